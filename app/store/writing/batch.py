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
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import orjson
from sqlalchemy import Connection, select

from app.core.records import record
from app.core.run import notices
from app.core.run.events import (
    TERMINAL,
    CallFinished,
    CallIntended,
    Event,
    Fact,
    Kind,
    RunApproved,
    RunAwaitingApproval,
    RunResumed,
    StepDone,
)
from app.core.run.kinds import AFTER_THE_END, COPIES, WITHOUT_LEASE
from app.errors import Conflict, LeaseLost, NotFound, RunEnded, RunOverBudget
from app.store.protocol import MOVED, TAKEN, Appended, Entry, IdempotencyRecord, Lease, Ledger, Move, NewRun, Projection
from app.store.rows import disclosures, texts
from app.store.rows.idempotency import record_row
from app.store.rows.runs import CachedRows
from app.store.sqlkit.sealing import TEXT, ContentKey, place_of
from app.store.sqlkit.statements import (
    ENDLESS,
    LIVE,
    SEEN,
    SETTLED,
    TICKET,
    OwnedRun,
    Row,
    Rows,
    SingleStatement,
    Statements,
)
from app.store.sqlkit.tables import EVENTS, RUNS
from app.store.writing import budget_ledger
from app.store.writing.budget_ledger import BudgetLedger, Charge, NeedsAllSlices, Signal

Outcome = Appended | Exception

NOTHING = Ledger()
LONG_AGO = 3600.0
"""Seconds by which the last announcement of a ticket is dated back if nobody announces it: it is overdue at once, and
the oldest is taken first."""
FIRST_EPOCH = 1
MOST_CACHED = 8192
"""Most runs whose rows are cached."""
BEGINNINGS = frozenset({Kind.ADMITTED, Kind.RESUMED})
"""Kinds of the events that begin a turn."""
_ID, _REVISION = SEEN.index("id"), SEEN.index("revision")
_BUDGETS = SEEN.index("budgets")
_STEP, _HOLDER = TICKET.index("step"), TICKET.index("holder")


@record(frozen=True, slots=True)
class EncodedEntry:
    """An entry whose event bodies are encoded as JSON, before it is queued: what cannot be encoded fails early."""

    entry: Entry
    bodies: tuple[bytes, ...]
    size: int
    moves_tickets: bool
    """True if the entry may change tickets of its run, so that these must be known. A new run has none yet."""
    key: ContentKey | None = None
    """The key under which its contents are encrypted; None: they are stored plain."""


def encode(entry: Entry, key: ContentKey | None = None) -> EncodedEntry:
    """Encode the bodies of an entry's events. Raises TypeError for a body that is not JSON."""
    bodies = tuple([orjson.dumps(draft.to_json()) for draft in entry.events])
    size = sum(map(len, bodies)) + sum([len(body) for _, body in entry.contents])
    ends = any(draft.kind in TERMINAL for draft in entry.events)
    moves = entry.new is None and (ends or entry.move is not None or bool(entry.outbox))
    return EncodedEntry(entry, bodies, size, moves, key)


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
    stored: bool = True
    gone: bool = False
    stored_until: float | None = None
    """None if the ticket has no row yet, or a row that must be written in any case."""


_LIVE_OF = attrgetter(*LIVE)
_CHANGE_OF = attrgetter(*ENDLESS, "id", "stored_epoch")
_END_OF = attrgetter(*LIVE, "id", "stored_epoch")
_TICKET_OF = attrgetter(*TICKET)
_SEEN_OF = attrgetter(*SEEN)
_TICKET_SETTLED_OF = attrgetter(*SETTLED, "run", "step")
_TICKET_CHANGE_OF = attrgetter(*TICKET[2:], "run", "step")


