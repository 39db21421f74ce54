"""Reads about lists of runs. `DatabaseRunLists` implements `protocol.RunLists`, which documents its verbs."""

from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from sqlalchemy import Connection, func, select

from app.core.run.recipients import RecipientKind
from app.store.protocol import Period, RunDetails, RunFigures, RunQuery
from app.store.rows.run_figures import figures
from app.store.rows.runs import conditions_of, parse_object
from app.store.sqlkit.tables import DISCLOSURES, EVENTS, RUNS

EXECUTING: tuple[RecipientKind, ...] = ("worker", "shadow")
"""The kinds of recipients that execute steps: those of a shadow have a kind of their own."""


class DatabaseRunLists:
    """Implements `protocol.RunLists` over the reads of a store."""

    def __init__(self, read: Callable[[Callable[[Connection], Any]], Awaitable[Any]]) -> None:
        """`read` carries out work that reads; for one tenant, where it is that tenant's store."""
        self._read = read

    async def count(self, query: RunQuery, most: int) -> int:
        number: int = await self._read(partial(_count, query=query, most=most))
        return number

    async def details(self, runs: Sequence[str]) -> Mapping[str, RunDetails]:
        if not runs:
            return {}
        details: dict[str, RunDetails] = await self._read(partial(_details, names=runs))
        return details

    async def figures(self, period: Period) -> RunFigures:
        run_figures: RunFigures = await self._read(partial(figures, period=period))
        return run_figures

    async def mark(self) -> tuple[object, ...]:
        position: tuple[object, ...] = await self._read(_mark)
        return position


def _count(conn: Connection, query: RunQuery, most: int) -> int:
    rows = select(RUNS.c.id).where(*conditions_of(query)).limit(most).subquery()
    return conn.execute(select(func.count()).select_from(rows)).scalar_one()


def _details(conn: Connection, names: Sequence[str]) -> dict[str, RunDetails]:
    calls = select(DISCLOSURES.c.run, DISCLOSURES.c.recipient).distinct()
    calls = calls.where(DISCLOSURES.c.run.in_(names), DISCLOSURES.c.kind.in_(EXECUTING))
    workers: defaultdict[str, list[str]] = defaultdict(list)
    for run, worker in conn.execute(calls.order_by(DISCLOSURES.c.run, DISCLOSURES.c.recipient)):
        workers[run].append(worker)
    admissions = select(EVENTS.c.run, EVENTS.c.body).where(EVENTS.c.run.in_(names), EVENTS.c.seq == 1)
    details: dict[str, RunDetails] = {}
    for run, body in conn.execute(admissions):
        details[run] = RunDetails(tuple(workers[run]), is_preview=bool(parse_object(body).get("preview")))
    return details


def _mark(conn: Connection) -> tuple[Any, ...]:
    newest = select(RUNS.c.id).order_by(RUNS.c.created_at.desc(), RUNS.c.id.desc()).limit(1).scalar_subquery()
    query = select(newest, func.count(), func.sum(RUNS.c.seq)).where(RUNS.c.ended_at.is_(None))
    return tuple(conn.execute(query).one())
