"""F-28: the clock of one machine is minutes wrong, jumps back or ahead; what a run may take is not measured by it."""

import time
from collections.abc import Callable, Iterator

import pytest
from msgspec import Struct

from tests.faults.accounts import accounts, settle
from tests.faults.load import flood
from tests.faults.points import case
from tests.faults.scene import WORKERS, Scene, scene
from tests.harness.processes import run_command
from tests.harness.waiting import wait_until
from tests.stubs import Reply

CALLERS = 10
Record = Callable[[str, object], None]


class ClockFault(Struct, frozen=True):
    """A process whose clock is wrong by some seconds, and by others after it has jumped."""

    who: str
    before: float
    after: float
    ci: bool = False

    @property
    def name(self) -> str:
        """Return the name of the injection point."""
        if self.before == self.after:
            return f"clock of a {self.who} wrong by {self.before:+.0f} s"
        return f"clock of a {self.who} jumps by {self.after - self.before:+.0f} s"


WRONG_SECONDS = 3.0
"""How long the clocks are wrong while runs are under way."""
CLOCK_FAULTS = (
    ClockFault("dispatcher", 300, 300, ci=True),
    ClockFault("dispatcher", -300, -300),
    ClockFault("gateway", 300, 300),
    ClockFault("gateway", -300, -300),
    ClockFault("dispatcher", 0, 300),
    ClockFault("dispatcher", 0, -300),
    ClockFault("gateway", 0, 300),
    ClockFault("gateway", 0, -300),
    ClockFault("dispatcher", 0, 1),
    ClockFault("gateway", 0, -3600),
)


@pytest.fixture(scope="module")
def shared_scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Two gateways and three dispatchers; the first of each kind looks at a clock of its own."""
    folder = tmp_path_factory.mktemp("clocks")
    with scene(folder, gateways=2, start=False, lease=4.0) as new_scene:
        for process in (new_scene.gateways[0], new_scene.dispatchers[0]):
            words = process.program[:-1]
            process.program = (*words, "--clock", str(folder / f"{process.verb}.clock"), "--")
        assert run_command(folder, new_scene.environ, "migrate").returncode == 0
        new_scene.reset()
        yield new_scene


@pytest.fixture
def system(shared_scene: Scene) -> Scene:
    shared_scene.reset()
    for name in WORKERS:
        shared_scene.stub.always(name, Reply(chunks=(f"{name} ", "says so."), first_delay=0.2))
    return shared_scene


def wrong(clock_fault: ClockFault) -> object:
    expectation = "no run expires or is lost; none is done twice"
    return case(
        clock_fault,
        family="F-28",
        place=clock_fault.name,
        expectation=expectation,
        ci=clock_fault.ci,
        name=clock_fault.name,
    )


@pytest.mark.parametrize("clock_fault", [wrong(clock_fault) for clock_fault in CLOCK_FAULTS])
def test_a_wrong_clock_ends_no_run_and_repeats_none(
    system: Scene, clock_fault: ClockFault, record_property: Record
) -> None:
    clock = system.folder / f"{clock_fault.who}.clock"
    process = system.gateways[0] if clock_fault.who == "gateway" else system.dispatchers[0]
    clock.write_text(str(clock_fault.before))
    process.stop()
    system.mend()
    try:
        with flood(system.gateways, CALLERS) as load:
            wait_until(lambda: len(load.answers) > CALLERS, within=20, what="runs are under way")
            clock.write_text(str(clock_fault.after))
            time.sleep(WRONG_SECONDS)
        assert settle(system) == []
    finally:
        clock.write_text("0")
        process.stop()
    ours = accounts(system.database)
    repeated = sum(outcomes != ["ok"] for run in ours for outcomes in run.outcomes())
    record_property("measured", f"{len(ours)} runs, {repeated} steps done twice")
    assert load.statuses == {200: load.request_count}
    assert {run.row["state"] for run in ours} == {"succeeded"}
    assert {run.row["degraded"] for run in ours} == {False}
    assert repeated == 0
    for run in ours:
        assert [event.seq for event in run.events] == list(range(1, len(run.events) + 1))
