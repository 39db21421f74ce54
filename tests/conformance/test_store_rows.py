"""Every promise of the store seam about tickets, leases, lists and keys, on both databases."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from app.core.pool.catalog import Amount
from app.core.run.events import Kind
from app.errors import Conflict, LeaseLost
from app.store.protocol import (
    REQUEST_TAG,
    USER_TAG,
    AppendResult,
    Backlog,
    Entry,
    KeyRow,
    LapsedRuns,
    Lease,
    Outbox,
    Projection,
    RunQuery,
    RunRow,
    Store,
    TicketClaim,
    TicketRow,
)
from app.store.sql import open_store
from tests.conformance.entries import (
    GRACE,
    Opener,
    admission_entry,
    gather_outcomes,
    move_entry,
    note,
    queue_entry,
    take,
)
from tests.harness.raw_facts import Raw

LOGGED = 24 + 4096
"""Bytes of a page in SQLite's write-ahead log."""

# Tickets


async def test_a_ticket_is_taken_held_and_finished(store: Store) -> None:
    await store.append(admission_entry("run"))
    await store.append(queue_entry("run"))
    assert await store.find_ticket("run", 0) == TicketRow(
        "run", 0, "mini", "driver", version=0, claim=0, until=2.0, seq=2, tenant="tenant"
    )
    assert (await store.append(take("run", 0, "a"))).claim == 1
    due_step = TicketRow("run", 0, "mini", "driver", version=1, claim=1, until=10.0, seq=2, holder="a", tenant="tenant")
    assert await store.find_ticket("run", 0) == due_step
    await store.append(move_entry("run", "hold", 1))
    assert await store.find_ticket("run", 0) == replace(due_step, version=2, seq=3)
    await store.append(move_entry("run", "finish", 1))
    assert await store.find_ticket("run", 0) is None
    with pytest.raises(LeaseLost):
        await store.append(move_entry("run", "hold", 1))


async def test_a_held_ticket_is_refused_to_others_until_its_claim_lapses(store: Store) -> None:
    await store.append(admission_entry("run"))
    await store.append(queue_entry("run"))
    await store.append(take("run", 0, "a", at=3.0, until=10.0))
    for version in (0, 1):
        with pytest.raises(LeaseLost):
            await store.append(take("run", version, "b", at=9.9))
    with pytest.raises(LeaseLost):
        await store.append(take("run", 0, "b", at=10.0))  # the version is an old ring's
    assert (await store.append(take("run", 1, "b", at=10.0, until=20.0))).claim == 2
    for verb in ("hold", "finish", "release"):
        with pytest.raises(LeaseLost):
            await store.append(move_entry("run", verb, 1))  # the zombie
    await store.append(move_entry("run", "finish", 2))


async def test_claims_that_lapse_are_counted_and_those_handed_back_are_not(store: Store) -> None:
    await store.append(admission_entry("run"))
    await store.append(queue_entry("run"))
    losses = []
    for version, name in enumerate(("silent", "silent too", "orderly")):
        await store.append(take("run", version, name, at=10.0 * version + 3, until=10.0 * version + 5))
        due = await store.find_ticket("run", 0)
        losses.append(due.lost if due else None)
    await store.append(move_entry("run", "release", 3, until=40.0))
    await store.append(take("run", 4, "next", at=41.0, until=50.0))
    due = await store.find_ticket("run", 0)
    assert due is not None
    assert ([*losses, due.lost], due.holder) == ([0, 1, 2, 2], "next")


async def test_one_of_many_dispatchers_gets_the_ticket(opener: Opener) -> None:
    async with opener() as first_store, opener() as second_store:
        await first_store.append(admission_entry("run"))
        await first_store.append(queue_entry("run"))
        takers = [(store, str(n)) for n, store in enumerate([first_store, second_store] * 16)]
        answers = await gather_outcomes(store.append(take("run", 0, name)) for store, name in takers)
        assert sum(isinstance(answer, AppendResult) for answer in answers) == 1
        assert sum(isinstance(answer, LeaseLost) for answer in answers) == 31


