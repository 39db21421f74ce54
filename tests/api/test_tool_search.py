"""Deferred tools of `/v1/responses`: a search by the caller's side, and what is on offer when nobody has to search."""

import json
from typing import Any

import httpx
import pytest
from openai.types.responses import ResponseToolSearchCall, ResponseToolSearchOutputItem

from app.gateway import tool_search
from app.gateway.responses_tools import flat
from tests.api.test_exact_responses import exact_events
from tests.api.test_response_tools import ASKED, SPAWN, WAYS, asked, calling
from tests.exact import exactly, published
from tests.stubs import ProviderStub, Reply

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
OURS = {"type": "tool_search", "execution": "client"}
GOAL = {
    "type": "object",
    "properties": {"goal": {"type": "string"}},
    "required": ["goal"],
    "additionalProperties": False,
}
GO: dict[str, Any] = {"role": "user", "content": "Go."}


def offered(stub: ProviderStub, at: int = -1) -> dict[str, dict[str, Any]]:
    """What the worker was offered, by name."""
    return {tool["function"]["name"]: tool["function"] for tool in stub.of("alpha")[at].json["tools"]}


def found(call: dict[str, Any], *tools: dict[str, Any]) -> dict[str, Any]:
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
    first = await asked(client, way, tools=tools)
    assert first["tools"] == tools
    search = offered(stub)["tool_search"]
    assert (list(offered(stub)), search["description"], search["parameters"]) == (
        ["spawn", "tool_search"],
        "Finds tools.",
        GOAL,
    )
    (call,) = first["output"]
    exactly(ResponseToolSearchCall, call)
    published("ToolSearchCall", call)
    assert (call["execution"], call["arguments"], call["status"]) == ("client", {"goal": "weather"}, "completed")
    talk = [GO, call, found(call, WEATHER, CRM)]
    second = await asked(client, way, tools=tools, input=talk)
    assert second["id"].startswith(first["id"]), "the same run goes on"
    assert list(offered(stub)) == ["spawn", "tool_search", "weather", "crm__orders"]
    assert second["tools"] == tools, "what was loaded is no part of the request"
    sent = stub.of("alpha")[1].json["messages"]
    assert json.loads(sent[1]["tool_calls"][0]["function"]["arguments"]) == {"goal": "weather"}
    assert sent[2]["content"] == "These tools are on offer now: weather, crm__orders."
    (weather,) = second["output"]
    assert (weather["type"], weather["name"]) == ("function_call", "weather")
    result = {"type": "function_call_output", "call_id": weather["call_id"], "output": "fine"}
    third = await asked(client, way, tools=tools, input=[*talk, weather, result])
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
    first = await asked(client, tools=[OURS])
    output = found(first["output"][0], WEATHER)
    second = await asked(client, tools=[OURS], previous_response_id=first["id"], input=[output])
    assert (second["id"].startswith(first["id"]), second["output"][0]["name"]) == (True, "weather")
    (listed,) = (await client.get(f"/v1/responses/{second['id']}/input_items")).json()["data"]
    exactly(ResponseToolSearchOutputItem, listed)
    published("ToolSearchOutput", listed)
    assert listed | {"id": ""} == output | {"id": "", "tools": [WEATHER]}
    result = {"type": "function_call_output", "call_id": second["output"][0]["call_id"], "output": "fine"}
    third = await asked(client, tools=[OURS], previous_response_id=second["id"], input=[result])
    await asked(client, previous_response_id=third["id"], input="And now?")
    assert [list(offered(stub, at)) for at in range(4)] == [
        ["tool_search"],
        ["tool_search", "weather"],
        ["tool_search", "weather"],
        ["weather"],
    ]


