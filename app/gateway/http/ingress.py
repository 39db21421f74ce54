"""The way from a request to the endpoint of its route: `Direct` routes, bodies, and callers by their keys.

*The body.* What the parser gives is safe to store and to send on: UTF-8 only, no NUL, no lone surrogates, no duplicate
keys, integers within 64 bits, and bounded depth, node count and lengths. It refuses everything else with a status and a
message of its own, in which nothing of the input occurs. A body in gzip or deflate is unpacked piece by piece, and no
further than a body may be long. A body whose type is no JSON, because none was set or the client's default was left
(curl's is that of a form), is read if it looks like a JSON object: keys are never cookies, so no web page gains by it.

Bodies are counted while they arrive, and their nodes before anything is built of them, so that no body within the limit
holds up the event loop for more than some tens of milliseconds (measured in tests/gateway/test_bad_input.py). orjson
does the parsing: it is strict about NaN, 1e999, surrogates, encodings and grammar; duplicate keys, NUL and integers
that it would turn into floats are ours to find.

*The caller.* One function reads the key from a request's headers. A key is `bt_<public id>_<secret>`. It is looked up
by its public id and compared, in constant time, by the HMAC-SHA-256 of its secret under the service's pepper, or under
an earlier pepper that is still accepted; such a key is then hashed anew under the present one. Every fault of a key
gives the same 401 and costs the same work. A store that cannot be reached is a 503, so that an infrastructure fault
never looks like a bad key. The results of lookups, good and bad, are cached for at most `GatewayContext.key_ttl`
seconds under the hash of the whole key, so that a revocation takes effect within that time.
"""

import asyncio
import hashlib
import hmac
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Final, Literal

import orjson
from fastapi import Depends, Security
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from fastapi.security import APIKeyHeader, HTTPBearer, SecurityScopes
from fastapi.security.base import SecurityBase
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.core.records import record
from app.core.roles import KEY_FORMAT, permits
from app.errors import (
    BatonError,
    Forbidden,
    InvalidRequest,
    Overloaded,
    StoreUnavailable,
    TooLarge,
    TooSlow,
    Unauthorized,
    UnsupportedMedia,
)
from app.gateway.http.api_keys import digest, pepper_mark
from app.gateway.http.context import Bounds, GatewayContext, PendingBodies
from app.gateway.http.field_names import FIELD_NAME, MOST_PARAM_CHARS
from app.store.protocol import Actor, KeyRow
from app.store.protocol.admin_events import Via

INTEGER_BOUND = 1 << 63
WHITE_SPACE: Final = b" \t\r\n"
NUMBER = (float, int)
YIELD_ABOVE = 1 << 18
"""Bytes of a body from which the event loop gets a turn between the passes over it."""
ESCAPED_COLON = b"\\u003"
"""The beginning of an escaped colon."""
SLICE_BYTES = 1 << 20
"""Bytes of a body from which escapes are removed in one turn of the event loop."""
UNPACKED_BYTES: Final = 1 << 18
"""The most bytes that are unpacked in one turn of the event loop."""
ENCODINGS: Final = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""The content encodings that are read, each with zlib's parameter for it."""
DEFAULT_MEDIA_TYPES: Final = frozenset(
    {"", "application/x-www-form-urlencoded", "text/plain", "application/octet-stream"}
)
"""Media types that clients send where nobody has set one."""
Reserve = Callable[[int], None]
"""Reserves room for more bytes; raises `Overloaded` where there is none."""
Dependency = Callable[[Request], Awaitable[Any]]


async def read_json(request: Request, bounds: Bounds) -> dict[str, object]:
    """Return the JSON object in a request's body; raises `TooLarge`, `TooSlow`, `UnsupportedMedia`, `InvalidRequest` or
    `Overloaded`."""
    _check_headers(request, bounds)
    with room_for_body(bounds.pending, max(bounds.all_bodies, 2 * bounds.body)) as reserve:
        return await _read_json(request, bounds, reserve)


@contextmanager
def room_for_body(pending: PendingBodies, most_bytes: int) -> Iterator[Reserve]:
    """Yield a function that reserves room for bytes of one body until the block ends; it raises `Overloaded` where all
    bodies together would take more than `most_bytes`."""
    reserved_bytes = 0

    def reserve(size: int) -> None:
        nonlocal reserved_bytes
        if pending.bytes + size > most_bytes:
            raise Overloaded("Too much is being sent to this service at once; try again shortly.")
        pending.bytes += size
        reserved_bytes += size

    try:
        yield reserve
    finally:
        pending.bytes -= reserved_bytes


