"""The share of a swap's lost reward that can be regained, by a learner that knows the form of the world.

    python -m tests.lab.recovery_bound [--seeds 10] [--first 20]

It bounds what the selector reaches in `tests.lab.changes`. The swap, the arms, the tasks and the number of ratings are
the same. This learner reads the class of each task and knows all figures of the world and all skills before the swap.
It believes that two workers change at the same moment, that their skills in each domain are then drawn from a normal
distribution (`SKILL`), and that a change happens once in `RATINGS_BETWEEN_CHANGES` ratings. Its posterior over the
moment, the two workers and their new skills is exact, but for a grid of skills and of moments. Three learners are
compared:

told ................ it knows the moment and the two workers, and chooses by a draw from its posterior (Thompson)
not told ............ it knows neither, and chooses by a draw
not told, by mean ... it knows neither, and takes the arm that is best at the mean

As the selector does, each of them takes a random arm for a small share of the tasks. Printed is the share of the lost
reward that the arms regain which are best at the mean, for `deploy/docs/learning.md`.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from statistics import mean
from typing import TypeAlias

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from app.lab.outcome import bill, right
from app.lab.plans import Plan
from app.lab.world import CLASSES, standard_pool
from app.providers.rehearsal.task_families import DOMAINS
from tests.lab import bandit
from tests.lab.changes import BEFORE, BIRCH, CEDAR, LOOKS, Pool, swap_specialists

Array: TypeAlias = NDArray[np.float64]
SKILL = (1.1, 1.1)
"""Mean and deviation of a changed worker's skill in a domain: those of the standard pool, rounded."""
SKILLS = np.linspace(-3, 5, 41)
"""The grid of skills."""
RATINGS_BETWEEN_CHANGES = 2_000
RATINGS_BETWEEN_MOMENTS = 5
"""The grid of moments: a change can happen at every fifth rating."""
PAIRS = tuple(combinations(range(len(standard_pool())), 2))


@dataclass(frozen=True)
class World:
    """The learner's knowledge: chances of a right answer and its worth, by arm and class."""

    worth: Array
    before: Array
    after: Array
    """The true chances after the swap, which the learner does not know."""
    by_skill: Array
    """Chances by arm, class and skill (`SKILLS`) of the worker that answers."""
    answering: NDArray[np.int64]
    """The worker that answers, by arm."""


@cache
def world() -> World:
    """Return the standard world."""
    arms, pool = bandit.every_arm(), standard_pool()
    names = [worker.name for worker in pool]
    worth = np.array([_worths(bandit.as_plan(arm)) for arm in arms])
    answering = np.array([names.index(arm.main) for arm in arms])
    by_skill = np.zeros((len(arms), len(CLASSES), len(SKILLS)))
    for worker in range(len(pool)):
        rows = answering == worker
        for place, skill in enumerate(SKILLS):
            by_skill[rows, :, place] = _chances(_pool_with(worker, float(skill)))[rows]
    return World(worth, _chances(pool), _chances(swap_specialists()), by_skill, answering)


def _worths(plan: Plan) -> list[float]:
    """Return what a right answer of a plan is worth, by class."""
    bills = [bill(plan, level, standard_pool()) for _, level in CLASSES]
    return [bandit.WEIGHTS.worth(usd, seconds) for usd, seconds in bills]


def _chances(pool: Pool) -> Array:
    """Return the chance of a right answer, by arm and class."""
    rows = []
    for arm in bandit.every_arm():
        plan = bandit.as_plan(arm)
        rows.append([right(plan, kind, pool) for kind in CLASSES])
    return np.array(rows)


def _pool_with(worker: int, skill: float) -> Pool:
    """Return the standard pool in which one worker has this skill in every domain."""
    pool = list(standard_pool())
    pool[worker] = replace(pool[worker], skills=(skill,) * 4, name=f"{pool[worker].name} {skill}")
    return tuple(pool)


