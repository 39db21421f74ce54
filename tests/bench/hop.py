"""Measure a hop over the queue: the time until another process has a ticket, and until its answer has arrived here.

`python -m tests.bench.hop --redis URL` prints JSON: the percentiles of the hop in milliseconds, and under `round_trip`
those of the way there and back. There is one ticket at a time. The other process is this file with `--echo`; it does
what an engine does for a step without work: it takes the ticket, sends the driver an event, and acknowledges. Both read
the machine's one monotonic clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from typing import NamedTuple

import uvloop

from app.core.run.events import Event, Kind
from app.stepqueue.protocol import DISPATCHERS, CommittedEvents, Live, StepQueue, Ticket
from app.stepqueue.redis import RedisQueue

from .load import percentiles
from .processes import ROOT

DRIVER = "bench-driver"
TIERS = ("mini",)
PATIENCE = 10.0


async def echo(queue: StepQueue) -> None:
    """Answer every ticket with an event, for ever; the next ones are taken meanwhile."""

    async def answer(ticket: Ticket, sent_at: float) -> None:
        event = Event(ticket.run, ticket.seq, Kind.STEP_DONE, sent_at, {"step": ticket.step})
        await queue.publish(ticket.driver, [CommittedEvents(ticket.run, (event,))])
        await queue.done([ticket])

    async with asyncio.TaskGroup() as answers:
        while True:
            for ticket in await queue.take(16, 1.0):
                answers.create_task(answer(ticket, time.monotonic()))


class Hop(NamedTuple):
    """Milliseconds from calling `enqueue`."""

    there: float
    and_back: float


async def hops(queue: StepQueue, count: int, warmup: int = 20) -> list[Hop]:
    """Until the ticket was taken and until the answer was heard, for so many tickets, one after another."""
    events: asyncio.Queue[Event] = asyncio.Queue()

    def sink(message: Live) -> None:
        if isinstance(message, CommittedEvents):
            events.put_nowait(message.events[0])

    all_hops: list[Hop] = []
    async with queue.subscribe(DRIVER, sink):
        for number in range(count + warmup):
            run, start = f"bench-{number}", time.monotonic()
            await queue.enqueue([Ticket(run, 0, TIERS[0], DRIVER, number)])
            async with asyncio.timeout(PATIENCE):
                while (answer := await events.get()).run != run:
                    pass
            all_hops.append(Hop((answer.at - start) * 1000, (time.monotonic() - start) * 1000))
    return all_hops[warmup:]


async def _echo(url: str) -> None:
    async with RedisQueue(url, TIERS) as queue, queue.subscribe(DISPATCHERS, lambda message: None):
        print("ready", flush=True)
        await echo(queue)


async def _measure(url: str, count: int) -> list[Hop]:
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
            all_hops = uvloop.run(_measure(chosen.redis, chosen.count))
            there, and_back = (percentiles(column) for column in zip(*all_hops, strict=True))
            print(json.dumps({**there, "round_trip": and_back}))
        finally:
            other.kill()


if __name__ == "__main__":
    main()
