"""Validates a batch of entries, applies them in memory, and writes them in one transaction.

The entries are applied in order, and each sees the changes of those before it. The changed rows are written at the end,
none of them twice. An entry that is refused changes nothing and does not affect the others.

`commit` reads the rows of the runs under lock (and those of the tickets, if an entry moves one), applies the entries to
them and writes the changes: four round trips, one after the other (BEGIN, the rows, the writes, COMMIT).

If the rows are cached it takes one. A process remembers the row and the tickets of the runs that it wrote or read last.
`apply_to_cached_rows` checks and applies the entries on these in the same way as on locked rows, and
`conditional_write` writes them by one statement: it locks the run's row, compares its `revision` with the cached one,
and writes nothing at all if they differ. Every change of a run's row or tickets raises the revision (renewals of leases
and claims do not: nothing is decided by those), so cached rows may be as old as they like. If they are, that costs one
round trip, and another one reads the rows, to which the batch is then applied. The first one is saved where an entry
names the epoch or the event that it follows, and those of the cached rows are older.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import orjson
from msgspec import Struct
from sqlalchemy import Connection, select

from app.core.pool.catalog import Amount
from app.core.run import notices
from app.core.run.events import (
    TERMINAL,
    Event,
    Fact,
    Json,
    Kind,
    RunApproved,
    RunAwaitingApproval,
    RunResumed,
    StepDone,
)
from app.core.run.kinds import AFTER_THE_END, COPIES, WITHOUT_LEASE
from app.errors import Conflict, LeaseLost, NotFound, RunEnded, RunOverBudget
from app.store.protocol import (
    MOVED,
    PLAN_TAG,
    AppendResult,
    Entry,
    Lease,
    NewRun,
    Outbox,
    Projection,
    TicketMove,
)
from app.store.rows import texts
from app.store.rows.disclosures import DisclosureRows
from app.store.rows.idempotency import IdempotencyRows
from app.store.rows.runs import CachedRows
from app.store.sqlkit.sealing import TEXT, ContentKey, place_of
from app.store.sqlkit.statements import (
    CACHED_COLUMNS,
    MUTABLE_COLUMNS,
    OPEN_RUN_COLUMNS,
    TICKET_COLUMNS,
    TICKET_COLUMNS_EXCEPT_UNTIL,
    OwnedRun,
    Row,
    RowWrites,
    SingleStatement,
    Statements,
)
from app.store.sqlkit.tables import EVENTS, RUNS
from app.store.writing import budget_ledger
from app.store.writing.budget_ledger import BudgetLedger, Charge, NeedsAllSlices, Signal

Outcome = AppendResult | Exception

NOTHING = Amount()
BACKDATED_SECONDS = 3600.0
"""Seconds by which the last announcement of a ticket is dated back if nobody announces it: it is overdue at once, and
the oldest is taken first."""
FIRST_EPOCH = 1
MOST_CACHED = 8192
"""Most runs whose rows are cached."""
BEGINNINGS = frozenset({Kind.ADMITTED, Kind.RESUMED})
"""Kinds of the events that begin a turn."""
_ID, _REVISION = CACHED_COLUMNS.index("id"), CACHED_COLUMNS.index("revision")
_BUDGETS = CACHED_COLUMNS.index("budgets")
_STEP, _HOLDER = TICKET_COLUMNS.index("step"), TICKET_COLUMNS.index("holder")


class EncodedEntry(Struct, frozen=True):
    """An entry whose event bodies are encoded as JSON, before it is queued: what cannot be encoded fails early."""

    entry: Entry
    values: tuple[Json, ...]
    """The bodies as JSON values."""
    bodies: tuple[bytes, ...]
    size: int
    moves_tickets: bool
    """True if the entry may change tickets of its run, so that these must be known. A new run has none yet."""
    key: ContentKey | None = None
    """The key under which its contents are encrypted; None: they are stored plain."""


def encode(entry: Entry, key: ContentKey | None = None) -> EncodedEntry:
    """Encode the bodies of an entry's events. Raises TypeError for a body that is not JSON."""
    values = tuple([draft.to_json() for draft in entry.events])
    bodies = tuple([orjson.dumps(value) for value in values])
    size = sum(map(len, bodies)) + sum([len(body) for _, body in entry.contents])
    ends = any(draft.kind in TERMINAL for draft in entry.events)
    moves = entry.new is None and (ends or entry.move is not None or bool(entry.outbox))
    return EncodedEntry(entry, values, bodies, size, moves, key)