async def _read_json(request: Request, bounds: Bounds, reserve: Reserve) -> dict[str, object]:
    content_length = request.headers.get("content-length", "")
    if content_length.isdigit():  # a body that is too much is refused before it is read
        reserve(int(content_length))
        body = await _read(request, bounds)
    else:
        body = await _read(request, bounds, reserve)
    encoding = _encoding(request)
    if encoding:
        body = await _unpack(body, encoding, bounds, reserve)
    if not _says_json(request) and not body.lstrip(WHITE_SPACE).startswith(b"{"):
        raise UnsupportedMedia()
    await _yield_if_large(body)
    written_keys = None
    if len(body) > bounds.nodes or ESCAPED_COLON in body:
        written_keys = await _count_keys(body, bounds)
    value = _parse(body)
    await _yield_if_large(body)
    parsed_keys, colons_in_strings = _check_values(value, bounds, may_have_nul=b"\\u0000" in body)
    if written_keys is None:
        written_keys = body.count(b":") - colons_in_strings
    if parsed_keys != written_keys:
        raise InvalidRequest("An object in the body has the same key twice.", code="invalid_json")
    await _yield_if_large(body)
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.", code="invalid_json")
    return value


async def read_json_if_any(request: Request, bounds: Bounds) -> dict[str, object]:
    """`read_json` for routes that need no body: none at all is an empty object."""
    headers = request.headers
    if headers.get("content-length", "0").strip() == "0" and "transfer-encoding" not in headers:
        return {}
    return await read_json(request, bounds)


def json_body(bounds: Bounds, *, optional: bool = False) -> Any:
    """Return the declaration of a route's body: `Annotated[dict[str, object], json_body(context.bounds)]`.

    It is a dependency, so that a body is read after the key was checked and within its bounds; FastAPI's own body
    parameters are read first, and whole.
    """
    read = read_json_if_any if optional else read_json

    async def body(request: Request) -> dict[str, object]:
        return await read(request, bounds)

    return Depends(body)


async def _yield_if_large(body: bytes) -> None:
    """Give the event loop a turn between two passes over a large body."""
    if len(body) > YIELD_ABOVE:
        await asyncio.sleep(0)


def _encoding(request: Request) -> str:
    """Return the content encoding, in lower case; empty where there is none."""
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding == "identity":
        return ""
    return encoding


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _says_json(request: Request) -> bool:
    kind = _media_type(request)
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _check_headers(request: Request, bounds: Bounds) -> None:
    headers = request.headers
    if _encoding(request) not in ("", *ENCODINGS):
        raise UnsupportedMedia()
    if not _says_json(request) and _media_type(request) not in DEFAULT_MEDIA_TYPES:
        raise UnsupportedMedia()
    rest = headers.get("content-type", "").partition(";")[2]
    charset = rest.lower().partition("charset=")[2].split(";")[0].strip(' "')
    if charset not in ("", "utf-8", "utf8", "us-ascii"):
        raise UnsupportedMedia()
    length = headers.get("content-length", "0")
    if length.isdigit() and (len(length) > 18 or int(length) > bounds.body):
        raise TooLarge()


async def _read(request: Request, bounds: Bounds, reserve: Reserve | None = None) -> bytes:
    """Read the body as it arrives; its bytes are reserved one by one unless the whole length is reserved already."""
    body = bytearray()
    try:
        async with asyncio.timeout(bounds.seconds):
            while len(body) <= bounds.body:
                message = await request.receive()
                if message["type"] != "http.request":
                    raise ClientDisconnect()
                part = message.get("body", b"")
                if reserve is not None:
                    reserve(len(part))
                body += part
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        raise TooSlow() from None
    if len(body) > bounds.body:
        raise TooLarge()
    return bytes(body)


async def _unpack(body: bytes, encoding: str, bounds: Bounds, reserve: Reserve) -> bytes:
    """Return the body without its content encoding, which must be one whole stream; raises `TooLarge` with the first
    byte that is too many, and `InvalidRequest`."""
    unpacker = zlib.decompressobj(wbits=ENCODINGS[encoding])
    content = bytearray()
    while not unpacker.eof:
        try:
            piece = unpacker.decompress(body, UNPACKED_BYTES)
        except zlib.error:
            raise _encoding_error(encoding) from None
        body = unpacker.unconsumed_tail
        if not piece and not body and not unpacker.eof:
            raise _encoding_error(encoding)  # it ends too early
        reserve(len(piece))
        content += piece
        if len(content) > bounds.body:
            raise TooLarge()
        await asyncio.sleep(0)
    if unpacker.unused_data:
        raise _encoding_error(encoding)
    return bytes(content)


