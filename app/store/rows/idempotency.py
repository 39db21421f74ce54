"""Rows of idempotency records.

They are checked and written in the transaction of the entry that carries the request out (see `batch.IdempotencyRows`).

A record that has run out counts as absent, and its row is reused. Rows are read under lock. If two processes insert the
same record at the same time, the primary key refuses the second one; its transaction is repeated, and then finds the
first one's row.
"""

from sqlalchemy import Connection, delete, insert, select, update

from app.store.protocol import IdempotencyRecord
from app.store.sqlkit.statements import IDEMPOTENCY
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
    values = dict(zip(IDEMPOTENCY, record_row(once), strict=True))
    conn.execute(
        insert(ONCE).values(values) if row is None else update(ONCE).where(ONCE.c.id == once.id).values(values)
    )
    return once


def lapsed(conn: Connection, now: float) -> bool:
    """Return True if any record has run out."""
    return conn.execute(select(ONCE.c.id).where(ONCE.c.until <= now).limit(1)).first() is not None


def forget(conn: Connection, now: float, limit: int) -> int:
    """Delete at most `limit` records that have run out, but none that another sweep is deleting at the moment."""
    oldest = select(ONCE.c.id).where(ONCE.c.until <= now).order_by(ONCE.c.until).limit(limit)
    gone = conn.execute(oldest.with_for_update(skip_locked=True)).scalars().all()
    if gone:
        conn.execute(delete(ONCE).where(ONCE.c.id.in_(gone)))
    return len(gone)


def record_row(once: IdempotencyRecord) -> tuple[str, bytes, float, str, int, bytes, str | None]:
    """Return the values of the columns `IDEMPOTENCY`."""
    return once.id, once.fingerprint, once.until, once.run, once.status, once.reply, once.tenant
