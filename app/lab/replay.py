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

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain, groupby, pairwise
from random import Random
from typing import NamedTuple

from msgspec import Struct

from app.core.plan.templates import Arm, arm_of_workers
from app.core.pool.catalog import Card, Price, SelectorSpec, Worker
from app.core.rating.features import Features, features
from app.core.rating.posterior import USUAL_OUTPUT_TOKENS, Rating, logistic
from app.lab.logged_decisions import hash_features
from app.lab.offpolicy import Log, LoggedOutcome, Report
from app.lab.recorded_outcomes import Dataset, RecordedPrompt, RecordsRefused
from app.lab.routing_baselines import BASELINES, Estimator, Example, Scores
from app.lab.simulated_selector import SimulatedSelector

SELECTOR, ORACLE, LOGGED = "selector", "perfect choice", "always "
TARGET = 0.95
"""The share of the best model's score whose cost is reported."""
FULL_MICRO_USD = 50_000
"""The cost of a call of the best model, as the selector is told it; all others are in proportion."""


class Plan(Struct, frozen=True):
    """The size of a replay."""

    ratings: int
    held_out: int
    seeds: Sequence[int]
    cost_weight: float
    """The share of a right answer's worth that the best model's cost takes away."""


class Figures(Struct, frozen=True):
    """Figures of one policy under one seed; the module docstring defines them. None: not defined there."""

    auc: float
    apgr: float | None
    cost_95: float | None
    regret: float
    learning_regret: float | None = None


class Routes(Struct, frozen=True):
    """The models between which prompts are routed, by rising cost: the first is the cheapest, the last the best."""

    models: tuple[str, ...]
    costs: Mapping[str, float]
    """In parts of the best model's cost; also of the models that are left out."""
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
    worthwhile = [model for model in data.models if model == strong or data.costs[model] < data.costs[strong]]
    if len(worthwhile) < 2:
        raise RecordsRefused(
            f"{strong} is the best model and the cheapest one; there is nothing to choose: send it every prompt, "
            "or give costs with --cost MODEL=DOLLARS"
        )
    by_cost = sorted(worthwhile, key=lambda model: data.costs[model])
    relative_costs = {model: data.costs[model] / data.costs[strong] for model in data.models}
    return Routes(tuple(by_cost), relative_costs, cost_weight)


class Part(Struct, frozen=True):
    """A part of the rows, with features and with the scores of the routed models."""

    rows: Sequence[RecordedPrompt]
    seen: Sequence[Features]
    scores: Sequence[Scores]

    @property
    def examples(self) -> Sequence[Example]:
        """Return the rows as baselines learn them."""
        return [
            Example(prompt_features, scores) for prompt_features, scores in zip(self.seen, self.scores, strict=True)
        ]


