"""Reading a file of journals (`app/store/journal_file.py` has its format), as the auditor reads a database."""

import gzip
import zlib
from base64 import b64decode
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from app.core.pool.conductor_versions import Change
from app.errors import ConfigInvalid
from app.store.archive import AccountSums, Administration, Record, StoredEvent
from app.store.protocol import PrunedRun

VERSION = 3
UNCHANGED = 1
"""The first version, without the changes of conductors' versions; it can still be audited."""
WITHOUT_LEDGER = (UNCHANGED, 2)
"""The versions without the ledger of disclosures."""
OUTSIDE_RUNS = frozenset({"catalog", "change", "pruned"})
"""Kinds of lines that belong to no run."""
MOST_LINES = (b'{"event":', b'{"content":')
"""The beginnings of most lines of a file, which are not parsed where other lines are looked for."""
BYTES = "base64"
GZIP = ".gz"
MALFORMED = (AttributeError, KeyError, TypeError, ValueError)
"""The exceptions that are raised where a line lacks a field, or a field is of another type."""


@dataclass(slots=True)
class _PartialRun:
    """The part of a run that was read so far."""

    row: dict[str, Any]
    events: list[StoredEvent] = field(default_factory=list)
    contents: dict[str, bytes] = field(default_factory=dict)
    tickets: list[Mapping[str, Any]] = field(default_factory=list)
    disclosures: list[Mapping[str, Any]] = field(default_factory=list)
    ratings: list[Mapping[str, Any]] = field(default_factory=list)

    def add(self, line: Mapping[str, Any]) -> None:
        """Add one line. Raises one of `MALFORMED` for a line that is not part of a run."""
        if "event" in line:
            body = line["body"]
            coded = isinstance(body, dict) and body.keys() == {BYTES}
            raw = _from_base64(body[BYTES]) if coded else orjson.dumps(body)
            self.events.append(StoredEvent(int(line["event"]), str(line["kind"]), float(line["at"]), raw))
        elif "content" in line:
            self.contents[line["content"]] = _from_base64(line["body"])
        elif "disclosure" in line:
            self.disclosures.append(_decode_columns(line["disclosure"]))
        elif "rating" in line:
            self.ratings.append(_decode_columns(line["rating"]))
        else:
            self.tickets.append(_decode_columns(line["ticket"]))

    def record(self, *, has_ledger: bool) -> Record:
        """Return the run."""
        ledger = tuple(self.disclosures) if has_ledger else None
        tickets, ratings = tuple(self.tickets), tuple(self.ratings)
        return Record(self.row, tuple(self.events), self.contents, tickets, disclosures=ledger, ratings=ratings)


def _is_selected(name: str, created_at: float, run: str | None, since: float | None) -> bool:
    return (run is None or name == run) and (since is None or created_at >= since)


def _from_base64(text: str) -> bytes:
    """Decode base64. Raises `ValueError` or `TypeError` if it is not valid."""
    return b64decode(text, validate=True)


def _decode_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a row, with those that are bytes decoded. Raises one of `MALFORMED`."""
    row: dict[str, Any] = {}
    for name, column in columns.items():
        if isinstance(column, dict):
            row[name] = _from_base64(column[BYTES])
        else:
            row[name] = column
    return row


def _decode_run(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a run, or what is left of a pruned one. Raises one of `MALFORMED`."""
    row = _decode_columns(columns)
    if not isinstance(row["id"], str) or not isinstance(row["created_at"], int | float):
        raise TypeError("a run has an id and the time of its admission")
    return row


def _decode_pruned_run(columns: Mapping[str, Any]) -> PrunedRun:
    """Return what is left of a pruned run. Raises one of `MALFORMED`."""
    pruned_run = PrunedRun(**_decode_run(columns))
    if not isinstance(pruned_run.events, int) or not isinstance(pruned_run.root, bytes):
        raise TypeError("of a pruned run the number of its events is left, and their root")
    if not isinstance(pruned_run.ended_at, int | float):
        raise TypeError("of a pruned run the time of its end is left")
    return pruned_run


def _decode_change(columns: Mapping[str, Any]) -> Change:
    """Return a change of a conductor's version. Raises one of `MALFORMED`."""
    change = Change(**columns)
    texts = (change.id, change.conductor, change.kind, change.version)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a change names itself, its conductor, its kind and its version")
    if not isinstance(change.at, int | float) or not isinstance(change.share, int | float):
        raise TypeError("a change has a time and a share of the runs")
    return change


