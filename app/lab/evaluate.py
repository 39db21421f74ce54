"""Held-out comparison of arms on the same lessons: exact expectations, paired intervals, the share of the gap closed.

Every figure of an arm is the mean over lessons of the exact expectation over the workers' dice, so an interval is about
the choice of tasks or pools alone. It is the percentile interval of a paired bootstrap: over lessons where all have one
pool, else over pools with all of their lessons, because lessons of one pool share its workers.
"""

from collections.abc import Mapping, Sequence
from itertools import cycle
from operator import attrgetter
from random import Random
from typing import Any

import msgspec
from msgspec import Struct

from app.lab.baselines import FIXED, OPTIMUM, arm_names, plans_of_arm
from app.lab.lessons import Lesson, Split, draw_lesson
from app.lab.outcome import Outcome, outcome
from app.lab.paired_statistics import Interval, interval, paired_bootstrap
from app.lab.plan_grammar import ROLES, WORDS, Form
from app.lab.plans import Plan
from app.lab.search import mean_reward
from app.lab.world import Pool, Setting, Weights, draw_pool

TRAINED, WITHOUT_TEXT = "trained conductor", "its plans in fixed words"
RESAMPLES = 2_000
POOLS = 16
"""Different pools among the lessons over random ones, at least `PER_POOL` for each; all are searched whole."""
PER_POOL = 25


class Row(Struct, frozen=True):
    """One arm: means over lessons; `ahead` is the difference by which the trained conductor's reward is higher."""

    arm: str
    reward: float
    accuracy: float
    usd: float
    seconds: float
    steps: float
    ahead: Interval


