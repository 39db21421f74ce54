"""A server for `POST /v1/embeddings` that is as strict as its published description and fails on demand."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web

DIMENSIONS = 8
FIELDS = {"model", "input", "encoding_format", "dimensions", "user"}
Fault = Literal["", "500", "hang", "garbage", "short", "words", "nothing", "page"]


@dataclass
class Embeddings:
    """The requests that the server received, and the faults that it shows."""

    url: str = ""
    fault: Fault = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    released: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, request: web.Request) -> web.Response:
        """Answer one request."""
        body = await request.json()
        whole = isinstance(body.get("input"), str) and body["input"] and isinstance(body.get("model"), str)
        if not whole or set(body) - FIELDS or body.get("encoding_format", "float") != "float":
            told = {"message": "Invalid request.", "type": "invalid_request_error", "param": None, "code": None}
            return web.json_response({"error": told}, status=400)
        self.requests.append({"key": request.headers.get("authorization"), **body})
        if self.fault == "hang":
            await self.released.wait()
        if self.fault == "500":
            told = {"message": "The server had an error.", "type": "server_error", "param": None, "code": None}
            return web.json_response({"error": told}, status=500)
        if self.fault in ("garbage", "page"):
            kind = "application/json" if self.fault == "garbage" else "text/html"
            return web.Response(body=b"{\xff<html>", content_type=kind)
        return web.json_response(self._document(body))

    def _document(self, body: dict[str, Any]) -> dict[str, Any]:
        vector: Any = [float(body["input"].count(letter)) for letter in "aeioupoe"]
        vector = {"short": vector[:-1], "words": ["x"] * DIMENSIONS, "nothing": [0.0] * DIMENSIONS}.get(
            self.fault, vector
        )
        read = len(body["input"].split())
        return {
            "object": "list",
            "data": [{"object": "embedding", "index": 0, "embedding": vector}],
            "model": body["model"],
            "usage": {"prompt_tokens": read, "total_tokens": read},
        }


@asynccontextmanager
async def embeddings() -> AsyncIterator[Embeddings]:
    """Serve on a free port for the length of the block."""
    served = Embeddings()
    app = web.Application()
    app.router.add_post("/v1/embeddings", served.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    served.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield served
    finally:
        served.released.set()
        await runner.cleanup()
