"""Every promise of the store seam about tickets, leases, lists and keys, on both databases."""

import asyncio
from dataclasses import replace

import pytest

from app.core.journal import Draft, Kind
from app.errors import LeaseLost
from app.store.protocol import (
    Appended,
    Due,
    Entry,
    Held,
    KeyRow,
    Ledger,
    Outbox,
    Projection,
    RunQuery,
    RunRow,
    Store,
)
from tests.conformance.entries import GRACE, Opener, admitted, moved, note, queued, settled, take

# Tickets


async def test_a_ticket_is_taken_held_and_finished(store: Store) -> None:
    await store.append(admitted("run"))
    await store.append(queued("run"))
    assert await store.due("run", 0) == Due("run", 0, "mini", "driver", version=0, claim=0, until=2.0, seq=2)
    assert (await store.append(take("run", 0, "a"))).claim == 1
    assert await store.due("run", 0) == Due("run", 0, "mini", "driver", version=1, claim=1, until=10.0, seq=2)
    await store.append(moved("run", "hold", 1))
    assert await store.due("run", 0) == Due("run", 0, "mini", "driver", version=2, claim=1, until=10.0, seq=3)
    await store.append(moved("run", "finish", 1))
    assert await store.due("run", 0) is None
    with pytest.raises(LeaseLost):
        await store.append(moved("run", "hold", 1))


async def test_a_held_ticket_is_refused_to_others_until_its_claim_lapses(store: Store) -> None:
    await store.append(admitted("run"))
    await store.append(queued("run"))
    await store.append(take("run", 0, "a", at=3.0, until=10.0))
    for version in (0, 1):
        with pytest.raises(LeaseLost):
            await store.append(take("run", version, "b", at=9.9))
    with pytest.raises(LeaseLost):
        await store.append(take("run", 0, "b", at=10.0))  # the version is an old ring's
    assert (await store.append(take("run", 1, "b", at=10.0, until=20.0))).claim == 2
    for verb in ("hold", "finish", "release"):
        with pytest.raises(LeaseLost):
            await store.append(moved("run", verb, 1))  # the zombie
    await store.append(moved("run", "finish", 2))


async def test_one_of_many_dispatchers_gets_the_ticket(opener: Opener) -> None:
    async with opener() as one, opener() as other:
        await one.append(admitted("run"))
        await one.append(queued("run"))
        takers = [(store, str(n)) for n, store in enumerate([one, other] * 16)]
        answers = await settled(store.append(take("run", 0, name)) for store, name in takers)
        assert sum(isinstance(answer, Appended) for answer in answers) == 1
        assert sum(isinstance(answer, LeaseLost) for answer in answers) == 31


async def test_a_released_ticket_is_due_again_and_no_longer_the_holders(store: Store) -> None:
    await store.append(admitted("run"))
    await store.append(queued("run"))
    await store.append(take("run", 0, "a"))
    await store.append(moved("run", "release", 1, until=30.0))
    with pytest.raises(LeaseLost):
        await store.append(moved("run", "hold", 1))
    assert await store.keep([Held("run", 0, 1)], 99.0) == frozenset()
    assert await store.overdue(29.9, 10) == ()
    (due,) = await store.overdue(30.0, 10)
    assert (await store.append(take("run", due.version, "b", at=30.0, until=40.0))).claim == 2


async def test_a_claim_on_a_former_ticket_of_the_step_is_worth_nothing(store: Store) -> None:
    """A step that waited for a tool is queued anew; whoever held it long ago must not pass for its new holder."""
    await store.append(admitted("run"))
    await store.append(queued("run"))
    await store.append(take("run", 0, "zombie", until=5.0))
    await store.append(take("run", 1, "b", at=6.0))
    await store.append(moved("run", "finish", 2))
    await store.append(queued("run"))
    assert (await store.append(take("run", 0, "c"))).claim == 3
    for claim in (1, 2):
        with pytest.raises(LeaseLost):
            await store.append(moved("run", "finish", claim))


