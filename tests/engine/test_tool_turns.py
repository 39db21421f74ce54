"""Tool calls inside a run: the calls go out under ids of ours, and with the results the same step goes on."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from app.core.message.chat import Toolbox, run_of
from app.core.run.events import Kind
from app.core.run.fold import fold
from app.errors import InvalidRequest, LeaseLost
from app.process.wiring import Runtime
from app.store.protocol import AppendResult, Entry
from tests.harness.conversations import ADD, LOOK, TOOLBOX, Conversation, assemble_calls, look_call, tool_call_reply
from tests.harness.in_process import bodies_of, events, finish, kinds, limits_with, plan, pool_text, running_service
from tests.harness.raw_facts import fact_from_json
from tests.harness.waiting import until
from tests.stubs import Fail, ProviderStub, Raw, Reply
from tests.stubs import ToolCall as Calls

DONE = Reply(chunks=("It is ", "42."))
PARALLEL = plan(("alpha", "Look left", ["user"]), ("beta", "Look right", ["user"]), ("gamma", "Answer", ["user", 0, 1]))
for step in PARALLEL["steps"][:2]:
    step["tools"] = True


@pytest.fixture
async def runtime(stub: ProviderStub, tmp_path: Path) -> AsyncIterator[Runtime]:
    async with running_service(tmp_path, pool_text(stub)) as runtime:
        yield runtime


def code(refused: pytest.ExceptionInfo[InvalidRequest]) -> str | None:
    return refused.value.public_code


# --- the loop


async def test_a_tool_loop_is_one_run_and_one_call_a_turn(stub: ProviderStub, runtime: Runtime) -> None:
    more = tool_call_reply(look_call("b", "their-2"), Calls("add", "", "their-3"))
    stub.script("alpha", tool_call_reply(look_call("a", "their-1"), words="Let me see. "), more, DONE)
    conversation = Conversation(runtime)
    first = await conversation.take_turn()
    state = first.ended.state
    assert (first.ended.finish, first.ended.answer, state.state) == ("tool_calls", "Let me see. ", "awaiting_tool")
    (call,) = first.ended.calls
    assert (call.name, json.loads(call.arguments), run_of(call.id)) == ("look", {"q": "a"}, state.run)
    conversation.add_results(first, "A")
    second = await conversation.take_turn()
    assert [call.name for call in second.ended.calls] == ["look", "add"]
    conversation.add_results(second, "B", "3")
    third = await conversation.take_turn()
    assert (third.ended.answer, third.ended.finish, third.ended.calls) == ("It is 42.", "stop", ())
    assert state.run == second.ended.state.run == third.ended.state.run
    conversations_sent = [received.json["messages"] for received in stub.requests_for("alpha")]
    assert len(conversations_sent) == len(stub.requests) == 3
    assert conversations_sent[1][: len(conversations_sent[0])] == conversations_sent[0]
    assistant_turn, result = conversations_sent[1][len(conversations_sent[0]) :]
    assert (assistant_turn["content"], assistant_turn["tool_calls"][0]["id"]) == ("Let me see. ", "their-1")
    assert (result["role"], result["tool_call_id"], result["content"]) == ("tool", "their-1", "A")
    assert [message["content"] for message in conversations_sent[2] if message["role"] == "tool"] == ["A", "B", "3"]
    assert all(len(received.json["tools"]) == 2 for received in stub.requests)
    assert kinds(await events(runtime, state.run)).count(Kind.PLAN_OPENED) == 1


async def test_what_an_engine_keeps_of_a_run_that_waits_is_the_fold_of_its_journal(
    stub: ProviderStub, runtime: Runtime
) -> None:
    stub.script("alpha", tool_call_reply(look_call("a")))
    state = (await Conversation(runtime).take_turn()).ended.state
    kept = await until(lambda: runtime.drivers._waiting.take(state.run))
    assert kept.state == fold(await events(runtime, state.run))


async def hold_conversation_with_results(stub: ProviderStub, runtime: Runtime) -> tuple[Conversation, str]:
    """Return a conversation whose next turn brings the results that its run waits for, and that run."""
    stub.script("alpha", tool_call_reply(look_call("a")), DONE)
    conversation = Conversation(runtime)
    first = await conversation.take_turn()
    conversation.add_results(first, "A")
    return conversation, first.ended.state.run


async def test_a_run_that_waits_here_is_not_looked_up(
    stub: ProviderStub, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit of the turn is fenced by the epoch under which it waited."""
    conversation, _ = await hold_conversation_with_results(stub, runtime)
    monkeypatch.setattr(runtime.context.store, "run", None)
    assert (await conversation.take_turn()).ended.answer == "It is 42."


