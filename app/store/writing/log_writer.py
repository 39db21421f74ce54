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

from msgspec import Struct
from sqlalchemy import Connection, Dialect

from app.core.run.journal_hash import leaf as event_hash
from app.core.transparency.leaves import LOG_KEY, ROW, RUN, before_part, events_part, leaf, parse_leaf
from app.core.transparency.merkle import Frontier, leaf_hash, range_root, tree_root
from app.core.transparency.notes import Checkpoint, Signer, sign
from app.core.transparency.tiles import HEIGHT, WIDTH, hashes_of, node_reader
from app.store.protocol.transparency_log import LogState, Proof, SealingResult
from app.store.rows import log_sources, transparency_log
from app.store.rows.log_sources import SOURCES, Row
from app.store.rows.transparency_log import LEDGER, LastEntry, Place, QueuedChange
from app.store.sqlkit.log_statements import LogStatements
from app.store.sqlkit.statements import Statements
from app.store.sqlkit.tables import LOG_LEAVES


class PassLimits(Struct, frozen=True):
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
RandomBytes = Callable[[], bytes]
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
        places, level = [], 0
        while size >> HEIGHT * level:
            number, width = divmod(size >> HEIGHT * level, WIDTH)
            if width:
                places.append((level, number))
            level += 1
        return places

    def append(self, entry: bytes) -> None:
        self._add(0, self.size, leaf_hash(entry))
        self.size += 1

    def _add(self, level: int, index: int, hash_: bytes) -> None:
        """Add a hash to the last tile of a level; a tile that is full then counts as one hash above."""
        place = (level, index // WIDTH)
        hashes = self._tiles.setdefault(place, [])
        hashes.append(hash_)
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

    def __init__(self, conn: Connection, statements: LogStatements, now: float, random_bytes: RandomBytes) -> None:
        self._conn = conn
        self._statements = statements
        self._random_bytes = random_bytes
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

    def seal(self, changes: Sequence[QueuedChange]) -> list[QueuedChange]:
        """Make the entries of these changes. Returns the changes that are sealed now."""
        by_kind: dict[str, dict[str, None]] = {}
        for change in changes:
            by_kind.setdefault(change.kind, {})[change.id] = None
        completed_ledgers = by_kind.pop(LEDGER, {})
        sealed_runs = self._runs(list({**by_kind.pop(RUN, {}), **completed_ledgers}), completed_ledgers)
        for kind, ids in by_kind.items():
            if kind in SOURCES:
                self._rows(kind, list(ids))
        return [change for change in changes if change.kind not in (RUN, LEDGER) or change.id in sealed_runs]

    def _runs(self, runs: list[str], completed_ledgers: Container[str]) -> set[str]:
        """Seal the events of these runs, as many as one pass may. The runs in `completed_ledgers` are sealed again even
        without a new event, because their ledger of disclosures was completed. Returns the runs that are done."""
        conn, statements = self._conn, self._statements
        if not runs:
            return set()
        rows = log_sources.run_rows(conn, statements, runs)
        last = transparency_log.last_entries(conn, statements, runs)
        last_by_run = {run: last[RUN, run] for run in runs if (RUN, run) in last}
        last_seqs = dict.fromkeys(runs, 0) | {run: entry.events for run, entry in last_by_run.items()}
        runs_of_pass = _first_runs(rows, last_seqs, runs, self.limits.events)
        due_runs = []
        for run in runs_of_pass:
            if run in rows and (run in completed_ledgers or rows[run]["seq"] > last_seqs[run]):
                due_runs.append(run)
        if due_runs:
            tags = log_sources.private_tags(conn, statements, due_runs)
            ledger_rows = log_sources.disclosures(conn, statements, due_runs)
            events: dict[str, list[Any]] = {run: [] for run in due_runs}
            for event in log_sources.events_beyond(conn, statements, {run: last_seqs[run] for run in due_runs}):
                if event[1] <= rows[event[0]]["seq"]:  # a later one was committed after the row was read: next pass
                    events[event[0]].append(event)
            for run in due_runs:
                self._run(rows[run], events[run], last_by_run.get(run), tags.get(run, ()), ledger_rows.get(run, ()))
        return set(runs_of_pass)

    def _run(
        self, row: Row, events: Sequence[Any], last: LastEntry | None, tags: Sequence[Row], ledger_rows: Sequence[Row]
    ) -> None:
        """Seal the next events of a run, and the state of its rows; nothing, if both are as they were sealed."""
        if not events and (last is None or last.salt is None):
            return
        if not events and last is not None and last.salt is not None:
            parts = log_sources.run_parts(row, last.salt, tags, ledger_rows)
            if parts == parse_leaf(last.entry).parts:
                return
        frontier = Frontier.from_bytes(last.events, last.frontier or b"") if last is not None else Frontier()
        frontier.extend([event_hash(*event) for event in events])
        salt = self._random_bytes()
        parts = log_sources.run_parts(row, salt, tags, ledger_rows) | events_part(frontier.size, frontier.root())
        self.add(RUN, row["id"], parts, salt=salt, events=frontier.size, frontier=frontier.to_bytes())

    def _rows(self, kind: str, ids: list[str]) -> None:
        """Seal the state of these rows, of those that have changed since they were sealed."""
        source = SOURCES[kind]
        rows = log_sources.rows_of(self._conn, source, ids)
        runs = {name: row[source.run] for name, row in rows.items()} if source.run is not None else {}
        subjects = [runs.get(name, name) for name in ids]
        last = transparency_log.last_entries(self._conn, self._statements, subjects)
        salts = self._salts_of(runs.values()) if source.erased else {}
        for name in ids:
            last_entry, row = last.get((kind, name)), rows.get(name)
            if row is None:
                if source.run is None and last_entry is not None and not parse_leaf(last_entry.entry).gone:
                    self.add(kind, name, {"gone": True})
                continue
            run_salt = salts.get(runs.get(name, ""))
            if last_entry is not None and _is_sealed(last_entry, source, row):
                continue
            salt = self._random_bytes()
            parts = log_sources.row_parts(source, row, salt, run_salt)
            if last_entry is not None and last_entry.salt is not None:
                parts |= before_part(last_entry.salt)
            self.add(kind, name, parts, salt=salt, subject=runs.get(name, name))

    def _salts_of(self, runs: Iterable[str]) -> dict[str, bytes | None]:
        ids = sorted(set(runs))
        rows = log_sources.run_rows(self._conn, self._statements, ids) if ids else {}
        return {run: row["salt"] for run, row in rows.items()}


def _first_runs(rows: Mapping[str, Row], last_seqs: Mapping[str, int], runs: Sequence[str], most: int) -> list[str]:
    """Return the first of these runs, that have at most `most` events to seal; at least one."""
    first_runs: list[str] = []
    events = 0
    for run in runs:
        event_count = rows[run]["seq"] - last_seqs[run] if run in rows else 0
        if first_runs and events + event_count > most:
            break
        first_runs.append(run)
        events += event_count
    return first_runs


def _is_sealed(last_entry: LastEntry, source: log_sources.Source, row: Row) -> bool:
    """Return True if the last entry about a row has its present state."""
    if last_entry.salt is None:
        return False
    parts = log_sources.row_parts(source, row, last_entry.salt, None)
    return bool(parse_leaf(last_entry.entry).parts.get(ROW) == parts[ROW])


class StoredSigner:
    """The key that is stored in the database. It is read anew only when it is another one."""

    def __init__(self) -> None:
        self._text: str | None = None
        self._signers: tuple[Signer, ...] = ()

    def read(self, text: str) -> tuple[Signer, ...]:
        """Return the key that is written so."""
        if text != self._text:
            self._text, self._signers = text, (Signer.parse(text),)
        return self._signers


def seal(
    conn: Connection,
    statements: LogStatements,
    stored_signer: StoredSigner,
    signers: Sequence[Signer],
    random_bytes: RandomBytes,
) -> SealingResult | None:
    """Carry out one pass. None if another process does so; see the module docstring."""
    state = transparency_log.lock(conn, statements)
    if state is None:
        return None
    before = dict(state)
    statements.common.plan_by_key(conn)
    window = transparency_log.window(conn, statements, state["xid"])
    log_pass = Pass(conn, statements, window.now, random_bytes)
    most = log_pass.limits.changes
    queued_changes = transparency_log.queued_changes(conn, statements, window.since, most)
    signers = signers or _stored_signers(state, stored_signer, random_bytes)
    _name_keys(log_pass, state, signers)
    sealed_changes = log_pass.seal(queued_changes)
    transparency_log.dequeue(conn, statements, [change.n for change in sealed_changes])
    is_complete = len(sealed_changes) == len(queued_changes) < most
    state["xid"] = window.horizon
    if not is_complete:
        state["xid"] = min(window.horizon, _first_left(queued_changes, sealed_changes))
    if is_complete and state["catch_up"] is not None:
        state["catch_up"] = transparency_log.queue_older_runs(conn, state["catch_up"], state["xid"], log_pass.at, most)
        is_complete = state["catch_up"] is None
    if log_pass.entries:
        _append(conn, statements, log_pass, state, signers)
    if state != before:
        transparency_log.change_state(conn, statements, state)
    replaced_keys = ""
    if state["verifiers"] != before["verifiers"]:
        replaced_keys = before["verifiers"] or ""
    return SealingResult(
        leaves=len(log_pass.entries),
        size=state["size"],
        lag=_lag(conn, statements, log_pass.at, sealed_changes),
        more=not is_complete,
        replaced_keys=replaced_keys,
    )


def _first_left(queued_changes: Sequence[QueuedChange], sealed_changes: Sequence[QueuedChange]) -> int:
    """Return the first transaction of which changes may be left in the queue, where a pass could not take all."""
    numbers_left = {change.n for change in queued_changes} - {change.n for change in sealed_changes}
    return min([change.xid for change in queued_changes if change.n in numbers_left], default=queued_changes[-1].xid)


def _stored_signers(
    state: dict[str, Any], stored_signer: StoredSigner, random_bytes: RandomBytes
) -> tuple[Signer, ...]:
    """Return the key that is stored in the state of the log. It is made with the first entry."""
    if state["signer"] is None:
        state["signer"] = Signer(f"baton-{random_bytes()[:6].hex()}", random_bytes() + random_bytes()).secret()
    return stored_signer.read(state["signer"])


def _name_keys(log_pass: Pass, state: dict[str, Any], signers: Sequence[Signer]) -> None:
    """Make an entry that names the keys by which checkpoints are signed from now on, if these are others."""
    verifiers = " ".join([str(signer.verifier) for signer in signers])
    if verifiers != state["verifiers"]:
        log_pass.add(LOG_KEY, verifiers, {})
        state["verifiers"] = verifiers


def _append(
    conn: Connection, statements: LogStatements, log_pass: Pass, state: dict[str, Any], signers: Sequence[Signer]
) -> None:
    """Append the entries of a pass to the tree, and sign it."""
    tree = Tree(state["size"], transparency_log.tiles(conn, statements, Tree.edge(state["size"])))
    rows = []
    for entry in log_pass.entries:
        rows.append((tree.size, *entry))
        tree.append(entry[ENTRY])
    statements.common.write(conn, (statements.insert_entry, rows))
    transparency_log.write_tiles(conn, statements, tree.bodies())
    checkpoint = Checkpoint(signers[0].name, tree.size, tree.root())
    state |= {"size": tree.size, "checkpoint": sign(checkpoint.text, signers), "sealed_at": log_pass.at}


def _lag(conn: Connection, statements: LogStatements, now: float, sealed_changes: Sequence[QueuedChange]) -> float:
    """Return the lag after a pass: see `SealingResult`."""
    since = transparency_log.oldest(conn, statements)
    if since is None:
        since = min([change.at for change in sealed_changes], default=now)
    return max(now - since, 0.0)


class DatabaseLog:
    """Implements `protocol.TransparencyLog`."""

    def __init__(self, statements: Statements, dialect: Dialect, read: Work, write: Work) -> None:
        self._statements = LogStatements(statements, dialect, log_sources.OF_RUN)
        self._read = read
        self._write = write
        self._stored_signer = StoredSigner()

    async def seal(self, signers: Sequence[Signer], random_bytes: RandomBytes) -> SealingResult | None:
        work = partial(
            seal,
            statements=self._statements,
            stored_signer=self._stored_signer,
            signers=signers,
            random_bytes=random_bytes,
        )
        return await self._write(work)

    async def state(self) -> LogState:
        return await self._read(partial(transparency_log.state, statements=self._statements))

    async def tile(self, level: int, number: int) -> bytes:
        return await self._read(partial(transparency_log.tile, level=level, number=number))

    async def entries(self, number: int) -> Sequence[bytes]:
        return await self._read(partial(transparency_log.entries, number=number))

    async def proof(self, run: str) -> Proof:
        return await self._read(partial(transparency_log.proof, run=run))
