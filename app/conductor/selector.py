"""The selector: a contextual bandit over small workflows that learns from ratings.

It generates no text. It chooses one of its arms (`plan/templates.py`) from the posterior over the arms' values for this
request (`rating/posterior.py`), and reports the probability of the choice (`rating/decision.py`). One of the arms may
be to let a model plan. In a second round it decides what becomes of the first answer, with a probability of its own: it
is accepted, checked, or given anew by another worker. Arms that the run cannot pay, or has no time for, are left out
before the draw, and the decision says which. The posterior is read for each choice and is kept up to date by
`app/engine/conductors/ratings.py`; this module keeps no state. Random numbers are seeded by the run's id and the
proposal's number, so that a choice can be repeated from the posterior that it names.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import inf
from random import Random
from statistics import NormalDist

from msgspec.structs import replace

from app.conductor.protocol import Brief, Chooser, Conductor, ConductorChoice, FixedPlanConductor, RequestEmbedding
from app.core.plan.pricing import every_plan_fits, least_price, plan_price, plan_seconds, question_tokens
from app.core.plan.templates import ACCEPT, MODEL, PLANNED, Arm, arm_of, arms, build_follow_up_arm, list_follow_up_arms
from app.core.plan.workflow import access_from_list
from app.core.pool.catalog import SELECTOR_ROUNDS, Amount, SelectorSpec
from app.core.rating.decision import Normals, decide
from app.core.rating.features import Features, features, find_last_question, of_answer
from app.core.rating.posterior import estimates
from app.core.rating.published_posterior import Beliefs, PublishedPosterior, policy

GRAIN = 1024
"""Quantiles that stand for the normal distribution."""


class Selector(Chooser):
    """The selector of one tier."""

    def __init__(
        self, tier: str, spec: SelectorSpec, beliefs: Callable[[str], Beliefs], model: Conductor | None = None
    ) -> None:
        """`beliefs` returns those of a tenant; `model` is the conductor whose plan is one of the arms."""
        self._policy = policy(tier)
        self._spec = spec
        self._beliefs = beliefs
        self.embedder, self.patience = spec.embedder, spec.patience
        self.model = model

    def choose(
        self, brief: Brief, seed: str, *, explores: bool, asks: bool, embedding: RequestEmbedding
    ) -> ConductorChoice:
        """Choose an arm for this brief; `protocol.Chooser` has the contract."""
        request_features, candidates, spent = self._candidates(brief, asks=asks, embedding=embedding)
        payable, masked = affordable(candidates, brief)
        random = Random(seed)
        explore: float | None = None
        lent = 0.0
        beliefs = self._beliefs(brief.tenant)
        if explores:
            explore = self._spec.explore
            lent = beliefs.lent(self._spec.peers)
        published = _draw_posterior(beliefs, lent, random)
        estimated = estimates(published.posterior, self._spec, payable, brief.workers, request_features, spent)
        choice = decide(estimated, explore, _normals(random), random.random)
        arm = next(arm for arm in payable if arm.name == choice.action)
        conductor: Conductor = FixedPlanConductor(arm.steps)
        if arm.name == MODEL and self.model is not None:
            conductor = self.model
        return ConductorChoice(
            conductor, choice, self._policy, published.version, request_features, explore or 0.0, seed, masked, lent
        )

    def _candidates(
        self, brief: Brief, *, asks: bool, embedding: RequestEmbedding
    ) -> tuple[Features, Sequence[Arm], float]:
        """Return the features of the question (in a second round, of the answer too), the arms that may be chosen in
        this round, and the micro-dollars that the run has spent before it."""
        request_features = features(find_last_question(brief.task.messages), embedding.vector)
        if brief.round == 1:
            may_ask = asks and self.model is not None
            return request_features, arms(self._spec, brief.workers, brief.limits.steps, model=may_ask), 0.0
        spent = float(brief.limits.usd - brief.usd_left)
        if brief.previous is None or brief.round > SELECTOR_ROUNDS:
            return request_features, (build_follow_up_arm(ACCEPT, PLANNED),), spent
        steps = [(step.worker, step.subtask, access_from_list(step.access)) for step in brief.previous.steps]
        request_features = replace(request_features, answer=of_answer(brief.previous.answer))
        return request_features, list_follow_up_arms(self._spec, brief.workers, arm_of(steps)), spent


def _draw_posterior(beliefs: Beliefs, lent: float, random: Random) -> PublishedPosterior:
    """Return the posterior that decides: the tenant's own, or with the probability `lent` one of another tenant's."""
    if lent and random.random() < lent:
        return random.choice(beliefs.peers)
    return beliefs.published


def affordable(every: Sequence[Arm], brief: Brief) -> tuple[Sequence[Arm], Mapping[str, Mapping[str, float]]]:
    """Return the arms whose least price fits what the run may still spend, and whose likely duration fits its time; and
    the others with their prices or durations.

    Where none fits, the cheapest and quickest arm remains: its step is given to whoever can be paid.
    """
    question = question_tokens(brief.task)
    amount_left = Amount(brief.usd_left, brief.tokens_left)
    seconds_left = inf
    if brief.seconds_left is not None:
        seconds_left = brief.seconds_left
    longest = max([len(arm.steps) for arm in every])
    slowest = brief.planning_seconds + max(longest, 1) * max(brief.paces.values(), default=0.0)
    least_left = amount_left.minus(brief.planning)
    if slowest <= seconds_left and every_plan_fits(brief.workers, longest, question, brief.limits.floor, least_left):
        return every, {}
    masked: dict[str, Mapping[str, float]] = {}
    ranks: dict[str, tuple[bool, bool, float, int]] = {}
    for arm in every:
        price, seconds = _price(arm, brief, question), _seconds(arm, brief)
        lack = amount_left.shortage(price)
        is_late = seconds > seconds_left
        if lack:
            masked[arm.name] = {lack: price.usd if lack == "usd" else price.tokens}
            ranks[arm.name] = (True, is_late, 0.0, price.usd)
        elif is_late:
            masked[arm.name] = {"seconds": seconds}
            ranks[arm.name] = (False, True, seconds, price.usd)
    if len(masked) == len(every):
        del masked[min(masked, key=lambda name: ranks[name])]
    return [arm for arm in every if arm.name not in masked], masked


def _seconds(arm: Arm, brief: Brief) -> float:
    """Return the likely seconds of an arm; where the model plans, those of its call and of the quickest answer."""
    if arm.name == MODEL:
        return brief.planning_seconds + min(brief.paces.values(), default=0.0)
    return plan_seconds([(step.worker, step.access.steps) for step in arm.steps], brief.paces, brief.limits.fan_out)


def _price(arm: Arm, brief: Brief, question: int) -> Amount:
    """Return the least price of an arm; where the model plans, that of its call and of the cheapest answer."""
    floor = brief.limits.floor
    if arm.name != MODEL:
        return plan_price(arm.steps, brief.workers, question, floor)
    prices = [least_price(worker, question, floor) for worker in brief.workers]
    return brief.planning + min(prices, key=lambda price: price.usd)


def _normals(random: Random) -> Normals:
    def draw(count: int) -> Sequence[float]:
        return random.choices(_grains(), k=count)

    return draw


@cache
def _grains() -> tuple[float, ...]:
    """Return equally probable quantiles of the normal distribution: to pick one is ten times as fast as to draw."""
    return tuple(NormalDist().inv_cdf((n + 0.5) / GRAIN) for n in range(GRAIN))
