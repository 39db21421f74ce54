"""Rows of a calibration's trials: one for each worker, model, version and task."""

from msgspec.structs import asdict
from sqlalchemy import Connection, select

from app.core.rating.calibration import Trial
from app.store.sqlkit.tables import TRIALS, insert_into


def note(conn: Connection, trial: Trial) -> None:
    """Store a trial. It replaces an earlier one of the same worker, model, version and task."""
    row = asdict(trial)
    key_columns = [column.name for column in TRIALS.primary_key]
    statement = insert_into(conn, TRIALS).values(row)
    conn.execute(statement.on_conflict_do_update(index_elements=key_columns, set_=row))


def read_all(conn: Connection, news: float | None) -> tuple[Trial, ...]:
    """Return all trials, the oldest first. With `news`, none at all unless one is later, which is cheap to ask
    often."""
    if news is not None and conn.execute(select(TRIALS.c.at).where(TRIALS.c.at > news).limit(1)).first() is None:
        return ()
    query = select(TRIALS).order_by(TRIALS.c.at, TRIALS.c.worker, TRIALS.c.task)
    return tuple(Trial(**row._mapping) for row in conn.execute(query))
