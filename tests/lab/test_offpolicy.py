"""The estimators: what they come to on logs that can be worked out by hand, that they cover the truth, that they are
right where one of the two things they rest on is wrong, and that they refuse where there is too little to go by."""

import math
import sys
from collections.abc import Sequence
from random import Random

import pytest
from msgspec.structs import replace

from app.lab.offpolicy import CAP, LEAST, Log, LoggedOutcome, Policy, Report
from tests.lab import logs

ROWS, REPEATS = 500, 4
A: Policy = {"a": 1.0}


def row(action: str, propensity: float, reward: float, *features: float) -> LoggedOutcome:
    return LoggedOutcome(features, action, propensity, reward)


def report_on(rows: Sequence[LoggedOutcome], target: Policy) -> Report:
    """One choice in every row's place."""
    return Log(rows).report([target] * len(rows))


def test_weighted_means_are_those_of_pen_and_paper() -> None:
    judgement = report_on([row("a", 0.5, 1.0), row("a", 0.25, 0.0), row("b", 0.5, 1.0), row("a", 0.5, 0.5)], A)
    assert judgement.ips.value == pytest.approx((2 * 1.0 + 4 * 0.0 + 0 + 2 * 0.5) / 4)
    assert judgement.snips.value == pytest.approx((2 * 1.0 + 4 * 0.0 + 0 + 2 * 0.5) / 8)
    assert judgement.ess == pytest.approx(8**2 / (4 + 16 + 4))
    assert judgement.logged.value == pytest.approx(2.5 / 4)
    spread = math.sqrt(sum((reward - 0.625) ** 2 for reward in (1.0, 0.0, 1.0, 0.5)) / 3 / 4)
    assert judgement.logged.high - judgement.logged.value == pytest.approx(1.96 * spread)


def test_the_policy_of_the_log_earned_what_was_logged() -> None:
    random = Random(0)
    odds = {"a": 0.3, "b": 0.7}
    rows = [
        row(arm := random.choices(list(odds), list(odds.values()))[0], odds[arm], random.random()) for _ in range(300)
    ]
    judgement = report_on(rows, odds)
    assert judgement.ips.value == pytest.approx(judgement.logged.value)
    assert judgement.snips.value == pytest.approx(judgement.logged.value)
    assert judgement.ess == pytest.approx(300)
    assert judgement.covered == 1.0
    assert judgement.ahead.holds(0.0)
    assert judgement.verdict == "undecided"


def test_weights_are_capped_and_what_they_no_longer_stand_for_is_told() -> None:
    rows = [row("a", 0.01, 1.0), *(row("b", 0.99, 0.0) for _ in range(99))]
    judgement = report_on(rows, A)
    assert judgement.dr.high - judgement.dr.value >= 1.96 * (1 - judgement.covered) * 0.5, "nobody knows of the others"
    assert judgement.capped == 1
    assert judgement.ips.value == pytest.approx(CAP / 100)
    assert judgement.covered == pytest.approx(CAP / 100)


