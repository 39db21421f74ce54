"""Commits on cached rows: one round trip if the cached rows are current, and as safe if they are not."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

import asyncpg
import pytest
from msgspec.structs import replace
from sqlalchemy import Connection, text

from app.core.contents import content_ref
from app.core.pool.catalog import Amount
from app.core.run.events import Kind
from app.errors import LeaseLost, NotFound, RunEnded, StoreUnavailable
from app.store.protocol import BRIEF, Entry, Lease, Outbox, TicketClaim, TicketMove
from app.store.rows.runs import CachedRows
from app.store.sql import SqlStore, open_store
from app.store.writing.batch import RowCache
from tests.conformance.entries import SALT, admission_entry, gather_outcomes, move_entry, note, queue_entry, take
from tests.harness.raw_facts import Raw
from tests.harness.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.integration


@pytest.fixture
async def stores(migrated_postgres_url: str) -> AsyncIterator[Sequence[SqlStore]]:
    """Two processes over one database, whose trigger for processes of 0.1 is off: they raise revisions themselves."""
    await _execute(migrated_postgres_url, "ALTER TABLE runs DISABLE TRIGGER runs_revision")
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(open_store(migrated_postgres_url)) for _ in range(2)]
    await _execute(migrated_postgres_url, "ALTER TABLE runs ENABLE TRIGGER runs_revision")


async def _execute(url: str, statement: str) -> None:
    conn = await asyncpg.connect(url)
    try:
        await conn.execute(statement)
    finally:
        await conn.close()


def driven(run: str = "run", **fields: Any) -> Entry:
    """An event of the run's driver."""
    return Entry(run, 2.0, (Raw(Kind.STEP_SKIPPED, {}),), epoch=1, **fields)


async def tickets(store: SqlStore, run: str) -> list[dict[str, Any]]:
    """Return the rows of tickets as the server has them."""

    def read(conn: Connection) -> list[dict[str, Any]]:
        cursor = conn.exec_driver_sql(f"SELECT * FROM tickets WHERE run = '{run}'")
        return [dict(row) for row in cursor.mappings()]

    return await store._read(read)


async def ticket(store: SqlStore, run: str = "run") -> dict[str, Any]:
    """The one there is."""
    (row,) = await tickets(store, run)
    return row


@pytest.mark.long
async def test_each_commit_of_a_step_is_one_round_trip(stores: Sequence[SqlStore], round_trips: list[str]) -> None:
    gateway, dispatcher = stores
    await gateway.append(admission_entry("other"))
    await dispatcher.step_input("other")  # once for each connection the driver looks up the types of its columns
    for entry in (admission_entry("run"), queue_entry("run")):
        round_trips.clear()
        await gateway.append(entry)
        assert len(round_trips) == 1
    round_trips.clear()
    assert len((await dispatcher.step_input("run")).events) == 2
    await dispatcher.append(take("run", 0, "a"))
    await dispatcher.append(move_entry("run", "finish", 1))
    assert len(round_trips) == 3
    round_trips.clear()
    await gateway.step_input("run")  # the rows come with it
    round_trips.clear()
    await gateway.append(driven())
    assert len(round_trips) == 1


@pytest.mark.long
async def test_a_step_input_after_an_event_has_the_later_events_and_the_contents_that_they_name(
    stores: Sequence[SqlStore],
) -> None:
    gateway, dispatcher = stores
    bodies = {content_ref(SALT, body): body for body in (b"task", b"long" * BRIEF, b"result", b"of nobody")}
    task, long, result, _ = bodies
    await gateway.append(replace(admission_entry("run"), contents=tuple(bodies.items())))
    await gateway.append(Entry("run", 2.0, (Raw(Kind.STEP_SKIPPED, {"task": task}),), epoch=1))
    await gateway.append(Entry("run", 3.0, (Raw(Kind.STEP_SKIPPED, {"of": [long, {"it": result}]}),), epoch=1))
    whole, rest = await dispatcher.step_input("run"), await dispatcher.step_input("run", 2)
    assert [event.seq for event in whole.events] == [1, 2, 3]
    assert whole.contents.keys() == bodies.keys() - {long}
    assert [event.seq for event in rest.events] == [3]
    assert (rest.contents, rest.epoch, rest.salt) == ({result: b"result"}, 1, SALT)


async def test_tickets_are_known_in_whatever_order_they_were_made(
    stores: Sequence[SqlStore], round_trips: list[str]
) -> None:
    first_store, _ = stores
    for entry in (admission_entry("run"), queue_entry("run", step=1), queue_entry("run", step=0)):
        await first_store.append(entry)
    round_trips.clear()
    await first_store.append(take("run", 0, "a"))
    assert len(round_trips) == 1


async def test_an_entry_on_outdated_rows_is_written_after_the_entries_of_others(
    stores: Sequence[SqlStore], round_trips: list[str]
) -> None:
    first_store, second_store = stores
    await first_store.append(admission_entry("run"))
    await second_store.append(driven())
    round_trips.clear()
    appended = await first_store.append(driven())
    assert [event.seq for event in appended.events] == [3]
    round_trips.clear()
    assert [event.seq for event in (await first_store.append(driven())).events] == [4]
    assert len(round_trips) == 1
    assert [event.seq for event in (await second_store.journal("run")).events] == [1, 2, 3, 4]


