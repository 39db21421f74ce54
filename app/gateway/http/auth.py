"""API keys: who is calling, and with which scopes. One function reads the key from a request's headers.

A key is `bt_<public id>_<secret>`. It is looked up by its public id and compared, in constant time, by the
HMAC-SHA-256 of its secret under the service's pepper, or under an earlier pepper that is still accepted; such a key is
then hashed anew under the present one. Every fault of a key gives the same 401 and costs the same work.
A store that cannot be reached is a 503, so that an infrastructure fault never looks like a bad key. The results of
lookups, good and bad, are cached for at most `GatewayContext.key_ttl` seconds under the hash of the whole key, so that
a revocation takes effect within that time.
"""

import asyncio
import hashlib
import hmac
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any, Final, Literal

from fastapi import Security
from fastapi.security import APIKeyHeader, HTTPBearer, SecurityScopes
from starlette.requests import HTTPConnection, Request

from app.core.records import record
from app.core.roles import permits
from app.errors import BatonError, Forbidden, Overloaded, StoreUnavailable, Unauthorized
from app.gateway.http.api_keys import KEY_FORMAT, digest, pepper_mark
from app.gateway.http.context import GatewayContext
from app.store.protocol import Actor, KeyRow
from app.store.protocol.admin_events import Via

ABSENT_DIGEST = hashlib.sha256(b"no such key").digest()
"""The digest that is compared when no key has the id, so that both cases take the same path."""
CACHED_KEYS = 10_000
LEFT: Literal["left"] = "left"
Answer = KeyRow | BatonError | Literal["left"] | None
"""The result of a lookup; `LEFT` if the request that began it was cancelled before its end."""
LOOKUPS = 64
"""The most keys that are looked up at the same time: more of them are a flood of invalid keys."""
LOOKUP_TIMEOUT = 3.0
"""Seconds that a key lookup in the store may take."""
LEAST_PAUSE = 0.2
"""The least time in seconds between two lookups for a stream that is open."""


NO_KEY: Final = (
    "You didn't provide an API key, or two different ones; send one Baton key as `Authorization: Bearer bt_...` or as "
    "`x-api-key`."
)
BEARER: Final = HTTPBearer(
    scheme_name="bearer",
    auto_error=False,
    description="A key as `Authorization: Bearer bt_...`, as OpenAI's clients do.",
)
API_KEY: Final = APIKeyHeader(
    name="x-api-key",
    scheme_name="header",
    auto_error=False,
    description="A key as `x-api-key`, as Anthropic's clients do.",
)
"""Both document where a key may stand; `presented` reads it from either."""


@record(frozen=True, slots=True)
class Caller:
    """An authenticated caller."""

    key: KeyRow
    via: Via = "key"
    """`oidc` for a person, whose `key` has the rights that the settings give."""
    csrf_token: str | None = None
    """For a person: the value that a request must repeat to change something."""

    @property
    def actor(self) -> Actor:
        """The author of what this caller changes."""
        return Actor(self.key.id, self.via)

    @property
    def tenant(self) -> str | None:
        """The tenant whose runs this caller may see; None means all of them.

        `admin` carries every scope but stays inside its tenant: only a key of all tenants reaches beyond its own.
        """
        if self.key.all_tenants:
            return None
        return self.key.tenant

    def sees(self, tenant: str) -> bool:
        """Return True if this caller may see what belongs to a tenant."""
        return self.tenant in (None, tenant)

    def may_list(self, tenant: str | None) -> bool:
        """False if a list is to have the entries of another tenant alone, so that this caller sees none of it."""
        return tenant is None or self.sees(tenant)

    def may(self, scope: str) -> bool:
        """Return True if the key carries `scope`; `admin` carries every one (`core/roles.py`)."""
        return permits(self.key.scopes, scope, all_tenants=self.key.all_tenants)


def presented(connection: HTTPConnection) -> str | None:
    """The key in a request's headers, whichever spelling it uses; None if there is none or if two disagree."""
    found: set[str] = set()
    for name, value in connection.scope["headers"]:
        if name == b"authorization":
            scheme, _, token = value.decode("latin-1").strip().partition(" ")
            found.add(token.strip() if scheme.lower() == "bearer" else "")
        elif name == b"x-api-key":
            found.add(value.decode("latin-1").strip())
    return found.pop() if len(found) == 1 else None


def _mark(key: str | None) -> bytes:
    """Return the hash under which the lookup of a key is remembered."""
    return hashlib.sha256((key or "").encode()).digest()


def _until_rotated(row: KeyRow) -> KeyRow:
    """Return the row for a caller with the secret from before a rotation: the key expires for them when that secret
    does."""
    until = row.previous_until or 0.0
    return replace(row, expires_at=until if row.expires_at is None else min(until, row.expires_at))


def _is_any(stored: bytes, asked: Iterable[bytes]) -> bool:
    """Return True if the stored digest is one of these; every one is compared, in constant time."""
    return any([hmac.compare_digest(one, stored) for one in asked])


