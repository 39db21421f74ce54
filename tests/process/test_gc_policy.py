"""The collector looks when the process is idle, and only then."""

import asyncio
import gc
from collections.abc import Iterator
from typing import Any
from weakref import ref

import pytest

from app.process import gc_policy


class Cycle:
    """An accident."""

    def __init__(self) -> None:
        self.itself: Any = self


@pytest.fixture
def settled() -> Iterator[None]:
    before = gc.get_threshold()
    gc_policy.settle()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


async def test_garbage_goes_when_there_is_nothing_to_do_and_not_before(settled: None) -> None:
    stopping, busy = asyncio.Event(), True
    keeping = asyncio.create_task(gc_policy.keep(lambda: busy, stopping, pause=0.01))
    lost = ref(Cycle())
    kept: list[list[int]] = [[] for _ in range(50 * gc_policy.WORTHWHILE)]  # work that makes objects
    await asyncio.sleep(0.1)
    assert lost() is not None
    busy = False
    async with asyncio.timeout(5):
        while lost() is not None:  # noqa: ASYNC110 - what is awaited has no event
            await asyncio.sleep(0.01)
    del kept
    stopping.set()
    await keeping


async def test_an_idle_process_that_made_nothing_is_left_alone(settled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[None] = []
    monkeypatch.setattr(gc_policy, "settle", lambda: looks.append(None))
    stopping = asyncio.Event()
    keeping = asyncio.create_task(gc_policy.keep(lambda: False, stopping, pause=0.01))
    await asyncio.sleep(0.1)
    stopping.set()
    await keeping
    assert not looks
