"""The store behind a real PgBouncer, which pools sessions or transactions."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import asyncpg
import pytest
from msgspec.structs import replace
from sqlalchemy import text

from app.core.run.events import Kind
from app.errors import ConfigInvalid, Conflict, LeaseLost, NotFound
from app.store.archive import open_archive
from app.store.protocol import Entry, IdempotencyRecord, KeyRow, Outbox, RunQuery, TicketClaim
from app.store.sql import SqlStore, open_store
from app.store.sqlkit.migrate import migrate
from app.store.sqlkit.revisions import status
from app.store.sqlkit.runner import parse_url
from tests.conformance.entries import SALT, admission_entry, move_entry, note, queue_entry, take
from tests.harness import servers
from tests.harness.raw_facts import Raw
from tests.harness.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.integration

SERVER_CONNECTIONS = 3
"""Fewer than the store has, so that in transaction pooling consecutive statements reach different ones."""
RUNS = [f"run-{n}" for n in range(24)]


@pytest.fixture(params=["session", "transaction"])
def pooling(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextlib.contextmanager
def bouncer(url: str, pooling: str) -> Iterator[str]:
    """The URL of a database behind a PgBouncer, as deploy/docs/postgres.md tells an operator to write it."""
    if servers.pgbouncer_binary() is None:
        pytest.skip("PgBouncer is not installed (Debian's package pgbouncer), and no wheel brings it")
    count = SERVER_CONNECTIONS if pooling == "transaction" else 20
    with servers.pgbouncer(url, pooling, connections=count) as server:
        yield f"{server.url}?pgbouncer=transaction" if pooling == "transaction" else server.url


@pytest.fixture
def bouncer_url(migrated_postgres_url: str, pooling: str) -> Iterator[str]:
    """The URL of a migrated database behind a PgBouncer."""
    with bouncer(migrated_postgres_url, pooling) as url:
        yield url


@pytest.fixture
async def stores(bouncer_url: str) -> AsyncIterator[list[SqlStore]]:
    """Two processes over one database."""
    async with contextlib.AsyncExitStack() as stack:
        opened = [open_store(bouncer_url, connections=4, patience=PATIENCE_SECONDS) for _ in range(2)]
        yield [await stack.enter_async_context(store) for store in opened]


@pytest.mark.parametrize("pooling", ["transaction"], indirect=True)
@pytest.mark.long
def test_the_schema_is_made_through_it(postgres_url: str, pooling: str) -> None:
    with bouncer(postgres_url, pooling) as url:
        assert not status(url).is_current
        migrate(url)
        assert status(url).is_current


@pytest.mark.long
async def test_what_is_done_for_callers_of_two_tenants_does_not_mix(stores: list[SqlStore]) -> None:
    """The role and the tenant of a transaction end with it, on whichever connection it was."""
    for n, run in enumerate(RUNS):
        await stores[0].append(admission_entry(run, tenant="ab"[n % 2]))

    async def tenants_of(tenant: str | None) -> set[str]:
        return {row.tenant for row in await stores[1].of_tenant(tenant).runs(RunQuery(limit=100))}

    async def list_tenants(tenant: str, n: int) -> set[str]:
        """The tenants of the keys of a list, after one more key of the tenant was made."""
        mine = stores[n % 2].administration_of(tenant)
        assert await mine.add_key(KeyRow(f"{tenant}{n}", tenant, f"{n}", b"", frozenset(), 1.0))
        with pytest.raises(NotFound):
            await mine.add_key(KeyRow(f"foreign {tenant}{n}", "c", f"{n}", b"", frozenset(), 1.0))
        return {row.tenant for row in await mine.keys()}

    tenants = await asyncio.gather(*[tenants_of(tenant) for _ in range(6) for tenant in ("a", "b", None)])
    assert tenants == [{"a"}, {"b"}, {"a", "b"}] * 6
    tenants = await asyncio.gather(*[list_tenants(tenant, n) for n in range(6) for tenant in "ab"])
    assert tenants == [{"a"}, {"b"}] * 6
    assert len(await stores[0].keys()) == 12


@pytest.mark.long
async def test_runs_are_written_and_read_from_two_processes(stores: list[SqlStore], migrated_postgres_url: str) -> None:
    first_store, second_store = stores

    async def step(run: str, first: SqlStore, second: SqlStore) -> None:
        await first.append(replace(admission_entry(run), contents=(("ref", run.encode()),)))
        await first.append(queue_entry(run))
        await second.append(take(run, 0, "a"))
        assert (await second.step_input(run)).contents == {"ref": run.encode()}
        await second.append(move_entry(run, "finish", 1))
        await first.append(Entry(run, 5.0, (Raw(Kind.AWAITING, {}),), epoch=1, outbox=(Outbox(1, "mini", "driver"),)))
        assert await second.contents(run, ["ref"]) == {"ref": run.encode()}

    async with asyncio.TaskGroup() as group:
        for n, run in enumerate(RUNS):
            group.create_task(step(run, *(stores if n % 2 else stores[::-1])))
    kinds = [Kind.ADMITTED, Kind.STEP_QUEUED, Kind.CALL_FINISHED, Kind.AWAITING]
    for run in RUNS:
        journal = await second_store.journal(run)
        assert ([event.seq for event in journal.events], journal.salt) == ([1, 2, 3, 4], SALT)
        assert [event.kind for event in journal.events] == kinds
    assert {row.id for row in await first_store.runs(RunQuery(limit=50))} == set(RUNS)
    assert await first_store.last_seqs(RUNS) == dict.fromkeys(RUNS, 4)
    conn = await asyncpg.connect(migrated_postgres_url)
    try:
        assert await conn.fetchval("SELECT count(*) FROM tickets WHERE step = 1") == len(RUNS)
    finally:
        await conn.close()


@pytest.mark.long
async def test_leases_claims_and_fences_hold(stores: list[SqlStore]) -> None:
    first_store, second_store = stores
    for run in ("a", "b"):
        await first_store.append(admission_entry(run, lease_until=5.0))
        await first_store.append(queue_entry(run))
    assert await first_store.renew_leases("driver", {"a": 1, "b": 1, "c": 1}, 7.0) == {"a": 2, "b": 2}
    assert {row.epoch for row in await second_store.take_over("heir", 8.0, 20.0, 9, [("mini", "v1")])} == {2}
    with pytest.raises(LeaseLost):
        await first_store.append(Entry("a", 9.0, (Raw(Kind.STEP_SKIPPED, {}),), epoch=1))
    claims = await asyncio.gather(*[store.append(take("b", 0, "x")) for store in stores * 3], return_exceptions=True)
    assert Counter(type(claim).__name__ for claim in claims) == {"AppendResult": 1, "LeaseLost": 5}
    assert await second_store.renew_claims([TicketClaim("b", 0, 1), TicketClaim("b", 0, 9)], 30.0) == {
        TicketClaim("b", 0, 1)
    }
    assert {due.run for due in await first_store.announce_overdue_tickets(50.0, 9, 0.0)} == {"a", "b"}
    once = IdempotencyRecord("key", b"print", 99.0)
    answers = await asyncio.gather(
        *[store.append(replace(admission_entry(f"once-{n}"), once=once)) for n, store in enumerate(stores * 3)],
        return_exceptions=True,
    )
    assert sum(isinstance(answer, Conflict) for answer in answers) == 5
    assert await first_store.erase("a")
    assert (await second_store.journal("a")).salt == b""


@pytest.mark.long
async def test_the_archive_and_the_schema_are_read(stores: list[SqlStore], bouncer_url: str) -> None:
    await stores[0].append(admission_entry("run"))
    assert (await asyncio.to_thread(status, bouncer_url)).is_current
    async with open_archive(bouncer_url) as archive:
        assert [record.row["id"] async for record in archive.records()] == ["run"]


async def test_a_store_goes_on_after_its_connections_were_cut(
    stores: list[SqlStore], migrated_postgres_url: str
) -> None:
    first_store, _ = stores
    await first_store.append(admission_entry("run"))
    conn = await asyncpg.connect(migrated_postgres_url)
    try:
        ours = "datname = current_database() AND pid <> pg_backend_pid()"
        await conn.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {ours}")
    finally:
        await conn.close()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            with contextlib.suppress(Exception):
                await first_store.ready()
                break
    assert [event.seq for event in (await first_store.append(note("run"))).events] == [2]


@pytest.mark.parametrize("pooling", ["transaction"], indirect=True)
@pytest.mark.long
async def test_nothing_is_left_on_connections_that_others_use(stores: list[SqlStore]) -> None:
    """Neither settings nor prepared statements: PgBouncer cleans up after a session, but not after a transaction."""
    await asyncio.gather(*[stores[n % 2].append(admission_entry(run)) for n, run in enumerate(RUNS)])
    await asyncio.gather(*[stores[n % 2].runs(RunQuery(limit=n + 1)) for n in range(24)])
    await stores[0].renew_leases("driver", dict.fromkeys(RUNS, 1), 9.0)
    left = text(
        "SELECT (SELECT count(*) FROM pg_prepared_statements WHERE name <> ''), current_setting('synchronous_commit'), "
        "current_setting('lock_timeout'), pg_backend_pid()"
    )
    settings = await asyncio.gather(*[stores[n % 2]._read(lambda conn: conn.execute(left).one()) for n in range(12)])
    assert {tuple(row[:3]) for row in settings} == {(0, "on", "0")}
    assert len({row[3] for row in settings}) <= SERVER_CONNECTIONS


def test_another_way_of_pooling_is_refused() -> None:
    with pytest.raises(ConfigInvalid):
        parse_url("postgresql://u@h/db?pgbouncer=statement")
