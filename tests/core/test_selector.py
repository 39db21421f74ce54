"""A selector's arms, features, posterior and probabilities, and its learning from a rated run."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from app.core.plan.templates import (
    ANSWERED,
    MODEL,
    MOST,
    PLANNED,
    TEMPLATES,
    Arm,
    arm_named,
    arm_of,
    arm_of_workers,
    arms,
    list_follow_up_arms,
)
from app.core.plan.workflow import Access
from app.core.pool.catalog import Card, Price, SelectorSpec, Worker
from app.core.rating import posterior as posterior_of_arms
from app.core.rating.decision import ArmChoice, Decision, decide
from app.core.rating.evidence import ARM_KINDS, RatedRun, build_rating, decision, scores
from app.core.rating.features import (
    COUNTED,
    SKETCH,
    WIDTH,
    Features,
    features,
    from_json,
    of_answer,
    sketch_embedding,
    sketch_to_features,
)
from app.core.rating.feedback import Feedback
from app.core.rating.posterior import (
    BIAS,
    COUNTS,
    FIRST_LOG_ODDS,
    VECTORS,
    Estimate,
    PossibleChange,
    Posterior,
    Rating,
    belief_about,
    estimates,
    fade_posterior,
    update_posterior,
)
from app.core.rating.posterior import from_json as read
from app.core.run.events import CallIntended, Event, Fact, PlanAccepted, PlanOpened, PlanStep, RunSucceeded

DAY = 86_400.0


def worker(name: str, price: int = 1_000_000, *strengths: str) -> Worker:
    return Worker(name, "provider", name, Price(price, price), Card(strengths=strengths))


POOL = (worker("ant"), worker("bee", 1_000_000, "planning"), worker("cat", 1_000_000, "checking facts"))
SPEC = SelectorSpec(templates=tuple(TEMPLATES), cost=0.0)  # type: ignore[arg-type]
SEEN = features("What is 2 + 2?")


def test_every_template_is_an_arm_for_each_worker_as_the_one_who_answers() -> None:
    all_arms = arms(SPEC, POOL, 5)
    assert Counter(arm.template for arm in all_arms) == dict.fromkeys(TEMPLATES, 3)
    for arm in all_arms:
        assert [step.answers for step in arm.steps] == [False] * (len(arm.steps) - 1) + [True]
        assert arm.name.split()[1:] == [step.worker for step in arm.steps]
    arms_by_name = {arm.name: arm for arm in all_arms}
    assert arms_by_name["plan-reason-check bee ant cat"].aids == ("plan:bee", "check:cat")
    assert arms_by_name["plan-reason-check bee ant cat"].steps[2].access == Access(True, (1,))
    assert arms_by_name["mixture ant bee cat cat"].main == "ant"
    assert arm_of_workers("mixture", ["ant", "bee", "cat", "cat"]) == arms_by_name["mixture ant bee cat cat"]


def test_arms_fit_into_the_steps_and_name_whom_the_pool_file_names() -> None:
    assert {arm.template for arm in arms(SPEC, POOL, 1)} == {"answer", "reason"}
    only_long = replace(SPEC, templates=("plan-reason",), planners=("cat", "gone"))
    assert {arm.steps[0].worker for arm in arms(only_long, POOL, 5)} == {"cat"}
    assert [arm.name for arm in arms(only_long, POOL, 1)] == ["answer ant", "answer bee", "answer cat"]
    assert arms(only_long, POOL, 1, model=True) == (PLANNED,)
    assert arms(only_long, POOL, 5, model=True)[-1].name == MODEL
    planners = tuple([replace(POOL[0], name=f"planner{n}") for n in range(20)])
    planned = SelectorSpec(templates=("plan-solve",), planners=tuple([worker.name for worker in planners]))
    many = arms(planned, planners, 5, model=True)
    assert (len(many), many[-1]) == (MOST, PLANNED), "the model stays an arm where there are more than can be learned"
    dear = (worker("ant"), worker("dog", 9_000_000))
    assert {arm.steps[0].worker for arm in arms(replace(only_long, planners=()), dear, 5)} == {"dog"}


def test_features_are_of_length_one_and_know_numbers_only_by_their_shape() -> None:
    sentence = features("Sum 12 and 99, please; sum them.")
    assert math.isclose(sum(value * value for _, value in sentence.words), 1)
    assert all(0 <= place < WIDTH for place, _ in sentence.words)
    assert features("Sum 18 and 90, please; sum them.") == sentence
    assert features("Sum 45 and 90, please; sum them.") != sentence
    assert features("Sum 181 and 90, please; sum them.") != sentence
    assert features("On 3 May 1871") == features("On 3 May 1802")
    assert features("On 3 May 1871") != features("On 3 May 1971"), "of a year the century is seen"


def test_the_number_nought_weighs_as_much_as_a_word() -> None:
    """Its shape is the word that all numbers are, so the order in which words are read must not decide its weight."""
    weights = {abs(value) for _, value in features("cost 0").words}
    assert len(weights) == 1


def test_counts_tell_how_much_there_is_and_how_much_of_it_again() -> None:
    few, many, again = (features(text) for text in ("one two six", "one two six ten", "one two two"))
    assert len(few.counts) == COUNTED
    assert few.counts[3] == again.counts[3]
    assert many.counts[3] > few.counts[3]
    assert again.counts[4] > few.counts[4]
    assert from_json(few.to_json()) == few
    assert from_json({**few.to_json(), "version": "words-0"}) is None


def test_of_a_long_text_the_beginning_and_the_end_are_seen() -> None:
    long = f"begin {'word ' * 5_000} end"
    assert {place for place, _ in features(long).words} == {place for place, _ in features("begin word end").words}


def rate(posterior: Posterior, arm: str, score: float, **more: Any) -> Posterior:
    played = arm_of_workers(arm.split()[0], arm.split()[1:])
    fields = {"seen": SEEN, "usd": 100, "at": DAY} | more
    return update_posterior(posterior, SPEC, POOL, Rating(played, score=score, **fields))


def mean(posterior: Posterior, arm: str) -> Estimate:
    return next(
        estimate for estimate in estimates(posterior, SPEC, arms(SPEC, POOL, 5), POOL, SEEN) if estimate.arm.name == arm
    )


def test_a_rating_moves_its_arm_and_what_shares_a_part_with_it() -> None:
    before, after = Posterior(), rate(Posterior(), "answer ant", 0.0)
    assert mean(after, "answer ant").mean < mean(before, "answer ant").mean
    assert mean(after, "answer ant").deviation < mean(before, "answer ant").deviation
    alike = ("reason ant", "answer bee", "reason bee")
    same_worker, same_template, neither = (mean(before, name).mean - mean(after, name).mean for name in alike)
    assert same_worker > neither > 0, "the request is hard"
    assert same_template > neither
    assert after.ratings == 1


def test_what_makes_one_kind_of_question_hard_is_not_held_against_another() -> None:
    poems, sums = "Write a poem, {}please", "Add these, {}thanks"
    longer = "and then again with all of the same care as before, and with more of it, "
    posterior = Posterior()
    for n in range(120):  # long poems fail, long sums do not
        text, long = (poems, sums)[n % 2], n % 4 >= 2
        sight = features(text.format(longer if long else ""))
        posterior = rate(posterior, "answer ant", float(text == sums or not long), seen=sight)
    arm = arms(SPEC, POOL, 5)[:1]
    short, lengthy = {}, {}
    for kind in (poems, sums):
        short[kind] = estimates(posterior, SPEC, arm, POOL, features(kind.format("")))[0].mean
        lengthy[kind] = estimates(posterior, SPEC, arm, POOL, features(kind.format(longer)))[0].mean
    assert lengthy[poems] < 0 < min(short[poems], short[sums], lengthy[sums])


def test_who_changes_their_mind_moves_the_belief_and_makes_it_no_surer() -> None:
    posterior = rate(Posterior(), "answer ant", 0.0)
    mended = rate(posterior, "answer ant", 1.0, before=0.0)
    assert mean(mended, "answer ant").mean > mean(posterior, "answer ant").mean
    for part, weights in posterior.weights.items():
        assert {place: mended.weights[part][place][1] for place in weights} == {
            place: variance for place, (_, variance) in weights.items()
        }
    assert (mended.ratings, mended.bills) == (1, posterior.bills)


def test_a_rating_makes_each_weight_as_certain_as_the_sum_of_its_kind() -> None:
    sight = replace(SEEN, vector=((0, 0.6), (1, 0.8)))
    posterior = rate(Posterior(), "answer ant", 0.0, seen=sight)
    part = "main:ant=ant"
    learned, learned_since = posterior.weights[part], change_of(posterior).weights[part]
    prior = posterior_of_arms.VARIANCES["main"]
    precision_of_bias = 1 / learned[BIAS][1] - 1 / prior[1]
    assert precision_of_bias > 0
    counts = [(COUNTS + n, value) for n, value in enumerate(sight.counts)]
    vector = [(VECTORS + n, value) for n, value in sight.vector]
    for inputs, spread in ((sight.words, prior[0]), (counts, prior[2]), (vector, prior[0])):
        squares = sum(value * value for _, value in inputs)
        assert len(inputs) > 1
        for place, _ in inputs:
            precision = 1 / learned[place][1] - 1 / spread
            assert precision == pytest.approx(squares * precision_of_bias, rel=1e-6)
            assert learned_since[place][1] >= learned[place][1], "what a change has made of a worker is learned faster"
        assert sum(learned_since[place][1] > learned[place][1] for place, _ in inputs) > 1


def test_evidence_for_a_change_counts_more_than_once_as_the_older_belief_explains_a_part_of_it() -> None:
    since = PossibleChange({"main:ant=ant": {BIAS: (-1.0, 0.1)}}, {"main:ant=ant": 2.0}, 10.0)
    posterior = replace(learn_of_two_workers(), possible=since)
    evidence = change_of(rate(posterior, "answer ant", 0.0)).evidence["main:ant=ant"] - 2.0
    with patch.object(posterior_of_arms, "EVIDENCE_FACTOR", 1.0):
        likelihood_ratio = change_of(rate(posterior, "answer ant", 0.0)).evidence["main:ant=ant"] - 2.0
    assert evidence == pytest.approx(posterior_of_arms.EVIDENCE_FACTOR * likelihood_ratio)
    assert evidence > likelihood_ratio > 0


def test_what_was_learned_fades_back_to_the_prior() -> None:
    posterior = Posterior()
    for _ in range(50):
        posterior = rate(posterior, "answer ant", 0.0)
    later = fade_posterior(posterior, 0.995, DAY + 140 * DAY)
    nearly_all, prior = (
        mean(fade_posterior(posterior, 0.995, DAY + 4_000 * DAY), "answer ant"),
        mean(Posterior(), "answer ant"),
    )
    assert mean(posterior, "answer ant").mean < mean(later, "answer ant").mean < nearly_all.mean
    assert nearly_all.mean == pytest.approx(prior.mean, abs=1e-3)
    assert prior.deviation <= nearly_all.deviation < 1.01 * prior.deviation, "it may still have changed"
    weights = fade_posterior(posterior, 0.995, DAY + 4_000 * DAY).weights["base"]
    assert all(mean_ == pytest.approx(0.0, abs=1e-3) for mean_, _ in weights.values())
    assert max(variance for _, variance in weights.values()) == pytest.approx(1.0, abs=1e-3), "of the bias"
    assert later.bills["answer ant=ant"][0] == pytest.approx(50 * 0.995**140)
    assert fade_posterior(posterior, 0.995, DAY + 60) is posterior


def test_another_model_under_a_workers_name_starts_from_its_prior_and_the_first_one_stays_known() -> None:
    posterior = Posterior()
    for _ in range(20):
        posterior = rate(posterior, "answer ant", 0.0)
    fresh = replace(POOL[0], model="ant-2")
    pools = POOL, (fresh, *POOL[1:])
    usual, exchanged = (estimates(posterior, SPEC, arms(SPEC, pool, 1)[:1], pool, SEEN)[0] for pool in pools)
    untaught = mean(Posterior(), "answer ant")
    assert usual.mean < exchanged.mean
    assert usual.deviation < exchanged.deviation < untaught.deviation, "of the template something is known"
    before = rate(posterior, "answer ant", 1.0, models={"ant": "ant-0"})
    assert before.weights["main:ant=ant"] == posterior.weights["main:ant=ant"], "an older model answered"


TEXTS = (
    "Sum 2 and 3",
    "Write a poem about rain",
    "Name the day after Easter",
    "Sort these words by length",
    "Translate hello",
    "Prove it",
)


def rate_many(posterior: Posterior, arms_in_turn: Sequence[str], count: int, chance: float, seed: int) -> Posterior:
    """Learn ratings of answers that are right by chance."""
    random = Random(seed)
    for n in range(count):
        seen = features(random.choice(TEXTS))
        posterior = rate(posterior, arms_in_turn[n % len(arms_in_turn)], float(random.random() < chance), seen=seen)
    return posterior


@cache
def learn_of_two_workers() -> Posterior:
    """Return what is believed of two workers after 600 ratings."""
    return rate_many(Posterior(), ("answer ant", "answer bee"), 600, 0.8, seed=2)


@cache
def suspicious() -> Posterior:
    """Return the same after the ant has been wrong nearly always for 60 ratings."""
    return rate_many(replace(learn_of_two_workers(), possible=None), ("answer ant",), 60, 0.1, seed=2)


def expecting_no_change() -> Any:
    """Make changes so improbable that no evidence suffices."""
    return patch.object(posterior_of_arms, "CHANGE_PROBABILITY", 1e-30)


def change_of(posterior: Posterior) -> PossibleChange:
    """Return the change that is looked for."""
    assert posterior.possible is not None
    return posterior.possible


def test_a_worker_that_has_changed_is_believed_to_be_what_its_ratings_since_say() -> None:
    posterior = suspicious()
    with expecting_no_change():
        as_before = mean(posterior, "answer ant")
    now = mean(posterior, "answer ant")
    assert change_of(posterior).probability > 0.7
    assert now.mean < as_before.mean
    assert now.deviation > as_before.deviation, "what follows is learned faster"
    assert read(posterior.to_json()) == posterior


def leave_of_change(weight: tuple[float, float], prior: float) -> tuple[float, float]:
    """Return the mean and the variance that a change leaves of a weight, by the two constants of the rule."""
    mean_before, variance = weight
    wider, share = posterior_of_arms.WIDER_IF_CHANGED * prior, posterior_of_arms.KEPT_SHARE
    precision = 1 / wider + share * (1 / variance - 1 / prior)
    return share * mean_before / variance / precision, 1 / precision


def test_of_a_worker_that_has_changed_a_small_share_is_known_and_the_first_ratings_since_outweigh_it() -> None:
    usual, prior = replace(learn_of_two_workers(), possible=None), posterior_of_arms.VARIANCES["main"][1]
    bias, seen = usual.weights["main:ant=ant"][BIAS], Features((), (0.0,) * COUNTED)
    assert abs(bias[0]) > 0.05
    left = leave_of_change(bias, prior)
    assert 0 < left[0] / bias[0] < 0.5, "some of it is left"
    assert left[1] > prior, "and less is certain than before any rating"
    certainly = PossibleChange({}, {"main:ant=ant": 99.0}, 10.0)
    assert belief_about(replace(usual, possible=certainly), "main:ant=ant", seen) == pytest.approx(left)
    rated = rate(usual, "answer ant", 0.0, seen=seen)
    since = change_of(rated).weights["main:ant=ant"][BIAS]
    assert since[0] - left[0] < 3 * (rated.weights["main:ant=ant"][BIAS][0] - bias[0]) < 0, "it moves farther"
    assert since[1] < left[1], "the ratings since are added to what was left"


def test_when_one_worker_has_changed_the_others_are_tried_again() -> None:
    posterior = suspicious()
    with expecting_no_change():
        as_before = mean(posterior, "answer bee")
    assert "main:bee=bee" not in change_of(posterior).evidence, "it was not asked since"
    assert change_of(posterior).share("main:bee=bee") == pytest.approx(posterior_of_arms.CHANGED_SHARE)
    assert mean(posterior, "answer bee").deviation > 1.05 * as_before.deviation


@pytest.mark.parametrize(("evidence", "changes"), [(1.0, 0), (9.0, 1)])
def test_after_some_hundred_ratings_the_more_probable_belief_is_kept(evidence: float, changes: int) -> None:
    ratings = posterior_of_arms.RATINGS_UNTIL_SETTLED - 1
    since = PossibleChange({"main:ant=ant": {BIAS: (-1.0, 0.1)}}, {"main:ant=ant": evidence}, ratings)
    posterior = replace(learn_of_two_workers(), possible=since)
    settled = rate(posterior, "answer ant", 1.0)
    assert (settled.changes, settled.possible) == (changes, PossibleChange())
    assert (settled.weights["main:ant=ant"][BIAS][0] < -0.5) == bool(changes)


@pytest.mark.parametrize("seed", range(3))
def test_a_worker_whose_answers_are_as_good_as_ever_has_not_changed(seed: int) -> None:
    calm = rate_many(learn_of_two_workers(), ("answer ant", "answer bee"), 400, 0.8, seed)
    assert calm.changes == 0


def test_a_change_that_is_settled_replaces_all_beliefs_about_the_worker() -> None:
    posterior = rate_many(learn_of_two_workers(), ("answer-check bee ant",), 20, 1.0, seed=1)
    known = posterior.weights["check:ant=ant"][BIAS]
    assert known[0] != 0
    count = round(posterior_of_arms.RATINGS_UNTIL_SETTLED) + 20
    posterior = rate_many(replace(posterior, possible=None), ("answer ant",), count, 0.1, seed=2)
    assert posterior.changes == 1
    usual = posterior_of_arms.HELPER[1]
    left = leave_of_change(known, usual)
    assert left[1] > usual
    assert posterior.weights["check:ant=ant"][BIAS] == pytest.approx((left[0], usual)), "none is wider than its prior"
    bias_variance = posterior.weights["main:bee=bee"][BIAS][1]
    assert bias_variance < posterior_of_arms.VARIANCES["main"][1] / 2, "the bee is known as before"


def test_a_rating_that_is_altered_alters_what_the_ratings_since_a_possible_change_say() -> None:
    posterior = suspicious()
    altered = rate(posterior, "answer ant", 1.0, before=0.0)
    before, after = (change_of(posterior).weights["main:ant=ant"][BIAS] for posterior in (posterior, altered))
    assert before[0] < after[0]
    assert before[1] == after[1]
    assert change_of(altered).evidence == change_of(posterior).evidence


def test_beliefs_that_an_earlier_release_has_written_are_read() -> None:
    posterior = rate(Posterior(), "answer ant", 1.0)
    before = json.loads(posterior.to_json())
    del before["possible"]
    before |= {"watches": {"main:ant=ant": [0.5, 0.0]}, "usual": {"main:ant=ant": [1.0, 1.0, 0.0]}}
    assert read(json.dumps(before).encode()) == replace(posterior, possible=None)


def test_a_rating_that_counts_for_less_moves_the_beliefs_by_less() -> None:
    whole, part = (rate(Posterior(), "answer ant", 0.0, weight=weight) for weight in (1.0, 0.2))
    assert mean(whole, "answer ant").mean < mean(part, "answer ant").mean < mean(Posterior(), "answer ant").mean
    assert mean(whole, "answer ant").deviation < mean(part, "answer ant").deviation


def test_the_dearer_worker_is_expected_to_gain_with_the_length_of_a_request() -> None:
    long = features("Explain and then explain and then explain again what and how and why. " * 8)
    pool = worker("free", 0), worker("dear", 4_000_000)
    edges = []
    for sight in (SEEN, long):
        free, dear = (
            estimate.mean
            for estimate in first_estimates(SPEC, pool, sight).values()
            if estimate.arm.template == "answer"
        )
        edges.append(dear - free)
    assert 0 < edges[0] < edges[1], "a worker without a price is the cheapest"


def test_a_posterior_is_the_same_after_it_was_stored() -> None:
    posterior = rate(rate(Posterior(), "answer ant", 0.3), "plan-reason bee cat", 1.0)
    assert read(posterior.to_json()) == posterior
    assert read(b'{"version": "posterior-0"}') == Posterior()


def first_estimates(spec: SelectorSpec, pool: tuple[Worker, ...], sight: Features) -> dict[str, Estimate]:
    """The estimates of single steps before any rating."""
    return {estimate.arm.name: estimate for estimate in estimates(Posterior(), spec, arms(spec, pool, 1), pool, sight)}


def test_cards_decide_before_any_rating_and_costs_take_their_share() -> None:
    poet, sage = worker("poet", 1_000_000, "poems"), worker("sage", 4_000_000)
    by_name = first_estimates(SPEC, (poet, sage), SEEN)
    assert by_name["answer sage"].mean > by_name["answer poet"].mean, "the dearer is held for a little better"
    sight = features("Write poems")
    by_name = {
        estimate.arm.name: estimate
        for estimate in estimates(Posterior(), SPEC, arms(SPEC, (poet, sage), 1), (poet, sage), sight)
    }
    assert by_name["answer poet"].mean > by_name["answer sage"].mean, "but who is good at it is better"
    dear = replace(SPEC, cost=0.5, full_usd=1_000)
    by_name = first_estimates(dear, (poet, sage), SEEN)
    assert by_name["answer sage"].left < by_name["answer poet"].left < 1
    billed = rate(Posterior(), "answer ant", 1.0, usd=10**9)
    assert next(iter(estimates(billed, dear, arms(SPEC, POOL, 1), POOL, SEEN))).left == 0.5


def arm(name: str) -> Arm:
    return Arm(name, "answer", name, (), ())


def choice(*beliefs: tuple[float, float], share: float | None = 0.05, seed: int = 0) -> ArmChoice:
    """A choice among arms of these log-odds and deviations."""
    random = Random(seed)
    all_estimates = [Estimate(arm(str(n)), *belief, 1.0) for n, belief in enumerate(beliefs)]
    return decide(all_estimates, share, lambda count: [random.gauss(0, 1) for _ in range(count)], random.random)


def test_probabilities_add_up_and_every_arm_keeps_its_share() -> None:
    decision = choice((1.0, 0.1), (0.9, 0.1), (-3.0, 0.1))
    assert math.isclose(sum(decision.candidates.values()), 1)
    assert decision.candidates["2"] == pytest.approx(0.05 / 3)
    assert decision.candidates["0"] > decision.candidates["1"] > decision.candidates["2"]
    assert decision.best == "0"
    unsure = choice((1.0, 1.0), (0.9, 1.0), (-3.0, 3.0))
    assert unsure.candidates["2"] > 0.05 / 3, "who might be good is tried"


def test_actions_are_drawn_from_the_probabilities_that_are_told() -> None:
    expected: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for seed in range(500):
        decision = choice((1.0, 0.5), (0.8, 0.5), (0.0, 0.5), seed=seed)
        counts[decision.action] += 1
        expected.update(decision.candidates)
    for name, probability in expected.items():
        assert abs(counts[name] - probability) < 4 * math.sqrt(probability)


def test_without_leave_to_explore_the_best_is_certain() -> None:
    decision = choice((1.0, 2.0), (1.1, 0.1), share=None)
    assert (decision.action, decision.propensity, dict(decision.candidates)) == ("1", 1.0, {"0": 0.0, "1": 1.0})


def feedback_at(at: float, score: float | None, source: str = "user", kind: str = "explicit") -> Feedback:
    return Feedback(f"fb_{at}", "run", "acme", "", at, kind, source, "", score, "" if score is not None else "label")  # type: ignore[arg-type]


def test_a_run_is_worth_the_mean_of_what_its_sources_said_last() -> None:
    ratings = [
        feedback_at(1, 0.0),
        feedback_at(2, 1.0),
        feedback_at(3, 0.5, "rule", "grader"),
        feedback_at(4, None),
        feedback_at(5, 0.9, kind="implicit"),
    ]
    assert scores(ratings, ratings[0]) == (None, 0.0)
    assert scores(ratings, ratings[1]) == (0.0, 1.0)
    assert scores(ratings, ratings[2]) == (1.0, 0.75)
    assert scores(ratings, ratings[3]) == scores(ratings, ratings[4]) == (None, None)


def journal(*workers: str, called: tuple[str, ...] = (), action: str = "", fallback: bool = False) -> tuple[Event, ...]:
    """Return the journal of a selector's run: its plan and its calls."""
    arm_choice = ArmChoice({action: 1.0}, action, action)
    body = Decision(arm_choice, "policy", "1-x", "ref", 0.05, "seed").body()
    all_facts: list[Fact] = [PlanOpened(0, 0, "first", "selector", decision=body)]
    all_facts += [PlanOpened(1, 0, "fallback", "fallback")] if fallback else []
    last = len(all_facts) - 1
    all_facts += [PlanStep(last, n, name, "", Access(), answers=False) for n, name in enumerate(workers)]
    all_facts += [PlanAccepted(last, "", len(workers), "chain")]
    calls = enumerate(called or workers)
    all_facts += [CallIntended(f"call-{n}", n, name, Access(), usd_held=0, tokens_held=0) for n, name in calls]
    return tuple(Event.of("run", seq, 0.0, fact) for seq, fact in enumerate(all_facts, 1))


