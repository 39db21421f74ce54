"""Journaled decisions that were drawn at random, and the choices that other policies would have made instead.

Two layers leave such decisions. A selector journals the probability of every arm (`plan.opened`, `decision`). A
conductor that is a model reports the probability of each worker that it named (`plan.step`), given what it had written
before: so the workers of a plan are judged given its shape, and plans of another shape are another log. The text of
subtasks counts for nothing.

In a second round a selector decides what becomes of the first answer. That decision has a probability of its own; it is
the `further` one of the first.

Policies, by name: `greedy` is the log's own, which takes the likeliest arm and leaves nothing to chance; `current` is
the selector as it would choose now, from all that it has learned; `uniform` takes any arm; `always ARM` that arm, where
it may be taken, and whose answer it accepts.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from itertools import product

from msgspec import Struct
from msgspec.structs import replace

from app.core.message.chat import Message
from app.core.plan.templates import ACCEPT, MODEL, arm_named, arms, list_follow_up_arms
from app.core.pool.catalog import SelectorSpec, Worker
from app.core.rating.features import Features
from app.core.rating.feedback import Feedback, latest_scores
from app.core.rating.posterior import Posterior, estimates
from app.core.run.events import Event, Kind, PlanAccepted, PlanOpened, PlanStep, facts
from app.lab.offpolicy import Policy
from app.lab.rollouts import opening, turns_of

PLACES = 61
"""Into so many places the words of a request are folded: with the counts it makes a regression of a bearable size."""
MOST_COMBINED = 1_024
"""Combinations of workers over which `uniform` is spread."""
GREEDY, CURRENT, UNIFORM, ALWAYS = "greedy", "current", "uniform", "always "
MOST_STEPS = 32
"""The largest number of steps of an arm; the candidates of a decision say whether the run had room for it."""


class LoggedDecision(Struct, frozen=True):
    """One decision. Only those of one `layer` and `shape` are judged together."""

    layer: str
    shape: str
    """The access lists of a model's plan, as JSON; empty for a selector, whose arms have shapes of their own."""
    action: str
    propensity: float
    candidates: Mapping[str, float]
    """Every arm that could have been taken; of a model only what it did is known."""
    pool: tuple[str, ...]
    features: str = ""
    """The ref of what the decision rests on; empty where it was not stored."""
    further: "LoggedDecision | None" = None
    """The decision about the answer in a second round of a selector."""
    spent: float = 0.0
    """The micro-dollars that the run had cost before a decision in a second round."""

    @property
    def was_drawn(self) -> bool:
        """Return True if another choice was possible."""
        return self.propensity < 1.0 or (self.further is not None and self.further.was_drawn)


def read_decision(events: Sequence[Event]) -> LoggedDecision | None:
    """Return the decision behind the first workflow of a run that has an answer; None if there is none of these kinds,
    or if that workflow was a repair or a fallback."""
    accepted = {fact.proposal for fact in facts(events, PlanAccepted)}
    succeeded = [event for event in events if event.kind is Kind.SUCCEEDED]
    first_round = [fact for fact in facts(events, PlanOpened) if fact.round == 1 and fact.parent is None]
    plans = [fact for fact in first_round if fact.proposal in accepted]
    if not plans or not succeeded:
        return None
    opened = plans[-1]  # one before it was dropped, because nobody approved it
    if opened.mode != "first":
        return None
    if opened.decision is not None:
        return _selector_decision(events, opened)
    steps = [fact for fact in facts(events, PlanStep) if fact.proposal == opened.proposal]
    odds = [step.probability for step in steps if step.probability]  # what has a probability of 0 was not drawn by it
    if steps and len(odds) == len(steps):
        return _model_decision(opened, steps, odds)
    return None


def _selector_decision(events: Sequence[Event], opened: PlanOpened) -> LoggedDecision | None:
    """Return the decision of a selector, with that of a second round. None where the latter was not carried out: the
    run went on with the first answer for another reason than the choice."""
    first = _decision_of(opened)
    later = [fact for fact in facts(events, PlanOpened) if fact.round > 1 and fact.decision is not None]
    if first is None or not later:
        return first
    carried_out = {fact.proposal for fact in facts(events, PlanAccepted)} >= {later[-1].proposal}
    stopped = any(event.kind is Kind.SUCCEEDED and event.body.get("stopped") for event in events)
    further = _decision_of(later[-1])
    if further is not None and carried_out and not stopped:
        return replace(first, further=replace(further, spent=_spent_before(events, later[-1].proposal)))
    return None


def _spent_before(events: Sequence[Event], proposal: int) -> float:
    """Return the micro-dollars that a run had cost when a proposal was opened."""
    spent = 0.0
    for event in events:
        if event.kind is Kind.PLAN_OPENED and event.body["proposal"] == proposal:
            break
        if event.kind is Kind.CALL_FINISHED:
            spent += event.body["usd"]
    return spent


