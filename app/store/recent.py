"""Journals that this process wrote itself, kept for a while so that a live run is read back without SQL.

A prefix of a journal never changes, so what is kept can be incomplete but not wrong. The bounds are on runs and on
bytes; the run that was longest not asked for goes first.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.core.journal import TERMINAL, Event
from app.store.bodies import Reader
from app.store.desk import Packed
from app.store.protocol import Appended, Journal

RUNS = 8192
BYTES = 64 * 2**20
EVENT_BYTES = 700
"""What an event costs beside its body, roughly: the record and the decoded dictionary."""


@dataclass(slots=True)
class _Kept:
    salt: bytes
    events: list[Event] = field(default_factory=list)
    contents: dict[str, bytes] = field(default_factory=dict)
    records: dict[tuple[str, Reader], Any] = field(default_factory=dict)
    """What contents were read as, by ref and reader; each counts as much as its body."""
    size: int = 0


class RecentJournals:
    """A bounded memory of prefixes, from the first event on, and of contents."""

    def __init__(self, runs: int = RUNS, size: int = BYTES) -> None:
        self._runs: OrderedDict[str, _Kept] = OrderedDict()
        self._most_runs = runs
        self._most_bytes = size
        self._bytes = 0

    def wrote(self, packed: Packed, appended: Appended) -> None:
        """Take note of a committed entry. A run that ended is forgotten; one with a gap keeps its prefix."""
        entry = packed.entry
        if entry.new is not None:
            self._runs[entry.run] = _Kept(entry.new.salt)
        kept = self._runs.get(entry.run)
        if kept is None:
            return
        if any(event.kind in TERMINAL for event in appended.events):
            self.forget(entry.run)
            return
        kept.contents.update(entry.contents)
        self._grow(entry.run, kept, packed.size)
        self.extend(entry.run, appended.events)

    def extend(self, run: str, events: Sequence[Event]) -> None:
        """Append events if they follow on what is kept; others are of no use here."""
        kept = self._runs.get(run)
        if kept is None or not events or events[0].seq != len(kept.events) + 1:
            return
        kept.events.extend(events)
        self._grow(run, kept, EVENT_BYTES * len(events))

    def journal(self, run: str, after: int = 0) -> tuple[Journal, int]:
        """What is kept of a run beyond `after`, and up to which seq that goes; (empty, 0) if nothing is."""
        kept = self._runs.get(run)
        if kept is None:
            return Journal(b"", ()), 0
        self._runs.move_to_end(run)
        return Journal(kept.salt, tuple(kept.events[after:])), len(kept.events)

    def contents(self, run: str, refs: Sequence[str]) -> dict[str, bytes]:
        """Those bodies that are kept."""
        kept = self._runs.get(run)
        return {ref: kept.contents[ref] for ref in refs if ref in kept.contents} if kept else {}

    def records(self, run: str, wanted: Iterable[tuple[str, Reader]]) -> dict[tuple[str, Reader], Any]:
        """What is read of those bodies that are kept; each is read once."""
        found: dict[tuple[str, Reader], Any] = {}
        if (kept := self._runs.get(run)) is None:
            return found
        for one in wanted:
            ref, read = one
            if one not in kept.records and ref in kept.contents:
                kept.records[one] = read(kept.contents[ref])
                self._grow(run, kept, len(kept.contents[ref]))
            if one in kept.records:
                found[one] = kept.records[one]
        return found

    def forget(self, run: str) -> None:
        """Let go of a run."""
        kept = self._runs.pop(run, None)
        self._bytes -= kept.size if kept else 0

    def _grow(self, run: str, kept: _Kept, size: int) -> None:
        kept.size += size
        self._bytes += size
        self._runs.move_to_end(run)
        while self._runs and (self._bytes > self._most_bytes or len(self._runs) > self._most_runs):
            self.forget(next(iter(self._runs)))
