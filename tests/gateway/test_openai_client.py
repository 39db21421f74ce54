"""The official client, sync and async, over a real server: what a user of the OpenAI API would do."""

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from app.engine.delivery.messages import AnswerPart, CallerMessage, Mailbox
from app.engine.runs.admission import Order
from app.errors import RunFailed
from tests.harness.stand_ins import GatewayStandIn, turn_end

GAP_SECONDS = 0.01
MESSAGES = [{"role": "user", "content": "What is 2 + 2?"}]


@pytest.fixture
async def url(gateway: GatewayStandIn) -> AsyncIterator[str]:
    """The URL on which the gateway listens."""
    async with gateway.serve() as served:
        yield f"{served}/v1"


@pytest.fixture
async def client(url: str, key: str) -> AsyncIterator[AsyncOpenAI]:
    """An asynchronous client that does not retry."""
    async with AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as opened:
        yield opened


async def test_async(client: AsyncOpenAI) -> None:
    reply = await client.chat.completions.create(model="baton-mini", messages=MESSAGES)  # type: ignore[call-overload]
    assert reply.choices[0].message.content == "Four."
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.model_extra["baton"]["run"] == "run_0"


async def test_async_stream(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="baton-mini",
        messages=MESSAGES,  # type: ignore[arg-type]
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"baton": {"stream_steps": True, "labels": ["phi"]}},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == "Four."
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 17


@pytest.mark.parametrize("silence", [0.0, 0.2])
async def test_a_silence_within_an_answer(silence: float) -> None:
    """The client takes every blank line for an event once it has seen an id, so comments may not end with one."""
    gateway = GatewayStandIn(ping=0.05)
    key = gateway.add_key()

    async def script(_order: Order, run: str, line: Mailbox[CallerMessage]) -> None:
        line.put(AnswerPart("Fo", at=2))
        await asyncio.sleep(silence)
        line.put(AnswerPart("ur.", at=5))
        line.put(turn_end(run))

    gateway.runs.script = script
    async with (
        gateway.serve() as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client,
    ):
        chat = await client.chat.completions.create(model="baton-mini", messages=MESSAGES, stream=True)  # type: ignore[call-overload]
        chunks = [chunk async for chunk in chat]
    assert [choice.delta.content for chunk in chunks for choice in chunk.choices if choice.delta.content] == [
        "Fo",
        "ur.",
    ]


async def test_the_stream_helper(client: AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model="baton-mini", messages=MESSAGES) as stream:  # type: ignore[arg-type]
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "Four."


async def test_sync(url: str, key: str) -> None:
    def both() -> tuple[str | None, str, list[str]]:
        with OpenAI(base_url=url, api_key=key, max_retries=0) as client:
            whole = client.chat.completions.create(model="mini", messages=MESSAGES)  # type: ignore[call-overload]
            stream = client.chat.completions.create(model="mini", messages=MESSAGES, stream=True)  # type: ignore[call-overload]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            return whole.choices[0].message.content, text, [model.id for model in client.models.list()]

    assert await asyncio.to_thread(both) == ("Four.", "Four.", ["baton-mini", "mini"])


async def test_errors_are_the_clients_own(client: AsyncOpenAI, url: str) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="nothing", messages=MESSAGES)  # type: ignore[call-overload]
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError):
        await client.chat.completions.create(model="mini", messages=[])
    async with AsyncOpenAI(base_url=url, api_key="sk-wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()


async def test_an_error_in_a_stream_is_raised(gateway: GatewayStandIn, client: AsyncOpenAI) -> None:
    async def script(_order: Order, run: str, line: Mailbox[CallerMessage]) -> None:
        line.put(AnswerPart("Fo"))
        line.put(turn_end(run, "", RunFailed()))

    gateway.runs.script = script
    stream = await client.chat.completions.create(model="mini", messages=MESSAGES, stream=True)  # type: ignore[call-overload]
    pieces: list[str] = []

    async def listen() -> None:
        async for chunk in stream:
            pieces.append(chunk.choices[0].delta.content or "")

    with pytest.raises(openai.APIError) as broken:
        await listen()
    assert "".join(pieces) == "Fo"
    assert broken.value.code == "run_failed"


async def test_closing_a_stream_cancels_the_run(gateway: GatewayStandIn, client: AsyncOpenAI) -> None:
    async def script(_order: Order, _run: str, line: Mailbox[CallerMessage]) -> None:
        for _ in range(1_000):
            line.put(AnswerPart("more "))
            await asyncio.sleep(GAP_SECONDS)

    gateway.runs.script = script
    stream = await client.chat.completions.create(model="mini", messages=MESSAGES, stream=True)  # type: ignore[call-overload]
    for _ in range(3):
        await anext(stream)
    await stream.close()
    await gateway.runs.stopped.wait()
    assert gateway.runs.cancelled == [("run_0", "client")]
