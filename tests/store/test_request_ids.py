"""Runs are looked up by their request or user, and listed by cost, along an index of either database, however many runs
there are."""

from pathlib import Path
from typing import Any

import asyncpg
import pytest
from sqlalchemy import Connection, Engine, event

from app.store.protocol import REQUEST_TAG, USER_TAG, RunQuery
from app.store.sql import open_store
from tests.conformance.entries import admission_entry

QUERIES = (
    RunQuery(request_id="r-7", tenant="tenant"),
    RunQuery(request_id="r-7"),
    RunQuery(user="r-7", tenant="tenant"),
    RunQuery(user="r-7"),
)
BY_COST = {
    RunQuery(sort="cost", limit=3): "runs_by_cost",
    RunQuery(sort="cost", ascending=True, min_usd=40, before=(42, "run-42"), limit=3): "runs_by_cost",
    RunQuery(sort="cost", tenant="tenant", max_usd=4_990, limit=3): "runs_by_tenant_cost",
    RunQuery(sort="cost", tenant="tenant", before=(4_990, "run-4990"), limit=3): "runs_by_tenant_cost",
}
CROWD = 5_000


def explain(statements: list[tuple[str, Any]], conn: Connection) -> str:
    return "\n".join(
        str(row) for text, values in statements for row in conn.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}", values)
    )


async def test_sqlite_reads_no_other_run(tmp_path: Path) -> None:
    statements: list[tuple[str, Any]] = []

    def note_statement(_conn: object, _cursor: object, text: str, values: Any, *_: object) -> None:
        statements.append((text, values))

    event.listen(Engine, "before_cursor_execute", note_statement)
    try:
        async with open_store(f"sqlite:///{tmp_path / 'baton.db'}") as store:
            statements.clear()
            for query in QUERIES:
                await store.runs(query)
            query_plans = await store._read(lambda conn: explain(statements[:], conn))
            plans = []
            for query in BY_COST:
                statements.clear()
                await store.runs(query)
                plans.append(await store._read(lambda conn: explain(statements[:1], conn)))
            await store.append(admission_entry("run"))
            for work in (store.journaled_runs(RunQuery()), store.erase_contents(["run"])):
                statements.clear()
                await work
                of_tags = [statement for statement in statements if "tags" in statement[0]]
                plans.append(await store._read(lambda conn: explain(of_tags, conn)))  # noqa: B023
    finally:
        event.remove(Engine, "before_cursor_execute", note_statement)
    assert query_plans.count("SEARCH runs USING PRIMARY KEY") == len(QUERIES), query_plans
    for plan, index in zip(plans, (*BY_COST.values(), "tags_of_callers", "tags_of_callers"), strict=True):
        assert f"INDEX {index}'" in plan or f"INDEX {index} (" in plan, plan
        assert "TEMP B-TREE" not in plan, "the rows are sorted"


@pytest.mark.integration
async def test_postgres_reads_no_other_run(migrated_postgres_url: str) -> None:
    async with open_store(migrated_postgres_url) as store:
        await store.append(admission_entry("model"))
    conn = await asyncpg.connect(migrated_postgres_url)
    try:
        names = [
            row[0]
            for row in await conn.fetch(
                "SELECT column_name FROM information_schema.columns WHERE table_name = 'runs' ORDER BY ordinal_position"
            )
        ]
        column_values = {"id": "'run-' || n", "spent_usd": "n", "ended_at": "2.0"}
        values = [column_values.get(name, f'"{name}"') for name in names]
        columns = ", ".join(f'"{name}"' for name in names)
        await conn.execute(
            f"INSERT INTO runs ({columns}) SELECT {', '.join(values)} FROM runs, generate_series(1, {CROWD}) AS n"
        )
        for tag in (REQUEST_TAG, USER_TAG):
            await conn.execute(
                f"INSERT INTO tags SELECT '{tag}', 'r-' || n, 'run-' || n FROM generate_series(1, {CROWD}) AS n"
            )
        await conn.execute("ANALYZE")
        before = await _read(conn)
        async with open_store(migrated_postgres_url) as store:
            for query in QUERIES:
                assert [row.id for row in await store.runs(query)] == ["run-7"], query
            dearest = []
            for query in BY_COST:
                dearest.append([row.spent.usd for row in await store.runs(query)])
            for reader in (store, store.of_tenant("tenant")):
                page = await reader.journaled_runs(RunQuery(ascending=True, since=0.5, limit=3, sort="cost"))
                assert [run.users for run in page] == [("r-1",), ("r-2",), ("r-3",)]
            assert await store.erase_contents(["run-7"]) == 1
            assert dearest == [[5_000, 4_999, 4_998], [43, 44, 45], [4_990, 4_989, 4_988], [4_989, 4_988, 4_987]]
        after = await _read(conn)
    finally:
        await conn.close()
    assert after - before < 100


async def _read(conn: asyncpg.Connection) -> int:
    """Rows and index entries of runs and tags that were read so far; those of a connection count once it is closed."""
    await conn.execute("SELECT pg_stat_force_next_flush()")
    rows_read: int = await conn.fetchval(
        "SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0)) FROM pg_stat_user_tables "
        "WHERE relname IN ('runs', 'tags')"
    )
    return rows_read
