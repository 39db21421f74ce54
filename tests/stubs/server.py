"""The stub as a server: routes of five provider dialects on one loopback port, the record, and the control endpoint."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Iterable
from typing import Any, Self

from aiohttp import web
from msgspec.structs import replace

from tests.harness.waiting import PATIENCE_SECONDS

from .anthropic_wire import AnthropicWire
from .delivery import Exchange, stall
from .gemini_wire import GeminiWire
from .openai_wire import CREATED, OpenAIWire
from .record import ReceivedRequest
from .responses_wire import ResponsesWire
from .script import Behaviour, Choice, Drop, Fail, Hang, Raw, Reply, Script, Stall, from_json
from .wire import ProviderRefusal, Wire

KEYS = {"openai": "sk-stub-openai", "responses": "sk-stub-openai", "anthropic": "sk-ant-stub", "gemini": "AIza-stub"}
"""The keys that the stub accepts unless told otherwise."""


class ProviderStub:
    """`async with ProviderStub() as stub:` serves all dialects; `models` limits what exists."""

    def __init__(
        self,
        *,
        models: Iterable[str] | None = None,
        any_key: bool = False,
        port: int = 0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._tls = tls
        self.requests: list[ReceivedRequest] = []
        self._script = Script()
        self._models = None if models is None else frozenset(models)
        self._port = port
        self._arrived = asyncio.Condition()
        self._closing = False
        self._released = asyncio.Event()
        self._runner: web.AppRunner | None = None
        keys = {name: None if any_key else frozenset((key,)) for name, key in KEYS.items()}
        self._wires: dict[str, Wire] = {
            "openai": OpenAIWire(keys["openai"]),
            "responses": ResponsesWire(keys["responses"]),
            "vllm": OpenAIWire(None, strict=False, name="vllm"),
            "anthropic": AnthropicWire(keys["anthropic"]),
            "gemini": GeminiWire(keys["gemini"]),
        }

    @property
    def url(self) -> str:
        """The root URL, under which each format has its prefix."""
        return f"{'http' if self._tls is None else 'https'}://127.0.0.1:{self._port}"

    @property
    def openai_url(self) -> str:
        """The `base_url` of the official client. The `/v1` is part of it."""
        return f"{self.url}/openai/v1"

    @property
    def responses_url(self) -> str:
        """The `base_url` of the official client, which appends `/responses`."""
        return self.openai_url

    @property
    def vllm_url(self) -> str:
        """The `base_url` of a compatible server, which needs no key, accepts unknown fields and has `/vllm/health`."""
        return f"{self.url}/vllm/v1"

    @property
    def anthropic_url(self) -> str:
        """The `base_url` of the official client, which appends `/v1/messages`."""
        return f"{self.url}/anthropic"

    @property
    def gemini_url(self) -> str:
        """The `base_url` of the official client, which appends `/v1beta/models/...`."""
        return f"{self.url}/gemini"

    def script(self, model: str, *behaviours: Choice) -> None:
        """Queue behaviours for a model (`*` is any), each for one request."""
        self._script.add(model, *behaviours)

    def always(self, model: str, behaviour: Choice) -> None:
        """Set what a model does whenever its queue is empty."""
        self._script.always(model, behaviour)

    def clear(self) -> None:
        """Forget scripts and records."""
        self._script.clear()
        self.requests.clear()

    def release(self) -> None:
        """Continue all streams that stall without an end."""
        self._released.set()
        self._released = asyncio.Event()

    def requests_for(self, model: str) -> list[ReceivedRequest]:
        """Return the requests for that model, in order of arrival."""
        return [received for received in self.requests if received.model == model]

    async def wait_for(
        self, count: int = 1, model: str | None = None, within: float = PATIENCE_SECONDS
    ) -> list[ReceivedRequest]:
        """Wait until the stub has read `count` requests, and return them.

        Raises TimeoutError after `within` seconds.
        """

        def enough() -> bool:
            return len(self.requests if model is None else self.requests_for(model)) >= count

        async with asyncio.timeout(within), self._arrived:
            await self._arrived.wait_for(enough)
        return self.requests if model is None else self.requests_for(model)

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 30)
        app.add_routes(
            [
                web.post("/openai/v1/chat/completions", self._answer),
                web.post("/openai/v1/responses", self._answer),
                web.get("/openai/v1/models", self._list),
                web.post("/vllm/v1/chat/completions", self._answer),
                web.get("/vllm/v1/models", self._list),
                web.get("/vllm/health", self._health),
                web.post("/anthropic/v1/messages", self._answer),
                web.post("/gemini/{version:v1|v1beta}/models/{call}", self._answer),
                web.post("/_stub/{verb:script|always|clear|release}", self._control),
                web.get("/_stub/requests", self._records),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, ssl_context=self._tls)
        await site.start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *failure: object) -> None:
        self._closing = True
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        dialect = "responses" if request.path.endswith("/responses") else request.path.split("/")[1]
        wire = self._wires[dialect]
        headers = tuple((name.decode(), value.decode("latin-1")) for name, value in request.raw_headers)
        port = request.transport.get_extra_info("peername")[1] if request.transport is not None else 0
        received = ReceivedRequest(wire.name, request.method, request.path, dict(request.query), headers, port)
        try:
            received.body = await request.read()
            return await self._perform(request, received, wire)
        except (asyncio.CancelledError, ConnectionError):
            if not self._closing:
                received.mark_disconnected()
            raise
        finally:
            received.finished_at = time.monotonic()

    async def _perform(self, request: web.Request, received: ReceivedRequest, wire: Wire) -> web.StreamResponse:
        exchange = Exchange(request, received, wire)
        try:
            wire.accept(received)
            self._check_model(received.model)
        except ProviderRefusal as refused:
            await self._note(received)
            return await exchange.refuse(refused)
        behaviour = self._releasable(self._script.next(received))
        await self._note(received)
        if isinstance(behaviour, Fail):
            return await exchange.fail(behaviour)
        if isinstance(behaviour, Raw):
            return await exchange.raw(behaviour)
        if isinstance(behaviour, Drop):
            await exchange.cut()
        if isinstance(behaviour, Hang):
            await stall(behaviour.seconds)
            return await exchange.refuse(ProviderRefusal(504, "timed out"))
        assert not isinstance(behaviour, Drop)
        return await exchange.reply(behaviour)

    def _releasable(self, behaviour: Behaviour) -> Behaviour:
        """Return the behaviour, whose stall without an end lasts until `release`."""
        if isinstance(behaviour, Reply) and isinstance(behaviour.fault, Stall) and behaviour.fault.seconds is None:
            return replace(behaviour, fault=replace(behaviour.fault, seconds=self._released))
        return behaviour

    def _check_model(self, model: str) -> None:
        if self._models is not None and model not in self._models:
            raise ProviderRefusal(404, f"The model `{model}` does not exist or you do not have access to it.")

    async def _note(self, received: ReceivedRequest) -> None:
        async with self._arrived:
            self.requests.append(received)
            self._arrived.notify_all()

    async def _list(self, request: web.Request) -> web.Response:
        ids = sorted(self._models or ())
        data = [{"id": name, "object": "model", "created": CREATED, "owned_by": "stub"} for name in ids]
        return web.json_response({"object": "list", "data": data})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="")

    async def _control(self, request: web.Request) -> web.Response:
        """`{"model": ..., "behaviours": [...]}` in the JSON form of `script.to_json`."""
        document: dict[str, Any] = await request.json()
        match request.match_info["verb"]:
            case "release":
                self.release()
            case "script":
                self.script(document["model"], *from_json(document["behaviours"]))
            case "always":
                self.always(document["model"], from_json(document["behaviours"])[0])
            case _:
                self.clear()
        return web.json_response({"ok": True})

    async def _records(self, request: web.Request) -> web.Response:
        model = request.query.get("model")
        chosen = self.requests if model is None else self.requests_for(model)
        return web.json_response([received.as_json() for received in chosen], dumps=json.dumps)
