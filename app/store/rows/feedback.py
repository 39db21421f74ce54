"""Rows of ratings of runs. They are only ever added; their comments are erased with the content of the run."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import asdict
from sqlalchemy import Connection, Row, Select, func, select, tuple_, update

from app.core.rating.feedback import Feedback
from app.errors import Conflict, NotFound
from app.store.rows.runs import raise_revision
from app.store.sqlkit.tables import FEEDBACK, RUNS, insert_into

MOST = 200
"""Most ratings of one run. A client that sends more is in a loop."""


def add(conn: Connection, rating: Feedback) -> Feedback:
    """Store a rating. If one of that id is stored already, it stays, and is returned.

    Raises `NotFound` if the rating's tenant has no such run, and `Conflict` for a comment on a run whose content was
    erased, where nothing would erase the comment any more.
    """
    is_theirs = RUNS.c.id == rating.run, RUNS.c.tenant == rating.tenant
    run = conn.execute(select(RUNS.c.salt).where(*is_theirs).with_for_update()).one_or_none()
    if run is None:
        raise NotFound()
    row = FEEDBACK.c
    earlier_rating = conn.execute(select(FEEDBACK).where(row.id == rating.id)).one_or_none()
    if earlier_rating is not None:
        return _feedback(earlier_rating)
    if run.salt is None and rating.comment:
        raise Conflict(
            "The content of the run was erased, so no comment on it is kept; send the rating without one.",
            param="comment",
            code="content_erased",
        )
    if conn.execute(select(func.count()).select_from(FEEDBACK).where(row.run == rating.run)).scalar_one() >= MOST:
        raise Conflict(
            f"The run has {MOST} ratings already, which is the most that are kept.", code="too_much_feedback"
        )
    conn.execute(insert_into(conn, FEEDBACK).values(asdict(rating)).on_conflict_do_nothing())
    raise_revision(conn, rating.run)
    return rating


def of_run(conn: Connection, run: str) -> tuple[Feedback, ...]:
    """Return all ratings of a run, the oldest first."""
    query = select(FEEDBACK).where(FEEDBACK.c.run == run).order_by(FEEDBACK.c.at, FEEDBACK.c.id)
    return tuple(_feedback(row) for row in conn.execute(query))


def of_all(conn: Connection, runs: Sequence[str]) -> tuple[Feedback, ...]:
    """Return all ratings of these runs."""
    return read(conn, select(FEEDBACK).where(FEEDBACK.c.run.in_(list(runs))))


def read(conn: Connection, query: Select[Any]) -> tuple[Feedback, ...]:
    """Return the ratings that a query selects."""
    return tuple(_feedback(row) for row in conn.execute(query))


def after(conn: Connection, last: tuple[float, str], limit: int) -> tuple[Feedback, ...]:
    """Return the next ratings of any run after the (at, id) of the last one that was seen."""
    place = tuple_(FEEDBACK.c.at, FEEDBACK.c.id)
    query = select(FEEDBACK).where(place > tuple_(*last)).order_by(FEEDBACK.c.at, FEEDBACK.c.id).limit(limit)
    return tuple(_feedback(row) for row in conn.execute(query))


def erase_comments(conn: Connection, runs: Sequence[str]) -> None:
    """Erase the comments on these runs."""
    conn.execute(update(FEEDBACK).where(FEEDBACK.c.run.in_(runs), FEEDBACK.c.comment != "").values(comment=""))


def _feedback(row: Row[Any]) -> Feedback:
    return Feedback(**row._mapping)
