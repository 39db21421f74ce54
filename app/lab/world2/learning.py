"""A policy over workers and shapes that learns in world 2 from one verdict an execution, of a judge who errs.

What it is given: cards, the texts of tasks with their token counts, which of its training texts have which families and
are confidential (`reading.py`), prices, and the judge's rates of error, which an operator calibrates on a few checked
answers. What it learns from cards and verdicts alone: how good each worker is in each domain, how ability goes with
speed, how much workers differ, how hard each family is, and what every role, document, digest and handover
does.

It has a model of workflows: parts are solved apart, answers are copied, checked and voted on, and a task is harder or
easier for all. That is the form of this world, and of its rules for plans, but none of its figures, which begin at
ignorance. So it says what verdicts can teach to a policy that knows how workflows work; it is no evidence that real
workers follow this form. The figures are the most probable ones under weak priors, found by Newton's method with the
expected second derivatives (Fisher scoring). Their inverse is the covariance of what is believed (Laplace). A plan is
chosen by its reward on average over readings of the task, if the most probable figures are true. (To average over a few
draws of beliefs as well was worse where workers are known by their cards alone: the plan chosen is the one for which
the draws err most.) A thrifty policy counts a dollar for a little more than its price (`THRIFT`).

Executions: half of them over the pools that the policy is for, half over others of the same workers. A first part is
at random over all shapes and workers; then a quarter at random, the rest by plans that are best for some task over the
pool if a draw of beliefs is true (Thompson sampling). Half of these plans are carried out whole. Of the others one
worker who answers is asked alone: a verdict on one worker tells more of it than one on four. What is believed is
renewed whenever the executions have doubled. Each plan is carried out once, by the executor, through messages.

`LearnedPolicy.as_json` gives the beliefs as plain numbers in JSON (`format`: "world-2 policy 2"):

    figures   by the names of `PRIORS` and `SPREADS`, the lists of the most probable figures, in logits
    families  names of families, in the order of figures["families"], with the domain of each
    workers   by the names of known workers, the believed skill by domain, in logits, step by step bonuses apart
    scale     mean and deviation of log speed, by which `figures["speed"]` is scaled

An unknown worker's skills are those of `posterior_by_card`. The expected reward of a plan is `outcome.Rewards` over
workers of these skills, with the constants that `Beliefs.constants` takes from the figures.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from random import Random
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from app.lab.world2.baselines import PlanIndices, Setting
from app.lab.world2.constants import DOCUMENT_TOKENS, DOMAINS, TRAITS, Constants, constants
from app.lab.world2.execution import draw_verdict, execute_plan
from app.lab.world2.gradients import Value
from app.lab.world2.outcome import (
    Rewards,
    all_plans,
    cost_shares_of_all_plans,
    mean_rewards_of_all_plans,
    rewards_of_all_plans,
)
from app.lab.world2.reading import Reader, Reading
from app.lab.world2.rules import (
    ANSWERING,
    LANGUAGE,
    PARTIAL,
    Size,
    answers_seen,
    contributing_steps,
    parts_handed_over,
    shows_plan,
    size_of,
)
from app.lab.world2.sentences import load_word_vectors
from app.lab.world2.shapes import Plan, Shape, catalogue
from app.lab.world2.tasks import Family, Part, Task, draw_task
from app.lab.world2.workers import Card, Pool, Worker, draw_pool, worker_profiles

Array: TypeAlias = NDArray[np.float64]
Figures: TypeAlias = dict[str, Array]
BUDGETS = (1_000, 4_000, 16_000, 64_000)
POOLS, READ_TASKS, TASK_COUNT = 20, 1_500, 6_000
"""Pools of training beside the seen ones, labelled texts, and different tasks that are executed."""
SEEN_SHARE, TASKS_OF_SEEN_POOL, TASKS_OF_OTHER_POOL = 0.5, 40, 10
"""The share of executions over the seen pools, and the tasks whose best plans are tried over each of these, and over
each other pool."""
PRIORS: Mapping[str, tuple[float, float]] = {
    "mean": (0.5, 1.0), "speed": (0.0, 0.4), "exam": (0.0, 0.3), "plan": (0.0, 0.2), "load": (0.1, 0.2),
    "short": (-0.7, 0.7), "long": (-1.0, 0.7), "truncated": (-1.5, 1.0), "kept": (2.0, 1.0), "lost": (-1.5, 1.0),
    "keeps": (2.0, 1.0), "finds_own": (-0.5, 1.0), "finds_other": (0.0, 1.0), "skill": (0.3, 0.3),
    "pair": (0.3, 0.7), "majority": (1.5, 1.0), "handover": (3.0, 1.0), "trait": (0.0, 0.05),
}  # fmt: skip
"""Mean and deviation of what is believed of each figure before any verdict, as one would guess without sources. `trait`
is the logarithm of the deviation of tasks' difficulty: the most probable value of a scale is biased, so it is held."""
SPREADS: Mapping[str, float] = {"reason": 0.4, "families": 0.7, "abilities": 0.5, "edges": 0.4}
"""Deviations, about 0, of the effects of thinking by domain, of families, and of workers. Those of workers are only the
first guess: they are estimated again from what is found."""
ESTIMATED_SPREADS = ("abilities", "edges")
NEWTON_STEPS = {1_000: 16, 4_000: 8, 16_000: 6, 64_000: 5}
NEWTON_STEPS_BETWEEN = 3
"""Newton steps at each budget, from what was believed before, and where beliefs are renewed between two of them."""
MAX_STEP, BATCH_SIZE = 1.0, 512
THOMPSON_SHARE, ALONE_SHARE = 0.75, 0.5
"""The share of executions, after the first part, that try plans which are believed to be best, and the share of these
in which one worker of the plan is asked alone."""
THOMPSON_SAMPLES = 10
"""Draws of beliefs by which plans are tried."""
THRIFT = 0.25
"""By how much more than its price a dollar counts where a thrifty policy chooses. What a plan costs is known, but what
its answer is worth is only believed, and of thousands of plans those that look best are often expensive ones of which
too much is believed. Of 0.1 to 0.3 it is the least at which plans cost at least 2 % less than the reference's on all
kinds of validation tasks."""


