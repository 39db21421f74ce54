"""Tools in OpenAI's responses and Anthropic's messages: choices and parallel calls, whole and streamed alike."""

import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from anthropic.types import Message
from openai import AsyncOpenAI
from openai.types.responses import Response

from tests.clients.conftest import Address
from tests.clients.tool_worker import ADDS, LOOKS, STALL, worker
from tests.stubs import ProviderStub

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
QUESTION = "What is 2 + 2?"
FUNCTIONS: Any = [
    {"type": "function", "name": "add", "parameters": SCHEMA, "strict": True},
    {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False},
]
TOOLS: Any = [
    {"name": "add", "input_schema": SCHEMA, "strict": True},
    {"name": "look", "input_schema": {"type": "object"}},
]
WORDS, BOTH = "Let me see.", (ADDS, LOOKS)


@pytest.fixture
async def stub(stub: ProviderStub) -> ProviderStub:
    """The stub with a worker that calls tools."""
    stub.always("alpha", worker)
    return stub


@pytest.fixture
async def client(stub: ProviderStub, address: Address) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{address.url}/v1", api_key=address.key, max_retries=0) as running:
        yield running


@pytest.fixture
async def anthropic(stub: ProviderStub, address: Address) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=address.url, api_key=address.key, max_retries=0) as running:
        yield running


def by_call(pieces: list[tuple[int, str]]) -> dict[int, list[str]]:
    """Pieces of arguments by the place of their call; empty ones do not count."""
    pieces_by_index: dict[int, list[str]] = {}
    for place, text in pieces:
        if text:
            pieces_by_index.setdefault(place, []).append(text)
    return pieces_by_index


@pytest.mark.parametrize(
    ("choice", "text", "calls"),
    [
        ({"tool_choice": "auto"}, WORDS, BOTH),
        ({"tool_choice": "none"}, "No tools.", ()),
        ({"tool_choice": "required"}, "", (ADDS,)),
        ({"tool_choice": {"type": "function", "name": "look"}}, "", (LOOKS,)),
        ({"parallel_tool_calls": False}, WORDS, (ADDS,)),
    ],
    ids=["auto", "none", "required", "named", "one"],
)
async def test_responses(client: AsyncOpenAI, stub: ProviderStub, choice: Any, text: str, calls: Any) -> None:
    request_body: Any = {"model": "baton-mini", "input": QUESTION, "tools": FUNCTIONS, **choice}
    whole = await client.responses.create(**request_body)
    pieces, times, began, streamed = list[tuple[int, str]](), list[float](), 0.0, None
    async for event in await client.responses.create(**request_body, stream=True):
        times.append(time.monotonic())
        if event.type == "response.function_call_arguments.delta":
            pieces.append((event.output_index, event.delta))
            began = began or times[-1]
        elif event.type == "response.completed":
            streamed = event.response
    assert streamed is not None
    assert text_and_calls(whole) == text_and_calls(streamed) == (text, list(calls))
    assert whole.usage == streamed.usage
    assert ["".join(parts) for parts in by_call(pieces).values()] == [arguments for _, arguments in calls]
    assert {len(parts) for parts in by_call(pieces).values()} <= {2}, "in as many pieces as they came"
    if text == WORDS:
        assert times[-1] - began > STALL / 10, "they came while the worker was still at them"
    (add, look) = (tool["function"] for tool in stub.requests_for("alpha")[-1].json["tools"])
    assert (add["strict"], add["parameters"], "strict" in look) == (True, SCHEMA, False)


def text_and_calls(response: Response) -> tuple[str, list[list[str]]]:
    """Text and calls."""
    calls = [item for item in response.output if item.type == "function_call"]
    assert all(call.status == "completed" and call.call_id.startswith("call_bt") for call in calls)
    return response.output_text, [[call.name, call.arguments] for call in calls]


async def test_outputs_of_parallel_functions(client: AsyncOpenAI) -> None:
    """By the whole conversation, in any order of the outputs, streamed and not."""
    for streams in (False, True):
        request_body: Any = {"model": "baton-mini", "tools": FUNCTIONS}
        first = await client.responses.create(**request_body, input=QUESTION)
        calls = [item for item in first.output if item.type == "function_call"]
        outputs = [
            {"type": "function_call_output", "call_id": call.call_id, "output": call.name} for call in calls[::-1]
        ]
        talk: Any = [{"role": "user", "content": QUESTION}, *first.output, *outputs]
        if not streams:
            last = await client.responses.create(**request_body, input=talk)
        else:
            events = [event async for event in await client.responses.create(**request_body, input=talk, stream=True)]
            assert events[-1].type == "response.completed"
            last = events[-1].response
        assert last.output_text == "add;look;"


@pytest.mark.parametrize(
    ("choice", "text", "calls"),
    [
        ({"type": "auto"}, WORDS, BOTH),
        ({"type": "none"}, "No tools.", ()),
        ({"type": "any"}, "", (ADDS,)),
        ({"type": "tool", "name": "look"}, "", (LOOKS,)),
        ({"type": "auto", "disable_parallel_tool_use": True}, WORDS, (ADDS,)),
    ],
    ids=["auto", "none", "any", "tool", "one"],
)
async def test_messages(anthropic: AsyncAnthropic, stub: ProviderStub, choice: Any, text: str, calls: Any) -> None:
    request_body: Any = {
        "model": "baton-mini",
        "max_tokens": 64,
        "messages": [{"role": "user", "content": QUESTION}],
        "tools": TOOLS,
        "tool_choice": choice,
    }
    whole = await anthropic.messages.create(**request_body)
    pieces, times, began = list[tuple[int, str]](), list[float](), 0.0
    async with anthropic.messages.stream(**request_body) as stream:
        async for event in stream:
            times.append(time.monotonic())
            if event.type == "content_block_delta" and event.delta.type == "input_json_delta":
                pieces.append((event.index, event.delta.partial_json))
                began = began or times[-1]
        streamed = await stream.get_final_message()
    assert blocks(whole) == blocks(streamed) == (text, [[name, json.loads(arguments)] for name, arguments in calls])
    assert (whole.stop_reason, whole.usage) == (streamed.stop_reason, streamed.usage)
    assert ["".join(parts) for parts in by_call(pieces).values()] == [arguments for _, arguments in calls]
    assert {len(parts) for parts in by_call(pieces).values()} <= {2}, "in as many pieces as they came"
    if text == WORDS:
        assert times[-1] - began > STALL / 10, "they came while the worker was still at them"
    (add, look) = (tool["function"] for tool in stub.requests_for("alpha")[-1].json["tools"])
    assert (add["strict"], add["parameters"], "strict" in look) == (True, SCHEMA, False)


def blocks(message: Message) -> tuple[str, list[list[Any]]]:
    """Text and calls."""
    uses = [block for block in message.content if block.type == "tool_use"]
    text = "".join(block.text for block in message.content if block.type == "text")
    return text, [[use.name, use.input] for use in uses]


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
async def test_results_of_parallel_uses(anthropic: AsyncAnthropic, streams: bool) -> None:
    talk: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(2):
        request_body: Any = {"model": "baton-mini", "max_tokens": 64, "messages": talk, "tools": TOOLS}
        if streams:
            async with anthropic.messages.stream(**request_body) as stream:
                message: Any = await stream.get_final_message()
        else:
            message = await anthropic.messages.create(**request_body)
        uses = [block for block in message.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": use.name} for use in uses[::-1]]
        talk += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    assert (message.stop_reason, message.content[0].text) == ("end_turn", "add;look;")