class Table(Struct, frozen=True):
    """One split. `closed` is the share of the way from the best fixed plan to the optimum."""

    split: Split
    lessons: int
    rows: tuple[Row, ...]
    closed: Interval
    distinct: int
    """Different plans that the trained conductor gives, over places of the pool."""
    constant: float
    """The most that one of its plans is worth for every lesson of its pool, less the best fixed plan: never above 0."""

    def row(self, arm: str) -> Row:
        """Return the row of this arm."""
        return next(row for row in self.rows if row.arm == arm)

    def as_json(self) -> dict[str, Any]:
        """Return the table as JSON, for the run card."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields


def draw_exam(split: Split, count: int, seed: int) -> list[Lesson]:
    """Return the lessons of a split's evaluation."""
    random = Random(f"{split}|{seed}")
    lessons = [draw_lesson(random, split) for _ in range(count)]
    if split != "random pools":
        return lessons
    pools = [draw_pool(random, unseen=True) for _ in range(min(POOLS, max(1, count // PER_POOL)))]
    over_unseen_pools = []
    for lesson, pool in zip(lessons, cycle(pools), strict=False):
        order = random.sample(range(len(pool)), len(pool))
        over_unseen_pools.append(Lesson(lesson.problem, pool, tuple(order)))
    return over_unseen_pools


def compare(
    split: Split, lessons: Sequence[Lesson], trained: Sequence[Plan], weights: Weights, seed: int, form: Form = ROLES
) -> Table:
    """Return the whole table of one split; `trained` holds the conductor's plan for each lesson."""
    chosen = {arm: plans_of_arm(arm, lessons, weights, seed, form) for arm in arm_names(form)}
    if form is WORDS:
        chosen[WITHOUT_TEXT] = list(map(_without_text, trained))
    chosen[TRAINED] = list(trained)
    outcomes_of_arm: dict[str, list[Outcome]] = {}
    rewards: dict[str, list[float]] = {}
    for arm, plans in chosen.items():
        outcomes_of_arm[arm] = exact_outcomes(lessons, plans, weights)
        rewards[arm] = [result.reward for result in outcomes_of_arm[arm]]
    means = bootstrap_lessons(lessons, rewards, seed)
    rows = []
    for arm, outcomes in outcomes_of_arm.items():
        behind = interval([mean[TRAINED] - mean[arm] for mean in means])
        rows.append(_row(arm, outcomes, chosen[arm], behind))
    share = interval(list(map(gap_closed, means)))
    constant = _constant(lessons, trained, weights, seed)
    return Table(split, len(lessons), tuple(rows), share, len(set(trained)), constant)


def bootstrap_lessons(
    lessons: Sequence[Lesson], values: Mapping[str, Sequence[float]], seed: int
) -> list[dict[str, float]]:
    """Return the series' means over lessons that are drawn again, or over pools where there are several, as
    `paired_bootstrap` does; `values` has one for each lesson."""
    pools = [lesson.pool for lesson in lessons]
    count = len(set(pools))
    if count == 1:
        return paired_bootstrap(values, Random(seed), RESAMPLES)
    by_pool: dict[str, list[float]] = {}
    for name, series in values.items():
        totals = dict.fromkeys(pools, 0.0)
        for pool, value in zip(pools, series, strict=True):
            totals[pool] += value * count / len(lessons)
        by_pool[name] = list(totals.values())
    return paired_bootstrap(by_pool, Random(seed), RESAMPLES)


def _without_text(plan: Plan) -> Plan:
    """Return the plan with empty subtasks."""
    return tuple([step._replace(text="") for step in plan])


def gap_closed(mean: Mapping[str, float]) -> float:
    """Return the share of the gap that the trained conductor closes; 0 where there is no gap."""
    gap = mean[OPTIMUM] - mean[FIXED]
    if not gap:
        return 0.0
    return (mean[TRAINED] - mean[FIXED]) / gap


def exact_outcomes(lessons: Sequence[Lesson], plans: Sequence[Plan], weights: Weights) -> list[Outcome]:
    """Return the exact outcome of the plan for each lesson."""
    outcomes = []
    for lesson, plan in zip(lessons, plans, strict=True):
        outcomes.append(outcome(plan, lesson.problem.kind, Setting(lesson.pool, weights)))
    return outcomes


def mean_of(outcomes: Sequence[Outcome], name: str) -> float:
    """Return the mean of a figure of `Outcome` by its name: `reward`, `right`, `usd` or `seconds`."""
    total: float = sum(map(attrgetter(name), outcomes))
    return total / len(outcomes)


def _row(arm: str, outcomes: Sequence[Outcome], plans: Sequence[Plan], ahead: Interval) -> Row:
    return Row(
        arm=arm,
        reward=mean_of(outcomes, "reward"),
        accuracy=mean_of(outcomes, "right"),
        usd=mean_of(outcomes, "usd"),
        seconds=mean_of(outcomes, "seconds"),
        steps=sum(map(len, plans)) / len(plans),
        ahead=ahead,
    )


def _constant(lessons: Sequence[Lesson], trained: Sequence[Plan], weights: Weights, seed: int) -> float:
    """Return the most that one of the conductor's plans, given to all classes of its pool, gains over the pool's best
    fixed plan; it is never above 0."""
    pools = [lesson.pool for lesson in lessons]
    reward_of_fixed: dict[Pool, float] = {}
    for pool, plan in set(zip(pools, plans_of_arm(FIXED, lessons, weights, seed), strict=True)):
        reward_of_fixed[pool] = mean_reward(plan, Setting(pool, weights))
    gains = []
    for pool, plan in set(zip(pools, trained, strict=True)):
        gains.append(mean_reward(plan, Setting(pool, weights)) - reward_of_fixed[pool])
    return max(gains)


def format_table(table: Table) -> str:
    """Return the table as text, for a terminal or a document."""
    head = f"{table.split}: {table.lessons} lessons, {table.distinct} different plans"
    lines = [head, f"{'':31}reward  accuracy  cost m$  seconds  steps  trained is ahead by [95 %]"]
    for row in table.rows:
        ahead = ""
        if row.arm != TRAINED:
            ahead = f"{row.ahead.value:+.3f} [{row.ahead.low:+.3f}, {row.ahead.high:+.3f}]"
        figures = f"{row.reward:.3f}    {row.accuracy:.3f}  {1000 * row.usd:7.3f}  {row.seconds:7.2f}  {row.steps:5.2f}"
        lines.append(f"{row.arm:31}{figures:>42}  {ahead}".rstrip())
    share = table.closed
    gap = table.row(OPTIMUM).reward - table.row(FIXED).reward
    lines.append(f"of the gap of {gap:.3f} it closes {share.value:.1%} [{share.low:.1%}, {share.high:.1%}]")
    return "\n".join(lines)
