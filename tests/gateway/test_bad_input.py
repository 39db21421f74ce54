"""Bad requests: each gets its status in OpenAI's shape, small, fast, and without a byte of itself in the reply."""

import asyncio
import gzip
import json
import logging
import re
import time
import tracemalloc
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
import pytest

from app.gateway.http.bodies import room_for_body
from app.gateway.http.context import Bounds
from tests.harness.bad_bodies import CANARY, LIMIT, RAW
from tests.harness.stand_ins import GatewayStandIn, chat_body

STALL = 0.25
"""Seconds; `python -m tests.bench` has the figure on a quiet machine, and its budget of 0.1."""


def message(content: Any, role: str = "user", **more: Any) -> dict[str, Any]:
    return chat_body() | {"messages": [{"role": role, "content": content} | more]}


def by_schema(schema: Any) -> dict[str, Any]:
    return chat_body(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})


def baton(**fields: Any) -> dict[str, Any]:
    return chat_body(baton=fields)


RAW_WORDS = re.compile(r"Input|instance|dictionary|not a valid value|valid (string|integer|number|list|boolean)|items ")
"""What pydantic says, and callers of an API do not."""
CALL = {"id": CANARY, "type": "function", "function": {"name": "f", "arguments": "{}"}}


def nest_schema(levels: int) -> dict[str, Any]:
    """A schema of so many objects and lists inside each other; each property takes two."""
    schema: dict[str, Any] = {"type": "object"} if levels % 2 else {"enum": [1]}
    for _ in range((levels - 1) // 2):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def offer(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | more}


def write(name: str, format: Any = None) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": name, "format": format}}


def choose(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


FIELDS: dict[str, tuple[dict[str, Any], str | None]] = {
    "no model": ({"messages": [{"role": "user", "content": "x"}]}, "model"),
    "no messages": ({"model": "baton-mini"}, "messages"),
    "empty messages": ({"model": "baton-mini", "messages": []}, "messages"),
    "messages is a string": ({"model": "baton-mini", "messages": CANARY}, "messages"),
    "messages of strings": ({"model": "baton-mini", "messages": [CANARY]}, "messages[0]"),
    "too many messages": (chat_body() | {"messages": [{"role": "user", "content": "x"}] * 2_049}, "messages"),
    "no role": (chat_body() | {"messages": [{"content": CANARY}]}, "messages[0].role"),
    "unknown role": (message("x", CANARY), "messages[0].role"),
    "function role": (message("x", "function", name="f"), "messages[0].role"),
    "a result of nothing": (message("x", "tool", tool_call_id=CANARY), "messages[0].tool_call_id"),
    "a result without an id": (message("x", "tool"), "messages[0].tool_call_id"),
    "a user with an id": (message("x", tool_call_id=CANARY), "messages[0].tool_call_id"),
    "no content": (message(None), "messages[0].content"),
    "content is a number": (message(5), "messages[0].content"),
    "content is an object": (message({"type": "text", "text": CANARY}), "messages[0].content"),
    "empty parts": (message([]), "messages[0].content"),
    "unknown part": (message([{"type": CANARY}]), "messages[0].content[0].type"),
    "a text part with a strange field": (
        message([{"type": "text", "text": "x", "foo": CANARY}]),
        "messages[0].content[0].foo",
    ),
    "text is a number": (message([{"type": "text", "text": 5}]), "messages[0].content[0].text"),
    "audio part": (message([{"type": "input_audio", "input_audio": {"data": CANARY}}]), "messages[0].content[0].type"),
    "file url": (
        message([{"type": "image_url", "image_url": {"url": "file:///" + CANARY}}]),
        "messages[0].content[0].image_url.url",
    ),
    "an image part with a strange field": (
        message([{"type": "image_url", "image_url": {"url": "https://x.test/a.png"}, "foo": CANARY}]),
        "messages[0].content[0].foo",
    ),
    "an image with a strange field": (
        message([{"type": "image_url", "image_url": {"url": "https://x.test/a.png", "foo": CANARY}}]),
        "messages[0].content[0].image_url.foo",
    ),
    "a call without an id": (
        message(None, "assistant", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": "{}"}}]),
        "messages[0].tool_calls[0].id",
    ),
    "a call whose id is a number": (
        message(
            None, "assistant", tool_calls=[{"id": 7, "type": "function", "function": {"name": "f", "arguments": "{}"}}]
        ),
        "messages[0].tool_calls[0].id",
    ),
    "a choice with a strange field": (
        chat_body(tool_choice={"type": "function", "function": {"name": "f"}, "foo": CANARY}),
        "tool_choice.foo",
    ),
    "svg image": (
        message([{"type": "image_url", "image_url": {"url": "data:image/svg+xml;base64,AA"}}]),
        "messages[0].content[0].image_url.url",
    ),
    "image from an assistant": (
        message([{"type": "image_url", "image_url": {"url": "https://x/y"}}], "assistant"),
        "messages[0].content[0]",
    ),
    "half a call": (message("x", "assistant", tool_calls=[{"id": CANARY}]), "messages[0].tool_calls[0].type"),
    "no call": (message("x", "assistant", tool_calls=[]), "messages[0].tool_calls"),
    "a call of a user": (message("x", tool_calls=[CALL]), "messages[0].tool_calls"),
    "a call of a custom tool": (
        message("x", "assistant", tool_calls=[CALL | {"type": "custom"}]),
        "messages[0].tool_calls[0].custom",
    ),
    "a call of another tool": (
        message("x", "assistant", tool_calls=[CALL | {"type": CANARY}]),
        "messages[0].tool_calls[0].type",
    ),
    "arguments that are none": (
        message("x", "assistant", tool_calls=[CALL | {"function": {"name": "f", "arguments": {}}}]),
        "messages[0].tool_calls[0].function.arguments",
    ),
    "a call without its result": (message(None, "assistant", tool_calls=[CALL]), "messages[0].tool_calls"),
    "the same call twice": (message(None, "assistant", tool_calls=[CALL, CALL]), "messages[0].tool_calls"),
    "bad name": (message("x", name="a b " + CANARY), "messages[0].name"),
    "temperature is a string": (chat_body(temperature="1" + CANARY), "temperature"),
    "temperature is true": (chat_body(temperature=True), "temperature"),
    "temperature too high": (chat_body(temperature=2.1), "temperature"),
    "top_p below 0": (chat_body(top_p=-0.1), "top_p"),
    "max_tokens 0": (chat_body(max_tokens=0), "max_tokens"),
    "max_tokens below 0": (chat_body(max_tokens=-1), "max_tokens"),
    "max_tokens 1e18": (chat_body(max_tokens=10**18), "max_tokens"),
    "max_tokens 1.5": (chat_body(max_tokens=1.5), "max_tokens"),
    "both max_tokens": (chat_body(max_tokens=1, max_completion_tokens=1), "max_tokens"),
    "five stops": (chat_body(stop=["a"] * 5), "stop"),
    "empty stop": (chat_body(stop=""), "stop"),
    "seed of more than 64 bits": (chat_body(seed=10**30), "seed"),
    "a schema with a number of more than 64 bits": (
        by_schema({"type": "object", "properties": {"n": {"enum": [1, -(10**30)]}}}),
        "response_format.json_schema.schema.properties.n.enum[1]",
    ),
    "a number of more than 64 bits under a strange name": (chat_body(metadata={f"{CANARY} ": 10**30}), "metadata"),
    "seed is a float": (chat_body(seed=1.5), "seed"),
    "penalty": (chat_body(presence_penalty=3), "presence_penalty"),
    "stream is a number": (chat_body(stream=1), "stream"),
    "stream_options alone": (chat_body(stream_options={"include_usage": True}), "stream_options"),
    "long user": (chat_body(user=CANARY * 100), "user"),
    "metadata of numbers": (chat_body(metadata={"a": 1}), "metadata.a"),
    "a long key of metadata": (chat_body(metadata={CANARY * 10: "x"}), "metadata"),
    "17 metadata": (chat_body(metadata={str(n): "x" for n in range(17)}), "metadata"),
    "bad effort": (chat_body(reasoning_effort=CANARY), "reasoning_effort"),
    "n 2": (chat_body(n=2), "n"),
    "n 1e18": (chat_body(n=10**18), "n"),
    "n true": (chat_body(n=True), "n"),
    "a tool of another type": (chat_body(tools=[{"type": "mcp", "mcp": {"name": CANARY}}]), "tools[0].type"),
    "a custom tool with a bad name": (chat_body(tools=[write(f"a b {CANARY}")]), "tools[0].custom.name"),
    "a custom tool with another format": (
        chat_body(tools=[write("f", {"type": CANARY})]),
        "tools[0].custom.format.type",
    ),
    "a custom tool with another grammar": (
        chat_body(tools=[write("f", {"type": "grammar", "grammar": {"syntax": CANARY, "definition": "x"}})]),
        "tools[0].custom.format.grammar.syntax",
    ),
    "a custom tool and a function of one name": (chat_body(tools=[offer("f"), write("f")]), "tools[1].custom.name"),
    "tool_choice of a function that is a custom tool": (
        chat_body(tools=[write("f")], tool_choice=choose("f")),
        "tool_choice",
    ),
    "a tool with a bad name": (chat_body(tools=[offer(f"a b {CANARY}")]), "tools[0].function.name"),
    "a tool twice": (chat_body(tools=[offer("f"), offer("f")]), "tools[1].function.name"),
    "a tool with a bad schema": (
        chat_body(tools=[offer("f", parameters={"type": CANARY})]),
        "tools[0].function.parameters",
    ),
    "an unknown field of a tool": (chat_body(tools=[offer("f", returns=CANARY)]), "tools[0].function.returns"),
    "129 tools": (chat_body(tools=[offer(f"f{n}") for n in range(129)]), "tools"),
    "tool_choice without tools": (chat_body(tool_choice="auto"), "tool_choice"),
    "tool_choice of another tool": (chat_body(tools=[offer("f")], tool_choice=choose(CANARY)), "tool_choice"),
    "tool_choice that is none": (chat_body(tools=[offer("f")], tool_choice=CANARY), "tool_choice"),
    "an allowed tool that is not there": (
        chat_body(
            tools=[offer("f")],
            tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [choose("g")]}},
        ),
        "tool_choice",
    ),
    "parallel_tool_calls 1": (chat_body(tools=[offer("f")], parallel_tool_calls=1), "parallel_tool_calls"),
    "functions": (chat_body(functions=[{"name": CANARY}]), "functions"),
    "unknown format": (chat_body(response_format={"type": "xml"}), "response_format.type"),
    "schema without a name": (
        chat_body(response_format={"type": "json_schema", "json_schema": {}}),
        "response_format.json_schema.name",
    ),
    "schema that is none": (by_schema({"type": "objct"}), "response_format.json_schema.schema"),
    "schema elsewhere": (by_schema({"$ref": "http://127.0.0.1:9/x"}), "response_format.json_schema.schema"),
    "schema of 17 levels": (by_schema(nest_schema(17)), "response_format.json_schema.schema"),
    "a tool whose arguments are no object": (
        chat_body(tools=[offer("f", parameters={"type": "array"})]),
        "tools[0].function.parameters",
    ),
    "a tool of 17 levels": (chat_body(tools=[offer("f", parameters=nest_schema(17))]), "tools[0].function.parameters"),
    "schema too long": (by_schema({"description": "x" * 70_000}), "response_format.json_schema.schema"),
    "logprobs 1": (chat_body(logprobs=1), "logprobs"),
    "21 top_logprobs": (chat_body(logprobs=True, top_logprobs=21), "top_logprobs"),
    "top_logprobs alone": (chat_body(top_logprobs=1), "top_logprobs"),
    "a bias of words": (chat_body(logit_bias={CANARY: 5}), "logit_bias"),
    "a bias beyond 100": (chat_body(logit_bias={"1": 101}), "logit_bias"),
    "audio": (chat_body(modalities=["text", "audio"]), "modalities"),
    "prediction": (chat_body(prediction={"type": "content", "content": CANARY}), "prediction"),
    "web search": (chat_body(web_search_options={}), "web_search_options"),
    "unknown parameter": (chat_body(foo=CANARY), "foo"),
    "parameter of a strange name": (chat_body(**{CANARY + " <script>": 1}), None),
    "unknown in baton": (baton(bugdet={"usd": 1}), "baton.bugdet"),
    "unknown in budget": (baton(budget={"eur": 1}), "baton.budget.eur"),
    "strange name in baton": (baton(**{CANARY + " ": 1}), "baton"),
    "budget below 0": (baton(budget={"usd": -1}), "baton.budget.usd"),
    "budget in words": (baton(budget={"usd": CANARY}), "baton.budget.usd"),
    "no seconds": (baton(budget={"seconds": 0}), "baton.budget.seconds"),
    "half a step": (baton(budget={"steps": 1.5}), "baton.budget.steps"),
    "pool of nobody": (baton(pool={"allow": []}), "baton.pool.allow"),
    "pool of numbers": (baton(pool={"allow": [1]}), "baton.pool.allow[0]"),
    "label with spaces": (baton(labels=["a " + CANARY]), "baton.labels[0]"),
    "plan in words": (baton(plan=CANARY), "baton.plan"),
    "baton in words": (chat_body(baton=CANARY), "baton"),
}


async def send(gateway: GatewayStandIn, key: str, body: bytes, **headers: str) -> httpx.Response:
    async with gateway.client(key) as client:
        headers_sent = {"content-type": "application/json"} | headers
        return await client.post("/v1/chat/completions", content=body, headers=headers_sent)


def check(reply: httpx.Response, status: int) -> dict[str, Any]:
    """A refusal in OpenAI's shape that gives nothing of its request back."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    assert len(reply.content) <= 4_096
    assert CANARY not in reply.text
    assert CANARY not in str(reply.headers)
    assert reply.headers["x-request-id"]
    assert reply.headers["openai-processing-ms"].isdigit()
    error: dict[str, Any] = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@asynccontextmanager
async def watch_loop() -> AsyncIterator[list[float]]:
    """The longest time that the loop worked without a turn for others inside the block, and how many turns it gave.

    Seconds of its own CPU: the rest of the time belongs to whoever shares the machine.
    """
    longest = [0.0, 0]

    async def watch() -> None:
        while True:
            began = time.thread_time()
            await asyncio.sleep(0)
            longest[0] = max(longest[0], time.thread_time() - began)
            longest[1] += 1

    watcher = asyncio.create_task(watch())
    await asyncio.sleep(0)
    try:
        yield longest
        await asyncio.sleep(0)
    finally:
        watcher.cancel()


async def stalls(gateway: GatewayStandIn, key: str, body: bytes) -> tuple[httpx.Response, float]:
    """The reply, and the best of up to six longest stalls: caches and clocks are shared with others, too."""
    best = 1e9
    for _ in range(6):
        async with watch_loop() as longest:
            reply = await send(gateway, key, body)
        best = min(best, longest[0])
        if best < STALL:
            break
    return reply, best


@pytest.mark.parametrize("name", RAW)
async def test_bytes_that_are_no_request(gateway: GatewayStandIn, key: str, name: str) -> None:
    reply, stall = await stalls(gateway, key, RAW[name])
    error = check(reply, 400)
    assert error["type"] == "invalid_request_error"
    assert stall < STALL
    assert gateway.runs.orders == []


@pytest.mark.long
async def test_others_get_turns_while_a_large_body_is_read(gateway: GatewayStandIn, key: str) -> None:
    turns = []
    for body in (b'{"user":5}', RAW["many mixed escapes"]):
        async with watch_loop() as turns_taken:
            await send(gateway, key, body)
        turns.append(turns_taken[1])
    assert turns[1] >= turns[0] + 5


async def test_schemas_may_have_16_levels(gateway: GatewayStandIn, key: str) -> None:
    body = by_schema(nest_schema(16)) | {"tools": [offer("f", parameters=nest_schema(16))]}
    assert (await send(gateway, key, json.dumps(body).encode())).status_code == 200


@pytest.mark.parametrize("shift", range(6))
async def test_escapes_across_slices_hide_no_key(gateway: GatewayStandIn, key: str, shift: int) -> None:
    """The body is longer than one slice of the scan, whose cut falls on every place of the escapes."""
    content = "x" * shift + '\\":{,[\\\\' * 180_000
    assert (await send(gateway, key, json.dumps(chat_body(content)).encode())).status_code == 200
    twice = json.dumps(chat_body(content))[:-1] + ',"n":1,"n":1}'
    check(await send(gateway, key, twice.encode()), 400)


@pytest.mark.parametrize("colon", [b":", b"\\u003a", b"\\u003A", b"\\\\u003a", b"u003a"])
@pytest.mark.parametrize("length", [1, 50_000])
async def test_colons_in_strings_hide_no_key_and_make_none(
    gateway: GatewayStandIn, key: str, colon: bytes, length: int
) -> None:
    """Colons are counted in another way in a long body than in a short one; both ways are right."""
    request_body = chat_body("?" * length, metadata={"~": "~~"})
    body = json.dumps(request_body).encode().replace(b"~", colon)
    assert (await send(gateway, key, body)).status_code == 200
    for twice in (b'"user":"~","user":"x"}', b'"user":"x","user":"~"}'):
        check(await send(gateway, key, body[:-1] + b"," + twice.replace(b"~", colon)), 400)


@pytest.mark.parametrize("name", FIELDS)
async def test_fields_that_are_wrong(gateway: GatewayStandIn, key: str, name: str) -> None:
    body, param = FIELDS[name]
    reply, stall = await stalls(gateway, key, json.dumps(body).encode())
    error = check(reply, 400)
    assert error["param"] == param
    assert not RAW_WORDS.search(error["message"])
    assert stall < STALL
    assert gateway.runs.orders == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("messages is a string", "'messages': it must be a list, not a string."),
        ("content is a number", "'messages[0].content': it must be a string or a list, not a number."),
        ("content is an object", "'messages[0].content': it must be a string or a list, not an object."),
        ("a call whose id is a number", "'messages[0].tool_calls[0].id': it must be a string, not a number."),
        ("temperature too high", "'temperature': it must be at most 2."),
        ("temperature is a string", "'temperature': it must be a number, not a string."),
        ("max_tokens 1.5", "'max_tokens': it must be a whole number."),
        ("five stops", "'stop': it must have at most 4 entries."),
        ("empty messages", "'messages': it must have at least 1 entry."),
        ("unknown format", "'response_format.type': it must be one of 'text', 'json_object', 'json_schema'."),
        ("long user", "'user': it must have at most 512 characters."),
        ("a long key of metadata", "'metadata': each of its keys must have at most 64 characters."),
        ("a bias of words", "'logit_bias': each of its keys must match the regular expression ^[0-9]{1,9}$."),
    ],
)
async def test_a_fault_is_told_in_a_plain_sentence(gateway: GatewayStandIn, key: str, name: str, message: str) -> None:
    reply = await send(gateway, key, json.dumps(FIELDS[name][0]).encode())
    assert check(reply, 400)["message"] == f"Invalid value for {message}"


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=x", "limit=-1", "state=x", "degraded=x", "since=x", "after=x", "limit=101"]
)
async def test_a_fault_of_the_query_is_told_in_a_plain_sentence(gateway: GatewayStandIn, key: str, query: str) -> None:
    async with gateway.client(key) as client:
        message = check(await client.get(f"/v1/runs?{query}"), 400)["message"]
    assert message.startswith(f"Invalid value for '{query.split('=')[0]}': it must be ")
    assert ("from 0" in message) == (query in ("limit=x", "limit=-1"))
    assert not RAW_WORDS.search(message)


@pytest.mark.parametrize(("query", "param"), [("nothing=x", "nothing"), ("%3Cb%3E=x", None)])
async def test_an_unknown_parameter_of_the_query_is_named(
    gateway: GatewayStandIn, key: str, query: str, param: str | None
) -> None:
    async with gateway.client(key) as client:
        error = check(await client.get(f"/v1/runs?{query}"), 400)
    assert (error["param"], error["code"]) == (param, "unknown_parameter")
    assert error["message"] == ("Unknown parameter: 'nothing'." if param else "Unknown parameter.")


async def test_an_unknown_model_is_a_404(gateway: GatewayStandIn, key: str) -> None:
    error = check(await send(gateway, key, json.dumps(chat_body() | {"model": CANARY}).encode()), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


@pytest.mark.parametrize("size", [LIMIT + 1, 31_000_000])
async def test_a_large_body_is_refused_unread(gateway: GatewayStandIn, key: str, size: int) -> None:
    body = b'{"user":"' + b"a" * size + b'"}'
    reply, stall = await stalls(gateway, key, body)
    error = check(reply, 413)
    assert error["code"] == "request_too_large"
    assert f"more than {LIMIT:,} bytes" in error["message"]
    assert stall < STALL


async def test_a_large_body_of_unknown_length_is_refused_while_it_comes(gateway: GatewayStandIn, key: str) -> None:
    sent_bytes = 0

    async def endless() -> Any:
        nonlocal sent_bytes
        while sent_bytes < 64 << 20:
            sent_bytes += 1 << 16
            yield b"a" * (1 << 16)

    async with gateway.client(key) as client:
        reply = await client.post("/v1/chat/completions", content=endless())
    check(reply, 413)
    assert sent_bytes <= LIMIT + (1 << 17)


async def test_a_body_that_does_not_come_is_given_up_on() -> None:
    gateway = GatewayStandIn(bounds=Bounds(seconds=0.05))
    key = gateway.add_key()
    async with gateway.serve() as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\ncontent-length: 99\r\n\r\n{{"
        writer.write(head.encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 408")
        writer.close()


@pytest.mark.parametrize(
    "headers",
    [
        {"content-encoding": "br"},
        {"content-encoding": "identity, br"},
        {"content-encoding": "gzip, gzip"},
        {"content-type": "image/png"},
        {"content-type": "multipart/form-data; boundary=x"},
        {"content-type": "application/json; charset=utf-16"},
    ],
)
async def test_other_media_are_a_415(gateway: GatewayStandIn, key: str, headers: dict[str, str]) -> None:
    reply = await send(gateway, key, b"{}", **headers)
    check(reply, 415)
    assert reply.headers["accept-encoding"] == "gzip, deflate"


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain;charset=UTF-8"])
async def test_what_is_no_json_object_under_a_type_that_is_no_json_is_a_415(
    gateway: GatewayStandIn, key: str, kind: str
) -> None:
    for body in (b"model=baton-mini", b'["model"]', b""):
        error = check(await send(gateway, key, body, **{"content-type": kind}), 415)
        assert "Content-Type: application/json" in error["message"]


ZIPPED = {
    "gzip": partial(gzip.compress, mtime=0),
    "x-gzip": partial(gzip.compress, mtime=0),
    "GZIP": partial(gzip.compress, mtime=0),
    "deflate": zlib.compress,
}


@pytest.mark.parametrize("encoding", ZIPPED)
async def test_compressed_bodies_are_read(gateway: GatewayStandIn, key: str, encoding: str) -> None:
    request_body = chat_body("What is 2 + 2? " + "é" * 300_000)
    body = ZIPPED[encoding](json.dumps(request_body).encode())
    assert (await send(gateway, key, body, **{"content-encoding": encoding})).status_code == 200
    [order] = gateway.runs.orders
    assert order.task.messages[0].text == request_body["messages"][0]["content"]


async def test_a_body_that_is_not_compressed_as_it_says_is_a_400(gateway: GatewayStandIn, key: str) -> None:
    for body in (gzip.compress(b"{}")[:-3], gzip.compress(b"{}") * 2, b"{}", b""):
        error = check(await send(gateway, key, body, **{"content-encoding": "gzip"}), 400)
        assert (error["code"], "gzip" in error["message"]) == ("invalid_encoding", True)


@pytest.mark.long
async def test_a_bomb_is_refused_before_it_is_unpacked() -> None:
    """Of 16 MiB no more is unpacked than a body may have."""
    gateway = GatewayStandIn(bounds=Bounds(body=1 << 18))
    key = gateway.add_key()
    bomb = gzip.compress(b" " * (16 << 20), 1)
    assert len(bomb) < 1 << 18
    tracemalloc.start()
    try:
        error = check(await send(gateway, key, bomb, **{"content-encoding": "gzip"}), 413)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert error["code"] == "request_too_large"
    assert most < 4 << 20


async def test_one_string_may_have_half_as_many_characters_as_a_body() -> None:
    gateway = GatewayStandIn(bounds=Bounds(body=4_096))
    key = gateway.add_key()
    for length, message in ((2_048, "Missing required parameter"), (2_049, "more than 2,048 characters")):
        assert message in check(await send(gateway, key, json.dumps({"user": "x" * length}).encode()), 400)["message"]


async def test_unpacked_bytes_count_with_those_that_arrive() -> None:
    gateway = GatewayStandIn(bounds=Bounds(body=1 << 16, all_bodies=1 << 16))
    body = gzip.compress(b'{"user":"' + b"a" * ((1 << 16) - 20) + b'"}')
    with room_for_body(gateway.context.bounds.pending, 1 << 17) as more:
        more((1 << 17) - 2 * len(body))
        check(await send(gateway, gateway.add_key(), body, **{"content-encoding": "gzip"}), 503)


@pytest.mark.parametrize(
    "kind",
    [
        *("application/json", "application/json; charset=UTF-8", "application/x+json", ""),
        *("application/x-www-form-urlencoded", "text/plain;charset=UTF-8", "application/octet-stream"),
    ],
)
async def test_json_by_any_of_its_names_is_read(gateway: GatewayStandIn, key: str, kind: str) -> None:
    reply = await send(
        gateway, key, json.dumps(chat_body()).encode(), **{"content-type": kind, "content-encoding": "identity"}
    )
    assert reply.status_code == 200


async def test_a_body_without_a_media_type_is_read(gateway: GatewayStandIn, key: str) -> None:
    async with gateway.client(key) as client:
        request = client.build_request(
            "POST", "/v1/chat/completions", content=b"  \n" + json.dumps(chat_body()).encode()
        )
        assert "content-type" not in request.headers
        assert (await client.send(request)).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/", 405),
        ("GET", "/v1/canary7Q", 404),
        ("GET", "/docs/", 404),
        ("GET", "/v1/models/canary7Q", 404),
        ("GET", "/v1/runs/canary7Q", 404),
        ("GET", "/v1/runs/can%00ary7Q", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/v1/runs", 405),
        ("PUT", "/v1/chat/completions", 405),
        ("GET", "/v1/audio/canary7Q", 404),
        ("POST", "/v1/embeddings", 404),
        ("POST", "/chat/completions", 404),
    ],
)
async def test_other_routes_and_methods(gateway: GatewayStandIn, key: str, method: str, path: str, status: int) -> None:
    async with gateway.client(key) as client:
        check(await client.request(method, path), status)


async def test_a_bug_is_a_500_that_tells_nothing(
    gateway: GatewayStandIn, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    gateway.store.fault = RuntimeError(CANARY)
    async with gateway.client(key) as client:
        reply = await client.get("/v1/runs", headers={"x-request-id": "mine-1"})
    error = check(reply, 500)
    assert error["code"] == "internal_error"
    assert "mine-1" in error["message"]
    assert reply.headers["x-request-id"] == "mine-1"
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.__dict__["fields"]["error"].startswith("RuntimeError at ")
    assert CANARY not in str(record.__dict__)


@pytest.mark.parametrize("request_id", ["a b", "x" * 129, "-", "a\tb"])
async def test_a_strange_request_id_is_replaced(gateway: GatewayStandIn, request_id: str) -> None:
    async with gateway.client() as client:
        reply = await client.get("/healthz", headers={"x-request-id": request_id})
    assert reply.headers["x-request-id"].startswith("req_")
