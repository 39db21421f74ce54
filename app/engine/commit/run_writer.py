"""The one place where an engine commits to a run: the folded state, its lock, and the loop "decide until nothing
follows".

Everything that an engine writes under a run's lease passes through the run's `RunWriter`: the entry that takes the run,
its plans, the ends of its steps, and its own end. Each entry carries all that follows from it, so that a step's end,
the next steps with their tickets, and the intents of those that this process begins at once are one commit. The writer

* folds what it has committed, and what others have committed, in the order of the event numbers; a gap is read from the
  journal, which is never stale in a prefix;
* fences each entry by the run's epoch, and each one that decides something by the number of the event that it follows,
  so that nothing is decided upon a state from which others have moved on;
* waits for the database while it is away, for as long as the run is worth it.

Work on steps is claimed by their dispatcher, and written here only to travel in one entry with what follows.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from math import inf
from typing import Any, Protocol, TypeVar

import orjson

from app.core.pool.catalog import Catalog
from app.core.records import changed
from app.core.run import drafts
from app.core.run.events import CallFinished, Event, Fact, Kind, PlanStep, RunAwaitingApproval, StepQueued
from app.core.run.identifiers import NO_TRACE, Trace
from app.core.run.kinds import AFTER_THE_END
from app.core.run.progress import Await, AwaitApproval, Conclude, DropPlan, Finish, Propose, Queue, Skip, decide
from app.core.run.state import RUN_ENDED, Call, RunState, advance, possible, tentative
from app.engine.commit.colocation import BegunStep, StepStarter
from app.engine.context import EngineContext
from app.errors import Conflict, LeaseLost, QueueUnavailable, RunEnded, RunOverBudget, StoreUnavailable
from app.network import retries
from app.network.retries import Left, retried
from app.stepqueue.protocol import AGAIN, WHOLE_RUN, Ticket
from app.store.protocol import (
    APPROVAL_TAG,
    ASKED,
    MOVED,
    Appended,
    Due,
    Entry,
    Journal,
    Lease,
    Ledger,
    Outbox,
    Projection,
    Store,
)
from app.store.protocol.step_input import BRIEF

LATE_SECONDS = 15.0
"""How long beyond its deadline a run is still worth waiting for the database, so that its end can be written."""

KNOWN = 64
"""Contents of a run that are kept in memory while it is driven, each of at most `BRIEF` bytes."""

Contents = tuple[tuple[str, bytes], ...]
"""(ref, body) pairs to be stored with events."""


class Append(Protocol):
    """The way in which a planner writes: see `RunWriter.append`."""

    def __call__(
        self,
        events: tuple[Fact, ...],
        /,
        *,
        contents: Contents = (),
        hold: Ledger = Ledger(),
        release: Ledger = Ledger(),
        spent: Ledger = Ledger(),
        within: float = inf,
    ) -> Coroutine[Any, Any, None]:
        """Commit and fold."""
        ...


T = TypeVar("T")


async def patiently(store: Store, call: Callable[[], Awaitable[T]], left: Left) -> T:
    """Return what `call` returns once the database takes it; raises `StoreUnavailable` when no seconds are `left`.

    While the database is away, callers are woken in the order in which they came.
    """

    async def sleep(pause: float) -> None:
        if store.healthy:
            await asyncio.sleep(min(pause, left()))
        else:
            await store.wait_until_healthy(min(retries.DATABASE_LONGEST, left()))

    return await retried(call, lambda: retries.database(left=left, sleep=sleep))


class PatientStore:
    """The store as a run's writer uses it: calls wait for the database while it is away.

    `left` gives the seconds for which it is still worth waiting.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    async def append(self, entry: Entry, seq: int, left: Left, within: float = inf) -> Appended:
        """Commit an entry of at least one event, once, and within so many seconds. `seq` is that of an event that was
        known before."""
        tries = 0
        loop = asyncio.get_running_loop()
        until = loop.time() + within

        async def once() -> Appended:
            nonlocal tries
            tries += 1
            # A commit that went unanswered may have been one.
            landed = await self._landed(entry, seq) if tries > 1 else None
            return landed or await self._store.append(entry)

        return await patiently(self._store, once, lambda: min(left(), until - loop.time()))

    async def _landed(self, entry: Entry, seq: int) -> Appended | None:
        events = (await self._store.journal(entry.run, after=seq)).events
        wanted = [_as_stored(draft, entry.at) for draft in entry.events]
        for start in range(len(events) - len(wanted) + 1):
            found = events[start : start + len(wanted)]
            if [_stored(event) for event in found] == wanted:
                return Appended(found)
        return None

    async def journal(self, run: str, after: int, left: Left) -> Journal:
        """The journal of a run, from the event after `after` on."""
        return await patiently(self._store, partial(self._store.journal, run, after=after), left)

    async def contents(self, run: str, refs: Sequence[str], left: Left) -> dict[str, bytes]:
        """The bodies, by ref, that are still stored."""
        return dict(await patiently(self._store, partial(self._store.contents, run, refs), left))


