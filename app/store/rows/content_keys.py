"""Rows of content keys: one or more for each tenant whose contents are encrypted (`sqlkit/sealing.py`)."""

from collections.abc import Collection

from msgspec.structs import asdict
from sqlalchemy import Connection, delete, insert, select, update

from app.store.rows import holds
from app.store.sqlkit.sealing import StoredKey
from app.store.sqlkit.tables import CONTENT_KEYS

KEY = CONTENT_KEYS.c


def find_current(conn: Connection, tenant: str) -> StoredKey | None:
    """Return the key under which a tenant's new contents are encrypted; None if it has none yet."""
    mine = select(CONTENT_KEYS).where(KEY.tenant == tenant, KEY.retired_at.is_(None))
    row = conn.execute(mine.order_by(KEY.made_at, KEY.id).limit(1)).one_or_none()
    return StoredKey(*row) if row else None


def of_ids(conn: Connection, ids: Collection[str]) -> tuple[StoredKey, ...]:
    """Return the keys of these ids that were not destroyed."""
    return tuple([StoredKey(*row) for row in conn.execute(select(CONTENT_KEYS).where(KEY.id.in_(sorted(ids))))])


def read_all(conn: Connection) -> tuple[StoredKey, ...]:
    """Return all keys, by tenant and age."""
    query = select(CONTENT_KEYS).order_by(KEY.tenant, KEY.made_at, KEY.id)
    return tuple([StoredKey(*row) for row in conn.execute(query)])


def add(conn: Connection, key: StoredKey) -> StoredKey:
    """Store a tenant's key, unless it has one in use by now; the key that is in use then."""
    key_in_use = find_current(conn, key.tenant)
    if key_in_use is None:
        conn.execute(insert(CONTENT_KEYS).values(asdict(key)))
    return key_in_use or key


def replace_wrapping(conn: Connection, key: StoredKey, was: str) -> bool:
    """Store a key encrypted under another master key than `was`. False if it has changed meanwhile."""
    same = KEY.id == key.id, KEY.master == was
    statement = update(CONTENT_KEYS).where(*same).values(master=key.master, wrapped=key.wrapped)
    return conn.execute(statement).rowcount == 1


def retire(conn: Connection, tenant: str, at: float) -> int:
    """Take a tenant's keys out of use for new contents. Returns the number of keys that were in use."""
    mine = KEY.tenant == tenant, KEY.retired_at.is_(None)
    return conn.execute(update(CONTENT_KEYS).where(*mine).values(retired_at=at)).rowcount


def destroy(conn: Connection, tenant: str) -> tuple[str, ...]:
    """Destroy a tenant's keys that are out of use. Returns their ids.

    Raises `LegalHold` if a hold may cover runs of the tenant, because all of its contents are lost with its keys.
    """
    holds.lock(conn)
    holds.refuse_tenant(conn, tenant)
    mine = KEY.tenant == tenant, KEY.retired_at.is_not(None)
    return tuple(conn.execute(delete(CONTENT_KEYS).where(*mine).returning(KEY.id)).scalars())