async def test_a_released_ticket_is_due_again_and_no_longer_the_holders(store: Store) -> None:
    await store.append(admission_entry("run"))
    await store.append(queue_entry("run"))
    await store.append(take("run", 0, "a"))
    await store.append(move_entry("run", "release", 1, until=30.0))
    with pytest.raises(LeaseLost):
        await store.append(move_entry("run", "hold", 1))
    assert await store.renew_claims([TicketClaim("run", 0, 1)], 99.0) == frozenset()
    assert await store.announce_overdue_tickets(29.9, 10) == ()
    (due,) = await store.announce_overdue_tickets(30.0, 10)
    assert (await store.append(take("run", due.version, "b", at=30.0, until=40.0))).claim == 2


async def test_a_claim_on_a_former_ticket_of_the_step_is_worth_nothing(store: Store) -> None:
    """A step that waited for a tool is queued anew; whoever held it long ago must not pass for its new holder."""
    await store.append(admission_entry("run"))
    await store.append(queue_entry("run"))
    await store.append(take("run", 0, "zombie", until=5.0))
    await store.append(take("run", 1, "b", at=6.0))
    await store.append(move_entry("run", "finish", 2))
    await store.append(queue_entry("run"))
    assert (await store.append(take("run", 0, "c"))).claim == 3
    for claim in (1, 2):
        with pytest.raises(LeaseLost):
            await store.append(move_entry("run", "finish", claim))


async def test_a_step_queued_twice_has_one_ticket(store: Store) -> None:
    await store.append(admission_entry("run"))
    await store.append(queue_entry("run"))
    await store.append(take("run", 0, "a"))
    again = Entry("run", 5.0, outbox=(Outbox(0, "mini", "heir"),))
    await store.append(again)
    due = await store.find_ticket("run", 0)
    assert due is not None
    assert (due.claim, due.driver, due.until) == (1, "heir", 10.0)
    await store.append(move_entry("run", "finish", 1))


async def test_a_ticket_may_be_taken_by_the_entry_that_writes_it(store: Store) -> None:
    await store.append(admission_entry("run"))
    both = (Outbox(0, "mini", "driver", holder="a", until=10.0), Outbox(1, "mini", "driver"))
    both_taken = await store.append(replace(queue_entry("run"), outbox=both))
    assert both_taken.outbox_claims == (1,)
    with pytest.raises(LeaseLost):
        await store.append(take("run", 0, "b"))
    with pytest.raises(LeaseLost):
        await store.append(take("run", 1, "b", at=9.9))
    assert [due.step for due in await store.announce_overdue_tickets(9.9, 10)] == [1]
    await store.append(move_entry("run", "finish", 1))
    assert await store.find_ticket("run", 0) is None


async def test_nobody_takes_a_ticket_by_writing_it_again(store: Store) -> None:
    """It may be somebody's; then nothing of the entry is written."""
    await store.append(admission_entry("run"))
    await store.append(queue_entry("run"))
    await store.append(take("run", 0, "a"))
    greedy = replace(queue_entry("run"), outbox=(Outbox(0, "mini", "driver", holder="b", until=10.0),))
    with pytest.raises(Conflict):
        await store.append(greedy)
    due = await store.find_ticket("run", 0)
    assert due is not None
    assert (due.holder, due.claim, len((await store.journal("run")).events)) == ("a", 1, 2)


async def test_an_unanswered_ring_is_overdue_after_its_grace_and_only_once(store: Store) -> None:
    await store.append(admission_entry("run"))
    await store.append(queue_entry("run", at=20.0))
    assert await store.announce_overdue_tickets(20.0 + GRACE - 0.1, 10) == ()
    (due,) = await store.announce_overdue_tickets(20.0 + GRACE, 10)
    assert (due.run, due.step, due.seq) == ("run", 0, 2)
    assert await store.announce_overdue_tickets(20.0 + GRACE + 1.0, 10) == ()  # it was announced just now
    assert len(await store.announce_overdue_tickets(20.0 + 2 * GRACE, 10)) == 1


async def test_a_ticket_that_nobody_rings_is_overdue_at_once_and_for_one(store: Store) -> None:
    await store.append(admission_entry("run"))
    quiet = Outbox(0, "mini", "driver", announced=False)
    await store.append(replace(queue_entry("run", at=20.0), outbox=(quiet,)))
    assert len(await store.announce_overdue_tickets(20.0, 10)) == 1
    assert await store.announce_overdue_tickets(20.1, 10, 0.2) == ()  # whoever looked it up is about to take it
    assert len(await store.announce_overdue_tickets(20.2, 10, 0.2)) == 1


