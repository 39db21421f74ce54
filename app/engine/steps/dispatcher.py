"""The dispatcher of an engine takes tickets; any number of engines may run at the same time, each with its own slots.

It renews its claims every third of a lease, in the database and on the queue, and drops work whose claim is gone.
Order of shut-down: no more tickets are taken; running steps, and plans that are being made in this process, get a grace
period; what is left is interrupted, its outcome written and its ticket handed back, so that another dispatcher goes on
at once.

The queue may lose tickets, so a dispatcher with free slots also polls the outbox: about once a second, and several
times a second while the queue is known to be unavailable. A ticket that one dispatcher finds there is left alone by the
others.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

from msgspec.structs import replace

from app.core.run.state import RunState
from app.engine.calls.attempt import Attempt
from app.engine.commit.colocation import LocalDrivers, PreparedStep
from app.engine.commit.run_writer import ticket_of_row
from app.engine.context import EngineContext
from app.engine.periodic import wait_for_event
from app.engine.renewal import renew_regularly
from app.engine.steps.claimed_step import ClaimedStep, PendingOutcomes, Relay
from app.engine.steps.execution import Execution
from app.errors import BatonError, LeaseLost, NotFound, QueueUnavailable, RunEnded, StoreUnavailable
from app.stepqueue.protocol import AGAIN, DISPATCHERS, WHOLE_RUN, EngineChange, ListenRequest, Live, Stop, Ticket
from app.store.protocol import Outbox, TicketClaim

CLAIMS_NOT_RENEWED = "The claims of steps could not be renewed; this is tried again."
IDLE_WAIT_SECONDS = 1.0
"""Seconds that the queue waits for a ticket before it answers that there is none."""
POLL_SECONDS = 0.2
"""Seconds between two polls of the outbox while the queue is unavailable, on average."""
PLAN_LOOK_SECONDS = 0.05
"""Seconds between two polls, during the shut-down, for plans that are still being made."""
MISSED_TICKET_SECONDS = 0.5
"""Seconds after which a ticket that nobody has taken counts as lost, for a dispatcher that has nothing to do."""


class Dispatcher:
    """Takes tickets and executes their steps, at most `slots` at a time."""

    def __init__(
        self,
        context: EngineContext,
        drivers: LocalDrivers,
        *,
        name: str,
        slots: int,
        grace: float,
    ) -> None:
        """`drivers` are those of this process, and `name` is its name; `grace` is how many seconds running steps get
        after a shut-down began."""
        self._context = context
        self._drivers = drivers
        self._name = name
        self._slots = slots
        self._grace = grace
        self._claimed: dict[tuple[str, int], ClaimedStep] = {}
        self._prepared = 0
        """The number of steps that are prepared and wait for the entry that queues them; each has a slot."""
        self._group: asyncio.TaskGroup | None = None
        """The group of the tasks, while steps are taken."""
        self._interrupting = False
        """True once the grace period is over, and running steps are interrupted."""
        self._ended = False
        self._slot_freed = asyncio.Event()
        self._outcomes = PendingOutcomes(
            context.store, context.telemetry, monotonic=context.monotonic, freed=self._slot_freed.set
        )
        self._drained = asyncio.Event()
        context.telemetry.watch("baton_steps_running", self.__len__)

    def __len__(self) -> int:
        """Steps that are being worked on."""
        return len(self._claimed)

    async def run(self, stopping: asyncio.Event) -> None:
        """Work until `stopping` is set, then drain."""
        async with self._context.queue.subscribe(DISPATCHERS, self._receive), asyncio.TaskGroup() as group:
            self._group = group
            tickets_task = group.create_task(self._take_until(stopping, group))
            renewal = renew_regularly(
                self._context, self._renew, self._lose, is_over=self._drained.is_set, failed=CLAIMS_NOT_RENEWED
            )
            renewal_task = group.create_task(renewal)
            outcomes_task = group.create_task(self._outcomes.keep())
            await stopping.wait()
            self._group = None
            tickets_task.cancel()
            await asyncio.wait([tickets_task])  # tickets that it has just taken are drained with the rest
            await self._drain()
            self._drained.set()
            renewal_task.cancel()
            outcomes_task.cancel()
            self._ended = True

    async def _take_until(self, stopping: asyncio.Event, group: asyncio.TaskGroup) -> None:
        """Take tickets until the event is set; a cancellation is not relied upon, because a client library may swallow
        it."""
        while not stopping.is_set():
            for ticket in await self._take():
                if ticket.step == WHOLE_RUN:
                    group.create_task(self._drive(ticket))
                elif (ticket.run, ticket.step) not in self._claimed:
                    work = ClaimedStep(ticket)
                    self._start(group, work, self._execution(work))
            await asyncio.sleep(0)  # the steps that were taken begin before the next read

    async def _drive(self, ticket: Ticket) -> None:
        """Let this process drive the run of a ticket."""
        if await self._drivers.take(ticket.run):
            await self._forget(ticket)

    @property
    def slots(self) -> int:
        """Return the number of steps that this engine carries out at a time."""
        return self._slots

    @property
    def free_slots(self) -> int:
        """Return the number of steps that can be begun now."""
        if self._group is None:
            return 0
        return self._free() - self._drivers.runs_being_taken

    def _execution(self, work: ClaimedStep) -> Execution:
        return Execution(
            self._context,
            self._name,
            work,
            local=self._drivers.driver_of,
            outcomes=self._outcomes,
            has_last_delivery=self._has_last_delivery,
        )

    def _has_last_delivery(self) -> bool:
        return any(work.is_last_delivery for work in self._claimed.values())

    def _start(self, group: asyncio.TaskGroup, work: ClaimedStep, execution: Execution) -> None:
        self._claimed[work.ticket.run, work.ticket.step] = work
        work.task = group.create_task(self._execute(work, execution))

    async def _take(self) -> list[Ticket]:
        """Take tickets from the queue, or from the outbox if the queue has none; waits for a free slot, and at most
        `IDLE_WAIT_SECONDS` for a ticket."""
        while (free := self._free() - self._drivers.runs_being_taken) <= 0:
            self._slot_freed.clear()
            await self._slot_freed.wait()
        queue, pause = self._context.queue, POLL_SECONDS * (0.5 + self._context.random())
        if not self._context.clock_is_set():
            await asyncio.sleep(pause)
            return []
        places = self._drivers.free_places
        most, wait = free, pause
        if places > 0:
            most = min(free, places)
        if places > 0 and queue.healthy:  # else it looks again soon, because a place may have become free
            wait = IDLE_WAIT_SECONDS
        try:
            tickets = await queue.take(most, wait, runs=places > 0)
            if tickets:
                return tickets
        except QueueUnavailable:
            await asyncio.sleep(pause)
        return await self._take_from_outbox(free, MISSED_TICKET_SECONDS if queue.healthy else POLL_SECONDS)

    def _free(self) -> int:
        """Slots that have no step; those whose outcome waits for the database need none."""
        if self._outcomes.full:
            return 0
        return self._slots - len(self._claimed) - self._prepared + len(self._outcomes)

    async def _take_from_outbox(self, free: int, missed: float) -> list[Ticket]:
        try:
            dues = await self._context.store.announce_overdue_tickets(self._context.now(), free, missed)
        except StoreUnavailable:
            return []
        if dues:
            self._context.telemetry.count("baton_swept_total", "outbox", by=len(dues))
        return [ticket_of_row(due) for due in dues]

    def _receive(self, message: Live) -> None:
        """Take a message to all dispatchers about the steps of a run."""
        if isinstance(message, Stop):
            self.stop(message.run, message.step)
        elif isinstance(message, EngineChange):
            for work in self._steps_of_run(message.run):
                work.engine = message.address
        elif isinstance(message, ListenRequest):
            self.listen(message)

    def _steps_of_run(self, run: str) -> list[ClaimedStep]:
        return [work for work in self._claimed.values() if work.ticket.run == run]

    # -- for the drivers of this process: see commit/colocation.py

    def stop(self, run: str, step: int | None) -> bool:
        """Interrupt steps of a run; False if others may execute some of them."""
        claimed = [work for work in self._steps_of_run(run) if step in (None, work.ticket.step)]
        for work in claimed:
            work.interrupt(stopped=True)
        return step is not None and bool(claimed)

    def slot_freed(self) -> None:
        """Note that a run was taken, so that the slot that was kept for it is free."""
        self._slot_freed.set()

    def listen(self, message: ListenRequest) -> bool:
        """Send a gateway what it lacks of a run's answer; False if others may execute the answering step."""
        claimed = self._steps_of_run(message.run)
        for work in claimed:
            if message.address not in work.listening:
                work.listening = (*work.listening, message.address)
            if work.relay is not None and self._group is not None:
                self._group.create_task(self._send_lacking(message, work.relay))
        return any(work.relay is not None for work in claimed)

    async def _send_lacking(self, listener: ListenRequest, relay: Relay) -> None:
        """Send what has been sent of an answer by now, and not by the time when somebody began to listen: more of it
        may have been sent in between, and does not go on from what is known there."""
        part = relay.missing_part(listener)
        if part is not None:
            with suppress(QueueUnavailable):
                await self._context.queue.publish(listener.address, [part])

    async def _renew(self) -> set[TicketClaim]:
        """Prolong every claim; returns those that are missing."""
        claims = {TicketClaim(run, step, work.claim) for (run, step), work in self._claimed.items() if work.claim}
        if not claims:
            return set()
        tickets = [work.ticket for work in self._claimed.values() if work.claim and work.ticket.receipt]
        # First the queue, so that it delivers them to nobody else meanwhile; but a queue that hangs must cost no claim.
        with suppress(QueueUnavailable, TimeoutError):
            async with asyncio.timeout(self._context.lease / 6):
                await self._context.queue.keep(tickets)
        return claims - await self._context.store.renew_claims(list(claims), self._context.now() + self._context.lease)

    def _lose(self, claim: TicketClaim) -> None:
        """Stop the work on a step that another engine has taken over."""
        work = self._claimed.get((claim.run, claim.step))
        if work is not None and work.claim == claim.claim:
            self._context.telemetry.count("baton_lease_lost_total", "step")
            work.interrupt(stopped=True)

    async def _drain(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._grace):
                while self._claimed or self._prepared or self._drivers.plans_in_progress:
                    self._slot_freed.clear()
                    await wait_for_event(self._slot_freed, PLAN_LOOK_SECONDS)
        self._interrupting = True
        for work in list(self._claimed.values()):
            work.interrupt(stopped=False)
        self._outcomes.close()

    async def _execute(self, work: ClaimedStep, execution: Execution) -> None:
        """Execute one ticket; no error of it may end the dispatcher."""
        ticket = work.ticket
        try:
            await execution.perform()
            await self._forget(ticket)
        except LeaseLost:
            self._context.telemetry.count("baton_lease_lost_total", "step")
        except (RunEnded, NotFound, asyncio.CancelledError):  # nothing of the step is left to do
            await self._forget(ticket)
        except Exception as error:
            level = logging.WARNING if isinstance(error, BatonError) else logging.ERROR
            self._context.telemetry.log(
                level,
                "A step could not be executed; it is left to the next delivery of its ticket.",
                error,
                run=ticket.run,
                step=ticket.step,
            )
        finally:
            if self._claimed.get((ticket.run, ticket.step)) is work:  # else it was begun anew, for the next turn
                del self._claimed[ticket.run, ticket.step]
            self._slot_freed.set()

    async def _forget(self, ticket: Ticket) -> None:
        try:
            if ticket.receipt:
                await self._context.queue.done([ticket])
        except QueueUnavailable:
            self._context.telemetry.log(
                logging.WARNING,
                "The step queue is unavailable; the ticket of a finished step is delivered again and ignored.",
                run=ticket.run,
            )

    async def prepare(
        self, state: RunState, salt: bytes, contents: Mapping[str, bytes], rows: Sequence[Outbox]
    ) -> list[PreparedStep]:
        """Compose the first calls of these steps, as far as there are slots, before their entry is committed."""
        steps: list[PreparedStep] = []
        try:
            for row in rows:
                if self._group is None or self._free() <= 0:
                    break
                step = await self._prepare(self._group, state, salt, contents, row)
                if step is not None:
                    steps.append(step)
        except BaseException:
            for step in steps:
                step.abandon()
            raise
        return steps

    async def _prepare(
        self, group: asyncio.TaskGroup, state: RunState, salt: bytes, contents: Mapping[str, bytes], row: Outbox
    ) -> PreparedStep | None:
        work = ClaimedStep(Ticket(state.run, row.step, row.tier, row.driver, state.seq, AGAIN))
        execution, attempt = self._execution(work), None
        self._prepared += 1
        try:
            attempt = await execution.prepare(state, salt, contents)
        except Exception:  # the engine that takes the ticket meets the error again, and logs it
            return None
        finally:
            if attempt is None:
                self._free_prepared_slot()
        if attempt is None:
            return None
        return PreparedStep(
            row=replace(row, holder=self._name, until=self._context.now() + self._context.lease),
            intent=attempt.build_intent(),
            reserved=attempt.hold,
            start=partial(self._start_prepared, group, work, execution, attempt),
            abandon=partial(self._abandon_prepared, attempt),
        )

    def _start_prepared(
        self, group: asyncio.TaskGroup, work: ClaimedStep, execution: Execution, attempt: Attempt, claim: int
    ) -> None:
        if self._ended:  # its claim lapses, and the engine that takes it then gives the call the outcome `unknown`
            self._abandon_prepared(attempt)
            return
        self._prepared -= 1
        work.claim = claim
        self._start(group, work, execution)
        if self._interrupting:
            work.interrupt(stopped=False)

    def _abandon_prepared(self, attempt: Attempt) -> None:
        self._free_prepared_slot()
        attempt.abandon()

    def _free_prepared_slot(self) -> None:
        """Free the slot of a step that does not start, and wake those who wait for a slot."""
        self._prepared -= 1
        self._slot_freed.set()
