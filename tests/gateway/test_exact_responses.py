"""Every kind of reply and event of `/v1/responses`, against the official types and the published description."""

import json
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.response_item_list import ResponseItemList

from app.core.message.chat import ToolCall as MadeCall
from app.core.message.chat import ToolDelta
from app.engine.delivery.messages import AnswerPart, end_with_error
from app.errors import LeaseLost
from app.gateway.responses.reply import Events, Subject
from tests.harness.exact_replies import OURS, assert_published_schema, exactly
from tests.harness.stand_ins import TASK, state_of, turn_end
from tests.stubs import Fail, ProviderStub, Reply, Truncate
from tests.stubs.script import ToolCall, Usage

PUBLISHED = OURS | {"name"}
"""`function_call_arguments.done` has the function's name in the published description, not in the client's type."""
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
ASKED: dict[str, Any] = {"model": "baton-mini", "input": "What is 2 + 2?"}
FORM = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": False}
BEGIN = ["created", "in_progress"]
MESSAGE = ["output_item.added", "content_part.added"]
END = ["content_part.done", "output_item.done"]
TEXT = [*MESSAGE, "output_text.delta", "output_text.done", *END]
CALL = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
CALLS = (ToolCall("add", '{"a": 2}', "c1"), ToolCall("add", '{"a": 3}', "c2"))

REPLIES: dict[str, tuple[Reply, list[str]]] = {
    "plain": (Reply(chunks=("Fo", "ur", ".")), [*TEXT, "completed"]),
    "empty": (Reply(chunks=()), [*MESSAGE, "output_text.done", *END, "completed"]),
    "cut off": (Reply(chunks=("Fo",), finish="length"), [*TEXT, "incomplete"]),
    "filtered": (Reply(chunks=("Fo",), finish="content_filter"), [*TEXT, "incomplete"]),
    "refusing": (
        Reply(refusal="I will not say."),
        [*MESSAGE, "refusal.delta", "refusal.done", *END, "completed"],
    ),
    "with reasoning": (
        Reply(reasoning=("Hm.",), usage=Usage(input=50, output=40, cached=30, reasoning=25)),
        [*TEXT, "completed"],
    ),
    "without usage": (Reply(usage=None), [*TEXT, "completed"]),
    "not ASCII": (Reply(chunks=("\U0001f600", "\u2028", '"\\', "\x00")), [*TEXT, "completed"]),
    "calling": (Reply(chunks=(), tool_calls=CALLS[:1], finish="tool"), [*CALL, "completed"]),
    "saying and calling": (
        Reply(chunks=("Let me see.",), tool_calls=CALLS, finish="tool"),
        [*TEXT, *CALL, *CALL, "completed"],
    ),
}


def exact_events(text: str, *, broken: bool = False) -> list[dict[str, Any]]:
    """The events of a stream, each OpenAI's, its number above the one before, its `id:` and `event:` as in its data.

    What says that the stream is `broken` has the number of the event before, which is where it can be taken up.
    """
    events_of_text = []
    for frame in text.removesuffix("\n\n").split("\n\n"):
        lines = dict(line.partition(": ")[::2] for line in frame.split("\n"))
        if "data" not in lines:
            continue
        event = json.loads(lines["data"])
        exactly(ResponseStreamEvent, event, PUBLISHED)
        assert_published_schema("ResponseStreamEvent", event)
        assert lines["event"] == event["type"]
        assert int(lines.get("id", event["sequence_number"])) == event["sequence_number"]
        events_of_text.append(event)
    numbers = [event["sequence_number"] for event in events_of_text]
    assert numbers[: -1 if broken else None] == sorted(set(numbers)), numbers
    return events_of_text


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """Their types, those that follow each other once."""
    types = [event["type"].removeprefix("response.") for event in events]
    return [kind for place, kind in enumerate(types) if place == 0 or kind != types[place - 1]]


