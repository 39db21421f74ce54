"""Rows of the ledger of disclosures: deriving them from the events of calls, reading them, and adding those of runs
from before the ledger."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any

import orjson
from msgspec.structs import replace
from sqlalchemy import ColumnElement, Connection, bindparam, func, insert, or_, select, tuple_, update

from app.core.run.events import CallFinished, CallIntended, Event, Fact, Kind
from app.core.run.recipients import EMBEDDING_TEMPLATE, RecipientKind, steps_seen_by_recipient
from app.errors import EventMalformed
from app.store.protocol import ERASED_TAGS, USER_TAG
from app.store.protocol.disclosures import (
    Disclosure,
    DisclosureQuery,
    EventCompleter,
    Place,
    RebuildBatch,
    SeenDataFilter,
)
from app.store.rows.runs import raise_revision
from app.store.rows.transparency_log import queue_runs
from app.store.sqlkit.statements import Row, RowWrites, Statements
from app.store.sqlkit.tables import CATALOGS, DISCLOSURES, EVENTS, RUNS, TAGS

LEDGER = DISCLOSURES.c
OUTCOME_COLUMNS = ("outcome", "input_tokens", "output_tokens")
CALLS = (Kind.CALL_INTENDED.value, Kind.CALL_FINISHED.value)
CallOutcome = tuple[str, int, int]
"""The outcome of a call, its input tokens and its output tokens."""
NO_OUTCOME: Row = (None, None, None)
"""The values of `OUTCOME_COLUMNS` in the row of a call that has not ended."""
REBUILD_SECONDS = 1.0
"""The time after which a batch of a rebuild takes no further run: well below the time that a transaction has, so that a
busy machine derives fewer rows in one transaction instead of none."""


def recipient_kind(fact: CallIntended) -> RecipientKind:
    """Return the kind of recipient that a call has."""
    if fact.origin == "shadow":
        return "shadow"
    if fact.n is not None:
        return "worker"
    if fact.template == EMBEDDING_TEMPLATE:
        return "embedder"
    return "conductor"


def intent_row(run: str, tenant: str, key: str, fact: CallIntended, at: float) -> Row:
    """Return all columns of a row, in table order, but for the outcome."""
    labels = orjson.dumps(sorted(fact.labels)).decode() if fact.labels else None
    saw_steps = numbers(steps_seen_by_recipient(fact)) if fact.access.steps else ""
    passed_over = orjson.dumps(fact.to_json()["passed_over"]).decode() if fact.passed_over else None
    return (
        run,
        fact.call,
        at,
        fact.n,
        recipient_kind(fact),
        fact.worker,
        fact.provider,
        fact.model,
        fact.region,
        tenant,
        key,
        labels,
        fact.access.user,
        saw_steps,
        fact.results,
        numbers(fact.unseen),
        fact.planned_by,
        fact.attempt,
        passed_over,
        fact.bytes,
    )


def outcome_values(fact: CallFinished) -> CallOutcome:
    """Return the columns that the outcome of a call gives a row."""
    return fact.outcome, fact.usage.input, fact.usage.output


def numbers(steps: Sequence[int]) -> str:
    """Return numbers of steps as the columns have them: between commas, so that each can be searched for."""
    if not steps:
        return ""
    return f",{','.join(map(str, sorted(steps)))},"


# -- writing


class DisclosureRows:
    """The rows that a batch of entries adds, and those that it completes.

    The intent of a call gives a row before anything is sent, and the outcome of the call completes that row. A call
    whose intent was written by a release without the ledger has no row; `baton disclosures rebuild` derives it.
    """

    def __init__(self) -> None:
        self._intents: dict[tuple[str, str], Row] = {}
        self._outcomes: dict[tuple[str, str], CallOutcome] = {}

    def note(self, run: str, tenant: str, key: str, facts: Sequence[Fact], at: float) -> None:
        """Note those of a run's new events that are the intent or the outcome of a call."""
        for fact in facts:
            if isinstance(fact, CallIntended) and fact.planned_by:
                self._intents[run, fact.call] = intent_row(run, tenant, key, fact, at)
            elif isinstance(fact, CallFinished):
                self._outcomes[run, fact.call] = outcome_values(fact)

    def writes(self, statements: Statements) -> tuple[RowWrites, ...]:
        """Return the rows to be written. No row is both added and completed: Postgres does both in one statement."""
        added: list[Row] = []
        for place, row in self._intents.items():
            added.append(row + self._outcomes.get(place, NO_OUTCOME))
        completed: list[Row] = []
        for place, outcome in self._outcomes.items():
            if place not in self._intents:
                completed.append((*outcome, *place))
        return (statements.insert_disclosure, added), (statements.complete_disclosure, completed)


# -- reading


