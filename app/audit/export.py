"""The export of a journal: a file of JSON lines with everything that an audit needs.

    {"baton": "journal", "version": 2, "at": ...}        the time at which it was read, in seconds since 1970
    {"catalog": digest, "body": base64}                  every pool that was in force
    {"change": {column: value}}                          every change of a conductor's version; none in version 1
    {"run": {column: value}}                             a run's row, followed by:
    {"event": seq, "kind": ..., "at": ..., "body": ...}  its events in order
    {"content": ref, "body": base64}                     its texts, unless they were erased
    {"ticket": {column: value}}                          its tickets in the outbox
    {"end": runs}                                        the last line: without it the file was cut off

Bytes are written as base64. The file contains callers' texts, but no keys, neither of callers nor of providers.
"""

import os
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from app.audit.check import Records
from app.core.pool.conductor_versions import Change
from app.errors import ConfigInvalid
from app.store.archive import Record, Stored

VERSION = 2
UNCHANGED = 1
"""The previous version, without the changes of conductors' versions; it can still be audited."""
BYTES = "base64"


async def write(source: Records, path: Path, *, now: float, run: str | None = None, since: float | None = None) -> int:
    """Write an export that only its owner can read, completely or not at all. Returns the number of runs.

    Raises `ConfigInvalid` if it cannot be written there.
    """
    part = path.with_name(f"{path.name}.part")
    runs = 0
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            _line(file, {"baton": "journal", "version": VERSION, "at": now})
            for digest, body in (await source.catalogs()).items():
                _line(file, {"catalog": digest, "body": b64encode(body).decode()})
            for change in await source.changes() or ():
                _line(file, {"change": asdict(change)})
            async for record in source.records(run=run, since=since):
                runs += 1
                _write(file, record)
            _line(file, {"end": runs})
        part.replace(path)
    except OSError as error:
        raise ConfigInvalid([f"{path}: cannot be written: {error.strerror or type(error).__name__}"]) from None
    return runs


def _write(file: BinaryIO, record: Record) -> None:
    _line(file, {"run": _columns(record.row)})
    for event in record.events:
        _line(file, {"event": event.seq, "kind": event.kind, "at": event.at, "body": _body(event.body)})
    for ref, body in record.contents.items():
        _line(file, {"content": ref, "body": b64encode(body).decode()})
    for ticket in record.tickets:
        _line(file, {"ticket": _columns(ticket)})


def _line(file: BinaryIO, value: Mapping[str, Any]) -> None:
    file.write(orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE))


def _columns(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: {BYTES: b64encode(one).decode()} if isinstance(one, bytes) else one for name, one in row.items()}


def _body(body: bytes) -> Any:
    """Return an event's body as JSON, or its bytes if it is not JSON."""
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError:
        return {BYTES: b64encode(body).decode()}
    return orjson.Fragment(body)


@dataclass(slots=True)
class _Gathered:
    """The part of a run that was read so far."""

    row: dict[str, Any]
    events: list[Stored] = field(default_factory=list)
    contents: dict[str, bytes] = field(default_factory=dict)
    tickets: list[Mapping[str, Any]] = field(default_factory=list)

    def add(self, line: Mapping[str, Any]) -> None:
        """Add one line. Raises `KeyError`, `TypeError` or `ValueError` for a line that is not part of a run."""
        if "event" in line:
            body = line["body"]
            coded = isinstance(body, dict) and body.keys() == {BYTES}
            raw = _unpacked(body[BYTES]) if coded else orjson.dumps(body)
            self.events.append(Stored(int(line["event"]), str(line["kind"]), float(line["at"]), raw))
        elif "content" in line:
            self.contents[line["content"]] = _unpacked(line["body"])
        else:
            self.tickets.append(_decoded(line["ticket"]))

    def record(self) -> Record:
        """Return the run."""
        return Record(self.row, tuple(self.events), self.contents, tuple(self.tickets))


def _unpacked(text: str) -> bytes:
    """Decode base64. Raises `ValueError` or `TypeError` if it is not valid."""
    return b64decode(text, validate=True)


def _decoded(columns: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _unpacked(one[BYTES]) if isinstance(one, dict) else one for name, one in columns.items()}


class Export:
    """A file to audit. Every method raises `ConfigInvalid` if the file is not an export, or is cut off."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def at(self) -> float:
        """The time at which the journal was read, in seconds since 1970."""
        return float(self._head()["at"])

    def _head(self) -> dict[str, Any]:
        number, head = next(self._lines(), (1, {}))
        known = head.get("baton") == "journal" and head.get("version") in (UNCHANGED, VERSION)
        if not known or not isinstance(head.get("at"), float):
            raise self._fault(number, "is no export of this version's; write one with `baton audit export`")
        return head

    async def catalogs(self) -> Mapping[str, bytes]:
        """Implements `check.Records`."""
        found: dict[str, bytes] = {}
        for number, line in self._preamble("catalog"):
            found[line["catalog"]] = self._bytes(number, line)
        return found

    async def changes(self) -> Sequence[Change] | None:
        """Implements `check.Records`."""
        if self._head()["version"] == UNCHANGED:
            return None
        found: list[Change] = []
        for number, line in self._preamble("change"):
            try:
                found.append(Change(**line["change"]))
            except TypeError:
                raise self._fault(number, "is no line of an export") from None
        return found

    async def unnamed_texts(self) -> int:
        """Implements `check.Records`: an export has every content as a whole."""
        return 0

    async def records(self, *, run: str | None = None, since: float | None = None) -> AsyncIterator[Record]:
        """Implements `check.Records`."""
        for record in self._records():
            wanted = run is None or record.row["id"] == run
            if wanted and (since is None or record.row["created_at"] >= since):
                yield record

    def _records(self) -> Iterator[Record]:
        gathered: _Gathered | None = None
        ended = number = 0
        for number, line in self._lines():
            try:
                if "run" in line:
                    if gathered is not None:
                        yield gathered.record()
                    gathered = _Gathered(_decoded(line["run"]))
                elif "end" in line:
                    ended = number
                elif gathered is not None:
                    gathered.add(line)
            except (KeyError, TypeError, ValueError):
                raise self._fault(number, "is no line of an export") from None
        if not ended or ended != number:
            raise self._fault(number, "is where the file breaks off; export it again")
        if gathered is not None:
            yield gathered.record()

    def _preamble(self, kind: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the lines of a kind before the first run."""
        head = takewhile(lambda one: "run" not in one[1], self._lines())
        return (one for one in head if kind in one[1])

    def _lines(self) -> Iterator[tuple[int, dict[str, Any]]]:
        try:
            with self._path.open("rb") as file:
                for number, text in enumerate(file, 1):
                    line = orjson.loads(text)
                    if not isinstance(line, dict):
                        raise self._fault(number, "is no line of an export")
                    yield number, line
        except OSError as error:
            raise self._fault(1, f"cannot be read: {error.strerror or type(error).__name__}") from None
        except orjson.JSONDecodeError:
            raise self._fault(number, "is no JSON; the file is damaged") from None

    def _bytes(self, number: int, line: Mapping[str, Any]) -> bytes:
        try:
            return _unpacked(line["body"])
        except (KeyError, TypeError, ValueError):
            raise self._fault(number, "is no line of an export") from None

    def _fault(self, number: int, what: str) -> ConfigInvalid:
        return ConfigInvalid([f"{self._path}:{number}: {what}"])
