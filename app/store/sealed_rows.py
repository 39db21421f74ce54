"""Reads the transparency log, and the rows that are sealed in it, for an auditor: all in one snapshot of the database.

Rows are returned as they are stored, and nothing is checked: that is the auditor's task.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from msgspec import Struct
from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Select,
    Table,
    Text,
    and_,
    bindparam,
    case,
    cast,
    func,
    or_,
    select,
    text,
    tuple_,
)

from app.store.archive import (
    AccountSums,
    Administration,
    Archive,
    named_columns,
    orphans,
    read_accounts,
    read_administration,
)
from app.store.protocol import ERASED_TAGS
from app.store.rows import content, texts
from app.store.rows.runs import clock
from app.store.sqlkit.sealing import Decrypt
from app.store.sqlkit.statements import columns_of, unnest_arrays
from app.store.sqlkit.tables import (
    ADMIN_EVENTS,
    BUDGET_WINDOWS,
    BUDGETS,
    CATALOGS,
    CONDUCTOR_CHANGES,
    CONTENTS,
    DISCLOSURES,
    EVENTS,
    FEEDBACK,
    HOLDS,
    KEYS,
    LOG_LEAVES,
    LOG_QUEUE,
    LOG_STATE,
    LOG_TILES,
    METADATA,
    POLICIES,
    PRUNED_RUNS,
    RUNS,
    SHARED_CONTENTS,
    TAGS,
    TENANTS,
    TICKETS,
    TRIALS,
)

PAGE = 200
"""Most runs in one page."""
ROWS = 5_000
"""Most rows of other tables that are read at a time."""
KINDS: Mapping[str, Table] = {
    "pruned": PRUNED_RUNS,
    "feedback": FEEDBACK,
    "key": KEYS,
    "tenant": TENANTS,
    "budget": BUDGETS,
    "hold": HOLDS,
    "policy": POLICIES,
    "trial": TRIALS,
    "catalog": CATALOGS,
    "conductor_change": CONDUCTOR_CHANGES,
    "admin_event": ADMIN_EVENTS,
}
"""The table of each kind of an entry, apart from runs. The id of an entry is the primary key of the row, whose columns
are joined with line feeds."""
TABLES_BY_RUN = (RUNS, EVENTS, DISCLOSURES, CONTENTS, SHARED_CONTENTS, TICKETS, FEEDBACK)
"""The tables in which the rows of a run are found by its id."""
_SQLITE_TYPES: Mapping[type, tuple[str, ...]] = {
    str: ("text",),
    bytes: ("blob",),
    int: ("integer",),
    bool: ("integer",),
    float: ("real", "integer"),
}
"""The types of values that SQLite may store for a type of Python's."""
Row = Mapping[str, Any]
Event = tuple[int, str, float, bytes]
Ends = tuple[str, str]
"""The first and the last run of a page. What concerns its runs lies between them, by the order of ids."""
Tag = tuple[str, str, str]
"""A name, a value and the run that has them."""


class LogRow(Struct, frozen=True):
    """A row of the log's entries."""

    place: int
    kind: str
    id: str
    subject: str
    events: int
    entry: bytes
    salt: bytes | None
    frontier: bytes | None


class SealedRun(Struct, frozen=True):
    """Everything that is stored of one run, and the log's entries about it."""

    row: Row
    events: Sequence[Event]
    """Each as (seq, kind, at, body)."""
    entries: Sequence[LogRow]
    """All entries about the run itself, the oldest first."""
    erasures: Sequence[LogRow]
    """All entries about the erasure of its content."""
    private: Sequence[Row]
    """The tags that are erased with its content, sorted."""
    disclosures: Sequence[Row]
    contents: Mapping[str, bytes]
    threads: Sequence[tuple[int, str]]
    """The number of the owner and the last text of each of its contents that begins with shared texts."""
    last_claim: int
    """The highest number of a claim on one of its tickets; 0 if there is none."""


