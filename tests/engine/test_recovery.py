"""Runs whose driver is gone: driven on by whoever can, left to those who can, ended where nobody needs to understand
them. And drivers that are told nothing: they learn from the renewal of their leases that a journal has moved."""

import asyncio
import logging
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from math import inf
from pathlib import Path

import pytest

from app.conductor.protocol import FixedPlanConductor
from app.core.message.chat import Message, Task, Text
from app.core.plan.workflow import Step
from app.core.pool.budgets import Budget
from app.core.pool.catalog import Amount
from app.core.run.events import Kind, RunCancelAsked
from app.core.run.state import FALLBACK
from app.engine.context import StandstillWatch
from app.engine.runs import admission, cancellation, registry
from app.engine.runs.approvals import Decision
from app.engine.runs.recovery import Recovery, is_newer
from app.engine.runs.registry import Drivers
from app.errors import StoreUnavailable
from app.process.wiring import Runtime
from app.store.protocol import AppendResult, Entry, Journal, RunRow
from app.store.sql import SqlStore
from tests.harness.conversations import TOOLBOX, look_call, tool_call_reply
from tests.harness.in_process import events, finish, kinds, limits_with, order, pool_text, running_service
from tests.harness.raw_facts import fact_from_json
from tests.harness.waiting import PATIENCE_SECONDS, assert_stays, until
from tests.stubs import Hang, ProviderStub, Reply

LEASE = 0.6
SETTINGS = {"BATON_LEASE_SECONDS": str(LEASE)}


async def abandon_run(stub: ProviderStub, folder: Path, tier: str = "baton-mini", seconds: float = 30.0) -> str:
    """A run that its process has left in the middle of things."""
    stub.script("planner", Hang())
    async with running_service(folder, pool_text(stub), SETTINGS, dispatches=False) as runtime:
        limits = limits_with(runtime, tier, seconds=seconds)
        followed_run = await runtime.runs.start(order(runtime, tier, limits=limits))
        if tier == "baton-ultra":
            await stub.wait_for(1, "planner")
    stub.clear()
    return followed_run.run


async def at_its_end(runtime: Runtime, run: str, within: float = PATIENCE_SECONDS) -> RunRow:
    """The run's row once it has ended."""

    async def has_ended() -> bool:
        return (await runtime.context.store.run(run)).ended_at is not None

    await until(has_ended, within=within)
    return await runtime.context.store.run(run)


def gauge(runtime: Runtime) -> float:
    """Return the number of orphaned runs that this process reports and cannot drive."""
    lines = runtime.context.telemetry.exposition().decode().splitlines()
    return float(next(line.rpartition(" ")[2] for line in lines if line.startswith("baton_orphans_stranded ")))


async def until_reported(runtime: Runtime) -> None:
    await until(lambda: gauge(runtime))


async def until_relieved(runtime: Runtime, run: str) -> None:
    """Until the driver that admitted a run is not its driver any more."""

    def is_relieved() -> bool:
        driver = runtime.drivers.driver_of(run)
        return driver is None or driver.writer.epoch != 1

    await until(is_relieved)