class LoggedExecution(Struct, frozen=True):
    """One execution as it is learned from."""

    shape: str
    reading: Reading
    members: tuple[int, ...]
    """The places of the workers of its steps among all workers of training."""
    passed: bool


class Beliefs(Struct, frozen=True):
    """Figures that are taken for true: those that are most probable, or a draw from all that are believed."""

    figures: Figures
    families: tuple[Family, ...]
    random: np.random.Generator | None = None
    """Draws the skills of workers without verdicts; None for their means."""

    def rewards(self, chosen: Pool, worths: dict[tuple[str, Size], Array] | None = None) -> Rewards:
        """Return the rewards that would be true if what is believed were; `worths` as in `Rewards`."""
        return Rewards(tuple(map(self.worker, chosen)), self.constants(), worths=worths)

    def task_as_read(self, task: Task, reading: Reading) -> Task:
        """Return a task as this reading has it, with families as hard as is believed."""
        parts = []
        for place in reading.families:
            family = self.families[place]
            difficulty = float(self.figures["families"][place])
            parts.append(Part(Family(family.name, family.domain, difficulty, (), held_out=False), "", " "))
        return replace(task, parts=tuple(parts), confidential=reading.confidential)

    def worker(self, worker: Worker) -> Worker:
        """Return a worker as able as is believed."""
        place = _worker_indices().get(worker.name)
        if place is None:
            card = worker.card
            above_expected, edges = posterior_by_card(card, self.figures, self._spreads(), self.random)
        else:
            card = worker_profiles(unseen=False)[place].card
            above_expected = float(self.figures["abilities"][place])
            edges = self.figures["edges"][len(DOMAINS) * place : len(DOMAINS) * (place + 1)]
        ability = expected_ability(card, self.figures) + above_expected
        return replace(worker, ability=ability, edges=tuple(edges.tolist()))

    def constants(self) -> Constants:
        """Return the world's constants, with what is learned in the place of what is true; prices and tokens are
        known."""
        value = {name: float(self.figures[name][0]) for name in PRIORS}
        return replace(
            constants(), ability_mean=value["mean"], trait_sd=math.exp(value["trait"]),
            reason=tuple(self.figures["reason"].tolist()),
            plan_good=value["plan"], plan_bad=value["plan"], load=value["load"],
            length=(0.0, -value["short"], -value["long"]), digest_keeps=value["kept"], digest_lost=value["lost"],
            truncated=value["truncated"], keeps=value["keeps"], finds_own=value["finds_own"],
            finds_other=value["finds_other"], check_skill=value["skill"], pair=value["pair"],
            majority=value["majority"], unanimous=value["pair"] + 2 * value["majority"] + 1.0,
            handover=1 / (1 + math.exp(-value["handover"])),
        )  # fmt: skip

    def _spreads(self) -> tuple[float, float]:
        return float(self.figures["spread abilities"][0]), float(self.figures["spread edges"][0])


