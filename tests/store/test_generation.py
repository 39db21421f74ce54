"""A database that has moved to another server: an older copy of itself, on which no writer of before may go on."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import asyncpg
import pytest
from msgspec.structs import replace

from app.core.run.events import Kind
from app.errors import LeaseLost, StoreUnavailable
from app.store.protocol import Entry
from app.store.sql import SqlStore, open_store
from app.store.sqlkit import generation
from tests.conformance.entries import admission_entry, move_entry, note, queue_entry, take
from tests.harness.raw_facts import Raw
from tests.harness.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.integration
TicketMove = Callable[[str], None]


@pytest.fixture
def move_to(monkeypatch: pytest.MonkeyPatch) -> TicketMove:
    """Lets every connection that is opened from now on find the server of that name."""

    def move(name: str) -> None:
        looked = f"SELECT '{name}' AS present, (SELECT server FROM pulse WHERE id = 1) AS noted"
        monkeypatch.setattr(generation, "LOOK", looked)

    move("first/1")
    return move


async def on(url: str, *statements: str) -> list[Any]:
    """Run statements on a connection of their own; the rows of the last one."""
    conn = await asyncpg.connect(url)
    try:
        for statement in statements[:-1]:
            await conn.execute(statement)
        return list(await conn.fetch(statements[-1]))
    finally:
        await conn.close()


CUT_OFF = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'baton'"


def driven(run: str) -> Entry:
    return Entry(run, 2.0, (Raw(Kind.STEP_SKIPPED, {}),), epoch=1)


@pytest.mark.long
async def test_whoever_held_a_run_or_a_step_on_the_former_server_has_lost_it(
    migrated_postgres_url: str, move_to: TicketMove
) -> None:
    url = migrated_postgres_url
    async with open_store(url) as store:
        for run in ("open", "over"):
            await store.append(admission_entry(run))
            await store.append(queue_entry(run))
        claim = (await store.append(take("open", 0, "engine"))).claim
        await store.append(Entry("over", 3.0, (Raw(Kind.SUCCEEDED, {}),), epoch=1))
    move_to("first/2")
    async with open_store(url) as after, open_store(url) as beside:
        rows = {run: await after.run(run) for run in ("open", "over")}
        assert (rows["open"].epoch, rows["over"].epoch) == (1 + generation.STEP, 1)
        for late in (driven("open"), move_entry("open", "finish", claim), move_entry("open", "hold", claim)):
            for store in (after, beside):
                with pytest.raises(LeaseLost):
                    await store.append(late)
        (lapsed,) = await beside.count_lapsed_runs(after_all(rows["open"].lease_until))
        assert lapsed.runs == 1
        (due,) = await after.announce_overdue_tickets(after_all(0.0), 9)
        assert (due.holder, due.lost) == (None, 0), "its engine did not fail"
        taken_over = await after.append(take("open", due.version, "heir", at=5e9, until=6e9))
        assert taken_over.claim > claim + generation.STEP - 1
        assert (await beside.run("open")).epoch == 1 + generation.STEP, "it is done once, whoever connects"


@pytest.mark.long
async def test_a_takeover_leaves_a_claim_that_the_former_driver_has_made_on_the_new_server(
    migrated_postgres_url: str, move_to: TicketMove
) -> None:
    """Its call is under way, and would be paid twice."""
    url = migrated_postgres_url
    async with open_store(url) as store:
        await store.append(admission_entry("open"))
        await store.append(queue_entry("open"))
        await store.append(take("open", 0, "driver"))
    move_to("first/2")
    async with open_store(url) as after:
        now = after_all(0.0)
        (due,) = await after.announce_overdue_tickets(now, 9)
        claim = (await after.append(take("open", due.version, "driver", at=now, until=now + 9.0))).claim
        (run,) = await after.take_over("heir", now, now + 9.0, 9, [("mini", "v1")])
        assert (run.id, run.driver) == ("open", "heir")
        ticket = await after.find_ticket("open", 0)
        assert ticket is not None
        assert (ticket.driver, ticket.holder, ticket.claim, ticket.until) == ("heir", "driver", claim, now + 9.0)


def after_all(at: float) -> float:
    """A time after everything that these tests do."""
    return max(at, 5e9)


async def test_a_process_that_stays_reads_again_what_it_had_cached(
    migrated_postgres_url: str, move_to: TicketMove
) -> None:
    url = migrated_postgres_url
    async with open_store(url) as store:
        await store.append(admission_entry("run"))
        await store.append(driven("run"))
        assert (await kinds(store), store.server_changes) == ([Kind.ADMITTED, Kind.STEP_SKIPPED], 0)
        move_to("second/1")
        lost = ("DELETE FROM events WHERE seq = 2", "UPDATE runs SET seq = 1, revision = 1")
        await on(url, *lost, CUT_OFF)
        with suppress(StoreUnavailable):
            await kinds(store)
        assert await store.wait_until_healthy(PATIENCE_SECONDS)
        assert await kinds(store) == [Kind.ADMITTED]
        assert store.server_changes == 1
        with pytest.raises(LeaseLost):
            await store.append(driven("run"))
        await store.append(note("run"))
        assert await kinds(store) == [Kind.ADMITTED, Kind.CANCEL_ASKED]


async def test_a_process_that_stays_stores_again_what_the_former_server_alone_had(
    migrated_postgres_url: str, move_to: TicketMove
) -> None:
    """The pool by which its runs go, and the key under which it encrypts: without them nobody could read the runs."""
    url, master_keys = migrated_postgres_url, [bytes(32)]
    async with open_store(url, content_keys=master_keys) as store:
        await store.keep_catalog("digest", lambda: b"pool")
        await store.append(replace(admission_entry("former"), contents=(("ref", b"text"),)))
        move_to("second/1")
        await on(url, "DELETE FROM catalogs", "DELETE FROM content_keys", CUT_OFF)
        with suppress(StoreUnavailable):
            await store.clock()
        assert await store.wait_until_healthy(PATIENCE_SECONDS)
        await store.ready()
        await store.keep_catalog("digest", lambda: b"pool")
        await store.append(replace(admission_entry("present"), contents=(("ref", b"text"),)))
    async with open_store(url, content_keys=master_keys) as store:
        assert await store.catalogs(["digest"]) == {"digest": b"pool"}
        assert await store.contents("present", ["ref"]) == {"ref": b"text"}


async def kinds(store: SqlStore) -> list[Kind]:
    return [event.kind for event in (await store.journal("run")).events]


async def test_the_first_server_is_noted_and_nothing_is_raised(migrated_postgres_url: str) -> None:
    url = migrated_postgres_url
    await on(url, "TRUNCATE pulse", "SELECT 1")
    async with open_store(url) as store:
        await store.append(admission_entry("run"))
    ((noted,),) = await on(url, "SELECT server FROM pulse")
    identity, _, timeline = noted.partition("/")
    assert (identity.isdigit(), timeline) == (True, "00000001")
    async with open_store(url) as store:
        assert (await store.run("run")).epoch == 1


async def test_connections_that_are_opened_at_once_do_not_write_one_after_the_other(migrated_postgres_url: str) -> None:
    """All have read that no server is noted; those that come second find that it is by now, and commit nothing."""
    url = migrated_postgres_url
    await on(url, "TRUNCATE pulse", "SELECT 1")
    conn = await asyncpg.connect(url)
    try:
        present = await generation.look(conn)
        assert present is not None
        async with conn.transaction():
            await generation._begin(conn, present, known=False)
            assert await conn.fetchval("SELECT pg_current_xact_id_if_assigned()") is None
    finally:
        await conn.close()


async def test_a_schema_from_before_the_column_is_served_all_the_same(migrated_postgres_url: str) -> None:
    url = migrated_postgres_url
    await on(url, "ALTER TABLE pulse DROP COLUMN server", "SELECT 1")
    try:
        async with open_store(url) as store:
            await store.append(admission_entry("run"))
            assert await kinds(store) == [Kind.ADMITTED]
    finally:
        await on(url, "ALTER TABLE pulse ADD COLUMN server TEXT", "SELECT 1")
