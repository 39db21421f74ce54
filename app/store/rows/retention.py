"""Rows of runs whose content is to be erased, or which are to be deleted as a whole (*pruned*), in short
transactions."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Any, TypeVar

import orjson
from sqlalchemy import (
    ColumnElement,
    Connection,
    and_,
    bindparam,
    delete,
    exists,
    func,
    insert,
    select,
    true,
    tuple_,
    union,
    update,
)

from app.core.run.events import Kind
from app.core.run.identifiers import Trace
from app.core.run.notices import approval_notice_name
from app.core.run.retention_classes import RunClass
from app.errors import NotFound
from app.store.protocol import (
    APPROVAL_TAG,
    ASKED,
    FIRST_REVISION,
    PLAN_TAG,
    PROCESS,
    REQUEST_TAG,
    SHOWN_ONCE,
    TRACE_TAG,
    Actor,
    ContentPage,
    ContentQuery,
    PrunedRun,
    PruneQuery,
)
from app.store.rows import content, end_users, holds, texts
from app.store.rows.admin_events import note_prunings
from app.store.rows.runs import clock, run_row
from app.store.sqlkit.sealing import Decrypt
from app.store.sqlkit.statements import Statements
from app.store.sqlkit.tables import (
    CONTENTS,
    DISCLOSURES,
    EVENTS,
    FEEDBACK,
    HOLDS,
    LOG_LEAVES,
    NOTICES,
    PRUNED_RUNS,
    RUNS,
    SHARED_CONTENTS,
    TAGS,
    TICKETS,
)

T = TypeVar("T")

ERASED_BYTES = 4 * 2**20
"""Most bytes of content that one transaction erases, unless a single run has more."""
ERASED_RUNS = 50
"""Most runs whose content one transaction erases: writers of other runs wait for it on SQLite."""
PRUNED_EVENTS = 500
"""Most events that one transaction deletes, unless a single run has more: all writers wait for it on SQLite."""
PRUNED_EVENTS_POSTGRES = 2_000
"""Most events that one transaction deletes on Postgres, where no writer of other runs waits for it."""

TAGGED = (Kind.ADMITTED, Kind.RESUMED, Kind.STEP_RESULTS, Kind.PLAN_STEP, Kind.AWAITING_APPROVAL)
"""The kinds of events that give a run its tags."""


def page(
    conn: Connection, query: ContentQuery, after: tuple[float, str] | None, limit: int, decrypt: Decrypt
) -> ContentPage:
    """Return the next runs that still have their content, the oldest first.

    The limit counts rows that are read, so that a page takes a bounded time where millions were erased already.
    """
    where: list[ColumnElement[bool]] = []
    if query.tenant is not None:
        where.append(RUNS.c.tenant == query.tenant)
    if query.before is not None:
        where.append(RUNS.c.created_at < query.before)
    if after is not None:
        where.append(tuple_(RUNS.c.created_at, RUNS.c.id) > tuple_(*after))
    oldest_first = select(RUNS).where(*where).order_by(RUNS.c.created_at, RUNS.c.id).limit(limit)
    rows = [run_row(row) for row in conn.execute(oldest_first)]
    following = (rows[-1].created_at, rows[-1].id) if len(rows) == limit else None
    has_only_ended = all(row.ended_at is not None for row in rows)
    rows = [row for row in rows if not row.erased]
    if rows and (query.within is not None or query.without):
        among = select(RUNS.c.id).where(RUNS.c.id.in_([row.id for row in rows]), *_of_class(query))
        ids_of_class = set(conn.execute(among).scalars())
        rows = [row for row in rows if row.id in ids_of_class]
    if query.user is not None:
        theirs = end_users.of_runs(conn, [query.user], [row.id for row in rows], decrypt)
        rows = [row for row in rows if row.id in theirs]
    return ContentPage(tuple(rows), has_only_ended, following)


def _of_class(query: ContentQuery | PruneQuery) -> list[ColumnElement[bool]]:
    """Return the conditions for a run of the class that a query names, and of none of the others."""
    conditions = [~_matches(run_class) for run_class in query.without]
    if query.within is not None:
        conditions.append(_matches(query.within))
    return conditions


def _matches(run_class: RunClass) -> ColumnElement[bool]:
    """Return the condition for a run of a class. The tag of a label is found by its key."""
    conditions: list[ColumnElement[bool]] = [true()]
    if run_class.tenant is not None:
        conditions.append(RUNS.c.tenant == run_class.tenant)
    if run_class.tier is not None:
        conditions.append(RUNS.c.tier == run_class.tier)
    if run_class.label is not None:
        tag = TAGS.c.name == "label", TAGS.c.value == run_class.label, TAGS.c.run == RUNS.c.id
        conditions.append(exists(select(TAGS.c.run).where(*tag).correlate(RUNS)))
    return and_(*conditions)


def find_with_ref(conn: Connection, ref: str) -> list[str]:
    """Return the runs that have a content of this ref. No index leads to it, so the index of all contents is read."""
    queries = [select(table.c.run).where(table.c.ref == ref) for table in (CONTENTS, SHARED_CONTENTS)]
    return sorted(conn.execute(union(*queries)).scalars())


def find_with_text(conn: Connection, runs: Sequence[str], text: bytes, decrypt: Decrypt) -> list[str]:
    """Return the runs among these that have this text. Raises `UnknownKeys`."""
    quoted = orjson.dumps(text.decode("utf-8", "replace"))
    matches = []
    for run, bodies in content.of_runs(conn, runs, decrypt).items():
        if any(body == text or quoted in body for body in bodies.values()):
            matches.append(run)
    return matches


def groups(conn: Connection, runs: Sequence[str]) -> list[list[str]]:
    """Return these runs in groups, each of which one short transaction can erase."""
    sizes = content.sizes(conn, runs)
    return list(_split(sorted(runs), lambda run: sizes.get(run, 0), ERASED_BYTES, ERASED_RUNS))


def _split(items: Iterable[T], size_of: Callable[[T], int], most: int, most_items: float = inf) -> Iterator[list[T]]:
    """Yield these items in groups of at most that size and number; an item that is larger is a group of its own."""
    group: list[T] = []
    group_size = 0
    for item in items:
        size = size_of(item)
        if group and (len(group) >= most_items or group_size + size > most):
            yield group
            group, group_size = [], 0
        group.append(item)
        group_size += size
    if group:
        yield group


def prunable(query: PruneQuery) -> tuple[ColumnElement[bool], ...]:
    """Return the conditions for a run that may be pruned. The first one has it found along the index of times.

    All events of the run must be sealed: what was never sealed, and is deleted, could be denied by whoever deletes it.
    A run that gets another event after it was found has another revision, so it is not pruned.
    """
    row = RUNS.c
    has_ended = (row.ended_at < query.ended_before, row.deadline < query.deadline_before)
    is_on_hold: ColumnElement[bool] = exists(select(HOLDS.c.id).where(holds.covers()).correlate(RUNS))
    if not query.on_hold:
        is_on_hold = ~is_on_hold
    entry = LOG_LEAVES.c
    its_entries = (entry.subject == row.id, entry.kind == "run")
    sealed_events = select(func.coalesce(func.max(entry.events), 0)).where(*its_entries).correlate(RUNS)
    is_sealed: ColumnElement[bool] = sealed_events.scalar_subquery() == row.seq
    if query.unsealed:
        is_sealed = ~is_sealed
    return row.created_at < query.ended_before, *has_ended, is_on_hold, *_of_class(query), is_sealed


def pruning_groups(runs: Sequence[tuple[PrunedRun, int]], most: int) -> Iterator[list[tuple[PrunedRun, int]]]:
    """Return these runs in groups of at most that many events, each of which one short transaction can prune."""
    return _split(runs, lambda run: run[0].events, most)


def prune(
    conn: Connection, statements: Statements, runs: Sequence[tuple[PrunedRun, int]], decrypt: Decrypt, by: Actor
) -> list[str]:
    """Replace all rows of these runs by one row each, except for runs that are open, have another revision, or are
    covered by a legal hold.

    Returns the runs that were pruned. Their rows are locked in the order of their ids.
    """
    holds.lock(conn)
    statements.plan_by_key(conn)
    hold_of_run = holds.find_by_run(conn, [run.id for run, _ in runs], decrypt)
    pruned_rows = {}
    revisions = {}
    for run, revision in runs:
        if run.id not in hold_of_run:
            pruned_rows[run.id] = run
            revisions[run.id] = revision
    owners = texts.lock_owners(conn, list(revisions))
    query = select(RUNS.c.id, RUNS.c.revision).where(statements.among(RUNS.c.id), RUNS.c.ended_at.is_not(None))
    rows = conn.execute(query.order_by(RUNS.c.id).with_for_update(), {"ids": statements.values(list(revisions))}).all()
    names = [row.id for row in rows if row.revision == revisions[row.id]]
    if not names:
        return []
    ids = {"ids": statements.values(names)}
    pruned_at = clock(conn)
    conn.execute(insert(PRUNED_RUNS), [_row(pruned_rows[name]) | {"pruned_at": pruned_at} for name in names])
    if by != PROCESS:
        note_prunings(conn, {name: pruned_rows[name].tenant for name in names}, by)
    _delete_tags(conn, statements, ids)
    content.delete_bodies(conn, names, owners)
    # Their entries in the transparency log stay, and prove nothing about the rows any more.
    conn.execute(update(LOG_LEAVES).where(statements.among(LOG_LEAVES.c.subject)).values(salt=None, frontier=None), ids)
    for table in (EVENTS, DISCLOSURES, TICKETS, FEEDBACK):
        conn.execute(delete(table).where(statements.among(table.c.run)), ids)
    subjects = [*names, *map(approval_notice_name, names)]
    notices_of_runs = delete(NOTICES).where(statements.among(NOTICES.c.run))
    conn.execute(notices_of_runs, {"ids": statements.values(subjects)})
    conn.execute(delete(RUNS).where(statements.among(RUNS.c.id)), ids)
    return names


def _row(run: PrunedRun) -> dict[str, object]:
    return {column.name: getattr(run, column.name) for column in PRUNED_RUNS.columns}


def _delete_tags(conn: Connection, statements: Statements, ids: Mapping[str, object]) -> None:
    """Delete the tags of runs by their keys, which follow from the events: no index leads from a run to them."""
    query = select(EVENTS.c.run, EVENTS.c.kind, EVENTS.c.body)
    tagged = query.where(statements.among(EVENTS.c.run), EVENTS.c.kind.in_([kind.value for kind in TAGGED]))
    keys: set[tuple[str, str, str]] = set()
    for run, kind, body in conn.execute(tagged, ids):
        for name, value in _tags_of(kind, orjson.loads(body)):
            keys.add((name, value, run))
    conditions = [column == bindparam(f"its_{column.name}") for column in (TAGS.c.name, TAGS.c.value, TAGS.c.run)]
    if keys:
        values = [{"its_name": name, "its_value": value, "its_run": run} for name, value, run in sorted(keys)]
        conn.execute(delete(TAGS).where(*conditions), values)


def _tags_of(kind: str, body: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the names and values of the tags that an event of one of the kinds `TAGGED` gives its run."""
    if kind == Kind.PLAN_STEP.value:
        yield "worker", body["worker"]
        return
    if kind == Kind.AWAITING_APPROVAL.value:
        yield APPROVAL_TAG, ASKED
        return
    for label in (*body.get("labels", ()), *body.get("recorded_labels", ())):
        yield "label", label
    request = body.get("request_id")
    if request:
        yield REQUEST_TAG, request
    trace = Trace(body.get("traceparent", "")).id
    if trace:
        yield TRACE_TAG, trace
    if body.get("wire", {}).get("format") == "plan":
        yield PLAN_TAG, body.get("origin_run") or FIRST_REVISION
    elif body.get("preview"):
        yield PLAN_TAG, SHOWN_ONCE


def pruned_run(conn: Connection, name: str) -> PrunedRun:
    """Return the row that stays of a pruned run. Raises `NotFound`."""
    row = conn.execute(select(PRUNED_RUNS).where(PRUNED_RUNS.c.id == name)).one_or_none()
    if row is None:
        raise NotFound
    return PrunedRun(**row._mapping)
