"""Rows of API keys. They hold the digest of a secret, never the secret. Every change is logged with its author."""

import hashlib
from collections.abc import Mapping
from typing import Any, Final

import orjson
from msgspec.structs import asdict
from sqlalchemy import ColumnElement, Connection, and_, func, literal, not_, or_, select, update

from app.errors import Conflict, RecordDamaged
from app.store.protocol import PROCESS, TAKEN, Actor, IdempotencyRecord, KeyQuery, KeyRow
from app.store.rows import idempotency
from app.store.rows.admin_events import note
from app.store.rows.positions import follows
from app.store.sqlkit.tables import KEYS, TENANTS, insert_into

LOCK: Final = 0x6261746F6E6B6579
"""The number of the advisory lock of the names of keys: `batonkey` in ASCII."""
_SETS = ("scopes", "tiers", "labels")
_DIGESTS = ("digest", "previous_digest")


def find(conn: Connection, public_id: str) -> KeyRow | None:
    """Return a key by its public id."""
    of_tenant = KEYS.outerjoin(TENANTS, TENANTS.c.name == KEYS.c.tenant)
    query = select(KEYS, TENANTS.c.disabled_at.label("tenant_disabled_at")).select_from(of_tenant)
    row = conn.execute(query.where(KEYS.c.id == public_id)).one_or_none()
    return _key(row._mapping) if row else None


def page(conn: Connection, query: KeyQuery) -> tuple[KeyRow, ...]:
    """Return the keys of a query, the newest first. Raises `NotFound` if its tenant has no key `after`."""
    key = KEYS.c
    of_tenant = [] if query.tenant is None else [key.tenant == query.tenant]
    conditions: list[ColumnElement[bool]] = [*of_tenant]
    if query.name is not None:
        conditions.append(key.name == query.name)
    if query.ids is not None:
        conditions.append(key.id.in_(query.ids))
    if query.in_force is not None:
        is_accepted: ColumnElement[bool] = and_(
            key.revoked_at.is_(None), or_(key.expires_at.is_(None), key.expires_at > query.now)
        )
        if not query.in_force:
            is_accepted = not_(is_accepted)
        conditions.append(is_accepted)
    statement = select(KEYS).where(*conditions).order_by(key.created_at.desc(), key.id.desc()).limit(query.limit)
    if query.after is not None:
        statement = statement.where(follows(conn, key.created_at, key.id, query.after, of_tenant))
    return tuple([_key(row._mapping) for row in conn.execute(statement)])


def add(conn: Connection, key: KeyRow, by: Actor) -> bool:
    """Store a key. False if its id exists already. Raises `Conflict` if another key of its tenant that is in force has
    its name, unless the service itself makes it."""
    if by != PROCESS:
        _refuse_taken_name(conn, key)
    values = {name: value for name, value in asdict(key).items() if name in KEYS.c}
    for name in _SETS:
        values[name] = orjson.dumps(sorted(getattr(key, name))).decode()
    if conn.execute(insert_into(conn, KEYS).values(values).on_conflict_do_nothing()).rowcount != 1:
        return False
    note(conn, by, "key.added", key.id, tenant=key.tenant, before=None, after=public(key))
    return True


def _refuse_taken_name(conn: Connection, key: KeyRow) -> None:
    """Raise `Conflict` if another key has the name. Nobody else gives a name until the end of the transaction."""
    if conn.dialect.name == "postgresql":
        conn.execute(select(func.pg_advisory_xact_lock(literal(LOCK))))
    for namesake in page(conn, KeyQuery(key.tenant, name=key.name, in_force=True, now=key.created_at)):
        if namesake.id != key.id:
            words = f"The key {namesake.id} of this tenant has the name already; choose another, or rotate that key."
            raise Conflict(words, code="name_taken")


def revoke(conn: Connection, public_id: str, at: float, by: Actor) -> bool:
    """Mark a key as revoked. One that is revoked already keeps its time. False if there is no such key."""
    key = _lock_key(conn, public_id)
    if key is None:
        return False
    if key.revoked_at is None:
        _change(conn, key, {"revoked_at": at}, by, "key.revoked")
    return True


def rotate(
    conn: Connection,
    public_id: str,
    digest: bytes,
    until: float,
    pepper: str | None,
    by: Actor,
    once: IdempotencyRecord | None,
    now: float,
) -> bool:
    """Replace the digest of a key that is not revoked, and keep the earlier one. False if there is no such key.

    Raises `Conflict` with the code `TAKEN` if the request was carried out before.
    """
    key = _lock_key(conn, public_id)
    if key is None or key.revoked_at is not None:
        return False
    if once is not None and idempotency.remember(conn, once, now) is not once:
        raise Conflict(code=TAKEN)
    values = {"digest": digest, "previous_digest": key.digest, "previous_until": until, "pepper": pepper}
    _change(conn, key, values, by, "key.rotated")
    return True


def rehash(conn: Connection, public_id: str, was: bytes, digest: bytes, pepper: str) -> bool:
    """Replace a digest by one of the same secret under another pepper. False if the key has another digest by now."""
    key = _lock_key(conn, public_id)
    if key is None or key.digest != was:
        return False
    _change(conn, key, {"digest": digest, "pepper": pepper}, PROCESS, "key.rehashed")
    return True


def public(key: KeyRow) -> dict[str, Any]:
    """Return a key's fields as the log has them: in place of each digest a hash of it, which tells digests apart."""
    values: dict[str, Any] = {}
    for name in key.__struct_fields__:
        if name in KEYS.c:
            values[name] = getattr(key, name)
    for name in _SETS:
        values[name] = sorted(values[name])
    for name in _DIGESTS:
        values[name] = None if values[name] is None else hashlib.sha256(values[name]).hexdigest()
    return values


def _lock_key(conn: Connection, public_id: str) -> KeyRow | None:
    row = conn.execute(select(KEYS).where(KEYS.c.id == public_id).with_for_update()).one_or_none()
    return _key(row._mapping) if row else None


def _change(conn: Connection, key: KeyRow, values: dict[str, Any], by: Actor, action: str) -> None:
    """Change columns of a locked row, and log it."""
    conn.execute(update(KEYS).where(KEYS.c.id == key.id).values(**values))
    after = KeyRow(**asdict(key) | values)
    note(conn, by, action, key.id, tenant=key.tenant, before=public(key), after=public(after))


def _key(row: Mapping[Any, Any]) -> KeyRow:
    """Return the key of a row. Raises `RecordDamaged`."""
    values = {str(name): value for name, value in row.items()}
    try:
        for name in _SETS:
            values[name] = frozenset(orjson.loads(values[name]))
    except (TypeError, orjson.JSONDecodeError):
        found = f"The API key {row['id']} cannot be read: its row was altered, or the database is damaged."
        raise RecordDamaged(f"{found} `baton audit check` says what else is wrong.") from None
    return KeyRow(**values)
