"""Every promise of the store seam to callers of one tenant about their writes; both databases."""

import pytest
from msgspec.structs import replace

from app.core.rating.feedback import Feedback
from app.core.run.events import Kind
from app.errors import BatonError, NotFound
from app.store.protocol import METADATA_TAG, USER_TAG, AppendResult, Entry, RunQuery, Store, metadata_tag
from tests.conformance.entries import admission_entry, gather_outcomes, note
from tests.harness.raw_facts import Raw

OURS, THEIRS = "tenant", "other tenant"
RATING = Feedback("fb_1", "run", OURS, "key", 5.0, "explicit", "user", "1", 0.25)


def next_turn(run: str, seq: int) -> Entry:
    """An event of the run's present driver, by which rows that are cached may be written."""
    return Entry(run, 2.0, (Raw(Kind.STEP_SKIPPED, {}),), epoch=1, seq=seq)


async def test_a_tenant_writes_to_its_own_runs(store: Store) -> None:
    await store.append(admission_entry("run"))
    ours = store.of_tenant(OURS)
    assert (await ours.append(note("run"))).events[0].seq == 2
    assert (await ours.append(next_turn("run", 2))).events[0].seq == 3
    assert await ours.rate(RATING) == RATING
    assert await ours.erase("run")


@pytest.mark.parametrize("entry", [note("run"), next_turn("run", 1)], ids=["a wish", "a turn on cached rows"])
async def test_nothing_is_written_to_a_run_of_another_tenant(store: Store, entry: Entry) -> None:
    await store.append(admission_entry("run"))
    with pytest.raises(NotFound):
        await store.of_tenant(THEIRS).append(entry)
    assert (await store.run("run")).seq == 1
    assert len((await store.journal("run")).events) == 1


async def test_a_foreign_write_does_not_fail_the_others_of_its_batch(store: Store) -> None:
    for run in ("a", "b", "run"):
        await store.append(admission_entry(run))
    ours, theirs = store.of_tenant(OURS), store.of_tenant(THEIRS)
    first, foreign, last = await gather_outcomes(
        [ours.append(note("a")), theirs.append(note("run")), ours.append(note("b"))]
    )
    assert [type(outcome) for outcome in (first, foreign, last)] == [AppendResult, NotFound, AppendResult]
    assert [(await store.run(run)).seq for run in ("a", "run", "b")] == [2, 1, 2]


async def test_a_run_of_another_tenant_is_neither_rated_nor_erased(store: Store) -> None:
    await store.append(admission_entry("run"))
    theirs = store.of_tenant(THEIRS)
    with pytest.raises(NotFound):
        await theirs.rate(RATING)
    assert not await theirs.erase("run")
    assert await store.feedback("run") == ()
    assert not (await store.run("run")).erased


async def test_a_run_that_is_not_there_is_as_absent_as_a_foreign_one(store: Store) -> None:
    await store.append(admission_entry("run"))
    refused = await gather_outcomes([store.of_tenant(THEIRS).append(note(run)) for run in ("run", "none")])
    assert [type(error) for error in refused] == [NotFound, NotFound]
    assert len({str(error) for error in refused if isinstance(error, BatonError)}) == 1


async def test_a_report_reads_the_runs_of_its_tenant_with_all_that_belongs_to_them(store: Store) -> None:
    tags = ((USER_TAG, "ann"), (METADATA_TAG, metadata_tag("team", "search")), ("label", "phi"))
    for run, tenant in (("a", OURS), ("b", THEIRS), ("c", OURS)):
        await store.append(replace(admission_entry(run, tenant=tenant), tags=tags))
        await store.append(next_turn(run, 1))
        await store.rate(replace(RATING, id=f"fb_{run}", run=run, tenant=tenant, comment="not for reports"))
    query = RunQuery(ascending=True)
    assert [run.id for run in await store.journaled_runs(query)] == ["a", "b", "c"]
    journaled = await store.of_tenant(OURS).journaled_runs(replace(query, tenant=THEIRS))
    assert [run.id for run in journaled] == ["a", "c"]
    first = journaled[0]
    assert ([event.seq for event in first.events], first.ended) == ([1], False)
    assert (first.users, first.metadata) == (("ann",), ("team=search",))
    assert first.ratings == (replace(RATING, id="fb_a", run="a"),)
