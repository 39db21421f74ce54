"""The kinds of failures of a provider, as one table: how the stub shows each, and what Baton makes of it.

deploy/docs/failures.md prints this table for operators and callers; `test_upstream_failures.py` compares the two.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import httpx
import orjson

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
        reply = f"{self.status} `{self.public_code}`" + (f", `{self.retry}`" if self.retry else "")
        return f"| {self.name} | {self.about} | {http} | `{self.reason}` | `{self.code}` | {reply} |"

    def seen_by(self, inbound: str, *, streams: bool) -> tuple[int, str, str]:
        """Return what a caller receives if every worker fails like this: status, code or type of the error, and the
        header that says when to retry. Once a stream has begun there is no other status and no header."""
        code = {
            "chat": self.public_code,
            "responses": self.public_code,
            "messages": TYPES.get(self.status, "api_error"),
        }
        if not streams:
            return self.status, code[inbound], self.retry
        code["responses"] = RESPONSE_CODES.get(self.public_code, "server_error")
        return 200, code[inbound], ""


TYPES: Final = {400: "invalid_request_error", 429: "rate_limit_error"}
"""Anthropic's types of errors, by status."""
RESPONSE_CODES: Final = {
    "worker_refused": "invalid_prompt",
    **{code: code for code in ("context_length_exceeded", "rate_limit_exceeded", "insufficient_quota")},
}
"""The codes of a response that failed."""
INBOUND: Final = ("chat", "responses", "messages")
"""The formats of callers."""


async def receive_reply(client: httpx.AsyncClient, inbound: str, *, streams: bool, pin: str = "") -> tuple[Any, str]:
    """Ask one question; return what `Kind.seen_by` tells of the reply, and its run."""
    paths = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
    request_body: dict[str, Any] = {"model": "baton-mini", "stream": streams, "max_tokens": 64}
    request_body |= {"baton": {"pool": {"pin": pin}}} if pin else {}
    request_body["input" if inbound == "responses" else "messages"] = [{"role": "user", "content": "What is 2 + 2?"}]
    if inbound == "responses":
        del request_body["max_tokens"]
    reply = await client.post(paths[inbound], json=request_body)
    document = _last_event(reply.text) if streams else reply.json()
    error = document.get("response", document)["error"]
    code = error["type"] if inbound == "messages" else error["code"]
    names = [name for name in ("retry-after", "x-should-retry") if name in reply.headers]
    retry = ", ".join(f"{name}: {reply.headers[name]}" for name in names)
    run = reply.headers["x-baton-run"]
    assert run in error["message"], error["message"]
    return (reply.status_code, code, retry), run


def _last_event(text: str) -> dict[str, Any]:
    """The data of a stream's last event."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    document: dict[str, Any] = orjson.loads(lines[-1])
    return document


def _kind(name: str, about: str, act: Any, reason: str, code: str, **more: Any) -> Kind:
    http = more.pop("http", act.status if isinstance(act, Fail) else None)
    return Kind(name=name, act=act, reason=reason, code=code, about=about, http=http, **more)


MISCONFIGURED, REFUSED, UNAVAILABLE = "worker_misconfigured", "worker_refused", "worker_unavailable"
LIMITED = "worker_rate_limited"
QUOTA: Mapping[str, Any] = {"status": 429, "public": "insufficient_quota", "retry": "x-should-retry: false"}
KINDS: tuple[Kind, ...] = (
    _kind("wrong-key", "401", Fail(status=401), "authentication", MISCONFIGURED),
    _kind("no-permission", "403", Fail(status=403), "authentication", MISCONFIGURED),
    _kind("no-credit", "402, or words such as `insufficient_quota`", Fail(status=402), "quota", MISCONFIGURED, **QUOTA),
    _kind(
        "low-balance",
        "400 that names the balance",
        Fail(status=400, message=NO_CREDIT),
        "quota",
        MISCONFIGURED,
        **QUOTA,
    ),
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
