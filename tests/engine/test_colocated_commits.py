"""If gateway and dispatcher are one process, one entry commits a step's end with all that follows from it, and a queued
step is taken in the entry that queues it."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientRequest

from app.core.pool.catalog import Amount
from app.core.run.events import Kind
from app.core.run.progress import Command, Finish, decide
from app.core.run.state import RunState
from app.engine.commit import run_writer
from app.engine.commit.colocation import PreparedStep
from app.engine.commit.run_writer import Consequences, RunWriter
from app.engine.runs import cancellation
from app.engine.runs import driver as driver_module
from app.engine.runs.driver import Driver
from app.engine.runs.registry import Drivers
from app.engine.steps import execution
from app.engine.steps.dispatcher import Dispatcher
from app.engine.steps.execution import Execution
from app.errors import StoreUnavailable
from app.process.wiring import Runtime
from app.stepqueue.memory import MemoryQueue
from app.stepqueue.protocol import Live, Stop
from app.store.protocol import AppendResult, Entry, Outbox
from tests.harness.conversations import Conversation, look_call, tool_call_reply
from tests.harness.in_process import (
    await_ended_row,
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
from tests.harness.waiting import PATIENCE_SECONDS, assert_stays, until
from tests.stubs import Hang, ProviderStub, Reply

ONE_TWO_ONE = plan(
    ("alpha", "one", ["user"]), ("beta", "two", ["user", 0]), ("gamma", "three", ["user", 0]), ("alpha", "all", [1, 2])
)
CHAIN = plan(("alpha", "one", ["user"]), ("beta", "two", ["user", 0]))


def idle_drivers(runtime: Runtime) -> Drivers:
    """The drivers of an engine that drives no runs."""
    return Drivers(runtime.context, home="idle", bound=1)


@asynccontextmanager
async def run_watched_service(
    folder: Path, stub: ProviderStub, environ: Mapping[str, str] | None = None
) -> AsyncIterator[tuple[Runtime, list[Entry]]]:
    """A service and every entry that its store was asked to take."""
    entries: list[Entry] = []
    async with running_service(folder, pool_text(stub), environ) as runtime:
        append = runtime.context.store.append

        async def noting(entry: Entry) -> AppendResult:
            entries.append(entry)
            return await append(entry)

        runtime.context.store.append = noting  # type: ignore[method-assign]
        yield runtime, entries


DONE = [Kind.CALL_FINISHED, Kind.STEP_DONE]
QUEUED_TWICE = [Kind.STEP_QUEUED, Kind.STEP_QUEUED]
DELAY_SECONDS = 0.3
"""The time for which a commit or a message is on its way."""


@pytest.mark.long
async def test_a_workflow_of_four_calls_takes_five_entries(stub: ProviderStub, tmp_path: Path) -> None:
    async with run_watched_service(tmp_path, stub) as (runtime, entries):
        outcome = await finish(await runtime.runs.start(order(runtime, "baton-ultra", plan=ONE_TWO_ONE)))
    written = []
    for entry in entries:
        written.append([draft.kind for draft in entry.events])
    assert len(written) == 1 + 4
    assert written[0][-2:] == [Kind.STEP_QUEUED, Kind.CALL_INTENDED]
    assert written[1] == [*DONE, *QUEUED_TWICE, Kind.CALL_INTENDED, Kind.CALL_INTENDED]
    assert written[-1] == [*DONE, Kind.SUCCEEDED]
    assert outcome.ended.answer == "Hello there."


@pytest.mark.long
async def test_a_dispatcher_apart_takes_nine(stub: ProviderStub, tmp_path: Path) -> None:
    async with run_watched_service(tmp_path, stub) as (runtime, entries):
        runtime.drivers.spread = True
        outcome = await finish(await runtime.runs.start(order(runtime, "baton-ultra", plan=ONE_TWO_ONE)))
    written = []
    for entry in entries:
        written.append([draft.kind for draft in entry.events])
    assert len(written) == 1 + 2 * 4
    assert [*DONE, *QUEUED_TWICE] in written
    assert outcome.ended.answer == "Hello there."


async def test_a_dispatcher_takes_no_more_steps_than_it_has_slots(stub: ProviderStub, tmp_path: Path) -> None:
    environ = {"BATON_CONCURRENT_STEPS": "2"}
    stub.always("beta", Reply(header_delay=0.2))
    async with run_watched_service(tmp_path, stub, environ) as (runtime, entries):
        outcome = await finish(await runtime.runs.start(order(runtime, "baton-ultra", plan=ONE_TWO_ONE)))
    written = []
    for entry in entries:
        written.append([draft.kind for draft in entry.events])
    assert written[1] == [*DONE, *QUEUED_TWICE, Kind.CALL_INTENDED]  # the step that ends has the other slot
    assert outcome.ended.answer == "Hello there."


async def test_a_step_is_on_its_way_before_its_caller_and_its_driver_go_on(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    went: list[str] = []
    send, drive = ClientRequest.write_bytes, Driver.drive

    async def sending(self: ClientRequest, *arguments: Any) -> None:
        went.append("call")
        await send(self, *arguments)

    async def driving(self: Driver) -> None:
        went.append("driver")
        await drive(self)

    monkeypatch.setattr(ClientRequest, "write_bytes", sending)
    monkeypatch.setattr(Driver, "drive", driving)
    async with running_service(tmp_path, pool_text(stub)) as runtime:
        await finish(await runtime.runs.start(order(runtime, "baton-mini")))  # which connects
        went.clear()
        followed_run = await runtime.runs.start(order(runtime, "baton-mini"))
        assert went == ["call", "driver"]
        await finish(followed_run)


async def test_a_step_that_cannot_be_paid_for_costs_no_outcome(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the step before is kept, although its entry could not hold what the next one would reserve: others
    hold more by then than this engine knows."""
    monkeypatch.setattr(execution, "spendable_by_steps", lambda _: Amount(10**9, 10**9))
    async with run_watched_service(tmp_path, stub) as (runtime, entries):
        free = await finish(await runtime.runs.start(order(runtime, "baton-ultra", plan=CHAIN)))
        dearest = max(call.usd_held for call in free.ended.state.calls.values())
        limits = limits_with(runtime, "baton-ultra", usd=dearest, floor_tokens=1000)  # one fits, and nothing beside it
        entries.clear()
        outcome = await finish(await runtime.runs.start(order(runtime, "baton-ultra", plan=CHAIN, limits=limits)))
        journal = await events(runtime, outcome.ended.state.run)
    assert outcome.ended.state.state == "over_budget"
    assert kinds(journal).count(Kind.CALL_FINISHED) == kinds(journal).count(Kind.CALL_INTENDED) == 1
    reserving = []
    for entry in entries:
        if entry.hold.usd:
            reserving += [draft.kind for draft in entry.events]
    assert Kind.STEP_DONE in reserving