@pytest.mark.parametrize("remembered", [True, False])
async def test_a_run_that_was_cancelled_while_it_waited_calls_nobody_again(
    stub: ProviderStub, runtime: Runtime, remembered: bool
) -> None:
    """Though this process may remember it as it was before, and its caller has brought what it waited for."""
    conversation, run = await hold_conversation_with_results(stub, runtime)
    await until(lambda: not len(runtime.drivers))
    runtime.drivers.recovers = False  # a sweep might end the run before its caller comes
    if not remembered:
        assert runtime.runs._waiting.take(run) is not None
    await runtime.context.store.append(
        Entry(run, runtime.context.now(), (fact_from_json(Kind.CANCEL_ASKED, {"by": "client"}),))
    )
    assert (await finish(await conversation.start_turn())).ended.state.state == "cancelled"
    assert Kind.RESUMED in kinds(await events(runtime, run))
    assert len(stub.requests) == 1


async def test_results_wait_until_another_process_lets_go_of_the_run(
    stub: ProviderStub, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example an engine that has taken the run over: it ends it, or lets go of it soon."""
    conversation, _ = await hold_conversation_with_results(stub, runtime)
    await until(lambda: not len(runtime.drivers))
    loop, append = asyncio.get_running_loop(), runtime.context.store.append
    free_at = loop.time() + 0.1

    async def append_once_free(entry: Entry) -> AppendResult:
        if loop.time() < free_at:
            raise LeaseLost
        return await append(entry)

    monkeypatch.setattr(runtime.context.store, "append", append_once_free)
    assert (await conversation.take_turn()).ended.answer == "It is 42."


async def test_a_waiting_run_holds_no_driver_no_slot_and_no_lease(stub: ProviderStub, runtime: Runtime) -> None:
    stub.script("alpha", tool_call_reply(look_call("a")))
    ended = (await Conversation(runtime).take_turn()).ended
    await until(lambda: not len(runtime.drivers))
    row = await runtime.context.store.run(ended.state.run)
    assert (row.state, row.driver, row.held.usd) == ("awaiting_tool", "", 0)
    assert row.lease_until == row.deadline == pytest.approx(runtime.context.now() + 600, abs=30)
    assert await runtime.context.store.find_ticket(row.id, 0) is None
    assert runtime.dispatcher._claimed == {}
    gauge = b"\nbaton_runs_waiting 1.0"
    runtime.drivers.sweep_soon()
    await until(lambda: gauge in runtime.context.telemetry.exposition())


async def test_streams_tell_calls_as_they_come_and_every_turn_by_itself(stub: ProviderStub, runtime: Runtime) -> None:
    two = tool_call_reply(look_call("a"), Calls("add", '{"n": 1}'), words="Hm. ", gap=0.01)
    stub.script("alpha", two, Reply(chunks=("It ", "is ", "42."), gap=0.01))
    conversation = Conversation(runtime, extra={"streams": True})
    first = await conversation.take_turn()
    assert "".join(first.texts) == "Hm. "
    assert len(first.tool_deltas) > 3
    assert assemble_calls(first.tool_deltas) == [(call.id, call.name, call.arguments) for call in first.ended.calls]
    conversation.add_results(first, "A", "1")
    second = await conversation.take_turn()
    assert ("".join(second.texts), second.tool_deltas) == ("It is 42.", [])
    assert len(second.texts) > 1


@pytest.mark.long
async def test_a_turn_that_is_given_less_time_than_the_first_ends_with_what_was_written_in_it(
    stub: ProviderStub, runtime: Runtime
) -> None:
    stub.script("alpha", tool_call_reply(look_call("a")), Reply(chunks=("word ",) * 50, gap=0.05))
    conversation = Conversation(runtime)
    conversation.add_results(await conversation.take_turn(), "A")
    last = await conversation.take_turn(limits=limits_with(runtime, "baton-mini", seconds=0.6))
    assert (last.ended.finish, last.ended.state.degraded) == ("length", True)


async def test_what_the_caller_says_of_decoding_and_tools_holds_from_then_on(
    stub: ProviderStub, runtime: Runtime
) -> None:
    stub.script("alpha", tool_call_reply(look_call("a")), DONE)
    conversation = Conversation(runtime, toolbox=Toolbox((LOOK, ADD), "required"))
    conversation.add_results(await conversation.take_turn(), "A")
    conversation.toolbox = Toolbox((LOOK,), parallel=False)
    await conversation.take_turn()
    first_request, second_request = (received.json for received in stub.requests_for("alpha"))
    assert (first_request["tool_choice"], "parallel_tool_calls" in first_request, len(first_request["tools"])) == (
        "required",
        False,
        2,
    )
    assert ("tool_choice" in second_request, second_request["parallel_tool_calls"], len(second_request["tools"])) == (
        False,
        False,
        1,
    )


async def test_the_same_worker_goes_on_and_gets_back_what_its_provider_wants(
    stub: ProviderStub, runtime: Runtime
) -> None:
    """The planned worker is down, so another one calls the tool; with the results it is asked again, not the first."""
    stub.script("alpha", *[Fail(status=503)] * 2)
    stub.script("beta", tool_call_reply(look_call("a"), reasoning=("secret",)), DONE)
    conversation = Conversation(runtime)
    conversation.add_results(await conversation.take_turn(), "A")
    ended = (await conversation.take_turn()).ended
    assert (ended.answer, ended.state.steps[0].worker) == ("It is 42.", "beta")
    assert len(stub.requests_for("alpha")) == 2
    assert stub.requests_for("beta")[1].json["messages"][1]["reasoning_content"] == "secret"


async def test_another_worker_takes_over_with_the_transcript_but_not_with_the_first_ones_thoughts(
    stub: ProviderStub, runtime: Runtime
) -> None:
    stub.script("alpha", tool_call_reply(look_call("a", "theirs"), reasoning=("secret",)), *[Fail(status=503)] * 2)
    stub.script("beta", DONE)
    conversation = Conversation(runtime)
    conversation.add_results(await conversation.take_turn(), "A")
    assert (await conversation.take_turn()).ended.answer == "It is 42."
    (received,) = stub.requests_for("beta")
    assert b"secret" not in received.body
    assert [message["role"] for message in received.json["messages"]] == ["user", "assistant", "tool"]
    assert received.json["messages"][1]["tool_calls"][0]["id"] == received.json["messages"][2]["tool_call_id"]


async def test_attempts_are_counted_anew_in_each_turn(stub: ProviderStub, runtime: Runtime) -> None:
    turns = [tool_call_reply(look_call(str(n))) for n in range(6)]
    stub.script("alpha", *turns, DONE)
    conversation = Conversation(runtime)
    for n in range(6):
        conversation.add_results(await conversation.take_turn(), str(n))
    assert (await conversation.take_turn()).ended.answer == "It is 42."


async def test_a_quick_worker_is_asked_for_whole_replies_in_later_turns_too(
    stub: ProviderStub, runtime: Runtime
) -> None:
    stub.script("alpha", tool_call_reply(look_call("a")), tool_call_reply(look_call("b")), DONE)
    conversation = Conversation(runtime)
    for result in ("A", "B"):
        conversation.add_results(await conversation.take_turn(), result)
    await conversation.take_turn()
    assert [received.json.get("stream", False) for received in stub.requests] == [True, False, False]


@pytest.mark.parametrize("streams", [True, False])
async def test_a_refusal_is_an_answer_also_where_a_tool_call_was_demanded(
    stub: ProviderStub, runtime: Runtime, streams: bool
) -> None:
    stub.always("alpha", Reply(chunks=(), refusal="No."))
    conversation = Conversation(runtime, toolbox=Toolbox((LOOK,), "required"), extra={"streams": streams})
    outcome = await conversation.take_turn()
    assert (outcome.ended.answer, outcome.ended.refusal) == ("No.", True)
    assert len(stub.requests) == 1


async def test_the_definitions_of_tools_are_part_of_an_input_that_nobody_reports(
    stub: ProviderStub, runtime: Runtime
) -> None:
    stub.always("alpha", Reply(usage=None))
    usages = []
    for tools in ((LOOK,), (replace(LOOK, description="x" * 4_000),)):
        outcome = await Conversation(runtime, toolbox=Toolbox(tools)).take_turn()
        [finished] = bodies_of(await events(runtime, outcome.ended.state.run), Kind.CALL_FINISHED)
        usages.append(finished["usage"]["input"])
    assert 900 < usages[1] - usages[0] <= 1_000


# --- what a worker must not do


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize(
    "wrong",
    [
        tool_call_reply(Calls("look", '{"q": ')),
        tool_call_reply(Calls("look", "[1]")),
        tool_call_reply(Calls("rm", "{}")),
        Reply(chunks=()),
    ],
)
async def test_calls_that_cannot_be_handed_on_are_an_attempt_that_failed(
    stub: ProviderStub, runtime: Runtime, wrong: Reply, live: bool
) -> None:
    """Unless the caller has heard the beginning of it, when it was streamed: that cannot be unsaid. All of it is paid
    for; where it was not heard out nobody knows how much that is."""
    stub.script("alpha", replace(wrong, gap=0.02), tool_call_reply(look_call("a")))
    conversation = Conversation(runtime, toolbox=Toolbox((LOOK,), "required"), extra={"streams": live})
    outcome = await finish(await conversation.start_turn())
    call_was_streamed = live and any(call.name == "look" for call in wrong.tool_calls)
    journal = await events(runtime, outcome.ended.state.run)
    first = next(event.body for event in journal if event.kind is Kind.CALL_FINISHED)
    assert (first["outcome"], first["error"], "blamed" in first) == ("error", "tool_call_malformed", False)
    heard_out = not any(call.name == "rm" for call in wrong.tool_calls)
    assert wrong.usage is not None
    least = (wrong.usage.input, wrong.usage.output)
    assert first["usage"]["estimated"] is not heard_out
    assert (first["usage"]["input"], first["usage"]["output"]) == least or not heard_out
    assert first["usage"]["input"] >= least[0]
    assert first["usage"]["output"] >= least[1]
    if call_was_streamed:
        assert outcome.ended.error is not None
        assert outcome.ended.error.public_code == "tool_call_malformed"
    else:
        assert [call.name for call in outcome.ended.calls] == ["look"]
        assert assemble_calls(outcome.tool_deltas) == [(c.id, c.name, c.arguments) for c in outcome.ended.calls]


async def test_what_comes_with_the_end_is_told_with_it(stub: ProviderStub, runtime: Runtime) -> None:
    """So a reply that came in one piece is judged before anybody hears of it, and another one may take its place."""
    stub.script("alpha", in_one_piece('{"q": '), in_one_piece('{"q": "a"}'))
    conversation = Conversation(runtime, extra={"streams": True})
    outcome = await conversation.take_turn()
    assert assemble_calls(outcome.tool_deltas) == [(c.id, c.name, c.arguments) for c in outcome.ended.calls]
    assert [json.loads(call.arguments) for call in outcome.ended.calls] == [{"q": "a"}]
    assert ("".join(outcome.texts), len(outcome.tool_deltas)) == ("Hm. ", 1)
    journal = await events(runtime, outcome.ended.state.run)
    assert [event.body["outcome"] for event in journal if event.kind is Kind.CALL_FINISHED] == ["error", "ok"]


def in_one_piece(arguments: str) -> Raw:
    """A whole stream in one write, with words and a call of `look`."""
    call = {"index": 0, "id": "x", "type": "function", "function": {"name": "look", "arguments": arguments}}
    delta = {"index": 0, "delta": {"content": "Hm. ", "tool_calls": [call]}, "finish_reason": "tool_calls"}
    return Raw(body=f"data: {json.dumps({'choices': [delta]})}\n\ndata: [DONE]\n\n")


async def test_one_call_at_a_time_where_the_caller_wants_that(stub: ProviderStub, runtime: Runtime) -> None:
    """A server that does not know the parameter is not believed."""
    stub.script("alpha", *[tool_call_reply(look_call("a", "x"), look_call("b", "y")), DONE] * 2)
    for streams in (True, False):
        conversation = Conversation(runtime, toolbox=replace(TOOLBOX, parallel=False), extra={"streams": streams})
        first = await conversation.take_turn()
        assert [json.loads(call.arguments) for call in first.ended.calls] == [{"q": "a"}]
        assert not streams or len(assemble_calls(first.tool_deltas)) == 1
        conversation.add_results(first, "A")
        await conversation.take_turn()
        (assistant_turn,) = [
            message for message in stub.requests_for("alpha")[-1].json["messages"] if message["role"] == "assistant"
        ]
        assert [call["id"] for call in assistant_turn["tool_calls"]] == ["x"]


async def test_a_turn_that_is_cut_off_calls_nothing(stub: ProviderStub, runtime: Runtime) -> None:
    stub.script("alpha", Reply(chunks=("Let me",), tool_calls=(Calls("look", '{"q'),), finish="length"))
    ended = (await Conversation(runtime).take_turn()).ended
    assert (ended.answer, ended.finish, ended.calls, ended.state.state) == ("Let me", "length", (), "succeeded")


async def test_without_tools_on_offer_a_call_is_malformed(stub: ProviderStub, runtime: Runtime) -> None:
    stub.script("alpha", tool_call_reply(look_call("a")), DONE)
    for toolbox in (Toolbox(), Toolbox((LOOK,), "none")):
        assert (await Conversation(runtime, toolbox=toolbox).take_turn()).ended.answer
    assert "tool_choice" not in stub.requests[0].json


# --- several steps


async def test_steps_that_wait_together_call_in_one_reply(stub: ProviderStub, runtime: Runtime) -> None:
    stub.script("alpha", tool_call_reply(look_call("left", "x-1"), words="Left."), Reply(chunks=("L",)))
    stub.script("beta", Reply(header_delay=0.1, chunks=(), tool_calls=(look_call("right", "x-1"),), finish="tool"))
    stub.script("beta", Reply(chunks=("R",)))
    stub.script("gamma", tool_call_reply(look_call("both", "x-1"), words="Both."), Reply(chunks=("L and R.",)))
    conversation = Conversation(runtime, "baton-ultra", extra={"plan": PARALLEL})
    first = await conversation.take_turn()
    assert [json.loads(call.arguments)["q"] for call in first.ended.calls] == ["left", "right"]
    assert (first.ended.answer, len({call.id for call in first.ended.calls})) == ("", 2)
    conversation.add_results(first, "LEFT", "RIGHT")
    second = await conversation.take_turn()
    assert (second.ended.answer, len(second.ended.calls)) == ("Both.", 1)
    conversation.add_results(second, "BOTH")
    assert (await conversation.take_turn()).ended.answer == "L and R."
    bodies = {}
    for name, own in {"alpha": b"LEFT", "beta": b"RIGHT", "gamma": b"BOTH"}.items():
        bodies[name] = b"".join(received.body for received in stub.requests_for(name))
        assert [secret for secret in (b"LEFT", b"RIGHT", b"BOTH") if secret in bodies[name]] == [own]
    assert b"Left." not in bodies["beta"] + bodies["gamma"], "what is said beside a call belongs to the transcript"


async def test_only_the_answering_step_has_tools_unless_the_plan_says_otherwise(
    stub: ProviderStub, runtime: Runtime
) -> None:
    steps = plan(("alpha", "Think", ["user"]), ("beta", "Answer", ["user", 0]))
    stub.script("beta", DONE)
    conversation = Conversation(runtime, "baton-ultra", toolbox=Toolbox((LOOK,), "none"), extra={"plan": steps})
    await conversation.take_turn()
    assert "tools" not in stub.requests_for("alpha")[0].json
    assert stub.requests_for("beta")[0].json["tool_choice"] == "none"


async def test_what_is_demanded_is_demanded_of_the_answering_step(stub: ProviderStub, runtime: Runtime) -> None:
    steps = plan(("alpha", "Think", ["user"]), ("beta", "Answer", ["user", 0]))
    steps["steps"][0]["tools"] = True
    stub.script("beta", tool_call_reply(look_call("a")))
    conversation = Conversation(
        runtime, "baton-ultra", toolbox=Toolbox((LOOK,), "named", "look"), extra={"plan": steps}
    )
    assert len((await conversation.take_turn()).ended.calls) == 1
    assert "tool_choice" not in stub.requests_for("alpha")[0].json
    assert stub.requests_for("beta")[0].json["tool_choice"] == {"type": "function", "function": {"name": "look"}}


async def test_a_conductor_plans_once_for_all_turns(stub: ProviderStub, runtime: Runtime) -> None:
    text = '{"steps": [{"worker": 0, "subtask": "Answer.", "access": ["user"], "tools": true}]}'
    stub.always("planner", Reply(chunks=tuple(text)))
    for name in ("alpha", "beta", "gamma"):
        stub.script(name, tool_call_reply(look_call("a")), tool_call_reply(look_call("b")), DONE)
    conversation = Conversation(runtime, "baton-ultra")
    for result in ("A", "B"):
        conversation.add_results(await conversation.take_turn(), result)
    assert (await conversation.take_turn()).ended.answer == "It is 42."
    (request,) = stub.requests_for("planner")
    assert "- look: Looks something up." in request.json["messages"][0]["content"]
    place = request.json["response_format"]["json_schema"]["schema"]["properties"]["steps"]["prefixItems"][0]
    assert "tools" in place["required"]
