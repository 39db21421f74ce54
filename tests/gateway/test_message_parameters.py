"""Every field of `/v1/messages`, each driven over HTTP down to the worker and back."""

import typing
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import anthropic.types as sdk
import anthropic.types.beta as beta
import httpx
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from jsonschema import Draft202012Validator
from pydantic import BaseModel

from app.gateway.anthropic import blocks as blocks
from app.gateway.anthropic import request as ours
from app.gateway.anthropic import tools as tools
from app.process.wiring import Runtime
from tests.harness.in_process import latest_request, pool_text, running_service
from tests.harness.stand_ins import GatewayStandIn
from tests.stubs import ProviderStub, Reply
from tests.stubs.script import ToolCall

BEYOND = {
    *("baton", "temperature", "top_p", "top_k", "context_management", "mcp_servers", "thread", "output_format"),
}
"""Our own; what newer clients leave to `extra_body`; what only the beta's type has; and an older name."""
ASKED: dict[str, Any] = {
    "model": "baton-mini",
    "max_tokens": 64,
    "messages": [{"role": "user", "content": "What is 2 + 2?"}],
}
ADD = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
CALL = Reply(chunks=(), tool_calls=[ToolCall("add", "{}", "c1")], finish="tool")

Seen = Callable[[httpx.Response, Any], object]
"""From the reply and what the worker was sent."""
HONOURED: Mapping[str, tuple[dict[str, Any], Reply, Seen, object]] = {
    "model": ({"model": "baton-ultra"}, Reply(), lambda reply, _: reply.json()["model"], "baton-ultra"),
    "messages": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
        Reply(),
        lambda _, worker_body: worker_body["messages"],
        [{"role": "user", "content": "Hi"}],
    ),
    "max_tokens": (
        {"max_tokens": 7},
        Reply(),
        lambda _, worker_body: worker_body.get("max_completion_tokens", worker_body.get("max_tokens")),
        7,
    ),
    "system": (
        {"system": [{"type": "text", "text": "Be brief."}]},
        Reply(),
        lambda _, worker_body: worker_body["messages"][0],
        {"role": "system", "content": "Be brief."},
    ),
    "stop_sequences": ({"stop_sequences": ["END"]}, Reply(), lambda _, worker_body: worker_body["stop"], ["END"]),
    "temperature": ({"temperature": 0.5}, Reply(), lambda _, worker_body: worker_body["temperature"], 0.5),
    "top_p": ({"top_p": 0.25}, Reply(), lambda _, worker_body: worker_body["top_p"], 0.25),
    "tools": (
        {"tools": [ADD]},
        Reply(),
        lambda _, worker_body: [tool["function"]["name"] for tool in worker_body["tools"]],
        ["add"],
    ),
    "tool_choice": (
        {"tools": [ADD], "tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": True}},
        CALL,
        lambda _, worker_body: (worker_body["tool_choice"], worker_body["parallel_tool_calls"]),
        ({"type": "function", "function": {"name": "add"}}, False),
    ),
    "stream": (
        {"stream": True},
        Reply(),
        lambda reply, _: (reply.headers["content-type"].split(";")[0], "event: message_stop" in reply.text),
        ("text/event-stream", True),
    ),
    "baton": (
        {"baton": {"pool": {"pin": "beta"}}},
        Reply(),
        lambda reply, _: [step["worker"] for step in reply.json()["baton"]["steps"]],
        ["beta"],
    ),
}
"""What is sent beside `ASKED`, the worker's reply, and what is to be seen."""
APART = {"thinking", "output_config", "output_format", "metadata"}
"""Those that have a test of their own."""
IGNORED: Mapping[str, tuple[object, object]] = {
    "service_tier": ("auto", "cheap"),
    "speed": ("fast", "slow"),
    "top_k": (40, -1),
    "cache_control": ({"type": "ephemeral"}, {"type": "eternal"}),
    "inference_geo": ("eu", 5),
    "diagnostics": ({"previous_message_id": "msg_1"}, "all"),
    "workspace_id": ("w", 5),
    "user_profile_id": ("u", 5),
    "context_management": ({"edits": [{"type": "clear_thinking_20251015"}]}, {"edits": [{"type": "compact"}]}),
}
"""A value that is noted, and one that is no value of that field."""
EFFORTS = """
[tiers.baton-mini.efforts.low]
output_tokens = 77
[tiers.baton-mini.efforts.high]
output_tokens = 99
"""


@pytest.fixture
async def runtime(stub: ProviderStub, tmp_path: Path) -> AsyncIterator[Runtime]:
    async with running_service(tmp_path, pool_text(stub) + EFFORTS) as running:
        yield running


