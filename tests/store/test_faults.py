"""The store while its database misbehaves: gone, frozen, locked, or lost in the middle of a COMMIT."""

import asyncio
import contextlib
import gc
import re
import sqlite3
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import Literal

import pytest
from msgspec.structs import replace
from sqlalchemy import Connection, NullPool, create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError

from app.core.pool.catalog import Amount
from app.core.run.events import Kind
from app.errors import Conflict, StoreUnavailable
from app.store import sql
from app.store.protocol import UNDECIDED, AppendResult, Entry, NewRun, RunQuery
from app.store.sql import SqlStore, open_store
from app.store.sqlkit import postgres, sqlite
from app.store.sqlkit.runner import Fault, parse_url
from app.store.writing import group_commit
from tests.harness.raw_facts import Raw
from tests.harness.waiting import PATIENCE_SECONDS, assert_stays, let_others_run, until

pytestmark = [pytest.mark.integration, pytest.mark.faults]

NEW = NewRun("tenant", "key", "mini", "baton-mini", b"salt", "driver", 100.0, 500.0, Amount(1000, 1000), "v1")
Mood = Literal["open", "shut", "cut before commit", "cut after commit", "cut, and commit late"]
COMMIT_DELAY = 0.1
"""Seconds that Postgres is given to commit before its connection is cut."""
LATE_DELAY = 0.7
"""Seconds for which a COMMIT is under way whose connection has been cut."""


@dataclass(slots=True)
class Proxy:
    """A TCP proxy in front of Postgres that can be told to misbehave; a cut happens once."""

    host: str
    port: int
    mood: Mood = "open"
    for_good: bool = False
    """Whether nobody gets through after a cut."""
    cuts: int = 0
    _mute: bool = False
    _writes: set[bytes] = field(default_factory=set)
    """Names of statements that write; outside of a transaction each is one of its own."""
    _begun: set[asyncio.StreamReader] = field(default_factory=set)
    """Connections with a transaction."""
    _thawed: asyncio.Event = field(default_factory=asyncio.Event)
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _serving: set[asyncio.Task[None]] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task, ends = asyncio.current_task(), [writer]
        assert task is not None
        self._serving.add(task)
        try:
            if self.mood == "shut":
                return
            back_reader, back_writer = await asyncio.open_connection(self.host, self.port)
            ends.append(back_writer)
            if self.mood == "shut":
                return
            self._writers |= {writer, back_writer}
            await asyncio.gather(
                self._pump(reader, back_writer, (writer,)),
                self._pump(back_reader, writer, (back_writer,)),
                return_exceptions=True,
            )
        except OSError:
            return
        finally:
            for end in ends:
                end.transport.abort()
            self._serving.discard(task)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, others: tuple[asyncio.StreamWriter, ...]
    ) -> None:
        while data := await reader.read(65536):
            await self._thawed.wait()
            if self._commits(data, reader) and self.mood.startswith("cut"):
                self.cuts += 1
                mood, self.mood = self.mood, "open"
                if mood == "cut, and commit late":
                    for other in others:
                        other.transport.abort()
                    await asyncio.sleep(LATE_DELAY)
                self._mute = mood == "cut after commit"
                if mood != "cut before commit":
                    writer.write(data)
                    await writer.drain()
                    await asyncio.sleep(COMMIT_DELAY)  # Postgres commits; its answer goes nowhere
                if self.for_good:
                    self.shut()
                for other in others:
                    other.transport.abort()
                self._mute = False
                break
            if not self._mute:
                writer.write(data)
                await writer.drain()
        writer.close()

    def _commits(self, data: bytes, reader: asyncio.StreamReader) -> bool:
        """Return True if this asks the server to commit: by the word, or as a statement that stands alone."""
        self._writes |= set(re.findall(rb"(__asyncpg_stmt_\w+__)\0WITH ", data))
        if b"BEGIN;" in data:
            self._begun.add(reader)
        if b"COMMIT;" in data or b"ROLLBACK;" in data:
            self._begun.discard(reader)
            return b"COMMIT;" in data
        return reader not in self._begun and any(b"\0" + name + b"\0" in data for name in self._writes)

    def freeze(self) -> None:
        """Take everything and pass on nothing."""
        self._thawed.clear()

    def thaw(self) -> None:
        self._thawed.set()

    def shut(self) -> None:
        """Break all connections and take no new ones."""
        self.mood = "shut"
        for writer in self._writers:
            writer.transport.abort()

    async def end(self) -> None:
        """Shut, and until the last connection is closed: the next test would be blamed for what is left open."""
        self.thaw()
        self.shut()
        for _ in range(20):  # turns of the loop; a connection that has just been made is served after a few
            await asyncio.sleep(0)
            if self._serving:
                await asyncio.wait(self._serving, timeout=10)


