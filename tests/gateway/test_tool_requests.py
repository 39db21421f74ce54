"""Tools over the chat wire format: what a request comes to, and how tool calls are written in both kinds of replies."""

import json
from typing import Any

import pytest
from msgspec.structs import replace
from openai import AsyncOpenAI

from app.core.message.chat import Image, Message, Text, Tool, Toolbox, ToolCall, ToolDelta, mint_call_id
from app.core.run.caller_view import find_returned_results
from app.engine.delivery.messages import AnswerPart, CallerMessage, Mailbox, TurnEnd
from app.engine.runs.admission import Order
from app.gateway.chat.request import LazyConversation
from tests.harness.stand_ins import GatewayStandIn, chat_body, turn_end

SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"], "additionalProperties": False}
LOOK = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": SCHEMA, "strict": True}}
ADD = {"type": "function", "function": {"name": "add", "description": None, "strict": False}}
LOOKS, ADDS = Tool("look", "Looks.", SCHEMA, strict=True), Tool("add")


def choose_tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allow_tools(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [choose_tool(name) for name in names]}}


async def order_of_request(gateway: GatewayStandIn, key: str, **fields: Any) -> Order:
    """Return the order that the request leads to."""
    async with gateway.client(key) as client:
        reply = await client.post("/v1/chat/completions", json=chat_body() | fields)
    assert reply.status_code == 200, reply.text
    return gateway.runs.orders[-1]


@pytest.mark.parametrize(
    ("fields", "toolbox"),
    [
        ({}, Toolbox((LOOKS, ADDS))),
        ({"tool_choice": "auto", "parallel_tool_calls": True}, Toolbox((LOOKS, ADDS))),
        ({"tool_choice": "none"}, Toolbox((LOOKS, ADDS), "none")),
        ({"tool_choice": "required", "parallel_tool_calls": False}, Toolbox((LOOKS, ADDS), "required", parallel=False)),
        ({"tool_choice": choose_tool("add")}, Toolbox((LOOKS, ADDS), "named", "add")),
        ({"tool_choice": allow_tools("auto", "add")}, Toolbox((ADDS,))),
        ({"tool_choice": allow_tools("required", "add", "look")}, Toolbox((LOOKS, ADDS), "required")),
        ({"tools": []}, Toolbox()),
    ],
)
async def test_tools_and_choices(gateway: GatewayStandIn, key: str, fields: dict[str, Any], toolbox: Toolbox) -> None:
    order = await order_of_request(gateway, key, **{"tools": [LOOK, ADD]} | fields)
    assert (order.task.toolbox, order.ignored) == (toolbox, ())


async def test_a_conversation_with_calls_and_results(gateway: GatewayStandIn, key: str) -> None:
    """Messages of the official client come back with everything that it puts into them."""
    calls = [{"id": id_, "type": "function", "function": {"name": "look", "arguments": "{"}} for id_ in "ab"]
    extras = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "parsed": {"a": 1}}
    function = {"name": "look", "arguments": "{}", "parsed_arguments": {}}
    helped = {"id": "c", "type": "function", "index": 0, "function": function}
    picture = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    messages = [
        {"role": "user", "content": "Look twice."},
        {"role": "assistant", "content": None, "tool_calls": calls, **extras},
        {"role": "tool", "tool_call_id": "b", "content": "B"},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "A"}, picture], "name": "look"},
        {"role": "assistant", "content": "Again.", "tool_calls": [helped]},
        {"role": "tool", "tool_call_id": "c", "content": ""},
        {"role": "user", "content": "And?"},
    ]
    task = (await order_of_request(gateway, key, messages=messages)).task
    calls_of_caller = tuple(ToolCall(id_, "look", "{") for id_ in "ab")
    assert task.messages[1] == Message("assistant", (), calls=calls_of_caller)
    assert task.messages[2] == Message("tool", (Text("B"),), call_id="b")
    parts = (Text("A"), Image("https://example.org/a.png"))
    assert task.messages[3] == Message("tool", parts, name="look", call_id="a")
    assert task.messages[4] == Message("assistant", (Text("Again."),), calls=(ToolCall("c", "look", "{}"),))
    assert task.messages[5] == Message("tool", (Text(""),), call_id="c")
    assert task.needs_tools


