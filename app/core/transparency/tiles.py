"""The layout in which a log is served: tiles of hashes and bundles of entries, as https://c2sp.org/tlog-tiles has it.

A tile of level L holds up to 256 hashes, one behind the other, of nodes at the level 8 * L of the tree: leaf hashes at
level 0, roots over 256 of them at level 1, and so on. A bundle holds up to 256 entries, each behind its length in two
bytes. A full tile never changes; a partial one is the beginning of the full one, so that it can be cut from it.
"""

import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

from msgspec import Struct

from app.core.transparency.merkle import HASH_BYTES, Node, node_hash

WIDTH = 256
"""Hashes of a full tile, and entries of a full bundle."""
HEIGHT = 8
"""Levels of the tree from one level of tiles to the next."""
ENTRIES = "entries"
"""The name that stands in place of a level in the path of a bundle."""
ENTRY_BYTES = 2**16 - 1
"""Most bytes of an entry."""
_PATH = re.compile(r"tile/(entries|0|[1-9]\d?)/((?:x\d{3}/)*)(\d{3})(?:\.p/([1-9]\d{0,2}))?", re.ASCII)
MOST_LEVELS = 64
"""Most levels of tiles, as the specification has it."""
MOST_GROUPS = 6
"""Most groups of three digits of the number of a tile."""
MOST_TILES = 2**63 // WIDTH
"""Most tiles of a level: the places of their entries are numbers of 63 bits."""


class TileMissing(ValueError):
    """A tile that a log of this size must have is not there, or lacks hashes."""


class Tile(Struct, frozen=True):
    """A tile, or a bundle of entries if its level is None."""

    level: int | None
    number: int
    width: int = WIDTH

    @property
    def path(self) -> str:
        digits = f"{self.number:03d}"
        digits = digits.zfill(-(-len(digits) // 3) * 3)
        groups = [digits[at : at + 3] for at in range(0, len(digits), 3)]
        place = "/".join([f"x{group}" for group in groups[:-1]] + groups[-1:])
        level = ENTRIES if self.level is None else str(self.level)
        part = "" if self.width == WIDTH else f".p/{self.width}"
        return f"tile/{level}/{place}{part}"


def parse_tile(path: str) -> Tile | None:
    """Return the tile of a path, which begins with `tile/`; None if no tile has this path."""
    match = _PATH.fullmatch(path)
    if match is None:
        return None
    level, upper, last, width = match.groups()
    groups = [group[1:] for group in upper.split("/") if group] + [last]
    if len(groups) > MOST_GROUPS or (len(groups) > 1 and groups[0] == "000"):
        return None
    tile = Tile(
        level=None if level == ENTRIES else int(level),
        number=int("".join(groups)),
        width=int(width or WIDTH),
    )
    if tile.number >= MOST_TILES or (tile.level or 0) >= MOST_LEVELS or tile.width > WIDTH or tile.path != path:
        return None
    return tile


def tiles_of(size: int) -> Iterator[Tile]:
    """Yield all tiles of hashes of a tree, and all of its bundles of entries."""
    level: int | None = None
    count = size
    while count:
        full, remainder = divmod(count, WIDTH)
        for number in range(full):
            yield Tile(level, number)
        if remainder:
            yield Tile(level, full, remainder)
        if level is None:
            level = 0
        else:
            level, count = level + 1, full


def bundle(entries: Iterable[bytes]) -> bytes:
    """Return the bytes of a bundle of entries."""
    return b"".join([len(entry).to_bytes(2, "big") + entry for entry in entries])


def hashes_of(body: bytes) -> list[bytes]:
    """Return the hashes of a tile."""
    return [body[at : at + HASH_BYTES] for at in range(0, len(body), HASH_BYTES)]


def node_reader(tile: Callable[[int, int], Sequence[bytes]]) -> Node:
    """Return a reader of nodes from tiles, whose hashes `tile` returns for a level and a number.

    It raises `TileMissing` for a node whose tile does not have all of its hashes.
    """

    def node(level: int, index: int) -> bytes:
        tile_level, height = divmod(level, HEIGHT)
        number, first = divmod(index << height, WIDTH)
        hashes = list(tile(tile_level, number)[first : first + (1 << height)])
        if len(hashes) != 1 << height:
            raise TileMissing("A tile of the log, or a part of it, is not there.")
        while len(hashes) > 1:
            hashes = [node_hash(hashes[at], hashes[at + 1]) for at in range(0, len(hashes), 2)]
        return hashes[0]

    return node


async def reader_for(work: Callable[[Node], object], tile: Callable[[int, int], Awaitable[bytes]]) -> Node:
    """Return a reader of the nodes that `work` reads. `tile` gives the tile of a level and a number; each one is read
    once.

    `work` is carried out once here, over hashes of zeros, to learn which tiles it needs. Raises `TileMissing`, when a
    node is read, if the log does not have its tile.
    """
    hashes: dict[tuple[int, int], Sequence[bytes]] = {}

    def note_needed(level: int, number: int) -> Sequence[bytes]:
        hashes[level, number] = ()
        return [bytes(HASH_BYTES)] * WIDTH

    work(node_reader(note_needed))
    for level, number in hashes:
        hashes[level, number] = hashes_of(await tile(level, number))
    return node_reader(lambda level, number: hashes[level, number])