@pytest.mark.parametrize("announced", [True, False])
async def test_who_has_waited_longest_comes_first(store: Store, announced: bool) -> None:
    for name, at in (("b", 21.0), ("c", 22.0), ("a", 20.0)):
        await store.append(admission_entry(name))
        await store.append(
            replace(queue_entry(name, at=at), outbox=(Outbox(0, "mini", "driver", announced=announced),))
        )
    overdue = [await store.announce_overdue_tickets(60.0, 1) for _ in range(4)]
    assert [due.run for dues in overdue for due in dues] == ["a", "b", "c"]


async def test_a_held_ticket_is_overdue_as_soon_as_its_claim_lapses(store: Store) -> None:
    await store.append(admission_entry("run"))
    await store.append(queue_entry("run"))
    await store.append(take("run", 0, "a", until=10.0))
    assert await store.announce_overdue_tickets(9.9, 10) == ()
    assert await store.renew_claims(
        [TicketClaim("run", 0, 1), TicketClaim("run", 0, 7), TicketClaim("none", 0, 1)], 15.0
    ) == {TicketClaim("run", 0, 1)}
    assert await store.announce_overdue_tickets(14.9, 10) == ()
    assert len(await store.announce_overdue_tickets(15.0, 10)) == 1


@pytest.mark.parametrize("what", ["claims", "leases"])
async def test_others_get_their_turn_while_thousands_are_renewed(store: Store, what: str) -> None:
    """A process that holds many renews them all every second or so, beside everything else that it does."""
    names = [f"run-{n}" for n in range(3000)]
    claims = [TicketClaim(name, 0, 1) for name in names]
    renewing = (
        store.renew_claims(claims, 9.0)
        if what == "claims"
        else store.renew_leases("driver", dict.fromkeys(names, 1), 9.0)
    )
    renewed, turns = asyncio.ensure_future(renewing), 0
    while not renewed.done():
        await asyncio.sleep(0)
        turns += 1
    assert not await renewed
    assert turns > 10


async def test_two_sweepers_share_what_is_overdue(opener: Opener) -> None:
    async with opener() as first_store, opener() as second_store:
        await asyncio.gather(*(first_store.append(admission_entry(f"run-{n}")) for n in range(20)))
        await asyncio.gather(*(first_store.append(queue_entry(f"run-{n}")) for n in range(20)))
        swept = await asyncio.gather(
            *(store.announce_overdue_tickets(50.0, 20) for store in (first_store, second_store))
        )
        assert sorted(due.run for dues in swept for due in dues) == sorted(f"run-{n}" for n in range(20))


# Leases

KINDS = [("mini", "v1")]


async def test_a_lapsed_run_is_taken_over_once(opener: Opener) -> None:
    async with opener() as first_store, opener() as second_store:
        await asyncio.gather(*(first_store.append(admission_entry(f"run-{n:02}", lease_until=10.0)) for n in range(20)))
        await first_store.append(Entry("run-00", 5.0, (Raw(Kind.SUCCEEDED, {}),), epoch=1))
        await first_store.append(queue_entry("run-01"))
        assert await first_store.take_over("early", 9.9, 30.0, 50, KINDS) == ()
        calls = [
            store.take_over(f"heir-{n}", 10.0, 30.0, 5, KINDS)
            for n, store in enumerate([first_store, second_store] * 3)
        ]
        taken_rows: list[RunRow] = [row for rows in await asyncio.gather(*calls) for row in rows]
        while rows := await first_store.take_over(
            "heir", 10.0, 30.0, 5, KINDS
        ):  # what one left because another was at it
            taken_rows += rows
        assert sorted(row.id for row in taken_rows) == [f"run-{n:02}" for n in range(1, 20)]
        assert {row.epoch for row in taken_rows} == {2}
        due = await first_store.find_ticket("run-01", 0)
        assert due is not None
        assert due.driver == next(row.driver for row in taken_rows if row.id == "run-01")