class RowCache:
    """The rows of the runs that this process wrote or read last, on which a batch may be applied without reading them.

    The cache is bounded, and evicts the run that was not written to for longest.
    """

    def __init__(self, most: int = MOST_CACHED) -> None:
        self._runs: OrderedDict[str, CachedRows] = OrderedDict()
        self._most = most

    def find(self, runs: Iterable[str], moving: Iterable[str]) -> dict[str, CachedRows] | None:
        """Return the rows of all these runs, with the tickets of those that are `moving`; None if any of them is
        missing."""
        found = {}
        for run in runs:
            cached = self._runs.get(run)
            if cached is None:
                return None
            found[run] = cached
        if any(found[run].tickets is None for run in moving):
            return None
        return found

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


class IdempotencyRows:
    """The idempotency records that a batch of entries checks and adds."""

    def __init__(self, rows: Iterable[Row]) -> None:
        """`rows` are the stored records that have an id of the batch's records."""
        self._known = {row[0]: IdempotencyRecord(*row) for row in rows}
        self._stored = frozenset(self._known)
        self._changed: set[str] = set()

    def check(self, once: IdempotencyRecord | None, at: float) -> None:
        """Raise `Conflict` if an earlier record lasts at this time."""
        held = self._known.get(once.id) if once is not None else None
        if held is not None and held.until > at:
            raise Conflict(code=TAKEN)

    def add(self, once: IdempotencyRecord | None, run: str) -> None:
        """Add a record, after `check`. It is written with the batch."""
        if once is not None:
            self._known[once.id] = replace(once, run=run)
            self._changed.add(once.id)

    def writes(self, statements: Statements) -> tuple[tuple[Rows, list[Row]], ...]:
        """The rows to be written, in the order of their ids, so that no two batches wait for each other in a circle."""
        made = [record_row(self._known[name]) for name in sorted(self._changed)]
        return (
            (statements.new_idempotency, [row for row in made if row[0] not in self._stored]),
            (statements.change_idempotency, [(*row[1:], row[0]) for row in made if row[0] in self._stored]),
        )


class DisclosureRows:
    """The rows that a batch of entries adds, and those that it completes.

    The intent of a call gives a row before anything is sent, and the outcome of the call completes that row. A call
    whose intent was written by a release without the ledger has no row; `baton disclosures rebuild` derives it.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[str, str], Row] = {}
        self._ended: dict[tuple[str, str], disclosures.Ended] = {}

    def note(self, run: str, tenant: str, key: str, facts: Sequence[Fact], at: float) -> None:
        """Note those of a run's new events that are the intent or the outcome of a call."""
        for fact in facts:
            if isinstance(fact, CallIntended) and fact.planned_by:
                self._made[run, fact.call] = disclosures.intended(run, tenant, key, fact, at)
            elif isinstance(fact, CallFinished):
                self._ended[run, fact.call] = disclosures.ended(fact)

    def writes(self, statements: Statements) -> tuple[tuple[Rows, Sequence[Row]], ...]:
        """Return the rows to be written. No row is both added and completed: Postgres does both in one statement."""
        made = [row + self._ended.pop(place, (None, None, None)) for place, row in self._made.items()]
        completed = [(*outcome, *place) for place, outcome in self._ended.items()]
        return (statements.new_disclosure, made), (statements.end_disclosure, completed)


