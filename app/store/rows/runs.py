"""Rows of runs and tickets: reading them, their cache, and the leases and claims on them, over a connection."""

from collections import defaultdict, namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import orjson
from msgspec import Struct
from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    and_,
    bindparam,
    case,
    exists,
    func,
    or_,
    select,
    text,
    tuple_,
    union_all,
    update,
)

from app.core.pool.catalog import Amount
from app.core.run.events import Event, Kind
from app.core.run.kinds import WAITING
from app.errors import EventMalformed, NotFound
from app.store.protocol import (
    BRIEF,
    FIRST_REVISION,
    PLAN_TAG,
    REQUEST_TAG,
    SHOWN_ONCE,
    TRACE_TAG,
    USER_TAG,
    Backlog,
    Journal,
    LapsedRuns,
    Place,
    RatingFilter,
    RunQuery,
    RunRow,
    StepInput,
    TicketClaim,
    TicketRow,
)
from app.store.sqlkit.sealing import Decrypt, place_of
from app.store.sqlkit.statements import (
    CACHED_COLUMNS,
    MOST_CONTENTS,
    Row,
    SingleStatement,
    Statements,
    runs_and_tickets,
)
from app.store.sqlkit.tables import (
    CONTENTS,
    DISCLOSURES,
    EVENTS,
    FEEDBACK,
    PULSE,
    RUNS,
    TAGS,
    TICKETS,
    UNHAPPY,
    insert_into,
)

WORKER_TAG = "worker"
MOST_PASSED_OVER = 50
"""Lapsed runs whose rows others lock, and in place of which later ones are taken over at once, at the most."""
GOOD = 0.5
"""The least mean score of a run that is rated good."""
CLOCK = "extract(epoch FROM clock_timestamp())"
MACHINE_CLOCK = "(julianday('now') - 2440587.5) * 86400.0"
_EPOCH, _ENDED_AT = CACHED_COLUMNS.index("epoch"), CACHED_COLUMNS.index("ended_at")
_Columns = namedtuple("_Columns", list(RUNS.columns.keys()))  # type: ignore[misc]


class CachedRows(Struct, frozen=True):
    """The `CACHED_COLUMNS` of a run's row, and the `TICKET_COLUMNS` of each of its tickets; None if the tickets are not
    known."""

    run: Row
    tickets: tuple[Row, ...] | None


Read = Callable[[Connection], tuple[StepInput, CachedRows | None]]


def run(statements: Statements, name: str) -> SingleStatement[RunRow]:
    """Return a read of one run's row. Raises `NotFound`."""
    return SingleStatement(statements.run, (name,), _only)


def page(conn: Connection, query: RunQuery) -> tuple[RunRow, ...]:
    """Return one page of a list of runs, in the order of the query."""
    first_column = _sort_column(query)
    order: tuple[ColumnElement[Any], ...] = (first_column.desc(), RUNS.c.id.desc())
    if query.ascending:
        order = (first_column, RUNS.c.id)
    ordered = select(RUNS).where(*conditions_of(query)).order_by(*order)
    return tuple([run_row(row) for row in conn.execute(ordered.limit(query.limit))])


def journal(statements: Statements, name: str, after: int) -> SingleStatement[Journal]:
    """Return a read of a run's salt and its events after a seq. Raises `NotFound`, and `EventMalformed` for a run of
    which no event is left."""
    return SingleStatement(statements.journal, (after, name), partial(_journal, name, after))


def call_events(conn: Connection, name: str) -> tuple[Event, ...]:
    """Return the intents and outcomes of a run's calls, in their order."""
    query = select(EVENTS.c.seq, EVENTS.c.kind, EVENTS.c.at, EVENTS.c.body)
    of_calls = query.where(EVENTS.c.run == name, EVENTS.c.kind.in_([Kind.CALL_INTENDED, Kind.CALL_FINISHED]))
    rows = conn.execute(of_calls.order_by(EVENTS.c.seq))
    return tuple([Event.stored(name, seq, kind, at, body) for seq, kind, at, body in rows])


def step_input(statements: Statements, name: str, after: int, decrypt: Decrypt) -> Read:
    """Return a read of a run's journal after a seq, its small contents, and its rows for the cache. Raises `NotFound`,
    and `UnknownKeys` for contents that are encrypted."""
    if statements.step_input is None:
        return partial(_read_step_input, statements=statements, name=name, after=after, decrypt=decrypt)
    return SingleStatement(statements.step_input, (name, after, BRIEF), partial(_step_input, name, decrypt))


