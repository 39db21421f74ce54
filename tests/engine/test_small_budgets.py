"""Runs whose budget is small: what they leave out, cut and replace instead of being refused."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from app.core.message.chat import Form, Image, Message, Sampling, Task, Text, Tool, Toolbox
from app.core.pool.budgets import Budget
from app.core.pool.catalog import Amount
from app.core.pool.policy import PER_IMAGE
from app.core.run.caller_view import spendable_by_steps
from app.core.run.events import Kind
from app.engine.calls import step_request
from app.engine.runs.means import Means
from app.engine.steps import execution
from app.process.wiring import Runtime
from tests.harness.ends import end_of
from tests.harness.in_process import (
    ANSWERS,
    Outcome,
    bodies_of,
    events,
    finish,
    latest_request,
    limits_with,
    order,
    plan,
    plan_text,
    running_service,
    script_answers,
    script_plans,
)
from tests.harness.in_process import WORKER as EVERY_WORKER
from tests.stubs import Fail, ProviderStub, Reply
from tests.stubs import Usage as Used

WORKER = EVERY_WORKER + 'modalities = ["text", "image"]\n'
DEAR = WORKER.replace("1.00", "10.00").replace("2.00", "20.00").replace("0.50", "5.00")
POOL = """
[providers.stub]
format = "openai"
base_url = "{url}"
options = {{ positional = "true" }}

{workers}

[tiers.choosing]
pool = ["alpha", "beta", "gamma"]
conductor = {{ kind = "selector", templates = ["answer", "answer-check"], checkers = ["gamma"], explore = 1.0 }}
limits = {{ steps = 5, attempts = 2, seconds = 30, output_tokens = 1000 }}

[tiers.asking]
pool = ["alpha", "beta", "gamma"]
conductor = {{ kind = "selector", templates = ["answer"], worker = "planner", explore = 1.0 }}
limits = {{ steps = 5, attempts = 2, seconds = 30, output_tokens = 1000 }}

[tiers.single]
pool = ["dear", "beta"]
conductor = {{ kind = "fixed", shape = "single", workers = ["dear"] }}
limits = {{ steps = 5, attempts = 2, seconds = 30, output_tokens = 1000 }}

[tiers.wide]
pool = ["alpha"]
conductor = {{ kind = "fixed", shape = "self_consistency", width = 3 }}
limits = {{ steps = 5, attempts = 2, seconds = 30, output_tokens = 1000, floor_tokens = 100 }}

[tiers.checked]
pool = ["dear", "beta"]
conductor = {{ kind = "fixed", shape = "chain", workers = ["dear", "beta"] }}
limits = {{ steps = 5, attempts = 2, seconds = 30, output_tokens = 1000 }}

[tiers.asked]
pool = ["beta", "gamma"]
conductor = {{ kind = "model", worker = "planner" }}
limits = {{ steps = 5, attempts = 2, seconds = 30, output_tokens = 1000, floor_tokens = 900 }}

