"""Checks the log itself: its entries against its tiles, its signed checkpoint, and checkpoints held outside of it.

Entries are read once, in their order, in bounded memory. Whoever alters an entry changes the root at every later size,
so a checkpoint that was kept elsewhere shows it, even if all hashes were made anew and signed with the right key. The
checkpoint alone bounds where: the alteration lies before it, and behind the last one that still fits. Saved tiles, or
the tiles of the log where they were left as they were, show the very entry.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from msgspec import Struct

from app.audit.log.entries import LOG_KEY, ROW, RUN, LogEntry, read_entry
from app.audit.log.findings import Finding, Verification
from app.audit.log.tree import (
    HASH_BYTES,
    Checkpoint,
    GrowingTree,
    Key,
    LogFormatError,
    key_of,
    leaf_hash,
    read_checkpoint,
    read_key,
    root_of,
)

LOG = "the log"
WIDTH = 256
"""Hashes of a full tile, and entries of a bundle."""


class StoredEntry(Struct, frozen=True):
    """An entry as it is stored: the columns beside it must say the same."""

    place: int
    entry: bytes
    salt: bytes | None = None
    kind: str | None = None
    id: str | None = None
    subject: str | None = None
    events: int | None = None
    frontier: bytes | None = None


Tiles = Callable[[int, int], bytes]
"""Reads the hashes of the tile of a level and a number, one behind the other; empty if there is none."""
Saved = Callable[[int], Sequence[bytes]]
"""Reads the entries of a bundle that was saved elsewhere, as many as there are."""


def tiles_of(size: int) -> int:
    """Return the number of tiles of hashes of a log with so many entries, partial ones included."""
    count = 0
    while size:
        count += -(-size // WIDTH)
        size //= WIDTH
    return count


@dataclass(slots=True)
class LogCheck:
    """One verification of a log."""

    report: Verification
    keys: tuple[Key, ...] = ()
    """The keys that are trusted. Without any, the log's own are taken, which are in its entries."""
    held_checkpoints: tuple[tuple[str, Checkpoint], ...] = ()
    """The checkpoints that are held outside, each with the name of its file."""
    witnesses: tuple[Key, ...] = ()
    """The keys of witnesses, each of which must have cosigned the newest checkpoint that is held outside."""
    tiles: Tiles | None = None
    saved_entries: Saved | None = None
    stored_tiles: int | None = None
    """The number of tiles that are stored; None if that is not known."""
    own_keys: list[Key] = field(default_factory=list)
    last_at: float = 0.0
    """When the last entry was sealed, in seconds since 1970."""
    last_keys: str = ""
    """The keys that the last entry about keys names."""
    earlier_keys: set[str] = field(default_factory=set)
    """The keys that each entry about keys before it names."""
    returned_keys: int = 0
    """The number of entries by which keys came back that others had replaced."""

    def check(self, entries: Iterable[StoredEntry], note: str | None) -> None:
        """Check all entries and the log's checkpoint `note`."""
        checkpoint = self._read_own_checkpoint(note)
        sizes = {held_checkpoint.size for _, held_checkpoint in self.held_checkpoints}
        if checkpoint is not None:
            sizes.add(checkpoint.size)
        roots = self._check_entries(entries, sizes)
        if checkpoint is not None:
            self._check_signature("the log's checkpoint", checkpoint)
            self._compare_own(checkpoint, roots)
        elif self.report.entries:
            self._add("checkpoint", "the log has entries and no checkpoint")
        self._compare_held(roots)
        self._check_witnesses()
        if self.returned_keys:
            self.report.notes.append(
                f"{self.returned_keys:,} entries name keys of the log again after others had replaced them. Where that "
                "goes on, engines have different keys: give all of them the same BATON_LOG_KEY."
            )

    def check_state(self, state: Mapping[str, Any], *, settled: bool = True) -> None:
        """Compare the state from which sealing goes on, after `check`: it follows from the last entries.

        A log that is not `settled` may still be sealing runs from before it, as after an update.
        """
        last = {"verifiers": self.last_keys or None, "sealed_at": self.last_at or None}
        expected = {"size": self.report.entries, **last}
        for name, value in expected.items():
            if state[name] != value:
                self._add("state", f"its state has another `{name}` than its entries", self.report.entries)
        if state["catch_up"] is not None and not settled:
            self.report.notes.append("Runs from before the log are still being sealed; verify again once they are.")
        elif state["catch_up"] is not None and self.report.entries:
            words = "its state has a `catch_up`, as if runs from before the log were still to be sealed"
            self._add("state", words, self.report.entries)
        if state["signer"] is not None and not self._has_signed(state["signer"]):
            self._add("state", "its state has a `signer` that no entry names", self.report.entries)

    def _has_signed(self, signer: str) -> bool:
        """Return True if an entry names the public key of this signing key."""
        try:
            return key_of(signer) in self.own_keys
        except LogFormatError:
            return False

    def check_transactions(self, transaction: int, latest: int | None, passed_over: int) -> None:
        """Check the number of the transaction from which sealing goes on. `latest` is the next one of the
        database, None where transactions have no numbers; `passed_over` changes are of earlier ones, and wait."""
        words = "its state has another `xid` than where sealing has to go on"
        if latest is None and transaction:
            self._add("state", words, self.report.entries)
        elif latest is not None and transaction > latest:
            self.report.notes.append("The database was restored on another server, and nothing was sealed since.")
        elif passed_over:
            self._add("state", f"{words}: {passed_over:,} changes would never be sealed", self.report.entries)

    def _add(self, rule: str, words: str, place: int | None = 0) -> None:
        self.report.add(Finding(rule, LOG, words, place))

    def _read_own_checkpoint(self, note: str | None) -> Checkpoint | None:
        if note is not None and not note.endswith("\n"):
            self._add("checkpoint", "the log's checkpoint does not end with a line feed, as signed notes do")
        try:
            if note is None:
                return None
            return read_checkpoint(note)
        except LogFormatError as error:
            self._add("checkpoint", str(error))
            return None

    # -- the entries

    def _check_entries(self, entries: Iterable[StoredEntry], sizes: set[int]) -> Mapping[int, bytes]:
        """Read all entries. Returns the roots at these sizes, as far as the log has come."""
        tree = GrowingTree()
        roots = {0: tree.root()}
        progress: dict[str, int] = {}
        level: list[bytes] = []
        wrong: list[int] = []
        for entry in entries:
            if entry.place != tree.size:
                self._add("entry", f"entries {tree.size:,} to {entry.place - 1:,} are missing", tree.size)
                break
            self._check_entry(entry, progress)
            level.append(leaf_hash(entry.entry))
            tree.add(level[-1])
            if tree.size in sizes:
                roots[tree.size] = tree.root()
            if len(level) == WIDTH:
                wrong += self._differing_hashes(tree.size - WIDTH, level)
                self._compare_saved(tree.size - WIDTH, level)
                level = []
        wrong += self._differing_hashes(tree.size - len(level), level)
        self._compare_saved(tree.size - len(level), level)
        self.report.entries = tree.size
        roots[tree.size] = tree.root()
        self._report_differences(wrong, roots)
        if self.stored_tiles is not None:
            self._check_extent_of_tiles(self.stored_tiles, tree.size)
        return roots

    def _check_entry(self, stored: StoredEntry, progress: dict[str, int]) -> None:
        try:
            sealed = read_entry(stored.place, stored.entry, stored.salt)
        except LogFormatError as error:
            self._add("entry", str(error), stored.place)
            return
        self.last_at = sealed.at
        columns = (stored.kind, stored.id, stored.subject, stored.events)
        stated = (sealed.kind, sealed.id, sealed.run or sealed.id, sealed.events)
        if stored.kind is not None and (columns != stated or (stored.frontier and sealed.kind != RUN)):
            self._add("entry", "the columns beside the entry say something else", stored.place)
        if stored.salt is not None and ROW not in sealed.fields:
            self._add("entry", "it has a salt, and commits to no row", stored.place)
        if sealed.kind == RUN:
            self._check_growth(sealed, progress)
        if sealed.kind == LOG_KEY:
            self._learn_keys(sealed)

    def _check_growth(self, sealed: LogEntry, progress: dict[str, int]) -> None:
        """A run's later entry stands for no fewer events than the one before. It stands for as many if its ledger of
        disclosures was completed."""
        if sealed.events < progress.get(sealed.id, 1):
            self.report.add(Finding("entry", f"run {sealed.id}", "it has fewer events than before", sealed.place))
        progress[sealed.id] = sealed.events

    def _learn_keys(self, sealed: LogEntry) -> None:
        self.returned_keys += sealed.id in self.earlier_keys
        self.earlier_keys.add(sealed.id)
        self.last_keys = sealed.id
        for text in sealed.id.split():
            try:
                self.own_keys.append(read_key(text))
            except LogFormatError as error:
                self._add("entry", str(error), sealed.place)

    def _differing_hashes(self, first: int, level: Sequence[bytes]) -> list[int]:
        """Return the places from `first` on whose hashes in the log's tile are other ones. Those that it lacks are a
        finding."""
        if self.tiles is None or not level:
            return []
        hashes = _split_tile(self.tiles(0, first // WIDTH))
        places = [first + at for at, pair in enumerate(zip(level, hashes, strict=False)) if pair[0] != pair[1]]
        if len(hashes) < len(level):
            missing, last = first + len(hashes), first + len(level) - 1
            self._add("tile", f"the hashes of the entries {missing:,} to {last:,} are missing in its tiles", missing)
        elif len(level) == WIDTH and not places:
            self._check_tiles_above(self.tiles, first // WIDTH, hashes)
        return places

    def _check_tiles_above(self, tiles: Tiles, number: int, hashes: Sequence[bytes]) -> None:
        """Compare the root over a full tile of entries with its hash in the tile above. Where it is the last one of
        that tile, do the same with that tile, and so on."""
        for level in count(1):
            above, at = _split_tile(tiles(level, number // WIDTH)), number % WIDTH
            if above[at : at + 1] != [root_of(hashes)]:
                size = WIDTH**level
                first = number * size
                fault = "is another one" if len(above) > at else "is missing"
                self._add("tile", f"the hash over the entries {first:,} to {first + size - 1:,} {fault}", first)
            if at < WIDTH - 1:
                return
            number, hashes = number // WIDTH, above

    def _check_extent_of_tiles(self, stored_tiles: int, size: int) -> None:
        """As many tiles are stored as the entries have, and the last one of each level has no hash too many. (The
        hashes of all others are compared with the tile above.)"""
        if stored_tiles != (needed := tiles_of(size)):
            self._add("tile", f"{stored_tiles:,} tiles are stored, and the entries have {needed:,}", size)
        level, hashes = 0, size
        while self.tiles is not None and hashes:
            number, width = divmod(hashes, WIDTH)
            if width and len(self.tiles(level, number)) > width * HASH_BYTES:
                self._add("tile", f"the last tile of level {level} has more hashes than there are", size)
            level, hashes = level + 1, number

    def _compare_saved(self, first: int, level: Sequence[bytes]) -> None:
        """Compare with the entries that were saved elsewhere."""
        if self.saved_entries is None:
            return
        for at, entry in enumerate(self.saved_entries(first // WIDTH)):
            if at >= len(level):
                self._add("held", "the saved tiles have this entry, and the log ends before it", first + at)
                return
            if leaf_hash(entry) != level[at]:
                self._add("entry", "it is not the entry that the saved tiles have at this place", first + at)

    def _report_differences(self, wrong: Sequence[int], roots: Mapping[int, bytes]) -> None:
        """Entries and tiles contradict each other: what is held outside decides which of them is altered."""
        for place in wrong:
            later = [checkpoint for checkpoint in self._comparable_checkpoints(roots) if place < checkpoint.size]
            if later and all(roots[checkpoint.size] == checkpoint.root for checkpoint in later):
                self._add("tile", "its hash in the tiles of the log is another one", place)
            else:
                self._add("entry", "it does not have the hash that the tiles of the log have", place)

    # -- checkpoints

    def _check_signature(self, name: str, checkpoint: Checkpoint) -> None:
        keys = self.keys or tuple(self.own_keys)
        try:
            signed = checkpoint.signers(keys)
        except LogFormatError as error:
            self._add("checkpoint", f"{name}: {error}", checkpoint.size)
            return
        if checkpoint.origin not in signed:
            self._add("checkpoint", f"{name} is not signed by the log that it names", checkpoint.size)

    def _check_witnesses(self) -> None:
        """The newest held checkpoint has a cosignature by every witness; wrong ones of others are findings as well."""
        if not self.witnesses:
            return
        newest = max([checkpoint.size for _, checkpoint in self.held_checkpoints], default=0)
        signed: set[str] = set()
        for name, checkpoint in self.held_checkpoints:
            try:
                signers = checkpoint.signers(self.witnesses)
            except LogFormatError as error:
                self._add("checkpoint", f"{name}: {error}", checkpoint.size)
                continue
            if checkpoint.size == newest:
                signed |= set(signers)
        for witness in self.witnesses:
            if witness.name not in signed:
                self._add("checkpoint", f"the newest held checkpoint is not cosigned by {witness.name}", newest)

    def _compare_own(self, checkpoint: Checkpoint, roots: Mapping[int, bytes]) -> None:
        size = self.report.entries
        if checkpoint.size != size:
            words = f"the checkpoint counts {checkpoint.size:,} entries, and there are {size:,}"
            self._add("entry", words, min(size, checkpoint.size))
        elif roots[size] != checkpoint.root:
            self._add(
                "entry",
                "the entries do not have the root that the log has signed",
                self._last_agreeing_size(size, roots),
            )

    def _compare_held(self, roots: Mapping[int, bytes]) -> None:
        size = self.report.entries
        for name, checkpoint in sorted(self.held_checkpoints, key=lambda item: item[1].size):
            self._check_signature(name, checkpoint)
            if checkpoint.size > size:
                counts = f"{name} counts {checkpoint.size:,} entries, and the log has {size:,}"
                self._add("held", f"{counts}: it was cut off or set back", size)
            elif roots[checkpoint.size] != checkpoint.root:
                begin = self._last_agreeing_size(checkpoint.size, roots)
                entries = f"one of the entries {begin:,} to {checkpoint.size - 1:,}"
                self._add("held", f"{entries} is not the one that {name} was made for", begin)

    def _last_agreeing_size(self, size: int, roots: Mapping[int, bytes]) -> int:
        """Return the size of the largest held checkpoint below `size` that still fits."""
        agreeing_size = 0
        for checkpoint in self._comparable_checkpoints(roots):
            if checkpoint.size < size and roots[checkpoint.size] == checkpoint.root:
                agreeing_size = max(agreeing_size, checkpoint.size)
        return agreeing_size

    def _comparable_checkpoints(self, roots: Mapping[int, bytes]) -> list[Checkpoint]:
        """Return the held checkpoints whose sizes the log has reached, so that it has a root to compare."""
        return [checkpoint for _, checkpoint in self.held_checkpoints if checkpoint.size in roots]


def _split_tile(tile: bytes) -> list[bytes]:
    """Return the hashes of a tile."""
    return [tile[at : at + HASH_BYTES] for at in range(0, len(tile), HASH_BYTES)]
