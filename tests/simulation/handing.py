"""Bugs of the zoo in how runs go from one process to another: offered as they begin, handed
back as an engine stops, and taken again as their caller comes back."""

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from app.engine.commit import run_writer
from app.engine.delivery.followers import Followers
from app.engine.runs import client, registry, tool_results
from app.engine.runs.driver import Driver
from app.engine.runs.recovery import GIVEN_UP_SECONDS, Recovery
from app.engine.runs.registry import Drivers
from app.engine.steps.execution import Execution

Patch = pytest.MonkeyPatch


async def _nothing(*_: object) -> None:
    return


async def _none(*_: object) -> bool:
    return False


def find_nothing_by_looking(patch: Patch) -> None:
    """Never find a ticket that the queue does not deliver."""
    patch.setattr(Recovery, "sweep", _none)


def offer_no_run(patch: Patch) -> None:
    """An admission leaves no ticket, and nobody looks for it."""
    find_nothing_by_looking(patch)
    patch.setattr(client, "offer_run", _nothing)


def take_no_run(patch: Patch) -> None:
    """The tickets of runs are thrown away, and nobody looks for runs."""
    find_nothing_by_looking(patch)

    async def take_nothing(_drivers: Drivers, _run: str) -> bool:
        return False

    patch.setattr(Drivers, "take", take_nothing)


def hand_back_and_keep_the_lease(patch: Patch) -> None:
    """Tickets are left, but the lease goes on, so that nobody finds the run who has not got its ticket."""

    async def release(context: Any, _home: str, drivers: Mapping[str, Driver]) -> None:
        context.telemetry.count("baton_swept_total", "run", by=len(drivers))

    patch.setattr(registry, "hand_back", release)


def hand_back_and_prolong(patch: Patch) -> None:
    async def prolong(context: Any, home: str, drivers: Mapping[str, Driver]) -> None:
        epochs = {run: driver.writer.epoch for run, driver in drivers.items()}
        if epochs:
            await context.store.renew_leases(home, epochs, context.now() - GIVEN_UP_SECONDS)
            await context.store.renew_leases(home, epochs, context.now() + 30.0)

    patch.setattr(registry, "hand_back", prolong)


def stop_without_handing_back(patch: Patch) -> None:
    patch.setattr(registry, "hand_back", _nothing)


def forget_the_caller(patch: Patch) -> None:
    """Whoever begins a run does not follow it."""
    follow = Followers.follow

    def and_forget(self: Followers, *arguments: Any) -> Any:
        follower = follow(self, *arguments)
        self.forget(follower)
        return follower

    patch.setattr(Followers, "follow", and_forget)


def join_without_the_epoch(patch: Patch) -> None:
    """A step's end and what follows from it are committed by whoever executed the step, whoever drives the run."""
    patch.setattr(run_writer, "replace", lambda record, **more: replace(record, **_without_epoch(more)))


def _without_epoch(more: dict[str, Any]) -> dict[str, Any]:
    if "epoch" in more:
        more["epoch"] = None
    if more.get("seq") is not None:
        more["seq"] = None
    return more


def drain_in_silence(patch: Patch) -> None:
    withdraw = Execution._withdraw

    async def silent(self: Execution, openers: Any = ()) -> None:
        if self._work.stopped:
            await withdraw(self, openers)

    patch.setattr(Execution, "_withdraw", silent)


def go_on_from_memory(patch: Patch) -> None:
    begin = tool_results.begin_turn

    def unseen(*arguments: Any) -> Any:
        result = begin(*arguments)
        return replace(result, entry=replace(result.entry, seq=None))

    patch.setattr(tool_results, "begin_turn", unseen)