def _as_stored(draft: Fact, at: float) -> tuple[str, float, object]:
    return draft.kind.value, at, orjson.loads(orjson.dumps(draft.to_json()))


def _stored(event: Event) -> tuple[str, float, object]:
    return event.kind.value, event.at, event.body


OnFolded = Callable[[Sequence[Event]], Awaitable[None]]
OpenPlan = Callable[[RunState, Propose, Append], Awaitable[tuple[list[Fact], list[tuple[str, bytes]]]]]
"""Opens a proposal; returns its events and contents: one event if a conductor has yet to be asked, none if even that
has to wait."""


@dataclass(slots=True)
class Consequences:
    """The consequences of a state, ready to be committed; `pending` is a command that needs waiting first."""

    state: RunState
    events: list[Fact] = field(default_factory=list)
    outbox: list[Outbox] = field(default_factory=list)
    contents: list[tuple[str, bytes]] = field(default_factory=list)
    pending: Propose | Finish | None = None
    lease: Lease | None = None
    """Set where the run is let go of."""
    deadline: float | None = None
    """The time after which the run is overdue, where that has changed."""
    whole: bool = False
    """True if nothing more follows from `state` until its deadline, or until somebody writes to the run."""

    def facts_of(self, command: Queue | Skip | Conclude, home: str, *, enqueues: bool) -> list[Fact]:
        """The events of a command that needs nobody to be asked. Its tickets report to `home`; without `enqueues` they
        are not put into the queue, and dispatchers find them in the outbox."""
        if not isinstance(command, Queue):
            return list(drafts.settled(self.state, command))
        tier, turn = self.state.admitted.tier, self.state.turn.number
        self.outbox += [Outbox(n, tier, home, turn, enqueues) for n in command.steps]
        return [StepQueued(n) for n in command.steps]

    def await_tools(self, command: Await, now: float) -> Fact:
        """The event of a turn that ends with tool calls: nobody drives the run until its caller is back."""
        until = now + self.state.admitted.limits.tool_wait
        self.lease = Lease("", until, until)
        return drafts.awaiting(self.state, command, until)

    def await_approval(self, command: AwaitApproval, now: float, catalog: Catalog, *, notifies: bool) -> Fact:
        """The event of a plan that waits for an approval: nobody drives the run until there is a decision."""
        state, terms = self.state, self.state.admitted.approval
        until = now + (terms.seconds if terms is not None else 0.0)
        self.lease = Lease("", until, until)
        proposal = next(proposal for proposal in state.all_proposals if proposal.number == command.proposal)
        left = max(state.turn.deadline - now, 0.0)
        return drafts.awaiting_approval(state, proposal, until, left, catalog, notifies=notifies)

    def drop_plan(self, command: DropPlan, now: float) -> tuple[Fact, ...]:
        """The events of a plan that nobody has approved in time, for which another one is made."""
        dropped = drafts.plan_dropped(self.state, command, now)
        self.deadline = dropped[-1].deadline
        return dropped

    def add(self, fresh: Sequence[Fact]) -> None:
        """Events that follow from the state as it is here."""
        self.events += fresh
        self.state = tentative(self.state, fresh)

    def with_intents(self, begun: Sequence[BegunStep]) -> "Consequences":
        """These consequences with the intents of some steps, whose tickets are taken."""
        rows, intents = {call.row.step: call.row for call in begun}, [call.intent for call in begun]
        outbox = [rows.get(row.step, row) for row in self.outbox]
        return replace(self, state=tentative(self.state, intents), events=[*self.events, *intents], outbox=outbox)


