"""Workflows inside steps: the conductor takes a step itself. Who sees what of it; what holds it within bounds; what
becomes of it when something fails or a driver dies inside. The auditor reads every journal."""

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from app.cli.runs import run_tree
from app.core.message.chat import Form, Sampling, Task, Tool, Toolbox, sum_usages
from app.core.plan.workflow import CONDUCTOR
from app.core.run.events import Event, Kind
from app.core.run.kinds import DRIVER_LOST
from app.engine.runs.approvals import Decision
from app.process.wiring import Runtime
from tests.harness.ends import end_of
from tests.harness.in_process import (
    ANSWERS,
    Outcome,
    await_ended_row,
    bodies_of,
    client_of,
    events,
    finish,
    kinds,
    limits_with,
    order,
    plan_text,
    pool_text,
    running_service,
    script_answers,
    script_plans,
)
from tests.harness.waiting import until
from tests.stubs import Fail, Hang, ProviderStub, Reply
from tests.stubs import Usage as Used

TIER = "baton-nested"
ITSELF = 3
"""The ordinal behind those of the three workers."""
OUTER = plan_text((0, "Draft it", ["user"]), (ITSELF, "Take it apart", [0]), (1, "Put it together", ["user", 1]))
INNER = plan_text((1, "Look at it", ["user"]), (2, "Say it", ["user", 0]))
ALONE = plan_text((ITSELF, "Do it all", ["user"]))
SIMPLE = plan_text((0, "Just do it", ["user"]))
SETTINGS = {"BATON_LEASE_SECONDS": "0.6"}


@pytest.fixture(autouse=True)
def script_all_answers(stub: ProviderStub) -> None:
    script_answers(stub)


async def run(runtime: Runtime, **changes: Any) -> Outcome:
    """A run of one round, if nothing else is said."""
    changes = {"limits": limits_with(runtime, TIER, rounds=1)} | changes
    return await finish(await runtime.runs.start(order(runtime, TIER, **changes)))


def prompt_of(stub: ProviderStub, model: str, place: int = -1) -> str:
    """Return all that a model was shown in one of its calls."""
    return "\n".join(str(message["content"]) for message in stub.requests_for(model)[place].json["messages"])


def prompt_of_subtask(stub: ProviderStub, subtask: str) -> str:
    """Return all that the worker of this subtask was shown."""
    for name in ANSWERS:
        for place, call in enumerate(stub.requests_for(name)):
            if str(call.json["messages"][-1]["content"]).endswith(f"Your subtask:\n{subtask}"):
                return prompt_of(stub, name, place)
    raise AssertionError(f"nobody was given {subtask}")


# -- what it is


async def test_a_workflow_inside_a_step_gives_that_steps_answer(stub: ProviderStub, runtime: Runtime) -> None:
    script_plans(stub, OUTER, INNER)
    outcome = await run(runtime)
    state, journal = outcome.ended.state, await events(runtime, outcome.ended.state.run)
    assert (outcome.ended.error, state.degraded, end_of(state).step) == (None, False, 2)
    assert [
        (body["proposal"], body.get("parent"), body.get("room")) for body in bodies_of(journal, Kind.PLAN_OPENED)
    ] == [
        (0, None, None),
        (1, 1, 2),
    ], "of four steps, two are the workers' of the plan around it"
    assert [(step.n, step.state) for step in state.planned_steps] == [(n, "done") for n in range(5)]
    assert [body["n"] for body in bodies_of(journal, Kind.STEP_DONE)] == [0, 3, 4, 1, 2]
    assert bodies_of(journal, Kind.STEP_DONE, n=1)[0] | {"n": 4} == bodies_of(journal, Kind.STEP_DONE, n=4)[0] | {
        "from": 4
    }
    assert not bodies_of(journal, Kind.STEP_QUEUED, n=1), "nobody has a ticket for it"
    assert outcome.ended.answer == ANSWERS[state.steps[2].worker]
    row = await runtime.context.store.run(state.run)
    assert (row.steps, row.topology, row.degraded) == (5, "chain", False)


