"""Removing what is too old: by somebody's request, or because a time limit of the operator has passed.

Erasing removes every text of a run: what was asked, planned and answered, and the comments on it. Its salt is erased
with it, so that the hashes in the journal prove nothing about it any more. The journal itself stays: ids, states,
money.

Pruning removes the whole run, journal and ratings included, once it has ended. One row with the hash of its journal is
left. Where there is an archive, the journal is written there and read back before its rows go; if that fails, they
stay.

Runs that a legal hold covers are left as they are. The statements that erase and delete see to that; see
`app/store/rows/holds.py`.

Both go on in pages and short transactions, so that writers of other runs hardly wait.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol

import orjson
from msgspec import Struct
from msgspec.structs import replace

from app.core.run.journal_hash import root
from app.core.run.retention_classes import RetentionClass, Selection, content_selections, event_selections
from app.engine.context import EngineContext, Leadership
from app.engine.periodic import look_repeatedly
from app.errors import ArchiveUnavailable, NotFound, ServiceUnavailable, StoreUnavailable
from app.store.archive import Archive, Record, place
from app.store.archive_files import ArchiveFiles, open_archive_files
from app.store.journal_file import CompressedJournals
from app.store.protocol import (
    PROCESS,
    Actor,
    ContentQuery,
    Contents,
    Holds,
    PrunedRun,
    PruneQuery,
    Retention,
    RunJournal,
    RunRow,
)
from app.store.protocol.journal import ErasedBy

PAGE_RUNS = 200
"""Runs that are looked through at a time."""
GROUP_RUNS = 20
"""Runs whose texts are read at a time, when one text is looked for."""
LOOK_SECONDS = 60.0
"""Time between two looks for what is too old."""
ERASING_CLAIM, PRUNING_CLAIM = "retention", "retention-events"
"""Ids of the claims by which one engine at a time does this work. The claims of requests have hashes as ids."""
FILE_BYTES = 8 * 2**20
"""Size from which on a compressed file of the archive is ended. It is made in memory."""
FILE_RUNS = 20_000
"""Most runs in one file of the archive."""
READ_SECONDS = 30.0
"""Longest time for reading one page of runs."""
PUT_SECONDS = 300.0
"""Longest time for writing one file to the archive and reading it back."""
MARGIN_SECONDS = 60.0
"""Time by which an idempotency claim may outlast the last deadline of its run and the hours that it is remembered."""
EndRuns = Callable[[Sequence[RunRow]], Awaitable[None]]
"""Asks open runs to end, and waits a little for that."""
FindRuns = Callable[[], AsyncIterator[Sequence[RunRow]]]
"""Looks for runs that have content, and yields them page by page."""
Pause = Callable[[], Awaitable[bool]]
"""Called between two pieces of work. Waits as long as it likes, and returns False to stop."""
OpenArchive = Callable[[], AbstractAsyncContextManager[Archive]]
"""Opens the database for reading whole runs."""


# -- erasing


class EraseResult(Struct, frozen=True):
    """The result of an erasure."""

    runs: int
    overwritten: bool
    """True if the erased bytes are gone from the database's files; see `Retention.overwrite_erased`."""
    held: Mapping[str, str] = {}
    """The runs that were left as they are because a legal hold covers them, each with the hold's id."""


class TextSource(Contents, RunJournal, Protocol):
    """The part of the store that reads runs and their texts."""


class ErasureStore(Retention, Holds, Protocol):
    """The part of the store that an erasure needs."""


async def runs_with_content(store: Retention, query: ContentQuery) -> AsyncIterator[tuple[RunRow, ...]]:
    """Yield all runs that a query selects, page by page, the oldest first."""
    following: tuple[float, str] | None = None
    while True:
        page = await store.runs_with_content(query, following, PAGE_RUNS)
        if page.runs:
            yield page.runs
        if page.following is None:
            return
        following = page.following


