"""The deadlines of a worker's calls: those of the pool file, cut to the time that the run has left."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple

from app.core.pool.catalog import Deadlines
from app.errors import ConfigInvalid
from app.process.config import configure

POOL = """
[providers.near]
format = "openai"
base_url = "http://127.0.0.1:9/v1"
deadlines = { connect = 0.5, first = 10 }

[workers.plain]
provider = "near"
model = "plain"

[workers.slow]
provider = "near"
model = "slow"
deadlines = { first = 300, total = 900 }

[tiers.baton-mini]
pool = ["plain", "slow"]
"""
SECONDS = st.floats(0.001, 10_000)


def test_a_worker_inherits_the_deadlines_that_it_does_not_set(tmp_path: Path) -> None:
    (tmp_path / "pool.toml").write_text(POOL)
    workers = configure({"BATON_POOL": str(tmp_path / "pool.toml")}).catalog.workers
    assert workers["plain"].deadlines == Deadlines(connect=0.5, first=10)
    assert workers["slow"].deadlines == Deadlines(connect=0.5, first=300, total=900)


@pytest.mark.parametrize("wrong", ["first = 0", "gap = -1", "total = nan", "total = 1e9", 'connect = "5"', "frist = 5"])
def test_a_deadline_that_cannot_be_kept_is_a_fault(tmp_path: Path, wrong: str) -> None:
    (tmp_path / "pool.toml").write_text(POOL.replace("first = 300, total = 900", wrong))
    with pytest.raises(ConfigInvalid, match=r"pool.toml:\d+: workers.slow.deadlines"):
        configure({"BATON_POOL": str(tmp_path / "pool.toml")})


@given(SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, st.booleans(), st.booleans())
def test_no_deadline_outlives_the_run_or_exceeds_the_workers_own(
    connect: float, first: float, gap: float, total: float, left: float, live: bool, spare: bool
) -> None:
    own = Deadlines(connect, first, gap, total)
    cut = own.within(left, live=live, spare=spare)
    assert all(seconds <= left for seconds in astuple(cut))
    assert (cut.connect, cut.gap, cut.total) == (min(connect, left), min(gap, left), min(total, left))
    assert cut.first <= (first if live else total)


@pytest.mark.parametrize(
    ("live", "spare", "first"),
    [(True, False, 50.0), (True, True, 50.0), (False, False, 100.0), (False, True, 60.0)],
)
def test_a_worker_that_hangs_leaves_time_for_another(live: bool, spare: bool, first: float) -> None:
    assert Deadlines(first=50).within(100, live=live, spare=spare).first == first
    assert Deadlines(first=50).within(10, live=live, spare=True).first == 6.0


def test_silence_is_borne_for_a_share_of_the_tiers_time_while_there_is_another_worker() -> None:
    mini, ultra, whole = 180.0, 300.0, 10.0
    assert Deadlines().patience(mini, 0.0) == pytest.approx(20.0)
    assert Deadlines().patience(ultra, 0.0) == pytest.approx(33.3, abs=0.1)
    assert Deadlines().patience(20.0, 0.0) == 10.0
    assert Deadlines().patience(mini, whole) == pytest.approx(30.0)
    assert Deadlines(first=90).patience(mini, 0.0) == 90.0
    for live in (True, False):
        patience = Deadlines().patience(mini, 0.0 if live else whole)
        assert Deadlines().within(mini, live=live, spare=True, patience=patience).first == patience
        assert Deadlines().within(mini, live=live, spare=False, patience=patience).first > patience


def test_a_worker_that_was_silent_for_all_of_that_time_is_blamed() -> None:
    own, patience = Deadlines(), Deadlines().patience(180.0, 0.0)
    bounds = own.within(180.0, live=True, spare=True, patience=patience)
    assert own.fair(bounds, patience, patience, patience)
    short = own.within(20.0, live=True, spare=True, patience=patience)
    assert not own.fair(short, 12.0, 12.0, patience)


OWN = Deadlines(connect=5, first=100, gap=40, total=200)


@pytest.mark.parametrize(
    ("left", "seconds", "silence", "fair"),
    [
        (1_000, 100, 100, True),  # silent for as long as it may be
        (30, 30, 30, True),  # cut short by the run, but long enough
        (20, 20, 20, False),  # hardly granted any time: a caller's tiny budget is not the worker's fault
        (60, 60, 1, False),  # the run ended while it was talking
        (60, 60, 45, True),  # the run ended, and it had said nothing for long
        (1_000, 200, 1, True),  # it never came to an end
        (1_000, 5, 5, True),  # no connection
    ],
)
def test_being_late_speaks_against_a_worker_only_if_it_had_the_time(
    left: float, seconds: float, silence: float, fair: bool
) -> None:
    assert OWN.fair(OWN.within(left, live=True, spare=False), seconds, silence) is fair
