"""The service under a fate: `python -m tests.faults.doomed [--at ORDER] [--orders FILE] -- gateway|dispatcher|serve`.

This runs the real `app`, all of it; only the seams that `wiring.open_runtime` opens are wrapped (`seams.py`), so the
product needs no hooks. `--at` is an order for this process alone, `--orders` a file that is watched for them
(`fate.py`). `--clock FILE` holds seconds that are added to this process's wall clock, read anew whenever it asks for
the time. `--copies N` sends everything that goes through the queue N times, batches in reverse. `--files N` is the
most files that it may have open, sockets included.
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
from tests.faults.fate import Fate, Order
from tests.faults.seams import DoomedQueue, DoomedStore, doomed_call, doomed_pool


def bend(fate: Fate, *, clock: Path | None, copies: int) -> None:
    """Put the wrapped seams where `wiring` looks for the real ones."""
    open_store, open_queue = wiring.open_store, wiring._queue

    @asynccontextmanager
    async def store(*words: Any, **named: Any) -> AsyncIterator[DoomedStore]:
        async with open_store(*words, **named) as opened:
            yield DoomedStore(opened, fate)

    @asynccontextmanager
    async def queue(*given: Any) -> AsyncIterator[DoomedQueue]:
        async with open_queue(*given) as opened:
            yield DoomedQueue(opened, fate, copies)

    wiring.open_store = store  # type: ignore[assignment]
    wiring._queue = queue  # type: ignore[assignment]
    wiring.Pool = doomed_pool(fate)  # type: ignore[misc]
    http.Call = doomed_call(fate)  # type: ignore[misc]
    if clock is not None:
        serve.open_runtime = partial(serve.open_runtime, now=shifted(clock))


def shifted(path: Path) -> Callable[[], float]:
    """Return a wall clock that is wrong by as many seconds as the file says."""

    def now() -> float:
        try:
            return time.time() + float(path.read_text())
        except (FileNotFoundError, ValueError):  # it is just being written
            return time.time()

    return now


def main() -> int:
    """Run one role of the service to its end."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.doomed", description=__doc__)
    parser.add_argument("--at", type=Order.read, help="an order for this process")
    parser.add_argument("--orders", type=Path, help="a file that is watched for orders")
    parser.add_argument("--clock", type=Path, help="a file with the seconds by which its clock is wrong")
    parser.add_argument("--copies", type=int, default=1, help="how often everything is sent through the queue")
    parser.add_argument("--files", type=int, help="most open files")
    parser.add_argument("role", nargs="+", help="a command of `python -m app`")
    chosen = parser.parse_args()
    bend(Fate(chosen.at, chosen.orders), clock=chosen.clock, copies=chosen.copies)
    if chosen.files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (chosen.files, chosen.files))
    return __main__.main(chosen.role)


if __name__ == "__main__":
    sys.exit(main())
