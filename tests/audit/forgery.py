"""A run that can be tampered with: its row, events, contents and tickets as plain values, and back to a record."""

import hashlib
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import orjson

from app.core.pool.conductor_versions import Change
from app.store.archive import Record, StoredEvent
from tests.audit.scenes import Journal


@dataclass
class Line:
    """An event."""

    seq: int
    kind: str
    at: float
    body: dict[str, Any]


@dataclass
class ForgedRun:
    """One run, open to alteration. `catalogs` is the table of pools that it is checked against, `changes`
    that of conductors' versions."""

    row: dict[str, Any]
    events: list[Line]
    contents: dict[str, bytes]
    tickets: list[dict[str, Any]]
    catalogs: dict[str, bytes] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    disclosures: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, record: Record, journal: Journal) -> "ForgedRun":
        events = [Line(event.seq, event.kind, event.at, orjson.loads(event.body)) for event in record.events]
        tickets = [dict(ticket) for ticket in record.tickets]
        return cls(
            dict(record.row),
            events,
            dict(record.contents),
            tickets,
            dict(journal.catalogs),
            list(journal.changes),
            [dict(row) for row in record.disclosures or ()],
        )

    def record(self) -> Record:
        events = tuple(StoredEvent(line.seq, line.kind, line.at, orjson.dumps(line.body)) for line in self.events)
        return Record(self.row, events, self.contents, tuple(self.tickets), tuple(self.disclosures))

    # -- finding

    def all(self, kind: str, **fields: Any) -> list[Line]:
        """The events of a kind with these values in their bodies."""
        return [event for event in self.events if event.kind == kind and fields.items() <= event.body.items()]

    def first(self, kind: str, **fields: Any) -> dict[str, Any]:
        """The body of the first of them."""
        return self.all(kind, **fields)[0].body

    def last(self, kind: str, **fields: Any) -> dict[str, Any]:
        """The body of the last of them."""
        return self.all(kind, **fields)[-1].body

    @property
    def admitted(self) -> dict[str, Any]:
        """The body of the admission."""
        return self.events[0].body

    @property
    def end(self) -> dict[str, Any]:
        """The body of the last event."""
        return self.events[-1].body

    # -- altering

    def drop(self, line: Line) -> None:
        """Take an event out and close the gap, row included."""
        self.events.remove(line)
        self.renumber()

    def insert(self, place: int, kind: str, body: dict[str, Any]) -> None:
        """Put an event in before the one at `place`, row included."""
        self.events.insert(place, Line(0, kind, self.events[place - 1].at, deepcopy(body)))
        self.renumber()

    def repeat(self, line: Line) -> None:
        """Repeat an event directly after itself."""
        self.insert(self.events.index(line) + 1, line.kind, line.body)

    def move(self, line: Line, before: Line) -> None:
        """Put an event in front of another one."""
        self.events.remove(line)
        self.events.insert(self.events.index(before), line)
        self.renumber()

    def renumber(self) -> None:
        """Number the events as they stand; the row's counter follows."""
        for seq, line in enumerate(self.events, 1):
            line.seq = seq
        self.row["seq"] = len(self.events)

    def rewrite(self, ref: str, text: bytes) -> None:
        """Another text for a ref, as somebody would do who knows the salt: its hash is put in everywhere."""
        new = hashlib.sha256(self.row["salt"] + text).hexdigest()
        del self.contents[ref]
        self.contents[new] = text
        for line in self.events:
            line.body = orjson.loads(orjson.dumps(line.body).replace(ref.encode(), new.encode()))


Tamper = Callable[[ForgedRun], None]


@dataclass(frozen=True)
class Case:
    """A falsification, the rule that must catch it, and the scenes that it can be done to."""

    rule: str
    name: str
    tamper: Tamper
    scenes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.rule}: {self.name}"


def case(rule: str, name: str, scenes: str, tamper: Tamper) -> Case:
    """`scenes` are their names with spaces between."""
    return Case(rule, name, tamper, tuple(scenes.split()))


def put(**fields: Any) -> Callable[[dict[str, Any]], None]:
    """Set fields of a body or of a row."""
    return lambda body: body.update(fields)


def add(name: str, by: int = 1) -> Callable[[dict[str, Any]], None]:
    """Raise a figure in a body or in a row."""
    return lambda body: body.update({name: body[name] + by})


def in_row(change: Callable[[dict[str, Any]], None]) -> Tamper:
    """A change of the run's row."""
    return lambda run: change(run.row)


def in_first(kind: str, change: Callable[[dict[str, Any]], None], **fields: Any) -> Tamper:
    """A change of the first event of a kind that has these values."""
    return lambda run: change(run.first(kind, **fields))


def in_last(kind: str, change: Callable[[dict[str, Any]], None], **fields: Any) -> Tamper:
    """A change of the last event of a kind that has these values."""
    return lambda run: change(run.last(kind, **fields))


def in_limits(**figures: Any) -> Tamper:
    """A change of the limits that the run was admitted with."""
    return lambda run: run.admitted["limits"].update(figures)
