"""`python -m tests.bench.scaleout`: how far engines scale out over one Postgres, from 2 to 1,000 of them.

Two halves are put together:

* **Measured**, with real processes over a real Postgres with fsync and a real Redis: the CPU time of Postgres, of the
  gateway and of the engine for one run, the bytes of write-ahead log for one run, and the CPU time of Postgres for one
  idle engine.
* **Simulated**, because a thousand engines do not fit on this machine: fleets of the product's own engines in virtual
  time, of which the reads and the writing transactions that reach the database are counted. They say how much more an
  engine and a run ask of the database as the fleet grows.

The cost of a run in a fleet of N engines is the measured cost times the simulated growth of its transactions; the cost
of an engine likewise. The database is at its limit where that needs more than `LIMIT` of `--cores` cores.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import asyncpg
import psutil
from msgspec import Struct

from tests.harness import servers
from tests.simulation.fleet import WINDOW_SECONDS, Demand, demand

from .load import Load, run
from .processes import RunningProcess, upstream
from .subject import Target, baton, one_step, one_two_one

FLEETS = (2, 10, 30, 100, 300, 1000)
SIMULATED_RUNS = 100
LIMIT = 0.6
"""Share of the database's cores that may be busy: beyond it, waiting times grow without a bound."""
IDLE_ENGINES = 4
IDLE_SECONDS = 15.0
CONNECTIONS = 64
ROLES = ("gateway", "dispatcher")


class Cost(Struct, frozen=True):
    """The measured cost of one run: milliseconds of CPU time in each part, and bytes of write-ahead log."""

    database_ms: float
    gateway_ms: float
    engine_ms: float
    log_bytes: float


class Row(Struct, frozen=True):
    """A fleet: what it carries, and what it asks of the database. `cores` are the busy cores of the database."""

    engines: int
    runs_per_second: float
    reads_per_second: float
    writes_per_second: float
    cores: float
    log_mb_per_second: float


def database_seconds(server: servers.Server) -> float:
    """User and system time of all processes of a Postgres, ended ones included."""
    spent = 0.0
    parent = psutil.Process(server.pid)
    for process in (parent, *parent.children(recursive=True)):
        times = process.cpu_times()
        spent += times.user + times.system + times.children_user + times.children_system
    return spent


async def _log_position(url: str) -> int:
    connection = await asyncpg.connect(url, timeout=10)
    try:
        written: int = await connection.fetchval("SELECT pg_current_wal_lsn() - '0/0'::pg_lsn")
    finally:
        await connection.close()
    return int(written)


@contextmanager
def service(engines: int) -> Iterator[tuple[Target, servers.Server]]:
    """A gateway and engines over servers of their own."""
    with ExitStack() as stack:
        database = stack.enter_context(servers.postgres(fsync=True))
        queue = stack.enter_context(servers.redis())
        workers = stack.enter_context(upstream())
        roles = (ROLES[0], *[ROLES[1]] * engines)
        target = baton(workers.url, name="scale-out", roles=roles, database=database.url, redis=queue.url)
        yield stack.enter_context(target), database


def run_cost(body: str, worker: str, seconds: float) -> Cost:
    """Measure one run of a kind, over one gateway and one engine at full load."""
    with service(engines=1) as (target, database):
        load = Load(
            url=target.address(worker), body=body, connections=CONNECTIONS, seconds=3.0, headers=dict(target.headers)
        )
        run(load)  # caches and connections are warm from here on
        before, log = spent(target.processes, database), asyncio.run(_log_position(database.url))
        result = run(replace(load, seconds=seconds))
        after, written = spent(target.processes, database), asyncio.run(_log_position(database.url)) - log
    if result.errors or not result.requests:
        raise SystemExit(f"The load failed: {result.first_error or 'no request was answered'}")
    ours, gateway, engine = (1000 * (late - early) / result.requests for early, late in zip(before, after, strict=True))
    return Cost(ours, gateway, engine, written / result.requests)


