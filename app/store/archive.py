"""Reads whole journals for an auditor: run by run, the oldest first, each in the state of one moment.

Nothing is written or migrated. A page in memory holds a bounded number of runs and of bytes. Rows are returned as they
are stored, bodies as their exact bytes, and nothing is checked: that is the auditor's task.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import astuple
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import asyncpg
from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Engine,
    Select,
    Table,
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

from app.core.pool.budgets import whole_account
from app.core.pool.conductor_versions import Change
from app.core.records import record
from app.errors import StoreUnavailable
from app.store.protocol import PrunedRun, PruneQuery
from app.store.rows import content, content_keys, texts
from app.store.rows.retention import prunable
from app.store.sqlkit.postgres import postgres_engine
from app.store.sqlkit.runner import parse_url
from app.store.sqlkit.sealing import Keyring, MasterKey, Open, UnknownKeys
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


@record(frozen=True, slots=True)
class Stored:
    """An event as it is stored."""

    seq: int
    kind: str
    at: float
    body: bytes


@record(frozen=True, slots=True)
class Record:
    """Everything that is stored of one run. `row`, `tickets` and `disclosures` have the columns of their tables."""

    row: Mapping[str, Any]
    events: tuple[Stored, ...]
    contents: Mapping[str, bytes]
    tickets: tuple[Mapping[str, Any], ...]
    disclosures: tuple[Mapping[str, Any], ...] | None = None
    """None where the source has no ledger of disclosures."""
    ratings: tuple[Mapping[str, Any], ...] = ()
    """The rows of `feedback`. Their comments are content: they are empty where contents are left out."""


@record(frozen=True, slots=True)
class AccountSums:
    """The sums over all windows of an account, in micro-dollars; `holds` is the sum of the holds of its calls."""

    spent: int
    overrun: int
    held: int
    holds: int


@record(frozen=True, slots=True)
class Administration:
    """The rows of keys, tenants, budgets and legal holds, the changes of conductors' versions, and the log of all, the
    oldest first."""

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

    def __init__(self, engine: Engine | AsyncEngine, keyring: Keyring) -> None:
        self._engine = engine
        self._keyring = keyring

    async def catalogs(self) -> Mapping[str, bytes]:
        """The snapshot of every pool that was in force, by its digest (`core/pool/snapshot.py`)."""
        rows = await self._read(lambda conn: conn.execute(select(CATALOGS)).all())
        return {row.digest: row.body for row in rows}

    async def changes(self) -> tuple[Change, ...]:
        """All changes of conductors' versions, in the order of (at, id)."""
        table = CONDUCTOR_CHANGES
        query = select(table).order_by(table.c.at, table.c.id)
        rows = await self._read(lambda conn: conn.execute(query).all())
        return tuple(Change(**row._mapping) for row in rows)

    async def administration(self) -> Administration:
        """The keys, the tenants, and the log of who changed them."""
        return await self._read(read_administration)

    async def accounts(self) -> Mapping[str, AccountSums]:
        """The sums over all windows of each account of a budget."""
        return await self._read(read_accounts)

    async def unnamed_texts(self) -> int:
        """The number of shared texts that no content of a run names (see `rows/texts.py`)."""
        return await self._read(texts.unused)

    async def records(self, *, run: str | None = None, since: float | None = None) -> AsyncIterator[Record]:
        """Every run; or the run with this id; or the runs admitted from `since` on, in seconds since 1970."""
        after: tuple[float, str] | None = None
        where = _chosen(RUNS, run, since)
        while page := await self._read(partial(_page, where=where, after=after, opened=self._keyring.open)):
            for journal in page:
                yield journal
            after = place(page[-1])

    async def prunable(self, query: PruneQuery, after: tuple[float, str] | None, *, contents: bool) -> Sequence[Record]:
        """The next page of runs that may be pruned, the oldest first; empty after the last one.

        Without `contents` the runs look as if their content had been erased.
        """
        work = partial(
            _page,
            where=prunable(query),
            after=after,
            limit=PRUNED_PAGE,
            opened=self._keyring.open,
            contents=contents,
        )
        return await self._read(work)

    async def pruned(self, *, run: str | None = None, since: float | None = None) -> AsyncIterator[PrunedRun]:
        """The rows that are left of pruned runs, chosen as in `records`, in the order of their ids."""
        where = _chosen(PRUNED_RUNS, run, since)
        last = ""
        while True:
            query = select(PRUNED_RUNS).where(*where, PRUNED_RUNS.c.id > last).order_by(PRUNED_RUNS.c.id)
            page = await self._read(partial(_pruned, query=query.limit(PRUNED_ROWS)))
            for journal in page:
                yield journal
            if len(page) < PRUNED_ROWS:
                return
            last = page[-1].id

    async def orphans(self, limit: int) -> Sequence[tuple[str, bool]]:
        """Runs that other rows name though their own row is gone, and for each True if it was pruned.

        At most `limit` of them.
        """
        return await self._read(partial(orphans, limit=limit))

    async def snapshot(self, work: Callable[[Connection, Open], T]) -> T:
        """Run work that reads as much as it likes, all of it in one snapshot of the database."""
        keys = await self._read_once(content_keys.every)
        await asyncio.to_thread(self._keyring.load, keys)
        return await self._read_once(lambda conn: work(conn, self._open))

    def _open(self, place: str, body: bytes) -> bytes | None:
        """Decrypt a content, all keys of which are loaded: one that is not was destroyed."""
        try:
            return self._keyring.open(place, body)
        except UnknownKeys as unknown:
            self._keyring.load((), unknown.ids)
            return self._keyring.open(place, body)

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
            async with self._engine.connect() as opened:
                return await opened.run_sync(work)
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
    """An engine that is used in the event loop, not on a thread: an auditor has nothing else to do."""
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
    """The place of a run in the order in which pages are read."""
    return record.row["created_at"], record.row["id"]


