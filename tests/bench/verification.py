"""Measure how fast `baton audit verify` is: `python -m tests.bench.verification --runs 3000 [--postgres]`.

Has the real service carry out one run: a chain of three steps that a model planned, with 21 events, four calls and
eight texts. Copies of all of its rows are stored and sealed, and the database is verified as the command does, without
and with texts. The database is an SQLite file, or a Postgres that is started for it.

The rate is that of one process, also by the CPU that it used. Postgres uses another process, whose CPU is named.
"""

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, create_engine, insert, select, text

from app.audit.log.findings import Verification
from app.audit.log.rows import check_database
from app.audit.log.verify import LogCheck
from app.core.transparency.notes import Signer
from app.store.archive import open_archive
from app.store.sealed_rows import SealedRows, in_one_snapshot
from app.store.sql import SqlStore, open_store
from app.store.sqlkit.migrate import migrate
from app.store.sqlkit.tables import METADATA
from tests.audit.scenes import conducted
from tests.harness import servers
from tests.harness.in_process import pool_text, running_service
from tests.stubs import ProviderStub

SIGNER = Signer("log.example/baton", bytes(range(32)))
CHUNK = 500
OF_RUNS = {"runs": "id"} | dict.fromkeys(("events", "disclosures", "tags", "contents", "shared_contents"), "run")
"""The tables with rows of a run, and the column that names the run."""
OTHERS = ("texts", "catalogs")
Rows = Mapping[str, Sequence[Mapping[str, Any]]]
"""Rows by their table."""


async def record_rows(folder: Path) -> Rows:
    """Return all rows that the real service stores of one run."""
    async with ProviderStub() as stub, running_service(folder, pool_text(stub)) as runtime:
        run = await conducted(stub, runtime)
        url = runtime.pool.configuration.settings.database_url
    engine = create_engine(url)
    rows_by_table = {}
    with engine.connect() as conn:
        for name in (*OF_RUNS, *OTHERS):
            table = METADATA.tables[name]
            query = select(table)
            if name in OF_RUNS:
                query = query.where(table.c[OF_RUNS[name]] == run)
            rows_by_table[name] = [dict(row) for row in conn.execute(query).mappings()]
    engine.dispose()
    return rows_by_table


def store_rows(conn: Connection, rows: Rows, names: Sequence[str], runs: Sequence[str]) -> None:
    """Store the rows of these tables, for each of these runs."""
    for name in names:
        rows_of_runs = [{**row, OF_RUNS[name]: run} if name in OF_RUNS else row for run in runs for row in rows[name]]
        if rows_of_runs:
            conn.execute(insert(METADATA.tables[name]), rows_of_runs)


async def fill(store: SqlStore, rows: Rows, runs: int) -> None:
    """Store so many copies of the run."""
    await store._write(partial(store_rows, rows=rows, names=OTHERS, runs=[""]))
    for first in range(0, runs, CHUNK):
        names = [f"run_{number:09d}" for number in range(first, min(first + CHUNK, runs))]
        await store._write(partial(store_rows, rows=rows, names=list(OF_RUNS), runs=names))


async def fill_and_seal(url: str, rows: Rows, runs: int) -> float:
    """Store and seal the runs. Returns the events that were sealed in a second."""
    async with open_store(url) as store:
        await fill(store, rows, runs)
        began = time.monotonic()
        while (sealing := await store.log.seal([SIGNER], lambda: os.urandom(16))) is not None and sealing.more:
            pass
        return runs * len(rows["events"]) / (time.monotonic() - began)


def verify_database(stored: SealedRows, *, contents: bool) -> Verification:
    """Verify the database."""
    report = Verification()
    check_database(LogCheck(report), stored, contents=contents, settled=True)
    return report


def measure(stored: SealedRows) -> None:
    """Verify without and with texts, and print how fast it was."""
    for contents in (False, True):
        began, cpu, theirs = time.monotonic(), time.process_time(), server_cpu(stored)
        report = verify_database(stored, contents=contents)
        wall, used = time.monotonic() - began, time.process_time() - cpu
        assert report.is_clean, report.first
        words = f"with {report.contents:,} texts" if contents else "without texts"
        rates = f"{report.events / wall:,.0f}/s ({report.events / used:,.0f}/s of CPU)"
        print(f"{report.events:,} events {words}: {rates}, and {server_cpu(stored) - theirs:.2f} s of CPU in Postgres")


def server_cpu(stored: SealedRows) -> float:
    """Return the seconds of CPU that the process of Postgres behind this connection has used; 0 on SQLite."""
    conn = stored._conn
    if conn.dialect.name != "postgresql":
        return 0.0
    process = conn.execute(text("SELECT pg_backend_pid()")).scalar_one()
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def fill_and_measure(url: str, runs: int) -> None:
    """Make the runs, seal them, and verify them."""
    with tempfile.TemporaryDirectory() as folder:
        rows = await record_rows(Path(folder))
    print(f"sealed at {await fill_and_seal(url, rows, runs):,.0f} events/s")
    async with open_archive(url) as archive:
        await in_one_snapshot(archive, measure)


@contextmanager
def database(*, postgres: bool) -> Iterator[str]:
    """A database of the kind that is asked for."""
    if postgres:
        with servers.postgres() as server:
            migrate(server.url)
            yield server.url
        return
    with tempfile.TemporaryDirectory() as name:
        yield f"sqlite:///{Path(name) / 'baton.db'}"


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3_000)
    parser.add_argument("--postgres", action="store_true", help="on Postgres instead of SQLite")
    options = parser.parse_args()
    with database(postgres=options.postgres) as url:
        asyncio.run(fill_and_measure(url, options.runs))


if __name__ == "__main__":
    main()