def parse_object(body: bytes) -> dict[str, Any]:
    """Return a JSON object; an empty one for other bytes, as a damaged event may have."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _only(rows: Sequence[Row]) -> RunRow:
    if not rows:
        raise NotFound
    return run_row(_Columns._make(rows[0]))


def _journal(name: str, after: int, rows: Sequence[Row]) -> Journal:
    if not rows:
        raise NotFound
    salt = rows[0][0] or b""
    events = []
    for _, seq, kind, at, body in rows:
        if seq is not None:  # a run without such events has one row with the salt alone
            events.append(Event.stored(name, seq, kind, at, body))
    if not events and not after:
        raise EventMalformed(name, 1)
    return Journal(bytes(salt), tuple(events))


def _read_step_input(
    conn: Connection, statements: Statements, name: str, after: int, decrypt: Decrypt
) -> tuple[StepInput, CachedRows | None]:
    """Read in several statements what `Statements.step_input` reads in one."""
    events = journal(statements, name, after)(conn)
    (row,) = statements.runs.fetch(conn, [name])
    driver = conn.execute(select(RUNS.c.driver).where(RUNS.c.id == name)).scalar_one()
    is_brief = (CONTENTS.c.run == name, func.length(CONTENTS.c.body) <= BRIEF)
    contents = conn.execute(select(CONTENTS.c.ref, CONTENTS.c.body).where(*is_brief).limit(MOST_CONTENTS))
    cached = _rows_to_cache(row, statements.tickets.fetch(conn, [name]))
    return StepInput(
        events.salt, events.events, _decrypt_contents(name, contents, decrypt), row[_EPOCH], driver
    ), cached


def _decrypt_contents(name: str, rows: Iterable[Any], decrypt: Decrypt) -> dict[str, bytes]:
    """Return the contents of a run by ref, without those whose key was destroyed."""
    bodies: dict[str, bytes] = {}
    for ref, stored_body in rows:
        body = decrypt(place_of(name, ref), stored_body)
        if body is not None:
            bodies[ref] = body
    return bodies


def _step_input(name: str, decrypt: Decrypt, rows: Sequence[Row]) -> tuple[StepInput, CachedRows | None]:
    if not rows:
        raise NotFound
    *row, salt, driver, event_rows, tickets, contents = rows[0]
    events = [Event.stored(name, seq, kind, at, body) for seq, kind, at, body in event_rows]
    cached = _rows_to_cache((*row, salt), tickets)
    bodies = _decrypt_contents(name, contents, decrypt)
    return StepInput(bytes(salt or b""), tuple(events), bodies, row[_EPOCH], driver), cached


def for_cache(
    statements: Statements, names: Sequence[str]
) -> Callable[[Connection], dict[str, CachedRows | None]] | SingleStatement[dict[str, CachedRows | None]]:
    """Return a read of the rows of these runs, with all of their tickets, for the row cache. On Postgres it is one
    statement; on SQLite only the simulation has a row cache."""
    if statements.rows is None:
        return lambda conn: _by_run(statements.runs.fetch(conn, names), statements.tickets.fetch(conn, names))
    return SingleStatement(statements.rows, (names, names), _all_cached)


def _all_cached(rows: Sequence[Row]) -> dict[str, CachedRows | None]:
    return _by_run(*runs_and_tickets(rows))


def _by_run(rows: Sequence[Row], tickets: Sequence[Row]) -> dict[str, CachedRows | None]:
    tickets_of: defaultdict[str, list[Row]] = defaultdict(list)
    for ticket in tickets:
        tickets_of[ticket[0]].append(ticket)
    return {row[0]: _rows_to_cache(row, tickets_of[row[0]]) for row in rows}


def _rows_to_cache(row: Sequence[Any], tickets: Sequence[Row]) -> CachedRows | None:
    """Return the rows for the cache, from the `CHECKED_COLUMNS` of a run and its tickets; None if it has ended or was
    erased."""
    *cached_columns, salt = row
    if salt is None or cached_columns[_ENDED_AT] is not None:
        return None
    return CachedRows(tuple(cached_columns), tuple([tuple(ticket) for ticket in tickets]))


def renew_leases(
    conn: Connection, statements: Statements, driver: str, epochs: Mapping[str, int], until: float
) -> dict[str, int]:
    """Renew the leases that are still the driver's. Returns their runs, each with the seq of its last event."""
    statements.plan_by_key(conn)
    rows = statements.lock_leases.fetch(conn, statements.values(list(epochs)), driver)
    renewed: dict[str, int] = {}
    for name, epoch, seq, *_ in rows:
        if epochs[name] == epoch:
            renewed[name] = seq
    statements.write(conn, (statements.update_lease, [(until, name) for name in renewed]))
    return renewed


