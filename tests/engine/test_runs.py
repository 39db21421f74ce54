"""Runs from the order to the terminal event, over the real wiring: planning, execution, failures, limits."""

from pathlib import Path

import pytest

from app.core.message.chat import sum_usages
from app.core.run.events import Kind, StepSkipped
from app.errors import InvalidRequest
from app.process.wiring import Runtime
from tests.harness.in_process import (
    events,
    finish,
    kinds,
    limits_with,
    order,
    plan,
    plan_text,
    pool_text,
    running_service,
)
from tests.harness.waiting import until
from tests.stubs import Fail, Hang, ProviderStub, Reply, Truncate


async def test_mini_answers_with_one_call_and_nothing_added(stub: ProviderStub, runtime: Runtime) -> None:
    outcome = await finish(await runtime.runs.start(order(runtime, "baton-mini", "Say hello")))
    assert outcome.ended.error is None
    assert outcome.ended.answer == "Hello there." == "".join(outcome.texts)
    [received] = stub.requests
    assert received.json["messages"] == [{"role": "user", "content": "Say hello"}]
    journal = await events(runtime, outcome.ended.state.run)
    assert kinds(journal) == [
        Kind.ADMITTED,
        Kind.PLAN_OPENED,
        Kind.PLAN_STEP,
        Kind.PLAN_ACCEPTED,
        Kind.STEP_QUEUED,
        Kind.CALL_INTENDED,
        Kind.CALL_FINISHED,
        Kind.STEP_DONE,
        Kind.SUCCEEDED,
    ]
    assert outcome.ended.bill.orchestration.total == 0
    assert outcome.ended.bill.usd == 12 + 14


async def test_ultra_executes_the_conductors_plan(stub: ProviderStub, runtime: Runtime) -> None:
    stub.always("planner", Reply(chunks=tuple(plan_text((0, "Plan it", ["user"]), (1, "Solve it", ["user", 0])))))
    outcome = await finish(await runtime.runs.start(order(runtime, "baton-ultra")))
    assert outcome.ended.error is None
    state = outcome.ended.state
    assert [(step.access.as_list(), step.state) for step in state.steps.values()] == [
        (["user"], "done"),
        (["user", 0], "done"),
    ]
    assert not state.degraded
    assert len(stub.requests_for("planner")) == 1
    assert stub.requests_for("planner")[0].json["response_format"]["json_schema"]["strict"] is True
    assert outcome.ended.bill.total == sum_usages((outcome.ended.bill.visible, outcome.ended.bill.orchestration))


async def test_the_first_step_starts_before_the_plan_is_complete(stub: ProviderStub, runtime: Runtime) -> None:
    text = plan_text((0, "Plan it", ["user"]), (1, "Solve it", ["user", 0]))
    cut = text.index('{"worker": 1')
    stub.always("planner", Reply(chunks=(text[:cut], text[cut:]), gap=0.6))
    await finish(await runtime.runs.start(order(runtime, "baton-ultra")))
    first = next(received for received in stub.requests if received.model != "planner")
    (planning,) = stub.requests_for("planner")
    assert planning.finished_at is not None
    assert first.at < planning.finished_at


async def test_independent_steps_run_at_the_same_time(stub: ProviderStub, runtime: Runtime) -> None:
    stub.always("*", Reply(first_delay=0.3))
    steps = plan(("alpha", "a", ["user"]), ("beta", "b", ["user"]), ("gamma", "join", ["user", 0, 1]))
    outcome = await finish(await runtime.runs.start(order(runtime, "baton-mini", plan=steps)))
    assert outcome.ended.error is None
    starts = {received.model: received.at for received in stub.requests}
    ends = [received.finished_at or 0.0 for received in stub.requests if received.model != "gamma"]
    assert max(starts["alpha"], starts["beta"]) < min(ends), "each is called before the other has answered"
    assert starts["gamma"] >= max(ends)


async def test_a_step_that_has_ended_meanwhile_is_not_skipped(stub: ProviderStub, runtime: Runtime) -> None:
    stub.always("beta", Hang())
    steps = plan(("alpha", "a", ["user"]), ("beta", "b", ["user", 0]))
    followed_run = await runtime.runs.start(order(runtime, "baton-mini", plan=steps))
    await stub.wait_for(1, "beta")
    driver = runtime.drivers.driver_of(followed_run.run)
    assert driver is not None
    await driver.writer.append((StepSkipped(0, "plan_rejected"),))
    assert Kind.STEP_SKIPPED not in kinds(await events(runtime, followed_run.run))
    runtime.runs.cancellations.ask(followed_run.run, "caller")
    await finish(followed_run)


