"""The promise of the store seam about tenants and the log of changes; both databases."""

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy import Connection

from app.core.pool.budgets import Budget
from app.core.pool.catalog import Amount
from app.core.pool.conductor_versions import Change
from app.errors import Conflict, NotFound
from app.store.protocol import (
    CONTENT_ERASED,
    PROCESS,
    RETENTION_SET,
    Actor,
    AdminEventQuery,
    Hold,
    HoldQuery,
    IdempotencyRecord,
    KeyQuery,
    KeyRow,
    SpendQuery,
    SpendRow,
    Store,
    TenantRow,
)
from app.store.rows import budgets as budget_rows
from app.store.rows import keys as key_rows
from tests.conformance.entries import admission_entry, note

ANNA = Actor("anna", "command")
KEY = KeyRow("k1", "acme", "ci", b"digest", frozenset({"runs:read"}), 5.0)


async def test_every_change_is_logged_with_its_author_and_without_secrets(store: Store) -> None:
    await store.add_key(KEY, by=ANNA)
    await store.add_key(replace(KEY, tenant="thief"), by=ANNA)  # the id is taken
    await store.rotate_key("k1", b"second", 50.0, "mark", by=Actor("root", "key"))
    await store.rehash_key("k1", was=b"second", digest=b"third", pepper="other")
    await store.revoke_key("k1", 9.0, by=ANNA)
    await store.revoke_key("k1", 10.0, by=ANNA)  # it is revoked already
    await store.rotate_key("k1", b"fourth", 50.0, "mark", by=ANNA)  # a revoked key has no new secret
    await store.change(Change("c1", 20.0, "bob", "planner", "promoted", "v2"))
    logged = await store.admin_events(AdminEventQuery())
    assert [(event.action, event.actor, event.via, event.target, event.tenant) for event in reversed(logged)] == [
        ("key.added", "anna", "command", "k1", "acme"),
        ("key.rotated", "root", "key", "k1", "acme"),
        ("key.rehashed", PROCESS.id, "process", "k1", "acme"),
        ("key.revoked", "anna", "command", "k1", "acme"),
        ("conductor.promoted", "bob", "command", "planner", ""),
    ]
    of_key = logged[:0:-1]
    assert [change.before for change in of_key] == [None, *[change.after for change in of_key[:-1]]]
    assert dict(of_key[-1].after or {})["revoked_at"] == 9.0
    records = repr([(event.before, event.after) for event in logged])
    assert not [secret for secret in ("b'digest'", "second", "third") if secret in records]
    assert await store.admin_events(AdminEventQuery(limit=2, before=logged[0].seq)) == logged[1:3]
    assert await store.admin_events(AdminEventQuery(target="k1", actor="anna")) == (logged[1], logged[4])
    assert await store.admin_events(AdminEventQuery(tenant="acme", action="key.rotated")) == (logged[3],)
    assert await store.admin_events(AdminEventQuery(since=logged[0].at + 1)) == ()


async def test_of_two_admins_who_give_a_name_at_the_same_time_one_gets_it(store: Store) -> None:
    keys = [replace(KEY, id=f"k{number}", created_at=5.0) for number in range(8)]
    outcomes = await asyncio.gather(*[store.add_key(key, by=ANNA) for key in keys], return_exceptions=True)
    refusals = [outcome.public_code for outcome in outcomes if isinstance(outcome, Conflict)]
    assert (outcomes.count(True), refusals) == (1, ["name_taken"] * 7)
    [made] = await store.keys()
    assert not await store.add_key(made, by=ANNA), "it is made already"
    assert await store.add_key(replace(KEY, id="theirs", tenant="other"), by=ANNA)
    assert await store.revoke_key(made.id, 6.0)
    assert await store.add_key(replace(KEY, id="later", created_at=7.0, expires_at=8.0), by=ANNA)
    assert await store.add_key(replace(KEY, id="latest", created_at=8.0), by=ANNA)


