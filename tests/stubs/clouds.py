"""Models at clouds: Azure OpenAI, Bedrock and Vertex on one loopback port, which verify how a request is authenticated.

Sources: AWS's "Signature Version 4 for API requests" and Smithy's specification of its binary event streams,
both implemented here anew; the references of Azure OpenAI, of Bedrock's InvokeModel and of Vertex's `rawPredict`. The
answers themselves are those of the wire formats.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import struct
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Self
from urllib.parse import parse_qsl, quote

from aiohttp import web

from .anthropic_wire import AnthropicWire
from .gemini_wire import GeminiWire
from .openai_wire import OpenAIWire
from .record import ReceivedRequest
from .responses_wire import ResponsesWire
from .script import Reply
from .wire import Wire, encode

BEDROCK, VERTEX = "bedrock-2023-05-31", "vertex-2023-10-16"
Check = Callable[[ReceivedRequest, str], str]
"""Returns what is wrong with a request, given its path and query as they were sent; empty if nothing is."""


def with_header(name: str, value: str, query: str = "") -> Check:
    """Demand this header, no other credentials, and this query."""

    def check(received: ReceivedRequest, target: str) -> str:
        others = {"authorization", "api-key", "x-api-key", "x-goog-api-key"} - {name}
        if received.header(name) != value or any(received.header(other) for other in others):
            return f"{name} is not as it should be"
        return "" if query in target.partition("?")[2] else "the query is not as it should be"

    return check


def require_signature(access: str, secret: str, region: str, token: str = "", service: str = "bedrock") -> Check:
    """Demand AWS's signature version 4."""

    def check(received: ReceivedRequest, target: str) -> str:
        header = received.header("authorization") or ""
        algorithm, _, rest = header.partition(" ")
        fields = dict(part.strip().split("=", 1) for part in rest.split(",") if "=" in part)
        at = received.header("x-amz-date") or ""
        scope = f"{at[:8]}/{region}/{service}/aws4_request"
        if algorithm != "AWS4-HMAC-SHA256" or fields.get("Credential") != f"{access}/{scope}":
            return "the credential does not fit"
        if (received.header("x-amz-security-token") or "") != token:
            return "the session's token does not fit"
        names = fields["SignedHeaders"].split(";")
        if not {"host", "x-amz-date"} <= set(names) or (token and "x-amz-security-token" not in names):
            return "a header that must be signed is not"
        path, _, query = target.partition("?")
        pairs = sorted((quote(name, safe="~"), quote(value, safe="~")) for name, value in parse_qsl(query, True))
        canonical = [
            received.method,
            quote(path, safe="/~"),
            "&".join(f"{name}={value}" for name, value in pairs),
            *(f"{name}:{' '.join((received.header(name) or '').split())}" for name in names),
            "",
            fields["SignedHeaders"],
            hashlib.sha256(received.body).hexdigest(),
        ]
        digest = hashlib.sha256("\n".join(canonical).encode()).hexdigest()
        key = f"AWS4{secret}".encode()
        for part in (at[:8], region, service, "aws4_request"):
            key = hmac.digest(key, part.encode(), "sha256")
        signature = hmac.digest(key, f"{algorithm}\n{at}\n{scope}\n{digest}".encode(), "sha256").hex()
        return "" if hmac.compare_digest(signature, fields.get("Signature", "")) else "the signature does not fit"

    return check


def message(headers: Mapping[str, str], payload: bytes) -> bytes:
    """Return one message of an event stream."""
    lines = b"".join(
        bytes([len(name)]) + name.encode() + b"\x07" + struct.pack(">H", len(value)) + value.encode()
        for name, value in headers.items()
    )
    return framed(lines, payload)


def framed(lines: bytes, payload: bytes) -> bytes:
    """Return a message of an event stream with these bytes in the place of its headers."""
    prelude = struct.pack(">II", 16 + len(lines) + len(payload), len(lines))
    prelude += struct.pack(">I", zlib.crc32(prelude))
    whole = prelude + lines + payload
    return whole + struct.pack(">I", zlib.crc32(whole))


def chunk(data: str) -> bytes:
    """Return one event of a model inside an event stream."""
    payload = json.dumps({"bytes": base64.b64encode(data.encode()).decode(), "p": "abcd"}).encode()
    return message({":event-type": "chunk", ":content-type": "application/json", ":message-type": "event"}, payload)


def exception(name: str) -> bytes:
    """Return an exception inside an event stream."""
    return message(
        {":exception-type": name, ":content-type": "application/json", ":message-type": "exception"},
        b'{"message": "provider-body-canary"}',
    )


