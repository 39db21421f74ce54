"""Bodies of requests, as JSON objects within bounds.

What the parser gives is safe to store and to send on: UTF-8 only, no NUL, no lone surrogates, no duplicate keys,
integers within 64 bits, and bounded depth, node count and lengths. It refuses everything else with a status and a
message of its own, in which nothing of the input occurs. A body in gzip or deflate is unpacked piece by piece, and no
further than a body may be long. A body whose type is no JSON, because none was set or the client's default was left
(curl's is that of a form), is read if it looks like a JSON object: keys are never cookies, so no web page gains by it.
Anthropic's format holds the arguments of calls as JSON values, as a worker wrote them: its routes read larger integers
as doubles, or a conversation with one could not go on.

Bodies are counted while they arrive, and their nodes before anything is built of them, so that no body within the limit
holds up the event loop for more than some tens of milliseconds (measured in tests/gateway/test_bad_input.py). orjson
does the parsing: it is strict about NaN, 1e999, surrogates, encodings and grammar; duplicate keys, NUL and integers
that it would turn into floats are ours to find.
"""

import asyncio
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import orjson
from fastapi import Depends
from starlette.requests import ClientDisconnect, Request

from app.errors import InvalidRequest, Overloaded, TooLarge, TooSlow, UnsupportedMedia
from app.gateway.http.context import Bounds, PendingBodies
from app.gateway.http.field_names import FIELD_NAME, MOST_PARAM_CHARS

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
        raise _too_large(bounds)


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
        raise _too_large(bounds)
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
            raise _too_large(bounds)
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
            "The body is not valid JSON in UTF-8 (RFC 8259: no byte order mark, no NaN or Infinity, no unpaired "
            "surrogates), or it is nested too deeply or has a number of more than 64 bits.",
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
            elif _is_too_large(value) and not bounds.large_numbers:
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


def _too_large(bounds: Bounds) -> TooLarge:
    return TooLarge(
        f"The request body has more than {bounds.body:,} bytes, which is the most that this service reads "
        "(BATON_MAX_BODY_BYTES); shorten it, or send images by reference."
    )


def _too_long(what: str, longest: int) -> InvalidRequest:
    message = f"A {what} in the body has more than {longest:,} characters, which is the most that this service reads."
    return InvalidRequest(message, code="invalid_json")