def seqs(conn: Connection, names: Sequence[str]) -> dict[str, int]:
    """Return the seq of the last event of each of these runs."""
    return {name: seq for name, seq in conn.execute(select(RUNS.c.id, RUNS.c.seq).where(RUNS.c.id.in_(names)))}


def _has_lapsed(now: float) -> tuple[ColumnElement[bool], ...]:
    """Return the conditions for an open run whose lease has lapsed."""
    return RUNS.c.ended_at.is_(None), RUNS.c.lease_until <= now


def _is_to_be_cancelled() -> ColumnElement[bool]:
    """Return the condition for a run whose end was asked for."""
    return exists().where(EVENTS.c.run == RUNS.c.id, EVENTS.c.kind == Kind.CANCEL_ASKED)


def count_lapsed(conn: Connection, now: float) -> tuple[LapsedRuns, ...]:
    """Return the number of lapsed runs of each tier and code version."""
    expired = func.sum(case((RUNS.c.deadline <= now, 1), else_=0))
    cancelled = func.sum(case((and_(RUNS.c.deadline > now, _is_to_be_cancelled()), 1), else_=0))
    query = select(RUNS.c.tier, RUNS.c.code, func.count(), expired, cancelled).where(*_has_lapsed(now))
    rows = conn.execute(query.group_by(RUNS.c.tier, RUNS.c.code).order_by(RUNS.c.tier, RUNS.c.code))
    return tuple([LapsedRuns(*row) for row in rows])


def count_untaken(conn: Connection, now: float) -> dict[str, int]:
    """Return the number of lapsed runs of each tenant."""
    query = select(RUNS.c.tenant, func.count()).where(*_has_lapsed(now)).group_by(RUNS.c.tenant)
    return {tenant: count for tenant, count in conn.execute(query)}


def count_waiting(conn: Connection, most: int) -> int:
    """Return the number of runs that wait for tool results, counted up to `most`."""
    open_ones = select(RUNS.c.id).where(RUNS.c.ended_at.is_(None), RUNS.c.state == "awaiting_tool").limit(most)
    return conn.execute(select(func.count()).select_from(open_ones.subquery())).scalar_one()


def _turns(now: float, ours: ColumnElement[bool]) -> Select[Any]:
    """Return a query of the lapsed runs with their turns.

    The turn of a tenant's oldest run is the number of the tenant's runs that are driven, and each later one has the
    next number. So the tenant with the fewest runs under way is next, however many wait. Among equal turns the time
    decides which is first: the oldest run would always be that of the longest queue.
    """
    driven = and_(RUNS.c.lease_until > now, RUNS.c.state.not_in(WAITING), RUNS.c.driver != "")
    under_way = func.sum(case((driven, 1), else_=0)).over(partition_by=RUNS.c.tenant)
    can_go = and_(*_has_lapsed(now), ours)
    age = (RUNS.c.lease_until, RUNS.c.id)
    number = func.row_number().over(partition_by=(RUNS.c.tenant, can_go), order_by=age)
    columns = (RUNS.c.id, RUNS.c.lease_until, can_go.label("can_go"), (under_way + number).label("turn"))
    every = select(*columns).where(RUNS.c.ended_at.is_(None)).subquery()
    equal = func.count().over(partition_by=every.c.turn)
    oldest = func.row_number().over(partition_by=every.c.turn, order_by=(every.c.lease_until, every.c.id))
    place = (oldest + int(now * 1000)) % equal
    return select(every.c.id, every.c.turn, place.label("place")).where(every.c.can_go)