@pytest.mark.long
async def test_nothing_is_begun_or_judged_before_the_database_has_said_the_time(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await abandon_run(stub, tmp_path)
    clock, away = SqlStore.clock, True

    async def read_clock(store: SqlStore) -> float:
        if away:
            raise StoreUnavailable
        return await clock(store)

    monkeypatch.setattr(SqlStore, "clock", read_clock)
    async with running_service(tmp_path, pool_text(stub), SETTINGS) as runtime:
        with pytest.raises(StoreUnavailable):
            await runtime.runs.start(order(runtime, "baton-mini"))
        with pytest.raises(StoreUnavailable):  # it would be given the time of this machine's own clock
            await runtime.runs.decide(run, None, Decision("approve", "digest", "somebody", ""))
        before = await runtime.context.store.find_ticket(run, 0)

        async def is_untouched() -> bool:
            row, due = await runtime.context.store.run(run), await runtime.context.store.find_ticket(run, 0)
            return row.epoch == 1 and due == before

        await assert_stays(is_untouched, seconds=4 * LEASE)
        away = False
        await runtime.clock.read()
        assert (await at_its_end(runtime, run)).state == "succeeded"


async def test_an_orphan_is_driven_to_its_end(stub: ProviderStub, tmp_path: Path) -> None:
    run = await abandon_run(stub, tmp_path)
    async with running_service(tmp_path, pool_text(stub), SETTINGS) as runtime:
        assert (await at_its_end(runtime, run)).state == "succeeded"


@pytest.mark.parametrize("tier", ["baton-mini", "baton-ultra"])
async def test_an_orphan_without_content_fails_and_leaves_nothing_open(
    stub: ProviderStub, tmp_path: Path, tier: str
) -> None:
    run = await abandon_run(stub, tmp_path, tier)
    async with running_service(tmp_path, pool_text(stub), SETTINGS) as runtime:
        await runtime.context.store.erase(run)
        row = await at_its_end(runtime, run)
        assert (row.state, row.error) == ("failed", "content_erased")
        journal = await events(runtime, run)
        assert kinds(journal).count(Kind.CALL_INTENDED) == kinds(journal).count(Kind.CALL_FINISHED)
        assert row.held == Amount()
        assert (row.spent == Amount()) == (tier == "baton-mini")
        other = await runtime.runs.start(order(runtime, "baton-mini"))
        assert (await finish(other)).ended.error is None


@pytest.mark.long
async def test_an_engine_without_room_ends_what_is_overdue_and_what_is_cancelled(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overdue = await abandon_run(stub, tmp_path, "baton-ultra", seconds=1.0)
    planning = await abandon_run(stub, tmp_path, "baton-ultra")
    untaken = await abandon_run(stub, tmp_path)
    erased = await abandon_run(stub, tmp_path)
    other = await abandon_run(stub, tmp_path, "baton-ultra")
    monkeypatch.setattr(Drivers, "room", 0)
    async with running_service(tmp_path, pool_text(stub), SETTINGS) as runtime:
        store = runtime.context.store
        await store.erase_contents([erased])
        for run in (planning, untaken, erased):
            await cancellation.ask(store, runtime.context.queue, await store.run(run), "caller", runtime.context.now())
        assert (await at_its_end(runtime, planning)).state == "cancelled"
        assert (await at_its_end(runtime, untaken)).state == "cancelled"
        row = await at_its_end(runtime, erased)
        assert (row.state, row.error) == ("failed", "content_erased")
        assert (await at_its_end(runtime, overdue)).state == "expired"
        assert (await runtime.context.store.run(other)).epoch == 1


def test_a_process_notices_that_it_stood_still() -> None:
    now = 100.0
    watch = StandstillWatch(lambda: now, 10.0)
    looks = []
    for seconds in (60.0, 5.0, 5.5, 2.0):  # the first look comes when the engine has started
        now += seconds
        looks.append(watch.look())
    assert looks == [inf, inf, 0.0, 2.0]


@pytest.mark.parametrize("tier", ["baton-mini", "baton-ultra"])
@pytest.mark.long
async def test_an_engine_that_stood_still_gives_others_the_time_to_renew_leases_and_claims(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    """One run has a step that another engine has claimed; the other run has only a lease."""
    run = await abandon_run(stub, tmp_path, tier)
    with closing(sqlite3.connect(tmp_path / "baton.db", timeout=PATIENCE_SECONDS)) as database, database:
        database.execute("UPDATE tickets SET holder = 'another', until = 0")
    awake_for = 0.0
    monkeypatch.setattr(StandstillWatch, "look", lambda _watch: awake_for)
    async with running_service(tmp_path, pool_text(stub), SETTINGS) as runtime:
        before = kinds(await events(runtime, run))

        async def is_untouched() -> bool:
            return kinds(await events(runtime, run)) == before

        await assert_stays(is_untouched, seconds=4 * LEASE)
        awake_for = LEASE
        await at_its_end(runtime, run)


async def test_what_a_process_leaves_as_it_stops_needs_no_lease_to_lapse(stub: ProviderStub, tmp_path: Path) -> None:
    settings = {"BATON_LEASE_SECONDS": "60"}
    async with running_service(tmp_path, pool_text(stub), settings, dispatches=False) as runtime:
        followed_run = await runtime.runs.start(order(runtime, "baton-mini"))
        row = await runtime.context.store.run(followed_run.run)
        assert row.lease_until > runtime.context.now() + 30
    async with running_service(tmp_path, pool_text(stub), settings) as heir:
        heir.drivers.sweep_soon()
        row = await at_its_end(heir, followed_run.run)
        assert (row.state, row.epoch > 1) == ("succeeded", True)


@pytest.mark.long
async def test_a_run_of_an_unknown_tier_waits_for_who_knows_it(
    stub: ProviderStub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_service(tmp_path, pool_text(stub), SETTINGS, drives=False) as gateway:
        run = (await gateway.runs.start(order(gateway, "baton-mini", followed=False))).run
    renamed = pool_text(stub).replace("[tiers.baton-mini]", "[tiers.other]")
    async with running_service(tmp_path, renamed, SETTINGS) as stranger:
        assert await stranger.drivers.take(run), "its ticket is not kept: it is found in the database"
        assert [line.getMessage() for line in caplog.records if line.exc_info] == []
        await until_reported(stranger)
        assert (await stranger.context.store.run(run)).epoch == 1
    async with running_service(tmp_path, pool_text(stub), SETTINGS) as runtime:
        assert (await at_its_end(runtime, run)).state == "succeeded"
        assert gauge(runtime) == 0


@pytest.mark.long
async def test_a_run_of_newer_code_waits_and_is_ended_by_anybody_when_its_time_is_up(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await abandon_run(stub, tmp_path, seconds=4.0)
    with closing(sqlite3.connect(tmp_path / "baton.db")) as database, database:  # a word that only newer code knows
        database.execute("UPDATE events SET kind = 'plan.dreamt' WHERE run = ? AND kind = 'plan.accepted'", (run,))
    monkeypatch.setattr("app.process.wiring.version", lambda _: "0.0.9")
    async with running_service(tmp_path, pool_text(stub), SETTINGS, audits=False) as runtime:
        await until_reported(runtime)
        assert (await runtime.context.store.run(run)).epoch == 1
        row = await at_its_end(runtime, run)
        assert (row.state, row.error, row.ended_at is not None and row.ended_at >= row.deadline) == (
            "expired",
            "run_expired",
            True,
        )


@pytest.mark.long
async def test_where_nobody_knows_its_tier_a_run_is_cancelled_at_once_or_was_left_by_its_caller_all_the_same(
    stub: ProviderStub, tmp_path: Path
) -> None:
    stub.script("alpha", tool_call_reply(look_call("a")))
    async with running_service(tmp_path, pool_text(stub), SETTINGS) as runtime:
        limits = limits_with(runtime, "baton-mini", tool_wait=2.0)
        task = Task((Message("user", (Text("Look."),)),), toolbox=TOOLBOX)
        left = await runtime.runs.start(order(runtime, "baton-mini", task=task, limits=limits))
        assert (await finish(left)).ended.finish == "tool_calls"
    unwanted = await abandon_run(stub, tmp_path)
    renamed = pool_text(stub).replace("[tiers.baton-mini]", "[tiers.other]")
    async with running_service(tmp_path, renamed, SETTINGS, audits=False) as stranger:
        store = stranger.context.store
        await until_reported(stranger)
        row = await store.run(unwanted)
        await cancellation.ask(store, stranger.context.queue, row, "caller", stranger.context.now())
        ends = [await at_its_end(stranger, run) for run in (unwanted, left.run)]
    assert [(end.state, end.error) for end in ends] == [
        ("cancelled", "run_cancelled"),
        ("expired", "tool_results_missing"),
    ]
    assert ends[0].ended_at is not None
    assert ends[0].ended_at < ends[0].deadline


@pytest.mark.parametrize("change", ["kind = 'plan.dreamt'", "body = '[]'"], ids=["kind", "body"])
@pytest.mark.parametrize(("tier", "worker"), [("baton-ultra", "planner"), ("baton-mini", "alpha")])
async def test_a_run_that_nobody_can_read_gives_its_budgets_back_what_its_calls_hold(
    stub: ProviderStub, tmp_path: Path, tier: str, worker: str, change: str
) -> None:
    budget = Budget("tenant", "tenant", "", "day", 10**6)
    stub.script(worker, Hang())
    async with running_service(tmp_path, pool_text(stub), SETTINGS) as runtime:
        await runtime.context.store.set_budget(budget)
        run = (await runtime.runs.start(order(runtime, tier))).run
        await stub.wait_for(1, worker)
        (before,) = await runtime.context.store.budget_use(budget.id, 10)
        (tmp_path / "left").mkdir()
        with closing(sqlite3.connect(tmp_path / "left" / "baton.db")) as left, left:  # as a process that is killed
            with closing(sqlite3.connect(tmp_path / "baton.db")) as database:
                database.backup(left)
            left.execute(f"UPDATE events SET {change} WHERE kind = 'plan.opened'")
            left.execute("UPDATE runs SET deadline = 0, lease_until = 0")
        runtime.runs.cancellations.ask(run, "caller")
        await at_its_end(runtime, run)
    async with running_service(tmp_path / "left", pool_text(stub), SETTINGS, audits=False) as heir:
        await at_its_end(heir, run)

        async def has_no_ticket() -> bool:
            return await heir.context.store.find_ticket(run, 0) is None

        await until(has_no_ticket)
        row = await heir.context.store.run(run)
        (use,) = await heir.context.store.budget_use(budget.id, 10)
        events_at_end = await heir.context.store.call_events(run)
    assert before.held > 0
    assert (use.held, use.spent) == (0, before.held)
    assert (row.state, row.held, row.spent.usd) == ("expired", Amount(), before.held)
    assert [event.body.get("outcome") for event in events_at_end] == [None, "unknown"]


async def test_a_process_takes_nothing_over_from_itself(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.script("alpha", Hang(4 * LEASE))

    async def away(*_: object) -> object:
        raise StoreUnavailable

    async with running_service(tmp_path, pool_text(stub), SETTINGS) as runtime:
        followed_run = await runtime.runs.start(order(runtime, "baton-mini"))
        await stub.wait_for(1, "alpha")
        with monkeypatch.context() as slow:  # its leases lapse, as they do when it stands still
            slow.setattr(SqlStore, "renew_leases", away)
            await asyncio.sleep(3 * LEASE)
        assert (await finish(followed_run)).ended.error is None
        assert (await runtime.context.store.run(followed_run.run)).epoch == 1


async def test_a_run_that_is_taken_over_while_its_admission_is_being_answered_is_heard_and_driven_on(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = SqlStore.append

    async def nothing(*_: object) -> Mapping[str, int]:
        return {}

    async with running_service(tmp_path, pool_text(stub), SETTINGS) as runtime:

        async def late(store: SqlStore, entry: Entry) -> AppendResult:
            appended = await append(store, entry)
            if entry.new is not None:  # committed, and its lease lapses before this process hears of it
                await until_relieved(runtime, entry.run)
                monkeypatch.undo()
            return appended

        monkeypatch.setattr(SqlStore, "append", late)
        monkeypatch.setattr(SqlStore, "renew_leases", nothing)
        followed_run = await runtime.runs.start(order(runtime, "baton-mini"))
        assert (await finish(followed_run)).ended.error is None
        assert (await runtime.context.store.run(followed_run.run)).epoch > 1
        await until(lambda: len(runtime.drivers) == 0)


async def test_a_bug_in_a_sweep_ends_neither_the_engine_nor_the_sweeps(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed, swept = asyncio.Event(), asyncio.Event()

    async def sweep(*_: object) -> bool:
        if not failed.is_set():
            failed.set()
            raise ValueError("the bug")
        swept.set()
        return False

    monkeypatch.setattr(Recovery, "sweep", sweep)
    async with asyncio.timeout(PATIENCE_SECONDS):
        runtime.drivers.sweep_soon()
        await failed.wait()
        runtime.drivers.sweep_soon()
        await swept.wait()
    assert runtime.drivers.is_open
    (line,) = [line for line in caplog.records if line.levelno == logging.ERROR]
    assert line.message == "The search for runs that nobody drives failed because of a bug; it is repeated."


async def test_the_loss_of_a_lease_does_not_strike_the_driver_that_has_just_taken_it_over(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that is cancelled before its first step never runs, and nobody would ever hear of it."""
    stub.script("alpha", Reply(header_delay=4 * LEASE))
    renew, count = SqlStore.renew_leases, 0

    async def nothing(*_: object) -> None:
        return None

    monkeypatch.setattr(Drivers, "_sweep_for_ever", nothing)  # it renews too
    async with running_service(tmp_path, pool_text(stub), SETTINGS) as runtime:
        followed_run = await runtime.runs.start(order(runtime, "baton-mini"))
        first = runtime.drivers.driver_of(followed_run.run)

        async def lapsing(store: SqlStore, driver: str, epochs: Mapping[str, int], until: float) -> Mapping[str, int]:
            """The first driver's lease is lost, and this process takes the run over as the second look finds that."""
            nonlocal count
            if epochs.get(followed_run.run) != 1:
                return await renew(store, driver, epochs, until)
            count += 1
            if count == 2:
                now = runtime.context.now()
                ours = [("baton-mini", runtime.context.code)]
                (row,) = await store.take_over(driver, now + 60.0, now + LEASE, 1, ours)
                await runtime.drivers._recovery._go_on(row)
            return {}

        monkeypatch.setattr(SqlStore, "renew_leases", lapsing)
        outcome = await finish(followed_run)
        assert (outcome.ended.error, count) == (None, 2)
        row = await runtime.context.store.run(followed_run.run)
        assert (row.state, row.epoch > 1) == ("succeeded", True)
        assert first is not runtime.drivers.driver_of(followed_run.run)
        await until(lambda: len(runtime.drivers) == 0)


async def test_a_run_that_was_lost_and_comes_back_is_driven_once(stub: ProviderStub, tmp_path: Path) -> None:
    stub.script("alpha", Hang(3.0))
    async with running_service(tmp_path, pool_text(stub), SETTINGS) as runtime:
        followed_run = await runtime.runs.start(order(runtime, "baton-mini"))
        await stub.wait_for(1, "alpha")
        old = runtime.drivers.driver_of(followed_run.run)
        # Another one took it over, and died.
        with closing(sqlite3.connect(tmp_path / "baton.db", timeout=PATIENCE_SECONDS)) as database, database:
            database.execute(
                "UPDATE runs SET epoch = 2, driver = 'other', lease_until = 0 WHERE id = ?", (followed_run.run,)
            )
        await runtime.drivers._recovery.sweep(5, runtime.drivers._renew)
        again = runtime.drivers.driver_of(followed_run.run)
        assert again is not None
        assert again is not old
        assert (await finish(followed_run)).ended.error is None, "its caller hears the new driver"
        assert (await at_its_end(runtime, followed_run.run)).state == "succeeded"
        other = await runtime.runs.start(order(runtime, "baton-mini"))
        assert (await finish(other)).ended.error is None


async def test_a_run_is_taken_over_at_once_although_others_keep_writing_to_it(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time when it is about to be taken over, one more wish has been written; the lease of the engine that takes
    it over would last for a minute."""
    run, wishes, append = await abandon_run(stub, tmp_path), 0, SqlStore.append

    async def write_before(store: SqlStore, entry: Entry) -> AppendResult:
        nonlocal wishes
        if entry.lease is not None and wishes < 10:
            wishes += 1
            await append(store, Entry(run, entry.at, (RunCancelAsked("operator"),)))
        return await append(store, entry)

    monkeypatch.setattr(SqlStore, "append", write_before)
    async with running_service(tmp_path, pool_text(stub), {"BATON_LEASE_SECONDS": "60"}) as runtime:
        row = await at_its_end(runtime, run)
        assert (row.state, row.epoch, wishes) == ("cancelled", 3, 10)


@pytest.mark.long
async def test_a_database_that_goes_away_while_a_run_is_taken_over_leaves_no_traceback(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, journal, is_away = await abandon_run(stub, tmp_path), SqlStore.journal, True

    async def read_journal(store: SqlStore, run: str, upto: int | None = None, after: int = 0) -> Journal:
        nonlocal is_away
        if is_away:
            is_away = False
            raise StoreUnavailable
        return await journal(store, run, upto, after)

    monkeypatch.setattr(SqlStore, "journal", read_journal)
    async with running_service(tmp_path, pool_text(stub), SETTINGS) as runtime:
        assert (await at_its_end(runtime, run)).state == "succeeded"
    lines = [line for line in caplog.records if line.levelno >= logging.WARNING]
    assert [(line.getMessage(), line.levelno, line.exc_info) for line in lines] == [
        ("A run whose engine is gone could not be taken over; an engine tries again.", logging.WARNING, None)
    ]


@pytest.mark.parametrize(
    ("code", "than", "newer"),
    [
        ("0.1.0", "0.1.0", False),
        ("0.2.0", "0.10.0", False),
        ("0.10.0", "0.9.9", True),
        ("1", "0.9", True),
        ("dev", "dev", False),
        ("dev", "1.0", True),
    ],
)
def test_versions_are_compared_by_number(code: str, than: str, newer: bool) -> None:
    assert is_newer(code, than) is newer


async def test_a_driver_that_is_told_nothing_learns_it_with_its_lease(stub: ProviderStub, tmp_path: Path) -> None:
    stub.script("alpha", Hang())
    async with running_service(tmp_path, pool_text(stub), SETTINGS) as runtime:
        followed_run = await runtime.runs.start(order(runtime, "baton-mini"))
        await stub.wait_for(1, "alpha")
        wish = fact_from_json(Kind.CANCEL_ASKED, {"by": "operator"})
        await runtime.context.store.append(Entry(followed_run.run, runtime.context.now(), (wish,)))
        assert (await finish(followed_run)).ended.state.state == "cancelled"


@pytest.mark.long
async def test_waiting_drivers_do_not_read_their_journals(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    journal, renew = SqlStore.journal, SqlStore.renew_leases

    async def count_and_read(store: SqlStore, run: str, upto: int | None = None, after: int = 0) -> object:
        reads.append(run)
        return await journal(store, run, upto, after)

    async def one_query(store: SqlStore, driver: str, epochs: dict[str, int], until: float) -> object:
        renewals.append(len(epochs))
        return await renew(store, driver, epochs, until)

    renewals: list[int] = []
    stub.always("alpha", Hang())
    monkeypatch.setattr(SqlStore, "journal", count_and_read)
    monkeypatch.setattr(SqlStore, "renew_leases", one_query)
    async with running_service(tmp_path, pool_text(stub), SETTINGS) as runtime:
        driven = [await runtime.runs.start(order(runtime, "baton-mini")) for _ in range(5)]
        await stub.wait_for(5, "alpha")
        reads.clear()
        renewals.clear()
        await until(lambda: len(renewals) > 5)
        assert reads == []
        assert set(renewals) == {5}
        for followed in driven:
            runtime.runs.cancellations.ask(followed.run, "caller")
        for followed in driven:
            await finish(followed)


@pytest.mark.parametrize(
    ("tier", "by_fallback"),
    [("baton-mini", True), ("baton-mini", False), ("baton-again", False), ("baton-ultra", False)],
)
async def test_a_run_whose_workers_have_left_the_pool_file_ends_at_once(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str, by_fallback: bool
) -> None:
    pool = pool_text(stub)
    fallback = FixedPlanConductor((Step("alpha", answers=True),)), FALLBACK
    async with running_service(tmp_path, pool, SETTINGS, drives=False) as gateway:
        with monkeypatch.context() as patch:
            if by_fallback:
                patch.setattr(admission, "_tier_policy", lambda *_: fallback)
            run = (await gateway.runs.start(order(gateway, tier, followed=False))).run
    for worker in ("alpha", "beta", "gamma"):
        pool = pool.replace(worker, f"new-{worker}")
    async with running_service(tmp_path, pool, SETTINGS) as engine:
        row = await at_its_end(engine, run)
    assert (row.state, row.ended_at is not None and row.ended_at < row.deadline) == ("failed", True)
    assert stub.requests == []


@pytest.mark.long
async def test_a_run_that_a_bug_keeps_from_every_engine_ends_with_its_deadline(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await abandon_run(stub, tmp_path, "baton-ultra", seconds=1.0)

    async def read_with_a_bug(*_: object) -> None:
        raise IndexError("list index out of range")

    monkeypatch.setattr(registry, "_read_task_and_policy", read_with_a_bug)
    async with running_service(tmp_path, pool_text(stub), SETTINGS) as runtime:
        row = await at_its_end(runtime, run)
    assert (row.state, row.error, row.held) == ("expired", "run_expired", Amount())
