"""`baton budgets`: what is set, listed, shown and removed, in words and as JSON."""

import json
import sqlite3
import time
from contextlib import closing
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import click
import pytest

from app.cli.declarations import Dollars
from tests.cli.test_commands import baton

DAY_SECONDS = 86_400
DAILY = (
    "budgets",
    "set",
    "2.50",
    "--per",
    "day",
    "--user",
    "*",
    "--zone",
    "Europe/Berlin",
    "--soft",
    "0.8",
    "--slices",
    "4",
)


@pytest.mark.usefixtures("database_of_commands")
@pytest.mark.long
def test_a_budget_lives_from_set_to_rm(tmp_path: Path) -> None:
    assert baton(tmp_path, "budgets", "ls").out == "There are no budgets; `baton budgets set USD` makes one.\n"
    assert baton(tmp_path, *DAILY).out == "default/user/*/day: $2.50 for each day (Europe/Berlin).\n"
    assert "tenant/-/month" in baton(tmp_path, "budgets", "set", "500", "--per", "month").out
    assert baton(tmp_path, "budgets", "set", "0", "--user", "mallory").out.startswith("default/user/mallory/day: $0.00")
    assert baton(tmp_path, "budgets", "rm", "default/user/mallory/day").status == 0
    listed = baton(tmp_path, "budgets", "ls").out
    assert "$2.50 each" in listed
    assert "80%" in listed
    account = json.loads(baton(tmp_path, "budgets", "show", "default/user/*/day", "--of", "alice", "--json").out)
    assert (account["usd"], account["per"], account["zone"], account["soft"]) == (2.5, "day", "Europe/Berlin", 0.8)
    assert account["slices"] == 4
    assert baton(tmp_path, "budgets", "rm", "default/user/*/day").status == 0
    assert baton(tmp_path, "budgets", "rm", "default/user/*/day").status == 1
    assert [entry["id"] for entry in json.loads(baton(tmp_path, "budgets", "ls", "--json").out)] == [
        "default/tenant/-/month"
    ]


@pytest.mark.usefixtures("database_of_commands")
@pytest.mark.long
def test_a_key_is_named_as_its_owner_knows_it(tmp_path: Path) -> None:
    key = json.loads(baton(tmp_path, "keys", "add", "ci", "--json").out)
    result = baton(tmp_path, "budgets", "set", "20", "--key", "ci")
    assert result.out.startswith(f"default/key/{key['id']}/day")
    assert "tenant" not in result.err
    assert "No key has the tenant defualt yet" in baton(tmp_path, "budgets", "set", "20", "--tenant", "defualt").err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("1 --user a --team b", "name one of --key, --user and --team"),
        ("1 --zone Mars/Olympus", "time zone"),
        ("1 --soft 80", "share above 0 and below 1"),
        ("1 --slices 65", "the number of slices is from 2 to 64"),
        ("1 --slices 1", "the number of slices is from 2 to 64"),
        ("1 --key nobody", "There is no key"),
        (f"1 --user {'u' * 257}", "more than 256 characters"),
    ],
)
@pytest.mark.usefixtures("database_of_commands")
def test_a_wrong_budget_is_refused_in_words(tmp_path: Path, line: str, words: str) -> None:
    result = baton(tmp_path, "budgets", "set", *line.split())
    assert result.status in (1, 2)
    assert words in result.err


@pytest.mark.parametrize("amount", ["nan", "inf", "-1", "0.0000001", "1000001", "five"])
def test_an_amount_is_a_number_of_dollars(amount: str) -> None:
    with pytest.raises(click.BadParameter, match="must be a number of dollars from 0"):
        Dollars(or_nothing=True).convert(amount, None, None)


def test_no_command_makes_a_database(tmp_path: Path) -> None:
    assert baton(tmp_path, "budgets", "ls").status == 1
    assert not list(tmp_path.rglob("*.db*"))


@pytest.mark.usefixtures("database_of_commands")
@pytest.mark.long
def test_the_end_of_a_window_that_has_begun_is_shown_after_another_zone_was_set(tmp_path: Path) -> None:
    """The window goes on as it began, and the new zone counts once it is over."""
    zones = ("UTC", "Pacific/Kiritimati")

    def set_zone(zone: str) -> None:
        assert baton(tmp_path, "budgets", "set", "2", "--user", "*", "--zone", zone).status == 0

    def shown_end() -> str:
        *_, row = baton(tmp_path, "budgets", "ls").out.splitlines()
        return " ".join(row.split()[-3:])

    def local_time(at: float, zone: str) -> str:
        return datetime.fromtimestamp(at, ZoneInfo(zone)).strftime(f"%Y-%m-%d %H:%M {zone}")

    for zone in reversed(zones):
        set_zone(zone)
        assert shown_end().endswith(f"00:00 {zone}"), "the next midnight of the zone, before anything was spent"
    end = int(time.time()) + 3_600
    account = ("default/user/*/day#a", end - DAY_SECONDS, "default/user/*/day", end, 0, 0, 0)
    with closing(sqlite3.connect(tmp_path / "data" / "baton.db")) as connection, connection:
        columns = 'account, start, budget, "end", held, spent, overrun'
        connection.execute(f"INSERT INTO budget_windows ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", account)
    for zone in zones:
        set_zone(zone)
        assert shown_end() == local_time(end, zone)
