"""The cache of the journals that this process has written."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from app.core.records import trimmed
from app.core.run.events import TERMINAL, Event, Kind
from app.store.protocol import Appended, Journal, Reader
from app.store.writing.batch import EncodedEntry

MOST_RUNS = 8192
"""Most runs whose journals are cached."""
MOST_BYTES = 64 * 2**20
"""Most bytes of cached journals."""
EVENT_BYTES = 150
"""Approximate memory of an event, apart from its body."""


@dataclass(slots=True)
class _Kept:
    salt: bytes
    events: list[tuple[Kind, float, bytes]] = field(default_factory=list)
    """(kind, time, body) of each event from seq 1 on, without a gap."""
    contents: dict[str, bytes] = field(default_factory=dict)
    records: dict[tuple[str, Reader], Any] = field(default_factory=dict)
    """Values that readers made of contents, by ref and reader. Each counts as many bytes as its content."""
    size: int = 0


class JournalCache:
    """A cache of the journals that this process wrote itself, so that a live run is read back without SQL.

    A prefix of a journal never changes, so a cached one can be incomplete but not wrong. The cache is bounded in runs
    and bytes, and evicts the run that was not used for longest. Bodies are cached as they are stored: most runs are
    never read back, and decoded bodies take four times the memory.
    """

    def __init__(self, runs: int = MOST_RUNS, size: int = MOST_BYTES) -> None:
        self._runs: OrderedDict[str, _Kept] = OrderedDict()
        self._most_runs = runs
        self._most_bytes = size
        self._bytes = 0

    def add_committed(self, encoded: EncodedEntry, appended: Appended) -> None:
        """Cache a committed entry. A run that ended is evicted. An entry that leaves a gap is not cached."""
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
            kept.contents[ref] = trimmed(body)
        self._extend(entry.run, kept, appended.events, encoded.bodies)
        self._grow(entry.run, kept, sum([len(body) for _, body in entry.contents]))

    def extend(self, run: str, events: Sequence[Event]) -> None:
        """Cache events that were read from the database, if they follow the cached ones without a gap."""
        if (kept := self._runs.get(run)) is not None:
            self._extend(run, kept, events, [orjson.dumps(event.body) for event in events])

    def _extend(self, run: str, kept: _Kept, events: Sequence[Event], bodies: Sequence[bytes]) -> None:
        if events and events[0].seq == len(kept.events) + 1:
            kept.events += [(event.kind, event.at, trimmed(body)) for event, body in zip(events, bodies, strict=True)]
            self._grow(run, kept, EVENT_BYTES * len(events) + sum(map(len, bodies)))

    def journal(self, run: str, after: int = 0) -> tuple[Journal, int]:
        """Return the cached events of a run after the seq `after`, and the last cached seq; (empty, 0) if none is
        cached."""
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
        """Return the bodies that are cached, by ref."""
        kept = self._runs.get(run)
        if not kept:
            return {}
        return {ref: kept.contents[ref] for ref in refs if ref in kept.contents}

    def records(self, run: str, wanted: Iterable[tuple[str, Reader]]) -> dict[tuple[str, Reader], Any]:
        """Return the values that readers make of cached bodies. Each reader reads each body once."""
        found: dict[tuple[str, Reader], Any] = {}
        if (kept := self._runs.get(run)) is None:
            return found
        for content in wanted:
            ref, read = content
            if content not in kept.records and ref in kept.contents:
                kept.records[content] = read(kept.contents[ref])
                self._grow(run, kept, len(kept.contents[ref]))
            if content in kept.records:
                found[content] = kept.records[content]
        return found

    def clear(self) -> None:
        """Evict all runs."""
        self._runs.clear()
        self._bytes = 0

    def forget(self, run: str) -> None:
        """Evict a run."""
        kept = self._runs.pop(run, None)
        if kept:
            self._bytes -= kept.size

    def _grow(self, run: str, kept: _Kept, size: int) -> None:
        kept.size += size
        self._bytes += size
        self._runs.move_to_end(run)
        while self._runs and (self._bytes > self._most_bytes or len(self._runs) > self._most_runs):
            self.forget(next(iter(self._runs)))