def make_rating(
    events: tuple[Event, ...], *, answered: bool = True, features_json: bytes | None = None
) -> Rating | None:
    stored_features = json.dumps(SEEN.to_json()).encode() if features_json is None else features_json or None
    return build_rating(
        RatedRun(feedback_at(1, 1.0), "tier", answered, 7, (feedback_at(1, 1.0),), events, stored_features)
    )


def test_a_rating_teaches_of_what_was_really_played() -> None:
    as_planned = make_rating(journal("bee", "ant", action="plan-reason bee ant"))
    assert as_planned is not None
    assert as_planned.arm.name == "plan-reason bee ant"
    assert (as_planned.seen, as_planned.usd, as_planned.before) == (SEEN, 7, None)
    taken_over = make_rating(journal("bee", "ant", called=("bee", "cat"), action="plan-reason bee ant"))
    assert taken_over is not None
    assert taken_over.arm.name == "plan-reason bee cat"
    modelled = make_rating(journal("bee", "ant", action=MODEL))
    assert modelled is not None
    assert modelled.arm == PLANNED


def in_two_rounds(action: str, called: str = "") -> tuple[Event, ...]:
    """The cat answers, and then something is done with its answer."""
    first = {"action": "answer cat", "features": "ref"}
    _, _, worker = action.partition(" ")
    all_facts: list[Fact] = [
        PlanOpened(0, 0, "first", "selector", decision=first),
        PlanStep(0, 0, "cat", "", Access(), answers=True),
        PlanAccepted(0, "", 1, "single"),
        CallIntended("c0", 0, "cat", Access(), usd_held=0, tokens_held=0),
        PlanOpened(1, 1, "first", "selector", round=2, decision={"action": action, "features": "ref"}),
    ]
    all_facts += [PlanStep(1, 1, worker, "", Access(), answers=True)] if worker else []
    all_facts += [PlanAccepted(1, "", 1, "")]
    all_facts += [CallIntended("c1", 1, called or worker, Access(), usd_held=0, tokens_held=0)] if worker else []
    return tuple(Event.of("run", seq, 0.0, fact) for seq, fact in enumerate(all_facts, 1))