class RunWriter:
    """The writer of one run, under one lease of this process."""

    def __init__(
        self,
        context: EngineContext,
        *,
        home: str,
        state: RunState,
        salt: bytes,
        epoch: int,
        open_plan: OpenPlan,
        steps: StepStarter | None,
        contents: Mapping[str, bytes],
    ) -> None:
        """`home` is this process's address, to which tickets of the run report; `epoch` is the row's.

        `steps` is the dispatcher of this process, which begins steps in the entry that queues them; without it all
        steps are left to their tickets. `contents` are some of the run's, by ref, which need not be read again.
        """
        self._context = context
        self._home = home
        self._open_plan = open_plan
        self._store = PatientStore(context.store)
        self._lock = asyncio.Lock()
        self._early: dict[int, Event] = {}
        """Events that were received before those which precede them, by number."""
        self.state = state
        self.salt = salt
        self.epoch = epoch
        """The epoch under which this writer writes: that of its lease, once it has been taken."""
        self._steps = steps
        self.released = False
        """The run waits for its caller, and nobody drives it."""
        self.settled: RunState | None = None
        """A state that was committed with all that follows from it, so that there is nothing to do but to wait."""
        self._known = dict(contents)
        """Brief contents, by ref, from which the next steps are composed."""
        self.answer: Mapping[str, bytes] = {}
        """Contents, by ref, of the latest end of a step that was committed here: the reply is among them."""
        self.trace = NO_TRACE
        """The span of the run, which its tickets name."""
        self.on_folded: OnFolded = _ignore
        """Is called with events in the order of their numbers, as soon as they are folded."""
        self.on_joined: Callable[[], None] = _nothing
        """Is called once the end of a step was committed here, for the driver to look at the state."""

    def worth_waiting(self) -> float:
        """Seconds for which it is still worth waiting for the database."""
        return self.state.turn.deadline + LATE_SECONDS - self._context.now()

    @property
    def over(self) -> bool:
        """Return True if nothing is left to write under this lease: the run has ended, or waits for its caller."""
        return self.state.ended or self.released

    # -- committing

    async def admit(self, entry: Entry) -> Consequences:
        """Commit a run's admission with all that follows from it."""
        return await self._commit_first(entry, changed(self.state, seq=1))

    async def take(self, entry: Entry) -> Consequences:
        """Commit the entry that takes the run's lease, or begins its next turn, with all that follows from it.

        The entry's outbox has the tickets of steps that go on. Raises `LeaseLost` or `Conflict` if others have taken
        the run or written to it, `RunEnded`, `NotFound`, `StoreUnavailable`.
        """
        return await self._commit_first(entry, tentative(self.state, entry.events))

    async def _commit_first(self, entry: Entry, state: RunState) -> Consequences:
        follows = await self._consequences(state)
        if isinstance(follows.pending, Finish):  # it was asked for before anything could begin
            entry = changed(entry, outbox=())
        follows.outbox = [*entry.outbox, *follows.outbox]
        async with self._lock:
            await self._commit(changed(entry, outbox=()), follows)
        await self._enqueue(follows.outbox)
        return follows

    async def commit(self, first: tuple[Fact, ...] = (), contents: Contents = ()) -> Consequences:
        """Commit `first` and all that follows from it, in one entry; nothing if nothing follows.

        The state in what is returned is the writer's own unless others have written meanwhile.
        """
        async with self._lock:
            while (follows := await self._try_commit(first, contents)) is None:
                await self.catch_up()
        await self._enqueue(follows.outbox)
        return follows

    async def _try_commit(self, first: tuple[Fact, ...], contents: Contents) -> Consequences | None:
        """Commit once; None if nothing was written, because others have written what may forbid it."""
        if self.state.ended:  # the end of a step has brought the run's with it: see `join`
            return Consequences(self.state)
        upon = self.state
        follows = await self._consequences(tentative(upon, first), plans=not first)
        if first or follows.events:
            entry = Entry(upon.run, self._context.now(), events=first, epoch=self.epoch, contents=contents)
            try:
                appended = await self._commit(entry, follows)
            except Conflict:
                return None
            alone = self.state.seq == upon.seq + len(appended.events)
            follows.state = self.state if alone else follows.state
        return follows

    async def join(self, entry: Entry) -> Appended:
        """Commit the entry with which a step of this process ends, together with what follows from it.

        The entry keeps its ticket's fence and gets the run's in addition. Where the run's does not hold any more, or
        an event that came before is not known here, the entry is committed alone: a call that was paid for is never
        lost with the lease.
        """
        if not self._context.store.healthy:  # the step waits for the database longer than the lock may be held
            raise StoreUnavailable
        outbox: Sequence[Outbox] = ()
        async with self._lock:
            after = possible(self.state, entry.events)
            if after is None or self.over:
                appended = await self._append_alone(entry)
            else:
                follows = self._with_end(entry, await self._consequences(after, plans=False))
                try:
                    # It may have waited for the lock, and what follows counts from now: a wait for results, for one.
                    appended = await self._commit(changed(entry, at=self._context.now(), epoch=self.epoch), follows)
                    outbox = follows.outbox
                except (LeaseLost, RunEnded):
                    appended = await self._context.store.append(entry)
                except Conflict:
                    appended = await self._append_alone(entry)
        await self._enqueue(outbox)
        self.on_joined()
        return appended

    async def _append_alone(self, entry: Entry) -> Appended:
        appended = await self._context.store.append(entry)
        await self.receive(appended.events)
        return appended

    async def append(
        self,
        events: tuple[Fact, ...],
        *,
        contents: Contents = (),
        hold: Ledger = Ledger(),
        release: Ledger = Ledger(),
        spent: Ledger = Ledger(),
        within: float = inf,
    ) -> None:
        """Commit events from which nothing else is to follow yet; they are folded when this returns.

        `within` is how many seconds it may wait for the database. Nothing is written if the run has ended meanwhile,
        nor an outcome that was given up for lost already.
        """
        async with self._lock:
            if self.state.ended and not all(draft.kind in AFTER_THE_END for draft in events):
                return
            if any(call.outcome is not None for draft in events if (call := self._finished(draft)) is not None):
                return
            entry = Entry(
                run=self.state.run,
                at=self._context.now(),
                events=events,
                epoch=self.epoch,
                contents=tuple(contents),
                hold=hold,
                release=release,
                spent=spent,
            )
            await self._write(entry, Consequences(tentative(self.state, events)), within)

    async def end(self, upon: RunState, events: tuple[Fact, ...], lost: Ledger) -> None:
        """Commit the run's end as it was decided upon that state; nothing if others have written meanwhile.

        `lost` was held for calls that `events` give up for lost. Raises `Conflict` if there are events which have not
        been folded here.
        """
        async with self._lock:
            if self.state is upon:
                entry = Entry(upon.run, self._context.now(), events, epoch=self.epoch, release=lost, spent=lost)
                await self._write(entry, Consequences(tentative(upon, events)))

    async def release(self) -> None:
        """Give the lease up for as long as the run waits for its caller: it was taken over in the middle of that."""
        until = self.state.turn.until
        entry = Entry(
            self.state.run, self._context.now(), epoch=self.epoch, lease=Lease("", until, until), seq=self.state.seq
        )
        try:
            await self._context.store.append(entry)
            self.released = True
        except Conflict:
            await self.catch_up()

    @property
    def row_epoch(self) -> int:
        """Return the epoch of the run's row, which is one more once the lease was given up."""
        if not self.state.waits:
            return self.epoch
        return self.epoch + 1

    def close(self) -> None:
        """Call the driver back no more, so that it can be freed without the garbage collector."""
        self.on_folded = _ignore
        self.on_joined = _nothing

    def decide_again(self) -> None:
        """Make the driver decide once more, although nothing was written."""
        self.state = changed(self.state)

    async def read_answer(self, refs: Sequence[str]) -> None:
        """Read the contents of which the run's answer consists."""
        self.answer = await self._store.contents(self.state.run, refs, self.worth_waiting)

    def _finished(self, draft: Fact) -> Call | None:
        if not isinstance(draft, CallFinished):
            return None
        return self.state.calls.get(draft.call)

    async def _enqueue(self, outbox: Sequence[Outbox]) -> None:
        if outbox:
            await enqueue(self._context, self.state, outbox, self.trace)

    # -- deciding

    async def _consequences(self, state: RunState, *, plans: bool = True) -> Consequences:
        """Decide on tentative states until nothing follows any more.

        Without `plans` nothing follows where a conductor is to be asked: that is for the driver's own turn.
        """
        follows = Consequences(state)
        now = self._context.now()
        while follows.pending is None:
            commands = decide(follows.state, now)
            if not commands:
                break
            fresh: list[Fact] = []
            for command in commands:
                if isinstance(command, Propose):
                    opened, contents = await self._open_plan(follows.state, command, self.append)
                    if len(opened) < 2 and not plans:
                        return Consequences(state)
                    fresh += opened
                    follows.contents += contents
                    follows.pending = command if len(opened) < 2 else None
                elif isinstance(command, Queue | Skip | Conclude):
                    fresh += follows.facts_of(command, self._home, enqueues=self._context.queue.healthy)
                elif isinstance(command, Await):
                    fresh.append(follows.await_tools(command, now))
                elif isinstance(command, AwaitApproval):
                    catalog, notifies = self._context.catalog(), self._context.notifies
                    fresh.append(follows.await_approval(command, now, catalog, notifies=notifies))
                elif isinstance(command, DropPlan):
                    fresh += follows.drop_plan(command, now)
                else:  # a proposal or the end: no step is to begin that is about to be stopped
                    follows.pending, follows.outbox = command, []
            follows.add(fresh)
        follows.whole = follows.pending is None
        return follows

    def _with_end(self, entry: Entry, follows: Consequences) -> Consequences:
        """Add the run's success, where nothing needs to be waited for and the answer is in the entry."""
        command, state = follows.pending, follows.state
        self.answer = fresh = dict(entry.contents)
        if isinstance(command, Finish) and ends_at_once(state, command, fresh) and state.unmade is None:
            follows.add(ending(state, command))
        return follows

    # -- writing

    def _commit(self, entry: Entry, follows: Consequences) -> Coroutine[Any, Any, Appended]:
        """Commit an entry with what follows from it, and with the intents of those steps that are begun here at once.

        The tickets that are left in `follows.outbox` are to be queued.
        """
        if self._steps is not None and follows.outbox:
            return self._with_intents(self._steps, entry, follows)
        return self._write(entry, follows)

    async def _with_intents(self, steps: StepStarter, entry: Entry, follows: Consequences) -> Appended:
        """Where a step cannot be paid for, nothing is begun here, and the dispatcher that takes its ticket fails it."""
        fresh = self._known | dict((*entry.contents, *follows.contents))
        begun = await steps.begin(follows.state, self.salt, fresh, follows.outbox)
        if begun:
            hold = changed(entry, hold=reserved_for(begun))
            appended = await commit_with_intents(begun, self._write(hold, follows.with_intents(begun)))
            if appended is not None:
                taken = {call.row.step for call in begun}
                follows.outbox = [row for row in follows.outbox if row.step not in taken]
                return appended
        return await self._write(entry, follows)

    async def _write(self, entry: Entry, follows: Consequences, within: float = inf) -> Appended:
        """Commit an entry with what follows from it, and fold it. The caller holds the lock.

        Raises `Conflict` if the entry decides something and there are events that have not been folded here.
        """
        ends = follows.lease is not None or (follows.state.ended and not self.state.ended)
        decides = ends or (bool(follows.events) and entry.lease is None)  # an entry that takes a run has the number
        seq = self.state.seq if decides and entry.new is None else entry.seq
        complete = with_consequences(entry, follows, seq)
        if entry.move is None and entry.new is None and entry.lease is None:
            try:
                appended = await self._store.append(complete, self.state.seq, self.worth_waiting, within)
            except RunOverBudget:  # the run ends with it later
                raise
            except RunEnded:  # by others: nothing of this entry is needed any more
                await self.catch_up()
                return Appended(())
        else:  # the start of a run or a turn does not wait, and a step's end is retried by its dispatcher
            appended = await self._context.store.append(complete)
        if entry.lease is not None:
            self.epoch += 1
        self._remember(complete.contents)
        await self._committed(appended.events, follows.state)
        self.released = self.released or follows.lease is not None
        self.settled = follows.state if follows.whole else None
        return appended

    def _remember(self, contents: Contents) -> None:
        """Keep brief contents for the run's next steps, up to a bound; what is not kept is read."""
        for ref, body in contents:
            if len(body) <= BRIEF and len(self._known) < KNOWN:
                self._known[ref] = body

    # -- folding

    async def _committed(self, events: tuple[Event, ...], after: RunState) -> None:
        """Fold events of our own: `after` is the state then, unless others wrote in between."""
        known = self.state.seq
        if not events or events[-1].seq <= known:
            return
        if events[0].seq == known + 1 and events[-1].seq == after.seq:
            replied = after.replied and not self.state.replied
            self.state = changed(after, replied_at=events[-1].at) if replied else after
            await self.on_folded(events)
        else:
            await self.receive(events)

    async def receive(self, events: Iterable[Event]) -> None:
        """Fold what others have committed, in the order of the numbers; an event that is missing is read."""
        for event in events:
            if event.seq > self.state.seq:
                self._early[event.seq] = event
        folded = []
        while (following := self._early.pop(self.state.seq + 1, None)) is not None:
            folded.append(self._advance(following))
        if folded:
            await self.on_folded(folded)
        if self._early:
            await self.catch_up()

    async def catch_up(self) -> None:
        """Fold what the journal has beyond the state."""
        self._early.clear()
        journal = await self._store.journal(self.state.run, self.state.seq, self.worth_waiting)
        folded = [self._advance(event) for event in journal.events if event.seq == self.state.seq + 1]
        if folded:
            await self.on_folded(folded)

    def _advance(self, event: Event) -> Event:
        if not self.over:  # what is journaled after a turn belongs to the audit and not to its reply
            self.state = advance(self.state, event)
            self.released = event.kind in (Kind.AWAITING, Kind.AWAITING_APPROVAL)
        return event


