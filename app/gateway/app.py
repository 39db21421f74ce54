"""The gateway as one ASGI application: `create_app(context)`.

`RequestMiddleware` is the layer around every route: it gives each request an id and each reply the headers that its
route collected, counts, and turns errors into replies in OpenAI's shape. Errors are logged by type and place, never by
value. Keys are checked by a dependency of each route, so a route without one is open and can be seen to be.
"""

import asyncio
import copy
import logging
import re
from collections.abc import Mapping, MutableMapping, Sequence
from importlib.metadata import version
from typing import Any, Final

import orjson
from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import BatonError, EventMalformed, RecordDamaged
from app.gateway.anthropic import reply as anthropic_reply
from app.gateway.anthropic import route as messages
from app.gateway.chat import completions
from app.gateway.chat import route as chat
from app.gateway.http import fault, health
from app.gateway.http.admission import Admission
from app.gateway.http.callers import Keys
from app.gateway.http.connection import CLIENT_CLOSED, RequestLog, end_span, route_of, start_span
from app.gateway.http.context import GatewayContext
from app.gateway.http.cross_origin import CrossOrigin
from app.gateway.http.direct import Direct
from app.gateway.http.idempotency import Idempotency
from app.gateway.openapi import docs_page, operations, root
from app.gateway.plans import route as plans
from app.gateway.responses import route as responses
from app.gateway.runs import (
    approvals,
    disclosures,
    identity,
    log_route,
    models,
    overview_route,
    report_route,
    shadow_route,
)
from app.gateway.runs import route as runs
from app.gateway.wire import unsupported_routes
from app.gateway.wire.invalid_values import parameters_error
from app.telemetry import raised_at

SCHEMAS: Final[operations.Schemas] = {
    **chat.SCHEMAS,
    **completions.SCHEMAS,
    **messages.SCHEMAS,
    **responses.SCHEMAS,
    **runs.SCHEMAS,
    **plans.SCHEMAS,
    **approvals.SCHEMAS,
    **overview_route.SCHEMAS,
}
SHARED_FAMILIES: Final = frozenset({"models", "files", "skills", "complete"})
"""First segments behind /v1 of routes that Anthropic's clients ask for too; they name themselves by a header."""
NOT_STORED: Final = (b"cache-control", b"no-store")
"""The header of each reply whose route says nothing else: most have content, and no cache may keep it."""
REQUEST_ID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")

__all__ = ["Application", "GatewayContext", "create_app", "create_probes"]


def create_app(context: GatewayContext, *, has_metrics: bool = True) -> FastAPI:
    """Return every public route over the given dependencies, which the caller opens and closes; `/metrics` among them
    unless it has a listener of its own."""
    keys = Keys(context)
    idempotency = Idempotency(context, Admission(context))
    routers = [
        chat.routes(context, keys, idempotency),
        completions.routes(context, keys, idempotency),
        messages.routes(context, keys, idempotency),
        responses.routes(context, keys, idempotency),
        models.routes(context, keys),
        identity.routes(keys, "/v1"),
        runs.routes(context, keys, idempotency),
        approvals.routes(context, keys, idempotency),
        report_route.routes(context, keys),
        overview_route.routes(context, keys),
        log_route.routes(context, keys),
        plans.routes(context, keys, idempotency),
        disclosures.routes(context, keys),
        shadow_route.routes(context, keys),
        health.routes(context),
    ]
    if has_metrics:
        routers.append(health.metrics(context))
    routers.append(root.routes())
    return Application(context, *routers, schemas=SCHEMAS)


def create_probes(context: GatewayContext) -> FastAPI:
    """Only probes and metrics: the routes of a process that only executes steps."""
    return Application(context, health.routes(context), health.metrics(context))


