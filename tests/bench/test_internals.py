"""The tool that measures the queue seam, tried over both of its implementations."""

from __future__ import annotations

import asyncio

from app.stepqueue.memory import MemoryQueue
from tests.harness import servers

from .hop import TIERS, echo, hops
from .scenarios import queue_hop


async def test_hops_over_a_queue_in_memory() -> None:
    async with MemoryQueue(TIERS) as queue:
        far = asyncio.create_task(echo(queue))
        assert len(await hops(queue, 5, warmup=1)) == 5
        far.cancel()
        await asyncio.gather(far, return_exceptions=True)


def test_hop_over_redis() -> None:
    with servers.redis() as server:
        assert queue_hop(server.url) > 0
