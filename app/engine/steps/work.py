"""A ticket that this process is working on, and the basis of the step that it stands for."""

import asyncio
from dataclasses import dataclass

from app.core.records import record
from app.core.run.facts import PassedOver
from app.core.run.state import RunState, StepState
from app.engine.calls.candidates import Candidates
from app.engine.calls.step_request import View
from app.engine.steps.relay import Relay
from app.errors import RunOverBudget
from app.stepqueue.protocol import Ticket


@record(frozen=True, slots=True)
class Course:
    """The basis of a step: the state that it began from, what it may see, and the workers that it may call."""

    state: RunState
    view: View
    candidates: Candidates
    excluded: PassedOver
    """The workers of the run that may not read what it sees, each with the reason."""
    short: RunOverBudget | None = None
    """The refusal to reserve for the latest attempt, if there was one."""

    @property
    def step(self) -> StepState:
        """The step as it was in that state."""
        return self.view.step


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
    is_last_delivery: bool = False
    """The step is given up if this engine stops while it executes it; see `Execution._is_postponed`."""

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
