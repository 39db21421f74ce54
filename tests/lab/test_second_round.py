"""Second rounds of the small conductor's: the figures are those of `rounds.py`, and the grammar holds."""

import shlex
from pathlib import Path
from random import Random

import pytest

from app.cli.commands import parse
from app.lab import prompt, rounds, second_round
from app.lab.lessons import draw_lesson
from app.lab.outcome import outcome
from app.lab.plans import FURTHER, LONGEST, SLOTS, TOKENS, Plan, PlanStep, legal_again, to_tokens
from app.lab.rounds import Second
from app.lab.second_round import BEFORE, DOUBT, TAKE, TRUST
from app.lab.world import CLASSES, Setting, standard_pool
from tests.lab.test_world import any_plan

POOL = standard_pool()
BIRCH, EMBER, FLINT = 1, 4, 5
FIRST = (PlanStep(BIRCH, "solve"),)
CHECK = PlanStep(FLINT, "check", True, (0,))


@pytest.mark.parametrize(
    ("second", "second_figures"),
    [
        ((BEFORE, CHECK), Second(None, "", FLINT)),
        ((BEFORE, CHECK._replace(worker=BIRCH)), Second(None, "", BIRCH)),
        ((BEFORE, PlanStep(EMBER, "reason"), CHECK._replace(sees=(1,))), Second(EMBER, "reason", FLINT)),
    ],
    ids=str,
)
def test_a_run_of_two_rounds_comes_to_what_the_executor_makes_of_it(second: Plan, second_figures: Second) -> None:
    """Those figures are held against the executor's core by `test_rounds.py`."""
    setting = Setting(POOL)
    assert POOL.index(second_round.judging_worker(POOL)) == FLINT
    for kind, point in zip(CLASSES, rounds.policy(setting, FIRST, FLINT, second_figures), strict=True):
        result = second_round.run_outcome(FIRST, (TAKE, second), kind, setting)
        assert (result.right, result.usd, result.again) == pytest.approx((point.right, point.usd, point.again))


def test_taking_every_answer_costs_only_the_look_at_it() -> None:
    setting = Setting(POOL)
    for kind in CLASSES:
        single, both = outcome(FIRST, kind, setting), second_round.run_outcome(FIRST, (TAKE, TAKE), kind, setting)
        assert both.right == pytest.approx(single.right)
        assert both.usd == pytest.approx(single.usd + rounds.judging_usd(POOL[FLINT], kind[1], rounds.ACCEPTS))
        assert (both.again, both.seconds > single.seconds, both.reward < single.reward) == (0, True, True)


def test_who_wrote_the_answer_says_the_same_again() -> None:
    same = second_round.run_outcome(FIRST, ((BEFORE, PlanStep(BIRCH, "reason")),) * 2, (0, 2), Setting(POOL))
    assert same.right == pytest.approx(outcome(FIRST, (0, 2), Setting(POOL)).right)
    other = second_round.run_outcome(FIRST, ((BEFORE, PlanStep(EMBER, "reason")),) * 2, (0, 2), Setting(POOL))
    assert other.right != pytest.approx(same.right)


def test_doubt_says_that_an_answer_is_worse_if_the_one_who_looks_can_see() -> None:
    for kind in CLASSES:
        trusted = second_round.outcome_given_sign(FIRST, TAKE, kind, Setting(POOL), TRUST)
        doubted = second_round.outcome_given_sign(FIRST, TAKE, kind, Setting(POOL), DOUBT)
        assert trusted.right > doubted.right
        assert trusted.again + doubted.again == pytest.approx(1)


def test_every_legal_second_plan_is_read_and_written_back() -> None:
    random, lengths = Random(2), set()
    for _ in range(600):
        tokens = [0]
        while tokens[-1] != 2:
            tokens.append(random.choice(legal_again(len(tokens), 4)))
        plan = second_round.second_plan_of(tokens)
        assert second_round.second_plan_tokens(plan) == tokens
        assert all(step.worker < 4 and max(step.sees, default=0) <= n for n, step in enumerate(plan[1:]))
        assert len(tokens) <= LONGEST
        assert 0 <= second_round.run_outcome(FIRST, (TAKE, plan), (0, 1), Setting(POOL)).right <= 1
        lengths.add(len(plan) - 1)
    assert lengths == set(range(FURTHER + 1))
    assert all(set(legal_again(place, SLOTS)) <= set(range(TOKENS)) for place in range(1, LONGEST))


def test_drawn_second_plans_go_on_or_begin_anew_and_are_legal() -> None:
    random = Random(3)
    plans = [second_round.draw_second_plan(random, 4) for _ in range(300)]
    for plan in plans:
        tokens = second_round.second_plan_tokens(plan)
        assert all(token in legal_again(place, 4) for place, token in enumerate(tokens) if place)
    seeing = 0
    for plan in plans:
        seeing += any(0 in step.sees for step in plan[1:])
    assert 60 < seeing < 240
    assert {step.worker for plan in plans for step in second_round.place_plan(plan, (3, 2, 1, 0))[1:]} == {0, 1, 2, 3}


def test_the_second_prompt_is_the_first_with_the_plan_and_a_sign() -> None:
    random = Random(5)
    lesson = draw_lesson(random, "train")
    first = any_plan(random, len(lesson.pool))
    cards = 3 * len(lesson.pool) + 1
    for first_prompt in (lesson.prompt(), lesson.prompt(Random(1), 0.9)):
        for sign in second_round.SIGNS:
            second_prompt = second_round.second_prompt(first_prompt, lesson, first, sign)
            assert second_prompt == [*first_prompt[:-cards], *to_tokens(first), *first_prompt[-cards:], sign]
            assert (
                second_prompt[-cards - 1] == lesson.prompt()[-cards] == prompt.tokens("", lesson.pool, lesson.order)[0]
            )


def test_the_pages_command_is_a_command() -> None:
    page = (Path(__file__).parents[2] / "deploy" / "docs" / "rehearsal.md").read_text().partition("### Learned")[2]
    line = page.partition("```sh\n")[2].partition("\n")[0]
    options = parse(shlex.split(line)[1:])
    assert (options.backend, options.rounds, options.checkpoint) == ("builtin", 2, "trained/seed-0")
