"""The driver of a run: it plans, executes and ends the run for one engine. Read this first.

    RunClient ── admit ──> run.admitted committed        (client.py; the run is then taken by an engine: registry.py)
                 └ drive: until the run has ended, or waits for its caller (whose next turn is taken like a new run)
                    commands = decide(state)              pure, core/run/progress.py
                      Propose  ask a conductor, once more when a round has answered and another one may follow;
                               its steps are checked one by one as they stream in (planning.py)
                      Queue    journal step.queued with a ticket in the outbox; the dispatcher of this process begins
                               what it has slots for in the same entry, other engines take the rest
                      Skip     nothing is left for the step to see, or its round is over without it
                      Conclude what is nested in the step has answered (core/run/progress.py)
                      Await    the caller has to call tools first: the turn ends, and nobody drives the run
                      AwaitApproval  somebody has to approve the plan first: nobody drives the run until then
                      DropPlan nobody has approved the plan in time, and another one takes its place
                      Finish   stop what still runs, then exactly one terminal event
                    state = advance(state, event)         events of our own, and those that others have committed

All writing is the `RunWriter`'s (commit/run_writer.py), under the run's lease. Everything that this process knows can
be folded from the journal again, so an engine that dies is replaced by another one that folds and goes on. Each event
is sent to the gateways that follow the run as soon as it is folded; they find in the journal what gets lost.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from math import inf

from msgspec import Struct

from app.conductor.protocol import Policy
from app.core.message.chat import Task
from app.core.run import drafts
from app.core.run.events import CallFinished, Event, Kind
from app.core.run.fold import apply_facts
from app.core.run.identifiers import Trace
from app.core.run.kinds import DRIVER_LOST
from app.core.run.progress import Finish, Propose, decide_end_again
from app.core.run.state import RunState
from app.engine.calls.attempt import outcomes_of_lost_calls
from app.engine.commit.colocation import StepStarter
from app.engine.commit.run_writer import RunSnapshot, RunWriter, ending
from app.engine.context import EngineContext
from app.engine.delivery import messages
from app.engine.delivery.followers import LISTEN_SECONDS
from app.engine.delivery.messages import Mailbox
from app.engine.runs.planning import Planner, PlannerMessage, faults
from app.errors import Conflict, PlanRejected, QueueUnavailable
from app.network.tracing import Span
from app.stepqueue.protocol import DISPATCHERS, CommittedEvents, ListenRequest, Live, Stop
from app.store.protocol import BRIEF, Entry

QUIESCE_SECONDS = 1.5
"""Time that running calls get to write their outcome before the run's end is written."""
INBOX = 4_096
"""Messages that wait for the driver, at the most."""
FOLLOWERS = 64
"""Gateways that one run is sent to; more of them follow it by the journal alone."""


class JournalAdvance(Struct, frozen=True):
    """The run's journal has reached the event `seq`, which may not have been received here."""

    seq: int


Message = Live | PlannerMessage | JournalAdvance


