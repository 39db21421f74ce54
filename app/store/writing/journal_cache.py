"""Journals that this process wrote itself, kept for a while so that a live run is read back without SQL.

A prefix of a journal never changes, so what is kept can be incomplete but not wrong. The bounds are on runs and on
bytes; the run that was longest not asked for goes first. Bodies are kept as they are stored: most runs are never asked
for, and decoded they take four times as much.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from app.core.buffers import fitted
from app.core.run.events import TERMINAL, Event, Kind
from app.store.protocol import Appended, Journal, Reader
from app.store.writing.batch import EncodedEntry

RUNS = 8192
BYTES = 64 * 2**20
EVENT_BYTES = 150
"""What an event costs beside its body, roughly."""


@dataclass(slots=True)
class _Kept:
    salt: bytes
    events: list[tuple[Kind, float, bytes]] = field(default_factory=list)
    """The first one has the seq 1, and there are no gaps."""
    contents: dict[str, bytes] = field(default_factory=dict)
    records: dict[tuple[str, Reader], Any] = field(default_factory=dict)
    """What contents were read as, by ref and reader; each counts as much as its body."""
    size: int = 0


class JournalCache:
    """A bounded memory of prefixes, from the first event on, and of contents."""

    def __init__(self, runs: int = RUNS, size: int = BYTES) -> None:
        self._runs: OrderedDict[str, _Kept] = OrderedDict()
        self._most_runs = runs
        self._most_bytes = size
        self._bytes = 0

    def wrote(self, encoded: EncodedEntry, appended: Appended) -> None:
        """Take note of a committed entry. A run that ended is forgotten; one with a gap keeps its prefix."""
        entry = encoded.entry
        if entry.new is not None:
            self._runs[entry.run] = _Kept(entry.new.salt)
        kept = self._runs.get(entry.run)
        if kept is None:
            return
        if any(event.kind in TERMINAL for event in appended.events):
            self.forget(entry.run)
            return
        for ref, body in entry.contents:
            kept.contents[ref] = fitted(body)
        self._extend(entry.run, kept, appended.events, encoded.bodies)
        self._grow(entry.run, kept, sum([len(body) for _, body in entry.contents]))

    def extend(self, run: str, events: Sequence[Event]) -> None:
        """Append events if they follow on what is kept; others are of no use here."""
        if (kept := self._runs.get(run)) is not None:
            self._extend(run, kept, events, [orjson.dumps(event.body) for event in events])

    def _extend(self, run: str, kept: _Kept, events: Sequence[Event], bodies: Sequence[bytes]) -> None:
        if events and events[0].seq == len(kept.events) + 1:
            kept.events += [(event.kind, event.at, fitted(body)) for event, body in zip(events, bodies, strict=True)]
            self._grow(run, kept, EVENT_BYTES * len(events) + sum(map(len, bodies)))

    def journal(self, run: str, after: int = 0) -> tuple[Journal, int]:
        """What is kept of a run beyond `after`, and up to which seq that goes; (empty, 0) if nothing is."""
        kept = self._runs.get(run)
        if kept is None:
            return Journal(b"", ()), 0
        self._runs.move_to_end(run)
        events = [
            Event(run, seq, kind, at, orjson.loads(body))
            for seq, (kind, at, body) in enumerate(kept.events[after:], after + 1)
        ]
        return Journal(kept.salt, tuple(events)), len(kept.events)

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
