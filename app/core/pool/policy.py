"""The policy filter: the workers of the pool that may work on a task, chosen before planning (D6).

The conductor reads the whole task and writes the subtasks, so a subtask carries the task's labels: filtering workers
after planning alone would leak. A worker stays in the pool if it may do some step of the run; what it reads in each
step is checked when the plan is accepted and when the step's messages are composed (`app/core/run/visibility.py`).

A label such as `region:eu` or `retention:none` is compared with the region and retention on a worker's card, any other
one with its clearance; then the rules of the pool file apply (`rules.py`). Every exclusion has a reason, which is
journaled and names the rule.
"""

from collections.abc import Mapping, Sequence
from dataclasses import field

from app.core.message.chat import SAMPLING, Sampling, Task
from app.core.pool.budget import input_bound, tool_bytes
from app.core.pool.catalog import Card, Catalog, Tier, Worker
from app.core.pool.rules import Reading
from app.core.records import record

NO_PRICE = "its price is not known, and a budget applies; write `price` in the pool file"
NO_LOGPROBS = "tells no log-probabilities"
PINNED = "another worker is pinned by the request"
NOT_ALLOWED = "not in the request's allow list"
DENIED = "in the request's deny list"
REFUSALS: Mapping[str, str] = {name: f"takes no {name}" for name in SAMPLING}
"""The reason of a worker that refuses a sampling parameter, by parameter."""
BLAMED: Mapping[str, str] = {NO_LOGPROBS: "logprobs", **{reason: name for name, reason in REFUSALS.items()}}
"""The parameter that a reason is about."""
ENOUGH = 2
"""Workers that a run keeps although they are ejected: one to call, and one to take over from it."""


@record(frozen=True, slots=True)
class Overrides:
    """The caller's `baton.pool`: `allow` empty means all; `pin` forces every step onto one worker."""

    allow: frozenset[str] = frozenset()
    deny: frozenset[str] = frozenset()
    pin: str | None = None


@record(frozen=True, slots=True)
class Eligible:
    """The workers that may see this task, in the tier's order, and why the others may not."""

    workers: tuple[Worker, ...]
    excluded: Mapping[str, str] = field(default_factory=dict)

    @property
    def blamed(self) -> str | None:
        """The parameter without which somebody would be eligible, if it is one."""
        return next((BLAMED[reason] for reason in self.excluded.values() if reason in BLAMED), None)


@record(frozen=True, slots=True)
class Needs:
    """The abilities that a task demands of each worker. `context` is the conversation's likely size, in tokens."""

    images: bool
    documents: bool
    tools: bool
    context: int


def eligible(catalog: Catalog, tier: Tier, task: Task, least: Reading, overrides: Overrides) -> Eligible:
    """Filter the tier's pool by the caller's overrides, by labels and clearances, and by what the task needs.

    `least` is what every worker of the run reads in any of its steps.
    """
    size = input_bound(task.messages, tool_bytes(task.toolbox)) // 4
    needs = Needs(images=task.has_images, documents=task.has_documents, tools=task.needs_tools, context=size)
    kept: list[Worker] = []
    excluded: dict[str, str] = {}
    for name in tier.pool:
        worker = catalog.workers[name]
        reason = _overridden(name, overrides) or exclusion(worker, least) or _unable(worker, needs)
        if not reason and task.logprobs is not None and not catalog.providers[worker.provider].gives_logprobs:
            reason = NO_LOGPROBS
        if not reason and worker.refuses:
            reason = _refused(worker, task.sampling)
        if reason:
            excluded[name] = reason
        else:
            kept.append(worker)
    return Eligible(tuple(kept), excluded)


def priced(choice: Eligible) -> Eligible:
    """Without the workers of unknown price, for a run that has a budget: what they cost could not be held."""
    unknown = {worker.name: NO_PRICE for worker in choice.workers if not worker.priced}
    kept = tuple(worker for worker in choice.workers if worker.name not in unknown)
    if unknown:
        return Eligible(kept, {**choice.excluded, **unknown})
    return choice


