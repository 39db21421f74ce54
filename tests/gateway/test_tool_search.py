"""Deferred tools of `/v1/responses`: a search by the caller's side, and what is on offer when nobody has to search."""

import json
from typing import Any

import httpx
import pytest
from openai.types.responses import ResponseToolSearchCall, ResponseToolSearchOutputItem

from app.core.message.chat import Tool
from app.gateway.responses import tool_search
from app.gateway.responses.tools import flat
from tests.gateway.test_exact_responses import exact_events
from tests.gateway.test_response_tools import AGENTS, ASKED, SPAWN, WAYS, calling, respond
from tests.harness.exact_replies import assert_published_schema, exactly
from tests.stubs import ProviderStub, Reply
from tests.stubs.script import ToolCall

WEATHER = SPAWN | {"name": "weather", "description": "Tells the weather.", "defer_loading": True}
ORDERS = {
    "type": "custom",
    "name": "orders",
    "description": "Lists.",
    "format": {"type": "text"},
    "defer_loading": True,
}
CRM = {"type": "namespace", "name": "crm", "description": "Of customers.", "tools": [ORDERS]}
HOSTED = {"type": "tool_search"}
CACHED = {"type": "web_search", "external_web_access": False}
OURS = {"type": "tool_search", "execution": "client"}
GOAL = {
    "type": "object",
    "properties": {"goal": {"type": "string"}},
    "required": ["goal"],
    "additionalProperties": False,
}
GO: dict[str, Any] = {"role": "user", "content": "Go."}


def find_offered_tools(stub: ProviderStub, at: int = -1) -> dict[str, dict[str, Any]]:
    """Return the tools that the worker was offered, by name."""
    return {tool["function"]["name"]: tool["function"] for tool in stub.requests_for("alpha")[at].json["tools"]}


def search_output(call: dict[str, Any], *tools: dict[str, Any]) -> dict[str, Any]:
    """The output of a search by the caller's side."""
    ids = {"call_id": call["call_id"], "execution": "client", "status": "completed"}
    return {"type": "tool_search_output", **ids, "tools": list(tools)}


@pytest.mark.parametrize("way", WAYS)
async def test_a_search_of_the_callers_side(stub: ProviderStub, client: httpx.AsyncClient, way: str) -> None:
    """Its output puts tools on offer that no request had among its tools."""
    goal = '{"goal": "weather"}'
    stub.script(
        "alpha", calling("tool_search", goal), calling("weather", "{}"), calling("crm__orders", '{"input": "all"}')
    )
    tools = [SPAWN, OURS | {"description": "Finds tools.", "parameters": GOAL}]
    first = await respond(client, way, tools=tools)
    assert first["tools"] == tools
    search = find_offered_tools(stub)["tool_search"]
    assert (list(find_offered_tools(stub)), search["description"], search["parameters"]) == (
        ["spawn", "tool_search"],
        "Finds tools.",
        GOAL,
    )
    (call,) = first["output"]
    exactly(ResponseToolSearchCall, call)
    assert_published_schema("ToolSearchCall", call)
    assert (call["execution"], call["arguments"], call["status"]) == ("client", {"goal": "weather"}, "completed")
    talk = [GO, call, search_output(call, WEATHER, CRM)]
    second = await respond(client, way, tools=tools, input=talk)
    assert second["id"].startswith(first["id"]), "the same run goes on"
    assert list(find_offered_tools(stub)) == ["spawn", "tool_search", "weather", "crm__orders"]
    assert second["tools"] == tools, "what was loaded is no part of the request"
    messages_sent = stub.requests_for("alpha")[1].json["messages"]
    assert json.loads(messages_sent[1]["tool_calls"][0]["function"]["arguments"]) == {"goal": "weather"}
    assert messages_sent[2]["content"] == "These tools are on offer now: weather, crm__orders."
    (weather,) = second["output"]
    assert [weather[name] for name in ("type", "namespace", "name")] == ["function_call", "weather", "weather"]
    result = {"type": "function_call_output", "call_id": weather["call_id"], "output": "fine"}
    third = await respond(client, way, tools=tools, input=[*talk, weather, result])
    (orders,) = third["output"]
    assert [orders[name] for name in ("type", "namespace", "name", "input")] == [
        "custom_tool_call",
        "crm",
        "orders",
        "all",
    ]


