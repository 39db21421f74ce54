"""`/healthz` says that the process lives, `/readyz` that it can do its work, `/metrics` what it has done.

None of them needs a key. `/healthz` asks nobody, so that a database that is down does not get every gateway restarted.
Without the queue, or with a conductor that is out, `/readyz` says `degraded` and 200: a balancer that took the service
away would end what still works.
"""

import asyncio
from collections.abc import Awaitable, Callable

import orjson
from fastapi import APIRouter
from starlette.responses import Response

from app.errors import BatonError
from app.gateway.http.context import GatewayContext

PATIENCE = 3.0
"""Seconds for each check; the store and the queue give up by themselves after two."""


def routes(context: GatewayContext) -> APIRouter:
    """The routes of probes and of Prometheus."""
    router = APIRouter()

    @router.api_route("/healthz", methods=["GET", "HEAD"])
    async def healthz() -> Response:
        return Response(b'{"status":"ok"}', media_type="application/json")

    @router.api_route("/readyz", methods=["GET", "HEAD"])
    async def readyz() -> Response:
        checks = {"store": context.store.ready, "queue": context.queue.ready}
        results = await asyncio.gather(*(_check(ask) for ask in checks.values()))
        found = dict(zip(checks, results, strict=True))
        if (fit := context.conducts()) is not None:
            found["conductor"] = "ok" if fit else "degraded"
        ready = found["store"] == "ok"  # all else has something to go on with: the outbox (D1), the fallback
        status = "ready" if set(found.values()) == {"ok"} else "degraded"
        body = {"status": status if ready else "not_ready", "checks": found}
        headers = {} if ready else {"retry-after": "1"}
        return Response(orjson.dumps(body), 200 if ready else 503, headers, "application/json")

    @router.api_route("/metrics", methods=["GET", "HEAD"])
    async def metrics() -> Response:
        return Response(context.telemetry.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


async def _check(ask: Callable[[], Awaitable[None]]) -> str:
    """`ok`, or why not, in the words of the error's class."""
    try:
        async with asyncio.timeout(PATIENCE):
            await ask()
    except BatonError as error:
        return error.public_code or "failed"
    except TimeoutError:
        return "timeout"
    except OSError:
        return "unreachable"
    return "ok"
