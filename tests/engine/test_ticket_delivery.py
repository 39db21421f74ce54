"""Tickets as they may come: one lets read too little, one comes too early; one comes again, for a step that nobody can
pay for; one comes to two engines at the same moment; one comes when the end has been asked for."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from app.core.run.events import Kind
from app.engine.runs.driver import Driver
from app.stepqueue.memory import MemoryQueue
from app.stepqueue.protocol import AGAIN, Live, Ticket
from app.store.protocol import AppendResult, Entry, Journal, TicketClaim
from app.store.sql import SqlStore
from tests.harness.in_process import (
    LONG_LEASE,
    await_ended_row,
    events,
    finish,
    kinds,
    limits_with,
    order,
    plan,
    pool_text,
    running_service,
)
from tests.harness.raw_facts import fact_from_json
from tests.harness.waiting import PATIENCE_SECONDS
from tests.stubs import Hang, ProviderStub, Reply

DELAY_SECONDS = 0.5
"""The time for which a claim is on its way."""


async def play_chain(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """A run whose second step sees the first, by tickets alone."""
    chain = plan(("alpha", "one", ["user"]), ("beta", "two", ["user", 0]))
    async with (
        ProviderStub() as stub,
        running_service(folder, pool_text(stub)) as runtime,
    ):  # which audits what was sent
        runtime.drivers.spread = True
        patch.setattr(runtime.drivers, "driver_of", lambda _run: None)  # and as if the run were driven elsewhere
        followed_run = await runtime.runs.start(order(runtime, "baton-mini", plan=chain))
        assert (await finish(followed_run)).ended.error is None


async def test_a_step_sees_the_answers_before_it_however_little_its_ticket_lets_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, ring = SqlStore.journal, MemoryQueue.enqueue

    async def no_more(store: SqlStore, run: str, upto: int | None = None, after: int = 0) -> Journal:
        events = await journal(store, run, upto, after)
        return (
            events
            if upto is None
            else Journal(events.salt, tuple(event for event in events.events if event.seq <= upto))
        )

    async def early(queue: MemoryQueue, tickets: Sequence[Ticket]) -> None:
        await ring(queue, [replace(ticket, seq=6) for ticket in tickets])

    monkeypatch.setattr(SqlStore, "journal", no_more)
    monkeypatch.setattr(MemoryQueue, "enqueue", early)
    await play_chain(tmp_path, monkeypatch)


async def test_a_step_whose_ticket_comes_before_it_is_queued_sees_the_answers_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody guesses it, and the claim is so long on its way that the step has been queued when it arrives."""
    ring, append = MemoryQueue.enqueue, SqlStore.append

    async def ring_too_early(queue: MemoryQueue, tickets: Sequence[Ticket]) -> None:
        await ring(queue, [*tickets, *(replace(ticket, step=1) for ticket in tickets if ticket.step == 0)])

    async def slow(store: SqlStore, entry: Entry) -> AppendResult:
        if entry.move is not None and (entry.move.step, entry.move.verb) == (1, "take"):
            await asyncio.sleep(DELAY_SECONDS)
        return await append(store, entry)

    monkeypatch.setattr(MemoryQueue, "enqueue", ring_too_early)
    monkeypatch.setattr(SqlStore, "append", slow)
    await play_chain(tmp_path, monkeypatch)


async def test_a_step_that_was_claimed_and_cannot_be_paid_for_ends_its_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = MemoryQueue.enqueue

    async def again(queue: MemoryQueue, tickets: Sequence[Ticket]) -> None:
        await ring(queue, [replace(ticket, version=AGAIN) for ticket in tickets])

    monkeypatch.setattr(MemoryQueue, "enqueue", again)
    async with ProviderStub() as stub, running_service(tmp_path, pool_text(stub)) as runtime:
        runtime.drivers.spread = True
        poor = limits_with(runtime, "baton-mini", usd=1)
        followed_run = await runtime.runs.start(order(runtime, "baton-mini", limits=poor))
        assert (await finish(followed_run)).ended.state.state == "over_budget"


def share_queue(patch: pytest.MonkeyPatch, queues: Sequence[MemoryQueue]) -> None:
    """Give every ticket and every message to all of these queues, as Redis does with one queue of several engines."""
    ring, publish = MemoryQueue.enqueue, MemoryQueue.publish

    async def ring_everywhere(_queue: MemoryQueue, tickets: Sequence[Ticket]) -> None:
        for queue in queues:
            await ring(queue, tickets)

    async def publish_everywhere(_queue: MemoryQueue, address: str, messages: Sequence[Live]) -> None:
        for queue in queues:
            await publish(queue, address, messages)

    patch.setattr(MemoryQueue, "enqueue", ring_everywhere)
    patch.setattr(MemoryQueue, "publish", publish_everywhere)