class RowBatch:
    """The rows that a batch of entries reads, and the changes that it makes to them."""

    def __init__(
        self,
        runs: Iterable[Row],
        tickets: Iterable[Row],
        moving: Collection[str],
        idempotency: IdempotencyRows,
        locked: Collection[int] | None = None,
        budgets: BudgetLedger | None = None,
    ) -> None:
        """`tickets` are all tickets of the runs in `moving`. Only texts of owners whose lock is in `locked` are shared;
        None: those of all, and `locks` are to be taken before the write. Without `budgets` no entry holds or settles
        anything for a run that has accounts."""
        self._runs = {row[0]: _Run(*row) for row in runs}
        self._tickets = {(row[0], row[1]): _stored(row) for row in tickets}
        self._ticketed = set(moving)
        """Runs whose tickets are all known."""
        self._idempotency = idempotency
        self._born: dict[str, tuple[NewRun, float]] = {}
        self._changed: set[str] = set()
        self._touched: set[tuple[str, int]] = set()
        self._events: list[tuple[Any, ...]] = []
        self._contents: list[tuple[Any, ...]] = []
        self._disclosures = DisclosureRows()
        self._shared: list[Row] = []
        self._texts: dict[str, Row] = {}
        self._locked = locked
        self.locks: set[int] = set()
        """The locks of the owners whose texts are written."""
        self._key: ContentKey | None = None
        """The key under which the contents of the present entry are encrypted."""
        self.owned: set[OwnedRun] = set()
        """The runs that must belong to a tenant for anything to be written, each with that tenant."""
        self._tags: list[tuple[Any, ...]] = []
        self._notices: list[tuple[Any, ...]] = []
        self._budgets = budgets
        self._put_off: set[str] = set()
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
            self._idempotency.check(entry.once, entry.at)
            charge = self._charge(run, entry)
        except (LeaseLost, RunEnded, RunOverBudget, NotFound, Conflict, ValueError, NeedsAllSlices) as refusal:
            return refusal
        if entry.new is not None:
            self._runs[run.id] = run
            self._ticketed.add(run.id)
            self._born[run.id] = (entry.new, entry.at)
        elif run.id not in self._changed:
            self._changed.add(run.id)
            run.revision += 1
        run.held_usd, run.held_tokens, run.spent_usd, run.spent_tokens = money
        if charge is not None and self._budgets is not None:
            self._budgets.apply(charge)
        if entry.move and ticket:
            self._move(run, ticket, entry.move)
        if entry.lease is not None:
            run.epoch, run.lease = run.epoch + 1, entry.lease
        elif not fenced(entry):
            run.wished_at = entry.at
        events = self._append_events(run, encoded)
        self._key = encoded.key
        taken = self._apply_rows(run, entry)
        self._idempotency.add(entry.once, run.id)
        if entry.tenant is not None and run.id not in self._born:
            self.owned.add((run.id, entry.tenant))
        return Appended(events, ticket.claim if ticket and entry.move and entry.move.verb == "take" else 0, taken)

    def writes(self, statements: Statements) -> list[tuple[Rows, Sequence[Row]]]:
        """All changed rows, by the way in which they are written. Most of the lists are empty."""
        touched = [self._tickets[place] for place in sorted(self._touched)]
        kept = [ticket for ticket in touched if not ticket.gone]
        runs = [self._runs[name] for name in sorted(self._changed - self._born.keys())]
        handed = [run for run in runs if run.lease is not None]
        return [
            (statements.new_run, [_new_run_row(self._runs[name], *admitted) for name, admitted in self._born.items()]),
            (statements.change_run, [_CHANGE_OF(run) for run in runs if run.lease is None and run.ended_at is None]),
            (statements.end_run, [_END_OF(run) for run in runs if run.lease is None and run.ended_at is not None]),
            (statements.hand_run, [_lease_change(run) + _CHANGE_OF(run) for run in handed if run.ended_at is None]),
            (statements.hand_ended, [_lease_change(run) + _END_OF(run) for run in handed if run.ended_at is not None]),
            (statements.new_event, self._events),
            *self._disclosures.writes(statements),
            (statements.new_content, self._contents),
            (statements.new_shared_content, self._shared),
            (statements.new_text, [self._texts[name] for name in sorted(self._texts)]),
            (statements.new_tag, self._tags),
            (statements.new_notice, self._notices),
            *self._idempotency.writes(statements),
            (statements.end_ticket, [(t.run, t.step) for t in touched if t.gone and t.stored]),
            (statements.change_ticket, [_TICKET_CHANGE_OF(t) for t in kept if t.stored and t.until != t.stored_until]),
            (statements.settle_ticket, [_TICKET_SETTLED_OF(t) for t in kept if t.stored and t.until == t.stored_until]),
            (statements.new_ticket, [_TICKET_OF(t) for t in kept if not t.stored]),
        ]

    def cacheable(self) -> dict[str, CachedRows | None]:
        """The rows of these runs after the write, for the row cache. None for a run that has ended or was erased."""
        tickets: dict[str, list[Row]] = {run: [] for run in self._ticketed}
        for ticket in self._tickets.values():
            if not ticket.gone and ticket.run in tickets:
                tickets[ticket.run].append(_TICKET_OF(ticket))
        found: dict[str, CachedRows | None] = {}
        for name, run in self._runs.items():
            live = run.ended_at is None and run.salt is not None
            its = tuple(tickets[name]) if name in tickets else None
            found[name] = CachedRows(_SEEN_OF(run), its) if live else None
        return found

    def hasten_wishes(self, conn: Connection, statements: Statements) -> None:
        """Write again to runs that got a wish and have no driver, after a change of hands: they are due at once."""
        runs = [self._runs[name] for name in sorted(self._changed)]
        statements.hasten.each(conn, [(run.wished_at, run.id) for run in runs if run.wished_at is not None])

    def _run(self, entry: Entry) -> _Run:
        if entry.run in self._put_off:
            raise NeedsAllSlices
        run = self._runs.get(entry.run)
        if entry.new is None:
            if run is None:
                raise NotFound
            return run
        if run is not None:
            raise Conflict
        new = entry.new
        if _copies(new) and ((origin := self._runs.get(new.origin_run)) is None or origin.salt is None):
            raise NotFound  # it was erased since its content was read
        budgets = budget_ledger.column_of(new.budgets) if new.budgets else None
        caps = (new.cap.usd, new.cap.tokens)
        return _Run(entry.run, FIRST_EPOCH, *caps, tenant=new.tenant, key=new.key, budgets=budgets)

    def _charge(self, run: _Run, entry: Entry) -> Charge | None:
        """The changes that an entry makes to the run's accounts. Raises `BudgetExhausted` if one has not enough
        left, or `NeedsAllSlices`."""
        if self._budgets is None or run.budgets is None:
            return None
        try:
            return self._budgets.charge(entry, budget_ledger.accounts_of(run.budgets))
        except NeedsAllSlices:
            self._put_off.add(entry.run)
            raise

    def _ticket(self, run: str, move: Move, at: float) -> _Ticket:
        """The ticket that is moved. Raises `LeaseLost` if the move has no right to it (D3)."""
        ticket = self._tickets.get((run, move.step))
        if ticket is None or ticket.gone:
            raise LeaseLost
        if move.verb == "take":
            held = ticket.holder is not None and ticket.until > at
            allowed = ticket.version == move.version and not held
        else:
            allowed = ticket.holder is not None and ticket.claim == move.claim
        if not allowed:
            raise LeaseLost
        return ticket

    def _check_tenant(self, entry: Entry) -> None:
        """Raise `NotFound` if a new run belongs to another tenant. For stored runs the write compares it (`owned`)."""
        owner = entry.new.tenant if entry.new is not None else None
        if entry.new is None and entry.run in self._born:
            owner = self._born[entry.run][0].tenant
        if entry.tenant is not None and owner not in (None, entry.tenant):
            raise NotFound

    def _check_rows(self, entry: Entry) -> None:
        """Raise `Conflict` if a ticket that is to be taken as it is written exists already: it may have a holder."""
        for row in entry.outbox:
            ticket = self._tickets.get((entry.run, row.step)) if row.holder else None
            if ticket is not None and not ticket.gone:
                raise Conflict

    def _move(self, run: _Run, ticket: _Ticket, move: Move) -> None:
        self._touched.add((ticket.run, ticket.step))
        ticket.version += 1
        if move.verb == "take":
            # Numbered per run, not per row: a step that is queued anew must not honour a claim on its former ticket.
            run.claims += 1
            ticket.lost += ticket.holder is not None
            ticket.claim, ticket.holder, ticket.until, ticket.rung_at = run.claims, move.holder, move.until, 0.0
        elif move.verb == "release":
            ticket.holder, ticket.until, ticket.rung_at = None, move.until, 0.0
        elif move.verb == "finish":
            ticket.gone = True

    def _append_events(self, run: _Run, encoded: EncodedEntry) -> tuple[Event, ...]:
        entry, at = encoded.entry, encoded.entry.at
        events = tuple([Event.of(run.id, seq, at, draft) for seq, draft in enumerate(entry.events, run.seq + 1)])
        for event, draft, body in zip(events, entry.events, encoded.bodies, strict=True):
            self._events.append((run.id, event.seq, draft.kind.value, at, body))
            if draft.kind in TERMINAL:
                run.state, run.ended_at = TERMINAL[draft.kind], at
                self._delete_untaken(run.id)
            self._add_notice(run, draft, entry)
        self._disclosures.note(run.id, run.tenant, run.key, entry.events, at)
        run.seq += len(events)
        return events

    def _add_notice(self, run: _Run, draft: Fact, entry: Entry) -> None:
        """Write the notice of a turn together with the event that ends it, if the turn began with `Entry.notify`."""
        if draft.kind in BEGINNINGS:
            turn = draft.turn if isinstance(draft, RunResumed) else 0
            run.notify_turn = turn if entry.notify else None
        elif isinstance(draft, RunApproved):  # a price above the approved one is over budget
            run.cap_usd = draft.max_usd
        elif isinstance(draft, RunAwaitingApproval) and draft.notifies:
            named, about = notices.of_approval(run.id), notices.approval_requested(run.id, draft)
            row = (named, draft.proposal, notices.APPROVAL_REQUESTED, entry.at, 0, entry.at, None, None, about)
            self._notices.append(row)
        elif run.notify_turn is not None and (word := notices.word(draft)) is not None:
            self._notices.append((run.id, run.notify_turn, word, entry.at, 0, entry.at, None, None, None))
            run.notify_turn = None

    def _store_contents(self, run: _Run, entry: Entry) -> None:
        """Store the contents of an entry, some of them in parts."""
        outputs = {draft.output for draft in entry.events if isinstance(draft, StepDone)}
        for ref, body in entry.contents:
            if entry.shared is not None and entry.shared.ref == ref and self._may_share(entry.shared.owner):
                parts = texts.parted(run.id, entry.shared, self._key.id if self._key is not None else "")
                run.thread = (parts.thread or None) if entry.new is not None else run.thread
            elif ref in outputs and len(body) >= texts.SHARED_BYTES and run.thread and self._may_share(run.thread):
                parts = texts.answered(run.id, ref, body, run.thread)
            else:
                self._contents.append(self._content(run.id, ref, body))
                continue
            *row, own = parts.content
            self._shared.append((*row, self._encrypted(run.id, ref, own)))
            for name, before, spoken, text in parts.texts:
                body = text if self._key is None else self._key.seal(TEXT, text)
                self._texts[name] = (name, before, spoken, body, run.tenant)

    def _content(self, run: str, ref: str, body: bytes) -> Row:
        """The row of a content that is stored as a whole."""
        return run, ref, self._encrypted(run, ref, body)

    def _encrypted(self, run: str, ref: str, body: bytes) -> bytes:
        """The content as it is stored: as it is, where contents are not encrypted."""
        if self._key is None:
            return body
        return self._key.seal(place_of(run, ref), body)

    def _may_share(self, owner: str) -> bool:
        """True if texts of an owner may be written, whose lock is noted then."""
        lock = texts.lock_of(owner)
        if self._locked is not None and lock not in self._locked:
            return False
        self.locks.add(lock)
        return True

    def _delete_untaken(self, run: str) -> None:
        """Delete a run's tickets that were never taken. The others stay until the outcome of their call is recorded."""
        for place, ticket in self._tickets.items():
            if ticket.run == run and ticket.claim == 0:
                ticket.gone = True
                self._touched.add(place)

    def _apply_rows(self, run: _Run, entry: Entry) -> tuple[int, ...]:
        """Apply everything but the events. Returns the claims on tickets that were taken as they were written."""
        if run.salt is not None and (entry.shared is not None or run.thread is not None):
            self._store_contents(run, entry)
        elif run.salt is not None:
            self._contents += [self._content(run.id, ref, body) for ref, body in entry.contents]
        self._tags += [(name, value, run.id) for name, value in entry.tags]
        _apply_projection(run, entry.row)
        taken = []
        for outbox in entry.outbox:
            place = (run.id, outbox.step)
            ticket = self._tickets.get(place)
            if ticket is None or ticket.gone:
                stored = ticket is not None and ticket.stored
                rung_at = entry.at if outbox.announced else entry.at - LONG_AGO
                ticket = _Ticket(
                    *place, outbox.tier, outbox.driver, outbox.version, 0, None, entry.at, rung_at, stored=stored
                )
                self._tickets[place] = ticket
            else:  # it is queued, or a dispatcher has it: only the driver that it reports to changes
                ticket.driver, ticket.rung_at = outbox.driver, 0.0
            self._touched.add(place)
            if outbox.holder:
                self._move(run, ticket, Move(outbox.step, "take", holder=outbox.holder, until=outbox.until))
                taken.append(ticket.claim)
        return tuple(taken)


