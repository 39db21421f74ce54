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
from functools import partial
from itertools import zip_longest
from math import inf
from typing import Any, TypeVar

import orjson
from msgspec import Struct
from msgspec.structs import replace

from app.core.pool.catalog import Amount, Catalog
from app.core.run import drafts
from app.core.run.events import CallFinished, Event, Fact, Kind, PlanStep, RunAwaitingApproval, StepQueued, StepSkipped
from app.core.run.fold import advance, apply_facts, apply_facts_if_possible, fold
from app.core.run.identifiers import Trace
from app.core.run.kinds import AFTER_THE_END
from app.core.run.progress import Await, AwaitApproval, Conclude, DropPlan, Finish, Propose, Queue, Skip, decide
from app.core.run.state import RUN_ENDED, RunState
from app.engine.commit.colocation import PreparedStep, StepStarter
from app.engine.context import EngineContext
from app.errors import Conflict, LeaseLost, QueueUnavailable, RunEnded, RunOverBudget, StoreUnavailable
from app.network import retries
from app.network.retries import Left, retry
from app.stepqueue.protocol import AGAIN, WHOLE_RUN, Ticket
from app.store.protocol import (
    APPROVAL_TAG,
    ASKED,
    BRIEF,
    MOVED,
    AppendResult,
    Entry,
    Lease,
    Outbox,
    Projection,
    Store,
    TicketRow,
)

WRITE_GRACE_SECONDS = 15.0
"""How long beyond its deadline a run still waits for the database, so that its end can be written."""

MOST_CACHED_CONTENTS = 64
"""Contents of a run that are kept in memory while it is driven, each of at most `BRIEF` bytes."""

Contents = tuple[tuple[str, bytes], ...]
"""(ref, body) pairs to be stored with events."""


T = TypeVar("T")


async def retry_until_deadline(store: Store, call: Callable[[], Awaitable[T]], seconds_left: Left) -> T:
    """Return what `call` returns, tried again while the database is away. Raises `StoreUnavailable` when there are no
    `seconds_left`.

    Callers are woken in the order in which they came, once the database is back.
    """

    async def sleep(pause: float) -> None:
        if store.healthy:
            await asyncio.sleep(min(pause, seconds_left()))
        else:
            await store.wait_until_healthy(min(retries.DATABASE_LONGEST, seconds_left()))

    return await retry(call, lambda: retries.database(left=seconds_left, sleep=sleep))


async def append_exactly_once(store: Store, entry: Entry, after: int, seconds_left: Left) -> AppendResult:
    """Commit an entry of at least one event exactly once, tried again while the database is away.

    `after` is the number of the last event that was known before. A try that went unanswered may have been committed,
    so the entry is looked for in the journal before each further try. Raises `StoreUnavailable` when there are no
    `seconds_left`.
    """
    is_first_try = True

    async def append_once() -> AppendResult:
        nonlocal is_first_try
        if not is_first_try:
            committed = await _find_committed(store, entry, after)
            if committed is not None:
                return committed
        is_first_try = False
        return await store.append(entry)

    return await retry_until_deadline(store, append_once, seconds_left)


async def _find_committed(store: Store, entry: Entry, after: int) -> AppendResult | None:
    """Find the events of an entry in the journal; None if they are not there."""
    journaled = (await store.journal(entry.run, after=after)).events
    wanted = [_drafted_values(draft, entry.at) for draft in entry.events]
    for start in range(len(journaled) - len(wanted) + 1):
        events = journaled[start : start + len(wanted)]
        if [_journaled_values(event) for event in events] == wanted:
            return AppendResult(events)
    return None


def _drafted_values(draft: Fact, at: float) -> tuple[str, float, object]:
    """Return what identifies an event that is to be journaled: kind, time and body, as `_journaled_values` has them."""
    return draft.kind.value, at, orjson.loads(orjson.dumps(draft.to_json()))


def _journaled_values(event: Event) -> tuple[str, float, object]:
    return event.kind.value, event.at, event.body


