"""Optimistic row cache for compare-and-write commits.

A process remembers the row and the tickets of the runs that it wrote last, or that another process sent after its
commit. An entry is checked and applied on the cached rows in the same way as on locked rows, and then written by one
statement: it locks the run's row, compares its `revision` with the cached one, and writes nothing at all if they
differ. Every change of a run's row or tickets raises the revision (renewals of leases and claims do not: nothing is
decided by those), so cached rows may be as old as they like. If they are, they cost one round trip, and the rows are
read from the database.

Without the cache a commit takes four round trips, one after the other: BEGIN, the rows, the writes, COMMIT.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType
from typing import Any

from app.core.records import record
from app.store.sqlkit.prepared import Row
from app.store.sqlkit.statements import SEEN, TICKET, KnownRun
from app.store.sqlkit.tables import RUNS, TICKETS

MOST_RUNS = 8192
_LARGEST = 2**63
_TYPES: dict[type, tuple[type, ...]] = {str: (str,), int: (int,), bool: (bool,), float: (float, int)}
_ID, _REVISION = SEEN.index("id"), SEEN.index("revision")


@record(frozen=True, slots=True)
class CachedRows:
    """The columns `SEEN` of a run's row, and `TICKET` of each of its tickets; None if the tickets are not known."""

    run: Row
    tickets: tuple[Row, ...] | None

    @property
    def revision(self) -> int:
        """Revision of the run's row."""
        return int(self.run[_REVISION])

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

    def to_json(self, run: str) -> Sequence[object]:
        """The rows of a run as JSON values for another process; empty if they are not known."""
        cached = self._runs.get(run)
        return () if cached is None else (cached.run, cached.tickets)

    def accept_json(self, run: str, sent: Sequence[Any]) -> None:
        """Cache rows from another process's `to_json`, unless they are malformed or not newer than the cached ones."""
        cached, known = _parsed(run, sent), self._runs.get(run)
        if cached is not None and (known is None or known.revision < cached.revision):
            self.update({run: cached})


def _parsed(run: str, sent: Sequence[Any]) -> CachedRows | None:
    """The rows in another process's message; None for anything else, such as the rows of another version's schema."""
    match sent:
        case [row, None] if _fits(row, _RUN_TYPES) and row[_ID] == run:
            return CachedRows(tuple(row), None)
        case [row, [*tickets]] if _fits(row, _RUN_TYPES) and row[_ID] == run:
            if all(_fits(one, _TICKET_TYPES) and one[0] == run for one in tickets):
                return CachedRows(tuple(row), tuple([tuple(one) for one in tickets]))
    return None


def _types_of(columns: Iterable[Any]) -> tuple[tuple[type, ...], ...]:
    """The types of the values of each of these columns."""
    found = []
    for column in columns:
        types = _TYPES[column.type.python_type]
        found.append((*types, NoneType) if column.nullable else types)
    return tuple(found)


_RUN_TYPES = _types_of(RUNS.c[name] for name in SEEN)
_TICKET_TYPES = _types_of(TICKETS.c[name] for name in TICKET)


def _fits(row: Any, types: Sequence[tuple[type, ...]]) -> bool:
    """True if a row has values that the columns can hold. The driver could not send others."""
    if not isinstance(row, list | tuple) or len(row) != len(types):
        return False
    pairs = zip(row, types, strict=True)
    return all(type(value) in wanted and (type(value) is not int or _is_bigint(value)) for value, wanted in pairs)


def _is_bigint(value: int) -> bool:
    return -_LARGEST <= value < _LARGEST
