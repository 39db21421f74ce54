"""The evidence of a rated run for a selector: the arm that was really played, and the score of its answer.

Only ratings of runs that the selector decided are learned; calibrations are learned from their trials. A run without an
answer is not learned, since an outage is no wrong answer, nor is a plan that was not carried out. Where another worker
took over, the arm with that worker is the one that was played.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from app.core.plan.templates import (
    ACCEPT,
    ANSWERED,
    MODEL,
    PLANNED,
    TEMPLATES,
    Arm,
    arm_of_workers,
    build_follow_up_arm,
)
from app.core.rating.features import from_json
from app.core.rating.feedback import Feedback
from app.core.rating.posterior import Rating
from app.core.run.events import (
    CallIntended,
    Event,
    Kind,
    PlanAccepted,
    PlanOpened,
    PlanStep,
    RunSucceeded,
    StepDone,
    facts,
    read_facts,
)

ARM_KINDS = (
    Kind.PLAN_OPENED,
    Kind.PLAN_STEP,
    Kind.PLAN_ACCEPTED,
    Kind.CALL_INTENDED,
    Kind.STEP_DONE,
    Kind.SUCCEEDED,
)
"""The kinds of events from which the arm that was played is read."""


class RatedRun(Struct, frozen=True):
    """A rating with the run that it is about. `answered` is True if the run has an answer that no fallback gave, `usd`
    is its cost, `given` are all of its ratings, and `seen` are its stored features, None if they were erased."""

    rating: Feedback
    tier: str
    answered: bool
    usd: int
    given: tuple[Feedback, ...]
    events: tuple[Event, ...]
    seen: bytes | None


class PolicyState(Struct, frozen=True):
    """A learned posterior of a policy; each write has the number after the one that it replaces, from 1 on."""

    number: int
    body: bytes


def decision(events: Sequence[Event]) -> Mapping[str, Any] | None:
    """Return the selector's decision for the plan that was carried out; None if another conductor made the plan."""
    accepted = [fact.proposal for fact in facts(events, PlanAccepted)]
    if not accepted:
        return None
    opened = [fact for fact in facts(events, PlanOpened) if fact.proposal <= accepted[-1] and fact.mode != "repair"]
    if not opened:
        return None
    return opened[-1].decision


def find_features_ref(events: Sequence[Event]) -> str:
    """Return the ref of the content that holds the request's features; empty where nothing was decided. Raises
    `EventMalformed` if one of the events cannot be read."""
    read_facts(events)
    decided = decision(events)
    if decided is None:
        return ""
    return str(decided["features"])


def build_rating(rated: RatedRun, raters: Mapping[str, float] | None = None) -> Rating | None:
    """Return the rating as the posterior learns it; None if there is nothing to learn. `raters` has the weights of
    sources of ratings that do not count fully."""
    weights = raters if raters is not None else {}
    before, score = scores(rated.given, rated.rating, weights)
    if score is None or rated.seen is None or not rated.answered:
        return None
    played, seen = arm_played(rated.events), from_json(json.loads(rated.seen))
    if played is None or seen is None:
        return None
    weight = weights.get(rated.rating.source, 1.0)
    usd = rated.usd if played.is_whole else None
    return Rating(played.arm, seen, score, usd, rated.rating.at, before, _models(rated.events), weight)


def _models(events: Sequence[Event]) -> Mapping[str, str]:
    """Return the models that the workers had when the run called them."""
    return {call.worker: call.model for call in facts(events, CallIntended) if call.n is not None and call.model}


class PlayedArm(Struct, frozen=True):
    """The arm that a rating is about; `is_whole` is True if the run's cost is the arm's."""

    arm: Arm
    is_whole: bool = True


