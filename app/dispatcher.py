"""The process that takes tickets: any number of them may run beside each other, each with its own slots.

It renews its claims every third of a lease, in the database and on the queue, and drops work whose claim is gone.
Order of shut-down: no more tickets are taken; running steps get a grace period; what is left is interrupted, its
outcome written and its ticket handed back, so that another dispatcher goes on at once. Without a queue it looks into
the outbox itself.
"""

import asyncio
import logging

from app.attempt import Means
from app.dispatch import Execution, Known, Work
from app.errors import BatonError, LeaseLost, QueueUnavailable, RunEnded, StoreUnavailable
from app.stepqueue.protocol import DISPATCHERS, Live, Stop, Ticket
from app.store.protocol import Held

IDLE_WAIT = 1.0


class Dispatcher:
    """Takes tickets and executes their steps, at most `slots` at a time."""

    def __init__(self, means: Means, *, name: str, slots: int, grace: float, known: Known = lambda _run: None) -> None:
        """`name` is this process's; `grace` is how many seconds running steps get after a shut-down began.

        `known` spares it folding the journals of runs that are driven beside it.
        """
        self._known = known
        self._means = means
        self._name = name
        self._slots = slots
        self._grace = grace
        self._works: dict[tuple[str, int], Work] = {}
        self._freed = asyncio.Event()
        self._drained = asyncio.Event()

    async def run(self, stopping: asyncio.Event) -> None:
        """Work until `stopping` is set, then drain."""
        async with self._means.queue.hear(DISPATCHERS, self._hear), asyncio.TaskGroup() as group:
            taking = group.create_task(self._take_until(stopping, group))
            renewing = group.create_task(self._renew_until(self._drained))
            await stopping.wait()
            taking.cancel()
            await asyncio.wait([taking])  # what it has just been given is drained with the rest
            await self._drain()
            self._drained.set()
            renewing.cancel()

    async def _take_until(self, stopping: asyncio.Event, group: asyncio.TaskGroup) -> None:
        """The event ends it, not the cancellation: a client library may lose that to a time-out of its own."""
        while not stopping.is_set():
            for ticket in await self._take():
                self._start(group, ticket)

    def _start(self, group: asyncio.TaskGroup, ticket: Ticket) -> None:
        if (ticket.run, ticket.step) in self._works:
            return
        work = Work(ticket, group.create_task(self._execute(ticket)))
        self._works[ticket.run, ticket.step] = work
        self._means.telemetry.gauge("baton_steps_running", len(self._works))

    async def _take(self) -> list[Ticket]:
        free = self._slots - len(self._works)
        if free <= 0:
            self._freed.clear()
            await self._freed.wait()
            free = self._slots - len(self._works)
        try:
            return await self._means.queue.take(free, IDLE_WAIT)
        except QueueUnavailable:
            return await self._take_from_outbox(free)

    async def _take_from_outbox(self, free: int) -> list[Ticket]:
        """Without a doorbell, look at the door: the outbox is the record."""
        await asyncio.sleep(IDLE_WAIT * self._means.chance())
        try:
            dues = await self._means.store.overdue(self._means.now(), free)
        except StoreUnavailable:
            return []
        return [Ticket(due.run, due.step, due.tier, due.driver, due.seq, due.version) for due in dues]

    def _hear(self, message: Live) -> None:
        if not isinstance(message, Stop):
            return
        for work in list(self._works.values()):
            if work.ticket.run == message.run and message.step in (None, work.ticket.step):
                work.interrupt(stopped=True)

    async def _renew_until(self, drained: asyncio.Event) -> None:
        suspects: set[Held] = set()
        while not drained.is_set():
            await asyncio.sleep(self._means.lease / 3)
            held = {Held(w.ticket.run, w.ticket.step, w.claim): w for w in self._works.values() if w.claim}
            if not held:
                continue
            try:
                kept = await self._means.store.keep(list(held), self._means.now() + self._means.lease)
                await self._means.queue.keep([work.ticket for work in held.values()])
            except (StoreUnavailable, QueueUnavailable) as error:
                self._means.telemetry.log(logging.WARNING, "claims not renewed", error=error.public_code)
                continue
            # A step that was just finished is not kept either; only what is missing twice was taken over.
            missing = {claim for claim in set(held) - kept if held[claim] in self._works.values()}
            for claim in missing & suspects:
                self._means.telemetry.count("baton_lease_lost_total", "step")
                held[claim].interrupt(stopped=True)
            suspects = missing - suspects

    async def _drain(self) -> None:
        running = [work.task for work in self._works.values()]
        if running:
            await asyncio.wait(running, timeout=self._grace)
        for work in list(self._works.values()):
            work.interrupt(stopped=False)

    async def _execute(self, ticket: Ticket) -> None:
        """One ticket, whatever happens: nothing that goes wrong here may end the dispatcher."""
        key = (ticket.run, ticket.step)
        try:
            await Execution(self._means, self._name, ticket, self._works[key], self._known).perform()
            await self._forget(ticket)
        except LeaseLost:
            self._means.telemetry.count("baton_lease_lost_total", "step")
        except (RunEnded, asyncio.CancelledError):
            await self._forget(ticket)
        except Exception as error:
            level = logging.WARNING if isinstance(error, BatonError) else logging.ERROR
            self._means.telemetry.log(level, "a step was left to its next delivery", run=ticket.run, step=ticket.step)
            logging.getLogger("baton").debug("step", exc_info=error)
        finally:
            del self._works[key]
            self._freed.set()
            self._means.telemetry.gauge("baton_steps_running", len(self._works))

    async def _forget(self, ticket: Ticket) -> None:
        try:
            await self._means.queue.done([ticket])
        except QueueUnavailable:
            self._means.telemetry.log(logging.WARNING, "a delivery could not be forgotten", run=ticket.run)
