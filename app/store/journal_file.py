"""Files of whole journals: `baton audit export` and the archive of pruned runs write them, and the auditor reads them.

    {"baton": "journal", "version": 3, "whole": ..., "at": ...}
                                                         the time at which it was read, in seconds since 1970, and
                                                         true if it has every run; releases up to 0.2 did not say so
    {"catalog": digest, "body": base64}                  every pool that was in force
    {"change": {column: value}}                          every change of a conductor's version; none in version 1
    {"run": {column: value}}                             a run's row, followed by:
    {"event": seq, "kind": ..., "at": ..., "body": ...}  its events in order
    {"content": ref, "body": base64}                     its texts, unless they were erased
    {"ticket": {column: value}}                          its tickets in the outbox
    {"disclosure": {column: value}}                      its rows in the ledger of disclosures; none before version 3
    {"rating": {column: value}}                          its ratings; none before version 3
    {"pruned": {column: value}}                          what is left of every pruned run; none in archives
    {"end": runs}                                        the last line: without it the file was cut off

Runs are pruned and pools change while an export is written. Therefore what is left of pruned runs is read after all
runs, so that a run which is pruned meanwhile is in the file as the one or the other, and pools and changes that are new
by then follow it.

Each line is JSON. Bytes are written as base64. A file may be compressed with gzip; its name ends with `.gz` then.
"""

import os
import zlib
from base64 import b64encode
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import orjson
from msgspec.structs import asdict

from app.core.pool.conductor_versions import Change
from app.errors import ConfigInvalid
from app.store.archive import AccountSums, Administration, Record
from app.store.protocol import PrunedRun

VERSION = 3
BYTES = "base64"
LEVEL = 6
"""Level of gzip: journals shrink to about a sixth."""
GZIP_FORMAT = zlib.MAX_WBITS | 16
"""The `wbits` of zlib for the gzip format: the largest window, and 16 for gzip's header and checksum."""


class Source(Protocol):
    """A source of runs: a database, or a file that is read."""

    @property
    def is_whole(self) -> bool | None:
        """Return True if the source has every run, False if it has some of them, and None if it does not say so."""
        ...

    async def catalogs(self) -> Mapping[str, bytes]:
        """Return every pool that was in force, by its digest."""
        ...

    async def changes(self) -> Sequence[Change] | None:
        """Return the changes of conductors' versions; None if the source does not have them."""
        ...

    async def count_unnamed_texts(self) -> int:
        """Return the number of texts of conversations that are stored although no run has them any more."""
        ...

    async def administration(self) -> Administration | None:
        """Return the keys, the tenants and the log of their changes; None if the source does not have them."""
        ...

    async def hold_changes(self) -> Sequence[Mapping[str, Any]]:
        """Return the entries of the log of changes about legal holds, the oldest first; none if the source has no such
        log."""
        ...

    async def accounts(self) -> Mapping[str, AccountSums] | None:
        """Return the sums over all windows of each account of a budget; None if the source does not have them."""
        ...

    async def orphans(self, limit: int) -> Sequence[tuple[str, bool]]:
        """Return runs that are named though they are not stored, and for each True if it was pruned."""
        ...

    def pruned_runs(self, *, run: str | None = None, since: float | None = None) -> AsyncIterator[PrunedRun]:
        """Yield what is left of every pruned run, or of those that `records` would choose."""
        ...

    def records(self, *, run: str | None = None, since: float | None = None) -> AsyncIterator[Record]:
        """Yield every run, or the one with this id, or those admitted from `since` (seconds since 1970) on."""
        ...


