"""The task of an engine that writes the signed checkpoints of the transparency log to a place outside of the database.

Whoever may write to the database can replace the log as well, but not what was exported before: `baton audit verify
--checkpoint FOLDER` compares them. Before a checkpoint is written, witnesses are asked to cosign it, and after that an
RFC 3161 authority for a time stamp of the file, if there are any.

Sealing waits for none of them, and the export does not wait for witnesses or stamps that are away. What is missing of
the newest checkpoint is tried again at the next turn, and metrics and the log of the process say so.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256

import httpx
from msgspec import Struct

from app.core.transparency.notes import NoteInvalid, parse_checkpoint, split_note
from app.core.transparency.witnesses import Witness, cosignature_time, proof_from_tiles
from app.engine.context import EngineContext, Leadership
from app.engine.periodic import look_repeatedly
from app.errors import ArchiveUnavailable, ServiceUnavailable
from app.network.log_authorities import ConfirmationError, authority_client, request_cosignature, request_timestamp
from app.store.archive_files import ArchiveFiles

LOOK_SECONDS = 60.0
"""Time between two exports, if there is a newer checkpoint."""
PUT_SECONDS = 30.0
"""Longest time for writing one file and reading it back."""
SIZE_DIGITS = 15
"""Digits of the size in a file's name, so that names are in the order of the log."""
MARK_DIGITS = 16
"""Hexadecimal digits of the hash that tells two checkpoints of the same size apart."""
CLAIM = "log-export"
"""Id of the claim by which one engine at a time exports."""


def file_name(size: int, suffix: str = "txt", mark: str = "") -> str:
    """Return the name of the file with the checkpoint of a log of this size; `tsr` is the suffix of its time stamp, and
    `mark` tells it from another checkpoint of the same size."""
    return f"{size:0{SIZE_DIGITS}d}{mark}.{suffix}"


class Authorities(Struct, frozen=True):
    """The witnesses that confirm a checkpoint, and the URL of a time-stamp authority, if there is one."""

    witnesses: Sequence[Witness] = ()
    timestamps: str = ""


NO_AUTHORITIES = Authorities()


class ExportedCheckpoint(Struct):
    """The newest checkpoint, with the cosignatures that it has so far, and what was written of it."""

    size: int
    note: str
    written: str = ""
    """The text of the file that was written."""
    stamped: str = ""
    """The text for which a time stamp was written."""
    mark: str = ""
    """Part of the names of its files, where there is another checkpoint of this size, which it must not replace."""


