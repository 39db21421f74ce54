"""One pass of sealing: it appends to the transparency log what was committed since the last one.

A pass is one transaction, under the lock of the log's row: of several engines one seals at a time, and a pass that is
killed leaves nothing behind. It takes changes from the queue, which triggers fill in the transaction of each change.

On Postgres a pass begins where all transactions had ended at the one before (the snapshot horizon), never later. So a
slow transaction is never passed over, and rows of the queue that were deleted long ago are not read again.

Whether something is sealed already is seen from its last entry, so that a change that is queued twice is sealed once.
"""

from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from sqlalchemy import Connection, Dialect

from app.core.records import record
from app.core.run.journal_hash import leaf as event_hash
from app.core.transparency.leaves import LOG_KEY, ROW, RUN, before_part, events_part, leaf, parse_leaf
from app.core.transparency.merkle import Frontier, leaf_hash, range_root, tree_root
from app.core.transparency.notes import Checkpoint, Signer, sign
from app.core.transparency.tiles import HEIGHT, WIDTH, hashes_of, node_reader
from app.store.protocol.transparency_log import LogState, Proof, Sealed
from app.store.rows import log_sources, transparency_log
from app.store.rows.log_sources import SOURCES, Row
from app.store.rows.transparency_log import LEDGER, Last, Place, Waiting
from app.store.sqlkit.log_statements import LogStatements
from app.store.sqlkit.statements import Statements
from app.store.sqlkit.tables import LOG_LEAVES


@record(frozen=True, slots=True)
class PassLimits:
    """The most changes that one pass takes from the queue, and the most events that it seals, unless a single run has
    more. A run of one step has two changes and nine events: rows of changes that are too many are read in vain."""

    changes: int
    events: int


IN_LOOP = PassLimits(changes=200, events=1_000)
"""On SQLite a pass holds the loop of its process: some 10 ms."""
BETWEEN_AWAITS = PassLimits(changes=400, events=2_000)
"""On Postgres only hashing holds the loop, and each of a pass's 15 statements is a round trip: sealing a backlog takes
a quarter less CPU than in passes as on SQLite (`python -m tests.bench.sealing`)."""
ENTRY = LOG_LEAVES.columns.keys().index("entry") - 1
"""The place of an entry's bytes among its columns behind `place`."""
Fresh = Callable[[], bytes]
T = TypeVar("T")


class Work(Protocol):
    """Runs a function over a connection."""

    def __call__(self, work: Callable[[Connection], T]) -> Awaitable[T]: ...


