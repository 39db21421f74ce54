"""Breakers in a running service: what ejects a worker, who is called in its stead, and how it comes back (F-22)."""

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from app.core.message.chat import Usage
from app.core.plan.workflow import Access
from app.core.pool.catalog import Amount
from app.core.run.events import CallFinished, CallIntended, Kind
from app.engine.calls.step_request import WAIT_FOR_OTHERS_SECONDS
from app.process.wiring import Runtime
from app.stepqueue.protocol import CommittedEvents
from app.store.protocol import AppendResult, Entry, TicketMove
from tests.harness.in_process import Outcome, events, finish, limits_with, order, plan, pool_text, running_service
from tests.harness.waiting import until
from tests.stubs import Fail, Hang, ProviderStub, Reply

DOWN = Fail(status=503)
ANSWER = "Hello there."


async def run(runtime: Runtime, tier: str = "baton-mini", **changes: Any) -> Outcome:
    """One run, to its end."""
    return await finish(await runtime.runs.start(order(runtime, tier, **changes)))


async def intents(runtime: Runtime, outcome: Outcome) -> list[dict[str, Any]]:
    """The bodies of its `call.intended`."""
    journal = await events(runtime, outcome.ended.state.run)
    return [dict(event.body) for event in journal if event.kind is Kind.CALL_INTENDED]


