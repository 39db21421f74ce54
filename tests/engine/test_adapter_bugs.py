"""A bug of ours in a provider's adapter: a call that failed, with its outcome in the journal; the run goes on."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest

from app.core.message.chat import Piece, TextDelta
from app.core.run.events import Event, Kind
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