class Tree:
    """The tiles at the right edge of the tree, to which entries are appended."""

    def __init__(self, size: int, bodies: Mapping[Place, bytes]) -> None:
        self.size = size
        self.changed: set[Place] = set()
        self._tiles = {place: hashes_of(body) for place, body in bodies.items()}

    @staticmethod
    def edge(size: int) -> list[Place]:
        """Return the partial tiles of a tree of this size."""
        found, level = [], 0
        while size >> HEIGHT * level:
            number, width = divmod(size >> HEIGHT * level, WIDTH)
            if width:
                found.append((level, number))
            level += 1
        return found

    def append(self, entry: bytes) -> None:
        self._add(0, self.size, leaf_hash(entry))
        self.size += 1

    def _add(self, level: int, index: int, found: bytes) -> None:
        """Add a hash to the last tile of a level; a tile that is full then counts as one hash above."""
        place = (level, index // WIDTH)
        hashes = self._tiles.setdefault(place, [])
        hashes.append(found)
        self.changed.add(place)
        if len(hashes) == WIDTH:
            self._add(level + 1, place[1], tree_root(hashes))

    def root(self) -> bytes:
        return range_root(0, self.size, node_reader(lambda level, number: self._tiles[level, number]))

    def bodies(self) -> dict[Place, bytes]:
        """Return the tiles that have changed."""
        return {place: b"".join(self._tiles[place]) for place in self.changed}


class Pass:
    """The entries that one pass makes."""

    def __init__(self, conn: Connection, statements: LogStatements, now: float, fresh: Fresh) -> None:
        self._conn = conn
        self._statements = statements
        self._fresh = fresh
        self.limits = BETWEEN_AWAITS if statements.common.arrays else IN_LOOP
        self.at = round(now, 3)
        self.entries: list[tuple[Any, ...]] = []
        """The columns of the new entries, in table order behind `place`."""

    def add(
        self,
        kind: str,
        name: str,
        parts: Mapping[str, Any],
        *,
        salt: bytes | None = None,
        subject: str = "",
        events: int = 0,
        frontier: bytes | None = None,
    ) -> None:
        """Make an entry. Its place in the log is given later."""
        entry = leaf(kind, name, self.at, parts)
        self.entries.append((kind, name, subject or name, events, entry, salt, frontier))

    def seal(self, queued: Sequence[Waiting]) -> list[Waiting]:
        """Make the entries of these changes. Returns the changes that are sealed now."""
        by_kind: dict[str, dict[str, None]] = {}
        for change in queued:
            by_kind.setdefault(change.kind, {})[change.id] = None
        again = by_kind.pop(LEDGER, {})
        done = self._runs(list({**by_kind.pop(RUN, {}), **again}), again)
        for kind, ids in by_kind.items():
            if kind in SOURCES:
                self._rows(kind, list(ids))
        return [change for change in queued if change.kind not in (RUN, LEDGER) or change.id in done]

    def _runs(self, runs: list[str], again: Container[str]) -> set[str]:
        """Seal the events of these runs, as many as one pass may, and `again` those whose ledger was completed without
        an event. Returns the runs that are done."""
        conn, statements = self._conn, self._statements
        if not runs:
            return set()
        rows = log_sources.run_rows(conn, statements, runs)
        last = transparency_log.last_entries(conn, statements, runs)
        before = {run: last[RUN, run] for run in runs if (RUN, run) in last}
        sealed = {run: before[run].events if run in before else 0 for run in runs}
        chosen = _bounded(rows, sealed, runs, self.limits.events)
        there = [run for run in chosen if run in rows and (run in again or rows[run]["seq"] > sealed[run])]
        if there:
            private = log_sources.private_tags(conn, statements, there)
            disclosed = log_sources.disclosures(conn, statements, there)
            events: dict[str, list[Any]] = {run: [] for run in there}
            for event in log_sources.events_beyond(conn, statements, {run: sealed[run] for run in there}):
                if event[1] <= rows[event[0]]["seq"]:  # a later one was committed after the row was read: next pass
                    events[event[0]].append(event)
            for run in there:
                self._run(rows[run], events[run], before.get(run), private.get(run, ()), disclosed.get(run, ()))
        return set(chosen)

    def _run(
        self, row: Row, events: Sequence[Any], last: Last | None, private: Sequence[Row], disclosed: Sequence[Row]
    ) -> None:
        """Seal the next events of a run, and the state of its rows; nothing, if both are as they were sealed."""
        if not events and (last is None or last.salt is None):
            return
        if not events and last is not None and last.salt is not None:
            parts = log_sources.run_parts(row, last.salt, private, disclosed)
            if parts == parse_leaf(last.entry).parts:
                return
        frontier = Frontier.parsed(last.events, last.frontier or b"") if last is not None else Frontier()
        frontier.extend([event_hash(*event) for event in events])
        salt = self._fresh()
        parts = log_sources.run_parts(row, salt, private, disclosed) | events_part(frontier.size, frontier.root())
        self.add(RUN, row["id"], parts, salt=salt, events=frontier.size, frontier=frontier.stored())

    def _rows(self, kind: str, ids: list[str]) -> None:
        """Seal the state of these rows, of those that have changed since they were sealed."""
        source = SOURCES[kind]
        rows = log_sources.rows_of(self._conn, source, ids)
        runs = {name: row[source.run] for name, row in rows.items()} if source.run is not None else {}
        subjects = [runs.get(name, name) for name in ids]
        last = transparency_log.last_entries(self._conn, self._statements, subjects)
        salts = self._salts_of(runs.values()) if source.erased else {}
        for name in ids:
            before, row = last.get((kind, name)), rows.get(name)
            if row is None:
                if source.run is None and before is not None and not parse_leaf(before.entry).gone:
                    self.add(kind, name, {"gone": True})
                continue
            run_salt = salts.get(runs.get(name, ""))
            if before is not None and _is_sealed(before, source, row):
                continue
            salt = self._fresh()
            parts = log_sources.row_parts(source, row, salt, run_salt)
            if before is not None and before.salt is not None:
                parts |= before_part(before.salt)
            self.add(kind, name, parts, salt=salt, subject=runs.get(name, name))

    def _salts_of(self, runs: Iterable[str]) -> dict[str, bytes | None]:
        wanted = sorted(set(runs))
        rows = log_sources.run_rows(self._conn, self._statements, wanted) if wanted else {}
        return {run: row["salt"] for run, row in rows.items()}


def _bounded(rows: Mapping[str, Row], sealed: Mapping[str, int], runs: Sequence[str], most: int) -> list[str]:
    """Return the first of these runs, that have at most `most` events to seal; at least one."""
    chosen: list[str] = []
    events = 0
    for run in runs:
        more = rows[run]["seq"] - sealed[run] if run in rows else 0
        if chosen and events + more > most:
            break
        chosen.append(run)
        events += more
    return chosen


def _is_sealed(before: Last, source: log_sources.Source, row: Row) -> bool:
    """Return True if the last entry about a row has its present state."""
    if before.salt is None:
        return False
    found = log_sources.row_parts(source, row, before.salt, None)
    return bool(parse_leaf(before.entry).parts.get(ROW) == found[ROW])


class StoredSigner:
    """The key that is stored in the database. It is read anew only when it is another one."""

    def __init__(self) -> None:
        self._text: str | None = None
        self._signers: tuple[Signer, ...] = ()

    def read(self, text: str) -> tuple[Signer, ...]:
        """Return the key that is written so."""
        if text != self._text:
            self._text, self._signers = text, (Signer.parsed(text),)
        return self._signers


def seal(
    conn: Connection, statements: LogStatements, stored: StoredSigner, signers: Sequence[Signer], fresh: Fresh
) -> Sealed | None:
    """Carry out one pass. None if another process does so; see the module docstring."""
    state = transparency_log.lock(conn, statements)
    if state is None:
        return None
    statements.common.plan_by_key(conn)
    window = transparency_log.window(conn, statements, state["xid"])
    made = Pass(conn, statements, window.now, fresh)
    most = made.limits.changes
    queued = transparency_log.waiting(conn, statements, window.since, most)
    changes: dict[str, Any] = {}
    if not signers:
        if state["signer"] is None:
            changes["signer"] = Signer(f"baton-{fresh()[:6].hex()}", fresh() + fresh()).secret()
        signers = stored.read(changes.get("signer", state["signer"]))
    changes |= _keys_in_force(made, state, signers)
    done = made.seal(queued)
    transparency_log.taken(conn, statements, [change.n for change in done])
    whole = len(done) == len(queued) < most
    place = window.horizon
    if not whole:
        place = min(window.horizon, _first_left(queued, done))
    if whole and state["catch_up"] is not None:
        changes["catch_up"] = transparency_log.queue_older_runs(conn, state["catch_up"], place, made.at, most)
        whole = changes["catch_up"] is None
    if place != state["xid"]:
        changes["xid"] = place
    if made.entries:
        changes |= _append(conn, statements, made, state["size"], signers)
    if changes:
        state |= changes
        transparency_log.change_state(conn, statements, state)
    return Sealed(len(made.entries), state["size"], _lag(conn, statements, made.at, done), not whole)


def _first_left(queued: Sequence[Waiting], done: Sequence[Waiting]) -> int:
    """Return the first transaction of which changes may be left in the queue, where a pass could not take all."""
    left = {change.n for change in queued} - {change.n for change in done}
    return min([change.xid for change in queued if change.n in left], default=queued[-1].xid)


def _keys_in_force(made: Pass, state: Mapping[str, Any], signers: Sequence[Signer]) -> dict[str, Any]:
    """Return the changes of the state that name the keys by which checkpoints are signed from now on. An entry names
    them."""
    verifiers = " ".join([str(signer.verifier) for signer in signers])
    if verifiers == state["verifiers"]:
        return {}
    made.add(LOG_KEY, verifiers, {})
    return {"verifiers": verifiers}


def _append(
    conn: Connection, statements: LogStatements, made: Pass, size: int, signers: Sequence[Signer]
) -> dict[str, Any]:
    """Append the entries of a pass to the tree and sign it. Returns the changes of the state."""
    tree = Tree(size, transparency_log.tiles(conn, statements, Tree.edge(size)))
    rows = []
    for entry in made.entries:
        rows.append((tree.size, *entry))
        tree.append(entry[ENTRY])
    statements.common.write(conn, (statements.insert_entry, rows))
    transparency_log.write_tiles(conn, statements, tree.bodies())
    checkpoint = Checkpoint(signers[0].name, tree.size, tree.root())
    return {"size": tree.size, "checkpoint": sign(checkpoint.text, signers), "sealed_at": made.at}


def _lag(conn: Connection, statements: LogStatements, now: float, done: Sequence[Waiting]) -> float:
    """Return the lag after a pass: see `Sealed`."""
    since = transparency_log.oldest(conn, statements)
    if since is None:
        since = min([change.at for change in done], default=now)
    return max(now - since, 0.0)


class DatabaseLog:
    """Implements `protocol.TransparencyLog`."""

    def __init__(self, statements: Statements, dialect: Dialect, read: Work, write: Work) -> None:
        self._statements = LogStatements(statements, dialect, log_sources.OF_RUN)
        self._read = read
        self._write = write
        self._stored = StoredSigner()

    async def seal(self, signers: Sequence[Signer], fresh: Fresh) -> Sealed | None:
        work = partial(seal, statements=self._statements, stored=self._stored, signers=signers, fresh=fresh)
        return await self._write(work)

    async def state(self) -> LogState:
        return await self._read(partial(transparency_log.state, statements=self._statements))

    async def tile(self, level: int, number: int) -> bytes:
        return await self._read(partial(transparency_log.tile, level=level, number=number))

    async def entries(self, number: int) -> Sequence[bytes]:
        return await self._read(partial(transparency_log.entries, number=number))

    async def proof(self, run: str) -> Proof:
        return await self._read(partial(transparency_log.proof, run=run))
