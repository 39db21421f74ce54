"""The statements that the store sends to Postgres: how many round trips an entry takes, and by which plans."""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

import asyncpg
import pytest
from msgspec.structs import replace
from sqlalchemy import Connection, event

from app.core.run.events import Kind
from app.errors import LeaseLost
from app.store.protocol import Entry, Lease, Outbox, RunQuery, TicketClaim, TicketMove
from app.store.sql import SqlStore, open_store
from app.store.sqlkit.postgres import RawConnection
from app.store.sqlkit.statements import Row, TableWrite, WriteStatements
from tests.conformance.conversations import answer, turn
from tests.conformance.entries import admission_entry, note, queue_entry, take
from tests.harness.raw_facts import Raw
from tests.harness.waiting import until

pytestmark = pytest.mark.integration


@pytest.fixture
async def store(migrated_postgres_url: str) -> AsyncIterator[SqlStore]:
    async with open_store(migrated_postgres_url) as opened:
        yield opened


def skip_entry(run: str) -> Entry:
    return Entry(run, 3.0, (Raw(Kind.STEP_SKIPPED, {}),), epoch=1)


async def _a_step(store: SqlStore, round_trips: list[str]) -> list[int]:
    """Return the number of statements of an admission, a ticket, an intent and an end."""
    counts = []
    end = Entry(
        "run",
        4.0,
        (Raw(Kind.CALL_FINISHED, {}), Raw(Kind.STEP_DONE, {"n": 0})),
        move=TicketMove(0, "finish", claim=1),
        contents=(("ref", b"text"), ("another", b"text")),
        outbox=(Outbox(1, "mini", "driver"),),
        tags=(("model", "a"),),
    )
    for entry in (admission_entry("run"), queue_entry("run"), take("run", 0, "a"), end):
        round_trips.clear()
        await store.append(entry)
        counts.append(len(round_trips))
    return counts


async def test_an_entry_is_one_round_trip_whatever_is_in_it(store: SqlStore, round_trips: list[str]) -> None:
    await store.append(admission_entry("warm"))
    assert await _a_step(store, round_trips) == [1, 1, 1, 1]
    round_trips.clear()
    assert await store.renew_leases("driver", {"run": 1}, 9.0) == {"run": 4}
    assert await store.renew_claims([TicketClaim("run", 1, 0)], 9.0) == frozenset()
    round_trips.clear()
    await store.append(Entry("run", 5.0, (Raw(Kind.AWAITING, {}),), epoch=1, lease=Lease("", 9.0, 9.0)))
    assert len(round_trips) == 1


async def test_a_turn_that_shares_texts_is_one_round_trip_and_so_is_its_answer(
    store: SqlStore, round_trips: list[str]
) -> None:
    await store.append(turn("first", 3))
    for entry in (turn("run", 4), answer("run", 4)):
        round_trips.clear()
        await store.append(entry)
        assert len(round_trips) == 1


CROWD = 20_000
"""TableWrite that other processes add to each table at once."""


async def _crowd(url: str) -> None:
    """Copy one run, its ticket and its event many times. The server does not count the new rows before it has to."""
    conn = await asyncpg.connect(url)
    try:
        for table, key in (("runs", "id"), ("tickets", "run"), ("events", "run"), ("contents", "run")):
            rows = await conn.fetch(
                "SELECT attname FROM pg_attribute WHERE attrelid = $1::regclass AND attnum > 0", table
            )
            columns = [f'"{row[0]}"' for row in rows]
            values = ["'copy-' || n" if name == f'"{key}"' else name for name in columns]
            await conn.execute(
                f"INSERT INTO {table} ({', '.join(columns)}) SELECT {', '.join(values)} "
                f"FROM {table}, generate_series(1, {CROWD}) AS n WHERE {key} = 'model'"
            )
    finally:
        await conn.close()


async def _rows_read_in_sequence(url: str) -> dict[str, int]:
    """Return the number of rows of each table that sequential scans have read so far."""
    conn = await asyncpg.connect(url)
    try:
        await conn.execute("SELECT pg_stat_force_next_flush()")
        rows = await conn.fetch("SELECT relname, seq_tup_read FROM pg_stat_user_tables")
    finally:
        await conn.close()
    return {row["relname"]: row["seq_tup_read"] for row in rows}


