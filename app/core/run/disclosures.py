"""The facts of a call that the ledger of disclosures has and that its access list does not say by itself.

A call discloses to its recipient what its access list grants, as far as that exists: a step that ended without words
leaves no trace, and a step that called the caller's tools sees their results as well. Both follow from the journal up
to the intent of the call, and the intent has them, so that the ledger's row is derived from that event alone.
"""

from collections.abc import Iterator, Mapping, Sequence

from app.core.plan.workflow import Access
from app.core.pool.catalog import Catalog
from app.core.pool.snapshot import restored
from app.core.records import changed, record
from app.core.run.events import CallIntended, Event
from app.core.run.kinds import Kind, OriginKind
from app.core.run.labels import Flow, carried, conversation
from app.core.run.recipients import EMBEDS
from app.core.run.state import RunState, StepState, advance, begin

TIER = "tier"
"""The value of `planned_by` of calls that no plan asks for: the tier names the conductor and the embedder."""


@record(frozen=True, slots=True)
class Disclosed:
    """The disclosures of a call besides its access list, and by whose decision they are made."""

    planned_by: str = ""
    """The kind of conductor whose plan made the step: `model`, `fixed`, `selector`, `random`, `caller` or `fallback`;
    `tier` for the calls of conductors and embedders, which no plan asks for."""
    labels: frozenset[str] = frozenset()
    """The labels of all that the recipient reads."""
    unseen: tuple[int, ...] = ()
    """The steps of the access list that ended without words."""
    results: bool = False
    """True if the recipient sees results of the caller's tools."""
    origin: OriginKind = ""
    """The kind of origin that the run has."""


def of_step(state: RunState, step: StepState, labels: frozenset[str]) -> Disclosed:
    """Return the facts of a call for a step whose inputs are settled, with the labels of what the step reads."""
    return Disclosed(
        planned_by=_planner(state, step),
        labels=labels,
        unseen=without_words(state, step.access.steps),
        results=any(use.results for use in step.exchanges),
        origin=state.admitted.origin_kind,
    )


def of_plan(state: RunState, access: Access, *, embeds: bool) -> Disclosed:
    """Return the facts of a call for a plan, or for the embedding that a selector looks at."""
    labels = frozenset[str]()
    if carried(state):
        unmade = state.unmade
        planned = unmade is not None and not embeds
        reading = Flow(state).planner(unmade.round, unmade.parent) if unmade and planned else conversation(state)
        labels = reading.labels
    unseen = () if embeds else without_words(state, access.steps)
    return Disclosed(TIER, labels, unseen, origin=state.admitted.origin_kind)


def without_words(state: RunState, steps: Sequence[int]) -> tuple[int, ...]:
    """Return the steps among these that have no words to be seen."""
    return tuple([n for n in steps if state.steps[n].state != "done" or not state.steps[n].chars])


def completed(events: Sequence[Event], snapshots: Mapping[str, bytes]) -> Iterator[Event]:
    """Yield the intents and outcomes of a run's calls, the intents of releases before the ledger with the facts that
    follow from the journal. `snapshots` are those of pools by their digests; a region is unknown without its pool."""
    catalogs = {digest: restored(body) for digest, body in snapshots.items()}
    state: RunState | None = None
    for event in events:
        if event.kind is Kind.CALL_INTENDED and isinstance(event.fact, CallIntended):
            old = state is not None and not event.fact.planned_by
            yield Event.of(event.run, event.seq, event.at, _complete(state, event.fact, catalogs)) if old else event
        elif event.kind is Kind.CALL_FINISHED:
            yield event
        state = advance(begin(event) if state is None else state, event)


def _complete(state: RunState | None, fact: CallIntended, catalogs: Mapping[str, Catalog]) -> CallIntended:
    assert state is not None
    if fact.n is None:
        found = of_plan(state, fact.access, embeds=fact.template == EMBEDS)
    else:
        step = state.steps[fact.n]
        found = of_step(state, step, Flow(state).readings[fact.n].labels)
    catalog = catalogs.get(fact.catalog)
    worker = catalog.workers.get(fact.worker) if catalog is not None else None
    return changed(
        fact,
        planned_by=found.planned_by,
        labels=found.labels,
        unseen=found.unseen,
        results=found.results,
        origin=found.origin,
        region=worker.card.region or "" if worker is not None else "",
    )


def _planner(state: RunState, step: StepState) -> str:
    """Return the kind of conductor that made the proposal of a step."""
    for proposal in state.proposals:
        if proposal.number == step.proposal:
            return proposal.conductor
    return next(one.conductor for one in state.all_proposals if one.number == step.proposal)
