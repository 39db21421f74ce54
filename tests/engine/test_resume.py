"""Streams that are taken up again: from every event, in every process, and what cannot be taken up."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import openai
import orjson
import pytest
from openai import AsyncOpenAI

from app.core.run.caller_view import ATTEMPT, DONE, FINISH, USAGE
from app.process.wiring import Runtime
from tests.harness.callers import ReceivedStream, add_key, client_over_socket, open_stream, post_chat, stream_chat
from tests.harness.stand_ins import chat_body
from tests.harness.waiting import until
from tests.stubs import Fail, ProviderStub, Reply, Stall

PIECES = ("Vier ", "mal ", "fünf ", "ist ", "\U0001f600 ", "zwanzig.")
ANSWER = "".join(PIECES)
ASKED = chat_body(stream=True, stream_options={"include_usage": True})


@pytest.fixture
async def stub() -> AsyncIterator[ProviderStub]:
    """The providers, whose worker says its answer piece by piece."""
    async with ProviderStub() as running:
        running.always("alpha", Reply(chunks=PIECES, gap=0.01))
        yield running


@pytest.fixture
async def client(runtime: Runtime) -> AsyncIterator[httpx.AsyncClient]:
    async with client_over_socket(runtime, await add_key(runtime)) as running:
        yield running


async def watch(client: httpx.AsyncClient, run: str, **request: Any) -> ReceivedStream:
    """`GET /v1/runs/{id}/stream` to its end."""
    async with open_stream(client, "GET", f"/v1/runs/{run}/stream", **request) as (stream, events):
        async for _ in events:
            pass
    return stream


def run_of(stream: ReceivedStream) -> str:
    return stream.headers["x-baton-run"]


async def test_every_event_has_a_number_that_the_journal_knows(client: httpx.AsyncClient) -> None:
    stream = await stream_chat(client, ASKED, "one")
    assert stream.text == ANSWER
    assert stream.numbers[0] == 0
    assert stream.numbers == sorted(stream.numbers)
    assert stream.numbers[-4:] == [len(ANSWER), len(ANSWER) + FINISH, len(ANSWER) + USAGE, len(ANSWER) + DONE]
    length = 0
    for number, text in zip(stream.numbers, stream.texts, strict=False):
        length += len(text)
        assert number >= length
        assert not text or number == length


@pytest.mark.long
async def test_a_stream_goes_on_behind_every_event(client: httpx.AsyncClient) -> None:
    whole = await stream_chat(client, ASKED, "one")
    finish, usage = whole.chunks[-2:]
    for number in range(whole.numbers[-1] + 1):
        again = await stream_chat(client, ASKED, "one", last_event_id=str(number))
        watched = await watch(client, run_of(whole), params={"starting_after": number})
        header = await watch(
            client, run_of(whole), params={"starting_after": 0}, headers={"last-event-id": str(number)}
        )
        assert again.chunks == watched.chunks == header.chunks
        assert again.numbers == watched.numbers == header.numbers
        assert again.text == ANSWER[number:]
        assert all(event_number > number for event_number in again.numbers)
        assert (finish in again.chunks) is (number < len(ANSWER) + FINISH)
        assert (usage in again.chunks) is (number < len(ANSWER) + USAGE)
        assert again.done is (number < len(ANSWER) + DONE)
        assert {(chunk["id"], chunk["created"]) for chunk in again.chunks} <= {(finish["id"], finish["created"])}


async def test_a_stream_goes_on_while_the_answer_is_still_coming(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    stub.always("alpha", Reply(chunks=PIECES, gap=0.1))
    first = await stream_chat(client, ASKED, "one", upto=len(PIECES[0]))
    assert not first.done
    second = await stream_chat(client, ASKED, "one", upto=5, last_event_id=str(first.numbers[-1]))
    third = await stream_chat(client, ASKED, "one", last_event_id=str(second.numbers[-1]))
    assert first.text + second.text + third.text == ANSWER
    assert (second.headers["idempotent-replayed"], third.done) == ("true", True)
    assert third.chunks[-1]["usage"]["total_tokens"] > 0
    assert len({chunk["created"] for part in (first, second, third) for chunk in part.chunks}) == 1
    assert len(stub.requests) == 1


async def test_a_late_listener_gets_what_was_said_at_once_and_then_what_is_said(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    goes_on = asyncio.Event()
    stub.always("alpha", Reply(chunks=PIECES, fault=Stall(after=3, seconds=goes_on)))
    first = asyncio.create_task(stream_chat(client, ASKED, "one"))
    [received] = await stub.wait_for(1)
    await until(lambda: received.deltas_sent == 3, what="the worker is in the middle of its answer")
    headers = {"idempotency-key": "one"}
    async with open_stream(client, "POST", "/v1/chat/completions", json=ASKED, headers=headers) as (stream, events):
        async for _ in events:
            if stream.text:
                break
        assert stream.text == "".join(PIECES[:3])
        goes_on.set()
        async for _ in events:
            pass
    assert stream.text == (await first).text == ANSWER
    assert stream.chunks[-1] == (await first).chunks[-1]


async def test_steps_are_told_again_from_the_start_and_not_in_the_middle(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    request_body = ASKED | {"baton": {"stream_steps": True}}
    whole, again = [await stream_chat(client, request_body, "one") for _ in range(2)]
    rest = await stream_chat(client, request_body, "one", last_event_id="5")
    noted = []
    for part in (whole, again, rest):
        noted.append([chunk["baton"] for chunk in part.chunks if "event" in chunk.get("baton", {})])
    assert noted[0] == noted[1]
    assert {"plan.step", "plan.accepted", "call.intended", "step.done"} == {event["event"] for event in noted[0]}
    assert noted[2] == []


@pytest.mark.parametrize("number", ["-1", "x", "1.5", "9" * 16, str(len(ANSWER) + DONE + 1), str(ATTEMPT + 1)])
async def test_a_number_that_was_never_given_out_is_a_400(client: httpx.AsyncClient, number: str) -> None:
    whole = await stream_chat(client, ASKED, "one")
    again = await post_chat(client, ASKED, "one", last_event_id=number)
    watched = await client.get(f"/v1/runs/{run_of(whole)}/stream", headers={"last-event-id": number})
    for reply in (again, watched):
        error = reply.json()["error"]
        assert (reply.status_code, error["type"], error["code"]) == (400, "invalid_request_error", "unknown_event")
    second_reply = await client.get(f"/v1/runs/{run_of(whole)}/stream", params={"starting_after": number})
    assert second_reply.status_code == 400
    assert second_reply.json()["error"]["param"] == "starting_after"


async def test_a_number_of_a_stream_that_never_was_starts_nothing(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    for key in (None, "one"):
        assert (await post_chat(client, ASKED, key, last_event_id="7")).json()["error"]["code"] == "unknown_event"
    assert stub.requests == []
    assert (await stream_chat(client, ASKED, "one", last_event_id="0")).text == ANSWER


async def test_a_failed_run_ends_every_stream_with_its_error(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    stub.always("*", Fail(status=500))
    stub.always("alpha", Fail(status=500))
    whole = await stream_chat(client, ASKED, "one")
    rest = await stream_chat(client, ASKED, "one", last_event_id="0")
    assert whole.error == rest.error
    assert whole.error is not None
    assert not rest.done


async def test_a_collected_run_can_be_streamed_afterwards(client: httpx.AsyncClient) -> None:
    reply = (await post_chat(client, chat_body())).json()
    stream = await watch(client, reply["baton"]["run"])
    assert stream.text == ANSWER == reply["choices"][0]["message"]["content"]
    assert stream.chunks[0]["created"] == reply["created"]
    assert stream.chunks[-1]["baton"] == reply["baton"]
    assert (await watch(client, reply["id"])).text == ANSWER


@pytest.mark.long
async def test_who_may_hear_a_run(stub: ProviderStub, runtime: Runtime, client: httpx.AsyncClient) -> None:
    run = run_of(await stream_chat(client, ASKED, "one"))
    keys = {
        "colleague": await add_key(runtime),
        "auditor": await add_key(runtime, scopes=("runs:read", "audit:read")),
        "stranger": await add_key(runtime, "other", ("runs:read", "audit:read")),
        "admin": await add_key(runtime, "ops", ("admin",)),
        "operator": await add_key(runtime, "ops", ("admin",), all_tenants=True),
    }
    statuses = {}
    for who, key in keys.items():
        async with client_over_socket(runtime, key) as other:
            statuses[who] = (await other.get(f"/v1/runs/{run}/stream")).status_code
    assert statuses == {"colleague": 403, "auditor": 200, "stranger": 404, "admin": 404, "operator": 200}


async def test_a_head_does_not_wait_for_the_end(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    goes_on = asyncio.Event()
    stub.always("alpha", Reply(fault=Stall(after=1, seconds=goes_on)))
    first = asyncio.create_task(stream_chat(client, ASKED))
    await stub.wait_for(1)
    (row,) = (await client.get("/v1/runs")).json()["data"]
    reply = await client.head(f"/v1/runs/{row['id']}/stream")
    goes_on.set()
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert (await first).done


async def test_a_watcher_who_leaves_disturbs_nobody(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    stub.always("alpha", Reply(chunks=PIECES, gap=0.15))
    first = asyncio.create_task(stream_chat(client, ASKED))
    await stub.wait_for(1)
    (row,) = (await client.get("/v1/runs")).json()["data"]
    async with open_stream(client, "GET", f"/v1/runs/{row['id']}/stream") as (stream, events):
        async for _ in events:
            if stream.text:
                break
    assert (await first).text == ANSWER


async def test_the_official_client_reads_numbered_events_and_takes_them_up(runtime: Runtime) -> None:
    key = await add_key(runtime)
    async with (
        client_over_socket(runtime, key) as plain,
        AsyncOpenAI(base_url=f"{plain.base_url}/v1", api_key=key) as official,
    ):
        headers = {"Idempotency-Key": "one"}
        completions: Any = official.chat.completions
        chunks = [chunk async for chunk in await completions.create(**ASKED, extra_headers=headers)]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
        assert chunks[-1].usage.total_tokens > 0
        headers["Last-Event-ID"] = "9"
        rest = [chunk async for chunk in await completions.create(**ASKED, extra_headers=headers)]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in rest if chunk.choices) == ANSWER[9:]
        assert rest[-1].usage == chunks[-1].usage
        with pytest.raises(openai.BadRequestError) as refused:
            await completions.create(**ASKED, extra_headers=headers | {"Last-Event-ID": "999"})
        assert refused.value.code == "unknown_event"
        with pytest.raises(openai.ConflictError) as reused:
            await completions.create(**ASKED | {"temperature": 1}, extra_headers=headers)
        assert reused.value.code == "idempotency_key_reuse"


CONVERSATION = [{"role": "user", "content": "What is 4 times 5?"}]
FORMATS: dict[str, tuple[dict[str, Any], Callable[[Any], str]]] = {
    "/v1/chat/completions": ({"messages": CONVERSATION}, lambda data: data["choices"][0]["delta"].get("content") or ""),
    "/v1/completions": ({"prompt": "What is 4 times 5?"}, lambda data: data["choices"][0]["text"]),
    "/v1/messages": (
        {"messages": CONVERSATION, "max_tokens": 64},
        lambda data: data["delta"]["text"] if data["type"] == "content_block_delta" else "",
    ),
    "/v1/responses": (
        {"input": "What is 4 times 5?"},
        lambda data: data["delta"] if data["type"] == "response.output_text.delta" else "",
    ),
}


def frames(text: str) -> list[tuple[int | None, Any]]:
    """The events of a stream: number and data."""
    numbered_events: list[tuple[int | None, Any]] = []
    for event in text.split("\n\n"):
        lines = dict(line.partition(": ")[::2] for line in event.split("\n") if line and not line.startswith(":"))
        if "data" in lines:
            data = None if lines["data"] == "[DONE]" else orjson.loads(lines["data"])
            numbered_events.append((int(lines["id"]) if "id" in lines else None, data))
    return numbered_events


@pytest.mark.parametrize("path", FORMATS)
@pytest.mark.long
async def test_every_format_goes_on_behind_every_event(client: httpx.AsyncClient, path: str) -> None:
    body, words = FORMATS[path]

    async def ask(after: int | None = None) -> list[tuple[int | None, Any]]:
        headers = {"idempotency-key": "one"} | ({"last-event-id": str(after)} if after is not None else {})
        reply = await client.post(path, json=body | {"model": "baton-mini", "stream": True}, headers=headers)
        assert reply.status_code == 200, reply.text
        return frames(reply.text)

    def text(events: list[tuple[int | None, Any]]) -> str:
        return "".join(words(data) for _, data in events if data is not None)

    whole = await ask()
    assert text(whole) == ANSWER
    numbers = [number for number, _ in whole if number is not None]
    assert numbers == sorted(numbers)
    for number in sorted(set(numbers)):
        events_so_far = [
            (event_number, data) for event_number, data in whole if event_number is not None and event_number <= number
        ]
        rest = await ask(number)
        assert text(events_so_far) + text(rest) == ANSWER, number
        assert all(event_number is None or event_number > number for event_number, _ in rest)
        assert number == numbers[-1] or rest[-1] == whole[-1]


async def test_a_stored_response_is_streamed_by_its_id(client: httpx.AsyncClient) -> None:
    request_body = {"model": "baton-mini", "input": "What is 4 times 5?", "stream": True}
    events = frames((await client.post("/v1/responses", json=request_body)).text)
    (name,) = {data["response"]["id"] for _, data in events if "response" in data}
    again = frames((await client.get(f"/v1/responses/{name}", params={"stream": "true", "starting_after": 9})).text)
    assert again[-1] == events[-1]
    assert "".join(data["delta"] for _, data in again if data["type"] == "response.output_text.delta") == ANSWER[6:]
