"""Some bytes are refused before there is a request: those that are no HTTP, and heads too large or too late."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from app.gateway.http.connection import HEAD_SECONDS
from tests.harness.bad_bodies import CANARY
from tests.harness.stand_ins import GatewayStandIn, chat_body, serving
from tests.harness.waiting import PATIENCE_SECONDS, let_others_run

SHORT_SECONDS = 1.0
"""The time that the gateway gives a head on `hasty_line`, in seconds."""
KEEP_ALIVE_SECONDS = 1
"""The time, in seconds, for which a connection without a request is kept, where that is tested."""
GAP_SECONDS = 0.01
"""The pause between two pieces of a head."""
HEAD_END = b"\r\n\r\n"
GET = b"GET /healthz HTTP/1.1\r\nhost: x\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-api-key: %s\r\ncontent-type: application/json\r\n"


class Line:
    """A connection to the gateway."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def until(self, mark: bytes) -> bytes:
        """Read up to and with a mark."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self._reader.readuntil(mark)

    async def reply(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the next reply."""
        status, *lines = (await self.until(HEAD_END)).decode().strip().split("\r\n")
        async with asyncio.timeout(PATIENCE_SECONDS):
            headers = {}
            for line in lines:
                name, _, value = line.partition(": ")
                headers[name.lower()] = value
            body = await self._reader.readexactly(int(headers.get("content-length", 0)))
        return int(status.split()[1]), headers, body

    async def is_closed(self) -> bool:
        """Return True if the other side closes the connection."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self._reader.read() == b""


@asynccontextmanager
async def connected(gateway: GatewayStandIn, head_seconds: float, keep_alive: int = 5) -> AsyncIterator[Line]:
    async with serving(gateway.app, gateway.context, head_seconds=head_seconds, keep_alive=keep_alive) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        yield Line(reader, writer)
        writer.close()


@pytest.fixture
async def line(gateway: GatewayStandIn) -> AsyncIterator[Line]:
    """A connection on which no head is too late, however busy the machine is."""
    async with connected(gateway, HEAD_SECONDS) as new_line:
        yield new_line


@pytest.fixture
async def hasty_line(gateway: GatewayStandIn) -> AsyncIterator[Line]:
    """A connection for tests of how long the gateway waits."""
    async with connected(gateway, SHORT_SECONDS) as new_line:
        yield new_line


def check(reply: tuple[int, dict[str, str], bytes], status: int) -> dict[str, Any]:
    code, headers, body = reply
    assert code == status
    assert headers["content-type"] == "application/json"
    assert headers["x-request-id"]
    assert len(body) <= 4_096
    assert CANARY.encode() not in body
    error: dict[str, Any] = orjson.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    "data",
    [
        b"canary7Q\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /canary7Q HTTP/9.9\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
        GET + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
        GET + b"content-length: 1\r\ncontent-length: 2\r\n\r\n",
        GET + b"content-length: -1\r\n\r\n",
        GET + b"canary7Q: \x01\r\n\r\n",
        GET + b" folded: canary7Q\r\n\r\n",
        GET + b"Host: canary7Q\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n\r\n",
    ],
)
async def test_bytes_that_are_no_http(line: Line, data: bytes) -> None:
    await line.send(data)
    assert check(await line.reply(), 400)["code"] == "invalid_http"
    assert await line.is_closed()


@pytest.mark.parametrize("codings", [b"gzip, chunked", b"gzip\r\ntransfer-encoding: chunked", b"identity, chunked"])
async def test_a_body_in_a_transfer_coding_that_is_not_read(
    gateway: GatewayStandIn, key: str, line: Line, codings: bytes
) -> None:
    """Its chunks hold compressed bytes, although this one does not."""
    body = orjson.dumps(chat_body())
    await line.send(POST % key.encode() + b"transfer-encoding: %s\r\n\r\n" % codings)
    await line.send(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
    error = check(await line.reply(), 400)
    assert error["code"] == "invalid_http"
    assert "chunked" in error["message"]
    assert await line.is_closed()
    assert gateway.runs.orders == []


@pytest.mark.parametrize("name", [b"chunked", b"Chunked", b"chunked  "])
async def test_a_chunked_body_is_read(gateway: GatewayStandIn, key: str, line: Line, name: bytes) -> None:
    body = orjson.dumps(chat_body())
    await line.send(POST % key.encode() + b"transfer-encoding: %s\r\n\r\n" % name)
    await line.send(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
    assert (await line.reply())[0] == 200


async def test_a_request_of_the_older_version_needs_no_host(line: Line) -> None:
    await line.send(b"GET /healthz HTTP/1.0\r\n\r\n")
    assert (await line.reply())[0] == 200


async def test_a_stream_to_a_client_of_the_older_version_is_not_sent_in_chunks(key: str, line: Line) -> None:
    """It would take their sizes for a part of the text. The end of the connection ends the reply."""
    body = orjson.dumps(chat_body() | {"stream": True})
    head = POST.replace(b"HTTP/1.1", b"HTTP/1.0") % key.encode() + b"content-length: %d\r\n\r\n" % len(body)
    await line.send(head + body)
    status, headers, _ = await line.reply()
    assert (status, headers.get("transfer-encoding"), headers["connection"]) == (200, None, "close")
    assert (await line.until(b"data: [DONE]\n\n")).startswith(b"id: 0\ndata: {")
    assert await line.is_closed()


@pytest.mark.parametrize(
    "chunks",
    [b"zz\r\n", b"5\r\nab\r\n0\r\n\r\n", b"ffffffffffffffffff\r\n", b"-1\r\n", b"1\r\n{}\r\n0\r\n\r\n", b"5 5\r\n"],
)
async def test_chunks_that_are_none(gateway: GatewayStandIn, key: str, line: Line, chunks: bytes) -> None:
    await line.send(POST % key.encode() + b"transfer-encoding: chunked\r\n\r\n")
    await line.send(chunks)
    check(await line.reply(), 400)
    assert gateway.runs.orders == []


@pytest.mark.parametrize("extension", [b"", b";" + b"x" * 4_000])
async def test_a_body_of_single_bytes_is_read(gateway: GatewayStandIn, key: str, line: Line, extension: bytes) -> None:
    body = orjson.dumps(chat_body())
    head = POST % key.encode() + b"transfer-encoding: chunked\r\n\r\n"
    chunks = b"".join(b"1%s\r\n%c\r\n" % (extension, byte) for byte in body)
    await line.send(head + chunks + b"0\r\n\r\n")
    status, _, reply = await line.reply()
    assert status == 200, reply


async def test_fields_behind_a_body_are_no_headers(gateway: GatewayStandIn, key: str, line: Line) -> None:
    """Nothing that stands before the gateway looks at them."""
    body = orjson.dumps(chat_body())
    head = GET.replace(b"GET /healthz", b"POST /v1/chat/completions") + b"transfer-encoding: chunked\r\n\r\n"
    await line.send(head + b"%x\r\n%s\r\n0\r\nx-api-key: %s\r\n\r\n" % (len(body), body, key.encode()))
    check(await line.reply(), 401)
    await line.send(GET + b"\r\n")
    assert (await line.reply())[0] == 200


@pytest.mark.parametrize("field", [b"x: %s\r\n" % (b"y" * 1_000), b"x" * 1_000])
@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/healthz"])
async def test_fields_without_end_behind_a_body_end_the_connection(
    key: str, line: Line, path: bytes, field: bytes
) -> None:
    head = POST.replace(b"/v1/chat/completions", path) % key.encode() + b"transfer-encoding: chunked\r\n\r\n"
    await line.send(head + b"2\r\n{}\r\n0\r\n")
    if path == b"/healthz":
        check(await line.reply(), 405)
    for _ in range(70):
        await line.send(field)
        await let_others_run()
    assert check(await line.reply(), 431)["code"] == "headers_too_large"
    assert await line.is_closed()


async def test_a_chunked_body_without_end_is_a_413(gateway: GatewayStandIn, key: str, line: Line) -> None:
    await line.send(POST % key.encode() + b"transfer-encoding: chunked\r\n\r\n")
    for _ in range(9):
        await line.send(b"100000\r\n" + b" " * (1 << 20) + b"\r\n")
    check(await line.reply(), 413)


async def test_a_head_that_is_too_large(line: Line) -> None:
    await line.send(GET)
    for n in range(70):
        await line.send(b"x-%d: %s\r\n" % (n, b"canary7Q" * 128))
    assert check(await line.reply(), 431)["code"] == "headers_too_large"
    assert await line.is_closed()


async def test_who_still_sends_a_head_that_is_too_large_is_not_reset(line: Line) -> None:
    """Bytes that nobody reads would reset the connection, and the client could miss why it was refused."""
    await line.send(GET + b"x: %s\r\n" % (b"y" * 65_536))
    check(await line.reply(), 431)
    for _ in range(8):
        await line.send(b"x: y\r\n")
        await let_others_run()
    assert await line.is_closed()


async def test_many_requests_in_one_packet_that_ends_within_a_head(line: Line) -> None:
    """The heads before the last one are no part of it, and neither is the body before it."""
    get = GET + b"x: %s\r\n\r\n" % (b"y" * 8_000)
    post = b"POST /healthz HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n" + b"z" * 100_000
    await line.send(10 * get + GET)
    await asyncio.sleep(GAP_SECONDS)
    await line.send(b"\r\n")
    await line.send(post + GET)
    await asyncio.sleep(GAP_SECONDS)
    await line.send(b"\r\n")
    statuses = [(await line.reply())[0] for _ in range(13)]
    assert statuses == [*(11 * [200]), 405, 200]


@pytest.mark.parametrize("before", [b"", GET + b"\r\n", 2 * (GET + b"\r\n")])
async def test_bytes_that_are_no_http_behind_requests_that_have_no_reply_yet(
    key: str, line: Line, caplog: pytest.LogCaptureFixture, before: bytes
) -> None:
    """Nothing is written behind the refusal, which is no bug of the requests."""
    body = orjson.dumps(chat_body())
    request = POST % key.encode() + b"content-length: %d\r\n\r\n%s" % (len(body), body)
    await line.send(request + before + b"canary7Q\r\n\r\n")
    check(await line.reply(), 400)
    assert await line.is_closed()
    for _ in range(20):
        await let_others_run()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_who_waits_for_a_body_that_is_no_http_does_not_ask_for_it(
    key: str, line: Line, caplog: pytest.LogCaptureFixture
) -> None:
    head = POST % key.encode() + b"expect: 100-continue\r\ntransfer-encoding: chunked\r\n\r\n"
    await line.send(head + b"zz\r\n")
    check(await line.reply(), 400)
    assert await line.is_closed()
    for _ in range(20):
        await let_others_run()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_head_that_is_too_late(hasty_line: Line) -> None:
    await hasty_line.send(GET)
    assert check(await hasty_line.reply(), 408)["code"] == "request_timeout"
    assert await hasty_line.is_closed()


async def test_a_head_that_drips_is_too_late(hasty_line: Line) -> None:
    async def drip() -> None:
        for byte in GET + b"x: " + 1_000 * b"y":
            await hasty_line.send(bytes([byte]))
            await asyncio.sleep(GAP_SECONDS)

    dripping = asyncio.create_task(drip())
    assert (await hasty_line.reply())[0] == 408
    dripping.cancel()


async def test_whoever_says_nothing_is_not_waited_for(hasty_line: Line) -> None:
    assert await hasty_line.is_closed()


async def test_a_head_in_pieces(line: Line) -> None:
    for _ in range(3):
        for piece in (GET[:9], GET[9:], b"x: y\r\n", b"\r\n"):
            await line.send(piece)
            await asyncio.sleep(GAP_SECONDS)
        assert (await line.reply())[0] == 200


async def test_a_connection_is_kept_for_longer_than_a_head_may_take(hasty_line: Line) -> None:
    await hasty_line.send(GET + b"\r\n")
    assert (await hasty_line.reply())[0] == 200
    await asyncio.sleep(1.5 * SHORT_SECONDS)
    await hasty_line.send(GET + b"\r\n")
    assert (await hasty_line.reply())[0] == 200


async def test_who_has_a_reply_and_stops_within_the_body_is_not_waited_for(gateway: GatewayStandIn) -> None:
    """Most such clients have gone without a word. The next head may come in pieces all the same."""
    head = b"POST /healthz HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n"
    async with connected(gateway, HEAD_SECONDS, keep_alive=KEEP_ALIVE_SECONDS) as line:
        await line.send(head)
        check(await line.reply(), 405)
        await line.send(b"{}" + GET[:9])
        await asyncio.sleep(1.5 * KEEP_ALIVE_SECONDS)
        await line.send(GET[9:] + b"\r\n" + head)
        assert (await line.reply())[0] == 200
        check(await line.reply(), 405)
        await line.send(b"{")
        assert await line.is_closed()


@pytest.mark.parametrize(
    "framing", [b"content-length: %d\r\n\r\n%s", b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n"]
)
@pytest.mark.parametrize("in_one_packet", [True, False])
async def test_a_wish_for_another_protocol_is_ignored(
    gateway: GatewayStandIn, key: str, line: Line, framing: bytes, in_one_packet: bool
) -> None:
    """Java's client asks for HTTP/2 with every request over plain HTTP, and clients of realtime APIs for WebSocket."""
    upgrade = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAA\r\n"
    body = orjson.dumps(chat_body())
    head, end, rest = (POST % key.encode() + upgrade + framing % (len(body), body)).partition(HEAD_END)
    for _ in range(2):
        if in_one_packet:
            await line.send(head + end + rest)
        else:
            await line.send(head + end)
            await asyncio.sleep(GAP_SECONDS)
            await line.send(rest)
        status, _, reply = await line.reply()
        assert status == 200, reply
    await line.send(2 * (GET + b"connection: Upgrade\r\nupgrade: websocket\r\n\r\n"))
    assert (await line.reply())[0] == 200
    assert (await line.reply())[0] == 200
    await line.send(b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n")
    assert check(await line.reply(), 400)["code"] == "invalid_http"


@pytest.mark.parametrize(("version", "options"), [(b"1.0", b"Upgrade"), (b"1.1", b"Upgrade, close")])
async def test_a_wish_for_another_protocol_with_the_last_request_of_a_connection_is_ignored_too(
    line: Line, version: bytes, options: bytes
) -> None:
    await line.send(b"GET /healthz HTTP/%s\r\nhost: x\r\nconnection: %s\r\nupgrade: h2c\r\n\r\n" % (version, options))
    assert (await line.reply())[0] == 200
    assert await line.is_closed()


async def test_a_slow_run_is_not_a_slow_head(gateway: GatewayStandIn, key: str, hasty_line: Line) -> None:
    async def script(order: Any, run: str, received: Any) -> None:
        await asyncio.sleep(1.5 * SHORT_SECONDS)
        gateway.runs.cancel(run, "test")

    gateway.runs.script = script
    body = orjson.dumps(chat_body())
    await hasty_line.send(POST % key.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
    assert (await hasty_line.reply())[0] == 499
