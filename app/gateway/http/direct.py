"""`Direct`: a route whose endpoint is reached without FastAPI's reading of parameters."""

from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from fastapi.security import SecurityScopes
from fastapi.security.base import SecurityBase
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Dependency = Callable[[Request], Awaitable[Any]]


class Direct(APIRoute):
    """A route that begins runs: FastAPI's declarations, with a shorter way from the request to the endpoint.

    FastAPI solves the dependencies of a request in four passes over parameters that these routes do not have: a tenth
    of the CPU time of a short run (measured with `python -m tests.bench`, one step, CPU per request). Here dependencies
    are declared as usual and called in the same order, but what FastAPI determines for each request is determined once.
    All other routes are FastAPI's own. While a stream is open, one frame of its route is left and no request object.

    The endpoint takes `request` and its dependencies, which take the request or nothing; all of them are
    coroutines. Declaring anything else raises TypeError at start-up.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self._answer = self.get_route_handler()

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Errors are raised to the layer around all routes."""
        if scope["method"] not in (self.methods or ()):
            return await super().handle(scope, receive, send)
        response = await self._answer(Request(scope, receive, send))
        await response(scope, receive, send)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the coroutine function that FastAPI calls for each request."""
        endpoint: Callable[..., Coroutine[Any, Any, Response]] = self.endpoint
        dependencies = [
            (self._bind_dependency(dependency), dependency.name) for dependency in self.dependant.dependencies
        ]
        if _reads_parameters(self.dependant) or self.dependant.request_param_name != "request":
            raise TypeError(f"{self.path}: an endpoint that needs more than the request and its dependencies")

        async def handle(request: Request) -> Response:
            arguments = {}
            for call, name in dependencies:
                value = await call(request)
                if name is not None:
                    arguments[name] = value
            return await endpoint(request=request, **arguments)

        return handle

    def _bind_dependency(self, dependant: Dependant) -> Dependency:
        """Return a dependency as a function of the request. Security schemes below it only document it, and are
        None."""
        call = dependant.call
        only_documents = all(map(_only_documents, dependant.dependencies))
        if call is None or _reads_parameters(dependant) or not only_documents:
            raise TypeError(f"{self.path}: a dependency that needs more than the request")
        arguments: dict[str, Any] = {}
        for dependency in dependant.dependencies:
            if dependency.name is not None:
                arguments[dependency.name] = None
        if dependant.security_scopes_param_name is not None:
            arguments[dependant.security_scopes_param_name] = SecurityScopes(dependant.own_oauth_scopes)
        bound = partial(call, **arguments) if arguments else call
        request_param_name = dependant.request_param_name
        if request_param_name is None:
            return lambda _: bound()
        return lambda request: bound(**{request_param_name: request})


def _only_documents(dependant: Dependant) -> bool:
    return isinstance(dependant.call, SecurityBase)


def _reads_parameters(dependant: Dependant) -> bool:
    """Return True if FastAPI would have to read a part of the request for it."""
    return bool(
        dependant.path_params
        or dependant.query_params
        or dependant.header_params
        or dependant.cookie_params
        or dependant.body_params
    )
