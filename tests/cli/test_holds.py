"""`baton holds`: what is placed, listed and released, and what the commands that erase say then."""

import asyncio
import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from app.store.protocol import USER_TAG
from app.store.sql import open_store
from tests.cli.test_commands import baton
from tests.conformance.test_store_retention import admission, end_run

pytestmark = pytest.mark.usefixtures("database_of_commands")


@pytest.mark.long
def test_a_hold_lives_from_add_to_release(tmp_path: Path) -> None:
    assert baton(tmp_path, "tenants", "add", "acme").status == 0
    assert "No legal hold" in baton(tmp_path, "holds", "ls").out
    (placed,) = json.loads(baton(tmp_path, "holds", "add", "--tenant", "acme", "--reason", "case 12", "--json").out)
    (user,) = json.loads(
        baton(tmp_path, "holds", "add", "--user", "ann", "--tenant", "acme", "--reason", "case 13", "--json").out
    )
    assert (user["scope"], user["name"], user["tenant"]) == ("user", "ann", "acme")
    listed = baton(tmp_path, "holds", "ls").out
    assert "tenant acme" in listed
    assert "case 12" in listed
    assert "content keys are kept" in baton(tmp_path, "runs", "erase", "--tenant", "acme").err
    for hold in (placed, user):
        assert baton(tmp_path, "holds", "release", hold["id"]).status == 0
    assert "No legal hold" in baton(tmp_path, "holds", "ls").out
    assert len(json.loads(baton(tmp_path, "holds", "ls", "--all", "--json").out)) == 2
    changes = json.loads(baton(tmp_path, "audit", "changes", "--target", placed["id"], "--json").out)
    assert [change["action"] for change in changes] == ["hold.released", "hold.placed"]
    assert {change["via"] for change in changes} == {"command"}


def test_an_erasure_says_of_its_own_runs_what_is_left_and_of_held_ones_that_they_stay(tmp_path: Path) -> None:
    async def fill() -> None:
        async with open_store(f"sqlite:///{tmp_path / 'data' / 'baton.db'}") as store:
            for entry in (replace(admission("run_1"), tags=((USER_TAG, "ann"),)), end_run("run_1", 2.0)):
                await store.append(entry)

    asyncio.run(fill())
    mistyped = baton(tmp_path, "holds", "add", "--user", "Ann", "--reason", "case 12", "--json")
    assert "`baton runs ls --user` finds no run of Ann" in mistyped.err
    baton(tmp_path, "holds", "release", json.loads(mistyped.out)[0]["id"])
    placed = baton(tmp_path, "holds", "add", "--user", "ann", "--reason", "case 12", "--json")
    assert "finds no run" not in placed.err
    (hold,) = json.loads(placed.out)
    result = baton(tmp_path, "runs", "erase", "--user", "ann")
    assert result.status == 1
    assert result.out.endswith(f"is left in the database's files. Legal holds ({hold['id']}) keep 1 other run whole.\n")


def test_a_hold_that_covers_nothing_or_two_things_is_refused(tmp_path: Path) -> None:
    for line in ("", "--run last --key ci", "--user a --key ci"):
        result = baton(tmp_path, "holds", "add", "--reason", "case", *line.split())
        assert result.status == 2, line
        assert "name one of --run, --user, --tenant and --key" in result.err
    assert "`baton holds ls` lists them" in baton(tmp_path, "holds", "release", "hold_none").err
    assert "no tenant of this name" in baton(tmp_path, "holds", "add", "--reason", "x", "--tenant", "acme").err


def test_whoever_restores_a_back_up_is_reminded_of_holds(tmp_path: Path) -> None:
    """Engines would erase what a lost hold covered as soon as its time is over."""
    assert "Legal holds that were placed since then are gone" in baton(tmp_path, "restored", "--dry-run").out
