"""The product's selector (`kind = "selector"`) as a baseline in world 2: its own code, taught by an erring judge.

For each pool it begins anew, with cards of prices and of the domains in which a worker did best. Then it decides,
executes one plan a task, is told the judge's verdict less what the wait was worth, and learns from it with the bill.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from random import Random
from statistics import NormalDist

import numpy as np

from app.core.plan.templates import Arm, arms
from app.core.pool import catalog
from app.core.rating.decision import decide
from app.core.rating.features import features
from app.core.rating.posterior import Posterior, Rating, estimates, learned
from app.lab.world2.baselines import PlanIndices, Setting
from app.lab.world2.constants import DOMAINS, constants
from app.lab.world2.execution import draw_verdict
from app.lab.world2.rules import size_of
from app.lab.world2.shapes import MOST_STEPS, Plan
from app.lab.world2.tasks import Task
from app.lab.world2.workers import Worker

SHAPES: Mapping[str, str] = {
    "answer": "solve",
    "reason": "reason",
    "plan-reason": "plan reason",
    "answer-check": "solve check",
    "reason-check": "reason check",
    "judge": "solve+solve combine",
    "mixture": "solve+solve+solve combine",
}
"""Templates of the product, and the shapes that they are in this world."""


class ProductSelector:
    """Learns from `ratings` verdicts over each pool; judged on what it holds for best afterwards."""

    name = "product's selector"

    def __init__(self, seed: int, ratings: int) -> None:
        self._seed, self._ratings = seed, ratings
        self._learned: dict[int, Posterior] = {}

    def choose(self, setting: Setting, tasks: Sequence[Task]) -> PlanIndices:
        """Return the plans that the posterior's mean holds for best, once it has learned over this pool."""
        spec, workers = selector_spec(), [as_catalog(worker) for worker in setting.pool]
        open_ = arms(spec, workers, MOST_STEPS)
        posterior = self._learned.get(id(setting)) or self._taught(setting, workers, open_)
        self._learned[id(setting)] = posterior
        places = {plan: place for place, plan in enumerate(setting.plans)}
        chosen = []
        for task in tasks:
            found = estimates(posterior, spec, open_, workers, features(task.text))
            chosen.append(places[plan_of(max(found, key=lambda one: one.worth).arm, setting)])
        return np.array(chosen)

    def _taught(self, setting: Setting, workers: Sequence[catalog.Worker], open_: Sequence[Arm]) -> Posterior:
        random = Random(f"{self._seed}|{[worker.name for worker in setting.pool]}")
        spec, posterior = selector_spec(), Posterior()
        by_name = {arm.name: (arm, plan_of(arm, setting)) for arm in open_}
        for at in range(self._ratings):
            task = setting.training[at % len(setting.training)]
            seen = features(task.text)
            found = estimates(posterior, spec, open_, workers, seen)
            choice = decide(found, spec.explore, lambda count: random.choices(normals(), k=count), random.random)
            arm, plan = by_name[choice.action]
            score, usd = _rated(setting, plan, task, random)
            posterior = learned(posterior, spec, workers, Rating(arm, seen, score, round(1e6 * usd), 1e9 + at))
        return posterior


def _rated(setting: Setting, plan: Plan, task: Task, random: Random) -> tuple[float, float]:
    """Return the result of one execution: the judge's verdict less what the wait was worth, and the dollars."""
    known = constants()
    right = random.random() < setting.rewards.right(plan.shape, task)[task.trait][plan.workers]
    usd, seconds, _ = setting.rewards.bill(plan.shape, size_of(task))
    waited = known.wait * min(1.0, float(seconds[plan.workers]) / known.full_seconds)
    return (1 - waited if draw_verdict(bool(right), random) else 0.0), float(usd[plan.workers])


@cache
def selector_spec() -> catalog.SelectorSpec:
    """Return the settings of the selector in this world: all templates, and the world's weight of cost."""
    known = constants()
    templates: tuple[catalog.Template, ...] = (
        "answer", "reason", "plan-reason", "answer-check", "reason-check", "judge", "mixture",
    )  # fmt: skip
    return catalog.SelectorSpec(templates=templates, cost=known.cost, full_usd=round(1e6 * known.full_usd))


def as_catalog(worker: Worker) -> catalog.Worker:
    """Return a worker with the card that the selector is shown: its price, and the domains in which it did best."""
    best = max(worker.card.right)
    strengths = [name for name, right in zip(DOMAINS, worker.card.right, strict=True) if right == best]
    price = catalog.Price(round(worker.price * constants().input_share * 1e6), round(worker.price * 1e6))
    return catalog.Worker(worker.name, "world", worker.name, price, catalog.Card(strengths=tuple(strengths)))


def plan_of(arm: Arm, setting: Setting) -> Plan:
    """Return the plan of this world that an arm stands for."""
    names = [worker.name for worker in setting.pool]
    return Plan(SHAPES[arm.template], tuple(names.index(step.worker) for step in arm.steps))


@cache
def normals() -> tuple[float, ...]:
    """Return equally probable quantiles of the normal distribution, to draw from."""
    return tuple(NormalDist().inv_cdf((n + 0.5) / 1024) for n in range(1024))
