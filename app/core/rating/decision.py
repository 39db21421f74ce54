"""A selector's decision: how probable each arm was, which was taken, and what it takes to judge others by it later.

`decide` counts how often each arm is the best in `DRAWS` draws from the posterior (Thompson sampling), spreads a share
evenly over all arms, and draws the action from just these probabilities. So the propensity is the chance with which
the action was really taken. Without leave to explore, the arm that is best at the mean is taken, with propensity 1.

`Decision.body` stands in `plan.opened` under `decision`, committed before anything is executed. Whoever evaluates
policies off line reads it there: `layer` ("selector"), `policy` and `version` (which posterior: its number and hash),
`features` (the ref of the feature vector, a content of the run in the form of `Features.to_json`), `candidates` (arm
to probability; an arm that was not eligible is not there, and had 0), `action`, `propensity`, `explored` (whether the
action is another one than the posterior's best), `explore` (the share that was spread), and `seed`; with an embedder
also `embedder` (its name) and, if the features lack its vector, `blind` (why). Where arms were left out before the
draw, `masked` has each of them with what it would have held at the least, as `{"usd": micro-dollars}` or `{"tokens":
n}`, or would have taken, as `{"seconds": s}`, and `left` has what the run could still hold or take; such an arm is no
candidate. `predicted` has what the posterior expected of the action and of the `MOST_PREDICTED` arms that it took to be
worth the most: `{"success": probability of a right answer, "usd": micro-dollars}`. `lent` is the share of the tenant's
choices that are made by the posterior of another tenant, drawn before the arm; `version` names the one that decided,
and the probabilities are those under it.
"""

from collections.abc import Callable, Mapping, Sequence
from heapq import nlargest
from math import exp
from typing import Any

from msgspec import Struct

from app.core.rating.posterior import Estimate

DRAWS = 64
"""Draws from the posterior of which each arm wins some."""
RARE = 2.5
"""Deviations; an arm that would need more luck to be worth what the best is worth on a bad day is not drawn for."""
LAYER = "selector"
MOST_PREDICTED = 8
"""The most arms besides the action whose predictions are journaled."""

Normals = Callable[[int], Sequence[float]]
"""Gives so many draws from the standard normal distribution."""


class ArmChoice(Struct, frozen=True):
    """Probabilities by arm, and the arm that was drawn from them."""

    candidates: Mapping[str, float]
    action: str
    best: str
    """The arm that is best at the posterior's mean."""
    predicted: Mapping[str, Mapping[str, float]] = {}
    """The expected success and cost of the action and of the best arms: see the module's docstring."""

    @property
    def propensity(self) -> float:
        """Return the probability with which the action was taken."""
        return self.candidates[self.action]


class Decision(Struct, frozen=True):
    """A choice with everything that is journaled of it."""

    choice: ArmChoice
    policy: str
    version: str
    features: str
    explore: float
    seed: str
    masked: Mapping[str, Mapping[str, float]] = {}
    left: Mapping[str, float] = {}
    """The amount that the run could still hold when arms were masked."""
    lent: float = 0.0
    """The share of the tenant's choices that other tenants' beliefs decide."""
    embedder: Mapping[str, str] = {}
    """For a selector with an embedder: its name under `embedder`, and under `blind` the reason why it returned
    nothing."""

    def body(self) -> dict[str, Any]:
        """Return what is journaled, in plain JSON values; the module's docstring describes each field."""
        body: dict[str, Any] = {
            "layer": LAYER,
            "policy": self.policy,
            "version": self.version,
            "features": self.features,
            "candidates": dict(self.choice.candidates),
            "action": self.choice.action,
            "propensity": self.choice.propensity,
            "explored": self.choice.action != self.choice.best,
            "explore": self.explore,
            "seed": self.seed,
        }
        if self.choice.predicted:
            body["predicted"] = dict(self.choice.predicted)
        if self.masked:
            body["masked"] = {arm: dict(price) for arm, price in self.masked.items()}
            body["left"] = dict(self.left)
        if self.lent:
            body["lent"] = self.lent
        return body | dict(self.embedder)


def decide(
    estimates: Sequence[Estimate], share: float | None, normals: Normals, uniform: Callable[[], float]
) -> ArmChoice:
    """Choose among arms. `share` is spread evenly over them; None: take the best and leave nothing to chance."""
    best = max(estimates, key=lambda estimate: estimate.worth).arm.name
    if share is None:
        certain = {estimate.arm.name: float(estimate.arm.name == best) for estimate in estimates}
        return ArmChoice(certain, best, best, predictions(estimates, best))
    even = share / len(estimates)
    candidates: dict[str, float] = {}
    for estimate, wins in zip(estimates, count_wins(estimates, normals), strict=True):
        candidates[estimate.arm.name] = (1 - share) * wins / DRAWS + even
    action = draw_arm(candidates, uniform())
    return ArmChoice(candidates, action, best, predictions(estimates, action))


def predictions(estimates: Sequence[Estimate], action: str) -> Mapping[str, Mapping[str, float]]:
    """Return the expected success and cost of the action and of the arms that are worth the most, the action first."""
    chosen = [estimate for estimate in estimates if estimate.arm.name == action]
    best = nlargest(MOST_PREDICTED + 1, estimates, key=lambda estimate: estimate.worth)
    others = [estimate for estimate in best if estimate not in chosen]
    predicted: dict[str, Mapping[str, float]] = {}
    for estimate in [*chosen, *others[:MOST_PREDICTED]]:
        predicted[estimate.arm.name] = {"success": round(estimate.success, 6), "usd": round(estimate.usd)}
    return predicted


def count_wins(estimates: Sequence[Estimate], normals: Normals) -> list[int]:
    """Return in how many of `DRAWS` draws each arm is worth the most."""
    tops, leaders = [-1.0] * DRAWS, [0] * DRAWS
    floor = max([estimate.left / (1 + exp(estimate.deviation - estimate.mean)) for estimate in estimates])
    for place, estimate in enumerate(estimates):
        if estimate.left / (1 + exp(-RARE * estimate.deviation - estimate.mean)) < floor:
            continue
        mean, deviation, left = estimate.mean, estimate.deviation, estimate.left
        for n, draw in enumerate([left / (1 + exp(-mean - deviation * z)) for z in normals(DRAWS)]):
            if draw > tops[n]:
                tops[n], leaders[n] = draw, place
    return [leaders.count(place) for place in range(len(estimates))]


def draw_arm(candidates: Mapping[str, float], luck: float) -> str:
    """Return the arm on which a number in [0, 1) falls."""
    for name, probability in candidates.items():
        luck -= probability
        if luck < 0:
            return name
    return max(candidates, key=lambda name: candidates[name])  # rounding has left their sum a little below 1
