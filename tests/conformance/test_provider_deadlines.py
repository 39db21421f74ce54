"""The provider seam in time (F-23): deadlines, cancellation, and who may see the key."""

import asyncio
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from app.core.pool.catalog import ProviderSpec
from app.errors import (
    WorkerMalformed,
    WorkerMisconfigured,
    WorkerTimeout,
    WorkerUnavailable,
)
from app.providers import http
from tests.conformance.failures import error_against, failure
from tests.conformance.wire_formats import (
    HURRIED,
    PATIENT,
    Format,
    Line,
    request,
    text_of_pieces,
)
from tests.harness.waiting import PATIENCE_SECONDS, until
from tests.stubs import (
    Hang,
    Reply,
    Stall,
    Trickle,
)

pytestmark = pytest.mark.faults

BREAK_DELAY = 0.02
"""Seconds before an answer goes on in a way that breaks HTTP."""


# --- time


async def test_a_hang_before_the_first_byte(line: Line) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        error, _ = await failure(
            line, Hang(), deadlines=replace(HURRIED, connect=PATIENCE_SECONDS, first=3.0, total=3600)
        )
    assert type(error) is WorkerTimeout
    await line.stub.requests[0].wait_until_gone()


async def test_a_whole_answer_may_take_its_time(line: Line) -> None:
    """Nothing comes before all is written, so neither the first-byte nor the gap deadline cuts it short."""
    line.stub.script("model-a", Reply(header_delay=0.4), Hang())
    deadlines = replace(PATIENT, first=0.2, gap=0.2)
    whole_request = request(live=False)
    assert text_of_pieces(await line.pieces(whole_request, deadlines)) == "Hello there."
    with pytest.raises(WorkerTimeout):
        await line.pieces(whole_request, replace(deadlines, total=0.3))


async def test_an_error_that_never_finishes_its_body(form: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 Busy\r\nContent-Length: 100\r\nRetry-After: 3\r\n\r\n{")
        await reader.read()

    monkeypatch.setattr(http, "TAIL", 0.1)
    error = await error_against(form, answer)
    assert (type(error), error.retry_after) == (WorkerUnavailable, 3)


async def test_headers_are_not_yet_the_first_byte(line: Line) -> None:
    """A provider that sends its headers and then thinks is waited for as long as for the first byte, not for a gap."""
    line.stub.script("model-a", Reply(fault=Stall(after=0, seconds=1.5)))
    deadlines = replace(PATIENT, gap=1.0)
    if line.format.name == "gemini":  # The others send a preamble at once, and then stall.
        assert text_of_pieces(await line.pieces(request(), deadlines)) == "Hello there."


async def test_a_hang_between_two_reads(line: Line) -> None:
    error, text = await failure(line, Reply(fault=Stall(after=1)), deadlines=replace(PATIENT, gap=0.5))
    assert type(error) is WorkerTimeout
    assert text == "Hello"
    await line.stub.requests[0].wait_until_gone()


async def test_an_endless_stream_ends_at_the_total_deadline(line: Line) -> None:
    error, text = await failure(line, Reply(endless=True, gap=0.02), deadlines=replace(PATIENT, total=4.0))
    assert type(error) is WorkerTimeout
    assert text.startswith("Hello there.")
    await line.stub.requests[0].wait_until_gone()


async def test_a_slow_drip_ends_at_the_total_deadline(line: Line) -> None:
    error, _ = await failure(line, Reply(trickle=Trickle(1, 0.05)), deadlines=replace(PATIENT, total=0.5))
    assert type(error) is WorkerTimeout


async def test_an_endless_stream_ends_at_its_size(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.providers.http.STREAM_BYTES", 1 << 18)
    error, _ = await failure(line, Reply(chunks=("x" * 4096,), endless=True))
    assert type(error) is WorkerMalformed
    await line.stub.requests[0].wait_until_gone()


async def test_a_port_that_nobody_listens_on(form: Format) -> None:
    adapter = form.adapter(ProviderSpec("stub", form.name, "http://127.0.0.1:9"), form.key)
    with pytest.raises(WorkerUnavailable):
        await anext(adapter.stream(request(), adapter.render(request()), PATIENT))
    await adapter.close()


async def test_a_server_that_does_not_speak_http(form: Format) -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.9\r\n")
        await writer.drain()

    assert type(await error_against(form, babble)) is WorkerMalformed


# --- who stops, and who may see the key


async def test_closing_the_stream_closes_the_connection(line: Line) -> None:
    line.stub.script("model-a", Reply(endless=True, gap=0.005))
    stream: Any = line.stream(request())
    await anext(stream)
    await stream.aclose()
    await line.stub.requests[0].wait_until_gone()


@pytest.mark.parametrize("act", [Hang(), Reply(fault=Stall(after=1)), Reply(endless=True, gap=0.005)])
async def test_cancelling_the_consumer_closes_the_connection(line: Line, act: Any) -> None:
    line.stub.script("model-a", act)
    task = asyncio.create_task(line.pieces(request()))
    [received] = await line.stub.wait_for(1)
    await until(lambda: isinstance(act, Hang) or received.deltas_sent)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await line.stub.requests[0].wait_until_gone()


async def test_the_key_stays_with_its_origin(line: Line) -> None:
    endpoint = line.adapter._endpoint
    for url in ("https://evil.example/v1", line.stub.url.replace("127.0.0.1", "localhost"), "http://127.0.0.1:1/v1"):
        with pytest.raises(WorkerMisconfigured) as caught:
            await endpoint.post(httpx.URL(url), b"{}", 1, "w at stub")
        assert line.format.key not in str(caught.value)
    assert line.format.key not in repr(endpoint)


@pytest.mark.parametrize(
    "rest",
    [b"zz\r\nnot a chunk\r\n", b"ffffffffffffffffffffff\r\n", b"5\r\nabcdefgh", b"\x00\x00", b"-1\r\n\r\n"],
)
async def test_a_body_that_breaks_http(form: Format, rest: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head + b"4\r\n: x\n\r\n")
        await writer.drain()
        await asyncio.sleep(BREAK_DELAY)
        writer.write(rest)
        await writer.drain()

    await error_against(form, answer, gap=0.2)


async def test_a_redirect_is_not_followed(form: Format) -> None:
    async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        port = writer.get_extra_info("sockname")[1]
        location = f"Location: http://127.0.0.1:{port}/elsewhere"
        writer.write(f"HTTP/1.1 307 Moved\r\n{location}\r\nContent-Length: 0\r\n\r\n".encode())
        statuses.append(port)
        await writer.drain()

    statuses: list[int] = []
    assert type(await error_against(form, redirect)) is WorkerMisconfigured
    assert len(statuses) == 1


@pytest.mark.long
async def test_no_call_waits_for_a_connection(openai: Line) -> None:
    """However many are open already: it would look as if its worker did not answer, and be given to another one."""
    many = 600
    openai.stub.always("model-a", Hang())
    deadlines = replace(PATIENT, connect=20.0)
    calls = [asyncio.create_task(openai.pieces(request(), deadlines)) for _ in range(many)]
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await openai.stub.wait_for(many)
    finally:
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