OnFolded = Callable[[Sequence[Event]], Awaitable[None]]
OpenPlan = Callable[[RunState, Propose, "RunWriter"], Awaitable[tuple[list[Fact], list[tuple[str, bytes]]]]]
"""Opens a proposal; returns its events and contents: one event if a conductor has yet to be asked, none if even that
has to wait."""


class Consequences(Struct):
    """All that follows from a state, ready to be committed."""

    state: RunState
    """The state once `events` are committed."""
    events: list[Fact] = []
    outbox: list[Outbox] = []
    contents: list[tuple[str, bytes]] = []
    hold: Amount = Amount()
    """The amount that is reserved for the calls that are intended in `events`."""
    pending_command: Propose | Finish | None = None
    """The next command, which cannot be carried out before these consequences are committed."""
    lease: Lease | None = None
    """Set where the lease is given up, because the run waits for its caller."""
    deadline: float | None = None
    """The time after which the run is overdue, where that has changed."""

    def queue_steps(self, command: Queue, home: str, *, enqueues: bool) -> list[Fact]:
        """The events of steps that are queued, whose tickets report to `home`. Without `enqueues` the tickets are not
        put into the queue, and dispatchers find them in the outbox."""
        tier, turn = self.state.admitted.tier, self.state.turn.number
        self.outbox += [Outbox(n, tier, home, turn, enqueues) for n in command.steps]
        return [StepQueued(n) for n in command.steps]

    def await_tools(self, command: Await, now: float, lease: float) -> Fact:
        """The event of a turn that ends with tool calls: nobody drives the run until its caller is back.

        A replay may have the results in its recording. The engine that ended its turn gives them at once; if it cannot,
        the run is free to be taken after `lease` seconds, so that another engine does.
        """
        until = lapses = now + self.state.admitted.limits.tool_wait
        if self.state.is_recorded_replay:
            lapses = min(now + lease, until)
        self.lease = Lease("", lapses, until)
        return drafts.run_awaiting_tool(self.state, command, until)

    def await_approval(self, command: AwaitApproval, now: float, catalog: Catalog, *, notifies: bool) -> Fact:
        """The event of a plan that waits for an approval: nobody drives the run until there is a decision."""
        state, terms = self.state, self.state.admitted.approval
        until = now + (terms.seconds if terms is not None else 0.0)
        self.lease = Lease("", until, until)
        proposal = state.find_proposal(command.proposal)
        seconds_left = max(state.turn.deadline - now, 0.0)
        return drafts.run_awaiting_approval(state, proposal, until, seconds_left, catalog, notifies=notifies)

    def drop_plan(self, command: DropPlan, now: float) -> tuple[Fact, ...]:
        """The events of a plan that nobody has approved in time, for which another one is made."""
        dropped = drafts.plan_dropped(self.state, command, now)
        self.deadline = dropped[-1].deadline
        return dropped

    def add(self, events: Sequence[Fact]) -> None:
        """Add events that follow from `state`, and fold them into it."""
        self.events += events
        self.state = apply_facts(self.state, events)

    def with_intents(self, steps: Sequence[PreparedStep]) -> "Consequences":
        """These consequences with the intents of prepared steps, whose tickets are taken."""
        taken = {step.row.step: step.row for step in steps}
        intents = [step.intent for step in steps]
        return replace(
            self,
            state=apply_facts(self.state, intents),
            events=[*self.events, *intents],
            outbox=[taken.get(row.step, row) for row in self.outbox],
            hold=sum([step.reserved for step in steps], Amount()),
        )


class RunSnapshot(Struct, frozen=True):
    """A run as it was read, before this process takes its lease."""

    state: RunState
    salt: bytes
    """The salt of its content addresses."""
    epoch: int
    """The epoch of its row."""
    contents: Mapping[str, bytes] = {}
    """Some of its contents, by ref, which need not be read again."""


