"""The reward: malformed < wrong < right, cheaper is better among right answers, and an outage is no verdict."""

from random import Random

import pytest

from app.lab.outcome import outcome
from app.lab.plans import PlanStep
from app.lab.reward import MALFORMED, WRONG, expected_reward, ramp_weights, reward
from app.lab.world import DEAR, Setting, Weights, standard_pool

WEIGHTS = [Weights(), DEAR]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_any_right_answer_is_worth_more_than_any_wrong_one_and_that_more_than_no_plan(weights: Weights) -> None:
    random = Random(0)
    for _ in range(300):
        usd, seconds = random.expovariate(100), random.expovariate(0.05)
        right = reward("right", usd, seconds, weights)
        wrong = reward("wrong", random.expovariate(100), random.expovariate(0.05), weights)
        malformed = reward("malformed", 0.0, 0.0, weights)
        assert right is not None
        assert wrong is not None
        assert malformed is not None
        assert malformed < wrong < right <= 1


@pytest.mark.parametrize("weights", WEIGHTS)
def test_of_two_right_answers_the_cheaper_and_the_quicker_one_is_worth_strictly_more(weights: Weights) -> None:
    random = Random(1)
    for _ in range(300):
        usd, seconds = random.uniform(0, weights.full_usd), random.uniform(0, weights.full_seconds)
        worth = reward("right", usd, seconds, weights)
        assert worth is not None
        assert worth > (reward("right", usd + 1e-4, seconds, weights) or 0) or usd + 1e-4 > weights.full_usd
        assert worth > (reward("right", usd, seconds + 0.1, weights) or 0) or seconds + 0.1 > weights.full_seconds


@pytest.mark.parametrize("weights", WEIGHTS)
def test_cost_is_nothing_to_a_wrong_answer_and_capped_for_a_right_one(weights: Weights) -> None:
    assert reward("wrong", 5.0, 500.0, weights) == reward("wrong", 0.0, 0.0, weights) == WRONG
    assert reward("right", 5.0, 500.0, weights) == reward("right", 1.0, 50.0, weights)
    assert reward("malformed", 5.0, 500.0, weights) == MALFORMED


def test_an_outage_is_no_verdict() -> None:
    assert reward("outage", 0.001, 1.0, Weights()) is None


def test_cost_is_ramped_in() -> None:
    full = Weights()
    shares = [ramp_weights(full, percent / 20, 0.5).cost / full.cost for percent in range(21)]
    assert shares[0] == 0
    assert shares == sorted(shares)
    assert shares[10:] == [1.0] * 11
    assert ramp_weights(full, 0.0, 0.0) == full


def test_the_expected_reward_is_the_mean_of_sampled_verdicts() -> None:
    setting, random = Setting(standard_pool()), Random(2)
    result = outcome((PlanStep(1, "solve"),), (0, 1), setting)
    verdicts = ["right" if random.random() < result.right else "wrong" for _ in range(20_000)]
    sampled = [reward(verdict, result.usd, result.seconds, setting.weights) or 0.0 for verdict in verdicts]
    assert sum(sampled) / len(sampled) == pytest.approx(expected_reward(result, setting.weights), abs=0.02)