def _decision_of(opened: PlanOpened) -> LoggedDecision | None:
    decision = opened.decision
    if decision is None:
        return None
    return LoggedDecision(
        layer=decision["layer"],
        shape="",
        action=decision["action"],
        propensity=decision["propensity"],
        candidates=dict(decision["candidates"]),
        pool=opened.order,
        features=decision["features"],
    )


def _model_decision(opened: PlanOpened, steps: Sequence[PlanStep], odds: Sequence[float]) -> LoggedDecision:
    """Return the decision of a model; `odds` are the probabilities of the workers of its steps."""
    shape = [step.access.shift(-steps[0].n).as_list() for step in steps]
    action = " ".join(step.worker for step in steps)
    chance = min(1.0, math.prod(odds))
    return LoggedDecision(opened.conductor, json.dumps(shape), action, chance, {action: chance}, opened.order)


def choice(policy: str, decision: LoggedDecision) -> Policy | None:
    """Return the choice that a policy would have made in the place of a decision; None if it could not have done it
    there."""
    if policy == UNIFORM:
        return _uniform(decision)
    if policy == GREEDY:
        if decision.shape:
            return None
        return {max(decision.candidates, key=lambda arm: decision.candidates[arm]): 1.0}
    arm = policy.removeprefix(ALWAYS)
    if ACCEPT in decision.candidates:
        return {ACCEPT: 1.0}
    if not _is_possible(arm, decision):
        return None
    return {arm: 1.0}


def _uniform(decision: LoggedDecision) -> Policy | None:
    if not decision.shape:
        return dict.fromkeys(decision.candidates, 1 / len(decision.candidates))
    steps = len(json.loads(decision.shape))
    if len(decision.pool) ** steps > MOST_COMBINED:
        return None
    arms = [" ".join(workers) for workers in product(decision.pool, repeat=steps)]
    return dict.fromkeys(arms, 1 / len(arms))


def _is_possible(arm: str, decision: LoggedDecision) -> bool:
    if not decision.shape:
        return arm in decision.candidates
    workers = arm.split(" ")
    return len(workers) == len(json.loads(decision.shape)) and set(workers) <= set(decision.pool)


class Beliefs(Struct, frozen=True):
    """The state that a tier's selector has learned, and the arms that it chooses among."""

    posterior: Posterior
    spec: SelectorSpec
    workers: Mapping[str, Worker]

    def choice(
        self, decision: LoggedDecision, request_features: Features, first: LoggedDecision | None = None
    ) -> Policy | None:
        """Return the arm that it would take now, in the place of an earlier decision; None if it has none of the
        candidates any more. `first` is the decision whose answer it is about, in a second round."""
        workers = [self.workers[name] for name in decision.pool if name in self.workers]
        if not workers:
            return None
        if first is not None:
            all_arms = list_follow_up_arms(self.spec, workers, arm_named(first.action))
        else:
            all_arms = arms(self.spec, workers, MOST_STEPS, model=MODEL in decision.candidates)
        able = [arm for arm in all_arms if arm.name in decision.candidates]
        if not able:
            return None
        estimated = estimates(self.posterior, self.spec, able, workers, request_features, decision.spent)
        return {max(estimated, key=lambda estimate: estimate.worth).arm.name: 1.0}


def worth(ratings: Sequence[Feedback], usd: int, spec: SelectorSpec | None) -> float | None:
    """Return the reward of a run: its score, less the share of its cost where its tier has a selector; None without a
    score."""
    mean_score = score(ratings)
    if mean_score is None or spec is None or not spec.full_usd:
        return mean_score
    return mean_score * (1 - spec.cost * min(1.0, usd / spec.full_usd))


def score(ratings: Sequence[Feedback]) -> float | None:
    """Return the rating of a run: the mean of each source's latest score; None if nobody has rated it. What callers did
    without saying anything has no score."""
    latest = latest_scores(ratings)
    given = [*latest.get("explicit", {}).values(), *latest.get("grader", {}).values()]
    if not given:
        return None
    return sum(given) / len(given)


def conversation(messages: Sequence[Message]) -> str:
    """Return the name of a conversation: a hash of how it begins, up to the caller's first message."""
    return hashlib.sha256(opening(turns_of(messages)).encode()).hexdigest()[:16]


def hash_features(request_features: Features) -> tuple[float, ...]:
    """Return a request's features for a regression, and those of the answer where one was seen."""
    of_request, of_answer = [0.0] * PLACES, [0.0] * PLACES
    for place, value in request_features.words:
        of_request[place % PLACES] += value
    for place, value in request_features.answer:
        of_answer[place % PLACES] += value
    if not request_features.answer:
        return (*of_request, *request_features.counts)
    return (*of_request, *request_features.counts, *of_answer)