def page(conn: Connection, query: DisclosureQuery, tenant: str | None = None) -> tuple[Disclosure, ...]:
    """Return the rows that a query chooses, in its order; those of this tenant alone, if one is given."""
    if tenant is not None:
        query = replace(query, tenants=(tenant,))
    order: tuple[ColumnElement[Any], ...] = (LEDGER.at.desc(), LEDGER.call.desc())
    if query.ascending:
        order = (LEDGER.at, LEDGER.call)
    statement = select(DISCLOSURES).where(*_filters(conn, query)).order_by(*order).limit(query.limit)
    rows = conn.execute(statement).all()
    users = _users(conn, sorted({row.run for row in rows}))
    return tuple([_disclosure(row, users.get(row.run)) for row in rows])


def _filters(conn: Connection, query: DisclosureQuery) -> list[ColumnElement[bool]]:
    """Return the conditions on the rows that a query chooses."""
    among: tuple[tuple[ColumnElement[str], Sequence[str]], ...] = (
        (LEDGER.recipient, query.recipients),
        (LEDGER.kind, query.kinds),
        (LEDGER.provider, query.providers),
        (LEDGER.tenant, query.tenants),
        (LEDGER.run, query.runs),
        (LEDGER.key, query.keys),
    )
    conditions: list[ColumnElement[bool]] = []
    for column, values in among:
        if len(values) == 1:  # compared by `=`, so that the rows of an index are in the order of the list
            conditions.append(column == values[0])
        elif values:
            conditions.append(column.in_(values))
    if query.users:
        runs_of_users = select(TAGS.c.run).where(TAGS.c.name == USER_TAG, TAGS.c.value.in_(query.users))
        conditions.append(LEDGER.run.in_(runs_of_users))
    if query.since is not None:
        conditions.append(LEDGER.at >= query.since)
    if query.until is not None:
        conditions.append(LEDGER.at < query.until)
    if not query.saw.is_any:
        conditions.append(_has_seen(conn, query.saw))
    if query.before is not None:
        place, last_place = tuple_(LEDGER.at, LEDGER.call), tuple_(*query.before)
        if query.ascending:
            conditions.append(place > last_place)
        else:
            conditions.append(place < last_place)
    return conditions


def _has_seen(conn: Connection, saw: SeenDataFilter) -> ColumnElement[bool]:
    """Return the condition for a row of a recipient that saw any of these."""
    search = func.strpos if conn.dialect.name == "postgresql" else func.instr
    conditions: list[ColumnElement[bool]] = []
    if saw.user:
        conditions.append(LEDGER.saw_user)
    if saw.results:
        conditions.append(LEDGER.saw_results)
    for n in saw.steps:
        conditions.append(search(LEDGER.saw_steps, f",{n},") > 0)
    has_label = [search(LEDGER.labels, orjson.dumps(label).decode()) > 0 for label in saw.labels]
    if has_label:
        conditions.append(LEDGER.labels.is_not(None) & or_(*has_label))
    return or_(*conditions)


def _users(conn: Connection, runs: Sequence[str]) -> Mapping[str, str]:
    """Return the end users whom the requests of these runs named; of two names of one, the first in order."""
    if not runs:
        return {}
    # The names are literals: a partial index is used only for a condition that the planner can see.
    of_callers = TAGS.c.name.in_(bindparam("of_callers", ERASED_TAGS, expanding=True, literal_execute=True))
    theirs = (TAGS.c.run.in_(runs), of_callers, TAGS.c.name == USER_TAG)
    names = select(TAGS.c.run, func.min(TAGS.c.value)).where(*theirs).group_by(TAGS.c.run)
    return {run: value for run, value in conn.execute(names)}


def _disclosure(row: Any, user: str | None) -> Disclosure:
    return Disclosure(
        run=row.run,
        call=row.call,
        at=row.at,
        step=row.step,
        kind=row.kind,
        recipient=row.recipient,
        provider=row.provider,
        model=row.model,
        region=row.region,
        tenant=row.tenant,
        key=row.key,
        user=user,
        labels=tuple(orjson.loads(row.labels)) if row.labels is not None else (),
        saw_user=bool(row.saw_user),
        saw_steps=_steps(row.saw_steps),
        saw_results=bool(row.saw_results),
        unseen=_steps(row.unseen),
        planned_by=row.planned_by,
        attempt=row.attempt,
        passed_over=_parse_passed_over(row.passed_over),
        bytes=row.bytes,
        outcome=row.outcome,
        input_tokens=row.input_tokens,
        output_tokens=row.output_tokens,
    )


def _steps(column: str) -> tuple[int, ...]:
    return tuple([int(n) for n in column.split(",") if n])


def _parse_passed_over(column: str | None) -> tuple[tuple[str, str], ...]:
    if column is None:
        return ()
    return tuple([(message["worker"], message["reason"]) for message in orjson.loads(column)])


