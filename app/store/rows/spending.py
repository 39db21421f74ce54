"""Sums of the money that runs have spent, over the rows that the journal's writes keep."""

from typing import Any

from sqlalchemy import Connection, func, select

from app.store.protocol import SpendQuery, SpendRow
from app.store.sqlkit.tables import RUNS


def sums(conn: Connection, query: SpendQuery) -> tuple[SpendRow, ...]:
    """Return the sums of the runs that were admitted in a window, the highest first. Shadows have a budget of their
    own."""
    run = RUNS.c
    groups = [run.tenant, run.key] if query.by == "key" else [run.tenant]
    spent_usd = func.sum(run.spent_usd)
    is_no_shadow = run.origin_kind.is_distinct_from("shadow")
    figures = (func.count(), spent_usd, func.sum(run.held_usd), func.sum(run.spent_tokens))
    statement = select(*groups, *figures).where(
        run.created_at >= query.since, run.created_at < query.until, is_no_shadow
    )
    if query.tenant is not None:
        statement = statement.where(run.tenant == query.tenant)
    rows = conn.execute(statement.group_by(*groups).order_by(spent_usd.desc(), *groups).limit(query.limit))
    return tuple(_row(list(row), by_key=query.by == "key") for row in rows)


def _row(row: list[Any], *, by_key: bool) -> SpendRow:
    runs, usd, held, tokens = map(int, row[-4:])
    key = row[1] if by_key else None
    return SpendRow(tenant=row[0], key=key, runs=runs, usd=usd, held=held, tokens=tokens)