async def _ignore(_events: Sequence[Event]) -> None:
    return


def _nothing() -> None:
    return


def ends_at_once(state: RunState, command: Finish, contents: Mapping[str, bytes]) -> bool:
    """True if a run succeeds with nothing to wait for, and with an answer that is among these contents."""
    if command.kind is not Kind.SUCCEEDED or command.step is None or state.open_calls:
        return False
    return state.steps[command.step].output in contents


def with_consequences(entry: Entry, follows: Consequences, seq: int | None) -> Entry:
    """Return an entry with what follows from it; `seq` is the number of the event that it must follow, if it must."""
    events = (*entry.events, *follows.events)
    lease = follows.lease or entry.lease
    if lease is not None and follows.deadline is not None and follows.lease is None:
        lease = changed(lease, deadline=follows.deadline)
    return changed(
        entry,
        events=events,
        contents=(*entry.contents, *follows.contents),
        outbox=(*entry.outbox, *follows.outbox),
        row=projection(follows.state),
        tags=(*entry.tags, *tags(events)),
        lease=lease,
        seq=seq,
    )


def ending(state: RunState, command: Finish) -> tuple[Fact, ...]:
    """The terminal event, and before it what becomes of steps that are not settled."""
    skips = drafts.skipped(state.live, RUN_ENDED)
    return (*skips, drafts.ended(tentative(state, skips), command))