async def texts_with_ref(store: Retention, runs: TextSource, ref: str) -> list[tuple[str, bytes]]:
    """Return the text of this ref, with the tenant whose it is; more than one if runs have the same salt.

    Raises `NotFound` if no content has the ref.
    """
    texts = []
    for owner in await store.runs_with_ref(ref):
        row = await runs.run(owner)
        text = (await runs.contents(owner, [ref])).get(ref)
        if text is not None:
            texts.append((row.tenant, text))
    if not texts:
        raise NotFound("No text with this hash is stored; it may have been erased.")
    return texts


async def runs_with_text(store: Retention, tenant: str, text: bytes) -> AsyncIterator[Sequence[RunRow]]:
    """Yield all runs of the tenant that have this text, in whatever place: nobody else can have it from them.

    The texts of all runs of the tenant are read, in small groups.
    """
    async for page in runs_with_content(store, ContentQuery(tenant=tenant)):
        for start in range(0, len(page), GROUP_RUNS):
            group = page[start : start + GROUP_RUNS]
            found = set(await store.runs_with_text([run.id for run in group], text))
            if found:
                yield [run for run in group if run.id in found]


async def erase_all(
    store: ErasureStore, find: FindRuns, end: EndRuns, cause: ErasedBy = "operator", *, by: Actor = PROCESS
) -> EraseResult:
    """Erase the content of all runs that are found, but those under a legal hold, in the name of `by`. Those that are
    open are ended first, as far as possible.

    A run that does not end in time is erased all the same: nothing of it is stored from then on, and it fails. Runs are
    looked for until there are none: a copy of one may have been admitted since the last look, but before the erasure of
    its origin. Later copies are refused (`app/store/writing/batch.py`).
    """
    erased = 0
    held: dict[str, str] = {}
    while True:
        newly_erased = await _erase_found(store, find, end, held, partial(store.erase_contents, cause=cause, by=by))
        if not newly_erased:
            break
        erased += newly_erased
    return EraseResult(erased, await store.overwrite_erased(), held)


async def _erase_found(
    store: ErasureStore,
    find: FindRuns,
    end: EndRuns,
    held: dict[str, str],
    erase: Callable[[Sequence[str]], Awaitable[int]],
) -> int:
    """Erase what is found now, and add to `held` what legal holds keep. Returns the number of runs."""
    erased = 0
    async for rows in find():
        names = [row.id for row in rows]
        held_now = await store.find_holds_by_run(names)
        open_rows = [row for row in rows if row.ended_at is None and row.id not in held_now]
        if open_rows:
            await end(open_rows)
        erased += await erase(names)
        held |= await store.find_holds_by_run(names)
    return erased


# -- pruning


class ArchiveTarget(Struct, frozen=True):
    """The archive of pruned runs."""

    files: ArchiveFiles
    contents: bool
    """True if the texts that are still stored are archived as well. An erasure does not reach them there."""


def archiving(address: str, endpoint: str | None, *, contents: bool) -> ArchiveTarget | None:
    """Return the archive of this address (see `open_archive_files`), or None if it is empty. Raises `ConfigInvalid`."""
    if not address:
        return None
    return ArchiveTarget(open_archive_files(address, endpoint), contents)


@dataclass(slots=True)
class PruneResult:
    """The result of pruning."""

    runs: int = 0
    events: int = 0
    held: dict[str, str] = field(default_factory=dict)
    """Runs that were left as they are because a legal hold covers them, each with the hold's id, as far as the search
    came upon them."""
    damaged: list[str] = field(default_factory=list)
    """Runs that were left as they are because their journal has a gap or a body that is not JSON."""
    files: list[str] = field(default_factory=list)
    """The files of the archive that were written."""


@dataclass(slots=True)
class _Batch:
    """Runs that are archived in one file, each with the revision in which it was read."""

    runs: list[tuple[PrunedRun, int]] = field(default_factory=list)
    file: CompressedJournals | None = None

    @property
    def full(self) -> bool:
        return self.file is None or self.file.size >= FILE_BYTES or len(self.runs) >= FILE_RUNS


