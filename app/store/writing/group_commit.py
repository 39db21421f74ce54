"""Group commit: whatever waits is written together, and nothing waits for company.

A lane writes one batch at a time; while it is being committed the next one gathers. The entries of one run always take
the same lane, so that they stay in order. The queue is bounded, and an entry that waited too long is given up before it
is written, never after.
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

from app.errors import Conflict, StoreUnavailable
from app.network import retries
from app.network.retries import retried
from app.store.protocol import UNDECIDED, Appended
from app.store.rows.optimistic import RowCache
from app.store.sqlkit.availability import DatabaseAvailability
from app.store.sqlkit.engines import AWAY, Fault, Runner
from app.store.sqlkit.statements import Statements
from app.store.writing.batch import EncodedEntry, Outcome
from app.store.writing.commit import Applied, commit, conditional_write, settle, was_committed

logger = logging.getLogger(__name__)

ROOM = 4096
ROOM_FOR_NEW = 1024
"""Beyond it only runs that were admitted are served: they must not wait because more keep coming."""
ROOM_BYTES = 128 * 2**20
BATCH = 256
BATCH_BYTES = 8 * 2**20
TRIES = 6
DECIDE_SECONDS = 10.0
"""How long to go on asking whether a transaction was committed whose COMMIT went unanswered."""

UNKNOWN = "The database went away while this was written, so it is not known whether it was; try again shortly."


@dataclass(slots=True)
class _Waiting:
    encoded: EncodedEntry
    future: asyncio.Future[Appended]
    since: float


class GroupCommit:
    """One writer and its queue."""

    def __init__(
        self,
        runner: Runner,
        statements: Statements,
        committed: Callable[[EncodedEntry, Appended], None],
        patience: float,
        availability: DatabaseAvailability,
        row_cache: RowCache | None = None,
    ) -> None:
        """`committed` is told of each entry before its caller is; `patience` is in seconds, for the queue alone. With
        `row_cache` a first try does not ask for rows that they know."""
        self._availability = availability
        self._row_cache = row_cache
        self._losses = runner.losses
        self._runner = runner
        self._statements = statements
        self._committed = committed
        self._patience = patience
        self._waiting: deque[_Waiting] = deque()
        self._bytes = 0
        self._bell = asyncio.Event()
        self._closed = False
        self.finished = asyncio.Event()

    def put(self, encoded: EncodedEntry) -> asyncio.Future[Appended]:
        """Queue an entry; `StoreUnavailable` at once if there is no room."""
        if self._closed or len(self._waiting) >= ROOM or self._bytes >= ROOM_BYTES:
            raise StoreUnavailable(retry_after=1.0)
        if encoded.entry.new is not None and not (self._availability.healthy and len(self._waiting) < ROOM_FOR_NEW):
            raise StoreUnavailable(retry_after=1.0)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Appended] = loop.create_future()
        self._waiting.append(_Waiting(encoded, future, loop.time()))
        self._bytes += encoded.size
        self._bell.set()
        return future

    def close(self) -> None:
        """Take nothing more; `run` returns once everything that waits is written."""
        self._closed = True
        self._bell.set()

    async def run(self) -> None:
        """Write batches until closed."""
        try:
            while self._waiting or not self._closed:
                await self._bell.wait()
                self._bell.clear()
                while batch := self._gather():
                    await self._write(batch)
        finally:
            self.finished.set()

    def _gather(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        size, limit = 0, asyncio.get_running_loop().time() - self._patience
        while self._waiting and len(batch) < BATCH and size < BATCH_BYTES:
            waiting = self._waiting.popleft()
            self._bytes -= waiting.encoded.size
            if waiting.future.done():  # the caller went away before anything was written
                continue
            if waiting.since < limit:
                waiting.future.set_exception(StoreUnavailable(retry_after=1.0))
                continue
            batch.append(waiting)
            size += waiting.encoded.size
        return batch

    async def _write(self, batch: list[_Waiting]) -> None:
        outcomes: list[Outcome]
        try:
            outcomes = await self._commit([waiting.encoded for waiting in batch])
            self._availability.there()
        except Exception as error:
            if isinstance(error, Fault) and error.reason in AWAY:
                self._availability.away()
            outcomes = [_unavailable(error) for _ in batch]
        for waiting, outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, Appended):
                self._committed(waiting.encoded, outcome)
                if not waiting.future.done():
                    waiting.future.set_result(outcome)
            elif not waiting.future.done():
                waiting.future.set_exception(outcome)

    async def _commit(self, batch: list[EncodedEntry]) -> list[Outcome]:
        """Write a batch, again as often as it makes sense; raises `Fault` if nothing of it was written, or, where its
        reason is `undecided`, if that could not be found out."""
        unanswered: list[Outcome] = []
        for attempt in range(TRIES):
            try:
                outcomes = await self._transact(batch, locks=attempt > 0)
                return unanswered if _came_late(unanswered, outcomes) else outcomes
            except Fault as fault:
                if fault.reason == "refused" and len(batch) > 1:
                    return await self._one_by_one(batch)
                if fault.reason == "undecided":
                    unanswered = cast(Applied, fault.result).outcomes
                    if await self._was_committed(unanswered, fault):
                        return unanswered
                elif fault.reason not in {"contended", "lost"} or attempt == TRIES - 1:
                    if unanswered:  # which may still have come late
                        raise Fault("undecided", unanswered) from fault
                    raise
            except Exception:  # the driver could not even encode a value
                if len(batch) == 1:
                    raise
                return await self._one_by_one(batch)
            await asyncio.sleep(random.random() * 0.01 * 2**attempt)
        raise Fault("contended")

    async def _transact(self, batch: list[EncodedEntry], *, locks: bool) -> list[Outcome]:
        """Commit a batch in one transaction: on cached rows, unless `locks` or one of them is missing or outdated."""
        try:
            applied = None if locks else await self._write_on_cached_rows(batch)
            if applied is None:
                applied = await self._runner.write(partial(commit, statements=self._statements, batch=batch))
        except Fault as fault:
            if fault.reason in AWAY and self._row_cache is not None:
                self._row_cache.clear()
            raise
        if self._row_cache is not None:
            self._row_cache.update(applied.left)
        return applied.outcomes

    async def _write_on_cached_rows(self, batch: list[EncodedEntry]) -> Applied | None:
        """None, and nothing is written, if the rows have to be read first."""
        if self._row_cache is None:
            return None
        if self._losses != self._runner.losses:
            self._losses = self._runner.losses
            self._row_cache.clear()
        speculative = settle(batch, self._row_cache)
        if speculative is None:
            return None
        return await self._runner.write(conditional_write(self._statements, speculative), meant=speculative.done)

    async def _one_by_one(self, batch: list[EncodedEntry]) -> list[Outcome]:
        """The database did not take something in a batch: only the entry at fault is to suffer."""
        outcomes: list[Outcome] = []
        for encoded in batch:
            try:
                outcomes += await self._commit([encoded])
            except Exception as error:
                outcomes.append(_unavailable(error))
        return outcomes

    async def _was_committed(self, outcomes: list[Outcome], fault: Fault) -> bool:
        loop = asyncio.get_running_loop()
        limit = loop.time() + DECIDE_SECONDS

        async def look() -> bool | None:
            try:
                return await self._runner.write(partial(was_committed, outcomes=outcomes))
            except Fault as again:
                if again.reason in AWAY:
                    self._availability.away()
                raise

        try:
            decided = await retried(look, partial(retries.database, left=lambda: limit - loop.time(), faults=(Fault,)))
        except Fault:
            decided = None
        if decided is None:
            raise fault
        return decided


def _came_late(unanswered: list[Outcome], outcomes: list[Outcome]) -> bool:
    """Whether the attempt that went unanswered was committed after we had looked for it in vain.

    That can only be one that made nothing but new runs (see `was_committed`), and their ids are nobody else's.
    """
    pairs = zip(unanswered, outcomes, strict=False)
    return any(isinstance(was, Appended) and _exists_already(now) for was, now in pairs)


def _exists_already(outcome: Outcome) -> bool:
    return isinstance(outcome, Conflict) and outcome.public_code == Conflict.code


def _unavailable(error: Exception) -> StoreUnavailable:
    if not isinstance(error, Fault):
        logger.error("an entry could not be written", exc_info=error)
    unavailable = StoreUnavailable(retry_after=1.0)
    if isinstance(error, Fault) and error.reason == "undecided":
        unavailable = StoreUnavailable(UNKNOWN, code=UNDECIDED, retry_after=1.0)
    unavailable.__cause__ = error
    return unavailable
