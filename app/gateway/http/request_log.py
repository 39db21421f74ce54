"""The facts of an HTTP request at its end, for its one line in the log and for the metrics of requests.

`Frontdoor` makes a `RequestLog` for each request and puts it into the request's scope as `baton.log`; whoever learns
something of the request notes it there. Nothing that a caller sends gets into it but the request's id, whose form is
checked.
"""

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from app.core.pool.catalog import MILLION
from app.engine.delivery.messages import FollowedRun, TurnEnd
from app.errors import BatonError, OverQuota
from app.store.protocol import KeyRow
from app.telemetry import Telemetry

UNMATCHED = "unmatched"
"""The route of a request for which there is none."""
METHODS = {"GET": "read", "HEAD": "read", "OPTIONS": "read"}
"""The classes of methods; all others are `write`."""
TEXT = 128
"""Characters of a name in a line."""
CLIENT_CLOSED = 499
OVERLOADED = 503
REASONS = 100
"""Most reasons of refusals that are counted apart. They are codes of our own errors, of which there are fewer."""


@dataclass(slots=True)
class RequestLog:
    """One HTTP request. `began` is the tick at which it came."""

    id: str
    began: float
    key: KeyRow | None = None
    """The API key, once it is known to be right."""
    run: str = ""
    """The run that the request has begun or follows."""
    tier: str = ""
    usd: int | None = None
    """Micro-dollars of the turn that the request has begun; None for every other request."""
    code: str = ""
    """The code of the error with which the request, or its stream, has ended."""
    limit: str = ""
    """The limit that the request has reached, of those that `OverQuota` names."""
    is_complete: bool = False
    """True once all of the reply was handed to the server."""
    is_disconnected: bool = False
    """True if the client has left before that."""

    def follow(self, driven: FollowedRun) -> None:
        """Note the run of the request."""
        self.run, self.tier = driven.run, driven.state.admitted.tier

    def end(self, driven: FollowedRun, ended: TurnEnd) -> None:
        """Note the end of its turn. What it has cost belongs to the request that has begun it."""
        if not driven.replayed:
            self.usd = ended.bill.turn_usd
        if ended.error is not None:
            self.fail(ended.error)

    def fail(self, error: BatonError) -> None:
        """Note an error."""
        self.code = error.public_code or ""
        self.limit = error.limit if isinstance(error, OverQuota) else ""

    def outcome(self, status: int) -> str:
        """`answered`, `failed` (an error, maybe inside of a stream), `disconnected` by the client, or `aborted`: this
        process was stopped before the reply was complete."""
        if self.is_disconnected:
            return "disconnected"
        if not self.is_complete:
            return "aborted"
        return "failed" if self.code or status >= 400 else "answered"

    def write(self, telemetry: Telemetry, scope: MutableMapping[str, Any], tick: float) -> None:
        """Count the request, and write its line. `tick` is the present one."""
        status, route, method = scope["baton.status"], route_of(scope), scope["method"]
        seconds = tick - self.began
        telemetry.count("baton_requests_total", route, str(status))
        telemetry.observe("baton_request_seconds", seconds, route, METHODS.get(method, "write"), f"{status // 100}xx")
        count_refusal(telemetry, status, self.limit or self.code)
        fields: dict[str, object] = {
            "request": self.id,
            "method": method[:TEXT],
            "status": status,
            "outcome": self.outcome(status),
            "ms": round(seconds * 1000, 3),
        }
        if self.code:
            fields["code"] = self.code
        if self.key is not None:
            fields |= {"key": self.key.name[:TEXT], "tenant": self.key.tenant[:TEXT]}
        if self.run:
            fields |= {"run": self.run, "tier": self.tier}
        if self.usd is not None:
            fields["cost_usd"] = self.usd / MILLION
        telemetry.log_request(route, fields)


def write_unreadable(telemetry: Telemetry, request_id: str, status: int, code: str) -> None:
    """Count a request that the server has refused before it could be read, and write its line."""
    telemetry.count("baton_requests_total", UNMATCHED, str(status))
    count_refusal(telemetry, status, code)
    telemetry.log_request(UNMATCHED, {"request": request_id, "status": status, "outcome": "failed", "code": code})


def count_refusal(telemetry: Telemetry, status: int, reason: str) -> None:
    """Count a request that was refused, by its reason. One that has failed otherwise (500, 502, 504) was not."""
    if reason and (400 <= status < CLIENT_CLOSED or status == OVERLOADED):
        telemetry.count("baton_refusals_total", str(status), telemetry.bounded("reason", reason, REASONS))


def route_of(scope: MutableMapping[str, Any]) -> str:
    """The route's template, never the path itself: metric labels come from closed sets."""
    return getattr(scope.get("route"), "path", UNMATCHED)
