"""The tools that measure the queue seam, the rate limiter and the floor of the stack."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from app.stepqueue.memory import MemoryQueue
from tests.harness import servers

from . import limits
from .hop import TIERS, echo, hops
from .scenarios import queue_hop
from .stack import Batcher, Write, part


async def test_hops_over_a_queue_in_memory() -> None:
    async with MemoryQueue(TIERS) as queue:
        far = asyncio.create_task(echo(queue))
        assert len(await hops(queue, 5, warmup=1)) == 5
        far.cancel()
        await asyncio.gather(far, return_exceptions=True)


def test_hop_over_redis() -> None:
    with servers.redis() as server:
        assert queue_hop(server.url, count=50) > 0


async def test_the_limiter_of_the_service_is_measured(
    embedded_database: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SECONDS", 0.05)
    cost = await limits.in_database(f"sqlite:///{tmp_path / 'baton.db'}", callers=2)
    assert cost.a_second > 0
    assert cost.median <= cost.p99


async def test_what_meets_shares_one_round_trip() -> None:
    acted: list[list[int]] = []

    async def act(items: Sequence[int]) -> None:
        acted.append(list(items))
        await asyncio.sleep(0)

    batcher = Batcher(act)
    first = batcher.put(1)
    await asyncio.sleep(0)
    await asyncio.gather(first, batcher.put(2), batcher.put(3))
    assert acted == [[1], [2, 3]]


def test_rows_of_the_stack_are_array_parameters() -> None:
    assert part(Write("tickets", 2, "delete"), 0, 4) == (
        "part_0 AS (DELETE FROM tickets USING unnest($4::text[], $5::text[]) AS given(c1, c2)"
        " WHERE tickets.c1 = given.c1 AND tickets.c2 = given.c2)"
    )
