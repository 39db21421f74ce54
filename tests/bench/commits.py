"""How fast the journal commits: many runs at once, each waiting for its event before it writes the next one.

That is the pattern of the service: an `append` returns only when its event is durable, and the rate comes from many
runs sharing a transaction.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from app.core.journal import Draft, Kind
from app.store.protocol import Entry, Ledger, NewRun, Store

from .load import percentiles

BODY = {"worker": "a", "access": ["user"], "sha256": "0" * 64, "note": "x" * 200}
FAR = 4e9


@dataclass(frozen=True, slots=True)
class Commits:
    """Events per second, and what one append waits (ms)."""

    events_per_s: float
    wait_ms: dict[str, float]


def _admitted(run: str) -> Entry:
    new = NewRun("bench", "bench", "mini", "baton-mini", b"s" * 16, "bench", FAR, FAR, Ledger(10**12, 10**12), "bench")
    return Entry(run, 0.0, (Draft(Kind.ADMITTED, BODY),), new=new)


async def commit_rate(store: Store, runs: int = 256, seconds: float = 5.0) -> Commits:
    """Write one event after another to so many runs at once."""
    waits: list[float] = []
    await asyncio.gather(*(store.append(_admitted(f"bench-{time.time_ns()}-{i}")) for i in range(runs)))
    started = time.perf_counter()

    async def one(number: int) -> None:
        run = f"bench-{time.time_ns()}-w{number}"
        await store.append(_admitted(run))
        while (begun := time.perf_counter()) < started + seconds:
            await store.append(Entry(run, 0.0, (Draft(Kind.PLAN_STEP, BODY),), epoch=1))
            waits.append((time.perf_counter() - begun) * 1000)

    await asyncio.gather(*(one(number) for number in range(runs)))
    return Commits(len(waits) / (time.perf_counter() - started), percentiles(waits))