class RunWriter:
    """The writer of one run, under one lease of this process."""

    def __init__(
        self,
        context: EngineContext,
        *,
        home: str,
        run: RunSnapshot,
        open_plan: OpenPlan,
        steps: StepStarter | None,
        trace: Trace,
    ) -> None:
        """`home` is this process's address, to which tickets of the run report, and `trace` is the span of the run,
        which they name.

        `steps` is the dispatcher of this process, which begins steps in the entry that queues them; without it all
        steps are left to their tickets.
        """
        self._context = context
        self._home = home
        self._open_plan = open_plan
        self._store = context.store
        self._lock = asyncio.Lock()
        self._events_after_gap: dict[int, Event] = {}
        """Events that were received before those which precede them, by number."""
        self.state = run.state
        self.salt = run.salt
        self.epoch = run.epoch
        """The epoch under which this writer writes: that of its lease, once it has been taken."""
        self._steps = steps
        self._trace = trace
        self.released = False
        """True if the run waits for its caller, and nobody drives it."""
        self._cached_contents = dict(run.contents)
        """Brief contents, by ref, from which the next steps are composed."""
        self.answer: Mapping[str, bytes] = {}
        """Contents, by ref, of the latest end of a step that was committed here: the reply is among them."""
        self.on_folded: OnFolded = _ignore_events
        """Called with events in the order of their numbers, as soon as they are folded."""
        self.on_step_end: Callable[[], None] = _do_nothing
        """Called once the end of a step is committed here, so that the driver looks at the state."""

    def seconds_to_wait(self) -> float:
        """Seconds for which a write of this run waits for the database, if that is away."""
        return self.state.turn.deadline + WRITE_GRACE_SECONDS - self._context.now()

    @property
    def is_over(self) -> bool:
        """Return True if nothing is left to write under this lease: the run has ended, or waits for its caller."""
        return self.state.ended or self.released

    # -- committing

    async def begin(self, entry: Entry) -> Consequences:
        """Commit the entry that admits the run, takes its lease, or begins its next turn, with all that follows from
        it.

        The entry's outbox has the tickets of steps that go on. Raises `LeaseLost` or `Conflict` if others have taken
        the run or written to it, `RunEnded`, `NotFound`, `StoreUnavailable`.
        """
        if entry.new is not None:  # the state is that of the admission already, before it has a number
            state = replace(self.state, seq=1)
        else:
            state = apply_facts(self.state, entry.events)
        consequences = await self._consequences_of(state)
        is_cancelled = isinstance(consequences.pending_command, Finish)  # before anything could begin
        if not is_cancelled:
            consequences.outbox = [*entry.outbox, *consequences.outbox]
        async with self._lock:
            await self._commit(replace(entry, outbox=()), consequences)
        await self._enqueue(consequences.outbox)
        return consequences

    async def commit(self, events: tuple[Fact, ...] = (), contents: Contents = ()) -> Consequences:
        """Commit `events` and all that follows from them, in one entry; nothing if nothing follows.

        The state in what is returned is the writer's own unless others have written meanwhile.
        """
        async with self._lock:
            consequences = await self._try_commit(events, contents)
            while consequences is None:
                await self.catch_up()
                consequences = await self._try_commit(events, contents)
        await self._enqueue(consequences.outbox)
        return consequences

    async def _try_commit(self, events: tuple[Fact, ...], contents: Contents) -> Consequences | None:
        """Commit once; None if nothing was written, because others have written what may forbid it."""
        if self.state.ended:  # the end of a step has brought the run's with it: see `commit_step_end`
            return Consequences(self.state)
        before = self.state
        consequences = await self._consequences_of(apply_facts(before, events), may_plan=not events)
        if not events and not consequences.events:
            return consequences
        entry = Entry(before.run, self._context.now(), events=events, epoch=self.epoch, contents=contents)
        try:
            appended = await self._commit(entry, consequences)
        except Conflict:
            return None
        others_have_written = self.state.seq != before.seq + len(appended.events)
        if not others_have_written:
            consequences.state = self.state
        return consequences

    async def commit_step_end(self, entry: Entry) -> AppendResult:
        """Commit the entry with which a step of this process ends, together with what follows from it.

        The entry keeps its ticket's fence and gets the run's in addition. Where the run's does not hold any more, an
        event that came before is not known here, or what follows cannot be decided because of a bug, the entry is
        committed alone: a call that was paid for is never lost with the lease, nor made again because of the next plan.
        """
        if not self._store.healthy:  # the step waits for the database longer than the lock may be held
            raise StoreUnavailable
        outbox: Sequence[Outbox] = ()
        async with self._lock:
            consequences = await self._consequences_of_step_end(entry)
            if consequences is None:
                appended = await self._append_alone(entry)
            else:
                # It may have waited for the lock, and what follows counts from now: a wait for results, for one.
                fenced = replace(entry, at=self._context.now(), epoch=self.epoch)
                try:
                    appended = await self._commit(fenced, consequences)
                    outbox = consequences.outbox
                except (LeaseLost, RunEnded):
                    appended = await self._store.append(entry)
                except Conflict:
                    appended = await self._append_alone(entry)
        await self._enqueue(outbox)
        self.on_step_end()
        return appended

    async def _consequences_of_step_end(self, entry: Entry) -> Consequences | None:
        """Return what follows from the end of a step; None if the entry must be committed without it."""
        after = apply_facts_if_possible(self.state, entry.events)
        if after is None or self.is_over:
            return None
        try:
            consequences = await self._consequences_of(after, may_plan=False)
            self._add_success(entry, consequences)
            return consequences
        except Exception as bug:  # the driver meets it again, and that costs nobody a second call
            self._context.telemetry.log(
                logging.ERROR,
                "What follows from the end of a step could not be decided because of a bug; its outcome is kept.",
                bug,
                run=entry.run,
            )
            return None

    async def _append_alone(self, entry: Entry) -> AppendResult:
        appended = await self._store.append(entry)
        await self.receive(appended.events)
        return appended

    async def append(
        self,
        events: tuple[Fact, ...],
        *,
        contents: Contents = (),
        hold: Amount = Amount(),
        release: Amount = Amount(),
        spent: Amount = Amount(),
        within: float = inf,
    ) -> None:
        """Commit events from which nothing else is to follow yet; they are folded when this returns.

        `within` is how many seconds it may wait for the database. Nothing is written if the run has ended meanwhile,
        nor an outcome of a call that has one already, because it was given up for lost. A step that has ended meanwhile
        is not skipped.
        """
        async with self._lock:
            events = tuple([draft for draft in events if not self._skips_settled_step(draft)])
            if self.state.ended and not all(draft.kind in AFTER_THE_END for draft in events):
                return
            if not events or any(self._has_outcome(draft) for draft in events):
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
            await self._write(entry, Consequences(apply_facts(self.state, events)), within)

    def _has_outcome(self, draft: Fact) -> bool:
        """Return True if the event is the outcome of a call that has an outcome in the journal already."""
        if not isinstance(draft, CallFinished):
            return False
        call = self.state.calls.get(draft.call)
        return call is not None and call.outcome is not None

    def _skips_settled_step(self, draft: Fact) -> bool:
        """Return True if the event skips a step that has ended."""
        if not isinstance(draft, StepSkipped):
            return False
        step = self.state.steps.get(draft.n)
        return step is not None and step.settled

    async def end(self, decided_on: RunState, events: tuple[Fact, ...], lost: Amount) -> None:
        """Commit the run's end as it was decided on that state; nothing if others have written meanwhile.

        `lost` was held for calls that `events` give up for lost. Raises `Conflict` if there are events which have not
        been folded here.
        """
        async with self._lock:
            if self.state is decided_on:
                entry = Entry(decided_on.run, self._context.now(), events, epoch=self.epoch, release=lost, spent=lost)
                await self._write(entry, Consequences(apply_facts(decided_on, events)))

    async def release(self) -> None:
        """Give the lease up for as long as the run waits for its caller: it was taken over in the middle of that."""
        until = self.state.turn.until
        entry = Entry(
            self.state.run, self._context.now(), epoch=self.epoch, lease=Lease("", until, until), seq=self.state.seq
        )
        try:
            await self._store.append(entry)
            self.released = True
        except Conflict:
            await self.catch_up()

    @property
    def row_epoch(self) -> int:
        """Return the epoch of the run's row, which is one more once the lease was given up."""
        if not self.state.is_waiting:
            return self.epoch
        return self.epoch + 1

    def close(self) -> None:
        """Call the driver back no more, so that it can be freed without the garbage collector."""
        self.on_folded = _ignore_events
        self.on_step_end = _do_nothing

    def decide_again(self) -> None:
        """Make the driver decide once more, although nothing was written."""
        self.state = replace(self.state)

    async def read_answer(self, refs: Sequence[str]) -> None:
        """Read the contents of which the run's answer consists."""
        read = partial(self._store.contents, self.state.run, refs)
        self.answer = await retry_until_deadline(self._store, read, self.seconds_to_wait)

    async def _enqueue(self, outbox: Sequence[Outbox]) -> None:
        """Queue the tickets of committed outbox rows; while the queue is unavailable, engines poll the outbox."""
        if not outbox:
            return
        of_run = replace(run_ticket(self.state), trace=self._trace, at=self._context.now())
        tickets = []
        for row in outbox:
            if row.announced:
                tickets.append(replace(of_run, step=row.step, driver=row.driver, version=row.version))
        await _queue(self._context, tickets)

    # -- deciding

    async def _consequences_of(self, state: RunState, *, may_plan: bool = True) -> Consequences:
        """Decide on tentative states until nothing follows any more, or a command has to wait for the commit.

        Without `may_plan` there are no consequences where a conductor is to be asked: the driver asks it, in its turn.
        """
        consequences = Consequences(state)
        now = self._context.now()
        while consequences.pending_command is None:
            commands = decide(consequences.state, now)
            if not commands:
                break
            events: list[Fact] = []
            for command in commands:
                if isinstance(command, Finish):  # no step is to begin that is about to be stopped
                    consequences.pending_command = command
                    consequences.outbox = []
                elif isinstance(command, Propose):
                    events += await self._open_proposal(command, consequences)
                    if consequences.pending_command is not None and not may_plan:
                        return Consequences(state)
                else:
                    events += self._carry_out(command, consequences, now)
            consequences.add(events)
        return consequences

    async def _open_proposal(self, command: Propose, consequences: Consequences) -> Sequence[Fact]:
        """Return the events of a proposal. The command stays pending where these do not include the whole plan."""
        events, contents = await self._open_plan(consequences.state, command, self)
        consequences.contents += contents
        if len(events) < 2:
            consequences.pending_command = command
        return events

    def _carry_out(
        self,
        command: Queue | Skip | Conclude | Await | AwaitApproval | DropPlan,
        consequences: Consequences,
        now: float,
    ) -> Sequence[Fact]:
        """Return the events of a command for which nobody needs to be asked."""
        if isinstance(command, Queue):
            return consequences.queue_steps(command, self._home, enqueues=self._context.queue.healthy)
        if isinstance(command, Await):
            return [consequences.await_tools(command, now, self._context.lease)]
        if isinstance(command, AwaitApproval):
            catalog, notifies = self._context.catalog(), self._context.notifies
            return [consequences.await_approval(command, now, catalog, notifies=notifies)]
        if isinstance(command, DropPlan):
            return consequences.drop_plan(command, now)
        return drafts.steps_settled(consequences.state, command)

    def _add_success(self, entry: Entry, consequences: Consequences) -> None:
        """Add the run's success, where nothing needs to be waited for and the answer is in the entry."""
        self.answer = dict(entry.contents)
        command, state = consequences.pending_command, consequences.state
        if isinstance(command, Finish) and ends_at_once(state, command, self.answer) and state.open_proposal is None:
            consequences.add(ending(state, command))

    # -- writing

    def _commit(self, entry: Entry, consequences: Consequences) -> Coroutine[Any, Any, AppendResult]:
        """Commit an entry with what follows from it, and with the intents of those steps that are begun here at once.

        The tickets that are left in `consequences.outbox` are to be queued.
        """
        if self._steps is not None and consequences.outbox:
            return self._commit_with_steps(self._steps, entry, consequences)
        return self._write(entry, consequences)

    async def _commit_with_steps(self, starter: StepStarter, entry: Entry, consequences: Consequences) -> AppendResult:
        """Commit with the intents of the steps that can begin here.

        Where these cannot be paid for, none begins here, and the dispatcher that takes a step's ticket fails it.
        """
        contents = self._cached_contents | dict((*entry.contents, *consequences.contents))
        steps = await starter.prepare(consequences.state, self.salt, contents, consequences.outbox)
        if steps:
            appended = await self._write_and_start(entry, consequences, steps)
            if appended is not None:
                started = {step.row.step for step in steps}
                consequences.outbox = [row for row in consequences.outbox if row.step not in started]
                return appended
        return await self._write(entry, consequences)

    async def _write_and_start(
        self, entry: Entry, consequences: Consequences, steps: Sequence[PreparedStep]
    ) -> AppendResult | None:
        """Commit with the intents of prepared steps, and start these. None if the entry was refused because of them."""
        try:
            appended = await self._write(entry, consequences.with_intents(steps))
        except BaseException as error:
            for step in steps:
                step.abandon()
            if _refuses_steps(error):
                return None
            raise
        for step, claim in zip_longest(steps, appended.outbox_claims):
            if claim is not None:
                step.start(claim)
            else:  # an entry that is found again after an outage has no claims: those tickets lapse and are taken anew
                step.abandon()
        return appended

    async def _write(self, entry: Entry, consequences: Consequences, within: float = inf) -> AppendResult:
        """Commit an entry with what follows from it, and fold it. The caller holds the lock.

        Raises `Conflict` if the entry decides something and there are events that have not been folded here.
        """
        complete = with_consequences(entry, consequences, self._seq_to_follow(entry, consequences))
        if entry.move is None and entry.new is None and entry.lease is None:
            appended = await self._append_unless_ended(complete, within)
            if appended is None:
                return AppendResult(())
        else:  # the start of a run or a turn does not wait, and a step's end is retried by its dispatcher
            appended = await self._store.append(complete)
        if entry.lease is not None:
            self.epoch += 1
        self._cache(complete.contents)
        await self._fold_own(appended.events, consequences.state)
        if consequences.lease is not None:
            self.released = True
        return appended

    def _seq_to_follow(self, entry: Entry, consequences: Consequences) -> int | None:
        """Return the number of the event that an entry must follow because it decides something; None if any may come
        before it."""
        ends_run = consequences.state.ended and not self.state.ended
        ends_turn = ends_run or consequences.lease is not None
        takes_lease = entry.lease is not None  # such an entry has the number already
        decides = ends_turn or (bool(consequences.events) and not takes_lease)
        if decides and entry.new is None:  # not `self.state.seq`: others may have been heard since it was decided
            return consequences.state.seq - len(entry.events) - len(consequences.events)
        return entry.seq

    async def _append_unless_ended(self, entry: Entry, within: float) -> AppendResult | None:
        """Append, waiting for the database; None if others have ended the run, so that nothing is needed any more."""
        give_up_at = self._context.monotonic() + within

        def seconds_left() -> float:
            return min(self.seconds_to_wait(), give_up_at - self._context.monotonic())

        try:
            return await append_exactly_once(self._store, entry, self.state.seq, seconds_left)
        except RunOverBudget:  # a `RunEnded`, but the run has not ended yet
            raise
        except RunEnded:
            await self.catch_up()
            return None

    def _cache(self, contents: Contents) -> None:
        """Keep brief contents for the run's next steps, up to a bound; what is not kept is read."""
        for ref, body in contents:
            if len(body) <= BRIEF and len(self._cached_contents) < MOST_CACHED_CONTENTS:
                self._cached_contents[ref] = body

    # -- folding

    async def _fold_own(self, events: tuple[Event, ...], after: RunState) -> None:
        """Fold events of our own: `after` is the state then, unless others wrote in between."""
        before = self.state
        if not events or events[-1].seq <= before.seq:
            return
        if events[0].seq == before.seq + 1 and events[-1].seq == after.seq:
            is_new_reply = after.replied and not before.replied
            self.state = fold(events, before) if is_new_reply else after  # a reply has the time of its event
            await self.on_folded(events)
        else:
            await self.receive(events)

    async def receive(self, events: Iterable[Event]) -> None:
        """Fold what others have committed, in the order of the numbers; an event that is missing is read."""
        for event in events:
            if event.seq > self.state.seq:
                self._events_after_gap[event.seq] = event
        folded = []
        while (event_in_order := self._events_after_gap.pop(self.state.seq + 1, None)) is not None:
            self._advance(event_in_order)
            folded.append(event_in_order)
        if folded:
            await self.on_folded(folded)
        if self._events_after_gap:
            await self.catch_up()

    async def catch_up(self) -> None:
        """Fold what the journal has beyond the state."""
        self._events_after_gap.clear()
        read = partial(self._store.journal, self.state.run, after=self.state.seq)
        journal = await retry_until_deadline(self._store, read, self.seconds_to_wait)
        folded = []
        for event in journal.events:
            if event.seq == self.state.seq + 1:
                self._advance(event)
                folded.append(event)
        if folded:
            await self.on_folded(folded)

    def _advance(self, event: Event) -> None:
        if not self.is_over:  # what is journaled after a turn belongs to the audit and not to its reply
            self.state = advance(self.state, event)
            self.released = event.kind in (Kind.AWAITING, Kind.AWAITING_APPROVAL)


