"""Tickets: how engines are notified of steps that are queued, and of runs that nobody drives."""

import logging
from collections.abc import Iterable

from app.core.records import changed
from app.core.run.identifiers import Trace
from app.core.run.state import RunState
from app.engine.context import EngineContext
from app.errors import QueueUnavailable
from app.stepqueue.protocol import AGAIN, WHOLE_RUN, Ticket
from app.store.protocol import Due, Outbox


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