async def _each_single_statement(store: SqlStore, run: str) -> None:
    """The statements of a run with one step that are sent without a transaction around them."""
    await store.append(admission_entry(run))
    await store.append(queue_entry(run))
    await store.append(take(run, 0, "a"))
    end = Entry(
        run, 6.0, (Raw(Kind.CALL_FINISHED, {}),), move=TicketMove(0, "finish", claim=1), contents=(("ref", b"x"),)
    )
    await store.append(end)
    await store.run(run)
    await store.step_input(run)
    await store.contents("other", ["ref"])
    pair = [f"{run}-{n}" for n in range(2)]
    for entry in (admission_entry, queue_entry, skip_entry):
        await asyncio.gather(*[store.append(entry(name)) for name in pair])


@pytest.mark.long
async def test_rows_are_found_by_their_key_after_the_tables_have_grown(migrated_postgres_url: str) -> None:
    """Postgres keeps a statement's plan, and for a table of a few rows that would be to read all of it."""
    model = replace(admission_entry("model"), contents=(("ref", b"x"),))
    async with open_store(migrated_postgres_url, connections=1) as store:
        await store.append(model)
        await store.append(queue_entry("model"))
        await store._write(lambda conn: conn.exec_driver_sql("ANALYZE"))
        for n in range(8):  # the plan would be kept from the sixth time on
            await _each_single_statement(store, f"before-{n}")
            await store.renew_leases("driver", {f"before-{n}": 1, "none": 1}, 9.0)
            await store.renew_claims([TicketClaim(f"before-{n}", 0, 1), TicketClaim("none", 0, 1)], 9.0)
        await _crowd(migrated_postgres_url)
        before = await _rows_read_in_sequence(migrated_postgres_url)
        for n in range(8):
            await _each_single_statement(store, f"after-{n}")
            await store.renew_leases("driver", {f"after-{n}": 1, "none": 1}, 9.0)
            await store.renew_claims([TicketClaim(f"after-{n}", 0, 1), TicketClaim("none", 0, 1)], 9.0)
    after = await _rows_read_in_sequence(migrated_postgres_url)
    rows_read = {table: after[table] - before[table] for table in ("runs", "tickets", "events", "contents")}
    assert max(rows_read.values()) < CROWD, rows_read


async def test_lists_of_runs_are_planned_as_the_server_sees_fit(migrated_postgres_url: str) -> None:
    """Though they use the very connection on which runs are found by their keys. Limits on waiting hold for all."""
    switched = "SELECT name FROM pg_settings WHERE source = 'session' AND category LIKE 'Query Tuning%'"
    limits = "SELECT name FROM pg_settings WHERE source = 'session' AND name LIKE '%_timeout' ORDER BY name"
    async with open_store(migrated_postgres_url, connections=1) as store:
        for n in range(3):
            await store.append(admission_entry(f"run-{n}"))
            assert len(await store.runs(RunQuery())) == n + 1
            await store.renew_leases("driver", {"run-0": 1}, 9.0)
            await asyncio.gather(*[store.append(skip_entry(f"run-{m}")) for m in range(n)])
            assert await store._read(lambda conn: conn.exec_driver_sql(switched).scalars().all()) == []
        settings = await store._read(lambda conn: conn.exec_driver_sql(limits).scalars().all())
        assert settings == ["idle_in_transaction_session_timeout", "lock_timeout", "statement_timeout"]


async def test_who_looks_for_what_has_lapsed_goes_by_what_is_open(store: SqlStore, migrated_postgres_url: str) -> None:
    """However many runs have ended."""
    statements: list[str] = []

    def note_statement(_conn: object, _cursor: object, query: str, *_: object) -> None:
        statements.append(query)

    event.listen(store._runner._writing.sync_engine, "before_cursor_execute", note_statement)  # type: ignore[attr-defined]
    await store.append(admission_entry("model", lease_until=5.0))
    await store.append(queue_entry("model"))
    await store.append(Entry("model", 2.0, (Raw(Kind.SUCCEEDED, {}),), epoch=1))
    await _crowd(migrated_postgres_url)
    await store._write(lambda conn: conn.exec_driver_sql("ANALYZE"))
    statements.clear()
    await store.count_lapsed_runs(6.0)
    await store.count_waiting_runs(10)
    await store.announce_overdue_tickets(6.0, 10)
    await store.take_over("heir", 6.0, 9.0, 10, [("mini", "test")])
    queries = [query for query in dict.fromkeys(statements) if "<=" in query or "LIMIT" in query]
    other = await asyncpg.connect(migrated_postgres_url)
    plans = []
    try:
        await other.execute("SET plan_cache_mode = force_generic_plan")  # for EXPLAIN to need no values
        for number, query in enumerate(queries):
            await other.execute(f"PREPARE q{number} AS {query}")
            values = ", ".join(["NULL"] * max(int(place) for place in re.findall(r"\$(\d+)", query)))
            rows = await other.fetch(f"EXPLAIN EXECUTE q{number}({values})")
            plans.append("\n".join(row[0] for row in rows))
    finally:
        await other.close()
    assert len(plans) == 4
    for query, plan in zip(queries, plans, strict=True):
        if "FROM tickets" not in query:  # there are no tickets, so any plan is as good
            assert "runs_open" in plan, plan
            assert "Seq Scan on runs" not in plan


