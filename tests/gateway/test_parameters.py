"""The table of parameters: complete, written down, and each row driven over HTTP."""

import json
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from openai.types import chat
from openai.types.chat import chat_completion_custom_tool_param, chat_completion_message_custom_tool_call_param
from openai.types.chat import completion_create_params as sdk
from openai.types.chat.chat_completion_content_part_image_param import ImageURL
from pydantic import BaseModel

from app.core.message.chat import Form, Tool, Toolbox
from app.engine.runs.admission import Order
from app.gateway.chat import request as chat_request
from app.gateway.chat.request import ChatRequest, ImagePart, ImageUrl, RefusalPart, TextPart
from app.gateway.wire.parameters import PARAMETERS, document
from tests.harness.exact_replies import CUT
from tests.harness.stand_ins import GatewayStandIn, chat_body

ROOT = Path(__file__).parents[2]
OURS = {"baton"}

Reads = Callable[[Order], object]
HONOURED: Mapping[str, tuple[object, Reads, object]] = {
    "model": ("mini", lambda order: (order.model, order.tier.name), ("mini", "baton-mini")),
    "messages": ([{"role": "user", "content": "Hi"}], lambda order: order.task.messages[0].text, "Hi"),
    "stream": (True, lambda order: order.streams, True),
    "max_tokens": (7, lambda order: order.task.sampling.max_tokens, 7),
    "max_completion_tokens": (8, lambda order: order.task.sampling.max_tokens, 8),
    "temperature": (0.5, lambda order: order.task.sampling.temperature, 0.5),
    "top_p": (0.25, lambda order: order.task.sampling.top_p, 0.25),
    "stop": (["a", "b"], lambda order: order.task.sampling.stop, ("a", "b")),
    "seed": (11, lambda order: order.task.sampling.seed, 11),
    "presence_penalty": (-1.5, lambda order: order.task.sampling.presence_penalty, -1.5),
    "frequency_penalty": (1.5, lambda order: order.task.sampling.frequency_penalty, 1.5),
    "logit_bias": ({"50256": -100}, lambda order: order.task.sampling.logit_bias, (("50256", -100),)),
    "logprobs": (True, lambda order: order.task.logprobs, 0),
    "reasoning_effort": ("low", lambda order: order.effort, "low"),
    "response_format": ({"type": "json_object"}, lambda order: order.task.form, Form()),
    "tools": (
        [{"type": "function", "function": {"name": "f"}}],
        lambda order: order.task.toolbox,
        Toolbox((Tool("f"),)),
    ),
    "tool_choice": ("none", lambda order: order.task.toolbox, Toolbox()),
    "parallel_tool_calls": (False, lambda order: order.task.toolbox, Toolbox()),
    "user": ("ann", lambda order: order.task.user, "ann"),
    "metadata": ({"a": "b"}, lambda order: order.task.metadata, {"a": "b"}),
    "baton": ({"labels": ["phi"]}, lambda order: order.labels, {"phi"}),
}
IGNORED: Mapping[str, tuple[object, object]] = {
    "store": (True, "yes"),
    "service_tier": ("flex", "cheap"),
    "safety_identifier": ("hash", "x" * 129),
    "prompt_cache_key": ("key", 5),
    "prompt_cache_retention": ("24h", "25h"),
    "prompt_cache_options": ({"mode": "explicit"}, "explicit"),
    "verbosity": ("low", "loud"),
}
"""A value that is noted, and one that is no value of that parameter."""
REFUSED: Mapping[str, object] = {
    "functions": [{"name": "f"}],
    "function_call": "auto",
    "n": 2,
    "modalities": ["text", "audio"],
    "audio": {"voice": "alloy", "format": "mp3"},
    "prediction": {"type": "content", "content": "x"},
    "web_search_options": {},
    "moderation": {"model": "omni-moderation-latest"},
}


def test_every_parameter_of_the_official_client_has_a_row() -> None:
    parameters = set(typing.get_type_hints(sdk.CompletionCreateParamsStreaming))
    assert len(parameters) > 30
    assert parameters <= set(PARAMETERS)
    assert set(PARAMETERS) - parameters == OURS


@pytest.mark.skipif(not CUT.exists(), reason="the published API description is not beside this checkout")
def test_every_parameter_of_the_published_description_has_a_row() -> None:
    """A cut without requests has those that replies of the other API repeat: chat completions share them."""
    definitions = json.loads(CUT.read_text())["$defs"]
    names = [
        name
        for part in ("CreateChatCompletionRequest", "CreateModelResponseProperties", "ModelResponseProperties")
        for name in _properties(definitions.get(part, {}))
    ]
    assert "temperature" in names
    assert set(names) <= set(PARAMETERS)


def _properties(schema: Mapping[str, Any]) -> list[str]:
    return [*schema.get("properties", {}), *(name for part in schema.get("allOf", ()) for name in _properties(part))]


def test_every_row_is_driven_by_a_test() -> None:
    driven = {
        "honoured": {*HONOURED, "stream_options", "top_logprobs"},
        "ignored": set(IGNORED),
        "refused": set(REFUSED),
    }
    for decision, names in driven.items():
        assert names == {name for name, row in PARAMETERS.items() if row.decision == decision}


def test_what_is_read_is_what_is_not_refused() -> None:
    assert set(ChatRequest.model_fields) == {name for name, row in PARAMETERS.items() if row.decision != "refused"}