def _stored(row: Row) -> _Ticket:
    ticket = _Ticket(*row)
    ticket.stored_until = ticket.until
    return ticket


def fenced(entry: Entry) -> bool:
    """True if the writer of an entry may write facts: as the run's driver, its creator, or the holder of a ticket."""
    return entry.epoch is not None or entry.move is not None or entry.new is not None


def _check_order(run: _Run, entry: Entry) -> None:
    """Check the fence and the order of events. The epoch comes first: a driver that lost its run must learn that."""
    if entry.epoch != run.epoch and (entry.epoch is not None or entry.lease is not None):
        raise LeaseLost
    if run.salt is None and any(draft.kind is Kind.RESUMED for draft in entry.events):
        raise NotFound
    if not fenced(entry) and any(draft.kind not in WITHOUT_LEASE for draft in entry.events):
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
    """The amounts held and spent after the entry. Raises `RunOverBudget` if a new hold would exceed a cap (D7)."""
    hold, release, spent = entry.hold, entry.release, entry.spent
    held_usd, held_tokens = run.held_usd + hold.usd - release.usd, run.held_tokens + hold.tokens - release.tokens
    spent_usd, spent_tokens = run.spent_usd + spent.usd, run.spent_tokens + spent.tokens
    if held_usd < 0 or held_tokens < 0:
        raise ValueError("more was released than the run holds")
    over = held_usd + spent_usd > run.cap_usd or held_tokens + spent_tokens > run.cap_tokens
    if over and hold != NOTHING:
        raise RunOverBudget
    return held_usd, held_tokens, spent_usd, spent_tokens