class Pruner:
    """Prunes the runs that a query selects, one batch after the other: read, archive, check, delete."""

    def __init__(
        self,
        store: ErasureStore,
        journals: Archive,
        archiving: ArchiveTarget | None,
        *,
        now: Callable[[], float],
        name: Callable[[str], str],
        pause: Pause,
        by: Actor = PROCESS,
    ) -> None:
        """`now` gives seconds since 1970, and `name` a fresh id with a prefix. `by` is in whose name it prunes."""
        self._store = store
        self._journals = journals
        self._archiving = archiving
        self._now = now
        self._name = name
        self._pause = pause
        self._by = by
        self._after: tuple[float, str] | None = None
        self.done = PruneResult()

    async def prune(self, query: PruneQuery) -> PruneResult:
        """Prune until no run is left that the query selects, or until `pause` says to stop.

        Raises `ArchiveUnavailable` and `StoreUnavailable`; `done` has what was pruned before.
        """
        while (batch := await self._read(query)) is not None:
            location = await self._write_to_archive(batch)
            for start in range(0, len(batch.runs), PAGE_RUNS):
                await self._delete(batch.runs[start : start + PAGE_RUNS], location)
                if not await self._pause():
                    return self.done
        return self.done

    async def _delete(self, chosen: Sequence[tuple[PrunedRun, int]], location: str) -> None:
        """Delete runs that are archived at this location, each unless its row has another revision by now."""
        runs = []
        for run, revision in chosen:
            runs.append((replace(run, archive=location), revision))
        deleted = set(await self._store.prune(runs, by=self._by))
        self.done.runs += len(deleted)
        for run, _ in runs:
            if run.id in deleted:
                self.done.events += run.events

    async def _read(self, query: PruneQuery) -> _Batch | None:
        """Return the next batch: a page, or as many pages as fill a file. None after the last one, and if it is to
        stop."""
        batch = _Batch()
        if self._archiving is not None:
            catalogs, changes = await self._journals.catalogs(), await self._journals.changes()
            batch.file = CompressedJournals(self._now(), catalogs, changes)
        read_any = False
        while page := await self._page(query):
            read_any = True
            self._after = place(page[-1])
            whole: list[Record] = []
            held = await self._store.find_holds_by_run([str(journal.row["id"]) for journal in page])
            self.done.held |= held
            for journal in page:
                if journal.row["id"] in held:
                    continue
                if not _is_whole(journal):
                    self.done.damaged.append(str(journal.row["id"]))
                    continue
                whole.append(journal)
                batch.runs.append((_pruned_run(journal), int(journal.row["revision"])))
            if batch.file is not None:
                await asyncio.to_thread(batch.file.add, whole)
            if batch.full:
                break
            if not await self._pause():
                return None
        if not read_any:
            return None
        return batch

    async def _page(self, query: PruneQuery) -> Sequence[Record]:
        contents = self._archiving is not None and self._archiving.contents
        try:
            async with asyncio.timeout(READ_SECONDS):
                return await self._journals.prunable(query, self._after, contents=contents)
        except TimeoutError:
            raise StoreUnavailable() from None

    async def _write_to_archive(self, batch: _Batch) -> str:
        """Write a batch to the archive. Returns the file's location; empty where there is no archive."""
        if self._archiving is None or batch.file is None or not batch.runs:
            return ""
        body = await asyncio.to_thread(batch.file.finish)
        first = batch.runs[0][0]
        month = datetime.fromtimestamp(first.created_at, UTC).strftime("%Y/%m")
        name = f"{month}/{first.id}-{self._name('archive')}.jsonl.gz"
        try:
            async with asyncio.timeout(PUT_SECONDS):
                location = await asyncio.to_thread(self._archiving.files.put, name, body)
        except TimeoutError:
            raise ArchiveUnavailable(f"{name} was not written within {PUT_SECONDS:.0f} seconds.") from None
        self.done.files.append(location)
        return location


