"""F-27 and F-33: a process stands still for two leases and wakes up; a step that kills whoever takes it."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from msgspec import Struct

from app.core.run.events import TERMINAL, Kind
from app.engine.steps.execution import MOST_DELIVERIES
from tests.faults.accounts import account, accounts, settle
from tests.faults.points import at, case
from tests.faults.scene import CHAIN, LEASE, SPREAD, WORKERS, Scene, ask, scene
from tests.harness.processes import Process
from tests.harness.waiting import wait_until
from tests.stubs import Reply, Trickle

FROZEN_SECONDS = 2 * LEASE
ASK_PAUSE = 0.2
"""Seconds between two runs that are not poisoned."""
PLANNED = {"baton": {"plan": CHAIN}}
POISON = {
    "steps": [
        {"worker": "alpha", "subtask": "Live.", "access": ["user"]},
        {"worker": "epsilon", "subtask": "Die.", "access": ["user"]},
    ]
}
POISONED = {"kill": "*kill stream.before[worker=epsilon]", "raise": "*raise append.after[call.intended@1]"}
"""How the second step ends whoever takes it: the process, or what it does for the step."""
ANSWER = "epsilon says so."
Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def shared_scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene(tmp_path_factory.mktemp("zombies"), dispatchers=3, **SPREAD) as new_scene:
        yield new_scene


class Standstill(Struct, frozen=True):
    """The place at which a process stands still, and the outcomes of the third step's attempts."""

    name: str
    order: str
    outcomes: tuple[str, ...] = ("ok",)
    ci: bool = False


LOST = ("unknown", "ok")
DISPATCHER = (
    Standstill("with a ticket in its hand", "stop take.after[step=2]"),
    Standstill("before it sends the request", "stop append.after[call.intended@2]", LOST),
    Standstill("in the middle of the reply", "stop stream.read[worker=gamma]:3", LOST),
    Standstill("before it writes the outcome", "stop append.before[call.finished@2]", LOST, ci=True),
    Standstill("after the outcome", "stop append.after[step.done@2]"),
)
ENGINE = (
    Standstill("before it queues a step", "stop append.before[step.queued@2]"),
    Standstill("after it has queued a step", "stop append.after[step.queued@2]"),
    Standstill("before it writes the end", "stop append.before[run.succeeded]", ci=True),
)


def still(who: str, standstill: Standstill, expectation: str) -> object:
    place = f"{who} frozen for two leases {standstill.name}"
    return case(standstill, family="F-27", place=place, expectation=expectation, ci=standstill.ci, name=place)


@contextmanager
def thaw_at_end(pid: int) -> Iterator[None]:
    """It goes on at the end of the block, whatever happens in it."""
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


REJECTED = "what the zombie writes is refused; its call is counted; the answer comes once"


@pytest.mark.parametrize("standstill", [still("dispatcher", moment, REJECTED) for moment in DISPATCHER])
def test_a_dispatcher_that_wakes_up_too_late_changes_nothing(system: Scene, standstill: Standstill) -> None:
    if "read" in standstill.order:
        system.stub.always("gamma", Reply(chunks=("one ", "two ", "three."), trickle=Trickle(size=100, pause=0.05)))
    system.orders.lay(standstill.order)
    calling = system.aside(ask, system.gateway, "baton-ultra", extra_body=PLANNED)
    strike = system.struck()
    zombie = system.process(strike.pid)
    with thaw_at_end(strike.pid):
        began = time.monotonic()
        answered = calling.result(30)
        time.sleep(max(0.0, FROZEN_SECONDS - (time.monotonic() - began)))
    assert (answered.status, answered.text) == (200, ANSWER)
    assert settle(system) == []
    outcomes = [["ok"] for _ in WORKERS]
    outcomes[2] = list(standstill.outcomes)
    assert account(system, answered.run).outcomes() == outcomes
    assert zombie.alive, "it goes on with other things"
    wait_until(lambda: not system.holders(), within=10, what="it has let go of the step")
    assert ask(system.gateway, "baton-mini").status == 200
    assert settle(system) == []


@pytest.mark.parametrize(
    "standstill", [still("engine", moment, "its epoch is over; its caller is answered") for moment in ENGINE]
)
def test_an_engine_that_wakes_up_too_late_changes_nothing(system: Scene, standstill: Standstill) -> None:
    system.orders.lay(standstill.order)
    calling = system.aside(ask, system.gateway, "baton-ultra", extra_body=PLANNED)
    strike = system.struck()
    with thaw_at_end(strike.pid):
        time.sleep(FROZEN_SECONDS)
        wait_until(lambda: system.has_ended(system.latest()), within=20, what="somebody else ends the run")
    answered = calling.result(30)
    assert (answered.status, answered.text) == (200, ANSWER)
    assert settle(system) == []
    run = account(system, answered.run)
    again = [outcomes for outcomes in run.outcomes() if outcomes != ["ok"]]
    assert again in ([], [list(LOST)]), "the step that the frozen engine itself had executed, if it had, is done anew"
    assert [event.kind for event in run.events if event.kind in TERMINAL] == [Kind.SUCCEEDED]
    assert run.row["epoch"] > 1