async def test_a_step_whose_ticket_comes_to_two_engines_at_the_same_moment_is_carried_out_once(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of them writes that it takes the step before both are about to."""
    append, both_are_here = SqlStore.append, asyncio.Barrier(2)
    takers: list[str] = []

    async def append_together(store: SqlStore, entry: Entry) -> AppendResult:
        if entry.move is not None and entry.move.verb == "take":
            takers.append(entry.move.holder)
            await both_are_here.wait()
        return await append(store, entry)

    monkeypatch.setattr(SqlStore, "append", append_together)
    pool = pool_text(stub)
    async with running_service(tmp_path, pool, LONG_LEASE) as one, running_service(tmp_path, pool, LONG_LEASE) as other:
        one.drivers.spread = True
        queues = [runtime.context.queue for runtime in (one, other)]
        share_queue(monkeypatch, [queue for queue in queues if isinstance(queue, MemoryQueue)])
        followed_run = await one.runs.start(order(one, "baton-mini"))
        assert (await finish(followed_run)).ended.error is None
        journal = kinds(await events(one, followed_run.run))
        assert len(set(takers)) == len(takers) == 2
        assert (journal.count(Kind.CALL_INTENDED), journal.count(Kind.STEP_DONE)) == (1, 1)
    assert len(stub.requests_for("alpha")) == 1


@pytest.mark.parametrize("version", [0, AGAIN])
async def test_the_ticket_of_a_run_that_is_not_there_is_forgotten(
    stub: ProviderStub, tmp_path: Path, version: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is older than a restore of the database, or the run was pruned; nothing of it is left to do."""
    forgotten, done = asyncio.Event(), MemoryQueue.done

    async def note_done(queue: MemoryQueue, tickets: Sequence[Ticket]) -> None:
        await done(queue, tickets)
        forgotten.set()

    monkeypatch.setattr(MemoryQueue, "done", note_done)
    async with running_service(tmp_path, pool_text(stub)) as runtime:
        await runtime.context.queue.enqueue([Ticket("run_gone", 0, "baton-mini", "engine", 1, version)])
        async with asyncio.timeout(PATIENCE_SECONDS):
            await forgotten.wait()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_claims_are_renewed_while_the_queue_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renewed, renew = asyncio.Event(), SqlStore.renew_claims

    async def hang(_queue: MemoryQueue, _tickets: Sequence[Ticket]) -> None:
        await asyncio.Event().wait()

    async def renew_and_note(store: SqlStore, claims: Sequence[TicketClaim], until: float) -> frozenset[TicketClaim]:
        renewed.set()
        return await renew(store, claims, until)

    monkeypatch.setattr(MemoryQueue, "keep", hang)
    monkeypatch.setattr(SqlStore, "renew_claims", renew_and_note)
    async with ProviderStub() as stub, running_service(tmp_path, pool_text(stub)) as runtime:
        stub.always("*", Hang())
        followed_run = await runtime.runs.start(order(runtime, "baton-mini"))
        await renewed.wait()
        runtime.runs.cancellations.ask(followed_run.run, "client")
        await finish(followed_run)


async def test_a_step_of_a_run_that_is_asked_to_end_calls_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its dispatcher has read so, though its driver has yet to hear of it."""
    ring = MemoryQueue.enqueue
    async with ProviderStub() as stub, running_service(tmp_path, pool_text(stub)) as runtime:
        runtime.drivers.spread = True

        async def late(queue: MemoryQueue, tickets: Sequence[Ticket]) -> None:
            wishes = (fact_from_json(Kind.CANCEL_ASKED, {"by": "caller"}),)
            for ticket in tickets:
                await runtime.context.store.append(Entry(ticket.run, runtime.context.now(), wishes))
            await ring(queue, [replace(ticket, seq=ticket.seq + 1) for ticket in tickets])

        monkeypatch.setattr(MemoryQueue, "enqueue", late)
        followed_run = await runtime.runs.start(order(runtime, "baton-mini"))
        assert (await finish(followed_run)).ended.state.state == "cancelled"
        assert Kind.CALL_INTENDED not in kinds(await events(runtime, followed_run.run))
        assert stub.requests == []


async def test_an_engine_drives_no_more_runs_than_it_may_and_leaves_the_others_in_the_queue(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway whose engine has no place admits runs undriven, so that an engine takes their tickets."""
    driven: list[int] = []
    drive = Driver.drive

    async def note_and_drive(self: Driver) -> None:
        driven.append(len(runtime.drivers))
        await drive(self)

    monkeypatch.setattr(Driver, "drive", note_and_drive)
    stub.always("alpha", Reply(header_delay=0.1))
    async with running_service(tmp_path, pool_text(stub), {"BATON_CONCURRENT_RUNS": "2"}) as runtime:
        runs = []
        for _ in range(6):
            followed_run = await runtime.runs.start(
                order(runtime, "baton-mini", followed=False, on_disconnect="finish")
            )
            runtime.runs.leave(followed_run)
            runs.append(followed_run.run)
        rows = [await await_ended_row(runtime.context.store, run) for run in runs]
    assert [row.state for row in rows] == ["succeeded"] * 6
    assert (len(driven), max(driven)) == (6, 2)
