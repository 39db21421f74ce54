"""Budgets over several runs, on both databases: what is set, what is held, and what is refused."""

from dataclasses import replace

from app.core.pool.budgets import Budget
from app.store.protocol import Store
from tests.conformance.entries import Opener

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