async def test_a_rotation_with_an_idempotency_record_is_made_once_while_that_lasts(store: Store) -> None:
    await store.add_key(KEY)
    ours = store.administration_of("acme")
    for now, digest, is_new in ((1.0, b"second", True), (9.0, b"third", False), (10.0, b"fourth", True)):
        once = IdempotencyRecord("once", b"f", now + 9.0, tenant="acme")
        if is_new:
            assert await ours.rotate_key("k1", digest, 50.0, once=once, now=now)
        else:
            with pytest.raises(Conflict):
                await ours.rotate_key("k1", digest, 50.0, once=once, now=now)
    row = await store.key("k1")
    assert row is not None
    assert (row.digest, row.previous_digest) == (b"fourth", b"second")


async def test_a_change_that_cannot_be_logged_is_not_made(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    await store.add_key(KEY)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(key_rows, "note", fail)
    with pytest.raises(RuntimeError):
        await store.revoke_key("k1", 9.0)
    with pytest.raises(RuntimeError):
        await store.add_key(replace(KEY, id="k2"))
    assert await store.keys() == (KEY,)


async def test_retention_is_logged_when_it_changes(store: Store) -> None:
    kept = {"content": "30", "events": "never", "classes": ""}
    await asyncio.gather(*[store.note_retention(kept) for _ in range(5)])  # as engines that start at once
    for periods in (kept | {"content": "7"}, kept):
        await store.note_retention(periods)
    entries = await store.admin_events(AdminEventQuery(action=RETENTION_SET))
    assert [entry.after for entry in entries] == [kept, kept | {"content": "7"}, kept]
    assert [entry.before for entry in entries] == [kept | {"content": "7"}, kept, None]
    assert {(entry.actor, entry.via, entry.target) for entry in entries} == {("baton", "process", "retention")}


async def test_tenants_are_created_disabled_and_enabled(store: Store) -> None:
    await store.add_key(KEY)
    assert await store.tenants() == (TenantRow("acme", created_at=None, keys=1),)
    assert [await store.add_tenant("new", 3.0, by=ANNA) for _ in range(2)] == [True, False]
    for _ in range(2):
        assert await store.switch_tenant("acme", 8.0, enabled=False, by=ANNA)
    assert await store.tenants() == (TenantRow("acme", 8.0, 8.0, 1), TenantRow("new", 3.0))
    assert await store.key("k1") == replace(KEY, tenant_disabled_at=8.0)
    assert await store.switch_tenant("acme", 9.0, enabled=True, by=ANNA)
    assert await store.key("k1") == KEY
    assert not await store.switch_tenant("nobody", 9.0, enabled=False)
    logged = await store.admin_events(AdminEventQuery(actor="anna"))
    actions = ["tenant.enabled", "tenant.disabled", "tenant.created", "tenant.created"]
    assert [event.action for event in logged] == actions


async def test_an_erasure_is_logged_with_its_author_unless_the_time_of_the_content_was_over(store: Store) -> None:
    for run in ("asked", "ordered", "old"):
        await store.append(admission_entry(run, tenant="acme"))
    key = Actor("k1", "key")
    assert await store.of_tenant("acme").erase("asked", by=key)
    assert await store.erase("asked", by=ANNA), "it is erased already"
    assert await store.erase_contents(["ordered", "asked"], "user", by=ANNA) == 1
    assert await store.erase_contents(["old"], "retention") == 1
    logged = await store.admin_events(AdminEventQuery(action=CONTENT_ERASED))
    assert [(entry.target, entry.actor, entry.tenant, entry.after) for entry in reversed(logged)] == [
        ("asked", "k1", "acme", {"cause": "request"}),
        ("ordered", "anna", "acme", {"cause": "user"}),
    ]
    assert await store.admin_events(AdminEventQuery()) == (), "it is no change of what operators set"


async def test_a_budget_that_is_removed_while_it_is_set_is_set_anew(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = Budget("acme", "tenant", "", "day", 5)
    await store.set_budget(budget)
    lock_budget, looks = budget_rows._lock_budget, []

    def remove_and_look(conn: Connection, id_: str) -> Any:
        """Another admin has removed it between two statements."""
        looks.append(id_)
        if len(looks) == 1:
            budget_rows.remove(conn, id_, ANNA)
        return lock_budget(conn, id_)

    monkeypatch.setattr(budget_rows, "_lock_budget", remove_and_look)
    await store.set_budget(replace(budget, usd=7))
    assert await store.budgets("acme") == (replace(budget, usd=7),)
    logged = await store.admin_events(AdminEventQuery(target=budget.id))
    assert [change.before is None for change in reversed(logged)] == [True, False, True]


async def test_spending_is_added_up_by_tenant_and_by_key(store: Store) -> None:
    for run, tenant, key, at in (("a", "acme", "k1", 10.0), ("b", "acme", "k2", 20.0), ("c", "other", "k3", 20.0)):
        await store.append(admission_entry(run, at, tenant=tenant, key=key))
        await store.append(note(run, hold=Amount(100, 10)))
        await store.append(note(run, release=Amount(40, 4), spent=Amount(30, 3)))
    rows = await store.spending(SpendQuery(since=10.0, until=20.0))
    assert rows == (SpendRow("acme", None, runs=1, usd=30, held=60, tokens=3),)
    rows = await store.spending(SpendQuery(since=0.0, until=99.0, by="key", tenant="acme"))
    assert [(row.tenant, row.key, row.runs) for row in rows] == [("acme", "k1", 1), ("acme", "k2", 1)]
    rows = await store.spending(SpendQuery(since=0.0, until=99.0, limit=1))
    assert rows == (SpendRow("acme", None, runs=2, usd=60, held=120, tokens=6),)


async def test_lists_are_read_page_by_page(store: Store) -> None:
    """Keys of the same second, of two tenants; what a page leaves out is the next one's."""
    for n in range(6):
        await store.add_key(replace(KEY, id=f"k{n}", tenant="ab"[n % 2], created_at=float(n // 4), name=f"n{n}"))
        await store.set_budget(Budget("ab"[n % 2], "user", f"u{n}", "day", 100))
        await store.place_hold(Hold(f"h{n}", "tenant", "ab"[n % 2], "ab"[n % 2], "why", float(n // 4), ""))
    await store.revoke_key("k1", 9.0)
    await store.release_hold("h1", 9.0)
    assert [row.id for row in await store.keys()] == ["k5", "k4", "k3", "k2", "k1", "k0"]
    assert [row.id for row in await store.keys(KeyQuery(after="k4", limit=2))] == ["k3", "k2"]
    assert [row.id for row in await store.keys(KeyQuery("b", in_force=True, now=1.0, after="k5", limit=2))] == ["k3"]
    in_force = KeyQuery("b", in_force=True, now=1.0, after="k1")
    assert [row.id for row in await store.keys(replace(in_force, in_force=None, after="k3"))] == ["k1"]
    assert await store.keys(in_force) == (), "k1 was revoked after it had been read"
    assert await store.holds(HoldQuery("b", in_force=True, after="h1")) == ()
    assert [row.id for row in await store.keys(KeyQuery("b", name="n3"))] == ["k3"]
    assert [row.id for row in await store.keys(KeyQuery(in_force=False))] == ["k1"]
    assert [hold.id for hold in await store.holds(HoldQuery("b", in_force=True, after="h5"))] == ["h3"]
    assert [budget.name for budget in await store.budgets("a", after="a/user/u0/day", limit=1)] == ["u2"]
    assert (await store.budget("b/user/u1/day")) == (await store.budgets("b"))[0]
    assert await store.budget("none") is None
    for query in (KeyQuery("a", after="k5"), KeyQuery(after="none")):
        with pytest.raises(NotFound):
            await store.keys(query)
    with pytest.raises(NotFound):
        await store.holds(HoldQuery("a", after="h5"))


async def test_tenants_are_read_page_by_page(store: Store) -> None:
    for name in ("c", "a"):
        await store.add_tenant(name, 1.0)
    for n, name in enumerate(("b", "a", "b")):
        await store.add_key(replace(KEY, id=f"k{n}", tenant=name))
    assert await store.tenants(limit=2) == (TenantRow("a", 1.0, keys=1), TenantRow("b", None, keys=2))
    assert await store.tenants(after="b") == (TenantRow("c", 1.0),)
    assert await store.tenants("b") == (TenantRow("b", None, keys=2),)
    assert await store.tenants("none") == ()
