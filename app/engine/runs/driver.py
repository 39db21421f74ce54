"""THE RUN: how one is admitted, planned, executed and ended. Read this first.

    order ── admit ──> run.admitted committed            (with the whole plan, if the conductor needs no model)
               └ drive: until the run has ended, or waits for its caller (who then comes to drivers.start again)
                    commands = decide(state)              pure, run/progress.py
                      Propose  ask a conductor, once more when a round has answered and another one may follow;
                               its steps are checked one by one as they stream in (planner.py)
                      Queue    journal step.queued with a ticket in the outbox, then ring the bell
                      Skip     nothing is left for the step to see, or its round is over without it
                      Conclude what is nested in the step has answered (run/nesting.py)
                      Await    the caller has to call tools first: its turn ends, and the lease goes to nobody
                      Finish   stop what still runs, then exactly one terminal event
                    state = advance(state, event)         events of our own, and those that dispatchers tell of

Only the holder of the run's lease gets here, and every write says so with its epoch. Whatever this process knows can be
folded from the journal again, so a driver that dies is replaced by another that folds and goes on. What dispatchers
tell is a courtesy: a gap in the numbers, or word that the journal has moved on, sends the driver there.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from math import inf

from app.conductor.protocol import Policy
from app.core.message.chat import Task
from app.core.records import changed
from app.core.run import drafts
from app.core.run.commands import Await, Conclude, Finish, Propose, Queue, Skip
from app.core.run.events import AFTER_THE_END, CallFinished, Draft, Event, Kind, RunCancelAsked
from app.core.run.progress import advance, confirmed, decide
from app.core.run.state import DRIVER_LOST, Call, RunState
from app.engine.commit.colocation import DispatcherBeside
from app.engine.commit.lost_calls import given_up
from app.engine.commit.retry import Patient
from app.engine.commit.speculative import ring, taking
from app.engine.commit.transition import Consequences, at_hand, ending, possible, tentative, whole
from app.engine.context import Means
from app.engine.delivery import turn_result
from app.engine.delivery.audience import Audience
from app.engine.delivery.mailbox import Mailbox
from app.engine.delivery.remote_run import LISTEN_SECONDS
from app.engine.runs.planning import Contents, Planned, Planner, faults
from app.engine.runs.request import CancelAsked, Moved, Owner
from app.errors import (
    BatonError,
    Conflict,
    LeaseLost,
    NotFound,
    QueueUnavailable,
    RunEnded,
    RunOverBudget,
    StoreUnavailable,
)
from app.stepqueue.protocol import DISPATCHERS, Committed, Delta, Listen, Live, Stop
from app.store.protocol import Appended, Entry, Lease, Ledger, Outbox
from app.store.rows.content import address

QUIESCE = 1.5
"""Seconds that running calls get to write their outcome before the run's end is written."""
INBOX = 4_096
LATE = 15.0
"""Seconds beyond the deadline for which a driver waits for the database to take the run's end."""

Heard = Live | Planned | CancelAsked | Moved


