"""The replay of recorded outcomes: what selectors and baselines would have earned on them.

With full information, each seed splits the prompts anew. Baselines learn from all outcomes of the training prompts. The
selector is given them one after the other, chooses a model by its own code, and is told the score of that one alone
(bandit feedback). All are then judged on the held-out prompts:

curve ...... mean score over mean cost, from every prompt to the cheapest model up to every prompt to the best one; the
             prompts are upgraded in the order of the estimated gain for each unit of cost
auc ........ the mean score along the curve
apgr ....... the average share of the gap between the cheapest and the best model that is closed; 0.5 by chance
cost_95 .... the least cost at which 95 % of the best model's score is reached, in parts of that model's cost
regret ..... the reward per prompt that is lost to a perfect choice, with the reward that a selector goes by
learning_regret ... the same on the training prompts while it learned from its own choices

Costs are the mean costs of the models, so that for two models the curve is RouteLLM's. Models that cost more than the
best one are left out. A log has one outcome for each prompt, so nothing is known of other choices: there each policy
learns from a part of the log and is judged by the rest, by the estimators of `offpolicy`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from random import Random
from statistics import NormalDist

from app.core.plan.templates import Arm, arm_of_workers
from app.core.pool.catalog import Card, Price, SelectorSpec, Worker
from app.core.rating.decision import decide
from app.core.rating.features import Features, features
from app.core.rating.posterior import USUAL_OUTPUT_TOKENS, Posterior, Rating, estimates, learned, logistic
from app.lab.logged_decisions import hashed_features
from app.lab.offpolicy import Log, Logged, Report
from app.lab.recorded_outcomes import Dataset, Recorded, RecordsRefused
from app.lab.routing_baselines import BASELINES, Estimator, Example, Scores

SELECTOR, ORACLE, LOGGED = "selector", "perfect choice", "always "
TARGET = 0.95
"""The share of the best model's score whose cost is reported."""
FULL_MICRO_USD = 50_000
"""The cost of a call of the best model, as the selector is told it; all others are in proportion."""
GRAINS = tuple(NormalDist().inv_cdf((n + 0.5) / 1024) for n in range(1024))
"""Equally probable quantiles of the normal distribution."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The size of a replay."""

    ratings: int
    held_out: int
    seeds: Sequence[int]
    cost_weight: float
    """The share of a right answer's worth that the best model's cost takes away."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one policy under one seed; the module docstring defines them. None: not defined there."""

    auc: float
    apgr: float | None
    cost_95: float | None
    regret: float
    learning_regret: float | None = None


@dataclass(frozen=True, slots=True)
class Routes:
    """The models between which prompts are routed, by rising cost: the first is the cheapest, the last the best."""

    models: tuple[str, ...]
    costs: Mapping[str, float]
    """In parts of the best model's cost."""
    cost_weight: float

    def reward(self, model: str, score: float) -> float:
        """Return the score of an answer less the worth that its cost takes away."""
        return score * (1 - self.cost_weight * min(1.0, self.costs[model]))

    def best(self, scores: Scores) -> str:
        """Return the model with the highest reward by these scores."""
        return max(self.models, key=lambda model: self.reward(model, scores[model]))


