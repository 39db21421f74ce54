"""Journals the request to cancel a run: one event, which any process may write.

The journal is what counts. A driver that is not notified sees the event when it next renews its lease. Where there is
no driver, because it was lost or because the run waits for its caller, whoever takes the run over sees it first. A run
that has ended stays as it is.
"""

from contextlib import suppress

from app.core.run.events import Kind, RunCancelAsked
from app.errors import EventMalformed, QueueUnavailable, RunEnded
from app.stepqueue.protocol import CommittedEvents, StepQueue
from app.store.protocol import Entry, RunRow, TenantStore


async def ask(store: TenantStore, queue: StepQueue | None, row: RunRow, by: str, now: float) -> None:
    """Journal the request in the name of `by`, unless one is there already or the run has ended.

    The run's driver is notified through the `queue`, if there is one. Raises `StoreUnavailable`.
    """
    if row.ended_at is not None:
        return
    with suppress(EventMalformed):  # a newer engine may drive the run, and hears of this request like any other
        if any(event.kind is Kind.CANCEL_ASKED for event in (await store.journal(row.id)).events):
            return
    try:
        appended = await store.append(Entry(row.id, now, (RunCancelAsked(by),)))
    except RunEnded:
        return
    if queue is not None and row.driver:
        with suppress(QueueUnavailable):
            await queue.publish(row.driver, [CommittedEvents(row.id, appended.events)])