Columns: TypeAlias = dict[str, NDArray[np.int64]]
"""Executions of one shape and one number of parts, as arrays with one row for each."""
Group: TypeAlias = tuple[str, int]
"""A shape, and a number of parts."""


class _Evidence(NamedTuple):
    """The log likelihood of n rows, and what its derivatives by the p figures are computed from.

    The gradient is `scores @ jacobian`, and the Fisher information `jacobian.T @ diag(weights) @ jacobian`.
    """

    log_likelihood: float
    scores: Array
    """The derivatives of the log likelihood by each row's chance: [n]."""
    jacobian: Array
    """The derivatives of each row's chance by the figures: [n, p]."""
    weights: Array
    """The Fisher information of each row about its chance: [n]."""


class Learner:
    """Beliefs, and the executions that they rest on."""

    def __init__(self, seed: int, pools: Sequence[Pool], texts: int = READ_TASKS) -> None:
        self._random = Random(f"world-2|learner|{seed}")
        self._noise = np.random.default_rng(seed)
        labelled = [draw_task(self._random, "train") for _ in range(texts)]
        self.reader = Reader(labelled, load_word_vectors())
        self._seen_pools, self._other_pools = list(pools), [draw_pool(self._random) for _ in range(POOLS)]
        self._labelled = labelled
        self._executions: list[LoggedExecution] = []
        self._tasks: list[tuple[Task, Reading]] = []
        self._context = np.array([worker.card.context for worker in worker_profiles(unseen=False)])
        self.figures = _initial_figures(len(self.reader.families))
        self.covariance = np.diag(self._prior_deviations() ** 2)

    def train_until(self, executions: int) -> None:
        """Execute plans until there are so many, and learn from all of them."""
        while self._executions and 2 * len(self._executions) < executions:
            self._execute_until(2 * len(self._executions))
            self.fit(NEWTON_STEPS_BETWEEN)
        self._execute_until(executions)
        self.fit(_newton_steps(executions))

    def policy(self) -> "LearnedPolicy":
        """Return what would be chosen by what is believed now."""
        return LearnedPolicy(name_learned_policy(len(self._executions)), self.reader, self.posterior_mode())

    def thrifty_policy(self) -> "LearnedPolicy":
        """Return what would be chosen by what is believed now if dollars counted for more than they do."""
        return LearnedPolicy(thrifty_name(len(self._executions)), self.reader, self.posterior_mode(), THRIFT)

    def posterior_mode(self) -> Beliefs:
        """Return the most probable figures."""
        return Beliefs(dict(self.figures), self.reader.families)

    def estimate_rewards(self, chosen: Pool) -> Rewards:
        """Return the rewards that would be true if the most probable figures were."""
        return self.posterior_mode().rewards(chosen)

    def task_as_read(self, task: Task, reading: Reading) -> Task:
        """Return a task as this reading has it, with families as hard as is most probable."""
        return self.posterior_mode().task_as_read(task, reading)

    def sample_beliefs(self) -> Beliefs:
        """Return a draw from what is believed."""
        root = np.linalg.cholesky(self.covariance)
        flat = self._flat() + root @ self._noise.standard_normal(len(root))
        seed = int(self._noise.integers(2**31))
        return Beliefs(self._unflatten(flat), self.reader.families, np.random.default_rng(seed))

    def _execute_until(self, executions: int) -> None:
        """Execute plans until there are so many."""
        seen_plans = [self._thompson_plans(pool, TASKS_OF_SEEN_POOL) for pool in self._seen_pools]
        other_plans = [self._thompson_plans(pool, TASKS_OF_OTHER_POOL) for pool in self._other_pools]
        while len(self._executions) < executions:
            pools, plans = self._other_pools, other_plans
            if self._seen_pools and self._random.random() < SEEN_SHARE:
                pools, plans = self._seen_pools, seen_plans
            place = self._random.randrange(len(pools))
            self._execute(pools[place], plans[place])

    def _execute(self, pool: Pool, thompson_plans: Sequence[Plan]) -> None:
        """Execute a plan once and keep the verdict."""
        task, reading = self._next_task()
        plan = self._draw_plan(pool, thompson_plans)
        passed = draw_verdict(execute_plan(plan, task, pool, self._random).right, self._random)
        members = [_worker_indices()[pool[worker].name] for worker in plan.workers]
        self._executions.append(LoggedExecution(plan.shape, reading, tuple(members), passed))

    def _draw_plan(self, pool: Pool, thompson_plans: Sequence[Plan]) -> Plan:
        """Return one of these plans, or one of its workers alone; or any plan over the pool."""
        random = self._random
        if not thompson_plans or random.random() >= THOMPSON_SHARE:
            shape = random.choice(sorted(catalogue()))
            workers = [random.randrange(len(pool)) for _ in catalogue()[shape]]
            return Plan(shape, tuple(workers))
        plan = random.choice(thompson_plans)
        if random.random() < ALONE_SHARE:
            return Plan("reason", (random.choice(_answering_workers(plan)),))
        return plan

    def _next_task(self) -> tuple[Task, Reading]:
        """Return a task of training, and how it is read."""
        if len(self._tasks) < TASK_COUNT:
            task = draw_task(self._random, "train")
            self._tasks.append((task, self.reader.read(task)))
            return self._tasks[-1]
        return self._random.choice(self._tasks)

    def _thompson_plans(self, pool: Pool, count: int) -> list[Plan]:
        """Return the plans that are best over a pool for so many tasks, each if a draw of beliefs is true; none at
        first."""
        if not self._executions:
            return []
        plans = all_plans(len(pool))
        worths: dict[tuple[str, Size], Array] = {}
        samples = []
        for _ in range(THOMPSON_SAMPLES):
            beliefs = self.sample_beliefs()
            samples.append((beliefs, beliefs.rewards(pool, worths)))
        best_plans = []
        for n, task in enumerate(self._random.sample(self._labelled, count)):
            beliefs, rewards = samples[n % THOMPSON_SAMPLES]
            task_as_read = beliefs.task_as_read(task, self.reader.read(task))
            best = int(rewards_of_all_plans(rewards, task_as_read).argmax())
            best_plans.append(plans[best])
        return best_plans

    # Learning.

    def fit(self, steps: int) -> None:
        """Take so many Newton steps towards the mode of the posterior over all rows and cards, from what was believed
        before. A step after which the posterior is lower is halved."""
        groups: dict[Group, list[LoggedExecution]] = defaultdict(list)
        for row in self._executions:
            groups[row.shape, len(row.reading.families)].append(row)
        columns = {group: self._columns(rows) for group, rows in groups.items()}
        accepted, log_likelihood = self._flat(), -math.inf
        step = np.zeros(len(accepted))
        for _ in range(steps):
            flat = accepted + step
            self.figures = self._unflatten(flat)
            new_log_likelihood, gradient, information = self._log_likelihood(columns)
            if new_log_likelihood + self._log_prior(flat) < log_likelihood + self._log_prior(accepted):
                step /= 2
                continue
            precision = self._prior_deviations() ** -2
            self.covariance = np.asarray(np.linalg.inv(information + np.diag(precision)), dtype=float)
            newton_step = self.covariance @ (gradient + precision * (self._prior_means() - flat))
            step[:] = newton_step * min(1.0, MAX_STEP / float(np.abs(newton_step).max()))
            accepted, log_likelihood = flat, new_log_likelihood
            self._estimate_spreads()
        self.figures = self._unflatten(accepted + step)

    def _log_prior(self, flat: Array) -> float:
        """Return the log of how probable these figures are without evidence, apart from a constant."""
        return -float(((flat - self._prior_means()) ** 2 / self._prior_deviations() ** 2).sum()) / 2

    def _log_likelihood(self, columns: Mapping[Group, Columns]) -> tuple[float, Array, Array]:
        """Return the log likelihood of all evidence, its gradient by the p figures [p], and the Fisher information
        [p, p]."""
        size = len(self.covariance)
        total, gradient, information = 0.0, np.zeros(size), np.zeros((size, size))
        for log_likelihood, scores, jacobian, weights in self._evidence(columns):
            total += log_likelihood
            gradient += scores @ jacobian
            information += jacobian.T @ (weights[:, None] * jacobian)
        return total, gradient, information

    def _evidence(self, columns: Mapping[Group, Columns]) -> Iterator[_Evidence]:
        """Yield the evidence of each batch of verdicts, and then that of the cards."""
        world = constants()
        slack = 1 - world.judge_false_pass - world.judge_false_fail
        for (name, parts), batch in _batches(columns):
            passed = batch["passed"]
            figures = self._values_by_row(len(passed))
            right = _RightProbability(figures, catalogue()[name], parts, batch).right()
            right.backward(np.full(len(passed), slack))
            chance = np.clip(world.judge_false_pass + slack * right.array, 1e-6, 1 - 1e-6)
            variance = chance * (1 - chance)
            log_likelihood = float(np.log(np.where(passed == 1, chance, 1 - chance)).sum())
            yield _Evidence(log_likelihood, (passed - chance) / variance, self._jacobian(figures), 1 / variance)
        yield self._card_evidence()

    def _card_evidence(self) -> _Evidence:
        """Return the evidence of the pass rates on cards, with a row for each worker and domain."""
        cards = [worker.card for worker in worker_profiles(unseen=False)]
        members, domains = np.divmod(np.arange(len(cards) * len(DOMAINS)), len(DOMAINS))
        figures = self._values_by_row(len(members))
        logits = _skills(figures, members, domains) + figures["reason"].at(domains) + figures["exam"]
        traits = figures["trait"].exponential().column() * np.array(TRAITS)[None, :]
        chance = (logits.column() - traits).logistic().mean_of_rows()
        chance.backward(np.ones(len(members)))
        questions = np.array([card.questions for card in cards])[members]
        right = np.concatenate([card.right for card in cards])
        variance = chance.array * (1 - chance.array)
        log_likelihood = float((right * np.log(chance.array) + (questions - right) * np.log(1 - chance.array)).sum())
        scores = (right - questions * chance.array) / variance
        return _Evidence(log_likelihood, scores, self._jacobian(figures), questions / variance)

    def _columns(self, rows: Sequence[LoggedExecution]) -> Columns:
        """Return the executions of one group as arrays with a row for each: of parts [rows, parts], of workers [rows,
        steps], else [rows]."""
        families = np.array([row.reading.families for row in rows])
        domains = np.array([family.domain for family in self.reader.families])
        members = np.array([row.members for row in rows])
        document = np.array([row.reading.document for row in rows])
        short = self._context[members] < np.array(DOCUMENT_TOKENS)[document][:, None]
        return {
            "families": families, "domains": domains[families], "members": members, "document": document,
            "short": short.astype(np.int64), "passed": np.array([row.passed for row in rows]).astype(np.int64),
        }  # fmt: skip

    def _estimate_spreads(self) -> None:
        """Take as the workers' spreads those that are found, with what is not known of each (one step of EM)."""
        variances, start = np.diag(self.covariance), 0
        for name in self._names():
            size = len(self.figures[name])
            if name in ESTIMATED_SPREADS:
                square = float((self.figures[name] ** 2 + variances[start : start + size]).mean())
                self.figures[f"spread {name}"] = np.array([math.sqrt(square)])
            start += size

    # Figures as one row of numbers.

    def _names(self) -> list[str]:
        return [*PRIORS, *SPREADS]

    def _flat(self) -> Array:
        return np.concatenate([self.figures[name] for name in self._names()])

    def _unflatten(self, flat: Array) -> Figures:
        figures, start = dict(self.figures), 0
        for name in self._names():
            size = len(self.figures[name])
            figures[name] = flat[start : start + size]
            start += size
        return figures

    def _values_by_row(self, rows: int) -> dict[str, Value]:
        """Return the figures with a copy for each row, so that derivatives are those of each row."""
        values = {}
        for name in self._names():
            copies = np.broadcast_to(self.figures[name], (rows, len(self.figures[name])))
            if name in PRIORS:
                copies = copies[:, 0]
            values[name] = Value(copies)
        return values

    def _jacobian(self, figures: Mapping[str, Value]) -> Array:
        """Return the derivatives of each row by the p figures: [rows, p]."""
        blocks = []
        for name in self._names():
            gradient = figures[name].gradient
            if gradient is None:
                gradient = np.zeros(figures[name].array.shape)
            blocks.append(gradient.reshape(len(gradient), -1))
        return np.hstack(blocks)

    def _prior_means(self) -> Array:
        """Return the figures that are believed without any evidence."""
        means = []
        for name in self._names():
            mean, _ = PRIORS.get(name, (0.0, 0.0))
            means.append(np.full(len(self.figures[name]), mean))
        return np.concatenate(means)

    def _prior_deviations(self) -> Array:
        """Return the standard deviations of what is believed without any evidence."""
        deviations = []
        for name in self._names():
            if name in PRIORS:
                _, deviation = PRIORS[name]
            elif name in ESTIMATED_SPREADS:
                deviation = float(self.figures[f"spread {name}"][0])
            else:
                deviation = SPREADS[name]
            deviations.append(np.full(len(self.figures[name]), deviation))
        return np.concatenate(deviations)


