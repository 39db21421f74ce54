"""Answers that must have a form: native where a worker can be held to it, else asked for, checked and repaired once."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from app.core.message.chat import Form, Message, Task, Text
from app.core.run.events import Kind
from app.process.wiring import Runtime
from tests.harness.in_process import bodies_of, events, finish, order, plan, pool_text, running_service
from tests.stubs import ProviderStub, Reply

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
STRICT, LOOSE = Form(POINT, strict=True), Form(POINT)
GOOD, BAD = Reply(chunks=('{"x"', ": 7}")), Reply(chunks=("Seven", "!"))


def order_of(runtime: Runtime, form: Form, tier: str = "baton-mini", **more: Any) -> Any:
    """An order whose answer must have this form."""
    return order(runtime, tier, task=Task((Message("user", (Text("Where?"),)),), form=form), **more)


async def test_a_strict_schema_is_the_providers_to_keep(stub: ProviderStub, runtime: Runtime) -> None:
    stub.always("alpha", GOOD)
    outcome = await finish(await runtime.runs.start(order_of(runtime, STRICT)))
    assert json.loads(outcome.ended.answer) == {"x": 7}
    [received] = stub.requests
    assert received.json["response_format"]["json_schema"] == {"name": "answer", "strict": True, "schema": POINT}
    assert len(received.json["messages"]) == 1


async def test_an_answer_off_form_is_repaired_once_with_its_faults(stub: ProviderStub, runtime: Runtime) -> None:
    stub.script("alpha", BAD, GOOD)
    outcome = await finish(await runtime.runs.start(order_of(runtime, LOOSE)))
    assert json.loads(outcome.ended.answer) == {"x": 7}
    first, second = stub.requests_for("alpha")
    assert "JSON schema" in first.json["messages"][-1]["content"]
    contents = [message["content"] for message in second.json["messages"]]
    assert contents[-2] == "Seven!"
    assert "not JSON" in contents[-1]
    calls = [event.body for event in await events(runtime, outcome.ended.state.run) if event.kind is Kind.CALL_INTENDED]
    assert calls[1]["repairs"] == calls[0]["call"]


async def test_a_whole_answer_off_form_without_usage_costs_what_it_likely_cost(
    stub: ProviderStub, runtime: Runtime
) -> None:
    stub.script("alpha", replace(BAD, usage=None), GOOD)
    outcome = await finish(await runtime.runs.start(order_of(runtime, LOOSE)))
    first, _ = [body["usage"] for body in bodies_of(await events(runtime, outcome.ended.state.run), Kind.CALL_FINISHED)]
    assert (first["output"], first["estimated"]) == (2, True)


async def test_another_worker_is_asked_when_the_repair_fails(stub: ProviderStub, runtime: Runtime) -> None:
    stub.always("alpha", BAD)
    stub.always("beta", GOOD)
    outcome = await finish(await runtime.runs.start(order_of(runtime, LOOSE)))
    assert json.loads(outcome.ended.answer) == {"x": 7}
    assert "Seven!" not in str(stub.requests_for("beta")[0].json)


@pytest.mark.parametrize("streams", [True, False])
async def test_a_run_without_a_valid_answer_fails_clearly(stub: ProviderStub, runtime: Runtime, streams: bool) -> None:
    stub.always("*", BAD)
    outcome = await finish(await runtime.runs.start(order_of(runtime, LOOSE, streams=streams)))
    assert outcome.ended.error is not None
    assert (outcome.ended.error.status, outcome.ended.error.public_code) == (502, "answer_off_form")
    assert outcome.texts == []


async def test_a_stream_is_held_back_until_its_form_is_known(stub: ProviderStub, runtime: Runtime) -> None:
    stub.script("alpha", BAD, GOOD)
    outcome = await finish(await runtime.runs.start(order_of(runtime, LOOSE, streams=True)))
    assert "".join(outcome.texts) == outcome.ended.answer == '{"x": 7}'


async def test_what_a_constrained_worker_says_is_told_as_it_comes(stub: ProviderStub, runtime: Runtime) -> None:
    stub.always("alpha", Reply(chunks=('{"x"', ": 7}"), gap=0.1))
    outcome = await finish(await runtime.runs.start(order_of(runtime, STRICT, streams=True)))
    assert len(outcome.texts) > 1


OPEN = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "string"}}, "required": ["x"]}


@pytest.mark.parametrize(
    ("form", "live"),
    [
        (Form(OPEN), True),
        (STRICT, True),
        (Form(POINT | {"properties": {"x": {"oneOf": [{"type": "integer"}]}}}), False),
        (Form(), False),
    ],
)
async def test_open_schemas_are_kept_where_the_operator_says_so(
    stub: ProviderStub, tmp_path: Path, form: Form, live: bool
) -> None:
    """The worker is told the schema in words all the same: its server shows it none. Nothing else is relayed."""
    pool = pool_text(stub).replace("options = {", 'options = { open_schemas = "true",')
    stub.always("alpha", Reply(chunks=('{"x"', ": 7}"), gap=0.1))
    async with running_service(tmp_path, pool) as runtime:
        outcome = await finish(await runtime.runs.start(order_of(runtime, form, streams=True)))
    assert (len(outcome.texts) > 1, "".join(outcome.texts)) == (live, '{"x": 7}')
    assert len(stub.requests[0].json["messages"]) == (1 if form is STRICT else 2)


async def test_an_open_answer_off_form_ends_the_stream(stub: ProviderStub, tmp_path: Path) -> None:
    pool = pool_text(stub).replace("options = {", 'options = { open_schemas = "true",')
    stub.always("alpha", Reply(chunks=('{"x"', ': "7"}'), gap=0.1))
    async with running_service(tmp_path, pool) as runtime:
        outcome = await finish(await runtime.runs.start(order_of(runtime, Form(OPEN), streams=True)))
    assert outcome.ended.error is not None
    assert (outcome.ended.error.public_code, len(stub.requests)) == ("answer_off_form", 1)


async def test_only_the_answering_step_is_asked_for_the_form(stub: ProviderStub, runtime: Runtime) -> None:
    stub.always("beta", GOOD)
    chosen = plan(("alpha", "Think.", ["user"]), ("beta", "", ["user", 0]))
    outcome = await finish(await runtime.runs.start(order_of(runtime, STRICT, "baton-ultra", plan=chosen)))
    assert outcome.ended.error is None
    assert "response_format" not in stub.requests_for("alpha")[0].json
    assert "response_format" in stub.requests_for("beta")[0].json


async def test_an_answer_that_was_cut_off_is_passed_on_as_it_is(stub: ProviderStub, runtime: Runtime) -> None:
    stub.always("alpha", Reply(chunks=('{"x"',), finish="length"))
    outcome = await finish(await runtime.runs.start(order_of(runtime, STRICT)))
    assert (outcome.ended.answer, outcome.ended.finish) == ('{"x"', "length")


@pytest.mark.long
async def test_a_bad_schema_of_the_callers_ejects_no_worker(stub: ProviderStub, runtime: Runtime) -> None:
    """Nothing satisfies it, which says nothing of the workers."""
    for _ in range(6):
        await finish(await runtime.runs.start(order_of(runtime, Form({"not": {}}))))
    assert runtime.context.health.ejected_workers(list(runtime.pool.catalog().workers.values())) == {}


@pytest.mark.parametrize("words", [False, True], ids=["as the caller asked for it", "after an answer off form"])
async def test_a_json_mode_needs_no_further_message_where_the_caller_asks_for_json(
    stub: ProviderStub, runtime: Runtime, words: bool
) -> None:
    """The auditor composes the request again, so that it knows the template; a repair says what was wrong."""
    stub.script("alpha", *([BAD] if words else []), GOOD)
    task = Task((Message("user", (Text("Where? Answer in json."),)),), form=Form())
    outcome = await finish(await runtime.runs.start(order(runtime, "baton-mini", task=task)))
    assert (outcome.ended.answer, len(stub.requests)) == ('{"x": 7}', 1 + words)
    assert all(request.json["response_format"] == {"type": "json_object"} for request in stub.requests)
    bodies = []
    for request in stub.requests:
        bodies.append([message["content"] for message in request.json["messages"]])
    first, *repairs = bodies
    assert first == ["Where? Answer in json."]
    assert [len(messages) for messages in repairs] == [4] * words
    calls = [event.body for event in await events(runtime, outcome.ended.state.run) if event.kind is Kind.CALL_INTENDED]
    assert [call["template"] for call in calls] == ["json-1", "step-1"][: 1 + words]


async def test_a_worker_without_a_json_mode_is_told_in_words(stub: ProviderStub, tmp_path: Path) -> None:
    pool = pool_text(stub).replace("options = {", "structured = false\noptions = {")
    stub.always("alpha", GOOD)
    task = Task((Message("user", (Text("Where? Answer in JSON."),)),), form=Form())
    async with running_service(tmp_path, pool) as runtime:
        assert (
            await finish(await runtime.runs.start(order(runtime, "baton-mini", task=task)))
        ).ended.answer == '{"x": 7}'
    assert "response_format" not in stub.requests[0].json
    assert "JSON object" in stub.requests[0].json["messages"][-1]["content"]


async def test_any_object_will_do_in_json_mode(stub: ProviderStub, runtime: Runtime) -> None:
    """OpenAI refuses the mode unless a message mentions JSON, so that one is added where none does."""
    stub.always("alpha", Reply(chunks=('{"anything": []}',)))
    outcome = await finish(await runtime.runs.start(order_of(runtime, Form())))
    assert outcome.ended.answer == '{"anything": []}'
    assert stub.requests[0].json["response_format"] == {"type": "json_object"}
    assert "JSON object" in stub.requests[0].json["messages"][-1]["content"]
