"""The rows that are sealed in the transparency log, and the parts of the entries that stand for them."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson
from msgspec import Struct
from sqlalchemy import Connection, Table, cast, literal, select
from sqlalchemy.sql.elements import ColumnElement
from sqlalchemy.types import Text

from app.core.transparency.leaves import DISCLOSURES, END, ERASURE, PRIVATE, PRUNED, ROW, commitment
from app.store.sqlkit import tables
from app.store.sqlkit.log_statements import LogStatements
from app.store.sqlkit.tables import (
    ADMIN_EVENTS,
    BUDGETS,
    CATALOGS,
    CONDUCTOR_CHANGES,
    FEEDBACK,
    HOLDS,
    KEYS,
    POLICIES,
    PRUNED_RUNS,
    RUNS,
    TENANTS,
    TRIALS,
)

ADMITTED: Final = ("id", "tenant", "key", "tier", "model", "code", "created_at")
"""Columns of a run that stay as they were at its admission."""
ENDED: Final = (
    "state",
    "topology",
    "degraded",
    "steps",
    "cap_usd",
    "cap_tokens",
    "spent_usd",
    "spent_tokens",
    "ended_at",
    "error",
)
"""Columns of a run that say how it ended."""
OF_RUN: Final = (*ADMITTED, *ENDED, "seq", "salt")
"""Columns of a run that a pass of sealing reads: what is sealed of them, `seq` and `salt`."""
Row = Mapping[Any, Any]


class Source(Struct, frozen=True):
    """A table whose rows are sealed one by one, or these columns of them. `run` is the column with the run that a row
    concerns."""

    table: Table
    key: tuple[str, ...]
    erased: tuple[str, ...] = ()
    """Columns that are erased with the content of the run."""
    run: str | None = None
    columns: tuple[str, ...] = ()
    version: tuple[str, str] | None = None
    """A column that grows with each change, and the field with its value in the entry."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the columns that are sealed."""
        return self.columns or tuple([str(column.name) for column in self.table.columns])

    @property
    def identity(self) -> ColumnElement[str]:
        """Return the id of a row's entry."""
        first, *others = [self.table.c[name] for name in self.key]
        identity: ColumnElement[str] = first if isinstance(first.type, Text) else cast(first, Text)
        for column in others:
            identity = identity + literal("\n") + column
        return identity

    def has_id(self, ids: Sequence[str]) -> ColumnElement[bool]:
        """Return the condition that the entry of a row has one of these ids. A key that is a number is compared as one,
        because its index does not find it as text, and the log of changes is long."""
        column = self.table.c[self.key[0]]
        if len(self.key) == 1 and not isinstance(column.type, Text):
            return column.in_([int(id_) for id_ in ids])
        return self.identity.in_(ids)


_OF_BUDGET = ("id", "tenant", "scope", "name", "period", "usd", "zone", "soft", "created_at")
"""Columns of a budget that are sealed. Its slices came later: the log of changes says how many it has."""
SOURCES: Final[Mapping[str, Source]] = {
    PRUNED: Source(PRUNED_RUNS, ("id",), run="id"),
    ERASURE: Source(RUNS, ("id",), run="id", columns=("id", "erased_at", "erased_by")),
    "feedback": Source(FEEDBACK, ("id",), erased=("comment",), run="run"),
    "key": Source(KEYS, ("id",)),
    "tenant": Source(TENANTS, ("name",)),
    "budget": Source(BUDGETS, ("id",), columns=_OF_BUDGET),
    "hold": Source(HOLDS, ("id",)),
    "policy": Source(POLICIES, ("policy",), version=("number", "number")),
    "trial": Source(TRIALS, ("worker", "model", "version", "task"), version=("at", "written")),
    "catalog": Source(CATALOGS, ("digest",)),
    "conductor_change": Source(CONDUCTOR_CHANGES, ("id",)),
    "admin_event": Source(ADMIN_EVENTS, ("seq",)),
}


def rows_of(conn: Connection, source: Source, ids: Sequence[str]) -> dict[str, Row]:
    """Return the rows of these ids."""
    names = source.names
    columns = [source.table.c[name] for name in names]
    query = select(*columns, source.identity.label("identity")).where(source.has_id(ids))
    return {row[-1]: dict(zip(names, row, strict=False)) for row in conn.execute(query).all()}


def row_parts(source: Source, row: Row, salt: bytes, run_salt: bytes | None) -> dict[str, Any]:
    """Return the parts of the entry about a row."""
    values = {name: value for name, value in row.items() if name not in source.erased}
    parts: dict[str, Any] = {ROW: commitment(salt, ROW, values)}
    if source.version is not None:
        column, name = source.version
        parts[name] = row[column]
    if source.run is not None and source.run != "id":
        parts["run"] = row[source.run]
    private = {name: row[name] for name in source.erased if row[name]}
    if private and run_salt:
        parts[PRIVATE] = commitment(run_salt, PRIVATE, private)
    return parts


def run_rows(conn: Connection, statements: LogStatements, runs: Sequence[str]) -> dict[str, Row]:
    """Return the columns `OF_RUN` of these runs."""
    rows: dict[str, Row] = {}
    for values in statements.runs.fetch(conn, statements.common.values(runs)):
        row = dict(zip(OF_RUN, values, strict=True))
        row["degraded"] = bool(row["degraded"])  # SQLite has no truth values
        rows[row["id"]] = row
    return rows


def private_tags(conn: Connection, statements: LogStatements, runs: Sequence[str]) -> dict[str, list[Row]]:
    """Return the tags of each of these runs that are erased with its content, sorted by code points whatever the order
    of the database is: that may change when it is restored elsewhere."""
    tags_by_run: dict[str, list[Row]] = {}
    rows = statements.private_tags.fetch(conn, statements.common.values(runs))
    for run, name, value in sorted([tuple(row) for row in rows]):
        tags_by_run.setdefault(run, []).append({"name": name, "value": value})
    return tags_by_run


def disclosures(conn: Connection, statements: LogStatements, runs: Sequence[str]) -> dict[str, list[Row]]:
    """Return the rows of the ledger of disclosures about these runs, in the order of their calls."""
    rows_by_run: dict[str, list[Row]] = {}
    names = tables.DISCLOSURES.columns.keys()
    for values in statements.disclosures.fetch(conn, statements.common.values(runs)):
        row = dict(zip(names, values, strict=True))
        row["saw_user"], row["saw_results"] = bool(row["saw_user"]), bool(row["saw_results"])
        rows_by_run.setdefault(row["run"], []).append(row)
    return rows_by_run


def run_parts(row: Row, salt: bytes, tags: Sequence[Row], ledger_rows: Sequence[Row]) -> dict[str, Any]:
    """Return the parts of the entry about a run, without those that stand for its events."""
    parts = {ROW: commitment(salt, ROW, {name: row[name] for name in ADMITTED})}
    if row["ended_at"] is not None:
        parts[END] = commitment(salt, END, {name: row[name] for name in ENDED})
    if ledger_rows:
        parts[DISCLOSURES] = commitment(salt, DISCLOSURES, ledger_rows)
    if tags and row["salt"]:
        parts[PRIVATE] = commitment(row["salt"], PRIVATE, tags)
    return parts


def events_beyond(conn: Connection, statements: LogStatements, last_seqs: Mapping[str, int]) -> Sequence[Any]:
    """Return the events of these runs after the last one that is sealed, each as (run, seq, kind, at, body), in
    order."""
    if not statements.common.arrays:
        return statements.events.fetch(conn, orjson.dumps(list(last_seqs.items())).decode())
    return statements.events.fetch(conn, list(last_seqs), list(last_seqs.values()))
