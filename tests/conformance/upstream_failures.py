"""The kinds of failures of a provider, as one table: how the stub shows each, and what Baton makes of it.

deploy/docs/failures.md prints this table for operators and callers; `test_upstream_failures.py` compares the two.
"""

from dataclasses import dataclass
from typing import Any

from tests.stubs import (
    Drop,
    Fail,
    Garbage,
    Hang,
    Raw,
    Reply,
    StreamError,
    Truncate,
)

WAIT_SECONDS = 30
"""The Retry-After of the stub where it names one: longer than the runs of these tests may take."""
TOO_LONG = "This model's maximum context length is 4096 tokens, your prompt is too long."
NO_CREDIT = "Your credit balance is too low to access the API."


@dataclass(frozen=True)
class Kind:
    """One kind of failure. `reason` and `code` are journaled with the call; `status`, `public` and `retry` are what the
    caller receives if every worker fails like this: HTTP status, error code, and the header that says when to retry.
    """

    name: str
    act: Any
    reason: str
    code: str
    about: str
    status: int = 502
    public: str = ""
    retry: str = ""
    http: int | None = None

    @property
    def public_code(self) -> str:
        """The error code that the caller receives."""
        return self.public or self.code

    @property
    def row(self) -> str:
        """Its line in the documented table."""
        http = str(self.http) if self.http is not None else "none"
        return f"| {self.name} | {self.about} | {http} | `{self.reason}` | `{self.code}` |"


def _kind(name: str, about: str, act: Any, reason: str, code: str, **more: Any) -> Kind:
    http = more.pop("http", act.status if isinstance(act, Fail) else None)
    return Kind(name=name, act=act, reason=reason, code=code, about=about, http=http, **more)


MISCONFIGURED, REFUSED, UNAVAILABLE = "worker_misconfigured", "worker_refused", "worker_unavailable"
LIMITED = "worker_rate_limited"
NEVER = "x-should-retry: false"
KINDS: tuple[Kind, ...] = (
    _kind("wrong-key", "401", Fail(status=401), "authentication", MISCONFIGURED),
    _kind("no-permission", "403", Fail(status=403), "authentication", MISCONFIGURED),
    _kind("no-credit", "402, or words such as `insufficient_quota`", Fail(status=402), "quota", MISCONFIGURED),
    _kind("low-balance", "400 that names the balance", Fail(status=400, message=NO_CREDIT), "quota", MISCONFIGURED),
    _kind("unknown-model", "404", Fail(status=404), "unknown_model", MISCONFIGURED),
    _kind("wrong-address", "405, or a redirect", Fail(status=405), "endpoint", MISCONFIGURED),
    _kind("refused", "400", Fail(status=400, message="No."), "refused", REFUSED, status=400),
    _kind(
        "too-long",
        "400 that names the context",
        Fail(status=400, message=TOO_LONG),
        "context_length",
        REFUSED,
        status=400,
        public="context_length_exceeded",
    ),
    _kind("too-large", "413", Fail(status=413), "refused", REFUSED, status=400),
    _kind("unprocessable", "422", Fail(status=422), "refused", REFUSED, status=400),
    _kind(
        "rate-limit",
        "429 with Retry-After",
        Fail(status=429, retry_after=WAIT_SECONDS),
        "rate_limit",
        LIMITED,
        status=429,
        public="rate_limit_exceeded",
        retry=f"retry-after: {WAIT_SECONDS}",
    ),
    _kind(
        "rate-limit-unsaid",
        "429 without Retry-After",
        Fail(status=429),
        "rate_limit",
        LIMITED,
        status=429,
        public="rate_limit_exceeded",
    ),
    _kind("overloaded", "529 or 503", Fail(status=529), "overload", UNAVAILABLE),
    _kind("server-error", "500 and other 5xx", Fail(status=500), "server_error", UNAVAILABLE),
    _kind("proxy-page", "502 with a page of HTML", Fail(status=502, html=True), "server_error", UNAVAILABLE),
    _kind("gateway-timeout", "504 or 408", Fail(status=504), "timeout", "worker_timeout"),
    _kind("silence", "nothing within `first` seconds", Hang(), "timeout", "worker_timeout"),
    _kind("reset", "no connection, or one that breaks before an answer", Drop(), "connection", UNAVAILABLE),
    _kind(
        "cut-off",
        "an answer that breaks off",
        Reply(fault=Truncate(after=1, clean=False)),
        "truncated",
        "worker_truncated",
        http=200,
    ),
    _kind(
        "error-in-stream",
        "an error inside a 200",
        Reply(fault=StreamError(after=0, status=500)),
        "server_error",
        UNAVAILABLE,
        http=200,
    ),
    _kind("garbage", "no JSON", Reply(fault=Garbage(after=0)), "malformed", "worker_malformed", http=200),
    _kind(
        "web-page",
        "200 with a page of HTML",
        Raw(body="<html></html>", content_type="text/html"),
        "malformed",
        "worker_malformed",
        http=200,
    ),
)
