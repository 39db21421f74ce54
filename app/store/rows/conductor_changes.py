"""Rows of changes to conductors' versions, and to what serves tiers. They are only ever added."""

from msgspec.structs import asdict
from sqlalchemy import Connection, select

from app.core.pool.conductor_versions import Change
from app.core.pool.serving import tier_in
from app.store.protocol import Actor
from app.store.rows.admin_events import note
from app.store.sqlkit.tables import CONDUCTOR_CHANGES, insert_into

MOST = 10_000
"""Most changes that are read. Operators make a few a day."""


def add(conn: Connection, change: Change, by: Actor | None) -> bool:
    """Store a change, and log it. `by` is its author; None: the user of a command. False if its id exists already."""
    if conn.execute(insert_into(conn, CONDUCTOR_CHANGES).values(asdict(change)).on_conflict_do_nothing()).rowcount != 1:
        return False
    author = by or Actor(change.who, "command")
    after = {"change": change.id, "version": change.version, "share": change.share, "note": change.note}
    tier = tier_in(change.conductor)
    action = f"tier.{change.kind}" if tier else f"conductor.{change.kind}"
    note(conn, author, action, tier or change.conductor, tenant="", before=None, after=after)
    return True


def read_all(conn: Connection) -> tuple[Change, ...]:
    """Return the latest changes, oldest first."""
    table = CONDUCTOR_CHANGES.c
    query = select(CONDUCTOR_CHANGES).order_by(table.at.desc(), table.id.desc()).limit(MOST)
    return tuple(Change(**row._mapping) for row in reversed(conn.execute(query).all()))
