"""`python -m tests.bench.transport`: CPU of one provider call over each HTTP client, in milliseconds.

Each client sends the same body to the fast upstream over 16 connections that are kept alive, and reads the answer to
its end: once as one document, once as a stream of 100 chunks. The rounds of the clients are interleaved, and the figure
is the median over the rounds of this process's CPU time for a call. `app` is what the service uses, with its deadlines
and its parser of the wire format; the others only move bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import httpx
import uvloop
from httpx_aiohttp import AiohttpTransport

from app.core.message.chat import Message, Sampling, Text
from app.core.pool.catalog import Deadlines, ProviderSpec, Worker
from app.providers.adapters.openai import OpenAIProvider
from app.providers.protocol import Request

from .processes import upstream

CONNECTIONS = 16
TOTAL = 30.0
"""Seconds for one call."""
PATH = "/d0/c100/g0/v1"
WHOLE = b'{"model": "bench", "messages": [{"role": "user", "content": "What is six times seven?"}]}'
BODIES = {"whole": WHOLE, "streamed": WHOLE[:-1] + b', "stream": true}'}
HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer bench", "User-Agent": "baton"}
Call = Callable[[str], Awaitable[None]]


@asynccontextmanager
async def over_aiohttp(url: str) -> AsyncIterator[Call]:
    """aiohttp itself, as release 0.1.0 used it."""
    connector = aiohttp.TCPConnector(limit=0)
    session = aiohttp.ClientSession(
        connector=connector, headers=HEADERS, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
    )

    async def call(how: str) -> None:
        async with asyncio.timeout(TOTAL):
            async with session.post(f"{url}/chat/completions", data=BODIES[how], allow_redirects=False) as reply:
                while await reply.content.readany():
                    pass

    async with session:
        yield call


@asynccontextmanager
async def over_httpx(url: str, transport: httpx.AsyncBaseTransport) -> AsyncIterator[Call]:
    """httpx over any transport, used as its documentation says."""

    async def call(how: str) -> None:
        async with asyncio.timeout(TOTAL):
            async with client.stream("POST", f"{url}/chat/completions", content=BODIES[how]) as reply:
                async for _ in reply.aiter_raw():
                    pass

    async with httpx.AsyncClient(transport=transport, headers=HEADERS, timeout=TOTAL, trust_env=False) as client:
        yield call


@asynccontextmanager
async def over_the_app(url: str) -> AsyncIterator[Call]:
    """The service's own adapter for OpenAI's wire format."""
    provider = OpenAIProvider(ProviderSpec("bench", "openai", url), "bench")
    worker, messages = Worker("w", "bench", "bench"), (Message("user", (Text("What is six times seven?"),)),)
    requests = {
        "whole": Request(worker, messages, Sampling(max_tokens=64), live=False),
        "streamed": Request(worker, messages, Sampling(max_tokens=64)),
    }
    bodies = {how: provider.render(request) for how, request in requests.items()}
    deadlines = Deadlines()

    async def call(how: str) -> None:
        async for _ in provider.stream(requests[how], bodies[how], deadlines):
            pass

    try:
        yield call
    finally:
        await provider.close()


def clients(url: str) -> dict[str, Callable[[], AsyncIterator[Call]]]:
    """Return each client by its name in the table."""
    bounded = httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS)
    return {
        "aiohttp": lambda: over_aiohttp(url),
        "httpx over httpx-aiohttp": lambda: over_httpx(url, AiohttpTransport(limits=bounded)),
        "httpx, its own transport": lambda: over_httpx(url, httpx.AsyncHTTPTransport(limits=bounded)),
        "app": lambda: over_the_app(url),
    }


async def cpu_per_call(call: Call, how: str, calls: int) -> float:
    """Return the milliseconds of this process's CPU time for a call, over `calls` calls on 16 connections."""
    left = iter(range(calls))

    async def caller() -> None:
        for _ in left:
            await call(how)

    began = time.process_time()
    await asyncio.gather(*(caller() for _ in range(CONNECTIONS)))
    return (time.process_time() - began) / calls * 1000


async def measure(url: str, calls: int, rounds: int) -> None:
    """Print the table."""
    times: dict[tuple[str, str], list[float]] = {}
    async with AsyncExitStack() as stack:
        opened = {name: await stack.enter_async_context(open_()) for name, open_ in clients(url).items()}
        for call in opened.values():
            await cpu_per_call(call, "whole", 200)
        for _ in range(rounds):
            for how in BODIES:
                for name, call in opened.items():
                    times.setdefault((name, how), []).append(await cpu_per_call(call, how, calls))
    print(f"| client | {' | '.join(f'{how}, ms' for how in BODIES)} |")
    print("|---|" + "---|" * len(BODIES))
    for name in opened:
        figures = [f"{statistics.median(times[name, how]):.3f}" for how in BODIES]
        print(f"| {name} | {' | '.join(figures)} |")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.transport", description=__doc__)
    parser.add_argument("--calls", type=int, default=1000, help="in each round")
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    with upstream() as running:
        uvloop.run(measure(running.url + PATH, chosen.calls, chosen.rounds))


if __name__ == "__main__":
    main()
