"""Optimistic row cache for compare-and-write commits.

A process remembers the row and the tickets of the runs that it wrote or read last. An entry is checked and applied on
the cached rows in the same way as on locked rows, and then written by one statement: it locks the run's row, compares
its `revision` with the cached one, and writes nothing at all if they differ. Every change of a run's row or tickets
raises the revision (renewals of leases and claims do not: nothing is decided by those), so cached rows may be as old
as they like. If they are, they cost one round trip, and the rows are read from the database.

Without the cache a commit takes four round trips, one after the other: BEGIN, the rows, the writes, COMMIT.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping

from app.core.records import record
from app.store.sqlkit.prepared import Row
from app.store.sqlkit.statements import SEEN, KnownRun

MOST_RUNS = 8192
_ID, _REVISION = SEEN.index("id"), SEEN.index("revision")


@record(frozen=True, slots=True)
class CachedRows:
    """The columns `SEEN` of a run's row, and `TICKET` of each of its tickets; None if the tickets are not known."""

    run: Row
    tickets: tuple[Row, ...] | None

    @property
    def known(self) -> KnownRun:
        """The run's id and revision, to be compared with the row."""
        return self.run[_ID], self.run[_REVISION]


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