async def test_a_step_inside_sees_its_parents_view_or_nothing_of_it(stub: ProviderStub, runtime: Runtime) -> None:
    """The step was given one answer, and not the question: nor is anybody inside, nor the conductor."""
    inner = plan_text((1, "Look at it", ["user"]), (2, "Say it", [0]))
    script_plans(stub, OUTER, inner)
    outcome = await run(runtime, text="A question?")
    journal = await events(runtime, outcome.ended.state.run)
    assert [(body["n"], body.get("parent"), body["access"]) for body in bodies_of(journal, Kind.PLAN_STEP)] == [
        (0, None, ["user"]),
        (1, None, [0]),
        (2, None, ["user", 1]),
        (3, 1, [0]),
        (4, 1, [3]),
    ]
    draft = outcome.ended.state.steps[0].worker
    planning, first, second = (
        prompt_of(stub, "planner", 1),
        prompt_of_subtask(stub, "Look at it"),
        prompt_of_subtask(stub, "Say it"),
    )
    for text in (planning, first):
        assert "A question?" not in text
        assert ANSWERS[draft] in text
        assert "The task:\nTake it apart" in text
        assert "Put it together" not in text
    for hidden in ("A question?", ANSWERS[draft], "Draft it", "Take it apart"):
        assert hidden not in second.replace(ANSWERS[outcome.ended.state.steps[3].worker], "")
    assert bodies_of(journal, Kind.CALL_INTENDED, n=None)[1]["access"] == [0], (
        "the conductor reads what the step may see"
    )
    last = prompt_of_subtask(stub, "Put it together")
    assert ANSWERS[outcome.ended.state.steps[4].worker] in last, "what came out is the step's answer"
    assert '<step index="1"' in last
    assert '<step index="4"' not in last


async def test_the_answer_inside_has_the_form_that_the_caller_wants(stub: ProviderStub, runtime: Runtime) -> None:
    """Only the step whose words the caller gets is held to it, and its answer comes whole."""
    for name in ANSWERS:
        stub.always(name, Reply(chunks=('{"a": ', "1}")))
    script_plans(stub, ALONE, plan_text((0, "First", ["user"]), (1, "Last", ["user", 0])))
    form = Form({"type": "object"}, strict=False)
    task = order(runtime, TIER).task
    task = Task(task.messages, Sampling(max_tokens=77), form=form)
    outcome = await run(runtime, task=task, streams=True)
    assert outcome.ended.error is None
    caps = {str(call.json["messages"]): call.json["max_tokens"] for call in _list_calls(stub)}
    assert sorted(caps.values()) == [77, 1000]
    assert outcome.texts == ['{"a": 1}']
    split, state = outcome.ended.bill, outcome.ended.state
    assert split.visible.output == state.calls[state.steps[0].call].usage.output
    assert sum_usages((split.visible, split.orchestration)) == split.turn


def _list_calls(stub: ProviderStub) -> list[Any]:
    return [call for name in ANSWERS for call in stub.requests_for(name)]


async def test_two_steps_may_be_taken_at_once_and_rounds_go_on(stub: ProviderStub, runtime: Runtime) -> None:
    both = plan_text((ITSELF, "Left", ["user"]), (ITSELF, "Right", ["user"]), (0, "Join", [0, 1]))
    again = plan_text((ITSELF, "Mend it", ["previous"]))
    script_plans(stub, both, SIMPLE, SIMPLE, again, SIMPLE)
    outcome = await run(runtime, limits=limits_with(runtime, TIER))
    state, journal = outcome.ended.state, await events(runtime, outcome.ended.state.run)
    assert (outcome.ended.error, state.degraded, state.round_count, len(state.nested)) == (None, False, 2, 3)
    assert [body["round"] for body in bodies_of(journal, Kind.PLAN_OPENED)] == [1, 1, 1, 2, 2]
    assert [body["proposal"] for body in bodies_of(journal, Kind.PLAN_OPENED)] == [0, 1, 2, 3, 4]
    assert ANSWERS[state.steps[2].worker] in prompt_of(stub, "planner", 4), "the answer before is this step's to see"
    assert "What is 2 + 2?" not in prompt_of(stub, "planner", 4)
    shown_before = prompt_of(stub, "planner", 3)
    assert f"- step 0, worker {ITSELF}, access user: Left" in shown_before
    assert outcome.ended.answer == ANSWERS[state.steps[6].worker]


