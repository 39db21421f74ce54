"""Rows of API keys. They hold the digest of a secret, never the secret."""

from dataclasses import asdict
from typing import Any

import orjson
from sqlalchemy import Connection, Row, func, select, update
from sqlalchemy.dialects import postgresql, sqlite

from app.store.protocol import KeyRow
from app.store.sqlkit.tables import KEYS

_SETS = ("scopes", "tiers", "labels")


def find(conn: Connection, public_id: str) -> KeyRow | None:
    """A key by its public id."""
    row = conn.execute(select(KEYS).where(KEYS.c.id == public_id)).one_or_none()
    return _key(row) if row else None


def every(conn: Connection) -> tuple[KeyRow, ...]:
    """All keys, the newest first."""
    return tuple(_key(row) for row in conn.execute(select(KEYS).order_by(KEYS.c.created_at.desc(), KEYS.c.id)))


def add(conn: Connection, key: KeyRow) -> bool:
    """Store a key. False if its id exists already."""
    insert = postgresql.insert if conn.dialect.name == "postgresql" else sqlite.insert
    values = asdict(key) | {name: orjson.dumps(sorted(getattr(key, name))).decode() for name in _SETS}
    return conn.execute(insert(KEYS).values(values).on_conflict_do_nothing()).rowcount == 1


def revoke(conn: Connection, public_id: str, at: float) -> bool:
    """Mark a key as revoked. One that is revoked already keeps its time. False if there is no such key."""
    since = func.coalesce(KEYS.c.revoked_at, at)
    return conn.execute(update(KEYS).where(KEYS.c.id == public_id).values(revoked_at=since)).rowcount == 1


def rotate(conn: Connection, public_id: str, digest: bytes, until: float, pepper: str | None) -> bool:
    """Replace the digest of a key that is not revoked, and keep the earlier one. False if there is no such key."""
    chosen = (KEYS.c.id == public_id) & KEYS.c.revoked_at.is_(None)
    values = {"digest": digest, "previous_digest": KEYS.c.digest, "previous_until": until}
    return conn.execute(update(KEYS).where(chosen).values(values | {"pepper": pepper})).rowcount == 1


def rehash(conn: Connection, public_id: str, was: bytes, digest: bytes, pepper: str) -> bool:
    """Replace a digest by one of the same secret under another pepper. False if the key has another digest by now."""
    chosen = (KEYS.c.id == public_id) & (KEYS.c.digest == was)
    return conn.execute(update(KEYS).where(chosen).values(digest=digest, pepper=pepper)).rowcount == 1


def _key(row: Row[Any]) -> KeyRow:
    values = dict(row._mapping)
    return KeyRow(**values | {name: frozenset(orjson.loads(values[name])) for name in _SETS})