async def _ignore_events(_events: Sequence[Event]) -> None:
    return


def _do_nothing() -> None:
    return


def ends_at_once(state: RunState, command: Finish, contents: Mapping[str, bytes]) -> bool:
    """True if a run succeeds with nothing to wait for, and with an answer that is among these contents."""
    if command.kind is not Kind.SUCCEEDED or command.step is None or state.open_calls:
        return False
    return state.steps[command.step].output in contents


def with_consequences(entry: Entry, consequences: Consequences, seq: int | None) -> Entry:
    """Return an entry with what follows from it; `seq` is the number of the event that it must follow, if it must."""
    events = (*entry.events, *consequences.events)
    lease = entry.lease
    if consequences.lease is not None:
        lease = consequences.lease
    elif lease is not None and consequences.deadline is not None:
        lease = replace(lease, deadline=consequences.deadline)
    return replace(
        entry,
        events=events,
        contents=(*entry.contents, *consequences.contents),
        hold=entry.hold + consequences.hold,
        outbox=(*entry.outbox, *consequences.outbox),
        row=projection(consequences.state),
        tags=(*entry.tags, *tags(events)),
        lease=lease,
        seq=seq,
    )


def ending(state: RunState, command: Finish) -> tuple[Fact, ...]:
    """The terminal event, and before it what becomes of steps that are not settled."""
    skips = drafts.steps_skipped(state.active_steps, RUN_ENDED)
    return (*skips, drafts.run_ended(apply_facts(state, skips), command))


def projection(state: RunState) -> Projection:
    """The columns of the run's row that lists and filters read."""
    error = state.end.error if state.end is not None else ""
    return Projection(
        state=state.state,
        topology=state.topology or None,
        degraded=state.degraded,
        steps=len(state.planned_steps),
        error=error or None,
    )


def tags(events: Iterable[Fact]) -> tuple[tuple[str, str], ...]:
    """The filters that these events add."""
    filters = []
    for event in events:
        if isinstance(event, PlanStep):
            filters.append(("worker", event.worker))
        elif isinstance(event, RunAwaitingApproval):
            filters.append((APPROVAL_TAG, ASKED))
    return tuple(filters)


def _refuses_steps(error: BaseException) -> bool:
    """Return True if an entry was refused because of the steps that begin in it, and may be committed without them."""
    if isinstance(error, Conflict):
        return error.public_code != MOVED
    return isinstance(error, RunOverBudget)


# -- tickets


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


def ticket_of_row(due: TicketRow) -> Ticket:
    """Return the ticket of an outbox row that was found by polling: the engine that takes it claims the row first."""
    return Ticket(due.run, due.step, due.tier, due.driver, due.seq, AGAIN, tenant=due.tenant)