def take_over(
    conn: Connection,
    driver: str,
    now: float,
    until: float,
    limit: int,
    kinds: Sequence[tuple[str, str]],
    cancelled_kinds: Sequence[tuple[str, str]],
) -> tuple[RunRow, ...]:
    """Take over lapsed runs, and have their tickets report to the new driver. Rows that others lock are skipped."""
    kind = tuple_(RUNS.c.tier, RUNS.c.code)
    to_be_cancelled = and_(kind.in_(cancelled_kinds), _is_to_be_cancelled())
    turns = _turns(now, or_(RUNS.c.deadline <= now, kind.in_(kinds), to_be_cancelled)).subquery()
    in_turn = select(turns.c.id).order_by(turns.c.turn, turns.c.place).limit(limit + MOST_PASSED_OVER)
    candidates = conn.execute(in_turn).scalars().all()
    if not candidates:
        return ()
    lock = select(RUNS.c.id).where(RUNS.c.id.in_(candidates), *_has_lapsed(now)).with_for_update(skip_locked=True)
    locked = frozenset(conn.execute(lock).scalars())
    names = [name for name in candidates if name in locked][:limit]
    if not names:
        return ()
    former = select(RUNS.c.driver).where(RUNS.c.id == TICKETS.c.run).scalar_subquery()
    new_until = case((TICKETS.c.holder == former, now), else_=TICKETS.c.until)
    conn.execute(update(TICKETS).where(TICKETS.c.run.in_(names)).values(driver=driver, until=new_until))
    is_taken = RUNS.c.id.in_(names)
    increments = {"epoch": RUNS.c.epoch + 1, "revision": RUNS.c.revision + 1}
    conn.execute(update(RUNS).where(is_taken).values(driver=driver, lease_until=until, **increments))
    return tuple([run_row(row) for row in conn.execute(select(RUNS).where(is_taken).order_by(RUNS.c.id))])


def renew_claims(
    conn: Connection, statements: Statements, claims: Sequence[TicketClaim], until: float
) -> frozenset[TicketClaim]:
    """Renew the claims that the tickets' rows still have."""
    statements.plan_by_key(conn)
    runs = sorted({claim.run for claim in claims})
    rows = statements.lock_claims.fetch(conn, statements.values(runs))
    stored_claims = [TicketClaim(run, step, claim) for run, step, claim, *_ in rows]
    renewed = frozenset(claims).intersection(stored_claims)
    statements.write(conn, (statements.update_claim, [(until, *claim) for claim in sorted(renewed)]))
    return renewed


def find_ticket(conn: Connection, name: str, step: int) -> TicketRow | None:
    """Return one ticket, or None."""
    row = conn.execute(_tickets().where(TICKETS.c.run == name, TICKETS.c.step == step)).one_or_none()
    if row is None:
        return None
    return TicketRow(*row)


def select_overdue_tickets(now: float, grace: float, limit: int) -> Select[Any]:
    """Return a query of tickets without a valid claim that were announced `grace` seconds ago or earlier, the oldest
    first."""
    unanswered = (TICKETS.c.until <= now, TICKETS.c.rung_at <= now - grace)
    return _tickets().where(*unanswered).order_by(TICKETS.c.rung_at).limit(limit)


def backlog(conn: Connection, now: float, most: int) -> Backlog:
    """Return the tickets without a valid claim, and the open runs without a valid lease."""
    tickets = select(TICKETS.c.until).where(TICKETS.c.until <= now).limit(most)
    runs = select(RUNS.c.lease_until.label("until")).where(*_has_lapsed(now)).limit(most)
    both = union_all(select(tickets.subquery()), select(runs.subquery())).subquery()
    count, oldest = conn.execute(select(func.count(), func.min(both.c.until))).one()
    return Backlog(count, oldest)


def announce(conn: Connection, now: float, grace: float, limit: int) -> tuple[TicketRow, ...]:
    """Return overdue tickets, marked as announced now, so that no other sweep, here or elsewhere, announces them
    again."""
    rows = conn.execute(select_overdue_tickets(now, grace, limit).with_for_update(skip_locked=True, of=TICKETS))
    tickets = tuple([TicketRow(*row) for row in rows])
    if tickets:
        is_announced = tuple_(TICKETS.c.run, TICKETS.c.step).in_([(ticket.run, ticket.step) for ticket in tickets])
        conn.execute(update(TICKETS).where(is_announced).values(rung_at=now))
    return tickets


def clock(conn: Connection) -> float:
    """Return the server's time in seconds since 1970; for SQLite, the machine's."""
    return float(conn.execute(text(f"SELECT {clock_of(conn)}")).scalar_one())


def clock_of(conn: Connection) -> str:
    """Return that time as an expression of SQL."""
    return CLOCK if conn.dialect.name == "postgresql" else MACHINE_CLOCK


