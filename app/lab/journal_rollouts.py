"""From a journaled run to a rollout: what its conductor was shown, what was planned, what it cost, what it was worth.

Only runs whose callers agreed are read, and only what is still stored: content that was erased is gone from training,
too. A run without a plan of its own (it failed before, a fallback decided, or the answer is a later round's) teaches
nothing about the plan that is its first, and is left out; so is one that a worker's outage spoiled.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from random import Random
from statistics import fmean

import orjson
from msgspec import Struct

from app.conductor.protocol import Brief
from app.core.message.chat import Task, task_from_json
from app.core.plan.arms import tier_of
from app.core.plan.workflow import Step, critical_path_seconds
from app.core.pool.catalog import MILLION, Catalog
from app.core.rating.feedback import Feedback
from app.core.run.events import CallIntended, Event, PlanOpened, PlanStep, facts
from app.core.run.fold import fold
from app.core.run.state import Proposal, RunState
from app.core.run.visibility import labels_in_run
from app.lab.rollouts import Rollout, conductor_prompt, plan_json, split, turns_of
from app.store.archive import Record

YES = frozenset({"yes", "true", "1"})


class SkippedRun(Exception):
    """A run that becomes no rollout; the message is the reason, in words that fit many runs."""


class RolloutFilter(Struct, frozen=True):
    """The conditions under which a run may be learned from."""

    consent: str | None
    """The label, or the name in the request's `metadata` with the value yes, that says so; None: everybody agreed."""
    without: frozenset[str] = frozenset()
    """Labels whose runs are left out in any case."""
    held_out: float = 0.1
    tier: str | None = None
    tenant: str | None = None
    rated: bool = False
    """True if only rated runs are wanted."""


def rollout(
    record: Record, catalogs: Mapping[str, Catalog], ratings: Sequence[Feedback], conditions: RolloutFilter
) -> Rollout:
    """Return the rollout of a run; raises `SkippedRun`."""
    state, events = _fold_record(record)
    _check_filter(record, state, conditions)
    task = _task(record, state, conditions)
    proposal = _find_executed_proposal(state)
    catalog = catalogs.get(state.admitted.catalog)
    order = _order(state, events, proposal)
    if catalog is None or not set(order) <= set(catalog.workers):
        raise SkippedRun("its pool is not known any more")
    admitted = state.admitted
    tier = tier_of(catalog, admitted.tier, admitted.model, admitted.served_by)
    if tier is None:
        raise SkippedRun("its tier is not known any more")
    brief = Brief(
        task=task,
        workers=tuple([catalog.workers[name] for name in order]),
        limits=state.admitted.limits,
        usd_left=_usd_left(state, events),
        seconds_left=_seconds_left(events),
        message_chars=tier.conductor.message_chars,
    )
    steps = _steps(record, state, events, proposal)
    if not {step.worker for step in steps} <= set(order):
        raise SkippedRun("its plan names a worker that was not offered")
    score, rated = score_of(ratings)
    if conditions.rated and score is None:
        raise SkippedRun("nobody has rated it")
    conversation = turns_of(task.messages)
    usd = sum([call.usd for call in state.calls.values() if call.step is not None])
    return Rollout(
        run=state.run,
        at=events[0].at,
        tier=state.admitted.tier,
        conductor=proposal.conductor,
        split=split(conversation, conditions.held_out),
        conversation=conversation,
        prompt=conductor_prompt(brief),
        completion=plan_json(steps, order),
        workers=tuple(order),
        pool=state.admitted.catalog,
        steps=len(steps),
        usd=usd / MILLION,
        seconds=round(_seconds(state, proposal), 6),
        score=score,
        rated=rated,
        probability=_product([step.probability for step in steps]),
        most=state.admitted.limits.steps,
    )


def score_of(ratings: Sequence[Feedback]) -> tuple[float | None, str]:
    """Return a run's score and who gave it: the mean of the latest score of each grader, else the caller's last
    explicit rating. `ratings` are in the order of their times. Implicit signals do not count."""
    by_grader: dict[str, tuple[float, str]] = {}
    by_caller: tuple[float | None, str] = (None, "")
    for rating in ratings:
        name = f"{rating.kind} {rating.source} {rating.version}".strip()
        if rating.score is None:
            continue
        if rating.kind == "grader":
            by_grader[rating.source] = (rating.score, name)
        elif rating.kind == "explicit":
            by_caller = (rating.score, name)
    if not by_grader:
        return by_caller
    scores, names = zip(*by_grader.values(), strict=True)
    return fmean(scores), ", ".join(sorted(names))