async def test_a_rejected_plan_gets_one_repair_with_all_reasons(stub: ProviderStub, runtime: Runtime) -> None:
    stub.script(
        "planner", Reply(chunks=(plan_text((9, "x", ["user", 3])),)), Reply(chunks=(plan_text((0, "y", ["user"])),))
    )
    outcome = await finish(await runtime.runs.start(order(runtime, "baton-ultra")))
    assert outcome.ended.error is None
    first, second = outcome.ended.state.proposals
    assert (first.state, first.mode, len(first.reasons)) == ("rejected", "first", 2)
    assert (second.state, second.mode) == ("accepted", "repair")
    question = stub.requests_for("planner")[1].json["messages"][-1]["content"]
    assert all(reason in question for reason in first.reasons)


async def test_a_plan_rejected_twice_falls_back_and_says_so(stub: ProviderStub, runtime: Runtime) -> None:
    stub.always("planner", Reply(chunks=("I would rather not.",)))
    outcome = await finish(await runtime.runs.start(order(runtime, "baton-ultra")))
    assert outcome.ended.error is None
    assert [proposal.mode for proposal in outcome.ended.state.proposals] == ["first", "repair", "fallback"]
    assert outcome.ended.state.degraded
    assert stub.requests[-1].model == "beta"


async def test_a_conductor_outage_goes_straight_to_the_fallback(stub: ProviderStub, runtime: Runtime) -> None:
    stub.always("planner", Fail(status=500))
    outcome = await finish(await runtime.runs.start(order(runtime, "baton-ultra")))
    assert outcome.ended.error is None
    assert [proposal.mode for proposal in outcome.ended.state.proposals] == ["first", "fallback"]
    assert outcome.ended.state.proposals[0].outage


async def test_a_conductor_that_is_not_cleared_never_sees_the_task(stub: ProviderStub, tmp_path: Path) -> None:
    cleared = pool_text(stub).replace("[workers.gamma]\n", '[workers.gamma]\nclearance = ["phi"]\n')
    async with running_service(tmp_path, cleared) as runtime:
        labelled = order(runtime, "baton-ultra", labels=frozenset({"phi"}))
        outcome = await finish(await runtime.runs.start(labelled))
    assert outcome.ended.answer == "Hello there."
    assert [received.model for received in stub.requests] == ["gamma"]
    assert outcome.ended.state.degraded


@pytest.mark.parametrize(
    ("region", "label", "reads_task"),
    [
        ('region = "us"', "region:eu", False),
        ("", "region:eu", False),
        ('region = "eu"', "region:eu", True),
        ('region = "eu"\nretention = "30d"', "retention:none", False),
        ('region = "us"\nretention = "none"', "retention:none", True),
    ],
)
async def test_a_conductor_elsewhere_or_that_keeps_it_never_sees_a_task_that_must_not_go_there(
    stub: ProviderStub, tmp_path: Path, region: str, label: str, reads_task: bool
) -> None:
    stub.always("planner", Reply(chunks=(plan_text((0, "Answer", ["user"])),)))
    pool = pool_text(stub).replace("[workers.gamma]\n", '[workers.gamma]\nregion = "eu"\nretention = "none"\n')
    async with running_service(
        tmp_path, pool.replace("[workers.planner]\n", f"[workers.planner]\n{region}\n")
    ) as runtime:
        bound = order(runtime, "baton-ultra", labels=frozenset({label}))
        outcome = await finish(await runtime.runs.start(bound))
    assert outcome.ended.answer == "Hello there."
    assert [received.model for received in stub.requests] == [*(["planner"] if reads_task else []), "gamma"]
    assert outcome.ended.state.degraded is not reads_task
    assert outcome.ended.state.admitted.pool == ("gamma",)
    assert outcome.ended.state.admitted.conductor == ("model" if reads_task else "fallback")


async def test_nobody_may_take_a_task_without_the_clearance(stub: ProviderStub, runtime: Runtime) -> None:
    with pytest.raises(InvalidRequest, match="not cleared for phi"):
        await runtime.runs.start(order(runtime, "baton-mini", labels=frozenset({"phi"})))
    assert stub.requests == []


async def test_a_failing_worker_is_retried_once_and_then_replaced(stub: ProviderStub, runtime: Runtime) -> None:
    stub.always("alpha", Fail(status=503))
    outcome = await finish(await runtime.runs.start(order(runtime, "baton-mini")))
    assert outcome.ended.error is None
    assert [received.model for received in stub.requests] == ["alpha", "alpha", "beta"]
    calls = list(outcome.ended.state.calls.values())
    assert [call.outcome for call in calls] == ["error", "error", "ok"]
    assert outcome.ended.state.steps[0].worker == "beta"


async def test_a_refused_request_is_not_retried_with_the_same_worker(stub: ProviderStub, runtime: Runtime) -> None:
    stub.always("alpha", Fail(status=400))
    await finish(await runtime.runs.start(order(runtime, "baton-mini")))
    assert [received.model for received in stub.requests] == ["alpha", "beta"]


