"""Every promise of the store seam, on an SQLite file and on a real Postgres."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from app.core.journal import TERMINAL, Draft, Event, Kind
from app.errors import Conflict, LeaseLost, NotFound, RunEnded, RunOverBudget, StoreUnavailable
from app.store import lanes
from app.store.content import address
from app.store.migrate import migrate
from app.store.protocol import (
    Appended,
    Due,
    Entry,
    Held,
    KeyRow,
    Ledger,
    Move,
    NewRun,
    Outbox,
    Projection,
    RunQuery,
    RunRow,
    Store,
)
from app.store.sql import SqlStore, open_store

GRACE = 5.0
SALT = b"salt-of-this-run"
Opener = Callable[[], AbstractAsyncContextManager[SqlStore]]


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.integration)])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database with the schema in it."""
    url = f"sqlite:///{tmp_path}/baton.db" if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    migrate(url)
    return str(url)


@pytest.fixture
def opener(database: str) -> Opener:
    """Opens stores over one database, as several processes would."""
    return partial(open_store, database, grace=GRACE, lanes=2)


@pytest.fixture
async def store(opener: Opener) -> AsyncIterator[SqlStore]:
    async with opener() as opened:
        yield opened


def new_run(**changes: Any) -> NewRun:
    plain = NewRun("tenant", "key", "mini", "baton-mini", SALT, "driver", 100.0, 500.0, Ledger(1000, 1000), "v1")
    return replace(plain, **changes)


def admitted(run: str, at: float = 1.0, row: Projection | None = None, **changes: Any) -> Entry:
    event = Draft(Kind.ADMITTED, {"tier": "mini"})
    return Entry(run, at, (event,), new=new_run(**changes), row=row or Projection())


def note(run: str, **fields: Any) -> Entry:
    """Any event that asks for no right."""
    return Entry(run, 2.0, (Draft(Kind.CANCEL_ASKED, {}),), **fields)


def queued(run: str, step: int = 0, at: float = 2.0) -> Entry:
    return Entry(run, at, (Draft(Kind.STEP_QUEUED, {"step": step}),), epoch=1, outbox=(Outbox(step, "mini", "driver"),))


def take(run: str, version: int, holder: str, at: float = 3.0, until: float = 10.0) -> Entry:
    return Entry(run, at, move=Move(0, "take", version=version, holder=holder, until=until))


def moved(run: str, verb: Any, claim: int, until: float = 0.0) -> Entry:
    return Entry(run, 4.0, (Draft(Kind.CALL_FINISHED, {}),), move=Move(0, verb, claim=claim, until=until))


async def settled(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*calls, return_exceptions=True)


# Events


async def test_events_are_numbered_from_one_and_read_back_as_they_were_answered(store: Store) -> None:
    first = await store.append(admitted("run"))
    second = await store.append(
        Entry("run", 2.5, (Draft(Kind.PLAN_OPENED, {"n": 1}), Draft(Kind.PLAN_STEP, {"access": ("user", 0)})), epoch=1)
    )
    assert [(event.seq, event.kind, event.at) for event in (*first.events, *second.events)] == [
        (1, Kind.ADMITTED, 1.0),
        (2, Kind.PLAN_OPENED, 2.5),
        (3, Kind.PLAN_STEP, 2.5),
    ]
    assert second.events[1].body == {"access": ["user", 0]}
    journal = await store.journal("run")
    assert journal.events == (*first.events, *second.events)
    assert journal.salt == SALT
    assert (await store.journal("run", after=2)).events == second.events[1:]


async def test_numbers_have_no_gaps_under_many_writers(opener: Opener) -> None:
    async with opener() as one, opener() as other:
        await one.append(admitted("run"))
        both = [one, other] * 32
        answers: list[Appended] = await asyncio.gather(*(store.append(note("run")) for store in both))
        assert sorted(answer.events[0].seq for answer in answers) == list(range(2, 66))
        assert [event.seq for event in (await other.journal("run")).events] == list(range(1, 66))
        assert (await one.run("run")).seq == 65


