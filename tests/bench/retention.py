"""Reading and pruning a journal that has grown for months.

`python -m tests.bench.retention [--events 1000000] [--database postgres|sqlite] [--archive] [--months 0]` has a service
carry out a few runs of every kind, copies them inside the database until a month that is over has that many events, and
the month that goes on a tenth of it, and prints the sizes, how long lists and single runs take, how long `baton runs
prune` takes for the whole month, and how long a writer of other runs waits meanwhile. With `--months` as many runs come
again and are pruned, so many times, and it prints the sizes of each time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import asyncpg

from app.__main__ import main as main_of_baton
from app.gateway.runs.audit import render_run, summary
from app.store.protocol import RunQuery
from app.store.sql import SqlStore, open_store
from app.store.sqlkit.migrate import migrate
from app.store.sqlkit.tables import (
    CONTENTS,
    DISCLOSURES,
    EVENTS,
    METADATA,
    NOTICES,
    RUNS,
    SHARED_CONTENTS,
    TAGS,
)
from tests.bench.erasure import fill
from tests.conformance.entries import admission_entry
from tests.harness import processes, servers
from tests.harness.in_process import pool_text, running_service
from tests.harness.sealing import seal_all
from tests.stubs import Echo, ProviderStub

MODELS = 20
"""Runs that are carried out; all others are copies of them."""
DAY_SECONDS = 86_400.0
RECENT = 0.1
"""Share of further events that are too young to be pruned."""
COPIED = (RUNS, EVENTS, CONTENTS, SHARED_CONTENTS, TAGS, NOTICES, DISCLOSURES)
TIMES = frozenset({"created_at", "deadline", "ended_at", "at"})
READS = 30
WRITE_PAUSE_SECONDS = 0.02
QUIET_SECONDS = 5.0
"""Time in which the writer is measured alone."""

Copy = tuple[str, str, float]
"""A run, the id of a copy of it, and the seconds by which the copy is younger."""


class Database(Protocol):
    """A database that can be filled and measured."""

    url: str

    async def copy(self, copies: Sequence[Copy]) -> None:
        """Free the room of what was deleted, insert copies of runs, and have the planner know of them."""
        ...

    async def sizes(self) -> Mapping[str, int]:
        """Return the bytes of its tables, indexes included, or of its file."""
        ...

    async def written(self) -> int:
        """Return the bytes of write-ahead log so far; 0 where that is not known."""
        ...


def statements(replaced: str) -> Iterator[str]:
    """The statements that copy all rows of the runs in the table `copies`. `replaced` is SQL that puts a copy's id into
    the body of an event."""
    for table in COPIED:
        columns = [f'"{column.name}"' for column in table.columns]
        values = []
        for column in table.columns:
            own = f'old."{column.name}"'
            if column.name in ("run", "id"):
                own = "copies.new"
            elif table is EVENTS and column.name == "body":
                own = replaced
            elif column.name in TIMES:
                own = f"{own} + copies.shift"
            values.append(own)
        key = "id" if table is RUNS else "run"
        joined = f'"{table.name}" AS old JOIN copies ON copies.old = old."{key}"'
        yield f'INSERT INTO "{table.name}" ({", ".join(columns)}) SELECT {", ".join(values)} FROM {joined}'


class InPostgres:
    """A server of its own, with fsync on."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def copy(self, copies: Sequence[Copy]) -> None:
        """Implements `Database`."""
        async with self._connect() as connection:
            await connection.execute("VACUUM")  # autovacuum does so in a service
            await connection.execute("CREATE TABLE copies (old text, new text, shift double precision)")
            await connection.copy_records_to_table("copies", records=copies)
            await connection.execute("ANALYZE copies")
            replaced = "convert_to(replace(convert_from(old.body, 'UTF8'), copies.old, copies.new), 'UTF8')"
            for statement in statements(replaced):
                await connection.execute(statement)
            await connection.execute("DROP TABLE copies")
            await connection.execute("VACUUM ANALYZE")
            await connection.execute("CHECKPOINT")

    async def sizes(self) -> Mapping[str, int]:
        """Implements `Database`."""
        async with self._connect() as connection:
            sizes_by_table = {}
            for table in METADATA.tables:
                sizes_by_table[table] = await connection.fetchval("SELECT pg_total_relation_size($1::regclass)", table)
        return sizes_by_table

    async def written(self) -> int:
        """Implements `Database`."""
        async with self._connect() as connection:
            return int(await connection.fetchval("SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')"))

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[Any]:
        connection = await asyncpg.connect(self.url)
        try:
            yield connection
        finally:
            await connection.close()


