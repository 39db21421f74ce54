"""Statements that stand alone, on connections that stay at hand: whose they are when somebody waits, breaks off or is
cut off."""

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import asyncpg
import pytest
from msgspec.structs import replace
from sqlalchemy import Connection, literal_column, select, text

from app.errors import StoreUnavailable
from app.store.protocol import RunQuery
from app.store.sql import open_store
from app.store.sqlkit import postgres
from app.store.sqlkit.postgres import Postgres
from app.store.sqlkit.runner import Fault, parse_url
from app.store.sqlkit.statements import PreparedStatement, SingleStatement
from app.store.writing import group_commit
from app.telemetry import PoolUse
from tests.conformance.entries import admission_entry, note
from tests.harness.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.integration

PID = "pg_backend_pid()"
SLEEPING = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND datname = current_database()"


@asynccontextmanager
async def open_runner(url: str, connections: int, **options: float) -> AsyncIterator[Postgres]:
    runner = Postgres(parse_url(url), connections, **options)
    try:
        yield runner
    finally:
        await runner.close()


def ask(runner: Postgres, *columns: str) -> SingleStatement[Any]:
    """The first of these columns."""
    return SingleStatement(
        PreparedStatement(select(*map(literal_column, columns)), runner.dialect, []), (), lambda rows: rows[0][0]
    )


async def pids(runner: Postgres, count: int) -> set[int]:
    """Return the process ids of so many connections at once."""
    pid_task = ask(runner, PID, "pg_sleep(0.05)")
    return set(await asyncio.gather(*(runner.read(pid_task) for _ in range(count))))


def end(url: str, pid: int) -> None:
    """Have the server close a connection, in a loop of our own."""

    async def terminate() -> None:
        other = await asyncpg.connect(url)
        assert await other.fetchval(f"SELECT pg_terminate_backend({pid}, {1000 * PATIENCE_SECONDS:.0f})"), "it is gone"
        await other.close()

    asyncio.run(terminate())


def plain(conn: Connection) -> int:
    """Work that goes through SQLAlchemy."""
    return int(conn.execute(text("SELECT pg_backend_pid()")).scalar_one())


@contextmanager
def no_collector() -> Iterator[None]:
    """It would close some time what nobody has closed."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.long
async def test_one_connection_is_enough_for_one_at_a_time(migrated_postgres_url: str) -> None:
    async with open_runner(migrated_postgres_url, 4) as runner:
        assert len({await runner.read(ask(runner, PID)) for _ in range(5)}) == 1
        assert len(await pids(runner, 4)) == 4


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_connection_is_not_used_again_whose_statement_was_broken_off(
    migrated_postgres_url: str, leaves: bool
) -> None:
    async with open_runner(migrated_postgres_url, 1) as runner:
        before = await runner.read(ask(runner, PID))
        if leaves:
            going = asyncio.create_task(runner.read(ask(runner, "pg_sleep(5)")))
            other = await asyncpg.connect(migrated_postgres_url)
            await until(lambda: other.fetchval(SLEEPING))
            await other.close()
            going.cancel()
            with pytest.raises(asyncio.CancelledError):
                await going
        else:
            runner._seconds = 0.1
            with pytest.raises(Fault, match="overlong"):
                await runner.read(ask(runner, "pg_sleep(5)"))
            runner._seconds = PATIENCE_SECONDS
        assert await runner.read(ask(runner, PID)) != before


async def test_after_a_loss_all_are_replaced_and_none_keeps_its_place(migrated_postgres_url: str) -> None:
    places = "(SELECT count(*) FROM pg_stat_activity WHERE datname = current_database())"
    with no_collector():
        async with open_runner(migrated_postgres_url, 3) as runner:
            before = await pids(runner, 3)
            with pytest.raises(Fault, match="lost"):
                await runner.read(ask(runner, f"pg_terminate_backend({PID})"))
            after = await pids(runner, 3)
            assert (len(before), len(after), before & after) == (3, 3, set())
            assert await runner.read(ask(runner, places)) <= 3


@pytest.mark.parametrize("busy", [True, False])
async def test_a_connection_that_the_server_has_closed_is_not_used_again(
    migrated_postgres_url: str, busy: bool
) -> None:
    """A write is not in doubt then, although the event loop was too busy to notice."""
    async with open_runner(migrated_postgres_url, 1) as runner:
        before = await runner.read(ask(runner, PID))
        (connection,) = runner._connections._idle
        with ThreadPoolExecutor(1) as aside:
            ending = aside.submit(end, migrated_postgres_url, before)
            ending.result() if busy else await asyncio.wrap_future(ending)
        raw = connection.connection.raw
        if busy:
            assert not raw.is_closed()
        else:
            await until(raw.is_closed)
        assert await runner.write(ask(runner, PID), expected_result=before) != before


async def test_a_statement_that_a_closed_connection_did_not_send_is_not_in_doubt(
    migrated_postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres.RawConnection, "is_alive", True)
    async with open_runner(migrated_postgres_url, 1) as runner:
        before = await runner.read(ask(runner, PID))
        (connection,) = runner._connections._idle
        await connection.connection.raw.close()
        with pytest.raises(Fault, match="lost"):
            await runner.write(ask(runner, PID), expected_result=before)
        assert await runner.write(ask(runner, PID), expected_result=before) != before


@pytest.mark.parametrize("error", [TimeoutError(), asyncpg.TooManyConnectionsError("made up")])
async def test_a_connection_that_cannot_be_opened_at_once_is_nobodys_error(
    migrated_postgres_url: str, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """On a machine without CPU to spare, or while the server still counts connections that were closed; the database
    has just answered, so it is not away."""
    slow, real = [error], asyncpg.connect

    async def connect(*arguments: Any, **options: Any) -> asyncpg.Connection:
        if slow:
            raise slow.pop()
        return await real(*arguments, **options)

    async with open_store(migrated_postgres_url) as store:
        await store.append(admission_entry("run"))
        monkeypatch.setattr(asyncpg, "connect", connect)
        results = await asyncio.gather(*(store.run("run") for _ in range(3)), store.append(note("run")))
        assert (len(slow), len(results), store.availability.healthy) == (0, 4, True)
        monkeypatch.setattr(postgres, "CONNECT_SECONDS", -1.0)  # long ago
        slow += [error] * 8
        refused = await asyncio.gather(*(store.run("run") for _ in range(12)), return_exceptions=True)
        assert any(isinstance(error, StoreUnavailable) for error in refused)


async def test_losses_while_a_connection_opens_are_nobodys_error(
    migrated_postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLAlchemy gives up when a second connection is outdated before it can be used."""
    left, real = [2], asyncpg.connect

    async with open_store(migrated_postgres_url) as store:
        await store.append(admission_entry("run"))
        connections = store._runner._connections

        async def connect(*arguments: Any, **options: Any) -> asyncpg.Connection:
            connection = await real(*arguments, **options)
            if left[0]:
                left[0] -= 1
                asyncio.get_running_loop().call_soon(connections.note_loss)
            return connection

        monkeypatch.setattr(asyncpg, "connect", connect)
        connections.note_loss()
        assert (await store.run("run")).id == "run"
        assert (left, store.availability.healthy) == ([0], True)