class LearnedPolicy:
    """The beliefs of a learner at one time, and the plans that follow from them."""

    def __init__(self, name: str, reader: Reader, probable: Beliefs, thrift: float = 0.0) -> None:
        self.name, self.beliefs, self._reader, self._thrift = name, probable, reader, thrift

    def choose(self, setting: Setting, tasks: Sequence[Task]) -> PlanIndices:
        """Return for each task the plan that is believed to be best, less what thrift takes for its dollars."""
        rewards = self.beliefs.rewards(setting.pool)
        cost_shares: dict[Size, Array] = {}
        chosen = []
        for task in tasks:
            size = replace(size_of(task), confidential=False)
            if size not in cost_shares:
                cost_shares[size] = cost_shares_of_all_plans(rewards, size)
            values = self._mean_believed_rewards(rewards, task) - self._thrift * cost_shares[size]
            chosen.append(int(values.argmax()))
        return np.array(chosen)

    def as_json(self) -> dict[str, Any]:
        """Return the most probable beliefs as plain numbers, as the head of this module describes them."""
        families = [{"name": family.name, "domain": DOMAINS[family.domain]} for family in self.beliefs.families]
        skills = {}
        for worker in worker_profiles(unseen=False):
            believed = self.beliefs.worker(worker)
            skills[worker.name] = [believed.ability + edge for edge in believed.edges]
        figures = {name: array.tolist() for name, array in self.beliefs.figures.items()}
        return {
            "format": "world-2 policy 2", "figures": figures, "families": families, "workers": skills,
            "scale": {"speed": _log_speed_scale()},
        }  # fmt: skip

    def _mean_believed_rewards(self, rewards: Rewards, task: Task) -> Array:
        """Return the rewards that are believed of all plans, on average over readings."""
        readings = []
        for reading in self._reader.readings(task):
            readings.append((reading.weight, self.beliefs.task_as_read(task, reading)))
        return mean_rewards_of_all_plans(rewards, readings)


