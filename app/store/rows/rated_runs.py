"""Reads of rated runs for learners, and rows of what they learned: one numbered body for each policy."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from sqlalchemy import Connection, func, select, update

from app.core.rating.evidence import PolicyState, RatedRun
from app.core.rating.feedback import Feedback
from app.core.run.events import Event, Kind
from app.core.run.kinds import COPIES
from app.errors import EventMalformed
from app.store.rows import content, feedback
from app.store.sqlkit.sealing import Decrypt
from app.store.sqlkit.tables import EVENTS, POLICIES, RUNS, insert_into

FindRef = Callable[[Sequence[Event]], str]
"""Finds a ref in the events of a run. Raises `EventMalformed` for an event that cannot be read."""


def find(
    conn: Connection, ratings: Sequence[Feedback], kinds: Sequence[Kind], find_ref: FindRef, decrypt: Decrypt
) -> tuple[RatedRun, ...]:
    """Return the runs of these ratings, each with its events of these kinds and the content whose ref `find_ref`
    returns.

    Shadows and replays are left out: they repeat the task of another run, from which the tier learns already. So are
    runs of which an event cannot be read.
    """
    names = sorted({rating.run for rating in ratings})
    counts = func.coalesce(RUNS.c.origin_kind, "").not_in(COPIES)
    columns = (RUNS.c.id, RUNS.c.tier, RUNS.c.state, RUNS.c.degraded, RUNS.c.spent_usd)
    rows = {row.id: row for row in conn.execute(select(*columns).where(RUNS.c.id.in_(names), counts))}
    events, refs = _events_and_refs(conn, names, kinds, find_ref)
    ratings_by_run: dict[str, list[Feedback]] = {name: [] for name in names}
    for rating in feedback.of_all(conn, names):
        ratings_by_run[rating.run].append(rating)
    bodies = content.one_of_each(conn, refs, decrypt)
    rated = []
    for rating in ratings:
        run = rating.run
        row = rows.get(run)
        if row is None or run not in events:
            continue
        is_success = row.state == "succeeded" and not row.degraded
        facts = (tuple(ratings_by_run[run]), tuple(events[run]), bodies.get(run))
        rated.append(RatedRun(rating, row.tier, is_success, row.spent_usd, *facts))
    return tuple(rated)


def _events_and_refs(
    conn: Connection, names: Sequence[str], kinds: Sequence[Kind], find_ref: FindRef
) -> tuple[dict[str, list[Event]], list[tuple[str, str]]]:
    """Return the events of these kinds by run, and the run and the ref of each content; without damaged runs."""
    rows_of_run: dict[str, list[tuple[str, int, str, float, bytes]]] = {name: [] for name in names}
    query = select(EVENTS).where(EVENTS.c.run.in_(names), EVENTS.c.kind.in_([kind.value for kind in kinds]))
    for run, seq, kind, at, body in conn.execute(query.order_by(EVENTS.c.run, EVENTS.c.seq)):
        rows_of_run[run].append((run, seq, kind, at, body))
    events: dict[str, list[Event]] = {}
    refs: list[tuple[str, str]] = []
    for run, rows in rows_of_run.items():
        with suppress(EventMalformed):
            run_events = [Event.stored(*row) for row in rows]
            refs.append((run, find_ref(run_events)))
            events[run] = run_events
    return events, refs


def find_latest(conn: Connection, policy: str, after: int) -> PolicyState | None:
    """Return the latest posterior of a policy, if its number is higher than `after`; else None."""
    row = POLICIES.c
    latest = conn.execute(select(row.number, row.body).where(row.policy == policy, row.number > after)).one_or_none()
    if latest is None:
        return None
    return PolicyState(*latest)


def learn(conn: Connection, policy: str, learned: PolicyState, at: float, parts: Mapping[str, bytes]) -> bool:
    """Replace what was learned under the number before, and with it the bodies of other policies, which get the same
    number. False, and nothing is written, if somebody else has replaced it."""
    if not _replace(conn, policy, learned, at):
        return False
    for name, body in parts.items():
        values = {"number": learned.number, "body": body, "at": at}
        insertion = insert_into(conn, POLICIES).values(policy=name, **values)
        conn.execute(insertion.on_conflict_do_update(index_elements=[POLICIES.c.policy], set_=values))
    return True


def _replace(conn: Connection, policy: str, learned: PolicyState, at: float) -> bool:
    row = POLICIES.c
    if learned.number > 1:
        before = (row.policy == policy, row.number == learned.number - 1)
        statement = update(POLICIES).where(*before).values(number=learned.number, body=learned.body, at=at)
        return bool(conn.execute(statement).rowcount)
    insertion = insert_into(conn, POLICIES).values(policy=policy, number=1, body=learned.body, at=at)
    return bool(conn.execute(insertion.on_conflict_do_nothing()).rowcount)
