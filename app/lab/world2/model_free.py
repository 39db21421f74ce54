"""Policies that learn from verdicts without a model of workflows, at the same numbers of plan executions.

Both are one softmax over shapes, by what the reader says of the task, and one over workers for each step, by what cards
say, with weights for each role. `advantage-weighted` fits it to its own journal: chosen plans, weighted by how much
better than expected they came out. `policy gradient` is GRPO's: groups of plans for the same task, rewards less the
group's mean, groups without variance dropped, tasks that nearly always pass or fail left out, and the weights kept that
were best on held-out executions, which count as well.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from app.lab.world2.baselines import PlanIndices, Setting
from app.lab.world2.constants import DOCUMENT_TOKENS, DOMAINS
from app.lab.world2.execution import draw_verdict, execute_plan
from app.lab.world2.learning import BUDGETS, POOLS, READ_TASKS
from app.lab.world2.outcome import Rewards
from app.lab.world2.reading import Reader
from app.lab.world2.rules import size_of
from app.lab.world2.sentences import load_word_vectors
from app.lab.world2.shapes import SUBTASKS, Plan, catalogue
from app.lab.world2.tasks import Task, draw_task
from app.lab.world2.workers import Card, Pool, draw_pool

Array: TypeAlias = NDArray[np.float64]
ROLES, SHAPES = tuple(SUBTASKS), tuple(catalogue())
TASK_FIGURES, WORKER_FIGURES = 6 + len(DOMAINS), 6
TASK_COUNT, HELD_OUT = 1_500, 150
"""Different tasks, with a pool each, that plans are executed for; and those that are held out."""
DECAY = 1e-3
REGRESSION_RATE, EXPLORATION, TEMPERATURE, MAX_WEIGHT, EPOCHS = 0.06, 0.2, 0.1, 10.0, 3
"""Of advantage-weighted regression: the rate, the share of plans at random, the advantage that makes a
weight e times as large, the largest weight, and the passes over the journal whenever it has doubled."""
JOURNAL_SIZES = (250, 500, 1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 64_000)
"""The numbers of executions after which it is fitted again; before the first all plans are at random."""
GRADIENT_RATE, GROUP, GROUPS = 0.03, 8, 16
"""Of the policy gradient: the rate, the plans of a group, and the groups of a step."""
MIN_PASS_RATE, MAX_PASS_RATE, LEAST_EXECUTIONS = 0.1, 0.9, 16
"""Tasks of other pass rates than between these are left out, from so many executions on."""
CHECK_INTERVAL = 2_000
"""Executions from one held-out check to the next."""


class Case(Struct, frozen=True):
    """A task over a pool, as the policy sees it."""

    task: Task
    rewards: Rewards
    task_figures: Array
    """[TASK_FIGURES]"""
    worker_figures: Array
    """[workers, WORKER_FIGURES]"""


class Softmax:
    """The policy: weights of shapes by figures of the task, and of workers by role and their figures."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self.shapes = np.zeros((TASK_FIGURES, len(SHAPES)))
        self.roles = np.zeros((len(ROLES), WORKER_FIGURES))
        self._first_moments = [np.zeros_like(self.shapes), np.zeros_like(self.roles)]
        self._second_moments = [np.zeros_like(self.shapes), np.zeros_like(self.roles)]
        self._steps = 0

    def best(self, case: Case) -> Plan:
        """Return the most probable shape and workers."""
        name = SHAPES[int((case.task_figures @ self.shapes).argmax())]
        workers = [int(self._chances(case, step.role).argmax()) for step in catalogue()[name]]
        return Plan(name, tuple(workers))

    def sample_plan(self, case: Case, random: Random) -> Plan:
        """Return a plan by chance."""
        name = random.choices(SHAPES, _softmax(case.task_figures @ self.shapes).tolist())[0]
        chosen = []
        for step in catalogue()[name]:
            chances = self._chances(case, step.role)
            chosen.append(random.choices(range(len(chances)), chances.tolist())[0])
        return Plan(name, tuple(chosen))

    def improve(self, cases: Sequence[Case], plans: Sequence[Plan], weights: Sequence[float]) -> None:
        """Take one step that makes plans of positive weight more probable, and others less (Adam)."""
        slopes = [-DECAY * self.shapes, -DECAY * self.roles]
        for case, plan, weight in zip(cases, plans, weights, strict=True):
            gradient = -_softmax(case.task_figures @ self.shapes)
            gradient[SHAPES.index(plan.shape)] += 1
            slopes[0] = slopes[0] + weight / len(cases) * np.outer(case.task_figures, gradient)
            for step, worker in zip(catalogue()[plan.shape], plan.workers, strict=True):
                chances = self._chances(case, step.role)
                figures = case.worker_figures[: len(chances)]
                slopes[1][ROLES.index(step.role)] += weight / len(cases) * (figures[worker] - chances @ figures)
        self._steps += 1
        for values, slope, first_moment, second_moment in zip(
            (self.shapes, self.roles), slopes, self._first_moments, self._second_moments, strict=True
        ):
            first_moment += 0.1 * (slope - first_moment)
            second_moment += 0.01 * (slope**2 - second_moment)
            mean, spread = first_moment / (1 - 0.9**self._steps), second_moment / (1 - 0.99**self._steps)
            values += self._rate * mean / (np.sqrt(spread) + 1e-8)

    def copy(self) -> "Softmax":
        """Return a policy with the same weights."""
        copy = Softmax(self._rate)
        copy.shapes, copy.roles = self.shapes.copy(), self.roles.copy()
        return copy

    def _chances(self, case: Case, role: str) -> Array:
        return _softmax(case.worker_figures @ self.roles[ROLES.index(role)])