def _is_whole(record: Record) -> bool:
    """Return True if the journal has all of its events, and each is a JSON object. A damaged one is evidence, and is
    kept."""
    if [event.seq for event in record.events] != list(range(1, record.row["seq"] + 1)):
        return False
    return all(_is_object(event.body) for event in record.events)


def _is_object(body: bytes) -> bool:
    try:
        return isinstance(orjson.loads(body), dict)
    except orjson.JSONDecodeError:
        return False


def _pruned_run(record: Record) -> PrunedRun:
    """Return the row that stays of a run that is pruned, still without the archive's location."""
    row: Any = record.row
    events = [(event.seq, event.kind, event.at, event.body) for event in record.events]
    return PrunedRun(
        id=row["id"],
        tenant=row["tenant"],
        state=row["state"],
        created_at=row["created_at"],
        ended_at=row["ended_at"],
        pruned_at=0.0,
        events=row["seq"],
        root=root(row["id"], events),
        archive="",
    )


# -- the tasks of an engine


class ContentRetention:
    """The task of an engine that erases content once its time is over. One engine of the service does so at a time."""

    def __init__(
        self, context: EngineContext, *, seconds: float | None, classes: Sequence[RetentionClass] = ()
    ) -> None:
        """Content is erased when its run has ended and was admitted longer ago than `seconds` (None: never), or than
        the classes of the run say."""
        self._context = context
        self._selections = content_selections(seconds, classes)
        self._leadership = Leadership(context, ERASING_CLAIM, 2 * LOOK_SECONDS)
        self._places: dict[Selection, tuple[float, str]] = {}
        """The run at which the next pass begins: all runs before it are erased, but those that a legal hold covered."""
        self._seen = (0, 0)
        """How many legal holds were released, and how often the database moved to another server, before the runs up to
        these places were looked at."""

    async def run(self, stopping: asyncio.Event) -> None:
        """Look again and again, until the process stops."""
        if self._selections:
            await look_repeatedly(
                partial(self.look, stopping),
                stopping,
                LOOK_SECONDS,
                self._context.telemetry,
                "The erasure of content",
                on_outage=self._log_failure,
            )

    async def look(self, stopping: asyncio.Event) -> None:
        """Erase all content whose time is over, unless another engine does. Pauses as long as it works, so that the
        database has half of its time for runs."""
        if not self._selections or not self._context.clock_is_set():
            return
        if not await self._leadership.acquire():
            return
        await self._begin_again_if_due()
        erased = 0
        for selection in self._selections:
            erased += await self._erase(selection, stopping)
        if erased:
            await self._context.store.overwrite_erased()
            self._context.telemetry.count("baton_contents_erased_total", by=erased)
            self._log(logging.INFO, "The content of runs was erased because its time is over.", count=erased)

    async def _erase(self, chosen: Selection, stopping: asyncio.Event) -> int:
        """Erase the content of a selection whose time is over. Returns the number of runs."""
        before = self._context.now() - chosen.seconds
        query = ContentQuery(before=before, within=chosen.within, without=chosen.without)
        following = self._places.get(chosen)
        all_settled = True
        erased = 0
        while not stopping.is_set():
            began = self._context.monotonic()
            page = await self._context.store.runs_with_content(query, following, PAGE_RUNS)
            all_settled = all_settled and page.settled
            ended = [run.id for run in page.runs if run.ended_at is not None]
            erased += await self._context.store.erase_contents(ended, "retention")
            following = page.following
            if following is None or not await self._leadership.acquire():
                break
            if all_settled:
                self._places[chosen] = following
            await asyncio.sleep(self._context.monotonic() - began)
        return erased

    async def _begin_again_if_due(self) -> None:
        """Look at all runs again once a legal hold was released, because some were passed over for its sake, and once
        the database is on another server, which may lack the latest erasures."""
        store = self._context.store
        seen = (await store.count_released_holds(), store.server_changes)
        if seen != self._seen:
            self._seen = seen
            self._places.clear()

    def _log_failure(self, error: ServiceUnavailable) -> None:
        self._log(logging.WARNING, "Expired content waits for the database.", error=error.public_code)

    def _log(self, level: int, message: str, **fields: object) -> None:
        self._context.telemetry.log(level, message, **fields)


