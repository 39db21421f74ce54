"""Callers of one process hear runs that another one drives: with a queue between them, without one, and after its end.

Two houses over one database stand for two processes.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from app.engine.delivery import followers
from app.process.wiring import Runtime
from tests.harness.callers import ReceivedStream, add_key, client_over_socket, post_chat, stream_chat
from tests.harness.in_process import events, kinds, pool_text, running_service
from tests.harness.stand_ins import chat_body
from tests.harness.waiting import until
from tests.stubs import ProviderStub, Reply, Stall

pytestmark = pytest.mark.usefixtures("patient_redis")

PIECES = ("Vier ", "mal ", "fünf ", "ist ", "zwanzig", ".")
ANSWER = "".join(PIECES)
ASKED = chat_body(stream=True, baton={"on_disconnect": "finish", "stream_steps": True})
LEASE = 0.8
PACE_SECONDS = 0.1
"""The time between two kills of connections."""
NEVER = 3600.0
"""Seconds between two looks into the journal, where words are to arrive without one."""


@dataclass
class Two:
    """Two processes; the second one executes the steps."""

    driving: Runtime
    other: Runtime
    here: httpx.AsyncClient
    there: httpx.AsyncClient
    stack: AsyncExitStack

    async def end_driving(self) -> None:
        """The first process is no more."""
        await self.stack.aclose()


@asynccontextmanager
async def two(folder: Path, stub: ProviderStub, redis: str | None) -> AsyncIterator[Two]:
    settings = {"BATON_LEASE_SECONDS": str(LEASE)} | ({"BATON_REDIS_URL": redis} if redis else {})
    async with (
        running_service(folder, pool_text(stub), settings) as other,
        AsyncExitStack() as stack,
    ):
        driving = await stack.enter_async_context(
            running_service(folder, pool_text(stub), settings, dispatches=not redis)
        )
        key = await add_key(other)
        here = await stack.enter_async_context(client_over_socket(driving, key))
        async with client_over_socket(other, key) as there:
            yield Two(driving, other, here, there, stack)


async def begin(both: Two, stub: ProviderStub) -> asyncio.Task[ReceivedStream]:
    """A stream at the first process, which has come to the worker's silence."""
    first = asyncio.create_task(stream_chat(both.here, ASKED, "one"))
    await stub.wait_for(1)
    await until(lambda: stub.requests[0].deltas_sent >= 3, what="the worker is in the middle of its answer")
    return first


async def listen(client: httpx.AsyncClient) -> ReceivedStream:
    """Send the request to another process, and leave once a first word has come."""
    return await stream_chat(client, ASKED, "one", upto=1)


