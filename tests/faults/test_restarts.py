"""F-31: processes are told to stop, one after another, while everybody goes on asking: nobody notices."""

import time
from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import replace

from tests.faults.accounts import accounts, settle
from tests.faults.load import flood
from tests.faults.points import at
from tests.faults.scene import TREE, WORKERS, Scene, ask, scene
from tests.harness.processes import Process
from tests.harness.waiting import wait_until
from tests.stubs import Reply

pytestmark = pytest.mark.timeout(240)
CALLERS = 20
RESTARTS = 10
DRAINED = 25.0
"""Seconds that a process takes at most to bring to an end what it has begun."""
Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def shared_scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene(tmp_path_factory.mktemp("restarts"), gateways=2, dispatchers=2, seconds=90, lease=4.0) as new_scene:
        yield new_scene


@pytest.fixture
def system(shared_scene: Scene) -> Scene:
    shared_scene.reset()
    for name in WORKERS:
        shared_scene.stub.always(name, Reply(chunks=(f"{name} ", "says so."), first_delay=0.3))
    return shared_scene


def restart_process(system: Scene, process: Process) -> float:
    """Stop it as a deployment does, start it again, and wait until it serves; the seconds until it had stopped."""
    began = time.monotonic()
    assert process.stop() == 0
    took = time.monotonic() - began
    system.mend()
    return took


def roll_processes(system: Scene, processes: list[Process], record_property: Record) -> None:
    slowest = 0.0
    with flood(system.gateways, CALLERS, retries=True) as load:
        wait_until(lambda: len(load.answers) > CALLERS, within=30, what="runs are under way")
        for n in range(RESTARTS):
            slowest = max(slowest, restart_process(system, processes[n % len(processes)]))
    assert settle(system, 30) == []
    ours = accounts(system.database)
    record_property("measured", f"{RESTARTS} restarts, {len(ours)} runs, slowest stop {slowest:.1f} s")
    assert load.statuses == {200: load.request_count}
    assert {run.row["state"] for run in ours} <= {"succeeded", "cancelled"}
    assert sum(run.row["state"] == "succeeded" for run in ours) >= load.request_count
    assert slowest < DRAINED + 5


@at("F-31", "dispatchers restarted ten times under load", "0 failed runs, no 5xx, no call is made twice")
def test_dispatchers_are_restarted_in_turn(system: Scene, record_property: Record) -> None:
    roll_processes(system, system.dispatchers, record_property)
    assert all(outcomes == ["ok"] for run in accounts(system.database) for outcomes in run.outcomes())


@at("F-31", "gateways restarted ten times under load", "0 failed runs; what was refused is asked again and answered")
def test_gateways_are_restarted_in_turn(system: Scene, record_property: Record) -> None:
    roll_processes(system, system.gateways, record_property)


@at("F-31", "dispatcher told to stop in the middle of a call", "it takes nothing new, and finishes the call", ci=True)
def test_a_dispatcher_that_stops_finishes_its_call(system: Scene) -> None:
    system.stub.always("alpha", Reply(chunks=("alpha ", "says so."), first_delay=3.0))
    calling = system.aside(ask, system.gateway, "baton-mini")
    system.wait_for_requests("alpha")
    victim = system.holding()
    victim.send_sigterm()
    system.stub.always("alpha", Reply(chunks=("alpha ", "says so.")))
    for _ in range(5):
        assert ask(system.gateway, "baton-mini").status == 200
        assert victim not in [dispatcher for dispatcher in system.dispatchers if not dispatcher.alive] or calling.done()
    answered = calling.result(30)
    assert answered.status == 200
    assert victim.wait_for_exit() == 0
    assert settle(system) == []
    assert {run.row["state"] for run in accounts(system.database)} == {"succeeded"}
    assert all(run.outcomes() == [["ok"]] for run in accounts(system.database))


@at("F-31", "engine told to stop in the middle of a plan", "the plan is finished, and made once", ci=True)
def test_an_engine_that_stops_finishes_its_plan(system: Scene) -> None:
    system.stub.always("planner", replace(TREE, gap=0.1))
    calling = system.aside(ask, system.gateway, "baton-ultra")
    system.wait_for_requests("planner")
    (driver,) = system.rows("SELECT driver FROM runs")
    victim = system.process(int(str(driver[0]).split("-")[-2]))
    victim.send_sigterm()
    assert calling.result(30).status == 200
    assert victim.wait_for_exit() == 0
    assert settle(system) == []
    (run,) = accounts(system.database)
    assert run.planning() == ["ok"]
    assert run.outcomes() == [["ok"]] * 3


@at("F-31", "dispatcher told to stop in the middle of an endless call", "handed back after 25 s, done by another")
def test_a_call_that_outlasts_the_drain_is_handed_back(system: Scene, record_property: Record) -> None:
    for dispatcher in system.dispatchers:  # new ones ask for a stream: they have not seen yet that the worker is quick
        restart_process(system, dispatcher)
    # A worker that goes on writing: one that says nothing would be replaced before the drain is over.
    system.stub.script("alpha", Reply(chunks=("and so on ",) * 300, gap=0.2))
    calling = system.aside(ask, system.gateway, "baton-mini", timeout=80)
    system.wait_for_requests("alpha")
    victim = system.holding()
    began = time.monotonic()
    assert victim.stop() == 0
    took = time.monotonic() - began
    record_property("measured", f"stopped after {took:.1f} s")
    assert DRAINED - 1 < took < DRAINED + 20
    assert calling.result(60).status == 200
    assert settle(system) == []
    (run,) = accounts(system.database)
    assert run.outcomes() == [["cancelled", "ok"]]


@at("F-31", "gateway told to stop in the middle of a stream", "the stream is told to its end", ci=True)
def test_a_gateway_that_stops_finishes_its_streams(system: Scene) -> None:
    words = tuple(f"word{n} " for n in range(30))
    system.stub.always("alpha", Reply(chunks=words, gap=0.1))
    calling = system.aside(ask, system.gateway, "baton-mini", streams=True)
    system.wait_for_requests("alpha")
    system.gateway.send_sigterm()
    answered = calling.result(30)
    assert (answered.status, answered.text) == (200, "".join(words))
    assert system.gateway.wait_for_exit() == 0
    assert settle(system) == []
