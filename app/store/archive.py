"""Reads whole journals for an auditor: run by run, the oldest first, each in the state of one moment.

Nothing is written or migrated. A page in memory holds a bounded number of runs and of bytes. Rows are returned as they
are stored, bodies as their exact bytes, and nothing is checked: that is the auditor's task.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import asyncpg
from msgspec import Struct
from msgspec.structs import astuple
from sqlalchemy import (
    Column,
    ColumnElement,
    CompoundSelect,
    Connection,
    Engine,
    Integer,
    Select,
    Table,
    bindparam,
    case,
    create_engine,
    event,
    exists,
    func,
    select,
    tuple_,
    union,
)
from sqlalchemy.engine import URL
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from app.core.pool.budgets import account_of_slice
from app.core.pool.conductor_versions import Change
from app.errors import StoreUnavailable
from app.store.protocol import ABOUT_RUNS, PrunedRun, PruneQuery
from app.store.rows import content, content_keys, texts
from app.store.rows.retention import prunable
from app.store.sqlkit.postgres import postgres_engine
from app.store.sqlkit.runner import parse_url
from app.store.sqlkit.sealing import Decrypt, Keyring, MasterKey, UnknownKeys
from app.store.sqlkit.statements import RUN_IDS
from app.store.sqlkit.tables import (
    ADMIN_EVENTS,
    BUDGET_HOLDS,
    BUDGET_WINDOWS,
    BUDGETS,
    CATALOGS,
    CONDUCTOR_CHANGES,
    CONTENTS,
    DISCLOSURES,
    EVENTS,
    FEEDBACK,
    FORMS,
    HOLDS,
    KEYS,
    PRUNED_RUNS,
    RUNS,
    SHARED_CONTENTS,
    TAGS,
    TENANTS,
    TICKETS,
)

T = TypeVar("T")

CONNECT_SECONDS = 10.0
"""Longest wait for a connection. An auditor is in no hurry, and the database may be busy."""
PAGE = 200
"""Most runs in one page."""
PRUNED_PAGE = 200
"""Most runs in one page of those that are to be pruned: an engine reads them while it works."""
PRUNED_ROWS = 5_000
"""Most rows of pruned runs that are read at a time."""
PAGE_BYTES = 32 * 2**20
"""Most bytes of content in one page, unless a single run has more."""


# -- the statements: they are built once, because building them takes longer than an audit of a small database

_MOST = bindparam("most", type_=Integer)
"""The most rows of a statement."""


def _rows_of_runs(order: Column[Any]) -> Select[Any]:
    """Select the rows of the table of this column that belong to some runs, by run, in the order of the column."""
    table = order.table
    return select(table).where(table.c.run.in_(RUN_IDS)).order_by(table.c.run, order)


def _runs_without_row() -> CompoundSelect[Any]:
    """Select the runs that rows of other tables name and that have no row of their own."""
    queries = []
    for table in (EVENTS, DISCLOSURES, TAGS, CONTENTS, SHARED_CONTENTS, TICKETS, FEEDBACK):
        has_row = exists().where(RUNS.c.id == table.c.run)
        queries.append(select(table.c.run).where(~has_row).distinct())
    return union(*queries).limit(_MOST)


def _sums_of_accounts() -> Select[Any]:
    """Select the sums over the windows of each account or slice. A single statement reads a hold and its window as they
    are together. The row of an account holds what its slices have in escrow, which is left out here."""
    row, hold = BUDGET_WINDOWS.c, BUDGET_HOLDS.c
    holds = select(hold.account, func.sum(hold.usd).label("usd")).group_by(hold.account).subquery()
    escrow = func.sum(case((row.whole.is_(None), row.escrow), else_=0))
    held = func.sum(row.held) - escrow
    sums = (func.sum(row.spent), func.sum(row.overrun), held, func.coalesce(func.max(holds.c.usd), 0))
    query = select(row.account, *sums).select_from(BUDGET_WINDOWS)
    return query.outerjoin(holds, holds.c.account == row.account).group_by(row.account)


_OLDEST_FIRST = select(RUNS).order_by(RUNS.c.created_at, RUNS.c.id)
_EVENTS = (
    select(EVENTS.c.run, EVENTS.c.seq, EVENTS.c.kind, EVENTS.c.at, EVENTS.c.body)
    .where(EVENTS.c.run.in_(RUN_IDS))
    .order_by(EVENTS.c.run, EVENTS.c.seq)
)
_TICKETS = _rows_of_runs(TICKETS.c.step)
_DISCLOSURES = _rows_of_runs(DISCLOSURES.c.call)
_RATINGS = _rows_of_runs(FEEDBACK.c.id)
_RUNS_WITHOUT_ROW = _runs_without_row()
_PRUNED_AMONG = select(PRUNED_RUNS.c.id).where(PRUNED_RUNS.c.id.in_(RUN_IDS))
_PRUNED_WITH_ROW = select(PRUNED_RUNS.c.id).join(RUNS, RUNS.c.id == PRUNED_RUNS.c.id).limit(_MOST)
_CATALOGS = select(CATALOGS)
_KEYS = select(KEYS)
_TENANTS = select(TENANTS)
_BUDGETS = select(BUDGETS)
_HOLDS = select(HOLDS)
_CHANGES = select(CONDUCTOR_CHANGES).order_by(CONDUCTOR_CHANGES.c.at, CONDUCTOR_CHANGES.c.id)
_LOGGED = select(ADMIN_EVENTS).order_by(ADMIN_EVENTS.c.seq)
_ADMIN_EVENTS = _LOGGED.where(ADMIN_EVENTS.c.action.not_in(ABOUT_RUNS))
_HOLD_CHANGES = _LOGGED.where(ADMIN_EVENTS.c.action.in_(("hold.placed", "hold.released")))
_LOGGED_SINCE = select(FORMS.c.since).where(FORMS.c.name == "admin_events")
_SUMS_OF_ACCOUNTS = _sums_of_accounts()


class StoredEvent(Struct, frozen=True):
    """An event as it is stored."""

    seq: int
    kind: str
    at: float
    body: bytes


class Record(Struct, frozen=True):
    """Everything that is stored of one run. `row`, `tickets` and `disclosures` have the columns of their tables."""

    row: Mapping[str, Any]
    events: tuple[StoredEvent, ...]
    contents: Mapping[str, bytes]
    tickets: tuple[Mapping[str, Any], ...]
    disclosures: tuple[Mapping[str, Any], ...] | None = None
    """None where the source has no ledger of disclosures."""
    ratings: tuple[Mapping[str, Any], ...] = ()
    """The rows of `feedback`. Their comments are content: they are empty where contents are left out."""


class AccountSums(Struct, frozen=True):
    """The sums over all windows of an account, in micro-dollars; `holds` is the sum of the holds of its calls."""

    spent: int
    overrun: int
    held: int
    holds: int


class Administration(Struct, frozen=True):
    """The rows of keys, tenants, budgets and legal holds, the changes of conductors' versions, and the log of all, the
    oldest first. What the log says of content is left out: of each reading and erasure there is an entry."""

    keys: tuple[Mapping[str, Any], ...]
    tenants: tuple[Mapping[str, Any], ...]
    budgets: tuple[Mapping[str, Any], ...]
    holds: tuple[Mapping[str, Any], ...]
    changes: tuple[Change, ...]
    events: tuple[Mapping[str, Any], ...]
    since: float
    """The time from which on every new key has its making in the log, in seconds since 1970."""


class Archive:
    """A database that is open for reading."""

    is_whole = True
    """It has every run that was not pruned."""

    def __init__(self, engine: Engine | AsyncEngine, keyring: Keyring) -> None:
        self._engine = engine
        self._keyring = keyring

    async def catalogs(self) -> Mapping[str, bytes]:
        """Return the snapshot of every pool that was in force, by its digest (`core/pool/snapshot.py`)."""
        rows = await self._read(lambda conn: conn.execute(_CATALOGS).all())
        return {row.digest: row.body for row in rows}

    async def changes(self) -> tuple[Change, ...]:
        """Return all changes of conductors' versions, in the order of (at, id)."""
        rows = await self._read(lambda conn: conn.execute(_CHANGES).all())
        return tuple(Change(**row._mapping) for row in rows)

    async def administration(self) -> Administration:
        """Return the keys, the tenants, and the log of who changed them."""
        return await self._read(read_administration)

    async def hold_changes(self) -> Sequence[Mapping[str, Any]]:
        """Return the entries of the log of changes about legal holds, the oldest first."""
        return await self._read(partial(_all_rows, query=_HOLD_CHANGES))

    async def accounts(self) -> Mapping[str, AccountSums]:
        """Return the sums over all windows of each account of a budget."""
        return await self._read(read_accounts)

    async def count_unnamed_texts(self) -> int:
        """Return the number of shared texts that no content of a run names (see `rows/texts.py`)."""
        return await self._read(texts.count_unused)

    async def records(
        self, *, run: str | None = None, since: float | None = None, contents: bool = True
    ) -> AsyncIterator[Record]:
        """Yield every run; or the run with this id; or the runs admitted from `since` on, in seconds since 1970.

        Without `contents` the runs look as if their content had been erased.
        """
        after: tuple[float, str] | None = None
        where = _conditions(RUNS, run, since)
        read = partial(_page, where=where, decrypt=self._keyring.open, contents=contents)
        while page := await self._read(partial(read, after=after)):
            for journal in page:
                yield journal
            after = place(page[-1])

    async def prunable(self, query: PruneQuery, after: tuple[float, str] | None, *, contents: bool) -> Sequence[Record]:
        """Return the next page of runs that may be pruned, the oldest first; empty after the last one.

        Without `contents` the runs look as if their content had been erased.
        """
        work = partial(
            _page,
            where=prunable(query),
            after=after,
            limit=PRUNED_PAGE,
            decrypt=self._keyring.open,
            contents=contents,
        )
        return await self._read(work)

    async def count_prunable(self, query: PruneQuery) -> tuple[int, int]:
        """Return the number of runs that may be pruned, and of their events."""
        counts = select(func.count(), func.coalesce(func.sum(RUNS.c.seq), 0)).where(*prunable(query))
        runs, events = await self._read(lambda conn: conn.execute(counts).one())
        return runs, int(events)

    async def pruned_runs(self, *, run: str | None = None, since: float | None = None) -> AsyncIterator[PrunedRun]:
        """Yield the rows that are left of pruned runs, chosen as in `records`, in the order of their ids."""
        where = _conditions(PRUNED_RUNS, run, since)
        last = ""
        while True:
            query = select(PRUNED_RUNS).where(*where, PRUNED_RUNS.c.id > last).order_by(PRUNED_RUNS.c.id)
            page = await self._read(partial(_pruned_runs, query=query.limit(PRUNED_ROWS)))
            for journal in page:
                yield journal
            if len(page) < PRUNED_ROWS:
                return
            last = page[-1].id

    async def orphans(self, limit: int) -> Sequence[tuple[str, bool]]:
        """Return runs that other rows name though their own row is gone, and for each True if it was pruned.

        At most `limit` of them.
        """
        return await self._read(partial(orphans, limit=limit))

    async def snapshot(self, work: Callable[[Connection, Decrypt], T]) -> T:
        """Run work that reads as much as it likes, all of it in one snapshot of the database.

        A content key is decrypted when the first content needs it: work that reads no content needs no master key.
        """
        keys = {key.id: key for key in await self._read_once(content_keys.read_all)}

        def decrypt(place: str, body: bytes) -> bytes | None:
            try:
                return self._keyring.open(place, body)
            except UnknownKeys as unknown:
                self._keyring.load([keys[name] for name in unknown.ids if name in keys], unknown.ids)
                return self._keyring.open(place, body)

        return await self._read_once(lambda conn: work(conn, decrypt))

    async def _read(self, work: Callable[[Connection], T]) -> T:
        """Run work in one read-only transaction, whose statements all see the same snapshot; again with each content
        key that it needs."""
        while True:
            try:
                return await self._read_once(work)
            except UnknownKeys as unknown:
                rows = await self._read_once(partial(content_keys.of_ids, ids=unknown.ids))
                await asyncio.to_thread(self._keyring.load, rows, unknown.ids)

    async def _read_once(self, work: Callable[[Connection], T]) -> T:
        try:
            if isinstance(self._engine, Engine):
                with self._engine.begin() as conn:
                    return work(conn)
            async with self._engine.connect() as connection:
                return await connection.run_sync(work)
        except (SQLAlchemyError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise StoreUnavailable("The database cannot be read, or has another version's schema.") from error


@asynccontextmanager
async def open_archive(url: str, content_keys: Sequence[MasterKey] = ()) -> AsyncIterator[Archive]:
    """Open the archive of a database. Raises `ConfigInvalid` for the URL, and `StoreUnavailable` for a missing file.

    `content_keys` are the master keys of contents that are encrypted.
    """
    keyring = Keyring(content_keys)
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        engine = _sqlite(parsed)
        try:
            yield Archive(engine, keyring)
        finally:
            engine.dispose()
        return
    remote = postgres_engine(
        parsed,
        hide_parameters=True,
        connect_args={"timeout": CONNECT_SECONDS, "server_settings": {"application_name": "baton audit"}},
        execution_options={"isolation_level": "REPEATABLE READ", "postgresql_readonly": True},
    )
    try:
        yield Archive(remote, keyring)
    finally:
        await remote.dispose()


def _sqlite(url: URL) -> Engine:
    """Return an engine that is used in the event loop, not on a thread: an auditor has nothing else to do."""
    if not Path(str(url.database)).is_file():
        raise StoreUnavailable("There is no database file of that name.")
    engine = create_engine(url, hide_parameters=True)
    event.listen(engine, "connect", _leave_transactions_to_us)
    event.listen(engine, "begin", _begin)
    return engine


def _leave_transactions_to_us(connection: Any, _record: object) -> None:
    connection.isolation_level = None


def _begin(conn: Connection) -> None:
    conn.connection.cursor().execute("BEGIN")


def place(record: Record) -> tuple[float, str]:
    """Return the place of a run in the order in which pages are read."""
    return record.row["created_at"], record.row["id"]


def _conditions(table: Table, run: str | None, since: float | None) -> list[ColumnElement[bool]]:
    """Return the conditions for rows of the run with this id, or of runs that were admitted from `since` on."""
    where: list[ColumnElement[bool]] = []
    if run is not None:
        where.append(table.c.id == run)
    if since is not None:
        where.append(table.c.created_at >= since)
    return where


def _page(
    conn: Connection,
    where: Sequence[ColumnElement[bool]],
    after: tuple[float, str] | None,
    limit: int | None = None,
    *,
    decrypt: Decrypt,
    contents: bool = True,
) -> list[Record]:
    """Return the next page of runs; empty if there are no more."""
    query = _OLDEST_FIRST.where(*where).limit(limit or PAGE)
    if after is not None:
        query = query.where(tuple_(RUNS.c.created_at, RUNS.c.id) > tuple_(*after))
    rows = [named_columns(row) for row in conn.execute(query).mappings()]
    if not rows:
        return []
    for row in rows:
        del row["thread"]  # it says how contents are stored, and no more about the run
    names = [row["id"] for row in rows]
    if not contents:
        without_salts = [row | {"salt": None} for row in rows]
        return _records(conn, without_salts, {}, comments=False)
    names = _fitting(conn, names)
    return _records(conn, rows[: len(names)], content.of_runs(conn, names, decrypt), comments=True)


def _pruned_runs(conn: Connection, query: Select[Any]) -> list[PrunedRun]:
    return [PrunedRun(**row._mapping) for row in conn.execute(query)]


def orphans(conn: Connection, limit: int) -> list[tuple[str, bool]]:
    """Return the runs without a row that rows of other tables name."""
    most = {"most": limit}
    runs = sorted(conn.execute(_RUNS_WITHOUT_ROW, most).scalars())
    pruned: set[str] = set()
    if runs:
        pruned.update(conn.execute(_PRUNED_AMONG, {"runs": runs}).scalars())
    runs_and_states = [(run, run in pruned) for run in runs]
    for run in conn.execute(_PRUNED_WITH_ROW, most).scalars():
        runs_and_states.append((run, True))
    return runs_and_states


def read_administration(conn: Connection) -> Administration:
    """Return the rows of keys, tenants, budgets and legal holds, and the log of changes."""
    since = conn.execute(_LOGGED_SINCE).scalar_one_or_none()
    return Administration(
        keys=_all_rows(conn, _KEYS),
        tenants=_all_rows(conn, _TENANTS),
        budgets=_all_rows(conn, _BUDGETS),
        holds=_all_rows(conn, _HOLDS),
        changes=tuple([Change(**row._mapping) for row in conn.execute(_CHANGES)]),
        events=_all_rows(conn, _ADMIN_EVENTS),
        since=float(since or 0.0),
    )


def _all_rows(conn: Connection, query: Select[Any]) -> tuple[Mapping[str, Any], ...]:
    """Return the rows of a query, by the names of their columns."""
    return tuple([named_columns(row) for row in conn.execute(query).mappings()])


def read_accounts(conn: Connection) -> dict[str, AccountSums]:
    """Return the sums of each account, to which those of its slices are added."""
    sums: dict[str, AccountSums] = {}
    for name, *figures in conn.execute(_SUMS_OF_ACCOUNTS):
        account = account_of_slice(name)
        earlier = sums.get(account, AccountSums(0, 0, 0, 0))
        totals = [int(total) + int(figure) for total, figure in zip(astuple(earlier), figures, strict=True)]
        sums[account] = AccountSums(*totals)
    return sums


def _fitting(conn: Connection, names: Sequence[str]) -> list[str]:
    """Return the first of these runs whose content fits into `PAGE_BYTES`; at least one."""
    sizes = content.sizes(conn, names)
    fitting_names: list[str] = []
    size = 0
    for name in names:
        size += sizes.get(name, 0)
        if fitting_names and size > PAGE_BYTES:
            break
        fitting_names.append(name)
    return fitting_names


def _records(
    conn: Connection,
    rows: Sequence[Mapping[str, Any]],
    contents: Mapping[str, Mapping[str, bytes]],
    *,
    comments: bool,
) -> list[Record]:
    """Return the runs of these rows with their contents, which are given, and all that other tables have of them.
    Without `comments`, those of ratings are empty."""
    names = [row["id"] for row in rows]
    events: defaultdict[str, list[StoredEvent]] = defaultdict(list)
    for name, seq, kind, at, body in conn.execute(_EVENTS, {"runs": names}):
        events[name].append(StoredEvent(seq, kind, at, body))
    tickets = _by_run(conn, _TICKETS, names)
    disclosures = _by_run(conn, _DISCLOSURES, names)
    ratings = _by_run(conn, _RATINGS, names)
    if not comments:
        for rating in chain.from_iterable(ratings.values()):
            rating["comment"] = ""
    records = []
    for row in rows:
        name = row["id"]
        records.append(
            Record(
                row=row,
                events=tuple(events[name]),
                contents=contents.get(name, {}),
                tickets=tuple(tickets[name]),
                disclosures=tuple(disclosures[name]),
                ratings=tuple(ratings[name]),
            )
        )
    return records


def _by_run(conn: Connection, query: Select[Any], runs: Sequence[str]) -> defaultdict[str, list[dict[str, Any]]]:
    """Return the rows that a query has for these runs, by run and in its order."""
    rows_by_run: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in conn.execute(query, {"runs": runs}).mappings():
        rows_by_run[row["run"]].append(named_columns(row))
    return rows_by_run


def named_columns(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a row by the names of its columns, as plain strings: SQLAlchemy's own strings cannot be written as
    JSON."""
    return {str(name): value for name, value in row.items()}