async def read_events(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream of a response."""
    async for line in reply.aiter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


@pytest.mark.integration
@pytest.mark.long
async def test_live_words_reach_the_callers_of_another_process(
    stub: ProviderStub, tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker goes on when all have heard its first words. Nobody learns of these or of the end by looking."""
    monkeypatch.setattr(followers, "POLL_SECONDS", NEVER)
    goes_on = asyncio.Event()
    stub.always("alpha", Reply(chunks=PIECES, fault=Stall(after=3, seconds=goes_on)))
    async with two(tmp_path, stub, redis_url) as both:
        first = await begin(both, stub)
        others = [asyncio.create_task(stream_chat(both.there, ASKED, "one")) for _ in range(2)]
        early = await listen(both.there)
        assert early.text == "".join(PIECES[:3])
        assert not first.done()
        rest = asyncio.create_task(stream_chat(both.there, ASKED, "one", last_event_id=str(early.numbers[-1])))
        goes_on.set()
        streams = [await first, *[await other for other in others]]
        assert early.text + (await rest).text == ANSWER
    assert {stream.text for stream in streams} == {ANSWER}
    assert all(stream.chunks[-1] == streams[0].chunks[-1] for stream in [*streams, rest.result()])
    notes = []
    for received_stream in streams:
        notes.append([chunk["baton"]["event"] for chunk in received_stream.chunks if "event" in chunk.get("baton", {})])
    assert notes[0] == notes[1] == notes[2]
    assert len(stub.requests) == 1


@pytest.mark.long
async def test_without_a_queue_between_them_the_journal_tells_it_all(stub: ProviderStub, tmp_path: Path) -> None:
    stub.always("alpha", Reply(chunks=PIECES, fault=Stall(after=3, seconds=1.0)))
    async with two(tmp_path, stub, None) as both:
        first = await begin(both, stub)
        followed, whole = await asyncio.gather(
            stream_chat(both.there, ASKED, "one"), post_chat(both.there, ASKED | {"stream": True}, "one")
        )
        assert followed.text == (await first).text == ANSWER
        assert followed.chunks[-1] == (await first).chunks[-1]
        assert b"[DONE]" in whole.content
    assert len(stub.requests) == 1


@pytest.mark.integration
@pytest.mark.long
async def test_an_emptied_or_frozen_queue_costs_time_and_no_words(
    stub: ProviderStub, tmp_path: Path, redis_url: str
) -> None:
    stub.always("alpha", Reply(chunks=PIECES * 20, gap=0.02))
    async with two(tmp_path, stub, redis_url) as both, Redis.from_url(redis_url) as redis:
        first = asyncio.create_task(stream_chat(both.here, ASKED, "one"))
        await stub.wait_for(1)
        other = asyncio.create_task(stream_chat(both.there, ASKED, "one"))
        for _ in range(10):
            await asyncio.sleep(PACE_SECONDS)
            await redis.client_kill_filter(_type="pubsub")
        assert (await other).text == (await first).text == ANSWER * 20
    assert len(stub.requests) == 1


@pytest.mark.integration
@pytest.mark.long
async def test_a_stream_outlives_the_process_that_drives_its_run(
    stub: ProviderStub, tmp_path: Path, redis_url: str
) -> None:
    """Its words come from a dispatcher that goes on, to the process that takes the run over."""
    stub.always("alpha", Reply(chunks=PIECES * 20, gap=0.05))
    async with two(tmp_path, stub, redis_url) as both:
        first = await begin(both, stub)
        listener = asyncio.create_task(stream_chat(both.there, ASKED, "one"))
        await listen(both.there)
        await both.end_driving()
        with pytest.raises((httpx.HTTPError, AssertionError)):
            assert (await first).done
        stream = await listener
        journal = kinds(await events(both.other, stream.headers["x-baton-run"]))
    assert (stream.text, stream.error, stream.done) == (ANSWER * 20, None, True)
    assert len([text for text in stream.texts if text]) > 40, "words came one by one, before the takeover and after it"
    assert len(stub.requests) == 1
    assert journal.count(journal[0]) == 1


@pytest.mark.integration
@pytest.mark.long
async def test_whoever_comes_after_the_driver_died_hears_live_words(
    stub: ProviderStub, tmp_path: Path, redis_url: str
) -> None:
    stub.always("alpha", Reply(chunks=PIECES * 20, gap=0.05))
    async with two(tmp_path, stub, redis_url) as both:
        first = await begin(both, stub)
        await both.end_driving()
        first.cancel()
        await until(lambda: len(both.other.drivers) == 1, what="the other process has taken the run over")
        early = await listen(both.there)
        rest = await stream_chat(both.there, ASKED, "one", last_event_id=str(early.numbers[-1]))
    assert early.text + rest.text == ANSWER * 20
    assert len(rest.texts) > 20


@pytest.mark.long
async def test_words_of_a_lost_attempt_are_followed_by_none_of_the_next_one_also_in_responses(
    stub: ProviderStub, tmp_path: Path
) -> None:
    """The stream is taken up while the attempt is in progress, by a process that hears nothing of its words."""
    lost = Reply(chunks=PIECES, fault=Stall(after=3, seconds=NEVER))
    stub.script("alpha", lost, Reply(chunks=("Zwan", "zig."), gap=0.1))
    asked = {"model": "baton-mini", "input": "4 * 5?", "background": True}
    async with two(tmp_path, stub, None) as both:
        response = (await both.here.post("/v1/responses", json=asked)).json()["id"]
        path, texts = f"/v1/responses/{response}?stream=true", list[str]()
        async with both.here.stream("GET", path) as reply:
            async for event in read_events(reply):
                if event["type"] == "response.output_text.delta":
                    texts.append(event["delta"])
                if "".join(texts) == "".join(PIECES[:3]):
                    break
        async with both.there.stream("GET", f"{path}&starting_after={event['sequence_number']}") as reply:
            await both.end_driving()
            rest = [event async for event in read_events(reply)]
        whole = [event async for event in read_events(await both.there.get(path))]
    assert [(event["type"], event.get("code")) for event in rest] == [("error", "answer_changed")]
    assert whole[-1]["response"]["output"][0]["content"][0]["text"] == "Zwanzig."
