"""The replay's figures on outcomes that can be worked out by hand, and what its learners get to know."""

from collections.abc import Mapping
from random import Random

import pytest

from app.core.rating.features import features
from app.lab.recorded_outcomes import Dataset, Outcome, RecordedPrompt, RecordsRefused
from app.lab.replay import Bandit, Part, Plan, Routes, curve, estimate_from_log, judge_estimator, regret, split
from app.lab.routing_baselines import BASELINES, Example

TWO = Routes(("weak", "strong"), {"weak": 0.2, "strong": 1.0}, 0.5)
TEXTS = ("one", "two", "three", "four")
TRUE = ({"weak": 0, "strong": 1}, {"weak": 1, "strong": 1}, {"weak": 1, "strong": 0}, {"weak": 0, "strong": 1})
"""The strong model gains on the first and the last prompt, and loses on the third."""


def make_held_out_part() -> Part:
    rows = []
    for text, scores in zip(TEXTS, TRUE, strict=True):
        rows.append(RecordedPrompt(text, text, {model: Outcome(score) for model, score in scores.items()}))
    return Part(rows, [features(text) for text in TEXTS], TRUE)


def test_the_curve_upgrades_prompts_in_the_order_of_the_estimated_gain() -> None:
    gains = (0.9, 0.1, 0.3, 0.2)
    points = curve(TWO, TRUE, [{"weak": 0.0, "strong": gain} for gain in gains])
    assert [cost for cost, _ in points] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert [score for _, score in points] == pytest.approx([0.5, 0.75, 0.5, 0.75, 0.75])


def test_figures_are_those_of_pen_and_paper() -> None:
    order = dict(zip(map(features, TEXTS), (0.9, 0.1, 0.3, 0.2), strict=True))
    judgement = judge_estimator(TWO, make_held_out_part(), lambda sight: {"weak": 0.0, "strong": order[sight]})
    auc = (0.625 + 0.625 + 0.625 + 0.75) / 4
    assert judgement.auc == pytest.approx(auc)
    assert judgement.apgr == pytest.approx((auc - 0.5) / 0.25)
    assert judgement.cost_95 == pytest.approx(0.2 + 0.2 * (0.95 * 0.75 - 0.5) / 0.25)
    # The strong model's right answer is worth 0.5, the weak one's 0.9; always the strong one loses 0, 0.4, 0.9 and 0.
    assert judgement.regret == pytest.approx((0.4 + 0.9) / 4)


def test_equal_estimates_are_upgraded_together_as_by_chance() -> None:
    judgement = judge_estimator(TWO, make_held_out_part(), lambda sight: {"weak": 0.3, "strong": 0.6})
    assert judgement.apgr == pytest.approx(0.5)


def test_a_model_below_the_line_between_two_others_is_passed_over() -> None:
    three = Routes(("weak", "middle", "strong"), {"weak": 0.0, "middle": 0.5, "strong": 1.0}, 0.0)
    low = curve(three, [{"weak": 0, "middle": 0, "strong": 1}], [{"weak": 0.0, "middle": 0.1, "strong": 0.9}])
    high = curve(three, [{"weak": 0, "middle": 1, "strong": 1}], [{"weak": 0.0, "middle": 0.8, "strong": 0.9}])
    assert low == [(0.0, 0), (1.0, 1)]
    assert high == [(0.0, 0), (0.5, 1), (1.0, 1)]
    assert regret(three, {"weak": 0.0, "middle": 1.0, "strong": 1.0}, "weak") == 1.0


def test_the_selector_learns_the_outcome_of_its_own_choice_alone() -> None:
    """The other model's scores, turned round, change nothing."""
    part, played = make_held_out_part(), Bandit(TWO)
    chosen: list[str] = []
    note = played.note
    played.note = lambda arm, *more: (chosen.append(arm.main), note(arm, *more))  # type: ignore[method-assign,func-returns-value]
    played.learn(part, Random(0))
    turned = []
    for model, scores in zip(chosen, part.scores, strict=True):
        turned.append({name: score if name == model else 1 - score for name, score in scores.items()})
    again = Bandit(TWO)
    again.learn(Part(part.rows, part.seen, turned), Random(0))
    assert again.selector.posterior == played.selector.posterior
    assert again.selector.posterior.ratings == len(TEXTS)


@pytest.mark.parametrize("name", sorted(set(BASELINES) - {"mean scores"}))
def test_a_baseline_learns_which_prompts_a_model_cannot_answer_from_some_of_its_scores(name: str) -> None:
    random, examples = Random(1), []
    for number in range(160):
        hard = number % 2 == 0
        text = f"{'prove theorem' if hard else 'name colour'} {random.choice(('red', 'blue', 'green'))}"
        model = random.choice(("weak", "strong"))
        examples.append(Example(features(text), {model: float(model == "strong" or not hard)}))
    estimate = BASELINES[name](examples, ("weak", "strong"), Random(0))
    hard, easy = estimate(features("prove theorem black")), estimate(features("name colour black"))
    assert hard["weak"] < 0.4 < 0.6 < easy["weak"]
    assert hard["strong"] > 0.6


def make_log(counts: Mapping[str, int]) -> Dataset:
    """A log of models a, b and x. The last one is left out, because it is dearer than b and worse."""
    random, models = Random(0), [model for model, count in counts.items() for _ in range(count)]
    random.shuffle(models)
    rewards, rows = {"a": 0.5, "b": 0.8, "x": 0.6}, []
    for number, model in enumerate(models):
        outcome = Outcome(float(random.random() < rewards[model]))
        rows.append(RecordedPrompt(f"{number}", f"prompt {number % 7}", {model: outcome}))
    return Dataset(rows, ("a", "b", "x"), {"a": 0.1, "b": 1.0, "x": 3.0}, "usd", False, {})


def test_models_that_are_left_out_of_a_log_leave_the_propensities_of_the_others_right() -> None:
    log = make_log({"a": 240, "b": 240, "x": 720})
    reports = estimate_from_log(log, Plan(ratings=20, held_out=600, seeds=[0], cost_weight=0.0))
    for model in ("a", "b"):
        (report,) = reports[f"always {model}"]
        assert report.rows == 600, "rows of x are among them, with a weight of 0"
        assert report.ips.value == pytest.approx(log.scores[model], abs=0.1)
        assert report.snips.value == pytest.approx(log.scores[model], abs=0.1)
    assert "always x" not in reports


def test_rows_of_models_that_are_left_out_are_no_support_for_other_choices() -> None:
    log = make_log({"a": 20, "b": 280, "x": 900})
    (report,) = estimate_from_log(log, Plan(ratings=20, held_out=600, seeds=[0], cost_weight=0.0))["always a"]
    assert report.covered < 0.5


def test_a_log_with_no_line_to_learn_from_is_refused() -> None:
    log, routing = make_log({"x": 40}), Routes(("a", "b"), {"a": 0.1, "b": 1.0, "x": 3.0}, 0.0)
    with pytest.raises(RecordsRefused, match="no line to learn from is of a or b"):
        split(log, routing, {}, Plan(ratings=20, held_out=20, seeds=[], cost_weight=0.0), 0)
