"""Budgets over several runs, on both databases: what is set, what is held, and what is refused."""

from dataclasses import replace

import orjson
import pytest

from app.core.message.chat import Usage
from app.core.plan.workflow import Access
from app.core.pool.budgets import Budget
from app.core.run.events import CallFinished, CallIntended
from app.core.run.notices import payload
from app.errors import BudgetExhausted, NotFound
from app.store.archive import AccountSums, open_archive
from app.store.protocol import Appended, Entry, Ledger, Store
from app.store.rows import runs as run_rows
from app.store.sql import SqlStore
from app.store.writing.budget_ledger import Signal
from tests.conformance.entries import Opener, admitted, settled

DAY_SECONDS = 86_400
DAILY = Budget("acme", "user", "*", "day", 1_000, zone="Europe/Berlin", soft=0.8)


async def test_budgets_are_set_changed_and_removed(store: Store) -> None:
    await store.set_budget(DAILY)
    await store.set_budget(Budget("globex", "tenant", "", "month", 5))
    await store.set_budget(replace(DAILY, usd=2_000, soft=None, created_at=9.0))
    assert await store.budgets("acme") == (replace(DAILY, usd=2_000, soft=None),)
    assert [one.tenant for one in await store.budgets()] == ["acme", "globex"]
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
    return admitted(run, budgets=accounts, cap=Ledger(cap, cap))


def intend(run: str, call: str, usd: int) -> Entry:
    intent = CallIntended(call=call, n=None, worker="w", access=Access(True, ()), usd_held=usd, tokens_held=1)
    return Entry(run, 2.0, (intent,), epoch=1, hold=Ledger(usd, 1))


def outcome(run: str, call: str, held: int, usd: int, word: str = "ok") -> Entry:
    finished = CallFinished(call=call, n=None, outcome=word, usage=Usage(input=1), usd=usd, seconds=0.0)
    return Entry(run, 3.0, (finished,), epoch=1, release=Ledger(held, 1), spent=Ledger(usd, 1))


async def begin(store: Store, *runs: str, budgets: tuple[Budget, ...] = (DAILY,), user: str = "alice") -> None:
    for budget in budgets:
        await store.set_budget(budget)
    accounts = await store.budget_accounts("acme", {"user": user, "key": "k", "team": ""})
    for run in runs:
        await store.append(accounts_run(run, accounts))


async def figures(store: Store, budget: Budget = DAILY) -> list[tuple[int, int, int]]:
    return [(one.held, one.spent, one.overrun) for one in await store.budget_use(budget.id, 10)]


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
        done = await settled(holds)
        assert sum(isinstance(one, Appended) for one in done) == 13
        refused = [one for one in done if isinstance(one, BudgetExhausted)]
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


async def test_a_hold_whose_outcome_is_refused_with_the_next_hold_stays(store: Store) -> None:
    await begin(store, "run")
    await store.append(intend("run", "a", 600))
    both = replace(outcome("run", "a", 600, 500), hold=Ledger(600, 1))
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
    assert [(one.kind, one.budget) for one in signals] == [("soft_limit", DAILY.id)]
    (notice,) = await store.take_notices(now=9e9, until=9e9, limit=10)
    told = orjson.loads(payload(notice))
    assert told["type"] == "budget.soft_limit"
    assert (told["data"]["budget"], told["data"]["spent_usd"]) == (DAILY.id, 0.00085)


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
    assert [(one.kind, one.budget) for one in signals] == [("soft_limit", DAILY.id)]
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
    first = replace(accounts_run("run", accounts), hold=Ledger(1_001, 1))
    intent = intend("run", "a", 1_001).events
    with pytest.raises(BudgetExhausted):
        await store.append(replace(first, events=(*first.events, *intent)))
    with pytest.raises(NotFound):
        await store.run("run")
