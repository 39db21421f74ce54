"""The bug zoo: with any of these bugs the simulation objects, without it the same worlds are clean."""

from functools import cache

import pytest

from tests.simulation.faults import FaultRates
from tests.simulation.play import play
from tests.simulation.zoo import BUGS, Bug

SEEDS = range(1, 97)
"""Played until the first one in which somebody notices the bug whose task it is."""


@cache
def clean(fault_rates: tuple[tuple[str, float], ...], seed: int) -> tuple[str, ...]:
    """Return what is wrong with a world without bugs: nothing."""
    return tuple(play(seed, FaultRates(dict(fault_rates))).violations)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_a_bug_is_found_and_only_a_bug(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in SEEDS:
        assert clean(tuple(bug.fault_rates.items()), seed) == ()
        with monkeypatch.context() as patch:
            bug.put_in(patch)
            outcome = play(seed, FaultRates(bug.fault_rates))
        if outcome.found_by & set(bug.noticed_by):
            return
    pytest.fail(f"nobody of {bug.noticed_by} noticed")


def test_there_are_enough_of_them_and_each_of_the_judges_finds_some() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 30
    judges = {name for bug in BUGS for name in bug.noticed_by}
    assert len(judges) >= 10
