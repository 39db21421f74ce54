"""Rows of idempotency records.

They are checked and written in the transaction of the entry that carries the request out (see `IdempotencyRows`).

A record that has run out counts as absent, and its row is reused. Rows are read under lock. If two processes insert the
same record at the same time, the primary key refuses the second one; its transaction is repeated, and then finds the
first one's row.
"""

from collections.abc import Iterable

from msgspec.structs import replace
from sqlalchemy import Connection, delete, insert, select, update

from app.errors import Conflict
from app.store.protocol import TAKEN, IdempotencyRecord
from app.store.sqlkit.statements import IDEMPOTENCY_COLUMNS, Row, RowWrites, Statements
from app.store.sqlkit.tables import ONCE


def find(conn: Connection, name: str, now: float) -> IdempotencyRecord | None:
    """Return the record with this id, if it lasts."""
    row = conn.execute(select(ONCE).where(ONCE.c.id == name, ONCE.c.until > now)).one_or_none()
    return IdempotencyRecord(*row) if row else None


def remember(conn: Connection, once: IdempotencyRecord, now: float) -> IdempotencyRecord:
    """Add a record, unless an earlier one lasts. Returns the record that lasts afterwards."""
    row = conn.execute(select(ONCE).where(ONCE.c.id == once.id).with_for_update()).one_or_none()
    if row is not None and row.until > now:
        return IdempotencyRecord(*row)
    values = dict(zip(IDEMPOTENCY_COLUMNS, record_row(once), strict=True))
    if row is None:
        conn.execute(insert(ONCE).values(values))
    else:
        conn.execute(update(ONCE).where(ONCE.c.id == once.id).values(values))
    return once


def add_or_prolong(conn: Connection, once: IdempotencyRecord, now: float) -> bool:
    """Add a record, or prolong an earlier one of the same fingerprint. False while one of another fingerprint lasts."""
    lasting = remember(conn, once, now)
    if lasting.fingerprint != once.fingerprint:
        return False
    if lasting.until < once.until:
        conn.execute(update(ONCE).where(ONCE.c.id == once.id).values(until=once.until))
    return True


def any_lapsed(conn: Connection, now: float) -> bool:
    """Return True if any record has run out."""
    return conn.execute(select(ONCE.c.id).where(ONCE.c.until <= now).limit(1)).first() is not None


def forget(conn: Connection, now: float, limit: int) -> int:
    """Delete at most `limit` records that have run out, but none that another sweep is deleting at the moment."""
    oldest = select(ONCE.c.id).where(ONCE.c.until <= now).order_by(ONCE.c.until).limit(limit)
    ids = conn.execute(oldest.with_for_update(skip_locked=True)).scalars().all()
    if ids:
        conn.execute(delete(ONCE).where(ONCE.c.id.in_(ids)))
    return len(ids)


def record_row(once: IdempotencyRecord) -> tuple[str, bytes, float, str, int, bytes, str | None]:
    """Return the values of the columns `IDEMPOTENCY_COLUMNS`."""
    return once.id, once.fingerprint, once.until, once.run, once.status, once.reply, once.tenant


class IdempotencyRows:
    """The idempotency records that a batch of entries checks and adds."""

    def __init__(self, rows: Iterable[Row]) -> None:
        """`rows` are the stored records that have an id of the batch's records."""
        self._known = {row[0]: IdempotencyRecord(*row) for row in rows}
        self._stored = frozenset(self._known)
        self._changed: set[str] = set()

    def check(self, once: IdempotencyRecord | None, at: float) -> None:
        """Raise `Conflict` if an earlier record lasts at this time."""
        if once is None:
            return
        earlier = self._known.get(once.id)
        if earlier is not None and earlier.until > at:
            raise Conflict(code=TAKEN)

    def add(self, once: IdempotencyRecord | None, run: str) -> None:
        """Add a record, after `check`. It is written with the batch."""
        if once is not None:
            self._known[once.id] = replace(once, run=run)
            self._changed.add(once.id)

    def writes(self, statements: Statements) -> tuple[RowWrites, ...]:
        """Return the rows to be written, in the order of their ids, so that no two batches wait for each other in a
        circle."""
        new_rows: list[Row] = []
        changed_rows: list[Row] = []
        for name in sorted(self._changed):
            id_, *values = record_row(self._known[name])
            if name in self._stored:
                changed_rows.append((*values, id_))
            else:
                new_rows.append((id_, *values))
        return (statements.insert_idempotency, new_rows), (statements.update_idempotency, changed_rows)
