"""Tools of free text on `/v1/chat/completions`: workers see functions of one text, callers their own tools again."""

import json
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from app.core.message.chat import TOKEN_BYTES, Message, Text, Tool, Toolbox, ToolCall, mint_call_id
from app.gateway.wire import custom_tools
from tests.gateway.test_exact_chat import events
from tests.harness.callers import open_stream, post_chat, stream_chat
from tests.harness.conversations import tool_call_reply
from tests.harness.exact_replies import assert_published_schema, exactly
from tests.harness.stand_ins import GatewayStandIn, chat_body
from tests.stubs import ProviderStub, Reply, Stall
from tests.stubs.script import ToolCall as Wanted

GRAMMAR = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: WORD"}}
PATCH: dict[str, Any] = {"type": "custom", "custom": {"name": "patch", "description": "Patches.", "format": GRAMMAR}}
NOTE: dict[str, Any] = {"type": "custom", "custom": {"name": "note"}}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
TEXT = 'a "word"\n\u00e9}'
SPOKEN = "The text `input` is passed on as it is."


def write_call(text: str = TEXT, name: str = "patch") -> Wanted:
    return Wanted(name, json.dumps({"input": text}), "c1")


def choose_tool(name: str, kind: str = "custom") -> dict[str, Any]:
    return {"type": kind, kind: {"name": name}}


def request_body(**more: Any) -> dict[str, Any]:
    return chat_body("Go.", tools=[PATCH, LOOK], **more)


def answer_calls(body: dict[str, Any], message: dict[str, Any], *results: str) -> dict[str, Any]:
    came = [
        {"role": "tool", "tool_call_id": call["id"], "content": result}
        for call, result in zip(message["tool_calls"], results, strict=True)
    ]
    return body | {"messages": [*body["messages"], message, *came]}


