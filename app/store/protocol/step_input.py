"""Batched read of all that a step needs, in one round trip."""

from collections.abc import Mapping
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
    """A read that saves a step its round trips. The other verbs could do it as well."""

    async def step_input(self, run: str, after: int = 0) -> StepInput:
        """Return all that a step of a run begins from; with `after`, the later events and the contents that they name.

        Raises `NotFound` and `StoreUnavailable`.
        """
        ...
