"""SQLite's write-ahead log stays small, whatever is written; and its indexes are used."""

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace
from sqlalchemy import Connection, create_engine

from app.core.contents import content_ref
from app.store.archive import read_accounts
from app.store.protocol import RunQuery
from app.store.rows import budgets, log_sources, runs
from app.store.sealed_rows import SealedRows
from app.store.sql import open_store
from app.store.sqlkit.runner import parse_url
from app.store.sqlkit.sqlite import LOG_BYTES, Sqlite
from tests.conformance.entries import SALT, admission_entry

BODY_BYTES = 2**20


@pytest.mark.long
async def test_the_log_is_copied_into_the_database_at_16_mib(
    tmp_path: Path, make_schema: Callable[[str], None]
) -> None:
    url = f"sqlite:///{tmp_path}/baton.db"
    make_schema(url)
    log = tmp_path / "baton.db-wal"
    largest = 0
    async with open_store(url) as store:
        for number in range(24):
            body = os.urandom(BODY_BYTES)
            entry = replace(admission_entry(f"run-{number}"), contents=((content_ref(SALT, body), body),))
            await store.append(entry)
            largest = max(largest, log.stat().st_size)
    assert LOG_BYTES - 2 * BODY_BYTES < largest < LOG_BYTES + 2 * BODY_BYTES


async def test_what_sqlite_leaves_in_unused_parts_of_pages_is_overwritten_too(tmp_path: Path) -> None:
    """It copies rows when it splits and joins pages, and `secure_delete` overwrites them where they are at the end."""
    draw, word = random.Random(0), b"ann-7c1e55"
    runner = Sqlite(parse_url(f"sqlite:///{tmp_path}/some.db"))

    def count_words_left() -> int:
        return sum(path.read_bytes().count(word) for path in tmp_path.iterdir())

    def fill(conn: Connection) -> None:
        conn.exec_driver_sql("CREATE TABLE some (id INTEGER PRIMARY KEY, body BLOB)")
        for number in draw.sample(range(600), 600):
            body = (word if number % 2 else b"bob") + b"x" * draw.choice((20, 100, 400, 900))
            conn.exec_driver_sql("INSERT INTO some VALUES (?, ?)", (number, body))

    await runner.write(fill)
    for number in draw.sample(range(600), 600):
        if number % 2:
            await runner.write(
                lambda conn, number=number: conn.exec_driver_sql(f"DELETE FROM some WHERE id = {number}")
            )
    assert await runner.empty_log()
    assert count_words_left() > 0
    assert await runner.overwrite_erased()
    assert count_words_left() == 0
    await runner.close()


@contextmanager
def reader_of_plans(url: str) -> Iterator[tuple[Connection, Callable[[Callable[[], object]], str]]]:
    """A connection to a database, and a function that returns the plan of the last statement of what it carries out."""
    statements: list[str] = []
    engine = create_engine(url)

    def plan_of(read: Callable[[], object]) -> str:
        conn.connection.driver_connection.set_trace_callback(statements.append)  # type: ignore[union-attr]
        assert not read()
        conn.connection.driver_connection.set_trace_callback(None)  # type: ignore[union-attr]
        return str(conn.exec_driver_sql(f"EXPLAIN QUERY PLAN {statements[-1]}").all())

    with engine.connect() as conn:
        yield conn, plan_of
    engine.dispose()


def test_runs_that_failed_are_found_by_the_index_of_rare_states(
    tmp_path: Path, make_schema: Callable[[str], None]
) -> None:
    url = f"sqlite:///{tmp_path}/baton.db"
    make_schema(url)
    with reader_of_plans(url) as (conn, plan_of):
        assert "runs_unhappy" in plan_of(lambda: runs.page(conn, RunQuery(state="failed")))


def test_whether_a_run_was_only_planned_is_looked_up_by_the_key_of_its_tag(
    tmp_path: Path, make_schema: Callable[[str], None]
) -> None:
    url = f"sqlite:///{tmp_path}/baton.db"
    make_schema(url)
    with reader_of_plans(url) as (conn, plan_of):
        assert "(name=? AND value=? AND run=?)" in plan_of(lambda: runs.page(conn, RunQuery(preview=True)))
        assert "(name=? AND value=? AND run=?)" in plan_of(lambda: runs.page(conn, RunQuery(preview=False)))


def test_sums_over_all_accounts_of_budgets_read_the_rows_once(
    tmp_path: Path, make_schema: Callable[[str], None]
) -> None:
    url = f"sqlite:///{tmp_path}/baton.db"
    make_schema(url)
    with reader_of_plans(url) as (conn, plan_of):
        assert "CORRELATED" not in plan_of(lambda: budgets.use(conn, "tenant/key/*/day", limit=1, account=None))
        assert "CORRELATED" not in plan_of(lambda: read_accounts(conn))


def test_entries_of_the_log_without_a_row_are_found_in_one_pass_over_the_rows(
    tmp_path: Path, make_schema: Callable[[str], None]
) -> None:
    url = f"sqlite:///{tmp_path}/baton.db"
    make_schema(url)
    with reader_of_plans(url) as (conn, plan_of):
        stored = SealedRows(conn, lambda _place, body: body)
        assert "CORRELATED" not in plan_of(lambda: list(stored.find_entries_without_row("run")))
        assert "CORRELATED" not in plan_of(lambda: list(stored.find_entries_without_row("admin_event")))


def test_rows_that_are_to_be_sealed_are_found_by_their_primary_keys(
    tmp_path: Path, make_schema: Callable[[str], None]
) -> None:
    url = f"sqlite:///{tmp_path}/baton.db"
    make_schema(url)
    plans: dict[str, str] = {}
    with reader_of_plans(url) as (conn, plan_of):
        for kind, source in log_sources.SOURCES.items():
            plans[kind] = plan_of(partial(log_sources.rows_of, conn, source, ["1", "2"]))
    assert {kind for kind, plan in plans.items() if "SEARCH" not in plan} == {"trial"}, (
        "which has a key of four columns"
    )
