"""API keys as strings, digests and rows; `callers.py` finds the caller of a request.

A key is `bt_<public id>_<secret>`. Commands import this module without the web framework.
"""

import hmac
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from app.core.pool.catalog import MILLION
from app.core.roles import KEY_FORM_TEXT, KEY_FORMAT, SCOPES, role_of
from app.errors import ConfigInvalid
from app.store.protocol import KeyQuery, KeyRow, Keys

NEWEST_KEYS = 100
"""Keys that are looked at to tell whether the pepper is that of the database."""


def digest(secret: str, pepper: bytes) -> bytes:
    """Return the hash under which a key's secret is stored."""
    return hmac.digest(pepper, secret.encode(), "sha256")


def pepper_mark(pepper: bytes) -> str:
    """Return a short name of a pepper, from which it cannot be found: stored with each digest that was made with it."""
    return hmac.digest(pepper, b"baton pepper mark", "sha256").hex()[:12]


def mint(
    pepper: bytes,
    *,
    tenant: str,
    name: str,
    scopes: Iterable[str],
    now: float,
    public: str | None = None,
) -> tuple[str, KeyRow]:
    """Return a new key: the string that is shown once, and the row that is stored. `ConfigInvalid` for an unknown
    scope.

    `public` is its public id, if that is chosen already.
    """
    public = public or secrets.token_hex(8)
    key = f"bt_{public}_{secrets.token_urlsafe(32)}"
    return key, adopt(key, pepper, tenant=tenant, name=name, scopes=scopes, now=now)


def adopt(key: str, pepper: bytes, *, tenant: str, name: str, scopes: Iterable[str], now: float) -> KeyRow:
    """Return the row for a key chosen elsewhere (`BATON_BOOTSTRAP_KEY`); `ConfigInvalid` if it has not a key's form."""
    faults: list[str] = []
    parts = KEY_FORMAT.fullmatch(key)
    if parts is None:
        faults.append(f"an API key {KEY_FORM_TEXT}")
    unknown = sorted(set(scopes) - set(SCOPES))
    if unknown:
        faults.append(f"unknown scope {', '.join(unknown)}; there are {', '.join(SCOPES)}")
    if parts is None or faults:
        raise ConfigInvalid(faults)
    return KeyRow(
        id=parts[1],
        tenant=tenant,
        name=name,
        digest=digest(parts[2], pepper),
        pepper=pepper_mark(pepper),
        scopes=frozenset(scopes),
        created_at=now,
    )


def new_secret(row: KeyRow, pepper: bytes) -> tuple[str, bytes]:
    """Return a new secret for a key: the string that is shown once, and the digest that is stored."""
    secret = secrets.token_urlsafe(32)
    return f"bt_{row.id}_{secret}", digest(secret, pepper)


def is_in_force(row: KeyRow, now: float) -> bool:
    """Return True if the key is neither revoked nor expired."""
    return row.revoked_at is None and (row.expires_at is None or row.expires_at > now)


async def is_any_key_accepted(store: Keys, peppers: Sequence[bytes], now: float) -> bool | None:
    """Return False if all keys in force are hashed under other peppers than these, so that every caller is refused;
    None if there is no key in force. Only the newest keys are looked at."""
    rows = await store.keys(KeyQuery(in_force=True, now=now, limit=NEWEST_KEYS))
    if not rows:
        return None
    marks = {pepper_mark(pepper) for pepper in peppers}
    return any(row.pepper is None or row.pepper in marks for row in rows)


def key_to_json(row: KeyRow, now: float) -> dict[str, Any]:
    """Return a key without its secret. Times are seconds since 1970, amounts are dollars."""
    return {
        "id": row.id,
        "name": row.name,
        "tenant": row.tenant,
        "all_tenants": row.all_tenants,
        "role": role_of(row.scopes),
        "scopes": sorted(row.scopes),
        "tiers": sorted(row.tiers),
        "labels": sorted(row.labels),
        "usd": row.max_usd / MILLION if row.max_usd is not None else None,
        "rpm": row.rpm,
        "tpm": row.tpm,
        "concurrency": row.concurrency,
        "created_at": row.created_at,
        "expires_at": row.expires_at,
        "revoked_at": row.revoked_at,
        "previous_until": row.previous_until,
        "in_force": is_in_force(row, now),
    }
