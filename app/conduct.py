"""THE RUN: how one is admitted, planned, executed and ended. Read this first.

    order ── admit ──> run.admitted committed            (with the whole plan, if the conductor needs no model)
               └ drive: until the run has ended
                    commands = decide(state)              pure, core/progress.py
                      Propose  ask a conductor; its steps are checked one by one as they stream in (planner.py)
                      Queue    journal step.queued with a ticket in the outbox, then ring the bell
                      Skip     nothing is left for the step to see
                      Finish   stop what still runs, then exactly one terminal event
                    state = advance(state, event)         events of our own, and those that dispatchers tell of

Only the holder of the run's lease gets here, and every write says so with its epoch. Whatever this process knows can be
folded from the journal again, so a driver that dies is replaced by another that folds and goes on. What dispatchers
tell is a courtesy: a gap in the numbers, or silence, sends the driver to the journal.
"""

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from app import errors
from app.attempt import Means, lost
from app.conductor.protocol import Conductor
from app.core import drafts
from app.core.bill import bill
from app.core.chat import Task
from app.core.journal import Draft, Event, Kind
from app.core.progress import Finish, Propose, Queue, Skip, advance, decide
from app.core.state import DRIVER_LOST, RUN_ENDED, RunState
from app.errors import BatonError, PlanRejected, QueueUnavailable
from app.mailbox import Mailbox
from app.order import NOTED, Ended, Noted, Said, Told
from app.planner import Contents, Planned, Planner, faults
from app.stepqueue.protocol import DISPATCHERS, Committed, Delta, Live, Stop, Ticket
from app.store.protocol import Entry, Ledger, Outbox, Projection

PATIENCE = 2.0
"""Seconds of silence after which a driver looks into the journal by itself."""
QUIESCE = 1.5
"""Seconds that running calls get to write their outcome before the run's end is written."""
INBOX = 4_096


@dataclass(frozen=True, slots=True)
class CancelAsked:
    """Somebody wants the run to stop; `by` says who: `client`, `caller` or `operator`."""

    by: str


@dataclass(slots=True)
class Consequences:
    """What follows from a state, ready to be committed; `pending` is a command that needs waiting first."""

    state: RunState
    events: list[Draft] = field(default_factory=list)
    outbox: list[Outbox] = field(default_factory=list)
    contents: list[tuple[str, bytes]] = field(default_factory=list)
    pending: Propose | Finish | None = None


