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
from app.lab.paired_statistics import Interval
from app.lab.plans import STEPS, Plan, PlanStep, contributing_steps, results_of_steps
from app.lab.search import CONTEXTS, Shape, Walk, shapes
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
    walk = _AllPlans(setting)
    for shape in shapes(most):
        walk.through(shape)
    return walk.points


class _AllPlans(Walk):
    """Takes note of all plans instead of the best."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.points: list[list[Point]] = [[] for _ in CLASSES]

    def note(self, shape: Shape, tokens: list[tuple[int, int]], workers: list[int], good: list[list[float]]) -> None:
        """Note one plan."""
        pool = [self.setting.pool[worker] for worker in workers]
        called = list(zip(pool, tokens, strict=True))
        costs = []
        for level in range(LEVELS):
            more = PER_LEVEL * level
            costs.append(sum([world.usd(worker, read + more, written) for worker, (read, written) in called]))
        for place, kind in enumerate(CLASSES):
            right = (sum(good[2 * place]) + sum(good[2 * place + 1])) / len(TRAITS)
            self.points[place].append(Point(costs[kind[1]], right))


def two_rounds(setting: Setting, conductor: int) -> list[list[Point]]:
    """Return for each class the points of all first and second plans of at most two steps, if this worker conducts."""
    walk = _FirstPlans(setting)
    for shape in shapes(2):
        walk.through(shape)
    points: list[list[Point]] = [[] for _ in CLASSES]
    for (plan, good), second in product(walk.plans, _second_plans(len(setting.pool))):
        wrote = writers(plan)
        if second.solver in wrote:  # it would say the same again
            continue
        for place, point in enumerate(_points(setting.pool, plan, good, conductor, second, wrote)):
            points[place].append(point)
    return points


def policy(setting: Setting, plan: Plan, judge: int, second: Second) -> list[Point]:
    """Return for each class the point of one first plan, one conductor and one second plan."""
    good = [right_given_trait(plan, kind, trait, setting.pool) for kind, trait in CONTEXTS]
    return list(_points(setting.pool, plan, good, judge, second, writers(plan)))


class _FirstPlans(Walk):
    """Takes note of plans with their chances in every context."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.plans: list[tuple[Plan, list[float]]] = []

    def note(self, shape: Shape, tokens: list[tuple[int, int]], workers: list[int], good: list[list[float]]) -> None:
        """Note one plan."""
        plan = tuple(PlanStep(worker, *step) for worker, step in zip(workers, _with_user(shape), strict=True))
        self.plans.append((plan, [sum(chances) for chances in good]))


def _with_user(shape: Shape) -> Iterable[tuple[str, bool, tuple[int, ...]]]:
    return ((role, True, sees) for role, sees in shape)


def _second_plans(workers: int) -> list[Second]:
    alone = [Second(None, "", checker) for checker in range(workers)]
    anew = [Second(solver, role, None) for solver in range(workers) for role in ("solve", "reason")]
    both = [Second(a, role, b) for a, b in permutations(range(workers), 2) for role in ("solve", "reason")]
    return [*alone, *anew, *both]


def writers(plan: Plan) -> frozenset[int]:
    """Return the workers that had a hand in a plan's answer."""
    yields = results_of_steps(plan)
    had = contributing_steps([step.sees for step in plan], yields, len(plan) - 1)
    return frozenset(plan[n].worker for n in {*had, len(plan) - 1} if yields[n] == "answer")


def _points(
    pool: Sequence[Profile], plan: Plan, good: Sequence[float], judge: int, second: Second, wrote: frozenset[int]
) -> Iterable[Point]:
    """Yield the points of one policy, one for each class."""
    doubts = [doubt_chance(pool[judge], right=right, own=judge in wrote) for right in (0, 1)]
    for kind in CLASSES:
        right = again = 0.0
        for trait in TRAITS:
            p = good[CONTEXTS.index((kind, trait))]
            mended = [_right_after_second_plan(pool, second, kind, trait, before, wrote) for before in (0, 1)]
            right += p * (1 - doubts[1]) + p * doubts[1] * mended[1] + (1 - p) * doubts[0] * mended[0]
            again += p * doubts[1] + (1 - p) * doubts[0]
        again /= len(TRAITS)
        accepting, planning = (judging_usd(pool[judge], kind[1], tokens) for tokens in (ACCEPTS, PLANS))
        judging = accepting * (1 - again) + planning * again
        usd = bill(plan, kind[1], tuple(pool))[0] + judging + again * _second_usd(pool, second, kind[1])
        yield Point(usd, right / len(TRAITS), again)