@dataclass(slots=True)
class _Run:
    """A run's row while the batch is applied: the columns that are checked and those that may change."""

    id: str
    epoch: int
    cap_usd: int
    cap_tokens: int
    seq: int = 0
    claims: int = 0
    held_usd: int = 0
    held_tokens: int = 0
    spent_usd: int = 0
    spent_tokens: int = 0
    state: str = "admitted"
    topology: str | None = None
    degraded: bool = False
    steps: int = 0
    ended_at: float | None = None
    error: str | None = None
    notify_turn: int | None = None
    revision: int = 0
    thread: str | None = None
    """The id of the thread to which its outputs belong, if its contents are shared (see `rows/texts.py`)."""
    budgets: str | None = None
    """A JSON array of the accounts in which its holds are reserved; None where there are none."""
    tenant: str = ""
    key: str = ""
    salt: bytes | None = b""
    """None once its content was erased."""
    stored_epoch: int = field(init=False)
    lease: Lease | None = None
    wished_at: float | None = None

    def __post_init__(self) -> None:
        self.stored_epoch = self.epoch


@dataclass(slots=True)
class _Ticket:
    """A ticket's row while the batch is applied."""

    run: str
    step: int
    tier: str
    driver: str
    version: int
    claim: int
    holder: str | None
    until: float
    rung_at: float
    lost: int = 0
    has_row: bool = True
    is_deleted: bool = False
    stored_until: float | None = None
    """None if the ticket has no row yet, or a row that must be written in any case."""


_MUTABLE_VALUES = attrgetter(*MUTABLE_COLUMNS)
_OPEN_RUN_CHANGE = attrgetter(*OPEN_RUN_COLUMNS, "id", "stored_epoch")
_ENDED_RUN_CHANGE = attrgetter(*MUTABLE_COLUMNS, "id", "stored_epoch")
_TICKET_VALUES = attrgetter(*TICKET_COLUMNS)
_CACHED_VALUES = attrgetter(*CACHED_COLUMNS)
_TICKET_CHANGE_EXCEPT_UNTIL = attrgetter(*TICKET_COLUMNS_EXCEPT_UNTIL, "run", "step")
_TICKET_CHANGE = attrgetter(*TICKET_COLUMNS[2:], "run", "step")


class RowCache:
    """The rows of the runs that this process wrote or read last, on which a batch may be applied without reading them.

    The cache is bounded, and evicts the run that was not written to for longest.
    """

    def __init__(self, most: int = MOST_CACHED) -> None:
        self._runs: OrderedDict[str, CachedRows] = OrderedDict()
        self._most = most

    def find(self, runs: Iterable[str], ticket_runs: Iterable[str]) -> dict[str, CachedRows] | None:
        """Return the rows of all these runs, with the tickets of those in `ticket_runs`; None if any of them is
        missing."""
        rows = {}
        for run in runs:
            cached = self._runs.get(run)
            if cached is None:
                return None
            rows[run] = cached
        if any(rows[run].tickets is None for run in ticket_runs):
            return None
        return rows

    def update(self, rows: Mapping[str, CachedRows | None]) -> None:
        """Cache the rows that a commit has written or that were read; forget the runs that have None."""
        for run, cached in rows.items():
            self._runs.pop(run, None)
            if cached is not None:
                self._runs[run] = cached
        while len(self._runs) > self._most:
            self._runs.popitem(last=False)

    def clear(self) -> None:
        """Forget everything. After a lost connection the database may be an older copy that counts revisions anew."""
        self._runs.clear()


