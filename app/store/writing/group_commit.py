"""Group commit: all entries that wait are written in one transaction, and none waits for others to arrive.

A `GroupCommit` writes one batch at a time, and entries that arrive during its commit are the next batch, so that they
stay in order. The queue is bounded, and an entry that waited too long for the batches before it is refused before it is
written, never after.

`JournalCache` is the cache of the journals of runs that this process drives.
"""

import asyncio
import logging
import random
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, cast

import orjson

from app.core.contents import trim_capacity
from app.core.pool.budgets import MOST_SLICES
from app.core.run.events import TERMINAL, Event, Kind
from app.errors import BatonError, Conflict, NotFound, StoreUnavailable
from app.network import retries
from app.network.retries import retry
from app.store.protocol import UNDECIDED, AppendResult, Journal, Reader
from app.store.rows.runs import for_cache
from app.store.sqlkit.runner import AWAY, Fault, Runner
from app.store.sqlkit.statements import Statements
from app.store.writing.batch import (
    AppliedBatch,
    EncodedEntry,
    Outcome,
    RowCache,
    SpeculativeBatch,
    apply_to_cached_rows,
    commit,
    conditional_write,
    runs_to_lock,
    was_committed,
)
from app.store.writing.budget_ledger import NeedsAllSlices, Signal

logger = logging.getLogger(__name__)

MOST_WAITING = 4096
MOST_WAITING_FOR_NEW = 1024
"""Entries in the queue beyond which new runs are refused: those that were admitted must not wait for more of them."""
MOST_WAITING_BYTES = 128 * 2**20
BATCH = 256
"""Most entries in one transaction."""
BATCH_BYTES = 8 * 2**20
TRIES = 6
DECIDE_SECONDS = 10.0
"""Seconds for which a transaction is looked up whose COMMIT was not answered."""

UNKNOWN = (
    "The connection to the database broke during this write, and it is not known whether it took place; try again."
)


