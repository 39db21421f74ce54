"""Two bounds beside the searched optimum say how much of the gap can be closed at all, by what a policy may know.

optimum by cards ... knows the world's figures and every task's kind; of workers it knows what their cards tell: the
                     mean of the exact posterior under the distribution that workers are drawn from. Where there are
                     no verdicts on the workers, no policy can be expected to do much better: the bound of the cards.
optimum as read .... knows the figures and the workers' hidden skills, and reads tasks as the learner does (`reading`)
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from random import Random

import numpy as np
from numpy.typing import NDArray

from app.lab.world2.baselines import Chosen, Setting
from app.lab.world2.constants import TRAITS, constants
from app.lab.world2.outcome import Rewards, everything
from app.lab.world2.reading import Reader
from app.lab.world2.tasks import Part, Task, task
from app.lab.world2.workers import PRICE_NOISE, PRICE_SLOPE, Card, Worker

GRID = np.linspace(-2.5, 4.0, 66)
"""Abilities and skills, in logits."""
FACTOR_NOISE = 0.1
"""The spread of a pool's price factors, in parts of the range of prices by ratio."""


class OptimumByCards:
    """The best plans if every worker were as its card makes it expected to be."""

    name = "optimum by cards"

    def choose(self, setting: Setting, tasks: Sequence[Task]) -> Chosen:
        """Return the best plan for each task."""
        rewards = Rewards(tuple(_expected(worker) for worker in setting.pool))
        return np.array([int(everything(rewards, posed).argmax()) for posed in tasks])


class OptimumAsRead:
    """The best plans if every task were as it is read."""

    name = "optimum as read"

    def __init__(self, seed: int, texts: int) -> None:
        random = Random(f"world-2|reader|{seed}")
        self._reader = Reader([task(random, "train") for _ in range(texts)])

    def choose(self, setting: Setting, tasks: Sequence[Task]) -> Chosen:
        """Return the best plan for each task."""
        return np.array([self._best(setting.rewards, posed) for posed in tasks])

    def _best(self, rewards: Rewards, posed: Task) -> int:
        total = np.zeros(1)
        for read in self._reader.readings(posed):
            parts = tuple(Part(self._reader.families[place], "", " ") for place in read.families)
            understood = replace(posed, parts=parts, confidential=read.confidential)
            total = total + read.weight * everything(rewards, understood)
        return int(total.argmax())


def _expected(worker: Worker) -> Worker:
    ability, skills = _posterior(worker.card)
    return replace(worker, ability=ability, edges=tuple(skill - ability for skill in skills))


@lru_cache(1_000)
def _posterior(card: Card) -> tuple[float, tuple[float, ...]]:
    """The means of ability and of the skill in each domain, given pass rates and price."""
    known = constants()
    z = (GRID - known.ability_mean) / known.ability_sd
    rank = np.log(card.price / known.price_low) / np.log(known.price_high / known.price_low)
    logs = -(z**2) / 2 - ((rank - 0.5 - PRICE_SLOPE * z) / np.hypot(PRICE_NOISE, FACTOR_NOISE)) ** 2 / 2
    near = np.exp(-(((GRID[None, :] - GRID[:, None]) / known.edge_sd) ** 2) / 2)
    near /= near.sum(axis=1, keepdims=True)
    means = []
    for domain, right in enumerate(card.right):
        rate = _rates(domain)
        chance = rate**right * (1 - rate) ** (card.asked - right)
        total = near @ chance
        logs = logs + np.log(total)
        means.append((near @ (chance * GRID)) / total)
    weights = np.exp(logs - logs.max())
    weights /= weights.sum()
    return float(weights @ GRID), tuple(float(weights @ mean) for mean in means)


def _rates(domain: int) -> NDArray[np.float64]:
    """The pass rate at each skill of the grid."""
    known = constants()
    logits = GRID[None, :] + known.reason[domain] - known.trait_sd * np.array(TRAITS)[:, None]
    rates: NDArray[np.float64] = (1 / (1 + np.exp(-logits))).mean(axis=0)
    return rates
