"""The store on SQLite or Postgres. `open_store` opens one."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from math import inf
from types import MappingProxyType
from typing import Any, TypeVar

from msgspec.structs import replace
from sqlalchemy import Connection

from app.core.pool.budgets import Scope
from app.core.pool.conductor_versions import Change
from app.core.pool.rates import RateReply, RateRequest
from app.core.rating.calibration import Trial
from app.core.rating.economics import JournaledRun
from app.core.rating.evidence import PolicyState, RatedRun
from app.core.rating.feedback import Feedback
from app.core.run.events import Event, Kind
from app.core.run.notices import FailedNotice, Notice
from app.errors import BatonError, NotFound, StoreUnavailable
from app.network import retries
from app.network.shared_read import SharedRead
from app.store.administration import Administration
from app.store.protocol import (
    EVERY_KEY,
    PROCESS,
    Actor,
    AppendResult,
    Backlog,
    ContentPage,
    ContentQuery,
    Disclosure,
    DisclosureQuery,
    Entry,
    Hold,
    IdempotencyRecord,
    Journal,
    KeyQuery,
    KeyRow,
    LapsedRuns,
    PrunedRun,
    Reader,
    RebuildBatch,
    RunQuery,
    RunRow,
    StepInput,
    TenantAdministration,
    TenantStore,
    TicketClaim,
    TicketRow,
)
from app.store.protocol.budgets import KNOWN_SECONDS
from app.store.protocol.disclosures import EventCompleter, Place
from app.store.protocol.journal import ErasedBy
from app.store.rows import (
    budgets,
    conductor_changes,
    content,
    disclosures,
    feedback,
    holds,
    idempotency,
    notices,
    rated_runs,
    rates,
    reports,
    retention,
    run_lists,
    runs,
    texts,
    trials,
)
from app.store.sqlkit import generation
from app.store.sqlkit.migrate import migrate, newest, revision
from app.store.sqlkit.postgres import Postgres
from app.store.sqlkit.runner import AWAY, Fault, Runner, parse_url
from app.store.sqlkit.sealing import MasterKey, UnknownKeys
from app.store.sqlkit.sqlite import Sqlite
from app.store.sqlkit.statements import Statements
from app.store.writing.batch import EncodedEntry, RowCache, encode
from app.store.writing.budget_ledger import Signal
from app.store.writing.group_commit import DatabaseAvailability, GroupCommit, JournalCache
from app.store.writing.log_writer import DatabaseLog
from app.store.writing.tenant_keys import TenantKeys
from app.telemetry import PoolUse

T = TypeVar("T")

CHUNK = 200
"""Most runs or tickets that one transaction renews: other writers wait for its locks."""
OVERLONG = "The database took too long for this request, though it answers others; ask for less at a time."
READY_SECONDS = 2.0
"""Seconds within which a write must succeed for the database to count as ready. Less than `/readyz` waits for a check,
which is less than the chart's probes wait for a reply, so that a probe is given the reason and not a time-out."""


@asynccontextmanager
async def open_store(
    url: str,
    *,
    grace: float = 5.0,
    patience: float = 5.0,
    connections: int = 10,
    content_keys: Sequence[MasterKey] = (),
) -> AsyncIterator["SqlStore"]:
    """Open a store for the length of the block. All waiting entries are committed before the block is left.

    An SQLite file is created and migrated. A Postgres database must have been migrated (`baton migrate`), but need not
    be up. `grace` is the time in seconds after which a ticket is overdue whose announcement nobody answered, `patience`
    the longest time in seconds that an entry waits for its batch, and `connections` the most connections to Postgres.
    `content_keys` are the master keys under which contents are encrypted, the present one first; without any, contents
    are stored plain.
    """
    parsed = parse_url(url)
    # Neither connects before it is used, so that a process can start while its database is down.
    runner: Runner = Sqlite(parsed) if parsed.get_backend_name() == "sqlite" else Postgres(parsed, connections)
    if runner.dialect.name == "sqlite":
        await asyncio.to_thread(migrate, url)
    # SQLite is in this process: optimistic writes would save no round trip.
    row_cache = RowCache() if runner.dialect.name == "postgresql" else None
    store = SqlStore(runner, grace, patience, row_cache, content_keys)
    failure: Exception | None = None
    async with asyncio.TaskGroup() as group:
        group.create_task(store.availability.run())
        group.create_task(store.writer.run())
        try:
            yield store
        except Exception as error:  # raised below, because the group would wrap it
            failure = error
        finally:
            await store.close()
    if failure is not None:
        raise failure