def _fold_record(record: Record) -> tuple[RunState, tuple[Event, ...]]:
    run = str(record.row["id"])
    events = []
    for stored in record.events:
        events.append(Event.stored(run, stored.seq, stored.kind, stored.at, stored.body))
    if not events:
        raise SkippedRun("it has no journal")
    journal = tuple(events)
    return fold(journal), journal


def _check_filter(record: Record, state: RunState, conditions: RolloutFilter) -> None:
    if conditions.tier is not None and state.admitted.tier != conditions.tier:
        raise SkippedRun("it is of another tier")
    if conditions.tenant is not None and record.row["tenant"] != conditions.tenant:
        raise SkippedRun("it is of another tenant")
    if barred := sorted(conditions.without & labels_in_run(state)):
        raise SkippedRun(f"it has the label {barred[0]}")
    if state.admitted.origin_kind == "shadow":
        raise SkippedRun("it is a shadow, whose answer nobody was given")
    if state.admitted.origin_kind == "replay":
        raise SkippedRun("it is a replay of another run")
    if not state.ended or state.admitted.preview:
        raise SkippedRun("it was only planned, or has not ended")


def _task(record: Record, state: RunState, conditions: RolloutFilter) -> Task:
    body = record.contents.get(state.admitted.task)
    if body is None:
        raise SkippedRun("its content was erased")
    task = task_from_json(orjson.loads(body))
    agreed = conditions.consent is None or conditions.consent in state.admitted.labels
    if not agreed and str(task.metadata.get(conditions.consent or "", "")).casefold() not in YES:
        raise SkippedRun("its caller has not agreed")
    return task


def _find_executed_proposal(state: RunState) -> Proposal:
    """Return the proposal that was carried out from beginning to end."""
    proposals = [proposal for proposal in state.proposals if proposal.state == "accepted" and proposal.topology]
    if state.degraded:
        raise SkippedRun("a fallback decided, or a worker was out")
    if state.state != "succeeded" or not proposals:
        raise SkippedRun(f"it has no answer ({state.state})")
    if len(proposals) > 1:
        raise SkippedRun("it had several rounds")
    if state.admitted.limits.depth:
        raise SkippedRun("its conductor might take steps itself")
    return proposals[0]


def _order(state: RunState, events: Sequence[Event], proposal: Proposal) -> list[str]:
    """Return the workers in the order in which the conductor saw them; for a conductor that saw none, in the shuffled
    order that it would have seen."""
    opened = {fact.proposal: fact for fact in facts(events, PlanOpened)}[proposal.number]
    order = list(opened.order)
    if opened.instant:
        Random(state.run).shuffle(order)
    return order


def _usd_left(state: RunState, events: Sequence[Event]) -> int:
    """Return the micro-dollars that the run's first call was told, which is the conductor's where it has one; those of
    the run where it was told none."""
    for fact in facts(events, CallIntended):
        if fact.usd_left is not None:
            return fact.usd_left
    return state.admitted.limits.usd


def _seconds_left(events: Sequence[Event]) -> float | None:
    """Return the seconds that the conductor was told; None where it was told none."""
    for fact in facts(events, CallIntended):
        if fact.seconds_left is not None:
            return float(fact.seconds_left)
    return None


def _steps(record: Record, state: RunState, events: Sequence[Event], proposal: Proposal) -> list[Step]:
    planned = {fact.n: fact for fact in facts(events, PlanStep)}
    steps = []
    for step in state.steps_of_round(proposal.round):
        if step.worker != planned[step.n].worker:
            raise SkippedRun("another worker stood in for a planned one")
        subtask = ""
        if step.subtask:
            if step.subtask not in record.contents:
                raise SkippedRun("its content was erased")
            subtask = record.contents[step.subtask].decode()
        access = step.access.shift(-proposal.base)
        steps.append(Step(step.worker, subtask, access, step.answers, planned[step.n].probability, step.tools))
    return steps


def _seconds(state: RunState, proposal: Proposal) -> float:
    spent: defaultdict[int, float] = defaultdict(float)
    for call in state.calls.values():
        if call.step is not None:
            spent[call.step] += call.seconds
    steps = state.steps_of_round(proposal.round)
    inputs = [step.access.shift(-proposal.base).steps for step in steps]
    return critical_path_seconds(inputs, [spent[step.n] for step in steps])


def _product(odds: Sequence[float | None]) -> float | None:
    """Return the probability of all choices together; None if one of them is not known."""
    probabilities = [probability for probability in odds if probability is not None]
    if len(probabilities) < len(odds):
        return None
    return math.prod(probabilities)
