"""Processes that seal are killed while others write and while slow transactions are open: nothing is missed or sealed
twice."""

import asyncio
import signal
import subprocess
import sys
from contextlib import AsyncExitStack
from random import Random

import pytest
from sqlalchemy import text

from app.store.sql import SqlStore, open_store
from app.store.sqlkit.migrate import migrate
from tests.bench.sealing import TWICE, UNSEALED, fetch_count, flood, seal_all
from tests.harness import servers

pytestmark = pytest.mark.timeout(300)
SECONDS, RATE, KILLS = 12.0, 1_500.0, 8
SLOW = 5
UNSEALED_POOLS = """
SELECT count(*) FROM catalogs WHERE NOT EXISTS
(SELECT 1 FROM log_leaves WHERE log_leaves.kind = 'catalog' AND log_leaves.id = catalogs.digest)
"""


async def hold_open(store: SqlStore, number: int, seconds: float) -> None:
    """A transaction that writes at once and commits late."""
    async with store._runner._writing.connect() as conn:  # type: ignore[attr-defined]
        await conn.execute(
            text("INSERT INTO catalogs (digest, body) VALUES (:digest, '')"), {"digest": f"slow{number}"}
        )
        await asyncio.sleep(seconds)
        await conn.commit()


def sealer(url: str) -> subprocess.Popen[bytes]:
    """Return a process that seals."""
    command = [sys.executable, "-m", "tests.bench.sealing", "--seal", url]
    return subprocess.Popen(command, stdin=subprocess.PIPE)


async def keep_killing(url: str, chance: Random) -> None:
    """Start two processes that seal, and kill one of them with SIGKILL, again and again."""
    for _ in range(KILLS):
        running = [sealer(url), sealer(url)]
        lifetime_seconds = SECONDS / KILLS + chance.random()
        await asyncio.sleep(lifetime_seconds)
        for process in running:
            process.send_signal(signal.SIGKILL)
            process.communicate()


async def play(url: str) -> tuple[int, int, int, int]:
    """Returns the events that were written, and what is missing, sealed twice, or of a slow transaction and missing."""
    chance = Random(19)
    async with AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(open_store(url, connections=5)) for _ in range(2)]
        slow = await stack.enter_async_context(open_store(url, connections=SLOW + 1))
        async with asyncio.TaskGroup() as group:
            group.create_task(keep_killing(url, chance))
            floods = []
            for number, store in enumerate(stores):
                floods.append(group.create_task(flood(store, f"run{number}", SECONDS, RATE / 2)))
            for number in range(SLOW):
                group.create_task(hold_open(slow, number, 1.0 + number * 2.0))
        store = stores[0]
        await seal_all(store)
        written = sum(task.result() for task in floods)
        missing, twice = await fetch_count(store, UNSEALED), await fetch_count(store, TWICE)
        return written, missing, twice, await fetch_count(store, UNSEALED_POOLS)


def test_nothing_is_missed_when_what_seals_is_killed() -> None:
    with servers.postgres(fsync=True) as server:
        migrate(server.url)
        written, missing, twice, pools = asyncio.run(play(server.url))
    assert written > SECONDS * RATE / 2
    assert (missing, twice, pools) == (0, 0, 0)