class InSqlite:
    """A file."""

    def __init__(self, file: Path) -> None:
        self.url = f"sqlite:///{file}"
        self._file = file

    async def copy(self, copies: Sequence[Copy]) -> None:
        """Implements `Database`."""
        connection = sqlite3.connect(self._file)
        connection.execute("CREATE TEMP TABLE copies (old TEXT, new TEXT, shift REAL)")
        connection.executemany("INSERT INTO copies VALUES (?, ?, ?)", copies)
        connection.execute("CREATE INDEX temp.copies_by_old ON copies (old)")
        replaced = "CAST(replace(CAST(old.body AS TEXT), copies.old, copies.new) AS BLOB)"
        for statement in statements(replaced):
            connection.execute(statement)
        connection.commit()
        connection.execute("ANALYZE")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.commit()
        connection.close()

    async def sizes(self) -> Mapping[str, int]:
        """Implements `Database`."""
        files = (self._file, self._file.with_name(f"{self._file.name}-wal"))
        return {path.name: path.stat().st_size for path in files if path.exists()}

    async def written(self) -> int:
        """Implements `Database`."""
        return 0


async def models(folder: Path, url: str) -> None:
    """Carry out the runs that are copied."""
    async with ProviderStub() as stub:
        stub.always("alpha", Echo("alpha", mirror=True))
        async with running_service(folder, pool_text(stub), {"BATON_DATABASE_URL": url}) as runtime:
            await fill(runtime, MODELS)


async def copies_of(store: SqlStore, events: int, now: float) -> list[Copy]:
    """As many copies as have that many events in the month that is over, and a tenth of them in this one."""
    rows = [row for row in await store.runs(RunQuery(limit=MODELS)) if row.ended_at is not None]
    event_count = int(events * (1 + RECENT))
    copies: list[Copy] = []
    event_total = 0
    while event_total < event_count:
        row = rows[len(copies) % len(rows)]
        share = event_total / event_count
        age = (
            61.0 - 29.9 * share / (1 / (1 + RECENT))
            if event_total < events
            else 29.0 * (event_count - event_total) / (event_count - events)
        )
        created = now - age * DAY_SECONDS
        name = f"run_{int(created * 1000):011x}{len(copies):020x}"
        copies.append((row.id, name, created - row.created_at))
        event_total += row.seq
    return copies


def older_than_a_month(copies: Sequence[Copy]) -> int:
    """Return how many of the copies, of which the oldest come first, belong to the month that is over."""
    limit = (time.time() - 30 * DAY_SECONDS) * 1000
    return sum(int(name[4:15], 16) < limit for _, name, _ in copies)


async def time_reads(read_once: Callable[[], Awaitable[object]]) -> str:
    """Return the median and the longest of some calls, in milliseconds."""
    durations = []
    for _ in range(READS):
        began = time.perf_counter()
        await read_once()
        durations.append((time.perf_counter() - began) * 1000)
    return f"median {statistics.median(durations):6.1f} ms, longest {max(durations):6.1f} ms"


async def read_lists(store: SqlStore, names: Sequence[str]) -> None:
    """Print how long it takes to read lists and single runs."""

    async def list_runs(query: RunQuery) -> None:
        [summary(row) for row in await store.runs(query)]

    async def show_run(name: str) -> None:
        row, journal = await store.run(name), await store.journal(name)
        render_run(row, journal, await store.feedback(name))

    tenant = (await store.run(names[0])).tenant
    lists = {
        "newest 20": RunQuery(limit=20),
        "newest 20 of a tenant": RunQuery(tenant=tenant, limit=20),
        "failed": RunQuery(state="failed", limit=20),
        "of a worker": RunQuery(tags=(("worker", "alpha"),), limit=20),
        "a page in the middle": RunQuery(before=(time.time() - 40 * DAY_SECONDS, ""), limit=20),
        "with a label that none has": RunQuery(tags=(("label", "none"),), limit=20),
    }
    for words, query in lists.items():
        print(f"list, {words:<27} {await time_reads(lambda query=query: list_runs(query))}")  # type: ignore[misc]
    place = iter(names)
    print(f"show, any run                     {await time_reads(lambda: show_run(next(place)))}")


def read_by_command(environ: Mapping[str, str], name: str) -> None:
    """Print how long the commands take in a process that has imported them."""
    for words in (("runs", "ls"), ("runs", "show", name), ("runs", "show", name[:-2])):
        durations = []
        for _ in range(3):
            began = time.perf_counter()
            with silence_output():
                status = main_of_baton(words, environ)
            durations.append((time.perf_counter() - began) * 1000)
        prefix = " of a prefix" if words[-1] == name[:-2] else ""
        print(f"baton {' '.join(words[:2])}{prefix}, in this process: {min(durations):.0f} ms, status {status}")


@contextmanager
def silence_output() -> Iterator[None]:
    """Send what is printed nowhere."""
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w") as nowhere:
        sys.stdout = sys.stderr = nowhere
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before