async def test_what_follows_an_entry_of_another_process_takes_two_round_trips(
    stores: Sequence[SqlStore], round_trips: list[str]
) -> None:
    """As where an engine takes a run whose next turn a gateway has begun: the rows are read and then written, and no
    lock is held in between."""
    first_store, second_store = stores
    await first_store.append(admission_entry("run"))
    await second_store.append(driven(lease=Lease("other", 9.0, 9.0)))
    await first_store.step_input("run")
    await second_store.append(replace(driven(), epoch=2))
    round_trips.clear()
    appended = await first_store.append(replace(driven(), epoch=2, seq=3, outbox=(Outbox(0, "mini", "driver"),)))
    assert ([event.seq for event in appended.events], len(round_trips)) == ([4], 2)
    assert (await ticket(second_store))["claim"] == 0


async def test_requests_that_come_together_read_once_who_has_budgets(
    stores: Sequence[SqlStore], round_trips: list[str]
) -> None:
    store, _ = stores
    assert await asyncio.gather(*[store.budget_accounts("acme", {"key": "k"}) for _ in range(16)]) == [()] * 16
    assert len([statement for statement in round_trips if "FROM budgets" in statement]) == 1


async def test_nothing_of_a_batch_is_written_on_outdated_rows(stores: Sequence[SqlStore]) -> None:
    first_store, second_store = stores
    for run in ("a", "b"):
        await first_store.append(admission_entry(run))
    await second_store.append(driven("b"))
    answers = [
        first_store.append(driven("a")),
        first_store.append(driven("b")),
        first_store.append(admission_entry("c")),
    ]
    seqs = []
    for answer in answers:
        seqs.append([event.seq for event in (await answer).events])
    assert seqs == [[2], [3], [1]]
    assert [event.seq for event in (await second_store.journal("a")).events] == [1, 2]


async def test_an_entry_is_never_refused_on_outdated_rows(stores: Sequence[SqlStore]) -> None:
    first_store, second_store = stores
    await first_store.append(admission_entry("run", cap=Amount(10, 10)))
    await first_store.append(driven(hold=Amount(10, 10)))
    await second_store.append(driven(release=Amount(10, 10)))
    await first_store.append(driven(hold=Amount(10, 10)))
    await second_store.append(driven(lease=Lease("other", 9.0, 9.0)))
    await first_store.append(replace(driven(), epoch=2))
    with pytest.raises(LeaseLost):
        await first_store.append(driven())


async def test_money_that_others_reserved_without_an_event_counts(stores: Sequence[SqlStore]) -> None:
    """Only the money moves: no event has a number that would be taken twice."""
    first_store, second_store = stores
    await first_store.append(admission_entry("run"))
    for store in (second_store, first_store, second_store, first_store):
        await store.append(Entry("run", 2.0, epoch=1, hold=Amount(100, 10)))
    assert (await second_store.run("run")).held == Amount(400, 40)


@pytest.mark.parametrize("beside", [False, True])
async def test_a_change_by_others_to_a_ticket_alone_is_seen(stores: Sequence[SqlStore], beside: bool) -> None:
    """No event and no amount of the run changes. It makes no difference what else is in the batch."""
    first_store, second_store = stores
    for run in ("run", "beside"):
        await first_store.append(admission_entry(run))
        await first_store.append(queue_entry(run))
        await first_store.append(take(run, 0, "a"))
    also = [first_store.append(move_entry("beside", "finish", 1))] if beside else []
    await second_store.append(Entry("run", 3.0, move=TicketMove(0, "release", claim=1, until=3.0)))
    answers = await gather_outcomes([first_store.append(move_entry("run", "finish", 1)), *also])
    assert isinstance(answers[0], LeaseLost)
    assert not any(isinstance(answer, Exception) for answer in answers[1:])
    assert (await ticket(second_store, "run"))["version"] == 2


@pytest.mark.parametrize("beside", [False, True])
async def test_tickets_that_others_have_added_or_ended_are_seen(stores: Sequence[SqlStore], beside: bool) -> None:
    first_store, second_store = stores
    await first_store.append(admission_entry("beside"))
    for run in ("added", "ended"):
        await first_store.append(admission_entry(run))
        await first_store.append(queue_entry(run))
    await second_store.append(Entry("added", 2.0, epoch=1, outbox=(Outbox(1, "mini", "driver"),)))
    await second_store.append(take("ended", 0, "a"))
    await second_store.append(Entry("ended", 2.0, move=TicketMove(0, "finish", claim=1)))
    for run in ("added", "ended"):
        also = [first_store.append(driven("beside"))] if beside else []
        end = Entry(run, 5.0, (Raw(Kind.SUCCEEDED, {}),), epoch=1)
        await asyncio.gather(first_store.append(end), *also)
        assert await tickets(second_store, run) == []


