"""Rows of idempotency claims, checked and written in the transaction of the entry that carries the request out.

A claim that has run out counts as absent, and its row is reused. Rows are read under lock. If two processes insert the
same claim at the same time, the primary key refuses the second one; its transaction is repeated, and then finds the
first one's row.
"""

from collections.abc import Iterable
from dataclasses import replace

from sqlalchemy import Connection, delete, insert, select, update

from app.errors import Conflict
from app.store.protocol import TAKEN, Once
from app.store.sqlkit.prepared import Row, Rows
from app.store.sqlkit.statements import CLAIM, Statements
from app.store.sqlkit.tables import ONCE


class Claims:
    """The claims that a batch of entries checks and makes."""

    def __init__(self, rows: Iterable[Row]) -> None:
        """`rows` are the stored claims with the ids of the batch's claims."""
        self._known = {row[0]: Once(*row) for row in rows}
        self._stored = frozenset(self._known)
        self._changed: set[str] = set()

    def check(self, once: Once | None, at: float) -> None:
        """Raise `Conflict` if an earlier claim lasts at this time."""
        held = self._known.get(once.id) if once is not None else None
        if held is not None and held.until > at:
            raise Conflict(code=TAKEN)

    def make(self, once: Once | None, run: str) -> None:
        """Make a claim, after `check`. It is written with the batch."""
        if once is not None:
            self._known[once.id] = replace(once, run=run)
            self._changed.add(once.id)

    def writes(self, statements: Statements) -> tuple[tuple[Rows, list[Row]], ...]:
        """The rows to be written, in the order of their ids, so that no two batches wait for each other in a circle."""
        made = [_row(self._known[name]) for name in sorted(self._changed)]
        return (
            (statements.new_claim, [row for row in made if row[0] not in self._stored]),
            (statements.change_claim, [(*row[1:], row[0]) for row in made if row[0] in self._stored]),
        )


def find(conn: Connection, claim: str, now: float) -> Once | None:
    """The claim on this id, if it lasts."""
    row = conn.execute(select(ONCE).where(ONCE.c.id == claim, ONCE.c.until > now)).one_or_none()
    return Once(*row) if row else None


def remember(conn: Connection, once: Once, now: float) -> Once:
    """Make a claim, unless an earlier one lasts. Returns the claim that lasts afterwards."""
    row = conn.execute(select(ONCE).where(ONCE.c.id == once.id).with_for_update()).one_or_none()
    if row is not None and row.until > now:
        return Once(*row)
    values = dict(zip(CLAIM, _row(once), strict=True))
    conn.execute(
        insert(ONCE).values(values) if row is None else update(ONCE).where(ONCE.c.id == once.id).values(values)
    )
    return once


def lapsed(conn: Connection, now: float) -> bool:
    """True if any claim has run out."""
    return conn.execute(select(ONCE.c.id).where(ONCE.c.until <= now).limit(1)).first() is not None


def forget(conn: Connection, now: float, limit: int) -> int:
    """Delete at most `limit` claims that have run out, but none that another sweep is deleting at the moment."""
    oldest = select(ONCE.c.id).where(ONCE.c.until <= now).order_by(ONCE.c.until).limit(limit)
    gone = conn.execute(oldest.with_for_update(skip_locked=True)).scalars().all()
    if gone:
        conn.execute(delete(ONCE).where(ONCE.c.id.in_(gone)))
    return len(gone)


def _row(once: Once) -> tuple[str, bytes, float, str, int, bytes]:
    """The values of the columns `CLAIM`."""
    return once.id, once.fingerprint, once.until, once.run, once.status, once.reply