class RowBatch:
    """The rows that a batch of entries reads, and the changes that it makes to them."""

    def __init__(
        self,
        runs: Iterable[Row],
        tickets: Iterable[Row],
        ticket_runs: Collection[str],
        idempotency: IdempotencyRows | None = None,
        held_locks: Collection[int] | None = None,
        budgets: BudgetLedger | None = None,
    ) -> None:
        """`tickets` are all tickets of the `ticket_runs`.

        Only texts of owners whose lock is in `held_locks` are shared; if that is None, those of all owners are, and
        `locks` are to be taken before the write. Without `idempotency` no entry has an idempotency record, and without
        `budgets` none holds or settles anything for a run that has accounts.
        """
        self._runs = {row[0]: _Run(*row) for row in runs}
        self._tickets = {(row[0], row[1]): _stored_ticket(row) for row in tickets}
        self._runs_with_tickets = set(ticket_runs)
        """Runs whose tickets are all known."""
        self._idempotency = idempotency
        self._new_runs: dict[str, tuple[NewRun, float]] = {}
        self._changed_runs: set[str] = set()
        self._changed_tickets: set[tuple[str, int]] = set()
        self._events: list[tuple[Any, ...]] = []
        self._contents: list[tuple[Any, ...]] = []
        self._disclosures = DisclosureRows()
        self._shared: list[Row] = []
        self._texts: dict[str, Row] = {}
        self._held_locks = held_locks
        self.locks: set[int] = set()
        """The locks of the owners whose texts are written."""
        self._key: ContentKey | None = None
        """The key under which the contents of the present entry are encrypted."""
        self.owned: set[OwnedRun] = set()
        """The runs that must belong to a tenant for anything to be written, each with that tenant."""
        self._tags: list[tuple[Any, ...]] = []
        self._notices: list[tuple[Any, ...]] = []
        self._budgets = budgets
        self._postponed_runs: set[str] = set()
        """Runs of which an entry is put off, and with it those that follow in the batch, so that they stay in order."""

    def apply(self, encoded: EncodedEntry) -> Outcome:
        """Check one entry and apply it, or return the exception that refuses it, or that puts it off."""
        entry = encoded.entry
        try:
            run = self._run(entry)
            _check_order(run, entry)
            self._check_tenant(entry)
            ticket = self._ticket(entry.run, entry.move, entry.at) if entry.move else None
            self._check_rows(entry)
            money = _balance(run, entry)
            charge = self._charge(run, entry)
        except (LeaseLost, RunEnded, RunOverBudget, NotFound, Conflict, ValueError, NeedsAllSlices) as refusal:
            return refusal
        if entry.new is not None:
            self._runs[run.id] = run
            self._runs_with_tickets.add(run.id)
            self._new_runs[run.id] = (entry.new, entry.at)
        elif run.id not in self._changed_runs:
            self._changed_runs.add(run.id)
            run.revision += 1
        run.held_usd, run.held_tokens, run.spent_usd, run.spent_tokens = money
        if charge is not None and self._budgets is not None:
            self._budgets.apply(charge)
        claim = self._move(run, ticket, entry.move) if entry.move and ticket else 0
        if entry.lease is not None:
            run.epoch, run.lease = run.epoch + 1, entry.lease
        elif not is_fenced(entry):
            run.wished_at = entry.at
        events = self._append_events(run, encoded)
        self._key = encoded.key
        claims = self._apply_rows(run, entry)
        if self._idempotency is not None:
            self._idempotency.add(entry.once, run.id)
        if entry.tenant is not None and run.id not in self._new_runs:
            self.owned.add((run.id, entry.tenant))
        return AppendResult(events, claim, claims)

    def writes(self, statements: Statements) -> list[RowWrites]:
        """Return all changed rows, each with the way in which it is written. Most of the lists are empty."""
        idempotency: Sequence[RowWrites] = ()
        if self._idempotency is not None:
            idempotency = self._idempotency.writes(statements)
        return [
            *self._writes_of_runs(statements),
            (statements.insert_event, self._events),
            *self._disclosures.writes(statements),
            (statements.insert_content, self._contents),
            (statements.insert_shared_content, self._shared),
            (statements.insert_text, [self._texts[name] for name in sorted(self._texts)]),
            (statements.insert_tag, self._tags),
            (statements.insert_notice, self._notices),
            *idempotency,
            *self._writes_of_tickets(statements),
        ]

    def _writes_of_runs(self, statements: Statements) -> list[RowWrites]:
        """Return the rows of new runs, and of others the columns that may have changed: fewer for a run that is open,
        and more for one whose lease has changed."""
        new_runs = [_new_run_row(self._runs[name], new, at) for name, (new, at) in self._new_runs.items()]
        open_runs: list[Row] = []
        ended_runs: list[Row] = []
        open_runs_and_leases: list[Row] = []
        ended_runs_and_leases: list[Row] = []
        for name in sorted(self._changed_runs - self._new_runs.keys()):
            run = self._runs[name]
            if run.lease is None and run.ended_at is None:
                open_runs.append(_OPEN_RUN_CHANGE(run))
            elif run.lease is None:
                ended_runs.append(_ENDED_RUN_CHANGE(run))
            elif run.ended_at is None:
                open_runs_and_leases.append(_lease_change(run) + _OPEN_RUN_CHANGE(run))
            else:
                ended_runs_and_leases.append(_lease_change(run) + _ENDED_RUN_CHANGE(run))
        return [
            (statements.insert_run, new_runs),
            (statements.update_open_run, open_runs),
            (statements.update_ended_run, ended_runs),
            (statements.update_open_run_and_lease, open_runs_and_leases),
            (statements.update_ended_run_and_lease, ended_runs_and_leases),
        ]

    def _writes_of_tickets(self, statements: Statements) -> list[RowWrites]:
        """Return the rows of new tickets, the keys of those that are gone, and of others the columns that may have
        changed: without `until` where the end of the claim is what is stored."""
        deletions: list[Row] = []
        updates: list[Row] = []
        updates_except_until: list[Row] = []
        new_tickets: list[Row] = []
        for place in sorted(self._changed_tickets):
            ticket = self._tickets[place]
            if ticket.is_deleted:
                if ticket.has_row:
                    deletions.append(place)
            elif not ticket.has_row:
                new_tickets.append(_TICKET_VALUES(ticket))
            elif ticket.until != ticket.stored_until:
                updates.append(_TICKET_CHANGE(ticket))
            else:
                updates_except_until.append(_TICKET_CHANGE_EXCEPT_UNTIL(ticket))
        return [
            (statements.delete_ticket, deletions),
            (statements.update_ticket, updates),
            (statements.update_ticket_except_until, updates_except_until),
            (statements.insert_ticket, new_tickets),
        ]

    def cacheable(self) -> dict[str, CachedRows | None]:
        """Return the rows of these runs after the write, for the row cache. None for a run that has ended or was
        erased."""
        tickets: dict[str, list[Row]] = {run: [] for run in self._runs_with_tickets}
        for ticket in self._tickets.values():
            if not ticket.is_deleted and ticket.run in tickets:
                tickets[ticket.run].append(_TICKET_VALUES(ticket))
        rows: dict[str, CachedRows | None] = {}
        for name, run in self._runs.items():
            if run.ended_at is not None or run.salt is None:
                rows[name] = None
            elif name in tickets:
                rows[name] = CachedRows(_CACHED_VALUES(run), tuple(tickets[name]))
            else:
                rows[name] = CachedRows(_CACHED_VALUES(run), None)
        return rows

    def make_wishes_due(self, conn: Connection, statements: Statements) -> None:
        """Write again to runs that got a wish and have no driver, after a change of hands: they are due at once."""
        rows: list[Row] = []
        for name in sorted(self._changed_runs):
            run = self._runs[name]
            if run.wished_at is not None:
                rows.append((run.wished_at, run.id))
        statements.make_due.each(conn, rows)

    def _run(self, entry: Entry) -> _Run:
        if entry.run in self._postponed_runs:
            raise NeedsAllSlices
        run = self._runs.get(entry.run)
        if entry.new is None:
            if run is None:
                raise NotFound
            return run
        if run is not None:
            raise Conflict
        new = entry.new
        if _copies(entry):
            origin = self._runs.get(new.origin_run)
            if origin is None or origin.salt is None:
                raise NotFound  # it was erased since its content was read
        run = _Run(entry.run, FIRST_EPOCH, new.cap.usd, new.cap.tokens, tenant=new.tenant, key=new.key)
        if new.budgets:
            run.budgets = budget_ledger.column_of(new.budgets)
        return run

    def _charge(self, run: _Run, entry: Entry) -> Charge | None:
        """Return the changes that an entry makes to the run's accounts. Raises `BudgetExhausted` if one has not enough
        left, or `NeedsAllSlices`."""
        if self._budgets is None or run.budgets is None:
            return None
        try:
            return self._budgets.charge(entry, budget_ledger.accounts_of(run.budgets))
        except NeedsAllSlices:
            self._postponed_runs.add(entry.run)
            raise

    def _ticket(self, run: str, move: TicketMove, at: float) -> _Ticket:
        """Return the ticket that is moved. Raises `LeaseLost` if the move has no right to it (D3)."""
        ticket = self._tickets.get((run, move.step))
        if ticket is None or ticket.is_deleted:
            raise LeaseLost
        if move.verb == "take":
            is_claimed = ticket.holder is not None and ticket.until > at
            allowed = ticket.version == move.version and not is_claimed
        else:
            allowed = ticket.holder is not None and ticket.claim == move.claim
        if not allowed:
            raise LeaseLost
        return ticket

    def _check_tenant(self, entry: Entry) -> None:
        """Raise `NotFound` if a new run belongs to another tenant. For stored runs the write compares it (`owned`)."""
        new = entry.new
        if new is None and entry.run in self._new_runs:
            new, _ = self._new_runs[entry.run]
        if new is not None and entry.tenant is not None and new.tenant != entry.tenant:
            raise NotFound

    def _check_rows(self, entry: Entry) -> None:
        """Raise `Conflict` if the entry's idempotency record is there already, or a ticket that is to be taken as it is
        written: it may have a holder."""
        if self._idempotency is not None:
            self._idempotency.check(entry.once, entry.at)
        for outbox in entry.outbox:
            ticket = self._tickets.get((entry.run, outbox.step))
            if outbox.holder and ticket is not None and not ticket.is_deleted:
                raise Conflict

    def _move(self, run: _Run, ticket: _Ticket, move: TicketMove) -> int:
        """Move a ticket. Returns the number of the claim that this has taken; 0 if it took none."""
        self._changed_tickets.add((ticket.run, ticket.step))
        ticket.version += 1
        if move.verb == "take":
            # Numbered per run, not per row: a step that is queued anew must not honour a claim on its former ticket.
            run.claims += 1
            ticket.lost += ticket.holder is not None
            ticket.claim, ticket.holder, ticket.until, ticket.rung_at = run.claims, move.holder, move.until, 0.0
            return ticket.claim
        if move.verb == "release":
            ticket.holder, ticket.until, ticket.rung_at = None, move.until, 0.0
        elif move.verb == "finish":
            ticket.is_deleted = True
        return 0

    def _append_events(self, run: _Run, encoded: EncodedEntry) -> tuple[Event, ...]:
        entry, at = encoded.entry, encoded.entry.at
        events: list[Event] = []
        for draft, value, body in zip(entry.events, encoded.values, encoded.bodies, strict=True):
            seq = run.seq + len(events) + 1
            events.append(Event(run.id, seq, draft.kind, at, value, draft))
            self._events.append((run.id, seq, draft.kind.value, at, body))
            if draft.kind in TERMINAL:
                run.state, run.ended_at = TERMINAL[draft.kind], at
                self._delete_untaken(run.id)
            self._add_notice(run, draft, entry)
        self._disclosures.note(run.id, run.tenant, run.key, entry.events, at)
        run.seq += len(events)
        return tuple(events)

    def _add_notice(self, run: _Run, draft: Fact, entry: Entry) -> None:
        """Write the notice of a turn together with the event that ends it, if the turn began with `Entry.notify`."""
        if draft.kind in BEGINNINGS:
            run.notify_turn = None
            if entry.notify:
                run.notify_turn = draft.turn if isinstance(draft, RunResumed) else 0
        elif isinstance(draft, RunApproved):  # a price above the approved one is over budget
            run.cap_usd = draft.max_usd
        elif isinstance(draft, RunAwaitingApproval) and draft.notifies:
            about = notices.approval_request_data(run.id, draft)
            subject = notices.approval_notice_name(run.id)
            self._notices.append(_notice_row(subject, draft.proposal, notices.APPROVAL_REQUESTED, entry.at, about))
        elif run.notify_turn is not None:
            word = notices.word(draft)
            if word is not None:
                self._notices.append(_notice_row(run.id, run.notify_turn, word, entry.at, None))
                run.notify_turn = None

    def _store_contents(self, run: _Run, entry: Entry) -> None:
        """Store the contents of an entry, some of them in parts; none of a run whose content was erased."""
        if run.salt is None:
            return
        outputs = {draft.output for draft in entry.events if isinstance(draft, StepDone)}
        for ref, body in entry.contents:
            if entry.shared is not None and entry.shared.ref == ref and self._may_share(entry.shared.owner):
                key_id = self._key.id if self._key is not None else ""
                parts = texts.split_into_parts(run.id, entry.shared, key_id)
                if entry.new is not None:
                    run.thread = parts.thread or None
            elif ref in outputs and len(body) >= texts.SHARED_BYTES and run.thread and self._may_share(run.thread):
                parts = texts.parts_of_output(run.id, ref, body, run.thread)
            else:
                self._contents.append((run.id, ref, self._encrypt(run.id, ref, body)))
                continue
            *row, own = parts.content
            self._shared.append((*row, self._encrypt(run.id, ref, own)))
            for name, before, spoken, text in parts.texts:
                stored_text = text
                if self._key is not None:
                    stored_text = self._key.seal(TEXT, text)
                self._texts[name] = (name, before, spoken, stored_text, run.tenant)

    def _encrypt(self, run: str, ref: str, body: bytes) -> bytes:
        """Return the content as it is stored: as it is, where contents are not encrypted."""
        if self._key is None:
            return body
        return self._key.seal(place_of(run, ref), body)

    def _may_share(self, owner: str) -> bool:
        """Return True if texts of an owner may be written, whose lock is noted then."""
        lock = texts.lock_of(owner)
        if self._held_locks is not None and lock not in self._held_locks:
            return False
        self.locks.add(lock)
        return True

    def _delete_untaken(self, run: str) -> None:
        """Delete a run's tickets that were never taken. The others stay until the outcome of their call is recorded."""
        for place, ticket in self._tickets.items():
            if ticket.run == run and ticket.claim == 0:
                ticket.is_deleted = True
                self._changed_tickets.add(place)

    def _apply_rows(self, run: _Run, entry: Entry) -> tuple[int, ...]:
        """Apply everything but the events. Returns the claims on tickets that were taken as they were written."""
        self._store_contents(run, entry)
        for name, value in entry.tags:
            self._tags.append((name, value, run.id))
        _apply_projection(run, entry.row)
        claims = []
        for outbox in entry.outbox:
            place = (run.id, outbox.step)
            ticket = self._tickets.get(place)
            if ticket is None or ticket.is_deleted:
                has_row = ticket is not None and ticket.has_row
                ticket = _new_ticket(run.id, outbox, entry.at, has_row=has_row)
                self._tickets[place] = ticket
            else:  # it is queued, or a dispatcher has it: only the driver that it reports to changes
                ticket.driver, ticket.rung_at = outbox.driver, 0.0
            self._changed_tickets.add(place)
            if outbox.holder:
                move = TicketMove(outbox.step, "take", holder=outbox.holder, until=outbox.until)
                claims.append(self._move(run, ticket, move))
        return tuple(claims)


