"""Twenty worlds, all different, in which every promise is kept, and what it takes for worlds to count.

`make simulate` plays more of them: five hundred in CI, which must bring every fault, every end and every outcome (see
`Totals.missing_coverage`).
"""

import sys
from collections import Counter
from functools import cache
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace

from app.core.run.kinds import ENDED, OUTCOMES
from tests.harness.processes import Process, environment
from tests.simulation.__main__ import main
from tests.simulation.callers import SECONDS, CallerConnection, visit
from tests.simulation.crowd import OF_READS, REQUIRED_ACTIONS, Totals
from tests.simulation.faults import SITES, FaultRates, Faults
from tests.simulation.operators import usual_pool
from tests.simulation.oracle import judge
from tests.simulation.play import play
from tests.simulation.report import Report
from tests.simulation.world import World

pytestmark = pytest.mark.long

SEEDS, AT_ONCE = 20, 10


@cache
def first_report(seed: int) -> Report:
    """The report on a seed's world, which is played once for all tests that only read it."""
    return play(seed)


@pytest.mark.parametrize("chunk", range(SEEDS // AT_ONCE), ids=lambda chunk: f"{chunk * AT_ONCE}+")
def test_every_promise_is_kept(chunk: int) -> None:
    total = Totals()
    for seed in range(chunk * AT_ONCE, (chunk + 1) * AT_ONCE):
        total.add(first_report(seed))
    assert total.failed == {}, "python -m tests.simulation SEED tells the story"


def test_what_did_not_happen_is_a_gap() -> None:
    rich = Totals(
        hits=Counter(SITES),
        places={(site, f"await {number}") for site in (*OF_READS, "a", "b", "c") for number in range(40)},
        states=Counter(dict.fromkeys(ENDED, 10)),
        outcomes=Counter(dict.fromkeys(OUTCOMES, 20)),
        actions=Counter(dict.fromkeys(REQUIRED_ACTIONS, 5)),
    )
    assert list(rich.missing_coverage()) == []
    poor = [
        replace(rich, hits=rich.hits - Counter(SITES[:1])),
        replace(rich, places={place for place in rich.places if place[0] != OF_READS[0]}),
        replace(
            rich, places={(site, f"await {number}") for site in (*OF_READS, "a", "b", "c") for number in range(39)}
        ),
        replace(rich, states=rich.states - Counter([min(ENDED)])),
        replace(rich, outcomes=rich.outcomes - Counter([min(OUTCOMES)])),
        replace(rich, actions=rich.actions - Counter(REQUIRED_ACTIONS[:1])),
    ]
    assert [len(list(coverage.missing_coverage())) for coverage in poor] == [1] * len(poor)


@pytest.mark.parametrize(("seeds", "missing", "status"), [(499, 9, 0), (500, 0, 0), (500, 1, 1)])
def test_enough_seeds_must_leave_no_gap(
    seeds: int, missing: int, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["simulation", "--seeds", str(seeds)])
    monkeypatch.setattr(Totals, "missing_coverage", lambda _: iter(["never happened"] * missing))
    monkeypatch.setattr("tests.simulation.__main__.many", lambda first, count, minutes: Totals(seeds=count))
    assert main() == status
    assert ("never happened" in capsys.readouterr().out) == bool(status)


def test_a_seed_is_one_history() -> None:
    seeds = (1, 2, 8, 13)
    first = [first_report(seed).trace for seed in seeds]
    again = [play(seed).trace for seed in seeds]
    assert first == again
    assert len(set(first)) == len(seeds)


def test_a_seed_tells_its_story_and_is_the_same_in_another_process(tmp_path: Path) -> None:
    """The other process is a fork of another interpreter, which has another hash seed than this one."""
    process = Process("13", tmp_path, environment(tmp_path), program=("tests.simulation",))
    process.start(wait=False)
    assert process.wait_for_exit() == 0, process.log
    lines = process.output.splitlines()
    assert lines[-1] == "every promise was kept"
    assert lines[-2] == f"history {first_report(13).trace}"
    assert any("call.intended" in line for line in lines)


def test_a_calm_world_has_no_faults() -> None:
    report = first_report(8)
    assert not report.hits
    assert report.states.keys() == {"succeeded"}


def test_a_world_rests_when_nobody_is_about_to_ask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its processes are told to stop, and what comes then is begun and not ended."""
    world = World(8)

    async def nobody_else() -> None:
        guest = visit(0, world.setting.catalog, world.faults, world.chance)
        world.visits.append(guest)
        world._refused(guest, CallerConnection("p0.0", guest.order, patience=1, refused="Overloaded"))

    monkeypatch.setattr(world, "_callers", nobody_else)
    assert world.run().violations == []
    assert world.database.rows("SELECT state FROM runs") == [("succeeded",)]
    assert [bool(recall.ended) for recall in world.recalls.values()] == [True]
    assert judge(world) == []


def test_nobody_is_short_of_time_in_a_calm_world() -> None:
    """Of plans within plans the least time limit is not always enough, and then a run is degraded by right."""
    limits = []
    for rates in ({}, {"process.killed": 0.3}):
        chance = Random(1)
        visits = [visit(number, usual_pool(), Faults(rates, chance, chance), chance) for number in range(40)]
        limits.append({guest.order.limits.seconds for guest in visits})
    assert limits == [set(SECONDS[1:]), set(SECONDS)]


def test_the_weather_is_what_was_asked_for() -> None:
    report = play(3, FaultRates({"process.killed": 0.3}))
    assert report.hits.keys() == {"process.killed"}
    assert report.violations == []


def test_a_worker_that_answered_nothing_is_not_asked_again_after_a_new_delivery() -> None:
    """Its answer was written while the engine waited for a worker to replace it, and then the step was delivered again.
    Seed 235 of the world of 0.3.0 had that."""
    assert play(235).violations == []
