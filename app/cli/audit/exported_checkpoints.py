"""The exported checkpoints of the transparency log: the newest one, and the last ones with cosignature or time stamp.

They are read from the place itself, so that what is shown is what is there.
"""

import asyncio
import re
from dataclasses import dataclass, field

from msgspec import Struct

from app.cli.terminal import moment
from app.core.transparency.notes import NoteInvalid
from app.core.transparency.witnesses import Witness, cosignature_time
from app.errors import ArchiveUnavailable, ConfigInvalid
from app.process.config import Settings, log_witnesses
from app.store.archive_files import ArchiveFiles, open_archive_files

NAME = re.compile(r"(\d{15})\.(txt|tsr)")
TAIL_ENTRIES = 1_000_000
"""So many entries before the end of the log are looked at first."""
MAX_CHECKPOINTS_READ = 100
"""Most checkpoints that are read to find the last one that a witness has cosigned."""
READ_SECONDS = 30.0


class LastCosignature(Struct, frozen=True):
    """The last checkpoint that a witness has cosigned, by its size, and when; None where none of the last 100 is."""

    size: int | None
    at: str | None


@dataclass(slots=True)
class ExportedCheckpoints:
    """The checkpoints that are held outside of the database. `problem` says why it could not be read."""

    place: str
    problem: str = ""
    size: int | None = None
    """Entries that the newest checkpoint counts."""
    written_at: str | None = None
    witnesses: dict[str, LastCosignature] = field(default_factory=dict)
    stamped_size: int | None = None
    """Entries that the last checkpoint with a time stamp counts."""

    def facts(self, *, stamps: bool) -> dict[str, object]:
        """Return the values by the names that are printed."""
        values: dict[str, object] = {
            "export": self.place,
            "exported_size": self.size,
            "exported_at": self.written_at,
        }
        if self.problem:
            values["export_problem"] = self.problem
        for name, last in self.witnesses.items():
            values[f"witness {name}"] = {"size": last.size, "at": last.at}
        if stamps:
            values["timestamped_size"] = self.stamped_size
        return values


async def read_exported(settings: Settings, size: int) -> ExportedCheckpoints | None:
    """Read the place; None if nothing is exported. `size` is the size of the log."""
    if not settings.log_export:
        return None
    checkpoints = ExportedCheckpoints(settings.log_export)
    try:
        async with asyncio.timeout(READ_SECONDS):
            files = open_archive_files(settings.log_export, settings.archive_endpoint)
            await asyncio.to_thread(_read, files, checkpoints, size, log_witnesses(settings))
    except (ArchiveUnavailable, ConfigInvalid, TimeoutError) as error:
        checkpoints.problem = str(error) or "it did not answer in time"
    return checkpoints


def _read(files: ArchiveFiles, checkpoints: ExportedCheckpoints, size: int, witnesses: tuple[Witness, ...]) -> None:
    names = files.names(f"{max(0, size - TAIL_ENTRIES):015d}") or files.names("")
    sizes: dict[str, list[int]] = {"txt": [], "tsr": []}
    for name in names:
        match = NAME.fullmatch(name)
        if match is not None:
            sizes[match[2]].append(int(match[1]))
    if sizes["tsr"]:
        checkpoints.stamped_size = sizes["tsr"][-1]
    if sizes["txt"]:
        checkpoints.size = sizes["txt"][-1]
        written_at = files.find_write_time(f"{checkpoints.size:015d}.txt")
        if written_at is not None:
            checkpoints.written_at = moment(written_at)
    checkpoints.witnesses = {witness.name: LastCosignature(size=None, at=None) for witness in witnesses}
    missing = list(witnesses)
    for checkpoint in sizes["txt"][: -MAX_CHECKPOINTS_READ - 1 : -1]:
        if not missing:
            return
        body = files.read(f"{checkpoint:015d}.txt") or b""
        for witness in missing[:]:
            at = _find_cosignature_time(body, witness)
            if at is not None:
                checkpoints.witnesses[witness.name] = LastCosignature(checkpoint, moment(at))
                missing.remove(witness)


def _find_cosignature_time(body: bytes, witness: Witness) -> float | None:
    try:
        return cosignature_time(body.decode(), witness.key)
    except (UnicodeDecodeError, NoteInvalid):
        return None
