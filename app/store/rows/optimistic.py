"""What a run's row and its tickets are taken to be, so that a commit need not ask for them first.

Whoever wrote them last knows them: this process, or another one that told of its commit. On a guess an entry is checked
and applied as it would be on rows under lock, and written by one statement that locks those rows, compares them and
writes nothing at all unless each is as it was taken to be. So a guess may be as old or as wrong as it likes: it costs
one way to the server, and then the rows are asked for.

Without it a commit is four ways to the server and back, one after the other: BEGIN, the rows, what is written, COMMIT.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType
from typing import Any

from app.core.records import record
from app.store.sqlkit.prepared import Row
from app.store.sqlkit.statements import SEEN, TICKET
from app.store.sqlkit.tables import RUNS, TICKETS

RUNS_KEPT = 8192
LARGEST = 2**63
KINDS: dict[type, tuple[type, ...]] = {str: (str,), int: (int,), bool: (bool,), float: (float, int)}


@record(frozen=True, slots=True)
class CachedRows:
    """The columns `SEEN` of a run's row, and `TICKET` of each of its tickets; None if those are not known."""

    run: Row
    tickets: tuple[Row, ...] | None

    @property
    def seq(self) -> int:
        """Of the run's last event."""
        return int(self.run[SEEN.index("seq")])


class RowCache:
    """A bounded memory of them. The run that was longest not written to goes first."""

    def __init__(self, most: int = RUNS_KEPT) -> None:
        self._kept: OrderedDict[str, CachedRows] = OrderedDict()
        self._most = most

    def of(self, runs: Iterable[str], moving: Iterable[str]) -> dict[str, CachedRows] | None:
        """A guess for each of these runs, with the tickets of those that are `moving`; None if one is missing."""
        found = {run: guess for run in runs if (guess := self._kept.get(run)) is not None}
        if not all(run in found for run in runs) or any(found[run].tickets is None for run in moving):
            return None
        return found

    def keep(self, left: Mapping[str, CachedRows | None]) -> None:
        """What commits have left behind; of a run that is None there is no more to be written."""
        for run, guess in left.items():
            self._kept.pop(run, None)
            if guess is not None:
                self._kept[run] = guess
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)

    def told(self, run: str) -> Sequence[object]:
        """The guess for another process, as JSON has it; empty if there is none."""
        guess = self._kept.get(run)
        return () if guess is None else (guess.run, guess.tickets)

    def heard(self, run: str, told: Sequence[Any]) -> None:
        """What another process says of its commit (see `told`); what is no such thing, or is old, is left alone."""
        guess, known = _parsed(run, told), self._kept.get(run)
        if guess is not None and (known is None or known.seq < guess.seq):
            self.keep({run: guess})


def _parsed(run: str, said: Sequence[Any]) -> CachedRows | None:
    """What `told` made, of that run; None for anything else. Values of other types would not get to the server."""
    match said:
        case [row, None] if _fits(row, _RUN_KINDS) and row[0] == run:
            return CachedRows(tuple(row), None)
        case [row, [*tickets]] if _fits(row, _RUN_KINDS) and row[0] == run:
            if all(_fits(one, _TICKET_KINDS) and one[0] == run for one in tickets):
                return CachedRows(tuple(row), tuple([tuple(one) for one in tickets]))
    return None


def _kinds(columns: Iterable[Any]) -> tuple[tuple[type, ...], ...]:
    kinds = [(KINDS[column.type.python_type], column.nullable) for column in columns]
    return tuple([(*kind, NoneType) if nullable else kind for kind, nullable in kinds])


_RUN_KINDS = _kinds(RUNS.c[name] for name in SEEN)
_TICKET_KINDS = _kinds(TICKETS.c[name] for name in TICKET)


def _fits(row: Any, kinds: Sequence[tuple[type, ...]]) -> bool:
    if not isinstance(row, list | tuple) or len(row) != len(kinds):
        return False
    return all(
        type(value) in kind and (type(value) is not int or -LARGEST <= value < LARGEST)
        for value, kind in zip(row, kinds, strict=True)
    )