# -- bounds


async def test_a_conductor_that_always_takes_the_step_itself_is_held(stub: ProviderStub, runtime: Runtime) -> None:
    stub.always("planner", Reply(chunks=(ALONE,)))
    outcome = await run(runtime)
    state = outcome.ended.state
    assert (outcome.ended.error, state.degraded) == (None, True)
    assert outcome.ended.answer in ANSWERS.values()
    assert (len(state.nested), len(stub.requests_for("planner"))) == (2, 4), (
        "one plan a level; the deepest is mended once"
    )
    assert [proposal.mode for proposal in state.nested[1]] == ["first", "repair", "fallback"]
    assert len(_list_calls(stub)) == 1


@pytest.mark.long
async def test_not_even_one_that_takes_all_of_them(stub: ProviderStub, runtime: Runtime) -> None:
    everything = plan_text(*((ITSELF, f"Part {place}", ["user"]) for place in range(4)))
    stub.always("planner", Reply(chunks=(everything,)))
    state = (await run(runtime)).ended.state
    assert state.state == "succeeded"
    assert sum(not step.opens_workflow for step in state.planned_steps) == 4, "as many as in a plan without any"
    assert len(state.nested) <= 8


async def test_it_is_offered_only_where_depth_is_left(stub: ProviderStub, runtime: Runtime) -> None:
    script_plans(stub, ALONE, ALONE, SIMPLE)
    outcome = await run(runtime)
    assert not outcome.ended.state.degraded
    requests = [call.json for call in stub.requests_for("planner")]
    ordinals = [_first_step(call)["properties"]["worker"]["enum"] for call in requests]
    assert ordinals == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2]]
    assert ["Worker 3: you" in str(call["messages"]) for call in requests] == [True, True, False]
    journal = await events(runtime, outcome.ended.state.run)
    assert [body["order"][3:] for body in bodies_of(journal, Kind.PLAN_OPENED)] == [[CONDUCTOR], [CONDUCTOR], []]


def _first_step(call: dict[str, Any]) -> dict[str, Any]:
    schema = call["response_format"]["json_schema"]["schema"]
    return dict(schema["properties"]["steps"]["prefixItems"][0])


async def test_it_is_not_offered_where_tools_are_or_to_a_callers_plan(stub: ProviderStub, runtime: Runtime) -> None:
    box = Toolbox((Tool("look", "Looks something up."),))
    script_plans(stub, SIMPLE)
    outcome = await run(runtime, task=Task(order(runtime, TIER).task.messages, toolbox=box))
    assert outcome.ended.state.admitted.limits.depth == 0
    assert "Worker 3" not in prompt_of(stub, "planner")
    async with client_of(runtime) as client:
        plan = {"steps": [{"worker": CONDUCTOR, "subtask": "Do it", "access": ["user"]}]}
        question = {"model": TIER, "messages": [{"role": "user", "content": "Hello?"}], "baton": {"plan": plan}}
        refused = await client.post("/v1/chat/completions", json=question)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_plan")


async def test_money_is_the_runs(stub: ProviderStub, runtime: Runtime) -> None:
    """Money that the outer run has spent is missing inside: no plan is requested, and a worker answers alone."""
    stub.always("planner", Reply(chunks=(ALONE,), usage=Used(input=3_000, output=2_800)))
    outcome = await run(runtime, limits=limits_with(runtime, TIER, rounds=1, usd=13_000))
    state = outcome.ended.state
    assert (state.state, state.degraded) == ("succeeded", True)
    assert [trial.reasons for tries in state.nested.values() for trial in tries] == [("run_over_budget",), ()]
    assert len(stub.requests_for("planner")) == 1
    assert state.usd <= 13_000


# -- failures inside


async def test_a_plan_inside_is_mended(stub: ProviderStub, runtime: Runtime) -> None:
    script_plans(stub, ALONE, plan_text((9, "Nobody", ["user"])), SIMPLE)
    outcome = await run(runtime)
    state = outcome.ended.state
    assert (outcome.ended.error, state.degraded) == (None, False)
    assert [proposal.mode for proposal in state.nested[0]] == ["first", "repair"]
    assert "worker is not an eligible worker" in prompt_of(stub, "planner", 2)
    assert "Nobody" in prompt_of(stub, "planner", 2)
    assert "Do it all" in prompt_of(stub, "planner", 2)