def expected_ability(card: Card, figures: Figures) -> float:
    """Return the ability that speed alone leads one to expect.

    Slow workers are expensive and able ones. The price says no more than the speed, and less over pools with other
    prices.
    """
    return float(figures["mean"][0] + figures["speed"][0] * _standardise_log_speed(card))


def posterior_by_card(
    card: Card, figures: Figures, spreads: tuple[float, float], random: np.random.Generator | None = None
) -> tuple[float, Array]:
    """Return how much abler than expected a worker is by its card, and its edges; drawn from what may be, or the mean.

    `spreads` are the deviations of abilities from what is expected, and of edges. With D domains the effects are [1 +
    D]: the ability, then the edges. They are found by eight steps of Fisher scoring.
    """
    offset = np.array([expected_ability(card, figures)] * len(DOMAINS)) + figures["reason"] + figures["exam"]
    traits = np.exp(figures["trait"]) * np.array(TRAITS)
    precision = np.array([spreads[0] ** -2, *[spreads[1] ** -2] * len(DOMAINS)])
    design = np.hstack([np.ones((len(DOMAINS), 1)), np.eye(len(DOMAINS))])
    right = np.array(card.right)
    effects = np.zeros(1 + len(DOMAINS))
    for _ in range(8):
        chances = 1 / (1 + np.exp(-((offset + design @ effects)[:, None] - traits)))
        rate = chances.mean(axis=1)
        slope = (chances * (1 - chances)).mean(axis=1)
        weight = card.questions * slope**2 / (rate * (1 - rate))
        score = (right - card.questions * rate) * slope / (rate * (1 - rate))
        information = np.diag(precision) + design.T @ (weight[:, None] * design)
        effects = effects + np.linalg.solve(information, design.T @ score - precision * effects)
    if random is not None:
        root = np.linalg.cholesky(np.linalg.inv(information))
        effects = effects + root @ random.standard_normal(len(effects))
    return float(effects[0]), effects[1:]


