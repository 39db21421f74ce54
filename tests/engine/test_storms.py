"""Storms and waiting: how many attempts a failing pool gets, and how long a step waits for Retry-After (F-21)."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from app.core.pool.breaker import ENOUGH_SUCCESSES, FREE_RETRIES, RETRY_SHARE
from app.core.run.events import Kind
from app.process.wiring import Runtime
from tests.harness.in_process import Outcome, events, finish, kinds, limits_with, order, pool_text, running_service
from tests.harness.waiting import until
from tests.stubs import Fail, ProviderStub, Reply

ANSWER = "Hello there."
RETRY_DELAY = 0.5
"""The seconds for which rate-limited workers ask to be left alone."""


@pytest.fixture
async def lonely(stub: ProviderStub, tmp_path: Path) -> AsyncIterator[Runtime]:
    """A service with one worker."""
    text = (
        pool_text(stub)
        .replace('["alpha", "beta", "gamma"]', '["alpha"]')
        .replace('workers = ["alpha", "beta"]', 'workers = ["alpha"]')
        .replace('fallback = "beta"', 'fallback = "alpha"')
    )
    async with running_service(tmp_path, text) as running:
        yield running


async def run(runtime: Runtime, **changes: Any) -> Outcome:
    """One run, to its end."""
    return await finish(await runtime.runs.start(order(runtime, "baton-mini", **changes)))


# -- storms


@pytest.mark.parametrize(
    ("act", "warm"),
    [
        pytest.param(Fail(status=429), False, id="429"),
        pytest.param(Fail(status=429, retry_after=0.2), False, id="429 soon"),
        pytest.param(Fail(status=429, retry_after=0.8), True, id="429 later"),
        pytest.param(Fail(status=429, retry_after=3_600), False, id="429 much later"),
        pytest.param(Fail(status=503, delay=0.02), False, id="503"),
        pytest.param(Fail(status=503, delay=0.02), True, id="503 out of calm"),
    ],
)
@pytest.mark.long
async def test_a_storm_gets_little_more_than_one_attempt_a_call(
    stub: ProviderStub, runtime: Runtime, act: Fail, warm: bool
) -> None:
    runs = 48
    if warm:
        await asyncio.gather(*(run(runtime) for _ in range(5)))
    stub.clear()
    stub.always("*", act)
    outcomes: list[Outcome] = []
    for _ in range(runs // 12):
        outcomes += await asyncio.gather(*(run(runtime) for _ in range(12)))
    assert {outcome.ended.state.state for outcome in outcomes} == {"failed"}
    assert runs <= len(stub.requests) <= (1 + RETRY_SHARE) * runs + 3 * FREE_RETRIES
    counted = runtime.context.telemetry.registry.get_sample_value
    attempts = sum(
        counted("baton_retries_total", {"worker": worker, "kind": kind}) or 0
        for worker in ("alpha", "beta", "gamma")
        for kind in ("retry", "replacement")
    )
    assert attempts == len(stub.requests) - runs


@pytest.mark.long
async def test_a_storm_ends_when_the_workers_are_back(stub: ProviderStub, runtime: Runtime) -> None:
    stub.always("*", Fail(status=429, retry_after=RETRY_DELAY))
    await asyncio.gather(*(run(runtime) for _ in range(20)))
    stub.always("*", Reply())
    await asyncio.sleep(1.2 * RETRY_DELAY)
    outcomes = await asyncio.gather(*(run(runtime) for _ in range(20)))
    assert {outcome.ended.answer for outcome in outcomes} == {ANSWER}


async def test_the_journal_says_that_there_was_no_budget_for_another_attempt(
    stub: ProviderStub, lonely: Runtime
) -> None:
    stub.always("*", Fail(status=500))
    outcomes = [await run(lonely) for _ in range(FREE_RETRIES + 1)]
    *_, failed, _ = await events(lonely, outcomes[-1].ended.state.run)
    assert failed.kind is Kind.STEP_FAILED
    assert failed.body["passed_over"] == [{"worker": "alpha", "reason": "retry_budget"}]
    assert failed.body["error"] == "worker_unavailable"
    counted = lonely.context.telemetry.registry.get_sample_value
    assert counted("baton_retry_budget_exhausted_total", {"worker": "alpha"}) == 1


# -- Retry-After


async def test_a_step_waits_as_long_as_retry_after_says(stub: ProviderStub, runtime: Runtime) -> None:
    stub.script("alpha", Fail(status=429, retry_after=0.7))
    outcome = await run(runtime)
    assert [received.model for received in stub.requests] == ["alpha", "alpha"]
    assert stub.requests[1].at - stub.requests[0].at >= 0.7
    assert outcome.ended.answer == ANSWER


async def test_a_date_is_as_good_as_seconds(stub: ProviderStub, runtime: Runtime) -> None:
    stub.script("alpha", Fail(status=503, retry_after=2, as_date=True))
    await run(runtime)
    assert [received.model for received in stub.requests] == ["alpha", "alpha"]
    assert stub.requests[1].at - stub.requests[0].at >= 0.9


async def test_a_worker_that_wants_to_be_left_alone_for_long_is_replaced_at_once(
    stub: ProviderStub, runtime: Runtime
) -> None:
    stub.always("alpha", Fail(status=429, retry_after=25))
    outcome = await run(runtime)
    assert outcome.ended.answer == ANSWER
    assert [received.model for received in stub.requests] == ["alpha", "beta"]
    assert stub.requests[1].at - stub.requests[0].at < 25
    await run(runtime)
    assert len(stub.requests_for("alpha")) == 1, "and the next run leaves it alone"


@pytest.mark.parametrize("retry_after", [60, 28])
async def test_nobody_waits_beyond_the_runs_deadline(stub: ProviderStub, lonely: Runtime, retry_after: float) -> None:
    stub.always("alpha", Fail(status=429, retry_after=retry_after))
    outcome = await run(lonely, limits=limits_with(lonely, "baton-mini", seconds=25.0))
    assert outcome.ended.state.state == "failed", "it ends at once; waiting until its deadline, it would expire"
    assert len(stub.requests) == 1


async def test_the_only_worker_is_waited_for(stub: ProviderStub, lonely: Runtime) -> None:
    stub.script("alpha", Fail(status=429, retry_after=1.2))
    outcome = await run(lonely)
    assert outcome.ended.answer == ANSWER
    assert stub.requests[1].at - stub.requests[0].at >= 1.2


async def test_a_wait_ends_with_its_run_and_hides_no_outcome(stub: ProviderStub, lonely: Runtime) -> None:
    stub.always("alpha", Fail(status=429, retry_after=20))
    followed_run = await lonely.runs.start(order(lonely, "baton-mini"))
    await stub.wait_for(1)

    async def has_failed() -> bool:
        return kinds(await events(lonely, followed_run.run))[-1] is Kind.CALL_FINISHED

    await until(has_failed)
    journal = await events(lonely, followed_run.run)
    assert (journal[-1].body["blamed"], journal[-1].body["retry_after"]) == ("rate_limited", 20)
    lonely.runs.cancellations.ask(followed_run.run, "client")
    outcome = await finish(followed_run, within=15.0)  # less than what Retry-After says
    assert outcome.ended.state.state == "cancelled"
    assert len(stub.requests) == 1
    await until(lambda: lonely.context.telemetry.registry.get_sample_value("baton_steps_running") == 0)


# -- time


async def calls_seem_slow(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the service learn that its first worker takes more than a hundred seconds for an answer."""
    monkeypatch.setattr(runtime.context.health, "_monotonic", lambda: time.monotonic() + 100.0)
    for _ in range(ENOUGH_SUCCESSES):
        await run(runtime)


async def test_a_step_that_nobody_could_do_in_time_is_not_begun(
    stub: ProviderStub, lonely: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    await calls_seem_slow(lonely, monkeypatch)
    stub.requests.clear()
    outcome = await run(lonely, limits=limits_with(lonely, "baton-mini", seconds=20.0))
    assert stub.requests == []
    assert outcome.ended.state.state == "expired"
    failed = next(event for event in await events(lonely, outcome.ended.state.run) if event.kind is Kind.STEP_FAILED)
    assert failed.body["error"] == "no_time"
    assert failed.body["passed_over"] == [{"worker": "alpha", "reason": "no_time"}]
    assert 0 < failed.body["left"] < 20


async def test_a_worker_that_is_too_slow_for_what_is_left_is_passed_over(
    stub: ProviderStub, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    await calls_seem_slow(runtime, monkeypatch)
    outcome = await run(runtime, limits=limits_with(runtime, "baton-mini", seconds=20.0))
    assert outcome.ended.answer == ANSWER
    assert stub.requests[-1].model == "beta"