async def test_a_conductor_that_is_out_is_stood_in_for_inside(stub: ProviderStub, runtime: Runtime) -> None:
    script_plans(stub, ALONE)
    stub.always("planner", Fail(status=400))
    outcome = await run(runtime)
    state, journal = outcome.ended.state, await events(runtime, outcome.ended.state.run)
    assert (outcome.ended.error, state.degraded) == (None, True)
    assert [(proposal.mode, proposal.outage) for proposal in state.nested[0]] == [("first", True), ("fallback", False)]
    assert outcome.ended.answer == ANSWERS["beta"]
    assert [body["conductor"] for body in bodies_of(journal, Kind.PLAN_OPENED)] == ["model", "model", "fallback"]
    assert "Do it all" in prompt_of(stub, "beta")


async def test_a_step_whose_workflow_is_lost_is_a_failed_step(stub: ProviderStub, runtime: Runtime) -> None:
    script_plans(stub, ALONE, SIMPLE)
    for name in ANSWERS:
        stub.always(name, Fail(status=400))
    state = (await run(runtime)).ended.state
    assert (state.state, state.steps[0].state) == ("failed", "failed")
    assert state.steps[0].error == state.steps[1].error != ""
    stub.clear()
    script_answers(stub)
    script_plans(stub, OUTER, INNER)
    assert (await run(runtime)).ended.state.state == "succeeded"


async def test_a_cancelled_run_stops_what_is_inside(stub: ProviderStub, runtime: Runtime) -> None:
    script_plans(stub, ALONE, SIMPLE)
    for name in ANSWERS:
        stub.always(name, Hang())
    limits = limits_with(runtime, TIER, rounds=1)
    followed_run = await runtime.runs.start(order(runtime, TIER, limits=limits))
    await stub.wait_for(2, "planner")
    await until(lambda: any(stub.requests_for(name) for name in ANSWERS), what="a worker inside is called")
    runtime.runs.cancellations.ask(followed_run.run, "caller")
    state = (await finish(followed_run)).ended.state
    assert state.state == "cancelled"
    assert all(step.settled for step in state.steps.values())
    assert not state.open_calls


# -- a driver that dies


async def _again(stub: ProviderStub, tmp_path: Path, run_id: str) -> tuple[Event, ...]:
    """Another process finishes the run."""
    async with running_service(tmp_path, pool_text(stub), SETTINGS) as again:
        await await_ended_row(again.context.store, run_id)
        return await events(again, run_id)


@pytest.mark.long
async def test_a_driver_that_dies_over_a_plan_inside_is_replaced(stub: ProviderStub, tmp_path: Path) -> None:
    """Nothing that was done is done again, and no plan is made twice."""
    script_plans(stub, OUTER)
    stub.script("planner", Hang())
    async with running_service(tmp_path, pool_text(stub), SETTINGS) as runtime:
        limits = limits_with(runtime, TIER, rounds=1)
        followed_run = await runtime.runs.start(order(runtime, TIER, on_disconnect="finish", limits=limits))
        await stub.wait_for(2, "planner")
    script_plans(stub, INNER)
    journal = await _again(stub, tmp_path, followed_run.run)
    assert journal[-1].kind is Kind.SUCCEEDED
    assert [(body.get("parent"), body["mode"]) for body in bodies_of(journal, Kind.PLAN_OPENED)] == [
        (None, "first"),
        (1, "first"),
        (1, "first"),
    ]
    assert [body["reasons"] for body in bodies_of(journal, Kind.PLAN_REJECTED)] == [[DRIVER_LOST]]
    assert len(_list_calls(stub)) == 4
    assert kinds(journal).count(Kind.CALL_INTENDED) == kinds(journal).count(Kind.CALL_FINISHED)


