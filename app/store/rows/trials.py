"""Trials of a calibration, as rows: one for each worker, model, version and task."""

from dataclasses import asdict

from sqlalchemy import Connection, select
from sqlalchemy.dialects import postgresql, sqlite

from app.core.rating.calibration import Trial
from app.store.sqlkit.tables import TRIALS


def note(conn: Connection, trial: Trial) -> None:
    """Keep a trial, in the place of an earlier one of the same name."""
    insert = postgresql.insert if conn.dialect.name == "postgresql" else sqlite.insert
    row = asdict(trial)
    named = [column.name for column in TRIALS.primary_key]
    statement = insert(TRIALS).values(row)
    conn.execute(statement.on_conflict_do_update(index_elements=named, set_=row))


def every(conn: Connection, news: float | None) -> tuple[Trial, ...]:
    """All of them, oldest first; none unless one is later than `news`, for who looks every second."""
    if news is not None and conn.execute(select(TRIALS.c.at).where(TRIALS.c.at > news).limit(1)).first() is None:
        return ()
    query = select(TRIALS).order_by(TRIALS.c.at, TRIALS.c.worker, TRIALS.c.task)
    return tuple(Trial(**row._mapping) for row in conn.execute(query))
