"""F-01 to F-06: a dispatcher is killed at every boundary of a step, for several steps of a plan of five."""

import time
from collections.abc import Callable, Iterator

import pytest
from msgspec import Struct

from app.core.run.events import Kind
from tests.faults.accounts import Account, account, settle
from tests.faults.crash_points import ObeyedOrder
from tests.faults.points import at, case
from tests.faults.scene import CHAIN, LEASE, SPREAD, WORKERS, Scene, ask, scene
from tests.stubs import Hang, Reply, Stall, Trickle

RESUMED = LEASE + 2
"""Seconds after a kill within which the run goes on."""


@pytest.fixture(scope="module")
def shared_scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene(tmp_path_factory.mktemp("killed"), dispatchers=3, **SPREAD) as new_scene:
        yield new_scene


class Boundary(Struct, frozen=True):
    """The place at which it dies: the order for step `n` by `worker`, and the outcomes of the step's attempts."""

    name: str
    order: str
    outcomes: tuple[str, ...]
    received: int
    """How many of those attempts reach the worker."""
    expectation: str


UNKNOWN, UNTOUCHED = "unknown, then ok", "ok, and never again"
BOUNDARIES = (
    Boundary("after the ticket was taken", "take.after[step={n}]", ("ok",), 1, "no attempt is lost"),
    Boundary("before the intent was committed", "append.before[call.intended@{n}]", ("ok",), 1, "no attempt"),
    Boundary("after the intent", "append.after[call.intended@{n}]", ("unknown", "ok"), 1, UNKNOWN),
    Boundary("before the request was sent", "stream.before[worker={worker}]", ("unknown", "ok"), 1, UNKNOWN),
    Boundary("after the request was sent", "", ("unknown", "ok"), 2, UNKNOWN),
    Boundary("in the middle of the reply", "stream.read[worker={worker}]:3", ("unknown", "ok"), 2, UNKNOWN),
    Boundary("after the last byte", "stream.last[worker={worker}]", ("unknown", "ok"), 2, UNKNOWN),
    Boundary("before the outcome", "append.before[call.finished@{n}]", ("unknown", "ok"), 2, UNKNOWN),
    Boundary("after the outcome", "append.after[step.done@{n}]", ("ok",), 1, UNTOUCHED),
    Boundary("before the delivery was forgotten", "done.before[step={n}]", ("ok",), 1, UNTOUCHED),
    Boundary("after the delivery was forgotten", "done.after[step={n}]", ("ok",), 1, UNTOUCHED),
)


def cut(boundary: Boundary, n: int) -> object:
    place = f"dispatcher killed {boundary.name}, step {n}"
    return case(boundary, n, family="F-01..06", place=place, expectation=boundary.expectation, ci=n == 2, name=place)


@pytest.mark.parametrize(("boundary", "n"), [cut(boundary, n) for boundary in BOUNDARIES for n in (0, 2, 4)])
def test_a_dispatcher_that_is_killed_is_replaced(
    system: Scene, boundary: Boundary, n: int, record_property: Callable[[str, object], None]
) -> None:
    if "read" in boundary.order:  # many small pieces
        system.stub.always(WORKERS[n], Reply(chunks=("one ", "two ", "three."), trickle=Trickle(size=100, pause=0.05)))
    if boundary.order:
        system.orders.lay(boundary.order.format(n=n, worker=WORKERS[n]))
    else:
        system.stub.script(WORKERS[n], Hang())
    calling = system.aside(ask, system.gateway, "baton-ultra", extra_body={"baton": {"plan": CHAIN}})
    strike = system.struck() if boundary.order else kill_while_it_waits(system, WORKERS[n])
    answered = calling.result(30)
    assert answered.status == 200, answered
    assert settle(system) == []
    run = account(system, answered.run)
    expected = [["ok"] for _ in WORKERS]
    expected[n] = list(boundary.outcomes)
    assert run.outcomes() == expected
    assert len(system.stub.requests(WORKERS[n])) == boundary.received
    went_on = seconds_until_resumed(run, strike.at)
    record_property("measured", f"resumed after {went_on:.1f} s")
    assert went_on < RESUMED


@at("F-01..06", "dispatcher killed in the middle of a told answer", "an error event; the run is done anew", ci=True)
def test_an_answer_that_was_begun_is_not_mixed_with_another(system: Scene) -> None:
    system.stub.script("alpha", Reply(chunks=("One", " thing"), fault=Stall(after=1)))
    system.stub.always("alpha", Reply(chunks=("Another", " thing")))
    system.orders.lay("tell.after[delta]")
    answered = ask(system.gateway, "baton-mini", streams=True)
    assert (answered.status, answered.code in ("run_failed", "answer_changed")) == (200, True), answered
    assert settle(system) == []
    run = account(system, system.latest())
    assert (run.row["state"], run.outcomes()) == ("succeeded", [["unknown", "ok"]])


def kill_while_it_waits(system: Scene, worker: str) -> ObeyedOrder:
    """The request is at the worker, which says nothing."""
    system.wait_for_requests(worker)
    victim = system.holding()
    pid = victim.pid
    victim.kill()
    return ObeyedOrder(pid, time.time(), "the worker has the request")


def seconds_until_resumed(run: Account, killed: float) -> float:
    """Return the seconds until the journal shows that somebody went on: with this step, or with what follows it. 0 if
    the last step had ended before, and the run with it."""
    kinds = (Kind.CALL_INTENDED, Kind.SUCCEEDED)
    moments = [event.at for event in run.events if event.kind in kinds]
    return next((at - killed for at in moments if at > killed), 0.0)
