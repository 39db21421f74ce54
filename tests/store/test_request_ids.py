"""A run is looked up by the id of its request in both databases, however many runs there are."""

from pathlib import Path
from typing import Any

import asyncpg
import pytest
from sqlalchemy import Connection, Engine, event

from app.store.protocol import REQUEST_TAG, RunQuery
from app.store.sql import open_store
from tests.conformance.entries import admitted

QUERIES = (RunQuery(request_id="r-7", tenant="tenant"), RunQuery(request_id="r-7"))
CROWD = 5_000


def explained(sent: list[tuple[str, Any]], conn: Connection) -> str:
    return "\n".join(
        str(row) for text, values in sent for row in conn.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}", values)
    )


async def test_sqlite_reads_no_other_run(tmp_path: Path) -> None:
    sent: list[tuple[str, Any]] = []

    def noted(_conn: object, _cursor: object, text: str, values: Any, *_: object) -> None:
        sent.append((text, values))

    event.listen(Engine, "before_cursor_execute", noted)
    try:
        async with open_store(f"sqlite:///{tmp_path / 'baton.db'}") as store:
            sent.clear()
            for query in QUERIES:
                await store.runs(query)
            found = await store._read(lambda conn: explained(sent[:], conn))
    finally:
        event.remove(Engine, "before_cursor_execute", noted)
    assert found.count("SEARCH runs USING PRIMARY KEY") == len(QUERIES), found


@pytest.mark.integration
async def test_postgres_reads_no_other_run(migrated_postgres_url: str) -> None:
    async with open_store(migrated_postgres_url) as store:
        await store.append(admitted("model"))
    conn = await asyncpg.connect(migrated_postgres_url)
    try:
        names = [
            row[0]
            for row in await conn.fetch(
                "SELECT column_name FROM information_schema.columns WHERE table_name = 'runs' ORDER BY ordinal_position"
            )
        ]
        values = ["'run-' || n" if name == "id" else f'"{name}"' for name in names]
        columns = ", ".join(f'"{name}"' for name in names)
        await conn.execute(
            f"INSERT INTO runs ({columns}) SELECT {', '.join(values)} FROM runs, generate_series(1, {CROWD}) AS n"
        )
        await conn.execute(
            f"INSERT INTO tags SELECT '{REQUEST_TAG}', 'r-' || n, 'run-' || n FROM generate_series(1, {CROWD}) AS n"
        )
        await conn.execute("ANALYZE")
        before = await _read(conn)
        async with open_store(migrated_postgres_url) as store:
            assert [[row.id for row in await store.runs(query)] for query in QUERIES] == [["run-7"], ["run-7"]]
        after = await _read(conn)
    finally:
        await conn.close()
    assert after - before < 100


async def _read(conn: asyncpg.Connection) -> int:
    """Rows and index entries of runs and tags that were read so far; those of a connection count once it is closed."""
    await conn.execute("SELECT pg_stat_force_next_flush()")
    found: int = await conn.fetchval(
        "SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0)) FROM pg_stat_user_tables "
        "WHERE relname IN ('runs', 'tags')"
    )
    return found