class ModelFree:
    """A policy as it was after so many executions."""

    def __init__(self, name: str, reader: Reader, policy: Softmax) -> None:
        self.name, self._reader, self._policy = name, reader, policy

    def choose(self, setting: Setting, tasks: Sequence[Task]) -> PlanIndices:
        """Return the policy's most probable plan for each task."""
        places = {plan: place for place, plan in enumerate(setting.plans)}
        chosen = []
        for task in tasks:
            case = _make_case(self._reader, task, setting.rewards)
            chosen.append(places[self._policy.best(case)])
        return np.array(chosen)


class Environment:
    """Tasks over pools of training, and how plans for them come out, one verdict each."""

    def __init__(self, pools: Sequence[Pool], seed: int, texts: int = READ_TASKS, count: int = TASK_COUNT) -> None:
        """Draw `count` tasks, each over one of these pools or of `POOLS` others; the reader learns from `texts`."""
        self.random = Random(f"world-2|model-free|{seed}")
        self.reader = Reader([draw_task(self.random, "train") for _ in range(texts)], load_word_vectors())
        other_pools = [draw_pool(self.random) for _ in range(POOLS)]
        rewards = list(map(Rewards, [*pools, *other_pools]))
        cases = []
        for _ in range(count + HELD_OUT):
            cases.append(_make_case(self.reader, draw_task(self.random, "train"), self.random.choice(rewards)))
        self.cases, self.held_out = cases[:count], cases[count:]

    def sample_reward(self, case: Case, plan: Plan) -> float:
        """Execute a plan once, by messages: the worth of its answer if the judge takes it for right, else 0."""
        passed = draw_verdict(execute_plan(plan, case.task, case.rewards.pool, self.random).right, self.random)
        return float(case.rewards.worth(plan.shape, size_of(case.task))[plan.workers]) * passed


def policy_names(most: int) -> list[str]:
    """Return the names of the policies of up to so many executions."""
    names = []
    for budget in BUDGETS:
        if budget <= most:
            names += [f"advantage-weighted, {budget:,} verdicts", f"policy gradient, {budget:,} verdicts"]
    return names


def train_model_free(settings: Sequence[Setting], seed: int, most: int) -> list[ModelFree]:
    """Return both policies at each of `BUDGETS` up to `most` executions."""
    policies = []
    ways: dict[str, Callable[[Environment, int], list[tuple[int, Softmax]]]] = {
        "advantage-weighted": train_advantage_weighted, "policy gradient": train_policy_gradient,
    }  # fmt: skip
    for name, learn in ways.items():
        trial = Environment([setting.pool for setting in settings], seed)
        for budget, policy in learn(trial, most):
            policies.append(ModelFree(f"{name}, {budget:,} verdicts", trial.reader, policy))
    return sorted(policies, key=lambda policy: policy_names(most).index(policy.name))