def _newton_steps(executions: int) -> int:
    """Return the Newton steps of the least budget that has so many executions, or of the largest one."""
    for budget, steps in NEWTON_STEPS.items():
        if executions <= budget:
            return steps
    return NEWTON_STEPS[BUDGETS[-1]]


def _answering_workers(plan: Plan) -> list[int]:
    """Return the workers of a plan's steps that answer, or work out a part of an answer."""
    workers = []
    for step, worker in zip(catalogue()[plan.shape], plan.workers, strict=True):
        if step.role in ANSWERING or step.role in PARTIAL:
            workers.append(worker)
    return workers


@cache
def _worker_indices() -> Mapping[str, int]:
    """Return the places of the workers of training."""
    return {worker.name: place for place, worker in enumerate(worker_profiles(unseen=False))}


@cache
def _log_speed_scale() -> tuple[float, float]:
    """Return mean and deviation of log speed over the workers of training."""
    logs = np.log([worker.card.speed for worker in worker_profiles(unseen=False)])
    return float(logs.mean()), float(logs.std())


def _standardise_log_speed(card: Card) -> float:
    """Return the log speed, in deviations from its mean."""
    mean, deviation = _log_speed_scale()
    return (math.log(card.speed) - mean) / deviation


@cache
def _standardised_log_speeds() -> Array:
    return np.array([_standardise_log_speed(worker.card) for worker in worker_profiles(unseen=False)])


