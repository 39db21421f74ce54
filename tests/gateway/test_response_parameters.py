"""The table of `/v1/responses`' parameters: complete, and each row driven over HTTP down to the worker and back."""

import json
import typing
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import openai.types.responses as sdk
import pytest
from openai.types.responses import (
    ResponseIncludable,
    response_create_params,
    response_input_item_param,
    response_input_param,
)
from openai.types.shared_params import Reasoning
from pydantic import BaseModel

from app.gateway.responses import input as items
from app.gateway.responses import request as ours
from app.gateway.responses import tools as tools
from app.gateway.wire.parameters import RESPONSES
from app.process.wiring import Runtime
from tests.harness.exact_replies import CUT
from tests.harness.in_process import latest_request, pool_text, running_service
from tests.stubs import ProviderStub, Reply
from tests.stubs.script import ToolCall

BEYOND = {"baton", "client_metadata"}
"""Our own, and what Codex sends without the description saying so."""
ASKED: dict[str, Any] = {"model": "baton-mini", "input": "What is 2 + 2?"}
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
LOOK = ADD | {"name": "look"}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
FORM = {"type": "json_schema", "name": "number", "schema": SCHEMA, "strict": True}
JSON = Reply(chunks=('{"n": 4}',))
CALL = Reply(chunks=(), tool_calls=[ToolCall("add", "{}", "c1")], finish="tool")

