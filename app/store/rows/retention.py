"""Rows of runs whose content is to be erased: finding them, and erasing them in short transactions."""

from collections.abc import Iterator, Sequence

import orjson
from sqlalchemy import ColumnElement, Connection, bindparam, delete, func, select, tuple_, update
from sqlalchemy.types import LargeBinary

from app.store.protocol import ContentPage, ContentQuery
from app.store.rows import feedback
from app.store.rows.runs import run_row
from app.store.sqlkit.tables import CONTENTS, RUNS

ERASED_BYTES = 4 * 2**20
"""Most bytes of content that one transaction erases, unless a single run has more."""
ERASED_RUNS = 50
"""Most runs whose content one transaction erases: writers of other runs wait for it on SQLite."""


def page(conn: Connection, query: ContentQuery, after: tuple[float, str] | None, limit: int) -> ContentPage:
    """The next runs that still have their content, the oldest first.

    The limit counts rows that are read, so that a page takes a bounded time where millions were erased already.
    """
    where: list[ColumnElement[bool]] = []
    if query.tenant is not None:
        where.append(RUNS.c.tenant == query.tenant)
    if query.before is not None:
        where.append(RUNS.c.created_at < query.before)
    if after is not None:
        where.append(tuple_(RUNS.c.created_at, RUNS.c.id) > tuple_(*after))
    oldest_first = select(RUNS).where(*where).order_by(RUNS.c.created_at, RUNS.c.id).limit(limit)
    rows = [run_row(row) for row in conn.execute(oldest_first)]
    following = (rows[-1].created_at, rows[-1].id) if len(rows) == limit else None
    rows = [row for row in rows if not row.erased]
    if query.user is not None:
        theirs = _of_user(conn, query.user, [row.id for row in rows])
        rows = [row for row in rows if row.id in theirs]
    return ContentPage(tuple(rows), following)


def _of_user(conn: Connection, user: str, runs: Sequence[str]) -> set[str]:
    """Return the runs among `runs` whose task names the user.

    The database looks for the bytes in which `task_to_json` names a user, so that only likely bodies are read.
    """
    named = bindparam("named", b'"user":' + orjson.dumps(user), LargeBinary)
    search = func.pg_catalog.position if conn.dialect.name == "postgresql" else func.instr
    likely = select(CONTENTS.c.run, CONTENTS.c.body).where(CONTENTS.c.run.in_(runs), search(CONTENTS.c.body, named) > 0)
    return {run for run, body in conn.execute(likely) if _names(bytes(body), user)} if runs else set()


def _names(body: bytes, user: str) -> bool:
    """True if this is a task of the user's, and not a text that has such words in it."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    return isinstance(value, dict) and "messages" in value and value.get("user") == user


def groups(conn: Connection, runs: Sequence[str]) -> list[list[str]]:
    """These runs in groups, each of which one short transaction can erase."""
    size = func.sum(func.length(CONTENTS.c.body))
    query = select(CONTENTS.c.run, size).where(CONTENTS.c.run.in_(runs)).group_by(CONTENTS.c.run)
    sizes: dict[str, int] = {run: int(total) for run, total in conn.execute(query)}
    return list(_grouped(runs, sizes))


def _grouped(runs: Sequence[str], sizes: dict[str, int]) -> Iterator[list[str]]:
    group: list[str] = []
    taken = 0
    for run in sorted(runs):
        size = sizes.get(run, 0)
        if group and (len(group) >= ERASED_RUNS or taken + size > ERASED_BYTES):
            yield group
            group, taken = [], 0
        group.append(run)
        taken += size
    if group:
        yield group


def erase(conn: Connection, runs: Sequence[str]) -> int:
    """Erase all content of these runs, their salts and the comments on them. Returns how many still had a salt.

    The rows are locked in the order of their ids, as all writers of several runs lock them.
    """
    held = select(RUNS.c.id).where(RUNS.c.id.in_(runs), RUNS.c.salt.is_not(None)).order_by(RUNS.c.id).with_for_update()
    known = conn.execute(held).scalars().all()
    conn.execute(update(RUNS).where(RUNS.c.id.in_(known)).values(salt=None, revision=RUNS.c.revision + 1))
    conn.execute(delete(CONTENTS).where(CONTENTS.c.run.in_(runs)))
    feedback.erase_comments(conn, runs)
    return len(known)
