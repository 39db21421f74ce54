"""Budgets over several runs, on both databases: what is set, what is held, and what is refused."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import asyncpg
import orjson
import pytest
from msgspec.structs import replace
from sqlalchemy import insert, select

from app.core.message.chat import Usage
from app.core.plan.workflow import Access
from app.core.pool.budgets import Budget, slice_of, window
from app.core.pool.catalog import Amount
from app.core.run.events import CallFinished, CallIntended
from app.core.run.notices import payload
from app.errors import BudgetExhausted, NotFound
from app.store.archive import AccountSums, open_archive
from app.store.protocol import AppendResult, Entry, Store
from app.store.rows import runs as run_rows
from app.store.sql import SqlStore, open_store
from app.store.sqlkit.tables import METADATA
from app.store.writing.budget_ledger import Signal
from tests.conformance.entries import Opener, admission_entry, gather_outcomes

DAY_SECONDS = 86_400
DAILY = Budget("acme", "user", "*", "day", 1_000, zone="Europe/Berlin", soft=0.8)


@pytest.mark.long
async def test_budgets_are_set_changed_and_removed(store: Store) -> None:
    await store.set_budget(DAILY)
    await store.set_budget(Budget("globex", "tenant", "", "month", 5))
    await store.set_budget(replace(DAILY, usd=2_000, soft=None, created_at=9.0))
    assert await store.budgets("acme") == (replace(DAILY, usd=2_000, soft=None),)
    assert [budget.tenant for budget in await store.budgets()] == ["acme", "globex"]
    assert await store.remove_budget(DAILY.id)
    assert not await store.remove_budget(DAILY.id)
    assert await store.budgets("acme") == ()


async def test_a_request_has_the_accounts_of_its_tenants_budgets(store: Store) -> None:
    assert await store.budget_accounts("acme", {"user": "alice"}) == ()
    await store.set_budget(DAILY)
    alice, bob = [await store.budget_accounts("acme", {"user": name, "key": "k"}) for name in ("alice", "bob")]
    assert len({*alice, *bob}) == 2
    assert await store.budget_accounts("globex", {"user": "alice"}) == ()
    assert await store.budget_use(DAILY.id, 10) == ()


async def test_another_process_learns_of_a_tenants_first_budget(opener: Opener) -> None:
    async with opener() as ours, opener() as theirs:
        await ours.set_budget(DAILY)
        assert len(await theirs.budget_accounts("acme", {"user": "alice"})) == 1


def accounts_run(run: str, accounts: tuple[str, ...], cap: int = 10_000) -> Entry:
    return admission_entry(run, budgets=accounts, cap=Amount(cap, cap))


def intend(run: str, call: str, usd: int) -> Entry:
    intent = CallIntended(call=call, n=None, worker="w", access=Access(True, ()), usd_held=usd, tokens_held=1)
    return Entry(run, 2.0, (intent,), epoch=1, hold=Amount(usd, 1))


def outcome(run: str, call: str, usd_held: int, usd: int, word: str = "ok") -> Entry:
    finished = CallFinished(call=call, n=None, outcome=word, usage=Usage(input=1), usd=usd, seconds=0.0)
    return Entry(run, 3.0, (finished,), epoch=1, release=Amount(usd_held, 1), spent=Amount(usd, 1))


async def begin(store: Store, *runs: str, budgets: tuple[Budget, ...] = (DAILY,), user: str = "alice") -> None:
    for budget in budgets:
        await store.set_budget(budget)
    accounts = await store.budget_accounts("acme", {"user": user, "key": "k", "team": ""})
    for run in runs:
        await store.append(accounts_run(run, accounts))


async def figures(store: Store, budget: Budget = DAILY) -> list[tuple[int, int, int]]:
    return [(window.held, window.spent, window.overrun) for window in await store.budget_use(budget.id, 10)]


async def test_a_hold_is_settled_by_its_outcome(store: Store) -> None:
    await begin(store, "run")
    await store.append(intend("run", "a", 600))
    assert await figures(store) == [(600, 0, 0)]
    await store.set_budget(replace(DAILY, usd=100))
    with pytest.raises(BudgetExhausted) as refused:
        await store.append(intend("run", "too much", 1))
    assert refused.value.left == -500, "less than is held already"
    await store.append(outcome("run", "a", 600, 250))
    assert await figures(store) == [(0, 250, 0)]
    await store.set_budget(DAILY)
    await store.append(intend("run", "b", 750))
    await store.append(outcome("run", "b", 750, 750, "unknown"))
    assert await figures(store) == [(0, 1_000, 0)]


async def test_what_was_billed_beyond_the_hold_is_an_overrun(store: Store) -> None:
    await begin(store, "run")
    await store.append(intend("run", "a", 600))
    await store.append(outcome("run", "a", 600, 1_100))
    assert await figures(store) == [(0, 1_100, 500)]
    with pytest.raises(BudgetExhausted):
        await store.append(intend("run", "b", 1))


async def test_runs_of_two_processes_never_hold_more_than_the_budget(opener: Opener) -> None:
    runs = [f"run {n}" for n in range(24)]
    async with opener() as ours, opener() as theirs:
        await begin(ours, *runs)
        holds = [(ours, theirs)[n % 2].append(intend(run, "a", 75)) for n, run in enumerate(runs)]
        outcomes = await gather_outcomes(holds)
        assert sum(isinstance(outcome, AppendResult) for outcome in outcomes) == 13
        refused = [outcome for outcome in outcomes if isinstance(outcome, BudgetExhausted)]
        assert len(refused) == 11
        assert refused[0].budget == DAILY.id
        assert refused[0].until % 900 == 0
        assert await figures(ours) == [(975, 0, 0)]
        assert [(await ours.run(run)).held.usd for run in runs].count(75) == 13


async def test_a_hold_is_made_in_all_accounts_or_in_none(store: Store) -> None:
    poor, key = Budget("acme", "tenant", "", "month", 100), Budget("acme", "key", "*", "hour", 1_000)
    await begin(store, "run", budgets=(DAILY, key, poor))
    with pytest.raises(BudgetExhausted) as refused:
        await store.append(intend("run", "a", 101))
    assert refused.value.budget == poor.id
    for budget in (DAILY, key, poor):
        assert await figures(store, budget) in ([], [(0, 0, 0)])
    await store.append(intend("run", "b", 100))
    for budget in (DAILY, key, poor):
        assert await figures(store, budget) == [(100, 0, 0)]


async def test_each_unknown_user_has_an_account_of_its_own(store: Store) -> None:
    await begin(store, "of alice")
    await begin(store, "of bob", user="bob")
    for run in ("of alice", "of bob"):
        await store.append(intend(run, "a", 800))
    assert await figures(store) == [(800, 0, 0), (800, 0, 0)]


@pytest.mark.long
async def test_old_windows_are_summed_up_and_the_accounts_keep_their_sums(
    store: SqlStore, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1_700_000_000.0]
    monkeypatch.setattr(run_rows, "clock_of", lambda _conn: str(now[0]))
    await begin(store, "run")
    for call in ("a", "b", "c"):
        await store.append(intend("run", call, 100))
        await store.append(outcome("run", call, 100, 90))
        now[0] += DAY_SECONDS
    await store.append(intend("run", "d", 70))
    open_since, now[0] = now[0], now[0] + DAY_SECONDS
    assert await store.sum_up_budget_use(open_since - DAY_SECONDS) == 2
    assert await store.sum_up_budget_use(now[0] + DAY_SECONDS) == 1
    assert await store.sum_up_budget_use(now[0] + DAY_SECONDS) == 0
    assert await figures(store) == [(70, 0, 0)]
    await store.append(outcome("run", "d", 70, 60))
    async with open_archive(database) as archive:
        ((_, sums),) = (await archive.accounts()).items()
    assert sums == AccountSums(spent=330, overrun=0, held=0, holds=0)


async def test_a_call_is_settled_in_the_window_of_its_hold(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1_700_000_000.0]
    monkeypatch.setattr(run_rows, "clock_of", lambda _conn: str(now[0]))
    await begin(store, "run")
    await store.append(intend("run", "a", 900))
    now[0] += DAY_SECONDS
    await store.append(intend("run", "b", 1_000))
    await store.append(outcome("run", "a", 900, 700))
    assert await figures(store) == [(1_000, 0, 0), (0, 700, 0)]


async def test_a_clock_that_goes_back_opens_no_window_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1_700_000_000.0]
    monkeypatch.setattr(run_rows, "clock_of", lambda _conn: str(now[0]))
    await begin(store, "run")
    await store.append(intend("run", "a", 900))
    for jump in (-40 * DAY_SECONDS, -DAY_SECONDS):
        now[0] = 1_700_000_000.0 + jump
        with pytest.raises(BudgetExhausted):
            await store.append(intend("run", "b", 900))


async def test_another_time_zone_gives_nobody_the_same_hours_twice(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A day that has begun in UTC ends with it. The next one is New York's, which began five hours after it."""
    now = [1_700_000_000.0]
    monkeypatch.setattr(run_rows, "clock_of", lambda _conn: str(now[0]))
    budget = replace(DAILY, zone="UTC")
    day = window("day", "UTC", now[0])
    await begin(store, "run", budgets=(budget,))
    await store.append(intend("run", "a", 900))
    await store.set_budget(replace(budget, zone="America/New_York"))
    with pytest.raises(BudgetExhausted) as refused:
        await store.append(intend("run", "b", 200))
    assert refused.value.until == day.end
    now[0] = float(day.end)
    await store.append(intend("run", "c", 200))
    assert [use.start - day.start for use in await store.budget_use(budget.id, 10)] == [5 * 3_600, 0]


