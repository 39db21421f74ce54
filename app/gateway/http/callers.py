"""Callers, who are found by the API keys in the headers of their requests.

One function reads the key from a request's headers. A key is `bt_<public id>_<secret>`. It is looked up by its public
id and compared, in constant time, by the HMAC-SHA-256 of its secret under the service's pepper, or under an earlier
pepper that is still accepted; such a key is then hashed anew under the present one. Every fault of a key gives the same
401 and costs the same work. A store that cannot be reached is a 503, so that an infrastructure fault never looks like a
bad key. The results of lookups, good and bad, are cached for at most `GatewayContext.key_ttl` seconds under the hash of
the whole key, so that a revocation takes effect within that time.
"""

import asyncio
import hashlib
import hmac
from collections.abc import Iterable
from contextlib import suppress
from typing import Annotated, Any, Final, Literal

from fastapi import Security
from fastapi.security import APIKeyHeader, HTTPBearer, SecurityScopes
from msgspec import Struct
from msgspec.structs import replace
from starlette.requests import HTTPConnection, Request

from app.core.roles import KEY_FORMAT, permits
from app.errors import BatonError, Forbidden, Overloaded, StoreUnavailable, Unauthorized
from app.gateway.http.api_keys import digest, pepper_mark
from app.gateway.http.context import GatewayContext
from app.store.protocol import Actor, KeyRow
from app.store.protocol.admin_events import Via

ABSENT_DIGEST = hashlib.sha256(b"no such key").digest()
"""The digest that is compared when no key has the id, so that both cases take the same path."""
CACHED_KEYS = 10_000
CANCELLED: Literal["cancelled"] = "cancelled"
LookupResult = KeyRow | BatonError | Literal["cancelled"] | None
"""The result of a lookup; `CANCELLED` if the request that began it was cancelled before its end."""
MOST_LOOKUPS = 64
"""The most keys that are looked up at the same time: more of them are a flood of invalid keys."""
LOOKUP_SECONDS = 3.0
"""Seconds that a key lookup in the store may take."""
LEAST_PAUSE_SECONDS = 0.2
"""The least time between two lookups for a stream that is open."""
NO_KEY: Final = (
    "You didn't provide an API key; send a Baton key as `Authorization: Bearer bt_...` or as `x-api-key: bt_...`."
)
NO_BEARER: Final = (
    "The Authorization header does not begin with `Bearer`; send your Baton key as `Authorization: Bearer bt_...`, or "
    "as `x-api-key: bt_...` without an Authorization header."
)
TWO_KEYS: Final = "The headers have two different API keys; send one of them."
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
"""Both document where a key may stand; `find_api_key` reads it from either."""


class Caller(Struct, frozen=True):
    """An authenticated caller."""

    key: KeyRow
    via: Via = "key"
    """`oidc` for a person, whose `key` has the rights that the settings give."""
    csrf_token: str | None = None
    """For a person: the value that a request must repeat to change something."""

    @property
    def actor(self) -> Actor:
        """Return the author of what this caller changes."""
        return Actor(self.key.id, self.via)

    @property
    def tenant(self) -> str | None:
        """Return the tenant whose runs this caller may see; None means all of them.

        `admin` carries every scope but stays inside its tenant: only a key of all tenants reaches beyond its own.
        """
        if self.key.all_tenants:
            return None
        return self.key.tenant

    def sees(self, tenant: str) -> bool:
        """Return True if this caller may see what belongs to a tenant."""
        return self.tenant in (None, tenant)

    def may_list(self, tenant: str | None) -> bool:
        """Return False if a list is to have the entries of another tenant alone, so that this caller sees none of
        it."""
        return tenant is None or self.sees(tenant)

    def may(self, scope: str) -> bool:
        """Return True if the key carries `scope`; `admin` carries every one (`core/roles.py`)."""
        return permits(self.key.scopes, scope, all_tenants=self.key.all_tenants)

    def may_read_content(self, key: str) -> bool:
        """Return True if this caller may read the content of a run that the `key` of this id began: it is the same key,
        or it carries `audit:read`. Whether the caller sees the run's tenant is another question."""
        return key == self.key.id or self.may("audit:read")


OTHER_SCHEME: Final = ""
"""Stands for the credentials of an Authorization header that is no Bearer: no key, and not that of the other header
either."""


def _credentials(connection: HTTPConnection) -> set[str]:
    """Return the keys in a request's headers, whichever spelling they use, and `OTHER_SCHEME`. A header without a key
    counts as none, such as that of a client which was given an empty one."""
    credentials: set[str] = set()
    for name, value in connection.scope["headers"]:
        text = value.decode("latin-1").strip()
        if name == b"authorization" and text:
            scheme, _, token = text.partition(" ")
            text = token.strip()
            if scheme.lower() != "bearer":
                credentials.add(OTHER_SCHEME)
                continue
        elif name != b"x-api-key":
            continue
        if text:
            credentials.add(text)
    return credentials


def find_api_key(connection: HTTPConnection) -> str | None:
    """Return the key in a request's headers; None if there is none or if two disagree."""
    credentials = _credentials(connection)
    if len(credentials) != 1 or OTHER_SCHEME in credentials:
        return None
    return credentials.pop()