async def test_entries_of_one_run_are_written_in_the_order_of_the_calls(store: Store) -> None:
    await store.append(admitted("run"))
    bodies = [{"n": n} for n in range(100)]
    await asyncio.gather(*(store.append(Entry("run", 2.0, (Draft(Kind.PLAN_STEP, body),), epoch=1)) for body in bodies))
    assert [event.body for event in (await store.journal("run")).events[1:]] == bodies


async def test_what_no_run_has_is_not_found(store: Store) -> None:
    for call in (store.append(note("none")), store.journal("none"), store.run("none")):
        with pytest.raises(NotFound):
            await call
    assert await store.contents("none", ["ref"]) == {}
    assert await store.due("none", 0) is None


async def test_a_run_is_admitted_once(opener: Opener) -> None:
    async with opener() as one, opener() as other:
        answers = await settled(store.append(admitted("run")) for store in [one, other] * 8)
        assert sum(isinstance(answer, Appended) for answer in answers) == 1
        assert all(isinstance(answer, Appended | Conflict) for answer in answers)
        assert (await one.run("run")).seq == 1


async def test_a_body_that_is_not_json_is_the_callers_fault(store: Store) -> None:
    await store.append(admitted("run"))
    with pytest.raises(TypeError):
        await store.append(Entry("run", 2.0, (Draft(Kind.PLAN_STEP, {"bad": object()}),)))
    assert (await store.run("run")).seq == 1


# Fences


async def test_only_the_present_epoch_writes(store: Store) -> None:
    await store.append(admitted("run", lease_until=10.0))
    (taken,) = await store.orphans("heir", now=11.0, until=20.0, limit=5)
    assert (taken.epoch, taken.driver, taken.lease_until) == (2, "heir", 20.0)
    with pytest.raises(LeaseLost):
        await store.append(note("run", epoch=1))
    await store.append(note("run", epoch=2))


async def test_a_run_ends_once(opener: Opener) -> None:
    async with opener() as one, opener() as other:
        await one.append(admitted("run"))
        ends = [Entry("run", 9.0, (Draft(kind, {}),)) for kind in TERMINAL for _ in range(4)]
        answers = await settled(store.append(end) for store, end in zip([one, other] * len(ends), ends, strict=False))
        (winner,) = [answer for answer in answers if isinstance(answer, Appended)]
        assert sum(isinstance(answer, RunEnded) for answer in answers) == len(ends) - 1
        row = await other.run("run")
        assert (row.state, row.ended_at, row.seq) == (TERMINAL[winner.events[0].kind], 9.0, 2)


async def test_after_the_end_only_an_outcome_is_taken(store: Store) -> None:
    await store.append(admitted("run"))
    await store.append(queued("run"))
    claim = (await store.append(take("run", 0, "a"))).claim
    await store.append(Entry("run", 5.0, (Draft(Kind.CANCELLED, {}),), epoch=1))
    refused = (
        note("run", epoch=1),
        Entry("run", 6.0, outbox=(Outbox(1, "mini", "driver"),)),
        Entry("run", 6.0, hold=Ledger(1, 1)),
        Entry("run", 6.0, (Draft(Kind.CALL_FINISHED, {}), Draft(Kind.STEP_DONE, {}))),
    )
    for entry in refused:
        with pytest.raises(RunEnded):
            await store.append(entry)
    answer = await store.append(moved("run", "finish", claim))
    assert [event.kind for event in answer.events] == [Kind.CALL_FINISHED]
    assert (await store.run("run")).state == "cancelled"


async def test_one_entry_cannot_go_on_after_its_own_end(store: Store) -> None:
    await store.append(admitted("run"))
    for second in (Kind.SUCCEEDED, Kind.STEP_DONE):
        with pytest.raises(RunEnded):
            await store.append(Entry("run", 2.0, (Draft(Kind.FAILED, {}), Draft(second, {}))))
    assert (await store.run("run")).ended_at is None


