"""Rows of the transparency log: its state, its queue, its entries and tiles, and proofs about them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, func, select, text, tuple_, update
from sqlalchemy.dialects import postgresql, sqlite

from app.core.records import record
from app.core.transparency.merkle import inclusion_proof
from app.core.transparency.notes import parse_checkpoint, split_note
from app.core.transparency.tiles import WIDTH, hashes_of, node_reader
from app.store.protocol.transparency_log import LogState, Proof, ProvenLeaf
from app.store.rows.runs import clock
from app.store.sqlkit.statements import Statements
from app.store.sqlkit.tables import LOG_LEAVES, LOG_QUEUE, LOG_STATE, LOG_TILES, RUNS

LEDGER = "ledger"
"""The kind of a row of the queue for a run whose ledger of disclosures was completed."""
MOST_COUNTED = 10_000
"""The most waiting changes that are counted."""
HORIZON = text(
    "SELECT pg_snapshot_xmin(snapshot)::text::bigint, pg_snapshot_xmax(snapshot)::text::bigint "
    "FROM pg_current_snapshot() AS snapshot"
)
Place = tuple[int, int]
"""A level and a number of a tile."""


@record(frozen=True, slots=True)
class Waiting:
    """A row of the queue: something of this kind and id was changed at this time."""

    n: int
    kind: str
    id: str
    xid: int
    at: float


@record(frozen=True, slots=True)
class Last:
    """The last entry about something."""

    entry: bytes
    salt: bytes | None
    events: int
    frontier: bytes | None


# -- the state and the queue


def lock(conn: Connection) -> Any:
    """The row of the log's state, locked; None if another process has it."""
    return conn.execute(select(LOG_STATE).with_for_update(skip_locked=True)).one_or_none()


@record(frozen=True, slots=True)
class Window:
    """Numbers of transactions: nothing of those before `since` waits, and those before `horizon` have all ended."""

    since: int
    horizon: int


def window(conn: Connection, known: int) -> Window:
    """The window that begins with the transaction `known`, up to which everything is sealed.

    Everything before the horizon is committed or was rolled back, and is seen by the statements that follow. A database
    that was restored elsewhere counts transactions anew, from less than the `known` one: whatever waits there is
    committed, and gets the number 0. SQLite has one writer, and the number 0 for all of its transactions.
    """
    if conn.dialect.name != "postgresql":
        return Window(0, 0)
    lowest, following = conn.execute(HORIZON).one()
    if following < known:
        conn.execute(update(LOG_QUEUE).values(xid=0))
        known = 0
    return Window(known, int(lowest))


def waiting(conn: Connection, since: int, most: int) -> list[Waiting]:
    """The first rows of the queue, from this transaction on."""
    row = LOG_QUEUE.c
    chosen = select(LOG_QUEUE).where(row.xid >= since).order_by(row.xid, row.n).limit(most)
    return [Waiting(*found) for found in conn.execute(chosen).all()]


def taken(conn: Connection, statements: Statements, numbers: Sequence[int]) -> None:
    """Remove rows from the queue."""
    if numbers:
        among = "= ANY(CAST(:ids AS bigint[]))" if statements.arrays else "IN (SELECT value FROM json_each(:ids))"
        conn.execute(text(f"DELETE FROM log_queue WHERE n {among}"), {"ids": statements.values(numbers)})


def queue_runs(conn: Connection, runs: Iterable[str]) -> None:
    """Have these runs sealed again, where something about them was changed without an event."""
    postgres = conn.dialect.name == "postgresql"
    xid = "pg_current_xact_id()::text::bigint" if postgres else "0"
    queued = text(f"INSERT INTO log_queue (kind, id, xid, at) VALUES ('{LEDGER}', :run, {xid}, :at)")
    now = clock(conn)
    for run in runs:
        conn.execute(queued, {"run": run, "at": now})


def oldest(conn: Connection) -> float | None:
    """When the first change that still waits was made; None if none does."""
    row = LOG_QUEUE.c
    found: float | None = conn.execute(select(row.at).order_by(row.xid, row.n).limit(1)).scalar_one_or_none()
    return found


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


def change_state(conn: Connection, **values: Any) -> None:
    conn.execute(update(LOG_STATE).values(**values))