class Application(FastAPI):
    """FastAPI with fewer layers around its routes: each layer is a coroutine and its closures in every open stream, and
    time in every request. `RequestMiddleware` renders errors, `bodies.py` bounds bodies, and spans are the
    engine's."""

    def __init__(
        self,
        context: GatewayContext,
        *routers: APIRouter,
        title: str = "Baton",
        schemas: operations.Schemas | None = None,
    ) -> None:
        """With `schemas`, those of requests and events by name, the routes are described."""
        super().__init__(
            title=title,
            version=version("baton"),
            description="An orchestration API: one OpenAI-compatible endpoint in front of a conducted pool of models.",
            docs_url=None,
            redoc_url=None,
            openapi_url=None,
            redirect_slashes=False,
        )
        self._schemas = schemas or {}
        if schemas is not None:
            routers = (*routers, self._description(), docs_page.routes())
        routes = _routes_of(routers)
        self.router.routes += routes  # as they are: `include_router` would wrap each once more
        self._request_middleware = RequestMiddleware(self.router.app, context, routes)

    def _description(self) -> APIRouter:
        """Return the route of the API's description. It is made when it is first requested, which takes a thread 100
        ms."""
        router = APIRouter(tags=["probes"])
        cached: list[bytes] = []

        @router.get(
            "/openapi.json",
            operation_id="get_openapi",
            summary="Describe this API.",
            responses=operations.replies(),
        )
        async def get_openapi() -> Response:
            """The OpenAPI document."""
            if not cached:
                cached.append(await asyncio.to_thread(lambda: orjson.dumps(self.openapi())))
            return Response(cached[0], media_type="application/json")

        return router

    def openapi(self) -> dict[str, Any]:
        """FastAPI's description of the routes."""
        if self.openapi_schema is None:
            self.openapi_schema = operations.complete(super().openapi(), self._schemas)
        return self.openapi_schema

    def build_middleware_stack(self) -> ASGIApp:
        """Called once, with the first request."""
        return self._request_middleware

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request."""
        if self.middleware_stack is None:
            self.middleware_stack = self.build_middleware_stack()
        scope["app"] = self
        await self.middleware_stack(scope, receive, send)


def _routes_of(routers: Sequence[APIRouter]) -> list[APIRoute]:
    """Return the routes of the routers, and behind them one for HEAD for each that answers GET."""
    routes: list[APIRoute] = []
    for router in routers:
        routes += [route for route in router.routes if isinstance(route, APIRoute)]
    for route in routes:
        if not isinstance(route, Direct):
            route.app = AsyncExitStackMiddleware(route.app)
    heads = [_head(route) for route in routes if "GET" in (route.methods or ())]
    return routes + heads


def _head(route: APIRoute) -> APIRoute:
    """Return a GET route for HEAD: the server leaves the body out. It has no description of its own."""
    head = copy.copy(route)
    head.methods = {"HEAD"}
    head.include_in_schema = False
    return head


def _refuse_unrouted(scope: Scope, error: HTTPException, routes: Sequence[APIRoute]) -> Response:
    """Return the reply to a request that the router refuses."""
    if error.status_code == 404:
        meant_route = _find_route(unsupported_routes.suggest_path(scope["path"]), routes)
        return _refuse(scope, 404, unsupported_routes.advice(scope["path"], meant_route), "unknown_url")
    if error.status_code == 405:
        methods = _allowed_methods(scope["path"], routes)
        allow = {"allow": ", ".join(methods)}
        if scope["method"] == "OPTIONS":
            return Response(status_code=204, headers=allow)
        return _refuse(
            scope, 405, unsupported_routes.other_methods(scope["path"], methods), "method_not_allowed", allow
        )
    return _refuse(scope, error.status_code, "The request cannot be served.", "invalid_request", error.headers)


def _find_route(path: str, routes: Sequence[APIRoute]) -> str | None:
    """Return the path of the route that serves `path`, as it was declared; None if there is none."""
    return next((route.path for route in routes if route.path_regex.match(path)), None)


def _allowed_methods(path: str, routes: Sequence[APIRoute]) -> list[str]:
    methods = {"OPTIONS"}
    for route in routes:
        if route.path_regex.match(path):
            methods |= route.methods or set()
    return sorted(methods)


def _refuse(
    scope: MutableMapping[str, Any], status: int, message: str, code: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Return the reply to a fault without a class of its own, in the shape of the request's format."""
    scope["baton.log"].code = code
    if _has_anthropic_format(scope):
        request_id: bytes = scope["baton.headers"][0][1]
        return anthropic_reply.refuse(status, message, request_id.decode(), headers)
    return fault.refuse(status, message, code, headers)


