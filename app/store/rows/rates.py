"""Rows of rate windows: `core/pool/rates.py` decides, and here its windows are read and written under lock.

The windows of a request are locked in the order of their names. A run that is open is found in the table `runs`, in the
same transaction, so that a place comes back with the commit that ends the run.
"""

from collections.abc import Iterable, Mapping, Sequence

from sqlalchemy import Connection, bindparam, delete, select, update

from app.core.pool.rates import RateReply, RateRequest, RunUse, Window, decide
from app.core.run.kinds import WAITING
from app.store.sqlkit.tables import RATE_WINDOWS, RUNS, insert_into

_EMPTY = Window().to_bytes()
_WRITE = (
    update(RATE_WINDOWS)
    .where(RATE_WINDOWS.c.name == bindparam("its_name"))
    .values(body=bindparam("new_body"), until=bindparam("new_until"))
)


def count(conn: Connection, requests: Sequence[RateRequest], now: float) -> tuple[RateReply, ...]:
    """Count requests in their windows, as far as the limits allow."""
    names: set[str] = set()
    runs: set[str] = set()
    for request in requests:
        names.update([name for name, _ in request.limits])
        if request.resumes:
            runs.add(request.resumes)
    windows = _lock_windows(conn, sorted(names))
    for window in windows.values():
        runs.update(window.runs)
    replies = decide(windows, requests, _uses(conn, runs), now)
    _write(conn, windows)
    return replies


def give_back(conn: Connection, request: RateRequest) -> None:
    """Forget the run of a request that was not begun."""
    windows = _lock_windows(conn, sorted(name for name, _ in request.limits))
    for window in windows.values():
        window.give_back(request.run)
    _write(conn, windows)


def any_lapsed(conn: Connection, now: float) -> bool:
    """Return True if there is a window in which nothing counts any more."""
    return conn.execute(select(RATE_WINDOWS.c.name).where(RATE_WINDOWS.c.until <= now).limit(1)).first() is not None


def forget(conn: Connection, now: float, limit: int) -> int:
    """Delete at most `limit` windows in which nothing counts, but none that a request is changing at the moment."""
    query = select(RATE_WINDOWS.c.name).where(RATE_WINDOWS.c.until <= now).limit(limit)
    names = conn.execute(query.with_for_update(skip_locked=True)).scalars().all()
    if names:
        conn.execute(delete(RATE_WINDOWS).where(RATE_WINDOWS.c.name.in_(names)))
    return len(names)


def _lock_windows(conn: Connection, names: Sequence[str]) -> dict[str, Window]:
    """Return the windows of these names, locked; new ones are made where there are none."""
    windows = _read(conn, names)
    while missing_names := [name for name in names if name not in windows]:
        rows = [{"name": name, "body": _EMPTY, "until": 0.0} for name in missing_names]
        conn.execute(insert_into(conn, RATE_WINDOWS).on_conflict_do_nothing(), rows)
        windows |= _read(conn, missing_names)  # a sweep may just have deleted a row that was there
    return windows


def _read(conn: Connection, names: Sequence[str]) -> dict[str, Window]:
    query = select(RATE_WINDOWS.c.name, RATE_WINDOWS.c.body).where(RATE_WINDOWS.c.name.in_(names))
    rows = conn.execute(query.order_by(RATE_WINDOWS.c.name).with_for_update())
    return {name: Window.from_bytes(body) for name, body in rows}


def _write(conn: Connection, windows: Mapping[str, Window]) -> None:
    rows = []
    for name, window in windows.items():
        rows.append({"its_name": name, "new_body": window.to_bytes(), "new_until": window.until})
    conn.execute(_WRITE, rows)


def _uses(conn: Connection, names: Iterable[str]) -> dict[str, RunUse]:
    """Return the use of these runs, as their rows have it."""
    ids = sorted(names)
    if not ids:
        return {}
    total_tokens = RUNS.c.spent_tokens + RUNS.c.held_tokens
    columns = (RUNS.c.id, RUNS.c.seq, total_tokens, RUNS.c.state.in_(WAITING), RUNS.c.ended_at)
    rows = conn.execute(select(*columns).where(RUNS.c.id.in_(ids)))
    return {run: RunUse(seq, tokens, bool(waits), ended_at) for run, seq, tokens, waits, ended_at in rows}