async def test_renewal_tells_which_leases_are_left(store: Store) -> None:
    await asyncio.gather(*(store.append(admission_entry(name, lease_until=10.0)) for name in ("mine", "ended", "lost")))
    await store.append(Entry("ended", 5.0, (Raw(Kind.FAILED, {}),), epoch=1))
    await store.renew_leases("driver", {"mine": 1}, 20.0)
    assert [row.id for row in await store.take_over("heir", 15.0, 99.0, 10, KINDS)] == ["lost"]
    epochs = {"mine": 1, "ended": 1, "lost": 1, "none": 1}
    await store.append(note("mine"))
    assert await store.renew_leases("driver", epochs, 30.0) == {"mine": 2}
    assert await store.renew_leases("heir", {"lost": 2, "mine": 1}, 30.0) == {"lost": 1}
    assert (await store.run("mine")).lease_until == 30.0
    assert await store.renew_leases("driver", {}, 30.0) == {}
    assert await store.last_seqs(["mine", "ended", "none"]) == {"mine": 2, "ended": 2}
    assert await store.last_seqs([]) == {}


async def test_runs_of_another_kind_are_left_until_their_deadline(store: Store) -> None:
    kinds = {"here": ("mini", "v1"), "elsewhere": ("grand", "v1"), "tomorrow": ("mini", "v2")}
    for name, (tier, code) in kinds.items():
        await store.append(admission_entry(name, lease_until=10.0, tier=tier, code=code, deadline=50.0))
    await store.append(admission_entry("driven", lease_until=99.0, tier="grand"))
    counted = [LapsedRuns(tier, code, 1, 0, 0) for tier, code in sorted(kinds.values())]
    assert await store.count_lapsed_runs(9.9) == ()
    assert await store.count_lapsed_runs(10.0) == tuple(counted)
    assert await store.take_over("heir", 10.0, 30.0, 10, []) == ()
    assert [row.id for row in await store.take_over("heir", 10.0, 30.0, 10, KINDS)] == ["here"]
    assert await store.count_lapsed_runs(50.0) == tuple(replace(ticket, expired=1) for ticket in counted)
    late = await store.take_over("anybody", 50.0, 60.0, 10, [])
    assert {row.id: (row.tier, row.code) for row in late} == kinds


async def test_of_runs_that_no_engine_has_room_for_only_those_to_be_cancelled_are_taken(store: Store) -> None:
    tiers = {"wished": "mini", "waits": "mini", "elsewhere": "grand", "driven": "mini"}
    for name, tier in tiers.items():
        lease_until = 99.0 if name == "driven" else 10.0
        await store.append(admission_entry(name, lease_until=lease_until, tier=tier, deadline=50.0))
    for name in ("wished", "elsewhere", "driven"):
        await store.append(note(name))
    counted = (LapsedRuns("grand", "v1", 1, 0, 1), LapsedRuns("mini", "v1", 2, 0, 1))
    assert await store.count_lapsed_runs(10.0) == counted
    taken = await store.take_over("heir", 10.0, 30.0, 10, [], KINDS)
    assert [row.id for row in taken] == ["wished"]
    assert await store.count_lapsed_runs(50.0) == (
        LapsedRuns("grand", "v1", 1, 1, 0),
        LapsedRuns("mini", "v1", 2, 2, 0),
    )
    late = await store.take_over("anybody", 50.0, 60.0, 10, [])
    assert {row.id for row in late} == {"waits", "elsewhere", "wished"}


# Lists


async def test_a_lease_changes_hands_with_an_entry(store: Store) -> None:
    """Let go of until the wait is over, then taken by whoever comes back: each old epoch is worth nothing from then."""
    await store.append(admission_entry("run"))
    await store.append(Entry("run", 2.0, (Raw(Kind.AWAITING, {}),), epoch=1, lease=Lease("", 900.0, 900.0)))
    row = await store.run("run")
    assert (row.epoch, row.driver, row.lease_until, row.deadline, row.seq) == (2, "", 900.0, 900.0, 2)
    assert await store.take_over("other", 899.0, 950.0, 9, [("mini", "v1")]) == ()
    late, winner, twice = await gather_outcomes(
        store.append(Entry("run", 3.0, (Raw(Kind.RESUMED, {}),), epoch=epoch, lease=Lease("home", 9.0, 70.0)))
        for epoch in (1, 2, 2)
    )
    assert isinstance(late, LeaseLost)
    assert isinstance(winner, AppendResult)
    assert isinstance(twice, LeaseLost)
    row = await store.run("run")
    assert (row.epoch, row.driver, row.lease_until, row.deadline, row.seq) == (3, "home", 9.0, 70.0, 3)
    await store.append(Entry("run", 3.0, (Raw(Kind.STEP_QUEUED, {}),), epoch=3))
    assert await store.renew_leases("home", {"run": 3}, 20.0) == {"run": 4}
    with pytest.raises(LeaseLost):
        await store.append(Entry("run", 4.0, lease=Lease("thief", 9.0, 70.0)))


