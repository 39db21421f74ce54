"""`/v1/responses` by the official client: whole, streamed, resumed, with tools, followed up, in the background."""

import os
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response
from pydantic import BaseModel

from tests.clients.conftest import Address
from tests.clients.npm import Node
from tests.clients.test_chat import error
from tests.stubs import ProviderStub, Reply
from tests.stubs.script import ToolCall, Usage

ASKED: dict[str, Any] = {"model": "baton-mini", "input": "What is 2 + 2?"}
ADD: dict[str, Any] = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    "strict": False,
}
ORDER = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


@pytest.fixture
async def client(address: Address) -> AsyncIterator[AsyncOpenAI]:
    """The client as an application has it."""
    async with AsyncOpenAI(base_url=f"{address.url}/v1", api_key=address.key, max_retries=0) as running:
        yield running


async def test_whole_and_streamed_are_the_same_response(client: AsyncOpenAI) -> None:
    whole = await client.responses.create(**ASKED, instructions="Be brief.", metadata={"a": "b"})
    events = [event async for event in await client.responses.create(**ASKED, stream=True)]
    kinds = [event.type for event in events]
    assert [kind for place, kind in enumerate(kinds) if kind not in kinds[:place]] == ORDER
    numbers = [event.sequence_number for event in events]
    assert numbers == sorted(set(numbers))
    last = events[-1]
    assert last.type == "response.completed"
    assert whole.output_text == last.response.output_text == "Four."
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Four."
    for response in (whole, last.response):
        assert response.usage is not None
        assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (40, 9, 49)
        assert response.usage.input_tokens_details.cached_tokens == 30
    assert (whole.instructions, whole.metadata, whole.status) == ("Be brief.", {"a": "b"}, "completed")


async def test_it_is_of_the_clients_own_types(client: AsyncOpenAI) -> None:
    raw = await client.responses.with_raw_response.create(**ASKED, tools=[ADD])
    body = raw.http_response.json()
    del body["baton"]
    Response.model_validate(body, strict=True)
    assert set(body) <= set(Response.model_fields)


async def test_a_stored_response_is_retrieved_and_deleted(client: AsyncOpenAI) -> None:
    response = await client.responses.create(**ASKED)
    again = await client.responses.retrieve(response.id)
    assert again.to_dict() == response.to_dict()
    items = await client.responses.input_items.list(response.id)
    assert [item.to_dict()["content"][0]["text"] for item in items.data] == ["What is 2 + 2?"]  # type: ignore[index]
    assert (await client.beta.responses.retrieve(response.id)).id == response.id
    assert [item.id for item in (await client.beta.responses.input_items.list(response.id)).data] == [items.data[0].id]
    await client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(response.id)
    secret = await client.responses.create(**ASKED, store=False)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(secret.id)