async def test_tickets_that_nobody_took_die_with_the_run(store: Store) -> None:
    await store.append(admitted("run"))
    await store.append(queued("run", 0))
    await store.append(queued("run", 1))
    await store.append(take("run", 0, "a"))
    await store.append(Entry("run", 5.0, (Draft(Kind.EXPIRED, {}),), epoch=1))
    assert await store.due("run", 1) is None
    assert await store.due("run", 0) is not None


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


# Money


async def test_racing_holds_never_pass_a_cap(opener: Opener) -> None:
    async with opener() as one, opener() as other:
        await one.append(admitted("run", cap=Ledger(1000, 10**6)))
        holds = [Entry("run", 2.0, (Draft(Kind.CALL_INTENDED, {}),), hold=Ledger(7, 1)) for _ in range(200)]
        answers = await settled(store.append(hold) for store, hold in zip([one, other] * 100, holds, strict=True))
        granted = sum(isinstance(answer, Appended) for answer in answers)
        assert granted == 1000 // 7
        assert sum(isinstance(answer, RunOverBudget) for answer in answers) == 200 - granted
        row = await one.run("run")
        assert (row.held, row.spent, row.seq) == (Ledger(7 * granted, granted), Ledger(), 1 + granted)


async def test_settling_gives_back_and_adds_the_true_cost(store: Store) -> None:
    await store.append(admitted("run"))
    await store.append(note("run", hold=Ledger(600, 10)))
    with pytest.raises(RunOverBudget):
        await store.append(note("run", hold=Ledger(401, 0)))
    with pytest.raises(RunOverBudget):
        await store.append(note("run", hold=Ledger(0, 991)))
    await store.append(note("run", release=Ledger(600, 10), spent=Ledger(100, 5), hold=Ledger(900, 995)))
    row = await store.run("run")
    assert (row.held, row.spent) == (Ledger(900, 995), Ledger(100, 5))
    # What a provider bills beyond the reservation is still recorded; only new holds are refused.
    await store.append(note("run", release=Ledger(900, 995), spent=Ledger(1500, 0)))
    assert (await store.run("run")).spent == Ledger(1600, 5)
    with pytest.raises(ValueError, match="released"):
        await store.append(note("run", release=Ledger(1, 0)))


# Batches


async def test_a_refused_entry_fails_alone(store: Store) -> None:
    await asyncio.gather(*(store.append(admitted(f"run-{n}")) for n in range(8)))
    entries = [note(f"run-{n}", epoch=1) for n in range(8)]
    entries[2] = note("run-2", epoch=9)
    entries[4] = note("run-4", hold=Ledger(10**6, 0))
    entries[6] = note("none")
    answers = await settled(map(store.append, entries))
    kinds = [type(answer) for answer in answers]
    good = Appended
    assert kinds == [good, good, LeaseLost, good, RunOverBudget, good, NotFound, good]
    assert {(await store.run(f"run-{n}")).seq for n in (2, 4)} == {1}


async def test_a_refused_entry_leaves_nothing_behind(store: Store) -> None:
    await store.append(admitted("run"))
    before = await store.run("run")
    ref = address(SALT, b"text")
    with pytest.raises(LeaseLost):
        await store.append(
            note(
                "run",
                epoch=9,
                spent=Ledger(5, 5),
                contents=((ref, b"text"),),
                outbox=(Outbox(0, "mini", "driver"),),
                row=Projection(state="running"),
                tags=(("worker", "a"),),
            )
        )
    assert await store.run("run") == before
    assert await store.contents("run", [ref]) == {}
    assert await store.due("run", 0) is None
    assert await store.runs(RunQuery(tags=(("worker", "a"),))) == ()


async def test_an_entry_that_the_database_does_not_take_fails_alone(store: Store) -> None:
    await store.append(admitted("run"))
    poison = admitted("bad", cap=Ledger(2**70, 0))
    answers = await settled(map(store.append, (note("run"), poison, note("run"))))
    assert [type(answer) for answer in answers] == [Appended, StoreUnavailable, Appended]
    assert (await store.run("run")).seq == 3


