"""Figures of the runs of a period, as `protocol.RunFigures` describes them. Plain functions over a connection."""

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import Column, ColumnElement, Connection, Integer, case, cast, func, select

from app.core.run.events import Kind
from app.store.protocol import CallGroup, EjectedWorker, Period, RunFigures, RunGroup
from app.store.rows.runs import GOOD, parse_object
from app.store.sqlkit.tables import DISCLOSURES, EVENTS, FEEDBACK, RUNS

FIRST_RUNS: Final = 300
"""The newest runs of which the first words of calls, and the workers that plans left out, are read: these stand in the
journal alone."""
Conditions = Sequence[ColumnElement[bool]]


def figures(conn: Connection, period: Period) -> RunFigures:
    """Return the figures of a period's runs."""
    runs = (RUNS.c.tenant, RUNS.c.created_at)
    since = _begin(conn, period, *runs, period.most_runs)
    ours = _within(period, *runs, since)
    calls = (DISCLOSURES.c.tenant, DISCLOSURES.c.at)
    calls_since = _begin(conn, period, *calls, period.most_calls)
    newest = _newest(conn, ours)
    bucket = _bucket(conn, period)
    return RunFigures(
        since=since,
        groups=_groups(conn, ours, bucket),
        seconds=_seconds(conn, ours, bucket),
        calls_since=calls_since,
        calls=_calls(conn, _within(period, *calls, calls_since)),
        ratings=_ratings(conn, period),
        first_seconds=_first_seconds(conn, newest),
        first_runs=len(newest),
        ejected=_find_ejected_workers(conn, newest),
        open=_open(conn, period.tenant),
    )


def _begin(conn: Connection, period: Period, tenant: Column[Any], at: Column[Any], most: int) -> float:
    """Return the time from which on there are at most so many rows in the period."""
    newest = select(at).where(*_within(period, tenant, at, period.since)).order_by(at.desc())
    last = conn.execute(newest.offset(most - 1).limit(1)).scalar_one_or_none()
    return period.since if last is None else float(last)


def _within(period: Period, tenant: Column[Any], at: Column[Any], since: float) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = [at >= since, at < period.until]
    if period.tenant is None:
        return conditions
    return [tenant == period.tenant, *conditions]


def _bucket(conn: Connection, period: Period) -> ColumnElement[int]:
    """Return the number of the bucket in which a run began. A cast rounds down in SQLite, and to the nearest in
    Postgres."""
    width = (period.until - period.since) / period.buckets
    place: ColumnElement[Any] = (RUNS.c.created_at - period.since) / width
    if conn.dialect.name == "postgresql":
        place = func.floor(place)
    return cast(place, Integer).label("bucket")


def _groups(conn: Connection, ours: Conditions, bucket: ColumnElement[int]) -> tuple[RunGroup, ...]:
    run = RUNS.c
    alike = (bucket, run.tier, run.state, run.topology, run.degraded, run.origin_kind, run.error)
    sums = (func.count(), func.sum(run.spent_usd), func.sum(run.spent_tokens))
    groups = []
    for row in conn.execute(select(*alike, *sums).where(*ours).group_by(*alike)):
        number, tier, state, topology, degraded, origin, error, runs, usd, tokens = row
        kind = (number, tier, state, topology, bool(degraded), origin or "", error)
        groups.append(RunGroup(*kind, int(runs), int(usd), int(tokens)))
    return tuple(groups)


def _seconds(conn: Connection, ours: Conditions, bucket: ColumnElement[int]) -> tuple[tuple[int, str, float], ...]:
    length = RUNS.c.ended_at - RUNS.c.created_at
    query = select(bucket, RUNS.c.tier, length).where(*ours, RUNS.c.state == "succeeded")
    return tuple([(number, tier, seconds) for number, tier, seconds in conn.execute(query)])