async def test_what_is_kept_makes_room_for_who_needs_one(migrated_postgres_url: str) -> None:
    async with open_runner(migrated_postgres_url, 2) as runner:
        before = await pids(runner, 2)
        async with asyncio.timeout(PATIENCE_SECONDS):
            # The second may begin when the first has ended, and then takes the same connection.
            assert set(await asyncio.gather(runner.read(plain), runner.read(plain))) <= before


async def test_who_waits_comes_before_who_asks_next(migrated_postgres_url: str) -> None:
    async with open_runner(migrated_postgres_url, 1) as runner, asyncio.TaskGroup() as group:

        async def ask_on() -> None:
            while not let_in.done():
                await runner.read(ask(runner, PID, "pg_sleep(0.02)"))

        await runner.read(ask(runner, PID))
        let_in = group.create_task(runner.read(plain))
        group.create_task(ask_on())
        group.create_task(ask_on())
        async with asyncio.timeout(PATIENCE_SECONDS):
            await let_in


async def test_an_altered_table_is_one_error_and_no_more(migrated_postgres_url: str) -> None:
    async with open_store(migrated_postgres_url, connections=2) as store:
        await store.append(admission_entry("run"))
        await store.run("run")

        def alter(conn: Connection) -> None:
            conn.execute(text("ALTER TABLE runs ALTER COLUMN model TYPE varchar(99)"))

        await store._write(alter)
        with pytest.raises(StoreUnavailable):
            await store.run("run")
        assert (await store.run("run")).model == (await store.runs(RunQuery()))[0].model


@pytest.mark.long
async def test_a_connection_keeps_a_bounded_number_of_statements(
    migrated_postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "STATEMENTS", 3)
    async with open_runner(migrated_postgres_url, 1) as runner:
        for number in range(40):
            assert await runner.read(ask(runner, str(number))) == number
        gc.collect()
        assert await runner.read(ask(runner, "(SELECT count(*) FROM pg_prepared_statements)")) < 20


async def test_what_the_server_has_refused_is_not_looked_for(
    migrated_postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it tried again: it was not written, and the next time would be no better."""
    monkeypatch.setattr(group_commit, "was_committed", None)
    async with open_store(migrated_postgres_url) as store:
        with pytest.raises(StoreUnavailable) as refused:
            await store.append(replace(admission_entry("run"), tags=(("name", "a\0b"),)))
        assert isinstance(refused.value.__cause__, Fault)
        assert refused.value.__cause__.reason == "refused"
        await store.append(admission_entry("run"))
        await store.append(note("run"))


async def test_whoever_waits_for_a_connection_is_counted(migrated_postgres_url: str) -> None:
    async with open_runner(migrated_postgres_url, 1) as runner:
        await runner.read(ask(runner, PID))
        assert runner.pool_use == PoolUse(in_use=0, most=1, waiting=0, waits=0)
        reading = [asyncio.create_task(runner.read(ask(runner, PID, "pg_sleep(0.5)"))) for _ in range(2)]
        await until(lambda: runner.pool_use.waiting)
        assert runner.pool_use == PoolUse(in_use=1, most=1, waiting=1, waits=1)
        await asyncio.gather(*reading)
        assert runner.pool_use == PoolUse(in_use=0, most=1, waiting=0, waits=1)