def _notice_row(subject: str, turn: int, word: str, at: float, about: Any) -> Row:
    """Return all columns of a notice that is due at once and was not tried yet, in table order."""
    return subject, turn, word, at, 0, at, None, None, about


def _stored_ticket(row: Row) -> _Ticket:
    ticket = _Ticket(*row)
    ticket.stored_until = ticket.until
    return ticket


def _new_ticket(run: str, outbox: Outbox, at: float, *, has_row: bool) -> _Ticket:
    """Return a ticket that nobody has claimed. `has_row` is True for one that replaces a ticket with a stored row."""
    announced_at = at if outbox.announced else at - BACKDATED_SECONDS
    return _Ticket(
        run=run,
        step=outbox.step,
        tier=outbox.tier,
        driver=outbox.driver,
        version=outbox.version,
        claim=0,
        holder=None,
        until=at,
        rung_at=announced_at,
        has_row=has_row,
    )


def is_fenced(entry: Entry) -> bool:
    """Return True if the writer of an entry may write facts: as the run's driver, its creator, or the holder of a
    ticket."""
    return entry.epoch is not None or entry.move is not None or entry.new is not None


def _check_order(run: _Run, entry: Entry) -> None:
    """Check the fence and the order of events. The epoch comes first: a driver that lost its run must learn that."""
    if entry.epoch != run.epoch and (entry.epoch is not None or entry.lease is not None):
        raise LeaseLost
    if run.salt is None and any(draft.kind is Kind.RESUMED for draft in entry.events):
        raise NotFound
    if not is_fenced(entry) and any(draft.kind not in WITHOUT_LEASE for draft in entry.events):
        raise LeaseLost
    ended = run.ended_at is not None
    if ended and (entry.outbox or entry.hold != NOTHING):
        raise RunEnded
    for draft in entry.events:
        if ended and draft.kind not in AFTER_THE_END:
            raise RunEnded
        ended = ended or draft.kind in TERMINAL
    if entry.seq is not None and entry.seq != run.seq:
        raise Conflict(code=MOVED)


