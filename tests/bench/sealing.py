"""`python -m tests.bench.sealing`: how fast the transparency log follows a busy journal on Postgres.

    python -m tests.bench.sealing [--seconds 10] [--rate 5500] [--backlog 50000]

A process writes runs of seven events each, in two entries, at `--rate` events a second, and another one seals as an
engine does, over a Postgres with fsync. Every tenth of a second the oldest change that waits is looked up: that is the
lag. Then `--backlog` events are written while nobody seals, and sealed at once: in parts, of which every second one is
sealed in passes as large as on Postgres, and the others in passes as large as on SQLite.

The exit status is 1 if fewer than 5,000 events a second were written and sealed, if the lag was above two seconds, or
if something was not sealed in the end.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

from msgspec.structs import replace
from sqlalchemy import text

from app.core.run.events import Kind
from app.engine.context import EngineContext
from app.engine.sealer import Sealer
from app.store.protocol import Entry
from app.store.sql import SqlStore, open_store
from app.store.sqlkit.migrate import migrate
from app.store.writing import log_writer
from app.telemetry import Telemetry
from tests.conformance.entries import admission_entry
from tests.harness import servers
from tests.harness.raw_facts import Raw
from tests.harness.sealing import seal_all
from tests.harness.waiting import until

EVENTS, FIRST = 7, 3
"""Events of a run, and those of its first entry."""
BODY = {"worker": "alpha", "step": 0, "request": "a" * 64, "held": {"usd": 120, "tokens": 900}}
LOOK_SECONDS = 0.1
WANTED, LAG_SECONDS = 5_000, 2.0
ROUNDS = 3
"""Parts of the backlog that are sealed with each size of a pass, in turn."""
UNSEALED = """
SELECT count(*) FROM runs LEFT JOIN (SELECT id, max(events) AS sealed FROM log_leaves WHERE kind = 'run' GROUP BY id)
AS known ON known.id = runs.id WHERE known.sealed IS NULL OR known.sealed <> runs.seq
"""
TWICE = (
    "SELECT count(*) FROM (SELECT 1 FROM log_leaves WHERE kind = 'run' GROUP BY id, events HAVING count(*) > 1) AS d"
)


def entries(run: str) -> tuple[Entry, Entry]:
    """Return the two entries of a run."""
    beginning = admission_entry(run, 1.0)
    facts = [Raw(Kind.CALL_FINISHED, BODY) for _ in range(EVENTS - 1)]
    first = replace(beginning, events=(*beginning.events, *facts[: FIRST - 1]))
    return first, Entry(run, 2.0, tuple(facts[FIRST - 1 :]), epoch=1)


async def write(store: SqlStore, runs: Sequence[str]) -> None:
    """Write these runs at the same time."""
    batches = [entries(run) for run in runs]
    await asyncio.gather(*[store.append(first) for first, _ in batches])
    await asyncio.gather(*[store.append(second) for _, second in batches])


async def flood(store: SqlStore, name: str, seconds: float, rate: float) -> int:
    """Write at this rate of events. Returns the number of events."""
    began, written = time.perf_counter(), 0
    batch = 32
    while (passed := time.perf_counter() - began) < seconds:
        if written * EVENTS > rate * passed:
            await asyncio.sleep(written * EVENTS / rate - passed)
            continue
        await write(store, [f"{name}_{written + number:07d}" for number in range(batch)])
        written += batch
    return written * EVENTS


async def seal_until_input_ends(url: str) -> None:
    """Seal as an engine does, until standard input ends."""
    async with open_store(url, connections=2) as store:
        parts: Any = SimpleNamespace(store=store, telemetry=Telemetry(), salt=lambda: os.urandom(16), now=time.time)
        stopping = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(Sealer(cast(EngineContext, parts), ()).run(stopping))
            await asyncio.to_thread(sys.stdin.read)
            stopping.set()


@contextmanager
def sealing(url: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that seals."""
    command = [sys.executable, "-m", "tests.bench.sealing", "--seal", url]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            if process.poll() is None and process.stdin is not None:
                process.stdin.close()
                process.wait(30)


