"""Paired statistics: intervals cover what they claim, p-values and their correction are what the books say."""

from random import Random

import pytest

from app.lab.paired_statistics import at_cost, holm, interval, p_value, paired_bootstrap, pareto


def test_the_interval_of_a_difference_covers_the_truth_as_often_as_it_says() -> None:
    """Two arms that differ by 0.1 on average, over tasks that are easy or hard for both."""
    random = Random(3)
    covered = 0
    for _ in range(120):
        easy = [random.random() for _ in range(60)]
        first = [float(random.random() < 0.2 + 0.5 * chance) for chance in easy]
        second = [float(random.random() < 0.3 + 0.5 * chance) for chance in easy]
        means = paired_bootstrap({"first": first, "second": second}, random, 250)
        low_and_high = interval([mean["second"] - mean["first"] for mean in means])
        covered += low_and_high.low <= 0.1 <= low_and_high.high
    assert 0.88 <= covered / 120 <= 1.0


def test_tasks_are_drawn_and_not_rows_of_arms() -> None:
    means = paired_bootstrap({"a": [0.0, 1.0, 1.0], "b": [1.0, 2.0, 2.0]}, Random(0), 300)
    assert {round(mean["b"] - mean["a"], 9) for mean in means} == {1.0}
    assert len({mean["a"] for mean in means}) == 4
    assert paired_bootstrap({"a": [0.5]}, Random(0), 3) == [{"a": 0.5}] * 4, "one task is no sample"


@pytest.mark.parametrize(
    ("differences", "exact"),
    [([1.0], 1.0), ([0.0] * 9, 1.0), ([1.0] * 3, 0.25), ([0.1] * 6, 2 / 64), ([3.0, -1.0, 1.0], 0.75)],
)
def test_a_p_value_is_that_of_all_signs(differences: list[float], exact: float) -> None:
    assert p_value(differences, Random(1), 4_000) == pytest.approx(exact, abs=0.02)


def test_like_arms_are_seldom_told_apart_also_over_few_tasks() -> None:
    random = Random(4)
    claims = 0
    for _ in range(300):
        differences = [random.gauss(0.0, 1.0) for _ in range(6)]
        claims += p_value(differences, random, 200) <= 0.05
    assert claims / 300 <= 0.07


def test_holm_is_the_textbooks() -> None:
    """Holm's own procedure: 0.01 * 4, then 0.013 * 3 raised to the one before, 0.03 * 2, 0.04 raised."""
    adjusted = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.013})
    assert adjusted == pytest.approx({"a": 0.04, "d": 0.04, "c": 0.06, "b": 0.06})
    assert holm({"a": 0.7, "b": 0.6}) == {"b": 1.0, "a": 1.0}


def test_the_front_and_what_a_mixture_of_arms_costs() -> None:
    points = {"cheap": (1.0, 0.5), "worse": (1.0, 0.4), "middle": (2.0, 0.6), "dear": (3.0, 0.9), "silly": (4.0, 0.9)}
    assert pareto(points) == {"cheap", "middle", "dear"}
    rest = [points["cheap"], points["worse"], points["dear"]]
    assert at_cost(rest, 2.0) == pytest.approx(0.7), "half of the tasks to the cheap arm, half to the dear one"
    assert at_cost(rest, 1.0) == 0.5
    assert at_cost(rest, 9.0) == 0.9, "money that is not needed is kept"
    assert at_cost(rest, 0.5) is None
