"""`/v1/messages` by the official Anthropic client: whole and streamed, tools, errors, counting."""

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import Message

from app.core.message.chat import Image
from app.core.message.chat import ToolCall as ToolUse
from app.gateway.anthropic.request import read_count, task_of
from tests.clients.conftest import Address
from tests.stubs import ProviderStub, Reply
from tests.stubs.script import ToolCall

ASKED: dict[str, Any] = {
    "model": "baton-mini",
    "max_tokens": 64,
    "messages": [{"role": "user", "content": "What is 2 + 2?"}],
}
ADD = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}


@pytest.fixture
async def client(address: Address) -> AsyncIterator[AsyncAnthropic]:
    """The client as an application has it: a base URL and a key."""
    async with AsyncAnthropic(base_url=address.url, api_key=address.key, max_retries=0) as running:
        yield running


async def test_whole_and_streamed_are_the_same_message(client: AsyncAnthropic) -> None:
    whole = await client.messages.create(**ASKED)
    async with client.messages.stream(**ASKED) as stream:
        texts = [text async for text in stream.text_stream]
        streamed = await stream.get_final_message()
    assert whole.content[0].to_dict()["text"] == "".join(texts) == "Four."
    assert (whole.stop_reason, streamed.stop_reason) == ("end_turn", "end_turn")
    for message in (whole, streamed):
        usage = message.usage
        assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (10, 30, 9)
        assert message.model == "baton-mini"
    assert whole._request_id is not None


async def test_the_clients_tool_runner_goes_on_without_a_thread(client: AsyncAnthropic, stub: ProviderStub) -> None:
    """It begins with a thread that the server is to keep, and goes on without one where the refusal says the word."""
    calls = (ToolCall("add", '{"a": 2, "b": 3}'),)
    stub.script("alpha", Reply(chunks=(), tool_calls=calls, finish="tool"), Reply(chunks=("Five.",)))

    @anthropic.beta_async_tool
    async def add(a: int, b: int) -> str:
        """Adds."""
        return str(a + b)

    last = await client.beta.messages.tool_runner(**ASKED, tools=[add]).until_done()
    assert [block.to_dict()["text"] for block in last.content] == ["Five."]
    assert json.loads(stub.requests_for("alpha")[-1].body)["messages"][-1]["content"] == "5"


async def test_replies_are_of_the_clients_own_types(client: AsyncAnthropic, address: Address) -> None:
    raw = await client.messages.with_raw_response.create(**ASKED)
    body = json.loads(await raw.text())
    extension = body.pop("baton")
    Message.model_validate(body, strict=True, extra="forbid")
    assert extension["usage"]["output"] == 9
    events = [event async for event in await client.messages.create(**ASKED, stream=True)]
    assert [event.type for event in events if event.type != "ping"][:2] == ["message_start", "content_block_start"]
    assert [event.type for event in events][-3:] == ["content_block_stop", "message_delta", "message_stop"]


async def test_what_the_request_says_reaches_the_worker(client: AsyncAnthropic, stub: ProviderStub) -> None:
    await client.messages.create(
        **ASKED,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        stop_sequences=["END"],
        extra_body={"temperature": 0.5, "top_p": 0.9},
        metadata={"user_id": "ann"},
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    body_sent = stub.requests_for("alpha")[-1].json
    assert body_sent["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body_sent["temperature"], body_sent["top_p"], body_sent["stop"]) == (0.5, 0.9, ["END"])


def test_images_thinking_and_results_are_read() -> None:
    """Content is read that no worker of the stub's pool could take."""
    source = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "image", "source": source}]}
    turns = [
        {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "https://x.example/y.png"}}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, USE]},
        {"role": "user", "content": [result | {"is_error": True}, {"type": "text", "text": "Go on."}]},
    ]
    task = task_of(read_count({"model": "m", "messages": turns, "tools": [ADD]}))
    user, assistant, returned, spoken = task.messages
    assert user.parts == (Image("https://x.example/y.png"),)
    assert (assistant.parts, assistant.calls) == ((), (ToolUse("toolu_1", "add", '{"a":1}'),))
    assert (returned.role, returned.call_id, returned.failed) == ("tool", "toolu_1", True)
    assert returned.parts == (Image("data:image/png;base64,iVBORw0KGgo="),)
    assert (spoken.role, spoken.text) == ("user", "Go on.")


