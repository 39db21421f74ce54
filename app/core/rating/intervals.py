"""Intervals that may be looked at again and again: they hold at all times at once, so that a decision may be made as
soon as one allows it (confidence sequences). Each holds the truth with probability 0.95 or more.

bounded ..... the mean of values within a known range: the empirical Bernstein sequence with predictable weights of
              Waudby-Smith and Ramdas (2024, theorem 2), which holds for any number of values
mean ........ the mean of values without bounds, such as costs: the asymptotic sequence of Waudby-Smith, Arbour, Sinha,
              Kennedy and Ramdas (2021), which holds approximately, so that it is infinite below `LEAST_VALUES` values
ratio ....... the relative difference of two means of the same pairs, by Fieller's theorem on that sequence
apart ....... the difference, or relative difference, of two means of different runs: both hold with 0.975

Values of one user belong together, so `by_cluster` makes one of them before: a user counts once, and users are taken to
be independent of each other.
"""

import math
from collections.abc import Hashable, Iterable, Sequence
from statistics import fmean, pvariance, variance

from msgspec import Struct

LEVEL = 0.05
"""The probability of an interval that does not hold."""
LEAST_VALUES = 20
"""Values below which the asymptotic intervals are infinite."""
NORMAL_QUANTILE = 1.96
"""Standard deviations from the mean to either end of a 95 % interval of a normal distribution."""
TUNED_FOR = 300
"""The number of values at which the asymptotic sequence is narrowest."""
LARGEST_WEIGHT = 0.5
"""The largest weight of a value in the empirical Bernstein sequence."""
MOST_NEEDED = 10_000_000
"""The most values that `sample_size` reports: nobody waits for more."""


class Interval(Struct, frozen=True):
    """A value with the ends of its interval, which are infinite where nothing is known."""

    value: float
    low: float = -math.inf
    high: float = math.inf

    def minus(self, other: "Interval") -> "Interval":
        """Return the difference of two values; if each interval holds with 0.975, this one does with 0.95."""
        return Interval(self.value - other.value, self.low - other.high, self.high - other.low)


def by_cluster(values: Iterable[tuple[Hashable, float]]) -> list[float]:
    """Return the mean of each cluster, in the order in which the clusters first appear."""
    found: dict[Hashable, list[float]] = {}
    for cluster, value in values:
        found.setdefault(cluster, []).append(value)
    return [fmean(of) for of in found.values()]


def mean_of_bounded(values: Sequence[float], low: float, high: float, level: float = LEVEL) -> Interval:
    """Return the mean of at least one value, all of which are between `low` and `high`."""
    scale, log_level = high - low, math.log(2 / level)
    total, squares = 0.5, 0.25  # one made-up value in the middle, with the largest variance
    weights = weighted = spent = 0.0
    lower, upper = 0.0, 1.0
    for count, value in enumerate([(value - low) / scale for value in values], start=1):
        before = total / count
        weight = min(math.sqrt(2 * log_level / (squares * math.log(count + 1))), LARGEST_WEIGHT)
        weights += weight
        weighted += weight * value
        spent += (value - before) ** 2 * (-math.log1p(-weight) - weight)
        centre, half = weighted / weights, (log_level + spent) / weights
        lower, upper = max(lower, centre - half), min(upper, centre + half)
        total += value
        squares += (value - total / (count + 1)) ** 2
    return Interval(fmean(values), low + scale * lower, low + scale * upper)


def half_width(count: int, level: float = LEVEL) -> float:
    """Return half of the width of the asymptotic sequence after so many values, in standard deviations."""
    if count < LEAST_VALUES:
        return math.inf
    tuning = (-2 * math.log(level) + math.log(-2 * math.log(level) + 1)) / TUNED_FOR
    scaled = count * tuning + 1
    return math.sqrt(2 * scaled / (count * count * tuning) * math.log(math.sqrt(scaled) / level))


def mean(values: Sequence[float], level: float = LEVEL) -> Interval:
    """Return the mean of at least one value without bounds."""
    value, width = fmean(values), half_width(len(values), level)
    if math.isinf(width):
        return Interval(value)
    half = width * math.sqrt(variance(values))
    return Interval(value, value - half, value + half)


def ratio(before: Sequence[float], after: Sequence[float]) -> Interval | None:
    """Return by which share the mean of `after` exceeds that of `before`, which has the same pairs in the same order.

    None where the mean before is 0 and nothing follows from that (`_rise_from_nothing`). An end is infinite where the
    mean before may be 0.
    """
    base, other = fmean(before), fmean(after)
    if base <= 0:
        return _rise_from_nothing(mean(before), mean(after))
    value, width = other / base - 1, half_width(len(before))
    if math.isinf(width):
        return Interval(value)
    factor = width * width * len(before) / (len(before) - 1)
    both = fmean([(x - base) * (y - other) for x, y in zip(before, after, strict=True)])
    square = base * base - factor * pvariance(before, base)
    if square <= 0:
        return Interval(value)
    middle = base * other - factor * both
    constant = other * other - factor * pvariance(after, other)
    root = math.sqrt(max(middle * middle - square * constant, 0.0))
    return Interval(value, (middle - root) / square - 1, (middle + root) / square - 1)


def ratio_apart(before: Sequence[float], after: Sequence[float]) -> Interval | None:
    """Return by which share the mean of `after` exceeds that of `before`; the two are of different runs."""
    base, other = mean(before, LEVEL / 2), mean(after, LEVEL / 2)
    if base.value <= 0:
        return _rise_from_nothing(base, other)
    value = other.value / base.value - 1
    if base.low <= 0 or math.isinf(other.low):
        return Interval(value)
    return Interval(value, max(other.low, 0.0) / base.high - 1, other.high / base.low - 1)


def _rise_from_nothing(base: Interval, other: Interval) -> Interval | None:
    """Return the rise from a mean that is 0 throughout, as the cost of workers that are free: none to another such
    mean, and an infinite one to a mean that is above 0 beyond chance. None where neither is known."""
    if base.low != 0 or base.high != 0:
        return None
    if other.low == other.high == 0:
        return Interval(0.0, 0.0, 0.0)
    if other.low > 0:
        return Interval(math.inf, math.inf, math.inf)
    return None


def sample_size(spread: float, margin: float, width: float = 0.0) -> int | None:
    """Return about how many values make an interval shorter than `margin` on either side, given the standard deviation
    of one; None if it is more than `MOST_NEEDED`.

    `width` is that of the range of bounded values. Their interval is not shorter than so many of them allow even where
    all are equal, because each has the weight `LARGEST_WEIGHT` at most.
    """
    if margin <= 0:
        return None
    least = math.ceil(width * math.log(2 / LEVEL) / (LARGEST_WEIGHT * margin))
    if least > MOST_NEEDED:
        return None
    low, high = LEAST_VALUES, LEAST_VALUES
    while half_width(high) * spread > margin:
        low, high = high, high * 2
        if high > MOST_NEEDED:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if half_width(middle) * spread > margin else (low, middle)
    return max(high, least)