def _new_run_row(run: _Run, new: NewRun, at: float) -> tuple[Any, ...]:
    """All columns of a new run, in table order. A later entry of the batch may have changed its lease."""
    described = (run.id, new.tenant, new.key, new.tier, new.model, new.code, new.salt, run.thread, run.budgets)
    origin = (new.origin_kind or None, new.origin_run or None)
    erasure = (None, None)  # when, and by what
    lease = (new.deadline, run.epoch, new.driver, new.lease_until) if run.lease is None else _lease(run)
    return (*described, *origin, *erasure, at, *lease, run.cap_usd, run.cap_tokens, *_LIVE_OF(run))


def _lease(run: _Run) -> tuple[Any, ...]:
    """The values of the columns `LEASE` for a run whose lease has changed."""
    assert run.lease is not None
    return run.lease.deadline, run.epoch, run.lease.driver, run.lease.until


def _lease_change(run: _Run) -> tuple[Any, ...]:
    """The columns that change with the lease: the lease, and what the run may cost after an approval."""
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


@record(frozen=True, slots=True)
class Applied:
    """A batch after it was applied: the outcomes in the order of the entries, and the rows."""

    outcomes: list[Outcome]
    rows: RowBatch
    signals: Sequence[Signal] = ()
    """Refusals, warnings and overruns of budgets."""

    @property
    def cacheable(self) -> Mapping[str, CachedRows | None]:
        """Return the rows after the write, for the row cache (see `RowBatch.cacheable`)."""
        return self.rows.cacheable()


