"""Every promise of the store seam about lists of runs and figures of a period; both databases."""

from msgspec.structs import replace
from sqlalchemy import insert

from app.core.rating.feedback import Feedback
from app.core.run.events import Kind
from app.store.protocol import EjectedWorker, Period, Projection, RatingFilter, RunDetails, RunQuery
from app.store.sql import SqlStore
from app.store.sqlkit.tables import DISCLOSURES
from tests.conformance.entries import admission_entry
from tests.harness.raw_facts import Raw

PERIOD = Period(tenant=None, since=0.0, until=100.0, buckets=4, most_runs=100, most_calls=100)
SENT = {
    "provider": "p",
    "model": "m",
    "region": "",
    "key": "k",
    "saw_user": True,
    "saw_steps": "",
    "saw_results": False,
    "unseen": "",
    "planned_by": "fixed",
    "attempt": 1,
    "bytes": 1,
}


async def fill(store: SqlStore) -> None:
    """Four runs of the tenant, one of which has failed, and one of another tenant."""
    for run, at, tenant in (("a", 1.0, "tenant"), ("b", 24.9, "tenant"), ("c", 25.0, "tenant"), ("d", 60.0, "tenant")):
        await store.append(admission_entry(run, at=at, tenant=tenant))
    await store.append(admission_entry("e", at=61.0, tenant="other"))
    body = {"step": None, "error": "timeout"}
    for run, kind, error in (("a", Kind.FAILED, "timeout"), ("b", Kind.SUCCEEDED, None)):
        called = Raw(Kind.CALL_FINISHED, {"call": "x", "n": 0, "first": 0.5})
        opened = Raw(Kind.PLAN_OPENED, {"ejected": {"w": "failing"}} if run == "a" else {})
        row = Projection(state=kind.value.removeprefix("run."), error=error, topology="single", steps=1)
        ended = replace(
            admission_entry(run, at=30.0), new=None, epoch=1, row=row, events=(opened, called, Raw(kind, body))
        )
        await store.append(ended)
    calls = [
        ("a", "w", "error", 10, 0, "worker"),
        ("b", "w", "ok", 20, 5, "worker"),
        ("b", "v", None, None, None, "conductor"),
    ]
    rows = []
    for number, (run, recipient, outcome, input_tokens, written, kind) in enumerate(calls):
        tokens = {"outcome": outcome, "input_tokens": input_tokens, "output_tokens": written}
        call_fields = {
            "run": run,
            "call": f"c{number}",
            "at": 20.0,
            "kind": kind,
            "recipient": recipient,
            "tenant": "tenant",
        }
        rows.append({**SENT, **call_fields, **tokens})
    await store._write(lambda conn: conn.execute(insert(DISCLOSURES), rows))
    await store.rate(Feedback("fb_1", "b", "tenant", "key", 40.0, "explicit", "user", "1", 1.0))


async def test_runs_are_counted_up_to_a_bound(store: SqlStore) -> None:
    await fill(store)
    assert await store.lists.count(RunQuery(), 10) == 5
    assert await store.lists.count(RunQuery(), 3) == 3
    assert await store.lists.count(RunQuery(error="timeout", limit=1), 10) == 1
    assert await store.of_tenant("other").lists.count(RunQuery(tenant="other"), 10) == 1
    await store.rate(Feedback("fb_2", "a", "tenant", "key", 41.0, "explicit", "user", "1", 0.0))
    await store.rate(Feedback("fb_3", "a", "tenant", "key", 50.0, "explicit", "user", "1", 1.0))
    for rated, runs in (
        (RatingFilter(good=True), ["b", "a"]),
        (RatingFilter(good=False), []),
        (RatingFilter(good=False, until=50.0), ["a"]),
        (RatingFilter(good=True, since=40.5), ["a"]),
    ):
        assert [row.id for row in await store.runs(RunQuery(rated=rated))] == runs


async def test_the_workers_of_a_run_are_those_that_were_sent_a_step(store: SqlStore) -> None:
    await fill(store)
    assert await store.lists.details(["b", "c", "gone"]) == {"b": RunDetails(("w",)), "c": RunDetails()}
    assert await store.of_tenant("other").lists.details([]) == {}


async def test_the_mark_changes_with_each_admission_event_and_end(store: SqlStore) -> None:
    marks = [await store.lists.mark()]
    await store.append(admission_entry("a", at=1.0))
    marks.append(await store.lists.mark())
    await store.append(replace(admission_entry("a", at=2.0), new=None, events=(Raw(Kind.CANCEL_ASKED, {}),)))
    marks.append(await store.lists.mark())
    ended = Raw(Kind.CANCELLED, {"step": None, "error": "cancelled"})
    await store.append(replace(admission_entry("a", at=3.0), new=None, epoch=1, events=(ended,)))
    marks.append(await store.lists.mark())
    assert len(set(marks)) == 4
    assert await store.lists.mark() == marks[-1]


async def test_figures_are_of_a_tenants_runs_in_the_period(store: SqlStore) -> None:
    await fill(store)
    figures = await store.of_tenant("tenant").lists.figures(replace(PERIOD, tenant="tenant"))
    runs_by_group = {(group.bucket, group.state, group.error): group.runs for group in figures.groups}
    assert runs_by_group == {
        (0, "failed", "timeout"): 1,
        (0, "succeeded", None): 1,
        (1, "admitted", None): 1,
        (2, "admitted", None): 1,
    }
    assert figures.seconds == ((0, "mini", 30.0 - 24.9),)
    assert sorted((call.recipient, call.outcome or "", call.calls, call.input_tokens) for call in figures.calls) == [
        ("v", "", 1, 0),
        ("w", "error", 1, 10),
        ("w", "ok", 1, 20),
    ]
    assert (figures.ratings, figures.first_seconds, figures.first_runs) == ((("w", 1, 1),), (0.5, 0.5), 4)
    assert figures.open == (("admitted", 2, 25.0),)
    assert figures.ejected == (EjectedWorker("w", "failing", "a", 30.0),)
    assert (figures.since, figures.calls_since) == (0.0, 0.0)
    everything = await store.lists.figures(PERIOD)
    assert sum(group.runs for group in everything.groups) == 5


async def test_of_too_many_runs_the_newest_are_read(store: SqlStore) -> None:
    await fill(store)
    figures = await store.lists.figures(replace(PERIOD, most_runs=2, most_calls=1))
    assert (figures.since, sum(group.runs for group in figures.groups), figures.calls_since) == (60.0, 2, 20.0)