class CheckpointExport:
    """Writes the newest checkpoint once a minute, if the log has grown. One engine of the service does so at a time."""

    def __init__(
        self, context: EngineContext, files: ArchiveFiles | None, authorities: Authorities = NO_AUTHORITIES
    ) -> None:
        """`files` is a folder or a bucket; None: nothing is exported."""
        self._context = context
        self._files = files
        self._authorities = authorities
        self._leadership = Leadership(context, CLAIM, 2 * LOOK_SECONDS)
        self._newest = ExportedCheckpoint(0, "")
        self._witnessed_sizes: dict[str, int] = {}
        """The size of the latest checkpoint that each witness has cosigned, by the witness's name."""
        self._failing: set[str] = set()
        """The kinds of work that failed when they were tried last: a witness's name, `timestamps`, or empty for all."""

    async def run(self, stopping: asyncio.Event) -> None:
        """Export again and again, until the process stops."""
        if self._files is not None:
            telemetry = self._context.telemetry
            await look_repeatedly(self.look, stopping, LOOK_SECONDS, telemetry, "The export of checkpoints")

    async def look(self) -> None:
        """Export the newest checkpoint, unless that was done. A failure is counted, and logged once."""
        try:
            if self._files is None or not await self._leadership.acquire():
                return
            note = (await self._context.store.log.state()).checkpoint
            if note is not None:
                await self._export(self._files, note, parse_checkpoint(split_note(note)[0]).size)
            self._failing.discard("")
        except (ServiceUnavailable, NoteInvalid, TimeoutError) as error:
            reason = type(error).__name__
            if isinstance(error, ArchiveUnavailable):
                reason = error.message
            self._context.telemetry.count("baton_log_export_failures_total")
            self._log_first("", f"A checkpoint of the log was not exported; sealing goes on: {reason}")

    async def _export(self, files: ArchiveFiles, note: str, size: int) -> None:
        text, _ = split_note(note)
        if not self._newest.note.startswith(text):
            self._newest = await self._read_exported(files, note, size)
        newest = self._newest
        missing = self._missing_witnesses(newest)
        authority_url = self._authorities.timestamps
        lacks_stamp = bool(authority_url) and newest.stamped != newest.note
        if not missing and newest.note == newest.written and not lacks_stamp:
            return
        async with authority_client() as client:
            requests = [self._request_cosignature(client, witness, newest) for witness in missing]
            newest.note += "".join(await asyncio.gather(*requests))
            if newest.note != newest.written:
                await self._put(files, file_name(newest.size, mark=newest.mark), newest.note.encode())
                newest.written = newest.note
            self._context.telemetry.gauge("baton_log_exported_size", newest.size)
            if authority_url and newest.stamped != newest.written:
                await self._stamp(client, files, authority_url)

    def _missing_witnesses(self, newest: ExportedCheckpoint) -> list[Witness]:
        """Return the witnesses that have not cosigned the checkpoint yet."""
        missing = []
        for witness in self._authorities.witnesses:
            if cosignature_time(newest.note, witness.key) is None:
                missing.append(witness)
        return missing

    async def _read_exported(self, files: ArchiveFiles, note: str, size: int) -> ExportedCheckpoint:
        """Return the checkpoint as another engine has exported it, with its cosignatures, or else as it was signed."""
        async with asyncio.timeout(PUT_SECONDS):
            body = await asyncio.to_thread(files.read, file_name(size))
        if body is None:
            return ExportedCheckpoint(size, note)
        text, _ = split_note(note)
        with suppress(UnicodeDecodeError, NoteInvalid):
            stored = body.decode()
            if stored and split_note(stored)[0] == text:
                self._context.telemetry.gauge("baton_log_exported_size", size)
                return ExportedCheckpoint(size, stored, written=stored)
        digest = sha256(text.encode()).hexdigest()
        return ExportedCheckpoint(size, note, mark=f"-{digest[:MARK_DIGITS]}")

    async def _put(self, files: ArchiveFiles, name: str, body: bytes) -> None:
        async with asyncio.timeout(PUT_SECONDS):
            await asyncio.to_thread(files.put, name, body)

    async def _request_cosignature(
        self, client: httpx.AsyncClient, witness: Witness, newest: ExportedCheckpoint
    ) -> str:
        """Return the line with a witness's cosignature; empty if it gives none now."""

        async def prove(old: int) -> Sequence[bytes]:
            return await proof_from_tiles(old, newest.size, self._context.store.log.tile)

        telemetry, name = self._context.telemetry, witness.name
        old = self._witnessed_sizes.get(name, 0)
        try:
            line = await request_cosignature(client, witness, newest.note, size=newest.size, old=old, prove=prove)
        except (ConfirmationError, ValueError) as error:
            telemetry.count("baton_log_witness_failures_total", name)
            reason = "The tiles of the log are incomplete."
            if isinstance(error, ConfirmationError):
                reason = str(error)
            self._log_first(
                name, f"The witness {name} did not cosign a checkpoint; export goes on without it: {reason}"
            )
            return ""
        self._witnessed_sizes[name] = newest.size
        self._failing.discard(name)
        telemetry.gauge("baton_log_witnessed_size", newest.size, name)
        return line

    async def _stamp(self, client: httpx.AsyncClient, files: ArchiveFiles, url: str) -> None:
        """Write a time stamp beside the newest checkpoint, if the authority gives one now."""
        newest = self._newest
        try:
            token = await request_timestamp(client, url, newest.written.encode())
        except ConfirmationError as error:
            self._context.telemetry.count("baton_log_timestamp_failures_total")
            self._log_first("timestamps", f"A checkpoint of the log has no time stamp yet; export goes on: {error}")
            return
        await self._put(files, file_name(newest.size, "tsr", newest.mark), token)
        newest.stamped = newest.written
        self._failing.discard("timestamps")
        self._context.telemetry.gauge("baton_log_timestamped_size", newest.size)

    def _log_first(self, kind: str, message: str) -> None:
        """Log the first of several failures of a kind."""
        if kind not in self._failing:
            self._context.telemetry.log(logging.WARNING, message)
        self._failing.add(kind)
