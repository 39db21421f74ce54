"""A ticket in hand: what its dispatcher has claimed, who hears of it, and how it is interrupted."""

import asyncio
from dataclasses import dataclass

from app.stepqueue.protocol import AGAIN, Ticket
from app.store.protocol import Due


@dataclass(slots=True)
class Work:
    """A ticket that this process is working on."""

    ticket: Ticket
    task: asyncio.Task[None] | None = None
    claim: int = 0
    interrupted: bool = False
    stopped: bool = False
    """Whether the run's driver asked for the end, as opposed to this process shutting down."""
    interruptible: bool = False
    """Whether it waits for a worker. It is never interrupted while it writes to the journal."""
    hearer: str = ""
    """The address of the run's new driver, if it has changed since the ticket was written."""
    behind: bool = False
    """Whether that driver has yet to be told what the worker has said so far."""

    def interrupt(self, *, stopped: bool) -> None:
        """End the wait for the worker, now or as soon as there is one; its outcome is written all the same."""
        self.interrupted = True
        self.stopped = self.stopped or stopped
        if self.interruptible and self.task is not None:
            self.interruptible = False
            self.task.cancel()

    def tell_from_now_on(self, hearer: str) -> None:
        """Another process drives the run."""
        self.hearer, self.behind = hearer, True

    def waits(self) -> None:
        """From here on it may be interrupted; raises `CancelledError` if it was to be already."""
        if self.interrupted:
            raise asyncio.CancelledError
        self.interruptible = True


def rung_again(due: Due) -> Ticket:
    """The ticket for a row that was found by looking."""
    return Ticket(due.run, due.step, due.tier, due.driver, due.seq, AGAIN)
