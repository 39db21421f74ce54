"""Results of tool calls as they come back: together, once, from the caller that the calls were given to."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from app.core.message.chat import Image, Message, Text, mint_call_id, run_of
from app.core.run.events import Kind
from app.engine.runs import tool_results
from app.errors import InvalidRequest
from app.process.wiring import Runtime
from tests.harness.conversations import QUESTION, Conversation, look_call, tool_call_reply
from tests.harness.in_process import bodies_of, events, finish, pool_text, running_service
from tests.harness.waiting import NotInTime, until
from tests.stubs import Fail, ProviderStub, Reply

DONE = Reply(chunks=("It is ", "42."))


@pytest.fixture
async def runtime(stub: ProviderStub, tmp_path: Path) -> AsyncIterator[Runtime]:
    async with running_service(tmp_path, pool_text(stub)) as runtime:
        yield runtime


def code(refused: pytest.ExceptionInfo[InvalidRequest]) -> str | None:
    return refused.value.public_code


async def test_results_of_several_calls_come_together(stub: ProviderStub, runtime: Runtime) -> None:
    stub.script("alpha", tool_call_reply(look_call("a"), look_call("b")), DONE)
    conversation = Conversation(runtime)
    first = await conversation.take_turn()
    conversation.add_results(first, "A", "B")
    results = conversation.messages.pop()
    with pytest.raises(InvalidRequest) as refused:
        await conversation.take_turn()
    assert code(refused) == "tool_results_missing"
    assert first.ended.calls[1].id in refused.value.message
    conversation.messages.append(results)
    assert (await conversation.take_turn()).ended.answer == "It is 42."


async def test_the_same_results_again_hear_the_same_reply(stub: ProviderStub, runtime: Runtime) -> None:
    stub.script(
        "alpha",
        tool_call_reply(look_call("a")),
        replace(tool_call_reply(look_call("b")), header_delay=0.3),
        DONE,
    )
    conversation = Conversation(runtime)
    conversation.add_results(await conversation.take_turn(), "A")
    together = await asyncio.gather(*(conversation.take_turn() for _ in range(3)))
    late = await conversation.take_turn()
    assert len({outcome.ended.calls for outcome in (*together, late)}) == 1
    assert len(stub.requests_for("alpha")) == 2
    conversation.add_results(late, "B")
    assert (await conversation.take_turn()).ended.answer == "It is 42."


async def test_results_that_come_again_as_soon_as_their_caller_has_left_begin_a_new_run(
    stub: ProviderStub, runtime: Runtime
) -> None:
    """A client whose connection broke sends the request again before the run has heard that it is to end."""
    stub.script("alpha", tool_call_reply(look_call("a")), replace(DONE, header_delay=30.0), DONE)
    conversation = Conversation(runtime, extra={"on_disconnect": "cancel"})
    conversation.add_results(await conversation.take_turn(), "A")
    left = await conversation.start_turn()
    await until(lambda: len(stub.requests_for("alpha")) == 2)
    runtime.runs.leave(left)
    again = await conversation.take_turn()
    assert (again.ended.answer, again.ended.state.run == left.run) == ("It is 42.", False)


async def test_whoever_loses_the_race_to_a_turn_leaves_its_driver_alone(
    stub: ProviderStub, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three bring the same at once, and each looks at the run before any of the others has begun, if it may."""
    stub.script("alpha", tool_call_reply(look_call("a")), tool_call_reply(look_call("b")), DONE)
    conversation, looking, find = Conversation(runtime), 0, tool_results.find_resumption

    async def find_together(*arguments: Any) -> Any:
        nonlocal looking
        resumption, looking = await find(*arguments), looking + 1
        with suppress(NotInTime):
            await until(lambda: looking >= 3, within=0.3)
        return resumption

    conversation.add_results(await conversation.take_turn(), "A")
    monkeypatch.setattr(tool_results, "find_resumption", find_together)
    replies = await asyncio.gather(*(conversation.take_turn() for _ in range(3)))
    assert len({outcome.ended.calls for outcome in replies}) == 1
    assert len(stub.requests_for("alpha")) == 2
    await until(lambda: not len(runtime.drivers))


async def test_other_results_for_the_same_calls_are_refused(stub: ProviderStub, runtime: Runtime) -> None:
    stub.script(
        "alpha",
        tool_call_reply(look_call("a")),
        replace(tool_call_reply(look_call("b")), header_delay=0.3),
        DONE,
    )
    conversation, liar = Conversation(runtime), Conversation(runtime)
    first = await conversation.take_turn()
    conversation.add_results(first, "A")
    liar.add_results(first, "not A")
    running = await conversation.start_turn()
    with pytest.raises(InvalidRequest) as refused:
        await liar.take_turn()
    assert code(refused) == "tool_call_answered"
    second = await finish(running)
    with pytest.raises(InvalidRequest) as refused:
        await liar.take_turn()
    assert code(refused) == "tool_call_answered"
    conversation.add_results(second, "B")
    await conversation.take_turn()