class Learner:
    """The exact posterior over what has changed.

    For each moment, worker and domain it keeps the log likelihood ratios of the ratings since that moment: of each
    skill that the worker could have since, to the skill that it had before.
    """

    def __init__(self, moments: Sequence[int], pairs: Sequence[tuple[int, int]], *, informed: bool) -> None:
        """`moments` and `pairs` of workers are those that are possible; `told`: one of each, and it is certain."""
        self._moments, self._pairs, self._told = np.array(moments), pairs, informed
        workers = len(standard_pool())
        self._is_in_pair = np.zeros((workers, len(pairs)))
        for place, pair in enumerate(pairs):
            self._is_in_pair[list(pair), place] = 1
        self._prior = np.exp(-(((SKILLS - SKILL[0]) / SKILL[1]) ** 2) / 2)
        self._prior /= self._prior.sum()
        self._ratios = np.zeros((len(moments), workers, len(DOMAINS), len(SKILLS)))
        self._evidence = np.zeros(self._ratios.shape[:3])
        """The log of the mean ratio over all skills."""
        self._ratings = 0

    def learn(self, arm: int, kind: int, *, answered: bool) -> None:
        """Learn one rating of an arm for a task of this class."""
        known_world, worker, domain = world(), world().answering[arm], CLASSES[kind][0]
        changed, unchanged = known_world.by_skill[arm, kind], known_world.before[arm, kind]
        since = self._moments <= self._ratings
        ratio = np.log(changed / unchanged) if answered else np.log((1 - changed) / (1 - unchanged))
        self._ratios[since, worker, domain] += ratio
        ratios = self._ratios[since, worker, domain]
        most = ratios.max(axis=1)
        self._evidence[since, worker, domain] = most + np.log(np.exp(ratios - most[:, None]) @ self._prior)
        self._ratings += 1

    def _probabilities(self) -> Array:
        """Return the probability of a change by moment and pair; what is missing to 1 is that nothing has changed."""
        moments_past = int((self._moments <= self._ratings).sum())
        logs = self._evidence[:moments_past].sum(axis=2) @ self._is_in_pair
        if self._told:
            unchanged = -np.inf
        else:
            unchanged = -self._ratings / RATINGS_BETWEEN_CHANGES
            logs += np.log(RATINGS_BETWEEN_MOMENTS / RATINGS_BETWEEN_CHANGES / len(self._pairs))
            logs -= self._moments[:moments_past, None] / RATINGS_BETWEEN_CHANGES
        most = max(unchanged, logs.max())
        weights = np.exp(logs - most)
        probabilities: Array = weights / (weights.sum() + np.exp(unchanged - most))
        return probabilities

    def _skills(self, moments: int | slice, worker: int, domain: int) -> Array:
        """Return the probabilities of a worker's skills if it has changed at these moments."""
        ratios = self._ratios[moments, worker, domain]
        weights = self._prior * np.exp(ratios - ratios.max(axis=-1, keepdims=True))
        probabilities: Array = weights / weights.sum(axis=-1, keepdims=True)
        return probabilities

    def draw_chances(self, kind: int, random: np.random.Generator) -> Array:
        """Return the chances of all arms for a class, by one draw of what has changed."""
        known_world, probabilities = world(), self._probabilities()
        chances = known_world.before[:, kind].copy()
        if random.random() >= probabilities.sum():
            return chances
        place_drawn = random.choice(probabilities.size, p=probabilities.ravel() / probabilities.sum())
        moment, pair = divmod(int(place_drawn), len(self._pairs))
        for worker in self._pairs[pair]:
            skill = random.choice(len(SKILLS), p=self._skills(moment, worker, CLASSES[kind][0]))
            rows = known_world.answering == worker
            chances[rows] = known_world.by_skill[rows, kind, skill]
        return chances

    def expected(self, kind: int) -> Array:
        """Return the mean chances of all arms for a class."""
        known_world, probabilities = world(), self._probabilities()
        chances = known_world.before[:, kind].copy()
        for worker in range(len(standard_pool())):
            changed = probabilities @ self._is_in_pair[worker]
            skills = changed @ self._skills(slice(0, len(changed)), worker, CLASSES[kind][0])
            rows = known_world.answering == worker
            chances[rows] = (1 - changed.sum()) * known_world.before[rows, kind] + known_world.by_skill[
                rows, kind
            ] @ skills
        return chances


def informed_learner() -> Learner:
    """Return the learner that knows the moment and the two workers."""
    return Learner([0], [(BIRCH, CEDAR)], informed=True)


def untold() -> Learner:
    """Return the learner that knows neither."""
    return Learner(range(0, BEFORE + max(LOOKS), RATINGS_BETWEEN_MOMENTS), PAIRS, informed=False)


def measure_recovery(learner: Learner, seed: int, first: int, *, draws: bool) -> list[float]:
    """Return the share of the lost reward that is regained at each look. The learner gets the ratings from the task
    `first` on."""
    known_world, random, shares = world(), np.random.default_rng(seed), []
    exam = [CLASSES.index(task.kind) for task in bandit.problems(200, 1_000_003)]
    tasks = [CLASSES.index(task.kind) for task in bandit.problems(BEFORE + max(LOOKS), seed)]
    best = (known_world.before * known_world.worth).argmax(axis=0)
    high, low = (_value(chances, best, exam) for chances in (known_world.before, known_world.after))
    for place in range(first, len(tasks)):
        kind = tasks[place]
        chances = learner.draw_chances(kind, random) if draws else learner.expected(kind)
        arm = int((chances * known_world.worth[:, kind]).argmax())
        if random.random() < bandit.SPEC.explore:
            arm = int(random.integers(len(known_world.worth)))
        truth = known_world.before if place < BEFORE else known_world.after
        learner.learn(arm, kind, answered=random.random() < truth[arm, kind])
        if place + 1 - BEFORE in LOOKS:
            believed = np.stack([learner.expected(kind) for kind in range(len(CLASSES))], axis=1)
            chosen = (believed * known_world.worth).argmax(axis=0)
            shares.append((_value(known_world.after, chosen, exam) - low) / (high - low))
    return shares


def _value(chances: Array, chosen: NDArray[np.int64], exam: Sequence[int]) -> float:
    """Return the mean reward of the arms that are chosen for each class."""
    rewards = chances * world().worth
    return mean(float(rewards[chosen[kind], kind]) for kind in exam)


def main() -> None:
    """Print the shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=20)
    options = parser.parse_args()
    learners: tuple[tuple[str, Callable[[], Learner], int, bool], ...] = (
        ("told", informed_learner, BEFORE, True),
        ("not told", untold, 0, True),
        ("not told, by mean", untold, 0, False),
    )
    for name, make_learner, first, draws in learners:
        seeds = range(options.first, options.first + options.seeds)
        shares_by_seed = [measure_recovery(make_learner(), seed, first, draws=draws) for seed in seeds]
        for look, shares in zip(LOOKS, zip(*shares_by_seed, strict=True), strict=True):
            every = ", ".join([f"{share:.0%}" for share in sorted(shares)])
            print(f"{name}, {look} ratings after the swap: {mean(shares):.0%}; by seed, the worst first: {every}")


if __name__ == "__main__":
    main()