def check_told(events: list[dict[str, Any]], output: list[dict[str, Any]]) -> None:
    """Check that the events of each item add up to the item."""
    done_events = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["item"] for event in done_events] == output
    assert [event["output_index"] for event in done_events] == list(range(len(output)))
    for place, item in enumerate(output):
        own = [event for event in events if event.get("output_index") == place]
        assert {event["item_id"] for event in own if "item_id" in event} <= {item["id"]}
        text = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        part = item["content"][0] if item["type"] == "message" else item
        assert text == part.get("text", part.get("refusal", part.get("arguments")))


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("name", REPLIES)
async def test_replies_and_events_are_openais(
    stub: ProviderStub, client: httpx.AsyncClient, name: str, logprobs: bool
) -> None:
    reply, order = REPLIES[name]
    stub.always("*", reply)
    request_body = ASKED | {"tools": [ADD], "instructions": "Be brief.", "metadata": {"a": "b"}}
    request_body |= {"top_logprobs": 2} if logprobs else {}
    whole = (await client.post("/v1/responses", json=request_body)).json()
    exactly(Response, whole)
    assert_published_schema("Response", whole)
    events = exact_events((await client.post("/v1/responses", json=request_body | {"stream": True})).text)
    assert kinds(events) == [*BEGIN, *order]
    last = events[-1]["response"]
    check_told(events, last["output"])
    own = ("id", "created_at", "completed_at", "baton", "output")
    assert {n: v for n, v in last.items() if n not in own} == {n: v for n, v in whole.items() if n not in own}
    assert [item.get("content") for item in last["output"]] == [item.get("content") for item in whole["output"]]
    second_body = (await client.get(f"/v1/responses/{last['id']}")).json()
    assert second_body == last
    for after in (0, 2, events[len(events) // 2]["sequence_number"], events[-2]["sequence_number"]):
        query = {"stream": "true", "starting_after": str(after)}
        rest = exact_events((await client.get(f"/v1/responses/{last['id']}", params=query)).text)
        assert rest[-1] == events[-1]
        assert all(event["sequence_number"] > after for event in rest)
        missed = [event for event in events if event["sequence_number"] > after]
        assert kinds(rest) == kinds(missed)
        assert text_of(rest) == text_of(missed)


@pytest.mark.long
async def test_the_phase_of_a_message_says_whether_calls_follow(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    """Known from the start where no tool is on offer, and else with the end of the message."""
    for reply, tools, phases in (
        (REPLIES["plain"][0], [], ["final_answer", "final_answer"]),
        (REPLIES["plain"][0], [ADD], [None, "final_answer"]),
        (REPLIES["saying and calling"][0], [ADD], [None, "commentary"]),
    ):
        stub.always("alpha", reply)
        whole = (await client.post("/v1/responses", json=ASKED | {"tools": tools})).json()
        events = exact_events((await client.post("/v1/responses", json=ASKED | {"tools": tools, "stream": True})).text)
        item_phases = [event["item"]["phase"] for event in events if event.get("item", {}).get("type") == "message"]
        assert (item_phases, whole["output"][0]["phase"]) == (phases, phases[-1])
        again = [item | {"phase": "final_answer"} for item in whole["output"] if item["type"] == "message"]
        assert (await client.post("/v1/responses", json=ASKED | {"input": again})).status_code == 200
    odd = [{"role": "assistant", "content": "Hm.", "phase": "thinking"}]
    reply = await client.post("/v1/responses", json=ASKED | {"input": odd})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (400, "input[0].phase", "invalid_value")
    assert "'commentary' or 'final_answer'" in error["message"]


@pytest.mark.parametrize("words", [(), ("Hm.",)])
async def test_a_call_that_is_cut_off_is_incomplete(
    stub: ProviderStub, client: httpx.AsyncClient, words: tuple[str, ...]
) -> None:
    """It is no call that a client could carry out, and the response does not have it."""
    stub.always("alpha", Reply(chunks=words, tool_calls=CALLS[:1], finish="length"))
    events = exact_events((await client.post("/v1/responses", json=ASKED | {"tools": [ADD], "stream": True})).text)
    ended = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [(item["type"], item["status"]) for item in ended] == [
        *(("message", "completed") for _ in words),
        ("function_call", "incomplete"),
    ]
    response = events[-1]["response"]
    assert (response["status"], [item["type"] for item in response["output"]]) == ("incomplete", ["message"])
    for event in events[:-1]:  # the call is not journaled, and the end comes whatever was received of it
        query = {"stream": "true", "starting_after": str(event["sequence_number"])}
        rest = exact_events((await client.get(f"/v1/responses/{response['id']}", params=query)).text)
        assert (rest[-1]["type"], rest[-1]["response"]) == ("response.incomplete", response)


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event.get("delta", "") for event in events)


def numbers_of(events: list[dict[str, Any]]) -> list[int]:
    return [event["sequence_number"] for event in events]


async def test_the_words_of_a_second_attempt_are_numbered_above_the_first(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    stub.script("alpha", Fail(status=500))
    stub.script("beta", Reply(chunks=("Fo", "ur", ".")))
    events = exact_events((await client.post("/v1/responses", json=ASKED | {"stream": True})).text)
    assert kinds(events) == [*BEGIN, *TEXT, "completed"]
    assert 2**26 < events[2]["sequence_number"] < events[-1]["sequence_number"] < 2**31, "as all clients can read it"
    last = events[-1]["response"]
    for place in (1, 2, 4, len(events) - 2):
        query = {"stream": "true", "starting_after": str(events[place]["sequence_number"])}
        rest = exact_events((await client.get(f"/v1/responses/{last['id']}", params=query)).text)
        assert rest[-1] == events[-1]
        assert text_of(rest) == text_of(events[place + 1 :])


async def test_each_response_of_a_loop_of_calls_counts_from_its_own_start(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    """Were all turns of a long run counted on, clients that read 32 bits could not follow."""
    calling = Reply(chunks=("Hm", "."), tool_calls=CALLS[:1], finish="tool")
    stub.script("alpha", calling, Fail(status=500), calling, Reply(chunks=("Fo", "ur", ".")))
    asked = ASKED | {"tools": [ADD], "stream": True, "baton": {"pool": {"pin": "alpha"}}}
    streams = [exact_events((await client.post("/v1/responses", json=asked)).text)]
    while (call := streams[-1][-1]["response"]["output"][-1])["type"] == "function_call":
        result = [{"type": "function_call_output", "call_id": call["call_id"], "output": "4"}]
        body = asked | {"input": result, "previous_response_id": streams[-1][-1]["response"]["id"]}
        streams.append(exact_events((await client.post("/v1/responses", json=body)).text))
    ids = [events[-1]["response"]["id"] for events in streams]
    assert ids == [ids[0], f"{ids[0]}_1", f"{ids[0]}_2"]
    numbers = [numbers_of(events) for events in streams]
    assert [own[:4] for own in numbers] == [[0, 1, 2, 3], [0, 1, 2**26 + 2, 2**26 + 3], [0, 1, 2, 3]]
    for own, events in zip(numbers, streams, strict=True):
        assert own == sorted(own)
        assert own[-1] < own[2] + 2**16
        for place in range(len(events) - 1):
            query = {"stream": "true", "starting_after": str(own[place])}
            rest = await client.get(f"/v1/responses/{events[-1]['response']['id']}", params=query)
            assert rest.status_code == 200, rest.text
            assert exact_events(rest.text)[-1] == events[-1]
            later = [event for event in events if event["sequence_number"] > own[place]]
            assert text_of(exact_events(rest.text)) == text_of(later)
    query = {"stream": "true", "starting_after": str(2**26 + 4)}
    unknown = await client.get(f"/v1/responses/{ids[2]}", params=query)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (400, "unknown_event")


async def test_every_option_is_told_back_in_its_form(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    stub.always("alpha", Reply(chunks=(), tool_calls=CALLS[:1], finish="tool"))
    request_body = ASKED | {
        "tools": [ADD],
        "text": {"format": FORM, "verbosity": "low"},
        "reasoning": {"effort": "low"},
    }
    request_body |= {
        "tool_choice": {"type": "function", "name": "add"},
        "temperature": 0.5,
        "top_p": 0.5,
        "user": "ann",
    }
    request_body |= {"max_output_tokens": 64, "parallel_tool_calls": False, "background": True, "top_logprobs": 1}
    under_way = (await client.post("/v1/responses", json=request_body)).json()
    exactly(Response, under_way)
    assert_published_schema("Response", under_way)
    query = {"stream": "true"}
    events = exact_events((await client.get(f"/v1/responses/{under_way['id']}", params=query)).text)
    assert (under_way["output"], events[-1]["type"]) == ([], "response.completed")
    differs = {"status", "output", "usage", "baton", "completed_at"}
    over = events[-1]["response"]
    assert {name: over[name] for name in over if name not in differs} == {
        name: under_way[name] for name in under_way if name not in differs
    }
    assert over["completed_at"] >= over["created_at"]


async def test_a_failure_is_openais(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    stub.always("alpha", Reply(chunks=("Fo", "ur"), gap=0.01, fault=Truncate(after=1)))
    pinned = {"baton": {"pool": {"pin": "alpha"}}}
    events = exact_events((await client.post("/v1/responses", json=ASKED | pinned | {"stream": True})).text)
    assert events[-1]["type"] == "response.failed"
    failed = events[-1]["response"]
    assert (failed["status"], failed["error"]["code"], failed["completed_at"]) == ("failed", "server_error", None)
    assert (await client.get(f"/v1/responses/{failed['id']}")).json() == failed
    second_reply = await client.get(f"/v1/responses/{failed['id']}", params={"stream": "true", "starting_after": "1"})
    assert kinds(exact_events(second_reply.text)) == ["failed"]


async def test_a_budget_that_is_used_up_is_no_reason_to_send_the_request_again(client: httpx.AsyncClient) -> None:
    """Codex repeats a response that failed with `rate_limit_exceeded`, and none with this code, which the published
    description does not list."""
    request_body = ASKED | {"stream": True, "baton": {"budget": {"usd": 0.000001}}}
    last = (await client.post("/v1/responses", json=request_body)).text.splitlines()[-2]
    event = json.loads(last.removeprefix("data: "))
    error = event["response"]["error"]
    assert (event["type"], error["code"]) == ("response.failed", "insufficient_quota")
    assert "budget" in error["message"]


async def test_a_cancelled_response_is_openais(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    stub.always("alpha", Reply(header_delay=20.0))
    body = (await client.post("/v1/responses", json=ASKED | {"background": True})).json()
    reply_body = (await client.post(f"/v1/responses/{body['id']}/cancel")).json()
    exactly(Response, reply_body)
    assert_published_schema("Response", reply_body)
    assert (reply_body["status"], reply_body["error"], reply_body["output"]) == ("cancelled", None, [])


def test_text_behind_a_call_comes_with_the_whole_response() -> None:
    events = Events(Subject(state_of("run_1"), TASK, TASK))
    frames = events.opening()
    for part in (
        AnswerPart("", calls=(ToolDelta(0, "call_1", "add", '{"a":'),)),
        AnswerPart("\n", at=1),
        AnswerPart("", at=1, calls=(ToolDelta(0, arguments="2}"), ToolDelta(1, "call_2", "add", "{}"))),
    ):
        frames += events.answer_part(part)
    calls = (MadeCall("call_1", "add", '{"a":2}'), MadeCall("call_2", "add", "{}"))
    frames += events.closing(replace(turn_end("run_1", "\n"), finish="tool_calls", calls=calls))
    told = exact_events(frames.decode())
    assert kinds(told) == [*BEGIN, *CALL, *CALL, "completed"]
    done_events = [event for event in told if event["type"] == "response.output_item.done"]
    assert [(event["output_index"], event["item"]["call_id"]) for event in done_events] == [
        (0, "call_1"),
        (1, "call_2"),
    ]
    assert [item["type"] for item in told[-1]["response"]["output"]] == ["message", "function_call", "function_call"]


@pytest.mark.parametrize("after", [None, 5])
def test_a_stream_whose_plan_waits_goes_on_behind_the_text_that_it_sent(after: int | None) -> None:
    """A plan in another step may wait for its approval when the answering step has spoken."""
    events = Events(Subject(state_of("run_1"), TASK, TASK), after)
    text = events.opening() + events.answer_part(AnswerPart("Four", at=4))
    waiting = end_with_error(replace(state_of("run_1"), state="awaiting_approval", end=None), LeaseLost())
    last = exact_events((text + events.closing(waiting)).decode(), broken=True)
    assert [event["sequence_number"] for event in last[-2:]] == [7, 7]


def test_a_stream_that_breaks_says_so_in_openais_event() -> None:
    of = Subject(state_of("run_1"), TASK, TASK)
    events = Events(of)
    head = events.opening()
    last = events.failure(LeaseLost("Let go."), end_with_error(state_of("run_1"), LeaseLost()))
    broken = exact_events((head + last).decode(), broken=True)
    assert broken[-1] == {
        "type": "error",
        "message": "Let go.",
        "param": None,
        "code": LeaseLost.code,
        "sequence_number": 1,
    }


async def test_lists_and_deletions_are_openais(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    stub.always("alpha", Reply(chunks=("Let me see.",), tool_calls=CALLS[:1], finish="tool"))
    history: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Hello", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c0", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c0", "output": "4"},
        {"role": "user", "content": "Go on."},
    ]
    body = (await client.post("/v1/responses", json=ASKED | {"input": history, "tools": [ADD]})).json()
    listed = (await client.get(f"/v1/responses/{body['id']}/input_items", params={"order": "asc"})).json()
    exactly(ResponseItemList, listed)
    assert_published_schema("ResponseItemList", listed)
    assert [item["type"] for item in listed["data"]] == [item.get("type", "message") for item in history]
    call = body["output"][-1]
    result = [{"type": "function_call_output", "call_id": call["call_id"], "output": "4"}]
    stub.always("alpha", Reply(chunks=("Four.",)))
    second = (
        await client.post("/v1/responses", json=ASKED | {"input": result, "previous_response_id": body["id"]})
    ).json()
    listed = (await client.get(f"/v1/responses/{second['id']}/input_items")).json()
    exactly(ResponseItemList, listed)
    assert_published_schema("ResponseItemList", listed)
    assert [item["call_id"] for item in listed["data"]] == [call["call_id"]]
    gone = (await client.delete(f"/v1/responses/{body['id']}")).json()
    assert gone == {"id": body["id"], "object": "response", "deleted": True}


async def test_errors_are_openais(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    stub.always("alpha", Fail(status=401))
    replies = [
        await client.post("/v1/responses", json=ASKED | {"baton": {"pool": {"pin": "alpha"}}}),
        await client.post("/v1/responses", json=ASKED | {"model": "nothing"}),
        await client.post("/v1/responses", json=ASKED | {"conversation": "conv_1"}),
        await client.get("/v1/responses/resp_nothing"),
        await client.delete("/v1/responses/resp_run_1"),
        await client.post("/v1/responses/resp_run_1/cancel"),
        await client.get("/v1/responses/resp_run_1/input_items"),
        await client.put("/v1/responses"),
    ]
    assert [reply.status_code for reply in replies] == [502, 404, 400, 404, 404, 404, 404, 405]
    for error in (reply.json() for reply in replies):
        assert_published_schema("ErrorResponse", error)
        assert set(error) == {"error"}
        assert set(error["error"]) == {"message", "type", "param", "code"}