async def test_results_of_an_earlier_turn_are_refused_while_the_run_goes_on(
    stub: ProviderStub, runtime: Runtime
) -> None:
    stub.script("alpha", *[tool_call_reply(look_call(str(n))) for n in range(3)])
    conversation = Conversation(runtime)
    conversation.add_results(await conversation.take_turn(), "A")
    early = list(conversation.messages)
    conversation.add_results(await conversation.take_turn(), "B")
    await conversation.take_turn()
    conversation.messages = early
    with pytest.raises(InvalidRequest) as refused:
        await conversation.take_turn()
    assert code(refused) == "tool_call_answered"
    assert f"the run {run_of(early[-1].call_id)} has gone on" in refused.value.message


async def test_ids_that_were_not_given_to_this_caller_are_unknown(stub: ProviderStub, runtime: Runtime) -> None:
    stub.script("alpha", tool_call_reply(look_call("a")))
    conversation = Conversation(runtime)
    first = await conversation.take_turn()
    (call_of_first_turn,) = first.ended.calls
    nobodys = replace(call_of_first_turn, id=mint_call_id("run_" + "0" * 31, b"x" * 9))
    others = replace(call_of_first_turn, id=mint_call_id(first.ended.state.run, b"x" * 9))
    for call, tenant in ((nobodys, "tenant"), (others, "tenant"), (call_of_first_turn, "stranger")):
        result = Message("tool", (Text("A"),), call_id=call.id)
        stranger = Conversation(runtime, messages=[QUESTION, Message("assistant", (), calls=(call,)), result])
        with pytest.raises(InvalidRequest) as refused:
            await runtime.runs.start(replace(stranger.order(), tenant=tenant))
        assert code(refused) == "unknown_tool_call"
        assert call.id not in refused.value.message


async def test_another_key_goes_on_only_in_the_same_tier(stub: ProviderStub, runtime: Runtime) -> None:
    stub.script("alpha", tool_call_reply(look_call("a")), DONE)
    conversation = Conversation(runtime)
    conversation.add_results(await conversation.take_turn(), "A")
    new_order = replace(conversation.order(), key="other")
    with pytest.raises(InvalidRequest) as refused:
        await runtime.runs.start(replace(new_order, tier=runtime.pool.catalog().tiers["baton-ultra"]))
    assert code(refused) == "unknown_tool_call"
    assert (await finish(await runtime.runs.start(new_order))).ended.answer == "It is 42."


async def test_labels_do_not_grow_behind_the_workers_backs(stub: ProviderStub, runtime: Runtime) -> None:
    stub.script("alpha", tool_call_reply(look_call("a")))
    conversation = Conversation(runtime)
    conversation.add_results(await conversation.take_turn(), "A")
    with pytest.raises(InvalidRequest) as refused:
        await conversation.take_turn(labels=frozenset({"phi"}))
    assert (code(refused), refused.value.param) == ("labels_changed", "baton.labels")


@pytest.mark.parametrize("tells", [True, False])
async def test_log_probabilities_that_a_later_turn_wants_are_told_or_refused(
    stub: ProviderStub, tmp_path: Path, tells: bool
) -> None:
    stub.script("alpha", tool_call_reply(look_call("a")), DONE)
    pool = pool_text(stub)
    if not tells:
        pool = pool.replace(', logprobs = "true"', "")
    async with running_service(tmp_path, pool) as runtime:
        conversation = Conversation(runtime)
        conversation.add_results(await conversation.take_turn(), "A")
        new_order = conversation.order()
        run = runtime.runs.start(replace(new_order, task=replace(new_order.task, logprobs=0)))
        if tells:
            assert len((await finish(await run)).ended.logprobs or ()) == len(DONE.chunks)
            return
        with pytest.raises(InvalidRequest) as refused:
            await run
        assert (code(refused), refused.value.param) == ("no_eligible_worker", "logprobs")
        assert "They are: alpha, beta, gamma." in str(refused.value)


async def test_an_image_for_a_worker_that_sees_none_is_refused(stub: ProviderStub, runtime: Runtime) -> None:
    stub.script("alpha", tool_call_reply(look_call("a")))
    conversation = Conversation(runtime)
    first = await conversation.take_turn()
    conversation.add_results(first, "A")
    conversation.messages[-1] = replace(conversation.messages[-1], parts=(Image("data:image/png;base64,AA"),))
    with pytest.raises(InvalidRequest) as refused:
        await conversation.take_turn()
    assert code(refused) == "no_eligible_worker"


async def test_no_worker_that_sees_no_images_takes_over_from_one_that_was_sent_an_image(
    stub: ProviderStub, tmp_path: Path
) -> None:
    sees = 'modalities = ["text", "image"]\n'
    pool = pool_text(stub)
    for name in ("alpha", "gamma"):
        pool = pool.replace(f"[workers.{name}]\n", f"[workers.{name}]\n{sees}")
    stub.script("alpha", tool_call_reply(look_call("a")), Fail(status=400))
    async with running_service(tmp_path, pool) as runtime:
        conversation = Conversation(runtime)
        conversation.add_results(await conversation.take_turn(), "")
        conversation.messages[-1] = replace(conversation.messages[-1], parts=(Image("data:image/png;base64,aGk="),))
        outcome = await conversation.take_turn()
        last = bodies_of(await events(runtime, outcome.ended.state.run), Kind.CALL_INTENDED)[-1]
    assert [request.model for request in stub.requests] == ["alpha", "alpha", "gamma"]
    assert last["passed_over"] == [{"worker": "beta", "reason": "cannot see images"}]