async def post_message(client: httpx.AsyncClient, **more: Any) -> httpx.Response:
    return await client.post("/v1/messages", json=ASKED | more)


def test_every_field_of_the_official_client_is_decided() -> None:
    parameters = set(typing.get_type_hints(message_create_params.MessageCreateParamsStreaming))
    parameters |= set(typing.get_type_hints(message_create_params.MessageCreateParamsNonStreaming))
    model_fields = set(ours.MessagesRequest.model_fields)
    assert len(parameters) > 15
    assert parameters <= model_fields
    assert model_fields - parameters == BEYOND
    assert set(typing.get_type_hints(message_count_tokens_params.MessageCountTokensParams)) <= set(
        ours.TokenCountRequest.model_fields
    )


def test_every_field_is_driven_by_a_test() -> None:
    assert set(ours.MessagesRequest.model_fields) == {*HONOURED, *APART, *IGNORED, *ours.REFUSED}
    assert set(ours.IGNORED) == set(IGNORED)


@pytest.mark.parametrize(
    ("model", "theirs", "beyond"),
    [
        (blocks.TextBlock, sdk.TextBlockParam, {"baton"}),
        (blocks.ImageBlock, sdk.ImageBlockParam, {"baton"}),
        (blocks.DocumentBlock, sdk.DocumentBlockParam, {"baton"}),
        (blocks.SearchResultBlock, sdk.SearchResultBlockParam, {"baton"}),
        (blocks.ToolUseBlock, sdk.ToolUseBlockParam, set()),
        (blocks.ToolResultBlock, sdk.ToolResultBlockParam, {"baton"}),
        (blocks.ThinkingBlock, sdk.ThinkingBlockParam, set()),
        (blocks.RedactedThinkingBlock, sdk.RedactedThinkingBlockParam, set()),
        (tools.WireTool, sdk.ToolParam, set()),
        (blocks.ToolReferenceBlock, sdk.ToolReferenceBlockParam, set()),
        (ours.OutputConfig, sdk.OutputConfigParam, set()),
        (ours.Metadata, sdk.MetadataParam, set()),
        (tools.CacheMark, sdk.CacheControlEphemeralParam, {"scope"}),
    ],
)
def test_what_is_nested_has_every_field(model: type[BaseModel], theirs: type, beyond: set[str]) -> None:
    names = {field.alias or name for name, field in model.model_fields.items()}
    assert names == set(typing.get_type_hints(theirs)) | beyond


