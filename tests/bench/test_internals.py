"""The tools that measure Baton's own seams, tried over the quickest implementations."""

from __future__ import annotations

import asyncio
from typing import cast

from app.stepqueue.memory import MemoryQueue
from app.store.protocol import Appended, Entry, Store
from tests import servers

from .commits import commit_rate
from .hop import TIERS, echo, hops
from .scenarios import queue_hop


class Instant:
    """A store that commits a batch every millisecond and keeps nothing."""

    async def append(self, entry: Entry) -> Appended:
        await asyncio.sleep(0.001)
        return Appended(())


async def test_hops_over_a_queue_in_memory() -> None:
    async with MemoryQueue(TIERS) as queue:
        far = asyncio.create_task(echo(queue))
        assert len(await hops(queue, 5, warmup=1)) == 5
        far.cancel()
        await asyncio.gather(far, return_exceptions=True)


async def test_commit_rate_counts_what_was_durable() -> None:
    seen = await commit_rate(cast(Store, Instant()), runs=8, seconds=0.2)
    assert 800 < seen.events_per_s < 8000
    assert seen.wait_ms["p50"] >= 1


def test_hop_over_redis() -> None:
    with servers.redis() as server:
        assert 0 < queue_hop(server.url) < 100
