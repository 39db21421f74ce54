"""Reads of runs with their journals and ratings, for reports. Plain functions over a connection."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from msgspec.structs import replace
from sqlalchemy import Connection, bindparam, select

from app.core.rating.economics import REPORTED_KINDS, JournaledRun
from app.core.rating.feedback import Feedback
from app.core.run.events import Event
from app.errors import EventMalformed
from app.store.protocol import ERASED_TAGS, METADATA_TAG, USER_TAG, RunQuery
from app.store.rows import feedback
from app.store.rows.runs import page
from app.store.sqlkit.tables import CATALOGS, EVENTS, TAGS


def journaled_runs(conn: Connection, query: RunQuery) -> tuple[JournaledRun, ...]:
    """Return one page of runs."""
    rows = page(conn, query)
    names = [row.id for row in rows]
    if not names:
        return ()
    events, ratings, tags = _events(conn, names), _ratings(conn, names), _tags(conn, names)
    runs = []
    for row in rows:
        run = JournaledRun(
            id=row.id,
            tenant=row.tenant,
            key=row.key,
            tier=row.tier,
            state=row.state,
            topology=row.topology,
            degraded=row.degraded,
            created_at=row.created_at,
            ended=row.ended_at is not None,
            events=tuple(events[row.id]),
            ratings=tuple(ratings[row.id]),
            users=tuple(tags[row.id, USER_TAG]),
            metadata=tuple(tags[row.id, METADATA_TAG]),
        )
        runs.append(run)
    return tuple(runs)


def _events(conn: Connection, names: Sequence[str]) -> Mapping[str, list[Event]]:
    """Return the events of each run; none of a run of which one is not JSON."""
    events_by_run: defaultdict[str, list[Event]] = defaultdict(list)
    damaged_runs: set[str] = set()
    conditions = (EVENTS.c.run.in_(names), EVENTS.c.kind.in_(sorted(kind.value for kind in REPORTED_KINDS)))
    columns = (EVENTS.c.run, EVENTS.c.seq, EVENTS.c.kind, EVENTS.c.at, EVENTS.c.body)
    for run, seq, kind, at, body in conn.execute(
        select(*columns).where(*conditions).order_by(EVENTS.c.run, EVENTS.c.seq)
    ):
        try:
            events_by_run[run].append(Event.stored(run, seq, kind, at, body))
        except EventMalformed:
            damaged_runs.add(run)
    for run in damaged_runs:
        del events_by_run[run][:]
    return events_by_run


def _ratings(conn: Connection, names: Sequence[str]) -> Mapping[str, list[Feedback]]:
    ratings_by_run: defaultdict[str, list[Feedback]] = defaultdict(list)
    for rating in feedback.of_all(conn, names):
        ratings_by_run[rating.run].append(replace(rating, comment=""))
    return ratings_by_run


def _tags(conn: Connection, names: Sequence[str]) -> Mapping[tuple[str, str], list[str]]:
    """Return the values of the tags with callers' words, by run and name. They are found by a partial index, for which
    the planner must see the names."""
    values_by_run: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    of_callers = TAGS.c.name.in_(bindparam("of_callers", ERASED_TAGS, expanding=True, literal_execute=True))
    query = select(TAGS.c.run, TAGS.c.name, TAGS.c.value).where(TAGS.c.run.in_(names), of_callers)
    for run, name, value in conn.execute(query.order_by(TAGS.c.run, TAGS.c.name, TAGS.c.value)):
        values_by_run[run, name].append(value)
    return values_by_run


def catalogs(conn: Connection, digests: Sequence[str]) -> dict[str, bytes]:
    """Return the stored snapshots with these digests."""
    rows = conn.execute(select(CATALOGS.c.digest, CATALOGS.c.body).where(CATALOGS.c.digest.in_(digests)))
    return {digest: bytes(body) for digest, body in rows}
