"""Tool calls of workers that mix their pieces, or give no arguments, in the formats that write one after the other."""

import json
from typing import Any

import httpx
import pytest

from app.core.message.chat import ToolDelta
from app.gateway.wire.call_sequence import CallSequence
from tests.stubs import ProviderStub, Reply, ToolCall

LOOK = {"type": "object", "properties": {"place": {"type": "string"}}}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/messages": {
        "model": "baton-mini",
        "max_tokens": 64,
        "messages": [{"role": "user", "content": "Look around."}],
        "tools": [{"name": "look", "input_schema": LOOK}],
    },
    "/v1/responses": {
        "model": "baton-mini",
        "input": "Look around.",
        "tools": [{"type": "function", "name": "look", "parameters": LOOK}],
    },
}


def arguments_in(events: list[dict[str, Any]]) -> list[str]:
    """The arguments of each call that a stream has begun, as its pieces come to them."""
    arguments: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_start":
            assert event["content_block"]["name"] == "look"
            arguments[event["index"]] = ""
        elif event["type"] == "content_block_delta":
            arguments[event["index"]] += event["delta"]["partial_json"]
        elif event["type"] == "response.function_call_arguments.done":
            arguments[event["output_index"]] = event["arguments"]
    return list(arguments.values())


@pytest.mark.parametrize("path", REQUESTS)
async def test_a_call_without_arguments_is_whole_before_the_next_one(
    stub: ProviderStub, client: httpx.AsyncClient, path: str
) -> None:
    calls = (ToolCall("look", "", "c1"), ToolCall("look", '{"place": "here"}', "c2"))
    stub.always("alpha", Reply(chunks=(), tool_calls=calls, finish="tool"))
    reply = await client.post(path, json=REQUESTS[path] | {"stream": True})
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
    assert arguments_in([json.loads(line) for line in lines]) == ["{}", '{"place": "here"}']


def test_mixed_pieces_are_put_in_sequence() -> None:
    sequence = CallSequence()
    first, second, third = [ToolDelta(index, f"call_{index}", "look", '{"place":') for index in range(3)]
    ends = [ToolDelta(index, arguments=f' "{index}"}}') for index in range(3)]
    assert sequence.take([first, second]) == [first]
    assert sequence.take([ends[1], third]) == []
    assert sequence.take([ends[0]]) == [ends[0], second, ends[1], third]
    assert sequence.take([ToolDelta(0, arguments="\n"), ends[2]]) == [ends[2]]