async def read_stream(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A reply's message put together from its chunks, and the pieces of its calls.

    The official types have the pieces of functions only: those of custom tools are as OpenAI sends them, and the rest
    of every chunk is held against the types.
    """
    pieces: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    contents: list[str] = []
    chunks = events(await post_chat(client, body | {"stream": True, "stream_options": {"include_usage": True}}))
    for chunk in chunks:
        deltas = [choice["delta"] for choice in chunk["choices"]]
        for delta in deltas:
            contents += [delta["content"]] if "content" in delta else []
            pieces += delta.get("tool_calls", ())
            delta["tool_calls"] = [call for call in delta.get("tool_calls", ()) if "function" in call]
        exactly(ChatCompletionChunk, chunk)
        assert_published_schema("CreateChatCompletionStreamResponse", chunk)
    assert contents == [""], "the opening says that there is no text, and no other chunk does"
    for piece in pieces:
        if "id" in piece:
            calls.append({"id": piece["id"], "type": piece["type"], piece["type"]: {}})
        call = calls[piece["index"]][calls[piece["index"]]["type"]]
        for name, more in piece[calls[piece["index"]]["type"]].items():
            call[name] = call.get(name, "") + more
    return {"role": "assistant", "content": None, "tool_calls": calls, "usage": chunks[-1]["usage"]}, pieces


async def test_a_tool_of_free_text_whole_and_streamed(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    stub.always("alpha", replace(tool_call_reply(write_call(), Wanted("look", '{"q": "x"}', "c2")), gap=0.01))
    reply = (await post_chat(client, request_body())).json()
    exactly(ChatCompletion, reply)
    assert_published_schema("CreateChatCompletionResponse", reply)
    calls = reply["choices"][0]["message"]["tool_calls"]
    assert [call["id"][:7] for call in calls] == ["call_bt", "call_bt"]
    assert [call | {"id": ""} for call in calls] == [
        {"id": "", "type": "custom", "custom": {"name": "patch", "input": TEXT}},
        {"id": "", "type": "function", "function": {"name": "look", "arguments": '{"q": "x"}'}},
    ]
    message, pieces = await read_stream(client, request_body())
    assert [call | {"id": ""} for call in message["tool_calls"]] == [call | {"id": ""} for call in calls]
    assert message["usage"] == reply["usage"]
    id_ = message["tool_calls"][0]["id"]
    assert pieces[:2] == [
        {"index": 0, "id": id_, "type": "custom", "custom": {"name": "patch", "input": ""}},
        {"index": 0, "custom": {"input": TEXT}},
    ], "the text is told before the next call begins"
    patch, look = (tool["function"] for tool in stub.requests_for("alpha")[0].json["tools"])
    assert (patch["parameters"], look["name"]) == (custom_tools.PARAMETERS, "look")
    assert patch["description"] == f"Patches.\n\n{SPOKEN} It must follow this lark grammar:\nstart: WORD"


async def test_results_go_on_with_the_run(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    stub.script(
        "alpha", tool_call_reply(write_call("one")), tool_call_reply(write_call("two")), Reply(chunks=("Done.",))
    )
    first = await post_chat(client, request_body(tool_choice=choose_tool("patch")))
    again = answer_calls(request_body(), first.json()["choices"][0]["message"], "patched")
    second, _ = await read_stream(client, again)
    second.pop("usage")
    last = await post_chat(client, answer_calls(again, second, "patched again"))
    assert last.json()["choices"][0]["message"]["content"] == "Done."
    assert last.headers["x-baton-run"] == first.headers["x-baton-run"]
    bodies = [received.json for received in stub.requests_for("alpha")]
    assert bodies[0]["tool_choice"] == choose_tool("patch", "function")
    call_and_result = (
        bodies[2]["messages"][1]["tool_calls"][0]["function"],
        bodies[2]["messages"][3]["tool_calls"][0]["function"],
    )
    assert [json.loads(call["arguments"]) for call in call_and_result] == [{"input": "one"}, {"input": "two"}]
    assert [message["content"] for message in bodies[2]["messages"] if message["role"] == "tool"] == [
        "patched",
        "patched again",
    ]
    partial = again | {"messages": again["messages"][:-1]}
    assert (await post_chat(client, partial)).json()["error"]["code"] == "tool_results_missing"


async def test_results_of_somebody_elses_call_are_refused(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    stub.always("alpha", tool_call_reply(write_call()))
    message = (await post_chat(client, request_body())).json()["choices"][0]["message"]
    message["tool_calls"][0]["id"] = mint_call_id("run_" + "7" * 31, bytes(TOKEN_BYTES))
    reply = await post_chat(client, answer_calls(request_body(), message, "x"))
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "unknown_tool_call")


WRITTEN = ('{"input": 5}', '{"text": "x"} ', "{}", '{"input": "\\ud800"}', '{"input": "x"}\n', '{"input": ""}')


@pytest.mark.long
async def test_what_a_worker_writes_is_told_the_same_on_both_ways(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    for arguments in WRITTEN:
        stub.always("alpha", tool_call_reply(Wanted("patch", arguments, "c1")))
        (whole,) = (await post_chat(client, request_body())).json()["choices"][0]["message"]["tool_calls"]
        message, _ = await read_stream(client, request_body())
        text = custom_tools.text_of(arguments)
        assert whole["custom"] == message["tool_calls"][0]["custom"] == {"name": "patch", "input": text}


async def test_a_call_that_is_cut_off_is_none(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    stub.always("alpha", Reply(chunks=("Hm.",), tool_calls=(Wanted("patch", '{"input": "wor', "c1"),), finish="length"))
    reply = (await post_chat(client, request_body())).json()["choices"][0]
    assert (reply["finish_reason"], "tool_calls" in reply["message"]) == ("length", False)
    chunks = events(await post_chat(client, request_body(stream=True)))
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_a_stream_broken_within_a_text_goes_on_with_all_of_it(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    stub.script("alpha", tool_call_reply(write_call(), words="Hm. ", fault=Stall(after=2, seconds=0.5)))
    request = {"json": request_body(stream=True), "headers": {"idempotency-key": "one"}}
    async with open_stream(client, "POST", "/v1/chat/completions", **request) as (received, events):
        async for _ in events:
            if "tool_calls" in received.chunks[-1]["choices"][0]["delta"]:
                break
    for _ in ("while it speaks", "afterwards"):
        rest = await stream_chat(client, request_body(), "one", last_event_id=str(received.numbers[-1]))
        pieces = [call for chunk in rest.chunks for c in chunk["choices"] for call in c["delta"].get("tool_calls", ())]
        assert (rest.text, rest.done) == ("", True)
        assert [piece["custom"]["input"] for piece in pieces] == ["", TEXT]
    assert len(stub.requests) == 1


FREE = {"name": "note", "said": "", "format": None}
NOTES = Tool("note", SPOKEN, custom_tools.PARAMETERS, spelling=FREE)
LOOKS = Tool("look", "", {"type": "object"})


@pytest.mark.parametrize(
    ("choice", "toolbox"),
    [
        ("required", Toolbox((NOTES, LOOKS), "required")),
        (choose_tool("note"), Toolbox((NOTES, LOOKS), "named", "note")),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [choose_tool("note")]}},
            Toolbox((NOTES,), "required"),
        ),
    ],
)
async def test_choices(gateway: GatewayStandIn, key: str, choice: Any, toolbox: Toolbox) -> None:
    async with gateway.client(key) as client:
        reply = await client.post("/v1/chat/completions", json=chat_body(tools=[NOTE, LOOK], tool_choice=choice))
    assert reply.status_code == 200, reply.text
    (order,) = gateway.runs.orders
    assert (order.task.toolbox, order.ignored, order.wire["custom"]) == (toolbox, (), ["note"])


async def test_a_history_with_calls_of_free_text(gateway: GatewayStandIn, key: str) -> None:
    """Calls of any server's; workers without tools are shown them as well."""
    call = {"id": "1", "type": "custom", "custom": {"name": "note", "input": "x"}, "index": 0}
    history = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    came = [{"role": "tool", "tool_call_id": "1", "content": "noted"}]
    async with gateway.client(key) as client:
        reply = await client.post("/v1/chat/completions", json=chat_body() | {"messages": history + came})
    assert reply.status_code == 200, reply.text
    first, second = gateway.runs.orders[0].task.messages
    assert first == Message("assistant", (), calls=(ToolCall("1", "note", '{"input": "x"}'),))
    assert second == Message("tool", (Text("noted"),), call_id="1")
