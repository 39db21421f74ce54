"""The conductor's breaker: while it is open the fallback decides at once, and nobody waits for time-outs (F-29)."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.core.pool.breaker import ENOUGH_SUCCESSES, FAILURES_IN_A_ROW
from app.core.run.events import Kind
from app.process.wiring import Runtime
from tests.harness.in_process import Outcome, events, finish, limits_with, order, plan_text, pool_text, running_service
from tests.stubs import Fail, Hang, ProviderStub, Reply

PLAN = Reply(chunks=(plan_text((0, "Solve it", ["user"])),))


@pytest.fixture
async def stub() -> AsyncIterator[ProviderStub]:
    """The providers."""
    async with ProviderStub() as running:
        running.always("planner", PLAN)
        yield running


@pytest.fixture
async def runtime(stub: ProviderStub, tmp_path: Path) -> AsyncIterator[Runtime]:
    """The service."""
    async with running_service(tmp_path, pool_text(stub)) as running:
        yield running


async def run(runtime: Runtime) -> Outcome:
    """One run, to its end."""
    return await finish(await runtime.runs.start(order(runtime, "baton-ultra")))


async def test_an_open_breaker_leads_to_the_fallback_without_a_call(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.always("planner", Hang())
    quick = "[workers.planner]\ndeadlines = { first = 0.3 }\n"
    async with running_service(tmp_path, pool_text(stub).replace("[workers.planner]\n", quick)) as runtime:
        now = time.monotonic()
        monkeypatch.setattr(runtime.context.health, "_monotonic", lambda: now)  # no ejection is ever over
        await asyncio.gather(*(run(runtime) for _ in range(FAILURES_IN_A_ROW)))
        request_count = len(stub.requests_for("planner"))
        outcome = await run(runtime)
        journal = await events(runtime, outcome.ended.state.run)
    assert len(stub.requests_for("planner")) == request_count
    assert outcome.ended.answer == "Hello there."
    state = outcome.ended.state
    assert state.degraded
    assert [(proposal.mode, proposal.outage, proposal.reasons) for proposal in state.proposals] == [
        ("first", True, ("conductor_failing",)),
        ("fallback", False, ()),
    ]
    assert [event.body["worker"] for event in journal if event.kind is Kind.CALL_INTENDED] == ["beta"]


@pytest.mark.long
async def test_one_run_probes_the_conductor_and_brings_it_back(
    stub: ProviderStub, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.always("planner", Fail(status=500))
    for _ in range(FAILURES_IN_A_ROW):
        await run(runtime)
    stub.clear()
    stub.always("planner", Reply(chunks=PLAN.chunks, header_delay=0.5))
    monkeypatch.setattr(runtime.context.health, "_monotonic", lambda: time.monotonic() + 10.0)
    outcomes = await asyncio.gather(*(run(runtime) for _ in range(5)))
    assert {outcome.ended.answer for outcome in outcomes} == {"Hello there."}
    assert len(stub.requests_for("planner")) == 1
    assert sum(outcome.ended.state.degraded for outcome in outcomes) == 4
    assert not (await run(runtime)).ended.state.degraded


@pytest.mark.long
async def test_a_plan_that_was_not_paid_for_keeps_nobody_from_probing(
    stub: ProviderStub, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.always("planner", Fail(status=500))
    for _ in range(FAILURES_IN_A_ROW):
        await run(runtime)
    stub.always("planner", PLAN)
    monkeypatch.setattr(runtime.context.health, "_monotonic", lambda: time.monotonic() + 10.0)
    poor = order(runtime, "baton-ultra", limits=limits_with(runtime, "baton-ultra", usd=1))
    await finish(await runtime.runs.start(poor))
    assert not (await run(runtime)).ended.state.degraded


@pytest.mark.long
async def test_a_bad_plan_is_no_fault_of_the_server_behind_the_conductor(stub: ProviderStub, runtime: Runtime) -> None:
    stub.always("planner", Reply(chunks=("I would rather not.",)))
    for _ in range(FAILURES_IN_A_ROW):
        await run(runtime)
    request_count = len(stub.requests_for("planner"))
    await run(runtime)
    assert len(stub.requests_for("planner")) == request_count + 2


@pytest.mark.long
async def test_a_conductor_that_could_not_plan_in_time_is_not_asked(
    stub: ProviderStub, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        runtime.context.health, "_monotonic", lambda: time.monotonic() + 100.0
    )  # all calls seem to last so long
    for _ in range(ENOUGH_SUCCESSES):
        await run(runtime)
    request_count = len(stub.requests_for("planner"))
    hurried = order(runtime, "baton-ultra", limits=limits_with(runtime, "baton-ultra", seconds=20.0))
    outcome = await finish(await runtime.runs.start(hurried))
    assert outcome.ended.answer == "Hello there."
    assert outcome.ended.state.proposals[0].reasons == ("conductor_no_time",)
    assert len(stub.requests_for("planner")) == request_count
