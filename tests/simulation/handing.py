"""Bugs of the zoo in how runs go from one process to another: handed over as they begin, handed back as it stops, taken
up as their caller comes back."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from app.engine.delivery.messages import Driven
from app.engine.runs import driver as conduct
from app.engine.runs import registry, tool_results
from app.engine.runs.recovery import GIVEN_UP
from app.engine.runs.registry import Drivers
from app.engine.steps.execution import Execution
from app.stepqueue.protocol import DISPATCHERS, Listen

Patch = pytest.MonkeyPatch


def _without(part: str) -> Callable[..., Any]:
    async def hand_back(means: Any, home: str, epochs: Mapping[str, int]) -> None:
        if part != "lease" and epochs:
            await means.store.renew_leases(home, epochs, means.now() - GIVEN_UP)
        if part != "call":
            await means.queue.tell(DISPATCHERS, [Listen(run, "") for run in epochs])

    return hand_back


def hand_over_without_giving_the_lease_up(patch: Patch) -> None:
    patch.setattr(registry, "hand_back", _without("lease"))


def hand_over_without_a_word(patch: Patch) -> None:
    patch.setattr(registry, "hand_back", _without("call"))


def hear_of_no_free_run(patch: Patch) -> None:
    patch.setattr(Drivers, "sweep_soon", lambda _self: None)


def _handing_over(patch: Patch, then: Callable[[Drivers, conduct.Driver], object]) -> None:
    pass_on = Drivers._pass_on

    async def and_more(self: Drivers, driver: conduct.Driver, line: Any) -> Driven:
        driven = await pass_on(self, driver, line)
        then(self, driver)
        return driven

    patch.setattr(Drivers, "_pass_on", and_more)


def hand_over_and_drive_on(patch: Patch) -> None:
    _handing_over(patch, lambda self, driver: self._drive(driver))


def hand_over_and_renew(patch: Patch) -> None:
    _handing_over(patch, lambda self, driver: self._drivers.setdefault(driver.state.run, driver))


def hand_over_and_forget_the_caller(patch: Patch) -> None:
    _handing_over(patch, lambda self, driver: self._followers.relieve(driver.state.run))


def admit_and_leave_nobody_to_drive(patch: Patch) -> None:
    """It is neither handed over nor driven here: what remains is that its lease runs out."""

    async def forgotten(self: Drivers, driver: conduct.Driver, line: Any) -> Driven:
        del self._drivers[driver.state.run]
        self._followers.follow(driver.state, driver.audience)
        return Driven(driver.state.run, line, driver.state, replayed=True)

    patch.setattr(Drivers, "_pass_on", forgotten)


def drive_what_was_to_be_handed_over(patch: Patch) -> None:
    async def never(_self: Drivers, _order: Any) -> bool:
        return False

    patch.setattr(Drivers, "_hands_over", never)


def stop_without_handing_back(patch: Patch) -> None:
    async def nothing(*_: object) -> None:
        return

    patch.setattr(registry, "hand_back", nothing)


def drain_in_silence(patch: Patch) -> None:
    withdraw = Execution._withdraw

    async def silent(self: Execution, openers: Any = ()) -> None:
        if self._work.stopped:
            await withdraw(self, openers)

    patch.setattr(Execution, "_withdraw", silent)


def go_on_from_memory(patch: Patch) -> None:
    begin = tool_results.begin

    def unseen(*given: Any) -> Any:
        begun = begin(*given)
        return replace(begun, entry=replace(begun.entry, seq=None))

    patch.setattr(tool_results, "begin", unseen)