async def test_an_end_and_an_erasure_by_others_are_seen(stores: Sequence[SqlStore]) -> None:
    first_store, second_store = stores
    for run in ("ended", "erased"):
        await first_store.append(admission_entry(run))
    await second_store.append(Entry("ended", 2.0, (Raw(Kind.SUCCEEDED, {}),), epoch=1))
    with pytest.raises(RunEnded):
        await first_store.append(driven("ended"))
    await second_store.erase("erased")
    with pytest.raises(NotFound):
        await first_store.append(Entry("erased", 2.0, (Raw(Kind.RESUMED, {"turn": 1}),), epoch=1))


async def test_a_take_over_by_another_process_is_seen(stores: Sequence[SqlStore]) -> None:
    first_store, second_store = stores
    await first_store.append(admission_entry("run", lease_until=5.0))
    assert await second_store.take_over("heir", 6.0, 9.0, 10, [("mini", "v1")])
    with pytest.raises(LeaseLost):
        await first_store.append(driven())


async def test_a_claim_is_found_to_have_lapsed_on_the_row_alone(stores: Sequence[SqlStore]) -> None:
    """Its holder prolonged it, which nobody else hears of."""
    first_store, second_store = stores
    await first_store.append(admission_entry("run"))
    await first_store.append(queue_entry("run"))
    await first_store.append(take("run", 0, "a", until=10.0))
    assert await second_store.renew_claims([TicketClaim("run", 0, 1)], 100.0)
    with pytest.raises(LeaseLost):
        await first_store.append(take("run", 1, "b", at=50.0))


@pytest.mark.parametrize("verb", ["hold", "queue"])
async def test_a_claim_that_was_prolonged_is_left_as_long_as_it_is(stores: Sequence[SqlStore], verb: str) -> None:
    first_store, second_store = stores
    await first_store.append(admission_entry("run"))
    await first_store.append(queue_entry("run"))
    await first_store.append(take("run", 0, "a", until=10.0))
    assert await second_store.renew_claims([TicketClaim("run", 0, 1)], 100.0)
    again = replace(queue_entry("run"), outbox=(Outbox(0, "mini", "new address"),))
    await first_store.append(move_entry("run", "hold", 1) if verb == "hold" else again)
    row = await ticket(second_store)
    assert (row["until"], row["holder"], row["claim"]) == (100.0, "a", 1)
    assert row["driver"] == ("driver" if verb == "hold" else "new address")


async def test_a_ticket_that_is_queued_anew_in_one_entry_with_its_end_is_due_at_once(
    stores: Sequence[SqlStore],
) -> None:
    first_store, second_store = stores
    await first_store.append(admission_entry("run"))
    await first_store.append(queue_entry("run"))
    await first_store.append(take("run", 0, "a", until=10.0))
    finish = TicketMove(0, "finish", claim=1)
    await first_store.append(
        Entry("run", 4.0, (Raw(Kind.CALL_FINISHED, {}),), move=finish, outbox=(Outbox(0, "mini", "d"),))
    )
    row = await ticket(second_store)
    assert (row["until"], row["holder"], row["claim"], row["version"]) == (4.0, None, 0, 0)


async def test_who_wishes_something_of_a_run_has_it_looked_at(stores: Sequence[SqlStore]) -> None:
    """The rest of what is written for a wish changes the same row."""
    first_store, _ = stores
    await first_store.append(admission_entry("run", driver="", lease_until=50.0))
    await first_store.append(note("run"))
    assert (await first_store.run("run")).lease_until == 2.0


def test_the_row_cache_evicts_the_run_that_was_not_written_to_for_longest() -> None:
    cache = RowCache(most=2)
    for run in ("a", "b", "c"):
        cache.update({run: CachedRows((run,), tickets=None)})
    assert cache.find(["a"], []) is None
    assert cache.find(["b", "c"], []) is not None
    assert cache.find(["b", "c"], ["b"]) is None  # its tickets are not known


async def test_after_a_lost_connection_no_cached_row_is_relied_on(
    stores: Sequence[SqlStore], round_trips: list[str]
) -> None:
    """A database that has failed over to an older copy may give the same revision to other changes.

    The cut waits until the server has ended each connection: one that lives on would lose nothing.
    """
    first_store, _ = stores
    await first_store.append(admission_entry("run"))
    await first_store.append(admission_entry("other"))
    row = await first_store.run("run")
    others = "backend_type = 'client backend' AND pid <> pg_backend_pid()"
    cut = text(f"SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE {others}")
    with contextlib.suppress(StoreUnavailable):
        await first_store._write(lambda conn: conn.execute(cut))
    await first_store._write(
        lambda conn: conn.execute(text("UPDATE runs SET held_usd = 7, revision = 0 WHERE id = 'run'"))
    )
    await append_once_all_cuts_are_known(first_store, driven("other"))
    await first_store.append(driven())
    assert (await first_store.run("run")).held == replace(row.held, usd=7)


async def append_once_all_cuts_are_known(store: SqlStore, entry: Entry) -> None:
    """Append an entry; a busy server may end connections so late that one of them has been taken for this."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            with contextlib.suppress(StoreUnavailable):
                await store.append(entry)
                return