def commit(
    conn: Connection,
    statements: Statements,
    batch: Sequence[EncodedEntry],
    number: int = 0,
    *,
    all_slices: bool = False,
) -> Applied:
    """Apply the entries in order on locked rows, and write the changes. The caller commits.

    New holds are made in the slice of this number of their accounts. An entry that this slice cannot decide is put off:
    its outcome is `NeedsAllSlices`, of which there is none with `all_slices`.
    Raises `NotFound` if an entry is written in the name of a tenant to which its run does not belong.
    """
    runs, moving = touched(batch)
    if len(runs) > 1:
        statements.plan_by_key(conn)
    owners = {encoded.entry.shared.owner for encoded in batch if encoded.entry.shared is not None}
    locked = sorted({texts.lock_of(owner) for owner in owners})
    statements.lock_texts(conn, locked)  # before any run's row, as an erasure does
    found, tickets = statements.under_lock(conn, runs, moving)
    ids = sorted({encoded.entry.once.id for encoded in batch if encoded.entry.once is not None})
    shared = locked if statements.arrays else None
    idempotency = IdempotencyRows(statements.idempotency.fetch(conn, ids))
    columns = _columns(found, batch)
    budgets = None
    if columns:
        entries = [encoded.entry for encoded in batch]
        budgets = budget_ledger.load(conn, columns, entries, number, all_slices=all_slices)
    rows = RowBatch(found, tickets, moving, idempotency, shared, budgets)
    outcomes = [rows.apply(encoded) for encoded in batch]
    wanted = rows.writes(statements)
    if budgets is not None:
        wanted += budgets.writes(conn, statements)
    if not statements.write_if_owned(conn, sorted(rows.owned), *wanted):
        raise NotFound
    rows.hasten_wishes(conn, statements)
    return Applied(outcomes, rows, budgets.signals if budgets is not None else ())