async def test_a_step_queued_twice_has_one_ticket(store: Store) -> None:
    await store.append(admitted("run"))
    await store.append(queued("run"))
    await store.append(take("run", 0, "a"))
    again = Entry("run", 5.0, outbox=(Outbox(0, "mini", "heir"),))
    await store.append(again)
    due = await store.due("run", 0)
    assert due is not None
    assert (due.claim, due.driver, due.until) == (1, "heir", 10.0)
    await store.append(moved("run", "finish", 1))


async def test_an_unanswered_ring_is_overdue_after_its_grace_and_only_once(store: Store) -> None:
    await store.append(admitted("run"))
    await store.append(queued("run", at=20.0))
    assert await store.overdue(20.0 + GRACE - 0.1, 10) == ()
    (due,) = await store.overdue(20.0 + GRACE, 10)
    assert (due.run, due.step, due.seq) == ("run", 0, 2)
    assert await store.overdue(20.0 + GRACE + 1.0, 10) == ()  # it has just been rung
    assert len(await store.overdue(20.0 + 2 * GRACE, 10)) == 1


async def test_a_held_ticket_is_overdue_as_soon_as_its_claim_lapses(store: Store) -> None:
    await store.append(admitted("run"))
    await store.append(queued("run"))
    await store.append(take("run", 0, "a", until=10.0))
    assert await store.overdue(9.9, 10) == ()
    assert await store.keep([Held("run", 0, 1), Held("run", 0, 7), Held("none", 0, 1)], 15.0) == {Held("run", 0, 1)}
    assert await store.overdue(14.9, 10) == ()
    assert len(await store.overdue(15.0, 10)) == 1


async def test_two_sweepers_share_what_is_overdue(opener: Opener) -> None:
    async with opener() as one, opener() as other:
        await asyncio.gather(*(one.append(admitted(f"run-{n}")) for n in range(20)))
        await asyncio.gather(*(one.append(queued(f"run-{n}")) for n in range(20)))
        swept = await asyncio.gather(*(store.overdue(50.0, 20) for store in (one, other)))
        assert sorted(due.run for dues in swept for due in dues) == sorted(f"run-{n}" for n in range(20))


# Leases


async def test_a_lapsed_run_is_taken_over_once(opener: Opener) -> None:
    async with opener() as one, opener() as other:
        await asyncio.gather(*(one.append(admitted(f"run-{n:02}", lease_until=10.0)) for n in range(20)))
        await one.append(Entry("run-00", 5.0, (Draft(Kind.SUCCEEDED, {}),)))
        await one.append(queued("run-01"))
        assert await one.orphans("early", 9.9, 30.0, 50) == ()
        calls = [store.orphans(f"heir-{n}", 10.0, 30.0, 5) for n, store in enumerate([one, other] * 5)]
        taken: list[RunRow] = [row for rows in await asyncio.gather(*calls) for row in rows]
        while rows := await one.orphans("heir", 10.0, 30.0, 5):  # what one left because another was at it
            taken += rows
        assert sorted(row.id for row in taken) == [f"run-{n:02}" for n in range(1, 20)]
        assert {row.epoch for row in taken} == {2}
        due = await one.due("run-01", 0)
        assert due is not None
        assert due.driver == next(row.driver for row in taken if row.id == "run-01")


async def test_renewal_tells_which_leases_are_left(store: Store) -> None:
    await asyncio.gather(*(store.append(admitted(name, lease_until=10.0)) for name in ("mine", "ended", "lost")))
    await store.append(Entry("ended", 5.0, (Draft(Kind.FAILED, {}),), epoch=1))
    await store.renew("driver", {"mine": 1}, 20.0)
    assert [row.id for row in await store.orphans("heir", 15.0, 99.0, 10)] == ["lost"]
    epochs = {"mine": 1, "ended": 1, "lost": 1, "none": 1}
    assert await store.renew("driver", epochs, 30.0) == {"mine"}
    assert await store.renew("heir", {"lost": 2, "mine": 1}, 30.0) == {"lost"}
    assert (await store.run("mine")).lease_until == 30.0
    assert await store.renew("driver", {}, 30.0) == frozenset()


