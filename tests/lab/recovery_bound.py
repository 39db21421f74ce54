"""How much of what a swap of skills took could be back after so many ratings, for whoever knows all but two workers.

    python -m tests.lab.recovery_bound [--seeds 10] [--first 20]

It bounds what the selector reaches in `tests.lab.changes`. After the same swap, over the same arms, tasks and ratings,
this learner is told at once which two workers have changed, reads the class of each task, and knows the form of the
world with all its figures, except how able these two now are in each domain. Of that it believes what `ABLE` says,
stands for it by `DRAWS` draws, weighs these by the ratings, and chooses by a draw (Thompson sampling). It prints a line
for `deploy/docs/learning.md`.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from app.lab.outcome import bill, right
from app.lab.plans import Plan
from app.lab.world import CLASSES, standard_pool
from tests.lab import bandit
from tests.lab.changes import BEFORE, BIRCH, CEDAR, Pool, swapped

Array: TypeAlias = NDArray[np.float64]
LOOKS, DRAWS = (150, 300), 1_500
ABLE = (1.1, 1.1)
"""Mean and deviation of a worker's skill in a domain before any rating: those of the standard pool, rounded."""


class Known:
    """The arms' chances and worths by class, as they are and as they would be by each draw of the two workers."""

    def __init__(self) -> None:
        arms, pool = bandit.every_arm(), standard_pool()
        self.worth = np.stack([_worths(bandit.as_plan(arm)) for arm in arms])
        self.before, self.after = _chances(pool), _chances(swapped())
        self.led: dict[int, list[int]] = {}
        """The places of the arms in which each of the two answers."""
        self.drawn: dict[int, Array] = {}
        """Their chances by draw, arm and class."""
        random = np.random.default_rng(0)
        for changed in (BIRCH, CEDAR):
            self.led[changed] = [place for place, arm in enumerate(arms) if arm.main == pool[changed].name]
            skills = random.normal(*ABLE, size=(DRAWS, 4))
            self.drawn[changed] = np.stack([_chances(_able(changed, row))[self.led[changed]] for row in skills])

    def rewards(self, weights: dict[int, Array]) -> Array:
        """The rewards of all arms by class, on average over weighted draws of the two workers."""
        chances = self.before.copy()
        for changed, of in weights.items():
            chances[self.led[changed]] = np.tensordot(of, self.drawn[changed], axes=1)
        rewards: Array = chances * self.worth
        return rewards


def _worths(plan: Plan) -> Array:
    """What a right answer of a plan is worth, by class."""
    bills = [bill(plan, level, standard_pool()) for _, level in CLASSES]
    return np.array([bandit.WEIGHTS.worth(usd, seconds) for usd, seconds in bills])


def _chances(pool: Pool) -> Array:
    """The chance of a right answer, by arm and class."""
    rows = []
    for arm in bandit.every_arm():
        plan = bandit.as_plan(arm)
        rows.append([right(plan, kind, pool) for kind in CLASSES])
    return np.array(rows)


def _able(changed: int, skills: Sequence[float]) -> Pool:
    """The pool after the swap, with these skills of one of the two."""
    first, second, third, fourth = map(float, skills)
    pool = list(swapped())
    pool[changed] = replace(pool[changed], skills=(first, second, third, fourth), name=f"{changed} {first}")
    return tuple(pool)


def recovered(known: Known, seed: int) -> list[float]:
    """The share of the lost reward that is back at each look."""
    exam = [CLASSES.index(task.kind) for task in bandit.problems(200, 1_000_003)]
    tasks = [CLASSES.index(task.kind) for task in bandit.problems(BEFORE + max(LOOKS), seed)[BEFORE:]]
    best = (known.before * known.worth).argmax(axis=0)
    high, low = (_value(chances * known.worth, best, exam) for chances in (known.before, known.after))
    random, found = np.random.default_rng(seed), []
    logs = {changed: np.zeros(DRAWS) for changed in known.led}
    for rated, kind in enumerate(tasks, 1):
        one = {changed: random.multinomial(1, _shares(of)).astype(float) for changed, of in logs.items()}
        arm = int(known.rewards(one)[:, kind].argmax())
        if random.random() < bandit.SPEC.explore:
            arm = int(random.integers(len(known.worth)))
        answered = random.random() < known.after[arm, kind]
        for changed, led in known.led.items():
            if arm in led:
                chances = known.drawn[changed][:, led.index(arm), kind]
                logs[changed] += np.log(chances if answered else 1 - chances)
        if rated in LOOKS:
            believed = known.rewards({changed: _shares(of) for changed, of in logs.items()}).argmax(axis=0)
            found.append((_value(known.after * known.worth, believed, exam) - low) / (high - low))
    return found


def _shares(logs: Array) -> Array:
    weights = np.exp(logs - logs.max())
    shares: Array = weights / weights.sum()
    return shares


def _value(rewards: Array, chosen: NDArray[np.int64], exam: Sequence[int]) -> float:
    """The mean reward of the arms that are chosen for each class."""
    return mean(float(rewards[chosen[kind], kind]) for kind in exam)


def main() -> None:
    """Print the shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=20)
    given = parser.parse_args()
    known = Known()
    found = [recovered(known, seed) for seed in range(given.first, given.first + given.seeds)]
    for look, of in zip(LOOKS, zip(*found, strict=True), strict=True):
        every = ", ".join([f"{one:.0%}" for one in sorted(of)])
        print(f"{look} ratings after the swap {mean(of):.0%} is back; by seed, the worst first: {every}")


if __name__ == "__main__":
    main()
