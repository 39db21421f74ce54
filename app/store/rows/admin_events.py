"""Rows of the log of changes. They are only ever added: a trigger refuses to alter or delete one."""

from collections.abc import Mapping
from typing import Any, Final

import orjson
from sqlalchemy import Connection, func, insert, literal, select

from app.errors import RecordDamaged
from app.store.protocol import (
    ABOUT_RUNS,
    CONTENT_ERASED,
    CONTENT_READ,
    PROCESS,
    RETENTION_SET,
    RUN_PRUNED,
    Actor,
    AdminEvent,
    AdminEventQuery,
)
from app.store.rows.runs import clock
from app.store.sqlkit.tables import ADMIN_EVENTS

Fields = Mapping[str, Any] | None
RETENTION = "retention"
"""The target of entries about how long texts and runs are kept."""
RETENTION_LOCK: Final = 0x6261746F6E726574
"""The number of the advisory lock of those who write one: `batonret` in ASCII."""


def note(conn: Connection, by: Actor, action: str, target: str, *, tenant: str, before: Fields, after: Fields) -> None:
    """Add a change to the log, in the transaction that makes it."""
    values = {"action": action, "target": target, "tenant": tenant, "before": _body(before), "after": _body(after)}
    conn.execute(insert(ADMIN_EVENTS).values(at=clock(conn), actor=by.id, via=by.via, **values))


def note_read(conn: Connection, run: str, tenant: str, what: str, by: Actor, digest: str) -> None:
    """Add a reading of content to the log."""
    note(conn, by, CONTENT_READ, run, tenant=tenant, before=None, after=_reading(what, digest))


def note_retention(conn: Connection, periods: Mapping[str, str]) -> None:
    """Add to the log by which settings engines erase and delete, if the latest entry has others."""
    if conn.dialect.name == "postgresql":  # of engines that start at once, one writes and the others find its entry
        conn.execute(select(func.pg_advisory_xact_lock(literal(RETENTION_LOCK))))
    table = ADMIN_EVENTS.c
    query = select(table.after).where(table.target == RETENTION, table.action == RETENTION_SET)
    before = conn.execute(query.order_by(table.seq.desc()).limit(1)).scalar()
    if before != _body(periods):
        fields = None if before is None else orjson.loads(before)
        note(conn, PROCESS, RETENTION_SET, RETENTION, tenant="", before=fields, after=periods)


def note_erasures(conn: Connection, tenants_by_run: Mapping[str, str], cause: str, by: Actor) -> None:
    """Add to the log that the content of these runs is erased."""
    _note_each(conn, tenants_by_run, CONTENT_ERASED, by, {"cause": cause})


def note_prunings(conn: Connection, tenants_by_run: Mapping[str, str], by: Actor) -> None:
    """Add to the log that these runs are pruned."""
    _note_each(conn, tenants_by_run, RUN_PRUNED, by, None)


def _note_each(conn: Connection, tenants_by_run: Mapping[str, str], action: str, by: Actor, after: Fields) -> None:
    """Add an entry for each of these runs."""
    shared = {"at": clock(conn), "actor": by.id, "via": by.via, "action": action, "after": _body(after)}
    entries = [shared | {"target": run, "tenant": tenant} for run, tenant in tenants_by_run.items()]
    if entries:
        conn.execute(insert(ADMIN_EVENTS), entries)


def has_read(conn: Connection, run: str, what: str, by: Actor, digest: str) -> bool:
    """Return True if the log has this very reading of the actor's."""
    table = ADMIN_EVENTS.c
    conditions = (table.target == run, table.action == CONTENT_READ, table.actor == by.id, table.via == by.via)
    query = select(table.seq).where(*conditions, table.after == _body(_reading(what, digest))).limit(1)
    return conn.execute(query).first() is not None


def _reading(what: str, digest: str) -> Mapping[str, Any]:
    if digest:
        return {"what": what, "shown": digest}
    return {"what": what}


def page(conn: Connection, query: AdminEventQuery) -> tuple[AdminEvent, ...]:
    """Return the changes that a query chooses, the newest first. Raises `RecordDamaged`."""
    table = ADMIN_EVENTS.c
    statement = select(ADMIN_EVENTS).order_by(table.seq.desc()).limit(query.limit)
    if query.before is not None:
        statement = statement.where(table.seq < query.before)
    if query.since is not None:
        statement = statement.where(table.at >= query.since)
    if query.action is None:
        statement = statement.where(table.action.not_in(ABOUT_RUNS))
    for name in ("tenant", "target", "actor", "action"):
        value = getattr(query, name)
        if value is not None:
            statement = statement.where(table[name] == value)
    return tuple(_event(row._mapping) for row in conn.execute(statement))


def _event(row: Mapping[Any, Any]) -> AdminEvent:
    """Return the change of a row. Raises `RecordDamaged`."""
    values = {str(name): value for name, value in row.items()}
    try:
        for name in ("before", "after"):
            if values[name] is not None:
                values[name] = orjson.loads(values[name])
    except orjson.JSONDecodeError:
        found = f"The entry {row['seq']} of the log of changes cannot be read"
        causes = "it was altered, or the database is damaged."
        raise RecordDamaged(f"{found}: {causes} `baton audit verify` says what else is wrong.") from None
    return AdminEvent(**values)


def _body(fields: Fields) -> bytes | None:
    if fields is None:
        return None
    return orjson.dumps(dict(fields), option=orjson.OPT_SORT_KEYS)