async def test_a_caller_who_goes_away_disturbs_nobody(store: Store) -> None:
    await store.append(admitted("run"))
    calls = [asyncio.create_task(store.append(note("run"))) for _ in range(20)]
    await asyncio.sleep(0)
    for call in calls[::2]:
        call.cancel()
    answers = await settled(calls)
    assert all(isinstance(answer, Appended) for answer in answers[1::2])
    assert (await store.run("run")).seq == len((await store.journal("run")).events)


async def test_a_full_queue_refuses_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    await store.append(admitted("run"))
    monkeypatch.setattr(lanes, "ROOM", 10)
    answers = await settled(store.append(note("run")) for _ in range(30))
    assert [type(answer) for answer in answers] == [Appended] * 10 + [StoreUnavailable] * 20


async def test_leaving_the_store_commits_what_waits(opener: Opener) -> None:
    async with opener() as store:
        await store.append(admitted("run"))
        calls = [asyncio.create_task(store.append(note("run"))) for _ in range(50)]
        await asyncio.sleep(0)
        await store.close()
        assert all(isinstance(answer, Appended) for answer in await settled(calls))
        with pytest.raises(StoreUnavailable):
            await store.append(note("run"))
    async with opener() as store:
        assert (await store.run("run")).seq == 51


# Contents and the memory of recent journals


async def test_contents_are_stored_once_and_erased_with_their_salt(opener: Opener) -> None:
    text, image = b"hello", bytes(range(256)) * 500
    pairs = tuple((address(SALT, body), body) for body in (text, image, text))
    async with opener() as store:
        await store.append(admitted("run"))
        await store.append(note("run", contents=pairs))
        await store.append(note("run", contents=pairs))
        assert await store.contents("run", [pairs[0][0], "none"]) == {pairs[0][0]: text}
    async with opener() as store:
        assert await store.contents("run", [ref for ref, _ in pairs]) == dict(pairs)
        assert await store.erase("run")
        assert not await store.erase("none")
        assert await store.contents("run", [pairs[0][0]]) == {}
        journal = await store.journal("run")
        assert (journal.salt, len(journal.events)) == (b"", 3)


async def test_an_address_depends_on_the_salt() -> None:
    assert address(b"a", b"text") != address(b"b", b"text")
    assert address(b"", b"") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


async def test_a_live_run_is_read_without_the_database(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opener() as store, opener() as other:
        ref = address(SALT, b"text")
        await store.append(replace(admitted("run"), contents=((ref, b"text"),)))
        await store.append(queued("run"))
        fresh = await other.journal("run")
        with monkeypatch.context() as patch:
            patch.setattr(store, "_read", None)
            assert await store.journal("run", upto=2) == fresh
            assert (await store.journal("run", upto=2, after=1)).events == fresh.events[1:]
            assert await store.contents("run", [ref]) == {ref: b"text"}


async def test_a_prefix_from_memory_is_completed_from_the_database(opener: Opener) -> None:
    async with opener() as store, opener() as other:
        await store.append(admitted("run"))
        await other.append(note("run"))
        await store.append(note("run"))  # leaves a gap in what this process has seen
        assert [event.seq for event in (await store.journal("run", upto=3)).events] == [1, 2, 3]
        assert await store.journal("run") == await other.journal("run")
        await other.append(note("run"))
        assert [event.seq for event in (await store.journal("run", after=2)).events] == [3, 4]


async def test_an_ended_run_is_read_from_the_database(opener: Opener) -> None:
    async with opener() as store:
        appended: list[Event] = []
        for entry in (admitted("run"), note("run"), Entry("run", 3.0, (Draft(Kind.SUCCEEDED, {"usd": 1}),))):
            appended += (await store.append(entry)).events
        assert (await store.journal("run", upto=3)).events == tuple(appended)


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
