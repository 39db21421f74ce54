"""Deadlines of a worker inside a run: one that hangs, stalls or never ends is left in time for another (F-23)."""

import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from app.core.pool.catalog import Deadlines
from app.core.pool.policy import Overrides
from app.core.run.events import Kind
from app.engine.calls.attempt import SPARE_CHARS, TOKEN_CHARS
from app.process.wiring import Runtime
from app.providers.adapters.openai import OpenAIProvider
from app.providers.protocol import Request
from tests.harness.in_process import bodies_of, events, finish, limits_with, order, plan, pool_text, running_service
from tests.harness.waiting import until
from tests.stubs import Hang, ProviderStub, Reply, Stall, Trickle
from tests.stubs.script import Behaviour


@pytest.fixture
async def runtime(stub: ProviderStub, tmp_path: Path) -> AsyncIterator[Runtime]:
    """A service whose worker alpha must be quick."""
    quick = "[workers.alpha]\ndeadlines = { first = 0.3, gap = 0.3, total = 0.8 }\n"
    async with running_service(tmp_path, pool_text(stub).replace("[workers.alpha]\n", quick)) as running:
        yield running


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("act", [Hang(), Reply(trickle=Trickle(1, 0.05))], ids=["hangs", "drips"])
async def test_a_worker_that_says_nothing_in_time_is_replaced(
    stub: ProviderStub, runtime: Runtime, act: Behaviour, streams: bool
) -> None:
    stub.always("alpha", act)
    outcome = await finish(await runtime.runs.start(order(runtime, "baton-mini", streams=streams)))
    assert outcome.ended.answer == "Hello there."
    assert [call.outcome for call in outcome.ended.state.calls.values()] == ["error", "ok"]
    await until(lambda: all(received.disconnected_at is not None for received in stub.requests_for("alpha")))


async def test_a_worker_to_which_no_connection_comes_about_costs_nothing(stub: ProviderStub, tmp_path: Path) -> None:
    """The server takes the connection and never answers the beginning of TLS."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"https://127.0.0.1:{server.getsockname()[1]}/v1"
        pool = pool_text(stub).replace(stub.vllm_url, url).replace("connect = 30", "connect = 0.3")
        async with running_service(tmp_path, pool) as runtime:
            limits = limits_with(runtime, "baton-mini", attempts=1)
            outcome = await finish(await runtime.runs.start(order(runtime, "baton-mini", limits=limits)))
            [finished] = bodies_of(await events(runtime, outcome.ended.state.run), Kind.CALL_FINISHED)
    assert (finished["usd"], finished["error"], finished["reason"]) == (0, "worker_timeout", "connection")


@pytest.mark.parametrize("tier", ["baton-mini", "baton-ultra"])
async def test_a_fresh_process_begins_nothing_that_the_pool_file_says_is_in_vain(
    stub: ProviderStub, tmp_path: Path, tier: str
) -> None:
    slow = pool_text(stub).replace("connect = 30", "connect = 30, quickest = 5.0")
    async with running_service(tmp_path, slow) as runtime:
        ended = []
        for seconds in (4.0, 20.0):
            limits = limits_with(runtime, tier, seconds=seconds)
            outcome = await finish(await runtime.runs.start(order(runtime, tier, limits=limits)))
            ended.append((outcome.ended.state.state, bool(outcome.ended.state.calls)))
    assert ended == [("expired", False), ("succeeded", True)]


@pytest.mark.parametrize("act", [Reply(fault=Stall(after=1)), Reply(endless=True, gap=0.02)], ids=["stall", "endless"])
async def test_an_answer_that_was_begun_ends_at_the_workers_deadline(
    stub: ProviderStub, tmp_path: Path, act: Behaviour
) -> None:
    stub.always("alpha", act)
    quick = "[workers.alpha]\ndeadlines = { gap = 1.0, total = 2.0 }\n"
    async with running_service(tmp_path, pool_text(stub).replace("[workers.alpha]\n", quick)) as runtime:
        outcome = await finish(await runtime.runs.start(order(runtime, "baton-mini", streams=True)))
    assert outcome.ended.state.state == "failed"
    assert outcome.ended.error is not None
    assert outcome.ended.error.public_code == "worker_timeout"


@pytest.mark.parametrize("seconds", [20.0, 30.0])
async def test_an_answer_is_not_cut_off_while_the_run_has_time_for_another_worker(
    stub: ProviderStub, runtime: Runtime, seconds: float
) -> None:
    """Whether its caller gave the run fewer seconds than its tier does or not."""
    stub.always("alpha", Reply(endless=True, gap=0.02))
    limits = limits_with(runtime, "baton-mini", seconds=seconds, attempts=2)
    outcome = await finish(await runtime.runs.start(order(runtime, "baton-mini", limits=limits)))
    assert outcome.ended.answer == "Hello there."


@pytest.mark.parametrize("streams", [False, True])
async def test_a_worker_with_plain_deadlines_leaves_the_run_time_for_another(
    stub: ProviderStub, tmp_path: Path, streams: bool
) -> None:
    """The run's five seconds are far below what beta may take by itself."""
    stub.always("beta", Hang())
    steps = plan(("beta", "", ["user"]))
    async with running_service(tmp_path, pool_text(stub)) as runtime:
        limits = limits_with(runtime, "baton-mini", seconds=5.0)
        ordered = order(runtime, "baton-mini", limits=limits, plan=steps, streams=streams)
        outcome = await finish(await runtime.runs.start(ordered))
    assert outcome.ended.answer == "Hello there."
    assert [call.worker for call in outcome.ended.state.calls.values()] == ["beta", "alpha"]


