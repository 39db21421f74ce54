"""Every promise of the store seam about ratings; both databases."""

from collections.abc import Iterable

import pytest
from msgspec.structs import replace

from app.core.rating.evidence import PolicyState
from app.core.rating.feedback import Feedback
from app.core.run.events import Event, Kind
from app.errors import Conflict, NotFound
from app.store.protocol import Entry, Store
from app.store.rows.feedback import MOST
from tests.conformance.entries import admission_entry
from tests.harness.raw_facts import Raw

GOOD = Feedback("fb_1", "run", "tenant", "key", 5.0, "explicit", "user", "1", 0.25, "too_long", "It rambles.")


async def test_a_rating_is_kept_as_it_is(store: Store) -> None:
    await store.append(admission_entry("run"))
    bare = Feedback("fb_2", "run", "tenant", "", 4.0, "implicit", "abandoned", "signs-1", label="abandoned")
    for rating in (GOOD, bare):
        assert await store.rate(rating) == rating
    assert await store.feedback("run") == (bare, GOOD)
    assert await store.feedback("other") == ()


async def test_of_two_with_one_id_the_first_counts(store: Store) -> None:
    await store.append(admission_entry("run"))
    await store.rate(GOOD)
    assert await store.rate(replace(GOOD, at=9.0, score=1.0)) == GOOD
    assert await store.feedback("run") == (GOOD,)


async def test_a_run_that_is_not_there_is_not_rated(store: Store) -> None:
    with pytest.raises(NotFound):
        await store.rate(GOOD)


async def test_ratings_come_in_order_behind_the_last_one(store: Store) -> None:
    for run in ("a", "b"):
        await store.append(admission_entry(run))
    ratings = [replace(GOOD, id=f"fb_{n}", run="ab"[n % 2], at=float(n // 2)) for n in range(6)]
    for rating in reversed(ratings):
        await store.rate(rating)
    assert await store.feedback_after((0.0, ""), 4) == tuple(ratings[:4])
    assert await store.feedback_after((ratings[3].at, ratings[3].id), 4) == tuple(ratings[4:])
    assert await store.feedback_after((ratings[5].at, ratings[5].id), 4) == ()


@pytest.mark.long
async def test_a_run_is_not_rated_for_ever(store: Store) -> None:
    await store.append(admission_entry("run"))
    for n in range(MOST):
        await store.rate(replace(GOOD, id=f"fb_{n}"))
    with pytest.raises(Conflict):
        await store.rate(replace(GOOD, id="fb_more"))
    assert (await store.rate(replace(GOOD, id="fb_7"))).id == "fb_7", "what is there is found"


async def test_comments_are_erased_with_the_content(store: Store) -> None:
    for run in ("run", "other"):
        await store.append(admission_entry(run))
        await store.rate(replace(GOOD, id=f"fb_{run}", run=run))
    await store.erase("run")
    assert [rating.comment for rating in await store.feedback("run")] == [""]
    assert [rating.comment for rating in await store.feedback("other")] == [GOOD.comment]
    with pytest.raises(Conflict) as refused:
        await store.rate(replace(GOOD, id="fb_later"))
    assert refused.value.public_code == "content_erased"
    later = replace(GOOD, id="fb_later", comment="")
    assert await store.rate(later) == later, "without a comment it is kept"


async def test_what_was_learned_is_replaced_by_whoever_has_read_it(store: Store) -> None:
    assert await store.find_learned_state("policy", 0) is None
    first, second, rival = PolicyState(1, b"one"), PolicyState(2, b"two"), PolicyState(2, b"too")
    assert await store.learn("policy", first, 1.0)
    assert not await store.learn("policy", PolicyState(1, b"uno"), 1.0)
    assert await store.learn("policy", second, 2.0)
    assert not await store.learn("policy", rival, 2.0)
    assert not await store.learn("policy", PolicyState(4, b"four"), 3.0)
    assert await store.find_learned_state("policy", 1) == second
    assert await store.find_learned_state("policy", 2) is None
    assert await store.find_learned_state("other", 0) is None
    assert await store.learn("policy", PolicyState(3, b"three"), 3.0, {"policy/acme": b"own"})
    assert not await store.learn("policy", PolicyState(3, b"trois"), 3.0, {"policy/acme": b"lost"})
    assert await store.find_learned_state("policy/acme", 0) == PolicyState(3, b"own")
    assert await store.learn("policy", PolicyState(4, b"four"), 3.0, {"policy/acme": b"next"})
    assert await store.find_learned_state("policy/acme", 3) == PolicyState(4, b"next")


def _kinds(events: Iterable[Event]) -> list[Kind]:
    return [event.kind for event in events]


async def test_rated_runs_come_with_what_was_asked_of_them(store: Store) -> None:
    opened = Raw(Kind.PLAN_OPENED, {"looked_at": "ref"})
    await store.append(admission_entry("run"))
    await store.append(Entry("run", 2.0, (opened,), epoch=1, contents=(("ref", b"seen"), ("other", b"unseen"))))
    await store.append(admission_entry("erased"))
    ratings = [
        GOOD,
        replace(GOOD, id="fb_2", source="other", at=6.0),
        replace(GOOD, id="fb_3", run="erased"),
    ]
    for rating in ratings:
        await store.rate(rating)
    rated_runs = await store.find_rated_runs(
        ratings, (Kind.PLAN_OPENED,), lambda plans: plans[0].body["looked_at"] if plans else ""
    )
    assert [rated.rating for rated in rated_runs] == ratings
    assert [rated.seen for rated in rated_runs] == [b"seen", b"seen", None]
    assert set(rated_runs[0].given) == set(ratings[:2])
    assert [_kinds(rated.events) for rated in rated_runs] == [[Kind.PLAN_OPENED], [Kind.PLAN_OPENED], []]
    assert not rated_runs[0].answered, "it has not ended"
