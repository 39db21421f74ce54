"""Counts the transactions that wrote to a database, from outside the processes that wrote.

Postgres gives each writing transaction one id, so the distance between two readings of the next id is the number of
commits. A SQLite write-ahead log marks the last page of each transaction, so the marked pages are the commits. Neither
reading writes anything.
"""

from __future__ import annotations

import asyncio
import os
import struct
from pathlib import Path
from typing import BinaryIO

import asyncpg
from msgspec import Struct

_WAL_HEADER = struct.Struct(">IIII8sII")
"""Magic number, format, page size, checkpoint number, salts, two checksums; `sqlite.org/fileformat2.html`, 4.1."""
_FRAME_HEADER = struct.Struct(">II8sII")
"""Page number, pages of the database after a commit (0 if this frame ends none), salts, two checksums."""


class WalRestartError(RuntimeError):
    """The write-ahead log began anew between two readings, so that they cannot be compared."""


class CommitCount(Struct, frozen=True):
    """A count of commits. Only readings of the same `generation` can be compared."""

    generation: bytes
    commits: int

    def since(self, earlier: CommitCount) -> int:
        """Return the commits between two readings. Raises WalRestartError."""
        if self.generation != earlier.generation:
            raise WalRestartError("the write-ahead log was restarted between the two readings")
        return self.commits - earlier.commits


def read(database: str) -> CommitCount:
    """The commits so far of the database with this URL: Postgres, or a SQLite file."""
    if database.startswith("sqlite:///"):
        return _read_wal(Path(f"{database.removeprefix('sqlite:///')}-wal"))
    return asyncio.run(_read_postgres(database))


async def _read_postgres(url: str) -> CommitCount:
    connection = await asyncpg.connect(url, timeout=10)
    try:
        following = await connection.fetchval("SELECT pg_snapshot_xmax(pg_current_snapshot())::text")
    finally:
        await connection.close()
    return CommitCount(b"", int(following))


def _read_wal(path: Path) -> CommitCount:
    if not path.exists() or path.stat().st_size < _WAL_HEADER.size:
        return CommitCount(b"", 0)
    with path.open("rb") as log:
        _, _, page_bytes, _, salts, _, _ = _WAL_HEADER.unpack(log.read(_WAL_HEADER.size))
        return CommitCount(salts, _commit_frames(log, page_bytes, salts))


def _commit_frames(log: BinaryIO, page_bytes: int, salts: bytes) -> int:
    """Return the frames that end a transaction; frames of an earlier generation have other salts."""
    commits = 0
    while len(header := log.read(_FRAME_HEADER.size)) == _FRAME_HEADER.size:
        _, pages_after, frame_salts, _, _ = _FRAME_HEADER.unpack(header)
        if frame_salts != salts:
            break
        commits += pages_after > 0
        log.seek(page_bytes, os.SEEK_CUR)
    return commits