async def test_deferred_tools_are_held_back_until_they_are_found(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    """The search is told what there is, and takes its names where the request does not say what it takes."""
    stub.always("alpha", calling("tool_search", '{"paths": ["crm"]}'))
    tools = [OURS, WEATHER, SPAWN, CRM]
    first = await asked(client, tools=tools)
    search = offered(stub)["tool_search"]
    assert list(offered(stub)) == ["spawn", "tool_search"]
    assert search["description"].endswith("It can find:\n- weather: Tells the weather.\n- crm: Of customers.")
    assert search["parameters"]["properties"]["paths"]["items"]["enum"] == ["weather", "crm"]
    (call,) = first["output"]
    stub.always("alpha", Reply(chunks=("Done.",)))
    second = await asked(client, tools=tools, input=[GO, call, found(call, CRM)])
    assert list(offered(stub)) == ["spawn", "crm__orders", "tool_search"]
    assert CRM in second["tools"]
    await asked(client, tools=tools, input=[GO, call, found(call)])
    assert stub.of("alpha")[-1].json["messages"][2]["content"] == "No tool was found."
    assert list(offered(stub)) == ["spawn", "tool_search"]


async def test_where_nobody_has_to_search_all_is_on_offer(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    response = await asked(client, tools=[HOSTED, WEATHER, CRM])
    assert list(offered(stub)) == ["weather", "crm__orders"]
    assert response["tools"] == [WEATHER, CRM]
    run = (await client.get(f"/v1/runs/{response['baton']['run']}")).json()
    assert run["ignored"] == ["tools.tool_search"]
    assert (await asked(client, tools=[HOSTED]))["tools"] == []


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
    await asked(client, tools=[SPAWN], input=items)
    assert list(offered(stub)) == ["spawn", "weather", "other"]
    sent = stub.of("alpha")[0].json["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "tool"]
    assert sent[1]["tool_calls"][0]["function"]["name"] == flat("weather", "weather") == "weather"


async def test_a_search_has_no_events_of_its_own(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    """Its arguments are told when they are whole, and a stream can be taken up before that."""
    stub.always("alpha", calling("tool_search", '{"paths": ["x"]}'))
    events = exact_events((await client.post("/v1/responses", json=ASKED | {"tools": [OURS], "stream": True})).text)
    (begun, ended) = (event for event in events if "item" in event)
    assert (begun["type"], begun["item"]["arguments"]) == ("response.output_item.added", {})
    assert (ended["type"], ended["item"]["arguments"]) == ("response.output_item.done", {"paths": ["x"]})
    assert ended["item"]["id"] == begun["item"]["id"] == f"tsc_{begun['item']['call_id']}"
    name, after = events[0]["response"]["id"], begun["sequence_number"]
    rest = await client.get(f"/v1/responses/{name}", params={"stream": "true", "starting_after": after})
    assert exact_events(rest.text) == events[events.index(ended) :]
    again = [GO, {"type": "item_reference", "id": ended["item"]["id"]}, found(ended["item"], WEATHER)]
    stub.always("alpha", Reply(chunks=("Done.",)))
    assert (await asked(client, tools=[OURS], input=again))["id"].startswith(name)


@pytest.mark.parametrize(
    ("more", "param", "says"),
    [
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
            "input[1].tools[0]",
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
    ],
)
async def test_what_is_refused(client: httpx.AsyncClient, more: Any, param: str, says: str) -> None:
    reply = await client.post("/v1/responses", json=ASKED | more)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], says in error["message"]) == (400, param, True), error


@pytest.mark.parametrize("text", ["", "{}", '{"a": 1}', '{"a": "\\ud800"}'])
def test_arguments_can_be_told(text: str) -> None:
    told = tool_search.arguments_in(text)
    json.dumps(told).encode()
    assert told == ({"arguments": text} if "ud800" in text else json.loads(text or "{}"))


def test_the_schema_without_names() -> None:
    (search,) = tool_search.on_offer((), [tool_search.ToolSearch(type="tool_search", execution="client")], ())
    assert (search.parameters or {})["properties"]["paths"]["items"] == {"type": "string"}
    assert search.description == tool_search.OFFERS
