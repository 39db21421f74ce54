"""Ways to make a provider's call fail, and the checks that must hold for every failure."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from msgspec.structs import replace

from app.core.message.chat import Piece
from app.core.pool.catalog import ProviderSpec
from app.errors import WorkerError
from tests.conformance.wire_formats import PATIENT, QUESTION, Format, Line, request, text_of_pieces
from tests.harness.waiting import PATIENCE_SECONDS

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def error_against(form: Format, answer: Answer, gap: float = PATIENCE_SECONDS) -> WorkerError:
    """The error that a server of that behaviour causes; the server closes after `answer`."""
    finished = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer(reader, writer)
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
        finally:
            finished.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server, asyncio.timeout(PATIENCE_SECONDS):
        port = server.sockets[0].getsockname()[1]
        adapter = form.adapter(ProviderSpec("stub", form.name, f"http://127.0.0.1:{port}"), form.key)
        try:
            with pytest.raises(WorkerError) as caught:
                await anext(adapter.stream(request(), adapter.render(request()), replace(PATIENT, gap=gap)))
        finally:
            await adapter.close()
        await finished.wait()
    return caught.value


async def failure(line: Line, *behaviours: Any, deadlines: Any = PATIENT) -> tuple[WorkerError, str]:
    """The error of one call and the text that came before it; no secret may stand in the error."""
    if behaviours:
        line.stub.script("model-a", *behaviours)
    pieces: list[Piece] = []

    async def collect() -> None:
        async for batch in line.stream(request(), deadlines):
            pieces.extend(batch)

    with pytest.raises(WorkerError) as caught:
        await collect()
    error = caught.value
    text = f"{error} {error.__cause__}"
    for secret in (line.format.key, QUESTION, "provider-body-canary", line.stub.url):
        assert secret not in text
    assert "w at stub" in str(error)
    assert len(line.stub.requests) <= 1, "an adapter retries nothing"  # a deadline may pass before the first arrives
    return error, text_of_pieces(pieces)
