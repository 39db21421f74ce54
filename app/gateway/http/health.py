"""Probes and metrics: `/healthz`, `/readyz` and `/metrics`, none of which needs a key.

`/healthz` checks nothing but that the process is alive, so that an outage of the database does not get every gateway
restarted. `/readyz` tells whether the process can do its work. Without the queue, or while a conductor is unhealthy, it
says `degraded` and 200: a balancer that took the gateway away would end what still works. A process that was told to
stop is not ready at once, and still serves for `BATON_DRAIN_SECONDS`, so that balancers send their requests elsewhere.
"""

import asyncio
from collections.abc import Awaitable, Callable

import orjson
from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from app.errors import BatonError
from app.gateway.http.context import GatewayContext
from app.gateway.http.json_reply import json_reply
from app.gateway.openapi import operations, replies

CHECK_TIMEOUT = 3.0
"""Seconds for each check; the store and the queue give up by themselves after two, and probes after five."""


def routes(context: GatewayContext) -> APIRouter:
    """Return the routes of probes."""
    router = APIRouter(tags=["probes"])

    @router.get(
        "/healthz",
        operation_id="get_health",
        summary="Tell whether the process is alive.",
        response_model=replies.Health,
        responses=operations.replies(),
    )
    async def get_health() -> Response:
        """Nothing else is asked, so that an outage of the database does not get every gateway restarted."""
        return Response(b'{"status":"ok"}', media_type="application/json")

    @router.get(
        "/readyz",
        operation_id="get_readiness",
        summary="Tell whether the process can do its work.",
        response_model=replies.Readiness,
        responses={
            **operations.replies(),
            503: {"model": replies.Readiness, "description": "Not ready.", "headers": operations.HEADERS},
        },
    )
    async def get_readiness() -> Response:
        """The state of the database, the queue, and the conductors that are models."""
        store, queue = await asyncio.gather(_check(context.store.ready), _check(context.queue.ready))
        checks = {"store": store, "queue": queue}
        conducts = context.conducts()
        if conducts is not None:
            checks["conductor"] = "ok" if conducts else "degraded"
        if context.stop_requested.is_set():
            checks["process"] = "stopping"
        # Without the queue the outbox goes on (D1), and without a conductor the fallback.
        if store != "ok" or context.stop_requested.is_set():
            body = {"status": "not_ready", "checks": checks}
            return Response(orjson.dumps(body), 503, {"retry-after": "1"}, "application/json")
        status = "ready" if set(checks.values()) == {"ok"} else "degraded"
        return json_reply({"status": status, "checks": checks})

    return router


def metrics(context: GatewayContext) -> APIRouter:
    """Return the route of Prometheus."""
    router = APIRouter(tags=["probes"])

    @router.get(
        "/metrics",
        operation_id="get_metrics",
        summary="Read the metrics in Prometheus' text format.",
        response_class=PlainTextResponse,
        responses=operations.replies(),
    )
    async def get_metrics() -> Response:
        """The metrics of this process."""
        return Response(context.telemetry.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


async def _check(ask: Callable[[], Awaitable[None]]) -> str:
    """`ok`, or the code of the error."""
    try:
        async with asyncio.timeout(CHECK_TIMEOUT):
            await ask()
    except BatonError as error:
        return error.public_code or "failed"
    except TimeoutError:
        return "timeout"
    except OSError:
        return "unreachable"
    return "ok"
