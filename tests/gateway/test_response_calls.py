"""Calls and outputs in the input of `/v1/responses`: in whatever order they come, an output stands behind its call."""

from typing import Any

import httpx
import pytest

from app.core.message.chat import TOKEN_BYTES, Message, Text, ToolCall, mint_call_id
from app.errors import InvalidRequest
from app.gateway.responses.calls import pair_outputs
from tests.gateway.test_response_tools import SPAWN, calling, respond
from tests.stubs import ProviderStub, Reply

HI, OURS = Message("user", (Text("Hi"),)), mint_call_id("run_" + "7" * 31, bytes(TOKEN_BYTES))


def call(*ids: str) -> Message:
    return Message("assistant", (), calls=tuple(ToolCall(id_, "f") for id_ in ids))


def output(id_: str, text: str = "") -> Message:
    return Message("tool", (Text(text),), call_id=id_)


@pytest.mark.parametrize(
    ("messages", "paired"),
    [
        (
            (HI, call("a", "b"), output("b"), HI, output("a"), HI),
            (HI, call("a", "b"), output("a"), output("b"), HI, HI),
        ),
        ((call("a"), call("b"), output("a"), output("b")), (call("a"), output("a"), call("b"), output("b"))),
        ((call("a"), output("a", "1"), call("a"), output("a", "2")),) * 2,
        ((HI, output(OURS), HI),) * 2,
        ((HI,),) * 2,
    ],
    ids=["behind a message", "behind another call", "one id twice", "of a run of ours", "none"],
)
def test_outputs_stand_behind_their_calls(messages: tuple[Message, ...], paired: tuple[Message, ...]) -> None:
    assert pair_outputs(messages) == paired


@pytest.mark.parametrize(
    ("messages", "code", "says"),
    [
        ((call("a", "b"), output("a")), "tool_results_missing", "of: 1 in all"),
        ((call(OURS, "b"), HI), "tool_results_missing", f"of: {OURS}"),
        ((HI, output("a")), "unknown_tool_call", "answers no call"),
        ((call("a"), output("a"), output("a")), "unknown_tool_call", "answers no call"),
        ((output("a"), call("a")), "unknown_tool_call", "answers no call"),
    ],
)
def test_what_has_no_other_half_is_refused(messages: tuple[Message, ...], code: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        pair_outputs(messages)
    assert (refused.value.public_code, refused.value.param, says in refused.value.message) == (code, "input", True)


@pytest.mark.long
async def test_outputs_in_any_order(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    """A run goes on by an output behind the user's next words; words in its place are refused, not sent to a worker."""
    stub.script("alpha", calling("spawn", "{}"), Reply(chunks=("Done.",)))
    first = await respond(client, tools=[SPAWN])
    result = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "begun"}
    go, now = ({"role": "user", "content": text} for text in ("Go.", "Now?"))
    behind: dict[str, Any] = {"model": "baton-mini", "tools": [SPAWN], "previous_response_id": first["id"]}
    error = (await client.post("/v1/responses", json=behind | {"input": "Now?"})).json()["error"]
    assert (error["code"], result["call_id"] in error["message"]) == ("tool_results_missing", True)
    last = await respond(client, tools=[SPAWN], input=[go, first["output"][0], now, result])
    assert (last["id"].startswith(first["id"]), last["output"][0]["content"][0]["text"]) == (True, "Done.")
    assert [message["role"] for message in stub.requests_for("alpha")[1].json["messages"]] == [
        "user",
        "assistant",
        "tool",
        "user",
    ]


async def test_a_call_may_have_any_id_that_other_servers_give(client: httpx.AsyncClient) -> None:
    """Such as that of LiteLLM, which puts a signature in base64 behind the id."""
    id_ = {"call_id": "call_1__thought__a+b/c=="}
    history = [{"role": "user", "content": "Hi"}, CALL | id_, OUTPUT | id_]
    await respond(client, input=history)


CALL = {"type": "function_call", "call_id": "x", "name": "spawn", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "x", "output": "begun"}
CHAT = {"role": "tool", "tool_call_id": "x", "content": "begun"}


@pytest.mark.parametrize(
    ("path", "field", "items", "param"),
    [
        ("responses", "input", [OUTPUT], "input"),
        ("responses", "input", [OUTPUT, CALL], "input"),
        ("responses", "input", [OUTPUT | {"type": "custom_tool_call_output"}], "input"),
        ("responses", "input", [CALL, OUTPUT | {"type": "custom_tool_call_output"}], "input[1].type"),
        ("chat/completions", "messages", [{"role": "user", "content": "Hi"}, CHAT], "messages[1].tool_call_id"),
        ("chat/completions", "messages", [CHAT], "messages[0].tool_call_id"),
    ],
)
async def test_a_result_without_its_call_is_refused_in_both_formats(
    stub: ProviderStub, client: httpx.AsyncClient, path: str, field: str, items: list[Any], param: str
) -> None:
    for more in ({}, {"stream": True}):
        reply = await client.post(f"/v1/{path}", json={"model": "baton-mini", field: items} | more)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert not stub.requests


async def test_a_turn_shows_what_its_own_request_sent_and_the_instructions_in_force(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    """The step goes on as it was told to: instructions that come with results are not those of the run."""
    stub.script("alpha", calling("spawn", "{}"), Reply(chunks=("Done.",)), Reply())
    first = await respond(client, tools=[SPAWN], metadata={"a": "1"}, user="ann")
    result = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "begun"}
    more = {"metadata": {"b": "2"}, "user": "bob", "instructions": "Be brief."}
    second = await respond(client, tools=[SPAWN], previous_response_id=first["id"], input=[result], **more)
    assert second["id"].startswith(first["id"])
    assert (second["metadata"], second["user"], second["instructions"]) == ({"b": "2"}, "bob", None)
    await respond(client, input="And now?", previous_response_id=second["id"])
    assert [message["role"] for message in stub.requests[-1].json["messages"]] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
    ]


async def test_what_was_said_of_tools_comes_back_where_none_is_on_offer(client: httpx.AsyncClient) -> None:
    body = await respond(client, parallel_tool_calls=False, tool_choice="none")
    assert (body["parallel_tool_calls"], body["tool_choice"]) == (False, "none")
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "spawn"}]}
    assert (await respond(client, tools=[SPAWN], tool_choice=choice))["tool_choice"] == choice
