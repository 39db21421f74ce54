"""The value of a second round at its price: two rounds against one at equal cost, exactly, in the rehearsal world.

    python -m app.lab.rounds

In a second round the conductor is shown the answer. It is one of the pool's workers, paid as such: it finds a wrong
answer wrong, and a right one right, with the chances that the world gives a checker, so badly in its own hand. What it
doubts has a second plan of one or two steps, which checks the answer or begins anew. One round has instead any plan of
up to four steps; of two rounds each has up to two. Both arms know the hidden skills and choose the best they have: for
a budget, the frontier of accuracy over expected cost, on which plans may be mixed.
"""

import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, permutations, product
from random import Random
from typing import NamedTuple

from app.lab import world
from app.lab.outcome import bill, right_given_trait
from app.lab.paired_statistics import Interval, interval, paired_bootstrap
from app.lab.plans import STEPS, Plan, PlanStep, contributing_steps, results_of_steps
from app.lab.search import CONTEXTS, PlanSearch, Shape, shapes
from app.lab.world import CLASSES, OUTPUT, PER_LEVEL, QUESTION, TRAITS, Profile, Setting, standard_pool
from app.providers.rehearsal.task_families import LEVELS

PROMPT = 1_000
"""Input tokens of a conductor's prompt without question and answer, for a pool of six."""
ACCEPTS, PLANS = 10, 60
"""Output tokens of the empty plan, and of one of a step or two."""
BUDGETS = (0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
"""Thousandths of a dollar for a task."""
LESSONS, RESAMPLES = 1_000, 2_000


class Point(NamedTuple):
    """The dollars and the accuracy of a policy for one class of tasks."""

    usd: float
    right: float
    again: float = 0.0
    """The share of tasks for which it opens a second round."""


class Second(NamedTuple):
    """A second plan: the worker that begins anew, if one does, with its role, and the one that checks, if one does."""

    solver: int | None
    role: str
    checker: int | None


def one_round(setting: Setting, most: int = STEPS) -> list[list[Point]]:
    """Return for each class the points of all plans of at most `most` steps."""
    plan_search = _AllPlans(setting)
    for shape in shapes(most):
        plan_search.try_shape(shape)
    return plan_search.points


class _AllPlans(PlanSearch):
    """Keeps the points of all plans instead of the best."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.points: list[list[Point]] = [[] for _ in CLASSES]

    def record(self, shape: Shape, tokens: list[tuple[int, int]], workers: list[int], good: list[list[float]]) -> None:
        """Keep the points of one plan."""
        usd_by_level = [0.0] * LEVELS
        for level in range(LEVELS):
            for place, (input_tokens, output_tokens) in zip(workers, tokens, strict=True):
                usd_by_level[level] += world.usd(
                    self.setting.pool[place], input_tokens + PER_LEVEL * level, output_tokens
                )
        for n, (_, level) in enumerate(CLASSES):
            right = (sum(good[2 * n]) + sum(good[2 * n + 1])) / len(TRAITS)
            self.points[n].append(Point(usd_by_level[level], right))


def two_rounds(setting: Setting, conductor: int) -> list[list[Point]]:
    """Return for each class the points of all first and second plans of at most two steps, if this worker conducts."""
    plan_search = _FirstPlans(setting)
    for shape in shapes(2):
        plan_search.try_shape(shape)
    points: list[list[Point]] = [[] for _ in CLASSES]
    for (plan, good), second in product(plan_search.plans, _second_plans(len(setting.pool))):
        wrote = writers(plan)
        if second.solver in wrote:  # it would say the same again
            continue
        for n, point in enumerate(_points(setting.pool, plan, good, conductor, second, wrote)):
            points[n].append(point)
    return points


def policy(setting: Setting, plan: Plan, judge: int, second: Second) -> list[Point]:
    """Return for each class the point of one first plan, one conductor and one second plan."""
    good = [right_given_trait(plan, kind, trait, setting.pool) for kind, trait in CONTEXTS]
    return list(_points(setting.pool, plan, good, judge, second, writers(plan)))


class _FirstPlans(PlanSearch):
    """Keeps all plans with their chances in every context."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.plans: list[tuple[Plan, list[float]]] = []

    def record(self, shape: Shape, tokens: list[tuple[int, int]], workers: list[int], good: list[list[float]]) -> None:
        """Keep one plan."""
        plan = []
        for worker, (role, sees) in zip(workers, shape, strict=True):
            plan.append(PlanStep(worker, role, True, sees))
        self.plans.append((tuple(plan), list(map(sum, good))))


def _second_plans(workers: int) -> list[Second]:
    """Return all second plans: those that check alone, those that begin anew, and those that do both."""
    plans = [Second(None, "", checker) for checker in range(workers)]
    for solver, role in product(range(workers), ("solve", "reason")):
        plans.append(Second(solver, role, None))
    for (solver, checker), role in product(permutations(range(workers), 2), ("solve", "reason")):
        plans.append(Second(solver, role, checker))
    return plans


def writers(plan: Plan) -> frozenset[int]:
    """Return the workers that had a hand in a plan's answer."""
    results = results_of_steps(plan)
    last = len(plan) - 1
    workers = set()
    for n in {*contributing_steps([step.sees for step in plan], results, last), last}:
        if results[n] == "answer":
            workers.add(plan[n].worker)
    return frozenset(workers)


def _points(
    pool: Sequence[Profile], plan: Plan, good: Sequence[float], judge: int, second: Second, wrote: frozenset[int]
) -> Iterable[Point]:
    """Yield the points of one policy, one for each class."""
    own = judge in wrote
    doubts_wrong = doubt_chance(pool[judge], right=0, own=own)
    doubts_right = doubt_chance(pool[judge], right=1, own=own)
    for kind in CLASSES:
        level = kind[1]
        right = again = 0.0
        for trait in TRAITS:
            p = good[CONTEXTS.index((kind, trait))]
            after_wrong = _right_after_second_plan(pool, second, kind, trait, 0, wrote)
            after_right = _right_after_second_plan(pool, second, kind, trait, 1, wrote)
            right += p * (1 - doubts_right) + p * doubts_right * after_right + (1 - p) * doubts_wrong * after_wrong
            again += p * doubts_right + (1 - p) * doubts_wrong
        again /= len(TRAITS)
        accepting = judging_usd(pool[judge], level, ACCEPTS)
        planning = judging_usd(pool[judge], level, PLANS)
        judging = accepting * (1 - again) + planning * again
        first_usd, _ = bill(plan, level, tuple(pool))
        usd = first_usd + judging + again * _second_usd(pool, second, level)
        yield Point(usd, right / len(TRAITS), again)


def doubt_chance(judge: Profile, *, right: int, own: bool) -> float:
    """Return the probability that a conductor opens a second round: as likely as a checker finds fault."""
    if right:
        return 1 - world.logistic(2.2 + 0.7 * judge.checks)
    logit = judge.checks - 0.5
    if own:
        logit += world.SELF
    return world.logistic(logit)


def judging_usd(judge: Profile, level: int, output_tokens: int) -> float:
    """Return the cost of showing a conductor the answer, in dollars."""
    return world.usd(judge, PROMPT + QUESTION + PER_LEVEL * level + OUTPUT["reason"], output_tokens)


def _right_after_second_plan(
    pool: Sequence[Profile], second: Second, kind: tuple[int, int], trait: float, before: int, wrote: frozenset[int]
) -> float:
    """Return the probability that the second plan's answer is right, if the one before was (1) or was not (0)."""
    if second.solver is not None:
        p = world.solve_chance(pool[second.solver], kind, trait, second.role, None, 0)
        if second.checker is None:
            return p
        checker = pool[second.checker]
        keeps = world.check_chance(checker, kind, trait, 1, False, 0)
        corrects = world.check_chance(checker, kind, trait, 0, False, 0)
        return p * keeps + (1 - p) * corrects
    assert second.checker is not None
    return world.check_chance(pool[second.checker], kind, trait, before, second.checker in wrote, 0)


def _second_usd(pool: Sequence[Profile], second: Second, level: int) -> float:
    """Return the dollars of a second plan's workers. A checker reads the solver's answer, or that of the first plan."""
    question = QUESTION + PER_LEVEL * level
    answer = OUTPUT["reason"]
    usd = 0.0
    if second.solver is not None:
        usd += world.usd(pool[second.solver], question, OUTPUT[second.role])
        answer = OUTPUT[second.role]
    if second.checker is not None:
        usd += world.usd(pool[second.checker], question + answer, OUTPUT["check"])
    return usd


# -- at equal cost


def frontier(points: Sequence[Point]) -> list[Point]:
    """Return the policies that are worth mixing: the upper hull of accuracy over cost, as far as it rises."""
    hull: list[Point] = []
    for point in sorted(points, key=lambda point: (point.usd, -point.right)):
        if hull and point.right <= hull[-1].right:
            continue
        while len(hull) > 1 and _slope(hull[-2], point) >= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(point)
    return hull


def _slope(point: Point, other: Point) -> float:
    return (other.right - point.right) / max(other.usd - point.usd, 1e-12)


def by_class(points: Sequence[Sequence[Point]], usd: float) -> list[Point] | None:
    """Return the result for each class if each has the plans that are best for it and a task may cost so many dollars
    on average; None if nothing is so cheap."""
    hulls = list(map(frontier, points))
    chosen = [hull[0] for hull in hulls]
    left_usd = usd * len(hulls) - sum([point.usd for point in chosen])
    if left_usd < 0:
        return None
    upgrades: list[tuple[float, int, Point, Point]] = []
    for n, hull in enumerate(hulls):
        for low, high in pairwise(hull):
            upgrades.append((_slope(low, high), n, low, high))
    upgrades.sort(key=lambda upgrade: -upgrade[0])
    for _, n, low, high in upgrades:
        part = min(1.0, left_usd / (high.usd - low.usd))
        chosen[n] = _mix(low, high, part)
        left_usd -= part * (high.usd - low.usd)
        if part < 1.0:
            break
    return chosen


def same_for_all(points: Sequence[Sequence[Point]], usd: float) -> list[Point] | None:
    """Return the result for each class if all have the same plan, or the same two mixed."""
    number_of: dict[Point, int] = {}
    for number, of_plan in enumerate(zip(*points, strict=True)):
        number_of.setdefault(_mean(of_plan), number)
    hull = frontier(list(number_of))
    place = bisect_right([point.usd for point in hull], usd) - 1
    if place < 0:
        return None
    low, high = hull[place], hull[min(place + 1, len(hull) - 1)]
    part = 0.0
    if high is not low:
        part = (usd - low.usd) / (high.usd - low.usd)
    return [_mix(of_class[number_of[low]], of_class[number_of[high]], part) for of_class in points]


def _mean(points: Sequence[Point]) -> Point:
    """Return the means of dollars, accuracy and second rounds."""
    usd, right, again = zip(*points, strict=True)
    return Point(sum(usd) / len(points), sum(right) / len(points), sum(again) / len(points))


def _mix(low: Point, high: Point, part: float) -> Point:
    """Return the result of taking `high` for a share `part` of the tasks, else `low`."""
    return Point(
        usd=low.usd + part * (high.usd - low.usd),
        right=low.right + part * (high.right - low.right),
        again=low.again + part * (high.again - low.again),
    )


class Row(NamedTuple):
    """The accuracy of both arms over the same tasks, the advantage of two rounds, and how often the second one is
    opened."""

    one: float
    two: float
    ahead: Interval
    again: float


def compare_rounds(single: Sequence[Point], double: Sequence[Point]) -> Row:
    """Compare one round with two, given for each class; the interval is a paired bootstrap over tasks."""
    random = Random(0)
    tasks = random.choices(list(zip(single, double, strict=True)), k=LESSONS)
    ahead = [two.right - one.right for one, two in tasks]
    means = paired_bootstrap({"ahead": ahead}, random, RESAMPLES)
    one, two = map(_mean, zip(*tasks, strict=True))
    return Row(one.right, two.right, interval([mean["ahead"] for mean in means]), two.again)


def report(setting: Setting, most: int = STEPS) -> Iterator[str]:
    """Yield the tables, line by line. A plan of one round has at most `most` steps."""
    one = one_round(setting, most)
    each = [two_rounds(setting, conductor) for conductor in range(len(setting.pool))]
    two: list[list[Point]] = [[] for _ in CLASSES]
    for points in each:
        for place, of_class in enumerate(points):
            two[place] += of_class
    yield f"{LESSONS} tasks; one round: {len(one[0])} plans; two rounds: {len(two[0])} policies"
    for name, choose in (("the best plans for each class", by_class), ("the same plan for all", same_for_all)):
        yield f"{name}:"
        for budget in BUDGETS:
            yield _line(f"${budget:g}m a task", choose(one, budget / 1000), choose(two, budget / 1000))
    yield "the best plans for each class, $1m a task, by who conducts:"
    single = by_class(one, 0.001)
    for worker, points in zip(setting.pool, each, strict=True):
        sees = doubt_chance(worker, right=0, own=False), doubt_chance(worker, right=1, own=False)
        title = f"{worker.name}: doubts {sees[0]:.0%} of wrong, {sees[1]:.0%} of right answers"
        yield _line(title, single, by_class(points, 0.001))


def _line(name: str, single: Sequence[Point] | None, double: Sequence[Point] | None) -> str:
    if single is None or double is None:
        return f"  {name:<56} too expensive"
    one, two, ahead, again = compare_rounds(single, double)
    figures = f"one {one:.3f}  two {two:.3f}  ahead {ahead.value:+.3f} [{ahead.low:+.3f}, {ahead.high:+.3f}]"
    return f"  {name:<56} {figures}  second round in {again:.0%}"


if __name__ == "__main__":
    for line in report(Setting(standard_pool())):
        sys.stdout.write(f"{line}\n")