class DatabaseAvailability:
    """The availability of one store's database, and one probe that waits for its return for all callers.

    Every call reports whether it reached the database. After one that did not, the probe writes a row several times a
    second until that succeeds. Then all waiting callers are woken, in the order in which they came. See
    `protocol.Availability` for what the store promises of it.
    """

    def __init__(self, probe: Callable[[], Awaitable[None]]) -> None:
        """`probe` returns if the database takes writes, else it raises a `BatonError`; both within bounded time."""
        self._probe = probe
        self._suspected = asyncio.Event()
        self._reached = asyncio.Event()
        self._reached.set()
        self._recovered_at = float("-inf")
        self._closing = asyncio.Event()
        self.finished = asyncio.Event()

    @property
    def healthy(self) -> bool:
        """Return True if the last call that reported reached the database."""
        return self._reached.is_set()

    @property
    def seconds_since_recovery(self) -> float:
        """Return the seconds since the database came back; 0 while it is away, infinite if it was never away."""
        if not self.healthy:
            return 0.0
        return asyncio.get_running_loop().time() - self._recovered_at

    def report_away(self, cause: str) -> None:
        """Report a call that did not reach the database, for this cause."""
        if self.healthy:
            logger.warning("The database is unavailable (%s); writes wait until it is back.", cause or "no cause given")
        self._reached.clear()
        self._suspected.set()

    def report_reached(self) -> None:
        """Report a call that succeeded."""
        if not self.healthy:
            logger.warning("The database is available again.")
            self._recovered_at = asyncio.get_running_loop().time()
            self._reached.set()

    async def wait_until_healthy(self, seconds: float) -> bool:
        """Wait for the database, at most for this long. False if it is still away."""
        try:
            async with asyncio.timeout(seconds):
                await self._reached.wait()
        except TimeoutError:
            return False
        return True

    async def run(self) -> None:
        """Probe the database while it is away, until `close`."""
        try:
            while not self._closing.is_set():
                await self._suspected.wait()
                self._suspected.clear()
                if not self.healthy:
                    await self._sleep(retries.DATABASE_PROBE_FIRST)
                    await retries.database_probe(stopped=self._closing.is_set, sleep=self._sleep)(self._try)
        finally:  # also where it is cancelled because the writer of entries has failed: the store waits for this
            self.finished.set()

    async def _sleep(self, seconds: float) -> None:
        """Sleep, or return at once when this is closed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()

    async def _try(self) -> bool:
        """Probe once, unless a call has succeeded since; return whether the database is healthy."""
        if self.healthy or self._closing.is_set():
            return True
        try:
            await self._probe()
        except BatonError:
            return False
        except Exception as error:  # any fault of the driver with a broken database: the next probe may succeed
            logger.debug("A probe of the database failed with %s; the next one follows.", type(error).__name__)
            return False
        self.report_reached()
        return True

    def close(self) -> None:
        """Let `run` return, after which `finished` is set."""
        self._closing.set()
        self._suspected.set()


@dataclass(slots=True)
class _QueuedEntry:
    encoded: EncodedEntry
    future: asyncio.Future[AppendResult]
    since: float


class GroupCommit:
    """A queue of entries, and the task that writes them."""

    def __init__(
        self,
        runner: Runner,
        statements: Statements,
        on_commit: Callable[[EncodedEntry, AppendResult], None],
        patience: float,
        availability: DatabaseAvailability,
        row_cache: RowCache | None = None,
        on_signal: Callable[[Signal], None] = lambda _signal: None,
    ) -> None:
        """`on_commit` is called with each committed entry before the caller of `put` gets its result, and `on_signal`
        with what is to be counted of budgets. `patience` is the longest time in the queue behind other batches, in
        seconds. With a `row_cache` the first attempt does not lock rows before it writes."""
        self._availability = availability
        self._row_cache = row_cache
        self._losses = runner.losses
        self._runner = runner
        self._statements = statements
        self._on_commit = on_commit
        self._on_signal = on_signal
        self._patience = patience
        self.slice = random.randrange(MOST_SLICES)
        """The number of the slice in which it holds the money of calls, in budgets that have slices."""
        self._queue: deque[_QueuedEntry] = deque()
        self._bytes = 0
        self._arrived = asyncio.Event()
        self._closed = False
        self.finished = asyncio.Event()

    def put(self, encoded: EncodedEntry) -> asyncio.Future[AppendResult]:
        """Queue an entry. Raises `StoreUnavailable` at once if the queue is full."""
        if self._closed or len(self._queue) >= MOST_WAITING or self._bytes >= MOST_WAITING_BYTES:
            raise StoreUnavailable()
        accepts_new_runs = self._availability.healthy and len(self._queue) < MOST_WAITING_FOR_NEW
        if encoded.entry.new is not None and not accepts_new_runs:
            raise StoreUnavailable()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[AppendResult] = loop.create_future()
        self._queue.append(_QueuedEntry(encoded, future, loop.time()))
        self._bytes += encoded.size
        self._arrived.set()
        return future

    def close(self) -> None:
        """Refuse further entries. `run` returns when all that wait are written."""
        self._closed = True
        self._arrived.set()

    async def run(self) -> None:
        """Write batches until `close`."""
        try:
            limit = -inf  # no commit was in the way: what has waited so far, has waited for this process alone
            while self._queue or not self._closed:
                batch = self._gather(limit)
                if not batch:
                    limit = -inf
                    await self._arrived.wait()
                    self._arrived.clear()
                    continue
                entries = [queued_entry.encoded for queued_entry in batch]
                try:
                    outcomes = await self._commit(entries)
                    self._availability.report_reached()
                    outcomes = await self._with_all_slices(entries, outcomes)
                except Exception as error:
                    outcomes = self._outcomes_of_failure(error, entries)
                self._answer(batch, outcomes)
                limit = asyncio.get_running_loop().time() - self._patience
        finally:
            self.finished.set()

    def _gather(self, limit: float) -> list[_QueuedEntry]:
        """Return the entries of the next batch. Those that arrived before the loop's time `limit` are refused."""
        batch: list[_QueuedEntry] = []
        size = 0
        while self._queue and len(batch) < BATCH and size < BATCH_BYTES:
            queued_entry = self._queue.popleft()
            self._bytes -= queued_entry.encoded.size
            if queued_entry.future.done():  # the caller went away before anything was written
                continue
            if queued_entry.since < limit:
                queued_entry.future.set_exception(StoreUnavailable())
                continue
            batch.append(queued_entry)
            size += queued_entry.encoded.size
        return batch

    def _outcomes_of_failure(self, error: Exception, batch: Sequence[object]) -> list[Outcome]:
        """Return the outcomes of a batch that could not be written."""
        if isinstance(error, Fault) and error.reason in AWAY:
            self._availability.report_away(error.describe_cause())
        return [_refusal(error) for _ in batch]

    def _answer(self, batch: list[_QueuedEntry], outcomes: list[Outcome]) -> None:
        """Give each caller of `put` its outcome."""
        for queued_entry, outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, AppendResult):
                self._on_commit(queued_entry.encoded, outcome)
                if not queued_entry.future.done():
                    queued_entry.future.set_result(outcome)
            elif not queued_entry.future.done():
                queued_entry.future.set_exception(outcome)

    async def _with_all_slices(self, batch: list[EncodedEntry], outcomes: list[Outcome]) -> list[Outcome]:
        """Write the entries that were put off, in a transaction of their own; return the outcomes of all."""
        places = [place for place, outcome in enumerate(outcomes) if isinstance(outcome, NeedsAllSlices)]
        if not places:
            return outcomes
        postponed_entries = [batch[place] for place in places]
        try:
            later_outcomes = await self._commit(postponed_entries, all_slices=True)
        except Exception as error:  # the others are committed
            later_outcomes = self._outcomes_of_failure(error, postponed_entries)
        all_outcomes = list(outcomes)
        for place, outcome in zip(places, later_outcomes, strict=True):
            all_outcomes[place] = outcome
        return all_outcomes

    async def _commit(self, batch: list[EncodedEntry], *, all_slices: bool = False) -> list[Outcome]:
        """Write a batch, with retries where another attempt may succeed.

        Raises `Fault` if nothing of it was written, or, with the reason `undecided`, if that could not be found out.
        """
        unanswered: list[Outcome] = []
        for attempt in range(TRIES):
            try:
                outcomes = await self._transact(batch, locks=all_slices or attempt > 0, all_slices=all_slices)
                return unanswered if _came_late(unanswered, outcomes) else outcomes
            except Fault as fault:
                if fault.reason == "refused" and len(batch) > 1:
                    return await self._one_by_one(batch, all_slices=all_slices)
                if fault.reason == "undecided":
                    unanswered = cast(AppliedBatch, fault.result).outcomes
                    if await self._was_committed(unanswered, fault):
                        return unanswered
                elif fault.reason not in {"contended", "lost", "slow"} or attempt == TRIES - 1:
                    if unanswered:  # which may still have come late
                        raise Fault("undecided", unanswered) from fault
                    raise
            except Exception:  # the driver could not even encode a value
                if len(batch) == 1:
                    raise
                return await self._one_by_one(batch, all_slices=all_slices)
            await asyncio.sleep(random.random() * 0.01 * 2**attempt)
        raise Fault("undecided", unanswered)  # the last attempt was not answered, and may still come late

    async def _transact(self, batch: list[EncodedEntry], *, locks: bool, all_slices: bool) -> list[Outcome]:
        """Commit a batch in one transaction: on cached rows, unless `locks` or one of them is missing. Rows that others
        have changed since they were cached are read again, once."""
        applied = speculative = None
        try:
            if not locks:
                speculative = self._apply_to_cached_rows(batch)
            if speculative is not None and not speculative.refuses:
                applied = await self._write_if_current(speculative)
            if speculative is not None and applied is None:
                await self._cache_rows(batch)
                speculative = self._apply_to_cached_rows(batch)
                if speculative is not None:
                    applied = await self._write_if_current(speculative)
            if applied is None:
                work_on_rows = partial(
                    commit, statements=self._statements, batch=batch, number=self.slice, all_slices=all_slices
                )
                applied = await self._runner.write(work_on_rows)
        except Fault as fault:
            if fault.reason in AWAY and self._row_cache is not None:
                self._row_cache.clear()
            raise
        if self._row_cache is not None:
            self._row_cache.update(applied.rows.cacheable())
        for signal in applied.signals:
            self._on_signal(signal)
        return applied.outcomes

    def _apply_to_cached_rows(self, batch: list[EncodedEntry]) -> SpeculativeBatch | None:
        """Apply a batch to cached rows; None if its entries need locked rows, or rows that are not cached."""
        if self._row_cache is None:
            return None
        if self._losses != self._runner.losses:
            self._losses = self._runner.losses
            self._row_cache.clear()
        return apply_to_cached_rows(batch, self._row_cache)

    async def _cache_rows(self, batch: list[EncodedEntry]) -> None:
        """Read the rows of a batch's runs into the cache."""
        runs, _ = runs_to_lock([encoded for encoded in batch if encoded.entry.new is None])
        rows = await self._runner.read(for_cache(self._statements, runs))
        if self._row_cache is not None:
            self._row_cache.update(rows)

    def _write_if_current(self, speculative: SpeculativeBatch) -> Awaitable[AppliedBatch | None]:
        """Write a batch; the result is None, and nothing was written, if a row has changed since it was cached."""
        return self._runner.write(conditional_write(self._statements, speculative), expected_result=speculative.applied)

    async def _one_by_one(self, batch: list[EncodedEntry], *, all_slices: bool) -> list[Outcome]:
        """Write a batch with a value that the database refuses, so that only the entry at fault fails."""
        outcomes: list[Outcome] = []
        for encoded in batch:
            try:
                outcomes += await self._commit([encoded], all_slices=all_slices)
            except Exception as error:
                outcomes.append(_refusal(error))
        return outcomes

    async def _was_committed(self, outcomes: list[Outcome], fault: Fault) -> bool:
        loop = asyncio.get_running_loop()
        limit = loop.time() + DECIDE_SECONDS

        async def look() -> bool | None:
            try:
                return await self._runner.write(partial(was_committed, outcomes=outcomes))
            except Fault as error:
                if error.reason in AWAY:
                    self._availability.report_away(error.describe_cause())
                raise

        try:
            is_committed = await retry(
                look, partial(retries.database, left=lambda: limit - loop.time(), faults=(Fault,))
            )
        except Fault:
            is_committed = None
        if is_committed is None:
            raise fault
        return is_committed