def test_it_refuses_to_judge_by_too_few_rows() -> None:
    def of(count: int) -> Report:
        return report_on(
            [row("a", 0.6, 1.0) for _ in range(count)] + [row("b", 0.4, 0.0) for _ in range(count // 2)], A
        )

    assert of(int(LEAST)).verdict == "better"
    few = of(int(LEAST) - 1)
    assert few.verdict == "refused"
    assert "99 rows of that policy, and 100 are needed" in few.refusal
    assert "99 rows" in replace(few, ess=99.97).refusal
    assert report_on([row("b", 1.0, 0.0)] * 500, A).verdict == "refused", "what it would do was never done"


def test_it_refuses_to_let_the_model_alone_judge() -> None:
    rows = [row("a", 0.02, 1.0)] * 120 + [row("b", 0.98, 0.0)] * 5_880
    judgement = report_on(rows, A)
    assert judgement.ess >= LEAST
    assert judgement.verdict == "refused"
    assert "stands for 40% of that policy's choices" in judgement.refusal


def test_it_says_which_policy_is_better() -> None:
    rows = [row("a", 0.5, 1.0), row("b", 0.5, 0.0)] * 200
    assert report_on(rows, A).verdict == "better"
    assert report_on(rows, {"b": 1.0}).verdict == "worse"


def draw_decisions(random: Random, count: int, better: float = 0.2) -> list[LoggedOutcome]:
    """Decisions between two arms, drawn evenly: a is right in half of them, b less often by `better`."""
    rows = []
    for _ in range(count):
        arm = random.choice("ab")
        chance = 0.5 if arm == "a" else 0.5 - better
        rows.append(row(arm, 0.5, float(random.random() < chance)))
    return rows


def test_the_intervals_hold_at_all_looks_at_once() -> None:
    """The short form of `python -m tests.lab.logs --looks`: someone looks after each hundred rows."""
    holding, fixed = logs.shares_held_at_all_looks(repeats=40, looks=(100, 150, 200, 300, 400))
    assert holding >= 0.95
    assert fixed < holding, "intervals for one look alone do not hold at each of several"


def test_rows_of_one_conversation_count_as_one() -> None:
    once = draw_decisions(Random(0), 300)
    often = [replace(row, cluster=f"{n}") for n, row in enumerate(once) for _ in range(5)]
    single, grouped = report_on(once, A), report_on(often, A)
    apart = report_on([replace(row, cluster="") for row in often], A)
    assert (single.clusters, grouped.clusters, apart.clusters) == (300, 300, 1_500)
    widths = [report.ahead.high - report.ahead.low for report in (single, grouped, apart)]
    assert widths[1] == pytest.approx(widths[0], rel=0.05)
    assert widths[2] < 0.6 * widths[0]


def test_no_row_is_judged_by_a_model_that_has_seen_its_conversation() -> None:
    rows = [replace(row, cluster=f"{n % 10}") for n, row in enumerate(draw_decisions(Random(1), 50))]
    only: list[Policy] = [A if n == 7 else {} for n in range(50)]
    other = [replace(row, reward=0.5) if row.cluster == "7" else row for row in rows]
    assert Log(rows).report(only).direct == Log(other).report(only).direct


def test_beside_a_refusal_stand_the_rows_that_are_still_needed() -> None:
    few = report_on(draw_decisions(Random(2), 60), A)
    assert few.verdict == "refused"
    assert few.needed is not None
    assert f"about {few.needed - 60} more rows like these lead to a verdict" in few.refusal
    assert report_on(draw_decisions(Random(2), round(1.5 * few.needed)), A).verdict == "better"
    assert report_on([row("b", 0.5, 0.0)] * 50, A).needed is None
    equal = report_on(draw_decisions(Random(3), 2_000, better=0.0), A)
    assert equal.verdict == "undecided"
    assert equal.needed is None or equal.needed > 2_000


def test_no_number_of_rows_is_promised_where_only_exploration_helps() -> None:
    """Each weight of 100 is cut to 20, so that the log stands for a fifth of the policy's choices, however long it
    is."""
    for count in (10, 30, 200):
        judgement = report_on([row("a", 0.01, 1.0)] * count + [row("b", 0.99, 0.0)] * (99 * count), A)
        assert judgement.verdict == "refused"
        assert judgement.needed is None
        assert judgement.refusal.startswith("the log stands for 20% of that policy's choices, and 50% are needed")
        assert judgement.refusal.endswith("more rows do not help, more exploration does")


def test_ratings_that_are_missing_for_a_reason_are_bounded() -> None:
    """Both arms are as good, and right answers of the first one are rated twice as often as all others."""
    random = Random(4)
    decisions = [
        decision
        for decision in draw_decisions(random, 6_000, better=0.0)
        if random.random() < (0.8 if decision.reward and decision.action == "a" else 0.4)
    ]
    misled = report_on(decisions, A)
    assert misled.verdict == "better"
    low, high = misled.selected
    assert low <= 0.0 <= high
    assert 1.0 < misled.selection < 2.0, "by so little does the verdict depend on who rates"
    plain = report_on([row("a", 0.5, 1.0), row("b", 0.5, 0.0)] * 400, A)
    assert plain.selection > 3.0


@pytest.mark.parametrize("propensity", [0.0, -0.1, 1.1, math.nan])
def test_a_decision_without_a_real_probability_is_no_row(propensity: float) -> None:
    with pytest.raises(ValueError, match="propensity"):
        Log([row("a", propensity, 1.0)])


def test_a_log_without_rows_is_none() -> None:
    with pytest.raises(ValueError, match="needs rows"):
        Log([])


def test_no_row_is_judged_by_a_model_that_has_seen_it() -> None:
    random = Random(1)
    rows = [row("a", 0.5, random.random(), random.random(), random.random()) for _ in range(50)]
    for place in (0, 7, 31):
        only: list[Policy] = [A if n == place else {} for n in range(50)]
        other = [replace(row, reward=0.5) if n == place else row for n, row in enumerate(rows)]
        assert Log(rows).report(only).direct == Log(other).report(only).direct
        policies: list[Policy] = [A if n == (place + 1) % 50 else {} for n in range(50)]
        assert Log(rows).report(policies).direct != Log(other).report(policies).direct


def test_the_model_finds_what_each_arm_hangs_on_and_takes_unseen_arms_for_usual_ones() -> None:
    random = Random(2)
    rows = []
    for n in range(2_000):
        x, y = random.random(), random.random()
        rows.append(row("ab"[n % 2], 0.5, 0.1 + 0.8 * x if n % 2 else 0.9 - 0.4 * y, x, y))
    model = logs.fit_model(rows)
    assert model.predict("b", (0.5, 0.0)) == pytest.approx(0.5, abs=0.02)
    assert model.predict("a", (0.0, 0.5)) == pytest.approx(0.7, abs=0.02)
    usual = (0.1 + 0.4 + 0.9 - 0.2) / 2
    assert model.predict("never done", (0.5, 0.5)) == pytest.approx(usual, abs=0.02)
    assert model.predict("b", (50.0, 0.0)) == max(row.reward for row in rows), "nothing beyond what was seen"


@pytest.fixture(scope="module")
def world() -> tuple[logs.Study, dict[str, float]]:
    """The study of the documentation, without the policies for which it has too few rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logs, "TRUTH", 8)
        return _study_two_targets()


def _study_two_targets() -> tuple[logs.Study, dict[str, float]]:
    full = logs.study()
    targets = {name: full.targets[name] for name in ("as it serves without exploring", "any arm")}
    study = replace(full, targets=targets)
    return study, study.truths()


def test_intervals_cover_the_truth(world: tuple[logs.Study, dict[str, float]]) -> None:
    """The short form of `python -m tests.lab.logs`: the log's own mean is far off, the doubly robust one is not."""
    study, truths = world
    reports = [report for repeat in range(REPEATS) for report in study.reports(repeat, ROWS)]
    holding = sum(report.dr.holds(truths[name]) for name, report in reports)
    assert holding >= 0.8 * len(reports)
    assert sum(report.logged.holds(truths[name]) for name, report in reports) < holding
    assert all(report.verdict != "refused" for _, report in reports)
    widest = max(report.dr.high - report.dr.low for _, report in reports)
    assert widest < 0.4, "an interval that holds everything covers by no merit"


def draw_confounded(random: Random, count: int) -> list[LoggedOutcome]:
    """Arm a is drawn where it is good: always a is worth 0.6, and looks like 0.84."""
    rows = []
    for _ in range(count):
        good = float(random.random() < 0.5)
        odds = {"a": 0.9 if good else 0.1, "b": 0.1 if good else 0.9}
        arm = "a" if random.random() < odds["a"] else "b"
        chance = (0.9 if good else 0.3) if arm == "a" else 0.5
        rows.append(row(arm, odds[arm], float(random.random() < chance), good))
    return rows


def test_it_is_right_if_either_the_probabilities_or_the_model_is() -> None:
    rows = draw_confounded(Random(3), 4_000)
    blind = report_on([replace(row, features=()) for row in rows], A)
    assert blind.direct > 0.8
    assert blind.dr.holds(0.6)
    misled = report_on([replace(row, propensity=0.5) for row in rows], A)
    assert misled.snips.value > 0.8
    assert misled.dr.holds(0.6)
    assert blind.dr.high - blind.dr.low < 0.25


def test_the_command_prints_its_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(logs, "TRUTH", 1)
    monkeypatch.setattr(sys, "argv", ["logs", "--repeats", "2", "--rows", "100"])
    logs.main()
    output = capsys.readouterr().out
    assert "23 arms, 100 rows, 2 repeats" in output
    assert "always flint > ember" in output


# -- two decisions for one reward


def two_rounds(count: int, random: Random) -> list[LoggedOutcome]:
    """Answers of a cheap and a dear worker, and what becomes of them: `keep`, or `redo`, which is right in 90 of 100
    cases. The answer shows (1 or 0) whether it is likely to be right. First draws are 70 to 30, second ones 80 to 20.
    """
    rows = []
    for _ in range(count):
        first = random.choices(("cheap", "dear"), (0.7, 0.3))[0]
        right = random.random() < (0.5 if first == "cheap" else 0.7)
        looks_good = float(right if random.random() < 0.9 else not right)
        second = random.choices(("keep", "redo"), (0.8, 0.2))[0]
        reward = float(right) if second == "keep" else 0.85 * (random.random() < 0.9)
        further = LoggedOutcome((looks_good,), second, 0.8 if second == "keep" else 0.2, reward)
        rows.append(LoggedOutcome((), first, 0.7 if first == "cheap" else 0.3, reward, further=further))
    return rows


ESCALATED = 0.5 * 0.9 + (0.5 * 0.1 + 0.5 * 0.9) * 0.9 * 0.85
"""Kept where it looks right, and is; else given anew."""


def escalating(rows: Sequence[LoggedOutcome]) -> Report:
    """The cheap worker first, and another answer where the first one does not look right."""
    further: list[Policy | None] = []
    for row in rows:
        assert row.further is not None
        further.append({"keep" if row.further.features[0] else "redo": 1.0})
    return Log(rows).report([{"cheap": 1.0}] * len(rows), further)


def test_a_row_with_two_decisions_is_weighed_by_both() -> None:
    kept_answer = LoggedOutcome((), "cheap", 0.5, 1.0, further=LoggedOutcome((), "keep", 0.25, 1.0))
    redone = LoggedOutcome((), "cheap", 0.5, 0.5, further=LoggedOutcome((), "redo", 0.75, 0.5))
    dear = LoggedOutcome((), "dear", 0.5, 0.25)
    report = Log([kept_answer, redone, dear]).report([{"cheap": 1.0}] * 3, [{"keep": 1.0}, {"keep": 1.0}, None])
    assert report.ips.value == pytest.approx(8 * 1.0 / 3)
    assert report.ess == pytest.approx(1.0)


@pytest.mark.parametrize(("first", "second", "capped"), [(0.02, 1.0, 1), (1.0, 0.02, 1), (0.25, 1 / 6, 0)])
def test_a_row_is_capped_if_either_of_its_decisions_is(first: float, second: float, capped: int) -> None:
    """The probabilities of the other policy are such that the products of the weights are 10, 10 and 24."""
    chances = {0.02: 1.0, 1.0: 0.2, 0.25: 1.0, 1 / 6: 1.0}
    seldom = LoggedOutcome((), "cheap", first, 1.0, further=LoggedOutcome((), "keep", second, 1.0))
    report = Log([seldom, LoggedOutcome((), "dear", 0.5, 0.0)]).report(
        [{"cheap": chances[first]}] * 2, [{"keep": chances[second]}, None]
    )
    assert report.capped == capped


def test_the_value_of_a_policy_over_two_rounds_is_found() -> None:
    """As it is not if the second decision is left out: then the log's own second choices are taken for the policy's."""
    random = Random(2026)
    whole, one_round, holding = [], [], 0
    repeats = 8
    for _ in range(repeats):
        rows = two_rounds(2_000, random)
        report = escalating(rows)
        whole.append(report.dr.value)
        holding += report.dr.holds(ESCALATED)
        blind = Log([replace(row, further=None) for row in rows]).report([{"cheap": 1.0}] * len(rows))
        one_round.append(blind.dr.value)
    assert sum(whole) / repeats == pytest.approx(ESCALATED, abs=0.02)
    assert holding >= repeats - 1
    assert sum(one_round) / repeats < ESCALATED - 0.15
