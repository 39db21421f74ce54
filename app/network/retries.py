"""The retry policies of the service: one function for each thing that is waited for.

They are for retries that are not a run's own: a call to a worker is retried by the run's journal, and a webhook by the
schedule that is stored with its notice, since both outlive the process. A policy says which errors are retried, how
long the pauses are, and when it gives up; then the last error is raised as it is.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    retry_if_result,
    stop_after_attempt,
    wait_exponential,
    wait_fixed,
)

from app.errors import StoreUnavailable

T = TypeVar("T")
Left = Callable[[], float]
"""Seconds for which it is still worth waiting; 0 or less ends the retries."""
Sleep = Callable[[float], Awaitable[None]]

DATABASE_FIRST, DATABASE_LONGEST = 0.05, 1.0
"""Seconds between two tries of a call to the database: the pause doubles from the first to the longest."""
DATABASE_PROBE_FIRST, DATABASE_PROBE_LONGEST = 0.1, 0.5
"""Seconds between two probes of a database that is away."""
REDIS_PAUSE = 0.25
"""Seconds between two attempts to connect to Redis, and between two probes of a Redis that does not answer."""
STARTUP_PAUSE = 2.0
"""Seconds between two tries of what a process needs before it is ready."""
MANAGEMENT_TRIES = 4
MANAGEMENT_FIRST, MANAGEMENT_LONGEST = 0.1, 1.0
"""Seconds between two attempts to connect to a vLLM server's management API."""

AUTHORITY_TRIES = 3
AUTHORITY_FIRST, AUTHORITY_LONGEST = 0.1, 2.0
"""Seconds between two requests to a witness or a time-stamp authority, before the next turn of the export."""


async def retry(call: Callable[[], Awaitable[T]], policy: Callable[[], AsyncRetrying]) -> T:
    """Return what `call` returns, tried again as `policy` says.

    The first try is made outside of tenacity, which costs 0.07 ms of CPU even for a call that succeeds: a tenth of a
    one-step run for each of its commits. So `policy` is asked only after a failure.
    """
    try:
        return await call()
    except Exception as error:
        first = error
    async for attempt in policy():
        with attempt:
            if attempt.retry_state.attempt_number == 1:
                raise first
            return await call()
    raise AssertionError("a policy ends by returning or raising")


def database(
    *, left: Left, sleep: Sleep = asyncio.sleep, faults: tuple[type[Exception], ...] = (StoreUnavailable,)
) -> AsyncRetrying:
    """Wait until the database takes a call; `sleep` may return early, when the database is known to be back."""
    return AsyncRetrying(
        retry=retry_if_exception_type(faults),
        wait=wait_exponential(multiplier=DATABASE_FIRST, max=DATABASE_LONGEST),
        stop=_when(lambda: left() <= 0),
        sleep=sleep,
        reraise=True,
    )


def database_probe(*, stopped: Callable[[], bool], sleep: Sleep) -> AsyncRetrying:
    """Probe until the database answers, which the probe reports by returning True, or until `stopped`."""
    return AsyncRetrying(
        retry=retry_if_result(_is_false),
        wait=wait_exponential(multiplier=DATABASE_PROBE_FIRST, max=DATABASE_PROBE_LONGEST),
        stop=_when(stopped),
        sleep=sleep,
        retry_error_callback=_give_up,
    )


def redis_probe(*, stopped: Callable[[], bool]) -> AsyncRetrying:
    """Probe until Redis answers, which the probe reports by returning True, or until `stopped`."""
    return AsyncRetrying(
        retry=retry_if_result(_is_false),
        wait=wait_fixed(REDIS_PAUSE),
        stop=_when(stopped),
        retry_error_callback=_give_up,
    )


def redis_subscription(*, faults: tuple[type[Exception], ...], stopped: Callable[[], bool]) -> AsyncRetrying:
    """Subscribe again after each of `faults`, until `stopped`; then the last of them is dropped."""
    return AsyncRetrying(
        retry=retry_if_exception_type(faults),
        wait=wait_fixed(REDIS_PAUSE),
        stop=_when(stopped),
        retry_error_callback=_give_up,
    )


def startup(*, faults: tuple[type[Exception], ...], log: Callable[[BaseException], None]) -> AsyncRetrying:
    """Try without end what a process needs before it is ready, and `log` each failure."""
    return AsyncRetrying(
        retry=retry_if_exception_type(faults),
        wait=wait_fixed(STARTUP_PAUSE),
        before_sleep=lambda state: log(_error(state)),
        reraise=True,
    )


def management(*, faults: tuple[type[Exception], ...]) -> Retrying:
    """Connect again to a server that is being started; `faults` are those after which nothing can have been sent."""
    return Retrying(
        retry=retry_if_exception_type(faults),
        wait=wait_exponential(multiplier=MANAGEMENT_FIRST, max=MANAGEMENT_LONGEST),
        stop=stop_after_attempt(MANAGEMENT_TRIES),
        reraise=True,
    )


def authority(*, faults: tuple[type[Exception], ...]) -> AsyncRetrying:
    """Ask a witness or a time-stamp authority again, a few times."""
    return AsyncRetrying(
        retry=retry_if_exception_type(faults),
        wait=wait_exponential(multiplier=AUTHORITY_FIRST, max=AUTHORITY_LONGEST),
        stop=stop_after_attempt(AUTHORITY_TRIES),
        reraise=True,
    )


def _when(true: Callable[[], bool]) -> Callable[[RetryCallState], bool]:
    return lambda _state: true()


def _is_false(result: object) -> bool:
    return not result


def _give_up(_state: RetryCallState) -> None:
    return None


def _error(state: RetryCallState) -> BaseException:
    error = state.outcome.exception() if state.outcome is not None else None
    assert error is not None
    return error
