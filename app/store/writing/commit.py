"""One transaction of the journal: many entries in, one outcome each out.

The rows of the runs (and of the tickets, if any entry moves one) are read under lock, the entries applied to them (see
`batch.py`), and what came of it is written at the end. Where the rows are taken to be known (`optimistic.py`) the same
is done without asking for them: `settle` applies a batch to guesses, and `if_so` writes it if they are right.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

import orjson
from sqlalchemy import Connection, select

from app.core.records import record
from app.store.protocol import Appended, Entry
from app.store.rows.idempotency import Claims
from app.store.rows.optimistic import Guess, Guesses
from app.store.sqlkit.statements import TICKET, Statements
from app.store.sqlkit.tables import EVENTS, RUNS
from app.store.writing.batch import Desk, Outcome, Packed, fenced

_STEP, _HOLDER = TICKET.index("step"), TICKET.index("holder")


@record(frozen=True, slots=True)
class Done:
    """What became of a batch: outcomes in the entries' order, and the rows that it leaves behind."""

    outcomes: list[Outcome]
    desk: Desk

    @property
    def left(self) -> Mapping[str, Guess | None]:
        """See `Desk.left`: for whoever keeps guesses."""
        return self.desk.left()


def commit(conn: Connection, statements: Statements, batch: Sequence[Packed]) -> Done:
    """Apply the entries in order, on rows under lock; the caller commits."""
    runs, moving = touched(batch)
    rows, tickets = statements.under_lock(conn, runs, moving)
    ids = sorted({packed.entry.once.id for packed in batch if packed.entry.once is not None})
    desk = Desk(rows, tickets, moving, Claims(statements.claims.fetch(conn, ids)))
    outcomes = [desk.settle(packed) for packed in batch]
    statements.write(conn, *desk.writes(statements))
    desk.write_later(conn, statements)
    return Done(outcomes, desk)


def touched(batch: Sequence[Packed]) -> tuple[list[str], list[str]]:
    """The runs of a batch, and those whose tickets may be moved."""
    moving = {packed.entry.run for packed in batch if packed.moves_tickets}
    return list({packed.entry.run for packed in batch}), list(moving)


@record(frozen=True, slots=True)
class Settled:
    """A batch that was applied to guesses, and is yet to be written."""

    desk: Desk
    guesses: Sequence[Guess]
    moving: Sequence[str]
    done: Done


def settle(batch: Sequence[Packed], guesses: Guesses) -> Settled | None:
    """Apply the entries to what the rows are taken to be; None where they must be asked for.

    That a claim of somebody else's has lapsed is only to be seen on the row itself: it may have been prolonged since.
    """
    runs, moving = touched([packed for packed in batch if packed.entry.new is None])
    known = guesses.of(runs, moving)
    if known is None or any(_needs_rows(packed.entry, known) for packed in batch):
        return None
    ticketed = {run: guess.tickets for run, guess in known.items() if guess.tickets is not None}
    tickets = [row for rows in ticketed.values() for row in rows]
    desk = Desk([guess.run for guess in known.values()], tickets, ticketed.keys(), Claims(()))
    outcomes = [desk.settle(packed) for packed in batch]
    return Settled(desk, list(known.values()), moving, Done(outcomes, desk))


def _needs_rows(entry: Entry, known: Mapping[str, Guess]) -> bool:
    if entry.once is not None or not fenced(entry) or (entry.new is not None and entry.lease is not None):
        return True
    if entry.move is None or entry.move.verb != "take":
        return False
    tickets = known[entry.run].tickets or ()
    return any(ticket[_STEP] == entry.move.step and ticket[_HOLDER] is not None for ticket in tickets)


def if_so(statements: Statements, settled: Settled) -> Callable[[Connection], Done | None]:
    """What writes the batch unless a row is not what it was taken to be, and comes to None then: on a server, one
    statement."""
    runs, moving = [guess.run for guess in settled.guesses], settled.moving
    tickets = [row for guess in settled.guesses if guess.run[0] in moving for row in guess.tickets or ()]
    look, done, wanted = (runs, tickets, moving), settled.done, settled.desk.writes(statements)
    if statements.arrays:
        return statements.asked_if(*look, done, *wanted)
    return lambda conn: done if statements.write_if(conn, *look, *wanted) else None


def landed(conn: Connection, outcomes: Sequence[Outcome]) -> bool | None:
    """Whether a transaction whose COMMIT went unanswered was committed; None if it left nothing to know it by.

    Waits for the row lock, so that a server that is still busy committing has decided by the time we look. One event
    stands for all, because the transaction was atomic; it is one of a run that existed before, if there is one, since
    the row of a new run has no lock that anybody else could see.
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
