"""From rows to a table: how good each arm is, what it costs, and whether the difference could be chance.

The repeats of a task are averaged first. Every arm is held against one reference arm, task by task; the p-values are
Holm's, over all arms. `bought` compares at equal cost: by how much an arm is better than what the other arms come to
for the same money, dealing tasks out among two of them by lot. The oracle takes the best arm of each task after all
have answered: a ceiling, and with few repeats a flattering one, since it picks luck as well.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter, sub
from random import Random
from statistics import fmean

from msgspec import Struct

from app.core.plan.arms import ORACLE
from app.lab.measurements import Measure
from app.lab.paired_statistics import Interval, at_cost, holm, interval, p_value, paired_bootstrap, pareto
from app.lab.world import Weights

LAMBDAS = (0.15, 0.30)
"""Shares of a right answer that a full cost takes away; at 0 the reward is the accuracy."""


class ArmResult(Struct, frozen=True):
    """One arm; figures are means over tasks of the means over repeats, counts are of rows."""

    arm: str
    rows: int
    accuracy: Interval
    ahead: Interval | None
    """The advantage over the reference's accuracy; None for the reference itself."""
    p: float | None
    """Holm's; None for the reference and the oracle."""
    usd: float
    bought: Interval | None
    """Accuracy beyond what the other arms buy for the same money; None where they all cost more, and for the oracle."""
    front: bool
    """True if no other arm is as good for less, or better for as much."""
    rewards: tuple[float, ...]
    """At each of `LAMBDAS`."""
    conductor_tokens: float
    worker_tokens: float
    wall: float
    path: float
    calls: float
    steps: float
    plans: int
    """Different ones."""
    outages: int
    failures: int
    degraded: int
    invalid: int


class Table(Struct, frozen=True):
    """All arms, best first. `missing` tasks lack an arm's row and are left out; `full_usd` is what a full cost is."""

    reference: str
    tasks: int
    missing: int
    full_usd: float
    resamples: int
    standings: tuple[ArmResult, ...]


class _Comparison(Struct, frozen=True):
    """One arm beside the others: the fields of its standing that come from the bootstrap."""

    arm: str
    accuracy: Interval
    ahead: Interval | None
    p: float | None
    bought: Interval | None
    front: bool


Rows = Mapping[str, Mapping[str, Sequence[Measure]]]
"""By arm, then by task."""


def table(measures: Sequence[Measure], arms: Sequence[str], reference: str, seed: int, resamples: int) -> Table:
    """Return the table of these arms over the tasks that all of them have rows for. Raises ValueError if there is
    none."""
    rows: dict[str, dict[str, list[Measure]]] = {arm: {} for arm in arms}
    for measure in measures:
        if measure.arm in rows:
            rows[measure.arm].setdefault(measure.task, []).append(measure)
    every = list(dict.fromkeys([measure.task for measure in measures]))
    shared = set(every).intersection(*rows.values())
    tasks = [task for task in every if task in shared]
    if not tasks:
        raise ValueError("no task has a row of every arm")
    series: dict[str, list[float]] = {}
    for arm in arms:
        series[f"right {arm}"] = _series(rows[arm], tasks, attrgetter("right"))
        series[f"usd {arm}"] = _series(rows[arm], tasks, attrgetter("usd"))
    full_usd = max([fmean(series[f"usd {arm}"]) for arm in arms])
    if not full_usd:
        full_usd = 1.0
    series |= _oracle(series, arms, len(tasks))
    random = Random(seed)
    means = paired_bootstrap(series, random, resamples)
    p_values: dict[str, float] = {}
    for arm in arms:
        if arm != reference:
            differences = list(map(sub, series[f"right {arm}"], series[f"right {reference}"]))
            p_values[arm] = p_value(differences, random, resamples)
    standings = _standings(rows, tasks, means, reference, full_usd, holm(p_values))
    standings.sort(key=lambda standing: (-standing.accuracy.value, standing.usd))
    return Table(reference, len(tasks), len(every) - len(tasks), full_usd, resamples, tuple(standings))


def _series(rows: Mapping[str, Sequence[Measure]], tasks: Sequence[str], of: Callable[[Measure], float]) -> list[float]:
    return [fmean(map(of, rows[task])) for task in tasks]


def _oracle(series: Mapping[str, Sequence[float]], arms: Sequence[str], tasks: int) -> dict[str, list[float]]:
    """Return the series of the oracle: each task's best arm, and the cheapest of several that are equally good."""
    right: list[float] = []
    usd: list[float] = []
    for n in range(tasks):
        loss, cost = min([(-series[f"right {arm}"][n], series[f"usd {arm}"][n]) for arm in arms])
        right.append(-loss)
        usd.append(cost)
    return {f"right {ORACLE}": right, f"usd {ORACLE}": usd}


