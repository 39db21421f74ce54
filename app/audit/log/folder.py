"""A log in a folder, as https://c2sp.org/tlog-tiles lays it out: `checkpoint`, `tile/<level>/...`, `tile/entries/...`.

A folder that was fetched from a server by another program is read as well: of each tile the widest part counts.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from app.audit.log.tree import Checkpoint, LogFormatError, leaf_hash, read_checkpoint, root_of
from app.audit.log.verify import WIDTH, StoredEntry
from app.errors import ConfigInvalid

CHECKPOINT = "checkpoint"
LENGTH_BYTES = 2
"""Bytes of the length before each entry of a bundle."""


def tile_path(level: int | str, number: int, width: int = WIDTH) -> str:
    """Return the path of a tile, or of a bundle of entries (level `entries`)."""
    groups = [f"{number % 1000:03d}"]
    while number := number // 1000:
        groups.insert(0, f"x{number % 1000:03d}")
    part = "" if width == WIDTH else f".p/{width}"
    return f"tile/{level}/{'/'.join(groups)}{part}"


class TilesFolder:
    """A log that was saved in a folder. Every method raises `ConfigInvalid` for a folder that cannot be read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def note(self) -> str:
        """Return the signed checkpoint."""
        try:
            return (self._path / CHECKPOINT).read_text()
        except (OSError, UnicodeDecodeError):
            raise ConfigInvalid([f"{self._path}: there is no readable checkpoint of a log in this folder"]) from None

    def checkpoint(self) -> Checkpoint:
        """Return the checkpoint. Raises `ConfigInvalid` if it is malformed."""
        try:
            return read_checkpoint(self.note())
        except LogFormatError as error:
            raise ConfigInvalid([f"{self._path / CHECKPOINT}: {error}"]) from None

    def entries(self) -> Iterator[StoredEntry]:
        """Yield every entry, in the order of the log, as far as bundles are there."""
        size, place = self.checkpoint().size, 0
        while place < size:
            bundle = self.bundle(place // WIDTH)[: size - place]
            for entry in bundle:
                yield StoredEntry(place, entry)
                place += 1
            if len(bundle) < WIDTH:
                return

    def bundle(self, number: int) -> Sequence[bytes]:
        """Return the entries of a bundle, as many as there are. Raises `ConfigInvalid` for a malformed one."""
        body = self._widest("entries", number)
        entries: list[bytes] = []
        at = 0
        while at < len(body):
            end = at + LENGTH_BYTES + int.from_bytes(body[at : at + LENGTH_BYTES], "big")
            if end > len(body):
                raise ConfigInvalid([f"{self._path / tile_path('entries', number)}: the bundle is cut off"])
            entries.append(body[at + LENGTH_BYTES : end])
            at = end
        return entries

    def tile(self, level: int, number: int) -> bytes:
        """Return the hashes of a tile, one behind the other; empty if it was not saved."""
        return self._widest(level, number)

    def _widest(self, level: int | str, number: int) -> bytes:
        whole = self._path / tile_path(level, number)
        try:
            if whole.is_file():
                return whole.read_bytes()
            parts = whole.with_name(f"{whole.name}.p")
            if not parts.is_dir():
                return b""
            widths = [int(part.name) for part in parts.iterdir() if part.name.isdecimal()]
            if not widths:
                return b""
            return (parts / str(max(widths))).read_bytes()
        except OSError as error:
            raise ConfigInvalid([f"{whole}: cannot be read: {error.strerror}"]) from None


def save(path: Path, entries: Iterable[bytes], note: str) -> int:
    """Write a log to a folder; what is there already is replaced. Returns the number of entries.

    Only the entries that the checkpoint counts are written, and the tiles are computed from them. Raises
    `ConfigInvalid` for a file that cannot be written.
    """
    size = read_checkpoint(note).size
    hashes: list[bytes] = []
    bundle: list[bytes] = []
    for place, entry in enumerate(entries):
        if place == size:
            break
        hashes.append(leaf_hash(entry))
        bundle.append(len(entry).to_bytes(LENGTH_BYTES, "big") + entry)
        if len(bundle) == WIDTH:
            _write(path / tile_path("entries", place // WIDTH), b"".join(bundle))
            bundle.clear()
    if bundle:
        _write(path / tile_path("entries", len(hashes) // WIDTH, len(bundle)), b"".join(bundle))
    level, above = 0, hashes
    while above:
        above = list(_save_level(path, level, above))
        level += 1
    _write(path / CHECKPOINT, note.encode())
    return len(hashes)


def _save_level(path: Path, level: int, hashes: Sequence[bytes]) -> Iterator[bytes]:
    """Write the tiles of a level. Yields the root over each full one, which the level above holds."""
    for number in range(-(-len(hashes) // WIDTH)):
        own = hashes[number * WIDTH : (number + 1) * WIDTH]
        _write(path / tile_path(level, number, len(own)), b"".join(own))
        if len(own) == WIDTH:
            yield root_of(own)


def _write(path: Path, body: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    except OSError as error:
        raise ConfigInvalid([f"{path}: cannot be written: {error.strerror}"]) from None
