"""The statements that the store sends to Postgres: how many round trips an entry takes, and by which plans."""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

import asyncpg
import pytest
from sqlalchemy import Connection, event

from app.core.run.events import Kind
from app.errors import LeaseLost
from app.store.protocol import Entry, Held, Lease, Move, Outbox
from app.store.sql import SqlStore, open_store
from app.store.sqlkit.connections import RawConnection
from app.store.sqlkit.engines import BY_KEY
from app.store.sqlkit.prepared import Row, Rows, WriteStatements
from tests.conformance.entries import admitted, note, queued, take
from tests.harness.raw_facts import Raw

pytestmark = pytest.mark.integration


@pytest.fixture
async def store(migrated_postgres_url: str) -> AsyncIterator[SqlStore]:
    async with open_store(migrated_postgres_url) as opened:
        yield opened


def skipped(run: str) -> Entry:
    return Entry(run, 3.0, (Raw(Kind.STEP_SKIPPED, {}),), epoch=1)


async def _a_step(store: SqlStore, round_trips: list[str]) -> list[int]:
    """How many statements a run's admission, its step's ticket, its intent and its end take."""
    counts = []
    end = Entry(
        "run",
        4.0,
        (Raw(Kind.CALL_FINISHED, {}), Raw(Kind.STEP_DONE, {"n": 0})),
        move=Move(0, "finish", claim=1),
        contents=(("ref", b"text"), ("another", b"text")),
        outbox=(Outbox(1, "mini", "driver"),),
        tags=(("model", "a"),),
    )
    for entry in (admitted("run"), queued("run"), take("run", 0, "a"), end):
        round_trips.clear()
        await store.append(entry)
        counts.append(len(round_trips))
    return counts


async def test_an_entry_is_one_round_trip_whatever_is_in_it(store: SqlStore, round_trips: list[str]) -> None:
    await store.append(admitted("warm"))
    assert await _a_step(store, round_trips) == [1, 1, 1, 1]
    round_trips.clear()
    assert await store.renew_leases("driver", {"run": 1}, 9.0) == {"run": 4}
    assert await store.renew_claims([Held("run", 1, 0)], 9.0) == frozenset()
    round_trips.clear()
    await store.append(Entry("run", 5.0, (Raw(Kind.AWAITING, {}),), epoch=1, lease=Lease("", 9.0, 9.0)))
    assert len(round_trips) == 1


async def test_rows_are_found_by_their_key_by_whoever_asked_while_there_were_few(
    store: SqlStore, round_trips: list[str]
) -> None:
    await _a_step(store, round_trips)
    await store.append(Entry("run", 5.0, move=Move(1, "take", version=0, holder="a", until=9.0)))
    await store.renew_claims([Held("run", 1, 2)], 9.0)
    await store.renew_leases("driver", {"run": 1}, 9.0)
    for entries in zip(*([entry(run) for entry in (admitted, queued, skipped)] for run in ("x", "y")), strict=True):
        await asyncio.gather(*map(store.append, entries))
    await store.append(Entry("run", 6.0, (Raw(Kind.CALL_FINISHED, {}),), move=Move(1, "finish", claim=2)))
    await store.journal("run")
    await store.contents("other", ["ref"])

    def plans(conn: Connection) -> list[str]:
        conn.exec_driver_sql("ANALYZE")
        found = []
        for number, query in enumerate(sorted({query for query in round_trips if "$1" in query})):
            conn.exec_driver_sql(f"PREPARE q{number} AS {query}")
            values = ", ".join(["NULL"] * max(int(place) for place in re.findall(r"\$(\d+)", query)))
            found.append("\n".join(row[0] for row in conn.exec_driver_sql(f"EXPLAIN EXECUTE q{number}({values})")))
        return found

    plan = "\n".join(await store._runner.read(plans))
    for table in ("runs", "tickets", "events", "contents"):
        assert f"Seq Scan on {table}" not in plan
        assert f"on {table}" in plan


