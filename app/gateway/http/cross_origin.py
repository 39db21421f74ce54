"""Cross-origin requests (CORS): web pages of the origins that the operator lists may read replies.

No cookie has a meaning here, so credentials are never allowed, and `*` gives a page no more than any other program
has: it still needs a key. A preflight is answered before routing and without a key, because browsers send none.
"""

from collections.abc import Collection
from itertools import product
from typing import Final

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

METHODS: Final = ("GET", "HEAD", "POST", "PATCH", "DELETE", "OPTIONS")
RATES: Final = tuple(product(("requests", "tokens"), ("limit", "remaining", "reset")))
EXPOSED: Final = (
    *("x-request-id", "request-id", "x-baton-run", "idempotent-replayed", "openai-processing-ms"),
    *("retry-after", "x-should-retry"),
    *(f"x-ratelimit-{figure}-{unit}" for unit, figure in RATES),
    *(f"anthropic-ratelimit-{unit}-{figure}" for unit, figure in RATES),
)
"""Headers of replies that a page's script may read."""
MAX_AGE: Final = 7_200
"""Seconds for which a browser may reuse the answer to a preflight."""
NO_HEADERS: Final = Headers()


class CrossOrigin(CORSMiddleware):
    """Starlette's middleware, with two differences that callers rely on.

    A request from an unlisted origin is served as if it had no origin: Starlette would name the exposed headers to it,
    and refuse its preflight with 400. A preflight from a listed origin is always an empty 204 with the whole lists, and
    the browser compares what the page wants with them; a star in the list of headers does not include Authorization.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        super().__init__(
            app, allow_origins=frozenset(origins), allow_methods=METHODS, expose_headers=EXPOSED, max_age=MAX_AGE
        )
        self.preflight_headers["Access-Control-Allow-Headers"] = "Authorization, *"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        origin = Headers(scope=scope).get("origin")
        if origin is None or self.is_allowed_origin(origin):
            await super().__call__(scope, receive, send)
        else:
            await self.simple_response(scope, receive, send, request_headers=NO_HEADERS)

    def preflight_response(self, request_headers: Headers) -> Response:
        """Return the reply to a preflight from a listed origin."""
        allowed = super().preflight_response(request_headers).headers
        names = (name for name in allowed if name == "vary" or name.startswith("access-control-"))
        return Response(status_code=204, headers={name: allowed[name] for name in names})