@pytest.fixture
def postgres_url(migrated_postgres_url: str) -> str:
    return migrated_postgres_url


@pytest.fixture
async def proxy(postgres_url: str) -> Proxy:
    url = make_url(postgres_url)
    opened = Proxy(str(url.host), url.port or 5432)
    opened.thaw()
    return opened


@contextlib.asynccontextmanager
async def behind(proxy: Proxy, database: str, **options: float) -> AsyncIterator[SqlStore]:
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    url = make_url(database).set(port=port).render_as_string(hide_password=False)
    try:
        async with open_store(url, **options) as store:  # type: ignore[arg-type]
            yield store
            proxy.shut()
    finally:
        server.close()
        await proxy.end()


def admission_entry(run: str) -> Entry:
    return Entry(run, 1.0, (Raw(Kind.ADMITTED, {"run": run}),), new=NEW)


def note(run: str) -> Entry:
    return Entry(run, 2.0, (Raw(Kind.CANCEL_ASKED, {}),), epoch=1)


@pytest.mark.long
async def test_a_database_that_is_down_is_said_so_quickly_and_used_again_when_it_is_back(
    proxy: Proxy, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for it to come back."""
    monkeypatch.setattr(group_commit, "DECIDE_SECONDS", 3600.0)
    async with behind(proxy, postgres_url, patience=3600.0) as store:
        await store.append(admission_entry("run"))
        proxy.shut()
        async with asyncio.timeout(PATIENCE_SECONDS):
            calls = [store.append(note("run")) for _ in range(20)]
            answers = await asyncio.gather(*calls, store.ready(), store.run("run"), return_exceptions=True)
        assert all(isinstance(answer, StoreUnavailable) for answer in answers)
        proxy.mood = "open"
        await store.ready()
        assert (await store.append(note("run"))).events[0].seq == 2


async def test_dead_connections_in_the_pool_are_nobodys_error(proxy: Proxy, postgres_url: str) -> None:
    async with behind(proxy, postgres_url) as store:
        await store.append(admission_entry("run"))
        await asyncio.gather(*(store.runs(RunQuery()) for _ in range(8)))
        proxy.shut()
        proxy.mood = "open"
        await store.append(note("run"))
        assert (await store.run("run")).seq == 2


async def test_a_database_that_answers_others_is_not_away_because_one_read_takes_too_long(
    migrated_postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql, "Postgres", partial(postgres.Postgres, work_seconds=1.0))
    async with open_store(migrated_postgres_url) as store:
        reading = asyncio.create_task(store._read(lambda conn: conn.exec_driver_sql("SELECT pg_sleep(60)")))
        while not reading.done():
            await store.clock()
        with pytest.raises(StoreUnavailable, match="took too long"):
            await reading
        assert store.healthy
        assert store.seconds_since_recovery == inf


async def test_a_store_opens_before_its_database_is_up(proxy: Proxy, postgres_url: str) -> None:
    proxy.mood = "shut"
    async with behind(proxy, postgres_url) as store:
        with pytest.raises(StoreUnavailable):
            await store.ready()
        proxy.mood = "open"
        await store.ready()


async def append_on_a_busy_machine(store: SqlStore, entry: Entry) -> None:
    """Append again while a connection takes longer than the short limits of these tests."""

    async def is_appended() -> bool:
        with contextlib.suppress(StoreUnavailable):
            await store.append(entry)
            return True
        return False

    assert await until(is_appended)


@pytest.mark.parametrize("given_up", ["append", "wish", "read"])
async def test_what_is_told_as_written_after_a_freeze_can_be_seen_by_others(
    proxy: Proxy, postgres_url: str, monkeypatch: pytest.MonkeyPatch, given_up: str
) -> None:
    """A statement that was given up, or its BEGIN, reaches the database later, on a connection that is in use again."""
    monkeypatch.setattr(sql, "Postgres", partial(postgres.Postgres, work_seconds=1.5))
    monkeypatch.setattr(group_commit, "DECIDE_SECONDS", 0.5)
    async with behind(proxy, postgres_url, connections=1) as store:
        await append_on_a_busy_machine(store, admission_entry("run"))
        proxy.freeze()
        entry = note("run") if given_up == "append" else replace(note("run"), epoch=None)
        with pytest.raises(StoreUnavailable):
            await (store.run("run") if given_up == "read" else store.append(entry))
        proxy.thaw()
        assert await store.wait_until_healthy(PATIENCE_SECONDS)
        await append_on_a_busy_machine(store, note("run"))
        async with open_store(postgres_url) as other:
            assert (await other.run("run")).seq == (await store.run("run")).seq >= 2


async def test_a_frozen_database_is_given_up_in_bounded_time(
    proxy: Proxy, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "CONNECT_SECONDS", 1.0)
    monkeypatch.setattr(sql, "Postgres", partial(postgres.Postgres, work_seconds=1.0))
    monkeypatch.setattr(group_commit, "DECIDE_SECONDS", 0.6)
    async with behind(proxy, postgres_url, patience=0.3) as store:
        await append_on_a_busy_machine(store, admission_entry("run"))
        proxy.freeze()
        first = asyncio.create_task(store.append(note("run")))
        await assert_stays(lambda: not first.done(), seconds=0.05)
        later = [asyncio.create_task(store.append(note("run"))) for _ in range(5)]
        async with asyncio.timeout(PATIENCE_SECONDS):
            answers = await asyncio.gather(first, *later, return_exceptions=True)
        assert all(isinstance(answer, StoreUnavailable) for answer in answers)
        proxy.thaw()
        assert await store.wait_until_healthy(PATIENCE_SECONDS)

        async def appended() -> list[int]:
            with contextlib.suppress(StoreUnavailable):  # a connection that takes longer, as on a busy machine
                before = (await store.run("run")).seq
                return [(await store.append(note("run"))).events[0].seq - before]
            return []

        assert await until(appended) == [1]


async def test_an_entry_that_waited_for_this_process_alone_is_not_refused(tmp_path: Path) -> None:
    """The machine stood still before the entry was looked at; nothing speaks against the database."""
    async with open_store(f"sqlite:///{tmp_path}/baton.db", patience=0.0) as store:
        await store.append(admission_entry("run"))
        assert (await store.append(note("run"))).events[0].seq == 2


async def test_pool_exhaustion_is_unavailable_not_a_hang(
    proxy: Proxy, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "CONNECT_SECONDS", 2.0)
    async with behind(proxy, postgres_url, connections=1) as store:
        async with store._runner._writing.connect():  # type: ignore[attr-defined]
            with pytest.raises(StoreUnavailable):
                await store.append(admission_entry("run"))
        await store.append(admission_entry("run"))


async def test_connections_in_use_when_the_pool_is_given_up_do_not_keep_their_places(postgres_url: str) -> None:
    """The server told one of them that it shuts down, and then did not: the others are given back to no pool."""
    runner = postgres.Postgres(parse_url(postgres_url), connections=3)

    def end_connection(conn: Connection) -> None:
        conn.execute(text("DO $$ BEGIN PERFORM pg_sleep(0.05); RAISE SQLSTATE '57P01'; END $$"))

    def busy(conn: Connection) -> None:
        conn.execute(text("SELECT pg_sleep(0.15)"))

    def places(conn: Connection) -> int:
        counted = text("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")
        return int(conn.execute(counted).scalar_one())

    gc.disable()  # it would close them some time
    try:
        for _ in range(3):
            await asyncio.gather(*map(runner.read, (busy, busy, end_connection)), return_exceptions=True)
        assert await runner.read(places) <= 3
    finally:
        gc.enable()
        await runner.close()


@pytest.mark.parametrize("mood", ["cut before commit", "cut after commit"])
async def test_a_commit_without_an_answer_is_looked_up(proxy: Proxy, postgres_url: str, mood: Mood) -> None:
    """F-18: whichever way it went, each entry is written once and answered as committed."""
    async with behind(proxy, postgres_url) as store:
        await store.append(admission_entry("run"))
        proxy.mood = mood
        entries = [note("run"), note("run"), admission_entry("other")]
        answers = await asyncio.gather(*map(store.append, entries))
        assert proxy.cuts == 1
        outcomes = []
        for answer in answers:
            outcomes.append([event.seq for event in answer.events])
        assert outcomes == [[2], [3], [1]]
        async with open_store(postgres_url) as direct:
            assert [event.seq for event in (await direct.journal("run")).events] == [1, 2, 3]
            assert len((await direct.journal("other")).events) == 1


@pytest.mark.parametrize("is_known", [False, True])
async def test_a_commit_that_comes_late_is_not_made_twice(proxy: Proxy, postgres_url: str, is_known: bool) -> None:
    """F-18: the connection breaks, and the server goes on committing while we look for what it has committed."""
    async with behind(proxy, postgres_url) as store:
        await store.append(admission_entry("run"))
        proxy.mood = "cut, and commit late"
        entries = [admission_entry("other"), *([note("run")] if is_known else [])]
        answers = await asyncio.gather(*map(store.append, entries))
        assert proxy.cuts == 1
        outcomes = []
        for answer in answers:
            outcomes.append([event.seq for event in answer.events])
        assert outcomes == [[1], [2]][: len(entries)]
        async with open_store(postgres_url) as direct:
            assert len((await direct.journal("other")).events) == 1
            assert len((await direct.journal("run")).events) == 1 + is_known


@pytest.mark.parametrize("mood", ["cut before commit", "cut after commit"])
async def test_a_database_that_stays_away_after_a_commit_leaves_it_undecided(
    proxy: Proxy, postgres_url: str, mood: Mood, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_commit, "DECIDE_SECONDS", 0.4)
    async with behind(proxy, postgres_url) as store:
        await store.append(admission_entry("run"))
        proxy.mood, proxy.for_good = mood, True
        with pytest.raises(StoreUnavailable) as refused:
            await store.append(admission_entry("other"))
        assert (refused.value.public_code, "not known" in refused.value.message) == (UNDECIDED, True)


async def test_an_admission_that_may_come_late_after_the_last_try_is_undecided(
    proxy: Proxy, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can wait for the row of a run that others do not see yet."""
    monkeypatch.setattr(group_commit, "TRIES", 1)
    async with behind(proxy, postgres_url) as store:
        await store.append(admission_entry("run"))
        proxy.mood = "cut, and commit late"
        with pytest.raises(StoreUnavailable) as refused:
            await store.append(admission_entry("other"))
        assert refused.value.public_code == UNDECIDED


async def test_who_finds_the_connection_closed_knows_that_nothing_was_written(
    proxy: Proxy, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is nothing to look up then, and nobody waits for the database to come back."""
    monkeypatch.setattr(group_commit, "DECIDE_SECONDS", 3600.0)
    async with behind(proxy, postgres_url) as store:
        await store.append(admission_entry("run"))
        proxy.shut()
        await let_others_run()
        with pytest.raises(StoreUnavailable) as refused:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await store.append(admission_entry("other"))
        assert refused.value.public_code != UNDECIDED


async def test_a_deadlock_is_tried_again(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_store(postgres_url) as store:
        await store.append(admission_entry("run"))
        write, faults = store._runner.write, [Fault("contended"), Fault("lost")]

        async def unlucky(work: object, **arguments: object) -> object:
            if faults:
                raise faults.pop()
            return await write(work, **arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(store._runner, "write", unlucky)
        assert (await store.append(note("run"))).events[0].seq == 2
        assert not faults


async def test_two_processes_that_admit_one_id_leave_one_run(postgres_url: str) -> None:
    async with open_store(postgres_url) as first_store, open_store(postgres_url) as second_store:
        for n in range(20):
            calls = [store.append(admission_entry(f"run-{n}")) for store in (first_store, second_store)]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            assert sum(isinstance(answer, AppendResult) for answer in answers) == 1
            assert sum(isinstance(answer, Conflict) for answer in answers) == 1


async def test_a_locked_file_is_unavailable_until_it_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "LOCK_SECONDS", 0.2)
    async with open_store(f"sqlite:///{tmp_path}/baton.db") as store:
        await store.append(admission_entry("run"))
        other = sqlite3.connect(tmp_path / "baton.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        for call in (partial(store.append, note("run")), store.ready):
            with pytest.raises(StoreUnavailable):
                await call()
        assert (await store.run("run")).seq == 1  # readers do not wait for writers
        other.execute("ROLLBACK")
        other.close()
        await store.ready()
        assert (await store.append(note("run"))).events[0].seq == 2


async def test_the_log_says_why_the_database_is_unavailable(caplog: pytest.LogCaptureFixture) -> None:
    """The password in the URL is not logged."""
    async with open_store("postgresql://baton:hush@127.0.0.1:1/baton") as store:
        with pytest.raises(StoreUnavailable):
            await store.clock()
    [line] = [record.getMessage() for record in caplog.records if "unavailable" in record.getMessage()]
    assert line.startswith("The database is unavailable (ConnectionRefusedError: [Errno 111] Connect call failed")
    assert line.endswith("); writes wait until it is back.")
    assert "hush" not in line


def test_the_cause_of_a_fault_has_neither_a_statement_nor_its_values() -> None:
    engine = create_engine("sqlite://", poolclass=NullPool)
    with engine.connect() as conn, pytest.raises(OperationalError) as caught:
        conn.execute(text("SELECT :value FROM nowhere"), {"value": "a secret"})
    fault = Fault("down")
    fault.__cause__ = caught.value
    assert fault.describe_cause() == "OperationalError: no such table: nowhere"
    assert Fault("contended").describe_cause() == ""
