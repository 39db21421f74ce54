"""The lessons that training and evaluation draw: a task, a pool, and the order in which the pool is shown."""

from functools import cache
from random import Random
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from app.lab import prompt, search
from app.lab.plan_grammar import ROLES, Form
from app.lab.plans import Plan, PlanStep
from app.lab.world import Pool, draw_pool, standard_pool
from app.providers.rehearsal.task_families import FAMILIES, LEVELS, Family, Problem, write

Split = Literal["train", "held-out tasks", "unseen paraphrases", "unseen families", "random pools"]
SPLITS: tuple[Split, ...] = ("held-out tasks", "unseen paraphrases", "random pools", "unseen families")
"""The splits of the evaluation: fresh tasks of the standard pool; the same in phrasings, or of families, that
training never meets; fresh tasks over pools and prices that training never meets."""


class Lesson(Struct, frozen=True):
    """One task before one pool; ordinal n is the worker `pool[order[n]]`."""

    problem: Problem
    pool: Pool
    order: tuple[int, ...]

    def prompt(self, noise: Random | None = None, share: float = 0.0, form: Form = ROLES) -> list[int]:
        """Return the tokens that the conductor reads."""
        return prompt.tokens(self.problem.text, self.pool, self.order, noise, share, form)

    def shuffle_pool(self, random: Random) -> "Lesson":
        """Return the lesson with its pool shown in another order."""
        return replace(self, order=tuple(random.sample(self.order, len(self.order))))


def draw_lesson(random: Random, split: Split, standard: float = 0.5) -> Lesson:
    """Draw a lesson of this split. In training a share `standard` of the lessons is over the standard pool."""
    problem = write(random, random.choice(_families(split)), random.randrange(LEVELS), _draw_phrasing(random, split))
    pool = _draw_pool(random, split, standard)
    order = list(range(len(pool)))
    random.shuffle(order)
    return Lesson(problem, pool, tuple(order))


@cache
def _families(split: Split) -> tuple[Family, ...]:
    return tuple(family for family in FAMILIES if family.held_out is (split == "unseen families"))


def _draw_phrasing(random: Random, split: Split) -> int:
    last = len(FAMILIES[0].phrasings) - 1
    if split == "unseen paraphrases":
        return last
    return random.randrange(last)


def _draw_pool(random: Random, split: Split, standard: float) -> Pool:
    if split == "random pools":
        return draw_pool(random, unseen=True)
    if split == "train" and random.random() >= standard:
        return draw_pool(random, unseen=False)
    return standard_pool()


def draw_sensible_plan(random: Random, workers: int) -> Plan:
    """Draw a plan of a sensible shape with random workers: the only prior knowledge of training.

    Sensible is a shape in which every step is of use to the answer; nothing says who is good at what.
    """
    shape = random.choice(_shapes_by_length()[random.randrange(len(_shapes_by_length()))])
    return tuple(PlanStep(random.randrange(workers), role, True, sees) for role, sees in shape)


@cache
def _shapes_by_length() -> tuple[tuple[search.Shape, ...], ...]:
    everything = search.shapes()
    by_length: list[list[search.Shape]] = [[] for _ in range(max(map(len, everything)))]
    for shape in everything:
        by_length[len(shape) - 1].append(shape)
    return tuple(map(tuple, by_length))