def projection(state: RunState) -> Projection:
    """The columns of the run's row that lists and filters read."""
    return Projection(
        state=state.state,
        topology=state.topology or None,
        degraded=state.degraded,
        steps=len(state.planned),
        error=state.end.error or None if state.end is not None else None,
    )


def tags(events: Iterable[Fact]) -> tuple[tuple[str, str], ...]:
    """The filters that these events add."""
    found = []
    for draft in events:
        if isinstance(draft, PlanStep):
            found.append(("worker", draft.worker))
        elif isinstance(draft, RunAwaitingApproval):
            found.append((APPROVAL_TAG, ASKED))
    return tuple(found)


# -- steps that are begun in the entry that queues them


def reserved_for(begun: Sequence[BegunStep]) -> Ledger:
    """Return the amount that an entry reserves for all of them."""
    return Ledger(sum(call.hold.usd for call in begun), sum(call.hold.tokens for call in begun))


async def commit_with_intents(begun: Sequence[BegunStep], commit: Awaitable[Appended]) -> Appended | None:
    """Commit the entry that these steps wait for and let them go; None if it is refused because of them."""
    try:
        appended = await commit
    except BaseException as error:
        for call in begun:
            call.forgo()
        moved = isinstance(error, Conflict) and error.public_code == MOVED  # which has nothing to do with the steps
        if isinstance(error, RunOverBudget | Conflict) and not moved:
            return None
        raise
    for call, claim in zip_longest(begun, appended.taken):
        # An entry that is found again after an outage has no claims: those tickets lapse and are taken anew.
        call.go(claim) if claim is not None else call.forgo()
    return appended