class RunRetention:
    """The task of an engine that prunes runs once their time is over. One engine of the service does so at a time."""

    def __init__(
        self,
        context: EngineContext,
        open_journals: OpenArchive,
        archiving: ArchiveTarget | None,
        *,
        seconds: float | None,
        claim_seconds: float,
        classes: Sequence[RetentionClass] = (),
    ) -> None:
        """A run is pruned when it ended longer ago than `seconds` (None: never), or than its classes say, and its last
        deadline is longer ago than `claim_seconds`, which is how long idempotency claims last."""
        self._context = context
        self._open_journals = open_journals
        self._archiving = archiving
        self._seconds = seconds
        self._selections = event_selections(seconds, classes)
        self._claim_seconds = claim_seconds
        self._leadership = Leadership(context, PRUNING_CLAIM, PUT_SECONDS + 2 * LOOK_SECONDS)

    async def run(self, stopping: asyncio.Event) -> None:
        """Look again and again, until the process stops."""
        if self._selections:
            await look_repeatedly(
                partial(self.look, stopping),
                stopping,
                LOOK_SECONDS,
                self._context.telemetry,
                "The pruning of runs",
                on_outage=self._log_failure,
            )

    async def look(self, stopping: asyncio.Event) -> None:
        """Prune all runs whose time is over, unless another engine does. Pauses as long as it works. The windows of
        budgets that ended so long ago are summed up."""
        if not self._selections or not self._context.clock_is_set():
            return
        if not await self._leadership.acquire():
            return
        if self._seconds is not None:
            await self._context.store.sum_up_budget_use(self._context.now() - self._seconds)
        for selection in self._selections:
            if not stopping.is_set():
                await self._prune(selection, stopping)

    async def _prune(self, chosen: Selection, stopping: asyncio.Event) -> None:
        """Prune the runs of a selection whose time is over."""
        query = prune_query(self._context.now(), chosen.seconds, self._claim_seconds)
        query = replace(query, within=chosen.within, without=chosen.without)
        began = self._context.monotonic()

        async def pause() -> bool:
            nonlocal began
            await asyncio.sleep(self._context.monotonic() - began)
            began = self._context.monotonic()
            return not stopping.is_set() and await self._leadership.acquire()

        async with self._open_journals() as journals:
            pruning = Pruner(
                self._context.store,
                journals,
                self._archiving,
                now=self._context.now,
                name=self._context.name,
                pause=pause,
            )
            try:
                await pruning.prune(query)
            finally:
                self._report(pruning.done)
        if pruning.done.runs:
            await self._context.store.overwrite_erased()

    def _report(self, done: PruneResult) -> None:
        telemetry = self._context.telemetry
        for run in done.damaged:
            telemetry.log(logging.ERROR, "The journal of a run is damaged, so the run is not pruned.", run=run)
        if done.runs:
            telemetry.count("baton_runs_pruned_total", by=done.runs)
            telemetry.log(logging.INFO, "Runs were pruned because their time is over.", count=done.runs)

    def _log_failure(self, error: ServiceUnavailable) -> None:
        telemetry = self._context.telemetry
        if isinstance(error, ArchiveUnavailable):
            telemetry.count("baton_archive_failures_total")
            words = f"The archive failed, so no further run is pruned: {error.message}"
            telemetry.log(logging.ERROR, words, error=error.public_code)
            return
        telemetry.log(logging.WARNING, "Runs whose time is over wait for the database.", error=error.public_code)


def prune_query(now: float, seconds: float, claim_seconds: float) -> PruneQuery:
    """Select the runs that ended longer than `seconds` ago and on which no idempotency claim lasts."""
    return PruneQuery(ended_before=now - seconds, deadline_before=now - claim_seconds - MARGIN_SECONDS)
