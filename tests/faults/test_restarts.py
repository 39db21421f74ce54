"""F-31: processes are told to stop, one after another, while everybody goes on asking: nobody notices."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.faults.accounts import accounts, settle
from tests.faults.load import flood
from tests.faults.points import at
from tests.faults.scene import TREE, WORKERS, Scene, ask, scene
from tests.harness.processes import Process
from tests.harness.waiting import wait_until
from tests.stubs import Hang, Reply

pytestmark = pytest.mark.timeout(240)
CALLERS = 20
RESTARTS = 10
DRAINED = 25.0
"""Seconds that a process takes at most to bring to an end what it has begun."""
Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene(tmp_path_factory.mktemp("restarts"), gateways=2, dispatchers=2, seconds=90, lease=4.0) as made:
        yield made


@pytest.fixture
def house(shared: Scene) -> Scene:
    shared.reset()
    for name in WORKERS:
        shared.stub.always(name, Reply(chunks=(f"{name} ", "says so."), first_delay=0.3))
    return shared


def restarted(house: Scene, process: Process) -> float:
    """Stop it as a deployment does, start it again, and wait until it serves; the seconds until it had stopped."""
    began = time.monotonic()
    assert process.stop() == 0
    took = time.monotonic() - began
    house.mend()
    return took


def rolled(house: Scene, processes: list[Process], record_property: Record) -> None:
    slowest = 0.0
    with flood(house.gateways, CALLERS, retries=True) as load:
        wait_until(lambda: len(load.answers) > CALLERS, within=30, what="runs are under way")
        for n in range(RESTARTS):
            slowest = max(slowest, restarted(house, processes[n % len(processes)]))
    assert settle(house, 30) == []
    ours = accounts(house.database)
    record_property("measured", f"{RESTARTS} restarts, {len(ours)} runs, slowest stop {slowest:.1f} s")
    assert load.statuses == {200: load.asked}
    assert {run.row["state"] for run in ours} <= {"succeeded", "cancelled"}
    assert sum(run.row["state"] == "succeeded" for run in ours) >= load.asked
    assert slowest < DRAINED + 5


@at("F-31", "dispatchers restarted ten times under load", "0 failed runs, no 5xx, no call is made twice")
def test_dispatchers_are_restarted_in_turn(house: Scene, record_property: Record) -> None:
    rolled(house, house.dispatchers, record_property)
    assert all(outcomes == ["ok"] for run in accounts(house.database) for outcomes in run.outcomes())


@at("F-31", "gateways restarted ten times under load", "0 failed runs; what was refused is asked again and answered")
def test_gateways_are_restarted_in_turn(house: Scene, record_property: Record) -> None:
    rolled(house, house.gateways, record_property)


@at("F-31", "dispatcher told to stop in the middle of a call", "it takes nothing new, and finishes the call", ci=True)
def test_a_dispatcher_that_stops_finishes_its_call(house: Scene) -> None:
    house.stub.always("alpha", Reply(chunks=("alpha ", "says so."), first_delay=3.0))
    calling = house.aside(ask, house.gateway, "baton-mini")
    house.asked("alpha")
    victim = house.holding()
    victim.tell_to_stop()
    house.stub.always("alpha", Reply(chunks=("alpha ", "says so.")))
    for _ in range(5):
        assert ask(house.gateway, "baton-mini").status == 200
        assert victim not in [one for one in house.dispatchers if not one.alive] or calling.done()
    answered = calling.result(30)
    assert answered.status == 200
    assert victim.ended() == 0
    assert settle(house) == []
    assert {run.row["state"] for run in accounts(house.database)} == {"succeeded"}
    assert all(run.outcomes() == [["ok"]] for run in accounts(house.database))


@at("F-31", "engine told to stop in the middle of a plan", "the plan is finished, and made once", ci=True)
def test_an_engine_that_stops_finishes_its_plan(house: Scene) -> None:
    house.stub.always("planner", replace(TREE, gap=0.1))
    calling = house.aside(ask, house.gateway, "baton-ultra")
    house.asked("planner")
    (driver,) = house.rows("SELECT driver FROM runs")
    victim = house.process(int(str(driver[0]).split("-")[-2]))
    victim.tell_to_stop()
    assert calling.result(30).status == 200
    assert victim.ended() == 0
    assert settle(house) == []
    (run,) = accounts(house.database)
    assert run.planning() == ["ok"]
    assert run.outcomes() == [["ok"]] * 3


@at("F-31", "dispatcher told to stop in the middle of an endless call", "handed back after 25 s, done by another")
def test_a_call_that_outlasts_the_drain_is_handed_back(house: Scene, record_property: Record) -> None:
    house.stub.script("alpha", Hang())
    calling = house.aside(ask, house.gateway, "baton-mini", timeout=80)
    house.asked("alpha")
    victim = house.holding()
    began = time.monotonic()
    assert victim.stop() == 0
    took = time.monotonic() - began
    record_property("measured", f"stopped after {took:.1f} s")
    assert took < DRAINED + 5
    assert calling.result(60).status == 200
    assert settle(house) == []
    (run,) = accounts(house.database)
    assert run.outcomes() == [["cancelled", "ok"]]


@at("F-31", "gateway told to stop in the middle of a stream", "the stream is told to its end", ci=True)
def test_a_gateway_that_stops_finishes_its_streams(house: Scene) -> None:
    words = tuple(f"word{n} " for n in range(30))
    house.stub.always("alpha", Reply(chunks=words, gap=0.1))
    calling = house.aside(ask, house.gateway, "baton-mini", streams=True)
    house.asked("alpha")
    house.gateway.tell_to_stop()
    answered = calling.result(30)
    assert (answered.status, answered.text) == (200, "".join(words))
    assert house.gateway.ended() == 0
    assert settle(house) == []