async def test_what_was_found_stays_on_offer(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    """Over previous_response_id: while the run waits, after its end, and in the list of its input."""
    stub.script("alpha", calling("tool_search", "{}"), calling("weather", "{}"), Reply(), Reply(chunks=("Bye.",)))
    first = await respond(client, tools=[OURS])
    output = search_output(first["output"][0], WEATHER)
    second = await respond(client, tools=[OURS], previous_response_id=first["id"], input=[output])
    assert (second["id"].startswith(first["id"]), second["output"][0]["name"]) == (True, "weather")
    (listed,) = (await client.get(f"/v1/responses/{second['id']}/input_items")).json()["data"]
    exactly(ResponseToolSearchOutputItem, listed)
    assert_published_schema("ToolSearchOutput", listed)
    assert listed | {"id": ""} == output | {"id": "", "tools": [WEATHER]}
    result = {"type": "function_call_output", "call_id": second["output"][0]["call_id"], "output": "fine"}
    third = await respond(client, tools=[OURS], previous_response_id=second["id"], input=[result])
    await respond(client, previous_response_id=third["id"], input="And now?")
    assert [list(find_offered_tools(stub, at)) for at in range(4)] == [
        ["tool_search"],
        ["tool_search", "weather"],
        ["tool_search", "weather"],
        ["weather"],
    ]


async def test_deferred_tools_are_held_back_until_they_are_found(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    """The search is told what there is, and takes its names where the request does not say what it takes."""
    stub.always("alpha", calling("tool_search", '{"paths": ["crm"]}'))
    tools = [OURS, WEATHER, SPAWN, CRM]
    first = await respond(client, tools=tools)
    search = find_offered_tools(stub)["tool_search"]
    assert list(find_offered_tools(stub)) == ["spawn", "tool_search"]
    assert search["description"].endswith("It can find:\n- weather: Tells the weather.\n- crm: Of customers.")
    assert search["parameters"]["properties"]["paths"]["items"]["enum"] == ["weather", "crm"]
    (call,) = first["output"]
    stub.always("alpha", Reply(chunks=("Done.",)))
    second = await respond(client, tools=tools, input=[GO, call, search_output(call, CRM)])
    assert list(find_offered_tools(stub)) == ["spawn", "crm__orders", "tool_search"]
    assert CRM in second["tools"]
    await respond(client, tools=tools, input=[GO, call, search_output(call)])
    assert stub.requests_for("alpha")[-1].json["messages"][2]["content"] == "No tool was found."
    assert list(find_offered_tools(stub)) == ["spawn", "tool_search"]


@pytest.mark.parametrize("way", WAYS)
async def test_a_hosted_search_has_found_what_is_called(
    stub: ProviderStub, client: httpx.AsyncClient, way: str
) -> None:
    """All deferred tools are on offer at once; the first call of a tool stands behind the search for it."""
    calls = [ToolCall("weather", "{}", "1"), ToolCall("weather", "{}", "2"), ToolCall("spawn", "{}", "3")]
    calls.append(ToolCall("crm__orders", '{"input": "all"}', "4"))
    stub.script("alpha", Reply(chunks=("Let me see.",), tool_calls=calls, finish="tool"), Reply(chunks=("Fine.",)))
    tools = [SPAWN, WEATHER, CRM]
    response = await respond(client, way, tools=[*tools, HOSTED])
    assert list(find_offered_tools(stub)) == ["spawn", "weather", "crm__orders"]
    assert response["tools"] == tools
    items = response["output"]
    assert [item["type"] for item in items] == [
        *("message", "tool_search_call", "tool_search_output", "function_call", "function_call"),
        *("function_call", "tool_search_call", "tool_search_output", "custom_tool_call"),
    ]
    for at, path, tool in ((1, "weather", WEATHER), (6, "crm", CRM)):
        exactly(ResponseToolSearchCall, items[at])
        exactly(ResponseToolSearchOutputItem, items[at + 1])
        assert (items[at]["arguments"], items[at + 1]["tools"]) == ({"paths": [path]}, [tool])
        assert [(item["execution"], item["call_id"]) for item in items[at : at + 2]] == [("server", None)] * 2
    called = [item for item in items if item.get("call_id")]
    results = [{"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "x"} for item in called]
    last = await respond(client, way, tools=tools, input=[GO, *items, *results])
    assert (last["id"].startswith(response["id"]), last["output"][0]["content"][0]["text"]) == (True, "Fine.")


@pytest.mark.parametrize("by", ["items", "references", "response", "call"])
async def test_a_hosted_search_is_told_once(stub: ProviderStub, client: httpx.AsyncClient, by: str) -> None:
    """However the client goes on; unless it leaves the search out."""
    stub.always("alpha", calling("weather", "{}"))
    tools = [WEATHER, HOSTED]
    first = await respond(client, tools=tools)
    items = first["output"]
    result = {"type": "function_call_output", "call_id": items[2]["call_id"], "output": "fine"}
    inputs: dict[str, list[dict[str, Any]]] = {
        "items": items,
        "references": [{"type": "item_reference", "id": item["id"]} for item in items],
        "call": items[2:],
    }
    before = {"previous_response_id": first["id"]} if by == "response" else {}
    again = await respond(client, tools=tools, input=[*([GO, *inputs[by]] if by in inputs else ()), result], **before)
    assert again["id"].startswith(first["id"])
    assert len(again["output"]) == (3 if by == "call" else 1)
    assert len(stub.requests_for("alpha")[1].json["messages"]) == 3
    if by == "response":
        result |= {"call_id": again["output"][0]["call_id"]}
        third = await respond(client, tools=tools, input=[result], previous_response_id=again["id"])
        assert len(third["output"]) == 1


def apart(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the pieces of arguments, which come together if they come later."""
    return [event for event in events if not event["type"].endswith("arguments.delta")]


async def test_a_hosted_search_keeps_its_place_in_a_stream(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    stub.always("alpha", Reply(chunks=("Hm.",), tool_calls=[ToolCall("weather", "{}", "1")], finish="tool"))
    body = ASKED | {"tools": [HOSTED, WEATHER], "stream": True}
    events = apart(exact_events((await client.post("/v1/responses", json=body)).text))
    parts = [event for event in events if "search" in event.get("item", {}).get("type", "")]
    items = [(part["item"]["status"], part["item"].get("arguments", part["item"].get("tools"))) for part in parts]
    assert items == [
        *(("in_progress", {}), ("completed", {"paths": ["weather"]})),
        *(("in_progress", []), ("completed", [WEATHER])),
    ]
    for part in parts:
        url, number = f"/v1/responses/{events[0]['response']['id']}", part["sequence_number"]
        rest = await client.get(url, params={"stream": "true", "starting_after": number})
        assert apart(exact_events(rest.text)) == events[events.index(part) + 1 :]


@pytest.mark.parametrize(
    "hosted", [{"execution": "server", "call_id": None}, {"execution": "server", "call_id": "9"}, {}]
)
async def test_a_history_of_a_hosted_search(stub: ProviderStub, client: httpx.AsyncClient, hosted: Any) -> None:
    """As OpenAI tells it: the search has no id for its output, and what it found a namespace of its own name."""
    other = WEATHER | {"name": "other"}
    items = [
        GO,
        {"type": "tool_search_call", "id": "tsc_1", **hosted, "arguments": {"paths": ["weather"]}},
        {"type": "tool_search_output", "id": "tso_1", **hosted, "tools": [WEATHER]},
        {"type": "function_call", "call_id": "1", "namespace": "weather", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "fine"},
        {"type": "additional_tools", "role": "developer", "tools": [other]},
    ]
    await respond(client, tools=[SPAWN], input=items)
    assert list(find_offered_tools(stub)) == ["spawn", "weather", "other"]
    messages_sent = stub.requests_for("alpha")[0].json["messages"]
    assert [message["role"] for message in messages_sent] == ["user", "assistant", "tool"]
    assert messages_sent[1]["tool_calls"][0]["function"]["name"] == flat("weather", "weather") == "weather"


async def test_tools_in_the_conversation(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    """A search among them is the caller's, too; all of them stay on offer, and none is told as the request's."""
    stub.script("alpha", calling("tool_search", "{}"), Reply(chunks=("Bye.",)))
    item = {"type": "additional_tools", "role": "developer", "tools": [AGENTS, OURS | {"parameters": GOAL}, CACHED]}
    first = await respond(client, input=[item, GO])
    assert list(find_offered_tools(stub)) == ["agents__spawn", "agents__note", "tool_search"]
    assert ([call["type"] for call in first["output"]], first["tools"]) == (["tool_search_call"], [])
    output = search_output(first["output"][0], WEATHER)
    await respond(client, tools=[OURS], input=[output], previous_response_id=first["id"])
    assert list(find_offered_tools(stub)) == ["tool_search", "agents__spawn", "agents__note", "weather"]


async def test_a_search_has_no_events_of_its_own(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    """Its arguments are told when they are whole, and a stream can be taken up before that."""
    stub.always("alpha", calling("tool_search", '{"paths": ["x"]}'))
    events = exact_events((await client.post("/v1/responses", json=ASKED | {"tools": [OURS], "stream": True})).text)
    (added, ended) = (event for event in events if "item" in event)
    assert (added["type"], added["item"]["arguments"]) == ("response.output_item.added", {})
    assert (ended["type"], ended["item"]["arguments"]) == ("response.output_item.done", {"paths": ["x"]})
    assert ended["item"]["id"] == added["item"]["id"] == f"tsc_{added['item']['call_id']}"
    name, after = events[0]["response"]["id"], added["sequence_number"]
    rest = await client.get(f"/v1/responses/{name}", params={"stream": "true", "starting_after": after})
    assert exact_events(rest.text) == events[events.index(ended) :]
    again = [GO, {"type": "item_reference", "id": ended["item"]["id"]}, search_output(ended["item"], WEATHER)]
    stub.always("alpha", Reply(chunks=("Done.",)))
    assert (await respond(client, tools=[OURS], input=again))["id"].startswith(name)


REFUSED: list[tuple[Any, str, str]] = [
    ({"tools": [WEATHER]}, "tools", "needs a tool_search"),
    ({"tools": [HOSTED, OURS]}, "tools", "one tool_search at most"),
    ({"tools": [OURS, SPAWN | {"name": "tool_search"}]}, "tools", "the same name"),
    ({"tools": [OURS | {"parameters": {"type": "x"}}]}, "tools[0].parameters", ""),
    ({"tools": [OURS, WEATHER], "tool_choice": {"type": "function", "name": "weather"}}, "tool_choice.name", ""),
    (
        {"tools": [HOSTED, *({**WEATHER, "name": f"f{n}"} for n in range(127)), CRM, CRM | {"name": "d"}]},
        "tools",
        "search",
    ),
    (
        {"input": [GO, {"type": "tool_search_output", "tools": [{"type": "mcp"}]}]},
        "input[1].tools[0].type",
        "'function'",
    ),
    (
        {
            "input": [
                GO,
                {"type": "additional_tools", "role": "developer", "tools": [SPAWN | {"parameters": {"type": "x"}}]},
            ]
        },
        "input[1].tools[0].parameters",
        "",
    ),
    ({"input": [GO, {"type": "additional_tools", "role": "user", "tools": []}]}, "input[1].role", ""),
]


@pytest.mark.long
async def test_what_is_refused(client: httpx.AsyncClient) -> None:
    for more, param, says in REFUSED:
        reply = await client.post("/v1/responses", json=ASKED | more)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"], says in error["message"]) == (400, param, True), error


@pytest.mark.parametrize("text", ["", "{}", '{"a": 1}', '{"a": "\\ud800"}'])
def test_arguments_can_be_told(text: str) -> None:
    arguments = tool_search.arguments_in(text)
    json.dumps(arguments).encode()
    assert arguments == ({"arguments": text} if "ud800" in text else json.loads(text or "{}"))


SEARCH = tool_search.ToolSearch(type="tool_search", execution="client")


def test_the_schema_without_names() -> None:
    (search,) = tool_search.tools_on_offer((), [SEARCH], (), 9)
    assert (search.parameters or {})["properties"]["paths"]["items"] == {"type": "string"}
    assert search.description == tool_search.DEFAULT_DESCRIPTION


def test_what_was_found_first_gives_way() -> None:
    """Deferred tools of the request and others alike; what is found once more is the latest."""
    deferred_tool = Tool("a", spelling={"deferred": True})
    tools = (Tool("own"), deferred_tool)
    loaded = [tool_search.load(Tool(name), "") for name in "abcdb"]
    offered = []
    for most in (6, 5, 4, 3, 2, 1):
        offered.append([tool.name for tool in tool_search.tools_on_offer(tools, [SEARCH], loaded, most)])
    assert offered == [
        ["own", "a", "tool_search", "c", "d", "b"],
        ["own", "tool_search", "c", "d", "b"],
        ["own", "tool_search", "d", "b"],
        ["own", "tool_search", "b"],
        ["own", "tool_search"],
        ["own", "tool_search"],
    ]