async def test_a_tenant_with_fewer_runs_under_way_is_taken_over_first(store: Store) -> None:
    for number in range(6):
        await store.append(admission_entry(f"flood-{number}", tenant="flood", driver="", lease_until=1.0 + number))
    await store.append(admission_entry("small", tenant="small", driver="", lease_until=9.0))
    assert await store.count_untaken_runs(10.0) == {"flood": 6, "small": 1}
    first = await store.take_over("engine", 10.0, 30.0, 2, KINDS)
    assert {row.id for row in first} == {"flood-0", "small"}
    await store.append(admission_entry("small-2", tenant="other", driver="", lease_until=9.0))
    assert [row.id for row in await store.take_over("engine", 10.0, 30.0, 1, KINDS)] == ["small-2"]
    assert [row.id for row in await store.take_over("engine", 10.0, 30.0, 9, KINDS)] == [
        f"flood-{n}" for n in range(1, 6)
    ]
    assert await store.count_untaken_runs(10.0) == {}


async def test_a_run_that_waits_is_taken_over_when_its_wait_is_over(store: Store) -> None:
    await store.append(admission_entry("run"))
    await store.append(Entry("run", 2.0, (Raw(Kind.AWAITING, {}),), epoch=1, lease=Lease("", 900.0, 900.0)))
    (row,) = await store.take_over("home", 900.0, 950.0, 9, [])
    assert (row.id, row.epoch, row.driver, row.lease_until) == ("run", 3, "home", 950.0)


@pytest.mark.parametrize("together", [False, True])
async def test_a_wish_wakes_a_run_that_waits_and_no_other(store: Store, together: bool) -> None:
    rest = Entry("run", 2.0, (Raw(Kind.AWAITING, {}),), epoch=1, lease=Lease("", 900.0, 900.0))
    await gather_outcomes(store.append(admission_entry(name)) for name in ("run", "driven"))
    if together:
        await gather_outcomes(store.append(entry) for entry in (rest, note("run"), note("driven")))
    else:
        for entry in (rest, note("run"), note("driven")):
            await store.append(entry)
    (row,) = await store.take_over("home", 2.0, 50.0, 9, [("mini", "v1")])
    assert (row.id, row.epoch) == ("run", 3)
    assert (await store.run("driven")).lease_until == 100.0


async def test_a_run_that_is_born_and_let_go_of_in_one_batch_is_nobodys(store: Store) -> None:
    rest = Entry("run", 2.0, (Raw(Kind.AWAITING, {}),), epoch=1, lease=Lease("", 900.0, 900.0))
    await gather_outcomes(store.append(entry) for entry in (admission_entry("run"), rest))
    row = await store.run("run")
    assert (row.epoch, row.driver, row.seq) == (2, "", 2)


async def test_waiting_runs_are_counted_up_to_a_bound(store: Store) -> None:
    for n in range(3):
        await store.append(admission_entry(f"run{n}", row=Projection("awaiting_tool")))
    await store.append(admission_entry("other", row=Projection("running")))
    assert [await store.count_waiting_runs(most) for most in (2, 10)] == [2, 3]
    ended = Raw(Kind.EXPIRED, {"error": "tool_results_missing"})
    await store.append(Entry("run0", 9.0, (ended,), epoch=1, row=Projection("expired")))
    assert await store.count_waiting_runs(10) == 2


