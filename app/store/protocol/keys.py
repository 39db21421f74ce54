"""API keys. The store has everything of a key but its secret."""

from typing import Protocol

from msgspec import Struct

from app.store.protocol.admin_events import PROCESS, Actor
from app.store.protocol.idempotency import IdempotencyRecord


class KeyRow(Struct, frozen=True):
    """An API key. `digest` is the HMAC-SHA-256 of its secret under the service's pepper."""

    id: str
    tenant: str
    name: str
    digest: bytes
    scopes: frozenset[str]
    created_at: float
    tiers: frozenset[str] = frozenset()
    """Tiers that the key may use. Empty means every tier."""
    labels: frozenset[str] = frozenset()
    """Labels that are put on every task of this key."""
    max_usd: int | None = None
    """Cap on the cost of one run, in micro-dollars."""
    rpm: int | None = None
    """Requests a minute, over all gateways; so are the next two."""
    tpm: int | None = None
    """Tokens a minute, over all calls of the key's runs."""
    concurrency: int | None = None
    """Runs that may be open at the same time; one that waits for its caller is not."""
    expires_at: float | None = None
    revoked_at: float | None = None
    all_tenants: bool = False
    """True if its scopes apply to the runs of every tenant, and not only to those of its own."""
    previous_digest: bytes | None = None
    """The digest of the secret that was in force before a rotation."""
    previous_until: float | None = None
    """The time until which that secret still works, in seconds since 1970."""
    pepper: str | None = None
    """The mark of the pepper under which `digest` was made; None where an earlier release has made it."""
    tenant_disabled_at: float | None = None
    """The time at which its tenant was disabled, where the key was looked up by its id."""


class KeyQuery(Struct, frozen=True):
    """The keys of a list."""

    tenant: str | None = None
    """None: those of every tenant."""
    name: str | None = None
    ids: frozenset[str] | None = None
    """None: any."""
    in_force: bool | None = None
    """True: those that are neither revoked nor expired at the time `now`; false: the others."""
    now: float = 0.0
    """In seconds since 1970."""
    after: str | None = None
    """The id of the last key of the page before."""
    limit: int | None = None


EVERY_KEY = KeyQuery()


class Keys(Protocol):
    """All verbs raise `StoreUnavailable`. Each change is logged in its transaction, with its author `by`."""

    async def key(self, public_id: str) -> KeyRow | None:
        """Return a key by its public id, revoked and expired ones included."""
        ...

    async def keys(self, query: KeyQuery = EVERY_KEY) -> tuple[KeyRow, ...]:
        """Return the keys of a query, the newest first. Raises `NotFound` if its tenant has no key `after`."""
        ...

    async def add_key(self, row: KeyRow, *, by: Actor = PROCESS) -> bool:
        """Store a new key. False if the id exists already. Raises `Conflict` with the code `name_taken` if another key
        of its tenant that is in force has its name, unless the service itself makes it."""
        ...

    async def revoke_key(self, public_id: str, at: float, *, by: Actor = PROCESS) -> bool:
        """Mark a key as revoked. False if there is no such key."""
        ...

    async def rotate_key(
        self,
        public_id: str,
        digest: bytes,
        until: float,
        pepper: str | None = None,
        *,
        by: Actor = PROCESS,
        once: IdempotencyRecord | None = None,
        now: float = 0.0,
    ) -> bool:
        """Give a key a new secret. The one before it works until `until`, and no earlier one works any longer. `pepper`
        is the mark of the pepper of the new digest. The record `once` of the request is added in the same transaction.

        False if there is no such key, or if it is revoked. Raises `Conflict` with the code `TAKEN`, and changes
        nothing, if an earlier record of the same id lasts at `now`.
        """
        ...

    async def rehash_key(self, public_id: str, *, was: bytes, digest: bytes, pepper: str) -> bool:
        """Replace the digest of the same secret by one under another pepper. False if the key has another digest than
        `was` by now."""
        ...
