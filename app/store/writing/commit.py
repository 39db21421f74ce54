"""One transaction of the journal, which commits a batch of entries and returns an outcome for each.

`commit` reads the rows of the runs under lock (and those of the tickets, if an entry moves one), applies the entries to
them (see `batch.py`) and writes the changes. If the rows are cached (`optimistic.py`) this takes one round trip:
`apply_to_cached_rows` applies the batch, and `conditional_write` writes it if the rows are current.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

import orjson
from sqlalchemy import Connection, select

from app.core.records import record
from app.store.protocol import Appended, Entry
from app.store.rows.idempotency import Claims
from app.store.rows.optimistic import CachedRows, RowCache
from app.store.sqlkit.prepared import Row, SingleStatement
from app.store.sqlkit.statements import TICKET, Statements
from app.store.sqlkit.tables import EVENTS, RUNS
from app.store.writing.batch import EncodedEntry, Outcome, RowBatch, fenced

_STEP, _HOLDER = TICKET.index("step"), TICKET.index("holder")


@record(frozen=True, slots=True)
class Applied:
    """A batch after it was applied: the outcomes in the order of the entries, and the rows."""

    outcomes: list[Outcome]
    rows: RowBatch

    @property
    def left(self) -> Mapping[str, CachedRows | None]:
        """The rows after the write, for the row cache (see `RowBatch.left`)."""
        return self.rows.left()


def commit(conn: Connection, statements: Statements, batch: Sequence[EncodedEntry]) -> Applied:
    """Apply the entries in order on locked rows, and write the changes. The caller commits."""
    runs, moving = touched(batch)
    if len(runs) > 1:
        statements.plan_by_key(conn)
    found, tickets = statements.under_lock(conn, runs, moving)
    ids = sorted({encoded.entry.once.id for encoded in batch if encoded.entry.once is not None})
    rows = RowBatch(found, tickets, moving, Claims(statements.claims.fetch(conn, ids)))
    outcomes = [rows.apply(encoded) for encoded in batch]
    statements.write(conn, *rows.writes(statements))
    rows.write_later(conn, statements)
    return Applied(outcomes, rows)


def touched(batch: Sequence[EncodedEntry]) -> tuple[list[str], list[str]]:
    """The runs of a batch, and those of them whose tickets may change."""
    moving = {encoded.entry.run for encoded in batch if encoded.moves_tickets}
    return list({encoded.entry.run for encoded in batch}), list(moving)


@record(frozen=True, slots=True)
class Speculative:
    """A batch that was applied to cached rows and is not written yet."""

    rows: RowBatch
    cached: Sequence[CachedRows]
    moving: Sequence[str]
    done: Applied


def apply_to_cached_rows(batch: Sequence[EncodedEntry], row_cache: RowCache) -> Speculative | None:
    """Apply the entries to cached rows; None if rows are not cached, or if the entries need them from the database.

    A claim on a ticket may have been renewed since it was cached, so only the row tells whether it has lapsed.
    """
    runs, moving = touched([encoded for encoded in batch if encoded.entry.new is None])
    known = row_cache.find(runs, moving)
    if known is None or any(_needs_rows(encoded.entry, known) for encoded in batch):
        return None
    tickets: list[Row] = []
    ticketed: list[str] = []
    for run, cached in known.items():
        if cached.tickets is not None:
            tickets += cached.tickets
            ticketed.append(run)
    rows = RowBatch([cached.run for cached in known.values()], tickets, ticketed, Claims(()))
    outcomes = [rows.apply(encoded) for encoded in batch]
    return Speculative(rows, list(known.values()), moving, Applied(outcomes, rows))


def _needs_rows(entry: Entry, known: Mapping[str, CachedRows]) -> bool:
    if entry.once is not None or not fenced(entry):
        return True
    if entry.move is None or entry.move.verb != "take":
        return False
    tickets = known[entry.run].tickets or ()
    return any(ticket[_STEP] == entry.move.step and ticket[_HOLDER] is not None for ticket in tickets)


def conditional_write(
    statements: Statements, speculative: Speculative
) -> Callable[[Connection], Applied | None] | SingleStatement[Applied | None]:
    """Work that writes the batch, or writes nothing and returns None if a run's row has another revision than was
    cached. On Postgres it is one statement."""
    known = [cached.known for cached in speculative.cached]
    applied, wanted = speculative.done, speculative.rows.writes(statements)
    if statements.arrays:
        return statements.current_or_nothing(known, speculative.moving, applied, *wanted)
    return lambda conn: applied if statements.write_if_current(conn, known, *wanted) else None


def was_committed(conn: Connection, outcomes: Sequence[Outcome]) -> bool | None:
    """True if a transaction whose COMMIT was not answered was committed; None if it wrote no event to look for.

    Waits for the row lock, so that a server that is still committing has decided by then. It looks for one event,
    because the transaction was atomic: one of a run that existed before if there is one, since nobody else can see a
    lock on the row of a new run.
    """
    firsts = [outcome.events[0] for outcome in outcomes if isinstance(outcome, Appended) and outcome.events]
    event = max(firsts, key=attrgetter("seq"), default=None)
    if event is None:
        return None
    conn.execute(select(RUNS.c.id).where(RUNS.c.id == event.run).with_for_update())
    query = select(EVENTS.c.kind, EVENTS.c.at, EVENTS.c.body).where(
        EVENTS.c.run == event.run, EVENTS.c.seq == event.seq
    )
    found = conn.execute(query).one_or_none()
    return found is not None and (found.kind, found.at, orjson.loads(found.body)) == (event.kind, event.at, event.body)
