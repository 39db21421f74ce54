"""Rows of notices that wait for their delivery. The entry that ends the turn writes them (see `writing/batch.py`)."""

from sqlalchemy import Connection, Select, delete, func, literal, select, tuple_, update

from app.core.run.notices import Notice
from app.store.sqlkit.tables import NOTICES


def due(now: float, limit: int) -> Select[tuple[str, int, str, float, int, str]]:
    """A query of the notices that may be tried, those due for longest first."""
    row = NOTICES.c
    columns = (row.run, row.turn, row.word, row.at, row.tries, row.about)
    return select(*columns).where(row.due <= now).order_by(row.due).limit(limit)


def take(conn: Connection, now: float, until: float, limit: int) -> tuple[Notice, ...]:
    """Claim notices until then, but none that another process is claiming at the moment."""
    rows = conn.execute(due(now, limit).with_for_update(skip_locked=True)).all()
    if rows:
        taken = tuple_(NOTICES.c.run, NOTICES.c.turn).in_([(row.run, row.turn) for row in rows])
        conn.execute(update(NOTICES).where(taken).values(due=until, tries=NOTICES.c.tries + 1))
    return tuple([Notice(row.run, row.turn, row.word, row.at, row.tries + 1, row.about) for row in rows])


def close(conn: Connection, notice: Notice) -> bool:
    """Delete a notice, whoever has claimed it. False if it is gone already."""
    row = NOTICES.c
    return bool(conn.execute(delete(NOTICES).where(row.run == notice.run, row.turn == notice.turn)).rowcount)


def put_off(conn: Connection, notice: Notice, due: float) -> bool:
    """Have a notice tried again from then on. False if somebody else has claimed it meanwhile."""
    row = NOTICES.c
    mine = (row.run == notice.run, row.turn == notice.turn, row.tries == notice.tries)
    return bool(conn.execute(update(NOTICES).where(*mine).values(due=due)).rowcount)


def count(conn: Connection, most: int) -> int:
    """The number of notices, counted up to `most`."""
    some = select(literal(1)).select_from(NOTICES).limit(most).subquery()
    return int(conn.execute(select(func.count()).select_from(some)).scalar_one())


def forget(conn: Connection, before: float, limit: int) -> int:
    """Delete at most `limit` notices of turns that ended before then. Returns their number."""
    row = NOTICES.c
    old = select(row.run, row.turn).where(row.due < before, row.at < before).limit(limit)
    names = [tuple(found) for found in conn.execute(old.with_for_update(skip_locked=True))]
    if names:
        conn.execute(delete(NOTICES).where(tuple_(row.run, row.turn).in_(names)))
    return len(names)