def healthy(choice: Eligible, ejected: Mapping[str, str]) -> Eligible:
    """Without the ejected ones, as long as `ENOUGH` remain; `ejected` gives their reasons, the worst of them first."""
    out = spared(choice.workers, ejected)
    kept = tuple(worker for worker in choice.workers if worker.name not in out)
    return Eligible(kept, {**choice.excluded, **{name: f"ejected: {reason}" for name, reason in out.items()}})


def spared(workers: Sequence[Worker], ejected: Mapping[str, str]) -> Mapping[str, str]:
    """Return those of the ejected workers, the worst first, that can be left out so that `ENOUGH` remain."""
    names = list(ejected)[: max(len(workers) - ENOUGH, 0)]
    return {name: ejected[name] for name in names}


def unknown_names(tier: Tier, overrides: Overrides) -> tuple[str, ...]:
    """Names in the overrides that the tier's pool does not hold, sorted."""
    named = overrides.allow | overrides.deny | ({overrides.pin} if overrides.pin else set())
    return tuple(sorted(named - set(tier.pool)))


def overridden(tier: Tier, other: Tier, overrides: Overrides) -> Overrides | None:
    """Return a request's choice of workers as it applies to the tier while it is served by a subject (`other`). None if
    the request allows none of the subject's workers, or names one that is in neither pool: then it is the tier's own
    definition that it is about."""
    pool = frozenset(other.pool)
    unknown = frozenset(unknown_names(tier, overrides)) - pool
    if unknown or (overrides.allow and not overrides.allow & pool):
        return None
    if overrides.pin is not None and overrides.pin not in pool:
        return None
    return Overrides(overrides.allow & pool, overrides.deny & pool, overrides.pin)


def permits(worker: Worker, reading: Reading) -> bool:
    """True if a worker may read this: the decision of `exclusion`, without the sentence that gives its reason."""
    labels = reading.labels
    if not labels <= worker.card.clearance:
        for label in labels - worker.card.clearance:
            if not _is_granted(worker.card, label):
                return False
    if worker.bars:
        labels = labels | reading.sources
        for bar in worker.bars:
            if bar.labels <= labels:
                return False
    return True


def exclusion(worker: Worker, reading: Reading) -> str:
    """Return the reason why a worker may not read this; empty if it may."""
    if permits(worker, reading):
        return ""
    missing = [label for label in reading.labels - worker.card.clearance if not _is_granted(worker.card, label)]
    if missing:
        return f"not cleared for {', '.join(sorted(missing))}"
    labels = reading.labels | reading.sources
    return next(f"excluded by the rule {bar.rule}" for bar in worker.bars if bar.labels <= labels)


def _is_granted(card: Card, label: str) -> bool:
    """True for `region:` and `retention:` with what the card says of each."""
    kind, _, value = label.partition(":")
    if kind == "region":
        return bool(value) and value == card.region
    return kind == "retention" and bool(value) and value == card.retention


def _overridden(name: str, overrides: Overrides) -> str | None:
    if overrides.pin is not None and name != overrides.pin:
        return PINNED
    if overrides.allow and name not in overrides.allow:
        return NOT_ALLOWED
    return DENIED if name in overrides.deny else None


def _refused(worker: Worker, sampling: Sampling) -> str | None:
    asked = (name for name in sorted(worker.refuses) if getattr(sampling, name) not in (None, ()))
    return next((REFUSALS[name] for name in asked), None)


def _unable(worker: Worker, needs: Needs) -> str | None:
    if needs.images and "image" not in worker.card.modalities:
        return "cannot see images"
    if needs.documents and "pdf" not in worker.card.modalities:
        return "cannot read PDFs"
    if needs.tools and not worker.card.tools:
        return "cannot call tools"
    if needs.context >= worker.card.context:
        return "the conversation is longer than its context"
    return None
