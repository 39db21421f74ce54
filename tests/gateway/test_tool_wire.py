"""A tool loop over HTTP: stopped while it waits, sent twice, taken up again, and in any process."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.core.run.caller_view import ATTEMPT
from app.core.run.events import Kind
from app.process.wiring import Runtime
from tests.harness.callers import ReceivedStream, add_key, client_over_socket, open_stream, post_chat, stream_chat
from tests.harness.conversations import look_call, tool_call_reply
from tests.harness.in_process import await_ended_row, events, kinds, pool_text, running_service
from tests.harness.stand_ins import chat_body
from tests.stubs import ProviderStub, Reply, Stall

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


@pytest.fixture
async def client(runtime: Runtime) -> AsyncIterator[httpx.AsyncClient]:
    async with client_over_socket(runtime, await add_key(runtime)) as client:
        yield client


def request_body(**more: Any) -> dict[str, Any]:
    return chat_body("What is it?", tools=TOOLS, **more)


def answer_calls(body: dict[str, Any], message: dict[str, Any], *results: str) -> dict[str, Any]:
    """The next request: the reply's message, and a result for each of its calls."""
    assistant_turn = {"role": "assistant", "content": message["content"], "tool_calls": message["tool_calls"]}
    came = [
        {"role": "tool", "tool_call_id": call["id"], "content": result}
        for call, result in zip(message["tool_calls"], results, strict=True)
    ]
    return body | {"messages": [*body["messages"], assistant_turn, *came]}


def message_of(reply: httpx.Response) -> dict[str, Any]:
    assert reply.status_code == 200, reply.text
    message: dict[str, Any] = reply.json()["choices"][0]["message"]
    return message


async def waiting(stub: ProviderStub, client: httpx.AsyncClient) -> tuple[dict[str, Any], str]:
    """The next request of a run that waits, and the run."""
    stub.script("alpha", tool_call_reply(look_call("a")))
    first = await post_chat(client, request_body())
    return answer_calls(request_body(), message_of(first), "A"), first.headers["x-baton-run"]


