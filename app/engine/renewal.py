"""The renewal of what a process holds for a time: the leases of its runs, the claims of its steps."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from app.engine.context import EngineContext
from app.errors import StoreUnavailable

T = TypeVar("T")


async def renew_regularly(
    context: EngineContext,
    renew: Callable[[], Awaitable[set[T]]],
    lose: Callable[[T], None],
    *,
    is_over: Callable[[], bool],
    failed: str,
) -> None:
    """Renew every third of a lease until it `is_over`; no cancellation is relied upon. `failed` is logged while the
    database is away.

    `renew` returns what is missing in the database. What was just finished is missing too: only what is missing twice
    was taken over, and is given to `lose`.
    """
    suspects: set[T] = set()
    pause = context.lease / 3
    while not is_over():
        await asyncio.sleep(pause)
        pause = context.lease / 3
        try:
            missing = await renew()
        except StoreUnavailable as error:
            context.telemetry.log(logging.WARNING, failed, error=error.public_code)
            if not context.store.healthy and await context.store.wait_until_healthy(pause):
                pause = 0.0  # after an outage the process that renews first keeps what it holds
            continue
        for held in missing & suspects:
            lose(held)
        suspects = missing - suspects