def _encoding_error(encoding: str) -> InvalidRequest:
    return InvalidRequest(
        f"The body is not one whole stream of {encoding}, which Content-Encoding says; send it as it is, without that "
        "header.",
        code="invalid_encoding",
    )


async def _count_keys(body: bytes, bounds: Bounds) -> int:
    """Return the number of keys that are written in a body, and refuse a body of too many nodes before it is parsed.

    A body with fewer bytes than nodes are allowed does not need this: once it has been parsed, each of its colons that
    is not inside a string follows a key.

    Escapes stand only inside strings, so once they are removed every second piece between quotes is structure. In a
    body that is not JSON the count may be wrong, but only from the place where the parser stops as well.
    """
    if b"\\" in body:
        body = await _without_escapes(body)
    if body.count(b'"') > 2 * bounds.nodes:
        raise _too_many()
    structure = b"".join(body.split(b'"')[0::2])
    await _yield_if_large(body)
    colons = structure.count(b":")
    if structure.count(b",") + structure.count(b"[") + structure.count(b"{") + colons > bounds.nodes:
        raise _too_many()
    return colons


async def _without_escapes(body: bytes) -> bytes:
    """Return a body without escaped quotes and backslashes, made slice by slice. No slice ends inside an escape: an odd
    number of backslashes at its end would begin one."""
    pieces: list[bytes] = []
    start = 0
    while start < len(body):
        piece = body[start : start + SLICE_BYTES]
        backslashes = len(piece) - len(piece.rstrip(b"\\"))
        is_last = start + len(piece) == len(body)
        if backslashes % 2 == 1 and not is_last:
            piece = piece[:-1]
        start += len(piece)
        pieces.append(piece.replace(b"\\\\", b"").replace(b'\\"', b""))
        await _yield_if_large(piece)
    return b"".join(pieces)


def _too_many() -> InvalidRequest:
    return InvalidRequest("The body has too many values; shorten it.", code="invalid_json")


def _parse(body: bytes) -> object:
    try:
        value: object = orjson.loads(body)
    except orjson.JSONDecodeError:
        if not body.strip(WHITE_SPACE):
            raise InvalidRequest("The body is empty; send a JSON object.", code="invalid_json") from None
        raise InvalidRequest(
            "The body is not valid JSON in UTF-8 (RFC 8259: no NaN or Infinity, no unpaired surrogates), "
            "or it is nested too deeply or has a number of more than 64 bits.",
            code="invalid_json",
        ) from None
    return value


def _check_values(root: object, bounds: Bounds, *, may_have_nul: bool) -> tuple[int, int]:
    """Check all values, level by level. Return the number of keys, of which the parser keeps one of each duplicate, and
    the number of colons in strings.

    With `may_have_nul` strings are searched for NUL, which JSON can hold only as an escape. Types are compared exactly,
    because the parser makes no subclasses.
    """
    level = [root]
    colons = depth = 0
    longest = bounds.body // 2  # characters of one string, such as an image as a `data:` URL
    objects: list[dict[str, object]] = []
    while level and depth <= bounds.depth:
        depth += 1
        deeper: list[object] = []
        for value in level:
            if type(value) is str:
                if len(value) > longest or (may_have_nul and "\x00" in value):
                    raise _text_error(value, longest)
                colons += value.count(":")
            elif type(value) is dict:
                objects.append(value)
                deeper += value.values()
            elif type(value) is list:
                deeper += value
            elif _is_too_large(value):
                raise _number_error(root, bounds.depth)
        level = deeper
    if level:
        raise InvalidRequest(f"The body is nested deeper than {bounds.depth} levels.", code="invalid_json")
    names = _check_names(objects, bounds, may_have_nul=may_have_nul)
    return len(names), colons + "".join(names).count(":")


def _is_too_large(value: object) -> bool:
    return isinstance(value, NUMBER) and not -INTEGER_BOUND <= value < INTEGER_BOUND


def _number_error(root: object, depth: int) -> InvalidRequest:
    """Return the refusal of a body that has a number of more than 64 bits within so many levels."""
    param = _param_of(_path_to_number(root, depth) or [])
    place = f" at '{param}'" if param else ""
    return InvalidRequest(
        f"The number{place} in the body is not between -{INTEGER_BOUND} and {INTEGER_BOUND - 1} (64 bits).",
        param=param or None,
        code="invalid_json",
    )


