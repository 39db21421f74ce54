"""Every promise of the store seam about notices: written with the end that they tell, taken by one; both databases."""

from typing import Any

import pytest
from msgspec.structs import replace

from app.core.run.events import TERMINAL, Kind
from app.core.run.notices import KEPT_FAILED_SECONDS, FailedNotice, Notice
from app.errors import LeaseLost, RunEnded
from app.store.protocol import AppendResult, Entry, Lease, Store
from tests.conformance.entries import Opener, admission_entry, gather_outcomes, note
from tests.harness.raw_facts import fact_from_json

TURN: dict[str, Any] = {"deadline": 9.0, "streams": False, "at": 1.0, "turn": 0, "until": 9.0}
"""The fields that the bodies of `run.awaiting_tool` and `run.resumed` must have."""


def admission_with_notice(run: str, at: float = 1.0) -> Entry:
    """The admission of a run whose end is to be told."""
    return replace(admission_entry(run, at), notify=True)


def event(run: str, kind: Kind, at: float = 5.0, *, epoch: int = 1, **fields: Any) -> Entry:
    return Entry(run, at, (fact_from_json(kind, TURN | fields.pop("body", {})),), epoch=epoch, **fields)


async def take_notices(store: Store, now: float = 10.0, until: float = 20.0, limit: int = 10) -> tuple[Notice, ...]:
    return await store.take_notices(now, until, limit)


@pytest.mark.parametrize("kind", sorted(TERMINAL))
async def test_the_end_of_a_run_becomes_a_notice(store: Store, kind: Kind) -> None:
    await store.append(admission_with_notice("run"))
    await store.append(note("run"))
    assert await take_notices(store) == ()
    await store.append(event("run", kind))
    words = {Kind.SUCCEEDED: "completed", Kind.CANCELLED: "cancelled"}
    assert await take_notices(store) == (Notice("run", 0, words.get(kind, "failed"), 5.0, tries=1),)


async def test_an_end_in_the_entry_of_its_admission_becomes_one_too(store: Store) -> None:
    whole = admission_with_notice("run")
    await store.append(replace(whole, events=(*whole.events, fact_from_json(Kind.SUCCEEDED, {"finish": "length"}))))
    assert await take_notices(store) == (Notice("run", 0, "incomplete", 1.0, tries=1),)


async def test_what_was_not_asked_for_is_not_told(store: Store) -> None:
    await store.append(admission_entry("run"))
    await store.append(event("run", Kind.SUCCEEDED))
    assert await take_notices(store) == ()


async def test_an_end_that_is_refused_tells_nothing(store: Store) -> None:
    await store.append(admission_with_notice("run"))
    answers = await gather_outcomes([store.append(event("run", Kind.SUCCEEDED, epoch=2))])
    assert isinstance(answers[0], LeaseLost)
    assert await take_notices(store) == ()
    await store.append(event("run", Kind.FAILED))
    answers = await gather_outcomes([store.append(event("run", Kind.SUCCEEDED))])
    assert isinstance(answers[0], RunEnded)
    assert [notice.word for notice in await take_notices(store)] == ["failed"]


async def test_each_turn_is_told_by_what_its_own_request_asked(store: Store) -> None:
    """Turn 0 and 2 are background turns, turn 1 has a caller; while a run waits nothing more is told of it."""
    lease = Lease("driver", 100.0, 500.0)
    await store.append(admission_with_notice("run"))
    await store.append(event("run", Kind.AWAITING, 2.0))
    resumed = event("run", Kind.RESUMED, 3.0, body={"turn": 1}, lease=lease)
    await store.append(resumed)
    await store.append(event("run", Kind.AWAITING, 4.0, epoch=2))
    await store.append(event("run", Kind.RESUMED, 5.0, epoch=2, body={"turn": 2}, lease=lease, notify=True))
    await store.append(event("run", Kind.AWAITING, 6.0, epoch=3))
    notices = await take_notices(store)
    assert notices == (Notice("run", 0, "completed", 2.0, 1), Notice("run", 2, "completed", 6.0, 1))
    assert [await store.close_notice(notice) for notice in notices] == [True, True]
    await store.append(event("run", Kind.EXPIRED, 7.0, epoch=3))
    assert await store.count_pending_notices(10) == 0