# Lists


async def test_lists_filter_by_every_column(store: Store) -> None:
    await store.append(admitted("a", 10.0, tenant="t1", tier="ultra", key="k1"))
    await store.append(replace(admitted("b", 20.0, tenant="t1"), tags=(("worker", "w"), ("label", "phi"))))
    await store.append(admitted("c", 30.0, tenant="t2", row=Projection(degraded=True)))
    await store.append(Entry("a", 31.0, (Draft(Kind.FAILED, {}),), row=Projection(error="no_worker")))
    row = Projection(state="running", topology="chain", steps=3)
    await store.append(note("b", spent=Ledger(700, 1), row=row, tags=(("worker", "w"),)))
    cases: dict[str, list[RunQuery]] = {
        "cba": [RunQuery(), RunQuery(since=10.0, until=30.1)],
        "ba": [RunQuery(tenant="t1"), RunQuery(until=30.0)],
        "cb": [RunQuery(tier="mini"), RunQuery(since=20.0), RunQuery(limit=2)],
        "a": [RunQuery(state="failed"), RunQuery(key="k1"), RunQuery(before=(20.0, "b"))],
        "b": [
            RunQuery(min_usd=700),
            RunQuery(state="running", tenant="t1"),
            RunQuery(tags=(("worker", "w"), ("label", "phi"))),
        ],
        "c": [RunQuery(degraded=True)],
        "": [RunQuery(tags=(("worker", "w"), ("label", "none"))), RunQuery(min_usd=701), RunQuery(tenant="t'1")],
    }
    for expected, queries in cases.items():
        for query in queries:
            assert "".join([row.id for row in await store.runs(query)]) == expected, query
    shown = await store.run("b")
    assert (shown.state, shown.topology, shown.steps, shown.degraded) == ("running", "chain", 3, False)
    assert ((await store.run("a")).error, (await store.run("a")).state) == ("no_worker", "failed")


async def test_pages_hold_every_row_once_while_others_come_in(store: Store) -> None:
    await asyncio.gather(*(store.append(admitted(f"run-{n:03}", float(n // 5))) for n in range(60)))
    seen: list[str] = []
    before = None
    while rows := await store.runs(RunQuery(before=before, limit=7)):
        seen += [row.id for row in rows]
        before = (rows[-1].created_at, rows[-1].id)
        await store.append(admitted(f"later-{len(seen)}", 1000.0))
    assert seen == [f"run-{n:03}" for n in reversed(range(60))]


# Keys, readiness


async def test_keys_are_stored_found_and_revoked(store: Store) -> None:
    old = KeyRow("old", "tenant", "first", b"\x00digest", frozenset({"runs:write", "admin"}), 1.0)
    full = KeyRow(
        "new",
        "tenant",
        "second",
        b"d",
        frozenset(),
        2.0,
        tiers=frozenset({"mini"}),
        labels=frozenset({"phi", "eu"}),
        max_usd=2**40,
        rpm=60,
        concurrency=4,
        expires_at=9.5,
    )
    assert [await store.add_key(key) for key in (old, full, replace(full, tenant="thief"))] == [True, True, False]
    assert await store.keys() == (full, old)
    assert await store.key("new") == full
    assert await store.key("none") is None
    assert await store.revoke_key("old", 7.0)
    assert await store.revoke_key("old", 8.0)
    assert await store.key("old") == replace(old, revoked_at=7.0)
    assert not await store.revoke_key("none", 7.0)


async def test_ready_writes(store: Store) -> None:
    await asyncio.gather(*(store.ready() for _ in range(4)))