async def write_until(store: SqlStore, over: asyncio.Event) -> list[float]:
    """Admit runs one after the other, and return how long each took, in milliseconds."""
    durations = []
    while not over.is_set():
        at = time.time()
        entry = admission_entry(f"run_{int(at * 1000):011x}{len(durations):020x}", at)
        began = time.perf_counter()
        await store.append(entry)
        durations.append((time.perf_counter() - began) * 1000)
        with suppress(TimeoutError):
            async with asyncio.timeout(WRITE_PAUSE_SECONDS):
                await over.wait()
    return durations


def slowest(durations: Sequence[float]) -> str:
    """Return the median, a high percentile and the longest of some durations."""
    ordered = sorted(durations)
    high = ordered[int(len(ordered) * 0.99)]
    middle = statistics.median(durations)
    return f"median {middle:.1f} ms, 99 % {high:.1f} ms, longest {ordered[-1]:.1f} ms ({len(durations)} writes)"


async def prune(store: SqlStore, environ: Mapping[str, str]) -> None:
    """Print how long `baton runs prune` takes, in a process of its own, and how long another writer waits meanwhile."""
    over = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        alone = group.create_task(write_until(store, over))
        await asyncio.sleep(QUIET_SECONDS)
        over.set()
    print(f"a writer alone: {slowest(alone.result())}")
    over = asyncio.Event()
    command = (sys.executable, "-m", "app", "runs", "prune", "--before", "30d")
    began, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    async with asyncio.TaskGroup() as group:
        meanwhile = group.create_task(write_until(store, over))
        process = await asyncio.create_subprocess_exec(
            *command, env=dict(environ), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, err = await process.communicate()
        over.set()
    seconds = time.perf_counter() - began
    assert process.returncode == 0, err.decode()
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    load = f"{cpu:.1f} s of CPU in the command, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    print(f"baton runs prune: {seconds:.1f} s ({load}); it says: {out.decode().splitlines()[0]}")
    print(f"a writer meanwhile: {slowest(meanwhile.result())}")


def megabytes(sizes: Mapping[str, int]) -> str:
    """Sizes in words, the largest first."""
    large = sorted(sizes.items(), key=lambda size: -size[1])
    parts = ", ".join(f"{name} {size / 1e6:,.1f}" for name, size in large if size > 1e5)
    return f"{sum(sizes.values()) / 1e6:,.1f} MB ({parts})"


async def measure(database: Database, folder: Path, events: int, *, archive: bool, months: int) -> None:
    """Fill a database, and print all figures."""
    await models(folder, database.url)
    archived = folder / "archive"
    environ = processes.environment(folder, BATON_DATABASE_URL=database.url, BATON_PEPPER="p" * 32)
    if archive:
        environ |= {"BATON_ARCHIVE": str(archived)}
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(open_store(database.url))
        copies = await copies_of(store, events, time.time())
        began = time.perf_counter()
        await database.copy(copies)
        seconds = time.perf_counter() - began
        print(f"{len(copies):,} runs with {events * (1 + RECENT):,.0f} events copied in {seconds:.0f} s")
        before = await database.sizes()
        print(f"size: {megabytes(before)}; {sum(before.values()) / len(copies):,.0f} bytes a run")
        names = [name for _, name, _ in copies]
        await read_lists(store, names[:: len(names) // READS][: READS + 1])
        await asyncio.to_thread(read_by_command, environ, names[len(names) // 2])
        await seal_all(store)
        log = await database.written()
        await prune(store, environ)
        print(f"write-ahead log of that: {(await database.written() - log) / 1e6:,.0f} MB")
        print(f"size afterwards: {megabytes(await database.sizes())}")
        pruned = copies[: older_than_a_month(copies)]
        for month in range(1, months + 1):
            await database.copy([(old, f"{name[:15]}{month:02x}{name[17:]}", shift) for old, name, shift in pruned])
            await seal_all(store)
            full = await database.sizes()
            await asyncio.to_thread(main_of_baton, ("runs", "prune", "--before", "30d"), environ)
            print(f"size with month {month} after the first: {megabytes(full)}")
    if archive:
        files = [path for path in archived.rglob("*.gz")]
        size = sum(path.stat().st_size for path in files)
        print(f"archive: {size / 1e6:,.1f} MB in {len(files)} files, {size / events:,.0f} bytes an event")


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.retention", description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--database", choices=("postgres", "sqlite"), default="postgres")
    parser.add_argument("--archive", action="store_true", help="archive in a folder before pruning")
    parser.add_argument("--months", type=int, default=0, help="further months of as many runs, each of them pruned")
    options = parser.parse_args()
    how = {"archive": options.archive, "months": options.months}
    with tempfile.TemporaryDirectory(prefix="baton-retention-") as name:
        folder = Path(name)
        if options.database == "sqlite":
            (folder / "data").mkdir()
            database: Database = InSqlite(folder / "data" / "baton.db")
            migrate(database.url)
            asyncio.run(measure(database, folder, options.events, **how))
            return
        with servers.postgres(fsync=True) as server:
            migrate(server.url)
            asyncio.run(measure(InPostgres(server.url), folder, options.events, **how))


if __name__ == "__main__":
    main()
