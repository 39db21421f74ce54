"""Measure what a request of a limited key costs its gateway, and how many requests one key can have.

`python -m tests.bench.limits` counts requests of one key under all three limits at three gateways over one Postgres
with fsync, and as many requests by a script in Redis, which was the alternative.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any, cast

from msgspec import Struct
from redis.asyncio import Redis

from app.core.pool.rates import RateLimits, RateRequest
from app.gateway.http.admission import RateLimiter
from app.gateway.http.context import GatewayContext, Rates
from app.store.sql import open_store
from app.store.sqlkit.migrate import migrate
from tests.harness import servers

GATEWAYS = 3
SECONDS = 2.0
LIMITS = RateLimits(rpm=10**9, tpm=10**12, concurrency=10**6)
SCRIPT = """
local now, window = tonumber(ARGV[1]), 60
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - window)
redis.call('ZADD', KEYS[1], now, ARGV[2])
return redis.call('ZCARD', KEYS[1])
"""
Count = Callable[[str], Awaitable[object]]


class RequestCost(Struct, frozen=True):
    """The cost of requests: milliseconds each, requests per second, and CPU of this process for each."""

    median: float
    p99: float
    a_second: float
    cpu: float


async def measure_limiter(counts: Sequence[Count], callers: int) -> RequestCost:
    """Count requests for a while, with so many callers at each gateway."""
    took: list[float] = []
    began, cpu = time.perf_counter(), time.process_time()

    async def call(count: Count, name: str) -> None:
        number = 0
        while time.perf_counter() - began < SECONDS:
            number += 1
            at = time.perf_counter()
            await count(f"{name}_{number}")
            took.append(1000 * (time.perf_counter() - at))

    jobs = [call(count, f"run_{gateway}_{n}") for gateway, count in enumerate(counts) for n in range(callers)]
    await asyncio.gather(*jobs)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    took.sort()
    return RequestCost(took[len(took) // 2], took[len(took) * 99 // 100], len(took) / seconds, 1000 * cpu / len(took))


async def in_database(url: str, callers: int) -> RequestCost:
    """Measure the limiter of the service over a migrated database. The requests begin no runs, so none is open."""
    async with AsyncExitStack() as stack:
        counts: list[Count] = []
        for _ in range(GATEWAYS if callers > 1 else 1):
            store = await stack.enter_async_context(open_store(url))
            context = SimpleNamespace(store=store, now=time.time, rates=Rates())
            limiter = RateLimiter(cast(GatewayContext, context))
            counts.append(_count_with(limiter))
        return await measure_limiter(counts, callers)


def _count_with(limiter: RateLimiter) -> Count:
    async def count(_run: str) -> None:
        await limiter.count(RateRequest((("key:bench", LIMITS),)), [])

    return count


async def in_redis(url: str, callers: int) -> RequestCost:
    """Measure a script in Redis that keeps a sliding window in a sorted set."""
    clients: list[Any] = [Redis.from_url(url) for _ in range(GATEWAYS if callers > 1 else 1)]
    scripts = [client.register_script(SCRIPT) for client in clients]

    def count_with(script: Any) -> Count:
        return lambda run: script(keys=["bench"], args=[time.time(), run])

    try:
        return await measure_limiter([count_with(script) for script in scripts], callers)
    finally:
        for client in clients:
            await client.aclose()


def main() -> None:
    print("| callers | where | median, ms | p99, ms | requests a second | CPU of the gateways each, ms |")
    print("|---|---|---|---|---|---|")
    with servers.postgres(fsync=True) as database, servers.redis() as redis:
        migrate(database.url)
        for callers in (1, 16):
            for name, measure, url in (("Postgres", in_database, database.url), ("Redis", in_redis, redis.url)):
                result = asyncio.run(measure(url, callers))
                where = f"1 gateway, {callers}" if callers == 1 else f"{GATEWAYS} gateways, {callers} each"
                figures = f"{result.median:.1f} | {result.p99:.1f} | {result.a_second:.0f} | {result.cpu:.2f}"
                print(f"| {where} | {name} | {figures} |")


if __name__ == "__main__":
    main()