def split(
    data: Dataset, routing: Routes, features_of_row: dict[int, Features], plan: Plan, seed: int
) -> tuple[Part, Part]:
    """Return the training and the held-out part of a seed; of few rows at least half are for training. There is no
    training on rows of a log whose model is left out, nor on the conversations of held-out rows.

    `features_of_row` keeps the features of rows, by their place, for the next seed.
    """
    places_of: dict[str, list[int]] = {}
    for place, row in enumerate(data.rows):
        places_of.setdefault(row.conversation or f"row {place}", []).append(place)
    conversations = list(places_of.values())
    Random(f"replay|{seed}").shuffle(conversations)
    order = list(chain.from_iterable(conversations))
    count = min(plan.held_out, len(order) // 2)
    held_out = order[:count]
    held_out_conversations = {data.rows[place].conversation for place in held_out} - {""}
    training: list[int] = []
    for place in order[count:]:
        row = data.rows[place]
        is_routed = not row.outcomes.keys().isdisjoint(routing.models)
        if is_routed and row.conversation not in held_out_conversations:
            training.append(place)
    training = training[: plan.ratings]
    if not training:
        raise RecordsRefused(f"no line to learn from is of {' or '.join(routing.models)}; give more lines of them")
    for place in (*training, *held_out):
        if place not in features_of_row:
            features_of_row[place] = features(data.rows[place].prompt)
    return _part(data, routing, features_of_row, training), _part(data, routing, features_of_row, held_out)


def _part(data: Dataset, routing: Routes, features_of_row: Mapping[int, Features], places: Sequence[int]) -> Part:
    """Return the rows in these places, with the scores that are known of the routed models."""
    rows: list[RecordedPrompt] = []
    scores: list[Scores] = []
    for place in places:
        row = data.rows[place]
        rows.append(row)
        scores.append({model: row.outcomes[model].score for model in routing.models if model in row.outcomes})
    return Part(rows, [features_of_row[place] for place in places], scores)


# -- full information


def replay_outcomes(data: Dataset, plan: Plan) -> Mapping[str, Sequence[Figures]]:
    """Return the figures of each policy, one for each seed. Raises `RecordsRefused`."""
    routing = routes(data, plan.cost_weight)
    features_of_row: dict[int, Features] = {}
    figures: dict[str, list[Figures]] = defaultdict(list)
    for seed in plan.seeds:
        training, held_out = split(data, routing, features_of_row, plan, seed)
        bandit = Bandit(routing)
        learning_regret = bandit.learn(training, Random(f"bandit|{seed}"))
        figures[SELECTOR].append(judge_estimator(routing, held_out, bandit.expects, learning_regret))
        for name, fit in BASELINES.items():
            estimator = fit(training.examples, routing.models, Random(f"{name}|{seed}"))
            figures[name].append(judge_estimator(routing, held_out, estimator))
        figures[ORACLE].append(_figures(routing, held_out, held_out.scores, None))
    return figures


def judge_estimator(
    routing: Routes, held_out: Part, estimator: Estimator, learning_regret: float | None = None
) -> Figures:
    """Return the figures of an estimator on held-out prompts."""
    estimates = list(map(estimator, held_out.seen))
    return _figures(routing, held_out, estimates, learning_regret)


def _figures(routing: Routes, held_out: Part, estimates: Sequence[Scores], learning_regret: float | None) -> Figures:
    """Return the figures of a policy that goes by these estimates of the held-out prompts' scores."""
    points = curve(routing, held_out.scores, estimates)
    (first_cost, weak), (last_cost, strong) = points[0], points[-1]
    area = 0.0
    for (cost, score), (next_cost, next_score) in pairwise(points):
        area += (next_cost - cost) * (score + next_score) / 2
    auc = area / (last_cost - first_cost)
    apgr = None
    if strong > weak:
        apgr = (auc - weak) / (strong - weak)
    total_regret = 0.0
    for scores, estimated in zip(held_out.scores, estimates, strict=True):
        total_regret += regret(routing, scores, routing.best(estimated))
    mean_regret = total_regret / len(held_out.scores)
    return Figures(auc, apgr, _cost_at(points, TARGET * strong), mean_regret, learning_regret)


def regret(routing: Routes, scores: Scores, chosen: str) -> float:
    """Return the reward that a choice loses to the perfect one."""
    best = routing.best(scores)
    return routing.reward(best, scores[best]) - routing.reward(chosen, scores[chosen])


class Upgrade(NamedTuple):
    """The step of one prompt from a model to a more expensive one."""

    slope: float
    """The estimated gain for each unit of cost."""
    cost: float
    gain: float
    """The true gain of score."""


def curve(routing: Routes, true: Sequence[Scores], estimates: Sequence[Scores]) -> list[tuple[float, float]]:
    """Return pairs of mean cost and mean score, from all prompts at the cheapest model to all at the best one.

    Upgrades with the same estimate are made together, along a straight line, as if drawn by chance.
    """
    upgrades: list[Upgrade] = []
    for scores, estimated in zip(true, estimates, strict=True):
        upgrades += _upgrades(routing, scores, estimated)
    upgrades.sort(key=lambda upgrade: -upgrade.slope)
    count, cheapest = len(true), routing.models[0]
    cost, score = routing.costs[cheapest], sum([scores[cheapest] for scores in true]) / count
    points = [(cost, score)]
    for _, group in groupby(upgrades, key=lambda upgrade: upgrade.slope):
        together = list(group)
        cost += sum([upgrade.cost for upgrade in together]) / count
        score += sum([upgrade.gain for upgrade in together]) / count
        points.append((cost, score))
    return points


def _upgrades(routing: Routes, scores: Scores, estimated: Scores) -> list[Upgrade]:
    """Return the steps of one prompt along the upper hull of estimated score over cost, up to the best model."""
    models, costs = routing.models, routing.costs
    upgrades: list[Upgrade] = []
    here = 0
    while here < len(models) - 1:
        best = Upgrade(-math.inf, 0.0, 0.0)
        there = here
        for place in range(here + 1, len(models)):
            cost = costs[models[place]] - costs[models[here]]
            slope = 0.0
            if cost > 0:
                slope = (estimated[models[place]] - estimated[models[here]]) / cost
            if slope >= best.slope:  # of equal slopes the longest step
                best = Upgrade(slope, cost, scores[models[place]] - scores[models[here]])
                there = place
        upgrades.append(best)
        here = there
    return upgrades


def _cost_at(points: Sequence[tuple[float, float]], target: float) -> float | None:
    """Return the least cost at which a score is reached; None if it never is."""
    if points[0][1] >= target:
        return points[0][0]
    for (cost, score), (next_cost, next_score) in pairwise(points):
        if next_score >= target:
            return cost + (next_cost - cost) * (target - score) / (next_score - score)
    return None


# -- the selector


class Bandit:
    """The selector of the service over models as workers, with its own posterior, decision and exploration."""

    def __init__(self, routing: Routes) -> None:
        self._routes = routing
        self._usd = {model: round(routing.costs[model] * FULL_MICRO_USD) for model in routing.models}
        spec = SelectorSpec(templates=("answer",), cost=routing.cost_weight, full_usd=FULL_MICRO_USD)
        workers = [_worker(model, self._usd[model]) for model in routing.models]
        self._arms = [arm_of_workers("answer", [model]) for model in routing.models]
        self.selector = SimulatedSelector(spec, workers, self._arms)

    def learn(self, part: Part, random: Random) -> float:
        """Choose, and learn the score of the choice, prompt by prompt; return the mean regret."""
        total_regret = 0.0
        for number, (prompt_features, scores) in enumerate(zip(part.seen, part.scores, strict=True)):
            arm = self.selector.explore(prompt_features, random).arm
            total_regret += regret(self._routes, scores, arm.main)
            self.note(arm, prompt_features, scores[arm.main], number)
        return total_regret / len(part.seen)

    def imitate(self, part: Part) -> None:
        """Learn the outcomes of a log, whoever chose."""
        arms = {arm.main: arm for arm in self._arms}
        for number, (prompt_features, scores) in enumerate(zip(part.seen, part.scores, strict=True)):
            for model, score in scores.items():
                self.note(arms[model], prompt_features, score, number)

    def note(self, arm: Arm, prompt_features: Features, score: float, number: int) -> None:
        """Learn one rating; ratings follow each other by a second."""
        self.selector.learn(Rating(arm, prompt_features, score, self._usd[arm.main], 1.0 + number))

    def expects(self, prompt_features: Features) -> Scores:
        """Return the expected score of each model at the posterior's mean."""
        estimated = self.selector.estimates(prompt_features)
        return {estimate.arm.main: logistic(estimate.mean) for estimate in estimated}


def _worker(model: str, usd: int) -> Worker:
    """Return a worker whose usual step costs so many micro-dollars."""
    return Worker(model, "recorded", model, Price(0, round(usd * 1e6 / USUAL_OUTPUT_TOKENS)), Card())


# -- logs


def estimate_from_log(data: Dataset, plan: Plan) -> Mapping[str, Sequence[Report]]:
    """Return the off-policy estimate of each policy from a log, one for each seed. Raises `RecordsRefused`."""
    routing = routes(data, plan.cost_weight)
    shares = {model: 0.0 for model in data.models}
    for row in data.rows:
        shares[next(iter(row.outcomes))] += 1 / len(data.rows)
    features_of_row: dict[int, Features] = {}
    reports: dict[str, list[Report]] = defaultdict(list)
    for seed in plan.seeds:
        training, held_out = split(data, routing, features_of_row, plan, seed)
        bandit = Bandit(routing)
        bandit.imitate(training)
        estimators: dict[str, Estimator] = {SELECTOR: bandit.expects}
        for name, fit in BASELINES.items():
            estimators[name] = fit(training.examples, routing.models, Random(f"{name}|{seed}"))
        judge = Log(_make_logged_rows(routing, held_out, shares))
        for name, estimator in estimators.items():
            choices = [{routing.best(estimator(prompt)): 1.0} for prompt in held_out.seen]
            reports[name].append(judge.report(choices))
        for model in routing.models:
            reports[LOGGED + model].append(judge.report([{model: 1.0}] * len(held_out.rows)))
    return reports


def _make_logged_rows(routing: Routes, part: Part, shares: Mapping[str, float]) -> list[LoggedOutcome]:
    """Return the rows as the estimators read them. One without its own propensity has the model's share of the log.

    Rows of models that are left out stay, with a weight of 0: a propensity is a probability among all models.
    """
    logged = []
    for row, prompt_features in zip(part.rows, part.seen, strict=True):
        model, outcome = next(iter(row.outcomes.items()))
        propensity = row.propensity
        if propensity is None:
            propensity = shares[model]
        reward = routing.reward(model, outcome.score)
        logged.append(LoggedOutcome(hash_features(prompt_features), model, propensity, reward, row.conversation))
    return logged
