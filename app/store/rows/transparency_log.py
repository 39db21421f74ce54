"""Rows of the transparency log: its state, its queue, its entries and tiles, and proofs about them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from sqlalchemy import Connection, func, select, text, update

from app.core.transparency.leaves import ERASURE
from app.core.transparency.merkle import inclusion_proof
from app.core.transparency.notes import parse_checkpoint, split_note
from app.core.transparency.tiles import WIDTH, hashes_of, node_reader
from app.store.protocol.transparency_log import LogState, Proof, ProvenLeaf
from app.store.rows.runs import clock
from app.store.sqlkit.log_statements import STATE, LogStatements
from app.store.sqlkit.tables import LOG_LEAVES, LOG_QUEUE, LOG_STATE, LOG_TILES, RUNS

LEDGER = "ledger"
"""The kind of a row of the queue for a run whose ledger of disclosures was completed."""
MOST_COUNTED = 10_000
"""The most waiting changes that are counted."""
Place = tuple[int, int]
"""A level and a number of a tile."""


class QueuedChange(Struct, frozen=True):
    """A row of the queue: something of this kind and id was changed at this time."""

    n: int
    kind: str
    id: str
    xid: int
    at: float


class LastEntry(Struct, frozen=True):
    """The last entry about something."""

    entry: bytes
    salt: bytes | None
    events: int
    frontier: bytes | None


# -- the state and the queue


def lock(conn: Connection, statements: LogStatements) -> dict[str, Any] | None:
    """Return the row of the log's state, locked; None if another process has it."""
    rows = statements.lock.fetch(conn)
    if not rows:
        return None
    return dict(zip(STATE, rows[0], strict=True))


class Window(Struct, frozen=True):
    """Numbers of transactions: nothing of those before `since` waits, and those before `horizon` have all ended."""

    since: int
    horizon: int
    now: float
    """The time of the database."""


def window(conn: Connection, statements: LogStatements, sealed_up_to: int) -> Window:
    """Return the window that begins with the transaction `sealed_up_to`, up to which everything is sealed.

    Everything before the horizon is committed or was rolled back, and is seen by the statements that follow. A database
    that was restored elsewhere counts transactions anew, from less than the `sealed_up_to` one: whatever waits there is
    committed, and gets the number 0. SQLite has one writer, and the number 0 for all of its transactions.
    """
    lowest, following, now = statements.moment.fetch(conn)[0]
    if following < sealed_up_to:
        conn.execute(update(LOG_QUEUE).values(xid=0))
        sealed_up_to = 0
    return Window(sealed_up_to, lowest, now)


def queued_changes(conn: Connection, statements: LogStatements, since: int, most: int) -> list[QueuedChange]:
    """Return the first rows of the queue, from this transaction on."""
    return [QueuedChange(*row) for row in statements.queued_changes.fetch(conn, since, most)]


def dequeue(conn: Connection, statements: LogStatements, numbers: Sequence[int]) -> None:
    """Remove rows from the queue."""
    if numbers:
        statements.dequeue.each(conn, [(statements.common.values(numbers),)])


def queue_runs(conn: Connection, runs: Iterable[str], kind: str = LEDGER) -> None:
    """Have something of these runs sealed that was changed without an event: their ledger, or their erasure."""
    postgres = conn.dialect.name == "postgresql"
    xid = "pg_current_xact_id()::text::bigint" if postgres else "0"
    insertion = text(f"INSERT INTO log_queue (kind, id, xid, at) VALUES (:kind, :run, {xid}, :at)")
    now = clock(conn)
    rows = [{"kind": kind, "run": run, "at": now} for run in runs]
    if rows:
        conn.execute(insertion, rows)


def oldest(conn: Connection, statements: LogStatements) -> float | None:
    """Return when the first change that still waits was made; None if none does."""
    rows = statements.oldest.fetch(conn)
    return rows[0][0] if rows else None


_QUEUE_RUNS = """
INSERT INTO log_queue (kind, id, xid, at) SELECT 'run', older.id, :xid, :at FROM
(SELECT id FROM runs WHERE id > :after ORDER BY id LIMIT :most) AS older
"""


def queue_older_runs(conn: Connection, after: str, xid: int, at: float, most: int) -> str | None:
    """Queue the next runs from before the log, and return the last of them; None if there are none. `xid` is where the
    next window begins."""
    page = select(RUNS.c.id).where(RUNS.c.id > after).order_by(RUNS.c.id).limit(most).subquery()
    last: str | None = conn.execute(select(func.max(page.c.id))).scalar_one_or_none()
    if last is not None:
        conn.execute(text(_QUEUE_RUNS), {"after": after, "xid": xid, "at": at, "most": most})
    return last


