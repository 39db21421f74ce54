"""Callers who need the same value of the database wait for one read of it, and hear of its failure together."""

import asyncio

import pytest

from app.errors import StoreUnavailable
from app.network.shared_read import SharedRead


class Reader:
    """Counts the reads, and lets each of them end when the test says so."""

    def __init__(self) -> None:
        self.reads = 0
        self.fails = False
        self.may_end = asyncio.Event()

    async def read(self) -> int:
        self.reads += 1
        number = self.reads
        await self.may_end.wait()
        if self.fails:
            raise StoreUnavailable()
        return number


async def begin(shared: SharedRead[int], callers: int, group: asyncio.TaskGroup) -> list[asyncio.Task[int]]:
    tasks = [group.create_task(shared.get()) for _ in range(callers)]
    await asyncio.sleep(0)
    return tasks


async def test_callers_that_come_together_share_one_read_until_it_is_old() -> None:
    reader = Reader()
    shared = SharedRead(reader.read, seconds=60.0)
    async with asyncio.TaskGroup() as group:
        tasks = await begin(shared, 8, group)
        reader.may_end.set()
    assert [task.result() for task in tasks] == [1] * 8
    assert await shared.get() == 1
    shared.forget()
    assert await shared.get() == 2


async def test_a_read_that_fails_fails_for_all_who_waited_for_it_and_is_tried_again_by_the_next() -> None:
    """Otherwise each of them would wait in turn for a database that does not answer."""
    reader = Reader()
    shared = SharedRead(reader.read, seconds=60.0)
    reader.fails = True
    waiting = [asyncio.ensure_future(shared.get()) for _ in range(8)]
    await asyncio.sleep(0)
    reader.may_end.set()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [StoreUnavailable] * 8
    assert reader.reads == 1
    reader.fails = False
    assert await shared.get() == 2


@pytest.mark.long
async def test_a_caller_that_gives_up_leaves_the_read_to_the_next() -> None:
    reader = Reader()
    shared = SharedRead(reader.read, seconds=60.0)
    async with asyncio.TaskGroup() as group:
        first, second = await begin(shared, 2, group)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        reader.may_end.set()
    assert second.result() == 2
