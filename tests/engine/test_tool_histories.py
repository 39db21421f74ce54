"""Tool calls over time: in histories, with runs that have ended or expired, and against limits and bills."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from app.core.message.chat import Message, Text, ToolCall, Usage, sum_usages
from app.gateway.runs.cancel import wait_until_ended
from app.process.wiring import Runtime
from tests.harness.conversations import QUESTION, Conversation, look_call, tool_call_reply
from tests.harness.in_process import finish, pool_text, running_service
from tests.harness.waiting import PATIENCE_SECONDS
from tests.stubs import ProviderStub, Reply
from tests.stubs import Usage as Billed

DONE = Reply(chunks=("It is ", "42."))
RUN_SECONDS = 3.0
"""The time limit of a run whose caller takes longer to bring a result."""


@pytest.fixture
async def runtime(stub: ProviderStub, tmp_path: Path) -> AsyncIterator[Runtime]:
    async with running_service(tmp_path, pool_text(stub)) as runtime:
        yield runtime


# --- history


async def test_words_after_the_results_are_heard_by_the_step_that_may_see_the_user(
    stub: ProviderStub, runtime: Runtime
) -> None:
    stub.script("alpha", tool_call_reply(look_call("a")), DONE)
    conversation = Conversation(runtime)
    first = await conversation.take_turn()
    conversation.add_results(first, "A")
    conversation.messages.append(Message("user", (Text("And hurry."),)))
    second = await conversation.take_turn()
    assert second.ended.state.run == first.ended.state.run
    roles = [message["role"] for message in stub.requests_for("alpha")[1].json["messages"]]
    assert roles == ["user", "assistant", "tool", "user"]


@pytest.mark.parametrize("foreign", ["call_abc", "toolu_01A09q90qw90lq917835lq9", "functions.look:0"])
async def test_a_loop_that_began_elsewhere_is_history(stub: ProviderStub, runtime: Runtime, foreign: str) -> None:
    stub.script("alpha", DONE)
    call = ToolCall(foreign, "look", '{"q": "a"}')
    result = Message("tool", (Text("A"),), call_id=foreign)
    ended = (
        await Conversation(runtime, messages=[QUESTION, Message("assistant", (), calls=(call,)), result]).take_turn()
    ).ended
    assert ended.answer == "It is 42."
    messages_sent = stub.requests_for("alpha")[0].json["messages"]
    assert [message["role"] for message in messages_sent] == ["user", "assistant", "tool"]
    assert messages_sent[1]["tool_calls"][0]["id"] == messages_sent[2]["tool_call_id"] == foreign


async def test_a_later_run_of_the_conversation_sees_the_earlier_ones_messages(
    stub: ProviderStub, runtime: Runtime
) -> None:
    stub.script("alpha", tool_call_reply(look_call("a")), DONE, tool_call_reply(look_call("b")), Reply(chunks=("43.",)))
    conversation = Conversation(runtime)
    first = await conversation.take_turn()
    conversation.add_results(first, "A")
    outcome = await conversation.take_turn()
    conversation.messages += [Message("assistant", (Text(outcome.ended.answer),)), Message("user", (Text("And now?"),))]
    third = await conversation.take_turn()
    assert third.ended.state.run != first.ended.state.run
    conversation.add_results(third, "B")
    assert (await conversation.take_turn()).ended.answer == "43."
    messages_sent = stub.requests_for("alpha")[2].json["messages"]
    assert [message["role"] for message in messages_sent] == ["user", "assistant", "tool", "assistant", "user"]
    assert messages_sent[1]["tool_calls"][0]["id"] == first.ended.calls[0].id


async def test_results_for_a_run_that_has_ended_are_history_for_a_new_one(stub: ProviderStub, runtime: Runtime) -> None:
    """A caller who comes too late can go on all the same: nothing is lost but the workflow."""
    stub.script("alpha", tool_call_reply(look_call("a")), DONE, Reply(chunks=("Again 42.",)))
    conversation = Conversation(runtime)
    first = await conversation.take_turn()
    conversation.add_results(first, "A")
    await conversation.take_turn()
    again = (await conversation.take_turn()).ended
    assert (again.answer, again.state.run != first.ended.state.run) == ("Again 42.", True)


async def test_erased_content_makes_history_of_what_the_caller_still_has(stub: ProviderStub, runtime: Runtime) -> None:
    stub.script("alpha", tool_call_reply(look_call("a")), DONE)
    conversation = Conversation(runtime)
    first = await conversation.take_turn()
    conversation.add_results(first, "A")
    assert await runtime.context.store.erase(first.ended.state.run)
    assert (await conversation.take_turn()).ended.state.run != first.ended.state.run


async def test_what_another_process_erased_is_not_gone_on_with(stub: ProviderStub, tmp_path: Path) -> None:
    """Though this one still has the run in its memory."""
    stub.script("alpha", tool_call_reply(look_call("a")), DONE)
    async with (
        running_service(tmp_path, pool_text(stub)) as runtime,
        running_service(tmp_path, pool_text(stub)) as other,
    ):
        conversation = Conversation(runtime)
        first = await conversation.take_turn()
        conversation.add_results(first, "A")
        assert await other.context.store.erase(first.ended.state.run)
        assert (await conversation.take_turn()).ended.state.run != first.ended.state.run


# --- time and money


async def test_an_abandoned_wait_expires(stub: ProviderStub, tmp_path: Path) -> None:
    pool = pool_text(stub).replace("seconds = 30,", "seconds = 30, tool_wait = 0.5,")
    async with running_service(tmp_path, pool, {"BATON_LEASE_SECONDS": "1"}) as runtime:
        stub.script("alpha", tool_call_reply(look_call("a")), DONE)
        conversation = Conversation(runtime)
        first = await conversation.take_turn()
        row = await wait_until_ended(
            runtime.context.store, await runtime.context.store.run(first.ended.state.run), PATIENCE_SECONDS
        )
        assert (row.state, row.error) == ("expired", "tool_results_missing")
        counted = runtime.context.telemetry.exposition().decode()
        assert 'baton_runs_total{outcome="abandoned",tier="baton-mini"} 1.0' in counted, "no fault of this service"
        conversation.add_results(first, "A")
        assert (await conversation.take_turn()).ended.state.run != row.id


async def test_the_wait_does_not_count_as_the_runs_time(stub: ProviderStub, runtime: Runtime) -> None:
    stub.script("alpha", tool_call_reply(look_call("a")), Reply(header_delay=0.5), DONE)
    chosen = runtime.pool.catalog().tiers["baton-mini"]
    conversation = Conversation(runtime, extra={"limits": replace(chosen.efforts[chosen.effort], seconds=RUN_SECONDS)})
    conversation.add_results(await conversation.take_turn(), "A")
    await asyncio.sleep(1.1 * RUN_SECONDS)
    assert (await conversation.take_turn()).ended.state.state == "succeeded"


async def test_each_turn_tells_its_own_usage_and_all_add_up(stub: ProviderStub, runtime: Runtime) -> None:
    bills = [Billed(input=10, output=5, cached=2), Billed(input=30, output=7, reasoning=3), Billed(input=50, output=9)]
    stub.script(
        "alpha", tool_call_reply(look_call("a"), usage=bills[0]), tool_call_reply(look_call("b"), usage=bills[1])
    )
    stub.script("alpha", Reply(usage=bills[2]))
    conversation = Conversation(runtime)
    usages = []
    for result in ("A", "B", ""):
        outcome = await conversation.take_turn()
        usages.append(outcome.ended.bill)
        if outcome.ended.calls:
            conversation.add_results(outcome, result)
    assert [bill.visible.total for bill in usages] == [15, 37, 59]
    assert all(bill.orchestration == Usage() for bill in usages)
    assert sum_usages(bill.turn for bill in usages) == usages[-1].total
    assert sum(bill.turn_usd for bill in usages) == usages[-1].usd
    assert (await runtime.context.store.run(outcome.ended.state.run)).spent.usd == usages[-1].usd


async def test_the_budget_is_for_all_turns_and_its_error_says_what_is_left_and_how_to_go_on(
    stub: ProviderStub, runtime: Runtime
) -> None:
    stub.script("alpha", *[tool_call_reply(look_call("a"), usage=Billed(input=999_000, output=499))] * 2, DONE)
    conversation = Conversation(runtime)
    conversation.add_results(await conversation.take_turn(), "A")
    conversation.add_results(await conversation.take_turn(), "B")
    ended = (await finish(await conversation.start_turn())).ended
    assert (ended.state.state, ended.error and ended.error.public_code) == ("over_budget", "run_over_budget")
    assert ended.error is not None
    assert "98001002 of 100000000 tokens and $0.0000 of $2.0000" in ended.error.message
    assert "the same conversation, sent again, goes on in a new one" in ended.error.message
    assert len(stub.requests_for("alpha")) == 2
    again = (await finish(await conversation.start_turn())).ended
    assert (again.state.state, again.state.run == ended.state.run) == ("succeeded", False)