async def test_a_hold_whose_outcome_is_refused_with_the_next_hold_stays(store: Store) -> None:
    await begin(store, "run")
    await store.append(intend("run", "a", 600))
    both = replace(outcome("run", "a", 600, 500), hold=Amount(600, 1))
    with pytest.raises(BudgetExhausted):
        await store.append(replace(both, events=(*both.events, *intend("run", "b", 600).events)))
    assert await figures(store) == [(600, 0, 0)]
    await store.append(outcome("run", "a", 600, 500))
    assert await figures(store) == [(0, 500, 0)]


async def test_the_soft_limit_warns_once_in_a_window(store: SqlStore) -> None:
    signals: list[Signal] = []
    store.on_signal = signals.append
    await begin(store, "run")
    for number, usd in enumerate((700, 150, 150)):
        await store.append(intend("run", str(number), usd))
        await store.append(outcome("run", str(number), usd, usd))
    assert [(signal.kind, signal.budget) for signal in signals] == [("soft_limit", DAILY.id)]
    (notice,) = await store.take_notices(now=9e9, until=9e9, limit=10)
    notice_body = orjson.loads(payload(notice))
    assert notice_body["type"] == "budget.soft_limit"
    assert (notice_body["data"]["budget"], notice_body["data"]["spent_usd"]) == (DAILY.id, 0.00085)


