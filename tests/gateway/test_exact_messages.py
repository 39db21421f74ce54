"""Every kind of reply and event of Anthropic's format, against the official types; streamed and whole say the same."""

import json
from typing import Any

import httpx
import pytest
from anthropic.pagination import SyncPage
from anthropic.types import ErrorResponse, Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent

from tests.harness.exact_replies import exactly
from tests.harness.stand_ins import GatewayStandIn
from tests.stubs import Fail, ProviderStub, Reply, Truncate
from tests.stubs.script import ToolCall, Usage

OURS = frozenset({"baton", "data[].baton"})
ADD = {"name": "add", "input_schema": {"type": "object"}}
ASKED: dict[str, Any] = {
    "model": "baton-mini",
    "max_tokens": 64,
    "messages": [{"role": "user", "content": "What is 2 + 2?"}],
    "tools": [ADD],
}
CALLS = (ToolCall("add", '{"a": 2}', "c1"), ToolCall("add", '{"a": 3}', "c2"))
ODD_ARGUMENTS = '{"half a pair": "\\ud83d", "beyond 64 bits": 123456789012345678901234567890, "beyond a double": 1e400}'
BLOCK = ["content_block_start", "content_block_delta", "content_block_stop"]
END = ["message_delta", "message_stop"]
REPLIES: dict[str, tuple[Reply, list[str], str]] = {
    "plain": (Reply(chunks=("Fo", "ur", ".")), BLOCK, "end_turn"),
    "empty": (Reply(chunks=()), [], "end_turn"),
    "cut off": (Reply(chunks=("Fo",), finish="length"), BLOCK, "max_tokens"),
    "filtered": (Reply(chunks=("Fo",), finish="content_filter"), BLOCK, "refusal"),
    "refusing": (Reply(refusal="I will not say."), BLOCK, "end_turn"),
    "with reasoning": (
        Reply(reasoning=("Hm.",), usage=Usage(input=50, output=40, cached=30, reasoning=25)),
        BLOCK,
        "end_turn",
    ),
    "without usage": (Reply(usage=None), BLOCK, "end_turn"),
    "not ASCII": (Reply(chunks=("\U0001f600", "\u2028", '"\\', "\x00")), BLOCK, "end_turn"),
    "calling": (Reply(chunks=(), tool_calls=CALLS[:1], finish="tool"), BLOCK, "tool_use"),
    "calling with numbers and texts that not every parser reads": (
        Reply(chunks=(), tool_calls=(ToolCall("add", ODD_ARGUMENTS, "c1"),), finish="tool"),
        BLOCK,
        "tool_use",
    ),
    "saying and calling": (
        Reply(chunks=("Let me see.",), tool_calls=CALLS, finish="tool"),
        [*BLOCK, *BLOCK, *BLOCK],
        "tool_use",
    ),
}


def exact_events(text: str) -> list[dict[str, Any]]:
    """The events of a stream but the pings, each Anthropic's and named in its `event:`."""
    events_of_text = []
    for frame in text.removesuffix("\n\n").split("\n\n"):
        lines = dict(line.partition(": ")[::2] for line in frame.split("\n"))
        event = json.loads(lines["data"])
        assert lines["event"] == event["type"]
        if event["type"] == "ping":
            continue
        exactly(ErrorResponse if event["type"] == "error" else RawMessageStreamEvent, event, OURS)
        events_of_text.append(event)
    return events_of_text