USE = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_tool_is_called_and_its_result_goes_back(
    client: AsyncAnthropic, stub: ProviderStub, streamed: bool
) -> None:
    calls = Reply(chunks=("Let me add.",), tool_calls=[ToolCall("add", '{"a": 2, "b": 2}', "c1")], finish="tool")
    stub.script("alpha", calls, Reply(chunks=("Four.",)))
    first = await _ask(client, streamed, tools=[ADD])
    text, use = first.content
    assert (text.type, use.type, first.stop_reason) == ("text", "tool_use", "tool_use")
    assert use.type == "tool_use"
    assert (use.name, use.input) == ("add", {"a": 2, "b": 2})
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "4"}]}
    turns = [
        *ASKED["messages"],
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]},
        {"role": "user", "content": [result]},
    ]
    last = await _ask(client, streamed, tools=[ADD], messages=turns)
    assert (last.stop_reason, last.content[0].to_dict()["text"]) == ("end_turn", "Four.")
    assert last.id == f"{first.id}_1"  # the same run, another message
    assert stub.requests_for("alpha")[-1].json["messages"][-1]["content"] == "4"


async def _ask(client: AsyncAnthropic, streamed: bool, **more: Any) -> Message:
    if not streamed:
        message: Message = await client.messages.create(**ASKED | more)
        return message
    async with client.messages.stream(**ASKED | more) as stream:
        return await stream.get_final_message()


async def test_either_header_carries_the_key(address: Address) -> None:
    async with AsyncAnthropic(base_url=address.url, auth_token=address.key, api_key=None, max_retries=0) as client:
        assert (await client.messages.create(**ASKED)).content


@pytest.mark.parametrize(
    ("changes", "kind", "says"),
    [
        ({"model": "nothing"}, anthropic.NotFoundError, "not_found_error"),
        ({"messages": []}, anthropic.BadRequestError, "invalid_request_error"),
        ({"extra_body": {"foo": 1}}, anthropic.BadRequestError, "invalid_request_error"),
        ({"extra_body": {"mcp_servers": [{}]}}, anthropic.BadRequestError, "invalid_request_error"),
        ({"tools": [ADD, ADD]}, anthropic.BadRequestError, "invalid_request_error"),
        ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError, "invalid_request_error"),
        ({"extra_headers": {"x-api-key": "sk-wrong"}}, anthropic.AuthenticationError, "authentication_error"),
        ({"model": "baton-broken"}, anthropic.BadRequestError, "invalid_request_error"),
    ],
)
async def test_errors_are_anthropics(
    client: AsyncAnthropic, changes: dict[str, Any], kind: type[anthropic.APIStatusError], says: str
) -> None:
    with pytest.raises(kind) as caught:
        await client.messages.create(**ASKED | changes)
    body = caught.value.body
    assert isinstance(body, dict)
    assert (body["type"], body["error"]["type"]) == ("error", says)
    assert body["request_id"] == caught.value.response.headers["request-id"]


async def test_an_error_after_the_first_byte_is_an_event(client: AsyncAnthropic) -> None:
    with pytest.raises(anthropic.APIStatusError) as caught:
        async for _ in await client.messages.create(**ASKED | {"model": "baton-broken"}, stream=True):
            pass
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["error"]["type"] == "api_error"


async def test_tokens_are_counted_without_a_run(client: AsyncAnthropic, stub: ProviderStub) -> None:
    request_body = {name: ASKED[name] for name in ("model", "messages")}
    short = await client.messages.count_tokens(**request_body)
    long = await client.messages.count_tokens(**request_body, system="word " * 400, tools=[ADD])
    assert 0 < short.input_tokens < long.input_tokens
    assert not stub.requests


async def test_a_form_is_held_to(client: AsyncAnthropic, stub: ProviderStub) -> None:
    schema = {
        "type": "object",
        "properties": {"x": {"type": "integer"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    stub.script("alpha", Reply(chunks=("seven",)), Reply(chunks=('{"x": 7}',)))
    message = await client.messages.create(
        **ASKED, extra_body={"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    )
    assert json.loads(message.content[0].to_dict()["text"]) == {"x": 7}


async def test_the_run_can_be_audited(client: AsyncAnthropic, address: Address) -> None:
    message = await client.messages.create(**ASKED)
    async with httpx.AsyncClient(base_url=address.url, headers={"x-api-key": address.key}) as audit:
        run = (await audit.get(f"/v1/runs/{message.id.removeprefix('msg_')}")).json()
    assert run["state"] == "succeeded"