@pytest.mark.parametrize("streamed", [False, True])
async def test_tools_by_previous_response(client: AsyncOpenAI, stub: ProviderStub, streamed: bool) -> None:
    calls = Reply(chunks=("Let me add.",), tool_calls=[ToolCall("add", '{"a": 2, "b": 2}', "c1")], finish="tool")
    stub.script("alpha", calls, Reply(chunks=("Four.",)), Reply(chunks=("Welcome.",)))
    first = await _ask(client, streamed, **ASKED, tools=[ADD])
    message, call = first.output
    assert call.type == "function_call"
    assert (message.type, call.name, call.arguments) == ("message", "add", '{"a": 2, "b": 2}')
    assert await client.responses.retrieve(first.id) == first
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "4"}]
    second = await _ask(client, streamed, model="baton-mini", input=output, previous_response_id=first.id, tools=[ADD])
    assert (second.output_text, second.previous_response_id) == ("Four.", first.id)
    assert second.id.startswith(first.id)
    third = await _ask(client, streamed, model="baton-mini", input="Thanks.", previous_response_id=second.id)
    assert third.output_text == "Welcome."
    roles = [message["role"] for message in stub.requests_for("alpha")[-1].json["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant", "user"]


async def _ask(client: AsyncOpenAI, streamed: bool, **request_body: Any) -> Response:
    if not streamed:
        response: Response = await client.responses.create(**request_body)
        return response
    kinds = []
    async for event in await client.responses.create(**request_body, stream=True):
        kinds.append(event.type)
        if event.type == "response.completed":
            return event.response
    raise AssertionError(kinds)


async def test_a_background_response_outlives_its_connection(client: AsyncOpenAI, stub: ProviderStub) -> None:
    stub.script("alpha", Reply(chunks=("Fo", "ur", "."), header_delay=0.3, gap=0.05))
    response = await client.responses.create(**ASKED, background=True)
    assert response.status in ("queued", "in_progress")
    events = [event async for event in await client.responses.retrieve(response.id, stream=True, starting_after=1)]
    assert events[0].type == "response.output_item.added"
    assert events[-1].type == "response.completed"
    behind = next(event for event in events if event.type == "response.output_text.delta").sequence_number
    rest = [event async for event in await client.responses.retrieve(response.id, stream=True, starting_after=behind)]
    assert all(event.sequence_number > behind for event in rest)
    assert rest[-1].sequence_number == events[-1].sequence_number
    assert (await client.responses.retrieve(response.id)).output_text == "Four."


async def test_a_background_response_is_cancelled(client: AsyncOpenAI, stub: ProviderStub) -> None:
    stub.script("alpha", Reply(header_delay=20.0))
    response = await client.responses.create(**ASKED, background=True)
    await stub.wait_for(1)
    stopped = await client.responses.cancel(response.id)
    assert stopped.status == "cancelled"
    assert (await client.responses.retrieve(response.id)).status == "cancelled"


class Point(BaseModel):
    """A place in two dimensions."""

    x: int


async def test_a_form_is_parsed(client: AsyncOpenAI, stub: ProviderStub) -> None:
    stub.script("alpha", Reply(chunks=('{"x": 7}',)))
    parsed = await client.responses.parse(**ASKED, text_format=Point)
    assert parsed.output_parsed == Point(x=7)


@pytest.mark.parametrize(
    ("changes", "kind", "param"),
    [
        ({"model": "nothing"}, openai.NotFoundError, "model"),
        ({"input": []}, openai.BadRequestError, "input"),
        ({"extra_body": {"foo": 1}}, openai.BadRequestError, "foo"),
        ({"tools": [{"type": "web_search"}]}, openai.BadRequestError, "tools[0].type"),
        ({"previous_response_id": f"resp_run_{'0' * 31}"}, openai.BadRequestError, "previous_response_id"),
        ({"conversation": "conv_1"}, openai.BadRequestError, "conversation"),
        ({"background": True, "store": False}, openai.BadRequestError, "store"),
    ],
)
async def test_what_cannot_be_had_is_named(
    client: AsyncOpenAI, changes: dict[str, Any], kind: type[openai.APIStatusError], param: str
) -> None:
    with pytest.raises(kind) as caught:
        await client.responses.create(**ASKED | changes)
    assert caught.value.param == param


async def test_a_failed_response_says_so(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        await client.responses.create(**ASKED | {"model": "baton-broken"})
    events = [event async for event in await client.responses.create(**ASKED | {"model": "baton-broken"}, stream=True)]
    last = events[-1]
    assert last.type == "response.failed"
    assert (last.response.status, last.response.error and last.response.error.code) == ("failed", "server_error")


async def test_the_node_client(address: Address, stub: ProviderStub, node: Node) -> None:
    """All of it once more by the other official client, whose helpers check the order of events for themselves."""
    usage = Usage(input=40, cached=30, output=9, reasoning=4)
    four = Reply(chunks=("Fo", "ur", "."), usage=usage)
    calls = Reply(chunks=("Let me add.",), tool_calls=[ToolCall("add", '{"a": 2}', "c1")], finish="tool")
    stub.script("alpha", *[four] * 4, calls, four, Reply(chunks=('{"x": 7}',)))
    environ = {"PATH": os.environ["PATH"], "BATON_URL": address.url, "BATON_API_KEY": address.key}
    report = await node.run("responses", environ)
    deleted = report.pop("deleted")
    assert (deleted["class"], deleted["status"]) == ("NotFoundError", 404)
    assert report == {
        "text": "Four.",
        "usage": [40, 9, 49],
        "streamed": {"text": "Four.", "kinds": ORDER, "usage": [40, 9, 49]},
        "helped": "Four.",
        "background": {"begun": True, "ended": "completed", "text": "Four.", "resumed": True},
        "tools": {
            "name": "add",
            "arguments": '{"a": 2}',
            "text": "Four.",
            "listed": ["function_call_output"],
        },
        "parsed": {"x": 7},
        "unknown": error("BadRequestError", 400, "unknown_parameter", "foo"),
        "failed": error("BadRequestError", 400, "worker_refused", None, "invalid_request_error"),
    }
