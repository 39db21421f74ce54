"""The store over SQLAlchemy Core, on SQLite or Postgres. `open_store` is the way in."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar
from zlib import crc32

from sqlalchemy import Connection

from app.errors import StoreUnavailable
from app.store import content, keys, runs
from app.store.commit import pack
from app.store.engines import Fault, Runner, open_runner
from app.store.lanes import Lane
from app.store.migrate import migrate
from app.store.protocol import Appended, Due, Entry, Held, Journal, KeyRow, RunQuery, RunRow
from app.store.recent import RecentJournals
from app.store.statements import Statements

T = TypeVar("T")

CHUNK = 1000
"""Most runs or tickets in one statement of a renewal."""
READY_SECONDS = 2.0


@asynccontextmanager
async def open_store(
    url: str, *, grace: float = 5.0, patience: float = 5.0, connections: int = 10, lanes: int = 1
) -> AsyncIterator["SqlStore"]:
    """A store that owns its writers until the block is left, when what is waiting has been committed.

    An SQLite file is created and migrated; a Postgres database must have been (`baton migrate`), but need not be up.
    `grace` is how many seconds a ring may go unanswered before the ticket is overdue, `patience` how many an entry may
    wait for its batch.
    """
    runner = open_runner(url, connections)
    if runner.dialect.name == "sqlite":
        await asyncio.to_thread(migrate, url)
        lanes = 1
    store = SqlStore(runner, lanes, grace, patience)
    failure: Exception | None = None
    async with asyncio.TaskGroup() as group:
        for lane in store.lanes:
            group.create_task(lane.run())
        try:
            yield store
        except Exception as error:  # kept apart, because the group would wrap it
            failure = error
        finally:
            await store.close()
    if failure is not None:
        raise failure


class SqlStore:
    """Implements `protocol.Store`; see there for what is promised."""

    def __init__(self, runner: Runner, lanes: int, grace: float, patience: float) -> None:
        self._runner = runner
        self._grace = grace
        self._closed = False
        self._recent = RecentJournals()
        statements = Statements(runner.dialect)
        self.lanes = tuple(Lane(runner, statements, self._recent.wrote, patience) for _ in range(lanes))

    async def append(self, entry: Entry) -> Appended:
        lane = self.lanes[crc32(entry.run.encode()) % len(self.lanes)] if len(self.lanes) > 1 else self.lanes[0]
        return await lane.put(pack(entry))

    async def journal(self, run: str, upto: int | None = None, after: int = 0) -> Journal:
        kept, known = self._recent.journal(run, after)
        if upto is not None and known >= upto:
            return kept
        # What is kept is a true prefix, so only what follows it is read.
        read = await self._read(partial(runs.journal, name=run, after=max(after, known)))
        self._recent.extend(run, read.events)
        return Journal(read.salt, (*kept.events, *read.events))

    async def contents(self, run: str, refs: Sequence[str]) -> Mapping[str, bytes]:
        found = self._recent.contents(run, refs)
        missing = [ref for ref in refs if ref not in found]
        if missing:
            found |= await self._read(partial(content.read, run=run, refs=missing))
        return found

    async def erase(self, run: str) -> bool:
        """Forget a run's content and salt; False if there is no such run."""
        known = await self._write(partial(content.erase, run=run))
        self._recent.forget(run)
        return known

    async def run(self, run: str) -> RunRow:
        return await self._read(partial(runs.run, name=run))

    async def runs(self, query: RunQuery) -> tuple[RunRow, ...]:
        return await self._read(partial(runs.page, query=query))

    async def renew(self, driver: str, epochs: Mapping[str, int], until: float) -> frozenset[str]:
        ours: frozenset[str] = frozenset()
        names = sorted(epochs)
        for start in range(0, len(names), CHUNK):
            chunk = {name: epochs[name] for name in names[start : start + CHUNK]}
            ours |= await self._write(partial(runs.renew, driver=driver, epochs=chunk, until=until))
        return ours

    async def orphans(self, driver: str, now: float, until: float, limit: int) -> tuple[RunRow, ...]:
        # Nearly always there are none, so look before taking the write lock.
        if not await self._read(lambda conn: conn.execute(runs.lapsed(now, 1)).first()):
            return ()
        return await self._write(partial(runs.adopt, driver=driver, now=now, until=until, limit=limit))

    async def keep(self, held: Sequence[Held], until: float) -> frozenset[Held]:
        ours: frozenset[Held] = frozenset()
        for start in range(0, len(held), CHUNK):
            ours |= await self._write(partial(runs.keep, held=held[start : start + CHUNK], until=until))
        return ours

    async def due(self, run: str, step: int) -> Due | None:
        return await self._read(partial(runs.due, name=run, step=step))

    async def overdue(self, now: float, limit: int) -> tuple[Due, ...]:
        if not await self._read(lambda conn: conn.execute(runs.overdue(now, self._grace, 1)).first()):
            return ()
        return await self._write(partial(runs.ring, now=now, grace=self._grace, limit=limit))

    async def key(self, public_id: str) -> KeyRow | None:
        return await self._read(partial(keys.find, public_id=public_id))

    async def keys(self) -> tuple[KeyRow, ...]:
        return await self._read(keys.every)

    async def add_key(self, row: KeyRow) -> bool:
        return await self._write(partial(keys.add, key=row))

    async def revoke_key(self, public_id: str, at: float) -> bool:
        return await self._write(partial(keys.revoke, public_id=public_id, at=at))

    async def ready(self) -> None:
        try:
            async with asyncio.timeout(READY_SECONDS):
                await self._write(runs.beat)
        except TimeoutError as error:
            raise StoreUnavailable(retry_after=1.0) from error

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for lane in self.lanes:
            lane.close()
        for lane in self.lanes:
            await lane.finished.wait()
        await self._runner.close()

    async def _read(self, work: Callable[[Connection], T]) -> T:
        return await _patiently(partial(self._runner.read, work))

    async def _write(self, work: Callable[[Connection], T]) -> T:
        """For work that may be done twice without harm: an unanswered COMMIT is reported as a failure."""
        return await _patiently(partial(self._runner.write, work))


async def _patiently(call: Callable[[], Coroutine[object, object, T]]) -> T:
    """Once more if a pooled connection turned out to be dead; every other fault is the caller's to know."""
    try:
        try:
            return await call()
        except Fault as fault:
            if fault.reason not in {"lost", "contended"}:
                raise
            return await call()
    except Fault as fault:
        raise StoreUnavailable(retry_after=1.0) from fault