class RequestMiddleware:
    """The outermost layer: gives every request its id and every reply its headers, counts, and renders errors."""

    def __init__(self, app: ASGIApp, context: GatewayContext, routes: Sequence[APIRoute]) -> None:
        self._app = app
        self._context = context
        self._routes = routes
        self._inner: ASGIApp = CrossOrigin(self._serve, context.origins) if context.origins else self._serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        request_id = _find_request_id(scope) or self._context.name("req").encode()
        headers = [(b"x-request-id", request_id)]
        is_anthropic = _has_anthropic_format(scope)
        if is_anthropic:
            headers.append((b"request-id", request_id))
        scope["baton.headers"] = headers
        scope["baton.status"] = 0
        scope["baton.log"] = log = RequestLog(request_id.decode(), self._context.tick())
        span = start_span(self._context.tracing, scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                scope["baton.status"] = message["status"]
                all_headers = [*message["headers"], *headers]
                if is_anthropic:
                    all_headers += anthropic_reply.rate_headers(headers, self._context.now())
                if all(name != b"cache-control" for name, _ in message["headers"]):
                    all_headers.append(NOT_STORED)
                milliseconds = (self._context.tick() - log.began) * 1000
                all_headers.append((b"openai-processing-ms", b"%d" % milliseconds))
                message["headers"] = all_headers
            else:
                log.is_complete = not message.get("more_body", False)
            await send(message)

        try:
            await self._inner(scope, receive, send_with_headers)
        finally:
            log.write(self._context.telemetry, scope, self._context.tick())
            end_span(span, scope)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Route the request; whatever is raised becomes a reply, unless one has begun."""
        try:
            if "\0" in scope["path"]:  # Postgres would refuse it as a part of a name
                raise HTTPException(404)
            await self._app(scope, receive, send)
        except ClientDisconnect:
            scope["baton.status"] = CLIENT_CLOSED
            scope["baton.log"].is_disconnected = True
        except Exception as error:
            has_begun = scope["baton.status"] != 0
            reply = None
            if not has_begun:
                reply = self._refusal(scope, error)
            if reply is None:
                reply = self._report_bug(scope, error)
            if not has_begun:
                await reply(scope, receive, send)

    def _refusal(self, scope: Scope, error: Exception) -> Response | None:
        """Return the reply to an expected error; None for a bug."""
        if isinstance(error, HTTPException):
            return _refuse_unrouted(scope, error, self._routes)
        if isinstance(error, RequestValidationError):
            error = parameters_error(error.errors())
        elif isinstance(error, EventMalformed):
            error = RecordDamaged(f"{error} No request can mend it: report it to the operator.")
        if not isinstance(error, BatonError):
            return None
        error.without_frames()  # the end of a turn keeps its error, and the frames keep the request
        scope["baton.log"].fail(error)
        if isinstance(error, RecordDamaged):
            fields = {"route": route_of(scope), "request": scope["baton.log"].id, "error": error.message}
            self._context.telemetry.log(logging.ERROR, "A request met damaged data.", **fields)
        if _has_anthropic_format(scope):
            return anthropic_reply.failure(error, scope["baton.headers"][0][1].decode())
        return fault.render(error)

    def _report_bug(self, scope: MutableMapping[str, Any], error: Exception) -> Response:
        """Log an unexpected error and return the reply to it."""
        request_id: str = scope["baton.headers"][0][1].decode()
        fields = {"route": route_of(scope), "request": request_id, "error": place_of(error)}
        self._context.telemetry.log(logging.ERROR, "A request failed because of a bug.", **fields)
        message = f"Something went wrong inside the service; report request {request_id} if it stays."
        return _refuse(scope, 500, message, "internal_error")


def _has_anthropic_format(scope: MutableMapping[str, Any]) -> bool:
    """Return True if a request has Anthropic's format, so that its errors have it too."""
    path: str = scope["path"]
    first, _, family = path[1:].partition("/")
    family = family.partition("/")[0]
    if first == "v1" and family in SHARED_FAMILIES:
        return any(name == b"anthropic-version" for name, _ in scope["headers"])
    return path == messages.PREFIX or path.startswith(f"{messages.PREFIX}/")


def _find_request_id(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            return value if REQUEST_ID.fullmatch(value) else None
    return None


def place_of(error: BaseException) -> str:
    """Return an error's type and the line that raised it; of a group, its first error's."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    where = raised_at(error.__traceback__)
    if not where:
        return type(error).__name__
    return f"{type(error).__name__} at {where}"