class Keys:
    """Finds the caller of a request; one for each gateway."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._known: dict[bytes, tuple[float, KeyRow | None]] = {}
        self._asked: dict[bytes, asyncio.Future[Answer]] = {}
        """Lookups in progress: a request with the same key waits for the one that there is."""

    def needs(self, *scopes: str) -> Any:
        """Return the declaration of a route's caller: `Annotated[Caller, keys.needs("runs:read")]`."""
        return Security(self.caller, scopes=scopes)

    async def caller(
        self,
        request: Request,
        scopes: SecurityScopes,
        bearer: Annotated[object, Security(BEARER)],
        header: Annotated[object, Security(API_KEY)],
    ) -> Caller:
        """Return the caller of a request, if its key has every one of `scopes`; raises `Unauthorized` or
        `Forbidden`."""
        found = Caller(await self._row(presented(request)))
        request.scope["baton.log"].key = found.key
        if not all(found.may(scope) for scope in scopes.scopes):
            raise Forbidden()
        return found

    async def until_refused(self, request: Request, scope: str) -> None:
        """Return once the caller of a request may not use `scope` any more: within `key_ttl` of a revocation.

        While nobody can say whether they may, because the database is away, they may."""
        key = presented(request)
        while True:
            await asyncio.sleep(self._seconds_known(key))
            try:
                await self.caller(request, SecurityScopes([scope]), key, None)
            except (StoreUnavailable, Overloaded):
                continue
            except BatonError:
                return

    def _seconds_known(self, key: str | None) -> float:
        """Return the seconds for which the last lookup of a key counts."""
        until, row = self._known.get(_mark(key), (0.0, None))
        if row is None:
            return self._context.key_ttl / 2
        seconds = until - self._context.tick()
        if row.expires_at is not None:
            seconds = min(seconds, row.expires_at - self._context.now())
        return max(seconds, LEAST_PAUSE)

    async def _row(self, key: str | None) -> KeyRow:
        """Return a key's row, if it may be used now. Without a key nothing is looked up."""
        if not key:
            raise Unauthorized(NO_KEY)
        parts = KEY_FORMAT.fullmatch(key)
        public, secret = (parts[1], parts[2]) if parts else ("", "")
        mark = _mark(key)
        until, row = self._known.get(mark, (0.0, None))
        if until <= self._context.tick():
            row = await self._look_up(mark, public, secret)
        now = self._context.now()
        if row is None or row.revoked_at is not None or row.tenant_disabled_at is not None:
            raise Unauthorized()
        if row.expires_at is not None and row.expires_at <= now:
            raise Unauthorized()
        return row

    async def _look_up(self, mark: bytes, public: str, secret: str) -> KeyRow | None:
        """Return the row of a key if its secret is right: one lookup, however many requests bring it meanwhile."""
        while (asked := self._asked.get(mark)) is not None:
            outcome = await asyncio.shield(asked)
            if isinstance(outcome, BatonError):
                raise outcome
            if outcome != LEFT:
                return outcome
        if len(self._asked) >= LOOKUPS:
            raise Overloaded(retry_after=1.0)
        self._asked[mark] = asked = asyncio.get_running_loop().create_future()
        answer: Answer = LEFT
        began = self._context.tick()
        try:
            answer = row = await self._check(await self._find(public), secret)
            self._remember(mark, row, began)
            return row
        except BatonError as error:
            answer = error
            raise
        finally:
            del self._asked[mark]
            asked.set_result(answer)

    async def _find(self, public: str) -> KeyRow | None:
        if not public:
            return None
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT):
                return await self._context.store.key(public)
        except BatonError:
            raise
        except (OSError, TimeoutError):
            raise StoreUnavailable(retry_after=1) from None

    async def _check(self, row: KeyRow | None, secret: str) -> KeyRow | None:
        """Return the row, if the secret is the key's: in force, or from before a rotation that still overlaps."""
        asked = [digest(secret, pepper) for pepper in self._context.peppers()]
        same = _is_any(row.digest if row else ABSENT_DIGEST, asked)
        previous = row.previous_digest if row is not None else None
        rotated = _is_any(previous or ABSENT_DIGEST, asked)
        if row is None or not (same or rotated):
            return None
        if not same:
            return _until_rotated(row)
        if row.pepper != pepper_mark(self._context.pepper):
            await self._hash_anew(row, asked[0])
        return row

    async def _hash_anew(self, row: KeyRow, made: bytes) -> None:
        """Store the digest under the present pepper, so that an earlier one can be given up. While the database takes
        no writes the key works all the same, and the next lookup tries again."""
        mark = pepper_mark(self._context.pepper)
        with suppress(BatonError, OSError, TimeoutError):
            async with asyncio.timeout(LOOKUP_TIMEOUT):
                await self._context.store.rehash_key(row.id, was=row.digest, digest=made, pepper=mark)

    def _remember(self, mark: bytes, row: KeyRow | None, began: float) -> None:
        """Keep what a lookup has found, counted from its beginning: the key may have been revoked since then."""
        self._known.pop(mark, None)
        while len(self._known) >= CACHED_KEYS:
            del self._known[next(iter(self._known))]
        self._known[mark] = (began + self._context.key_ttl, row)
