"""Past runs under another pool file: which of their calls it would have refused. Pure.

`baton policy try` and the admin API use it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from app.core.pool.catalog import Catalog
from app.core.pool.policy import exclusion
from app.core.run.events import CallIntended, Event
from app.core.run.fold import advance, begin
from app.core.run.state import RunState
from app.core.run.visibility import LabelFlow, conversation_reading


class RefusedRun(Struct, frozen=True):
    """A run with calls that the pool file would not have allowed, and the first reason for each worker."""

    run: str
    tier: str
    labels: tuple[str, ...]
    reasons: Mapping[str, str]

    def as_json(self) -> dict[str, Any]:
        """Return it as a JSON value."""
        return {"run": self.run, "tier": self.tier, "labels": self.labels, "refused": dict(self.reasons)}


@dataclass(slots=True)
class PolicyTrial:
    """The past runs to which a pool file was applied."""

    runs: int = 0
    refused: list[RefusedRun] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    """Runs whose journal cannot be read, so that nobody knows what would have been refused."""

    def as_json(self) -> dict[str, Any]:
        """Return it as a JSON value."""
        return {"runs": self.runs, "refused": [run.as_json() for run in self.refused], "damaged": self.damaged}


def find_refused_calls(events: Sequence[Event], catalog: Catalog) -> RefusedRun | None:
    """Return the calls of a run that the catalog would have refused; None if there are none. Raises
    `EventMalformed`."""
    state, reasons = begin(events[0]), dict[str, str]()
    for event in events[1:]:
        before, state = state, advance(state, event)
        if isinstance(event.fact, CallIntended):
            reason = _reason(catalog, before, event.fact)
            if reason:
                reasons.setdefault(event.fact.worker, reason)
    labels = tuple(sorted(state.admitted.labels))
    if not reasons:
        return None
    return RefusedRun(state.run, state.admitted.tier, labels, reasons)


def _reason(catalog: Catalog, state: RunState, call: CallIntended) -> str:
    """Return the reason why the pool file would not have allowed a call, from the labels of what was read in it."""
    worker = catalog.workers.get(call.worker)
    if worker is None:
        return "is not in the pool file"
    flow = LabelFlow(state, catalog, lowered_now=True)
    if call.n is not None:
        return exclusion(worker, flow.readings[call.n])
    open_proposal = state.open_proposal
    if open_proposal is None:
        return exclusion(worker, conversation_reading(state))
    return exclusion(worker, flow.planner_reading(open_proposal.round, open_proposal.parent))