async def test_a_worker_that_says_more_than_it_was_granted_is_cut_off(stub: ProviderStub, runtime: Runtime) -> None:
    stub.always("alpha", Reply(chunks=("x" * 30_000,) * 10, fault=Stall(after="close")))
    limits = limits_with(runtime, "baton-mini", output_tokens=16)
    outcome = await finish(await runtime.runs.start(order(runtime, "baton-mini", limits=limits, streams=True)))
    finished = bodies_of(await events(runtime, outcome.ended.state.run), Kind.CALL_FINISHED)
    assert finished[0]["error"] == "worker_malformed", "if it came in one read, nobody received it, and beta answers"
    assert len("".join(outcome.texts)) <= 16 * TOKEN_CHARS + SPARE_CHARS
    await until(lambda: stub.requests[0].disconnected_at is not None)


def note_deadlines(monkeypatch: pytest.MonkeyPatch) -> list[Deadlines]:
    """The deadlines of all calls from now on."""
    noted_deadlines: list[Deadlines] = []
    stream = OpenAIProvider.stream

    def note(self: OpenAIProvider, request: Request, body: bytes, deadlines: Deadlines) -> Any:
        noted_deadlines.append(deadlines)
        return stream(self, request, body, deadlines)

    monkeypatch.setattr(OpenAIProvider, "stream", note)
    return noted_deadlines


@pytest.mark.parametrize(
    ("pinned", "streams", "first"),
    [(False, True, 20.0), (False, False, 20.0), (True, True, 120.0)],
    ids=["with others", "with others, whole", "alone"],
)
async def test_a_worker_is_silent_for_a_ninth_of_the_tiers_time_while_there_are_others(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pinned: bool, streams: bool, first: float
) -> None:
    deadlines = note_deadlines(monkeypatch)
    async with running_service(tmp_path, pool_text(stub).replace("seconds = 30", "seconds = 180")) as runtime:
        overrides = Overrides(pin="alpha") if pinned else Overrides()
        await finish(await runtime.runs.start(order(runtime, "baton-mini", streams=streams, overrides=overrides)))
    assert deadlines[0].first == pytest.approx(first)


async def test_a_conductor_is_silent_for_as_long_before_the_fallback_answers(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines = note_deadlines(monkeypatch)
    async with running_service(tmp_path, pool_text(stub).replace("seconds = 30", "seconds = 180")) as runtime:
        await finish(await runtime.runs.start(order(runtime, "baton-ultra")))
    assert stub.requests[0].model == "planner"
    assert deadlines[0].first == pytest.approx(20.0)


@pytest.mark.parametrize(("tokens", "streams"), [(1000, True), (16, False)], ids=["long", "brief"])
async def test_a_reply_that_is_brief_is_asked_for_whole(
    stub: ProviderStub, runtime: Runtime, tokens: int, streams: bool
) -> None:
    """A long reply is streamed even if nobody follows it: the stream shows that its worker is not silent."""
    limits = limits_with(runtime, "baton-mini", output_tokens=tokens)
    outcome = await finish(await runtime.runs.start(order(runtime, "baton-mini", limits=limits)))
    assert outcome.texts == [outcome.ended.answer]
    assert [request.json.get("stream", False) for request in stub.requests] == [streams]


async def test_a_worker_that_has_been_quick_is_asked_for_whole_replies_until_one_takes_long(
    stub: ProviderStub, runtime: Runtime
) -> None:
    async def ask() -> bool:
        before = len(stub.requests)
        await finish(await runtime.runs.start(order(runtime, "baton-mini")))
        return bool(stub.requests[before].json.get("stream", False))

    alpha, health = runtime.context.catalog().workers["alpha"], runtime.context.health
    health.note_reply_time(alpha, 0.1, 20.0)
    assert await ask() is False
    health.note_reply_time(alpha, 6.0, 20.0)
    health.note_reply_time(alpha, 0.1, 20.0)
    assert await ask() is True


async def test_after_a_silent_worker_the_next_one_is_asked_for_a_stream(stub: ProviderStub, tmp_path: Path) -> None:
    stub.always("alpha", Hang())
    quick = "[workers.alpha]\ndeadlines = { first = 0.3 }\n"
    async with running_service(tmp_path, pool_text(stub).replace("[workers.alpha]\n", quick)) as runtime:
        for worker in runtime.context.catalog().workers.values():
            runtime.context.health.note_reply_time(worker, 0.1, 20.0)
        outcome = await finish(await runtime.runs.start(order(runtime, "baton-mini")))
    assert outcome.ended.error is None
    assert [request.json.get("stream", False) for request in stub.requests] == [False, True]