def _chosen(table: Table, run: str | None, since: float | None) -> list[ColumnElement[bool]]:
    """The conditions for rows of the run with this id, or of runs that were admitted from `since` on."""
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
    opened: Open,
    contents: bool = True,
) -> list[Record]:
    """The next page of runs."""
    further = [tuple_(RUNS.c.created_at, RUNS.c.id) > tuple_(*after)] if after is not None else []
    query = select(RUNS).where(*where, *further).order_by(RUNS.c.created_at, RUNS.c.id).limit(limit or PAGE)
    rows = [named_columns(row) for row in conn.execute(query).mappings()]
    for row in rows:
        del row["thread"]  # it says how contents are stored, and no more about the run
    names = [row["id"] for row in rows]
    if not contents:
        bare = [row | {"salt": None} for row in rows]
        return _records(conn, bare, names, opened=opened, contents=False)
    names = _fitting(conn, names)
    return _records(conn, rows[: len(names)], names, opened=opened)


def _pruned(conn: Connection, query: Select[Any]) -> list[PrunedRun]:
    return [PrunedRun(**row._mapping) for row in conn.execute(query)]


def orphans(conn: Connection, limit: int) -> list[tuple[str, bool]]:
    """The runs without a row that rows of other tables name."""
    named = []
    for table in (EVENTS, DISCLOSURES, TAGS, CONTENTS, SHARED_CONTENTS, TICKETS, FEEDBACK):
        known = exists().where(RUNS.c.id == table.c.run)
        named.append(select(table.c.run).where(~known).distinct())
    query = union(*named).limit(limit)
    runs = sorted(conn.execute(query).scalars())
    kept = select(PRUNED_RUNS.c.id).where(PRUNED_RUNS.c.id.in_(runs))
    pruned = set(conn.execute(kept).scalars())
    twice = select(PRUNED_RUNS.c.id).join(RUNS, RUNS.c.id == PRUNED_RUNS.c.id).limit(limit)
    return [(run, run in pruned) for run in runs] + [(run, True) for run in conn.execute(twice).scalars()]