def dies(how: str) -> object:
    return case(
        how,
        family="F-33",
        place=f"step that {'kills' if how == 'kill' else 'breaks'} every dispatcher",
        expectation=f"a dead letter after {MOST_DELIVERIES}; others unaffected",
        ci=True,
        name=how,
    )


@pytest.mark.parametrize("how", [dies(how) for how in POISONED])
def test_a_poisoned_step_is_given_up(system: Scene, how: str, record_property: Record) -> None:
    system.orders.lay(POISONED[how])
    began = time.monotonic()
    calling = system.aside(ask, system.gateway, "baton-ultra", extra_body={"baton": {"plan": POISON}})
    others = []
    with supervise_processes(system, system.processes):
        while not calling.done():
            others.append(ask(system.gateway, "baton-mini", timeout=30))
            time.sleep(ASK_PAUSE)
    answered = calling.result(0)
    record_property("measured", f"given up after {time.monotonic() - began:.1f} s, {len(others)} others answered")
    assert (answered.status, answered.code) == (502, "dead_letter")
    assert {other.status for other in others} == {200}
    system.mend()
    assert settle(system) == []
    assert len(system.orders.obeyed_orders) == MOST_DELIVERIES
    (poisoned,) = [account for account in accounts(system.database) if account.row["state"] == "failed"]
    (failed,) = poisoned.bodies(Kind.STEP_FAILED)
    assert (failed["error"], failed["deliveries"]) == ("dead_letter", MOST_DELIVERIES)
    assert system.stub.requests("epsilon") == []


@at("F-33", "step beside one that kills the only dispatcher", "it is done; the other one is the dead letter")
def test_only_the_poisoned_one_of_two_steps_is_given_up(system: Scene) -> None:
    """Both are lost with each dispatcher, since the worker of the other step is slow."""
    system.stub.always("alpha", Reply(chunks=("alpha ", "says ", "so."), header_delay=LEASE))
    for process in system.dispatchers[1:]:
        process.kill()
    system.orders.lay(POISONED["kill"])
    with supervise_processes(system, system.dispatchers[:1]):
        answered = ask(system.gateway, "baton-ultra", extra_body={"baton": {"plan": POISON}})
    assert (answered.status, answered.code) == (502, "dead_letter")
    system.mend()
    assert settle(system) == []
    (poisoned,) = accounts(system.database)
    (failed,) = poisoned.bodies(Kind.STEP_FAILED)
    assert (failed["n"], failed["deliveries"]) == (1, MOST_DELIVERIES)
    assert [step["n"] for step in poisoned.bodies(Kind.STEP_DONE)] == [0]


@at("F-33", "adapter that breaks at every call", "error, then answered by another worker; nobody dies")
def test_a_step_whose_adapter_breaks_is_answered_by_another_worker(system: Scene) -> None:
    alive = [process.pid for process in system.processes]
    system.orders.lay("*raise stream.before[worker=epsilon]")
    answered = ask(system.gateway, "baton-ultra", extra_body={"baton": {"plan": POISON}})
    assert answered.status == 200
    assert settle(system) == []
    outcomes = account(system, answered.run).outcomes()
    assert outcomes == [["ok"], ["error", "error", "ok"]]
    assert [process.pid for process in system.processes] == alive


@at("F-33", "plan that kills every engine", "the fallback answers, degraded; others unaffected")
def test_a_poisoned_plan_is_given_up(system: Scene) -> None:
    system.orders.lay("*kill stream.last[worker=planner]")
    calling = system.aside(ask, system.gateway, "baton-ultra")
    system.struck()
    run = system.latest()

    def over() -> bool:
        revive_dead(system.processes)
        return system.has_ended(run)

    wait_until(over, within=60, what="the run ends")
    system.orders.withdraw()
    system.mend()
    assert calling.result(30).status == 200
    assert settle(system) == []
    run_account = account(system, run)
    assert (run_account.row["state"], run_account.row["degraded"]) == ("succeeded", True)
    assert run_account.outcomes()[-1] == ["ok"]


def revive_dead(processes: Sequence[Process]) -> None:
    """As a supervisor does: whatever has died starts again."""
    for process in processes:
        if not process.alive:
            process.start(wait=False)


@contextmanager
def supervise_processes(system: Scene, processes: Sequence[Process]) -> Iterator[None]:
    """Within the block those that die start again, also while the test waits for an answer."""
    over = threading.Event()

    def supervise() -> None:
        while not over.wait(ASK_PAUSE):
            revive_dead(processes)

    supervising = system.aside(supervise)
    try:
        yield
    finally:
        over.set()
        supervising.result()