def raise_revision(conn: Connection, name: str) -> None:
    """Raise the revision of a run because rows of other tables that belong to it have changed. Whoever has read it
    before, to prune it, then leaves it as it is."""
    conn.execute(update(RUNS).where(RUNS.c.id == name).values(revision=RUNS.c.revision + 1))


def write_pulse(conn: Connection) -> None:
    """Write one row, to prove that the database takes writes."""
    first = insert_into(conn, PULSE).values(id=1, beats=1)
    conn.execute(first.on_conflict_do_update(index_elements=[PULSE.c.id], set_={"beats": PULSE.c.beats + 1}))


def _tickets() -> Select[Any]:
    ticket = TICKETS.c
    columns = (ticket.run, ticket.step, ticket.tier, ticket.driver, ticket.version, ticket.claim, ticket.until)
    return select(*columns, RUNS.c.seq, ticket.holder, ticket.lost, RUNS.c.tenant).join(RUNS, RUNS.c.id == ticket.run)


def conditions_of(query: RunQuery) -> list[ColumnElement[bool]]:
    """Return the conditions on the rows that a query selects."""
    column = RUNS.c
    conditions = _equalities(query)
    if query.state is not None:  # as a literal: a partial index is used only for a value that the planner can see
        conditions.append(column.state == bindparam("state", query.state, literal_execute=True))
        if query.state in UNHAPPY:  # SQLite uses that index only where the query repeats its condition
            conditions.append(column.state.in_(bindparam("unhappy", UNHAPPY, expanding=True, literal_execute=True)))
    if query.origin_kind == "":
        conditions.append(column.origin_kind.is_(None))
    if query.ids:
        conditions.append(column.id.in_(query.ids))
    conditions += _bounds(query)
    if query.sort == "cost":
        conditions.append(column.ended_at.is_not(None))
    if query.before is not None:
        conditions.append(_comes_after(query, query.before))
    return [*conditions, *_tag_conditions(query), *_conditions_on_other_tables(query)]


def _equalities(query: RunQuery) -> list[ColumnElement[bool]]:
    """Return the conditions that a column has a value."""
    column = RUNS.c
    tenant: ColumnElement[str] = column.tenant
    if _rare_tags(query):  # such runs are looked up by their ids, not by the index of the tenant's runs
        tenant = column.tenant + ""
    pairs = (
        (tenant, query.tenant),
        (column.tier, query.tier),
        (column.key, query.key),
        (column.model, query.model),
        (column.topology, query.topology),
        (column.degraded, query.degraded),
        (column.error, query.error),
        (column.origin_kind, query.origin_kind or None),
        (column.origin_run, query.origin_run),
    )
    return [column_or_expression == value for column_or_expression, value in pairs if value is not None]


def _tag_conditions(query: RunQuery) -> list[ColumnElement[bool]]:
    """Return the conditions on the tags of a run."""
    run, tag = RUNS.c.id, TAGS.c
    conditions: list[ColumnElement[bool]] = []
    for name, value in _rare_tags(query):
        conditions.append(run.in_(select(tag.run).where(tag.name == name, tag.value == value)))
    for name, value in query.tags:
        has_tag = exists().where(tag.name == name, tag.value == value, tag.run == run)
        if name == WORKER_TAG:
            conditions.append(_was_called(value, has_tag))
        else:
            conditions.append(has_tag)
    return conditions


def _rare_tags(query: RunQuery) -> list[tuple[str, str]]:
    """Return the names and values of tags for which a query asks and that few runs have."""
    tags = ((REQUEST_TAG, query.request_id), (TRACE_TAG, query.trace_id), (USER_TAG, query.user))
    return [(name, value) for name, value in tags if value is not None]


def _conditions_on_other_tables(query: RunQuery) -> list[ColumnElement[bool]]:
    """Return the conditions on what other tables have of a run."""
    column = RUNS.c
    conditions: list[ColumnElement[bool]] = []
    if query.preview is not None:
        conditions.append(_is_plan() if query.preview else ~_is_plan())
    if query.outcome is not None:
        conditions.append(_has_call(query.outcome, dict(query.tags).get(WORKER_TAG)))
    if query.rated is not None:
        conditions.append(column.id.in_(_select_rated_runs(query.rated)))
    if query.untaken_at is not None:
        queued = column.id.in_(select(TICKETS.c.run).where(TICKETS.c.until <= query.untaken_at))
        conditions.append(or_(queued, and_(*_has_lapsed(query.untaken_at))))
    return conditions


