"""Routes whose endpoints read the request themselves.

FastAPI's own solving of dependencies takes a tenth of what a short request costs in all (four passes over parameters
that these routes do not have). What such a route depends on is still declared as usual, and asked in the same order.
While a stream is open there is one frame of its route, and no request any more.
"""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send


class Direct(APIRoute):
    """A route whose endpoint takes `request` and its dependencies, which take the request or nothing; both are
    coroutines. Declaring anything else is an error at start-up."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self._answer = self.get_route_handler()

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. What is raised is for the layer around all routes."""
        if scope["method"] not in (self.methods or ()):
            return await super().handle(scope, receive, send)
        response = await self._answer(Request(scope, receive, send))
        await response(scope, receive, send)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """What FastAPI calls for each request."""
        endpoint: Callable[..., Coroutine[Any, Any, Response]] = self.endpoint
        asked = []
        for one in self.dependant.dependencies:
            if one.dependencies or _reads(one) or one.call is None:
                raise TypeError(f"{self.path}: a dependency that needs more than the request")
            asked.append((one.call, one.request_param_name, one.name))
        if _reads(self.dependant) or self.dependant.request_param_name != "request":
            raise TypeError(f"{self.path}: an endpoint that needs more than the request and its dependencies")

        async def handle(request: Request) -> Response:
            found = {}
            for call, takes, name in asked:
                value = await (call(**{takes: request}) if takes else call())
                if name is not None:
                    found[name] = value
            return await endpoint(request=request, **found)

        return handle


def _reads(dependant: Any) -> bool:
    """Whether it wants something of the request that FastAPI would read for it."""
    kinds = ("path_params", "query_params", "header_params", "cookie_params", "body_params")
    return any(getattr(dependant, kind) for kind in kinds)
