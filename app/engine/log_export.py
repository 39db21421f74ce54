"""The task of an engine that writes the signed checkpoints of the transparency log to a place outside of the database.

Whoever may write to the database can replace the log as well, but not what was exported before: `baton audit verify
--checkpoint FOLDER` compares them. Sealing does not wait for an export. While the place is away, the newest checkpoint
is tried again at the next turn, and a metric and the log of the process say so.
"""

import asyncio
import logging
from contextlib import suppress

from app.core.transparency.notes import NoteInvalid, parse_checkpoint, split_note
from app.engine.context import EngineContext
from app.errors import ArchiveUnavailable, OursError
from app.store.archive_files import ArchiveFiles
from app.store.protocol import Once

TURN_SECONDS = 60.0
"""Time between two exports, if there is a newer checkpoint."""
PUT_SECONDS = 30.0
"""Longest time for writing one checkpoint and reading it back."""
SIZE_DIGITS = 15
"""Digits of the size in a file's name, so that names are in the order of the log."""
EXPORTING = "log-export"
"""Id of the claim by which one engine at a time exports. The claims of requests have hashes as ids."""


def file_name(size: int) -> str:
    """The name of the file with the checkpoint of a log of this size."""
    return f"{size:0{SIZE_DIGITS}d}.txt"


class CheckpointExport:
    """Writes the newest checkpoint once a minute, if the log has grown. One engine of the service does so at a time."""

    def __init__(self, context: EngineContext, files: ArchiveFiles | None) -> None:
        """`files` is a folder or a bucket; None: nothing is exported."""
        self._context = context
        self._files = files
        self._mine = context.name("export").encode()
        self._exported = 0
        self._failing = False

    async def run(self, stopping: asyncio.Event) -> None:
        """Export again and again, until the process stops."""
        while self._files is not None and not stopping.is_set():
            await self.look()
            with suppress(TimeoutError):
                async with asyncio.timeout(TURN_SECONDS):
                    await stopping.wait()

    async def look(self) -> None:
        """Export the newest checkpoint, unless that was done. A failure is counted, and logged once."""
        try:
            if not await self._is_mine():
                return
            note = (await self._context.store.log.state()).checkpoint
            if note is not None:
                await self._export(note, parse_checkpoint(split_note(note)[0]).size)
            self._failing = False
        except (OursError, NoteInvalid, TimeoutError) as error:
            self._report(error)

    async def _is_mine(self) -> bool:
        """Claim the next turns, unless a claim lasts. False if it is another engine's."""
        now = self._context.now()
        claim = Once(EXPORTING, self._mine, now + 2 * TURN_SECONDS)
        return (await self._context.store.claim_request(claim, now)).fingerprint == self._mine

    async def _export(self, note: str, size: int) -> None:
        if size <= self._exported or self._files is None:
            return
        async with asyncio.timeout(PUT_SECONDS):
            await asyncio.to_thread(self._files.put, file_name(size), note.encode())
        self._exported = size
        self._context.telemetry.gauge("baton_log_exported_size", size)

    def _report(self, error: Exception) -> None:
        telemetry = self._context.telemetry
        telemetry.count("baton_log_export_failures_total")
        if not self._failing:
            words = error.message if isinstance(error, ArchiveUnavailable) else type(error).__name__
            telemetry.log(logging.WARNING, f"A checkpoint of the log was not exported; sealing goes on: {words}")
        self._failing = True
