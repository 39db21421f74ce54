"""A memory of the states in which runs began to wait for their callers, for those who take part in their next turns.

A prefix of a journal never changes, so what is kept can be behind but not wrong.
"""

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")

BYTES = 16 * 2**20
EVENT_BYTES = 250
"""The size that an event leaves in a run's state, roughly, in bytes."""


class WaitingRuns(Generic[T]):
    """A bounded memory by run; the one that waits longest goes first."""

    def __init__(self, size: int = BYTES) -> None:
        """`size` is what all of it may take, in bytes."""
        self._most = size
        self._bytes = 0
        self._runs: OrderedDict[str, tuple[T, int]] = OrderedDict()

    def keep(self, run: str, known: T, events: int, text: int = 0) -> None:
        """Take note of a run that waits, after so many events; `text` is in bytes, of what is kept in addition to its
        state."""
        self.take(run)
        size = EVENT_BYTES * events + text
        self._runs[run] = known, size
        self._bytes += size
        while self._bytes > self._most:
            self.take(next(iter(self._runs)))

    def take(self, run: str) -> T | None:
        """Return what is kept of a run, if anything, and forget it."""
        known, size = self._runs.pop(run, (None, 0))
        self._bytes -= size
        return known