async def test_a_soft_limit_below_what_is_spent_warns_at_once_and_only_once(store: SqlStore) -> None:
    await begin(store, "run", budgets=(replace(DAILY, soft=None),))
    await store.append(intend("run", "a", 500))
    await store.append(outcome("run", "a", 500, 500))
    signals: list[Signal] = []
    store.on_signal = signals.append
    for soft, usd in ((0.8, 1_000), (0.4, 1_000), (0.9, 500)):  # not reached; reached; warned of already
        await store.set_budget(replace(DAILY, soft=soft, usd=usd))
    await store.append(intend("run", "b", 0))
    await store.append(outcome("run", "b", 0, 0))
    assert [(signal.kind, signal.budget) for signal in signals] == [("soft_limit", DAILY.id)]
    (notice,) = await store.take_notices(now=9e9, until=9e9, limit=10)
    assert orjson.loads(payload(notice))["data"]["spent_usd"] == 0.0005


async def test_a_budget_that_is_removed_holds_nothing_more_and_keeps_what_was_spent(store: Store) -> None:
    await begin(store, "run")
    await store.append(intend("run", "a", 1_000))
    await store.remove_budget(DAILY.id)
    await store.append(intend("run", "b", 1_000))
    await store.append(outcome("run", "a", 1_000, 900))
    await store.append(outcome("run", "b", 1_000, 900))
    assert await figures(store) == [(0, 900, 0)]


