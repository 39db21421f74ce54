"""Measure how fast the journal commits, the CPU of an append, and how long an entry waits for its batch.

    python -m tests.bench.journal sqlite:///bench.db
    python -m tests.bench.journal postgresql://user@host/name --writers 256

Each writer drives one-step runs, one after another, in the four commits that the service makes of one.
"""

import argparse
import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from app.core.contents import content_ref
from app.core.pool.catalog import Amount
from app.core.run.events import Kind
from app.store.protocol import Entry, NewRun, Outbox, Projection, TicketMove
from app.store.sql import SqlStore, open_store
from app.store.sqlkit.migrate import migrate
from tests.harness.raw_facts import Raw

SALT = b"0123456789abcdef"
TEXT = b"A question of a few lines, or an answer to it. " * 20
FAR = 4e9


@dataclass(slots=True)
class Figures:
    """The measured figures; times are in seconds."""

    appends: int = 0
    events: int = 0
    batches: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    waits: list[float] = field(default_factory=list)
    writes: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        waits, writes = sorted(self.waits), sorted(self.writes)
        return (
            f"{self.events / self.seconds:,.0f} events/s, {self.appends / self.seconds:,.0f} appends/s, "
            f"{self.cpu / self.appends * 1e6:,.0f} us CPU per append, "
            f"{self.appends / self.batches:.1f} appends a batch\n"
            f"batch writes p50 {_at(writes, 0.5)} p99 {_at(writes, 0.99)} max {_at(writes, 1)}; "
            f"wait for a batch p50 {_at(waits, 0.5)} p99 {_at(waits, 0.99)} max {_at(waits, 1)}; "
            f"worst wait beyond one write {max(0.0, waits[-1] - writes[-1]) * 1e3:.1f} ms"
        )


def _at(values: list[float], share: float) -> str:
    return f"{values[min(len(values) - 1, int(share * len(values)))] * 1e3:.1f} ms"


def one_step_run(run: str) -> list[Entry]:
    """Return the four entries of a run with one step: admitted, planned, taken, answered."""
    question, answer = content_ref(SALT, TEXT + run.encode()), content_ref(SALT, run.encode() + TEXT)
    new = NewRun("tenant", "key", "mini", "baton-mini", SALT, "driver", FAR, FAR, Amount(10**9, 10**9), "bench")
    call = {"call": f"{run}-0", "step": 0, "worker": "alpha", "access": ["user"], "sha256": question, "usd": 420}
    return [
        Entry(
            run,
            1.0,
            (Raw(Kind.ADMITTED, {"task": question, "tier": "mini", "labels": []}),),
            new=new,
            contents=((question, TEXT + run.encode()),),
        ),
        Entry(
            run,
            2.0,
            (
                Raw(Kind.PLAN_ACCEPTED, {"round": 0, "steps": [{"worker": "alpha", "access": ["user"]}]}),
                Raw(Kind.STEP_QUEUED, {"step": 0}),
            ),
            epoch=1,
            outbox=(Outbox(0, "mini", "driver"),),
            row=Projection(state="running", topology="single", steps=1),
            tags=(("worker", "alpha"),),
        ),
        Entry(
            run,
            3.0,
            (Raw(Kind.CALL_INTENDED, call),),
            move=TicketMove(0, "take", holder="d", until=FAR),
            hold=Amount(420, 900),
        ),
        Entry(
            run,
            4.0,
            (
                Raw(Kind.CALL_FINISHED, {"call": f"{run}-0", "outcome": "ok", "usage": {"in": 300, "out": 200}}),
                Raw(Kind.STEP_DONE, {"step": 0, "answer": answer}),
                Raw(Kind.SUCCEEDED, {"answer": answer, "usd": 300}),
            ),
            move=TicketMove(0, "finish", claim=1),
            release=Amount(420, 900),
            spent=Amount(300, 500),
            contents=((answer, run.encode() + TEXT),),
        ),
    ]


async def measure(store: SqlStore, writers: int, seconds: float) -> Figures:
    """Let so many writers work for so long."""
    figures = Figures()
    last = _watch_batches(store, figures)
    started, cpu = time.perf_counter(), time.process_time()

    async def write(number: int) -> None:
        turn = 0
        while time.perf_counter() - started < seconds:
            turn += 1
            for entry in one_step_run(f"{time.time_ns():x}-{number}-{turn}"):
                put = time.perf_counter()
                await store.append(entry)
                figures.waits.append(max(0.0, last[0] - put))
                figures.appends += 1
                figures.events += len(entry.events)

    await asyncio.gather(*(write(number) for number in range(writers)))
    figures.seconds, figures.cpu = time.perf_counter() - started, time.process_time() - cpu
    return figures


def _watch_batches(store: SqlStore, figures: Figures) -> list[float]:
    """Record each write; returns a cell with the start of the write that ended last."""
    last, write = [0.0], store._runner.write

    async def write_and_note(work: Callable[..., Any], **intent: Any) -> Any:
        start = time.perf_counter()
        result = await write(work, **intent)
        last[0] = start
        figures.batches += 1
        figures.writes.append(time.perf_counter() - start)
        return result

    store._runner.write = write_and_note  # type: ignore[method-assign,assignment]
    return last


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--writers", type=int, nargs="*", default=[1, 16, 256])
    parser.add_argument("--seconds", type=float, default=4.0)
    options = parser.parse_args()
    await asyncio.to_thread(migrate, options.url)
    for writers in options.writers:
        async with open_store(options.url) as store:
            await measure(store, writers, 0.5)
        async with open_store(options.url) as store:
            print(f"{writers} writers: {await measure(store, writers, options.seconds)}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