class Driver:
    """One run in the hands of this process."""

    def __init__(
        self,
        means: Means,
        *,
        home: str,
        state: RunState,
        task: Task,
        salt: bytes,
        conductor: Conductor,
        epoch: int = 1,
        line: Mailbox[Told] | None = None,
        notes: bool = False,
    ) -> None:
        """`home` is the address where dispatchers tell of this run; `line` leads to the caller, if one is waiting."""
        self._means = means
        self._home = home
        self._epoch = epoch
        self._line = line
        self._notes = notes
        self.state = state
        self.salt = salt
        self.planning: Propose | None = None
        """A proposal that was opened with the admission and waits for `drive` to begin."""
        self.inbox: Mailbox[Live | Planned | CancelAsked] = Mailbox(INBOX)
        self._planner = Planner(
            means, task=task, salt=salt, conductor=conductor, append=self._append, tell=self.inbox.push
        )
        self._early: dict[int, Event] = {}
        self._writing = asyncio.Lock()
        self._told = ""
        self._teller = ""
        """The call whose text is told."""
        self._text = ""
        """The whole answer, read before the end is written."""
        self._began = means.tick()

    @property
    def epoch(self) -> int:
        """The lease that this driver writes under."""
        return self._epoch

    async def drive(self) -> None:
        """Until the run has ended. Raises `LeaseLost` if somebody else drives it now; then this one falls silent."""
        async with asyncio.TaskGroup() as group:
            try:
                if self.planning is not None:
                    self._planner.start(group, self.state, self.planning)
                elif self.state.proposal is not None and self.state.proposal.state == "open":
                    await self._give_up_plan()
                while not self.state.ended:
                    await self._act(group)
                    if not self.state.ended:
                        await self._hear(await self.inbox.take(self._patience()))
            finally:
                await self._planner.stop()
        self._tell_end()

    def _patience(self) -> float:
        return max(min(self.state.admitted.deadline - self._means.now(), PATIENCE), 0.0)

    async def _act(self, group: asyncio.TaskGroup) -> None:
        """Commit everything that follows from the present state, in one entry; then begin what needs waiting."""
        follows = await self.consequences(self.state)
        await self._commit(follows)
        if isinstance(follows.pending, Finish):
            await self._finish(follows.pending)
        elif follows.pending is not None:
            self._planner.start(group, self.state, follows.pending)

    async def consequences(self, state: RunState) -> Consequences:
        """Decide on tentative states until nothing follows any more."""
        follows = Consequences(state)
        while follows.pending is None and (commands := decide(follows.state, self._means.now())):
            fresh: list[Draft] = []
            for command in commands:
                if isinstance(command, Propose):
                    opened, contents = await self._planner.open(follows.state, command)
                    fresh += opened
                    follows.contents += contents
                    follows.pending = command if len(opened) == 1 else None
                elif isinstance(command, Queue):
                    fresh += [Draft(Kind.STEP_QUEUED, {"n": n}) for n in command.steps]
                    follows.outbox += [Outbox(n, state.admitted.tier, self._home) for n in command.steps]
                elif isinstance(command, Skip):
                    fresh += drafts.skipped([follows.state.steps[command.step]], "inputs_lost")
                else:
                    follows.pending = command
            follows.events += fresh
            follows.state = tentative(follows.state, fresh)
        return follows

    async def _commit(self, follows: Consequences, first: tuple[Draft, ...] = (), contents: Contents = ()) -> None:
        """One entry, then the bell for the tickets in it."""
        events = (*first, *follows.events)
        if not events:
            return
        contents = (*contents, *follows.contents)
        await self._append(events, outbox=tuple(follows.outbox), contents=contents, after=follows.state)
        await self.ring(follows.outbox)

    async def ring(self, outbox: Iterable[Outbox]) -> None:
        """Tell dispatchers of committed tickets; if the bell is down they find the outbox by themselves."""
        tickets = [Ticket(self.state.run, row.step, row.tier, row.driver, self.state.seq) for row in outbox]
        try:
            if tickets:
                await self._means.queue.ring(tickets)
        except QueueUnavailable:
            self._means.telemetry.log(logging.WARNING, "the bell is down; dispatchers poll", run=self.state.run)

    async def _append(
        self,
        events: tuple[Draft, ...],
        *,
        outbox: tuple[Outbox, ...] = (),
        contents: Contents = (),
        hold: Ledger = Ledger(),
        release: Ledger = Ledger(),
        spent: Ledger = Ledger(),
        after: RunState | None = None,
    ) -> None:
        """One entry under our epoch; its events are folded when this returns.

        `after` is the state that they lead to, if the caller has worked it out from the present one already.
        """
        async with self._writing:
            now = self._means.now()
            if after is None or after.seq != self.state.seq + len(events):
                after = tentative(self.state, events)
            entry = Entry(
                run=self.state.run,
                at=now,
                events=events,
                epoch=self._epoch,
                hold=hold,
                release=release,
                spent=spent,
                contents=contents,
                outbox=outbox,
                row=projection(after, now),
                tags=tags(events),
            )
            appended = await self._means.store.append(entry)
            await self.committed(appended.events, after)

    # -- hearing

    async def _hear(self, messages: list[Live | Planned | CancelAsked]) -> None:
        if not messages:
            return await self._catch_up()
        for message in messages:
            if isinstance(message, Delta):
                self._relay(message)
            elif isinstance(message, Committed):
                await self.fold(message.events)
            elif isinstance(message, Planned):
                await self._planned(message)
            elif isinstance(message, CancelAsked) and not self.state.ended:
                await self._append((Draft(Kind.CANCEL_ASKED, {"by": message.by}),))

    def _relay(self, delta: Delta) -> None:
        """Pass on text of the answering step if it continues what was told; what is not passed on comes at the end."""
        answering = self.state.answering
        if self._line is None or answering is None or answering.n != delta.step or delta.offset != len(self._told):
            return
        if self._told and delta.call != self._teller:  # another attempt, which may well say something else
            return
        if not self._told:
            since = self._means.tick() - self._began
            self._means.telemetry.observe("baton_first_delta_seconds", since, self.state.admitted.tier)
        if self._line.put(Said(delta.text)):
            self._teller = delta.call
            self._told += delta.text

    async def committed(self, events: tuple[Event, ...], after: RunState) -> None:
        """Our own events came back with their numbers: `after` is the state, unless others wrote in between."""
        if events and events[0].seq == self.state.seq + 1 and events[-1].seq == after.seq:
            for event in events:
                self._note(event)
            self.state = after
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
        journal = await self._means.store.journal(self.state.run, after=self.state.seq)
        for event in journal.events:
            if event.seq == self.state.seq + 1:
                self._advance(event)

    def _advance(self, event: Event) -> None:
        self.state = advance(self.state, event)
        self._note(event)

    def _note(self, event: Event) -> None:
        if self._notes and self._line is not None and event.kind in NOTED:
            public = {name: event.body[name] for name in NOTED[event.kind] if event.body.get(name) is not None}
            self._line.put(Noted(event.kind.value, public))

    # -- planning

    async def _planned(self, planned: Planned) -> None:
        """One more step of the open proposal, or its end."""
        proposal = self.state.proposal
        if proposal is None or proposal.state != "open" or proposal.number != planned.proposal:
            return
        if planned.step is not None:
            place = len(self.state.current)
            if found := faults(self.state, planned.step, place):
                await self._planner.stop()
                return await self._reject(found, outage=False)
            draft, contents = self._planner.step(proposal.number, proposal.base, place, planned.step)
        elif isinstance(planned.error, PlanRejected):
            return await self._reject(planned.error.reasons, outage=False)
        elif planned.error is not None:
            return await self._reject([planned.error.public_code or "conductor_failed"], outage=True)
        elif not self.state.current or not self.state.current[-1].answers:
            return await self._reject(["the plan has no answering step"], outage=False)
        else:
            inputs = [[n - proposal.base for n in step.access.steps] for step in self.state.current]
            draft, contents = drafts.accepted(proposal.number, self._planner.call, inputs), ()
            self._means.telemetry.count("baton_plans_total", self.state.admitted.tier, "accepted")
        await self._commit(await self.consequences(tentative(self.state, [draft])), (draft,), contents)

    async def _reject(self, reasons: Iterable[str], *, outage: bool) -> None:
        """Journal a proposal's end without a workflow; its steps that run already are stopped."""
        proposal, current = self.state.proposal, self.state.current
        if proposal is None:
            return
        self._means.telemetry.count("baton_plans_total", self.state.admitted.tier, "outage" if outage else "rejected")
        stops = [Stop(self.state.run, step.n) for step in current if step.state in ("queued", "running")]
        rejected = drafts.rejected(proposal.number, self._planner.call, list(reasons), outage)
        await self._append((*drafts.skipped(current, "plan_rejected"), rejected))
        await self._stop(stops)

    async def _give_up_plan(self) -> None:
        """Taken over from a driver that died while a plan was made: account for its calls, then plan anew."""
        gone = [call for call in self.state.open_calls if call.step is None]
        for call in gone:
            held = Ledger(call.usd_held, call.tokens_held)
            await self._append((lost(call.id, None, held),), release=held, spent=held)
        await self._reject([DRIVER_LOST], outage=True)

    # -- the end

    async def _finish(self, command: Finish) -> None:
        """Stop what runs, give it time to write its outcome, then write the one terminal event."""
        await self._planner.stop()
        if self.state.open_calls:
            await self._stop([Stop(self.state.run)])
            await self._quiesce()
        if command.step is not None:
            self._text = await self._answer(self.state.steps[command.step].output)
        if not self.state.ended:
            skips = drafts.skipped(self.state.current, RUN_ENDED)
            await self._append((*skips, drafts.ended(tentative(self.state, skips), command)))

    async def _quiesce(self) -> None:
        until = self._means.tick() + QUIESCE
        while self.state.open_calls and (left := until - self._means.tick()) > 0:
            for message in await self.inbox.take(left):
                if isinstance(message, Committed):
                    await self.fold(message.events)

    async def _stop(self, stops: list[Stop]) -> None:
        try:
            if stops:
                await self._means.queue.tell(DISPATCHERS, stops)
        except QueueUnavailable:
            self._means.telemetry.log(logging.WARNING, "dispatchers could not be told to stop", run=self.state.run)

    def _tell_end(self) -> None:
        state, telemetry = self.state, self._means.telemetry
        telemetry.count("baton_runs_total", state.admitted.tier, state.state)
        telemetry.observe("baton_run_seconds", self._means.tick() - self._began, state.admitted.tier)
        if state.degraded:
            telemetry.count("baton_degraded_total", state.admitted.tier)
        if self._line is None:
            return
        answer, error = self._text, ending_error(state)
        if error is None and not answer.startswith(self._told):
            error = errors.RunFailed("The answer changed while it was streamed; GET /v1/runs/{id} has it.")
        elif error is None and len(answer) > len(self._told):
            self._line.push(Said(answer[len(self._told) :]))
        self._line.push(Ended(state, answer, state.end.get("finish") or "stop", bill(state), error))

    def tell_failure(self, error: BatonError) -> None:
        """This process can no longer drive the run; whoever waits for it is told so. The run itself goes on
        elsewhere."""
        if self._line is not None:
            self._line.push(Ended(self.state, "", "stop", bill(self.state), error))

    async def _answer(self, ref: str) -> str:
        if not ref:
            return ""
        return (await self._means.store.contents(self.state.run, [ref]))[ref].decode()


def tentative(state: RunState, events: Iterable[Draft]) -> RunState:
    """What the state would be if these were committed next."""
    for draft in events:
        state = advance(state, Event(state.run, state.seq + 1, draft.kind, 0.0, draft.body))
    return state


def projection(state: RunState, now: float) -> Projection:
    """The columns of the run's row that lists and filters read."""
    return Projection(
        state=state.state,
        topology=state.proposal.topology or None if state.proposal else None,
        degraded=state.degraded,
        steps=len(state.current),
        ended_at=now if state.ended else None,
        error=state.end.get("error"),
    )


def tags(events: Iterable[Draft]) -> tuple[tuple[str, str], ...]:
    """The filters that these events add."""
    return tuple(("worker", draft.body["worker"]) for draft in events if draft.kind is Kind.PLAN_STEP)


def ending_error(state: RunState) -> BatonError | None:
    """What a caller is told of a run that did not succeed."""
    endings: dict[str, type[BatonError]] = {
        "cancelled": errors.RunCancelled,
        "expired": errors.RunExpired,
        "over_budget": errors.RunOverBudget,
        "failed": errors.RunFailed,
    }
    ending = endings.get(state.state)
    return ending(code=state.end.get("error")) if ending else None
