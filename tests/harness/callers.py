"""Callers of a whole service in this loop: keys in its real store, and clients that see a stream event by event."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson
from msgspec.structs import replace

from app.gateway.http.api_keys import mint
from app.process.wiring import Runtime
from tests.harness.prepared_apps import app_over
from tests.harness.stand_ins import serving
from tests.harness.waiting import PATIENCE_SECONDS

CALLER_SCOPES = ("runs:write", "runs:read")


async def add_key(runtime: Runtime, tenant: str = "acme", scopes: tuple[str, ...] = CALLER_SCOPES, **more: Any) -> str:
    """Make a key in the service's own store and return its string."""
    key, row = mint(runtime.gateway.pepper, tenant=tenant, name="t", scopes=scopes, now=0.0)
    assert await runtime.gateway.store.add_key(replace(row, **more))
    return key


@asynccontextmanager
async def client_over_socket(runtime: Runtime, key: str) -> AsyncIterator[httpx.AsyncClient]:
    """Open a client of the service's gateway on a real socket, so that streams arrive as they are written."""
    with app_over(runtime.gateway) as app:
        async with (
            serving(app, runtime.gateway) as url,
            httpx.AsyncClient(
                base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=PATIENCE_SECONDS
            ) as client,
        ):
            yield client


async def post_chat(
    client: httpx.AsyncClient, request_body: dict[str, Any], idempotency_key: str | None = None, **headers: str
) -> httpx.Response:
    """Send one request for a chat completion. An underscore in the name of a header stands for a hyphen."""
    request_headers = _request_headers(headers, idempotency_key)
    return await client.post("/v1/chat/completions", json=request_body, headers=request_headers)


def _request_headers(headers: dict[str, str], idempotency_key: str | None) -> dict[str, str]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    if idempotency_key:
        named["idempotency-key"] = idempotency_key
    return named


@dataclass
class ReceivedStream:
    """The events of a stream that have arrived: their numbers, their texts, and the end."""

    headers: httpx.Headers
    numbers: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    chunks: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False

    @property
    def text(self) -> str:
        """The part of the answer that has arrived."""
        return "".join(self.texts)

    @property
    def error(self) -> dict[str, Any] | None:
        """The error that ended the stream."""
        if not self.chunks:
            return None
        error: dict[str, Any] | None = self.chunks[-1].get("error")
        return error

    def add(self, event: str) -> None:
        """Add one event."""
        lines = dict(line.partition(": ")[::2] for line in event.split("\n") if not line.startswith(":"))
        if "id" in lines:
            self.numbers.append(int(lines["id"]))
        if lines["data"] == "[DONE]":
            self.done = True
            return
        chunk = orjson.loads(lines["data"])
        self.chunks.append(chunk)
        texts = [choice["delta"].get("content") or "" for choice in chunk.get("choices", ())]
        self.texts.append("".join(texts))


@asynccontextmanager
async def open_stream(
    client: httpx.AsyncClient, method: str, path: str, **request: Any
) -> AsyncIterator[tuple[ReceivedStream, AsyncIterator[ReceivedStream]]]:
    """Open a stream; yield what has arrived so far, and an iterator that reads one further event at a time."""
    async with client.stream(method, path, **request) as reply:
        if reply.status_code != httpx.codes.OK:
            await reply.aread()
        assert reply.status_code == httpx.codes.OK, reply.text
        received = ReceivedStream(reply.headers)

        async def events() -> AsyncIterator[ReceivedStream]:
            rest = ""
            async for text in reply.aiter_text():
                *whole, rest = (rest + text).split("\n\n")
                for event in whole:
                    received.add(event)
                    yield received

        yield received, events()


async def stream_chat(
    client: httpx.AsyncClient,
    request_body: dict[str, Any],
    idempotency_key: str | None = None,
    *,
    upto: int | None = None,
    **headers: str,
) -> ReceivedStream:
    """Read a streamed completion to its end, or until `upto` characters of it have arrived."""
    request_headers = _request_headers(headers, idempotency_key)
    request_body = request_body | {"stream": True}
    async with open_stream(client, "POST", "/v1/chat/completions", json=request_body, headers=request_headers) as (
        received,
        events,
    ):
        async for _ in events:
            if upto is not None and len(received.text) >= upto:
                break
    return received
