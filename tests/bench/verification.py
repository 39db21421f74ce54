"""How fast `baton audit verify` is: `python -m tests.bench.verification --runs 10000 [--postgres]`.

Makes runs with twelve events each, seals them, and verifies the database as the command does, without and with texts.
The database is an SQLite file, or a Postgres that is started for it.
"""

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
from sqlalchemy import Connection, insert

from app.audit.log.findings import Verified
from app.audit.log.rows import check_database
from app.audit.log.verify import LogCheck
from app.core.transparency.notes import Signer
from app.store.archive import open_archive
from app.store.sealed_rows import SealedRows, in_one_snapshot
from app.store.sql import open_store
from app.store.sqlkit.migrate import migrate
from app.store.sqlkit.tables import EVENTS, RUNS, TAGS
from tests.harness import servers

SIGNER = Signer("log.example/baton", bytes(range(32)))
EVENTS_PER_RUN = 12
CHUNK = 500
WORDS = orjson.dumps({"worker": "alpha", "n": 1, "ref": "0" * 64, "usage": {"input": 812, "output": 99}, "at": 1.5})
ROW = {
    "tenant": "acme",
    "key": "key",
    "tier": "baton-mini",
    "model": "baton-mini",
    "code": "0.3.0",
    "salt": b"s" * 16,
    "created_at": 1.0,
    "deadline": 2.0,
    "epoch": 1,
    "driver": "",
    "lease_until": 0.0,
    "cap_usd": 1,
    "cap_tokens": 1,
    "seq": EVENTS_PER_RUN,
    "claims": 0,
    "held_usd": 0,
    "held_tokens": 0,
    "spent_usd": 0,
    "spent_tokens": 0,
    "state": "succeeded",
    "degraded": False,
    "steps": 1,
    "ended_at": 2.0,
}


def fill(conn: Connection, first: int, count: int) -> None:
    """Store runs that have ended."""
    names = [f"run_{number:09d}" for number in range(first, first + count)]
    conn.execute(insert(RUNS), [ROW | {"id": name} for name in names])
    events = []
    for name in names:
        events.append({"run": name, "seq": 1, "kind": "run.admitted", "at": 1.0, "body": b'{"labels":["phi"]}'})
        for seq in range(2, EVENTS_PER_RUN + 1):
            kind = "plan.step" if seq == 3 else "call.finished"
            events.append({"run": name, "seq": seq, "kind": kind, "at": 1.0 + seq, "body": WORDS})
    conn.execute(insert(EVENTS), events)
    tags = [{"name": "label", "value": "phi", "run": name} for name in names]
    conn.execute(insert(TAGS), tags + [{"name": "worker", "value": "alpha", "run": name} for name in names])


async def sealed(url: str, runs: int) -> float:
    """Make and seal the runs. Returns the events that were sealed in a second."""
    async with open_store(url) as store:
        for first in range(0, runs, CHUNK):
            await store._write(lambda conn, first=first: fill(conn, first, min(CHUNK, runs - first)))
        began = time.monotonic()
        while (made := await store.log.seal([SIGNER], lambda: os.urandom(16))) is not None and made.more:
            pass
        return runs * EVENTS_PER_RUN / (time.monotonic() - began)


def verified(stored: SealedRows, *, contents: bool) -> Verified:
    """Verify the database."""
    report = Verified()
    check_database(LogCheck(report), stored, contents=contents, settled=True)
    return report


def measure(stored: SealedRows) -> None:
    """Verify without and with texts, and print how fast it was."""
    for contents in (False, True):
        began, cpu = time.monotonic(), time.process_time()
        report = verified(stored, contents=contents)
        wall, used = time.monotonic() - began, time.process_time() - cpu
        assert report.clean, report.first
        words = "with texts" if contents else "without texts"
        rates = f"{report.events / wall:,.0f}/s ({report.events / used:,.0f}/s of CPU)"
        print(f"{report.events:,} events {words}: {rates}")


async def fill_and_measure(url: str, runs: int) -> None:
    """Make the runs, seal them, and verify them."""
    print(f"sealed at {await sealed(url, runs):,.0f} events/s")
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
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--postgres", action="store_true", help="on Postgres instead of SQLite")
    options = parser.parse_args()
    with database(postgres=options.postgres) as url:
        asyncio.run(fill_and_measure(url, options.runs))


if __name__ == "__main__":
    main()