def _came_late(unanswered: list[Outcome], outcomes: list[Outcome]) -> bool:
    """Return True if the attempt that was not answered was committed after it was looked up without success.

    Only an attempt that made nothing but new runs can be (see `was_committed`), and nobody else has their ids.
    """
    for earlier, later in zip(unanswered, outcomes, strict=False):
        if isinstance(earlier, AppendResult) and _exists_already(later):
            return True
    return False


def _exists_already(outcome: Outcome) -> bool:
    return isinstance(outcome, Conflict) and outcome.public_code == Conflict.code


def _refusal(error: Exception) -> BatonError:
    """Return the outcome of an entry that could not be written, or whose run belongs to another tenant."""
    if isinstance(error, NotFound):
        return error
    if not isinstance(error, Fault):
        logger.error(
            "The store could not write an entry to the journal because of a bug; report it with this traceback.",
            exc_info=error,
        )
    unavailable = StoreUnavailable()
    if isinstance(error, Fault) and error.reason == "undecided":
        unavailable = StoreUnavailable(UNKNOWN, code=UNDECIDED)
    unavailable.__cause__ = error
    return unavailable


# -- the journals in memory


MOST_RUNS = 8192
"""Most runs whose journals are cached."""
MOST_BYTES = 64 * 2**20
"""Most bytes of cached journals."""
EVENT_BYTES = 150
"""Approximate memory of an event, apart from its body."""


