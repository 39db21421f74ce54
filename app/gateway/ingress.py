"""The one parser from a request's bytes to JSON values.

What it gives is safe to store and to send on: UTF-8 only, no NUL, no lone surrogates, no duplicate keys, integers
within 64 bits, and bounded depth, node count and lengths. It refuses everything else with a status and a message of
its own, in which nothing of the input occurs. Bodies are counted while they arrive, and their nodes before anything
is built of them, so that no body within the limit holds up the event loop for more than some tens of milliseconds
(measured in tests/api/test_bad_input.py). orjson does the parsing: it is strict about NaN, 1e999, surrogates, encodings
and grammar; duplicate keys, NUL and integers that it would turn into floats are ours to find.
"""

import asyncio
from dataclasses import dataclass

import orjson
from starlette.requests import ClientDisconnect, Request

from app.errors import InvalidRequest, TooLarge, UnsupportedMedia

WHOLE = 1 << 63
YIELD_ABOVE = 1 << 18
"""Bytes from which the event loop gets a turn between the passes over a body."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a body may be. `seconds` is how long it may take to arrive."""

    body: int = 4 << 20
    seconds: float = 60.0
    depth: int = 32
    nodes: int = 50_000
    """Values and keys together."""
    text: int = 4 << 20
    key: int = 256
    keys: int = 1_000
    """In one object."""


async def read_json(request: Request, bounds: Bounds) -> dict[str, object]:
    """The JSON object in a request's body; raises `TooLarge`, `UnsupportedMedia` or `InvalidRequest`."""
    _check_headers(request, bounds)
    body = await _read(request, bounds)
    await _give_way(body)
    colons = _prescan(body, bounds)
    await _give_way(body)
    value = _parse(body)
    await _give_way(body)
    _walk(value, colons, bounds)
    await _give_way(body)
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.", code="invalid_json")
    return value


async def _give_way(body: bytes) -> None:
    """A turn for everybody else, between two passes over a large body."""
    if len(body) > YIELD_ABOVE:
        await asyncio.sleep(0)


def _check_headers(request: Request, bounds: Bounds) -> None:
    headers = request.headers
    if headers.get("content-encoding", "identity").strip().lower() not in ("identity", ""):
        raise UnsupportedMedia()
    kind, _, rest = headers.get("content-type", "application/json").partition(";")
    kind = kind.strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise UnsupportedMedia()
    charset = rest.lower().partition("charset=")[2].split(";")[0].strip(' "')
    if charset not in ("", "utf-8", "utf8", "us-ascii"):
        raise UnsupportedMedia()
    length = headers.get("content-length", "0")
    if length.isdigit() and (len(length) > 18 or int(length) > bounds.body):
        raise TooLarge()


async def _read(request: Request, bounds: Bounds) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(bounds.seconds):
            while len(body) <= bounds.body:
                message = await request.receive()
                if message["type"] != "http.request":
                    raise ClientDisconnect()
                body += message.get("body", b"")
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        raise InvalidRequest("The body did not arrive in time; send it again.", code="request_timeout") from None
    if len(body) > bounds.body:
        raise TooLarge()
    return bytes(body)


def _prescan(body: bytes, bounds: Bounds) -> int:
    """Refuse bodies of too many nodes before they are built; the number of keys as written.

    Escapes stand only inside strings, so once they are taken out every second piece between quotes is structure. In a
    body that is not JSON the count may be wrong, but only from where the parser stops too.
    """
    if not body.strip(b" \t\r\n"):
        raise InvalidRequest("The body is empty; send a JSON object.", code="invalid_json")
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if body.count(b'"') > 2 * bounds.nodes:
        raise _too_many()
    structure = b"".join(body.split(b'"')[0::2])
    colons = structure.count(b":")
    if structure.count(b",") + structure.count(b"[") + structure.count(b"{") + colons > bounds.nodes:
        raise _too_many()
    return colons


def _too_many() -> InvalidRequest:
    return InvalidRequest("The body has too many values; shorten it.", code="invalid_json")


def _parse(body: bytes) -> object:
    try:
        value: object = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise InvalidRequest(
            "The body is not valid JSON in UTF-8 (RFC 8259: no NaN or Infinity, no unpaired surrogates).",
            code="invalid_json",
        ) from None
    return value


def _walk(root: object, colons: int, bounds: Bounds) -> None:
    """Check all values, level by level; `colons` is the number of keys before duplicates fell together."""
    level = [root]
    keys = 0
    for _ in range(bounds.depth + 1):
        deeper: list[object] = []
        for value in level:
            if isinstance(value, str):
                _check_text(value, bounds.text)
            elif isinstance(value, dict):
                keys += _check_keys(value, bounds)
                deeper += value.values()
            elif isinstance(value, list):
                deeper += value
            elif isinstance(value, float | int) and not -WHOLE <= value < WHOLE:
                raise InvalidRequest("A number in the body is out of range (64 bits).", code="invalid_json")
        level = deeper
    if level:
        raise InvalidRequest(f"The body is nested deeper than {bounds.depth} levels.", code="invalid_json")
    if keys != colons:
        raise InvalidRequest("An object in the body has the same key twice.", code="invalid_json")


def _check_keys(value: dict[str, object], bounds: Bounds) -> int:
    if len(value) > bounds.keys:
        raise _too_many()
    for key in value:
        _check_text(key, bounds.key)
    return len(value)


def _check_text(text: str, longest: int) -> None:
    if len(text) > longest:
        raise InvalidRequest("A string in the body is too long.", code="invalid_json")
    if "\x00" in text:
        raise InvalidRequest("The body holds a NUL character.", code="invalid_json")