def _balance(run: _Run, entry: Entry) -> tuple[int, int, int, int]:
    """Return the amounts held and spent after the entry. Raises `RunOverBudget` if a new hold would exceed a cap
    (D7)."""
    hold, release, spent = entry.hold, entry.release, entry.spent
    held_usd = run.held_usd + hold.usd - release.usd
    held_tokens = run.held_tokens + hold.tokens - release.tokens
    spent_usd = run.spent_usd + spent.usd
    spent_tokens = run.spent_tokens + spent.tokens
    if held_usd < 0 or held_tokens < 0:
        raise ValueError("more was released than the run holds")
    exceeds_cap = held_usd + spent_usd > run.cap_usd or held_tokens + spent_tokens > run.cap_tokens
    if exceeds_cap and hold != NOTHING:
        raise RunOverBudget
    return held_usd, held_tokens, spent_usd, spent_tokens


def _new_run_row(run: _Run, new: NewRun, at: float) -> tuple[Any, ...]:
    """Return all columns of a new run, in table order. A later entry of the batch may have changed its lease."""
    admission_columns = (run.id, new.tenant, new.key, new.tier, new.model, new.code, new.salt, run.thread, run.budgets)
    origin = (new.origin_kind or None, new.origin_run or None)
    erasure = (None, None)  # when, and by what
    lease: Row = (new.deadline, run.epoch, new.driver, new.lease_until)
    if run.lease is not None:
        lease = _lease(run)
    return (*admission_columns, *origin, *erasure, at, *lease, run.cap_usd, run.cap_tokens, *_MUTABLE_VALUES(run))


