"""The protocols between a run's writer and the dispatcher of the same process.

A step may begin in the very entry that queues it. The dispatcher prepares it: it composes the first call before the
entry is committed, and the entry carries the intent and the ticket as taken. After the commit the step starts, and the
call is made. The end of such a step is committed by the run's writer together with what follows from it. Whatever fails
here falls back to tickets, which any engine may take.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from app.core.pool.catalog import Amount
from app.core.run.events import Event, Fact
from app.core.run.identifiers import Trace
from app.core.run.state import RunState
from app.stepqueue.protocol import ListenRequest
from app.store.protocol import AppendResult, Entry, Outbox


class LocalRun(Protocol):
    """A run that is driven in this very process, as those who execute its steps see it."""

    @property
    def state(self) -> RunState:
        """Return the fold of a prefix of the journal, which is never stale."""
        ...

    @property
    def salt(self) -> bytes:
        """Return the salt of its content addresses."""
        ...

    @property
    def trace(self) -> Trace:
        """Return the span of the run, whose trace its steps continue."""
        ...

    def followers(self) -> Sequence[str]:
        """Return the addresses of the gateways that follow the run."""
        ...

    async def commit_step_end(self, entry: Entry) -> AppendResult:
        """Commit the entry that ends a step together with what follows from it."""
        ...

    async def receive(self, events: tuple[Event, ...]) -> None:
        """Fold what was committed for a step; nothing follows from it."""
        ...


LocalRuns = Callable[[str], LocalRun | None]
"""Finds a run by its id; None if it is driven elsewhere."""


class LocalDrivers(Protocol):
    """The drivers of this process, as its dispatcher uses them."""

    def driver_of(self, run: str) -> LocalRun | None:
        """Return a run by its id; None if it is driven elsewhere."""
        ...

    async def take(self, run: str) -> bool:
        """Take a run, if nobody drives it. False if its ticket must be kept for another engine."""
        ...

    @property
    def free_places(self) -> int:
        """Return how many more runs may be driven here."""
        ...

    @property
    def runs_being_taken(self) -> int:
        """Return the number of runs that are just being taken; each keeps a slot."""
        ...

    @property
    def plans_in_progress(self) -> int:
        """Return the number of plans that are being made here. Another engine would have to make them anew, so a
        shut-down waits for them."""
        ...


class PreparedStep(Struct, frozen=True):
    """A step whose first call is composed, but not made. Exactly one of `start` and `abandon` is called."""

    row: Outbox
    """Its ticket, taken."""
    intent: Fact
    """To be committed in the entry that queues the step."""
    reserved: Amount
    """The amount that the entry reserves for the call."""
    start: Callable[[int], None]
    """Make the call: the entry is committed, with this claim."""
    abandon: Callable[[], None]
    """Make no call: the entry was refused."""


class StepStarter(Protocol):
    """The dispatcher of this process, as those who drive runs use it."""

    @property
    def slots(self) -> int:
        """Return the number of steps that it carries out at a time."""
        ...

    @property
    def free_slots(self) -> int:
        """Return the number of steps that it can begin now, beyond one for each run that is being taken."""
        ...

    def slot_freed(self) -> None:
        """A run was taken, and the slot that was kept for it is free."""
        ...

    async def prepare(
        self, state: RunState, salt: bytes, contents: Mapping[str, bytes], rows: Sequence[Outbox]
    ) -> Sequence[PreparedStep]:
        """Prepare the steps for which there are free slots; the others are left to their tickets.

        `rows` are tickets that are about to be committed, `state` is the run's then, and `contents` has those that are
        committed with them or are at hand. Raises nothing that concerns one step alone.
        """
        ...

    def stop(self, run: str, step: int | None) -> bool:
        """Interrupt the steps of a run, or one of them, that are executed here; False if others may execute some."""
        ...

    def listen(self, message: ListenRequest) -> bool:
        """Send a gateway what it lacks of a run's answer; False if others may execute the answering step."""
        ...
