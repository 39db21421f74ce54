"""The work that an engine does again and again beside its runs, such as sealing, erasing and learning."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from app.errors import ServiceUnavailable
from app.telemetry import Telemetry


def _wait_for_the_next_look(_error: ServiceUnavailable) -> None:
    return


async def look_repeatedly(
    look: Callable[[], Awaitable[None]],
    stopping: asyncio.Event,
    seconds: float,
    telemetry: Telemetry,
    work: str,
    *,
    on_outage: Callable[[ServiceUnavailable], None] = _wait_for_the_next_look,
) -> None:
    """Look until `stopping` is set, with a pause of so many seconds between two looks.

    No error of a look ends the process with all of its runs: that a part of the service is away goes to `on_outage`,
    and anything else is logged as a bug in the `work`.
    """
    while not stopping.is_set():
        try:
            await look()
        except ServiceUnavailable as error:
            on_outage(error)
        except Exception as bug:
            telemetry.log(logging.ERROR, f"{work} failed because of a bug; it is tried again.", bug)
        await wait_for_event(stopping, seconds)


async def wait_for_event(event: asyncio.Event, seconds: float) -> None:
    """Wait until the event is set, at most so many seconds."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
