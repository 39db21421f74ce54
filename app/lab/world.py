"""A rehearsal world: workers with hidden skill by domain, price and pace, and what decides whether a step succeeds.

Skills and difficulties are on one scale; a chance is the logistic of SLOPE times what speaks for success. A figure that
has a source names it; all others are those of the first trial, or guesses. None was changed after a trained conductor
was first scored. A task has one hidden trait that is the same for all workers (`TRAITS`): errors of models on one
question go together, so that asking twice is worth less than two independent opinions.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from random import Random

from msgspec import Struct
from msgspec.structs import replace

from app.providers.rehearsal.task_families import DOMAINS, LEVELS

VERSION = "world-1"
SLOPE = 1.6
DIFFICULTY = (-0.6, 1.4, 3.7)
"""The difficulty of the three levels, as in the first trial."""
TRAITS = (-0.5, 0.5)
"""A task is, with equal chance, a little harder or easier than its level for every worker."""
REASON_HELPS = 0.4
"""Step by step instead of at once. A thinking and a direct Qwen3-32B differ by 0.04 to 0.4 logits on six of seven
benchmarks (arXiv 2512.04388, table of results), 2.4 on AIME25; 0.64 here."""
PLAN_HELPS, PLAN_MISLEADS = 0.8, -0.3
"""A good plan and a bad one. The first trial had 1.7; without its thinker role TRINITY loses 1.8 points of 70
(arXiv 2512.04695), so that is far too much."""
CROWDS = -0.15
"""Each further thing that a step sees and does not need."""
SELF = -1.4
"""On finding a fault in what the same worker has written: asking GPT-5 five times to reflect on its own answer gains
0.8 points, Gemini 0.1 (arXiv 2512.04388)."""

UNANIMOUS = 3.5
"""On passing on what all answers agree on: 97 in 100, at the least."""

QUESTION, PER_LEVEL = 60, 25
"""Input tokens of a question, and more of them with each level."""
OUTPUT: Mapping[str, int] = {"plan": 110, "solve": 40, "reason": 170, "check": 90, "combine": 60, "nothing": 20}
"""Output tokens of a step by its role; `nothing` is a worker's word that it cannot know."""
INPUT_SHARE = 0.35
"""The input's price in parts of the output's."""
OVERHEAD = 0.25
"""Seconds of a call apart from its decoding."""
CLASSES = tuple((domain, level) for domain in range(len(DOMAINS)) for level in range(LEVELS))


class Profile(Struct, frozen=True):
    """One worker as the world knows it. `strengths` is all that a conductor is shown of its skills."""

    name: str
    strengths: str
    skills: tuple[float, float, float, float]
    plans: float
    checks: float
    price: float
    """Dollars per million output tokens."""
    pace: float
    """Output tokens per second."""

    def __hash__(self) -> int:
        """Hash only the fields in which pools differ: training looks workers up a hundred thousand times a second."""
        return hash((self.name, self.price))


@cache
def profiles() -> Mapping[str, Profile]:
    """Return everyone who could be in a pool; the first six, the standard pool, are the first trial's."""
    everyone = (
        Profile("atlas", "general small", (0.6, 0.4, 0.2, 0.8), -0.5, -0.6, 0.2, 220),
        Profile("birch", "mathematics", (3.0, 2.9, 0.4, -0.2), 0.4, 1.0, 1.0, 90),
        Profile("cedar", "text", (0.8, 0.6, 3.0, -0.2), 0.3, 0.8, 1.0, 90),
        Profile("delta", "calendar", (0.2, 0.2, -0.2, 3.0), 0.6, 0.2, 0.8, 110),
        Profile("ember", "general large", (2.2, 2.2, 2.2, 2.2), 1.6, 1.4, 6.0, 45),
        Profile("flint", "planning checking", (0.3, 0.3, 0.3, 0.3), 2.6, 2.4, 0.9, 100),
        Profile("grove", "mathematics small", (2.0, 1.8, -0.2, -0.4), 0.0, 0.2, 0.4, 160),
        Profile("heron", "general medium", (1.4, 1.4, 1.4, 1.4), 0.9, 0.8, 2.0, 80),
    )
    return {profile.name: profile for profile in everyone}


@lru_cache(10_000)
def shift_skills(worker: Profile, shift: float) -> Profile:
    """Return the worker as its subtask's words make it: better or worse by so much, at planning and at every domain."""
    if not shift:
        return worker
    first, second, third, fourth = worker.skills
    skills = (first + shift, second + shift, third + shift, fourth + shift)
    return replace(worker, skills=skills, plans=worker.plans + shift)