async def test_the_backlog_is_the_work_that_nobody_has_taken(store: Store) -> None:
    await store.append(admission_entry("run"))  # its engine's lease is valid until 100
    assert await store.backlog(20.0, 10) == Backlog(0, None)
    await store.append(
        replace(queue_entry("run", at=20.0), outbox=tuple([Outbox(n, "mini", "driver") for n in range(3)]))
    )
    assert (await store.backlog(25.0, 10)) == Backlog(3, 20.0)
    await store.append(take("run", 0, "a", at=26.0, until=40.0))
    assert (await store.backlog(30.0, 10)).waiting == 2
    assert (await store.backlog(50.0, 10)).waiting == 3  # the claim has lapsed
    await store.append(admission_entry("taken"))
    assert [row.id for row in await store.runs(RunQuery(untaken_at=50.0))] == ["run"]
    assert {row.id for row in await store.runs(RunQuery(untaken_at=200.0))} == {"run", "taken"}
    await store.append(
        replace(admission_entry("taken"), new=None, epoch=1, events=(Raw(Kind.CANCELLED, {"step": None}),))
    )
    backlog = await store.backlog(200.0, 10)  # and so has the lease of the run
    assert (backlog.waiting, backlog.oldest_since) == (4, 20.0)
    assert (await store.backlog(200.0, 2)).waiting == 3


async def test_lists_filter_by_every_column(store: Store) -> None:
    await store.append(admission_entry("a", 10.0, tenant="t1", tier="ultra", key="k1", model="fugu"))
    await store.append(
        replace(admission_entry("b", 20.0, tenant="t1"), tags=(("worker", "w"), ("label", "phi"), (USER_TAG, "ann")))
    )
    await store.append(note("b", tags=((REQUEST_TAG, "r1"),)))
    await store.append(admission_entry("c", 30.0, tenant="t2", row=Projection(degraded=True)))
    await store.append(Entry("a", 31.0, (Raw(Kind.FAILED, {}),), epoch=1, row=Projection(error="no_worker")))
    row = Projection(state="running", topology="chain", steps=3)
    await store.append(note("b", spent=Amount(700, 1), row=row, tags=(("worker", "w"),)))
    await store.append(Entry("b", 32.0, (Raw(Kind.CALL_INTENDED, {}),), epoch=1))  # of a release without a ledger
    cases: dict[str, list[RunQuery]] = {
        "cba": [RunQuery(), RunQuery(since=10.0, until=30.1)],
        "ba": [RunQuery(tenant="t1"), RunQuery(until=30.0)],
        "abc": [RunQuery(ascending=True)],
        "bc": [RunQuery(ascending=True, before=(10.0, "a"))],
        "cb": [RunQuery(tier="mini"), RunQuery(since=20.0), RunQuery(limit=2)],
        "ca": [RunQuery(max_usd=699)],
        "a": [
            RunQuery(state="failed"),
            RunQuery(key="k1"),
            RunQuery(model="fugu"),
            RunQuery(before=(20.0, "b")),
            RunQuery(sort="cost"),
        ],
        "b": [
            RunQuery(min_usd=700),
            RunQuery(state="running", tenant="t1"),
            RunQuery(tags=(("worker", "w"), ("label", "phi"))),
            RunQuery(request_id="r1", tenant="t1"),
            RunQuery(topology="chain"),
            RunQuery(user="ann", tenant="t1"),
        ],
        "c": [RunQuery(degraded=True)],
        "": [
            RunQuery(request_id="w"),
            RunQuery(request_id="r1", tenant="t2"),
            RunQuery(tags=(("worker", "w"), ("label", "none"))),
            RunQuery(min_usd=701),
            RunQuery(user="ann", tenant="t2"),
            RunQuery(tenant="t'1"),
        ],
    }
    for expected, queries in cases.items():
        for query in queries:
            assert "".join([row.id for row in await store.runs(query)]) == expected, query
    stored_row = await store.run("b")
    assert (stored_row.state, stored_row.topology, stored_row.steps, stored_row.degraded) == (
        "running",
        "chain",
        3,
        False,
    )
    assert ((await store.run("a")).error, (await store.run("a")).state) == ("no_worker", "failed")