def change_state(conn: Connection, statements: LogStatements, values: Mapping[str, Any]) -> None:
    """Store the state of the log, all columns of it."""
    row = tuple([values[name] for name in (*STATE[1:], STATE[0])])
    statements.common.write(conn, (statements.change_state, [row]))


def state(conn: Connection, statements: LogStatements) -> LogState:
    """Return the state of the log."""
    row = conn.execute(select(LOG_STATE)).one()
    changes = select(LOG_QUEUE.c.n).limit(MOST_COUNTED).subquery()
    since = oldest(conn, statements)
    lag = 0.0
    if since is not None:
        lag = max(clock(conn) - since, 0.0)
    return LogState(
        size=row.size,
        checkpoint=row.checkpoint,
        sealed_at=row.sealed_at,
        verifiers=(row.verifiers or "").split(),
        stored_key=row.signer is not None and _signs(row.signer, row.verifiers),
        waiting=conn.execute(select(func.count()).select_from(changes)).scalar_one(),
        lag=lag,
        catching_up=row.catch_up is not None,
    )


def _signs(signer: str, verifiers: str | None) -> bool:
    """Return True if the stored key is one of those in force: it is named by the same name and id."""
    mark = signer.removeprefix("PRIVATE+KEY+").split("+")[:2]
    return any(verifier.split("+")[:2] == mark for verifier in (verifiers or "").split())


# -- entries and tiles


def last_entries(
    conn: Connection, statements: LogStatements, subjects: Sequence[str]
) -> dict[tuple[str, str], LastEntry]:
    """Return the last entry about each thing of these subjects, by its kind and id."""
    rows = statements.last_entries.fetch(conn, statements.common.values(subjects))
    return {(kind, name): LastEntry(*others) for kind, name, *others in rows}


def tiles(conn: Connection, statements: LogStatements, places: Iterable[Place]) -> dict[Place, bytes]:
    """Return the bodies of these tiles, of those that there are."""
    rows_by_place = {place: statements.tile.fetch(conn, *place) for place in places}
    return {place: rows[0][0] for place, rows in rows_by_place.items() if rows}


def write_tiles(conn: Connection, statements: LogStatements, bodies: Mapping[Place, bytes]) -> None:
    """Store tiles, in place of those that are there."""
    statements.write_tiles.each(conn, [(*place, body) for place, body in bodies.items()])


def tile(conn: Connection, level: int, number: int) -> bytes:
    """Return the hashes of a tile; empty if there is none."""
    row = LOG_TILES.c
    body = conn.execute(select(row.body).where(row.level == level, row.number == number)).scalar_one_or_none()
    return bytes(body) if body is not None else b""


def entries(conn: Connection, number: int) -> tuple[bytes, ...]:
    """Return the entries of a bundle."""
    row = LOG_LEAVES.c
    is_in_bundle = row.place.between(number * WIDTH, number * WIDTH + WIDTH - 1)
    query = select(row.entry).where(is_in_bundle).order_by(row.place)
    return tuple([bytes(entry) for entry in conn.execute(query).scalars()])


# -- proofs


def proof(conn: Connection, run: str) -> Proof:
    """Return the entries about a run, with the proofs that they are in the tree of the checkpoint. The erasure of its
    content is left out: it adds an entry, and changes nothing about what the others prove."""
    note: str | None = conn.execute(select(LOG_STATE.c.checkpoint)).scalar_one()
    if note is None:
        return Proof(None, ())
    size = parse_checkpoint(split_note(note)[0]).size
    row = LOG_LEAVES.c
    query = select(row.place, row.entry, row.salt).where(row.subject == run, row.kind != ERASURE, row.place < size)
    node = node_reader(_tile_reader(conn))
    leaves = []
    for place, entry, salt in conn.execute(query.order_by(row.place)).all():
        leaves.append(ProvenLeaf(place, bytes(entry), salt, inclusion_proof(place, size, node)))
    return Proof(note, leaves)


def _tile_reader(conn: Connection) -> Callable[[int, int], Sequence[bytes]]:
    """Reads each tile once."""
    hashes_by_place: dict[Place, Sequence[bytes]] = {}

    def hashes(level: int, number: int) -> Sequence[bytes]:
        if (level, number) not in hashes_by_place:
            hashes_by_place[level, number] = hashes_of(tile(conn, level, number))
        return hashes_by_place[level, number]

    return hashes
