"""Plans in words: a worker goes by what its subtask says, the grammar is exact, and nothing passes the optimum."""

import math
from functools import partial
from random import Random

import pytest
from msgspec.structs import replace

from app.core.plan.proposals import read_plan_text
from app.lab import prompt, search, subtask_wording, teacher
from app.lab.baselines import best_named_plans
from app.lab.lessons import draw_lesson, draw_sensible_plan
from app.lab.outcome import outcome, right
from app.lab.plan_grammar import MOST, ROLES, WORDS
from app.lab.plan_samples import format_samples, is_valid
from app.lab.plans import LONGEST, SUBTASKS, Plan, PlanStep, results_of_steps
from app.lab.world import CLASSES, Setting, standard_pool
from tests.lab.pure_execution import Stage, to_workflow
from tests.lab.test_world import any_problem

CALENDAR = 3
HARD = (CALENDAR, 1)
TEMPLATES = (
    "Write a plan for the task. Do not solve it.",
    "Weigh the answers against each other.",
    "Solve the problem.",
)


def in_words(random: Random, workers: int = 6) -> Plan:
    """Any plan of the grammar: mostly nonsense."""
    tokens, state = [0], 1
    while tokens[-1] != 2:
        tokens.append(random.choice(WORDS.legal(state, workers)))
        state = WORDS.follow(state, tokens[-1])
    return WORDS.decode(tokens)


def phrase_plan(random: Random, workers: int = 6) -> Plan:
    """A sensible plan in phrases that may be about anything."""
    plan = draw_sensible_plan(random, workers)
    return tuple(step._replace(text=subtask_wording.phrase(random, step.role, random.randrange(6))) for step in plan)


# What words come to.


def test_a_worker_does_what_the_words_ask_for() -> None:
    for role, phrases in subtask_wording.PHRASES.items():
        for text in (*phrases, SUBTASKS[role]):
            assert subtask_wording.role_of(text.format(it="the calendar task")) == role
    assert subtask_wording.role_of("Please verify what was said") == "check"
    assert subtask_wording.role_of("answer") == "solve"


def test_naming_the_task_rightly_helps_and_wrongly_or_not_at_all_harms() -> None:
    pool = standard_pool()
    texts = ("solve the calendar task at once", "solve the task at once", "solve it at once", "solve the algebra task")
    chances = [right((PlanStep(3, "solve", text=text),), HARD, pool) for text in texts]
    assert chances == sorted(chances, reverse=True)
    assert len(set(chances)) == len(texts)
    assert chances[1] == right((PlanStep(3, "solve"),), HARD, pool), "the fixed subtasks point at the task"
    both = "solve the calendar task and the equation"
    assert right((PlanStep(3, "solve", text=both),), HARD, pool) == chances[3]
    assert all(subtask_wording.shift(text, n) == 0 for text in (*SUBTASKS.values(), *TEMPLATES, "") for n in range(4))


@pytest.mark.parametrize(
    ("level", "texts"),
    [
        (2, ("write a plan for this equation", "do this equation step by step by the plan", "check this equation")),
        (1, ("solve it at once", "solve this equation at once", "combine what was said of the algebra task into one")),
        (2, ("write a plan for this question of dates", "do the calendar task step by step", "check it")),
    ],
)
def test_the_executor_finds_what_the_simulator_says_of_words(level: int, texts: tuple[str, str, str]) -> None:
    """Workers that read their messages do as well as the words let them."""
    random, pool, kind = Random(texts[0]), standard_pool(), (CALENDAR, level)
    roles = [subtask_wording.role_of(text) for text in texts]
    access_lists = ((), (0,), (1,)) if roles[0] == "plan" else ((), (), (0, 1))
    plan = tuple(PlanStep(*fields) for fields in zip((5, 3, 0), roles, (True,) * 3, access_lists, texts, strict=True))
    chance, spread = right(plan, kind, pool), math.sqrt(0.25 / 400)
    played = [Stage(plan, pool, any_problem(random, kind), str(n)).play().right for n in range(400)]
    assert abs(sum(played) / 400 - chance) <= 4 * spread
    if "calendar task" not in texts[1]:
        assert chance < right(tuple(step._replace(text="") for step in plan), kind, pool) - 5 * spread