def _no_key_error(connection: HTTPConnection) -> Unauthorized:
    """Return the refusal of a request in whose headers `find_api_key` finds no key."""
    credentials = _credentials(connection)
    if OTHER_SCHEME in credentials:
        return Unauthorized(NO_BEARER)
    if credentials:
        return Unauthorized(TWO_KEYS)
    return Unauthorized(NO_KEY)


def _mark(key: str | None) -> bytes:
    """Return the hash under which the lookup of a key is remembered."""
    return hashlib.sha256((key or "").encode()).digest()


def _until_rotated(row: KeyRow) -> KeyRow:
    """Return the row for a caller with the secret from before a rotation: the key expires for them when that secret
    does."""
    until = row.previous_until or 0.0
    if row.expires_at is not None:
        until = min(until, row.expires_at)
    return replace(row, expires_at=until)


def _is_any(stored_digest: bytes, digests: Iterable[bytes]) -> bool:
    """Return True if the stored digest is one of these; every one is compared, in constant time."""
    return any([hmac.compare_digest(digest, stored_digest) for digest in digests])


class Keys:
    """Finds the caller of a request; one for each gateway."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._cache: dict[bytes, tuple[float, KeyRow | None]] = {}
        """The results of lookups by the mark of the key, each with the tick until which it counts."""
        self._lookups: dict[bytes, asyncio.Future[LookupResult]] = {}
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
        key = find_api_key(request)
        if key is None:  # nothing is looked up
            raise _no_key_error(request)
        caller = Caller(await self._row(key))
        request.scope["baton.log"].key = caller.key
        if not all(caller.may(scope) for scope in scopes.scopes):
            raise Forbidden()
        return caller

    async def wait_until_refused(self, request: Request, scope: str) -> None:
        """Return once the caller of a request may not use `scope` any more: within `key_ttl` of a revocation.

        While nobody can say whether they may, because the database is away, they may."""
        key = find_api_key(request)
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
        until, row = self._cache.get(_mark(key), (0.0, None))
        if row is None:
            return self._context.key_ttl / 2
        seconds = until - self._context.tick()
        if row.expires_at is not None:
            seconds = min(seconds, row.expires_at - self._context.now())
        return max(seconds, LEAST_PAUSE_SECONDS)

    async def _row(self, key: str) -> KeyRow:
        """Return a key's row, if it may be used now."""
        public, secret = "", ""
        parts = KEY_FORMAT.fullmatch(key)
        if parts is not None:
            public, secret = parts[1], parts[2]
        mark = _mark(key)
        until, row = self._cache.get(mark, (0.0, None))
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
        while (lookup := self._lookups.get(mark)) is not None:
            earlier = await asyncio.shield(lookup)
            if isinstance(earlier, BatonError):
                raise earlier
            if earlier != CANCELLED:
                return earlier
        if len(self._lookups) >= MOST_LOOKUPS:
            raise Overloaded()
        self._lookups[mark] = lookup = asyncio.get_running_loop().create_future()
        result: LookupResult = CANCELLED
        began = self._context.tick()
        try:
            result = row = await self._check(await self._find(public), secret)
            self._remember(mark, row, began)
            return row
        except BatonError as error:
            result = error
            raise
        finally:
            del self._lookups[mark]
            lookup.set_result(result)

    async def _find(self, public: str) -> KeyRow | None:
        if not public:
            return None
        try:
            async with asyncio.timeout(LOOKUP_SECONDS):
                return await self._context.store.key(public)
        except BatonError:
            raise
        except (OSError, TimeoutError):
            raise StoreUnavailable() from None

    async def _check(self, row: KeyRow | None, secret: str) -> KeyRow | None:
        """Return the row, if the secret is the key's: the present one, or one from before a rotation that still
        overlaps."""
        digests = [digest(secret, pepper) for pepper in self._context.peppers()]
        current = previous = ABSENT_DIGEST
        if row is not None:
            current, previous = row.digest, row.previous_digest or ABSENT_DIGEST
        is_present = _is_any(current, digests)
        is_previous = _is_any(previous, digests)
        if row is None or not (is_present or is_previous):
            return None
        if not is_present:
            return _until_rotated(row)
        if row.pepper != pepper_mark(self._context.pepper):
            await self._store_digest(row, digests[0])
        return row

    async def _store_digest(self, row: KeyRow, new_digest: bytes) -> None:
        """Store the digest under the present pepper, so that an earlier one can be given up. While the database takes
        no writes the key works all the same, and the next lookup tries again."""
        mark = pepper_mark(self._context.pepper)
        with suppress(BatonError, OSError, TimeoutError):
            async with asyncio.timeout(LOOKUP_SECONDS):
                await self._context.store.rehash_key(row.id, was=row.digest, digest=new_digest, pepper=mark)

    def _remember(self, mark: bytes, row: KeyRow | None, began: float) -> None:
        """Keep what a lookup has found, counted from its beginning: the key may have been revoked since then."""
        self._cache.pop(mark, None)
        while len(self._cache) >= CACHED_KEYS:
            del self._cache[next(iter(self._cache))]
        self._cache[mark] = (began + self._context.key_ttl, row)
