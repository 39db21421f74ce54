"""Real runs of every kind keep every rule: plans, repairs, fallbacks, retries, failures, cancellations, budgets."""

import json

import pytest

from app.audit.report import Report
from app.core.message.chat import Message, Task, Text, Tool, Toolbox
from app.core.run.events import Kind
from app.gateway.runs.audit import render_run
from app.process.wiring import Runtime
from tests.harness.audited import audit_report
from tests.harness.in_process import events, finish, limits_with, order, plan, plan_text
from tests.stubs import Fail, Hang, ProviderStub, Reply, ToolCall, Truncate


async def clean(runtime: Runtime, *, runs: int = 1, calls: int | None = None) -> Report:
    """No violation, and every request was composed and rendered again."""
    report = await audit_report(runtime.pool.configuration.settings.database_url, settle=3)
    assert [str(violation) for violation in report.violations] == []
    assert report.runs == runs
    assert calls is None or report.calls == calls
    assert report.rebuilt_requests + report.unverifiable.total() >= report.calls
    return report


async def test_one_call(runtime: Runtime) -> None:
    await finish(await runtime.runs.start(order(runtime, "baton-mini")))
    await clean(runtime, calls=1)


async def test_a_dear_plan_that_waits_for_an_approval(runtime: Runtime) -> None:
    followed_run = await runtime.runs.start(order(runtime, "baton-mini", "Count these. " * 8_000, approval=True))
    await finish(followed_run)
    journal = await events(runtime, followed_run.run)
    [question] = [event.body for event in journal if event.kind is Kind.AWAITING_APPROVAL]
    assert question["price"] > 100_000  # ten cents
    await clean(runtime)


@pytest.mark.long
async def test_a_conducted_run_while_it_streams_and_after(stub: ProviderStub, runtime: Runtime) -> None:
    stub.always("planner", Reply(chunks=tuple(plan_text((0, "Plan it", ["user"]), (1, "Solve it", ["user", 0])))))
    stub.always("alpha", Reply(chunks=("Do", " this"), gap=0.02))
    followed_run = await runtime.runs.start(order(runtime, "baton-ultra", streams=True))
    while not any(event.kind is Kind.STEP_DONE for event in await events(runtime, followed_run.run)):
        await clean(runtime)
    await finish(followed_run)
    await clean(runtime, calls=3)


async def test_a_conductor_that_is_shown_parts_of_a_long_message(stub: ProviderStub, runtime: Runtime) -> None:
    """It only plans, so it reads both ends and the outline; the worker reads all of it. The journal has the number."""
    stub.script("planner", Reply(chunks=(plan_text((0, "Solve it", ["user"])),)))
    text = "Sum this up.\n" + "The minutes of a meeting. " * 2_000
    task = Task((Message("user", (Text(text),)),))
    followed_run = await runtime.runs.start(order(runtime, "baton-ultra", task=task))
    await finish(followed_run)
    planning, answered = [received.json for received in stub.requests if "messages" in received.json]
    assert len(json.dumps(planning["messages"])) < 12_000
    assert text[-2_000:] in planning["messages"][1]["content"]
    assert any(message["content"] == text for message in answered["messages"])
    facts = [event.body for event in await events(runtime, followed_run.run) if event.kind is Kind.CALL_INTENDED]
    assert [(fact["template"], fact.get("left_out", 0)) for fact in facts] == [
        ("plan-2-parts", len(text) - 6_000),
        ("step-1", 0),
    ]
    store, name = runtime.context.store, followed_run.run
    shown = render_run(await store.run(name), await store.journal(name))
    attempts = (*shown["proposals"][0]["attempts"], *shown["steps"][0]["attempts"])
    assert [attempt["left_out"] for attempt in attempts] == [len(text) - 6_000, 0]
    await clean(runtime, calls=2)


async def test_a_repaired_plan(stub: ProviderStub, runtime: Runtime) -> None:
    stub.script("planner", Reply(chunks=(plan_text((7, "Solve it", ["user"])),)))
    stub.script("planner", Reply(chunks=(plan_text((0, "Solve it", ["user"])),)))
    await finish(await runtime.runs.start(order(runtime, "baton-ultra")))
    await clean(runtime, calls=3)


async def test_a_fallback(stub: ProviderStub, runtime: Runtime) -> None:
    stub.always("planner", Fail(status=500))
    await finish(await runtime.runs.start(order(runtime, "baton-ultra")))
    await clean(runtime)