def _columns(found: Iterable[Row], batch: Sequence[EncodedEntry]) -> dict[str, str | None]:
    """The accounts of the runs of a batch that have any, as their rows name them."""
    columns: dict[str, str | None] = {row[_ID]: row[_BUDGETS] for row in found if row[_BUDGETS] is not None}
    for encoded in batch:
        if encoded.entry.new is not None and encoded.entry.new.budgets:
            columns[encoded.entry.run] = budget_ledger.column_of(encoded.entry.new.budgets)
    return columns


def touched(batch: Sequence[EncodedEntry]) -> tuple[list[str], list[str]]:
    """The runs of a batch with those of which it makes copies, and those of them whose tickets may change."""
    moving = {encoded.entry.run for encoded in batch if encoded.moves_tickets}
    runs = {encoded.entry.run for encoded in batch}
    origins = {new.origin_run for encoded in batch if (new := encoded.entry.new) is not None and _copies(new)}
    return list(runs | origins), list(moving)


def _copies(new: NewRun) -> bool:
    """True if a new run has the content of its origin. An erasure of that one then erases this one as well, so that
    the two must not pass each other: the origin is locked while this one is written, and must have its content."""
    return new.origin_kind in COPIES


@record(frozen=True, slots=True)
class Speculative:
    """A batch that was applied to cached rows and is not written yet."""

    rows: RowBatch
    cached: Sequence[CachedRows]
    moving: Sequence[str]
    done: Applied

    @property
    def refuses(self) -> bool:
        """Return True if an entry is refused on these rows, which is most likely because they are outdated."""
        return any(isinstance(outcome, Exception) for outcome in self.done.outcomes)