async def test_no_call_is_made_for_an_entry_that_was_not_taken(stub: ProviderStub, tmp_path: Path) -> None:
    """And the worker's breaker may be probed by the next one."""
    async with running_service(tmp_path, pool_text(stub)) as runtime:
        append, forgone = runtime.context.store.append, []

        async def failing(entry: Entry) -> AppendResult:
            raise StoreUnavailable()

        runtime.context.health.cancel_call = lambda worker, **_: forgone.append(worker.name)  # type: ignore[method-assign]
        runtime.context.store.append = failing  # type: ignore[method-assign]
        with pytest.raises(StoreUnavailable):
            await runtime.runs.start(order(runtime, "baton-ultra", plan=ONE_TWO_ONE))
        runtime.context.store.append = append  # type: ignore[method-assign]
        await assert_stays(lambda: (stub.requests, forgone) == ([], ["alpha"]), seconds=0.05)
        assert (await finish(await runtime.runs.start(order(runtime, "baton-mini")))).ended.error is None


async def test_no_step_is_begun_that_is_to_be_stopped(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's end follows from queuing the step, before anybody has a ticket for it."""

    def out_of_plans(state: RunState, now: float) -> tuple[Command, ...]:
        over = any(step.state == "queued" for step in state.steps.values())
        return (Finish(Kind.FAILED, error="plan_rejected"),) if over else decide(state, now)

    monkeypatch.setattr(run_writer, "decide", out_of_plans)
    async with run_watched_service(tmp_path, stub) as (runtime, entries):
        outcome = await finish(await runtime.runs.start(order(runtime, "baton-mini")))
    assert (outcome.ended.state.state, stub.requests) == ("failed", [])
    assert [entry.outbox for entry in entries if entry.outbox] == []


async def test_a_paid_outcome_is_kept_although_nothing_can_be_decided_upon_it(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bugs = [IndexError("a bug of whoever plans the next round")]

    def decide_with_a_bug(state: RunState, now: float) -> tuple[Command, ...]:
        if bugs and any(step.state == "done" for step in state.steps.values()):
            raise bugs.pop()
        return decide(state, now)

    monkeypatch.setattr(run_writer, "decide", decide_with_a_bug)
    async with run_watched_service(tmp_path, stub) as (runtime, entries):
        outcome = await finish(await runtime.runs.start(order(runtime, "baton-mini")))
    assert (outcome.ended.answer, len(stub.requests), bugs) == ("Hello there.", 1, [])
    assert [draft.kind for draft in entries[1].events] == DONE


@pytest.mark.parametrize("ended", [False, True])
async def test_a_step_that_begins_after_its_dispatcher_is_left_to_another(
    stub: ProviderStub, tmp_path: Path, ended: bool
) -> None:
    """Its entry is committed after running steps were interrupted, or after the dispatcher has gone: no call is made,
    and its outcome is either known or said to be unknown."""
    async with running_service(tmp_path, pool_text(stub), dispatches=False) as runtime:
        append, committing, go_on = runtime.context.store.append, asyncio.Event(), asyncio.Event()

        async def slow(entry: Entry) -> AppendResult:
            committing.set()
            await go_on.wait()
            return await append(entry)

        leaver, stopping = (
            Dispatcher(runtime.context, idle_drivers(runtime), name="leaver", slots=4, grace=0.1),
            asyncio.Event(),
        )
        runtime.drivers.dispatcher = leaver
        leaving = asyncio.create_task(leaver.run(stopping))
        await asyncio.sleep(0)
        runtime.context.store.append = slow  # type: ignore[method-assign]
        starting = asyncio.create_task(runtime.runs.start(order(runtime, "baton-mini")))
        await committing.wait()
        stopping.set()
        if ended:
            await leaving
        else:
            await asyncio.sleep(0)
            leaver._interrupting = True
        go_on.set()
        followed_run = await starting
        await leaving
        runtime.context.store.append = append  # type: ignore[method-assign]
        assert stub.requests == []
        heir, heir_ends = (
            Dispatcher(runtime.context, idle_drivers(runtime), name="heir", slots=4, grace=1.0),
            asyncio.Event(),
        )
        working = asyncio.create_task(heir.run(heir_ends))
        outcome = await finish(followed_run)
        heir_ends.set()
        await working
        journal = await events(runtime, followed_run.run)
    assert outcome.ended.error is None
    first = next(event for event in journal if event.kind is Kind.CALL_FINISHED)
    assert first.body["outcome"] == ("unknown" if ended else "cancelled")


async def test_a_step_that_begins_while_its_dispatcher_unsubscribes_is_left_to_another(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All steps are over then, and the queue takes its time."""
    async with running_service(tmp_path, pool_text(stub), dispatches=False) as runtime:
        append, subscribe = runtime.context.store.append, runtime.context.queue.subscribe
        committing, unsubscribing, committed = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def append_late(entry: Entry) -> AppendResult:
            committing.set()
            await unsubscribing.wait()
            return await append(entry)

        @asynccontextmanager
        async def subscribe_until_committed(*arguments: Any) -> AsyncIterator[None]:
            async with subscribe(*arguments):
                yield
            unsubscribing.set()
            await committed.wait()

        leaver, stopping = (
            Dispatcher(runtime.context, idle_drivers(runtime), name="leaver", slots=4, grace=0.0),
            asyncio.Event(),
        )
        with monkeypatch.context() as patch:
            patch.setattr(runtime.context.queue, "subscribe", subscribe_until_committed)
            leaving = asyncio.create_task(leaver.run(stopping))
            await asyncio.sleep(0)
        monkeypatch.setattr(runtime.context.store, "append", append_late)
        runtime.drivers.dispatcher = leaver
        starting = asyncio.create_task(runtime.runs.start(order(runtime, "baton-mini")))
        await committing.wait()
        stopping.set()
        followed_run = await starting
        committed.set()
        await leaving
        assert stub.requests == []
        runtime.runs.leave(followed_run)
        await await_ended_row(runtime.context.store, followed_run.run)


async def test_a_step_that_could_not_be_begun_gives_its_slot_back(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had the last one, and meanwhile the dispatcher has come to wait for a slot: it takes the ticket then."""
    monkeypatch.setattr("app.engine.steps.dispatcher.IDLE_WAIT_SECONDS", 0.05)

    async def too_hard(*_: object) -> None:
        await asyncio.sleep(DELAY_SECONDS)
        raise StoreUnavailable

    monkeypatch.setattr(Execution, "prepare", too_hard)
    async with running_service(tmp_path, pool_text(stub), dispatches=False) as runtime:
        dispatcher, stopping = (
            Dispatcher(runtime.context, idle_drivers(runtime), name="narrow", slots=1, grace=1.0),
            asyncio.Event(),
        )
        runtime.drivers.dispatcher = dispatcher
        working = asyncio.create_task(dispatcher.run(stopping))
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                outcome = await finish(await runtime.runs.start(order(runtime, "baton-mini")))
        finally:
            stopping.set()
            await working
    assert outcome.ended.error is None


async def test_steps_whose_entry_cannot_be_made_give_their_slots_back(
    stub: ProviderStub, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add_intents_with_a_bug(*_: object) -> None:
        raise ValueError("a bug")

    free_before = runtime.dispatcher.free_slots
    with monkeypatch.context() as patch:
        patch.setattr(Consequences, "with_intents", add_intents_with_a_bug)
        with pytest.raises(ValueError, match="a bug"):
            await runtime.runs.start(order(runtime, "baton-mini"))
    assert runtime.dispatcher.free_slots == free_before


async def test_no_step_begins_after_a_wish_to_cancel_that_comes_while_it_is_prepared(
    stub: ProviderStub, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That it follows from the end of the step before was decided when nobody had asked for the run's end."""
    prepare, context = Dispatcher.prepare, runtime.context

    async def prepare_meanwhile(
        dispatcher: Dispatcher, state: RunState, salt: bytes, contents: Mapping[str, bytes], rows: Sequence[Outbox]
    ) -> list[PreparedStep]:
        steps = await prepare(dispatcher, state, salt, contents, rows)
        driver = runtime.drivers.driver_of(state.run)
        if driver is not None and rows[0].step == 1:
            row = await context.store.run(state.run)
            await cancellation.ask(context.store, context.queue, row, "somebody", context.now())
            await until(lambda: driver.state.cancel_asked)
        return steps

    monkeypatch.setattr(Dispatcher, "prepare", prepare_meanwhile)
    outcome = await finish(await runtime.runs.start(order(runtime, "baton-ultra", plan=CHAIN)))
    assert (outcome.ended.state.state, len(stub.requests)) == ("cancelled", 1)


async def test_both_fences_hold_for_a_joined_entry(stub: ProviderStub, tmp_path: Path) -> None:
    """The driver lost its run while the worker spoke: the step's end is kept, what would follow from it is not."""
    stub.always("alpha", Reply(header_delay=0.3))
    async with run_watched_service(tmp_path, stub) as (runtime, entries):
        followed_run = await runtime.runs.start(order(runtime, "baton-ultra", plan=ONE_TWO_ONE))
        await stub.wait_for(1)
        now = runtime.context.now()
        assert await runtime.context.store.take_over(
            "another", now + 100, now + 200, 10, [("baton-ultra", runtime.context.code)]
        )

        async def has_ended() -> bool:
            return Kind.STEP_DONE in kinds(await events(runtime, followed_run.run))

        await until(has_ended)
        journal = await events(runtime, followed_run.run)
    assert [entry.epoch for entry in entries[-2:]] == [1, None]
    assert kinds(journal).count(Kind.STEP_QUEUED) == 1


async def test_an_outcome_that_joins_after_the_end_leaves_it_where_it_was(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end does not wait for a call that was stopped, and the call's outcome travels with the driver all the same.
    The auditor compares the row as well."""
    monkeypatch.setattr(driver_module, "QUIESCE_SECONDS", 0.0)
    stub.always("alpha", Hang())
    async with run_watched_service(tmp_path, stub) as (runtime, entries):
        followed_run = await runtime.runs.start(order(runtime, "baton-mini"))
        await stub.wait_for(1)
        runtime.runs.cancellations.ask(followed_run.run, "caller")
        await finish(followed_run)

        async def has_outcome() -> bool:
            return kinds(await events(runtime, followed_run.run))[-1] is Kind.CALL_FINISHED

        await until(has_outcome)
        journal = await events(runtime, followed_run.run)
        row = await runtime.context.store.run(followed_run.run)
    assert (journal[-2].kind, entries[-1].epoch) == (Kind.CANCELLED, None), "its own fence is enough"
    assert (row.state, row.ended_at) == ("cancelled", journal[-2].at)


async def test_a_joined_entry_is_as_old_as_what_follows_in_it(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outcome may have waited in the dispatcher; the caller still has its whole time for tool results."""
    join = RunWriter.commit_step_end

    async def late(writer: RunWriter, entry: Entry) -> AppendResult:
        await asyncio.sleep(DELAY_SECONDS)
        return await join(writer, entry)

    monkeypatch.setattr(RunWriter, "commit_step_end", late)
    stub.script("alpha", tool_call_reply(look_call("a")))
    async with run_watched_service(tmp_path, stub) as (runtime, _):
        state = (await Conversation(runtime).take_turn()).ended.state
        (turn,) = [event for event in await events(runtime, state.run) if event.kind is Kind.AWAITING]
    assert turn.body["until"] - turn.at == pytest.approx(state.admitted.limits.tool_wait, abs=DELAY_SECONDS / 2)


@pytest.mark.long
async def test_a_plan_that_follows_from_an_end_is_begun(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of a rejected plan is stopped, and its end comes before the driver's own turn: the repair must begin."""
    bad, good = plan_text((0, "Try.", ["user"]), (9, "No.", ["user"])), plan_text((0, "Do it.", ["user"]))
    stub.script("planner", Reply(chunks=tuple(bad), gap=0.005), Reply(chunks=(good,)))
    stub.script("*", Hang())
    tell = MemoryQueue.publish

    async def lagging(queue: MemoryQueue, address: str, messages: Sequence[Live]) -> None:
        await tell(queue, address, messages)
        if any(isinstance(message, Stop) for message in messages):
            await asyncio.sleep(DELAY_SECONDS)

    monkeypatch.setattr(MemoryQueue, "publish", lagging)
    async with running_service(tmp_path, pool_text(stub)) as runtime:
        outcome = await finish(await runtime.runs.start(order(runtime, "baton-ultra")), within=10)
    assert outcome.ended.answer == "Hello there."
    assert [proposal.mode for proposal in outcome.ended.state.proposals] == ["first", "repair"]
