"""The product's selector (`kind = "selector"`) as a baseline in world 2: its own code, taught by an erring judge.

For each pool it begins anew, with cards of prices and of the domains in which a worker did best. Then it decides,
executes one plan a task, is told the judge's verdict less what the wait was worth, and learns from it with the bill.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from random import Random
from typing import NamedTuple

import numpy as np

from app.core.plan.templates import Arm, arms
from app.core.pool import catalog
from app.core.rating.features import Features, features
from app.core.rating.posterior import Rating
from app.lab.simulated_selector import SimulatedSelector
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
    """Learns from `ratings` verdicts over each pool; then it takes the arm that is best at the posterior's mean."""

    name = "product's selector"

    def __init__(self, seed: int, ratings: int) -> None:
        self._seed, self._ratings = seed, ratings
        self._trained: dict[int, SelectorOverPool] = {}
        """By the identity of the setting."""

    def choose(self, setting: Setting, tasks: Sequence[Task]) -> PlanIndices:
        """Return the plans that the posterior's mean holds for best, once it has learned over this pool."""
        if id(setting) not in self._trained:
            self._trained[id(setting)] = self._train(setting)
        selector = self._trained[id(setting)]
        places = {plan: place for place, plan in enumerate(setting.plans)}
        chosen = []
        for task in tasks:
            best = max(selector.estimates(features(task.text)), key=lambda estimate: estimate.worth)
            chosen.append(places[selector.plans[best.arm.name]])
        return np.array(chosen)

    def _train(self, setting: Setting) -> "SelectorOverPool":
        random = Random(f"{self._seed}|{[worker.name for worker in setting.pool]}")
        selector = SelectorOverPool(setting)
        for n in range(self._ratings):
            task = setting.training[n % len(setting.training)]
            task_features = features(task.text)
            arm = selector.explore(task_features, random).arm
            execution = execute_once(setting, selector.plans[arm.name], task, random)
            selector.learn(execution.rating(arm, task_features, 1e9 + n))
        return selector


class SelectorOverPool(SimulatedSelector):
    """The service's selector over one pool."""

    def __init__(self, setting: Setting) -> None:
        spec = selector_spec()
        workers = [as_catalog(worker) for worker in setting.pool]
        all_arms = arms(spec, workers, MOST_STEPS)
        super().__init__(spec, workers, all_arms)
        self.plans = {arm.name: plan_of(arm, setting) for arm in all_arms}
        """The plan of this world that each arm stands for."""


class Execution(NamedTuple):
    """The result of one execution of a plan."""

    right: bool
    score: float
    """The judge's verdict, 0 or 1, less what the wait was worth of a 1."""
    usd: float

    def rating(self, arm: Arm, task_features: Features, at: float) -> Rating:
        """Return the rating of the arm that led to it, at this time in seconds."""
        return Rating(arm, task_features, self.score, round(1e6 * self.usd), at)


def execute_once(setting: Setting, plan: Plan, task: Task, random: Random) -> Execution:
    """Draw whether the answer of a plan is right, and then the judge's verdict."""
    world = constants()
    right_probability = setting.rewards.right(plan.shape, task)[task.trait][plan.workers]
    right = bool(random.random() < right_probability)
    usd, seconds, _ = setting.rewards.bill(plan.shape, size_of(task))
    score = 0.0
    if draw_verdict(right, random):
        score = 1 - world.wait * min(1.0, float(seconds[plan.workers]) / world.full_seconds)
    return Execution(right, score, float(usd[plan.workers]))


@cache
def selector_spec() -> catalog.SelectorSpec:
    """Return the settings of the selector in this world: all templates, and the world's weight of cost."""
    world = constants()
    templates: tuple[catalog.Template, ...] = (
        "answer", "reason", "plan-reason", "answer-check", "reason-check", "judge", "mixture",
    )  # fmt: skip
    return catalog.SelectorSpec(templates=templates, cost=world.cost, full_usd=round(1e6 * world.full_usd))


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