def _initial_figures(families: int) -> Figures:
    count = len(worker_profiles(unseen=False))
    figures = {name: np.array([mean]) for name, (mean, _) in PRIORS.items()}
    sizes = {"reason": len(DOMAINS), "families": families, "abilities": count, "edges": count * len(DOMAINS)}
    for name in SPREADS:
        figures[name] = np.zeros(sizes[name])
    for name in ESTIMATED_SPREADS:
        figures[f"spread {name}"] = np.array([SPREADS[name]])
    return figures


def _batches(columns_of_group: Mapping[Group, Columns]) -> Iterator[tuple[Group, Columns]]:
    """Yield the rows of each group, at most `BATCH_SIZE` at once."""
    for group, columns in sorted(columns_of_group.items()):
        for begin in range(0, len(columns["passed"]), BATCH_SIZE):
            batch = slice(begin, begin + BATCH_SIZE)
            yield group, {name: column[batch] for name, column in columns.items()}


def _expected_abilities(figures: Mapping[str, Value], members: NDArray[np.int64]) -> Value:
    """Return the abilities that speeds alone lead one to expect."""
    expected: Value = figures["mean"] + figures["speed"] * _standardised_log_speeds()[members]
    return expected


def _skills(figures: Mapping[str, Value], members: NDArray[np.int64], domains: NDArray[np.int64]) -> Value:
    own = figures["abilities"].at(members) + figures["edges"].at(len(DOMAINS) * members + domains)
    skill: Value = _expected_abilities(figures, members) + own
    return skill