def routes(data: Dataset, cost_weight: float) -> Routes:
    """Return the routes of a data set. Raises `RecordsRefused` if the cheapest model is the best as well."""
    scores = data.scores
    if data.unit == "calls":
        weak, strong = sorted(data.models, key=lambda model: scores[model])
        return Routes((weak, strong), {weak: 0.0, strong: 1.0}, cost_weight)
    strong = max(data.models, key=lambda model: (scores[model], -data.costs[model]))
    open_ = [model for model in data.models if model == strong or data.costs[model] < data.costs[strong]]
    if len(open_) < 2:
        raise RecordsRefused(f"{strong} is the best model and the cheapest one; there is nothing to choose")
    ordered = tuple(sorted(open_, key=lambda model: data.costs[model]))
    return Routes(ordered, {model: data.costs[model] / data.costs[strong] for model in ordered}, cost_weight)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the rows, with features and with the scores of the routed models."""

    rows: Sequence[Recorded]
    seen: Sequence[Features]
    scores: Sequence[Scores]

    @property
    def examples(self) -> Sequence[Example]:
        """Return the rows as baselines learn them."""
        return [Example(seen, scores) for seen, scores in zip(self.seen, self.scores, strict=True)]


def split(data: Dataset, open_: Routes, seen: dict[int, Features], plan: Plan, seed: int) -> tuple[Part, Part]:
    """Return the training and the held-out part of a seed; of few rows at least half are for training.

    `seen` keeps the features of rows, by their place, for the next seed.
    """
    order = list(range(len(data.rows)))
    Random(f"replay|{seed}").shuffle(order)
    held = min(plan.held_out, len(order) // 2)
    training, judged = order[held : held + plan.ratings], order[:held]
    for place in (*training, *judged):
        if place not in seen:
            seen[place] = features(data.rows[place].prompt)
    return _part(data, open_, seen, training), _part(data, open_, seen, judged)


def _part(data: Dataset, open_: Routes, seen: Mapping[int, Features], places: Sequence[int]) -> Part:
    rows = [data.rows[place] for place in places]
    scores: list[Scores] = []
    for row in rows:
        scores.append({model: row.outcomes[model].score for model in open_.models if model in row.outcomes})
    return Part(rows, [seen[place] for place in places], scores)


# -- full information


def replayed(data: Dataset, plan: Plan) -> Mapping[str, Sequence[Figures]]:
    """Return the figures of each policy, one for each seed. Raises `RecordsRefused`."""
    open_ = routes(data, plan.cost_weight)
    seen: dict[int, Features] = {}
    found: dict[str, list[Figures]] = {}
    for seed in plan.seeds:
        training, held = split(data, open_, seen, plan, seed)
        bandit = Bandit(open_)
        lost = bandit.learn(training, Random(f"bandit|{seed}"))
        found.setdefault(SELECTOR, []).append(judged(open_, held, bandit.expects, lost))
        for name, fit in BASELINES.items():
            estimator = fit(training.examples, open_.models, Random(f"{name}|{seed}"))
            found.setdefault(name, []).append(judged(open_, held, estimator))
        found.setdefault(ORACLE, []).append(_figures(open_, held, held.scores, None))
    return found


def judged(open_: Routes, held: Part, estimator: Estimator, lost: float | None = None) -> Figures:
    """Return the figures of an estimator on held-out prompts."""
    return _figures(open_, held, [estimator(seen) for seen in held.seen], lost)


def _figures(open_: Routes, held: Part, believed: Sequence[Scores], lost: float | None) -> Figures:
    points = curve(open_, held.scores, believed)
    (first, weak), (last, strong) = points[0], points[-1]
    area = 0.0
    for (before, low), (after, high) in pairwise(points):
        area += (after - before) * (low + high) / 2
    auc = area / (last - first)
    apgr = (auc - weak) / (strong - weak) if strong > weak else None
    losses = [regret(open_, scores, open_.best(own)) for scores, own in zip(held.scores, believed, strict=True)]
    return Figures(auc, apgr, _cost_at(points, TARGET * strong), sum(losses) / len(losses), lost)


def regret(open_: Routes, scores: Scores, chosen: str) -> float:
    """Return the reward that a choice loses to the perfect one."""
    best = open_.best(scores)
    return open_.reward(best, scores[best]) - open_.reward(chosen, scores[chosen])


Upgrade = tuple[float, float, float]
"""Estimated gain for each unit of cost, the cost, and the true gain."""


def curve(open_: Routes, true: Sequence[Scores], believed: Sequence[Scores]) -> list[tuple[float, float]]:
    """Return pairs of mean cost and mean score, from all prompts at the cheapest model to all at the best one.

    Upgrades with the same estimate are made together, along a straight line, as if drawn by chance.
    """
    upgrades: list[Upgrade] = []
    for scores, own in zip(true, believed, strict=True):
        upgrades += _upgrades(open_, scores, own)
    upgrades.sort(key=lambda upgrade: -upgrade[0])
    count, cheapest = len(true), open_.models[0]
    cost, score = open_.costs[cheapest], sum([scores[cheapest] for scores in true]) / count
    points = [(cost, score)]
    for _, group in groupby(upgrades, key=lambda upgrade: upgrade[0]):
        together = list(group)
        cost += sum([upgrade[1] for upgrade in together]) / count
        score += sum([upgrade[2] for upgrade in together]) / count
        points.append((cost, score))
    return points


def _upgrades(open_: Routes, scores: Scores, own: Scores) -> list[Upgrade]:
    """Return the steps of one prompt along the upper hull of estimated score over cost, up to the best model."""
    found: list[Upgrade] = []
    place, models = 0, open_.models
    while place < len(models) - 1:
        here = models[place]
        slopes = []
        for other in models[place + 1 :]:
            price = open_.costs[other] - open_.costs[here]
            slopes.append((own[other] - own[here]) / price if price > 0 else 0.0)
        steepest = max(range(len(slopes)), key=lambda n: (slopes[n], n))
        there = models[place + 1 + steepest]
        found.append((slopes[steepest], open_.costs[there] - open_.costs[here], scores[there] - scores[here]))
        place += 1 + steepest
    return found


def _cost_at(points: Sequence[tuple[float, float]], target: float) -> float | None:
    """Return the least cost at which a score is reached; None if it never is."""
    if points[0][1] >= target:
        return points[0][0]
    for (before, low), (after, high) in pairwise(points):
        if high >= target:
            return before + (after - before) * (target - low) / (high - low)
    return None


# -- the selector


class Bandit:
    """The selector of the service over models as workers, with its own posterior, decision and exploration."""

    def __init__(self, open_: Routes) -> None:
        self.posterior = Posterior()
        self._routes = open_
        self._spec = SelectorSpec(templates=("answer",), cost=open_.cost_weight, full_usd=FULL_MICRO_USD)
        self._usd = {model: round(open_.costs[model] * FULL_MICRO_USD) for model in open_.models}
        self._workers = [_worker(model, self._usd[model]) for model in open_.models]
        self._arms = [arm_of_workers("answer", [model]) for model in open_.models]

    def learn(self, part: Part, random: Random) -> float:
        """Choose, and learn the score of the choice, prompt by prompt; returns the mean regret."""
        total = 0.0
        for number, (seen, scores) in enumerate(zip(part.seen, part.scores, strict=True)):
            found = estimates(self.posterior, self._spec, self._arms, self._workers, seen)
            choice = decide(found, self._spec.explore, lambda count: random.choices(GRAINS, k=count), random.random)
            arm = next(arm for arm in self._arms if arm.name == choice.action)
            total += regret(self._routes, scores, arm.main)
            self.note(arm, seen, scores[arm.main], number)
        return total / len(part.seen)

    def imitate(self, part: Part) -> None:
        """Learn the outcomes of a log, whoever chose."""
        arms = {arm.main: arm for arm in self._arms}
        for number, (seen, scores) in enumerate(zip(part.seen, part.scores, strict=True)):
            for model, score in scores.items():
                self.note(arms[model], seen, score, number)

    def note(self, arm: Arm, seen: Features, score: float, number: int) -> None:
        """Learn one rating; ratings follow each other by a second."""
        rating = Rating(arm, seen, score, self._usd[arm.main], 1.0 + number)
        self.posterior = learned(self.posterior, self._spec, self._workers, rating)

    def expects(self, seen: Features) -> Scores:
        """Return the expected score of each model at the posterior's mean."""
        found = estimates(self.posterior, self._spec, self._arms, self._workers, seen)
        return {estimate.arm.main: logistic(estimate.mean) for estimate in found}