class Export:
    """A file to audit. Every method raises `ConfigInvalid` if the file is not an export, or is cut off."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def at(self) -> float:
        """Return the time at which the journal was read, in seconds since 1970."""
        return float(self._head()["at"])

    @property
    def is_whole(self) -> bool | None:
        """Implements `journal_file.Source`."""
        stated = self._head().get("whole")
        if isinstance(stated, bool):
            return stated
        return None

    def _head(self) -> dict[str, Any]:
        number, head = next(self._lines(), (1, {}))
        is_export = head.get("baton") == "journal" and head.get("version") in (*WITHOUT_LEDGER, VERSION)
        if not is_export or not isinstance(head.get("at"), float):
            raise self._fault(number, "is no export of this version's; write one with `baton audit export`")
        return head

    async def catalogs(self) -> Mapping[str, bytes]:
        """Implements `journal_file.Source`."""
        snapshots: dict[str, bytes] = {}
        for number, line in self._lines_outside_runs("catalog"):
            try:
                snapshots[line["catalog"]] = _from_base64(line["body"])
            except MALFORMED:
                raise self._fault(number, "is no line of an export") from None
        return snapshots

    async def changes(self) -> Sequence[Change] | None:
        """Implements `journal_file.Source`."""
        if self._head()["version"] == UNCHANGED:
            return None
        changes: list[Change] = []
        for number, line in self._lines_outside_runs("change"):
            try:
                changes.append(_decode_change(line["change"]))
            except MALFORMED:
                raise self._fault(number, "is no line of an export") from None
        return changes

    async def count_unnamed_texts(self) -> int:
        """Implements `journal_file.Source`: an export has every content as a whole."""
        return 0

    async def administration(self) -> Administration | None:
        """Implements `journal_file.Source`: an export has no keys and no log of their changes."""
        return None

    async def hold_changes(self) -> Sequence[Mapping[str, Any]]:
        """Implements `journal_file.Source`: an export has no log of changes."""
        return ()

    async def accounts(self) -> Mapping[str, AccountSums] | None:
        """Implements `journal_file.Source`: an export has no accounts of budgets."""
        return None

    async def orphans(self, limit: int) -> Sequence[tuple[str, bool]]:
        """Implements `journal_file.Source`: in an export everything belongs to a run of it."""
        return ()

    async def pruned_runs(self, *, run: str | None = None, since: float | None = None) -> AsyncIterator[PrunedRun]:
        """Implements `journal_file.Source`."""
        for number, line in self._lines_outside_runs("pruned"):
            try:
                pruned_run = _decode_pruned_run(line["pruned"])
            except MALFORMED:
                raise self._fault(number, "is no line of an export") from None
            if _is_selected(pruned_run.id, pruned_run.created_at, run, since):
                yield pruned_run

    async def records(self, *, run: str | None = None, since: float | None = None) -> AsyncIterator[Record]:
        """Implements `journal_file.Source`."""
        for record in self._records():
            if _is_selected(record.row["id"], record.row["created_at"], run, since):
                yield record

    def _records(self) -> Iterator[Record]:
        gathered: _PartialRun | None = None
        has_ledger = self._head()["version"] not in WITHOUT_LEDGER
        names: set[str] = set()
        ended = number = 0
        for number, line in self._lines():
            try:
                if "run" in line:
                    if gathered is not None:
                        yield gathered.record(has_ledger=has_ledger)
                    gathered = _PartialRun(_decode_run(line["run"]))
                    self._add_name(number, gathered.row["id"], names)
                elif "end" in line:
                    ended = number
                    if line["end"] != len(names):
                        words = f"says {line['end']} runs, but the file has {len(names)}; export it again"
                        raise self._fault(number, words)
                elif gathered is not None and not OUTSIDE_RUNS & line.keys():
                    gathered.add(line)
            except MALFORMED:
                raise self._fault(number, "is no line of an export") from None
        if not ended or ended != number:
            raise self._fault(number, "is where the file breaks off; export it again")
        if gathered is not None:
            yield gathered.record(has_ledger=has_ledger)

    def _add_name(self, number: int, name: str, names: set[str]) -> None:
        """Add the name of a run, which must not be among those of the runs before it."""
        if name in names:
            raise self._fault(number, f"is the run {name} once more; a file has each run once")
        names.add(name)

    def _lines_outside_runs(self, kind: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the lines of a kind that belong to no run: they stand before the first run and behind the last one."""
        for number, line in self._lines(skipped=MOST_LINES):
            if kind in line:
                yield number, line

    def _lines(self, skipped: tuple[bytes, ...] = ()) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield every line with its number, but for those that begin with one of `skipped`."""
        try:
            with gzip.open(self._path) if self._path.suffix == GZIP else self._path.open("rb") as file:
                for number, text in enumerate(file, 1):
                    if text.startswith(skipped):
                        continue
                    line = orjson.loads(text)
                    if not isinstance(line, dict):
                        raise self._fault(number, "is no line of an export")
                    yield number, line
        except (gzip.BadGzipFile, EOFError, zlib.error):
            raise self._fault(1, "is damaged: its compressed part cannot be read to its end") from None
        except OSError as error:
            raise self._fault(1, f"cannot be read: {error.strerror or type(error).__name__}") from None
        except orjson.JSONDecodeError:
            raise self._fault(number, "is no JSON; the file is damaged") from None

    def _fault(self, number: int, what: str) -> ConfigInvalid:
        return ConfigInvalid([f"{self._path}:{number}: {what}"])
