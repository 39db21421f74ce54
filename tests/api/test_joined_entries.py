"""Where gateway and dispatcher are one process, a step's end travels in one entry with what follows from it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from app.conduct import Driver
from app.core.journal import Kind
from app.stepqueue.memory import MemoryQueue
from app.stepqueue.protocol import Live, Stop
from app.store.protocol import Appended, Entry
from app.wiring import House
from tests.api.house import events, finish, kinds, open_house, order, plan, plan_text, pool_text
from tests.stubs import Hang, ProviderStub, Reply

ONE_TWO_ONE = plan(
    ("alpha", "one", ["user"]), ("beta", "two", ["user", 0]), ("gamma", "three", ["user", 0]), ("alpha", "all", [1, 2])
)


@asynccontextmanager
async def watched(folder: Path, stub: ProviderStub) -> AsyncIterator[tuple[House, list[Entry]]]:
    """A service and every entry that its store was asked to take."""
    seen: list[Entry] = []
    async with open_house(folder, pool_text(stub)) as opened:
        append = opened.means.store.append

        async def noting(entry: Entry) -> Appended:
            seen.append(entry)
            return await append(entry)

        opened.means.store.append = noting  # type: ignore[method-assign]
        yield opened, seen


@pytest.fixture
async def stub() -> AsyncIterator[ProviderStub]:
    """The providers."""
    async with ProviderStub() as running:
        yield running


async def test_a_workflow_of_four_calls_takes_nine_entries(stub: ProviderStub, tmp_path: Path) -> None:
    async with watched(tmp_path, stub) as (opened, seen):
        outcome = await finish(await opened.drivers.start(order(opened, "baton-ultra", plan=ONE_TWO_ONE)))
    written = [[draft.kind for draft in entry.events] for entry in seen]
    assert len(written) == 1 + 2 * 4
    assert written[-1] == [Kind.CALL_FINISHED, Kind.STEP_DONE, Kind.SUCCEEDED]
    assert [Kind.CALL_FINISHED, Kind.STEP_DONE, Kind.STEP_QUEUED, Kind.STEP_QUEUED] in written
    assert outcome.ended.answer == "Hello there."


async def test_both_fences_hold_for_a_joined_entry(stub: ProviderStub, tmp_path: Path) -> None:
    """The driver lost its run while the worker spoke: the step's end is kept, what would follow from it is not."""
    stub.always("alpha", Reply(header_delay=0.3))
    async with watched(tmp_path, stub) as (opened, seen):
        driven = await opened.drivers.start(order(opened, "baton-ultra", plan=ONE_TWO_ONE))
        await stub.wait_for(1)
        now = opened.means.now()
        assert await opened.means.store.orphans(
            "another", now + 100, now + 200, 10, [("baton-ultra", opened.means.code)]
        )
        for _ in range(100):
            await asyncio.sleep(0.05)
            if Kind.STEP_DONE in kinds(journal := await events(opened, driven.run)):
                break
    assert [entry.epoch for entry in seen[-2:]] == [1, None]
    assert kinds(journal).count(Kind.STEP_QUEUED) == 1


async def test_a_driver_that_has_not_heard_enough_adds_nothing(stub: ProviderStub, tmp_path: Path) -> None:
    """It cannot say what follows from an end whose intent it does not know."""
    async with watched(tmp_path, stub) as (opened, seen):
        heard, Driver.heard = Driver.heard, lambda self, events: None  # type: ignore[method-assign]
        try:
            outcome = await finish(await opened.drivers.start(order(opened, "baton-mini")))
        finally:
            Driver.heard = heard  # type: ignore[method-assign]
    assert [draft.kind for draft in seen[-2].events] == [Kind.CALL_FINISHED, Kind.STEP_DONE]
    assert outcome.ended.error is None


async def test_a_plan_that_follows_from_an_end_is_begun(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of a rejected plan is stopped, and its end comes before the driver's own turn: the repair must begin."""
    bad, good = plan_text((0, "Try.", ["user"]), (9, "No.", ["user"])), plan_text((0, "Do it.", ["user"]))
    stub.script("planner", Reply(chunks=tuple(bad), gap=0.005), Reply(chunks=(good,)))
    stub.script("*", Hang())
    tell = MemoryQueue.tell

    async def lagging(queue: MemoryQueue, address: str, messages: Sequence[Live]) -> None:
        await tell(queue, address, messages)
        if any(isinstance(message, Stop) for message in messages):
            await asyncio.sleep(0.3)

    monkeypatch.setattr(MemoryQueue, "tell", lagging)
    async with open_house(tmp_path, pool_text(stub)) as opened:
        outcome = await finish(await opened.drivers.start(order(opened, "baton-ultra")), within=10)
    assert outcome.ended.answer == "Hello there."
    assert [one.mode for one in outcome.ended.state.proposals] == ["first", "repair"]