class Driver:
    """One run in the hands of this process."""

    far = False

    def __init__(
        self,
        means: Means,
        *,
        home: str,
        owner: Owner,
        state: RunState,
        task: Task,
        salt: bytes,
        conductor: Policy,
        audience: Audience,
        epoch: int = 1,
    ) -> None:
        """`home` is the address where dispatchers tell of this run."""
        self._means = means
        self._home = home
        self.epoch = epoch
        """The lease that this driver writes under."""
        self.owner = owner
        self.audience = audience
        self.state = state
        self.salt = salt
        self.beside: DispatcherBeside | None = None
        """The dispatcher of this process, once it is known that there is one."""
        self.planning: Propose | None = None
        """A proposal that was opened with the admission and waits for `drive` to begin."""
        self.inbox: Mailbox[Heard] = Mailbox(INBOX)
        self._planner = Planner(means, task=task, salt=salt, conductor=conductor, tell=self.inbox.push)
        self.fresh = False
        """Whether its turn has just begun, so that no step runs yet."""
        self._let_go = False
        """Whether the run waits for its caller, and nobody drives it."""
        self._still: RunState | None = None
        """A state that was committed with all that follows from it, so that there is nothing to do but to listen."""
        self._early: dict[int, Event] = {}
        self._writing = asyncio.Lock()
        self._contents: Mapping[str, bytes] = {}
        """Of the latest end of a step that was brought here, or read before the run's end is written: the reply among
        them."""
        self._began = means.tick()
        self._store = Patient(means.store)

    def _worth_waiting(self) -> float:
        return self.state.deadline + LATE - self._means.now()

    async def drive(self) -> None:
        """Until the turn is over. Raises `LeaseLost` if somebody else drives the run; then this one falls silent."""
        if self.epoch > 1 and not self.fresh:  # what runs already still tells its former driver
            await self._tell_dispatchers([Listen(self.state.run, self._home)])
        async with asyncio.TaskGroup() as group:
            try:
                if self.planning is not None:
                    self._planner.start(group, self.state, self.planning, self._append)
                elif self.state.unmade is not None:
                    await self._reject([DRIVER_LOST], outage=True)
                while not self._over:
                    known, self._still, wait = self._still, None, inf
                    if known is not self.state:
                        known = await self._act(group)
                    while self.state is known and not self._over and wait:
                        await self._hear(await self.inbox.take(wait := self._patience()))
            finally:
                await self._planner.stop()
        await self._tell_end()

    @property
    def _over(self) -> bool:
        """Whether there is nothing left for this driver to do."""
        return self.state.ended or self._let_go

    def _patience(self) -> float:
        return max(self.state.deadline - self._means.now(), 0.0)

    async def _act(self, group: asyncio.TaskGroup) -> RunState:
        """Commit everything that follows from the present state, in one entry; then begin what needs waiting. Returns
        the state from which nothing else can follow until it is late."""
        follows = await self._commit()
        if self.state.ended:
            return self.state
        if isinstance(follows.pending, Finish):
            await self._finish(follows.pending)
        elif follows.pending is not None:
            self._planner.start(group, self.state, follows.pending, self._append)
        elif self.state.state == "awaiting_tool" and not self._let_go:  # taken over in the middle of its wait
            until, seq = self.state.turn.until, self.state.seq
            entry = Entry(self.state.run, self._means.now(), epoch=self.epoch, lease=Lease("", until, until), seq=seq)
            try:
                await self._means.store.append(entry)
                self._let_go = True
            except Conflict:
                await self._catch_up()
        return follows.state

    async def consequences(self, state: RunState, *, plans: bool = True) -> Consequences:
        """Decide on tentative states until nothing follows any more; nothing at all if a conductor is to be asked and
        whoever wants to know does not `plan`: that is for the driver's own turn."""
        follows = Consequences(state)
        while follows.pending is None and (commands := decide(follows.state, self._means.now())):
            fresh: list[Draft] = []
            for command in commands:
                if isinstance(command, Propose):
                    opened, contents = await self._planner.open(follows.state, command, self._append)
                    if len(opened) < 2 and not plans:
                        return Consequences(state)
                    fresh += opened
                    follows.contents += contents
                    follows.pending = command if len(opened) < 2 else None
                elif isinstance(command, Queue | Skip | Conclude):
                    fresh += follows.plain(command, self._home, sound=self._means.queue.sound)
                elif isinstance(command, Await):
                    fresh.append(follows.let_go(command, self._means.now()))
                else:  # and nobody begins what is about to be stopped
                    follows.pending, follows.outbox = command, []
            follows.add(fresh)
        follows.whole = follows.pending is None
        return follows

    async def _commit(self, first: tuple[Draft, ...] = (), contents: Contents = ()) -> Consequences:
        """One entry with `first` and all that follows, then the bell. Returns our state, unless others wrote too."""
        async with self._writing:
            while (follows := await self._with_all(first, contents)) is None:
                await self._catch_up()
        await self.ring(follows.outbox)
        return follows

    async def _with_all(self, first: tuple[Draft, ...], contents: Contents) -> Consequences | None:
        """None if nothing was written, because others have written what may forbid it."""
        if self.state.ended:  # a step's end took the run's with it: see `join`
            return Consequences(self.state)
        upon = self.state
        follows = await self.consequences(tentative(upon, first), plans=not first)
        if first or follows.events:
            mine = Entry(self.state.run, self._means.now(), events=first, epoch=self.epoch, contents=contents)
            try:
                appended = await self.write(mine, follows)
            except Conflict:
                return None
            alone = self.state.seq == upon.seq + len(appended.events)
            follows.state = self.state if alone else follows.state
        return follows

    async def join(self, entry: Entry) -> Appended:
        """Commit what a dispatcher of this very process wrote at a step's end together with what follows from it.

        One transaction instead of two or three, and the next steps are on their way a turn of the loop earlier. The
        entry keeps its own fence and gets the driver's beside it; if ours does not hold, it goes alone.
        """
        # We may be waiting for the database ourselves, and whoever brings this outcome has more patience.
        if not self._means.store.healthy:
            raise StoreUnavailable
        async with self._writing:
            after = possible(self.state, entry.events)
            if after is None:
                return await self._alone(entry)
            follows = self._with_end(entry, await self.consequences(after, plans=False))
            try:
                # It may have waited, and what follows counts from now: a wait for results, for one.
                joint = changed(entry, at=self._means.now(), epoch=self.epoch)
                appended = await self.write(joint, follows)
            except (LeaseLost, RunEnded):
                return await self._means.store.append(entry)
            except Conflict:
                return await self._alone(entry)
        await self.ring(follows.outbox)
        self.inbox.push(Committed(entry.run, appended.events))
        return appended

    async def _alone(self, entry: Entry) -> Appended:
        """What follows from it is for the driver to say when it knows all that came before."""
        appended = await self._means.store.append(entry)
        self.inbox.push(Committed(entry.run, appended.events))
        return appended

    def heard(self, events: tuple[Event, ...]) -> None:
        """Fold what a dispatcher of this process has committed, at once; nothing follows from it."""
        for event in events:
            if event.seq == self.state.seq + 1:
                self._advance(event)
        if events[-1].seq > self.state.seq:
            self.inbox.push(Committed(self.state.run, events))

    def _with_end(self, entry: Entry, follows: Consequences) -> Consequences:
        """The run's success too, where nothing needs to be waited for and the answer is at hand."""
        command, state = follows.pending, follows.state
        self._contents = fresh = dict(entry.contents)
        if isinstance(command, Finish) and at_hand(state, command, fresh) and self._planner.idle:
            follows.add(ending(state, command))
        return follows

    async def write(self, entry: Entry, follows: Consequences) -> Appended:
        """Commit an entry with what follows from it; what is left in `follows.outbox` is to be rung."""
        return await taking(self.beside, self.salt, entry, follows, self._write)

    async def _write(self, entry: Entry, follows: Consequences, within: float = inf) -> Appended:
        """Commit an entry with what follows from it, and fold it. The caller holds `_writing`, or is alone.

        Raises `Conflict` if it begins or ends a turn, or anything follows, and there are events of which we have not
        heard: a wish, say, or what a dispatcher has decided ahead of us.
        """
        ends = follows.lease is not None or (follows.state.ended and not self.state.ended)
        decides = ends or (bool(follows.events) and entry.lease is None)  # who begins a turn has said it already
        all_of_it = changed(whole(entry, follows), seq=self.state.seq if decides else entry.seq)
        if entry.move is None and entry.new is None and entry.lease is None:
            try:
                appended = await self._store.append(all_of_it, self.state.seq, self._worth_waiting, within)
            except RunOverBudget:  # which is an end to come
                raise
            except RunEnded:  # by a dispatcher, ahead of us: what we had to say is for nobody any more
                await self._catch_up()
                return Appended(())
        else:  # what a dispatcher brings waits by itself, with a fence of its own; a caller who begins a turn does not
            appended = await self._means.store.append(all_of_it)
        await self.committed(appended.events, follows.state)
        self._let_go = self._let_go or follows.lease is not None
        self._still = follows.state if follows.whole else None
        return appended

    async def ring(self, outbox: Iterable[Outbox]) -> None:
        """Tell dispatchers of committed tickets."""
        await ring(self._means, self.state, outbox)

    async def _append(
        self,
        events: tuple[Draft, ...],
        *,
        contents: Contents = (),
        hold: Ledger = Ledger(),
        release: Ledger = Ledger(),
        spent: Ledger = Ledger(),
        within: float = inf,
    ) -> None:
        """One entry under our epoch; its events are folded when this returns.

        Nothing is written if the run has ended meanwhile, nor an outcome that was given up for lost already.
        """
        async with self._writing:
            if self.state.ended and not all(draft.kind in AFTER_THE_END for draft in events):
                return
            if any(call.outcome is not None for draft in events if (call := self._finished(draft)) is not None):
                return
            entry = Entry(self.state.run, self._means.now(), events, None, self.epoch, None, hold, release, spent)
            after = Consequences(tentative(self.state, events))
            await self._write(changed(entry, contents=contents), after, within)

    def _finished(self, draft: Draft) -> Call | None:
        return self.state.calls.get(draft.call) if isinstance(draft, CallFinished) else None

    # -- hearing

    async def _hear(self, messages: list[Heard]) -> None:
        for message in messages:
            if isinstance(message, Delta):
                await self._relay(message)
            elif isinstance(message, Committed | Moved):
                await self._follow(message)
            elif isinstance(message, Planned):
                await self._planned(message)
            elif isinstance(message, Listen):
                self.audience.listen(message, self._means.tick() + LISTEN_SECONDS)
            elif isinstance(message, CancelAsked) and not self.state.ended:
                await self._append((RunCancelAsked(message.by),))
        await self.audience.tell_far(self._means.queue, self._means.tick())

    async def _follow(self, message: Committed | Moved) -> None:
        if isinstance(message, Committed):
            self._believe(message.contents)
            await self.fold(message.events)
        elif message.seq > self.state.seq:
            await self._catch_up()

    def _believe(self, contents: Sequence[tuple[str, str]]) -> None:
        """Texts that somebody tells of: those that have the addresses that they are said to have."""
        told = {ref: text.encode() for ref, text in contents}
        self._contents = {ref: body for ref, body in told.items() if address(self.salt, body) == ref} or self._contents

    def relay(self, delta: Delta) -> bool:
        """Pass on what a dispatcher of this process hears, at once; False: it is for the inbox."""
        if self.inbox or self.audience.heard_afar or delta.call not in self.state.calls:
            return False
        self._pass_on(delta)
        return True

    async def _relay(self, delta: Delta) -> None:
        if delta.call not in self.state.calls:  # its intent is journaled, but the word of it got lost
            await self._catch_up()
        self._pass_on(delta)

    def _pass_on(self, delta: Delta) -> None:
        """Text of the answering step; what is not passed on comes at the end."""
        first = not self.audience.chars
        if self.audience.hear(self.state, delta) and first:
            since = self._means.tick() - self._began
            self._means.telemetry.observe("baton_first_delta_seconds", since, self.state.admitted.tier)

    async def committed(self, events: tuple[Event, ...], after: RunState) -> None:
        """Our own events came back with their numbers: `after` is the state, unless others wrote in between."""
        if events and events[0].seq == self.state.seq + 1 and events[-1].seq == after.seq:
            for event in events:
                self.audience.note(event)
            replied = after.replied and not self.state.replied
            self.state = changed(after, replied_at=events[-1].at) if replied else after
        await self.fold(events)

    async def fold(self, events: Iterable[Event]) -> None:
        """Fold events in the order of their numbers; one that is missing is read from the journal."""
        for event in events:
            if event.seq > self.state.seq:
                self._early[event.seq] = event
        while (event_now := self._early.pop(self.state.seq + 1, None)) is not None:
            self._advance(event_now)
        if self._early:
            await self._catch_up()

    async def _catch_up(self) -> None:
        self._early.clear()
        journal = await self._store.journal(self.state.run, self.state.seq, self._worth_waiting)
        for event in journal.events:
            if event.seq == self.state.seq + 1:
                self._advance(event)

    def _advance(self, event: Event) -> None:
        """What is journaled after the turn is no part of what its callers are told."""
        if self._over:
            return
        self.state = advance(self.state, event)
        self._let_go = event.kind is Kind.AWAITING
        if isinstance(event.fact, CallFinished):
            self._means.health.overhear(self.state.calls[event.fact.call].worker, event.fact)
        self.audience.note(event)

    # -- planning

    async def _planned(self, planned: Planned) -> None:
        """One more step of the open proposal, or its end."""
        proposal = self.state.unmade
        if proposal is None or proposal.number != planned.proposal:
            self.state = changed(self.state)  # another one, so that whatever waited for an embedding goes on
            return
        current = self.state.steps_of(proposal)
        if found := faults(self.state, proposal, planned):
            await self._planner.stop()  # it may be others who say so
            return await self._reject(found, outage=planned.outage)
        if planned.step is not None:
            draft, contents = self._planner.step(self.state, proposal, len(current), planned.step)
        else:
            inputs = [[n - proposal.base for n in step.access.steps if n >= proposal.base] for step in current]
            draft, contents = drafts.accepted(proposal.number, self._planner.call, inputs), ()
            self._means.telemetry.count("baton_plans_total", self.state.admitted.tier, "accepted")
        await self._commit((draft,), contents)

    async def _reject(self, reasons: Iterable[str], *, outage: bool) -> None:
        """Journal a proposal's end without a workflow; its steps that run already are stopped, and a planning call
        that nobody is left to account for is unknown."""
        if (proposal := self.state.unmade) is None:
            return
        current = self.state.steps_of(proposal)
        self._means.telemetry.count("baton_plans_total", self.state.admitted.tier, "outage" if outage else "rejected")
        stops = [Stop(self.state.run, step.n) for step in current if step.state in ("queued", "running")]
        rejected = drafts.rejected(proposal.number, self._planner.call, list(reasons), outage)
        gone, held = given_up(self.state.planning if self._planner.idle else ())
        await self._append((*gone, *drafts.skipped(current, "plan_rejected"), rejected), release=held, spent=held)
        await self._tell_dispatchers(stops)

    # -- the end

    async def _finish(self, command: Finish) -> None:
        """Stop what runs, give it time to write its outcome, then write the one terminal event: that which follows from
        all that stands before it."""
        decided = self._means.now()
        await self._planner.stop()
        if self.state.open_calls or any(step.state == "running" for step in self.state.live):  # about to call again
            await self._tell_dispatchers([Stop(self.state.run)])
            await self._quiesce()
        while not self.state.ended:
            upon = self.state
            command = confirmed(command, upon, decided)
            if command.step is not None:
                refs = turn_result.of_step(upon.steps[command.step])
                self._contents = await self._store.contents(upon.run, refs, self._worth_waiting)
            try:
                await self._end(command, upon)
            except Conflict:  # the end sums up all calls: those too of which we have not heard
                await self._catch_up()

    async def _end(self, command: Finish, upon: RunState) -> None:
        """The end that was decided on upon that state; nothing is written if something was folded meanwhile."""
        async with self._writing:
            if self.state is upon:
                gone, held = given_up(self.state.planning)
                events = (*gone, *ending(tentative(self.state, gone), command))
                last = Entry(self.state.run, self._means.now(), events, epoch=self.epoch, release=held, spent=held)
                await self._write(last, Consequences(tentative(self.state, events)))

    async def _quiesce(self) -> None:
        until = self._means.tick() + QUIESCE
        while self.state.open_calls and (left := until - self._means.tick()) > 0:
            for message in await self.inbox.take(left):
                if isinstance(message, Committed | Moved):
                    await self._follow(message)

    async def _tell_dispatchers(self, messages: Sequence[Live]) -> None:
        try:
            if messages:
                await self._means.queue.tell(DISPATCHERS, messages)
        except QueueUnavailable:
            self._means.telemetry.log(logging.WARNING, "dispatchers could not be told", run=self.state.run)

    async def _tell_end(self) -> None:
        state, telemetry = self.state, self._means.telemetry
        if state.ended:
            turn_result.count(telemetry, state, self._means.tick() - self._began)
        else:
            telemetry.count("baton_tool_turns_total", state.admitted.tier)
        try:
            told = turn_result.told(state, self._contents)
        except NotFound:  # several steps call tools, or another driver wrote the end
            told = await turn_result.read(self._means.store, state)
        self.audience.end(told)
        await self.audience.ring_far(self._means.queue, self._means.tick())

    def tell_failure(self, error: BatonError) -> None:
        """This process can no longer drive the run; whoever waits for it is told so. The run itself goes on
        elsewhere."""
        self.audience.end(turn_result.without(self.state, error))
