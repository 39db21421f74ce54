"""Every promise of the store seam about runs and their journals, on an SQLite file and on a real Postgres."""

import asyncio
import time

import pytest
from msgspec.structs import replace

from app.core.contents import content_ref
from app.core.pool.catalog import Amount
from app.core.run.events import TERMINAL, Event, Kind
from app.errors import Conflict, LeaseLost, NotFound, RunEnded, RunOverBudget, StoreUnavailable
from app.store.protocol import (
    MOVED,
    AppendResult,
    Entry,
    Outbox,
    Projection,
    RunQuery,
    Store,
)
from app.store.writing import group_commit
from tests.conformance.entries import (
    SALT,
    Opener,
    admission_entry,
    gather_outcomes,
    move_entry,
    note,
    queue_entry,
    take,
)
from tests.harness.raw_facts import Raw

# Events


async def test_events_are_numbered_from_one_and_read_back_as_they_were_answered(store: Store) -> None:
    first = await store.append(admission_entry("run"))
    second = await store.append(
        Entry(
            "run",
            2.5,
            (Raw(Kind.PLAN_OPENED, {"n": 1}), Raw(Kind.PLAN_STEP, {"access": ("user", 0)})),
            epoch=1,
        )
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
    async with opener() as first_store, opener() as second_store:
        await first_store.append(admission_entry("run"))
        both = [first_store, second_store] * 32
        answers: list[AppendResult] = await asyncio.gather(*(store.append(note("run")) for store in both))
        assert sorted(answer.events[0].seq for answer in answers) == list(range(2, 66))
        assert [event.seq for event in (await second_store.journal("run")).events] == list(range(1, 66))
        assert (await first_store.run("run")).seq == 65


async def test_entries_of_one_run_are_written_in_the_order_of_the_calls(store: Store) -> None:
    await store.append(admission_entry("run"))
    bodies = [{"n": n} for n in range(100)]
    await asyncio.gather(*(store.append(Entry("run", 2.0, (Raw(Kind.PLAN_STEP, body),), epoch=1)) for body in bodies))
    assert [event.body for event in (await store.journal("run")).events[1:]] == bodies


async def test_what_no_run_has_is_not_found(store: Store) -> None:
    for call in (store.append(note("none")), store.journal("none"), store.run("none")):
        with pytest.raises(NotFound):
            await call
    assert await store.contents("none", ["ref"]) == {}
    assert await store.find_ticket("none", 0) is None


async def test_a_run_is_admitted_once(opener: Opener) -> None:
    async with opener() as first_store, opener() as second_store:
        answers = await gather_outcomes(
            store.append(admission_entry("run")) for store in [first_store, second_store] * 8
        )
        assert sum(isinstance(answer, AppendResult) for answer in answers) == 1
        assert all(isinstance(answer, AppendResult | Conflict) for answer in answers)
        assert (await first_store.run("run")).seq == 1


async def test_a_body_that_is_not_json_is_the_callers_fault(store: Store) -> None:
    await store.append(admission_entry("run"))
    with pytest.raises(TypeError):
        await store.append(Entry("run", 2.0, (Raw(Kind.PLAN_STEP, {"bad": object()}),), epoch=1))
    assert (await store.run("run")).seq == 1


# Fences


async def test_only_the_present_epoch_writes(store: Store) -> None:
    await store.append(admission_entry("run", lease_until=10.0))
    (row,) = await store.take_over("heir", now=11.0, until=20.0, limit=5, kinds=[("mini", "v1")])
    assert (row.epoch, row.driver, row.lease_until) == (2, "heir", 20.0)
    with pytest.raises(LeaseLost):
        await store.append(note("run", epoch=1))
    await store.append(note("run", epoch=2))


async def test_the_input_of_a_step_names_the_engine_that_has_the_lease(store: Store) -> None:
    await store.append(admission_entry("run", lease_until=10.0))
    before = await store.step_input("run")
    await store.take_over("heir", now=11.0, until=20.0, limit=5, kinds=[("mini", "v1")])
    after = await store.step_input("run", before.events[-1].seq)
    assert [(lease.driver, lease.epoch) for lease in (before, after)] == [("driver", 1), ("heir", 2)]


async def test_what_must_follow_an_event_is_refused_once_there_are_later_ones(store: Store) -> None:
    """A sum over all that came before would be wrong."""
    await store.append(admission_entry("run"))
    await store.append(note("run", epoch=1))
    last = Entry("run", 9.0, (Raw(Kind.FAILED, {}),), epoch=1, seq=1)
    with pytest.raises(Conflict) as refusal:
        await store.append(last)
    assert refusal.value.public_code == MOVED
    (event,) = (await store.append(replace(last, seq=2))).events
    assert event.seq == 3


async def test_the_events_of_calls_are_read_by_themselves(store: Store) -> None:
    await store.append(admission_entry("run"))
    intent = Raw(Kind.CALL_INTENDED, {"call": "call_0"})
    facts = (Raw(Kind.PLAN_OPENED, {}), intent, Raw(Kind.STEP_QUEUED, {}), Raw(Kind.CALL_FINISHED, {"call": "call_0"}))
    await store.append(Entry("run", 3.0, facts, epoch=1))
    assert [(event.seq, event.kind) for event in await store.call_events("run")] == [
        (3, Kind.CALL_INTENDED),
        (5, Kind.CALL_FINISHED),
    ]
    assert await store.call_events("none") == ()


async def test_no_journal_is_read_up_to_nothing(store: Store) -> None:
    """A forged ticket may name any number."""
    await store.append(admission_entry("run"))
    assert (await store.journal("run", upto=0)).events
    with pytest.raises(NotFound):
        await store.journal("absent", upto=0)


async def test_a_run_ends_once(opener: Opener) -> None:
    async with opener() as first_store, opener() as second_store:
        await first_store.append(admission_entry("run"))
        ends = [Entry("run", 9.0, (Raw(kind, {}),), epoch=1) for kind in TERMINAL for _ in range(4)]
        answers = await gather_outcomes(
            store.append(end) for store, end in zip([first_store, second_store] * len(ends), ends, strict=False)
        )
        (winner,) = [answer for answer in answers if isinstance(answer, AppendResult)]
        assert sum(isinstance(answer, RunEnded) for answer in answers) == len(ends) - 1
        row = await second_store.run("run")
        assert (row.state, row.ended_at, row.seq) == (TERMINAL[winner.events[0].kind], 9.0, 2)


async def test_after_the_end_only_an_outcome_is_taken(store: Store) -> None:
    await store.append(admission_entry("run"))
    await store.append(queue_entry("run"))
    claim = (await store.append(take("run", 0, "a"))).claim
    await store.append(Entry("run", 5.0, (Raw(Kind.CANCELLED, {}),), epoch=1))
    refused = (
        note("run", epoch=1),
        Entry("run", 6.0, outbox=(Outbox(1, "mini", "driver"),)),
        Entry("run", 6.0, hold=Amount(1, 1)),
        Entry("run", 6.0, (Raw(Kind.CALL_FINISHED, {}), Raw(Kind.STEP_DONE, {})), epoch=1),
    )
    for entry in refused:
        with pytest.raises(RunEnded):
            await store.append(entry)
    answer = await store.append(move_entry("run", "finish", claim))
    assert [event.kind for event in answer.events] == [Kind.CALL_FINISHED]
    assert (await store.run("run")).state == "cancelled"


async def test_one_entry_cannot_go_on_after_its_own_end(store: Store) -> None:
    await store.append(admission_entry("run"))
    for second in (Kind.SUCCEEDED, Kind.STEP_DONE):
        with pytest.raises(RunEnded):
            await store.append(Entry("run", 2.0, (Raw(Kind.FAILED, {}), Raw(second, {})), epoch=1))
    assert (await store.run("run")).ended_at is None


async def test_tickets_that_nobody_took_die_with_the_run(store: Store) -> None:
    await store.append(admission_entry("run"))
    await store.append(queue_entry("run", 0))
    await store.append(queue_entry("run", 1))
    await store.append(take("run", 0, "a"))
    await store.append(Entry("run", 5.0, (Raw(Kind.EXPIRED, {}),), epoch=1))
    assert await store.find_ticket("run", 1) is None
    assert await store.find_ticket("run", 0) is not None


# Money


async def test_racing_holds_never_pass_a_cap(opener: Opener) -> None:
    async with opener() as first_store, opener() as second_store:
        await first_store.append(admission_entry("run", cap=Amount(1000, 10**6)))
        holds = [Entry("run", 2.0, (Raw(Kind.CALL_INTENDED, {}),), epoch=1, hold=Amount(7, 1)) for _ in range(200)]
        answers = await gather_outcomes(
            store.append(hold) for store, hold in zip([first_store, second_store] * 100, holds, strict=True)
        )
        granted = sum(isinstance(answer, AppendResult) for answer in answers)
        assert granted == 1000 // 7
        assert sum(isinstance(answer, RunOverBudget) for answer in answers) == 200 - granted
        row = await first_store.run("run")
        assert (row.held, row.spent, row.seq) == (Amount(7 * granted, granted), Amount(), 1 + granted)


async def test_settling_gives_back_and_adds_the_true_cost(store: Store) -> None:
    await store.append(admission_entry("run"))
    await store.append(note("run", hold=Amount(600, 10)))
    with pytest.raises(RunOverBudget):
        await store.append(note("run", hold=Amount(401, 0)))
    with pytest.raises(RunOverBudget):
        await store.append(note("run", hold=Amount(0, 991)))
    await store.append(note("run", release=Amount(600, 10), spent=Amount(100, 5), hold=Amount(900, 995)))
    row = await store.run("run")
    assert (row.held, row.spent) == (Amount(900, 995), Amount(100, 5))
    # What a provider bills beyond the reservation is still recorded; only new holds are refused.
    await store.append(note("run", release=Amount(900, 995), spent=Amount(1500, 0)))
    assert (await store.run("run")).spent == Amount(1600, 5)
    with pytest.raises(ValueError, match="released"):
        await store.append(note("run", release=Amount(1, 0)))


# Batches


async def test_a_refused_entry_fails_alone(store: Store) -> None:
    await asyncio.gather(*(store.append(admission_entry(f"run-{n}")) for n in range(8)))
    entries = [note(f"run-{n}", epoch=1) for n in range(8)]
    entries[2] = note("run-2", epoch=9)
    entries[4] = note("run-4", hold=Amount(10**6, 0))
    entries[6] = note("none")
    answers = await gather_outcomes(map(store.append, entries))
    kinds = [type(answer) for answer in answers]
    good = AppendResult
    assert kinds == [good, good, LeaseLost, good, RunOverBudget, good, NotFound, good]
    assert {(await store.run(f"run-{n}")).seq for n in (2, 4)} == {1}


async def test_a_refused_entry_leaves_nothing_behind(store: Store) -> None:
    await store.append(admission_entry("run"))
    before = await store.run("run")
    ref = content_ref(SALT, b"text")
    with pytest.raises(LeaseLost):
        await store.append(
            note(
                "run",
                epoch=9,
                spent=Amount(5, 5),
                contents=((ref, b"text"),),
                outbox=(Outbox(0, "mini", "driver"),),
                row=Projection(state="running"),
                tags=(("worker", "a"),),
            )
        )
    assert await store.run("run") == before
    assert await store.contents("run", [ref]) == {}
    assert await store.find_ticket("run", 0) is None
    assert await store.runs(RunQuery(tags=(("worker", "a"),))) == ()


async def test_an_entry_that_the_database_does_not_take_fails_alone(store: Store) -> None:
    await store.append(admission_entry("run"))
    poison = admission_entry("bad", cap=Amount(2**70, 0))
    answers = await gather_outcomes(map(store.append, (note("run"), poison, note("run"))))
    assert [type(answer) for answer in answers] == [AppendResult, StoreUnavailable, AppendResult]
    assert (await store.run("run")).seq == 3


async def test_a_caller_who_goes_away_disturbs_nobody(store: Store) -> None:
    await store.append(admission_entry("run"))
    calls = [asyncio.create_task(store.append(note("run"))) for _ in range(20)]
    await asyncio.sleep(0)
    for call in calls[::2]:
        call.cancel()
    answers = await gather_outcomes(calls)
    assert all(isinstance(answer, AppendResult) for answer in answers[1::2])
    assert (await store.run("run")).seq == len((await store.journal("run")).events)


async def test_a_full_queue_refuses_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    await store.append(admission_entry("run"))
    monkeypatch.setattr(group_commit, "MOST_WAITING", 10)
    answers = await gather_outcomes(store.append(note("run")) for _ in range(30))
    assert [type(answer) for answer in answers] == [AppendResult] * 10 + [StoreUnavailable] * 20


async def test_leaving_the_store_commits_what_waits(opener: Opener) -> None:
    async with opener() as store:
        await store.append(admission_entry("run"))
        calls = [asyncio.create_task(store.append(note("run"))) for _ in range(50)]
        await asyncio.sleep(0)
        await store.close()
        assert all(isinstance(answer, AppendResult) for answer in await gather_outcomes(calls))
        with pytest.raises(StoreUnavailable):
            await store.append(note("run"))
    async with opener() as store:
        assert (await store.run("run")).seq == 51


# Contents and the memory of recent journals


async def test_contents_are_stored_once_and_erased_with_their_salt(opener: Opener) -> None:
    text, image = b"hello", bytes(range(256)) * 500
    pairs = tuple((content_ref(SALT, body), body) for body in (text, image, text))
    async with opener() as store:
        await store.append(admission_entry("run"))
        await store.append(note("run", contents=pairs))
        await store.append(note("run", contents=pairs))
        assert await store.contents("run", [pairs[0][0], "none"]) == {pairs[0][0]: text}
    async with opener() as store:
        assert await store.contents("run", [ref for ref, _ in pairs]) == dict(pairs)
        assert not (await store.run("run")).erased
        assert await store.erase("run")
        assert (await store.run("run")).erased
        assert not await store.erase("none")
        assert await store.contents("run", [pairs[0][0]]) == {}
        journal = await store.journal("run")
        assert (journal.salt, len(journal.events)) == (b"", 3)


async def test_nothing_of_an_erased_run_comes_back(opener: Opener) -> None:
    """Neither what is written after the erasure, by a call that was in flight say, nor what another process had in its
    memory; events and money are written on."""
    early, late = ((content_ref(SALT, body), body) for body in (b"early", b"late"))
    async with opener() as store, opener() as other:
        await store.append(admission_entry("run"))
        await store.append(note("run", contents=(early,)))
        assert await other.erase("run")
        await store.append(note("run", contents=(late,)))
        assert (await other.run("run")).seq == 3
        assert await other.contents("run", [early[0], late[0]]) == {}
        assert (await store.journal("run")).salt == b""
        assert await store.contents("run", [early[0], late[0]]) == {}


async def test_what_is_read_of_a_body_in_memory_is_kept_with_it(opener: Opener) -> None:
    parsed: list[bytes] = []

    def length(body: bytes) -> int:
        parsed.append(body)
        return len(body)

    ref = content_ref(SALT, b"text")
    expected = {(ref, length), (ref, bytes.decode), ("none", length)}
    async with opener() as store, opener() as other:
        await store.append(replace(admission_entry("run"), contents=((ref, b"text"),)))
        cached_bytes = store._journals._bytes
        for _ in range(2):
            assert await store.records("run", expected) == {(ref, length): 4, (ref, bytes.decode): "text"}
        assert parsed == [b"text"]
        assert store._journals._bytes == cached_bytes + 2 * len(b"text")
        assert await other.records("run", expected) == await store.records("run", expected)
        assert await store.erase("run")
        assert await store.records("run", expected) == {}


async def test_runs_that_are_admitted_for_other_processes_take_no_memory(opener: Opener) -> None:
    """A gateway without an engine never writes the end of a run, with which a cached journal goes."""
    async with opener() as store:
        for run, driver in (("own", "d"), ("others", "")):
            entry = admission_entry(run)
            assert entry.new is not None
            await store.append(replace(entry, new=replace(entry.new, driver=driver)))
        assert list(store._journals._runs) == ["own"]
        assert (await store.journal("others")).events[0].seq == 1


async def test_an_erased_run_begins_no_turn(opener: Opener) -> None:
    """Even for whoever has all of it in memory. What goes on already goes on, to an end that says so."""
    async with opener() as store:
        await store.append(admission_entry("run"))
        assert await store.erase("run")
        with pytest.raises(NotFound):
            await store.append(Entry("run", 2.0, (Raw(Kind.RESUMED, {"turn": 1}),), epoch=1))
        await store.append(Entry("run", 2.0, (Raw(Kind.FAILED, {}),), epoch=1))


async def test_an_address_depends_on_the_salt() -> None:
    assert content_ref(b"a", b"text") != content_ref(b"b", b"text")
    assert content_ref(b"", b"") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


async def test_a_live_run_is_read_without_the_database(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opener() as store, opener() as other:
        ref = content_ref(SALT, b"text")
        await store.append(replace(admission_entry("run"), contents=((ref, b"text"),)))
        await store.append(queue_entry("run"))
        fresh = await other.journal("run")
        with monkeypatch.context() as patch:
            patch.setattr(store, "_read", None)
            assert await store.journal("run", upto=2) == fresh
            assert (await store.journal("run", upto=2, after=1)).events == fresh.events[1:]
            assert await store.contents("run", [ref]) == {ref: b"text"}


async def test_a_prefix_from_memory_is_completed_from_the_database(opener: Opener) -> None:
    async with opener() as store, opener() as other:
        await store.append(admission_entry("run"))
        await other.append(note("run"))
        await store.append(note("run"))  # leaves a gap in what this process has seen
        assert [event.seq for event in (await store.journal("run", upto=3)).events] == [1, 2, 3]
        assert await store.journal("run") == await other.journal("run")
        await other.append(note("run"))
        assert [event.seq for event in (await store.journal("run", after=2)).events] == [3, 4]


async def test_an_ended_run_is_read_from_the_database(opener: Opener) -> None:
    async with opener() as store:
        appended: list[Event] = []
        for entry in (
            admission_entry("run"),
            note("run"),
            Entry("run", 3.0, (Raw(Kind.SUCCEEDED, {"usd": 1}),), epoch=1),
        ):
            appended += (await store.append(entry)).events
        assert (await store.journal("run", upto=3)).events == tuple(appended)


async def test_the_databases_clock_is_told_in_seconds_since_1970(store: Store) -> None:
    times = [await store.clock() for _ in range(2)]
    assert times == sorted(times)
    assert times[0] == pytest.approx(time.time(), abs=30.0), "the test's database is on this machine"