def _standings(
    rows: Rows,
    tasks: Sequence[str],
    means: Sequence[Mapping[str, float]],
    reference: str,
    full_usd: float,
    p_values: Mapping[str, float],
) -> list[ArmResult]:
    """Return the standings of all arms and of the oracle; `means` are those of `paired_bootstrap`, the p-values are
    corrected."""
    arms = list(rows)
    points = {arm: (means[0][f"usd {arm}"], means[0][f"right {arm}"]) for arm in arms}
    front = pareto(points)
    standings = []
    for arm in arms:
        ahead = None
        if arm != reference:
            ahead = _ahead(means, arm, reference, len(tasks))
        compared = _Comparison(
            arm=arm,
            accuracy=_accuracy(means, arm, len(tasks)),
            ahead=ahead,
            p=p_values.get(arm),
            bought=_gain_at_equal_cost(arm, arms, means, len(tasks)),
            front=arm in front,
        )
        standings.append(_standing(compared, rows[arm], tasks, full_usd))
    count = sum([standing.rows for standing in standings])
    standings.append(_oracle_standing(means, _ahead(means, ORACLE, reference, len(tasks)), count, len(tasks)))
    return standings


def _interval(resampled: Sequence[float], tasks: int, low: float, high: float) -> Interval:
    """Return the interval of resampled values, which are between `low` and `high`. Over one task it is all of that
    range, because one task says nothing of another."""
    if tasks < 2:
        return Interval(resampled[0], low, high)
    return interval(resampled)


def _accuracy(means: Sequence[Mapping[str, float]], arm: str, tasks: int) -> Interval:
    return _interval([mean[f"right {arm}"] for mean in means], tasks, 0.0, 1.0)


def _ahead(means: Sequence[Mapping[str, float]], arm: str, reference: str, tasks: int) -> Interval:
    """Return the accuracy of an arm less the reference's."""
    differences = [mean[f"right {arm}"] - mean[f"right {reference}"] for mean in means]
    return _interval(differences, tasks, -1.0, 1.0)


def _standing(
    compared: _Comparison, rows: Mapping[str, Sequence[Measure]], tasks: Sequence[str], full_usd: float
) -> ArmResult:
    """Return the standing of an arm; `full_usd` is a full cost in dollars."""
    rewards = []
    for share in LAMBDAS:
        weights = Weights(cost=share, wait=0.0, full_usd=full_usd)
        rewards.append(fmean(_series(rows, tasks, partial(_reward, weights=weights))))

    def mean(name: str) -> float:
        return fmean(_series(rows, tasks, attrgetter(name)))

    flat = list(chain.from_iterable([rows[task] for task in tasks]))
    outcomes = Counter([row.outcome for row in flat])
    plans = {row.plan for row in flat}
    return ArmResult(
        arm=compared.arm,
        rows=len(flat),
        accuracy=compared.accuracy,
        ahead=compared.ahead,
        p=compared.p,
        usd=mean("usd"),
        bought=compared.bought,
        front=compared.front,
        rewards=tuple(rewards),
        conductor_tokens=mean("conductor_tokens"),
        worker_tokens=mean("worker_tokens"),
        wall=mean("wall"),
        path=mean("path"),
        calls=mean("calls"),
        steps=mean("steps"),
        plans=len(plans - {""}),
        outages=outcomes["outage"],
        failures=outcomes["failed"],
        degraded=sum([row.degraded for row in flat]),
        invalid=sum([row.invalid for row in flat]),
    )


def _reward(row: Measure, weights: Weights) -> float:
    return row.right * weights.worth(row.usd, 0.0)


def _gain_at_equal_cost(
    arm: str, arms: Sequence[str], means: Sequence[Mapping[str, float]], tasks: int
) -> Interval | None:
    """Return the accuracy that an arm has beyond what the other arms buy for its cost, in every resample where they buy
    anything; None if they buy nothing for its cost over all tasks."""
    others = [other for other in arms if other != arm]
    gains: list[float] = []
    for mean in means:
        points = [(mean[f"usd {other}"], mean[f"right {other}"]) for other in others]
        accuracy_of_others = at_cost(points, mean[f"usd {arm}"])
        if accuracy_of_others is not None:
            gains.append(mean[f"right {arm}"] - accuracy_of_others)
        elif not gains:
            return None
    if len(gains) > 1:
        return _interval(gains, tasks, -1.0, 1.0)
    return None


def _oracle_standing(means: Sequence[Mapping[str, float]], ahead: Interval, rows: int, tasks: int) -> ArmResult:
    """Return the standing of the oracle. It has no rows of its own, so it has only an accuracy and a cost."""
    return ArmResult(
        arm=ORACLE,
        rows=rows,
        accuracy=_accuracy(means, ORACLE, tasks),
        ahead=ahead,
        p=None,
        usd=means[0][f"usd {ORACLE}"],
        bought=None,
        front=False,
        rewards=(),
        conductor_tokens=0.0,
        worker_tokens=0.0,
        wall=0.0,
        path=0.0,
        calls=0.0,
        steps=0.0,
        plans=0,
        outages=0,
        failures=0,
        degraded=0,
        invalid=0,
    )