class TenantVerbs(Administration):
    """The verbs that are the same for callers of one tenant and for those of all: `_read` and `_write` say for whom."""

    _statements: Statements

    @property
    def lists(self) -> run_lists.DatabaseRunLists:
        return run_lists.DatabaseRunLists(self._read)

    async def run(self, run: str) -> RunRow:
        return await self._read(runs.run(self._statements, run), brief=True)

    async def runs(self, query: RunQuery) -> tuple[RunRow, ...]:
        return await self._read(partial(runs.page, query=query))

    async def pruned_run(self, run: str) -> PrunedRun:
        return await self._read(partial(retention.pruned_run, name=run))

    async def feedback(self, run: str) -> tuple[Feedback, ...]:
        return await self._read(partial(feedback.of_run, run=run))

    async def find_idempotency_record(self, name: str, now: float) -> IdempotencyRecord | None:
        return await self._read(partial(idempotency.find, name=name, now=now))

    async def add_idempotency_record(self, once: IdempotencyRecord, now: float) -> IdempotencyRecord:
        return await self._write(partial(idempotency.remember, once=once, now=now))


class SqlStore(TenantVerbs):
    """Implements `protocol.Store`, which documents all public methods."""

    def __init__(
        self,
        runner: Runner,
        grace: float,
        patience: float,
        row_cache: RowCache | None = None,
        content_keys: Sequence[MasterKey] = (),
    ) -> None:
        self._runner = runner
        self._grace = grace
        self._closed = False
        self._journals = JournalCache()
        self._catalogs: set[str] = set()
        self._shares_from: float | None = None
        self._tenants_with_budgets = SharedRead(partial(self._read, budgets.tenants, brief=True), KNOWN_SECONDS)
        self._statements = statements = Statements(runner.dialect)
        self._tenant_keys = TenantKeys(content_keys, self._read, self._write)
        self._decrypt = self._tenant_keys.keyring.open
        self._log = DatabaseLog(statements, runner.dialect, self._read, self._write)
        self.availability = availability = DatabaseAvailability(self.ready)
        self._row_cache = row_cache
        self._server_changes = 0
        self.on_signal: Callable[[Signal], None] = lambda _signal: None
        """Called with what is to be counted of budgets: soft limits that were reached, and overruns."""
        self.writer = GroupCommit(
            runner, statements, self._add_committed, patience, availability, row_cache, self._forward_signal
        )

    @property
    def healthy(self) -> bool:
        return self.availability.healthy

    @property
    def log(self) -> DatabaseLog:
        return self._log

    @property
    def pool_use(self) -> PoolUse:
        """Return the use of the connections to the database, for metrics."""
        return self._runner.pool_use

    @property
    def seconds_since_recovery(self) -> float:
        return self.availability.seconds_since_recovery

    @property
    def server_changes(self) -> int:
        return self._runner.server_changes

    async def wait_until_healthy(self, seconds: float) -> bool:
        return await self.availability.wait_until_healthy(seconds)

    async def append(self, entry: Entry) -> AppendResult:
        if entry.shared is not None and entry.at < await self._read_sharing_start():
            entry = replace(entry, shared=None)
        key = None
        if entry.contents and self._tenant_keys.encrypts:
            self._forget_former_server()
            key = await self._tenant_keys.key_for(entry)
        return await self.writer.put(encode(entry, key))

    async def _read_sharing_start(self) -> float:
        """Return the time from which on contents may be stored in parts. It is read once."""
        if self._shares_from is None:
            since = await self._read(texts.read_sharing_start)
            self._shares_from = inf if since is None else since
        return self._shares_from

    async def journal(self, run: str, upto: int | None = None, after: int = 0) -> Journal:
        return await self.journal_of(None, run, upto, after)

    async def journal_of(self, tenant: str | None, run: str, upto: int | None = None, after: int = 0) -> Journal:
        """Return the journal of a run; one for a tenant never comes from the cache, unless the database knows no
        tenants."""
        if tenant is not None and self._runner.isolates_tenants:
            return await self.read_for(tenant, runs.journal(self._statements, run, after))
        changes = self._forget_former_server()
        cached, cached_seq = self._journals.journal(run, after)
        if cached_seq and upto is not None and cached_seq >= upto:
            return cached
        # A cached journal is a prefix of the stored one, so only the later events are read.
        later = await self._read(runs.journal(self._statements, run, max(after, cached_seq)))
        if self.server_changes != changes:  # the cached part may never have reached this server
            return await self.journal_of(None, run, upto, after)
        if not later.salt:  # another process has erased the content: this one must not show what it has cached
            self._journals.forget(run)
        self._journals.extend(run, later.events)
        return Journal(later.salt, (*cached.events, *later.events))

    async def call_events(self, run: str) -> tuple[Event, ...]:
        return await self._read(partial(runs.call_events, name=run))

    async def step_input(self, run: str, after: int = 0) -> StepInput:
        changes = self._forget_former_server()
        cached, cached_seq = self._journals.journal(run, after)
        later, rows = await self._read(runs.step_input(self._statements, run, max(after, cached_seq), self._decrypt))
        if self.server_changes != changes:
            return await self.step_input(run, after)
        if rows is not None and self._row_cache is not None:
            self._row_cache.update({run: rows})
        if not later.salt:
            self._journals.forget(run)
        self._journals.extend(run, later.events)
        return replace(later, events=(*cached.events, *later.events))

    def _add_committed(self, encoded: EncodedEntry, appended: AppendResult) -> None:
        self._forget_former_server()
        self._journals.add_committed(encoded, appended)

    def _forward_signal(self, signal: Signal) -> None:
        self.on_signal(signal)

    def _forget_former_server(self) -> int:
        """Forget what was read from, or written to, another server than the present one; its number of changes."""
        if self._server_changes != self.server_changes:
            self._server_changes = self.server_changes
            self._journals.clear()
            self._catalogs.clear()
            self._tenant_keys.look_again()
        return self._server_changes

    async def contents(self, run: str, refs: Sequence[str]) -> Mapping[str, bytes]:
        return await self.contents_of(None, run, refs)

    async def contents_of(self, tenant: str | None, run: str, refs: Sequence[str]) -> Mapping[str, bytes]:
        """Return the contents of a run, read for a tenant if there is one, as `journal_of` reads the journal."""
        if tenant is not None and self._runner.isolates_tenants:
            statement = content.read(self._statements, run, refs, self._decrypt)
            if not refs:
                return {}
            return await self.read_for(tenant, statement)
        bodies = self._journals.contents(run, refs)
        missing_refs = [ref for ref in refs if ref not in bodies]
        if missing_refs:
            bodies |= await self._read(content.read(self._statements, run, missing_refs, self._decrypt))
        return bodies

    async def records(self, run: str, keys: Collection[tuple[str, Reader]]) -> Mapping[tuple[str, Reader], Any]:
        values = self._journals.records(run, keys)
        missing = [digest for digest in keys if digest not in values]
        bodies = await self.contents(run, sorted({ref for ref, _ in missing})) if missing else {}
        return values | {(ref, read): read(bodies[ref]) for ref, read in missing if ref in bodies}

    async def keep_catalog(self, digest: str, snapshot: Callable[[], bytes]) -> None:
        self._forget_former_server()
        if digest not in self._catalogs:
            await self._write(partial(content.keep_catalog, digest=digest, snapshot=snapshot()))
            self._catalogs.add(digest)

    async def erase(self, run: str, *, by: Actor = PROCESS) -> bool:
        return await self.erase_of(run, None, by)

    async def erase_of(self, run: str, tenant: str | None, by: Actor) -> bool:
        """Erase the content of a run, if it is this tenant's (None: any tenant's)."""
        erasure = partial(content.erase_one, statements=self._statements, run=run, tenant=tenant, decrypt=self._decrypt)
        exists = await self._write(partial(erasure, by=by))
        for name in (run, *await self._read(partial(content.copies, run=run))):
            self._journals.forget(name)
        await self._runner.empty_log()
        return exists

    def of_tenant(self, tenant: str | None) -> TenantStore:
        if tenant is None:
            return self
        return SqlTenantStore(self, tenant)

    def administration_of(self, tenant: str | None) -> TenantAdministration:
        if tenant is None:
            return self
        return SqlTenantStore(self, tenant)

    async def runs_with_content(
        self, query: ContentQuery, after: tuple[float, str] | None = None, limit: int = 200
    ) -> ContentPage:
        return await self._read(partial(retention.page, query=query, after=after, limit=limit, decrypt=self._decrypt))

    async def runs_with_ref(self, ref: str) -> Sequence[str]:
        return await self._read(partial(retention.find_with_ref, ref=ref))

    async def runs_with_text(self, runs: Sequence[str], text: bytes) -> Sequence[str]:
        return await self._read(partial(retention.find_with_text, runs=runs, text=text, decrypt=self._decrypt))

    async def erase_contents(self, runs: Sequence[str], cause: ErasedBy = "operator", *, by: Actor = PROCESS) -> int:
        erased = 0
        now = asyncio.get_running_loop().time
        for group in await self._read(partial(retention.groups, runs=runs)):
            began = now()
            work = partial(content.erase, statements=self._statements, runs=group, decrypt=self._decrypt)
            erased += await self._write(partial(work, cause=cause, by=by))
            for run in group:
                self._journals.forget(run)
            await self._leave_time_for_others(now() - began)
        return erased

    async def place_hold(self, hold: Hold, *, by: Actor = PROCESS) -> Hold:
        return await self._write(partial(holds.place, hold=hold, by=by))

    async def release_hold(self, id_: str, at: float, *, by: Actor = PROCESS) -> Hold:
        return await self._write(partial(holds.release, id_=id_, at=at, by=by))

    async def find_holds_by_run(self, runs: Sequence[str]) -> Mapping[str, str]:
        return await self._read(partial(holds.find_by_run, runs=runs, decrypt=self._decrypt))

    async def count_released_holds(self) -> int:
        return await self._read(holds.count_released)

    async def prune(self, runs: Sequence[tuple[PrunedRun, int]], *, by: Actor = PROCESS) -> Sequence[str]:
        pruned_runs: list[str] = []
        most = retention.PRUNED_EVENTS_POSTGRES if self._statements.arrays else retention.PRUNED_EVENTS
        time = asyncio.get_running_loop().time
        for group in retention.pruning_groups(runs, most):
            began = time()
            work = partial(retention.prune, statements=self._statements, runs=group, decrypt=self._decrypt, by=by)
            names = await self._write(work)
            for run in names:
                self._journals.forget(run)
            pruned_runs += names
            await self._leave_time_for_others(time() - began)
        return pruned_runs

    async def _leave_time_for_others(self, seconds: float) -> None:
        """Give other writers of SQLite, in other processes too, as much time as a transaction has taken: SQLite has one
        writer and does not queue the others, which get the lock while nobody has it."""
        await asyncio.sleep(0.0 if self._statements.arrays else seconds)

    async def overwrite_erased(self) -> bool:
        return await self._runner.overwrite_erased()

    async def renew_leases(self, driver: str, epochs: Mapping[str, int], until: float) -> Mapping[str, int]:
        renewed: dict[str, int] = {}
        names = sorted(epochs)
        for start in range(0, len(names), CHUNK):
            chunk = {name: epochs[name] for name in names[start : start + CHUNK]}
            work = partial(runs.renew_leases, statements=self._statements, driver=driver, epochs=chunk, until=until)
            renewed |= await self._write(work)
            await asyncio.sleep(0)  # an SQLite transaction runs in the event loop: let other tasks in
        return renewed

    async def last_seqs(self, names: Sequence[str]) -> Mapping[str, int]:
        seqs: dict[str, int] = {}
        for start in range(0, len(names), CHUNK):
            seqs |= await self._read(partial(runs.seqs, names=names[start : start + CHUNK]))
        return seqs

    async def begin_generation(self, now: float) -> float | None:
        self._journals.clear()
        return await self._write(partial(generation.begin, now=now))

    async def count_lapsed_runs(self, now: float) -> tuple[LapsedRuns, ...]:
        return await self._read(partial(runs.count_lapsed, now=now))

    async def count_untaken_runs(self, now: float) -> Mapping[str, int]:
        return await self._read(partial(runs.count_untaken, now=now))

    async def count_waiting_runs(self, most: int) -> int:
        return await self._read(partial(runs.count_waiting, most=most))

    async def take_over(
        self,
        driver: str,
        now: float,
        until: float,
        limit: int,
        kinds: Sequence[tuple[str, str]],
        cancelled_kinds: Sequence[tuple[str, str]] = (),
    ) -> tuple[RunRow, ...]:
        return await self._write(
            partial(
                runs.take_over,
                driver=driver,
                now=now,
                until=until,
                limit=limit,
                kinds=kinds,
                cancelled_kinds=cancelled_kinds,
            )
        )

    async def renew_claims(self, claims: Sequence[TicketClaim], until: float) -> frozenset[TicketClaim]:
        renewed: set[TicketClaim] = set()
        for start in range(0, len(claims), CHUNK):
            chunk = claims[start : start + CHUNK]
            renewed |= await self._write(
                partial(runs.renew_claims, statements=self._statements, claims=chunk, until=until)
            )
            await asyncio.sleep(0)
        return frozenset(renewed)

    async def find_ticket(self, run: str, step: int) -> TicketRow | None:
        return await self._read(partial(runs.find_ticket, name=run, step=step))

    async def backlog(self, now: float, most: int) -> Backlog:
        return await self._read(partial(runs.backlog, now=now, most=most))

    async def announce_overdue_tickets(
        self, now: float, limit: int, grace: float | None = None
    ) -> tuple[TicketRow, ...]:
        grace = self._grace if grace is None else grace
        if not await self._read(lambda conn: conn.execute(runs.select_overdue_tickets(now, grace, 1)).first()):
            return ()
        return await self._write(partial(runs.announce, now=now, grace=grace, limit=limit))

    async def acquire_leadership(self, leader: IdempotencyRecord, now: float) -> bool:
        return await self._write(partial(idempotency.add_or_prolong, once=leader, now=now))

    async def forget_idempotency_records(self, now: float, limit: int) -> int:
        # There are hardly ever any, so look before a write transaction is begun.
        if not await self._read(partial(idempotency.any_lapsed, now=now)):
            return 0
        return await self._write(partial(idempotency.forget, now=now, limit=limit))

    async def take_notices(self, now: float, until: float, limit: int) -> tuple[Notice, ...]:
        # As with overdue tickets, look before a write transaction is begun.
        if not await self._read(lambda conn: conn.execute(notices.select_due(now, 1)).first()):
            return ()
        return await self._write(partial(notices.take, now=now, until=until, limit=limit))

    async def close_notice(self, notice: Notice) -> bool:
        return await self._write(partial(notices.close, notice=notice))

    async def fail_notice(self, notice: Notice, at: float, reason: str) -> bool:
        return await self._write(partial(notices.fail, notice=notice, at=at, reason=reason))

    async def failed_notices(self, limit: int) -> tuple[FailedNotice, ...]:
        return await self._read(partial(notices.list_failed, limit=limit))

    async def resend_notices(self, given_up: Sequence[Notice], now: float) -> int:
        return await self._write(partial(notices.resend, given_up=given_up, now=now))

    async def put_off_notice(self, notice: Notice, due: float) -> bool:
        return await self._write(partial(notices.put_off, notice=notice, due=due))

    async def count_pending_notices(self, most: int) -> int:
        return await self._read(partial(notices.count, most=most))

    async def forget_notices(self, before: float, limit: int) -> int:
        if not await self._read(lambda conn: conn.execute(notices.select_due(before, 1)).first()):
            return 0
        return await self._write(partial(notices.forget, before=before, limit=limit))

    async def rate(self, rating: Feedback) -> Feedback:
        return await self._write(partial(feedback.add, rating=rating))

    async def feedback_after(self, last: tuple[float, str], limit: int) -> tuple[Feedback, ...]:
        return await self._read(partial(feedback.after, last=last, limit=limit))

    async def note_trial(self, trial: Trial) -> None:
        await self._write(partial(trials.note, trial=trial))

    async def trials(self, news: float | None = None) -> tuple[Trial, ...]:
        return await self._read(partial(trials.read_all, news=news))

    async def find_rated_runs(
        self, ratings: Sequence[Feedback], kinds: Sequence[Kind], find_ref: Callable[[Sequence[Event]], str]
    ) -> tuple[RatedRun, ...]:
        work = partial(rated_runs.find, ratings=ratings, kinds=kinds, find_ref=find_ref, decrypt=self._decrypt)
        return await self._read(work)

    async def journaled_runs(self, query: RunQuery) -> tuple[JournaledRun, ...]:
        return await self._read(partial(reports.journaled_runs, query=query))

    async def disclosures(self, query: DisclosureQuery) -> tuple[Disclosure, ...]:
        return await self._read(partial(disclosures.page, query=query))

    async def rebuild_disclosures(self, after: Place | None, limit: int, complete: EventCompleter) -> RebuildBatch:
        return await self._write(partial(disclosures.rebuild, after=after, limit=limit, complete=complete))

    async def catalogs(self, digests: Sequence[str]) -> Mapping[str, bytes]:
        return await self._read(partial(reports.catalogs, digests=digests))

    async def find_learned_state(self, policy: str, after: int) -> PolicyState | None:
        return await self._read(partial(rated_runs.find_latest, policy=policy, after=after))

    async def learn(
        self, policy: str, learned: PolicyState, at: float, parts: Mapping[str, bytes] = MappingProxyType({})
    ) -> bool:
        return await self._write(partial(rated_runs.learn, policy=policy, learned=learned, at=at, parts=parts))

    async def change(self, change: Change, *, by: Actor | None = None) -> bool:
        return await self._write(partial(conductor_changes.add, change=change, by=by))

    async def changes(self) -> tuple[Change, ...]:
        return await self._read(conductor_changes.read_all)

    async def load_content_keys(self) -> int:
        return await self._tenant_keys.load_all()

    async def rewrap_content_keys(self) -> tuple[int, int]:
        return await self._tenant_keys.rewrap()

    async def retire_content_keys(self, tenant: str, at: float) -> float:
        return await self._tenant_keys.retire(tenant, at)

    async def destroy_content_keys(self, tenant: str) -> int:
        return await self._tenant_keys.destroy(tenant)

    async def key(self, public_id: str) -> KeyRow | None:
        if not self.availability.healthy:
            raise StoreUnavailable()
        return await super().key(public_id)

    def note_budget_change(self, id_: str, warnings: int) -> None:
        for _ in range(warnings):
            self._forward_signal(Signal("soft_limit", id_))
        self._tenants_with_budgets.forget()

    async def sum_up_budget_use(self, before: float) -> int:
        total = 0
        while window_count := await self._write(partial(budgets.sum_up, before=before)):
            total += window_count
        return total

    async def budget_accounts(self, tenant: str, names: Mapping[Scope, str]) -> tuple[str, ...]:
        if tenant not in await self._tenants_with_budgets.get():
            return ()
        return await self._read(partial(budgets.accounts_of, tenant=tenant, names=names))

    async def count_requests(self, requests: Sequence[RateRequest], now: float) -> tuple[RateReply, ...]:
        return await self._write(partial(rates.count, requests=requests, now=now))

    async def give_back(self, request: RateRequest) -> None:
        await self._write(partial(rates.give_back, request=request))

    async def forget_windows(self, now: float, limit: int) -> int:
        if not await self._read(partial(rates.any_lapsed, now=now)):
            return 0
        return await self._write(partial(rates.forget, now=now, limit=limit))

    async def clock(self) -> float:
        return await self._read(runs.clock)

    async def schema(self) -> tuple[str | None, str]:
        return await self._read(revision), newest()

    async def ready(self) -> None:
        try:
            async with asyncio.timeout(READY_SECONDS):
                await self._write(runs.write_pulse)
        except TimeoutError as error:
            self.availability.report_away(f"a test write took more than {READY_SECONDS:g} s")
            raise StoreUnavailable() from error

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.availability.close()
        self.writer.close()
        await self.writer.finished.wait()
        await self.availability.finished.wait()
        await self._runner.close()

    async def read_for(self, tenant: str | None, work: Callable[[Connection], T], *, brief: bool = False) -> T:
        """Read for a caller of this tenant; None: for one of all tenants, or for the service itself."""
        return await self._with_retry(partial(self._runner.read, work, brief=brief, tenant=tenant))

    async def _read(self, work: Callable[[Connection], T], *, brief: bool = False) -> T:
        return await self.read_for(None, work, brief=brief)

    async def _write(self, work: Callable[[Connection], T]) -> T:
        return await self.write_for(None, work)

    async def write_for(self, tenant: str | None, work: Callable[[Connection], T]) -> T:
        """Run work that may be done twice without harm: a COMMIT without an answer is reported as a failure. It is done
        for a caller of this tenant; None: for one of all tenants, or for the service itself."""
        result = await self._with_retry(partial(self._runner.write, work, tenant=tenant))
        self.availability.report_reached()  # a read proves nothing: a standby and a full disk can be read
        return result

    async def _with_retry(self, call: Callable[[], Coroutine[object, object, T]]) -> T:
        """Call once more if a pooled connection was dead, another transaction in the way, or a new connection not to be
        had for the moment; else report the fault. With each content key that it needs, it is called again."""
        is_repeated = False
        while True:
            try:
                return await call()
            except UnknownKeys as unknown:
                await self._tenant_keys.load(unknown.ids)
            except Fault as fault:
                if is_repeated or fault.reason not in {"lost", "contended", "slow"}:
                    raise self._report_fault(fault) from fault
                is_repeated = True
                if fault.reason == "slow":
                    await asyncio.sleep(retries.DATABASE_FIRST)

    def _report_fault(self, fault: Fault) -> BatonError:
        """Report a fault, and return it as the error that callers of the store are given."""
        if fault.reason == "foreign":
            return NotFound()
        if fault.reason == "overlong":
            return StoreUnavailable(OVERLONG)
        if fault.reason in AWAY:
            self.availability.report_away(fault.describe_cause())
        return StoreUnavailable()