async def test_who_looks_for_what_has_lapsed_goes_by_what_is_open(store: SqlStore, migrated_postgres_url: str) -> None:
    """However many runs have ended, and though the way was chosen when there were none."""
    sent: list[str] = []

    def noted(_conn: object, _cursor: object, query: str, *_: object) -> None:
        sent.append(query)

    event.listen(store._runner._writing.sync_engine, "before_cursor_execute", noted)  # type: ignore[attr-defined]
    await store.append(admitted("run", lease_until=5.0))
    sent.clear()
    await store.lapsed(6.0)
    await store.waiting(10)
    await store.overdue(6.0, 10)
    await store.take_over("heir", 6.0, 9.0, 10, [("mini", "test")])
    queries = [query for query in dict.fromkeys(sent) if "<=" in query or "LIMIT" in query]
    other = await asyncpg.connect(migrated_postgres_url, server_settings=BY_KEY)
    plans = []
    try:
        for number, query in enumerate(queries):
            await other.execute(f"PREPARE q{number} AS {query}")
            values = ", ".join(["NULL"] * max(int(place) for place in re.findall(r"\$(\d+)", query)))
            rows = await other.fetch(f"EXPLAIN EXECUTE q{number}({values})")
            plans.append("\n".join(row[0] for row in rows))
    finally:
        await other.close()
    assert len(plans) == 4
    for query, plan in zip(queries, plans, strict=True):
        index = "tickets_by_ring" if "FROM tickets" in query else "runs_open"
        assert index in plan, plan
        assert "Seq Scan" not in plan


async def test_leases_and_claims_are_prolonged_in_place(migrated_postgres_url: str) -> None:
    """No index is written for that, and none left to be swept up."""
    names = [f"run-{n}" for n in range(200)]
    async with open_store(migrated_postgres_url) as opened:
        await asyncio.gather(*(opened.append(admitted(name)) for name in names))
        await asyncio.gather(*(opened.append(queued(name)) for name in names))
        await asyncio.gather(*(opened.append(take(name, 0, "a")) for name in names))
    before = await _updates(migrated_postgres_url)
    async with open_store(migrated_postgres_url) as opened:
        for until in (9.0, 80.0, 200.0):
            assert len(await opened.renew_leases("driver", dict.fromkeys(names, 1), until)) == len(names)
            assert len(await opened.renew_claims([Held(name, 0, 1) for name in names], until)) == len(names)
    after = await _updates(migrated_postgres_url)
    for table in ("runs", "tickets"):
        made, in_place = (later - sooner for later, sooner in zip(after[table], before[table], strict=True))
        assert made == 3 * len(names)
        assert in_place > 0.8 * made, table


async def _updates(url: str) -> dict[str, tuple[int, int]]:
    """How many there were of each table's rows, and how many of them in place: who has gone has told all of them."""
    conn = await asyncpg.connect(url)
    try:
        rows = await conn.fetch("SELECT relname, n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables")
    finally:
        await conn.close()
    return {name: (made, in_place) for name, made, in_place in rows}


async def test_who_waited_for_the_lock_goes_by_what_was_changed_under_it(
    store: SqlStore, migrated_postgres_url: str
) -> None:
    await store.append(admitted("run"))
    await store.append(queued("run"))
    other = await asyncpg.connect(migrated_postgres_url)
    try:
        async with other.transaction():
            await other.execute("SELECT 1 FROM runs WHERE id = 'run' FOR UPDATE")
            taking = asyncio.create_task(store.append(take("run", 0, "late")))
            async with asyncio.timeout(5):
                while not await other.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await other.execute("UPDATE tickets SET version = 1, claim = 1, holder = 'early', until = 10")
            await other.execute("UPDATE runs SET claims = 1")  # as every entry that moves a ticket does
        with pytest.raises(LeaseLost):
            await taking
    finally:
        await other.close()


async def test_a_renewal_does_not_wait_for_the_disk(store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    await store.append(admitted("run"))
    await store.append(queued("run"))
    await store.append(take("run", 0, "a"))
    found: list[str] = []
    write = WriteStatements.__call__

    def noted(self: WriteStatements, conn: Connection, *wanted: tuple[Rows, Sequence[Row]]) -> None:
        write(self, conn, *wanted)
        found.append(str(conn.exec_driver_sql("SHOW synchronous_commit").scalar_one()))

    fetch = RawConnection.fetch

    async def noted_too(self: RawConnection, *given: Any) -> Any:
        found.append(await self.raw.fetchval("SHOW synchronous_commit"))
        return await fetch(self, *given)

    monkeypatch.setattr(WriteStatements, "__call__", noted)
    monkeypatch.setattr(RawConnection, "fetch", noted_too)
    await store.renew_leases("driver", {"run": 1}, 9.0)
    await store.renew_claims([Held("run", 0, 1)], 9.0)
    await store.append(Entry("run", 6.0, (Raw(Kind.CALL_FINISHED, {}),), move=Move(0, "finish", claim=1)))
    assert found == ["off", "off", "on"]
    await store.append(note("run"))
    assert set(found[3:]) == {"on"}
