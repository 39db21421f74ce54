"""When the garbage collector looks: while nobody waits for it.

A run that has ended is freed by its reference counts (`tests/engine/test_memory.py`), so that the collector is for
accidents. It stops the event loop for about half a microsecond per object. Its own rule, to look when so many more were
made than freed, does not fit a gateway: waits replace older waits there, so that whatever waits has become young when
the number is reached (1,000 runs and 2,000 streams: 93,000 objects, 60 ms, with each renewal of leases).
"""

import asyncio
import gc
from collections.abc import Callable
from contextlib import suppress

GROWN = 1_000_000
"""Objects made and not freed since the last look with which it looks while there is work, too: some 150 MiB."""
WORTHWHILE = 1_000
"""Objects without which an idle process does not look."""
PAUSE = 10.0
"""Seconds between two glances at whether the process is idle."""


def settle() -> None:
    """What there is now, above all what was imported, stays for good and is never looked through again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GROWN, 1, 1)


async def keep(busy: Callable[[], bool], stopping: asyncio.Event, pause: float = PAUSE) -> None:
    """Look whenever the process has nothing to do and has made something since."""
    while not stopping.is_set():
        with suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await stopping.wait()
        if not busy() and gc.get_count()[0] >= WORTHWHILE:
            settle()