def doubt_chance(judge: Profile, *, right: int, own: bool) -> float:
    """Return the probability that a conductor opens a second round: as likely as a checker finds fault."""
    if right:
        return 1 - world.logistic(2.2 + 0.7 * judge.checks)
    return world.logistic(judge.checks - 0.5 + (world.SELF if own else 0.0))


def judging_usd(judge: Profile, level: int, written: int) -> float:
    """Return the cost of showing a conductor the answer, in dollars."""
    return world.usd(judge, PROMPT + QUESTION + PER_LEVEL * level + OUTPUT["reason"], written)


def _right_after_second_plan(
    pool: Sequence[Profile], second: Second, kind: tuple[int, int], trait: float, before: int, wrote: frozenset[int]
) -> float:
    """Return the probability that the second plan's answer is right, if the one before was (1) or was not (0)."""
    if second.solver is not None:
        p = world.solve_chance(pool[second.solver], kind, trait, second.role, None, 0)
        if second.checker is None:
            return p
        kept, found = (world.check_chance(pool[second.checker], kind, trait, bit, False, 0) for bit in (1, 0))
        return p * kept + (1 - p) * found
    assert second.checker is not None
    return world.check_chance(pool[second.checker], kind, trait, before, second.checker in wrote, 0)


def _second_usd(pool: Sequence[Profile], second: Second, level: int) -> float:
    before, usd = OUTPUT["reason"], 0.0
    for worker, role in ((second.solver, second.role), (second.checker, "check")):
        if worker is not None:
            read = QUESTION + PER_LEVEL * level + (before if role == "check" else 0)
            usd, before = usd + world.usd(pool[worker], read, OUTPUT[role]), OUTPUT[role]
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
    hulls = [frontier(of_class) for of_class in points]
    chosen = [hull[0] for hull in hulls]
    left = usd * len(hulls) - sum(point.usd for point in chosen)
    if left < 0:
        return None
    steps = [(_slope(*pair), place, pair) for place, hull in enumerate(hulls) for pair in pairwise(hull)]
    for _, place, (low, high) in sorted(steps, key=lambda step: -step[0]):
        part = min(1.0, left / (high.usd - low.usd))
        chosen[place] = _mix(low, high, part)
        left -= part * (high.usd - low.usd)
        if part < 1.0:
            break
    return chosen


def same_for_all(points: Sequence[Sequence[Point]], usd: float) -> list[Point] | None:
    """Return the result for each class if all have the same plan, or the same two mixed."""
    means = []
    for n, of_plan in enumerate(zip(*points, strict=True)):
        usd_each = sum([point.usd for point in of_plan]) / len(points)
        right = sum([point.right for point in of_plan]) / len(points)
        means.append(Point(usd_each, right, float(n)))
    hull = frontier(means)
    place = bisect_right([point.usd for point in hull], usd) - 1
    if place < 0:
        return None
    low, high = hull[place], hull[min(place + 1, len(hull) - 1)]
    part = (usd - low.usd) / (high.usd - low.usd) if high is not low else 0.0
    return [_mix(of_class[int(low.again)], of_class[int(high.again)], part) for of_class in points]


def _mix(low: Point, high: Point, part: float) -> Point:
    return Point(*(a + part * (b - a) for a, b in zip(low, high, strict=True)))


class Row(NamedTuple):
    """The accuracy of both arms over the same tasks, the advantage of two rounds, and how often the second one is
    opened."""

    one: float
    two: float
    ahead: Interval
    again: float


def compare_rounds(single: Sequence[Point], double: Sequence[Point], seed: int = 0) -> Row:
    """Compare one round with two, given for each class; the interval is a paired bootstrap over tasks."""
    random = Random(seed)
    tasks = random.choices(list(zip(single, double, strict=True)), k=LESSONS)
    ahead = [two.right - one.right for one, two in tasks]
    means = sorted(sum(random.choices(ahead, k=LESSONS)) / LESSONS for _ in range(RESAMPLES))
    ends = means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES)]
    one = sum(first.right for first, _ in tasks) / LESSONS
    two = sum(second.right for _, second in tasks) / LESSONS
    return Row(one, two, Interval(two - one, *ends), sum(pair[1].again for pair in tasks) / LESSONS)


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
        return f"  {name:<56} too dear"
    one, two, ahead, again = compare_rounds(single, double)
    figures = f"one {one:.3f}  two {two:.3f}  ahead {ahead.value:+.3f} [{ahead.low:+.3f}, {ahead.high:+.3f}]"
    return f"  {name:<56} {figures}  second round in {again:.0%}"


if __name__ == "__main__":
    for line in report(Setting(standard_pool())):
        sys.stdout.write(f"{line}\n")