async def test_a_run_fails_when_no_worker_is_left(stub: ProviderStub, runtime: Runtime) -> None:
    stub.always("*", Fail(status=500))
    outcome = await finish(await runtime.runs.start(order(runtime, "baton-mini")))
    assert outcome.ended.error is not None
    assert outcome.ended.state.state == "failed"
    assert len(stub.requests) == 4
    row = await runtime.context.store.run(outcome.ended.state.run)
    assert (row.state, row.held.usd) == ("failed", 0)


async def test_an_answer_that_was_told_is_not_tried_again(stub: ProviderStub, runtime: Runtime) -> None:
    stub.always("alpha", Reply(fault=Truncate(after=2)))
    outcome = await finish(await runtime.runs.start(order(runtime, "baton-mini", streams=True)))
    assert outcome.texts == ["Hello", " there"] or "".join(outcome.texts) == "Hello there"
    assert outcome.ended.state.state == "failed"
    assert [received.model for received in stub.requests] == ["alpha"]


async def test_a_rate_limited_worker_does_not_go_on_with_an_answer_that_was_told(
    stub: ProviderStub, runtime: Runtime
) -> None:
    stub.script("alpha", Fail(status=429, retry_after=9.0))
    stub.always("beta", Reply(fault=Truncate(after=2)))
    outcome = await finish(await runtime.runs.start(order(runtime, "baton-mini", streams=True)))
    assert "".join(outcome.texts) == "Hello there"
    assert outcome.ended.state.state == "failed"
    assert [received.model for received in stub.requests] == ["alpha", "beta"]


async def test_a_truncated_answer_nobody_heard_is_tried_again(stub: ProviderStub, runtime: Runtime) -> None:
    stub.script("alpha", Reply(fault=Truncate(after=2)))
    outcome = await finish(await runtime.runs.start(order(runtime, "baton-mini")))
    assert outcome.ended.answer == "Hello there."
    assert [call.outcome for call in outcome.ended.state.calls.values()] == ["truncated", "ok"]


async def test_cancelling_closes_the_upstream(stub: ProviderStub, runtime: Runtime) -> None:
    stub.always("*", Hang())
    followed_run = await runtime.runs.start(order(runtime, "baton-mini"))
    [received] = await stub.wait_for(1)
    runtime.runs.cancellations.ask(followed_run.run, "client")
    outcome = await finish(followed_run)
    assert outcome.ended.state.state == "cancelled"
    await until(lambda: received.disconnected_at is not None)
    journal = await events(runtime, followed_run.run)
    assert kinds(journal)[-4:] == [Kind.CANCEL_ASKED, Kind.CALL_FINISHED, Kind.STEP_SKIPPED, Kind.CANCELLED]
    assert (await runtime.context.store.run(followed_run.run)).held.usd == 0


async def test_a_run_expires_at_its_deadline(stub: ProviderStub, runtime: Runtime) -> None:
    stub.always("*", Hang())
    limits = limits_with(runtime, "baton-mini", seconds=0.5)
    outcome = await finish(await runtime.runs.start(order(runtime, "baton-mini", limits=limits)))
    assert outcome.ended.state.state == "expired"
    assert all(call.outcome is not None for call in outcome.ended.state.calls.values())


async def test_a_run_never_holds_more_than_its_budget(stub: ProviderStub, runtime: Runtime) -> None:
    limits = limits_with(runtime, "baton-mini", usd=100)
    outcome = await finish(await runtime.runs.start(order(runtime, "baton-mini", limits=limits)))
    assert outcome.ended.state.state == "over_budget"
    assert stub.requests == []


async def test_an_invalid_plan_is_refused_with_all_its_faults(runtime: Runtime) -> None:
    steps = plan(("alpha", "a", ["user", 1]), ("nobody", "b", ["user"]), *[("beta", "c", ["user"])] * 4)
    with pytest.raises(InvalidRequest) as caught:
        await runtime.runs.start(order(runtime, "baton-mini", plan=steps))
    assert "forward access" in caught.value.message
    assert "not an eligible worker" in caught.value.message
    assert "6 steps" in caught.value.message


async def test_deltas_of_the_answer_are_told_as_they_come(stub: ProviderStub, runtime: Runtime) -> None:
    stub.always("*", Reply(chunks=("one ", "two ", "three"), gap=0.05))
    outcome = await finish(await runtime.runs.start(order(runtime, "baton-mini", streams=True, stream_steps=True)))
    assert len(outcome.texts) == 3
    assert "".join(outcome.texts) == outcome.ended.answer == "one two three"
    assert "step.done" in [event.kind for event in outcome.step_events]