@dataclass(slots=True)
class _CachedJournal:
    salt: bytes
    events: list[tuple[Kind, float, bytes]] = field(default_factory=list)
    """(kind, time, body) of each event from seq 1 on, without a gap."""
    contents: dict[str, bytes] = field(default_factory=dict)
    records: dict[tuple[str, Reader], Any] = field(default_factory=dict)
    """Values that readers made of contents, by ref and reader. Each counts as many bytes as its content."""
    size: int = 0


class JournalCache:
    """A cache of the journals of runs that this process drives, so that a live run is read back without SQL.

    A prefix of a journal never changes, so a cached one can be incomplete but not wrong. The cache is bounded in runs
    and bytes, and evicts the run that was not used for longest. Bodies are cached as they are stored: most runs are
    never read back, and decoded bodies take four times the memory.
    """

    def __init__(self, runs: int = MOST_RUNS, size: int = MOST_BYTES) -> None:
        self._runs: OrderedDict[str, _CachedJournal] = OrderedDict()
        self._most_runs = runs
        self._most_bytes = size
        self._bytes = 0

    def add_committed(self, encoded: EncodedEntry, appended: AppendResult) -> None:
        """Cache a committed entry. A run that ended is evicted. An entry that leaves a gap is not cached, nor is the
        admission of a run that this process does not drive: it would not hear of the run's end here."""
        entry = encoded.entry
        if entry.new is not None and entry.new.driver:
            self._runs[entry.run] = _CachedJournal(entry.new.salt)
        cached = self._runs.get(entry.run)
        if cached is None:
            return
        if any(event.kind in TERMINAL for event in appended.events):
            self.forget(entry.run)
            return
        for ref, body in entry.contents:
            cached.contents[ref] = trim_capacity(body)
        self._extend(entry.run, cached, appended.events, encoded.bodies)
        self._grow(entry.run, cached, sum([len(body) for _, body in entry.contents]))

    def extend(self, run: str, events: Sequence[Event]) -> None:
        """Cache events that were read from the database, if they follow the cached ones without a gap."""
        cached = self._runs.get(run)
        if cached is not None:
            self._extend(run, cached, events, [orjson.dumps(event.body) for event in events])

    def _extend(self, run: str, cached: _CachedJournal, events: Sequence[Event], bodies: Sequence[bytes]) -> None:
        if events and events[0].seq == len(cached.events) + 1:
            for event, body in zip(events, bodies, strict=True):
                cached.events.append((event.kind, event.at, trim_capacity(body)))
            self._grow(run, cached, EVENT_BYTES * len(events) + sum(map(len, bodies)))

    def journal(self, run: str, after: int = 0) -> tuple[Journal, int]:
        """Return the cached events of a run after the seq `after`, and the last cached seq; (empty, 0) if none is
        cached."""
        cached = self._runs.get(run)
        if cached is None:
            return Journal(b"", ()), 0
        self._runs.move_to_end(run)
        events = []
        for seq, (kind, at, body) in enumerate(cached.events[after:], after + 1):
            events.append(Event(run, seq, kind, at, orjson.loads(body)))
        return Journal(cached.salt, tuple(events)), len(cached.events)

    def contents(self, run: str, refs: Sequence[str]) -> dict[str, bytes]:
        """Return the bodies that are cached, by ref."""
        cached = self._runs.get(run)
        if not cached:
            return {}
        return {ref: cached.contents[ref] for ref in refs if ref in cached.contents}

    def records(self, run: str, keys: Iterable[tuple[str, Reader]]) -> dict[tuple[str, Reader], Any]:
        """Return the values that readers make of cached bodies. Each reader reads each body once."""
        values: dict[tuple[str, Reader], Any] = {}
        cached = self._runs.get(run)
        if cached is None:
            return values
        for content in keys:
            ref, read = content
            if content not in cached.records and ref in cached.contents:
                cached.records[content] = read(cached.contents[ref])
                self._grow(run, cached, len(cached.contents[ref]))
            if content in cached.records:
                values[content] = cached.records[content]
        return values

    def clear(self) -> None:
        """Evict all runs."""
        self._runs.clear()
        self._bytes = 0

    def forget(self, run: str) -> None:
        """Evict a run."""
        cached = self._runs.pop(run, None)
        if cached:
            self._bytes -= cached.size

    def _grow(self, run: str, cached: _CachedJournal, size: int) -> None:
        """Count more bytes of a run, and evict runs until the rest is within the bounds; this one too, if it is larger
        than the cache by itself."""
        if self._runs.get(run) is not cached:  # it was evicted by what the same call has added before
            return
        cached.size += size
        self._bytes += size
        self._runs.move_to_end(run)
        while self._runs and (self._bytes > self._most_bytes or len(self._runs) > self._most_runs):
            self.forget(next(iter(self._runs)))