def later(runtime: Runtime, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let so much time pass for the breakers, and then none. On a slow machine an ejection would be over before a test
    is, and a probe that fails is the next ejection."""
    now = time.monotonic() + seconds
    monkeypatch.setattr(runtime.context.health, "_monotonic", lambda: now)


@pytest.fixture
def runtime(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """A service whose breakers see no time pass."""
    later(runtime, monkeypatch, 0.0)
    return runtime


def ejections(runtime: Runtime, worker: str) -> float | None:
    """Return the number of ejections for failures, as `/metrics` has it."""
    labels = {"worker": worker, "reason": "failing"}
    return runtime.context.telemetry.registry.get_sample_value("baton_ejections_total", labels)


def level(runtime: Runtime, worker: str) -> float | None:
    """The breaker's state as `/metrics` has it."""
    return runtime.context.telemetry.registry.get_sample_value("baton_breaker_state", {"worker": worker})


@pytest.mark.parametrize("status", [500, 502, 503, 529])
@pytest.mark.long
async def test_a_worker_that_always_fails_is_ejected_within_ten_calls(
    stub: ProviderStub, runtime: Runtime, status: int
) -> None:
    stub.always("alpha", Fail(status=status))
    outcomes = [await run(runtime) for _ in range(15)]
    assert {outcome.ended.answer for outcome in outcomes} == {ANSWER}
    assert len(stub.requests_for("alpha")) <= 10
    assert level(runtime, "alpha") == 2
    assert level(runtime, "beta") == 0
    assert ejections(runtime, "alpha") == 1


@pytest.mark.long
async def test_runs_in_flight_when_a_worker_dies_all_fail_over(stub: ProviderStub, runtime: Runtime) -> None:
    """Thirty at once, and not a word of anybody before: a few scouts go first, and the others follow them."""
    stub.always("alpha", Fail(status=503, delay=0.1))
    stub.always("beta", Reply(header_delay=0.05))
    outcomes = await asyncio.gather(*(run(runtime) for _ in range(30)))
    assert [outcome.ended.answer for outcome in outcomes] == [ANSWER] * 30
    assert len(stub.requests_for("alpha")) <= 1.2 * 30


@pytest.mark.long
async def test_a_request_that_everybody_refuses_fails_at_once(stub: ProviderStub, runtime: Runtime) -> None:
    """However often it comes: nobody waits for good news of workers that have said all they will."""
    stub.always("*", Fail(status=400))
    for _ in range(6):
        outcome = await asyncio.wait_for(run(runtime), WAIT_FOR_OTHERS_SECONDS / 2)
        assert outcome.ended.state.state == "failed"
    assert [level(runtime, worker) for worker in ("alpha", "beta", "gamma")] == [0, 0, 0]


async def test_the_journal_says_why_the_planned_worker_was_passed_over(stub: ProviderStub, runtime: Runtime) -> None:
    stub.always("alpha", DOWN)
    for _ in range(4):
        await run(runtime)
    outcome = await run(runtime, plan=plan(("alpha", "", ["user"])), stream_steps=True)
    [intent] = await intents(runtime, outcome)
    passed_over = [{"worker": "alpha", "reason": "failing"}]
    assert (intent["worker"], intent["passed_over"]) == ("beta", passed_over)
    call_intent = next(event.body for event in outcome.step_events if event.kind == "call.intended")
    assert call_intent["passed_over"] == passed_over
    assert not outcome.ended.state.degraded


@pytest.mark.long
async def test_a_run_is_planned_without_the_ejected_workers(stub: ProviderStub, runtime: Runtime) -> None:
    stub.always("alpha", DOWN)
    for _ in range(4):
        await run(runtime)
    outcome = await run(runtime)
    admitted = (await events(runtime, outcome.ended.state.run))[0].body
    assert admitted["pool"] == ["beta", "gamma"]
    assert admitted["excluded"] == {"alpha": "ejected: failing"}
    assert "passed_over" not in (await intents(runtime, outcome))[0]


@pytest.mark.long
async def test_the_whole_pool_is_never_ejected(stub: ProviderStub, runtime: Runtime) -> None:
    stub.always("*", DOWN)
    for _ in range(8):
        await run(runtime)
    assert [level(runtime, worker) for worker in ("alpha", "beta", "gamma")] == [2, 2, 2]
    stub.clear()
    outcome = await run(runtime)
    assert outcome.ended.answer == ANSWER
    [intent] = await intents(runtime, outcome)
    assert intent["despite"] == "failing"
    assert level(runtime, intent["worker"]) == 0, "it works again, so it is taken back"


@pytest.mark.long
async def test_one_call_probes_a_worker_and_its_success_brings_it_back(
    stub: ProviderStub, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.always("alpha", DOWN)
    for _ in range(4):
        await run(runtime)
    stub.clear()
    stub.always("alpha", Reply(header_delay=1.0))
    later(runtime, monkeypatch, 10.0)
    assert level(runtime, "alpha") == 1
    outcomes = await asyncio.gather(*(run(runtime) for _ in range(6)))
    assert {outcome.ended.answer for outcome in outcomes} == {ANSWER}
    assert len(stub.requests_for("alpha")) == 1
    reasons = [intent.get("passed_over") for outcome in outcomes for intent in await intents(runtime, outcome)]
    assert reasons.count([{"worker": "alpha", "reason": "probing"}]) == 5
    assert level(runtime, "alpha") == 0
    await run(runtime)
    assert len(stub.requests_for("alpha")) == 2


async def test_a_probe_that_fails_keeps_the_worker_out_and_the_run_goes_on(
    stub: ProviderStub, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.always("alpha", DOWN)
    for _ in range(4):
        await run(runtime)
    stub.requests.clear()
    assert ejections(runtime, "alpha") == 1
    later(runtime, monkeypatch, 10.0)
    outcomes = [await run(runtime) for _ in range(3)]
    assert {outcome.ended.answer for outcome in outcomes} == {ANSWER}
    assert len(stub.requests_for("alpha")) == 1
    assert level(runtime, "alpha") == 2
    assert ejections(runtime, "alpha") == 2, "once its ejection is over it is tried, and ejected anew"


async def test_a_probe_that_was_not_paid_for_does_not_stand_in_the_way(
    stub: ProviderStub, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.always("alpha", DOWN)
    for _ in range(4):
        await run(runtime)
    stub.clear()
    later(runtime, monkeypatch, 10.0)
    poor = await run(runtime, limits=limits_with(runtime, "baton-mini", usd=1))
    assert poor.ended.state.state == "over_budget"
    await run(runtime)
    assert [received.model for received in stub.requests] == ["alpha"]


async def test_a_wrong_key_ejects_at_once_and_is_told_loudly(
    stub: ProviderStub, runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    stub.always("alpha", Fail(status=401))
    with caplog.at_level(logging.ERROR, "baton"):
        for _ in range(3):
            assert (await run(runtime)).ended.answer == ANSWER
    assert len(stub.requests_for("alpha")) == 1
    [record] = [record for record in caplog.records if "misconfigured" in record.message]
    assert record.levelno == logging.ERROR
    assert record.__dict__["fields"]["worker"] == "alpha"


@pytest.mark.long
async def test_a_request_that_is_refused_says_nothing_of_the_worker(stub: ProviderStub, runtime: Runtime) -> None:
    stub.always("alpha", Fail(status=400))
    for _ in range(12):
        assert (await run(runtime)).ended.answer == ANSWER
    assert len(stub.requests_for("alpha")) == 12


async def test_cancelled_runs_say_nothing_of_the_worker(stub: ProviderStub, runtime: Runtime) -> None:
    stub.always("alpha", Hang())
    for number in range(6):
        followed_run = await runtime.runs.start(order(runtime, "baton-mini"))
        await stub.wait_for(number + 1)
        runtime.runs.cancellations.ask(followed_run.run, "client")
        await finish(followed_run)
    assert level(runtime, "alpha") == 0


async def test_no_outcome_is_awaited_of_a_call_that_is_stopped_before_it_was_begun(
    stub: ProviderStub, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.always("alpha", Fail(status=400))
    append = runtime.context.store.append

    async def append_as_a_stop_comes(entry: Entry) -> AppendResult:
        appended = await append(entry)
        if any(isinstance(fact, CallIntended) and fact.worker == "beta" for fact in entry.events):
            runtime.dispatcher.stop(entry.run, None)
        return appended

    monkeypatch.setattr(runtime.context.store, "append", append_as_a_stop_comes)
    followed = await runtime.runs.start(order(runtime, "baton-mini"))
    await until(lambda: not len(runtime.dispatcher))
    runtime.runs.cancellations.ask(followed.run, "client")
    await finish(followed)
    assert stub.requests_for("beta") == []
    assert [breaker.scouts for breaker in runtime.context.health._breakers.values()] == [0, 0]


@pytest.mark.long
async def test_a_callers_tiny_time_limit_says_nothing_of_the_worker(stub: ProviderStub, runtime: Runtime) -> None:
    """Nobody can have a worker ejected for others by being in a hurry."""
    stub.always("*", Hang())
    hurried = limits_with(runtime, "baton-mini", seconds=0.3)
    outcomes = await asyncio.gather(*(run(runtime, limits=hurried) for _ in range(12)))
    assert {outcome.ended.state.state for outcome in outcomes} == {"expired"}
    assert [level(runtime, worker) for worker in ("alpha", "beta", "gamma")] == [0, 0, 0]
    journal = await events(runtime, outcomes[0].ended.state.run)
    assert not any("blamed" in event.body for event in journal)


@pytest.mark.long
async def test_a_worker_that_hangs_is_ejected_too(stub: ProviderStub, tmp_path: Path) -> None:
    quick = "[workers.alpha]\ndeadlines = { first = 0.1 }\n"
    stub.always("alpha", Hang())
    async with running_service(tmp_path, pool_text(stub).replace("[workers.alpha]\n", quick)) as runtime:
        outcomes = [await run(runtime, streams=True) for _ in range(8)]
    assert {outcome.ended.answer for outcome in outcomes} == {ANSWER}
    assert len(stub.requests_for("alpha")) == 5


async def test_an_outcome_that_is_received_late_counts_for_the_time_when_it_was_journaled(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another engine executes the step, and the messages of a minute come at once."""
    async with running_service(tmp_path, pool_text(stub), dispatches=False, audits=False) as runtime:
        followed_run = await runtime.runs.start(order(runtime, "baton-mini"))
        store, then, ages = runtime.context.store, runtime.context.now() - 60.0, list[float]()
        monkeypatch.setattr(runtime.context.health, "note_journaled", lambda _name, _finished, age: ages.append(age))
        due = await store.find_ticket(followed_run.run, 0)
        assert due is not None
        intent = CallIntended("call_0", 0, "alpha", Access(user=True), usd_held=5, tokens_held=7)
        take = TicketMove(0, "take", version=due.version, holder="other", until=then + 120.0)
        claim = await store.append(Entry(followed_run.run, then, (intent,), move=take, hold=Amount(5, 7)))
        finished = CallFinished("call_0", 0, "error", Usage(), usd=0, seconds=0.5, blamed="failing")
        hold = TicketMove(0, "hold", claim=claim.claim)
        ended = await store.append(Entry(followed_run.run, then, (finished,), move=hold, release=Amount(5, 7)))
        runtime.drivers.receive(CommittedEvents(followed_run.run, (*claim.events, *ended.events)))
        await until(lambda: ages)
    assert ages[0] >= 60.0
