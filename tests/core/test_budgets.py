"""Budgets over several runs: their windows, and which of them concern a request."""

import os
import subprocess
import sys
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from app.core.pool.budgets import Budget, Period, accounts, faults, window

BERLIN = ZoneInfo("Europe/Berlin")


def seconds(*when: int, zone: ZoneInfo = BERLIN) -> int:
    year, month, day, hour = when
    return int(datetime(year, month, day, hour, tzinfo=zone).timestamp())


@pytest.mark.parametrize(
    ("period", "start", "end"),
    [
        ("hour", (2026, 11, 23, 17), (2026, 11, 23, 18)),
        ("day", (2026, 11, 23, 0), (2026, 11, 24, 0)),
        ("month", (2026, 11, 1, 0), (2026, 12, 1, 0)),
    ],
)
def test_a_window_is_that_of_the_clocks_of_its_zone(
    period: Period, start: tuple[int, ...], end: tuple[int, ...]
) -> None:
    at = seconds(2026, 11, 23, 17) + 1799.5
    window_at = window(period, "Europe/Berlin", at)
    assert (window_at.start, window_at.end) == (seconds(*start), seconds(*end))


@pytest.mark.parametrize("period", ["hour", "day", "month"])
def test_the_last_fraction_of_a_second_belongs_to_the_window_that_it_ends(period: Period) -> None:
    """A time of so many digits is rounded up to the next second when it is made a date."""
    at = seconds(2026, 12, 1, 0) - 0.0000002
    assert window(period, "Europe/Berlin", at) == window(period, "Europe/Berlin", at - 1)
    assert window(period, "Europe/Berlin", at).end == seconds(2026, 12, 1, 0)


def test_a_day_on_which_the_clocks_are_changed_has_another_length() -> None:
    hours = [
        (window_at.end - window_at.start) / 3600
        for at in (seconds(2026, 3, 29, 12), seconds(2026, 10, 25, 12))
        for window_at in [window("day", "Europe/Berlin", at)]
    ]
    assert hours == [23, 25]


@pytest.mark.parametrize("zone", ["Australia/Lord_Howe", "America/Havana", "America/Santiago", "Africa/Cairo"])
def test_windows_follow_each_other_without_a_gap_through_a_year(zone: str) -> None:
    """Some time zones change their clocks by half an hour, and some at midnight, which is skipped or comes twice."""
    first = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
    counts: dict[Period, int] = {"hour": 8_800, "day": 400, "month": 14}
    for period, count in counts.items():
        window_at = window(period, zone, first)
        for _ in range(count):
            following = window(period, zone, window_at.end)
            assert following.start == window_at.end
            assert following == window(period, zone, following.end - 1)
            window_at = following


def test_a_budget_of_ones_own_replaces_that_of_everybody_for_the_same_period() -> None:
    everybody, alice = Budget("acme", "user", "*", "day", 5), Budget("acme", "user", "alice", "day", 9)
    hourly, whole = Budget("acme", "user", "*", "hour", 1), Budget("acme", "tenant", "", "month", 90)
    budgets = [everybody, alice, hourly, whole]
    hers, his, nobodys = (accounts(budgets, {"user": name}) for name in ("alice", "bob", ""))
    assert [name.partition("#")[0] for name in hers] == [
        "acme/tenant/-/month",
        "acme/user/*/hour",
        "acme/user/alice/day",
    ]
    assert [name.partition("#")[0] for name in his] == ["acme/tenant/-/month", "acme/user/*/day", "acme/user/*/hour"]
    assert len({his[1], nobodys[1], accounts(budgets, {"user": "*"})[1]}) == 3  # each has an account of its own
    assert "bob" not in "".join(his)


def test_what_is_wrong_with_a_budget_is_said_all_at_once() -> None:
    assert faults(Budget("acme", "user", "*", "day", 5, "Europe/Berlin", 0.8)) == []
    assert len(faults(Budget("", "user", "", "day", -1, "Mars/Olympus", 1.5))) == 5
    assert [len(faults(Budget("acme", "team", name, "day", 5))) for name in (".", "..", "...")] == [1, 1, 0]
    assert len(faults(Budget("acme", "user", "u" * 257, "day", 5, soft=float("nan")))) == 2


def test_time_zones_are_known_where_the_host_has_none() -> None:
    """A zone that one engine cannot read would fail each batch with an entry of that budget."""
    program = "from app.core.pool.budgets import window; print(window('day', 'Europe/Berlin', 1_700_000_000.0).start)"
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONTZPATH": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert int(result.stdout) == seconds(2023, 11, 14, 0)