def _lease(run: _Run) -> tuple[Any, ...]:
    """Return the values of the columns `LEASE_COLUMNS` for a run whose lease has changed."""
    assert run.lease is not None
    return run.lease.deadline, run.epoch, run.lease.driver, run.lease.until


def _lease_change(run: _Run) -> tuple[Any, ...]:
    """Return the columns that change with the lease: the lease, and what the run may cost after an approval."""
    return (*_lease(run), run.cap_usd)


def _apply_projection(run: _Run, row: Projection) -> None:
    if row.state is not None:
        run.state = row.state
    if row.topology is not None:
        run.topology = row.topology
    if row.degraded is not None:
        run.degraded = row.degraded
    if row.steps is not None:
        run.steps = row.steps
    if row.error is not None:
        run.error = row.error


class AppliedBatch(Struct, frozen=True):
    """A batch after it was applied: the outcomes in the order of the entries, and the rows."""

    outcomes: list[Outcome]
    rows: RowBatch
    signals: Sequence[Signal] = ()
    """Refusals, warnings and overruns of budgets."""


def commit(
    conn: Connection,
    statements: Statements,
    batch: Sequence[EncodedEntry],
    number: int = 0,
    *,
    all_slices: bool = False,
) -> AppliedBatch:
    """Apply the entries in order on locked rows, and write the changes. The caller commits.

    New holds are made in the slice of this number of their accounts. An entry that this slice cannot decide is put off:
    its outcome is `NeedsAllSlices`, of which there is none with `all_slices`.
    Raises `NotFound` if an entry is written in the name of a tenant to which its run does not belong.
    """
    runs, ticket_runs = runs_to_lock(batch)
    if len(runs) > 1:
        statements.plan_by_key(conn)
    locks = _locks_of_owners(batch)
    statements.lock_texts(conn, locks)  # before any run's row, as an erasure does
    run_rows, ticket_rows = statements.lock_runs_and_tickets(conn, runs, ticket_runs)
    idempotency = IdempotencyRows(statements.idempotency.fetch(conn, _idempotency_ids(batch)))
    account_columns = _account_columns(run_rows, batch)
    budgets = None
    if account_columns:
        entries = [encoded.entry for encoded in batch]
        budgets = budget_ledger.load(conn, account_columns, entries, number, all_slices=all_slices)
    held_locks = locks if statements.arrays else None
    rows = RowBatch(run_rows, ticket_rows, ticket_runs, idempotency, held_locks, budgets)
    outcomes = [rows.apply(encoded) for encoded in batch]
    writes = rows.writes(statements)
    signals: Sequence[Signal] = ()
    if budgets is not None:
        writes += budgets.writes(conn, statements)
        signals = budgets.signals
    if not statements.write_if_owned(conn, sorted(rows.owned), *writes):
        raise NotFound
    rows.make_wishes_due(conn, statements)
    return AppliedBatch(outcomes, rows, signals)