def _calls(conn: Connection, ours: Conditions) -> tuple[CallGroup, ...]:
    call = DISCLOSURES.c
    alike = (call.recipient, call.kind, call.outcome)
    tokens = [func.coalesce(func.sum(column), 0) for column in (call.input_tokens, call.output_tokens)]
    rows = conn.execute(select(*alike, func.count(), *tokens).where(*ours).group_by(*alike))
    groups = []
    for recipient, kind, outcome, number, input_tokens, output_tokens in rows:
        groups.append(CallGroup(recipient, kind, outcome, number, int(input_tokens), int(output_tokens)))
    return tuple(groups)


def _ratings(conn: Connection, period: Period) -> tuple[tuple[str, int, int], ...]:
    """Return the mean scores of the runs that were rated last in the period, by the workers of each."""
    ratings = select(FEEDBACK.c.run, FEEDBACK.c.score, FEEDBACK.c.at).where(FEEDBACK.c.score.is_not(None))
    ratings = ratings.where(*_within(period, FEEDBACK.c.tenant, FEEDBACK.c.at, period.since))
    latest = ratings.order_by(FEEDBACK.c.at.desc()).limit(period.most_calls).subquery()
    scores = select(latest.c.run, func.avg(latest.c.score).label("score")).group_by(latest.c.run).subquery()
    calls = select(DISCLOSURES.c.run, DISCLOSURES.c.recipient).where(DISCLOSURES.c.kind == "worker")
    workers = calls.where(DISCLOSURES.c.run.in_(select(scores.c.run))).distinct().subquery()
    good = func.sum(case((scores.c.score >= GOOD, 1), else_=0))
    query = select(workers.c.recipient, func.count(), good).join(scores, scores.c.run == workers.c.run)
    rows = conn.execute(query.group_by(workers.c.recipient).order_by(workers.c.recipient))
    return tuple([(worker, int(runs), int(good_runs)) for worker, runs, good_runs in rows])


def _newest(conn: Connection, ours: Conditions) -> Sequence[str]:
    newest = select(RUNS.c.id).where(*ours).order_by(RUNS.c.created_at.desc(), RUNS.c.id.desc()).limit(FIRST_RUNS)
    return conn.execute(newest).scalars().all()


def _first_seconds(conn: Connection, runs: Sequence[str]) -> tuple[float, ...]:
    is_outcome = (EVENTS.c.run.in_(runs), EVENTS.c.kind == Kind.CALL_FINISHED.value)
    bodies = conn.execute(select(EVENTS.c.body).where(*is_outcome)).scalars()
    seconds_of_calls = [float(parse_object(body).get("first") or 0.0) for body in bodies]
    return tuple([duration for duration in seconds_of_calls if duration > 0])


def _find_ejected_workers(conn: Connection, runs: Sequence[str]) -> tuple[EjectedWorker, ...]:
    is_opening = (EVENTS.c.run.in_(runs), EVENTS.c.kind == Kind.PLAN_OPENED.value)
    rows = conn.execute(select(EVENTS.c.run, EVENTS.c.at, EVENTS.c.body).where(*is_opening).order_by(EVENTS.c.at))
    latest: dict[str, EjectedWorker] = {}
    for run, at, body in rows:
        for worker, reason in (parse_object(body).get("ejected") or {}).items():
            latest[worker] = EjectedWorker(worker, reason, run, float(at))
    return tuple([latest[worker] for worker in sorted(latest)])


def _open(conn: Connection, tenant: str | None) -> tuple[tuple[str, int, float], ...]:
    query = select(RUNS.c.state, func.count(), func.min(RUNS.c.created_at)).where(RUNS.c.ended_at.is_(None))
    if tenant is not None:
        query = query.where(RUNS.c.tenant == tenant)
    rows = conn.execute(query.group_by(RUNS.c.state).order_by(RUNS.c.state))
    return tuple([(state, int(runs), float(oldest)) for state, runs, oldest in rows])