async def test_later_runs_are_taken_over_in_place_of_those_that_others_write_to(
    store: SqlStore, migrated_postgres_url: str
) -> None:
    for number in range(6):
        await store.append(admission_entry(f"run-{number}", lease_until=1.0 + number))
    other = await asyncpg.connect(migrated_postgres_url)
    try:
        async with other.transaction():
            await other.execute("SELECT id FROM runs WHERE id IN ('run-0', 'run-1', 'run-2') FOR UPDATE")
            taken = await store.take_over("heir", 10.0, 30.0, 2, [("mini", "v1")])
    finally:
        await other.close()
    assert [row.id for row in taken] == ["run-3", "run-4"]


async def test_leases_and_claims_are_prolonged_in_place(migrated_postgres_url: str) -> None:
    """No index is written for that, and none left to be swept up."""
    names = [f"run-{n}" for n in range(200)]
    async with open_store(migrated_postgres_url) as opened:
        await asyncio.gather(*(opened.append(admission_entry(name)) for name in names))
        await asyncio.gather(*(opened.append(queue_entry(name)) for name in names))
        await asyncio.gather(*(opened.append(take(name, 0, "a")) for name in names))
    before = await _updates(migrated_postgres_url)
    async with open_store(migrated_postgres_url) as opened:
        for until in (9.0, 80.0, 200.0):
            assert len(await opened.renew_leases("driver", dict.fromkeys(names, 1), until)) == len(names)
            assert len(await opened.renew_claims([TicketClaim(name, 0, 1) for name in names], until)) == len(names)
    after = await _updates(migrated_postgres_url)
    for table in ("runs", "tickets"):
        updates, in_place = (later - sooner for later, sooner in zip(after[table], before[table], strict=True))
        assert updates == 3 * len(names)
        assert in_place > 0.8 * updates, table


async def _updates(url: str) -> dict[str, tuple[int, int]]:
    """Return how many of each table's rows were updated, and how many of them in place."""
    conn = await asyncpg.connect(url)
    try:
        rows = await conn.fetch("SELECT relname, n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables")
    finally:
        await conn.close()
    return {name: (updates, in_place) for name, updates, in_place in rows}


async def test_who_waited_for_the_lock_goes_by_what_was_changed_under_it(
    store: SqlStore, migrated_postgres_url: str
) -> None:
    await store.append(admission_entry("run"))
    await store.append(queue_entry("run"))
    other = await asyncpg.connect(migrated_postgres_url)
    try:
        async with other.transaction():
            await other.execute("SELECT 1 FROM runs WHERE id = 'run' FOR UPDATE")
            taking = asyncio.create_task(store.append(take("run", 0, "late")))
            await until(lambda: other.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"))
            await other.execute("UPDATE tickets SET version = 1, claim = 1, holder = 'early', until = 10")
            await other.execute("UPDATE runs SET claims = 1")  # as every entry that moves a ticket does
        with pytest.raises(LeaseLost):
            await taking
    finally:
        await other.close()


async def test_a_renewal_does_not_wait_for_the_disk(store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    await store.append(admission_entry("run"))
    await store.append(queue_entry("run"))
    await store.append(take("run", 0, "a"))
    modes: list[str] = []
    write = WriteStatements.__call__

    def note_and_write(self: WriteStatements, conn: Connection, *rows: tuple[TableWrite, Sequence[Row]]) -> None:
        write(self, conn, *rows)
        modes.append(str(conn.exec_driver_sql("SHOW synchronous_commit").scalar_one()))

    prepared = RawConnection.prepare

    async def note_and_fetch(self: RawConnection, *arguments: Any) -> Any:
        modes.append(await self.raw.fetchval("SHOW synchronous_commit"))
        return await prepared(self, *arguments)

    monkeypatch.setattr(WriteStatements, "__call__", note_and_write)
    monkeypatch.setattr(RawConnection, "prepare", note_and_fetch)
    await store.renew_leases("driver", {"run": 1}, 9.0)
    await store.renew_claims([TicketClaim("run", 0, 1)], 9.0)
    await store.append(Entry("run", 6.0, (Raw(Kind.CALL_FINISHED, {}),), move=TicketMove(0, "finish", claim=1)))
    assert modes == ["off", "off", "on"]
    await store.append(note("run"))
    assert set(modes[3:]) == {"on"}