class SealedRows:
    """A database that is open for reading in one transaction."""

    def __init__(self, conn: Connection, decrypt: Decrypt) -> None:
        """`decrypt` decrypts contents."""
        self._conn = conn
        self._decrypt = decrypt

    def state(self) -> Row | None:
        """Return the state of the log; None if it has no row."""
        row = self._conn.execute(select(LOG_STATE).where(LOG_STATE.c.id == 1)).mappings().one_or_none()
        if row is None:
            return None
        return named_columns(row)

    def count_states(self) -> int:
        """Return the number of rows of the state; there is one."""
        return self._conn.execute(select(func.count()).select_from(LOG_STATE)).scalar_one()

    def latest_transaction(self) -> int | None:
        """Return the number that the next transaction would have; None on SQLite, which has no such numbers."""
        if self._conn.dialect.name != "postgresql":
            return None
        query = text("SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint")
        number: int = self._conn.execute(query).scalar_one()
        return number

    def count_skipped_changes(self, xid: int) -> int:
        """Return the number of changes that wait and are of a transaction before this one, so that no pass takes
        them."""
        query = select(func.count()).select_from(LOG_QUEUE).where(LOG_QUEUE.c.xid < xid)
        return self._conn.execute(query).scalar_one()

    def find_mistyped_values(self, run: str | None = None) -> Iterator[tuple[str, str, str, str]]:
        """Yield values whose type their columns do not have, each as the table, the primary key, the column and the
        type. Nothing can be read from such a row. Postgres stores none; SQLite stores what it is given.

        With a `run`, only its own rows are read, in the tables in which they are found by the run.
        """
        if self._conn.dialect.name == "postgresql":
            return
        tables: Iterable[Table] = METADATA.sorted_tables
        if run is not None:
            tables = TABLES_BY_RUN
        for table in tables:
            mistyped = _rows_with_mistyped_values(table)
            if run is not None:
                mistyped = mistyped.where((table.c.id if table is RUNS else table.c.run) == run)
            for row in self._conn.execute(mistyped):
                types_of_values = row[-len(table.columns) :]
                key = " ".join([str(value) for value in row[: -len(table.columns)]])
                for column, stored_type in zip(table.columns, types_of_values, strict=True):
                    if stored_type not in _allowed_types(column):
                        yield table.name, key, str(column.name), str(stored_type)

    def clock(self) -> float:
        """Return the time by the clock of the database, in seconds since 1970."""
        return clock(self._conn)

    def read_queued_changes(self) -> Sequence[tuple[str, str, float]]:
        """Return the changes that wait to be sealed, each as the kind, the id, and when it was made."""
        row = LOG_QUEUE.c
        return [(kind, id_, at) for kind, id_, at in self._conn.execute(select(row.kind, row.id, row.at))]

    def has_entries(self) -> bool:
        """Return True if anything was ever sealed."""
        return self._conn.execute(select(LOG_LEAVES.c.place).limit(1)).first() is not None

    def entries(self) -> Iterator[LogRow]:
        """Yield every entry of the log, in its order."""
        last = -1
        while True:
            query = select(LOG_LEAVES).where(LOG_LEAVES.c.place > last).order_by(LOG_LEAVES.c.place).limit(ROWS)
            page = [_log_row(row._mapping) for row in self._conn.execute(query)]
            yield from page
            if len(page) < ROWS:
                return
            last = page[-1].place

    def tile(self, level: int, number: int) -> bytes:
        """Return the hashes of a tile; empty if there is none."""
        conditions = LOG_TILES.c.level == level, LOG_TILES.c.number == number
        body = self._conn.execute(select(LOG_TILES.c.body).where(*conditions)).scalar_one_or_none()
        return bytes(body or b"")

    def count_tiles(self) -> int:
        """Return the number of all tiles."""
        return self._conn.execute(select(func.count()).select_from(LOG_TILES)).scalar_one()

    def runs(self, *, contents: bool) -> Iterator[SealedRun]:
        """Yield every run, by id."""
        last = ""
        while True:
            query = select(RUNS).where(RUNS.c.id > last).order_by(RUNS.c.id).limit(PAGE)
            rows = [named_columns(row) for row in self._conn.execute(query).mappings()]
            if rows:
                yield from self._read_runs(rows, contents=contents)
            if len(rows) < PAGE:
                return
            last = rows[-1]["id"]

    def _read_runs(self, rows: Sequence[Row], *, contents: bool) -> Iterator[SealedRun]:
        names = [row["id"] for row in rows]
        ends = (names[0], names[-1])
        events: defaultdict[str, list[Event]] = defaultdict(list)
        columns = (EVENTS.c.run, EVENTS.c.seq, EVENTS.c.kind, EVENTS.c.at, EVENTS.c.body)
        query = select(*columns).where(EVENTS.c.run.between(*ends)).order_by(EVENTS.c.run, EVENTS.c.seq)
        for run, seq, kind, at, body in self._conn.execute(query).all():
            events[run].append((seq, kind, at, body))
        entries = self._entries_of(LOG_LEAVES.c.subject.between(*ends), "run", "erasure")
        private, disclosures = self._private(ends), self._disclosures(ends)
        bodies = content.of_runs(self._conn, names, self._decrypt) if contents else {}
        threads = self._threads(ends)
        claims = self._claims([row["id"] for row in rows if row["ended_at"] is None])
        for row in rows:
            name = row["id"]
            run_entries: list[LogRow] = []
            erasures: list[LogRow] = []
            for entry in entries.get(name, ()):
                if entry.kind == "run":
                    run_entries.append(entry)
                else:
                    erasures.append(entry)
            yield SealedRun(
                row=row,
                events=events[name],
                entries=run_entries,
                erasures=erasures,
                private=private.get(name, ()),
                disclosures=disclosures.get(name, ()),
                contents=bodies.get(name, {}),
                threads=threads.get(name, ()),
                last_claim=claims.get(name, 0),
            )

    def _threads(self, ends: Ends) -> Mapping[str, Sequence[tuple[int, str]]]:
        shared = SHARED_CONTENTS.c
        query = select(shared.run, shared.owner, shared.head).where(shared.run.between(*ends), shared.head.is_not(None))
        threads: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
        for run, owner, head in self._conn.execute(query):
            threads[run].append((owner, head))
        return threads

    def _claims(self, runs: Sequence[str]) -> Mapping[str, int]:
        ticket = TICKETS.c
        query = select(ticket.run, func.max(ticket.claim)).where(ticket.run.in_(runs)).group_by(ticket.run)
        return {run: claim for run, claim in self._conn.execute(query)}

    def entries_about(self, kind: str, ids: Sequence[str]) -> Mapping[str, Sequence[LogRow]]:
        """Return all entries of this kind about the things of these ids, the oldest first."""
        row = LOG_LEAVES.c
        by_subject = row.subject if kind != "feedback" else row.id
        return self._entries_of(by_subject.in_(ids), kind)

    def _entries_of(self, condition: ColumnElement[bool], *kinds: str) -> Mapping[str, Sequence[LogRow]]:
        row = LOG_LEAVES.c
        query = select(LOG_LEAVES).where(condition, row.kind.in_(kinds)).order_by(row.place)
        entries: defaultdict[str, list[LogRow]] = defaultdict(list)
        for entry_row in self._conn.execute(query):
            entries[entry_row.id].append(_log_row(entry_row._mapping))
        return entries

    def _private(self, ends: Ends) -> Mapping[str, Sequence[Row]]:
        of_callers = TAGS.c.name.in_(bindparam("of_callers", ERASED_TAGS, expanding=True, literal_execute=True))
        query = select(TAGS).where(TAGS.c.run.between(*ends), of_callers)
        tags: defaultdict[str, list[Row]] = defaultdict(list)
        for name, value, run in sorted([tuple(row) for row in self._conn.execute(query)]):
            tags[run].append({"name": name, "value": value})
        return tags

    def _disclosures(self, ends: Ends) -> Mapping[str, Sequence[Row]]:
        row = DISCLOSURES.c
        query = select(DISCLOSURES).where(row.run.between(*ends)).order_by(row.run, row.call)
        rows: defaultdict[str, list[Row]] = defaultdict(list)
        for disclosure in self._conn.execute(query).mappings():
            rows[disclosure["run"]].append(named_columns(disclosure))
        return rows

    def tags(self, tags: Sequence[Tag]) -> set[Tag]:
        """Return the tags among these that are stored."""
        if self._conn.dialect.name == "postgresql":  # a join with arrays costs it a tenth of a long list
            rows, names = unnest_arrays({str(column.name): column.type for column in TAGS.columns}, "")
            conditions = [column == rows.c[column.name] for column in TAGS.columns]
            arrays = dict(zip(names, columns_of(tags, len(names)), strict=True))
            query = select(TAGS).join(rows, and_(*conditions))
            return {(name, value, run) for name, value, run in self._conn.execute(query, arrays)}
        stored_tags: set[Tag] = set()
        key = tuple_(TAGS.c.name, TAGS.c.value, TAGS.c.run)
        for start in range(0, len(tags), PAGE):
            query = select(TAGS).where(key.in_(tags[start : start + PAGE]))
            stored_tags |= {(name, value, run) for name, value, run in self._conn.execute(query)}
        return stored_tags

    def find_entries_with_secrets(self) -> Iterator[LogRow]:
        """Yield the entries of pruned runs that have what is deleted with a run: their salt, or a frontier."""
        row = LOG_LEAVES.c
        is_pruned = row.subject.in_(select(PRUNED_RUNS.c.id)), row.kind != "pruned"
        has_secrets = or_(row.salt.is_not(None), row.frontier.is_not(None))
        for leaf in self._conn.execute(select(LOG_LEAVES).where(*is_pruned, has_secrets).order_by(row.place)):
            yield _log_row(leaf._mapping)

    def count_tags(self) -> int:
        """Return the number of all tags, but for those that are erased with content."""
        query = select(func.count()).select_from(TAGS).where(TAGS.c.name.not_in(ERASED_TAGS))
        return self._conn.execute(query).scalar_one()

    def all_tags(self) -> Iterator[Tag]:
        """Yield every tag, but for those that are erased with content."""
        last = ("", "", "")
        key = tuple_(TAGS.c.name, TAGS.c.value, TAGS.c.run)
        while True:
            query = select(TAGS).where(key > last, TAGS.c.name.not_in(ERASED_TAGS))
            query = query.order_by(TAGS.c.name, TAGS.c.value, TAGS.c.run)
            page = [(name, value, run) for name, value, run in self._conn.execute(query.limit(ROWS))]
            yield from page
            if len(page) < ROWS:
                return
            last = page[-1]

    def rows(self, kind: str) -> Iterator[tuple[str, Row, Sequence[LogRow]]]:
        """Yield every row of the table of this kind with its id and the entries about it."""
        table = KINDS[kind]
        keys = list(table.primary_key.columns)
        last: tuple[Any, ...] | None = None
        at_once = ROWS if kind == "feedback" else PAGE  # no index leads to its entries: each time the log is read
        while True:
            query = select(table).order_by(*keys).limit(ROWS)
            page = [named_columns(row) for row in self._conn.execute(_behind(query, keys, last)).mappings()]
            for start in range(0, len(page), at_once):
                some_rows = page[start : start + at_once]
                ids = [_id_of(row, keys) for row in some_rows]
                entries = self.entries_about(kind, ids)
                for id_, row in zip(ids, some_rows, strict=True):
                    yield id_, row, entries.get(id_, ())
            if len(page) < ROWS:
                return
            last = tuple([page[-1][key.name] for key in keys])

    def find_entries_without_row(self, kind: str) -> Iterator[LogRow]:
        """Yield the last entry of this kind about each thing that is not stored."""
        table = RUNS if kind == "run" else KINDS[kind]
        row = LOG_LEAVES.c
        absent_ids = select(row.id).where(row.kind == kind).except_(select(_identity(table)))
        last = select(func.max(row.place)).where(row.kind == kind, row.id.in_(absent_ids)).group_by(row.id)
        query = select(LOG_LEAVES).where(row.place.in_(last)).order_by(row.place)
        for entry_row in self._conn.execute(query):
            yield _log_row(entry_row._mapping)

    def find_pruned_runs(self, runs: Sequence[str]) -> Mapping[str, Row]:
        """Return the rows that are left of those of these runs that were pruned."""
        rows: dict[str, Row] = {}
        for start in range(0, len(runs), PAGE):
            query = select(PRUNED_RUNS).where(PRUNED_RUNS.c.id.in_(runs[start : start + PAGE]))
            rows |= {row["id"]: named_columns(row) for row in self._conn.execute(query).mappings()}
        return rows

    def salts(self, runs: Sequence[str]) -> Mapping[str, bytes | None]:
        """Return the salts of those of these runs that are stored; None where the content was erased."""
        rows: dict[str, bytes | None] = {}
        for start in range(0, len(runs), PAGE):
            query = select(RUNS.c.id, RUNS.c.salt).where(RUNS.c.id.in_(runs[start : start + PAGE]))
            rows |= {run: salt for run, salt in self._conn.execute(query)}
        return rows

    def orphans(self) -> Sequence[tuple[str, bool]]:
        """Return runs that other rows name though their own row is gone, and for each True if it was pruned."""
        return orphans(self._conn, ROWS)

    def accounts(self) -> Mapping[str, AccountSums]:
        """Return what the accounts of budgets have spent and hold."""
        return read_accounts(self._conn)

    def windows(self) -> Sequence[Row]:
        """Return the windows of the accounts of budgets."""
        return [named_columns(row) for row in self._conn.execute(select(BUDGET_WINDOWS)).mappings()]

    def catalogs(self) -> Mapping[str, bytes]:
        """Return the snapshots of all pools, by digest."""
        return {row.digest: bytes(row.body) for row in self._conn.execute(select(CATALOGS))}

    def count_unnamed_texts(self) -> int:
        """Return the number of shared texts that no content of a run names."""
        return texts.count_unused(self._conn)

    def count_missing_texts(self) -> int:
        """Return the number of texts and contents that name a shared text which is not stored."""
        return texts.count_missing(self._conn)

    def count_misplaced_texts(self) -> int:
        """Return the number of shared texts that have another tenant than what names them."""
        return texts.count_misplaced(self._conn)

    def administration(self) -> Administration:
        """Return the keys, tenants, budgets and holds, and the log of who changed them."""
        return read_administration(self._conn)


