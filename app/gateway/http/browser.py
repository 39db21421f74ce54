"""Cross-origin requests, for the pages of the origins that the operator names and no others.

Nothing that a browser adds by itself means anything here (there are no cookies), so credentials are never allowed and
`*` gives a page no more than any other program has: it still needs a key. A preflight is answered before routing and
without a key; browsers send none.
"""

from collections.abc import Collection
from typing import Final

from starlette.types import Scope

ANY: Final = "*"
LIMITED: Final = tuple(
    f"x-ratelimit-{what}-{unit}" for unit in ("requests", "tokens") for what in ("limit", "remaining", "reset")
)
EXPOSED: Final = ", ".join(
    ("x-request-id", "x-baton-run", "idempotent-replayed", "retry-after", "openai-processing-ms", *LIMITED)
)
PREFLIGHT: Final = [
    (b"access-control-allow-methods", b"GET, HEAD, POST, DELETE, OPTIONS"),
    (b"access-control-allow-headers", b"Authorization, *"),  # the star does not stand for Authorization
    (b"access-control-max-age", b"7200"),
]
Headers = list[tuple[bytes, bytes]]


class Crossing:
    """The origins whose pages may read replies; empty for none."""

    def __init__(self, origins: Collection[str]) -> None:
        self._origins = frozenset(origin.encode() for origin in origins)
        self._any = ANY in origins

    def headers(self, scope: Scope) -> Headers:
        """What a reply to this request says about who may read it."""
        if not self._origins:
            return []
        origin = _header(scope, b"origin")
        vary = [] if self._any else [(b"vary", b"Origin")]
        if origin is None or not (self._any or origin in self._origins):
            return vary
        allowed = (b"access-control-allow-origin", b"*" if self._any else origin)
        return [*vary, allowed, (b"access-control-expose-headers", EXPOSED.encode())]

    def preflight(self, scope: Scope) -> bool:
        """Whether this is a browser's question that may be answered with `PREFLIGHT`."""
        if not self._origins or scope["method"] != "OPTIONS":
            return False
        origin = _header(scope, b"origin")
        asks = _header(scope, b"access-control-request-method") is not None
        return asks and origin is not None and (self._any or origin in self._origins)


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for known, value in scope["headers"] if known == name), None)