@pytest.mark.long
async def test_a_driver_that_dies_with_steps_inside_is_replaced(stub: ProviderStub, tmp_path: Path) -> None:
    """The plan inside is made, and nobody has begun to carry it out."""
    script_plans(stub, ALONE, INNER)
    async with running_service(tmp_path, pool_text(stub), SETTINGS, dispatches=False) as runtime:
        limits = limits_with(runtime, TIER, rounds=1)
        followed_run = await runtime.runs.start(order(runtime, TIER, on_disconnect="finish", limits=limits))

        async def planned_inside() -> bool:
            return kinds(await events(runtime, followed_run.run)).count(Kind.PLAN_ACCEPTED) == 2

        await until(planned_inside)
    journal = await _again(stub, tmp_path, followed_run.run)
    assert journal[-1].kind is Kind.SUCCEEDED
    assert (len(bodies_of(journal, Kind.PLAN_OPENED)), len(stub.requests_for("planner"))) == (2, 2), (
        "no plan is made twice"
    )
    assert [body["n"] for body in bodies_of(journal, Kind.STEP_DONE)] == [1, 2, 0], "each once"


# -- what is told


async def test_a_run_is_shown_as_a_tree(stub: ProviderStub, runtime: Runtime) -> None:
    script_plans(stub, OUTER, INNER)
    async with client_of(runtime) as client:
        question = {"model": TIER, "messages": [{"role": "user", "content": "Hello?"}]}
        body = question | {"baton": {"budget": {"rounds": 1}}}
        baton = (await client.post("/v1/chat/completions", json=body)).json()["baton"]
        assert [proposal.get("parent") for proposal in baton["proposals"]] == [None, 1]
        assert [step.get("parent") for step in baton["steps"]] == [None, None, None, 1, 1]
        run_id = baton["run"]
        whole = (await client.get(f"/v1/runs/{run_id}")).json()
        assert [proposal["parent"] for proposal in whole["proposals"]] == [None, 1]
        assert [step["parent"] for step in whole["steps"]] == [None, None, None, 1, 1]
        assert whole["limits"]["depth"] == 2
        step = (await client.get(f"/v1/runs/{run_id}/steps/1")).json()
        assert step["messages"][-1]["content"][0]["text"].endswith("The task:\nTake it apart")
        assert step["output"] == ANSWERS[whole["steps"][4]["worker"]]
    store = runtime.context.store
    record, question = await run_tree.read_run(store, await store.run(run_id))
    out = StringIO()
    Console(file=out, width=160).print(run_tree.draw(record, question, full=False))
    lines = out.getvalue().splitlines()
    at = {}
    for name in ("step 1 ", "step 3 ", "step 4 "):
        at[name] = next(line.index(name) for line in lines if name in line)
    assert at["step 3 "] == at["step 4 "] > at["step 1 "]
    inner = next(line for line in lines if "proposal 1" in line)
    assert inner.index("proposal 1") == at["step 3 "]
    assert any("the conductor itself" in line for line in lines)


@pytest.mark.parametrize(("seconds", "state"), [(None, "failed"), (2, "expired")])
async def test_a_nested_plan_that_nobody_approves_ends_the_run_although_its_answering_step_is_done(
    stub: ProviderStub, tmp_path: Path, seconds: int | None, state: str
) -> None:
    """The auditor knows that the answer is not given then."""
    script_plans(stub, plan_text((ITSELF, "Take it apart", ["user"]), (1, "Answer it", ["user"])), INNER)
    asks = f"\n[tiers.{TIER}.approval]\nalways = true\nfour_eyes = false\nseconds = {seconds or 60}\n"
    async with running_service(tmp_path, pool_text(stub) + asks) as runtime:
        first = (await run(runtime)).ended.state

        async def latest_question() -> str:
            asked = bodies_of(await events(runtime, first.run), Kind.AWAITING_APPROVAL)
            return str(asked[-1]["digest"])

        outer = await latest_question()
        await runtime.runs.decide(first.run, None, Decision("approve", outer, "somebody", ""))

        async def asks_again() -> bool:
            return await latest_question() != outer

        await until(asks_again)
        if seconds is None:
            await runtime.runs.decide(first.run, None, Decision("refuse", await latest_question(), "somebody", ""))
        row = await await_ended_row(runtime.context.store, first.run)
    assert row.state == state
