"""Bad requests: each gets its status in OpenAI's shape, small, fast, and without a byte of itself in the reply."""

import asyncio
import json
import time
from typing import Any

import httpx
import pytest

from app.gateway.ingress import Bounds
from tests.api.stand_ins import House, ask

CANARY = "canary7Q"
LIMIT = 4 << 20
FILL = LIMIT - 100


def message(content: Any, role: str = "user", **more: Any) -> dict[str, Any]:
    return ask() | {"messages": [{"role": role, "content": content} | more]}


def baton(**fields: Any) -> dict[str, Any]:
    return ask(baton=fields)


RAW: dict[str, bytes] = {
    "empty": b"",
    "blank": b" \n",
    "not json": CANARY.encode(),
    "unclosed": b'{"model":"' + CANARY.encode(),
    "trailing comma": b'{"model":"baton-mini",}',
    "two values": b"{}{}",
    "comment": b"{/* no */}",
    "single quotes": b"{'model':'x'}",
    "list": b"[]",
    "string": b'"canary7Q"',
    "number": b"1",
    "null": b"null",
    "nan": b'{"temperature":NaN}',
    "infinity": b'{"temperature":-Infinity}',
    "1e999": b'{"temperature":1e999}',
    "lone surrogate": b'{"user":"\\ud800"}',
    "reversed surrogates": b'{"user":"\\udc00\\ud800"}',
    "escaped nul": b'{"user":"canary7Q\\u0000"}',
    "nul in a key": b'{"us\\u0000er":"canary7Q"}',
    "raw nul": b'{"user":"\x00"}',
    "raw newline": b'{"user":"\n"}',
    "invalid utf-8": b'{"user":"\xff\xfe"}',
    "overlong utf-8": b'{"user":"\xc0\x80"}',
    "surrogate in utf-8": b'{"user":"\xed\xa0\x80"}',
    "utf-8 bom": b"\xef\xbb\xbf{}",
    "utf-16": '{"model":"baton-mini"}'.encode("utf-16"),
    "utf-16-le": '{"model":"baton-mini"}'.encode("utf-16-le"),
    "utf-32": '{"model":"baton-mini"}'.encode("utf-32"),
    "duplicate keys": b'{"model":"baton-mini","model":"canary7Q"}',
    "duplicate keys below": b'{"baton":{"budget":{"usd":1,"usd":2}}}',
    "duplicate keys by escape": b'{"model":"a","mod\\u0065l":"b"}',
    "int of 4,000 digits": b'{"seed":' + b"9" * 4_000 + b"}",
    "2^63": b'{"seed":9223372036854775808}',
    "2^64": b'{"seed":18446744073709551616}',
    "-2^63-1": b'{"seed":-9223372036854780000}',
    "depth 33": b'{"a":' * 33 + b"1" + b"}" * 33,
    "depth 900": b"[" * 900 + b"]" * 900,
    "depth 5,000": b"[" * 5_000 + b"]" * 5_000,
    "depth 100,000": b"[" * 100_000 + b"]" * 100_000,
    "depth of the whole body": b"[" * FILL,
    "1e6 small objects": b'{"messages":[' + b",".join([b"{}"] * 1_000_000) + b"]}",
    "1e5 bad messages": b'{"messages":[' + b",".join([b"{}"] * 100_000) + b"]}",
    "20,000 bad messages": b'{"model":"m","messages":[' + b",".join([b"1"] * 20_000) + b"]}",
    "20,000 keys": b"{" + b",".join([b'"canary7Q%d":1' % n for n in range(20_000)]) + b"}",
    "many quotes": b'"' * FILL,
    "many escapes": b'{"user":"' + b'\\"' * (FILL // 2) + b'"}',
    "many backslashes": b'{"user":"' + b"\\\\" * (FILL // 2) + b'"}',
    "4 MiB of text": b'{"user":"' + b"a" * FILL + b'"}',
    "4 MiB of digits": b"1" * FILL,
    "4 MiB of spaces": b" " * FILL,
    "many long integers": b"[" + b",".join([b"9" * 4_000] * 1_000) + b"]",
}

FIELDS: dict[str, tuple[dict[str, Any], str | None]] = {
    "no model": ({"messages": [{"role": "user", "content": "x"}]}, "model"),
    "no messages": ({"model": "baton-mini"}, "messages"),
    "empty messages": ({"model": "baton-mini", "messages": []}, "messages"),
    "messages is a string": ({"model": "baton-mini", "messages": CANARY}, "messages"),
    "messages of strings": ({"model": "baton-mini", "messages": [CANARY]}, "messages[0]"),
    "too many messages": (ask() | {"messages": [{"role": "user", "content": "x"}] * 2_049}, "messages"),
    "no role": (ask() | {"messages": [{"content": CANARY}]}, "messages[0].role"),
    "unknown role": (message("x", CANARY), "messages[0].role"),
    "tool role": (message("x", "tool", tool_call_id=CANARY), "messages[0].role"),
    "no content": (message(None), "messages[0].content"),
    "content is a number": (message(5), "messages[0].content"),
    "empty parts": (message([]), "messages[0].content"),
    "unknown part": (message([{"type": CANARY}]), "messages[0].content[0]"),
    "text is a number": (message([{"type": "text", "text": 5}]), "messages[0].content[0].text"),
    "audio part": (message([{"type": "input_audio", "input_audio": {"data": CANARY}}]), "messages[0].content[0]"),
    "file url": (
        message([{"type": "image_url", "image_url": {"url": "file:///" + CANARY}}]),
        "messages[0].content[0].image_url.url",
    ),
    "svg image": (
        message([{"type": "image_url", "image_url": {"url": "data:image/svg+xml;base64,AA"}}]),
        "messages[0].content[0].image_url.url",
    ),
    "image from an assistant": (
        message([{"type": "image_url", "image_url": {"url": "https://x/y"}}], "assistant"),
        "messages[0].content[0]",
    ),
    "tool calls": (message("x", "assistant", tool_calls=[{"id": CANARY}]), "messages[0].tool_calls"),
    "bad name": (message("x", name="a b " + CANARY), "messages[0].name"),
    "temperature is a string": (ask(temperature="1" + CANARY), "temperature"),
    "temperature is true": (ask(temperature=True), "temperature"),
    "temperature too high": (ask(temperature=2.1), "temperature"),
    "top_p below 0": (ask(top_p=-0.1), "top_p"),
    "max_tokens 0": (ask(max_tokens=0), "max_tokens"),
    "max_tokens below 0": (ask(max_tokens=-1), "max_tokens"),
    "max_tokens 1e18": (ask(max_tokens=10**18), "max_tokens"),
    "max_tokens 1.5": (ask(max_tokens=1.5), "max_tokens"),
    "both max_tokens": (ask(max_tokens=1, max_completion_tokens=1), "max_tokens"),
    "five stops": (ask(stop=["a"] * 5), "stop"),
    "empty stop": (ask(stop=""), "stop"),
    "seed is a float": (ask(seed=1.5), "seed"),
    "penalty": (ask(presence_penalty=3), "presence_penalty"),
    "stream is a number": (ask(stream=1), "stream"),
    "stream_options alone": (ask(stream_options={"include_usage": True}), "stream_options"),
    "long user": (ask(user=CANARY * 100), "user"),
    "metadata of numbers": (ask(metadata={"a": 1}), "metadata.a"),
    "17 metadata": (ask(metadata={str(n): "x" for n in range(17)}), "metadata"),
    "bad effort": (ask(reasoning_effort=CANARY), "reasoning_effort"),
    "n 2": (ask(n=2), "n"),
    "n 1e18": (ask(n=10**18), "n"),
    "n true": (ask(n=True), "n"),
    "tools": (ask(tools=[{"type": "function", "function": {"name": CANARY}}]), "tools"),
    "tool_choice": (ask(tool_choice="auto"), "tool_choice"),
    "functions": (ask(functions=[{"name": CANARY}]), "functions"),
    "json mode": (ask(response_format={"type": "json_object"}), "response_format"),
    "logprobs": (ask(logprobs=True), "logprobs"),
    "logit_bias": (ask(logit_bias={"1": 5}), "logit_bias"),
    "audio": (ask(modalities=["text", "audio"]), "modalities"),
    "prediction": (ask(prediction={"type": "content", "content": CANARY}), "prediction"),
    "web search": (ask(web_search_options={}), "web_search_options"),
    "unknown parameter": (ask(foo=CANARY), "foo"),
    "parameter of a strange name": (ask(**{CANARY + " <script>": 1}), None),
    "unknown in baton": (baton(bugdet={"usd": 1}), "baton.bugdet"),
    "unknown in budget": (baton(budget={"eur": 1}), "baton.budget.eur"),
    "strange name in baton": (baton(**{CANARY + " ": 1}), "baton"),
    "budget below 0": (baton(budget={"usd": -1}), "baton.budget.usd"),
    "budget in words": (baton(budget={"usd": CANARY}), "baton.budget.usd"),
    "no seconds": (baton(budget={"seconds": 0}), "baton.budget.seconds"),
    "half a step": (baton(budget={"steps": 1.5}), "baton.budget.steps"),
    "pool of numbers": (baton(pool={"allow": [1]}), "baton.pool.allow[0]"),
    "label with spaces": (baton(labels=["a " + CANARY]), "baton.labels[0]"),
    "plan in words": (baton(plan=CANARY), "baton.plan"),
    "baton in words": (ask(baton=CANARY), "baton"),
}


async def send(gateway: House, key: str, body: bytes, **headers: str) -> httpx.Response:
    async with gateway.client(key) as client:
        sent = {"content-type": "application/json"} | headers
        return await client.post("/v1/chat/completions", content=body, headers=sent)


def check(reply: httpx.Response, status: int) -> dict[str, Any]:
    """A refusal in OpenAI's shape that gives nothing of its request back."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    assert len(reply.content) <= 4_096
    assert CANARY not in reply.text
    assert CANARY not in str(reply.headers)
    error: dict[str, Any] = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


async def fastest(gateway: House, key: str, body: bytes) -> tuple[httpx.Response, float]:
    """The reply, and the best of three times: the others belong to whoever shares the machine."""
    best = 1e9
    for _ in range(3):
        began = time.perf_counter()
        reply = await send(gateway, key, body)
        best = min(best, time.perf_counter() - began)
        if best < 0.05:
            break
    return reply, best


@pytest.mark.parametrize("name", RAW)
async def test_bytes_that_are_no_request(gateway: House, key: str, name: str) -> None:
    reply, seconds = await fastest(gateway, key, RAW[name])
    error = check(reply, 400)
    assert error["type"] == "invalid_request_error"
    assert seconds < 0.1
    assert gateway.drivers.orders == []


@pytest.mark.parametrize("name", FIELDS)
async def test_fields_that_are_wrong(gateway: House, key: str, name: str) -> None:
    body, param = FIELDS[name]
    reply, seconds = await fastest(gateway, key, json.dumps(body).encode())
    error = check(reply, 400)
    assert error["param"] == param
    assert seconds < 0.1
    assert gateway.drivers.orders == []


async def test_an_unknown_model_is_a_404(gateway: House, key: str) -> None:
    error = check(await send(gateway, key, json.dumps(ask() | {"model": CANARY}).encode()), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


@pytest.mark.parametrize("size", [LIMIT + 1, 31_000_000])
async def test_a_large_body_is_refused_unread(gateway: House, key: str, size: int) -> None:
    body = b'{"user":"' + b"a" * size + b'"}'
    reply, seconds = await fastest(gateway, key, body)
    assert check(reply, 413)["code"] == "request_too_large"
    assert seconds < 0.1


async def test_a_large_body_of_unknown_length_is_refused_while_it_comes(gateway: House, key: str) -> None:
    sent = 0

    async def endless() -> Any:
        nonlocal sent
        while sent < 64 << 20:
            sent += 1 << 16
            yield b"a" * (1 << 16)

    async with gateway.client(key) as client:
        reply = await client.post("/v1/chat/completions", content=endless())
    check(reply, 413)
    assert sent <= LIMIT + (1 << 17)


async def test_a_body_that_does_not_come_is_given_up_on() -> None:
    gateway = House(bounds=Bounds(seconds=0.05))
    key = gateway.add_key()
    async with gateway.served() as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\ncontent-length: 99\r\n\r\n{{"
        writer.write(head.encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 400")
        writer.close()


@pytest.mark.parametrize(
    "headers",
    [
        {"content-encoding": "gzip"},
        {"content-encoding": "identity, br"},
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "multipart/form-data; boundary=x"},
        {"content-type": "application/json; charset=utf-16"},
    ],
)
async def test_other_media_are_a_415(gateway: House, key: str, headers: dict[str, str]) -> None:
    check(await send(gateway, key, b"{}", **headers), 415)


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=UTF-8", "application/x+json"])
async def test_json_by_any_of_its_names_is_read(gateway: House, key: str, kind: str) -> None:
    reply = await send(
        gateway, key, json.dumps(ask()).encode(), **{"content-type": kind, "content-encoding": "identity"}
    )
    assert reply.status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/canary7Q", 404),
        ("GET", "/openapi.json", 404),
        ("GET", "/docs", 404),
        ("GET", "/v1/models/canary7Q", 404),
        ("GET", "/v1/runs/canary7Q", 404),
        ("GET", "/v1/runs/can%00ary7Q", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/v1/runs", 405),
        ("OPTIONS", "/v1/chat/completions", 405),
    ],
)
async def test_other_routes_and_methods(gateway: House, key: str, method: str, path: str, status: int) -> None:
    async with gateway.client(key) as client:
        check(await client.request(method, path), status)


async def test_a_bug_is_a_500_that_tells_nothing(gateway: House, key: str, caplog: pytest.LogCaptureFixture) -> None:
    gateway.store.fault = RuntimeError(CANARY)
    async with gateway.client(key) as client:
        reply = await client.get("/v1/runs", headers={"x-request-id": "mine-1"})
    error = check(reply, 500)
    assert error["code"] == "internal_error"
    assert "mine-1" in error["message"]
    assert reply.headers["x-request-id"] == "mine-1"
    [record] = caplog.records
    assert record.__dict__["fields"]["error"].startswith("RuntimeError at ")
    assert CANARY not in str(record.__dict__)


@pytest.mark.parametrize("given", ["a b", "x" * 129, "-", "a\tb"])
async def test_a_strange_request_id_is_replaced(gateway: House, given: str) -> None:
    async with gateway.client() as client:
        reply = await client.get("/healthz", headers={"x-request-id": given})
    assert reply.headers["x-request-id"].startswith("req_")