class _LocalServer(ABC):
    """`async with server:` serves its routes at `url`, on a free port of this machine."""

    def __init__(self) -> None:
        self._runner: web.AppRunner | None = None
        self.url = ""
        self.requests: list[ReceivedRequest] = []

    @abstractmethod
    def _routes(self) -> list[web.RouteDef]:
        """Return the routes that it serves."""

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_routes(self._routes())
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *failure: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()


class TokenStub(_LocalServer):
    """`async with TokenStub() as tokens:` answers the libraries that fetch tokens.

    `/msi/token` is the managed identity of Azure's App Service, and `/token` Google's token endpoint.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fields: list[Mapping[str, str]] = []
        """The query or the form of each request."""

    def _routes(self) -> list[web.RouteDef]:
        return [web.get("/msi/token", self._answer_managed_identity), web.post("/token", self._service_account)]

    async def _answer_managed_identity(self, request: web.Request) -> web.StreamResponse:
        self._note(request, dict(request.query))
        ends = int(time.time()) + 3600
        token = {"access_token": self._token("entra"), "expires_on": str(ends), "token_type": "Bearer"}
        return web.json_response(token | {"resource": request.query["resource"]})

    async def _service_account(self, request: web.Request) -> web.StreamResponse:
        form = await request.post()
        self._note(request, {name: str(value) for name, value in form.items()})
        return web.json_response({"access_token": self._token("google"), "expires_in": 3600, "token_type": "Bearer"})

    def _note(self, request: web.Request, fields: Mapping[str, str]) -> None:
        headers = tuple((name.decode(), value.decode("latin-1")) for name, value in request.raw_headers)
        self.requests.append(ReceivedRequest("tokens", request.method, request.path, dict(request.query), headers))
        self.fields.append(fields)

    def _token(self, kind: str) -> str:
        return f"{kind}-{len(self.requests)}"


class CloudStub(_LocalServer):
    """`async with CloudStub(check) as cloud:` answers at every path that it knows, if `check` finds nothing wrong."""

    def __init__(self, check: Check) -> None:
        super().__init__()
        self._check = check
        self.replies: list[Reply] = []
        """The next answers; then plain ones."""
        self.tail: bytes | None = None
        """What ends an event stream in place of its last event."""

    def _routes(self) -> list[web.RouteDef]:
        return [web.post("/{path:.*}", self._answer)]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        headers = tuple((name.decode(), value.decode("latin-1")) for name, value in request.raw_headers)
        received = ReceivedRequest("cloud", request.method, request.path, dict(request.query), headers)
        received.body = await request.read()
        self.requests.append(received)
        if fault := self._check(received, request.raw_path):
            return web.json_response({"error": {"message": fault, "code": "401"}}, status=401)
        model = _model(request.path, received.json)
        if model is None:
            return web.json_response({"error": {"message": "no such path or body"}}, status=404)
        wire, received.model, framing = model
        reply = self.replies.pop(0) if self.replies else Reply()
        if framing == "whole":
            return web.json_response(wire.document(received, reply))
        frames = list(wire.frames(received, reply))
        if framing == "sse":
            body = b"".join(encode(frame, "\n") for frame in frames)
            return web.Response(body=body, content_type="text/event-stream")
        parts = [chunk(frame.data) for frame in frames]
        if self.tail is not None:
            parts[-1] = self.tail
        return web.Response(body=b"".join(parts), content_type="application/vnd.amazon.eventstream")


def _model(path: str, body: dict[str, Any]) -> tuple[Wire, str, str] | None:
    """Return the wire format, the model, and how the answer is framed; None for a path or a body that no cloud
    takes."""
    if path.endswith(("/chat/completions", "/responses")):
        wire = OpenAIWire(None) if path.endswith("/chat/completions") else ResponsesWire(None)
        return wire, body["model"], "sse" if body.get("stream") else "whole"
    if path.startswith("/model/"):
        model, _, verb = path.removeprefix("/model/").partition("/")
        if body.get("anthropic_version") != BEDROCK or body.keys() & {"model", "stream"}:
            return None
        return AnthropicWire(None), model, {"invoke": "whole"}.get(verb, "events")
    head, _, verb = path.partition(":")
    place, _, model = head.rpartition("/models/")
    if place.endswith("/publishers/google"):
        return GeminiWire(None), model, "sse" if verb == "streamGenerateContent" else "whole"
    if place.endswith("/publishers/anthropic") and body.get("anthropic_version") == VERTEX and "model" not in body:
        streams = verb == "streamRawPredict"
        return (
            (AnthropicWire(None), model, "sse" if streams else "whole") if streams == bool(body.get("stream")) else None
        )
    return None
