"""F-01 to F-06 where a step's end, what follows from it and the next step's intent are one entry: an engine is
killed around that entry, and in the call that it began with it."""

from collections.abc import Callable, Iterator

import pytest
from msgspec import Struct

from tests.faults.accounts import account, settle
from tests.faults.points import case
from tests.faults.scene import CHAIN, WORKERS, Scene, ask, scene
from tests.faults.test_dispatcher_killed import RESUMED, seconds_until_resumed

PLANNED = {"baton": {"plan": CHAIN}}


@pytest.fixture(scope="module")
def shared_scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene(tmp_path_factory.mktemp("engines"), dispatchers=2) as new_scene:
        yield new_scene


class Boundary(Struct, frozen=True):
    """The place at which it dies, the step that is done again, and how often that step's worker is called."""

    name: str
    order: str
    again: int | None = None
    received: int = 0


BOUNDARIES = (
    Boundary("before the end and what follows are committed", "append.before[step.queued@2]", 1, 2),
    Boundary("after the end and what follows are committed", "append.after[step.queued@2]", 2, 1),
    Boundary("before the next request is sent", "stream.before[worker=gamma]", 2, 1),
    Boundary("before the run's end is committed", "append.before[run.succeeded]", 4, 2),
    Boundary("after the run's end is committed", "append.after[run.succeeded]"),
)


def cut(boundary: Boundary) -> object:
    place = f"engine killed, {boundary.name}"
    return case(boundary, family="F-01..06", place=place, expectation="one step at most anew", ci=True, name=place)


@pytest.mark.parametrize("boundary", [cut(boundary) for boundary in BOUNDARIES])
def test_an_engine_that_is_killed_is_replaced(
    system: Scene, boundary: Boundary, record_property: Callable[[str, object], None]
) -> None:
    system.orders.lay(boundary.order)
    calling = system.aside(ask, system.gateway, "baton-ultra", extra_body=PLANNED)
    strike = system.struck()
    answered = calling.result(30)
    assert answered.status == 200, answered
    assert settle(system) == []
    run = account(system, answered.run)
    expected = [["ok"] for _ in WORKERS]
    if boundary.again is not None:
        expected[boundary.again] = ["unknown", "ok"]
        assert len(system.stub.requests(WORKERS[boundary.again])) == boundary.received
        went_on = seconds_until_resumed(run, strike.at)
        record_property("measured", f"resumed after {went_on:.1f} s")
        assert went_on < RESUMED
    assert run.outcomes() == expected