class _RightProbability:
    """The chance that a batch of executions of one shape is right, as a function of the figures."""

    def __init__(
        self, figures: Mapping[str, Value], steps: Shape, parts: int, batch: Mapping[str, NDArray[np.int64]]
    ) -> None:
        self._figures, self._steps, self._parts, self._batch = figures, steps, parts, batch
        self._traits = np.array(TRAITS)[None, :]

    def right(self) -> Value:
        """Return the chance by execution."""
        roles = [step.role for step in self._steps]
        if "digest" not in roles:
            return self._all_parts_right(complete=True)
        at = roles.index("digest")
        logits = self._figures["kept"] + self._figures["truncated"] * self._batch["short"][:, at]
        edge = self._figures["edges"].at(len(DOMAINS) * self._batch["members"][:, at] + LANGUAGE)
        is_complete = (logits + self._figures["skill"] * edge).logistic()
        if_complete = self._all_parts_right(complete=True)
        return is_complete * if_complete + (1 - is_complete) * self._all_parts_right(complete=False)

    def _all_parts_right(self, *, complete: bool) -> Value:
        total: Value = Value(np.ones((1, 1)))
        for part in range(self._parts):
            total = total * self._part_right_at(len(self._steps) - 1, part, complete=complete)
        return total.mean_of_rows()

    def _part_right_at(self, at: int, part: int, *, complete: bool) -> Value:
        step = self._steps[at]
        if step.role == "check":
            return self._part_checked(at, part, complete=complete)
        if step.role == "combine":
            return self._part_combined(at, part, complete=complete)
        step_of_part = parts_handed_over(self._steps, step, self._parts)
        if part in step_of_part:
            fidelity = self._figures["handover"].logistic().column()
            return fidelity * self._part_right_at(step_of_part[part], part, complete=complete)
        return self._part_solved(at, part, step.role, len(step_of_part), complete=complete)

    def _part_solved(self, at: int, part: int, role: str, handed: int, *, complete: bool) -> Value:
        figures, batch, step = self._figures, self._batch, self._steps[at]
        domains = batch["domains"][:, part]
        logits = _skills(figures, batch["members"][:, at], domains) - figures["families"].at(batch["families"][:, part])
        if role != "solve":
            logits = logits + figures["reason"].at(domains)
        if shows_plan(self._steps, step):
            logits = logits + figures["plan"]
        parts_at_once = self._parts - handed
        if role in PARTIAL:
            parts_at_once = 1
        logits = logits - figures["load"] * float(parts_at_once - 1)
        if step.user:
            logits = logits + figures["short"] * (batch["document"] == 1) + figures["long"] * (batch["document"] == 2)
            logits = logits + figures["truncated"] * batch["short"][:, at]
        elif not complete:
            logits = logits + figures["lost"]
        return (logits.column() - figures["trait"].exponential().column() * self._traits).logistic()

    def _helper_effect(self, at: int) -> Value:
        """Return the effect that the ability of the worker who checks or combines has."""
        members = self._batch["members"][:, at]
        above = (
            _expected_abilities(self._figures, members) - self._figures["mean"] + self._figures["abilities"].at(members)
        )
        effect: Value = self._figures["skill"] * above
        return effect

    def _part_checked(self, at: int, part: int, *, complete: bool) -> Value:
        (answer,) = answers_seen(self._steps, self._steps[at])
        before = self._part_right_at(answer, part, complete=complete)
        members = self._batch["members"]
        others = contributing_steps(self._steps, answer, self._parts)
        own = (members[:, others] == members[:, [at]]).any(axis=1).astype(float)
        skill = self._helper_effect(at)
        keeps = (self._figures["keeps"] + skill).logistic().column()
        finds = self._figures["finds_own"] * own + self._figures["finds_other"] * (1 - own)
        doubts = (finds + skill).logistic().column()
        anew = self._part_solved(at, part, "reason", 0, complete=complete)
        after: Value = before * keeps + (1 - before) * doubts * anew
        return after

    def _part_combined(self, at: int, part: int, *, complete: bool) -> Value:
        answers = answers_seen(self._steps, self._steps[at])
        by_count = [Value(np.ones((1, 1)))]
        """The chance that so many of the answers so far are right, by their number."""
        for branch in [self._part_right_at(place, part, complete=complete) for place in answers]:
            zero = Value(np.zeros((1, 1)))
            without, with_one_less = [*by_count, zero], [zero, *by_count]
            by_count = []
            for same_count, one_less in zip(without, with_one_less, strict=True):
                by_count.append(same_count * (1 - branch) + one_less * branch)
        chosen: Value = Value(np.zeros((1, 1)))
        for right in range(1, len(by_count)):
            chosen = chosen + by_count[right] * self._pick_chance(at, right, len(answers))
        return chosen

    def _pick_chance(self, at: int, right: int, count: int) -> Value:
        """Return the chance of choosing a right answer where `right` of `count` are."""
        if right == count:
            logits = self._figures["pair"] + self._figures["majority"] * 2.0 + 1.0
        else:
            majority = self._figures["majority"] * float(2 * right - count)
            logits = self._figures["pair"] + majority + self._helper_effect(at)
        return (logits + np.zeros(len(self._batch["passed"]))).logistic().column()


def name_learned_policy(executions: int) -> str:
    """Return the name of the policy that has so many verdicts."""
    return f"learned from {executions:,} verdicts"


def thrifty_name(executions: int) -> str:
    """Return the name of the policy that has so many verdicts and is thrifty."""
    return f"thrifty after {executions:,} verdicts"


def learn_policies(settings: Sequence[Setting], seed: int, most: int) -> list[LearnedPolicy]:
    """Return what one learner chooses after each of `BUDGETS` up to `most` executions, and in the end with thrift."""
    learner = Learner(seed, [setting.pool for setting in settings])
    policies = []
    for budget in BUDGETS:
        if budget <= most:
            learner.train_until(budget)
            policies.append(learner.policy())
    return [*policies, learner.thrifty_policy()]