def _worker(model: str, usd: int) -> Worker:
    """Return a worker whose usual step costs so many micro-dollars."""
    return Worker(model, "recorded", model, Price(0, round(usd * 1e6 / USUAL_OUTPUT_TOKENS)), Card())


# -- logs


def estimated(data: Dataset, plan: Plan) -> Mapping[str, Sequence[Report]]:
    """Return the off-policy estimate of each policy from a log, one for each seed. Raises `RecordsRefused`."""
    open_ = routes(data, plan.cost_weight)
    shares = {model: 0.0 for model in data.models}
    for row in data.rows:
        shares[next(iter(row.outcomes))] += 1 / len(data.rows)
    rows = [row for row in data.rows if next(iter(row.outcomes)) in open_.models]
    log = Dataset(rows, data.models, data.costs, data.unit, data.full, data.left_out)
    seen: dict[int, Features] = {}
    found: dict[str, list[Report]] = {}
    for seed in plan.seeds:
        training, held = split(log, open_, seen, plan, seed)
        policies: dict[str, Estimator] = {}
        bandit = Bandit(open_)
        bandit.imitate(training)
        policies[SELECTOR] = bandit.expects
        for name, fit in BASELINES.items():
            policies[name] = fit(training.examples, open_.models, Random(f"{name}|{seed}"))
        judge = Log([_logged(open_, row, observed, shares) for row, observed in zip(held.rows, held.seen, strict=True)])
        for name, estimator in policies.items():
            found.setdefault(name, []).append(
                judge.report([{open_.best(estimator(observed)): 1.0} for observed in held.seen])
            )
        for model in open_.models:
            found.setdefault(LOGGED + model, []).append(judge.report([{model: 1.0}] * len(held.rows)))
    return found


def _logged(open_: Routes, row: Recorded, seen: Features, shares: Mapping[str, float]) -> Logged:
    """Return the row as the estimators read it. Without its own propensity it has the model's share of the log."""
    model, outcome = next(iter(row.outcomes.items()))
    propensity = row.propensity if row.propensity is not None else shares[model]
    return Logged(hashed_features(seen), model, propensity, open_.reward(model, outcome.score))
