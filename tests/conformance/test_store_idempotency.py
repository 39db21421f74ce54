"""Every promise of the store seam about requests that are carried out once, and about who may write; both databases."""

import pytest
from msgspec.structs import replace

from app.core.run.events import Kind
from app.core.run.kinds import WITHOUT_LEASE
from app.errors import Conflict, LeaseLost, RunEnded
from app.store.protocol import TAKEN, AppendResult, Entry, IdempotencyRecord, Store
from tests.conformance.entries import Opener, admission_entry, gather_outcomes, note
from tests.harness.raw_facts import Raw


def idempotency(name: str = "claim", until: float = 100.0, body: bytes = b"body") -> IdempotencyRecord:
    return IdempotencyRecord(name, body, until)


async def test_a_claim_is_made_with_its_run(store: Store) -> None:
    await store.append(replace(admission_entry("run"), once=idempotency()))
    assert await store.find_idempotency_record("claim", 99.9) == replace(idempotency(), run="run")
    assert await store.find_idempotency_record("other", 1.0) is None


@pytest.mark.parametrize("together", [False, True], ids=["one after the other", "in one batch"])
async def test_a_second_claim_admits_nothing(store: Store, together: bool) -> None:
    entries = [replace(admission_entry(f"run-{n}"), once=idempotency()) for n in range(4)]
    if together:
        answers = await gather_outcomes(map(store.append, entries))
    else:
        answers = [(await gather_outcomes([store.append(entry)]))[0] for entry in entries]
    assert [type(answer) for answer in answers] == [AppendResult, Conflict, Conflict, Conflict]
    assert {answer.public_code for answer in answers[1:]} == {TAKEN}
    assert await store.find_idempotency_record("claim", 1.0) == replace(idempotency(), run="run-0")
    answers = await gather_outcomes(store.run(f"run-{n}") for n in range(4))
    rows = [row for row in answers if not isinstance(row, Exception)]
    assert [row.id for row in rows] == ["run-0"]


async def test_of_two_processes_one_gets_the_claim(opener: Opener) -> None:
    async with opener() as first_store, opener() as second_store:
        for turn in range(10):
            entries = [replace(admission_entry(f"run-{turn}-{n}"), once=idempotency(f"claim-{turn}")) for n in range(8)]
            answers = await gather_outcomes(
                store.append(entry) for store, entry in zip([first_store, second_store] * 4, entries, strict=True)
            )
            assert sorted(type(answer).__name__ for answer in answers) == ["AppendResult"] + ["Conflict"] * 7
            (winner,) = [answer for answer in answers if isinstance(answer, AppendResult)]
            record = await second_store.find_idempotency_record(f"claim-{turn}", 1.0)
            assert record is not None
            assert record.run == winner.events[0].run


async def test_batches_that_claim_crosswise_do_not_block_each_other(opener: Opener) -> None:
    async with opener() as first_store, opener() as second_store:
        names = [f"claim-{n}" for n in range(12)]
        entries = [replace(admission_entry(f"a-{name}"), once=idempotency(name)) for name in names]
        entries += [replace(admission_entry(f"b-{name}"), once=idempotency(name)) for name in reversed(names)]
        answers = await gather_outcomes(
            store.append(entry) for store, entry in zip([first_store] * 12 + [second_store] * 12, entries, strict=True)
        )
        assert sum(isinstance(answer, AppendResult) for answer in answers) == 12
        assert sum(isinstance(answer, Conflict) for answer in answers) == 12


async def test_a_refused_entry_claims_nothing(store: Store) -> None:
    await store.append(admission_entry("run"))
    with pytest.raises(LeaseLost):
        await store.append(note("run", epoch=9, once=idempotency()))
    assert await store.find_idempotency_record("claim", 1.0) is None