def test_what_became_of_an_answer_teaches_of_what_was_done_with_it() -> None:
    accepted, checked = (make_rating(in_two_rounds(action)) for action in ("accept", "recheck ant"))
    again = make_rating(in_two_rounds("redo ant", called="bee"))
    assert accepted is not None
    assert checked is not None
    assert again is not None
    assert accepted.arm.parts == ("main:cat", "template:answer", ANSWERED)
    assert (accepted.arm.steps[0].worker, accepted.usd) == ("cat", 7), "the whole bill is that of the first answer"
    assert checked.arm.parts == ("main:cat", "check:ant", "template:recheck", ANSWERED)
    assert again.arm.parts == ("main:bee", "template:answer"), "the bee took over"
    assert (checked.usd, again.usd) == (None, None), "two rounds are on the bill"
    assert make_rating(in_two_rounds("accept"), answered=False) is None


def test_a_check_that_came_to_nothing_did_not_earn_what_the_first_answer_did() -> None:
    checked = in_two_rounds("recheck ant")
    end = Event.of("run", len(checked) + 1, 0.0, RunSucceeded(step=0, stopped="worker_failed"))
    assert end.kind in ARM_KINDS, "so that learners are given it"
    rating = make_rating((*checked, end))
    assert rating is not None
    assert rating.arm.parts == ("main:cat", "template:answer")
    assert rating.usd is None, "two rounds are on the bill"


