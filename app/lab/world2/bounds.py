"""Bounds beside the searched optimum say how much of the gap can be closed at all, by what a policy may know.

optimum by cards ...... knows the world's figures and every task's kind; of workers it knows what their cards tell,
                        by the exact posterior under the distribution that workers are drawn from, and takes the plan
                        with the best expected reward under it. Where there are no verdicts on the workers, no policy
                        has a higher expectation
optimum as read ....... knows the figures and the workers' hidden skills, and reads tasks as the learner does
optimum, silent ....... knows them too, and every part's family, but not which tasks are confidential: in phrasings that
                        were never met the words that say so share none with those of training
optimum by domain ..... knows them too, and each part's domain and what is confidential, but not how hard a family is: a
                        family that was never met is as hard as its domain is on average
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from random import Random

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from app.lab.world2.baselines import PlanIndices, Setting
from app.lab.world2.constants import DOMAINS, TRAITS, constants
from app.lab.world2.outcome import Rewards, mean_rewards_of_all_plans, rewards_of_all_plans
from app.lab.world2.reading import Reader
from app.lab.world2.sentences import load_word_vectors
from app.lab.world2.tasks import Part, Task, draw_task, families
from app.lab.world2.workers import PRICE_NOISE, PRICE_SLOPE, Card, Pool

GRID = np.linspace(-2.5, 4.0, 66)
"""Abilities and skills, in logits."""
DRAWS = 32
"""Draws from the posterior that stand for it, evenly spread over it."""


class OptimumByCards:
    """The plans with the best expected reward over all that workers may be, given their cards."""

    name = "optimum by cards"

    def choose(self, setting: Setting, tasks: Sequence[Task]) -> PlanIndices:
        """Return the best plan for each task."""
        first, *others = _sample_pools(setting.pool)
        rewards = Rewards(first, others=others)
        return np.array([int(rewards_of_all_plans(rewards, task).argmax()) for task in tasks])


class OptimumAsRead:
    """The best plans if every task were as it is read."""

    name = "optimum as read"

    def __init__(self, seed: int, texts: int) -> None:
        random = Random(f"world-2|reader|{seed}")
        self._reader = Reader([draw_task(random, "train") for _ in range(texts)], load_word_vectors())

    def choose(self, setting: Setting, tasks: Sequence[Task]) -> PlanIndices:
        """Return the best plan for each task."""
        return np.array([self._best(setting.rewards, task) for task in tasks])

    def _best(self, rewards: Rewards, task: Task) -> int:
        readings = []
        for reading in self._reader.readings(task):
            parts = tuple(Part(self._reader.families[place], "", " ") for place in reading.families)
            readings.append((reading.weight, replace(task, parts=parts, confidential=reading.confidential)))
        return int(mean_rewards_of_all_plans(rewards, readings).argmax())


class OptimumOverVariants(Struct, frozen=True):
    """The best plans if something about tasks is not known: `variants` are a task's possible kinds by their chances."""

    name: str
    variants: Callable[[Task], Sequence[tuple[float, Task]]]

    def choose(self, setting: Setting, tasks: Sequence[Task]) -> PlanIndices:
        """Return the best plan for each task."""
        chosen = []
        for task in tasks:
            total = np.zeros(1)
            for chance, variant in self.variants(task):
                total = total + chance * rewards_of_all_plans(setting.rewards, variant)
            chosen.append(int(total.argmax()))
        return np.array(chosen)


def optima_of_partial_knowledge() -> list[OptimumOverVariants]:
    """Return the bounds of what no text of unseen phrasings, or of unseen families, can tell."""
    return [
        OptimumOverVariants("optimum, silent", _without_confidentiality),
        OptimumOverVariants("optimum by domain", _with_mean_difficulty),
    ]


def _without_confidentiality(task: Task) -> list[tuple[float, Task]]:
    share = constants().confidential
    return [(share, replace(task, confidential=True)), (1 - share, replace(task, confidential=False))]


