"""The policy of the garbage collector: collect while the process is idle, and freeze the survivors.

A run that has ended is freed by its reference counts (`tests/engine/test_memory.py`), so that the collector only has to
find accidental cycles. It stops the event loop for about half a microsecond per object. Its usual rule, to collect when
so many more objects were made than freed, does not suit a gateway: the objects of waiting runs are replaced all the
time, so that each collection visits all of them (1,000 runs and 2,000 streams: 93,000 objects, 60 ms, with each renewal
of leases).
"""

import asyncio
import gc
from collections.abc import Callable

from app.engine.periodic import wait_for_event

BUSY_THRESHOLD_OBJECTS = 1_000_000
"""Objects made and not freed since the last collection that cause one while the process is busy: some 150 MiB."""
IDLE_THRESHOLD_OBJECTS = 1_000
"""Objects made since the last collection below which an idle process does not collect."""
CHECK_INTERVAL_SECONDS = 10.0
"""Seconds between two checks whether the process is idle."""


def collect_and_freeze() -> None:
    """Collect once, then exempt all present objects, such as imported modules, from later collections."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(BUSY_THRESHOLD_OBJECTS, 1, 1)


async def collect_when_idle(
    is_busy: Callable[[], bool], stopping: asyncio.Event, pause: float = CHECK_INTERVAL_SECONDS
) -> None:
    """Collect whenever the process is idle and has made enough objects since the last time.

    At the end nothing is exempt any more: the interpreter frees all modules when it exits, and DuckDB, which writes
    Parquet, would report each of its types that is left.
    """
    while not stopping.is_set():
        await wait_for_event(stopping, pause)
        if not is_busy() and gc.get_count()[0] >= IDLE_THRESHOLD_OBJECTS:
            collect_and_freeze()
    gc.unfreeze()