def read_administration(conn: Connection) -> Administration:
    """The rows of keys, tenants, budgets and legal holds, and the log of changes."""
    changes = conn.execute(select(CONDUCTOR_CHANGES).order_by(CONDUCTOR_CHANGES.c.at, CONDUCTOR_CHANGES.c.id))
    events = conn.execute(select(ADMIN_EVENTS).order_by(ADMIN_EVENTS.c.seq))
    since = conn.execute(select(FORMS.c.since).where(FORMS.c.name == "admin_events")).scalar_one_or_none()
    return Administration(
        keys=tuple(named_columns(row) for row in conn.execute(select(KEYS)).mappings()),
        tenants=tuple(named_columns(row) for row in conn.execute(select(TENANTS)).mappings()),
        budgets=tuple(named_columns(row) for row in conn.execute(select(BUDGETS)).mappings()),
        holds=tuple(named_columns(row) for row in conn.execute(select(HOLDS)).mappings()),
        changes=tuple(Change(**row._mapping) for row in changes),
        events=tuple(named_columns(row) for row in events.mappings()),
        since=float(since or 0.0),
    )


def read_accounts(conn: Connection) -> dict[str, AccountSums]:
    """In one statement, so that a hold and its window are read as they are together. Slices are added to their
    accounts, in whose rows `held` has what they have in escrow."""
    row, hold = BUDGET_WINDOWS.c, BUDGET_HOLDS.c
    held = select(func.sum(hold.usd)).where(hold.account == row.account).scalar_subquery()
    escrow = func.sum(case((row.whole.is_(None), row.escrow), else_=0))
    sums = (func.sum(row.spent), func.sum(row.overrun), func.sum(row.held) - escrow, func.coalesce(held, 0))
    found: dict[str, AccountSums] = {}
    for name, *figures in conn.execute(select(row.account, *sums).group_by(row.account)):
        account = whole_account(name)
        before = found.get(account, AccountSums(0, 0, 0, 0))
        added = [int(old) + int(new) for old, new in zip(astuple(before), figures, strict=True)]
        found[account] = AccountSums(*added)
    return found


def _fitting(conn: Connection, names: Sequence[str]) -> list[str]:
    """The first of these runs whose content fits into `PAGE_BYTES`; at least one."""
    sizes = content.sizes(conn, names)
    kept: list[str] = []
    taken = 0
    for name in names:
        taken += sizes.get(name, 0)
        if kept and taken > PAGE_BYTES:
            break
        kept.append(name)
    return kept


def _records(
    conn: Connection,
    rows: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    *,
    opened: Open,
    contents: bool = True,
) -> list[Record]:
    events: defaultdict[str, list[Stored]] = defaultdict(list)
    bodies = content.of_runs(conn, names, opened) if names and contents else {}
    columns = (EVENTS.c.run, EVENTS.c.seq, EVENTS.c.kind, EVENTS.c.at, EVENTS.c.body)
    query = select(*columns).where(EVENTS.c.run.in_(names)).order_by(EVENTS.c.run, EVENTS.c.seq)
    for name, seq, kind, at, body in conn.execute(query):
        events[name].append(Stored(seq, kind, at, body))
    tickets, ledger = _of_runs(conn, names, TICKETS.c.step), _of_runs(conn, names, DISCLOSURES.c.call)
    ratings = _of_runs(conn, names, FEEDBACK.c.id)
    if not contents:
        for rating in chain.from_iterable(ratings.values()):
            rating["comment"] = ""
    return [
        Record(
            row=row,
            events=tuple(events[row["id"]]),
            contents=bodies.get(row["id"], {}),
            tickets=tuple(tickets[row["id"]]),
            disclosures=tuple(ledger[row["id"]]),
            ratings=tuple(ratings[row["id"]]),
        )
        for row in rows
    ]


def _of_runs(conn: Connection, runs: Sequence[str], order: Column[Any]) -> defaultdict[str, list[dict[str, Any]]]:
    """The rows of the table of this column that belong to these runs, by run, in the order of the column."""
    found: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    table = order.table
    query = select(table).where(table.c.run.in_(runs)).order_by(table.c.run, order)
    for row in conn.execute(query).mappings():
        found[row["run"]].append(named_columns(row))
    return found


def named_columns(row: Mapping[Any, Any]) -> dict[str, Any]:
    """A row by the names of its columns, as plain strings: SQLAlchemy's own strings cannot be written as JSON."""
    return {str(name): value for name, value in row.items()}