async def test_what_is_honoured_is_seen_at_the_worker_or_in_the_reply(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    """One service for all fields: each is sent alone."""
    actual, expected = {}, {}
    for name, (more, reply, see, value) in HONOURED.items():
        for worker in ("alpha", "beta"):
            stub.always(worker, reply)
        answer = await post_message(client, **more)
        assert answer.status_code == 200, (name, answer.text)
        bodies = [request.json for worker in ("alpha", "beta") for request in stub.requests_for(worker)]
        actual[name], expected[name] = see(answer, bodies[-1]), value
        stub.requests.clear()
    assert actual == expected


@pytest.mark.parametrize(
    ("more", "effort"),
    [
        ({"output_config": {"effort": "low"}}, "low"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "high"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, "low"),
        ({"thinking": {"type": "disabled"}}, "medium"),
    ],
)
async def test_thinking_and_effort_choose_the_tiers_limits(
    client: httpx.AsyncClient, more: dict[str, Any], effort: str
) -> None:
    body = (await post_message(client, **more)).json()
    assert (await client.get(f"/v1/runs/{body['baton']['run']}")).json()["effort"] == effort


async def test_a_form_reaches_the_worker(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    stub.always("alpha", Reply(chunks=('{"n": 4}',)))
    form = {"type": "json_schema", "schema": SCHEMA}
    for more in ({"output_config": {"format": form}}, {"output_format": form}):
        assert (await post_message(client, **more)).status_code == 200
        assert stub.requests_for("alpha")[-1].json["response_format"]["json_schema"]["schema"] == SCHEMA
    assert (await post_message(client, output_config={"format": form}, output_format=form)).status_code == 400


def test_the_end_user_is_kept_with_the_task() -> None:
    request, _ = ours.read_request(ASKED | {"metadata": {"user_id": "ann"}})
    assert ours.build_task(request).user == "ann"


@pytest.mark.long
async def test_what_is_ignored_is_checked_noted_and_changes_nothing(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    own = ("id", "baton")
    plain = (await post_message(client)).json()
    request_body = latest_request(stub, "alpha")
    for name, (value, wrong) in IGNORED.items():
        body = (await post_message(client, **{name: value})).json()
        assert {n: v for n, v in body.items() if n not in own} == {n: v for n, v in plain.items() if n not in own}, name
        assert latest_request(stub, "alpha") == request_body, name
        run = (await client.get(f"/v1/runs/{body['baton']['run']}")).json()
        assert run["ignored"] == [name]
        refused = await post_message(client, **{name: wrong})
        assert (refused.status_code, name in refused.json()["error"]["message"]) == (400, True), name


def assistant_turn_with_calls(*ids: str) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": id_, "name": "add", "input": {}} for id_ in ids],
    }


def result(*ids: str, then: str = "") -> dict[str, Any]:
    content: list[dict[str, Any]] = [{"type": "tool_result", "tool_use_id": id_, "content": "4"} for id_ in ids]
    return {"role": "user", "content": content + ([{"type": "text", "text": then}] if then else [])}


ASK = {"role": "user", "content": "What is 2 + 2?"}


@pytest.mark.parametrize(
    ("turns", "param", "says"),
    [
        ([ASK, result("a")], "messages.1.content.0.tool_use_id", "needs its tool_use"),
        (
            [ASK, assistant_turn_with_calls("a"), result("a", "b")],
            "messages.2.content.1.tool_use_id",
            "needs its tool_use",
        ),
        (
            [ASK, assistant_turn_with_calls("a"), result("a"), result("a")],
            "messages.3.content.0.tool_use_id",
            "needs its tool_use",
        ),
        ([ASK, assistant_turn_with_calls("a"), ASK, result("a")], "messages.1.content.0", "needs its tool_result"),
        ([ASK, assistant_turn_with_calls("a", "b"), result("b")], "messages.1.content.0", "needs its tool_result"),
        ([ASK, assistant_turn_with_calls("a")], "messages.1.content.0", "needs its tool_result"),
        ([ASK, assistant_turn_with_calls("a", "a"), result("a")], "messages.1.content.1.id", "the same id"),
        (
            [ASK, assistant_turn_with_calls("a") | {"role": "user"}],
            "messages.1.content.0",
            "only an assistant's turn calls tools",
        ),
    ],
)
async def test_a_result_without_its_call_and_a_call_without_its_result_are_refused(
    gateway: GatewayStandIn, key: str, turns: list[dict[str, Any]], param: str, says: str
) -> None:
    async with gateway.client(key) as client:
        reply = await post_message(client, messages=turns, tools=[ADD])
        counted = {"model": "baton-mini", "messages": turns, "tools": [ADD]}
        count = await client.post("/v1/messages/count_tokens", json=counted)
    assert count.status_code == (400 if "calls tools" in says else 200)
    assert reply.status_code == 400
    message = reply.json()["error"]["message"]
    assert (param in message, says in message) == (True, True)
    assert gateway.runs.orders == []


@pytest.mark.parametrize(
    "turns",
    [
        [ASK, assistant_turn_with_calls("a", "b"), result("b", "a", then="And now?")],
        [ASK, assistant_turn_with_calls("a"), assistant_turn_with_calls("b"), result("a"), result("b"), ASK],
        [ASK, assistant_turn_with_calls("a"), result("a"), assistant_turn_with_calls("a"), result("a")],
    ],
)
async def test_results_right_behind_their_calls_are_read(
    gateway: GatewayStandIn, key: str, turns: list[dict[str, Any]]
) -> None:
    async with gateway.client(key) as client:
        assert (await post_message(client, messages=turns, tools=[ADD])).status_code == 200


SHELL = {"type": "bash_20250124", "name": "bash"}
EDITOR = {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 10_000}
MEMORY = {"type": "memory_20250818", "name": "memory", "cache_control": {"type": "ephemeral"}}


async def test_tools_that_anthropic_describes_are_functions_to_workers(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    edit = '{"command": "view", "path": "/a"}'
    stub.always("alpha", Reply(chunks=(), tool_calls=[ToolCall(EDITOR["name"], edit, "c1")], finish="tool"))
    reply = await post_message(client, tools=[SHELL, EDITOR, MEMORY, ADD])
    assert reply.status_code == 200, reply.text
    [block] = reply.json()["content"]
    assert (block["name"], block["input"]) == (EDITOR["name"], {"command": "view", "path": "/a"})
    offered = {tool["function"]["name"]: tool["function"] for tool in stub.requests_for("alpha")[-1].json["tools"]}
    assert list(offered) == ["bash", EDITOR["name"], "memory", "add"]
    assert set(offered["bash"]["parameters"]["properties"]) == {"command", "restart"}
    commands = offered["memory"]["parameters"]["properties"]["command"]["enum"]
    assert commands == ["view", "create", "str_replace", "insert", "delete", "rename"]


async def test_of_many_deferred_tools_those_that_were_found_last_are_offered(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    """A worker is offered 128 at once, as on the other routes."""
    deferred = [ADD | {"name": f"tool{n}", "defer_loading": True} for n in range(300)]
    turns: list[dict[str, Any]] = []
    for first in (0, 100):  # the second search finds some of them again
        found = [{"type": "tool_reference", "tool_name": f"tool{n}"} for n in range(first, first + 110)]
        search = {"type": "tool_use", "id": f"toolu_{first}", "name": "add", "input": {}}
        result = {"type": "tool_result", "tool_use_id": search["id"], "content": found}
        turns += [{"role": "assistant", "content": [search]}, {"role": "user", "content": [result]}]
    stub.always("alpha", Reply())
    request_body = ASKED | {"messages": [*ASKED["messages"], *turns], "tools": [ADD, *deferred]}
    assert (await client.post("/v1/messages", json=request_body)).status_code == 200
    offered = [tool["function"]["name"] for tool in latest_request(stub, "alpha")["tools"]]
    assert offered == ["add", *(f"tool{n}" for n in range(83, 210))]
    refused = await client.post("/v1/messages", json=ASKED | {"tools": [ADD | {"name": f"t{n}"} for n in range(129)]})
    assert (refused.status_code, "128" in refused.json()["error"]["message"]) == (400, True)


def test_they_have_the_arguments_that_the_official_client_reads() -> None:
    for command in typing.get_args(typing.get_args(beta.BetaMemoryTool20250818Command)[0]):
        field_names = set(command.model_fields)
        assert field_names <= set(tools.KNOWN["memory_20250818"].schema["properties"])
    kinds = {kind for tool in typing.get_args(sdk.ToolUnionParam) for kind in kinds_of(tool)}
    assert set(tools.KNOWN) <= kinds


def kinds_of(tool: type) -> tuple[str, ...]:
    return typing.get_args(typing.get_type_hints(tool)["type"])


async def test_tools_that_anthropic_would_run_are_refused(gateway: GatewayStandIn, key: str) -> None:
    async with gateway.client(key) as client:
        for tool, says in (
            ({"type": "web_search_20250305", "name": "web_search"}, "tools.0.type"),
            ({"type": "code_execution_20250825", "name": "code_execution"}, "tools.0.type"),
            ({"type": ["custom"], "name": "add", "input_schema": {"type": "object"}}, "tools.0.type"),
            (SHELL | {"name": "zsh"}, "tools.0.name"),
            (SHELL | {"input_schema": {}}, "tools.0.input_schema"),
        ):
            reply = await post_message(client, tools=[tool])
            assert (reply.status_code, says in reply.json()["error"]["message"]) == (400, True), reply.text


@pytest.mark.parametrize("name", ours.REFUSED)
async def test_what_is_refused_is_named(gateway: GatewayStandIn, key: str, name: str) -> None:
    async with gateway.client(key) as client:
        for value in ([{"name": "x"}], {}, "", False):
            reply = await post_message(client, **{name: value})
            assert (reply.status_code, name in reply.json()["error"]["message"]) == (400, True), value
        assert (await post_message(client, **{name: None})).status_code == 200
    assert len(gateway.runs.orders) == 1


@pytest.mark.parametrize("schema", ["MessagesRequest", "TokenCountRequest"])
async def test_a_field_that_is_refused_is_described_with_what_it_may_have(gateway: GatewayStandIn, schema: str) -> None:
    async with gateway.client() as client:
        document = (await client.get("/openapi.json")).json()
    properties = document["components"]["schemas"][schema]["properties"]
    for name in ours.REFUSED:
        described = Draft202012Validator(properties[name])
        assert described.is_valid(None)
        assert described.is_valid([]) == (name == "mcp_servers")
        assert not described.is_valid([{"name": "x"}])
        assert not described.is_valid({})


async def test_a_turn_without_content_is_left_out_and_a_conversation_without_any_is_refused(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    asked, empty = {"role": "user", "content": "Hi."}, {"role": "assistant", "content": []}
    assert (await post_message(client, messages=[asked, empty, asked])).status_code == 200
    assert [message["content"] for message in stub.requests[-1].json["messages"]][-2:] == ["Hi.", "Hi."]
    refused = await post_message(client, messages=[{"role": "user", "content": []}])
    assert (refused.status_code, "must have content" in refused.json()["error"]["message"]) == (400, True)
    assert len(stub.requests) == 1
