"""The reference: FastAPI and aiohttp that pass a request through and do nothing else."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse


def build(upstream: str) -> FastAPI:
    """Return an application that answers `/<prefix>/v1/chat/completions` with what the upstream says to the same
    path."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False) as session:
            app.state.session = session
            yield

    app = FastAPI(lifespan=lifespan, openapi_url=None)

    @app.post("/{path:path}")
    async def relay(path: str, request: Request) -> Response:
        session: aiohttp.ClientSession = request.app.state.session
        headers = {"content-type": "application/json"}
        answer = await session.post(f"{upstream}/{path}", data=await request.body(), headers=headers)
        if not answer.content_type.startswith("text/event-stream"):
            return Response(await answer.read(), answer.status, media_type="application/json")

        async def pieces() -> AsyncIterator[bytes]:
            async with answer:
                async for piece in answer.content.iter_any():
                    yield piece

        return StreamingResponse(pieces(), answer.status, media_type="text/event-stream")

    return app


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bare", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--upstream", required=True)
    chosen = parser.parse_args()
    uvicorn.run(
        build(chosen.upstream),
        host="127.0.0.1",
        port=chosen.port,
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_level="warning",
        backlog=4096,
    )


if __name__ == "__main__":
    main()
