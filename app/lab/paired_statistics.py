"""Paired statistics over tasks: every arm has answered the same ones, so tasks are drawn again and arms are not.

The repeats of a task are averaged before they come here, so that a task counts once however often it was asked. An
interval is the percentile interval of the bootstrap, which is too narrow for fewer than `FEW_TASKS`; a p-value is that
of the sign-flip test, which holds for any number of tasks, and `holm` makes a family of them honest.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from operator import itemgetter
from random import Random

from app.core.rating.intervals import Interval as Interval

RESAMPLES = 10_000
FEW_TASKS = 20
"""With fewer tasks the percentile interval is too narrow: over ten it holds for 91 % in place of 95 %."""
LOWEST_BITS = bytes(number & 1 for number in range(256))
"""Translates bytes to their lowest bits."""


def paired_bootstrap(
    values: Mapping[str, Sequence[float]], random: Random, times: int = RESAMPLES
) -> list[dict[str, float]]:
    """Return the series' means over tasks drawn again with replacement, the same for every series. The first entry is
    over all tasks as they are."""
    count = len(next(iter(values.values())))
    means = [{name: sum(of) / count for name, of in values.items()}]
    if count < 2:
        return means * (times + 1)
    for _ in range(times):
        pick = itemgetter(*random.choices(range(count), k=count))
        means.append({name: sum(pick(of)) / count for name, of in values.items()})
    return means


def interval(values: Sequence[float]) -> Interval:
    """Return the percentile interval of resampled values. The first value is that of all tasks, the others are
    resampled."""
    ordered = sorted(values[1:])
    return Interval(values[0], ordered[int(0.025 * len(ordered))], ordered[int(0.975 * len(ordered)) - 1])


def p_value(differences: Sequence[float], random: Random, times: int = RESAMPLES) -> float:
    """Return the two-sided p-value of two arms' differences, one for each task: how often their sum is as far from zero
    if the sign of each is drawn by lot, as it is between arms that are alike (Fisher's randomization test)."""
    observed = sum(differences)
    as_far = 1  # with the signs as they are
    for _ in range(times):
        is_positive = random.randbytes(len(differences)).translate(LOWEST_BITS)
        drawn = 2 * sum(compress(differences, is_positive)) - observed
        as_far += abs(drawn) >= abs(observed) - 1e-9
    return as_far / (times + 1)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return p-values corrected for their number (Holm, 1979): the chance of even one false claim stays below the
    level."""
    corrected: dict[str, float] = {}
    least = 0.0
    for place, (name, p) in enumerate(sorted(p_values.items(), key=itemgetter(1))):
        least = max(least, min(1.0, (len(p_values) - place) * p))
        corrected[name] = least
    return corrected


Point = tuple[float, float]
"""The cost of an arm, and its quality."""


def pareto(points: Mapping[str, Point]) -> set[str]:
    """Return the arms that no other one beats in one respect without being worse in the other."""
    return {name for name, point in points.items() if not _is_dominated(point, points.values())}


def _is_dominated(point: Point, others: Iterable[Point]) -> bool:
    """Return whether another point is cheaper or better, and in the other respect no worse."""
    cost, good = point
    return any(c <= cost and g >= good and (c, g) != point for c, g in others)


def at_cost(points: Sequence[Point], cost: float) -> float | None:
    """Return the best that these arms come to for `cost` on average, if tasks may be dealt out among two of them by
    lot; None if even the cheapest costs more. Money that is not needed is not spent."""
    affordable = [point for point in points if point[0] <= cost]
    if not affordable:
        return None
    best = max(good for _, good in affordable)
    for c, g in affordable:
        for dear, good in points:
            if dear > cost:
                best = max(best, g + (good - g) * (cost - c) / (dear - c))
    return best