def test_messages_are_made_when_somebody_looks_at_them() -> None:
    texts: list[str] = []

    def make(text: str) -> Message:
        texts.append(text)
        return Message("user" if text > "a" else "assistant", (Text(text),))

    conversation = LazyConversation(["b", "a", "c", "d"], make)
    assert find_returned_results(conversation) is None
    assert texts == ["d", "c", "a"]
    whole = tuple(conversation)
    assert [message.text for message in whole] == ["b", "a", "c", "d"]
    assert (conversation[1], conversation[2:], len(conversation)) == (whole[1], whole[2:], 4)
    assert conversation == whole
    assert len(texts) == 7


async def test_missing_results_of_our_own_calls_are_named(gateway: GatewayStandIn, key: str) -> None:
    run = "run_" + "7" * 31
    ours = [mint_call_id(run, bytes([n]) * 9) for n in range(3)]
    calls = [{"id": id_, "type": "function", "function": {"name": "look", "arguments": "{}"}} for id_ in ours]
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": ours[1], "content": "B"},
    ]
    async with gateway.client(key) as client:
        reply = await client.post("/v1/chat/completions", json=chat_body() | {"messages": messages})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "tool_results_missing")
    assert [id_ in error["message"] for id_ in ours] == [True, False, True]


# --- replies

CALLS = (ToolCall("call_bt1", "look", '{"q":"é"}'), ToolCall("call_bt2", "add", "{}"))


def wants(run: str, words: str = "") -> TurnEnd:
    """The end of a turn that calls tools."""
    return replace(turn_end(run, words), finish="tool_calls", calls=CALLS)


async def calling(_order: Order, run: str, line: Mailbox[CallerMessage]) -> None:
    """Words, then two calls in pieces."""
    line.put(AnswerPart("Let me ", at=7))
    deltas = (ToolDelta(0, "call_bt1", "look"), ToolDelta(0, arguments='{"q":'))
    line.put(AnswerPart("see.", at=11, calls=deltas))
    line.put(AnswerPart("", at=11, calls=(ToolDelta(0, arguments='"é"}'), ToolDelta(1, "call_bt2", "add", "{}"))))
    line.put(wants(run, "Let me see."))


async def test_a_whole_reply_with_calls(gateway: GatewayStandIn, key: str) -> None:
    for words, content in (("", None), ("Let me see.", "Let me see.")):

        async def script(_order: Order, run: str, line: Mailbox[CallerMessage], words: str = words) -> None:
            line.put(wants(run, words))

        gateway.runs.script = script
        async with gateway.client(key) as client:
            reply = await client.post("/v1/chat/completions", json=chat_body(tools=[LOOK]))
        (choice,) = reply.json()["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == content
        assert [call["id"] for call in choice["message"]["tool_calls"]] == ["call_bt1", "call_bt2"]
        function = {"name": "look", "arguments": '{"q":"é"}'}
        assert choice["message"]["tool_calls"][0] == {"id": "call_bt1", "type": "function", "function": function}


async def test_calls_are_streamed_as_they_come(gateway: GatewayStandIn, key: str) -> None:
    gateway.runs.script = calling
    async with gateway.client(key) as client:
        reply = await client.post("/v1/chat/completions", json=chat_body(tools=[LOOK], stream=True))
    frames = [frame.split("\n") for frame in reply.text.split("\n\n") if "data: {" in frame]
    chunks = [json.loads(lines[-1].removeprefix("data: ")) for lines in frames]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Let me see."
    pieces = [call for delta in deltas for call in delta.get("tool_calls", ())]
    head = {"index": 0, "id": "call_bt1", "type": "function", "function": {"name": "look", "arguments": ""}}
    assert pieces[0] == head
    assert pieces[1] == {"index": 0, "function": {"arguments": '{"q":'}}
    assert [piece["index"] for piece in pieces] == [0, 0, 0, 1]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    numbered = {lines[0] for lines in frames if '"tool_calls":[' in lines[-1]}
    assert not any(line.startswith("id:") for line in numbered)
    assert reply.text.endswith("data: [DONE]\n\n")


async def test_the_official_client_puts_the_stream_together(gateway: GatewayStandIn, key: str) -> None:
    gateway.runs.script = calling
    async with gateway.serve() as url, AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        ask_again: Any = {"model": "baton-mini", "messages": chat_body()["messages"], "tools": [LOOK]}
        async with client.chat.completions.stream(**ask_again) as stream:
            final = await stream.get_final_completion()
    message = final.choices[0].message
    assert (message.content, final.choices[0].finish_reason) == ("Let me see.", "tool_calls")
    assert message.tool_calls is not None
    assert [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls] == [
        (call.id, call.name, call.arguments) for call in CALLS
    ]
