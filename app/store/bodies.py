"""What a store promises about the contents of runs, beside all that `protocol.py` has. They are written by entries."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

Reader = Callable[[bytes], Any]
"""Pure, and makes values."""


class Bodies(Protocol):
    """A body never changes under its ref. All raise `StoreUnavailable`."""

    async def contents(self, run: str, refs: Sequence[str]) -> Mapping[str, bytes]:
        """The bodies that are still stored; a missing ref was erased."""
        ...

    async def records(self, run: str, wanted: Collection[tuple[str, Reader]]) -> Mapping[tuple[str, Reader], Any]:
        """The same as they are read, by ref and reader. What was read of a body that is kept in memory is kept with it,
        and forgotten with it."""
        ...

    async def erase(self, run: str) -> bool:
        """Forget all content of a run, its salt and the comments on it; the journal stays. False if there is no such
        run."""
        ...
