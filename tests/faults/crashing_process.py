"""The service with crash points: `python -m tests.faults.crashing_process [--at ORDER] [--orders FILE] -- PROGRAM`.

PROGRAM is `gateway`, `dispatcher` or `serve`. This runs the real `app`, all of it; only what `wiring.open_runtime`
opens is wrapped (`crash_boundaries.py`), so the product needs no hooks. `--at` is an order for this process alone,
`--orders` a file that is watched for them (`crash_points.py`). `--clock FILE` holds seconds that are added to this
process's wall clock, read anew whenever it asks for the time. `--copies N` sends everything that goes through the
queue N times, batches in reverse. `--files N` is the most files that it may have open, sockets included.
"""

import argparse
import resource
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from app import __main__
from app.process import serve, wiring
from app.providers import http
from tests.faults.crash_boundaries import CrashingQueue, CrashingStore, crashing_call, crashing_pool
from tests.faults.crash_points import CrashPoints, Order


def bend(crashes: CrashPoints, *, clock: Path | None, copies: int) -> None:
    """Put the wrapped seams where `wiring` looks for the real ones."""
    open_store, open_queue = wiring.open_store, wiring._queue

    @asynccontextmanager
    async def store(*words: Any, **arguments: Any) -> AsyncIterator[CrashingStore]:
        async with open_store(*words, **arguments) as opened:
            yield CrashingStore(opened, crashes)

    @asynccontextmanager
    async def queue(*arguments: Any) -> AsyncIterator[CrashingQueue]:
        async with open_queue(*arguments) as opened:
            yield CrashingQueue(opened, crashes, copies)

    wiring.open_store = store  # type: ignore[assignment]
    wiring._queue = queue  # type: ignore[assignment]
    wiring.Pool = crashing_pool(crashes)  # type: ignore[misc]
    http.Call = crashing_call(crashes)  # type: ignore[misc]
    if clock is not None:
        serve.open_runtime = partial(serve.open_runtime, now=shift_clock(clock))


def shift_clock(path: Path) -> Callable[[], float]:
    """Return a wall clock that is wrong by as many seconds as the file says."""

    def now() -> float:
        try:
            return time.time() + float(path.read_text())
        except (FileNotFoundError, ValueError):  # it is just being written
            return time.time()

    return now


def main() -> int:
    """Run one role of the service to its end."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.crashing_process", description=__doc__)
    parser.add_argument("--at", type=Order.read, help="an order for this process")
    parser.add_argument("--orders", type=Path, help="a file that is watched for orders")
    parser.add_argument("--clock", type=Path, help="a file with the seconds by which its clock is wrong")
    parser.add_argument("--copies", type=int, default=1, help="how often everything is sent through the queue")
    parser.add_argument("--files", type=int, help="most open files")
    parser.add_argument("role", nargs="+", help="a command of `python -m app`")
    chosen = parser.parse_args()
    bend(CrashPoints(chosen.at, chosen.orders), clock=chosen.clock, copies=chosen.copies)
    if chosen.files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (chosen.files, chosen.files))
    return __main__.main(chosen.role)


if __name__ == "__main__":
    sys.exit(main())