async def test_a_claim_that_has_run_out_is_free(opener: Opener) -> None:
    async with opener() as first_store, opener() as second_store:
        await first_store.append(replace(admission_entry("old", at=1.0), once=idempotency(until=10.0)))
        assert await first_store.find_idempotency_record("claim", 10.0) is None
        entries = [
            replace(admission_entry(f"new-{n}", at=10.0), once=idempotency(until=20.0, body=b"new")) for n in range(6)
        ]
        answers = await gather_outcomes(
            store.append(entry) for store, entry in zip([first_store, second_store] * 3, entries, strict=True)
        )
        (winner,) = [answer for answer in answers if isinstance(answer, AppendResult)]
        assert sum(isinstance(answer, Conflict) for answer in answers) == 5
        assert await second_store.find_idempotency_record("claim", 10.0) == replace(
            idempotency(until=20.0, body=b"new"), run=winner.events[0].run
        )


async def test_a_reply_is_remembered_once(opener: Opener) -> None:
    async with opener() as first_store, opener() as second_store:
        replies = [replace(idempotency(), status=200, reply=b"%d" % n) for n in range(6)]
        replies_added = await gather_outcomes(
            store.add_idempotency_record(reply, 1.0)
            for store, reply in zip([first_store, second_store] * 3, replies, strict=True)
        )
        assert len(set(replies_added)) == 1
        assert replies_added[0] in replies
        assert await first_store.find_idempotency_record("claim", 1.0) == replies_added[0]
        later = replace(replies[0], until=300.0, reply=b"later")
        assert (
            await second_store.add_idempotency_record(later, 100.0)
            == later
            == await first_store.find_idempotency_record("claim", 100.0)
        )


async def test_a_leadership_is_prolonged_by_who_has_it_and_else_by_nobody(opener: Opener) -> None:
    def leader(name: str, until: float) -> IdempotencyRecord:
        return IdempotencyRecord("work", name.encode(), until)

    async with opener() as first_store, opener() as second_store:
        assert await first_store.acquire_leadership(leader("first", 6.0), 0.0)
        assert await first_store.acquire_leadership(leader("first", 11.0), 5.0)
        assert not await second_store.acquire_leadership(leader("second", 13.0), 7.0)
        assert await first_store.find_idempotency_record("work", 7.0) == leader("first", 11.0)
        assert await second_store.acquire_leadership(leader("second", 17.0), 11.0)
        assert not await first_store.acquire_leadership(leader("first", 18.0), 12.0)


async def test_claims_that_have_run_out_are_forgotten_in_batches(opener: Opener) -> None:
    async with opener() as first_store, opener() as second_store:
        for n in range(7):
            await first_store.add_idempotency_record(idempotency(f"claim-{n}", until=10.0 + n), 1.0)
        assert await first_store.forget_idempotency_records(9.9, 100) == 0
        assert await first_store.forget_idempotency_records(15.0, 4) == 4
        assert (
            sum(
                await gather_outcomes(
                    [first_store.forget_idempotency_records(15.0, 4), second_store.forget_idempotency_records(15.0, 4)]
                )
            )
            == 2
        )
        assert await first_store.forget_idempotency_records(15.0, 4) == 0
        assert await second_store.find_idempotency_record("claim-6", 1.0) == idempotency("claim-6", until=16.0)


async def test_whoever_holds_nothing_may_only_ask_for_the_end(store: Store) -> None:
    await store.append(admission_entry("run"))
    for kind in set(Kind) - WITHOUT_LEASE:
        with pytest.raises(LeaseLost):
            await store.append(Entry("run", 2.0, (Raw(Kind.CANCEL_ASKED, {}), Raw(kind, {}))))
    wish = await store.append(Entry("run", 2.0, (Raw(Kind.CANCEL_ASKED, {"by": "caller"}),)))
    assert [(event.seq, event.kind) for event in wish.events] == [(2, Kind.CANCEL_ASKED)]
    await store.append(Entry("run", 3.0, (Raw(Kind.CANCELLED, {}),), epoch=1))
    with pytest.raises(RunEnded):
        await store.append(Entry("run", 4.0, (Raw(Kind.CANCEL_ASKED, {"by": "caller"}),)))
