"""Five hundred worlds, all different, in which every promise is kept; and that they are worlds in which it counts."""

import subprocess
import sys
from functools import cache

import pytest

from app.core.journal import ENDED, OUTCOMES
from tests.simulation.crowd import Sum
from tests.simulation.faults import SITES, Weather
from tests.simulation.play import play

SEEDS, AT_ONCE = 500, 10


@cache
def played(chunk: int) -> Sum:
    """So many seeds, once for all tests of this file."""
    total = Sum()
    for seed in range(chunk * AT_ONCE, (chunk + 1) * AT_ONCE):
        total.add(play(seed))
    return total


@cache
def everything() -> Sum:
    """All of them."""
    total = Sum()
    for chunk in range(SEEDS // AT_ONCE):
        total.take(played(chunk))
    return total


@pytest.mark.parametrize("chunk", range(SEEDS // AT_ONCE), ids=lambda chunk: f"{chunk * AT_ONCE}+")
def test_every_promise_is_kept(chunk: int) -> None:
    assert played(chunk).failed == {}, "python -m tests.simulation SEED tells the story"


@pytest.mark.timeout(300)
def test_every_fault_happens_and_at_many_awaits() -> None:
    hits, places = everything().hits, everything().places
    assert [site for site in SITES if not hits[site]] == []
    assert len({place for _, place in places}) >= 40
    assert len(places) >= 250
    for site in (
        "store.read.down",
        "store.read.lost",
        "store.read.slow",
        "crash at store.read",
        "freeze at store.read",
    ):
        assert len({place for struck, place in places if struck == site}) >= 5, site


@pytest.mark.timeout(300)
def test_every_end_and_every_outcome_is_reached() -> None:
    assert everything().states.keys() == ENDED
    assert everything().outcomes.keys() == OUTCOMES
    assert min(everything().states.values()) >= 10
    assert min(everything().outcomes.values()) >= 20


def test_a_seed_is_one_history() -> None:
    seeds = (1, 2, 8, 13)
    first, again = ([play(seed).trace for seed in seeds] for _ in range(2))
    assert first == again
    assert len(set(first)) == len(seeds)


def test_a_seed_tells_its_story_and_is_the_same_in_another_process() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "tests.simulation", "13"], capture_output=True, text=True, timeout=120, check=True
    )
    lines = told.stdout.splitlines()
    assert lines[-1] == "every promise was kept"
    assert lines[-2] == f"history {play(13).trace}"
    assert any("call.intended" in line for line in lines)


def test_a_calm_world_has_no_faults() -> None:
    report = play(8)
    assert not report.hits
    assert report.states.keys() == {"succeeded"}


def test_the_weather_is_what_was_asked_for() -> None:
    report = play(3, Weather({"process.killed": 0.3}))
    assert report.hits.keys() == {"process.killed"}
    assert report.violations == []