async def seal_runs(store: SqlStore, patience: float = 60.0) -> float:
    """Wait until everything is sealed. Returns the seconds."""
    began = time.perf_counter()
    await until(lambda: _nothing_waits(store), within=patience)
    return time.perf_counter() - began


async def _nothing_waits(store: SqlStore) -> bool:
    return not (await store.log.state()).waiting


async def fetch_count(store: SqlStore, query: str) -> int:
    number: int = await store._read(lambda conn: conn.execute(text(query)).scalar_one())
    return number


async def lags(store: SqlStore, until: asyncio.Event) -> list[float]:
    """Return the lag, at every look."""
    all_lags = []
    while not until.is_set():
        all_lags.append((await store.log.state()).lag)
        await asyncio.sleep(LOOK_SECONDS)
    return all_lags


async def measure(url: str, options: argparse.Namespace) -> bool:
    async with open_store(url, connections=12) as store:
        with sealing(url) as process:
            await flood(store, "warm", 2.0, options.rate)
            await seal_runs(store)
            over = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                looking = group.create_task(lags(store, over))
                began, before = time.perf_counter(), cpu_of(process.pid)
                events = await flood(store, "run", options.seconds, options.rate)
                seconds = time.perf_counter() - began
                tail = await seal_runs(store)
                used = cpu_of(process.pid) - before
                over.set()
            worst = max(looking.result())
        rate = events / seconds
        print(f"written {rate:,.0f} events/s for {seconds:.1f} s, the last sealed {tail:.2f} s after its commit")
        print(f"lag: at most {worst:.2f} s; the sealer used {used / events * 1e6:.0f} us of CPU an event")
        for limits in (log_writer.IN_LOOP, log_writer.BETWEEN_AWAITS) * ROUNDS:
            await measure_backlog(store, options.backlog // ROUNDS // 2, limits)
        missed, twice = await fetch_count(store, UNSEALED), await fetch_count(store, TWICE)
        events = await fetch_count(store, "SELECT count(*) FROM events")
        print(f"{events:,} events; missed runs {missed}, sealed twice {twice}")
        return rate >= WANTED and worst <= LAG_SECONDS and not missed and not twice


async def measure_backlog(store: SqlStore, events: int, limits: log_writer.PassLimits) -> None:
    """Write events while nobody seals, and seal them in passes of this size."""
    await write_backlog(store, events)
    with patch.object(log_writer, "BETWEEN_AWAITS", limits):
        began, cpu = time.perf_counter(), time.process_time()
        sealed_now = await seal_all(store) * EVENTS
        rate, of_cpu = sealed_now / (time.perf_counter() - began), sealed_now / (time.process_time() - cpu)
    print(
        f"backlog, {limits.events:,} events a pass: {rate:,.0f} events/s ({of_cpu:,.0f}/s of CPU), nothing is written"
    )


async def write_backlog(store: SqlStore, events: int) -> None:
    beginning = f"old_{time.time_ns()}"
    runs = [f"{beginning}_{number:07d}" for number in range(events // EVENTS)]
    for start in range(0, len(runs), 64):
        await write(store, runs[start : start + 64])


def cpu_of(pid: int) -> float:
    """Return the seconds of CPU of a process so far."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(description="How fast the transparency log follows a busy journal on Postgres.")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=5_500.0)
    parser.add_argument("--backlog", type=int, default=50_000)
    parser.add_argument("--seal", metavar="URL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.seal:
        asyncio.run(seal_until_input_ends(options.seal))
        return 0
    with servers.postgres(fsync=True) as server:
        migrate(server.url)
        return 0 if asyncio.run(measure(server.url, options)) else 1


if __name__ == "__main__":
    sys.exit(main())
