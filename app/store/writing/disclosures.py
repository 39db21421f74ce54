"""Derives the rows of the ledger of disclosures from the events of calls, for the transaction that writes these.

The intent of a call gives a row before anything is sent, and the outcome of the call completes that row. A call whose
intent was written by a release without the ledger has no row; `baton disclosures rebuild` derives it.
"""

from collections.abc import Sequence

from app.core.run.events import CallFinished, CallIntended
from app.core.run.facts import Fact
from app.core.run.kinds import Kind
from app.store.rows.disclosures import Ended, ended, intended
from app.store.sqlkit.statements import Row, Rows, Statements

CALLS = frozenset({Kind.CALL_INTENDED, Kind.CALL_FINISHED})


class Disclosures:
    """The rows that a batch of entries adds, and those that it completes."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, str], Row] = {}
        self._ended: dict[tuple[str, str], Ended] = {}

    def note(self, run: str, tenant: str, key: str, fact: Fact, at: float) -> None:
        """Note an event of a run, if it is the intent or the outcome of a call."""
        if fact.kind not in CALLS:
            return
        if isinstance(fact, CallIntended) and fact.planned_by:
            self._made[run, fact.call] = intended(run, tenant, key, fact, at)
        elif isinstance(fact, CallFinished):
            self._ended[run, fact.call] = ended(fact)

    def writes(self, statements: Statements) -> tuple[tuple[Rows, Sequence[Row]], ...]:
        """The rows to be written. No row is both added and completed: Postgres does both in one statement."""
        made = [row + self._ended.pop(place, (None, None, None)) for place, row in self._made.items()]
        completed = [(*outcome, *place) for place, outcome in self._ended.items()]
        return (statements.new_disclosure, made), (statements.end_disclosure, completed)
