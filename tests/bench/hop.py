"""The queue hop: a ticket rung here, taken by another process, and its answer heard here again, one at a time.

`python -m tests.bench.hop --redis URL` prints JSON with the percentiles in milliseconds. The other process is this file
with `--echo`; it does what a dispatcher does for a step without work: take, tell the driver, done.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time

import uvloop

from app.core.journal import Event, Kind
from app.stepqueue.protocol import DISPATCHERS, Committed, Live, StepQueue, Ticket
from app.stepqueue.redis import RedisQueue

from .load import percentiles
from .processes import ROOT

DRIVER = "bench-driver"
TIERS = ("mini",)
PATIENCE = 10.0


async def echo(queue: StepQueue) -> None:
    """Answer every ticket with an event, for ever; the next ones are taken meanwhile."""

    async def answer(ticket: Ticket) -> None:
        event = Event(ticket.run, ticket.seq, Kind.STEP_DONE, 0.0, {"step": ticket.step})
        await queue.tell(ticket.driver, [Committed(ticket.run, (event,))])
        await queue.done([ticket])

    async with asyncio.TaskGroup() as answers:
        while True:
            for ticket in await queue.take(16, 1.0):
                answers.create_task(answer(ticket))


async def hops(queue: StepQueue, count: int, warmup: int = 20) -> list[float]:
    """Milliseconds from `ring` to the answer, for so many tickets, one after another."""
    heard: asyncio.Queue[str] = asyncio.Queue()

    def sink(message: Live) -> None:
        if isinstance(message, Committed):
            heard.put_nowait(message.run)

    taken: list[float] = []
    async with queue.hear(DRIVER, sink):
        for number in range(count + warmup):
            run, start = f"bench-{number}", time.perf_counter()
            await queue.ring([Ticket(run, 0, TIERS[0], DRIVER, number)])
            async with asyncio.timeout(PATIENCE):
                while await heard.get() != run:
                    pass
            taken.append((time.perf_counter() - start) * 1000)
    return taken[warmup:]


async def _echo(url: str) -> None:
    async with RedisQueue(url, TIERS) as queue, queue.hear(DISPATCHERS, lambda message: None):
        print("ready", flush=True)
        await echo(queue)


async def _measure(url: str, count: int) -> list[float]:
    async with RedisQueue(url, TIERS) as queue:
        return await hops(queue, count)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.hop", description=__doc__)
    parser.add_argument("--redis", required=True)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--echo", action="store_true")
    chosen = parser.parse_args()
    if chosen.echo:
        uvloop.run(_echo(chosen.redis))
        return
    command = [sys.executable, "-m", "tests.bench.hop", "--redis", chosen.redis, "--echo"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            print(json.dumps(percentiles(uvloop.run(_measure(chosen.redis, chosen.count)))))
        finally:
            other.kill()


if __name__ == "__main__":
    main()