def arm_played(events: Sequence[Event]) -> PlayedArm | None:
    """Return the arm that a rating is about; None if it is about none, such as that of a plan that was only shown.

    Where a further round has accepted the answer, it is the arm of the first round, of whose answer something was seen;
    else it is what was done in the last round, unless that came to nothing, so that the first answer was rated.
    """
    decided = decision(events)
    if decided is None:
        return None
    rounds = _rounds(events)
    is_carried_out = any(call.n is not None for call in facts(events, CallIntended))
    if not rounds or not is_carried_out:
        return None
    first = _first(rounds[0])
    if first is None:
        return None
    if len(rounds) == 1:
        return PlayedArm(first)
    if any(end.stopped for end in facts(events, RunSucceeded)):
        return PlayedArm(first, is_whole=False)
    action = str(decided["action"])
    if action == ACCEPT:
        return PlayedArm(replace(first, further=(ANSWERED,)))
    kind = action.partition(" ")[0]
    name = " ".join([kind, *rounds[-1].workers])
    return PlayedArm(build_follow_up_arm(name, first), is_whole=False)


class _Round(Struct, frozen=True):
    """An accepted plan: the decision behind it, and the workers that really worked, in the order of the steps."""

    decision: Mapping[str, Any]
    workers: tuple[str, ...]


def _first(made: _Round) -> Arm | None:
    """Return the arm of a first round; None where other steps were carried out than its template has."""
    template = str(made.decision["action"]).partition(" ")[0]
    if template == MODEL:
        return PLANNED
    if TEMPLATES.get(template) != len(made.workers):
        return None
    return arm_of_workers(template, made.workers)


def _rounds(events: Sequence[Event]) -> list[_Round]:
    """Return the accepted plans of a selector, in their order."""
    opened = [fact for fact in facts(events, PlanOpened) if fact.mode != "repair"]
    workers: dict[int, dict[int, str]] = {}
    placed: dict[int, int] = {}
    called: dict[str, str] = {}
    for event in events:
        fact = event.fact
        if isinstance(fact, PlanStep):
            workers.setdefault(fact.proposal, {})[fact.n] = fact.worker
            placed[fact.n] = fact.proposal
        elif isinstance(fact, CallIntended) and fact.n is not None and fact.n in placed:
            workers[placed[fact.n]][fact.n] = called[fact.call] = fact.worker
        elif isinstance(fact, StepDone) and fact.call in called:  # the output of an earlier call may stand
            workers[placed[fact.n]][fact.n] = called[fact.call]
    found = []
    for accepted in facts(events, PlanAccepted):
        made = [fact.decision for fact in opened if fact.proposal <= accepted.proposal]
        of_plan = workers.get(accepted.proposal, {})
        if made and made[-1] is not None:
            found.append(_Round(made[-1], tuple([of_plan[n] for n in sorted(of_plan)])))
    return found


def scores(
    ratings: Sequence[Feedback], last: Feedback, raters: Mapping[str, float] | None = None
) -> tuple[float | None, float | None]:
    """Return the score of a run before a rating and with it: the mean over sources of the latest score of each, by
    the weights in `raters`, where a source that is not named has 1.

    None means that no source has scored it. Implicit signs have no score and are ignored, as are sources of weight 0.
    """
    weights = raters if raters is not None else {}
    latest: dict[tuple[str, str], float] = {}
    before: float | None = None
    for rating in sorted(ratings, key=lambda rating: (rating.at, rating.id)):
        if rating.score is None or rating.kind == "implicit" or not weights.get(rating.source, 1.0):
            continue
        if rating.id == last.id:
            before = _mean(latest, weights)
        latest[rating.kind, rating.source] = rating.score
        if rating.id == last.id:
            return before, _mean(latest, weights)
    return None, None


def _mean(latest: Mapping[tuple[str, str], float], weights: Mapping[str, float]) -> float | None:
    """Return the weighted mean of scores by kind and source; None where there is none."""
    total = sum([weights.get(source, 1.0) for _, source in latest])
    weighted = sum([weights.get(source, 1.0) * score for (_, source), score in latest.items()])
    if not total:
        return None
    return weighted / total
