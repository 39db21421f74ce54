"""Batched read of all that a step needs, in one round trip; and the rows that processes share to save round trips."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from app.core.records import record
from app.core.run.events import Event

BRIEF = 16_384
"""Bytes of the largest content that is read together with a journal, and buffered for the run's next steps."""


@record(frozen=True, slots=True)
class StepInput:
    """A run's journal, and those of its contents that are small. Other contents have to be read apart."""

    salt: bytes
    events: tuple[Event, ...]
    contents: Mapping[str, bytes]
    epoch: int
    """Epoch of the run when it was read."""
    driver: str
    """Address of the engine that drives the run, or that drove it until its lease lapsed; empty if there is none."""


class StepInputs(Protocol):
    """Reads that save a step its round trips. Each could be done by the other verbs as well."""

    async def step_input(self, run: str, after: int = 0) -> StepInput:
        """All that a step of a run begins from; with `after`, the later events and the contents that they name.

        Raises `NotFound` and `StoreUnavailable`.
        """
        ...

    def known_rows(self, run: str) -> Sequence[object]:
        """The run's row and tickets as this process last knew them, as JSON values to be sent to another process.

        Empty if this process does not know them. No I/O.
        """
        ...

    def accept_rows(self, run: str, rows: Sequence[object]) -> None:
        """Take over what another process sent from `known_rows`; an empty sequence forgets what is known of the run.

        The rows may be old: the write that uses them compares their revision with the database. Malformed rows are
        ignored. No I/O.
        """
        ...