def _locks_of_owners(batch: Sequence[EncodedEntry]) -> list[int]:
    """Return the locks of the owners whose texts a batch may write, in order."""
    locks = set()
    for encoded in batch:
        if encoded.entry.shared is not None:
            locks.add(texts.lock_of(encoded.entry.shared.owner))
    return sorted(locks)


def _idempotency_ids(batch: Sequence[EncodedEntry]) -> list[str]:
    """Return the ids of the idempotency records of a batch, in order."""
    ids = set()
    for encoded in batch:
        if encoded.entry.once is not None:
            ids.add(encoded.entry.once.id)
    return sorted(ids)


def _account_columns(run_rows: Iterable[Row], batch: Sequence[EncodedEntry]) -> dict[str, str | None]:
    """Return the accounts of the runs of a batch that have any, as their rows name them."""
    columns: dict[str, str | None] = {}
    for row in run_rows:
        if row[_BUDGETS] is not None:
            columns[row[_ID]] = row[_BUDGETS]
    for encoded in batch:
        new = encoded.entry.new
        if new is not None and new.budgets:
            columns[encoded.entry.run] = budget_ledger.column_of(new.budgets)
    return columns


def runs_to_lock(batch: Sequence[EncodedEntry]) -> tuple[list[str], list[str]]:
    """Return the runs of a batch with those of which it makes copies, and those of them whose tickets may change."""
    runs: set[str] = set()
    ticket_runs: set[str] = set()
    for encoded in batch:
        entry = encoded.entry
        runs.add(entry.run)
        if encoded.moves_tickets:
            ticket_runs.add(entry.run)
        if entry.new is not None and _copies(entry):
            runs.add(entry.new.origin_run)
    return list(runs), list(ticket_runs)


