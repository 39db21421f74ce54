"""Engines are killed while they look for runs to shadow, admit shadows and carry them out: every caller is answered by
the run's own worker, and every run gets one shadow, which ends.

`SHADOWED_RUNS=400 python -m pytest -m faults_suite tests/faults/test_shadows.py` plays more runs.
"""

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event as Flag

import pytest

from app.core.rating.shadows import shadow_id
from app.core.run.events import Kind
from tests.faults.accounts import accounts, settle
from tests.faults.network_proxy import NetworkProxy
from tests.faults.points import at
from tests.faults.scene import Scene, ask, pool, scene
from tests.harness.waiting import wait_until
from tests.stubs import Reply
from tests.stubs.control import StubControl

pytestmark = pytest.mark.timeout(600)
RUNS = int(os.environ.get("SHADOWED_RUNS", "60"))
CALLERS = 6
PATIENCE = 180.0
SHADOW = '\n[tiers.baton-mini.shadow]\nshare = 1\nworker = "gamma"\nusd_per_day = 100\nmax_waiting = 10_000\n'


def pool_with_shadows(stub: StubControl, to_stub: NetworkProxy) -> str:
    """Return the usual pool file, in which every run of `baton-mini` gets a shadow."""
    return pool(stub, to_stub) + SHADOW


@pytest.fixture(scope="module")
def shared_scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene(tmp_path_factory.mktemp("shadows"), dispatchers=2, pools=pool_with_shadows) as new_scene:
        yield new_scene


def kill_engines_until(system: Scene, over: Flag) -> int:
    """Kill one engine after the other until it is over. Returns how many."""
    chance, count = random.Random(23), 0
    while not over.wait(1.0 + chance.random()):
        chance.choice(system.dispatchers).kill()
        system.mend()
        count += 1
    return count


def lacking(system: Scene) -> int:
    """Return the number of runs that have no shadow which has ended."""
    ended = "SELECT origin_run FROM runs WHERE origin_kind = 'shadow' AND ended_at IS NOT NULL"
    return int(system.rows(f"SELECT count(*) FROM runs WHERE origin_kind IS NULL AND id NOT IN ({ended})")[0][0])


@at("F-06", "engines killed while they admit and carry out shadows", "one shadow for each run; callers notice nothing")
def test_every_run_gets_one_shadow_and_no_caller_notices(
    shared_scene: Scene, record_property: Callable[[str, object], None]
) -> None:
    shared_scene.reset()
    shared_scene.stub.always("gamma", Reply(chunks=("gamma ", "says ", "so."), gap=0.3))
    over = Flag()
    killing = shared_scene.aside(kill_engines_until, shared_scene, over)
    with ThreadPoolExecutor(CALLERS) as callers:
        answers = list(callers.map(lambda _: ask(shared_scene.gateway, "baton-mini"), range(RUNS)))
    wait_until(lambda: lacking(shared_scene) < RUNS / 2, within=PATIENCE, what="half of the shadows have ended")
    over.set()
    kills = killing.result(PATIENCE)
    wait_until(lambda: not lacking(shared_scene), within=PATIENCE, what="every run has its shadow")
    assert {(answer.status, answer.text) for answer in answers} == {(200, "alpha says so.")}
    assert settle(shared_scene, 60) == [], "the auditor finds no call, text or money where it does not belong"
    ours = {run.id: run for run in accounts(shared_scene.database)}
    callers_runs = [name for name, run in ours.items() if run.row["origin_kind"] is None]
    shadows = [run for run in ours.values() if run.row["origin_kind"] == "shadow"]
    assert sorted(run.id for run in shadows) == sorted(map(shadow_id, callers_runs)), "one for each"
    assert Counter(run.row["state"] for run in shadows) == {"succeeded": len(callers_runs)}
    called = {
        event.body["worker"] for name in callers_runs for event in ours[name].events if event.kind is Kind.CALL_INTENDED
    }
    assert called == {"alpha"}, "nothing of a shadow is part of a caller's run"
    record_property("measured", f"{len(callers_runs)} runs, {kills} engines killed")
