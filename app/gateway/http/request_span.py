"""The span of an HTTP request, by OpenTelemetry's conventions for servers, below the span that the caller names.

The request's headers and query, its body, and the addresses of callers are not in it.
"""

from collections.abc import MutableMapping
from typing import Any, Final

from opentelemetry.trace import SpanKind

from app.core.run.state import RunState
from app.core.run.trace import NO_TRACE, continued
from app.network.tracing import Span, Tracing, received

PROBES: Final = frozenset({"/healthz", "/readyz", "/metrics"})
"""Paths that are asked every few seconds and belong to no request of a caller."""
KEY: Final = "baton.span"
"""The key of the span in the scope of a request."""
METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Methods that are named; others are `_OTHER`, as the conventions have it."""


def start(tracing: Tracing, scope: MutableMapping[str, Any]) -> Span:
    """Start the span of a request and put it into its scope."""
    if scope["path"] in PROBES:
        span = Span(NO_TRACE)
    elif not tracing.exports:
        span = Span(received(scope["headers"]))
    else:
        span = _start(tracing, scope)
    scope[KEY] = span
    return span


def _start(tracing: Tracing, scope: MutableMapping[str, Any]) -> Span:
    method = _method(scope)
    attributes: dict[str, str | int] = {"http.request.method": method, "url.scheme": scope.get("scheme", "http")}
    if scope.get("http_version"):
        attributes["network.protocol.version"] = scope["http_version"]
    if server := scope.get("server"):
        attributes["server.address"] = server[0]
        if server[1] is not None:
            attributes["server.port"] = server[1]
    return tracing.start(method, received(scope["headers"]), attributes, kind=SpanKind.SERVER)


def end(span: Span, scope: MutableMapping[str, Any]) -> None:
    """End it with the route and the status of the reply; a status of 500 or more is an error."""
    if not span.is_recording:
        return span.end()
    status, route = scope["baton.status"], getattr(scope.get("route"), "path", None)
    attributes: dict[str, str | int] = {"baton.request": scope["baton.headers"][0][1].decode()}
    if route is not None:  # the path of a request that fits no route may be anything
        span.rename(f"{_method(scope)} {route}")
        attributes |= {"http.route": route, "url.path": scope["path"]}
    if status:
        attributes["http.response.status_code"] = status
    span.set(attributes)
    return span.end(str(status or 500) if not 0 < status < 500 else "")


def belongs_to(scope: MutableMapping[str, Any], state: RunState) -> None:
    """Note the run that a request began or follows, with a link if the run belongs to another trace."""
    span: Span = scope[KEY]
    if span.is_recording:
        span.set({"baton.run": state.run})
        span.link(continued(state.admitted.trace, state.turn.trace))


def _method(scope: MutableMapping[str, Any]) -> str:
    method: str = scope["method"]
    return method if method in METHODS else "_OTHER"