# -- runs from before the ledger


def rebuild(conn: Connection, after: Place | None, limit: int, complete: EventCompleter) -> RebuildBatch:
    """Add the rows that calls of the next runs lack, and the outcomes that rows lack, until `REBUILD_SECONDS` are over.
    The runs are locked meanwhile."""
    ends_at = monotonic() + REBUILD_SECONDS
    query = select(RUNS.c.id, RUNS.c.created_at, RUNS.c.tenant, RUNS.c.key)
    if after is not None:
        query = query.where(tuple_(RUNS.c.created_at, RUNS.c.id) > tuple_(*after))
    runs = conn.execute(query.order_by(RUNS.c.created_at, RUNS.c.id).limit(limit)).all()
    incomplete_runs = _incomplete_runs(conn, [row.id for row in runs])
    added = 0
    damaged: tuple[str, ...] = ()
    for count, row in enumerate(runs, start=1):
        if row.id in incomplete_runs:
            try:
                added += _derive(conn, row.id, row.tenant, row.key, complete)
            except EventMalformed:
                damaged += (row.id,)
        if monotonic() >= ends_at:
            return RebuildBatch(count, added, (row.created_at, row.id), damaged)
    following = (runs[-1].created_at, runs[-1].id) if len(runs) == limit else None
    return RebuildBatch(len(runs), added, following, damaged)


def _incomplete_runs(conn: Connection, runs: Sequence[str]) -> set[str]:
    """Return the runs of which not each event of a call is in the ledger."""
    missing_counts: defaultdict[str, int] = defaultdict(int)
    events = select(EVENTS.c.run, func.count()).where(EVENTS.c.run.in_(runs), EVENTS.c.kind.in_(CALLS))
    for run, count in conn.execute(events.group_by(EVENTS.c.run)):
        missing_counts[run] = count
    ledger_rows = select(LEDGER.run, func.count() + func.count(LEDGER.outcome)).where(LEDGER.run.in_(runs))
    for run, count in conn.execute(ledger_rows.group_by(LEDGER.run)):
        missing_counts[run] -= count
    return {run for run, count in missing_counts.items() if count}


def _derive(conn: Connection, run: str, tenant: str, key: str, complete: EventCompleter) -> int:
    """Add what the ledger lacks of one run. Returns the number of rows that were added or completed. Raises
    `EventMalformed`, before anything is written."""
    conn.execute(select(RUNS.c.id).where(RUNS.c.id == run).with_for_update())
    events = _events(conn, run)
    rows = conn.execute(select(LEDGER.call, LEDGER.outcome).where(LEDGER.run == run))
    stored_outcomes = {row.call: row.outcome for row in rows}
    names = DISCLOSURES.columns.keys()
    new_rows: dict[str, dict[str, Any]] = {}
    completed = 0
    for event in list(complete(events, _snapshots(conn, events))):
        fact = event.fact
        if isinstance(fact, CallIntended) and fact.call not in stored_outcomes:
            row = intent_row(run, tenant, key, fact, event.at)
            new_rows[fact.call] = dict(zip(names, (*row, *NO_OUTCOME), strict=True))
        elif isinstance(fact, CallFinished):
            outcome = dict(zip(OUTCOME_COLUMNS, outcome_values(fact), strict=True))
            if fact.call in new_rows:
                new_rows[fact.call] |= outcome
            elif fact.call in stored_outcomes and stored_outcomes[fact.call] is None:
                conn.execute(update(DISCLOSURES).where(LEDGER.run == run, LEDGER.call == fact.call).values(outcome))
                completed += 1
    if new_rows:
        conn.execute(insert(DISCLOSURES), list(new_rows.values()))
    if new_rows or completed:
        raise_revision(conn, run)
        queue_runs(conn, [run])
    return completed + len(new_rows)


def _events(conn: Connection, run: str) -> list[Event]:
    """Return the journal of a run."""
    query = select(EVENTS.c.seq, EVENTS.c.kind, EVENTS.c.at, EVENTS.c.body).where(EVENTS.c.run == run)
    events = []
    for seq, kind, at, body in conn.execute(query.order_by(EVENTS.c.seq)):
        events.append(Event.stored(run, seq, kind, at, body))
    return events


def _snapshots(conn: Connection, events: Sequence[Event]) -> dict[str, bytes]:
    """Return the snapshots of the pools that calls of a run went by, as far as they are stored."""
    digests = set()
    for event in events:
        if event.kind is Kind.CALL_INTENDED and isinstance(event.fact, CallIntended):
            digests.add(event.fact.catalog)
    rows = conn.execute(select(CATALOGS.c.digest, CATALOGS.c.body).where(CATALOGS.c.digest.in_(sorted(digests))))
    return {digest: bytes(body) for digest, body in rows}
