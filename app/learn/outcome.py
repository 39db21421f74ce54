"""What a plan comes to in a world, exactly: the chance of a right answer, its cost and its wait.

Each step that yields a plan or an answer has one hidden bit, good or right; the chance of each bit follows from the
bits that the step sees. Summing over all bits of at most four steps and both traits of a task is exact and takes
microseconds, so that training rolls out thousands of plans a second. `actors.py` is the same world as workers that
read and write messages; a test runs plans through the executor's core and finds the same figures.
"""

from functools import lru_cache
from typing import NamedTuple

from app.learn import world
from app.learn.plans import Plan, hands, kinds, needs
from app.learn.world import OUTPUT, PER_LEVEL, QUESTION, TRAITS, Profile, Setting


class Outcome(NamedTuple):
    """The expectation of one plan for one class of tasks."""

    right: float
    usd: float
    seconds: float
    worth: float
    """Of a right answer under the setting's weights."""

    @property
    def reward(self) -> float:
        """The expected reward: nothing for a wrong answer."""
        return self.right * self.worth


def outcome(plan: Plan, kind: tuple[int, int], setting: Setting) -> Outcome:
    """What `plan` comes to for tasks of class `kind` = (domain, level)."""
    usd, seconds = bill(plan, kind[1], setting.pool)
    return Outcome(right(plan, kind, setting.pool), usd, seconds, setting.weights.worth(usd, seconds))


@lru_cache(200_000)
def right(plan: Plan, kind: tuple[int, int], pool: tuple[Profile, ...]) -> float:
    """The chance that the plan's answer is right."""
    yields = kinds(plan)
    if yields[-1] != "answer":
        return 0.0
    return sum(_right(plan, yields, kind, trait, pool) for trait in TRAITS) / len(TRAITS)


def _right(plan: Plan, yields: list[str], kind: tuple[int, int], trait: float, pool: tuple[Profile, ...]) -> float:
    used_by = [needs(plan, place, yields) for place in range(len(plan))]
    odds = [1.0]
    """The chance of each combination of bits so far; bit n is step n's."""
    for place, step in enumerate(plan):
        if yields[place] == "nothing":
            odds += [0.0] * len(odds)
            continue
        used = used_by[place]
        crowd = len(step.sees) - len(used)
        own = step.role == "check" and any(plan[n].worker == step.worker for n in hands(used_by, yields, used[0]))
        worker = pool[step.worker]
        chances = [
            chance(worker, kind, trait, step.role, tuple(bits >> n & 1 for n in used), own, crowd)
            for bits in range(len(odds))
        ]
        odds = [p * (1 - c) for p, c in zip(odds, chances, strict=True)] + [
            p * c for p, c in zip(odds, chances, strict=True)
        ]
    return sum(odds[len(odds) // 2 :])


@lru_cache(200_000)
def chance(
    worker: Profile, kind: tuple[int, int], trait: float, role: str, seen: tuple[int, ...], own: bool, crowd: int
) -> float:
    if role == "plan":
        return world.plan_chance(worker, kind[1], crowd)
    if role == "check":
        return world.check_chance(worker, kind, trait, seen[0], own, crowd)
    if role == "combine":
        return world.combine_chance(worker, kind, trait, sum(seen), len(seen), crowd)
    return world.solve_chance(worker, kind, trait, role, seen[0] if seen else None, crowd)


def bill(plan: Plan, level: int, pool: tuple[Profile, ...]) -> tuple[float, float]:
    """Dollars of all calls, and seconds on the critical path to the last step."""
    yields = kinds(plan)
    written = [OUTPUT["nothing" if what == "nothing" else step.role] for step, what in zip(plan, yields, strict=True)]
    ends: list[float] = []
    dollars = 0.0
    for place, step in enumerate(plan):
        worker = pool[step.worker]
        read = (QUESTION + PER_LEVEL * level if step.user else 0) + sum(written[n] for n in step.sees)
        dollars += world.usd(worker, read, written[place])
        ends.append(max((ends[n] for n in step.sees), default=0.0) + world.seconds(worker, written[place]))
    return dollars, max(ends)