async def test_a_run_that_waits_can_be_stopped_at_once(stub: ProviderStub, tmp_path: Path) -> None:
    settings = {"BATON_LEASE_SECONDS": "60"}
    async with (
        running_service(tmp_path, pool_text(stub), settings) as runtime,
        client_over_socket(runtime, await add_key(runtime)) as client,
    ):
        following, run = await waiting(stub, client)
        reply = await client.post(f"/v1/runs/{run}/cancel")
        assert (reply.status_code, reply.json()["state"]) == (200, "cancelled"), "no lease has to run out first"
        assert kinds(await events(runtime, run))[-3:] == [Kind.CANCEL_ASKED, Kind.STEP_SKIPPED, Kind.CANCELLED]
        stub.script("alpha", Reply(chunks=("So be it.",)))
        late = await post_chat(client, following)
    assert (message_of(late)["content"], late.headers["x-baton-run"] != run) == ("So be it.", True)


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"role": "user", "content": "x", "tool_call_id": "a"}, "messages[0].tool_call_id"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "refusal", "refusal": "No."}]}, "messages[0].content[0]"),
        ({"role": "assistant", "content": "x", "name": "a b"}, "messages[0].name"),
    ],
)
async def test_what_came_before_the_results_is_checked_too(
    stub: ProviderStub, client: httpx.AsyncClient, wrong: dict[str, Any], param: str
) -> None:
    """Though the run that goes on has no use for it."""
    body, _ = await waiting(stub, client)
    refused = await post_chat(client, body | {"messages": [wrong, *body["messages"]]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    stub.script("alpha", Reply(chunks=("It is 42.",)))
    assert message_of(await post_chat(client, body))["content"] == "It is 42."


async def test_a_turn_that_is_sent_twice_is_one_turn(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    following, run = await waiting(stub, client)
    stub.script("alpha", tool_call_reply(look_call("b"), header_delay=0.2), Reply(chunks=("42.",)))
    both = await asyncio.gather(*(post_chat(client, following, "second") for _ in range(2)))
    last = answer_calls(following, message_of(both[0]), "B")
    end = await post_chat(client, last, "third")
    again = [await post_chat(client, following, "second"), await post_chat(client, last, "third")]
    assert both[0].content == both[1].content == again[0].content
    assert (end.content, message_of(end)["content"]) == (again[1].content, "42.")
    assert {reply.headers["x-baton-run"] for reply in (*both, end, *again)} == {run}
    assert len({reply.json()["id"] for reply in (both[0], end)}) == 2, "each reply has an id of its own"
    other = await post_chat(client, last | {"temperature": 0.5}, "third")
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reuse")
    assert len(stub.requests) == 3


@pytest.mark.parametrize("streams", [False, True])
async def test_results_that_are_sent_again_are_answered_as_that_request_asks(
    stub: ProviderStub, client: httpx.AsyncClient, streams: bool
) -> None:
    """Some clients ask for a whole reply where a stream broke off."""
    following, run = await waiting(stub, client)
    stub.script("alpha", Reply(chunks=("4", "2."), header_delay=0.3))
    first = asyncio.create_task(post_chat(client, following | {"stream": not streams}))
    await stub.wait_for(2)
    again = await post_chat(client, following | {"stream": streams})
    formats = [reply.headers["content-type"].partition(";")[0] for reply in (await first, again)]
    whole, stream = "application/json", "text/event-stream"
    assert formats == ([whole, stream] if streams else [stream, whole])
    assert {reply.headers["x-baton-run"] for reply in (first.result(), again)} == {run}
    assert len(stub.requests) == 2


async def test_a_streamed_turn_can_be_taken_up_again(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    following, run = await waiting(stub, client)
    words = ("Let ", "me ", "look ", "again.")
    stub.script("alpha", Reply(chunks=words, tool_calls=(look_call("b"),), finish="tool", gap=0.05))
    part = await stream_chat(client, following, "second", upto=7)
    assert part.text.startswith("Let me ")
    rest = await stream_chat(client, following, "second", last_event_id=str(part.numbers[-1]))
    assert part.text + rest.text == "".join(words)
    called = [
        call for chunk in rest.chunks for choice in chunk["choices"] for call in choice["delta"].get("tool_calls", ())
    ]
    assert "".join(chunk["function"]["arguments"] for chunk in called) == '{"q": "b"}'
    assert rest.chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    async with open_stream(client, "GET", f"/v1/runs/{run}/stream") as (stream, its):
        async for _ in its:
            pass
    assert (stream.text, stream.done) == ("".join(words), True)
    assert len(stub.requests) == 2


def pieces(stream: ReceivedStream) -> list[dict[str, Any]]:
    """Return the pieces of tool calls that were received."""
    choices = [choice for chunk in stream.chunks for choice in chunk["choices"]]
    return [piece for choice in choices for piece in choice["delta"].get("tool_calls", ())]


async def test_a_stream_broken_within_a_call_goes_on_with_the_whole_of_it(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    """Pieces of calls have no number: who comes back behind the words gets no word twice and all calls anew, under the
    same ids, while the worker still speaks and after its end."""
    following, _ = await waiting(stub, client)
    script = tool_call_reply(look_call("b"), words="Hm. ", fault=Stall(after=2, seconds=1.0))
    stub.script("alpha", script)
    request = {"json": following | {"stream": True}, "headers": {"idempotency-key": "second"}}
    async with open_stream(client, "POST", "/v1/chat/completions", **request) as (stream, events):
        async for _ in events:
            if len(pieces(stream)) == 2:
                break
    first_pieces = pieces(stream)
    behind = str(stream.numbers[-1])
    assert (stream.text, int(behind) % ATTEMPT, len(first_pieces[1]["function"]["arguments"])) == ("Hm. ", 4, 5)
    for _ in ("while it speaks", "afterwards"):
        rest = await stream_chat(client, following, "second", last_event_id=behind)
        head, *more = pieces(rest)
        assert (rest.text, head["id"], head["function"]["name"]) == ("", first_pieces[0]["id"], "look")
        arguments = "".join(piece["function"]["arguments"] for piece in (head, *more))
        assert (arguments, rest.done) == ('{"q": "b"}', True)
        assert rest.chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert len(stub.requests) == 2


async def test_a_call_that_is_cut_off_while_it_streams_ends_the_reply(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    """No other worker is asked, though the reply has no answer: its caller has received a part of the call."""
    stub.script("alpha", Reply(chunks=(), tool_calls=(look_call("a"),), finish="length"))
    cut = await stream_chat(client, request_body())
    assert [piece["function"]["arguments"] for piece in pieces(cut)] == ["", '{"q":']
    assert (cut.chunks[-1]["choices"][0]["finish_reason"], cut.done) == ("length", True)
    assert [request.model for request in stub.requests] == ["alpha"]


@pytest.mark.long
async def test_results_may_come_to_another_process(stub: ProviderStub, tmp_path: Path) -> None:
    """Two processes over one database, without a queue between them: there, back to the first one, which remembers the
    run as it let go of it, and to a third one when both are gone."""
    async with (
        running_service(tmp_path, pool_text(stub)) as first,
        running_service(tmp_path, pool_text(stub)) as another,
    ):
        key = await add_key(first)
        async with client_over_socket(first, key) as here, client_over_socket(another, key) as there:
            following, run = await waiting(stub, here)
            stub.script(
                "alpha", tool_call_reply(look_call("b")), tool_call_reply(look_call("c")), Reply(chunks=("42.",))
            )
            second = answer_calls(following, message_of(await post_chat(there, following)), "B")
            last = answer_calls(second, message_of(await post_chat(here, second)), "C")
    async with running_service(tmp_path, pool_text(stub)) as third, client_over_socket(third, key) as client:
        end = await post_chat(client, last)
    assert (message_of(end)["content"], end.headers["x-baton-run"]) == ("42.", run)
    contents = [
        message["content"] for message in stub.requests_for("alpha")[-1].json["messages"] if message["role"] == "tool"
    ]
    assert contents == ["A", "B", "C"]


async def test_a_caller_that_leaves_in_a_later_turn_stops_the_run(
    stub: ProviderStub, runtime: Runtime, client: httpx.AsyncClient
) -> None:
    following, run = await waiting(stub, client)
    stub.script("alpha", Reply(chunks=("Let ", "me ", "think."), gap=5.0))
    await stream_chat(client, following, upto=3)
    row = await await_ended_row(runtime.context.store, run)
    assert row.state == "cancelled"