def _with_mean_difficulty(task: Task) -> list[tuple[float, Task]]:
    means = _mean_difficulties()
    parts = []
    for part in task.parts:
        domain = part.family.domain
        parts.append(replace(part, family=replace(part.family, name=DOMAINS[domain], difficulty=means[domain])))
    return [(1.0, replace(task, parts=tuple(parts)))]


@cache
def _mean_difficulties() -> list[float]:
    """Return the mean difficulty of training's families, by domain."""
    means = []
    for domain in range(len(DOMAINS)):
        own = [family.difficulty for family in families() if family.domain == domain and not family.held_out]
        means.append(sum(own) / len(own))
    return means


def _sample_pools(chosen: Pool) -> list[Pool]:
    """Draw what the workers of a pool may be, each worker apart from the others."""
    random = np.random.default_rng(0)
    columns = []
    for worker in chosen:
        abilities, skills = _sample_skills(worker.card, random)
        edges = skills - abilities[:, None]
        columns.append([
            replace(worker, ability=float(ability), edges=tuple(row.tolist()))
            for ability, row in zip(abilities, edges, strict=True)
        ])  # fmt: skip
    return list(zip(*columns, strict=True))


def _sample_skills(card: Card, random: np.random.Generator) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Draw abilities, and skills by domain (a row for each draw)."""
    weights, by_domain = _posterior(card)
    places = _draw_stratified(np.tile(weights, (DRAWS, 1)), random)
    skills = [GRID[_draw_stratified(conditional[places], random)] for conditional in by_domain]
    return GRID[places], np.stack(skills, axis=1)


def _draw_stratified(weights: NDArray[np.float64], random: np.random.Generator) -> NDArray[np.int64]:
    """Draw one place of each row, by its weights; the dice of all rows are evenly spread."""
    dice = random.permutation((np.arange(len(weights)) + random.random(len(weights))) / len(weights))
    sums = weights.cumsum(axis=1)
    places: NDArray[np.int64] = (sums < (dice * sums[:, -1])[:, None]).sum(axis=1)
    return places


@lru_cache(1_000)
def _posterior(card: Card) -> tuple[NDArray[np.float64], list[NDArray[np.float64]]]:
    """Return the weights of abilities, and for each domain those of skills (columns) at each ability (rows), given pass
    rates and speed. Speed tells the worker's place in the range of prices, which the prices of pools do not."""
    world = constants()
    z = (GRID - world.ability_mean) / world.ability_sd
    logs = -(z**2) / 2 + _log_likelihood_of_speed(card.speed, z)
    near = np.exp(-(((GRID[None, :] - GRID[:, None]) / world.edge_sd) ** 2) / 2)
    near /= near.sum(axis=1, keepdims=True)
    by_domain = []
    for domain, right in enumerate(card.right):
        rate = _pass_rates(domain)
        likelihood = right * np.log(rate) + (card.questions - right) * np.log(1 - rate)
        joint = near * np.exp(likelihood - likelihood.max())
        by_domain.append(joint)
        logs = logs + np.log(joint.sum(axis=1))
    return np.exp(logs - logs.max()), by_domain


def _log_likelihood_of_speed(speed: float, z: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the log likelihood of a speed at each ability in deviations. The ends of the range stand for all beyond
    them."""
    world = constants()
    rank = math.log(speed / world.speed_high) / math.log(world.speed_low / world.speed_high)
    deviations = (rank - 0.5 - PRICE_SLOPE * z) / PRICE_NOISE
    if 0 < rank < 1:
        return np.asarray(-(deviations**2) / 2)
    beyond = deviations if rank >= 1 else -deviations
    return np.log([math.erfc(deviation / math.sqrt(2)) for deviation in beyond.tolist()])


def _pass_rates(domain: int) -> NDArray[np.float64]:
    """Return the pass rate at each skill of the grid."""
    world = constants()
    logits = GRID[None, :] + world.reason[domain] - world.trait_sd * np.array(TRAITS)[:, None]
    rates: NDArray[np.float64] = (1 / (1 + np.exp(-logits))).mean(axis=0)
    return rates