SMALL = standard_pool()[3:]


def test_nothing_in_words_passes_the_optimum_that_names_each_task() -> None:
    random, setting = Random(2), Setting(SMALL)
    best = {}
    for kind, plan in zip(CLASSES, best_named_plans(setting), strict=True):
        best[kind] = outcome(plan, kind, setting).reward
    plain = search.search(setting).best_rewards
    assert all(best[kind] > reward for kind, reward in zip(CLASSES, plain, strict=True))
    for turn in range(2_000):
        plan, kind = phrase_plan(random, 3) if turn % 2 else in_words(random, 3), random.choice(CLASSES)
        assert outcome(plan, kind, setting).reward <= best[kind] + 1e-12


def test_the_teacher_finds_out_what_to_call_a_task_by_what_its_plans_were_worth() -> None:
    setting = Setting(SMALL)
    for place in range(20):
        random = Random(place)
        plan, kind = draw_sensible_plan(random, 3), random.choice(CLASSES)
        plans, worth = teacher.put_in_words(random, plan, partial(reward_of, kind=kind, setting=setting), 8)
        assert worth == pytest.approx(outcome(plans[0], kind, setting).reward)
        assert {subtask_wording.shift(step.text, kind[0]) for plan in plans for step in plan} == {subtask_wording.NAMED}
        assert len(set(plans)) > 1, "in several ways"


def reward_of(plan: Plan, kind: tuple[int, int], setting: Setting) -> float:
    return outcome(plan, kind, setting).reward


# The grammar.


def test_a_plan_in_words_is_read_by_the_service_as_it_was_meant() -> None:
    random = Random(5)
    for turn in range(300):
        lesson = draw_lesson(random, "train")
        plan = phrase_plan(random, len(lesson.pool)) if turn % 2 else in_words(random, len(lesson.pool))
        tokens = WORDS.encode(plan)
        assert WORDS.decode(tokens) == plan
        assert len(tokens) <= WORDS.longest
        names = [worker.name for worker in lesson.pool]
        steps = read_plan_text(WORDS.text(tokens), names, 4)
        intended = [replace(step, subtask=f"Please {step.subtask}.") for step in to_workflow(plan, names).steps]
        assert steps is not None
        assert list(steps) == intended
        assert [subtask_wording.role_of(step.subtask) for step in steps] == [step.role for step in plan]
        assert is_valid(WORDS, lesson, prompt.over_places(plan, lesson.order))
        assert "valid plans: 1 of 1" in format_samples(WORDS, [(lesson, prompt.over_places(plan, lesson.order))])


def test_the_grammar_lets_through_what_some_plan_goes_on_with_and_nothing_else() -> None:
    """Every state: each legal token can be followed to an end that decodes, and no other token can."""
    random = Random(6)
    for _ in range(60):
        tokens, state, workers = [0], 1, random.randint(1, 6)
        while tokens[-1] != 2:
            legal = set(WORDS.legal(state, workers))
            for token in random.sample(range(len(WORDS.tokens)), 12):
                follows = token in legal and can_finish([*tokens, token], WORDS.follow(state, token), workers)
                assert follows == (token in legal)
                if token not in WORDS.legal(state, 6):
                    with pytest.raises(ValueError, match="has no place"):
                        WORDS.decode([*tokens, token])
            tokens.append(random.choice(sorted(legal)))
            state = WORDS.follow(state, tokens[-1])
        assert max(len(step.text.split()) for step in WORDS.decode(tokens)) <= MOST


def can_finish(tokens: list[int], state: int, workers: int) -> bool:
    """Return True if some plan begins with these tokens."""
    while tokens[-1] != 2:
        tokens.append(max(WORDS.legal(state, workers)))
        state = WORDS.follow(state, tokens[-1])
    plan = WORDS.decode(tokens)
    return len(results_of_steps(plan)) == len(plan) and all(step.worker < workers and step.text for step in plan)


def test_a_state_is_a_place_where_roles_are_tokens() -> None:
    assert [ROLES.follow(place, 0) for place in range(LONGEST)] == [*range(1, LONGEST), LONGEST - 1]


# What it reads.
