"""Mangled bytes on connections: requests in which something is inserted, left out or changed, in pieces of any size."""

import asyncio
import logging
from contextlib import suppress
from random import Random
from typing import Final

import httpx
import orjson
import pytest

from tests.fuzz.cases import CASES, SEED
from tests.fuzz.conftest import stock_gateway
from tests.harness.stand_ins import chat_body
from tests.harness.waiting import let_others_run

pytestmark = pytest.mark.timeout(max(60, CASES // 10))
TOGETHER: Final = 16
"""Connections at a time."""
READ_SECONDS: Final = 0.25
"""The longest that a connection is read from."""
GET: Final = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
PIECES: Final = (
    *(b"\r\n", b"\n", b"\r", b"\0", b"\xff", b" ", b":", b"x" * 70_000, b"HTTP/1.0", b"HTTP/2.0", b"host: y\r\n", GET),
    *(b"transfer-encoding: chunked\r\n", b"content-length: 5\r\n", b"content-length: 0\r\n", b"5\r\nhello\r\n"),
    *(b"0\r\n\r\n", b";a=b", b"connection: close\r\n", b"connection: upgrade\r\nupgrade: h2c\r\n"),
    *(b"expect: 100-continue\r\n", b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
)
"""What is inserted."""


def requests(key: str) -> list[bytes]:
    """Valid requests, of which some are answered at once, some by a run, and some before their body has come."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-api-key: %s\r\n" % key.encode()
    whole, stream = orjson.dumps(chat_body()), orjson.dumps(chat_body(stream=True))
    return [
        GET,
        GET.replace(b"host: x\r\n", b"host: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n"),
        head + b"content-length: %d\r\n\r\n%s" % (len(whole), whole),
        head + b"content-length: %d\r\n\r\n%s" % (len(stream), stream),
        head + b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\nx: y\r\n\r\n" % (len(whole), whole),
        b"POST /healthz HTTP/1.1\r\nhost: x\r\ncontent-length: 20\r\n\r\n" + b"z" * 20,
    ]


def mangled(chance: Random, valid: list[bytes]) -> list[bytes]:
    """A few requests with something broken in them, in pieces."""
    data = bytearray(b"".join(chance.choices(valid, k=chance.randint(1, 3))))
    for _ in range(chance.randint(1, 3)):
        place, how = chance.randrange(len(data)), chance.random()
        if how < 0.5:
            data[place:place] = chance.choice(PIECES)
        elif how < 0.7:
            del data[place : place + chance.randint(1, 30)]
        else:
            data[place] = chance.randrange(256)
        data = data or bytearray(GET)
    cuts = sorted(chance.sample(range(len(data)), k=min(chance.randint(0, 4), len(data))))
    return [bytes(data[start:end]) for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


async def exchange(port: int, pieces: list[bytes]) -> bytes:
    """Send the pieces, and return what comes back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = bytearray()
    with suppress(OSError, TimeoutError):  # the gateway may close before all was sent, or wait for more
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await let_others_run()
        async with asyncio.timeout(READ_SECONDS):
            while part := await reader.read(65_536):
                received += part
    writer.close()
    return bytes(received)


async def test_mangled_bytes_break_no_connection_and_no_request(caplog: pytest.LogCaptureFixture) -> None:
    stand_in, key = stock_gateway()
    chance, valid = Random(SEED), requests(key)
    async with stand_in.serve() as url:
        port = int(url.rpartition(":")[2])
        for _ in range(CASES // TOGETHER + 1):
            sent = [mangled(chance, valid) for _ in range(TOGETHER)]
            for pieces, received in zip(sent, await asyncio.gather(*[exchange(port, p) for p in sent]), strict=True):
                assert b"HTTP/1.1 500" not in received, pieces
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.get("/healthz")).status_code == 200
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