def test_it_learns_from_an_answers_words_when_to_ask_somebody_else() -> None:
    """The ant is right as often as not, and its answers show when; the bee is right in three of four cases."""
    sure, unsure = "It is clearly 4.", "I am not certain, perhaps 5."
    random, posterior = Random(3), Posterior()
    first = arm_of_workers("answer", ["ant"])
    spec = replace(SPEC, cost=0.1, full_usd=1_000)

    def choose(answer: str) -> str:
        sight = replace(SEEN, answer=of_answer(answer))
        all_estimates = estimates(posterior, spec, list_follow_up_arms(spec, POOL[:2], first), POOL[:2], sight)
        return max(all_estimates, key=lambda estimate: estimate.worth).arm.name

    for _ in range(400):
        answer = random.choice((sure, unsure))
        arm_played = random.choice(list_follow_up_arms(spec, POOL[:2], first))
        right = random.random() < (0.75 if arm_played.name.endswith("bee") else 0.95 if answer == sure else 0.1)
        sight = replace(SEEN, answer=of_answer(answer))
        posterior = update_posterior(posterior, spec, POOL[:2], Rating(arm_played, sight, float(right), None, DAY))
    assert (choose(sure), choose(unsure)) == ("accept", "redo bee")
    assert posterior.bills == {}


