"""Bugs of ours around a call. One in a provider's adapter is a call that failed, and the run goes on; one after a call
fails the step, and nobody pays for the call again."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest

from app.core.message.chat import Piece, TextDelta
from app.core.plan.proposals import PlanReader
from app.core.run.events import Event, Kind
from app.engine.steps.claimed_step import Relay
from app.engine.steps.execution import Execution
from app.process.wiring import Runtime
from app.providers.adapters.openai import OpenAIProvider
from app.providers.protocol import Deadlines, Request
from tests.harness.in_process import Outcome, events, finish, order

Reading = AsyncIterator[list[Piece]]
BROKE = "A provider's adapter failed because of a bug; the call counts as malformed, and the step goes on."


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Workers whose adapter breaks: after the first word where it is told at once, else before there is any."""
    names: set[str] = set()
    stream = OpenAIProvider.stream

    async def breaking(request: Request) -> Reading:
        if request.live:
            yield [TextDelta("So")]
        raise KeyError("choices")

    def broken_stream(adapter: OpenAIProvider, request: Request, body: bytes, deadlines: Deadlines) -> Reading:
        return breaking(request) if request.worker.name in names else stream(adapter, request, body, deadlines)

    monkeypatch.setattr(OpenAIProvider, "stream", broken_stream)
    return names


def of(journal: Sequence[Event], kind: Kind) -> list[Mapping[str, Any]]:
    """The bodies of its events of a kind."""
    return [event.body for event in journal if event.kind is kind]


async def run(runtime: Runtime, tier: str, **changes: Any) -> tuple[Outcome, list[Event]]:
    """One run to its end, and its journal."""
    outcome = await finish(await runtime.runs.start(order(runtime, tier, **changes)))
    return outcome, await events(runtime, outcome.ended.state.run)


@pytest.mark.long
async def test_the_step_is_tried_again_and_then_by_another_worker(
    runtime: Runtime, broken: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    broken.add("alpha")
    outcome, journal = await run(runtime, "baton-mini")
    assert outcome.ended.error is None
    intents, ends = of(journal, Kind.CALL_INTENDED), of(journal, Kind.CALL_FINISHED)
    assert [intent["worker"] for intent in intents] == ["alpha", "alpha", "beta"]
    assert [end["outcome"] for end in ends] == ["error", "error", "ok"]
    for intent, end in zip(intents[:2], ends[:2], strict=True):
        assert (end["error"], end["usd"], end["usage"]["estimated"]) == ("adapter_broke", intent["usd_held"], True)
    logged = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.getMessage() for record in logged] == [BROKE, BROKE]
    assert {record.exc_info[0] for record in logged if record.exc_info} == {KeyError}


@pytest.mark.long
async def test_an_answer_that_was_begun_is_not_begun_again(runtime: Runtime, broken: set[str]) -> None:
    broken.add("alpha")
    outcome, journal = await run(runtime, "baton-mini", streams=True)
    assert outcome.ended.error is not None
    (intent,), (end,) = of(journal, Kind.CALL_INTENDED), of(journal, Kind.CALL_FINISHED)
    assert (end["outcome"], end["usd"], end["usage"]["estimated"]) == ("error", intent["usd_held"], True)
    assert [failed["error"] for failed in of(journal, Kind.STEP_FAILED)] == ["adapter_broke"]


async def test_the_conductors_is_an_outage(runtime: Runtime, broken: set[str]) -> None:
    broken.add("planner")
    outcome, journal = await run(runtime, "baton-ultra")
    assert outcome.ended.error is None
    assert [(rejection["reasons"], rejection["outage"]) for rejection in of(journal, Kind.PLAN_REJECTED)] == [
        (["adapter_broke"], True)
    ]


async def test_a_bug_that_a_cancellation_brings_to_light_is_a_cancellation(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hanging = asyncio.Event()

    async def untidy(*_: object) -> Reading:
        try:
            hanging.set()
            await asyncio.Event().wait()
            yield []
        finally:
            raise RuntimeError

    monkeypatch.setattr(OpenAIProvider, "stream", untidy)
    followed_run = await runtime.runs.start(order(runtime, "baton-mini"))
    await hanging.wait()
    runtime.runs.cancellations.ask(followed_run.run, "caller")
    outcome = await finish(followed_run)
    (end,) = of(await events(runtime, followed_run.run), Kind.CALL_FINISHED)
    assert (outcome.ended.state.state, end["outcome"], "error" in end) == ("cancelled", "cancelled", False)
    assert [record.getMessage() for record in caplog.records if record.exc_info] == [BROKE]


@pytest.mark.parametrize(
    ("place", "method", "outcome"), [(Relay, "delta", "cancelled"), (Execution, "_step_done", "ok")]
)
async def test_a_bug_after_a_call_fails_the_step_and_nobody_pays_for_the_call_again(
    runtime: Runtime,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    place: type,
    method: str,
    outcome: str,
) -> None:
    def break_down(*_: object) -> None:
        raise KeyError("text")

    monkeypatch.setattr(place, method, break_down)
    reply, journal = await run(runtime, "baton-mini", streams=True)
    (end,) = of(journal, Kind.CALL_FINISHED)
    assert (end["outcome"], end["usd"] > 0) == (outcome, True)
    assert [failed["error"] for failed in of(journal, Kind.STEP_FAILED)] == ["internal_error"]
    assert reply.ended.error is not None
    assert (reply.ended.error.status, reply.ended.error.public_code) == (502, "internal_error")
    assert [record.getMessage() for record in caplog.records if record.exc_info] == [
        "A step failed because of a bug after its worker was called; the outcome of the call is kept."
    ]


async def test_a_bug_in_the_reading_of_a_plan_leaves_the_run_to_its_fallback(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def break_down(*_: object) -> None:
        raise KeyError("steps")

    monkeypatch.setattr(PlanReader, "feed", break_down)
    outcome, journal = await run(runtime, "baton-ultra")
    assert outcome.ended.error is None
    assert [(plan["reasons"], plan["outage"]) for plan in of(journal, Kind.PLAN_REJECTED)] == [
        (["conductor_failed"], True)
    ]
    planned = [end for end in of(journal, Kind.CALL_FINISHED) if "n" not in end or end["n"] is None]
    assert [end["outcome"] for end in planned] == ["cancelled"]
    assert [record.getMessage() for record in caplog.records if record.exc_info] == [
        "A plan could not be made because of a bug; the run goes on without it."
    ]
