"""Positions in lists that are read page by page, the newest entry first."""

from collections.abc import Sequence

from sqlalchemy import Column, ColumnElement, Connection, select, tuple_

from app.errors import NotFound


def follows(
    conn: Connection, time: Column[float], id_: Column[str], after: str, visible: Sequence[ColumnElement[bool]]
) -> ColumnElement[bool]:
    """Return the condition that an entry comes after the one with the id `after`, in the order of falling times and
    ids. That one may have left the list since it was read, as a key does that is revoked.

    Raises `NotFound` if there is none of this id for which the conditions `visible` hold.
    """
    place = conn.execute(select(time, id_).where(id_ == after, *visible)).one_or_none()
    if place is None:
        raise NotFound("The list has no entry of this id.")
    return tuple_(time, id_) < tuple_(*place)