def state(conn: Connection) -> LogState:
    """The state of the log."""
    row = conn.execute(select(LOG_STATE)).one()
    counted = select(LOG_QUEUE.c.n).limit(MOST_COUNTED).subquery()
    since = oldest(conn)
    return LogState(
        size=row.size,
        checkpoint=row.checkpoint,
        sealed_at=row.sealed_at,
        verifiers=(row.verifiers or "").split(),
        stored_key=row.signer is not None and _signs(row.signer, row.verifiers),
        waiting=conn.execute(select(func.count()).select_from(counted)).scalar_one(),
        lag=max(clock(conn) - since, 0.0) if since is not None else 0.0,
        catching_up=row.catch_up is not None,
    )


def _signs(signer: str, verifiers: str | None) -> bool:
    """True if the stored key is one of those in force: it is named by the same name and id."""
    mark = signer.removeprefix("PRIVATE+KEY+").split("+")[:2]
    return any(one.split("+")[:2] == mark for one in (verifiers or "").split())


# -- entries and tiles


def last_entries(conn: Connection, statements: Statements, subjects: Sequence[str]) -> dict[tuple[str, str], Last]:
    """The last entry about each thing of these subjects, by its kind and id."""
    row = LOG_LEAVES.c
    about = select(func.max(row.place)).where(statements.among(row.subject)).group_by(row.subject, row.kind, row.id)
    chosen = select(row.kind, row.id, row.entry, row.salt, row.events, row.frontier).where(row.place.in_(about))
    found = conn.execute(chosen, {"ids": statements.values(subjects)}).all()
    return {(kind, name): Last(*others) for kind, name, *others in found}


def tiles(conn: Connection, places: Iterable[Place]) -> dict[Place, bytes]:
    """The bodies of these tiles, of those that there are."""
    row = LOG_TILES.c
    wanted = list(places)
    if not wanted:
        return {}
    chosen = select(LOG_TILES).where(tuple_(row.level, row.number).in_(wanted))
    return {(level, number): bytes(body) for level, number, body in conn.execute(chosen)}


def write_tiles(conn: Connection, bodies: Mapping[Place, bytes]) -> None:
    """Store tiles, in place of those that are there."""
    made = postgresql.insert if conn.dialect.name == "postgresql" else sqlite.insert
    statement = made(LOG_TILES)
    upsert = statement.on_conflict_do_update(
        index_elements=[LOG_TILES.c.level, LOG_TILES.c.number], set_={"body": statement.excluded.body}
    )
    conn.execute(upsert, [{"level": level, "number": number, "body": body} for (level, number), body in bodies.items()])


def tile(conn: Connection, level: int, number: int) -> bytes:
    """The hashes of a tile; empty if there is none."""
    return tiles(conn, [(level, number)]).get((level, number), b"")


def entries(conn: Connection, number: int) -> tuple[bytes, ...]:
    """The entries of a bundle."""
    row = LOG_LEAVES.c
    its_own = row.place.between(number * WIDTH, number * WIDTH + WIDTH - 1)
    return tuple(
        [bytes(entry) for entry in conn.execute(select(row.entry).where(its_own).order_by(row.place)).scalars()]
    )


# -- proofs


def proof(conn: Connection, run: str) -> Proof:
    """The entries about a run, with the proofs that they are in the tree of the checkpoint."""
    note: str | None = conn.execute(select(LOG_STATE.c.checkpoint)).scalar_one()
    if note is None:
        return Proof(None, ())
    size = parse_checkpoint(split_note(note)[0]).size
    row = LOG_LEAVES.c
    chosen = select(row.place, row.entry, row.salt).where(row.subject == run, row.place < size).order_by(row.place)
    node = node_reader(_tile_reader(conn))
    found = [
        ProvenLeaf(place, bytes(entry), salt, inclusion_proof(place, size, node))
        for place, entry, salt in conn.execute(chosen).all()
    ]
    return Proof(note, found)


def _tile_reader(conn: Connection) -> Callable[[int, int], Sequence[bytes]]:
    """Reads each tile once."""
    known: dict[Place, Sequence[bytes]] = {}

    def hashes(level: int, number: int) -> Sequence[bytes]:
        if (level, number) not in known:
            known[level, number] = hashes_of(tile(conn, level, number))
        return known[level, number]

    return hashes