async def test_retries_replacements_and_lost_inputs(stub: ProviderStub, runtime: Runtime) -> None:
    stub.script("alpha", Fail(status=503), Reply(fault=Truncate(after=1)))
    for worker in ("beta", "gamma"):
        stub.always(worker, Fail(status=500))
    steps = plan(("alpha", "One", ["user"]), ("beta", "Two", [0]), ("alpha", "Three", ["user", 1]))
    await finish(await runtime.runs.start(order(runtime, "baton-ultra", plan=steps)))
    await clean(runtime)


async def test_a_cancelled_run(stub: ProviderStub, runtime: Runtime) -> None:
    for worker in ("alpha", "beta", "gamma"):
        stub.always(worker, Hang())
    steps = plan(("alpha", "One", ["user"]), ("beta", "Two", ["user"]), ("gamma", "Three", [0, 1]))
    followed_run = await runtime.runs.start(order(runtime, "baton-ultra", plan=steps))
    await stub.wait_for(2)
    runtime.runs.cancellations.ask(followed_run.run, "caller")
    assert (await finish(followed_run)).ended.state.state == "cancelled"
    await clean(runtime, calls=2)


@pytest.mark.long
async def test_an_expired_run(stub: ProviderStub, runtime: Runtime) -> None:
    stub.always("*", Hang())
    short = limits_with(runtime, "baton-mini", seconds=0.4)
    assert (await finish(await runtime.runs.start(order(runtime, "baton-mini", limits=short)))).ended.error
    await clean(runtime)


async def test_a_run_over_its_budget(runtime: Runtime) -> None:
    poor = limits_with(runtime, "baton-mini", usd=10)
    assert (await finish(await runtime.runs.start(order(runtime, "baton-mini", limits=poor)))).ended.error
    await clean(runtime, calls=0)


async def test_a_preview(stub: ProviderStub, runtime: Runtime) -> None:
    stub.always("planner", Reply(chunks=(plan_text((0, "Solve it", ["user"])),)))
    await finish(await runtime.runs.start(order(runtime, "baton-ultra", preview=True)))
    await clean(runtime, calls=1)


async def test_erased_content_breaks_no_rule(runtime: Runtime) -> None:
    outcome = await finish(await runtime.runs.start(order(runtime, "baton-mini")))
    assert await runtime.context.store.erase(outcome.ended.state.run)
    report = await clean(runtime)
    assert (report.rebuilt_requests, report.unverifiable) == (0, {"erased": 1})


async def test_calls_of_tools_that_a_round_did_not_wait_for(stub: ProviderStub, runtime: Runtime) -> None:
    """A step of the first round calls tools, and its answer needs none of that; one of the second round calls them."""
    first = {"steps": [
        {"worker": 0, "subtask": "Look", "access": ["user"], "tools": True},
        {"worker": 1, "subtask": "Answer", "access": ["user"], "tools": False},
    ]}  # fmt: skip
    second = {"steps": [{"worker": 0, "subtask": "Look again", "access": ["previous"], "tools": True}]}
    calls = Reply(tool_calls=(ToolCall("look", '{"q":"a"}', "theirs"),), finish="tool")
    answers = Reply(chunks=("An answer.",), header_delay=0.2)
    stub.always("*", lambda received: calls if "Look" in str(received.json["messages"]) else answers)
    for text in (first, second):
        stub.script("planner", Reply(chunks=(json.dumps(text),)))
    task = Task((Message("user", (Text("What is it?"),)),), toolbox=Toolbox((Tool("look", "Looks something up."),)))
    ended = (await finish(await runtime.runs.start(order(runtime, "baton-deep", task=task)))).ended
    assert [step.state for step in ended.state.steps.values()] == ["skipped", "done", "awaiting_tool"]
    await clean(runtime)


@pytest.mark.long
async def test_many_runs_at_once(stub: ProviderStub, runtime: Runtime) -> None:
    stub.always("planner", Reply(chunks=tuple(plan_text((0, "Plan", ["user"]), (1, "Go", [0]), (2, "Sum", [0, 1])))))
    tiers = ["baton-mini", "baton-ultra"] * 10
    for followed_run in [await runtime.runs.start(order(runtime, tier)) for tier in tiers]:
        await finish(followed_run)
    await clean(runtime, runs=20)