async def test_a_run_that_is_admitted_with_its_first_intent_holds_at_once(store: Store) -> None:
    await store.set_budget(DAILY)
    accounts = await store.budget_accounts("acme", {"user": "alice"})
    first = replace(accounts_run("run", accounts), hold=Amount(1_001, 1))
    intent = intend("run", "a", 1_001).events
    with pytest.raises(BudgetExhausted):
        await store.append(replace(first, events=(*first.events, *intent)))
    with pytest.raises(NotFound):
        await store.run("run")


SLICED = replace(DAILY, slices=4)
WAITING = "SELECT count(*) FROM pg_locks WHERE NOT granted AND pg_backend_pid() = ANY(pg_blocking_pids(pid))"


@asynccontextmanager
async def two_processes(opener: Opener, budget: Budget = SLICED) -> AsyncIterator[tuple[SqlStore, SqlStore]]:
    """Two processes that use different slices, each with a run of its own, `ours` and `theirs`."""
    async with opener() as ours, opener() as theirs:
        for number, account in enumerate((ours, theirs)):
            account.writer.slice = number
        await begin(ours, "ours", "theirs", budgets=(budget,))
        yield ours, theirs


async def rows_of(store: SqlStore, *names: str) -> list[tuple[int, ...]]:
    """These columns of the rows of the account and its slices, in the order of their names."""
    table = METADATA.tables["budget_windows"]
    query = select(*[table.c[name] for name in names]).order_by(table.c.account, table.c.start)
    return [tuple(row) for row in await store._read(lambda conn: conn.execute(query).all())]


@pytest.mark.long
async def test_a_slice_lends_what_it_has_free_before_anyone_is_refused(opener: Opener) -> None:
    async with two_processes(opener) as (ours, theirs):
        await ours.append(intend("ours", "a", 100))
        await theirs.append(intend("theirs", "b", 100))
        assert await figures(ours) == [(200, 0, 0)]
        assert sum(escrow > 0 for (escrow,) in await rows_of(ours, "escrow")) == 5, "the account's, and each slice's"
        await ours.append(intend("ours", "c", 795))
        for store, run in ((ours, "ours"), (theirs, "theirs")):
            with pytest.raises(BudgetExhausted) as refused:
                await store.append(intend(run, "d", 6))
            assert refused.value.left == 5
        await theirs.append(intend("theirs", "e", 5))
        assert await figures(theirs) == [(1_000, 0, 0)]


async def test_a_release_that_knows_no_slices_sees_what_is_in_escrow_as_held(opener: Opener) -> None:
    async with two_processes(opener) as (ours, theirs):
        for call in ("a", "b", "c"):
            await ours.append(intend("ours", call, 20))
            await theirs.append(intend("theirs", call, 20))
            await ours.append(outcome("ours", call, 20, 15))
            (own, *slices) = await rows_of(ours, "held", "spent", "escrow")
            assert own[2] == sum(escrow for _, _, escrow in slices)
            assert all(usd_held + spent <= escrow for usd_held, spent, escrow in slices)
            assert own[0] >= own[2], "so it takes no more than what is left beside the escrow"


async def test_a_call_is_settled_in_its_slice_whoever_settles_it(opener: Opener) -> None:
    async with two_processes(opener) as (ours, theirs):
        await ours.append(intend("ours", "a", 100))
        await theirs.append(outcome("ours", "a", 100, 60))
        assert await figures(ours) == [(0, 60, 0)]
        await theirs.append(intend("theirs", "b", 940))
        assert await figures(theirs) == [(940, 60, 0)]


@pytest.mark.long
async def test_a_lowered_amount_binds_what_slices_have_in_escrow(opener: Opener) -> None:
    async with two_processes(opener) as (ours, theirs):
        await ours.append(intend("ours", "a", 100))
        await ours.administration_of("acme").set_budget(replace(SLICED, usd=150))
        with pytest.raises(BudgetExhausted) as refused:
            await theirs.append(intend("theirs", "b", 51))
        assert refused.value.left == 50
        await theirs.append(intend("theirs", "b", 50))
        await ours.set_budget(replace(SLICED, usd=160, slices=None, soft=None))
        await theirs.append(outcome("theirs", "b", 50, 10))
        await theirs.append(intend("theirs", "c", 50))
        with pytest.raises(BudgetExhausted):
            await ours.append(intend("ours", "d", 1))
        assert await figures(ours) == [(150, 10, 0)]