class Driver:
    """The driver of one run in this process."""

    def __init__(
        self,
        context: EngineContext,
        *,
        home: str,
        run: RunSnapshot,
        task: Task,
        conductor: Policy,
        steps: StepStarter | None,
        span: Span,
    ) -> None:
        """`home` is the address of this process; `steps` is its dispatcher, as `RunWriter` takes it. `span` is that of
        the present turn in this engine, which the owner of this driver ends."""
        self._context = context
        self._home = home
        self.inbox: Mailbox[Message] = Mailbox(INBOX)
        self.span = span
        self._planner = Planner(
            context, task=task, salt=run.salt, conductor=conductor, send=self.inbox.push, trace=span.trace
        )
        self.writer = RunWriter(
            context, home=home, run=run, open_plan=self._planner.open, steps=steps, trace=span.trace
        )
        self.writer.on_folded = self._publish_events
        self.writer.on_step_end = self._wake
        self.commit_step_end = self.writer.commit_step_end
        """Commits the entry that ends a step of this process together with what follows from it."""
        self._steps = steps
        self.planning: Propose | None = None
        """A proposal that was opened with the run's lease, and waits for `drive` to begin."""
        self._listening: dict[str, float] = {}
        """Further gateways that follow the run, with the time on the monotonic clock until which they do."""
        self._latest: tuple[Event, ...] = ()
        """The last event that was sent to the run's followers; () if none was."""
        self._began_at = context.monotonic()

    @property
    def state(self) -> RunState:
        """Return the fold of a prefix of the journal, which is never stale."""
        return self.writer.state

    @property
    def salt(self) -> bytes:
        """Return the salt of the run's content addresses."""
        return self.writer.salt

    @property
    def trace(self) -> Trace:
        """Return the span of the run, whose trace its plans and steps continue."""
        return self.span.trace

    async def begin(self, entry: Entry) -> None:
        """Commit the entry that begins to drive the run, with all that follows; see `RunWriter.begin`."""
        consequences = await self.writer.begin(entry)
        if isinstance(consequences.pending_command, Propose):
            self.planning = consequences.pending_command

    async def drive(self) -> None:
        """Drive until the turn is over. Raises `LeaseLost` if somebody else drives the run; then this driver writes
        nothing more."""
        writer = self.writer
        async with asyncio.TaskGroup() as group:
            try:
                if self.planning is not None:
                    self._planner.start(group, self.state, self.planning, writer)
                elif self.state.open_proposal is not None:
                    await self._reject([DRIVER_LOST], outage=True)
                while not writer.is_over:
                    await self._wait_for_change(await self._act(group))
            finally:
                await self._planner.stop()
                writer.close()
        self._count()

    async def _wait_for_change(self, idle: RunState) -> None:
        """Take messages until the run's state is another one, the turn is over, or the deadline has passed."""
        seconds_left = inf
        while self.state is idle and not self.writer.is_over and seconds_left > 0:
            seconds_left = max(self.state.turn.deadline - self._context.now(), 0.0)
            await self._receive(await self.inbox.take(seconds_left))

    async def _act(self, group: asyncio.TaskGroup) -> RunState:
        """Commit everything that follows from the present state, then carry out the command that had to wait for the
        commit. Returns the state that was committed."""
        consequences = await self.writer.commit()
        command = consequences.pending_command
        if self.state.ended:
            return self.state
        if isinstance(command, Finish):
            await self._finish(command)
        elif command is not None:
            self._planner.start(group, self.state, command, self.writer)
        elif self.state.is_waiting and not self.writer.released:
            await self.writer.release()
        return consequences.state

    # -- for the steps of this run that are executed in this process: see commit/colocation.py

    def followers(self) -> Sequence[str]:
        """The addresses of the gateways that follow the run now."""
        if self._listening:
            now = self._context.monotonic()
            self._listening = {address: until for address, until in self._listening.items() if until > now}
        gateway = self.state.turn.gateway
        if gateway:
            return (gateway, *self._listening)
        return tuple(self._listening)

    async def receive(self, events: tuple[Event, ...]) -> None:
        """Fold what was committed for a step; nothing follows from it."""
        await self.writer.receive(events)

    def _wake(self) -> None:
        """Let `drive` look at the state."""
        self.inbox.push(JournalAdvance(self.state.seq))

    # -- what others send

    async def _receive(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if isinstance(message, CommittedEvents):
                await self.writer.receive(message.events)
            elif isinstance(message, JournalAdvance) and message.seq > self.state.seq:
                await self.writer.catch_up()
            elif isinstance(message, PlannerMessage):
                await self._take_plan(message)

    async def listen(self, message: ListenRequest) -> None:
        """Add a gateway that follows the run. It is sent the latest event, by which it finds out what it missed; and
        the engines that execute the run's steps send it what it lacks of the answer."""
        is_known = message.address in self.followers()
        if message.address != self.state.turn.gateway and (is_known or len(self._listening) < FOLLOWERS):
            self._listening[message.address] = self._context.monotonic() + LISTEN_SECONDS
        latest = CommittedEvents(self.state.run, self._latest, engine=self._home, epoch=self.writer.row_epoch)
        await self._send(message.address, [latest])
        if self._steps is None or not self._steps.listen(message):
            await self._send(DISPATCHERS, [message])

    async def _publish_events(self, events: Sequence[Event]) -> None:
        """Send events to the run's followers, with the texts of the reply where it is there and brief."""
        self._latest = tuple(events[-1:])  # first: a gateway that begins to listen meanwhile is to know of them
        state = self.state
        for event in events:
            if event.kind is Kind.CALL_FINISHED and isinstance(event.fact, CallFinished):
                age = max(self._context.now() - event.at, 0.0)
                worker = state.calls[event.fact.call].worker
                self._context.health.note_journaled(worker, event.fact, age)
        message = CommittedEvents(
            state.run, tuple(events), contents=self._reply(state), engine=self._home, epoch=self.writer.row_epoch
        )
        for address in self.followers():
            await self._send(address, [message])

    def _reply(self, state: RunState) -> tuple[tuple[str, str], ...]:
        """The brief contents of the reply that are at hand, with their refs; none before there is a reply."""
        if not state.replied:
            return ()
        contents = self.writer.answer
        reply = []
        for ref in messages.reply_refs(state):
            body = contents.get(ref)
            if body is not None and len(body) <= BRIEF:
                reply.append((ref, body.decode()))
        return tuple(reply)

    async def _send(self, address: str, messages: Sequence[Live]) -> None:
        with suppress(QueueUnavailable):  # the queue has logged it; other processes find the events in the journal
            await self._context.queue.publish(address, messages)

    # -- planning

    async def _take_plan(self, planned: PlannerMessage) -> None:
        """Journal one more step of the open proposal, or its end."""
        proposal = self.state.open_proposal
        if proposal is None or proposal.number != planned.proposal:
            self.writer.decide_again()  # a proposal that waited for an embedding can be opened now
            return
        current = self.state.steps_of(proposal)
        reasons = faults(self.state, proposal, planned) or self._planner.objections(self.state, proposal, planned)
        if reasons:
            await self._planner.stop()  # it may still be running: this end need not be its own
            return await self._reject(reasons, outage=planned.outage, budget=planned.budget)
        if planned.step is not None:
            draft, contents = self._planner.step(self.state, proposal, len(current), planned.step)
        else:
            inputs = [step.access.places(proposal.base) for step in current]
            draft, contents = self._planner.accept_plan(self.state, proposal, inputs, planned.why)
            self._context.telemetry.count("baton_plans_total", self.state.admitted.tier, "accepted")
        await self.writer.commit((draft,), contents)

    async def _reject(self, reasons: Sequence[str], *, outage: bool, budget: tuple[str, float] | None = None) -> None:
        """Journal a proposal's end without a workflow; its steps that run already are stopped, and a planning call
        whose process is gone gets the outcome `unknown`."""
        proposal = self.state.open_proposal
        if proposal is None:
            return
        current = self.state.steps_of(proposal)
        outcome = "outage" if outage else "rejected"
        if reasons == [DRIVER_LOST]:  # the conductor is not to blame
            outcome = "engine_lost"
        self._context.telemetry.count("baton_plans_total", self.state.admitted.tier, outcome)
        stops = [step.n for step in current if step.state in ("queued", "running")]
        rejected = drafts.plan_rejected(proposal.number, self._planner.call, reasons, outage=outage, budget=budget)
        lost_calls = self.state.open_planning_calls if self._planner.idle else ()
        outcomes, held = outcomes_of_lost_calls(lost_calls)
        events = (*outcomes, *drafts.steps_skipped(current, PlanRejected.code), rejected)
        await self.writer.append(events, release=held, spent=held)
        for step in stops:
            await self._stop(step)

    async def _stop(self, step: int | None = None) -> None:
        """Stop the running steps, or one of them, wherever they are executed."""
        if self._steps is None or not self._steps.stop(self.state.run, step):
            await self._send(DISPATCHERS, [Stop(self.state.run, step)])

    # -- the end

    async def _finish(self, command: Finish) -> None:
        """Stop what runs, give it time to write its outcome, then write the one terminal event: the one that follows
        from all that stands before it."""
        decided_at = self._context.now()
        await self._planner.stop()
        about_to_call = any(step.state == "running" for step in self.state.active_steps)
        if self.state.open_calls or about_to_call:
            await self._stop()
            await self._quiesce()
        while not self.state.ended:
            state = self.state
            command = decide_end_again(command, state, decided_at)
            if command.step is not None:
                await self.writer.read_answer(messages.answer_refs(state.steps[command.step]))
            outcomes, held = outcomes_of_lost_calls(state.open_planning_calls)
            events = (*outcomes, *ending(apply_facts(state, outcomes), command))
            try:
                await self.writer.end(state, events, held)
            except Conflict:  # the end sums up all calls, also those whose events were not received yet
                await self.writer.catch_up()

    async def _quiesce(self) -> None:
        until = self._context.monotonic() + QUIESCE_SECONDS
        while self.state.open_calls and (left := until - self._context.monotonic()) > 0:
            for message in await self.inbox.take(left):
                if isinstance(message, CommittedEvents | JournalAdvance):
                    await self._receive([message])

    def _count(self) -> None:
        """Note the end of the turn."""
        state, telemetry = self.state, self._context.telemetry
        if state.ended:
            messages.count_run_end(telemetry, state, self._context.monotonic() - self._began_at)
        elif state.state == "awaiting_approval":
            telemetry.count("baton_approvals_total", state.admitted.tier, "asked")
        else:
            telemetry.count("baton_tool_turns_total", state.admitted.tier)
