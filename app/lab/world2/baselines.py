"""The policies that a trained conductor of world 2 is compared with, each behind `Policy`.

All that learn constant plans are given what no operator has: the exact expected reward of every plan for each training
task, over the very pool that they are judged on; what is tuned is tuned on validation tasks of that pool. They are
judged on other tasks. So a gap that is left between them and the optimum is not for want of data.

random plan ................. any plan of the catalogue
best single worker .......... one step
self-consistency ............ one worker answers twice or three times, one combines
mixture of agents ........... two or three workers answer, one combines
planner-executor-checker .... three steps
best fixed plan ............. one plan for all tasks, searched among all plans
plan by domain (...) ........ one plan for each domain, as a classifier of texts sees it (`texts.py`)
plan by true domain ......... the same, told the true domain of most parts
nearest outcomes ............ the plan that was best over the most similar training tasks, all of whose rewards it knows
product's selector .......... the code of `kind = "selector"`, after verdicts of an erring judge
evolved prompt .............. the rules of a conductor's prompt, evolved by GEPA from verdicts (`evolution.py`)
searched optimum ............ the best plan for each kind of task: families, document and confidence are known to it
clairvoyant ................. the same, told the hidden trait too: nothing that reads a text can reach it
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from random import Random
from typing import Protocol, TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from app.lab.world2 import texts
from app.lab.world2.execution import draw_verdict
from app.lab.world2.outcome import Rewards, all_plans, rewards_of_all_plans
from app.lab.world2.rules import size_of
from app.lab.world2.shapes import Plan, catalogue
from app.lab.world2.tasks import Task
from app.lab.world2.workers import Pool

Table: TypeAlias = NDArray[np.float32]
PlanIndices: TypeAlias = NDArray[np.int64]
PRIOR = 3.0
"""Training tasks of average reward that a group counts in addition to its own."""
CLUSTERS = (5, 10, 20, 40)
NEAREST = (5, 10, 20, 40)


class Setting:
    """One pool, with training and validation tasks and the exact rewards of all plans for them."""

    def __init__(self, pool: Pool, training: Sequence[Task], validation: Sequence[Task]) -> None:
        self.pool, self.training, self.validation = pool, training, validation
        self.rewards = Rewards(pool)
        self.plans: list[Plan] = all_plans(len(pool))
        self._rewards_of_kind: dict[object, Table] = {}

    @cached_property
    def training_rewards(self) -> Table:
        """Return the rewards of training tasks."""
        return self.table(self.training)

    @cached_property
    def validation_rewards(self) -> Table:
        """Return the rewards of validation tasks."""
        return self.table(self.validation)

    def table(self, tasks: Sequence[Task]) -> Table:
        """Return one row for each task, with the expected reward of every plan."""
        for task in tasks:
            if task.kind not in self._rewards_of_kind:
                self._rewards_of_kind[task.kind] = rewards_of_all_plans(self.rewards, task)
        return np.stack([self._rewards_of_kind[task.kind] for task in tasks])

    def sample_reward(self, plan: Plan, task: Task, random: Random) -> float:
        """Execute a plan once, and return the worth of its answer if a judge, who errs, takes it for right; else 0."""
        right = random.random() < self.rewards.right(plan.shape, task)[task.trait][plan.workers]
        worth = float(self.rewards.worth(plan.shape, size_of(task))[plan.workers])
        return worth * draw_verdict(bool(right), random)

    def indices_of(self, shapes: Callable[[Plan], bool]) -> PlanIndices:
        """Return the places of the plans that `shapes` lets pass."""
        return np.flatnonzero(list(map(shapes, self.plans)))


class Policy(Protocol):
    """Chooses a plan for each task of a setting; its place in `Setting.plans`."""

    @property
    def name(self) -> str:
        """Return the name of its row in the tables."""

    def choose(self, setting: Setting, tasks: Sequence[Task]) -> PlanIndices:
        """Return the place of the plan for each task."""


class RandomPlan(Struct, frozen=True):
    """Any plan of the catalogue."""

    seed: int
    name: str = "random plan"

    def choose(self, setting: Setting, tasks: Sequence[Task]) -> PlanIndices:
        """Return plans by chance."""
        random = Random(self.seed)
        return np.array([random.randrange(len(setting.plans)) for _ in tasks])


class ConstantPlan(Struct, frozen=True):
    """The best constant plan among those that `admits` lets pass, by training and validation tasks together."""

    name: str
    admits: Callable[[Plan], bool]

    def choose(self, setting: Setting, tasks: Sequence[Task]) -> PlanIndices:
        """Return the same plan for all."""
        places = setting.indices_of(self.admits)
        means = setting.training_rewards[:, places].sum(axis=0) + setting.validation_rewards[:, places].sum(axis=0)
        return np.full(len(tasks), places[int(means.argmax())])


class ByGroup(Struct, frozen=True):
    """One plan for each group of a classifier."""

    name: str
    learn: Callable[[Sequence[Task]], texts.Classifier]

    def choose(self, setting: Setting, tasks: Sequence[Task]) -> PlanIndices:
        """Return for each task the plan that is best over the training tasks of its group."""
        classify = self.learn(setting.training)
        return _best_plans_by_group(setting, classify(setting.training), classify(tasks))


class ByCluster(Struct, frozen=True):
    """One plan for each cluster; how many clusters there are is tuned on validation tasks."""

    seed: int
    name: str = "plan by domain (k-means)"

    def choose(self, setting: Setting, tasks: Sequence[Task]) -> PlanIndices:
        """Return for each task the plan that is best over the training tasks of its cluster."""
        best, chosen = -1.0, np.zeros(len(tasks), dtype=np.int64)
        for count in CLUSTERS:
            classify = texts.clusters(setting.training, count, self.seed)
            training_groups = classify(setting.training)
            validation_plans = _best_plans_by_group(setting, training_groups, classify(setting.validation))
            reward = _mean_reward(setting.validation_rewards, validation_plans)
            if reward > best:
                best, chosen = reward, _best_plans_by_group(setting, training_groups, classify(tasks))
        return chosen


class NearestOutcomes(Struct, frozen=True):
    """The plan that was best over the most similar training tasks; how many is tuned on validation tasks."""

    name: str = "nearest outcomes"

    def choose(self, setting: Setting, tasks: Sequence[Task]) -> PlanIndices:
        """Return the plan of each task."""
        vocabulary = texts.Vocabulary(setting.training)
        rows = vocabulary.weigh(setting.training)
        validation_orders = np.argsort(-(vocabulary.weigh(setting.validation) @ rows.T), axis=1)
        orders = np.argsort(-(vocabulary.weigh(tasks) @ rows.T), axis=1)
        best, chosen = -1.0, np.zeros(len(tasks), dtype=np.int64)
        for count in NEAREST:
            validation_plans = _best_plans_of_neighbours(setting, validation_orders, count)
            reward = _mean_reward(setting.validation_rewards, validation_plans)
            if reward > best:
                best, chosen = reward, _best_plans_of_neighbours(setting, orders, count)
        return chosen


class Optimum(Struct, frozen=True):
    """The best plan for each kind of task."""

    name: str = "searched optimum"

    def choose(self, setting: Setting, tasks: Sequence[Task]) -> PlanIndices:
        """Return the best plans."""
        return np.asarray(setting.table(tasks).argmax(axis=1))


def clairvoyant_rewards(setting: Setting, tasks: Sequence[Task]) -> NDArray[np.float64]:
    """Return the reward of the best plan for each task if the hidden trait were known as well, over all traits."""
    reward_of_kind: dict[object, float] = {}
    for task in tasks:
        if task.kind not in reward_of_kind:
            tables = []
            for name in catalogue():
                rewards = setting.rewards.right(name, task) * setting.rewards.worth(name, size_of(task))
                tables.append(rewards.reshape(len(rewards), -1).max(axis=1))
            reward_of_kind[task.kind] = float(np.stack(tables).max(axis=0).mean())
    return np.array([reward_of_kind[task.kind] for task in tasks])


def list_fixed_policies() -> list[Policy]:
    """Return the policies of one constant plan."""
    return [
        ConstantPlan("best single worker", lambda plan: len(plan.workers) == 1),
        ConstantPlan("self-consistency", is_self_consistent),
        ConstantPlan("mixture of agents", lambda plan: combines_answers(plan) and not is_self_consistent(plan)),
        ConstantPlan("planner-executor-checker", lambda plan: plan.shape in ("plan solve check", "plan reason check")),
        ConstantPlan("best fixed plan", lambda plan: True),
    ]


def domain_plans(seed: int) -> list[Policy]:
    """Return the policies of one constant plan for each domain; the best of them is the reference to beat."""
    return [
        ByGroup("plan by domain (regular expressions)", lambda training: texts.by_regex),
        ByGroup("plan by domain (naive Bayes)", texts.naive_bayes),
        ByGroup("plan by domain (kNN)", texts.nearest_neighbours),
        ByCluster(seed),
    ]


def true_domain_plans() -> Policy:
    """Return the policy of one plan for each true domain."""
    return ByGroup("plan by true domain", lambda training: texts.domains)


def combines_answers(plan: Plan) -> bool:
    """Return True for a plan whose workers answer for themselves before one combines the answers."""
    return plan.shape.endswith(" combine") and plan.shape.split()[0] not in ("plan", "digest")


def is_self_consistent(plan: Plan) -> bool:
    """Return True for such a plan in which one worker gives all the answers that are combined."""
    return combines_answers(plan) and len(set(plan.workers[:-1])) == 1


def _best_plans_by_group(setting: Setting, training_groups: texts.Groups, groups: texts.Groups) -> PlanIndices:
    """Return for each of `groups` the plan with the best mean over the group's training tasks; the means are shrunk
    towards the mean over all tasks. `training_groups` are the groups of the training tasks."""
    mean = setting.training_rewards.mean(axis=0)
    plans = np.zeros(len(groups), dtype=np.int64)
    for group in np.unique(groups):
        own = setting.training_rewards[training_groups == group]
        plans[groups == group] = (own.sum(axis=0) + PRIOR * mean).argmax()
    return plans


def _best_plans_of_neighbours(setting: Setting, orders: NDArray[np.int64], count: int) -> PlanIndices:
    mean = setting.training_rewards.mean(axis=0)
    chosen = [(setting.training_rewards[order[:count]].sum(axis=0) + PRIOR * mean).argmax() for order in orders]
    return np.array(chosen)


def _mean_reward(table: Table, chosen: PlanIndices) -> float:
    return float(table[np.arange(len(table)), chosen].mean())
