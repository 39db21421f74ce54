"""Waiting for a condition, with a deadline: what a test does in place of sleeping for a fixed time.

`until` and `wait_until` return as soon as the condition holds, so a generous deadline costs a passing test nothing.
`stays` asserts that something does not happen. No condition can be waited for there; a slow machine can hide a fault
from it, but cannot make a right program fail.
"""

import asyncio
import contextlib
import inspect
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import psutil

T = TypeVar("T")

NANOSECONDS: Final = 1_000_000_000
"""Nanoseconds in a second; the kernel counts in these."""
PATIENCE_SECONDS: Final = 60.0
"""How long a test waits for what must happen, unless it names another deadline; half of a test's own time limit."""
POLL_SECONDS: Final = 0.01
"""The pause between two looks at a condition in this process."""
OUTSIDE_POLL_SECONDS: Final = 0.02
"""The pause between two looks at another process."""


class Stopwatch:
    """Measures how long something takes, in seconds, without the time for which it waited for a processor.

    The kernel counts that time for each thread; it is taken off for this process and all that it has started. On a
    crowded machine a promise of time can be tested all the same, and a test that waited for a timer still fails.
    """

    def __init__(self) -> None:
        self._waited = _processor_wait_seconds()
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """The seconds since it was made."""
        passed = time.monotonic() - self._began
        return passed - max(0.0, _processor_wait_seconds() - self._waited)


def _processor_wait_seconds() -> float:
    """How long the threads of this process and its descendants were ready to run and did not; 0 where it is unknown."""
    this = psutil.Process()
    found = 0
    for process in (this, *this.children(recursive=True)):
        for path in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, IndexError):
                found += int(path.read_text().split()[1])
    return found / NANOSECONDS


class NotInTime(AssertionError):
    """The condition did not hold before the deadline; the message names what was waited for."""


async def until(condition: Callable[[], T | Awaitable[T]], *, within: float = PATIENCE_SECONDS, what: str = "") -> T:
    """Wait until the condition, which may be a coroutine function, is true; return its value.

    `within` is in seconds. Raises NotInTime with `what`, or with the condition's source, when the time is over.
    """
    deadline = time.monotonic() + within
    while not (value := await _value(condition)):
        if time.monotonic() > deadline:
            raise NotInTime(_message(condition, within, what))
        await asyncio.sleep(POLL_SECONDS)
    return value


def wait_until(condition: Callable[[], T], *, within: float = PATIENCE_SECONDS, what: str = "") -> T:
    """Wait as `until` does, in a thread without an event loop."""
    deadline = time.monotonic() + within
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise NotInTime(_message(condition, within, what))
        time.sleep(OUTSIDE_POLL_SECONDS)
    return value


async def stays(condition: Callable[[], bool | Awaitable[bool]], *, seconds: float) -> None:
    """Assert that the condition holds now and at every look for so many seconds."""
    end = time.monotonic() + seconds
    while True:
        assert await _value(condition), f"no longer true: {_source(condition)}"
        if time.monotonic() > end:
            return
        await asyncio.sleep(POLL_SECONDS)


async def let_others_run(turns: int = 100) -> None:
    """Give every task of this loop so many turns: enough for work that waits for nothing outside of the loop."""
    for _ in range(turns):
        await asyncio.sleep(0)


async def _value(condition: Callable[[], Any]) -> Any:
    value = condition()
    return await value if inspect.isawaitable(value) else value


def _message(condition: Callable[[], Any], within: float, what: str) -> str:
    return f"not within {within:g} s: {what or _source(condition)}"


def _source(condition: Callable[[], Any]) -> str:
    try:
        return inspect.getsource(condition).strip()
    except (OSError, TypeError):
        return repr(condition)
