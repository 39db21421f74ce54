"""Waiting for a condition, with a deadline: what a test does in place of sleeping for a fixed time.

`until` and `wait_until` return as soon as the condition holds, so a generous deadline costs a passing test nothing.
`stays` asserts that something does not happen. No condition can be waited for there; a slow machine can hide a fault
from it, but cannot make a right program fail.

No test limits the time of one measurement: a busy machine exceeds every limit that is near to what is promised. A test
asserts the cause instead (requests, order, the journal, a pause that it has made endless), or gives a limit that only
the failure would reach. `fastest` is for what is left: a wait too many is in every try, and a busy machine is not.
"""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

T = TypeVar("T")

PATIENCE_SECONDS: Final = 60.0
"""How long a test waits for what must happen, unless it names another deadline; half of a test's own time limit."""
POLL_SECONDS: Final = 0.01
"""The pause between two looks at a condition in this process."""
OUTSIDE_POLL_SECONDS: Final = 0.02
"""The pause between two looks at another process."""


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


async def assert_stays(condition: Callable[[], bool | Awaitable[bool]], *, seconds: float) -> None:
    """Assert that the condition holds now and at every look for so many seconds."""
    end = time.monotonic() + seconds
    while True:
        assert await _value(condition), f"no longer true: {_source(condition)}"
        if time.monotonic() > end:
            return
        await asyncio.sleep(POLL_SECONDS)


async def fastest(measured: Callable[[], float | Awaitable[float]], *, enough: float, tries: int = 10) -> float:
    """Call a function, which may be a coroutine function and returns seconds, until one call has returned no more than
    `enough`, though at most so many times; return the least of them."""
    least = await _value(measured)
    for _ in range(tries - 1):
        if least <= enough:
            break
        least = min(least, await _value(measured))
    return float(least)


def fastest_in_thread(measured: Callable[[], float], *, enough: float, tries: int = 10) -> float:
    """Measure as `fastest` does, in a thread without an event loop."""
    return asyncio.run(fastest(measured, enough=enough, tries=tries))


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
