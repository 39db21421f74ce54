"""What spares a step its ways to the database; all of it could be asked for piece by piece."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from app.core.records import record
from app.core.run.events import Event

BRIEF = 16_384
"""Bytes of a content that comes along with a journal, and is kept for the run's next steps."""


@record(frozen=True, slots=True)
class StepInput:
    """A run's journal, and along with it what was cheap to bring of its contents. What is not among them has to be
    asked for."""

    salt: bytes
    events: tuple[Event, ...]
    """Those that were asked for."""
    contents: Mapping[str, bytes]
    epoch: int
    """The run's then."""


class StepInputs(Protocol):
    """A part of the store."""

    async def step_input(self, run: str, after: int = 0) -> StepInput:
        """All that a step of a run begins from, in one go where that saves time; after some event, what follows it and
        the contents that this names. `NotFound`."""
        ...

    def known_rows(self, run: str) -> Sequence[object]:
        """What this process takes the run's row and tickets to be, for another process to be told with its events;
        JSON, and empty if it does not know. Asking costs nothing."""
        ...

    def accept_rows(self, run: str, rows: Sequence[object]) -> None:
        """What another process said of them. It may be as wrong as it likes: it only saves asking the database. Nothing
        at all lets this process forget what it knows of the run."""
        ...