def _is_plan() -> ColumnElement[bool]:
    """Return the condition for runs that only made a plan. All values of the tag are named, so that each run's is found
    by its key: without them, all plans would be read for each run."""
    value = TAGS.c.value.in_((FIRST_REVISION, SHOWN_ONCE, RUNS.c.origin_run))
    return exists().where(TAGS.c.name == PLAN_TAG, value, TAGS.c.run == RUNS.c.id)


def _select_rated_runs(rated: RatingFilter) -> Select[tuple[str]]:
    """Return the query for the runs whose ratings have such a mean score."""
    rating, mean = FEEDBACK.c, func.avg(FEEDBACK.c.score)
    query = select(rating.run).where(rating.score.is_not(None)).group_by(rating.run)
    if rated.since is not None:
        query = query.where(rating.at >= rated.since)
    if rated.until is not None:
        query = query.where(rating.at < rated.until)
    if rated.good:
        return query.having(mean >= GOOD)
    return query.having(mean < GOOD)


def _has_call(outcome: str, worker: str | None) -> ColumnElement[bool]:
    """Return the condition for runs with a call of this outcome, of this worker if one is named."""
    call = DISCLOSURES.c
    conditions: list[ColumnElement[bool]] = [call.run == RUNS.c.id]
    if outcome == "open":
        conditions.append(call.outcome.is_(None))
    else:
        conditions.append(call.outcome == outcome)
    if worker is not None:
        conditions.append(call.recipient == worker)
    return exists().where(*conditions)


def _was_called(worker: str, has_tag: ColumnElement[bool]) -> ColumnElement[bool]:
    """Return the condition for runs in which a worker was sent something. Of runs with calls that are not in the ledger
    of disclosures yet, those whose plans have `has_tag` it."""
    of_run = DISCLOSURES.c.run == RUNS.c.id
    has_calls = exists().where(EVENTS.c.run == RUNS.c.id, EVENTS.c.kind == Kind.CALL_INTENDED.value)
    was_sent = exists().where(of_run, DISCLOSURES.c.recipient == worker)
    return or_(was_sent, and_(has_tag, ~exists().where(of_run), has_calls))


def _bounds(query: RunQuery) -> list[ColumnElement[bool]]:
    """Return the conditions on the time of the admission and on the cost."""
    column = RUNS.c
    conditions: list[ColumnElement[bool]] = []
    if query.since is not None:
        conditions.append(column.created_at >= query.since)
    if query.until is not None:
        conditions.append(column.created_at < query.until)
    if query.min_usd is not None:
        conditions.append(column.spent_usd >= query.min_usd)
    if query.max_usd is not None:
        conditions.append(column.spent_usd <= query.max_usd)
    return conditions


def _sort_column(query: RunQuery) -> ColumnElement[Any]:
    if query.sort == "cost":
        return RUNS.c.spent_usd
    return RUNS.c.created_at


def _comes_after(query: RunQuery, place: Place) -> ColumnElement[bool]:
    """Return the condition for the rows behind a place in the order of the query."""
    value, id_ = place
    if query.sort == "cost":
        value = int(value)
    row, last_row = tuple_(_sort_column(query), RUNS.c.id), tuple_(value, id_)
    if query.ascending:
        return row > last_row
    return row < last_row


def run_row(row: Any) -> RunRow:
    return RunRow(
        id=row.id,
        tenant=row.tenant,
        key=row.key,
        tier=row.tier,
        model=row.model,
        state=row.state,
        created_at=row.created_at,
        deadline=row.deadline,
        epoch=row.epoch,
        driver=row.driver,
        lease_until=row.lease_until,
        seq=row.seq,
        cap=Amount(row.cap_usd, row.cap_tokens),
        held=Amount(row.held_usd, row.held_tokens),
        spent=Amount(row.spent_usd, row.spent_tokens),
        code=row.code,
        topology=row.topology,
        degraded=bool(row.degraded),
        steps=row.steps,
        ended_at=row.ended_at,
        error=row.error,
        erased=row.salt is None,
        erased_at=row.erased_at,
        erased_by=row.erased_by,
        origin_kind=row.origin_kind or "",
        origin_run=row.origin_run or "",
    )
