"""The transparency log: sealing what was committed, and reading the log. deploy/docs/transparency.md has its layout."""

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from app.core.transparency.notes import Signer


class SealingResult(Struct, frozen=True):
    """The result of one pass of sealing."""

    leaves: int
    """The entries that were appended."""
    size: int
    """The number of all entries."""
    lag: float
    """Seconds for which the oldest change that is still to be sealed has waited; where none is, the longest wait of
    those that were sealed now."""
    more: bool
    """True if more could be sealed at once."""
    replaced_keys: str
    """The keys in place of which this pass has put others; empty if it has not."""


class LogState(Struct, frozen=True):
    """The state of the log."""

    size: int
    checkpoint: str | None
    """The signed checkpoint of that size; None before the first one."""
    sealed_at: float | None
    """When the checkpoint was signed, in seconds since 1970."""
    verifiers: Sequence[str]
    """The keys by which checkpoints are signed now."""
    stored_key: bool
    """True if the signing key is stored in the database, because no setting names one."""
    waiting: int
    """Changes that are still to be sealed, counted up to 10,000."""
    lag: float
    """Seconds for which the oldest of these has waited; 0.0 if there is none."""
    catching_up: bool
    """True while runs from before the log are still to be sealed."""


class ProvenLeaf(Struct, frozen=True):
    """An entry of the log with the proof that it is in the tree of a checkpoint."""

    place: int
    entry: bytes
    salt: bytes | None
    """The salt of its commitments; None once its run was pruned."""
    proof: Sequence[bytes]


class Proof(Struct, frozen=True):
    """All entries about a run, the oldest first, in the tree of a checkpoint."""

    checkpoint: str | None
    """None before the first one; there are no entries then."""
    leaves: Sequence[ProvenLeaf]


class TransparencyLog(Protocol):
    """All verbs raise `StoreUnavailable`."""

    async def seal(self, signers: Sequence[Signer], random_bytes: Callable[[], bytes]) -> SealingResult | None:
        """Append what was committed and is not in the log yet, in one bounded transaction, and sign a checkpoint.

        None if another process does so at this moment. Without `signers`, the key that is stored in the database
        signs, which is made with the first entry. `random_bytes` returns 16 unpredictable bytes (`SALT_BYTES`).
        """
        ...

    async def state(self) -> LogState:
        """Return the state of the log."""
        ...

    async def tile(self, level: int, number: int) -> bytes:
        """Return the hashes of a tile, as many as there are; empty if there is none."""
        ...

    async def entries(self, number: int) -> Sequence[bytes]:
        """Return the entries of a bundle, as many as there are."""
        ...

    async def proof(self, run: str) -> Proof:
        """Return the entries about a run with their proofs."""
        ...


class WithLog(Protocol):
    """The way to the transparency log of a store."""

    @property
    def log(self) -> TransparencyLog:
        """Return the log."""
        ...