def test_an_arm_is_known_again_by_its_steps() -> None:
    for arm in arms(SPEC, POOL, 5):
        assert arm_of([(step.worker, step.subtask, step.access) for step in arm.steps]) == arm
        assert arm_named(arm.name) == arm
    assert arm_of([("ant", "Something else.", Access())]) == PLANNED
    names = [arm.name for arm in list_follow_up_arms(SPEC, POOL, arm_of_workers("answer", ["ant"]))]
    assert names == ["accept", "recheck cat", "redo bee", "redo cat"]


def test_what_teaches_nothing() -> None:
    assert make_rating(journal("ant", action="answer ant"), answered=False) is None, "an outage is no wrong answer"
    assert make_rating(journal("ant", action="answer ant", fallback=True)) is None
    assert make_rating(journal("ant", action="plan-reason bee ant")) is None
    assert make_rating(journal("ant", action="answer ant"), features_json=b"") is None, "its content was erased"
    assert decision(journal("ant", action="answer ant", fallback=True)) is None


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def test_an_embedding_is_sketched_to_few_numbers_that_keep_what_is_alike() -> None:
    random = Random(0)
    topic = [random.gauss(0, 1) for _ in range(1_536)]
    another = [random.gauss(0, 1) for _ in range(1_536)]
    near = []
    for mean in (topic, another, topic, another):
        near.append([value + random.gauss(0, 0.5) for value in mean])
    first_sketch, other, again, _ = (sketch_embedding(vector) for vector in near)
    assert len(first_sketch) == SKETCH
    assert math.isclose(sum(value * value for value in first_sketch), 1)
    alike = _dot(first_sketch, again)
    unlike = _dot(first_sketch, other)
    assert alike > 0.6 > 0.3 > abs(unlike)
    with pytest.raises(ValueError, match="without length"):
        sketch_embedding([0.0] * 10)


def test_what_was_learned_of_an_embedding_is_of_its_model_alone_and_the_words_know_it_too() -> None:
    vector = sketch_embedding([1.0, -2.0, 0.5] * 50)
    sight = features("What is 2 + 2?", sketch_to_features(vector, "eye-1"))
    posterior = Posterior()
    for _ in range(20):
        posterior = rate(posterior, "answer ant", 0.0, seen=sight)
    arm = arms(SPEC, POOL, 5)[:1]
    sights = (sight, features("What is 2 + 2?", sketch_to_features(vector, "eye-2")), SEEN)
    same, other_model, words_alone = (estimates(posterior, SPEC, arm, POOL, features)[0].mean for features in sights)
    assert same < other_model == pytest.approx(words_alone)
    assert words_alone < estimates(Posterior(), SPEC, arm, POOL, SEEN)[0].mean
    assert from_json(sight.to_json()) == sight
    faded_away = fade_posterior(posterior, 0.995, DAY + 4_000 * DAY)
    assert estimates(faded_away, SPEC, arm, POOL, sight)[0].mean == pytest.approx(FIRST_LOG_ODDS, abs=0.01)
