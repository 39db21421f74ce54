"""Many runs and streams at once, for minutes; then more than fits.

    load       RUNS runs of three steps at a time, with STREAMS slow streams, for SECONDS; they arrive one after the
               other, as fast as they end, since a thousand that begin in one moment would end in one, too. The runs
               that count begin when all streams are open, and end before the first stream does. How long a worker takes
               for a step (STEP) says how many steps there are a second
    overload   open loop: three times the runs that the service is set to hold, each a step of half a second

`python -m tests.bench.soak [--setup embedded|distributed]` prints one table. A step's own overhead is the caller's wall
time less what the workers took, divided by the steps; the disk is not in it (`--fsync` shows what it adds). Growth is
the slope of the memory meanwhile; what is pending is counted after the last answer. On two cores one process that does
it all is given twice the steps a second that a gateway and a dispatcher are, who share them with Postgres and Redis.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import asyncpg
import psutil
from msgspec import Struct
from redis import Redis

from tests.harness import servers

from .load import Load, run
from .processes import upstream
from .subject import Target, baton, body, one_step, step
from .table import Row, render_table

STEPS = 3
LONGEST = 120.0
"""Seconds that the slowest answer may be under way when the last request has been sent."""
OPENING = 40.0
"""Seconds in which the streams are opened, and the runs come to their number; more where their steps are long."""
HELD_RUNS, HELD_SECONDS, TIMES = 100, 0.5, 3
LOOK_EVERY = 2.0


@dataclass(slots=True)
class Watch:
    """Samples of the processes over time."""

    at: list[float] = field(default_factory=list)
    mebibytes: list[float] = field(default_factory=list)
    files: list[int] = field(default_factory=list)

    def look(self, target: Target, at: float) -> None:
        """One sample, summed over the processes."""
        self.at.append(at)
        self.mebibytes.append(sum(process.rss_bytes() for process in target.processes) / 2**20)
        self.files.append(sum(psutil.Process(process.pid).num_fds() for process in target.processes))

    def slope(self, since: float, until: float) -> float:
        """MiB per minute between these moments."""
        rows = [row for row in zip(self.at, self.mebibytes, strict=True) if since <= row[0] <= until]
        return statistics.linear_regression([at for at, _ in rows], [size for _, size in rows]).slope * 60


class Runtime(Struct, frozen=True):
    """The processes that run, and the addresses of their outbox and queue."""

    target: Target
    database: str | None
    queue: str | None

    def pending(self) -> int:
        """Tickets in the outbox, and deliveries that nobody has acknowledged."""
        tickets = asyncio.run(_tickets(self.database)) if self.database else 0
        return tickets + (_unacknowledged(self.queue) if self.queue else 0)


async def _tickets(url: str) -> int:
    conn = await asyncpg.connect(url)
    try:
        return int(await conn.fetchval("SELECT count(*) FROM tickets"))
    finally:
        await conn.close()


def _unacknowledged(url: str) -> int:
    with Redis.from_url(url) as client:
        streams = [key for key in client.scan_iter() if client.type(key) == b"stream"]
        return sum(group["pending"] for key in streams for group in client.xinfo_groups(key))


@contextmanager
def _service(setup: str, *, fsync: bool, **environ: str) -> Iterator[Runtime]:
    with ExitStack() as stack:
        workers = stack.enter_context(upstream())
        database = queue = None
        roles: tuple[str, ...] = ("serve",)
        if setup == "distributed":
            database = stack.enter_context(servers.postgres(fsync=fsync)).url
            queue, roles = stack.enter_context(servers.redis()).url, ("gateway", "dispatcher")
        target = stack.enter_context(
            baton(workers.url, name=setup, roles=roles, database=database, redis=queue, more=environ)
        )
        yield Runtime(target, database, queue)


def _chain(worker: str) -> str:
    return body(*(step(worker, "user", *([n - 1] if n else [])) for n in range(STEPS)))


def _load(runtime: Runtime, runs: int, streams: int, seconds: float, each: int) -> list[Row]:
    target, opening = runtime.target, max(OPENING, STEPS * each + 2.0)
    chains = Load(
        url=target.address(f"{each}s"),
        body=_chain(f"{each}s"),
        connections=runs + runs // 10,
        seconds=seconds,
        warmup=opening,
        rate=runs / (STEPS * each),
        patience=LONGEST,
        headers=target.headers,
    )
    drips = Load(
        url=target.address("drip"),
        body=one_step("drip", stream=True),
        connections=streams,
        requests=streams,
        seconds=opening + seconds,
        rate=streams / opening,
        patience=LONGEST,
        headers=target.headers,
    )
    watch, began = Watch(), time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        reports = [pool.submit(run, load) for load in (chains, drips)]
        while not all(report.done() for report in reports):
            time.sleep(LOOK_EVERY)
            watch.look(target, time.monotonic() - began)
    finished, dripped = (report.result() for report in reports)
    per_step = {rank: ms / STEPS - each * 1000 for rank, ms in finished.latency_ms.items()}
    time.sleep(LOOK_EVERY)
    return [
        Row("runs of three steps ended", None, "", finished.requests),
        Row("own overhead a step, p50", None, "ms", per_step.get("p50")),
        Row("own overhead a step, p99", 75, "ms", per_step.get("p99")),
        Row("streams ended", streams, "", dripped.requests, better="higher"),
        Row("answers that failed", 0, "", finished.errors + dripped.errors, finished.first_error[:60]),
        Row("memory, at its most", None, "MiB", max(watch.mebibytes)),
        Row("memory, slope with all open", 6, "MiB/min", watch.slope(opening, opening + seconds)),
        Row("files open, at most", None, "", max(watch.files)),
        Row("pending after the last answer", 0, "", runtime.pending()),
    ]


def _overload(runtime: Runtime, seconds: float) -> list[Row]:
    """Goodput when just full, and at three times that; how long a refusal takes."""
    capacity = HELD_RUNS / HELD_SECONDS
    full = run(_paced(runtime.target, capacity * 0.95, seconds))
    over = run(_paced(runtime.target, capacity * TIMES, seconds))
    after = run(_paced(runtime.target, capacity * 0.5, 3.0))
    refused = sum(count for status, count in over.statuses.items() if status in ("429", "503"))
    strange = over.errors - refused
    return [
        Row("goodput when nearly full", None, "/s", full.requests_per_s),
        Row(
            f"goodput at {TIMES} x capacity, of that",
            90,
            "%",
            100 * over.requests_per_s / full.requests_per_s,
            better="higher",
        ),
        Row("refusals", None, "", refused),
        Row("refusal, p99", 50, "ms", over.refused_ms.get("p99")),
        Row("answers neither good nor refused", 0, "", strange, over.first_error[:60] if strange else ""),
        Row("failures right afterwards", 0, "", after.errors),
    ]


def _paced(target: Target, rate: float, seconds: float) -> Load:
    return Load(
        url=target.address("half"),
        body=one_step("half"),
        connections=int(rate * HELD_SECONDS * 4),
        seconds=seconds,
        rate=rate,
        headers=target.headers,
    )


def main() -> None:
    """The command line; exits with 1 when a budget is missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.soak", description=__doc__)
    parser.add_argument("--setup", choices=("embedded", "distributed"), default="distributed")
    parser.add_argument("--part", choices=("load", "overload"), action="append", help="only this one")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--step", type=int, choices=(10, 20, 30), help="seconds that a worker takes")
    parser.add_argument("--fsync", action="store_true", help="let Postgres wait for the disk")
    chosen = parser.parse_args()
    each = chosen.step or (10 if chosen.setup == "embedded" else 20)
    size = f"{chosen.runs} runs, their steps of {each} s, and {chosen.streams} streams for {chosen.seconds:g} s"
    print(f"{chosen.setup}: {size}; load of the machine {os.getloadavg()[0]:.1f}")
    rows: list[Row] = []
    if "load" in (chosen.part or ("load",)):
        with _service(chosen.setup, fsync=chosen.fsync) as runtime:
            rows += _load(runtime, chosen.runs, chosen.streams, chosen.seconds, each)
    if "overload" in (chosen.part or ("overload",)):
        with _service(chosen.setup, fsync=chosen.fsync, BATON_CONCURRENT_RUNS=str(HELD_RUNS)) as runtime:
            rows += _overload(runtime, min(chosen.seconds, 20.0))
    print(render_table(rows))
    raise SystemExit(any(row.verdict == "MISSED" for row in rows))


if __name__ == "__main__":
    main()