def _copies(entry: Entry) -> bool:
    """Return True if an entry admits a run that has the content of its origin: a repetition, or the further revision of
    a plan. An erasure of the origin then erases this one as well, so that the two must not pass each other: the origin
    is locked while this one is written, and must have its content."""
    new = entry.new
    return new is not None and (new.origin_kind in COPIES or (PLAN_TAG, new.origin_run) in entry.tags)


class SpeculativeBatch(Struct, frozen=True):
    """A batch that was applied to cached rows and is not written yet."""

    cached: Sequence[CachedRows]
    ticket_runs: Sequence[str]
    applied: AppliedBatch

    @property
    def refuses(self) -> bool:
        """Return True if an entry is refused on these rows, which is most likely because they are outdated."""
        return any(isinstance(outcome, Exception) for outcome in self.applied.outcomes)


def apply_to_cached_rows(batch: Sequence[EncodedEntry], row_cache: RowCache) -> SpeculativeBatch | None:
    """Apply the entries to cached rows; None if rows are not cached, or if the entries need them from the database.

    A claim on a ticket may have been renewed since it was cached, so only the row tells whether it has lapsed.
    """
    runs, ticket_runs = runs_to_lock([encoded for encoded in batch if encoded.entry.new is None])
    cached_rows = row_cache.find(runs, ticket_runs)
    if cached_rows is None or any(_needs_rows(encoded.entry, cached_rows) for encoded in batch):
        return None
    tickets: list[Row] = []
    runs_with_tickets: list[str] = []
    for run, cached in cached_rows.items():
        if cached.tickets is not None:
            tickets += cached.tickets
            runs_with_tickets.append(run)
    rows = RowBatch([cached.run for cached in cached_rows.values()], tickets, runs_with_tickets)
    outcomes = [rows.apply(encoded) for encoded in batch]
    return SpeculativeBatch(list(cached_rows.values()), ticket_runs, AppliedBatch(outcomes, rows))


def _needs_rows(entry: Entry, cached_rows: Mapping[str, CachedRows]) -> bool:
    """Return True if an entry can only be checked on rows of the database, and not on these cached ones."""
    if entry.once is not None or not is_fenced(entry):
        return True
    if _copies(entry):
        return True
    changes_holds = entry.hold != NOTHING or entry.release != NOTHING
    if changes_holds and _has_accounts(entry, cached_rows):
        return True
    if entry.move is None or entry.move.verb != "take":
        return False
    tickets = cached_rows[entry.run].tickets or ()
    return any(ticket[_STEP] == entry.move.step and ticket[_HOLDER] is not None for ticket in tickets)


def _has_accounts(entry: Entry, cached_rows: Mapping[str, CachedRows]) -> bool:
    if entry.new is not None:
        return bool(entry.new.budgets)
    return cached_rows[entry.run].run[_BUDGETS] is not None


def conditional_write(
    statements: Statements, speculative: SpeculativeBatch
) -> Callable[[Connection], AppliedBatch | None] | SingleStatement[AppliedBatch | None]:
    """Work that writes the batch, or writes nothing and returns None if a run's row has another revision than was
    cached. On Postgres it is one statement."""
    expected = [(cached.run[_ID], cached.run[_REVISION]) for cached in speculative.cached]
    applied, rows = speculative.applied, speculative.applied.rows
    writes = rows.writes(statements)
    if statements.arrays:
        locks, owned = sorted(rows.locks), sorted(rows.owned)
        return statements.single_write_if_current(
            expected, speculative.ticket_runs, applied, *writes, locks=locks, owned=owned
        )

    def write_if_current(conn: Connection) -> AppliedBatch | None:
        if statements.write_if_current(conn, expected, *writes):
            return applied
        return None

    return write_if_current


def was_committed(conn: Connection, outcomes: Sequence[Outcome]) -> bool | None:
    """Return True if a transaction whose COMMIT was not answered was committed; None if it wrote no event to look for.

    Waits for the row lock, so that a server that is still committing has decided by then. It looks for one event,
    because the transaction was atomic: one of a run that existed before if there is one, since nobody else can see a
    lock on the row of a new run.
    """
    first_events = []
    for outcome in outcomes:
        if isinstance(outcome, AppendResult) and outcome.events:
            first_events.append(outcome.events[0])
    event = max(first_events, key=attrgetter("seq"), default=None)
    if event is None:
        return None
    conn.execute(select(RUNS.c.id).where(RUNS.c.id == event.run).with_for_update())
    query = select(EVENTS.c.kind, EVENTS.c.at, EVENTS.c.body).where(
        EVENTS.c.run == event.run, EVENTS.c.seq == event.seq
    )
    row = conn.execute(query).one_or_none()
    if row is None:
        return False
    return (row.kind, row.at, orjson.loads(row.body)) == (event.kind, event.at, event.body)