async def test_an_overrun_in_a_slice_counts_against_the_whole_budget(opener: Opener) -> None:
    async with two_processes(opener) as (ours, theirs):
        await ours.append(intend("ours", "a", 10))
        await ours.append(outcome("ours", "a", 10, 995))
        with pytest.raises(BudgetExhausted):
            await theirs.append(intend("theirs", "b", 6))
        assert await figures(theirs) == [(0, 995, 985)]


@pytest.mark.parametrize("settles", ["ours", "theirs"])
@pytest.mark.long
async def test_the_soft_limit_of_slices_warns_with_the_outcome_that_reaches_it(opener: Opener, settles: str) -> None:
    signals: list[Signal] = []
    async with two_processes(opener) as (ours, theirs):
        for store in (ours, theirs):
            store.on_signal = signals.append
        for call in range(8):
            assert not signals
            store, run = ((ours, "ours"), (theirs, "theirs"))[call % 2]
            await store.append(intend(run, str(call), 100))
            await (ours if settles == "ours" else theirs).append(outcome(run, str(call), 100, 100))
        assert [(signal.kind, signal.budget) for signal in signals] == [("soft_limit", DAILY.id)]
        await ours.append(intend("ours", "last", 100))
        await ours.append(outcome("ours", "last", 100, 100))
        assert len(signals) == 1
        (use,) = await ours.budget_use(DAILY.id, 10)
        assert use.warned_at is not None


@pytest.mark.long
@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Tokyo"])
async def test_slices_in_another_time_zone_keep_to_the_window_that_has_begun(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch, zone: str
) -> None:
    now = 1_700_000_000.0
    monkeypatch.setattr(run_rows, "clock_of", lambda _conn: str(now))
    day = window("day", "UTC", now)
    await begin(store, "run", budgets=(replace(DAILY, zone="UTC"),))
    await store.append(intend("run", "a", 600))
    await store.set_budget(replace(SLICED, zone=zone))
    await store.append(intend("run", "b", 100))
    with pytest.raises(BudgetExhausted) as refused:
        await store.append(intend("run", "c", 400))
    assert refused.value.until == day.end
    assert {*await rows_of(store, "start", "end")} == {(day.start, day.end)}


@pytest.mark.long
async def test_slices_of_old_windows_are_summed_up_in_their_account(
    opener: Opener, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1_700_000_000.0]
    monkeypatch.setattr(run_rows, "clock_of", lambda _conn: str(now[0]))
    async with two_processes(opener) as (ours, theirs):
        for store, run in ((ours, "ours"), (theirs, "theirs")):
            await store.append(intend(run, "a", 100))
        await ours.append(outcome("ours", "a", 100, 90))
        now[0] += 2 * DAY_SECONDS
        await ours.append(intend("ours", "b", 1_000))
        assert await figures(ours) == [(1_000, 0, 0), (100, 90, 0)]
        await ours.sum_up_budget_use(now[0] - DAY_SECONDS)
        await theirs.append(outcome("theirs", "a", 100, 70))
        await ours.sum_up_budget_use(now[0] - DAY_SECONDS)
        assert await figures(ours) == [(1_000, 0, 0)]
        rows = await rows_of(ours, "start", "held", "spent", "escrow")
        assert len(rows) == 1 + 5, "one for the earlier windows, and those of the present one"
        assert rows[0] == (0, 0, 160, 0)
    async with open_archive(database) as archive:
        ((_, sums),) = (await archive.accounts()).items()
    assert sums == AccountSums(spent=160, overrun=0, held=1_000, holds=1_000)