def train_advantage_weighted(trial: Environment, most: int) -> list[tuple[int, Softmax]]:
    """Return the regression's policies: refitted whenever the journal has doubled, and then used to choose plans."""
    policy, uniform, snapshots = Softmax(REGRESSION_RATE), Softmax(REGRESSION_RATE), []
    cases: list[Case] = []
    plans: list[Plan] = []
    rewards: list[float] = []
    for size in JOURNAL_SIZES:
        if size > most:
            break
        while len(cases) < size:
            case = trial.random.choice(trial.cases)
            behaviour = policy
            if len(cases) < JOURNAL_SIZES[0] or trial.random.random() < EXPLORATION:
                behaviour = uniform
            cases.append(case)
            plans.append(behaviour.sample_plan(case, trial.random))
            rewards.append(trial.sample_reward(case, plans[-1]))
        figures, returns = np.array([case.task_figures for case in cases]), np.array(rewards)
        expected = figures @ np.linalg.lstsq(figures, returns, rcond=None)[0]
        weights = np.minimum(MAX_WEIGHT, np.exp((returns - expected) / TEMPERATURE))
        weights /= weights.mean()
        for _ in range(EPOCHS * max(1, 2_000 // size)):
            order = trial.random.sample(range(size), size)
            for begin in range(0, size, 256):
                batch = order[begin : begin + 256]
                policy.improve([cases[n] for n in batch], [plans[n] for n in batch], weights[batch].tolist())
        if size in BUDGETS:
            snapshots.append((size, policy.copy()))
    return snapshots


def train_policy_gradient(trial: Environment, most: int) -> list[tuple[int, Softmax]]:
    """Return the policies of group-relative gradients: at each budget the weights that were best when held out."""
    policy, snapshots, executions, last_check = Softmax(GRADIENT_RATE), [], 0, 0
    best, best_reward = policy.copy(), -1.0
    passed = {id(case): [0.0, 0.0] for case in trial.cases}
    for budget in BUDGETS:
        if budget > most:
            break
        while executions + GROUP * GROUPS <= budget:
            _improve_by_groups(policy, trial, passed)
            executions += GROUP * GROUPS
            if executions - last_check >= CHECK_INTERVAL and executions + HELD_OUT <= budget:
                held_out = [trial.sample_reward(case, policy.best(case)) for case in trial.held_out]
                held_out_reward = float(np.mean(held_out))
                executions, last_check = executions + HELD_OUT, executions
                if held_out_reward >= best_reward:
                    best, best_reward = policy.copy(), held_out_reward
        snapshot = policy
        if best_reward >= 0:
            snapshot = best
        snapshots.append((budget, snapshot.copy()))
    return snapshots


def _improve_by_groups(policy: Softmax, trial: Environment, passed: dict[int, list[float]]) -> None:
    """Take one step of the policy gradient over `GROUPS` groups of plans, and count their executions and passes in
    `passed`. Groups without variance teach nothing."""
    cases: list[Case] = []
    plans: list[Plan] = []
    weights: list[float] = []
    for case in _draw_informative_cases(trial, passed, GROUPS):
        group = [policy.sample_plan(case, trial.random) for _ in range(GROUP)]
        rewards = np.array([trial.sample_reward(case, plan) for plan in group])
        passed[id(case)][0] += GROUP
        passed[id(case)][1] += float((rewards > 0).sum())
        if rewards.std() > 0:
            cases += [case] * GROUP
            plans += group
            weights += (rewards - rewards.mean()).tolist()
    if cases:
        policy.improve(cases, plans, weights)


def _draw_informative_cases(trial: Environment, passed: dict[int, list[float]], count: int) -> list[Case]:
    """Return tasks that do not nearly always pass or fail, as far as is known."""
    cases: list[Case] = []
    while len(cases) < count:
        case = trial.random.choice(trial.cases)
        executions, right = passed[id(case)]
        if executions < LEAST_EXECUTIONS or MIN_PASS_RATE <= right / executions <= MAX_PASS_RATE:
            cases.append(case)
    return cases


def _make_case(reader: Reader, task: Task, rewards: Rewards) -> Case:
    """Return a task over a pool with its figures: size, confidence and shares of domains, as they are read."""
    shares, secret = np.zeros(len(DOMAINS)), 0.0
    for reading in reader.readings(task):
        secret += reading.weight * reading.confidential
        for family in reading.families:
            shares[reader.families[family].domain] += reading.weight / len(reading.families)
    count, document = len(task.parts), task.document
    sizes = np.array([1.0, count == 2, count == 3, document == 1, document == 2, secret])
    rows = [_worker_figures(worker.card, shares, secret, document) for worker in rewards.pool]
    return Case(task, rewards, np.concatenate([sizes, shares]), np.array(rows))


def _worker_figures(card: Card, shares: Array, secret: float, document: int) -> list[float]:
    """Return a card's figures for one task."""
    rates = (np.array(card.right) + 3.0) / (card.questions + 5.0)
    logits = np.log(rates / (1 - rates))
    short = card.context < DOCUMENT_TOKENS[document]
    return [
        float(logits.mean()), float(shares @ logits), float(np.log(card.price)), float(np.log(card.speed / 100)),
        secret * card.retains, float(short),
    ]  # fmt: skip


def _softmax(logits: Array) -> Array:
    raised = np.exp(logits - logits.max())
    chances: Array = raised / raised.sum()
    return chances