async def test_pages_hold_every_row_once_while_others_come_in(store: Store) -> None:
    await asyncio.gather(*(store.append(admission_entry(f"run-{n:03}", float(n // 5))) for n in range(60)))
    listed_ids: list[str] = []
    before = None
    while rows := await store.runs(RunQuery(before=before, limit=7)):
        listed_ids += [row.id for row in rows]
        before = (rows[-1].created_at, rows[-1].id)
        await store.append(admission_entry(f"later-{len(listed_ids)}", 1000.0))
    assert listed_ids == [f"run-{n:03}" for n in reversed(range(60))]


@pytest.mark.parametrize("ascending", [False, True])
async def test_pages_by_cost_hold_every_ended_run_once_while_others_end(store: Store, ascending: bool) -> None:
    async def spend(name: str, usd: int, *, ends: bool = True) -> None:
        await store.append(admission_entry(name, 1.0, cap=Amount(10_000, 10_000)))
        end = (Raw(Kind.SUCCEEDED, {}),) if ends else (Raw(Kind.STEP_SKIPPED, {}),)
        await store.append(Entry(name, 2.0, end, epoch=1, spent=Amount(usd, 1)))

    await asyncio.gather(*(spend(f"run-{n:02}", 100 + n // 4) for n in range(24)))
    await spend("open", 50, ends=False)
    passed = 100 if ascending else 105
    listed_ids: list[str] = []
    before = None
    while rows := await store.runs(RunQuery(sort="cost", ascending=ascending, before=before, limit=5)):
        listed_ids += [row.id for row in rows]
        before = (rows[-1].spent.usd, rows[-1].id)
        await spend(f"behind-us-{len(listed_ids)}", passed - 50 if ascending else passed + 50)
    names = [f"run-{n:02}" for n in range(24)]
    assert listed_ids == (names if ascending else names[::-1])


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
        tpm=2**40,
        concurrency=4,
        expires_at=9.5,
        all_tenants=True,
    )
    assert [await store.add_key(key) for key in (old, full, replace(full, tenant="thief"))] == [
        True,
        True,
        False,
    ]
    assert await store.keys() == (full, old)
    assert await store.key("new") == full
    assert await store.key("none") is None
    assert await store.revoke_key("old", 7.0)
    assert await store.revoke_key("old", 8.0)
    assert await store.key("old") == replace(old, revoked_at=7.0)
    assert not await store.revoke_key("none", 7.0)
    assert await store.rotate_key("new", b"e", 8.0)
    assert await store.key("new") == replace(full, digest=b"e", previous_digest=b"d", previous_until=8.0)
    assert await store.rehash_key("new", was=b"e", digest=b"f", pepper="mark")
    assert not await store.rehash_key("new", was=b"e", digest=b"g", pepper="mark")
    moved = replace(full, digest=b"f", previous_digest=b"d", previous_until=8.0, pepper="mark")
    assert await store.key("new") == moved
    assert await store.rotate_key("new", b"h", 9.0, "other")
    assert await store.key("new") == replace(
        moved, digest=b"h", previous_digest=b"f", previous_until=9.0, pepper="other"
    )
    assert not await store.rotate_key("old", b"e", 8.0)
    assert not await store.rotate_key("none", b"e", 8.0)


async def test_ready_writes(store: Store) -> None:
    await asyncio.gather(*(store.ready() for _ in range(4)))


async def test_a_run_may_change_hands_and_end_in_one_transaction(store: Store) -> None:
    await store.append(admission_entry("run"))
    handed = Entry("run", 2.0, epoch=1, lease=Lease("another", 9.0, 500.0))
    ended = Entry("run", 3.0, (Raw(Kind.SUCCEEDED, {}),), epoch=2)
    await gather_outcomes([store.append(handed), store.append(ended)])
    row = await store.run("run")
    assert (row.state, row.ended_at, row.epoch) == ("succeeded", 3.0, 2)


async def test_a_run_that_changes_hands_writes_no_index(tmp_path: Path, make_schema: Callable[[str], None]) -> None:
    """A file's log grows by a page of runs, one of events and two of what waits to be sealed, and by nothing else."""
    url, log = f"sqlite:///{tmp_path}/baton.db", tmp_path / "baton.db-wal"
    make_schema(url)
    async with open_store(url) as store:
        await store.append(admission_entry("run"))
        before = log.stat().st_size
        await store.append(note("run", epoch=1, lease=Lease("another", 9.0, 500.0)))
        assert log.stat().st_size - before == 4 * LOGGED