def _path_to_number(value: object, depth: int) -> list[str | int] | None:
    """Return the names and places that lead to the first number of more than 64 bits; None if there is none."""
    if _is_too_large(value):
        return []
    entries: Iterable[tuple[str | int, object]] = ()
    if isinstance(value, dict):
        entries = value.items()
    elif isinstance(value, list):
        entries = enumerate(value)
    if depth == 0:
        return None
    for name, entry in entries:
        path = _path_to_number(entry, depth - 1)
        if path is not None:
            return [name, *path]
    return None


def _param_of(path: Iterable[str | int]) -> str:
    """Return a path as callers write it, up to the first name that does not look like one."""
    param = ""
    for entry in path:
        if isinstance(entry, int):
            param = f"{param}[{entry}]"
        elif not FIELD_NAME.fullmatch(entry):
            break
        else:
            param = f"{param}.{entry}" if param else entry
    return param[:MOST_PARAM_CHARS]


def _check_names(objects: list[dict[str, object]], bounds: Bounds, *, may_have_nul: bool) -> list[str]:
    """Return the keys of all objects."""
    names: list[str] = []
    for value in objects:
        if len(value) > bounds.keys:
            raise _too_many()
        names += value
    if max(map(len, names), default=0) > bounds.key:
        raise _too_long("key", bounds.key)
    if may_have_nul and any("\x00" in name for name in names):
        raise _has_nul()
    return names


def _text_error(text: str, longest: int) -> InvalidRequest:
    if "\x00" in text:
        return _has_nul()
    return _too_long("string", longest)


def _has_nul() -> InvalidRequest:
    return InvalidRequest("The body holds a NUL character.", code="invalid_json")


def _too_long(what: str, longest: int) -> InvalidRequest:
    message = f"A {what} in the body has more than {longest:,} characters, which is the most that this service reads."
    return InvalidRequest(message, code="invalid_json")


class Direct(APIRoute):
    """A route that begins runs: FastAPI's declarations, with a shorter way from the request to the endpoint.

    FastAPI solves the dependencies of a request in four passes over parameters that these routes do not have: a tenth
    of the CPU time of a short run (measured with `python -m tests.bench`, one step, CPU per request). Here dependencies
    are declared as usual and called in the same order, but what FastAPI determines for each request is determined once.
    All other routes are FastAPI's own. While a stream is open, one frame of its route is left and no request object.

    The endpoint takes `request` and its dependencies, which take the request or nothing; all of them are
    coroutines. Declaring anything else raises TypeError at start-up.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self._answer = self.get_route_handler()

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Errors are raised to the layer around all routes."""
        if scope["method"] not in (self.methods or ()):
            return await super().handle(scope, receive, send)
        response = await self._answer(Request(scope, receive, send))
        await response(scope, receive, send)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the coroutine function that FastAPI calls for each request."""
        endpoint: Callable[..., Coroutine[Any, Any, Response]] = self.endpoint
        dependencies = [
            (self._bind_dependency(dependency), dependency.name) for dependency in self.dependant.dependencies
        ]
        if _reads_parameters(self.dependant) or self.dependant.request_param_name != "request":
            raise TypeError(f"{self.path}: an endpoint that needs more than the request and its dependencies")

        async def handle(request: Request) -> Response:
            arguments = {}
            for call, name in dependencies:
                value = await call(request)
                if name is not None:
                    arguments[name] = value
            return await endpoint(request=request, **arguments)

        return handle

    def _bind_dependency(self, dependant: Dependant) -> Dependency:
        """Return a dependency as a function of the request. Security schemes below it only document it, and are
        None."""
        call = dependant.call
        only_documents = all(map(_only_documents, dependant.dependencies))
        if call is None or _reads_parameters(dependant) or not only_documents:
            raise TypeError(f"{self.path}: a dependency that needs more than the request")
        arguments: dict[str, Any] = {}
        for dependency in dependant.dependencies:
            if dependency.name is not None:
                arguments[dependency.name] = None
        if dependant.security_scopes_param_name is not None:
            arguments[dependant.security_scopes_param_name] = SecurityScopes(dependant.own_oauth_scopes)
        bound = partial(call, **arguments) if arguments else call
        request_param_name = dependant.request_param_name
        if request_param_name is None:
            return lambda _: bound()
        return lambda request: bound(**{request_param_name: request})


def _only_documents(dependant: Dependant) -> bool:
    return isinstance(dependant.call, SecurityBase)


def _reads_parameters(dependant: Dependant) -> bool:
    """Return True if FastAPI would have to read a part of the request for it."""
    return bool(
        dependant.path_params
        or dependant.query_params
        or dependant.header_params
        or dependant.cookie_params
        or dependant.body_params
    )


# -- the caller

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