[tiers.planned]
pool = ["dear", "beta", "gamma"]
conductor = {{ kind = "model", worker = "planner" }}
limits = {{ steps = 5, attempts = 2, seconds = 30, output_tokens = 1000 }}
"""
INPUT = 46
"""Tokens that are reserved for the question."""


@pytest.fixture
async def runtime(stub: ProviderStub, tmp_path: Path) -> AsyncIterator[Runtime]:
    workers = "".join(WORKER.format(name=name) for name in ("alpha", "beta", "gamma", "planner"))
    script_answers(stub)
    async with running_service(
        tmp_path, POOL.format(url=stub.vllm_url, workers=workers + DEAR.format(name="dear"))
    ) as it:
        yield it


async def run(runtime: Runtime, tier: str, **limits: Any) -> tuple[Outcome, list[dict[str, Any]], list[dict[str, Any]]]:
    """The outcome of a run with these limits, its opened plans, and its intents."""
    outcome = await finish(await runtime.runs.start(order(runtime, tier, limits=limits_with(runtime, tier, **limits))))
    journal = await events(runtime, outcome.ended.state.run)
    return outcome, bodies_of(journal, Kind.PLAN_OPENED), bodies_of(journal, Kind.CALL_INTENDED)


async def test_a_selector_draws_among_the_arms_that_it_can_pay(runtime: Runtime) -> None:
    outcome, [plan], [call] = await run(runtime, "choosing", usd=1_000)
    decision = plan["decision"]
    assert outcome.ended.state.state == "succeeded"
    assert set(decision["candidates"]) == {f"answer {name}" for name in ("alpha", "beta", "gamma")}
    assert sum(decision["candidates"].values()) == pytest.approx(1)
    assert decision["propensity"] == decision["candidates"][decision["action"]]
    assert set(decision["masked"]) == {f"answer-check {name} gamma" for name in ("alpha", "beta", "gamma")}
    assert all(price["usd"] > decision["left"]["usd"] == 1_000 for price in decision["masked"].values())
    assert (call["wanted_tokens"], call["usd_held"]) == (1_000, 1_000)
    _, [unmasked], _ = await run(runtime, "choosing")
    assert len(unmasked["decision"]["candidates"]) == 6
    assert "masked" not in unmasked["decision"]


async def test_a_selector_does_not_let_a_model_plan_that_it_cannot_pay(runtime: Runtime) -> None:
    outcome, [plan], _ = await run(runtime, "asking", usd=2_000)
    assert outcome.ended.state.state == "succeeded"
    assert set(plan["decision"]["masked"]) == {"model"}


async def test_an_output_is_cut_to_what_is_left_and_to_the_floor_at_the_most(
    runtime: Runtime, stub: ProviderStub
) -> None:
    outcome, _, [call] = await run(runtime, "wide", usd=5 * INPUT + 2 * 300, steps=1)
    assert outcome.ended.state.state == "succeeded"
    assert (call["wanted_tokens"], call["max_tokens"]) == (1_000, (5 * INPUT + 600 - INPUT) // 2)
    assert latest_request(stub, "alpha")["max_tokens"] == call["max_tokens"]
    refused, _, calls = await run(runtime, "wide", usd=INPUT + 2 * 100 - 1, steps=1)
    assert (refused.ended.state.state, refused.ended.state.usd, calls) == ("over_budget", 0, [])
    assert refused.ended.error is not None
    assert "and $0.0002 of $0.0002 that are left. Raise" in refused.ended.error.message


async def test_a_refused_reservation_is_made_again_for_what_is_left(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others have reserved what this engine believes to be there, twice."""
    believed = [Amount(10**9, 10**9)] * 2
    monkeypatch.setattr(
        execution, "spendable_by_steps", lambda state: believed.pop() if believed else spendable_by_steps(state)
    )
    outcome, _, [call] = await run(runtime, "wide", usd=1_000, steps=1)
    assert outcome.ended.state.state == "succeeded"
    assert (call["attempt"], call["max_tokens"], believed) == (1, (1_000 - INPUT) // 2, [])


async def test_steps_share_what_is_left(runtime: Runtime) -> None:
    outcome, _, calls = await run(runtime, "wide", usd=6_000)
    state = outcome.ended.state
    assert (state.state, state.degraded) == ("succeeded", False)
    first, second, third, last = [call["max_tokens"] for call in calls]
    assert first == second == third
    assert 100 < first < 1_000
    assert last == 1_000, "what the others did not use is there again"


async def test_a_cheaper_worker_answers_before_a_run_is_refused(runtime: Runtime) -> None:
    limits = limits_with(runtime, "single", usd=2_000)
    new_order = order(runtime, "single", limits=limits, plan=plan(("dear", "", ["user"])))
    outcome = await finish(await runtime.runs.start(new_order))
    [call] = bodies_of(await events(runtime, outcome.ended.state.run), Kind.CALL_INTENDED)
    assert outcome.ended.answer == ANSWERS["beta"]
    assert call["passed_over"] == [{"worker": "dear", "reason": "over_budget"}]
    assert outcome.ended.state.steps[0].worker == "beta"


async def test_a_rate_limit_is_waited_for_where_the_other_worker_cannot_be_paid(
    runtime: Runtime, stub: ProviderStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_request, "MOST_BACKOFF_SECONDS", 0.05)  # so that the limit is longer than a mere pause
    stub.script("beta", Fail(status=429, retry_after=0.1))
    limits = limits_with(runtime, "single", usd=2_000)
    new_order = order(runtime, "single", limits=limits, plan=plan(("beta", "", ["user"])))
    outcome = await finish(await runtime.runs.start(new_order))
    assert outcome.ended.answer == ANSWERS["beta"]
    assert [request.model for request in stub.requests] == ["beta", "beta"]


async def test_runs_that_cannot_pay_a_worker_do_not_keep_it_from_those_that_can(
    runtime: Runtime, stub: ProviderStub
) -> None:
    stub.always("beta", Fail(status=400))
    ends = []
    for usd in (2_000, 2_000, 2_000, 2_000_000):
        limits = limits_with(runtime, "single", usd=usd)
        new_order = order(runtime, "single", limits=limits, plan=plan(("beta", "", ["user"])))
        ends.append((await finish(await runtime.runs.start(new_order))).ended.state.state)
    assert ends == ["over_budget"] * 3 + ["succeeded"]


async def test_a_cheaper_worker_answers_before_a_budget_over_several_runs_refuses(runtime: Runtime) -> None:
    await runtime.context.store.set_budget(Budget("tenant", "tenant", "", "day", 2_000))
    outcome = await finish(await runtime.runs.start(order(runtime, "single", plan=plan(("dear", "", ["user"])))))
    [call] = bodies_of(await events(runtime, outcome.ended.state.run), Kind.CALL_INTENDED)
    assert outcome.ended.answer == ANSWERS["beta"]
    assert call["passed_over"] == [{"worker": "dear", "reason": "over_budget"}]


async def test_a_fixed_plan_that_cannot_be_paid_is_replaced_by_one_worker(runtime: Runtime) -> None:
    outcome, opened_plans, [call] = await run(runtime, "checked", usd=1_500)
    state = outcome.ended.state
    assert ([plan["mode"] for plan in opened_plans], call["worker"]) == (["first", "fallback"], "beta")
    assert state.proposals[0].reasons[0] == "run_over_budget"
    assert state.proposals[0].reasons[1].startswith("the plan costs $")
    assert (state.state, state.degraded) == ("succeeded", True)


async def test_a_conductor_repairs_a_plan_that_is_too_dear_and_none_of_its_steps_begins_before(
    runtime: Runtime, stub: ProviderStub
) -> None:
    long = plan_text(*[(0, "Draft it.", ["user"])] * 4, (0, "Answer.", ["user", 0, 1, 2, 3]))
    script_plans(stub, long, plan_text((0, "Solve it.", ["user"])))
    outcome, opened_plans, calls = await run(runtime, "asked", usd=14_000)
    assert [plan["mode"] for plan in opened_plans] == ["first", "repair"]
    assert all(plan["waits"] for plan in opened_plans)
    assert [call["n"] for call in calls] == [None, None, 5]
    prompt = "".join(message["content"] for message in latest_request(stub, "planner")["messages"])
    assert "is left: name fewer steps or cheaper workers" in prompt
    assert "Time left: " in prompt
    assert (outcome.ended.state.state, outcome.ended.state.degraded) == ("succeeded", False)


async def test_a_clock_that_is_late_leaves_no_more_time_than_the_run_was_given(runtime: Runtime) -> None:
    state = (await finish(await runtime.runs.start(order(runtime, "single")))).ended.state
    late = replace(runtime.context, now=lambda: state.turn.deadline - 60.0)
    assert Means(late, Task((), Sampling())).seconds_left(state) == state.admitted.limits.seconds == 30.0


async def test_a_conductor_whose_plans_are_both_too_dear_is_replaced_by_one_worker(
    runtime: Runtime, stub: ProviderStub
) -> None:
    long = plan_text(*[(0, "Draft it.", ["user"])] * 4, (0, "Answer.", ["user", 0, 1, 2, 3]))
    script_plans(stub, long, long)
    outcome, opened_plans, _ = await run(runtime, "asked", usd=14_000)
    assert [plan["mode"] for plan in opened_plans] == ["first", "repair", "fallback"]
    assert (outcome.ended.state.state, outcome.ended.state.degraded) == ("succeeded", True)


async def test_the_best_answer_so_far_is_given_where_the_money_ends_in_the_middle(
    runtime: Runtime, stub: ProviderStub
) -> None:
    steps = plan(("beta", "Give the final answer.", ["user"]), ("gamma", "Check it.", ["user", 0]))
    stub.script("beta", Reply(chunks=("The draft.",), usage=Used(input=40, output=300)))
    limits = limits_with(runtime, "planned", usd=1_200)
    outcome = await finish(await runtime.runs.start(order(runtime, "planned", limits=limits, plan=steps)))
    state = outcome.ended.state
    assert (state.state, state.degraded, outcome.ended.error) == ("succeeded", True, None)
    assert (outcome.ended.answer, outcome.ended.finish) == ("The draft.", "stop")
    assert (end_of(state).stopped, end_of(state).fell_back) == ("run_over_budget", True)


@pytest.mark.parametrize(
    "task_fields",
    [
        {"form": Form({"type": "object"})},
        {"sampling": Sampling(stop=("END",))},
        {"toolbox": Toolbox((Tool("look", ""),), choice="required")},
    ],
)
async def test_an_output_that_has_not_the_form_of_the_answer_does_not_stand_in_for_it(
    runtime: Runtime, stub: ProviderStub, task_fields: dict[str, Any]
) -> None:
    steps = plan(("beta", "Give the final answer.", ["user"]), ("gamma", "Check it.", ["user", 0]))
    stub.script("beta", Reply(chunks=("The draft.",), usage=Used(input=40, output=300)))
    task = Task((Message("user", (Text("Hello"),)),), **task_fields)
    limits = limits_with(runtime, "planned", usd=1_200)
    outcome = await finish(await runtime.runs.start(order(runtime, "planned", limits=limits, plan=steps, task=task)))
    assert outcome.ended.state.state == "over_budget"


async def test_beside_tools_a_conversation_is_reserved_once_and_an_image_as_an_image(runtime: Runtime) -> None:
    picture = Image("data:image/png;base64," + "A" * 400_000)
    talk = (Message("user", (Text("x" * 5_000),)), Message("user", (picture,)))
    task = Task(talk, toolbox=Toolbox((Tool("look", "Looks.", {"type": "object"}),)))
    outcome = await finish(await runtime.runs.start(order(runtime, "single", task=task)))
    [call] = bodies_of(await events(runtime, outcome.ended.state.run), Kind.CALL_INTENDED)
    assert 5_000 + PER_IMAGE <= call["tokens_held"] - call["max_tokens"] < 5_500 + PER_IMAGE


async def test_a_conversation_that_is_too_long_for_the_worker_that_can_be_paid_is_to_be_shortened(
    runtime: Runtime, stub: ProviderStub
) -> None:
    stub.script("beta", Fail(status=400, code="context_length_exceeded", message="The maximum context length is 8"))
    outcome, _, calls = await run(runtime, "single", usd=3_000)
    assert ([call["worker"] for call in calls], outcome.ended.state.state) == (["beta"], "failed")
    assert outcome.ended.error is not None
    assert outcome.ended.error.public_code == "context_length_exceeded"


async def test_a_conductor_that_cannot_be_paid_is_not_asked(runtime: Runtime, stub: ProviderStub) -> None:
    outcome, opened_plans, [call] = await run(runtime, "planned", usd=700)
    assert ([plan["mode"] for plan in opened_plans], stub.requests_for("planner")) == (["first", "fallback"], [])
    assert outcome.ended.state.proposals[0].reasons == ("run_over_budget",)
    assert (outcome.ended.state.state, outcome.ended.state.degraded, call["worker"]) == ("succeeded", True, "beta")


async def test_a_plan_is_cut_where_money_is_short(runtime: Runtime, stub: ProviderStub) -> None:
    script_plans(stub, plan_text((0, "Solve it.", ["user"])))
    outcome, _, calls = await run(runtime, "planned", usd=7_000)
    assert outcome.ended.state.state == "succeeded"
    assert 512 <= calls[0]["max_tokens"] < calls[0]["wanted_tokens"]
    assert latest_request(stub, "planner")["max_tokens"] == calls[0]["max_tokens"]


# -- time


async def test_arms_that_would_take_too_long_are_left_out_before_the_draw(runtime: Runtime) -> None:
    slow(runtime, alpha=9.0, beta=2.0, gamma=2.0)
    outcome, [plan_opened], _ = await run(runtime, "choosing", seconds=8)
    decision = plan_opened["decision"]
    assert set(decision["candidates"]) == {
        "answer beta",
        "answer gamma",
        "answer-check beta gamma",
        "answer-check gamma gamma",
    }
    assert decision["masked"]["answer alpha"] == {"seconds": 9.0}
    assert outcome.ended.state.state == "succeeded"


async def test_a_plan_that_would_take_too_long_is_not_begun(runtime: Runtime, stub: ProviderStub) -> None:
    slow(runtime, dear=9.0, beta=3.0)
    outcome, opened_plans, [call] = await run(runtime, "checked", seconds=8)
    assert ([opened["mode"] for opened in opened_plans], call["worker"]) == (["first", "fallback"], "beta")
    assert "s are left" in outcome.ended.state.proposals[0].reasons[1]
    slow(runtime, planner=9.0)
    alone, opened_plans, [call] = await run(runtime, "planned", seconds=8)
    assert (stub.requests_for("planner"), call["worker"]) == ([], "beta")
    assert alone.ended.state.proposals[0].reasons == ("conductor_no_time",)


def slow(runtime: Runtime, **seconds: float) -> None:
    """Let this process have seen that these workers take so many seconds."""
    workers = runtime.pool.catalog().workers
    for name, took in [*seconds.items()] * 5:
        runtime.context.health.note_reply_time(workers[name], took, patience=60.0)