def gather_content(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content that a stream comes to."""
    blocks: list[dict[str, Any]] = []
    pieces: list[str] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
            pieces.append("")
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            pieces[event["index"]] += delta["text"] if delta["type"] == "text_delta" else delta["partial_json"]
    for block, piece in zip(blocks, pieces, strict=True):
        block |= {"text": piece} if block["type"] == "text" else {"input": json.loads(piece)}
    return blocks


def kinds(events: list[dict[str, Any]]) -> list[str]:
    types = [event["type"] for event in events]
    return [kind for place, kind in enumerate(types) if place == 0 or kind != types[place - 1]]


@pytest.mark.parametrize("name", REPLIES)
async def test_messages_and_events_are_anthropics(stub: ProviderStub, client: httpx.AsyncClient, name: str) -> None:
    reply, blocks, stop = REPLIES[name]
    stub.always("*", reply)
    whole = (await client.post("/v1/messages", json=ASKED)).json()
    exactly(Message, whole, OURS)
    events = exact_events((await client.post("/v1/messages", json=ASKED | {"stream": True})).text)
    assert kinds(events) == ["message_start", *blocks, *END]
    last = events[-2]
    content = gather_content(events)
    for block in (*content, *whole["content"]):
        assert block.get("citations", ()) is not None  # Vercel's client takes a list or nothing
        block.pop("id", None)
    assert content == whole["content"]
    assert last["delta"]["stop_reason"] == whole["stop_reason"] == stop
    assert last["usage"] == {name: value for name, value in whole["usage"].items() if name != "service_tier"}


async def test_a_call_with_large_numbers_can_be_sent_back(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    """As amounts in the smallest unit of a currency, which other APIs hold in the text of the arguments."""
    amounts = ToolCall("add", '{"wei": 25000000000000000000, "atoms": 6.02e23}', "c1")
    stub.script("alpha", Reply(chunks=(), tool_calls=(amounts,), finish="tool"), Reply(chunks=("Done.",)))
    first = (await client.post("/v1/messages", json=ASKED)).json()
    (call,) = first["content"]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "ok"}
    turns = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    request_body = ASKED | {"messages": [*ASKED["messages"], *turns]}
    second = await client.post("/v1/messages", json=request_body)
    assert second.status_code == 200, second.text
    assert second.json()["baton"]["run"] == first["baton"]["run"]
    del request_body["max_tokens"]
    assert (await client.post("/v1/messages/count_tokens", json=request_body)).status_code == 200
    refused = await client.post("/v1/messages", json=ASKED | {"max_tokens": 10**30})
    assert (refused.status_code, "max_tokens" in refused.json()["error"]["message"]) == (400, True)


async def test_errors_are_anthropics(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    broken = {"baton": {"pool": {"pin": "gamma"}}}
    stub.always("gamma", Fail(status=401))
    old = {"anthropic-version": "2023-06-01"}
    replies = [
        await client.post("/v1/messages", json=ASKED | broken),
        await client.post("/v1/messages", json=ASKED | {"model": "nothing"}),
        await client.post("/v1/messages", json=ASKED | {"foo": 1}),
        await client.post("/v1/messages/count_tokens", json={"model": "baton-mini"}),
        await client.post("/v1/messages", json=ASKED, headers={"authorization": "Bearer no"}),
        await client.post("/v1/messages", content=b"x" * (9 << 20)),
        await client.get("/v1/models/nothing", headers=old),
    ]
    assert [reply.status_code for reply in replies] == [502, 404, 400, 400, 401, 413, 404]
    assert replies[5].json()["error"]["type"] == "request_too_large"  # as documented; the client's type lacks it
    for reply in replies:
        if reply is not replies[5]:
            exactly(ErrorResponse, reply.json())
        assert reply.json()["request_id"] == reply.headers["request-id"]
    stub.always("gamma", Reply(chunks=("Fo", "ur"), gap=0.01, fault=Truncate(after=1)))
    events = exact_events((await client.post("/v1/messages", json=ASKED | broken | {"stream": True})).text)
    assert (events[-1]["type"], events[-1]["error"]["type"]) == ("error", "api_error")


OLD = {"anthropic-version": "2023-06-01"}


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "kind", "says"),
    [
        ("POST", "/v1/messages/batches", {}, 404, "not_found_error", "one by one to /v1/messages"),
        ("GET", "/v1/messages/batches/msgbatch_1/results", {}, 404, "not_found_error", "one by one to /v1/messages"),
        ("POST", "/v1/messages/nothing", {}, 404, "not_found_error", "no such route"),
        ("GET", "/v1/messages", {}, 405, "invalid_request_error", "method"),
        ("GET", "/v1/messages/count_tokens", {}, 405, "invalid_request_error", "method"),
        ("DELETE", "/v1/models", OLD, 405, "invalid_request_error", "method"),
        ("POST", "/v1/files", OLD, 404, "not_found_error", "keeps no files"),
        ("POST", "/v1/complete", OLD, 404, "not_found_error", "/v1/messages"),
    ],
)
async def test_routes_that_there_are_not_are_refused_in_anthropics_shape(
    gateway: GatewayStandIn, method: str, path: str, headers: dict[str, str], status: int, kind: str, says: str
) -> None:
    async with gateway.client() as client:
        reply = await client.request(method, path, headers=headers)
    body = reply.json()
    exactly(ErrorResponse, body)
    assert (reply.status_code, body["error"]["type"]) == (status, kind)
    assert says in body["error"]["message"]
    assert body["request_id"] == reply.headers["request-id"]
    assert ("POST" in reply.headers.get("allow", "")) == (status == 405 and path.startswith("/v1/messages"))


async def test_what_only_looks_like_anthropics_keeps_openais_shape(gateway: GatewayStandIn) -> None:
    async with gateway.client() as client:
        for path, headers in (("/v1/messagesque", {}), ("/v1/files", {}), ("/v1/audio/speech", OLD)):
            reply = await client.get(path, headers=headers)
            assert (reply.status_code, reply.json()["error"]["code"]) == (404, "unknown_url")


async def test_a_bug_is_reported_in_anthropics_shape(gateway: GatewayStandIn, key: str) -> None:
    gateway.runs.refusal = RuntimeError("canary")  # type: ignore[assignment]
    async with gateway.client(key) as client:
        reply = await client.post("/v1/messages", json=ASKED, headers={"x-request-id": "mine-1"})
    exactly(ErrorResponse, reply.json())
    assert (reply.status_code, reply.json()["error"]["type"]) == (500, "api_error")
    assert "mine-1" in reply.json()["error"]["message"]
    assert "canary" not in reply.text


async def test_counts_and_models_are_anthropics(client: httpx.AsyncClient) -> None:
    request_body = {name: ASKED[name] for name in ("model", "messages", "tools")}
    exactly(MessageTokensCount, (await client.post("/v1/messages/count_tokens?beta=true", json=request_body)).json())
    old = {"anthropic-version": "2023-06-01"}
    listed = (await client.get("/v1/models?limit=1000", headers=old)).json()
    retrieved = (await client.get("/v1/models/baton-mini", headers=old)).json()
    SyncPage[ModelInfo].model_validate_json(json.dumps(listed), strict=True)
    ModelInfo.model_validate_json(json.dumps(retrieved), strict=True)
    assert (retrieved["id"], retrieved["type"]) == ("baton-mini", "model")
    ids = [model["id"] for model in listed["data"]]
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == (ids[0], ids[-1], False)
