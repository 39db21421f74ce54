"""The least that a commit, a message over Redis and a read take on this machine, and what follows for the budgets.

`python -m tests.bench.floor` measures each with the drivers alone and nothing of Baton, every 20 ms as between the
calls of a workflow, since a processor that was idle takes a while to wake up. It then counts how many of them a run
over two processes has one after the other: Baton cannot be quicker than their sum. Use a quiet machine: a disk that
others wait for takes several times as long.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

import asyncpg
import redis.asyncio as redis

from tests.harness import servers

TRIES = 150
PAUSE_SECONDS = 0.02
"""As long as the workers of the bench take."""
ROW = b"x" * 1_600
"""As much as a step's end writes."""
PATIENCE_SECONDS = 5.0
STEPS = 3
"""Steps on the critical path of 1-2-1."""
SERIAL: dict[str, tuple[int, int, int, int]] = {
    "1-2-1, per step": (6, 2, 1, STEPS),
    "tool turn": (3, 2, 4, 1),
    "first token": (2, 2, 1, 1),
}
"""Commits, messages and reads that follow one another, and the number by which their time is divided.

1-2-1 has the admission, the plan with the first intent, the end of the first step with the intents of the next two,
their two ends, the last of which has the intent of the last step, and the end of that. A tool turn has its beginning,
the intent and the outcome; before each of the first two a row is read that the other process has written, and the
engine reads the task and the results. A first token needs the admission and the plan with the intent.
"""


async def median_ms(act: Callable[[], Awaitable[object]]) -> float:
    """Return the median of `TRIES` times, each after a pause."""
    times = []
    for _ in range(TRIES):
        await asyncio.sleep(PAUSE_SECONDS)
        began = time.perf_counter()
        await act()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1000


async def of_postgres(url: str) -> tuple[float, float]:
    """The milliseconds of a commit that waits for the disk, and of a read by key."""
    connection = await asyncpg.connect(url)
    try:
        await connection.execute("CREATE TABLE floor (id bigserial PRIMARY KEY, body bytea)")
        write = await connection.prepare("INSERT INTO floor (body) VALUES ($1)")
        read = await connection.prepare("SELECT body FROM floor WHERE id = $1")
        return await median_ms(lambda: write.fetch(ROW)), await median_ms(lambda: read.fetch(1))
    finally:
        await connection.close()


async def of_redis(url: str) -> float:
    """The milliseconds from a message's publication to its receipt."""
    sender, receiver = redis.from_url(url), redis.from_url(url)
    async with sender, receiver, receiver.pubsub() as subscribed:
        await subscribed.subscribe("floor")
        await subscribed.get_message(timeout=PATIENCE_SECONDS)

        async def hop() -> None:
            await sender.publish("floor", ROW)
            assert await subscribed.get_message(timeout=PATIENCE_SECONDS) is not None

        return await median_ms(hop)


def main() -> None:
    """Print what each costs, and the least time of the budgets over two processes."""
    with ExitStack() as stack:
        commit, read = asyncio.run(of_postgres(stack.enter_context(servers.postgres(fsync=True)).url))
        message = asyncio.run(of_redis(stack.enter_context(servers.redis()).url))
    print(f"commit with fsync {commit:.2f} ms, read by key {read:.2f} ms, message over Redis {message:.2f} ms")
    for what, (commits, messages, reads, shares) in SERIAL.items():
        least = (commits * commit + messages * message + reads * read) / shares
        print(f"{what}: {commits} commits, {messages} messages, {reads} reads: at least {least:.1f} ms")


if __name__ == "__main__":
    main()