# -- tickets


async def enqueue(context: EngineContext, state: RunState, outbox: Iterable[Outbox], trace: Trace) -> None:
    """Queue the tickets of committed outbox rows; while the queue is unavailable, engines poll the outbox.

    `trace` is the span of the run, whose trace the steps continue.
    """
    tier, seq, now = state.admitted.tier, state.seq, context.now()
    announced = [row for row in outbox if row.announced]
    known = Ticket(state.run, WHOLE_RUN, tier, "", seq, trace=trace, at=now, tenant=state.admitted.tenant)
    await _queue(context, [changed(known, step=row.step, driver=row.driver, version=row.version) for row in announced])


async def offer_run(context: EngineContext, state: RunState) -> None:
    """Queue a ticket for a run that nobody drives; while the queue is unavailable, engines poll for such runs."""
    await _queue(context, [run_ticket(state)])


def run_ticket(state: RunState) -> Ticket:
    """Return the ticket of a run that nobody drives."""
    return Ticket(state.run, WHOLE_RUN, state.admitted.tier, "", state.seq, tenant=state.admitted.tenant)


async def _queue(context: EngineContext, tickets: list[Ticket]) -> None:
    try:
        if tickets:
            await context.queue.enqueue(tickets)
    except QueueUnavailable:
        context.telemetry.log(
            logging.WARNING,
            "The step queue is unavailable; engines find the ticket in the database.",
            run=tickets[0].run,
        )


def due_ticket(due: Due) -> Ticket:
    """Return the ticket of an outbox row that was found by polling: the engine that takes it claims the row first."""
    return Ticket(due.run, due.step, due.tier, due.driver, due.seq, AGAIN, tenant=due.tenant)