Seen = Callable[[httpx.Response, Any, Any], object]
"""From the reply, its JSON and what the worker was sent last."""
HONOURED: Mapping[str, tuple[dict[str, Any], Reply, Seen, object]] = {
    "model": ({"model": "baton-ultra"}, Reply(), lambda _, body, __: body["model"], "baton-ultra"),
    "input": (
        {"input": "Hi"},
        Reply(),
        lambda _, __, worker_body: worker_body["messages"],
        [{"role": "user", "content": "Hi"}],
    ),
    "instructions": (
        {"instructions": "Be brief."},
        Reply(),
        lambda _, body, worker_body: (
            body["instructions"],
            worker_body["messages"][0]["content"],
            len(worker_body["messages"]),
        ),
        ("Be brief.", "Be brief.", 2),
    ),
    "tools": (
        {"tools": [ADD, LOOK]},
        Reply(),
        lambda _, body, worker_body: (
            [tool["name"] for tool in body["tools"]],
            [t["function"]["name"] for t in worker_body["tools"]],
        ),
        (["add", "look"], ["add", "look"]),
    ),
    "tool_choice": (
        {"tools": [ADD, LOOK], "tool_choice": {"type": "function", "name": "add"}},
        CALL,
        lambda _, body, worker_body: (body["tool_choice"], worker_body["tool_choice"]),
        ({"type": "function", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
    ),
    "parallel_tool_calls": (
        {"tools": [ADD], "parallel_tool_calls": False},
        CALL,
        lambda _, body, worker_body: (body["parallel_tool_calls"], worker_body["parallel_tool_calls"]),
        (False, False),
    ),
    "text": (
        {"text": {"format": FORM, "verbosity": "low"}},
        JSON,
        lambda _, body, worker_body: (
            body["text"]["format"]["schema"],
            body["text"]["verbosity"],
            worker_body["response_format"]["json_schema"]["schema"],
        ),
        (SCHEMA, "low", SCHEMA),
    ),
    "max_output_tokens": (
        {"max_output_tokens": 7},
        Reply(),
        lambda _, body, worker_body: (
            body["max_output_tokens"],
            worker_body.get("max_completion_tokens", worker_body.get("max_tokens")),
        ),
        (7, 7),
    ),
    "temperature": (
        {"temperature": 0.5},
        Reply(),
        lambda _, body, worker_body: (body["temperature"], worker_body["temperature"]),
        (0.5, 0.5),
    ),
    "top_p": (
        {"top_p": 0.25},
        Reply(),
        lambda _, body, worker_body: (body["top_p"], worker_body["top_p"]),
        (0.25, 0.25),
    ),
    "top_logprobs": (
        {"top_logprobs": 2},
        Reply(),
        lambda _, body, worker_body: (
            body["top_logprobs"],
            worker_body["top_logprobs"],
            len(logprobs_of(body)[0]["top_logprobs"]),
        ),
        (2, 2, 2),
    ),
    "include": (
        {"include": ["message.output_text.logprobs", "reasoning.encrypted_content"]},
        Reply(),
        lambda _, body, worker_body: (worker_body["logprobs"], [token["token"] for token in logprobs_of(body)]),
        (True, ["Hello", " there", "."]),
    ),
    "metadata": ({"metadata": {"a": "b"}}, Reply(), lambda _, body, __: body["metadata"], {"a": "b"}),
    "user": ({"user": "ann"}, Reply(), lambda _, body, __: body["user"], "ann"),
    "stream": (
        {"stream": True},
        Reply(),
        lambda reply, _, __: (reply.headers["content-type"].split(";")[0], "event: response.completed" in reply.text),
        ("text/event-stream", True),
    ),
    "stream_options": (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        Reply(),
        lambda reply, _, __: ("event: response.completed" in reply.text, '"obfuscation"' in reply.text),
        (True, False),
    ),
    "baton": (
        {"baton": {"pool": {"pin": "beta"}}},
        Reply(),
        lambda _, body, __: [step["worker"] for step in body["baton"]["steps"]],
        ["beta"],
    ),
}
"""What is sent beside `ASKED`, the worker's reply, and what is to be seen."""
APART = {"background", "previous_response_id", "reasoning", "store"}
"""Those that have a test of their own."""
IGNORED: Mapping[str, tuple[object, object]] = {
    "service_tier": ("flex", "cheap"),
    "safety_identifier": ("hash", "x" * 129),
    "prompt_cache_key": ("key", 5),
    "prompt_cache_retention": ("24h", "25h"),
    "prompt_cache_options": ({"mode": "explicit"}, "explicit"),
    "truncation": ("auto", "always"),
    "max_tool_calls": (3, 0),
    "client_metadata": ({"session": "1"}, {"session": 1}),
}
"""A value that is noted, and one that is no value of that parameter."""
REFUSED: Mapping[str, object] = {
    "access_programs": {"x": True},
    "context_management": [{"type": "compaction", "compact_threshold": 1000}],
    "conversation": "conv_1",
    "image": {"size": "auto"},
    "moderation": {"model": "omni-moderation-latest"},
    "prompt": {"id": "pmpt_1"},
}


def logprobs_of(body: dict[str, Any]) -> Any:
    """Return the log-probabilities of the first item of the output."""
    return body["output"][0]["content"][0]["logprobs"]


EFFORTS = """
[tiers.baton-mini.efforts.low]
output_tokens = 77
"""


@pytest.fixture
async def runtime(stub: ProviderStub, tmp_path: Path) -> AsyncIterator[Runtime]:
    async with running_service(tmp_path, pool_text(stub) + EFFORTS) as running:
        yield running


def test_every_parameter_of_the_official_client_has_a_row() -> None:
    parameters = set(typing.get_type_hints(response_create_params.ResponseCreateParamsStreaming))
    parameters |= set(typing.get_type_hints(response_create_params.ResponseCreateParamsNonStreaming))
    assert len(parameters) > 30
    assert parameters <= set(RESPONSES)
    assert set(RESPONSES) - parameters == BEYOND


@pytest.mark.skipif(not CUT.exists(), reason="the published API description is not beside this checkout")
def test_every_parameter_that_the_published_reply_repeats_has_a_row() -> None:
    definitions = json.loads(CUT.read_text())["$defs"]
    parts = ("ModelResponseProperties", "ResponseProperties", "CreateResponse", "CreateModelResponseProperties")
    properties = {name for part in parts for name in definitions.get(part, {}).get("properties", ())}
    assert len(properties) > 10
    assert properties <= set(RESPONSES)


def test_every_row_is_driven_by_a_test() -> None:
    driven = {"honoured": {*HONOURED, *APART}, "ignored": set(IGNORED), "refused": set(REFUSED)}
    for decision, names in driven.items():
        assert names == {name for name, row in RESPONSES.items() if row.decision == decision}


def test_what_is_read_is_what_is_not_refused() -> None:
    accepted = {name for name, row in RESPONSES.items() if row.decision != "refused"}
    assert set(ours.ResponsesRequest.model_fields) == accepted


@pytest.mark.parametrize(
    ("model", "theirs"),
    [
        (ours.TextOptions, sdk.ResponseTextConfigParam),
        (ours.JsonSchemaFormat, sdk.ResponseFormatTextJSONSchemaConfigParam),
        (ours.Reasoning, Reasoning),
        (ours.StreamOptions, response_create_params.StreamOptions),
        (tools.FunctionTool, sdk.FunctionToolParam),
        (tools.CustomTool, sdk.CustomToolParam),
        (tools.Namespace, sdk.NamespaceToolParam),
        (tools.ToolSearch, sdk.ToolSearchToolParam),
        (tools.Named, sdk.ToolChoiceFunctionParam),
        (tools.AllowedTools, sdk.ToolChoiceAllowedParam),
        (items.InputText, sdk.ResponseInputTextParam),
        (items.InputFile, sdk.ResponseInputFileParam),
        (items.InputImage, sdk.ResponseInputImageParam),
        (items.OutputText, sdk.ResponseOutputTextParam),
        (items.Refused, sdk.ResponseOutputRefusalParam),
        (items.MessageItem, sdk.ResponseOutputMessageParam),
        (items.CallItem, sdk.ResponseFunctionToolCallParam),
        (items.CustomCallItem, sdk.ResponseCustomToolCallParam),
        (items.OutputItem, response_input_param.FunctionCallOutput),
        (items.SearchCallItem, response_input_item_param.ToolSearchCall),
        (items.SearchOutputItem, sdk.ResponseToolSearchOutputItemParamParam),
        (items.MoreTools, response_input_item_param.AdditionalTools),
        (items.ReasoningItem, sdk.ResponseReasoningItemParam),
        (items.ItemReference, response_input_param.ItemReference),
    ],
)
def test_what_is_nested_has_every_field(model: type[BaseModel], theirs: type) -> None:
    names = {field.alias or name for name, field in model.model_fields.items()}
    beyond = {"status"} if model is items.CustomCallItem else set()  # replies have it, and Codex sends it back
    # The client's helpers add these to what they have parsed.
    beyond |= {"parsed"} if model is items.OutputText else set()
    beyond |= {"parsed_arguments"} if model is items.CallItem else set()
    beyond |= {"created_by"} if model in (items.SearchCallItem, items.SearchOutputItem) else set()  # replies have it
    assert names - {"baton"} == set(typing.get_type_hints(theirs)) | beyond


async def post_response(client: httpx.AsyncClient, **more: Any) -> httpx.Response:
    return await client.post("/v1/responses", json=ASKED | more)


@pytest.mark.long
async def test_what_is_honoured_is_seen_at_the_worker_or_in_the_reply(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    """One service for all rows: each is sent alone."""
    actual, expected = {}, {}
    for name, (more, reply, see, value) in HONOURED.items():
        for worker in ("alpha", "beta"):
            stub.always(worker, reply)
        answer = await post_response(client, **more)
        assert answer.status_code == 200, (name, answer.text)
        body = {} if more.get("stream") else answer.json()
        bodies = [request.json for worker in ("alpha", "beta") for request in stub.requests_for(worker)]
        actual[name], expected[name] = see(answer, body, bodies[-1]), value
        stub.requests.clear()
    assert actual == expected


async def test_previous_response_id_brings_its_conversation(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    stub.script("alpha", Reply(chunks=("Four.",)), Reply(chunks=("Five.",)))
    first = (await post_response(client, instructions="Be brief.")).json()
    second = (await post_response(client, input="Plus one?", previous_response_id=first["id"])).json()
    assert second["previous_response_id"] == first["id"]
    assert second["instructions"] is None
    messages = [(message["role"], message["content"]) for message in stub.requests_for("alpha")[-1].json["messages"]]
    assert messages == [("user", "What is 2 + 2?"), ("assistant", "Four."), ("user", "Plus one?")]


@pytest.mark.long
async def test_reasoning_chooses_the_tiers_limits(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    reasoning = {"effort": "low", "summary": "auto", "context": "auto", "mode": "standard"}
    body = (await post_response(client, reasoning=reasoning)).json()
    assert body["reasoning"] == {"effort": "low", "summary": "auto"}
    request_body = stub.requests_for("alpha")[-1].json
    assert request_body.get("max_completion_tokens", request_body.get("max_tokens")) == 77
    run = (await client.get(f"/v1/runs/{body['baton']['run']}")).json()
    assert run["effort"] == "low"
    reply = await post_response(client, reasoning={"mode": "pro"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "reasoning.mode")


async def test_a_response_that_is_not_stored_cannot_be_had_again(client: httpx.AsyncClient) -> None:
    stored, gone = (await post_response(client)).json(), (await post_response(client, store=False)).json()
    statuses = [(await client.get(f"/v1/responses/{stored['id']}")).status_code for stored in (stored, gone)]
    assert statuses == [200, 404]


async def test_a_background_response_is_told_of_at_once(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    stub.always("alpha", Reply(header_delay=0.2))
    body = (await post_response(client, background=True)).json()
    assert (body["background"], body["output"], body["usage"]) == (True, [], None)
    assert body["status"] in ("queued", "in_progress")
    over = await client.get(f"/v1/responses/{body['id']}", params={"stream": "true"})
    assert "event: response.completed" in over.text


@pytest.mark.long
async def test_what_is_ignored_is_checked_noted_and_changes_nothing(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    own = ("id", "created_at", "completed_at", "output", "baton")
    plain = (await post_response(client)).json()
    request_body = latest_request(stub, "alpha")
    for name, (value, wrong) in IGNORED.items():
        body = (await post_response(client, **{name: value})).json()
        echoed = {name: value} if name in ours.ECHOED else {}
        expected = {n: v for n, v in plain.items() if n not in own} | echoed
        assert {n: v for n, v in body.items() if n not in own} == expected, name
        assert body["output"][0]["content"] == plain["output"][0]["content"]
        assert latest_request(stub, "alpha") == request_body, name
        run = (await client.get(f"/v1/runs/{body['baton']['run']}")).json()
        assert run["ignored"] == [name]
        refused = await post_response(client, **{name: wrong})
        assert refused.status_code == 400, name
        assert refused.json()["error"]["param"].split(".")[0] == name


async def test_what_the_reply_repeats_comes_back_in_the_foreground_as_a_stream_and_later(
    client: httpx.AsyncClient,
) -> None:
    options: dict[str, Any] = {name: IGNORED[name][0] for name in ours.ECHOED}
    whole = (await post_response(client, **options)).json()
    streamed = await post_response(client, stream=True, **options)
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: ")]
    later = (await client.get(f"/v1/responses/{whole['id']}")).json()
    for body in (whole, later, *(event["response"] for event in events if "response" in event)):
        assert {name: body[name] for name in options} == options
    assert (await client.delete(f"/v1/responses/{whole['id']}")).status_code == 200
    for path in ("", "/events"):
        events_text = (await client.get(f"/v1/runs/{whole['baton']['run']}{path}")).text
        assert '"hash"' not in events_text, "an identifier of an end user is content, which is erased"


async def test_a_value_that_includes_nothing_known_is_refused_with_those_that_there_are(
    client: httpx.AsyncClient,
) -> None:
    reply = await post_response(client, include=["reasoning.encrypted_content", "usage"])
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (400, "include[1]", "invalid_value")
    for value in typing.get_args(ResponseIncludable):
        assert f"'{value}'" in error["message"]
        assert (await post_response(client, include=[value])).status_code == 200


async def test_nothing_is_asked_by_zero_likeliest_tokens(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    assert (await post_response(client, top_logprobs=0)).json()["top_logprobs"] == 0
    chat = {"model": "baton-mini", "messages": [{"role": "user", "content": "Hi"}], "top_logprobs": 0}
    assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
    assert (await client.post("/v1/chat/completions", json=chat | {"logprobs": False})).status_code == 200
    assert ["logprobs" in request.json for request in stub.requests] == [False] * 3


@pytest.mark.long
async def test_what_is_refused_is_named(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    for name, value in REFUSED.items():
        reply = await post_response(client, **{name: value})
        error = reply.json()["error"]
        neutral = RESPONSES[name].neutral
        code = "unsupported_value" if neutral else "unsupported_parameter"
        assert (reply.status_code, error["param"], error["code"]) == (400, name, code)
        for nothing in (None, *neutral):
            assert (await post_response(client, **{name: nothing})).status_code == 200
    unknown = (await post_response(client, foo=1)).json()["error"]
    assert (unknown["param"], unknown["code"]) == ("foo", "unknown_parameter")


async def test_null_is_as_good_as_absent(client: httpx.AsyncClient) -> None:
    nulls = {name: None for name in RESPONSES if name not in ASKED}
    body = (await post_response(client, **nulls)).json()
    assert body["status"] == "completed"
    run = (await client.get(f"/v1/runs/{body['baton']['run']}")).json()
    assert run["ignored"] == []


async def test_a_choice_among_some_of_the_tools(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]}
    stub.always("alpha", CALL)
    reply = await post_response(client, tools=[ADD, LOOK], tool_choice=choice)
    assert (reply.json()["tool_choice"], [tool["name"] for tool in reply.json()["tools"]]) == (choice, ["add", "look"])
    request_body = stub.requests_for("alpha")[-1].json
    assert ([tool["function"]["name"] for tool in request_body["tools"]], request_body["tool_choice"]) == (
        ["add"],
        "required",
    )
    for other in ({"type": "function", "name": "foo"}, {"type": "custom", "name": "add"}):
        choice["tools"] = [other]
        error = (await post_response(client, tools=[ADD], tool_choice=choice)).json()["error"]
        assert error["message"] == f"Invalid value for '{error['param']}': it names a tool that is not among tools."
        assert error["param"] == "tool_choice.tools"


async def test_an_item_that_is_no_object_or_of_no_type_is_told_so(client: httpx.AsyncClient) -> None:
    error = (await post_response(client, input=["Hi."])).json()["error"]
    assert (error["param"], error["message"]) == (
        "input[0]",
        "Invalid value for 'input[0]': it must be an object, not a string.",
    )
    error = (await post_response(client, input=[{"type": 5}])).json()["error"]
    assert (error["param"], "it must be one of 'message'" in error["message"]) == ("input[0].type", True)


CLOSED = {"type": "object", "properties": {"a": SCHEMA}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "strict_given", "strict"),
    [
        (SCHEMA, None, True),
        (CLOSED, None, True),
        (CLOSED, False, False),
        (CLOSED | {"required": []}, None, False),
        (CLOSED | {"additionalProperties": True}, None, False),
        (CLOSED | {"properties": {"a": {"type": "object", "properties": {}}}}, None, False),
        (CLOSED | {"properties": {"a": {"type": "array", "items": {"type": "object"}}}}, None, False),
        (CLOSED | {"properties": {"a": {"anyOf": [{"type": "null"}, SCHEMA]}}}, None, True),
        (CLOSED | {"properties": {"a": {"oneOf": [SCHEMA]}}}, None, False),
        ({"type": "object"}, None, False),
        (None, None, False),
        (CLOSED | {"required": []}, True, True),
    ],
)
def test_a_function_is_strict_where_its_schema_allows_it(
    schema: dict[str, Any] | None, strict_given: bool | None, strict: bool
) -> None:
    tool = {"type": "function", "name": "f", "parameters": schema, "strict": strict_given}
    request, _ = ours.read_request(ASKED | {"tools": [tool]})
    assert ours.task_of(request, ()).toolbox.tools[0].strict is strict


async def test_a_schema_that_is_none_is_refused(client: httpx.AsyncClient) -> None:
    reply = await post_response(client, tools=[ADD | {"parameters": {"type": 5}}])
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tools[0].parameters")
    request_body = {"model": "baton-mini", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
    reply = await client.post(
        "/v1/messages", json=request_body | {"tools": [{"name": "f", "input_schema": {"type": 5}}]}
    )
    assert (reply.status_code, "tools.0.input_schema" in reply.json()["error"]["message"]) == (400, True)
