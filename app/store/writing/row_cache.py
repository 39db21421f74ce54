"""The rows of the runs that this process wrote or read last, upon which a batch may be applied without reading them."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping

from app.store.rows.runs import CachedRows

MOST_RUNS = 8192
"""Most runs whose rows are cached."""


class RowCache:
    """A bounded cache. It evicts the run that was not written to for longest."""

    def __init__(self, most: int = MOST_RUNS) -> None:
        self._runs: OrderedDict[str, CachedRows] = OrderedDict()
        self._most = most

    def find(self, runs: Iterable[str], moving: Iterable[str]) -> dict[str, CachedRows] | None:
        """The rows of all these runs, with the tickets of those that are `moving`; None if any of them is missing."""
        found = {}
        for run in runs:
            cached = self._runs.get(run)
            if cached is None:
                return None
            found[run] = cached
        if any(found[run].tickets is None for run in moving):
            return None
        return found

    def update(self, rows: Mapping[str, CachedRows | None]) -> None:
        """Cache the rows that a commit has written or that were read; forget the runs that have None."""
        for run, cached in rows.items():
            self._runs.pop(run, None)
            if cached is not None:
                self._runs[run] = cached
        while len(self._runs) > self._most:
            self._runs.popitem(last=False)

    def clear(self) -> None:
        """Forget everything. After a lost connection the database may be an older copy that counts revisions anew."""
        self._runs.clear()