class SqlTenantStore(TenantVerbs):
    """Implements `protocol.TenantStore` and `protocol.TenantAdministration` for one tenant."""

    def __init__(self, store: SqlStore, tenant: str) -> None:
        self._store = store
        self._tenant = tenant
        self._statements = store._statements

    async def _read(self, work: Callable[[Connection], T], *, brief: bool = False) -> T:
        return await self._store.read_for(self._tenant, work, brief=brief)

    async def _write(self, work: Callable[[Connection], T]) -> T:
        return await self._store.write_for(self._tenant, work)

    def note_budget_change(self, id_: str, warnings: int) -> None:
        self._store.note_budget_change(id_, warnings)

    async def keys(self, query: KeyQuery = EVERY_KEY) -> tuple[KeyRow, ...]:
        return await super().keys(replace(query, tenant=self._tenant))

    async def append(self, entry: Entry) -> AppendResult:
        return await self._store.append(replace(entry, tenant=self._tenant))

    async def journal(self, run: str, upto: int | None = None, after: int = 0) -> Journal:
        return await self._store.journal_of(self._tenant, run, upto, after)

    async def journaled_runs(self, query: RunQuery) -> tuple[JournaledRun, ...]:
        return await self._read(partial(reports.journaled_runs, query=replace(query, tenant=self._tenant)))

    async def disclosures(self, query: DisclosureQuery) -> tuple[Disclosure, ...]:
        return await self._read(partial(disclosures.page, query=query, tenant=self._tenant))

    async def contents(self, run: str, refs: Sequence[str]) -> Mapping[str, bytes]:
        return await self._store.contents_of(self._tenant, run, refs)

    async def records(self, run: str, keys: Collection[tuple[str, Reader]]) -> Mapping[tuple[str, Reader], Any]:
        bodies = await self.contents(run, sorted({ref for ref, _ in keys}))
        return {(ref, read): read(bodies[ref]) for ref, read in keys if ref in bodies}

    async def erase(self, run: str, *, by: Actor = PROCESS) -> bool:
        return await self._store.erase_of(run, self._tenant, by)

    async def rate(self, rating: Feedback) -> Feedback:
        return await self._store.rate(replace(rating, tenant=self._tenant))
