"""The collector looks when the process is idle, and only then."""

import asyncio
import gc
from collections.abc import Iterator
from typing import Any
from weakref import ref

import pytest

from app.process import gc_policy
from tests.harness.waiting import assert_stays, until


class Cycle:
    """An accident."""

    def __init__(self) -> None:
        self.itself: Any = self


@pytest.fixture
def settled() -> Iterator[None]:
    before = gc.get_threshold()
    gc_policy.collect_and_freeze()
    yield
    gc.freeze()  # as before: what the tests have imported is not looked through any more
    gc.set_threshold(*before)


async def test_garbage_goes_when_there_is_nothing_to_do_and_not_before(settled: None) -> None:
    stopping, busy = asyncio.Event(), True
    keeping = asyncio.create_task(gc_policy.collect_when_idle(lambda: busy, stopping, pause=0.01))
    lost = ref(Cycle())
    garbage: list[list[int]] = [[] for _ in range(50 * gc_policy.IDLE_THRESHOLD_OBJECTS)]  # work that makes objects
    await assert_stays(lambda: lost() is not None, seconds=0.1)
    busy = False
    await until(lambda: lost() is None)
    del garbage
    stopping.set()
    await keeping
    assert gc.get_freeze_count() == 0, "the interpreter may free everything when it exits"


async def test_an_idle_process_that_made_nothing_is_left_alone(settled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[None] = []
    monkeypatch.setattr(gc_policy, "collect_and_freeze", lambda: looks.append(None))
    stopping = asyncio.Event()
    keeping = asyncio.create_task(gc_policy.collect_when_idle(lambda: False, stopping, pause=0.01))
    await assert_stays(lambda: not looks, seconds=0.1)
    stopping.set()
    await keeping