def _id_of(row: Row, keys: Sequence[Any]) -> str:
    """Return the id of the entries about a row."""
    return "\n".join([str(row[key.name]) for key in keys])


def _identity(table: Table) -> ColumnElement[str]:
    """Return the id of an entry about a row of a table."""
    first, *others = table.primary_key.columns
    identity: ColumnElement[str] = first if first.type.python_type is str else cast(first, Text)
    for key in others:
        identity = identity + "\n" + key
    return identity


def _behind(query: Any, keys: Sequence[Any], last: tuple[Any, ...] | None) -> Any:
    if last is None:
        return query
    if len(keys) > 1:
        return query.where(tuple_(*keys) > last)
    return query.where(keys[0] > last[0])


def _log_row(row: Mapping[Any, Any]) -> LogRow:
    salt, frontier = row["salt"], row["frontier"]
    return LogRow(
        place=row["place"],
        kind=row["kind"],
        id=row["id"],
        subject=row["subject"],
        events=row["events"],
        entry=bytes(row["entry"]),
        salt=bytes(salt) if salt is not None else None,
        frontier=bytes(frontier) if frontier is not None else None,
    )


@cache
def _rows_with_mistyped_values(table: Table) -> Select[*tuple[Any, ...]]:
    """Select the primary key and the type of each value of the rows that have a value of a type which its column does
    not have. It is built once for each table, because that takes longer than reading a small one."""
    keys = [cast(key, Text) for key in table.primary_key.columns]
    stored_types = [_stored_type(column) for column in table.columns]
    conditions = []
    for column, stored_type in zip(table.columns, stored_types, strict=True):
        conditions.append(stored_type.not_in(_allowed_types(column)))
    return select(*keys, *stored_types).where(or_(*conditions)).limit(ROWS)


def _allowed_types(column: Column[Any]) -> tuple[str, ...]:
    """Return SQLite's names of the types that the values of a column may have."""
    return (*_SQLITE_TYPES[column.type.python_type], "null")


def _stored_type(column: Column[Any]) -> ColumnElement[str]:
    """Return SQL for the type of a value in SQLite. A boolean other than 0 and 1 reads as true, although queries that
    compare it with 1 do not find it, so that is another type."""
    stored_type = func.typeof(column)
    if column.type.python_type is not bool:
        return stored_type
    return case((cast(column, BigInteger).not_in((0, 1)), "number other than 0 and 1"), else_=stored_type)


async def in_one_snapshot(archive: Archive, work: Callable[[SealedRows], None]) -> None:
    """Read as much as `work` likes, all in one snapshot of the database. Raises `StoreUnavailable`."""
    await archive.snapshot(lambda conn, decrypt: work(SealedRows(conn, decrypt)))