Pool = tuple[Profile, ...]
PRICES = (0.5, 1.0, 2.0)
HELD_OUT_PRICES = (0.7, 1.4)
SMALLEST = 3


def standard_pool() -> Pool:
    """Return the pool of the main table."""
    return tuple(profiles().values())[:6]


def is_held_out(names: Sequence[str]) -> bool:
    """Return True if a pool of these workers is held out from training: those without the first two workers, which are
    a fifth of all sets. So training never has to do without both."""
    return set(names).isdisjoint(list(profiles())[:2])


def draw_pool(random: Random, *, unseen: bool) -> Pool:
    """Draw three to six workers at other prices. `unseen` asks for a set of workers and prices that training never
    meets."""
    while True:
        names = random.sample(list(profiles()), random.randint(SMALLEST, 6))
        if is_held_out(names) == unseen:
            break
    prices: tuple[float, ...] = PRICES
    if unseen:
        prices = HELD_OUT_PRICES
    workers = []
    for name in names:
        worker = profiles()[name]
        workers.append(replace(worker, price=worker.price * random.choice(prices)))
    return tuple(workers)


class Weights(Struct, frozen=True):
    """The worth of a right answer: 1, less these shares of a full cost and a full wait. Wrong is 0."""

    cost: float = 0.30
    wait: float = 0.10
    full_usd: float = 0.006
    full_seconds: float = 12.0

    def worth(self, usd: float, seconds: float) -> float:
        """Return the worth of a right answer; it falls strictly with its cost up to the cap, and stays above 0."""
        return 1 - self.cost * min(1.0, usd / self.full_usd) - self.wait * min(1.0, seconds / self.full_seconds)


DEAR = Weights(cost=0.60, wait=0.35)


def logistic(value: float) -> float:
    """Return the chance that `value` stands for."""
    return 1 / (1 + math.exp(-value))


def plan_chance(worker: Profile, level: int, crowd: int) -> float:
    """Return the chance that its plan is a good one."""
    return logistic(worker.plans - 0.35 * DIFFICULTY[level] + 0.4 + SLOPE * CROWDS * crowd)


def solve_chance(
    worker: Profile, kind: tuple[int, int], trait: float, role: str, plan: int | None, crowd: int
) -> float:
    """Return the chance that it solves a task; `plan` is None, 0 for a bad one, 1 for a good one."""
    reason_effect = plan_effect = 0.0
    if role == "reason":
        reason_effect = REASON_HELPS
    if plan == 1:
        plan_effect = PLAN_HELPS
    elif plan == 0:
        plan_effect = PLAN_MISLEADS
    return logistic(SLOPE * (_margin(worker, kind, trait) + reason_effect + plan_effect + CROWDS * crowd))


def check_chance(worker: Profile, kind: tuple[int, int], trait: float, right: int, own: bool, crowd: int) -> float:
    """Return the chance that a checked answer is right: a right one is kept, a wrong one is found wrong and solved
    anew."""
    if right:
        return logistic(2.2 + 0.7 * worker.checks + SLOPE * CROWDS * crowd)
    logit = worker.checks - 0.5
    if own:
        logit += SELF
    finds = logistic(logit)
    return finds * logistic(SLOPE * (_margin(worker, kind, trait) + REASON_HELPS + CROWDS * crowd))


def combine_chance(worker: Profile, kind: tuple[int, int], trait: float, right: int, count: int, crowd: int) -> float:
    """Return the chance that a right answer is given, where `right` of `count` answers are: weak judges take the
    majority."""
    if not right:
        return 0.0
    majority = 1.5 * (2 * right - count) / count
    logit = SLOPE * (0.5 * worker.checks + 0.5 * _margin(worker, kind, trait) + majority)
    if right == count:
        logit = max(logit, UNANIMOUS)
    return logistic(logit + SLOPE * CROWDS * crowd)


def _margin(worker: Profile, kind: tuple[int, int], trait: float) -> float:
    return worker.skills[kind[0]] - DIFFICULTY[kind[1]] - trait


def usd(worker: Profile, input_tokens: int, output_tokens: int) -> float:
    """Return the cost of one call, in dollars."""
    return worker.price * (output_tokens + INPUT_SHARE * input_tokens) / 1e6


def seconds(worker: Profile, output_tokens: int) -> float:
    """Return the duration of one call, in seconds."""
    return OVERHEAD + output_tokens / worker.pace


class Setting(Struct, frozen=True):
    """A pool under one weighing of cost: with the task's class, all that a plan's worth depends on."""

    pool: Pool
    weights: Weights = Weights()