@pytest.mark.long
async def test_windows_of_many_users_are_brought_home_and_summed_up(store: SqlStore) -> None:
    """A statement of Postgres has at most 32,767 parameters, and there may be more users with accounts."""
    budget = replace(DAILY, slices=2)
    await store.set_budget(budget)
    users = [f"{budget.id}#{number:016}" for number in range(5_000)]
    sliced = [{"account": user, "whole": None, "held": 10, "spent": 0, "escrow": 10} for user in users[:600]]
    slices = [
        {"account": slice_of(row["account"], 0), "whole": row["account"], "held": 0, "spent": 3, "escrow": 10}
        for row in sliced
    ]
    plain = [{"account": user, "whole": None, "held": 0, "spent": 3, "escrow": 0} for user in users[600:]]
    rest = {"start": 1, "budget": budget.id, "end": 2, "overrun": 0}
    rows = [row | rest for row in (*sliced, *slices, *plain)]
    await store._write(lambda conn: conn.execute(insert(METADATA.tables["budget_windows"]), rows))
    assert await store.sum_up_budget_use(3.0) == 5_600
    sums = await rows_of(store, "start", "held", "spent", "escrow")
    assert sums == [(0, 0, 3, 0)] * 5_000


async def test_entries_of_a_run_stay_in_order_when_one_needs_all_slices(opener: Opener) -> None:
    async with two_processes(opener) as (ours, _):
        entries = [intend("ours", "a", 900), outcome("ours", "a", 900, 5), intend("ours", "b", 900)]
        outcomes = await gather_outcomes([ours.append(entry) for entry in entries])
        assert all(isinstance(outcome, AppendResult) for outcome in outcomes), outcomes
        assert await figures(ours) == [(900, 5, 0)]


@pytest.mark.long
async def test_processes_with_slices_of_several_budgets_spend_each_to_its_end(opener: Opener) -> None:
    tenant = Budget("acme", "tenant", "", "month", 1_000, slices=3, soft=0.5)
    signals: list[Signal] = []
    async with two_processes(opener) as (ours, theirs):
        await begin(ours, *[f"of alice {n}" for n in range(20)], budgets=(tenant,))
        await begin(ours, *[f"of bob {n}" for n in range(20)], budgets=(), user="bob")
        calls = [(f"of {user} {n}", (ours, theirs)[n % 2]) for n in range(20) for user in ("alice", "bob")]

        async def call(run: str, store: SqlStore) -> object:
            (outcome_of_call,) = await gather_outcomes([store.append(intend(run, "a", 40))])
            if isinstance(outcome_of_call, AppendResult):
                await store.append(outcome(run, "a", 40, 40))
            return outcome_of_call

        for store in (ours, theirs):
            store.on_signal = signals.append
        outcomes = await gather_outcomes([call(*arguments) for arguments in calls])
        assert [type(outcome) for outcome in outcomes if not isinstance(outcome, AppendResult)] == [
            BudgetExhausted
        ] * 15
        assert sum(isinstance(outcome, AppendResult) for outcome in outcomes) == 25
        assert await figures(ours, tenant) == [(0, 1_000, 0)]
        assert [signal.budget for signal in signals].count(tenant.id) == 1


@pytest.mark.integration
async def test_calls_in_one_slice_wait_neither_for_the_account_nor_for_another_slice(
    migrated_postgres_url: str,
) -> None:
    opener = partial(open_store, migrated_postgres_url)
    async with two_processes(opener) as (ours, theirs):
        await ours.append(intend("ours", "a", 10))
        await theirs.append(intend("theirs", "b", 10))
        other = await asyncpg.connect(migrated_postgres_url)
        try:
            async with other.transaction():
                locked = "SELECT 1 FROM budget_windows WHERE account NOT LIKE '%+0' FOR UPDATE"
                assert len(await other.fetch(locked)) == 4
                await ours.append(intend("ours", "c", 10))
                await ours.append(outcome("ours", "c", 10, 10))
        finally:
            await other.close()


@pytest.mark.integration
async def test_an_amount_that_is_being_changed_is_waited_for_before_slices_are_divided(
    migrated_postgres_url: str,
) -> None:
    async with two_processes(partial(open_store, migrated_postgres_url)) as (ours, theirs):
        await ours.append(intend("ours", "a", 10))
        other = await asyncpg.connect(migrated_postgres_url)
        try:
            async with other.transaction():
                await other.execute("UPDATE budgets SET usd = 20")
                divides = asyncio.create_task(theirs.append(intend("theirs", "b", 500)))
                while not (divides.done() or await other.fetchval(WAITING)):
                    pass
        finally:
            await other.close()
        with pytest.raises(BudgetExhausted):
            await divides