def test_the_page_says_what_the_code_does() -> None:
    page = (ROOT / "deploy" / "docs" / "parameters.md").read_text()
    assert page == document() + "\n", "run: python -m app.gateway.wire.parameters > deploy/docs/parameters.md"


async def post(gateway: GatewayStandIn, key: str, body: dict[str, Any]) -> Any:
    async with gateway.client(key) as client:
        return await client.post("/v1/chat/completions", json=body)


@pytest.mark.parametrize("name", HONOURED)
async def test_an_honoured_parameter_reaches_the_order(gateway: GatewayStandIn, key: str, name: str) -> None:
    value, read_value, expected = HONOURED[name]
    assert (await post(gateway, key, chat_body() | {name: value})).status_code == 200
    [order] = gateway.runs.orders
    assert read_value(order) == expected
    assert order.ignored == ()


async def test_stream_options_are_honoured(gateway: GatewayStandIn, key: str) -> None:
    reply = await post(gateway, key, chat_body(stream=True, stream_options={"include_usage": True}))
    assert '"choices":[],"usage":{' in reply.text


async def test_top_logprobs_go_with_logprobs(gateway: GatewayStandIn, key: str) -> None:
    assert (await post(gateway, key, chat_body(logprobs=True, top_logprobs=3))).status_code == 200
    assert gateway.runs.orders[0].task.logprobs == 3
    reply = await post(gateway, key, chat_body(top_logprobs=3))
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "top_logprobs")


@pytest.mark.parametrize("name", IGNORED)
async def test_an_ignored_parameter_is_checked_and_noted(gateway: GatewayStandIn, key: str, name: str) -> None:
    value, wrong = IGNORED[name]
    assert (await post(gateway, key, chat_body() | {name: value})).status_code == 200
    assert gateway.runs.orders[0].ignored == (name,)
    reply = await post(gateway, key, chat_body() | {name: wrong})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize("name", REFUSED)
async def test_a_refused_parameter_is_named(gateway: GatewayStandIn, key: str, name: str) -> None:
    reply = await post(gateway, key, chat_body() | {name: REFUSED[name]})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, name)
    row = PARAMETERS[name]
    code, which = ("unsupported_value", " with this value") if row.neutral else ("unsupported_parameter", "")
    assert (error["code"], error["message"]) == (code, f"'{name}' is not supported{which}. {row.note} Leave it out.")
    assert gateway.runs.orders == []


@pytest.mark.parametrize("name", [name for name in REFUSED if PARAMETERS[name].neutral])
async def test_a_refused_parameter_may_ask_for_nothing(gateway: GatewayStandIn, key: str, name: str) -> None:
    assert (await post(gateway, key, chat_body() | {name: PARAMETERS[name].neutral[0]})).status_code == 200
    assert gateway.runs.orders[0].ignored == (name,)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (TextPart, chat.ChatCompletionContentPartTextParam),
        (ImagePart, chat.ChatCompletionContentPartImageParam),
        (RefusalPart, chat.ChatCompletionContentPartRefusalParam),
        (ImageUrl, ImageURL),
        (chat_request.Custom, chat_completion_custom_tool_param.Custom),
        (chat_request.Grammar, chat_completion_custom_tool_param.CustomFormatGrammar),
        (chat_request.Rules, chat_completion_custom_tool_param.CustomFormatGrammarGrammar),
        (chat_request.Written, chat_completion_message_custom_tool_call_param.Custom),
    ],
)
def test_what_is_nested_has_every_field(ours: type[BaseModel], theirs: type) -> None:
    beyond = {"cache_control", "baton"} | (
        {"role", "refusal", "annotations", "tool_calls"} if ours is TextPart else set()
    )
    assert set(ours.model_fields) - beyond == set(typing.get_type_hints(theirs))


async def test_a_breakpoint_of_a_prompts_cache_is_noted(gateway: GatewayStandIn, key: str) -> None:
    part: dict[str, Any] = {"type": "text", "text": "Hi", "prompt_cache_breakpoint": {"mode": "explicit"}}
    part |= {"cache_control": {"type": "ephemeral"}}
    body = chat_body(store=True) | {"messages": [{"role": "user", "content": [part]}]}
    assert (await post(gateway, key, body)).status_code == 200
    assert gateway.runs.orders[0].ignored == ("store", "prompt_cache_breakpoint", "cache_control")
    part["prompt_cache_breakpoint"] = {"mode": "implicit"}
    reply = await post(gateway, key, body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "messages[0].content[0].prompt_cache_breakpoint.mode"


async def test_null_is_as_good_as_absent(gateway: GatewayStandIn, key: str) -> None:
    nulls = {name: None for name in PARAMETERS if name not in ("model", "messages")}
    assert (await post(gateway, key, chat_body() | nulls)).status_code == 200
    assert gateway.runs.orders[0].ignored == ()


async def test_a_null_inside_of_a_parameter_is_as_good_as_absent(gateway: GatewayStandIn, key: str) -> None:
    extension = {"labels": None, "stream_steps": None, "explore": None, "shadow": None, "pool": {"allow": None}}
    message = {"role": "user", "content": "Hi", "baton": {"labels": None}}
    body = chat_body(stream=True) | {"messages": [message]}
    nulls = {"stream_options": {"include_usage": None, "include_obfuscation": None}, "baton": extension}
    assert [(await post(gateway, key, body | more)).status_code for more in ({}, nulls)] == [200, 200]
    plain, with_nulls = gateway.runs.orders
    assert replace(with_nulls, request_id=plain.request_id) == plain