async def write(source: Source, path: Path, *, now: float, run: str | None = None, since: float | None = None) -> int:
    """Write a file that only its owner can read, completely or not at all. Returns the number of runs.

    It is written beside its place under a name that nobody can know before, so that it is a new file of the owner's.

    Raises `ConfigInvalid` if it cannot be written there.
    """
    path = _find_file_to_replace(path)
    part = path.with_name(f"{path.name}.{os.urandom(4).hex()}.part")
    runs = 0
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            catalogs, changes = await source.catalogs(), await source.changes() or ()
            is_whole = run is None and since is None
            file.writelines(_head(now, catalogs, changes, is_whole=is_whole))
            async for record in source.records(run=run, since=since):
                runs += 1
                file.writelines(_lines(record))
            async for pruned_run in source.pruned_runs(run=run, since=since):
                file.write(_line({"pruned": _columns(asdict(pruned_run))}))
            file.writelines(_catalog_lines(await source.catalogs(), catalogs.keys()))
            file.writelines(_change_lines(await source.changes() or (), changes))
            file.write(_line({"end": runs}))
        part.replace(path)
    except OSError as error:
        raise ConfigInvalid([f"{path}: cannot be written: {error.strerror or type(error).__name__}"]) from None
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
    return runs


def _find_file_to_replace(path: Path) -> Path:
    """Return the file that a name stands for, so that a link to it stays. Raises `ConfigInvalid` for a device."""
    file = path.resolve()
    if file.exists() and not file.is_file():
        raise ConfigInvalid([f"{path}: cannot be written: it is no file"])
    return file


class CompressedJournals:
    """A compressed file that is made in memory. Its methods use the CPU for long: call them on a thread."""

    def __init__(self, now: float, catalogs: Mapping[str, bytes], changes: Sequence[Change]) -> None:
        self._compressor = zlib.compressobj(LEVEL, wbits=GZIP_FORMAT)
        self._written = bytearray()
        self._write(_head(now, catalogs, changes, is_whole=False))
        self.runs = 0

    @property
    def size(self) -> int:
        """Return the bytes that were compressed so far."""
        return len(self._written)

    def add(self, records: Sequence[Record]) -> None:
        """Add runs."""
        for record in records:
            self._write(_lines(record))
        self.runs += len(records)

    def finish(self) -> bytes:
        """End the file and return it."""
        self._write([_line({"end": self.runs})])
        return bytes(self._written + self._compressor.flush())

    def _write(self, lines: Iterable[bytes]) -> None:
        self._written += self._compressor.compress(b"".join(lines))


def _head(now: float, catalogs: Mapping[str, bytes], changes: Sequence[Change], *, is_whole: bool) -> Iterator[bytes]:
    yield _line({"baton": "journal", "version": VERSION, "whole": is_whole, "at": now})
    yield from _catalog_lines(catalogs, ())
    yield from _change_lines(changes, ())


def _catalog_lines(catalogs: Mapping[str, bytes], written: Collection[str]) -> Iterator[bytes]:
    """Yield the lines of pools but for those whose digests are written already."""
    for digest, body in catalogs.items():
        if digest not in written:
            yield _line({"catalog": digest, "body": b64encode(body).decode()})


def _change_lines(changes: Sequence[Change], written: Collection[Change]) -> Iterator[bytes]:
    """Yield the lines of changes of conductors' versions but for those that are written already."""
    for change in changes:
        if change not in written:
            yield _line({"change": asdict(change)})


def _lines(record: Record) -> Iterator[bytes]:
    yield _line({"run": _columns(record.row)})
    for event in record.events:
        yield _line({"event": event.seq, "kind": event.kind, "at": event.at, "body": _body(event.body)})
    for ref, body in record.contents.items():
        yield _line({"content": ref, "body": b64encode(body).decode()})
    for ticket in record.tickets:
        yield _line({"ticket": _columns(ticket)})
    for row in record.disclosures or ():
        yield _line({"disclosure": _columns(row)})
    for row in record.ratings:
        yield _line({"rating": _columns(row)})


def _line(value: Mapping[str, Any]) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE)


def _columns(row: Mapping[str, Any]) -> dict[str, Any]:
    columns = dict(row)
    for name, value in row.items():
        if isinstance(value, bytes):
            columns[name] = {BYTES: b64encode(value).decode()}
    return columns


def _body(body: bytes) -> Any:
    """Return an event's body as JSON, or its bytes if its JSON would not be read back as the same bytes."""
    try:
        same = orjson.dumps(orjson.loads(body)) == body
    except orjson.JSONDecodeError:
        same = False
    if same:
        return orjson.Fragment(body)
    return {BYTES: b64encode(body).decode()}