def apply_to_cached_rows(batch: Sequence[EncodedEntry], row_cache: RowCache) -> Speculative | None:
    """Apply the entries to cached rows; None if rows are not cached, or if the entries need them from the database.

    A claim on a ticket may have been renewed since it was cached, so only the row tells whether it has lapsed.
    """
    runs, moving = touched([encoded for encoded in batch if encoded.entry.new is None])
    known = row_cache.find(runs, moving)
    if known is None or any(_needs_rows(encoded.entry, known) for encoded in batch):
        return None
    tickets: list[Row] = []
    ticketed: list[str] = []
    for run, cached in known.items():
        if cached.tickets is not None:
            tickets += cached.tickets
            ticketed.append(run)
    rows = RowBatch([cached.run for cached in known.values()], tickets, ticketed, IdempotencyRows(()))
    outcomes = [rows.apply(encoded) for encoded in batch]
    return Speculative(rows, list(known.values()), moving, Applied(outcomes, rows))


def _needs_rows(entry: Entry, known: Mapping[str, CachedRows]) -> bool:
    if entry.once is not None or not fenced(entry) or (entry.new is not None and _copies(entry.new)):
        return True
    if (entry.hold != NOTHING or entry.release != NOTHING) and _has_accounts(entry, known):
        return True
    if entry.move is None or entry.move.verb != "take":
        return False
    tickets = known[entry.run].tickets or ()
    return any(ticket[_STEP] == entry.move.step and ticket[_HOLDER] is not None for ticket in tickets)


def _has_accounts(entry: Entry, known: Mapping[str, CachedRows]) -> bool:
    if entry.new is not None:
        return bool(entry.new.budgets)
    return known[entry.run].run[_BUDGETS] is not None


def conditional_write(
    statements: Statements, speculative: Speculative
) -> Callable[[Connection], Applied | None] | SingleStatement[Applied | None]:
    """Work that writes the batch, or writes nothing and returns None if a run's row has another revision than was
    cached. On Postgres it is one statement."""
    known = [(cached.run[_ID], cached.run[_REVISION]) for cached in speculative.cached]
    applied, wanted = speculative.done, speculative.rows.writes(statements)
    if statements.arrays:
        locks = sorted(speculative.rows.locks)
        owned = sorted(speculative.rows.owned)
        return statements.current_or_nothing(known, speculative.moving, applied, *wanted, locks=locks, owned=owned)
    return lambda conn: applied if statements.write_if_current(conn, known, *wanted) else None


def was_committed(conn: Connection, outcomes: Sequence[Outcome]) -> bool | None:
    """True if a transaction whose COMMIT was not answered was committed; None if it wrote no event to look for.

    Waits for the row lock, so that a server that is still committing has decided by then. It looks for one event,
    because the transaction was atomic: one of a run that existed before if there is one, since nobody else can see a
    lock on the row of a new run.
    """
    firsts = [outcome.events[0] for outcome in outcomes if isinstance(outcome, Appended) and outcome.events]
    event = max(firsts, key=attrgetter("seq"), default=None)
    if event is None:
        return None
    conn.execute(select(RUNS.c.id).where(RUNS.c.id == event.run).with_for_update())
    query = select(EVENTS.c.kind, EVENTS.c.at, EVENTS.c.body).where(
        EVENTS.c.run == event.run, EVENTS.c.seq == event.seq
    )
    found = conn.execute(query).one_or_none()
    return found is not None and (found.kind, found.at, orjson.loads(found.body)) == (event.kind, event.at, event.body)
