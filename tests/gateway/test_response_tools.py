"""Tools of `/v1/responses` that are no plain functions: workers see functions, callers their own tools again."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types.responses import Response, ResponseCustomToolCall, ResponseFunctionToolCall
from openai.types.responses.parsed_response import ParsedResponseFunctionToolCall, ParsedResponseOutputMessage

from app.gateway.responses import tools as ours
from app.gateway.wire import custom_tools
from tests.gateway.test_exact_responses import exact_events
from tests.harness.exact_replies import exactly
from tests.harness.in_process import client_of, pool_text, running_service
from tests.stubs import ProviderStub, Reply
from tests.stubs.script import ToolCall

ASKED = {"model": "baton-mini", "input": "Go."}
CLOSED: dict[str, Any] = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
SPAWN = {"type": "function", "name": "spawn", "description": "Begins.", "parameters": CLOSED, "strict": False}
FREE = {"type": "custom", "name": "note", "description": "Notes.", "format": {"type": "text"}}
AGENTS = {"type": "namespace", "name": "agents", "description": "Of agents.", "tools": [SPAWN, FREE]}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: WORD"}
PATCH = {"type": "custom", "name": "patch", "description": "Patches.", "format": GRAMMAR}
WAYS = ("whole", "streamed")


@pytest.fixture
async def stub() -> AsyncIterator[ProviderStub]:
    async with ProviderStub() as running:
        yield running


def calling(name: str, arguments: str) -> Reply:
    return Reply(chunks=(), tool_calls=[ToolCall(name, arguments, "c1")], finish="tool")


async def respond(client: httpx.AsyncClient, way: str = "whole", **more: Any) -> dict[str, Any]:
    """The response, exactly OpenAI's on either way; a stream's items are told as they are in its end."""
    reply = await client.post("/v1/responses", json=ASKED | more | {"stream": way == "streamed"})
    assert reply.status_code == 200, reply.text
    if way == "whole":
        response: dict[str, Any] = reply.json()
    else:
        events = exact_events(reply.text)
        response = events[-1]["response"]
        items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert items == response["output"]
    exactly(Response, response)
    return response


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.long
async def test_functions_of_a_namespace(stub: ProviderStub, client: httpx.AsyncClient, way: str) -> None:
    stub.script("alpha", calling("agents__spawn", "{}"), Reply(chunks=("Done.",)))
    first = await respond(client, way, tools=[AGENTS])
    offered = {tool["function"]["name"]: tool["function"] for tool in stub.requests_for("alpha")[0].json["tools"]}
    assert (list(offered), offered["agents__spawn"]["description"]) == (
        ["agents__spawn", "agents__note"],
        "Of agents.\n\nBegins.",
    )
    (call,) = first["output"]
    assert (call["type"], call["namespace"], call["name"], call["arguments"]) == (
        *("function_call", "agents", "spawn"),
        "{}",
    )
    assert first["tools"] == [AGENTS]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "begun"}
    second = await respond(client, way, tools=[AGENTS], input=[{"role": "user", "content": "Go."}, call, result])
    assert second["output"][0]["content"][0]["text"] == "Done."
    assert second["id"].startswith(first["id"])  # the same run goes on


@pytest.mark.parametrize("way", WAYS)
async def test_tools_of_free_text(stub: ProviderStub, client: httpx.AsyncClient, way: str) -> None:
    text = 'a "word"\n\u00e9'
    stub.script("alpha", calling("patch", json.dumps({"input": text})), Reply(chunks=("Done.",)))
    first = await respond(client, way, tools=[PATCH], tool_choice={"type": "custom", "name": "patch"})
    offered = stub.requests_for("alpha")[0].json["tools"][0]["function"]
    assert (list(offered["parameters"]["properties"]), "start: WORD" in offered["description"]) == (["input"], True)
    (call,) = first["output"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "patch", text)
    assert (first["tools"], first["tool_choice"]) == ([PATCH], {"type": "custom", "name": "patch"})
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "patched"}
    second = await respond(client, way, tools=[PATCH], input=[{"role": "user", "content": "Go."}, call, result])
    assert second["output"][0]["content"][0]["text"] == "Done."
    assert second["id"].startswith(first["id"])
    messages_sent = stub.requests_for("alpha")[1].json["messages"]
    assert json.loads(messages_sent[1]["tool_calls"][0]["function"]["arguments"]) == {"input": text}
    assert messages_sent[2]["content"] == "patched"
    (listed, made, _) = (await client.get(f"/v1/responses/{second['id']}/input_items")).json()["data"]
    assert (listed["type"], listed["call_id"], made) == ("custom_tool_call_output", call["call_id"], call)


async def test_free_text_is_streamed_when_it_is_whole(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    stub.always("alpha", calling("patch", '{"input": "words"}'))
    events = exact_events((await client.post("/v1/responses", json=ASKED | {"tools": [PATCH], "stream": True})).text)
    own = [event for event in events if "custom_tool_call_input" in event["type"]]
    assert [(event["type"].rpartition(".")[2], event.get("delta", event.get("input"))) for event in own] == [
        ("delta", "words"),
        ("done", "words"),
    ]
    name, after = events[0]["response"]["id"], own[0]["sequence_number"]
    rest = await client.get(f"/v1/responses/{name}", params={"stream": "true", "starting_after": after})
    assert exact_events(rest.text) == events[events.index(own[1]) :]


async def test_a_call_of_free_text_by_reference(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    """A client that sends the id of the call in its place brings the output that such a call has."""
    stub.script("alpha", calling("agents__note", '{"input": "words"}'), Reply(chunks=("Done.",)))
    first = await respond(client, tools=[AGENTS])
    (call,) = first["output"]
    items = [
        {"role": "user", "content": "Go."},
        {"type": "item_reference", "id": call["id"]},
        {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "noted"},
    ]
    second = await respond(client, tools=[AGENTS], input=items)
    assert second["output"][0]["content"][0]["text"] == "Done."
    assert second["id"].startswith(first["id"])  # the same run goes on


async def test_calls_as_the_client_writes_them(client: httpx.AsyncClient) -> None:
    """`model_dump` has null for each field that is absent, and Python's name of `async`."""
    function = ResponseFunctionToolCall(arguments="{}", call_id="1", name="spawn", type="function_call")
    custom = ResponseCustomToolCall(call_id="2", input="words", name="note", type="custom_tool_call")
    outputs = [
        {"type": "function_call_output", "call_id": "1", "output": "begun"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": "noted"},
    ]
    for by_alias in (False, True):
        calls = [call.model_dump(by_alias=by_alias) for call in (function, custom)]
        await respond(client, input=[{"role": "user", "content": "Go."}, *calls, *outputs], tools=[SPAWN, FREE])


async def test_what_the_clients_parsed_may_come_back(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    """`model_dump` of what `responses.parse` returns has what the client itself has read in the texts."""
    words = {"type": "output_text", "text": '{"x": 7}', "annotations": [], "parsed": {"x": 7}}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [words]}
    call = {"arguments": "{}", "call_id": "1", "name": "spawn", "type": "function_call", "parsed_arguments": {}}
    items = [
        {"role": "user", "content": "Go."},
        ParsedResponseOutputMessage[Any].construct(**message).model_dump(warnings=False),
        ParsedResponseFunctionToolCall.construct(**call).model_dump(),
        {"type": "function_call_output", "call_id": "1", "output": "begun"},
    ]
    assert ("parsed" in items[1]["content"][0], "parsed_arguments" in items[2]) == (True, True)
    await respond(client, input=items, tools=[SPAWN])
    _, answer, _ = stub.requests_for("alpha")[0].json["messages"]
    assert (answer["content"], answer["tool_calls"][0]["function"]["arguments"]) == ('{"x": 7}', "{}")


async def test_a_history_of_other_tools(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    """Calls that another server made: with their names as the worker is offered them."""
    items = [
        {"role": "user", "content": "Go."},
        {"type": "function_call", "call_id": "1", "namespace": "agents", "name": "spawn", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": "words"},
        {"type": "function_call_output", "call_id": "1", "output": "begun"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": "patched"},
    ]
    response = await respond(client, input=items, tools=[AGENTS, PATCH])
    listed = (await client.get(f"/v1/responses/{response['id']}/input_items?order=asc")).json()["data"]
    assert [item["type"] for item in listed[1:]] == [item["type"] for item in items[1:]]
    calls = stub.requests_for("alpha")[0].json["messages"][1]["tool_calls"]
    assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls] == [
        ("agents__spawn", {}),
        ("patch", {"input": "words"}),
    ]


@pytest.mark.parametrize("live", [False, True], ids=["without access", "with full access"])
async def test_the_web_search_that_codex_offers_is_left_out_and_noted(
    stub: ProviderStub, client: httpx.AsyncClient, live: bool
) -> None:
    """Codex offers it unasked; any other tool that somebody else would run is refused, with what to do."""
    search = {"type": "web_search", "external_web_access": live}
    response = await respond(client, tools=[SPAWN, search])
    assert [tool["function"]["name"] for tool in stub.requests_for("alpha")[0].json["tools"]] == ["spawn"]
    run = (await client.get(f"/v1/runs/{response['baton']['run']}")).json()
    assert run["ignored"] == ["tools.web_search"]
    for tool in ({"type": "web_search"}, {"type": "web_search_preview"}, {"type": "mcp"}):
        error = (await client.post("/v1/responses", json=ASKED | {"tools": [SPAWN, tool]})).json()["error"]
        assert (error["param"], "leave it out, or offer a function" in error["message"]) == ("tools[1].type", True)


async def test_an_operator_may_refuse_a_live_search_and_the_error_names_the_remedies(
    stub: ProviderStub, tmp_path: Path
) -> None:
    settings = {"BATON_WEB_SEARCH": "refuse"}
    live, cached = ({"type": "web_search", "external_web_access": access} for access in (True, False))
    also = {"type": "additional_tools", "role": "developer", "tools": [SPAWN, live]}
    hi = {"role": "user", "content": "Hi"}
    async with running_service(tmp_path, pool_text(stub), settings) as runtime, client_of(runtime) as client:
        assert (await client.post("/v1/responses", json=ASKED | {"tools": [cached]})).status_code == 200
        for more, param in (({"tools": [live]}, "tools[0].type"), ({"input": [also, hi]}, "input[0].tools[1].type")):
            reply = await client.post("/v1/responses", json=ASKED | more)
            error = reply.json()["error"]
            assert (reply.status_code, error["param"], error["code"]) == (400, param, "unsupported_value")
            for remedy in ('web_search = "cached"', "BATON_WEB_SEARCH=omit", "offer a function"):
                assert remedy in error["message"]


async def test_names_stay_apart_and_short(client: httpx.AsyncClient) -> None:
    twice = {"tools": [AGENTS, SPAWN | {"name": "agents__spawn"}]}
    assert (await client.post("/v1/responses", json=ASKED | twice)).json()["error"]["param"] == "tools"
    many = {"type": "namespace", "name": "n", "tools": [SPAWN | {"name": f"f{at}"} for at in range(128)]}
    assert (await client.post("/v1/responses", json=ASKED | {"tools": [many, SPAWN]})).json()["error"][
        "param"
    ] == "tools"
    long = [ours.flat("n" * 60, name) for name in ("first", "other")]
    assert len(set(long)) == 2
    assert {len(name) for name in long} == {64}
    assert ours.flat("mcp__files__", "read") == "mcp__files__read"


@pytest.mark.parametrize(
    "arguments", ['{"input": 5}', '{"text": "x"}', '"x"', "x", "", '{"input": "\\ud800"}', "[" * 9999]
)
def test_what_a_worker_writes_otherwise_is_passed_on(arguments: str) -> None:
    assert custom_tools.text_of(arguments) == arguments
