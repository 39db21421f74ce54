"""Intervals that hold at every look, and how many values they need."""

import math
from random import Random

from app.core.rating.intervals import (
    LEAST_VALUES,
    by_cluster,
    half_width,
    mean,
    mean_of_bounded,
    ratio,
    ratio_apart,
    sample_size,
)

LOOKS = (20, 60, 150, 300)


def test_the_intervals_hold_at_all_looks_together() -> None:
    """Each of 80 series is looked at four times, and one look that misses the truth is a failure of its series. With
    a failure rate of 0.05 more than 9 failures would be seen in one of 100 such tests; these draws are fixed."""
    random, missed = Random(19), {"bounded": 0, "mean": 0, "ratio": 0}
    for _ in range(80):
        signs = [float(random.choices((-1, 0, 1), (0.1, 0.75, 0.15))[0]) for _ in range(LOOKS[-1])]
        costs = [random.expovariate(1.0) for _ in signs]
        dearer = [1.2 * cost + random.expovariate(5.0) for cost in costs]
        within = {"bounded": True, "mean": True, "ratio": True}
        for count in LOOKS:
            success, cost = mean_of_bounded(signs[:count], -1, 1), mean(costs[:count])
            rise = ratio(costs[:count], dearer[:count])
            assert rise is not None
            within["bounded"] &= success.low <= 0.05 <= success.high
            within["mean"] &= cost.low <= 1.0 <= cost.high
            within["ratio"] &= rise.low <= 0.4 <= rise.high
        for name, holds in within.items():
            missed[name] += not holds
    assert max(missed.values()) <= 9, missed


def test_pairs_that_agree_do_not_make_an_interval_of_no_width() -> None:
    few, many = mean_of_bounded([0.0] * 5, -1, 1), mean_of_bounded([0.0] * 500, -1, 1)
    assert few.value == many.value == 0.0
    assert (few.low, few.high) == (-1.0, 1.0)
    assert -0.1 < many.low < 0 < many.high < 0.1


def test_nothing_is_claimed_of_few_costs() -> None:
    assert mean([1.0] * (LEAST_VALUES - 1)).high == math.inf
    assert ratio([1.0] * 3, [2.0] * 3).high == math.inf  # type: ignore[union-attr]
    assert ratio([0.0] * 3, [1.0] * 3) is None
    assert ratio_apart([0.0] * 3, [1.0] * 3) is None
    exact = ratio([1.0, 2.0] * 20, [1.1, 2.2] * 20)
    assert exact is not None
    assert math.isclose(exact.low, 0.1)
    assert math.isclose(exact.high, 0.1)


def test_runs_of_two_kinds_are_compared_without_pairs() -> None:
    random = Random(3)
    before = [random.uniform(0.9, 1.1) for _ in range(400)]
    after = [random.uniform(1.35, 1.65) for _ in range(300)]
    interval = ratio_apart(before, after)
    assert interval is not None
    assert 0.4 < interval.low < interval.value < interval.high < 0.6


def test_a_user_counts_once() -> None:
    assert by_cluster([("ann", 1.0), ("bob", 0.0), ("ann", 0.0), ("bob", 0.0)]) == [0.5, 0.0]


def test_the_number_of_values_that_a_margin_needs() -> None:
    enough = sample_size(1.0, 0.1)
    assert enough is not None
    assert half_width(enough) <= 0.1 < half_width(enough - 1)
    assert sample_size(0.0, 0.1) == LEAST_VALUES
    assert sample_size(1.0, 0.0) is None
    assert sample_size(1.0, 1e-9) is None
