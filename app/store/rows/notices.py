"""Rows of notices that wait for their delivery. The entry that ends the turn writes them (see `writing/batch.py`)."""

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Connection, Select, delete, func, literal, select, tuple_, update

from app.core.run.notices import KEPT_FAILED_SECONDS, FailedNotice, Notice
from app.store.sqlkit.tables import NOTICES


def select_due(now: float, limit: int) -> Select[tuple[str, int, str, float, int, str]]:
    """Return a query of the notices that may be tried, those due for longest first."""
    row = NOTICES.c
    columns = (row.run, row.turn, row.word, row.at, row.tries, row.about)
    return select(*columns).where(row.due <= now).order_by(row.due).limit(limit)


def take(conn: Connection, now: float, until: float, limit: int) -> tuple[Notice, ...]:
    """Claim notices until then, but none that another process is claiming at the moment. Those that were given up
    are due only when they have been kept for long enough, and are deleted."""
    conn.execute(delete(NOTICES).where(NOTICES.c.due <= now, NOTICES.c.failed_at.is_not(None)))
    rows = conn.execute(select_due(now, limit).with_for_update(skip_locked=True)).all()
    if rows:
        is_among = tuple_(NOTICES.c.run, NOTICES.c.turn).in_([(row.run, row.turn) for row in rows])
        conn.execute(update(NOTICES).where(is_among).values(due=until, tries=NOTICES.c.tries + 1))
    return tuple([Notice(row.run, row.turn, row.word, row.at, row.tries + 1, row.about) for row in rows])


def close(conn: Connection, notice: Notice) -> bool:
    """Delete a notice, whoever has claimed it. False if it is gone already."""
    return bool(conn.execute(delete(NOTICES).where(*_same(notice))).rowcount)


def fail(conn: Connection, notice: Notice, at: float, reason: str) -> bool:
    """Mark a notice as given up. False if it is gone already."""
    changes = {"failed_at": at, "reason": reason, "due": at + KEPT_FAILED_SECONDS}
    return bool(conn.execute(update(NOTICES).where(*_same(notice)).values(changes)).rowcount)


def list_failed(conn: Connection, limit: int) -> tuple[FailedNotice, ...]:
    """Return the notices that were given up, the latest first."""
    row = NOTICES.c
    query = select(NOTICES).where(row.failed_at.is_not(None)).order_by(row.failed_at.desc(), row.run, row.turn)
    failed_notices = []
    for record in conn.execute(query.limit(limit)):
        notice = Notice(record.run, record.turn, record.word, record.at, record.tries, record.about)
        failed_notices.append(FailedNotice(notice, record.failed_at, record.reason))
    return tuple(failed_notices)


def resend(conn: Connection, given_up: Sequence[Notice], now: float) -> int:
    """Have notices that were given up tried again. Returns their number."""
    changes = {"failed_at": None, "reason": None, "due": now, "tries": 0}
    has_failed = NOTICES.c.failed_at.is_not(None)
    count = 0
    for notice in given_up:
        count += conn.execute(update(NOTICES).where(*_same(notice), has_failed).values(changes)).rowcount
    return count


def _same(notice: Notice) -> tuple[ColumnElement[bool], ...]:
    return NOTICES.c.run == notice.run, NOTICES.c.turn == notice.turn


def put_off(conn: Connection, notice: Notice, due: float) -> bool:
    """Have a notice tried again from then on. False if somebody else has claimed it meanwhile."""
    row = NOTICES.c
    mine = (row.run == notice.run, row.turn == notice.turn, row.tries == notice.tries, row.failed_at.is_(None))
    return bool(conn.execute(update(NOTICES).where(*mine).values(due=due)).rowcount)


def count(conn: Connection, most: int) -> int:
    """Return the number of notices that are still tried, counted up to `most`."""
    some = select(literal(1)).select_from(NOTICES).where(NOTICES.c.failed_at.is_(None)).limit(most).subquery()
    return int(conn.execute(select(func.count()).select_from(some)).scalar_one())


def forget(conn: Connection, before: float, limit: int) -> int:
    """Delete at most `limit` notices of turns that ended before then and that are due since. Returns their number."""
    row = NOTICES.c
    query = select(row.run, row.turn).where(row.due < before, row.at < before).limit(limit)
    keys = [tuple(key) for key in conn.execute(query.with_for_update(skip_locked=True))]
    if keys:
        conn.execute(delete(NOTICES).where(tuple_(row.run, row.turn).in_(keys)))
    return len(keys)