@pytest.mark.long
async def test_a_notice_is_taken_by_one_until_the_claim_lapses(opener: Opener) -> None:
    async with opener() as first_store, opener() as second_store:
        for n in range(20):
            await first_store.append(admission_with_notice(f"run-{n:02}"))
            await first_store.append(event(f"run-{n:02}", Kind.SUCCEEDED, 5.0))
        answers = await gather_outcomes(take_notices(store, limit=3) for store in [first_store, second_store] * 6)
        runs_of_notices = [notice.run for answer in answers for notice in answer]
        assert len(runs_of_notices) == len(set(runs_of_notices))
        while more := await take_notices(second_store, limit=3):  # what both looked at is left by one of them
            runs_of_notices += [notice.run for notice in more]
        assert sorted(runs_of_notices) == [f"run-{n:02}" for n in range(20)]
        assert await take_notices(first_store, now=19.9) == ()
        assert {notice.tries for notice in await take_notices(first_store, now=20.0, until=30.0)} == {2}


async def test_a_notice_is_closed_by_anybody_and_put_off_by_its_holder_only(store: Store) -> None:
    await store.append(admission_with_notice("run"))
    await store.append(event("run", Kind.SUCCEEDED))
    (first,) = await take_notices(store)
    assert await store.put_off_notice(first, 15.0)
    (second,) = await take_notices(store, now=15.0, until=25.0)
    assert second == replace(first, tries=2)
    assert not await store.put_off_notice(first, 0.0), "its claim has lapsed and another one's lasts"
    assert await take_notices(store, now=24.9) == ()
    assert await store.count_pending_notices(10) == 1
    assert await store.close_notice(first), "it was delivered after all"
    assert not await store.close_notice(second)
    assert not await store.put_off_notice(second, 0.0)
    assert (await take_notices(store, now=99.0), await store.count_pending_notices(10)) == ((), 0)


async def test_a_notice_that_is_given_up_is_kept_and_sent_again_when_asked_for(store: Store) -> None:
    await store.append(admission_with_notice("run"))
    await store.append(event("run", Kind.SUCCEEDED))
    (first,) = await take_notices(store)
    assert await store.fail_notice(first, 12.0, "HTTP 410")
    kept_until = 12.0 + KEPT_FAILED_SECONDS
    assert (await take_notices(store, now=kept_until - 1), await store.count_pending_notices(10)) == ((), 0)
    assert await store.failed_notices(10) == (FailedNotice(first, 12.0, "HTTP 410"),)
    assert not await store.put_off_notice(first, 13.0)
    assert await store.resend_notices([first, replace(first, run="other")], 20.0) == 1
    assert await store.failed_notices(10) == ()
    assert await take_notices(store, now=20.0, until=30.0) == (first,)
    assert await store.resend_notices([first], 21.0) == 0, "it is being tried"
    assert await store.fail_notice(first, 31.0, "timeout")
    assert await take_notices(store, now=31.0 + KEPT_FAILED_SECONDS) == ()
    assert await store.failed_notices(10) == (), "it was kept for long enough"


async def test_notices_that_were_given_up_are_forgotten_where_there_is_no_webhook_any_more(store: Store) -> None:
    await store.append(admission_with_notice("run"))
    await store.append(event("run", Kind.SUCCEEDED))
    (notice,) = await take_notices(store)
    assert await store.fail_notice(notice, 12.0, "HTTP 410")
    assert await store.forget_notices(12.0 + KEPT_FAILED_SECONDS, 10) == 0
    assert await store.forget_notices(13.0 + KEPT_FAILED_SECONDS, 10) == 1
    assert await store.failed_notices(10) == ()


async def test_pending_notices_are_counted_up_to_a_bound_and_old_ones_forgotten(store: Store) -> None:
    assert await store.forget_notices(99.0, 10) == 0
    answers = await gather_outcomes(store.append(admission_with_notice(f"run-{n}")) for n in range(5))
    assert all(isinstance(answer, AppendResult) for answer in answers)
    for n in range(5):
        await store.append(event(f"run-{n}", Kind.SUCCEEDED, float(n)))
    assert [await store.count_pending_notices(most) for most in (3, 10)] == [3, 5]
    await take_notices(store, now=0.0, until=50.0, limit=1)  # the first is being tried
    assert await store.forget_notices(3.0, 1) == 1
    assert await store.forget_notices(3.0, 10) == 1
    assert await store.count_pending_notices(10) == 3