def spent(processes: Sequence[RunningProcess], database: servers.Server) -> tuple[float, float, float]:
    gateway, engine = processes
    return database_seconds(database), gateway.cpu_seconds(), engine.cpu_seconds()


def idle_cost() -> float:
    """Measure the milliseconds of Postgres' CPU time that an idle engine takes in a second."""
    with service(engines=IDLE_ENGINES) as (_, database):
        time.sleep(IDLE_SECONDS / 3)
        before = database_seconds(database)
        time.sleep(IDLE_SECONDS)
        spent = database_seconds(database) - before
    return 1000 * spent / IDLE_SECONDS / IDLE_ENGINES


def rows(
    fleets: Mapping[int, tuple[Demand, Demand]], cost: Cost, idle_ms: float, runs_per_engine: float
) -> Iterator[Row]:
    """Combine both halves; a fleet has what it asked without and with `SIMULATED_RUNS` runs."""
    smallest = fleets[min(fleets)]
    for engines, (idle, loaded) in fleets.items():
        runs_per_second = engines * runs_per_engine
        growth = _transactions_of_a_run(idle, loaded) / _transactions_of_a_run(*smallest)
        polling = loaded.reads / WINDOW_SECONDS / engines
        polling_growth = polling / (smallest[0].reads / WINDOW_SECONDS / min(fleets))
        busy_ms = runs_per_second * cost.database_ms * growth + engines * idle_ms * polling_growth
        yield Row(
            engines,
            runs_per_second,
            polling * engines,
            runs_per_second * loaded.writes / loaded.runs,
            busy_ms / 1000,
            runs_per_second * cost.log_bytes / 1e6,
        )


def _transactions_of_a_run(idle: Demand, loaded: Demand) -> float:
    return (loaded.writes - idle.writes) / loaded.runs


def _render_table(rows: Sequence[Row], cores: int) -> Iterator[str]:
    yield "| engines | runs/s | reads by polling /s | writing transactions/s | cores of Postgres | log, MB/s | |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        verdict = "beyond the limit" if row.cores > LIMIT * cores else ""
        yield (
            f"| {row.engines} | {row.runs_per_second:,.0f} | {row.reads_per_second:,.0f} "
            f"| {row.writes_per_second:,.0f} | {row.cores:.2f} | {row.log_mb_per_second:.1f} | {verdict} |"
        )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.scaleout", description=__doc__)
    parser.add_argument("--fleets", type=int, nargs="+", default=FLEETS, metavar="N")
    parser.add_argument("--runs-per-engine", type=float, default=5.0, help="runs that an engine ends in a second")
    parser.add_argument("--cores", type=int, default=16, help="cores of the database server")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of the measured load")
    chosen = parser.parse_args()
    idle_ms = idle_cost()
    print(f"one idle engine: {idle_ms:.2f} ms of Postgres' CPU time a second", flush=True)
    idle = {engines: demand(engines, 0) for engines in sorted(chosen.fleets)}
    kinds = {"one step": ("single", one_step("fast"), "fast"), "1-2-1": ("fan_out", one_two_one(), "a")}
    for kind, (tier, body, worker) in kinds.items():
        cost = run_cost(body, worker, chosen.seconds)
        print(
            f"\n{kind}: Postgres {cost.database_ms:.2f} ms, gateway {cost.gateway_ms:.2f} ms, engine "
            f"{cost.engine_ms:.2f} ms of CPU time and {cost.log_bytes / 1000:.1f} kB of log for a run\n",
            flush=True,
        )
        fleets = {engines: (idle[engines], demand(engines, SIMULATED_RUNS, tier)) for engines in idle}
        print(
            *_render_table(list(rows(fleets, cost, idle_ms, chosen.runs_per_engine)), chosen.cores),
            sep="\n",
            flush=True,
        )


if __name__ == "__main__":
    main()
