"""A ticket that a dispatcher is working on: its claim, the receivers of its results, and its interruption."""

import asyncio
from dataclasses import dataclass

from app.engine.steps.delta_relay import Relay
from app.stepqueue.protocol import Ticket


@dataclass(slots=True)
class Work:
    """A ticket that this process is working on."""

    ticket: Ticket
    task: asyncio.Task[None] | None = None
    claim: int = 0
    interrupted: bool = False
    stopped: bool = False
    """The run's driver asked for the end, as opposed to this process shutting down."""
    interruptible: bool = False
    """It waits for a worker. It is never interrupted while it writes to the journal."""
    engine: str = ""
    """The address of the run's new engine, if it has changed since the ticket was written."""
    listening: tuple[str, ...] = ()
    """Further gateways that asked for the answer, of a run that is driven elsewhere."""
    relay: Relay | None = None
    """The answer on its way to the followers, while it streams."""

    def interrupt(self, *, stopped: bool) -> None:
        """End the wait for the worker, now or as soon as there is one; its outcome is written all the same."""
        self.interrupted = True
        self.stopped = self.stopped or stopped
        if self.interruptible and self.task is not None:
            self.interruptible = False
            self.task.cancel()

    def waits(self) -> None:
        """From here on it may be interrupted; raises `CancelledError` if it was to be already."""
        if self.interrupted:
            raise asyncio.CancelledError
        self.interruptible = True
