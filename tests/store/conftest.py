"""Fixtures of the tests of the store."""

from collections.abc import Iterator
from typing import Any

import pytest
from asyncpg.prepared_stmt import PreparedStatement
from sqlalchemy import event
from sqlalchemy.pool import Pool


@pytest.fixture
def round_trips(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Each statement that a store sends to Postgres from now on, with BEGIN and COMMIT: one round trip each."""
    statements: list[str] = []
    fetch, many = PreparedStatement.fetch, PreparedStatement.executemany

    def note(query: str, times: int = 1) -> None:
        if not _is_of_the_driver(query):
            statements.extend([query.strip()] * times)

    async def note_fetch(statement: Any, *values: Any, **options: Any) -> Any:
        note(statement.get_query())
        return await fetch(statement, *values, **options)

    async def note_executemany(statement: Any, rows: Any, **options: Any) -> Any:
        note(statement.get_query(), len(rows))
        return await many(statement, rows, **options)

    def note_queries_of(connection: Any, _record: object) -> None:
        driver = getattr(connection, "driver_connection", None)
        if hasattr(driver, "add_query_logger"):  # it is shown BEGIN and COMMIT, and nothing that was prepared
            driver.add_query_logger(lambda logged: note(logged.query))

    monkeypatch.setattr(PreparedStatement, "fetch", note_fetch)
    monkeypatch.setattr(PreparedStatement, "executemany", note_executemany)
    event.listen(Pool, "connect", note_queries_of)
    yield statements
    event.remove(Pool, "connect", note_queries_of)


def _is_of_the_driver(query: str) -> bool:
    """True for asyncpg's own look-ups of types, which it makes once for each connection."""
    return "typeinfo" in query or "current_setting('jit')" in query or "set_config('jit'" in query
