"""The lessons of a conductor of words: the service's own prompt, plans as JSON, and no worker to recognise."""

import json
from random import Random

import pytest
from msgspec.structs import replace

from app.conductor.protocol import Brief
from app.conductor.styles import STYLES
from app.core.message.chat import Message, Text
from app.core.message.chat import Task as Request
from app.core.plan.proposals import by_ordinal, read_plan
from app.core.pool import catalog
from app.core.pool.catalog import Catalog, Limits
from app.core.rating.calibration import Trial, add_measurements
from app.lab.world2.constants import DOMAINS
from app.lab.world2.outcome import Rewards, all_plans, tokens_of_all_plans
from app.lab.world2.rules import Size, size_of
from app.lab.world2.shapes import MOST_STEPS, Plan, catalogue, workflow
from app.lab.world2.tasks import draw_tasks
from app.lab.world2.words_lessons import TOKEN_PRICE, Teacher, as_catalog, parse_plan, plan_text, prompt
from app.lab.world2.workers import Worker, draw_pool, worker_profiles

ORDER = (2, 0, 1)


def test_each_plan_of_the_world_is_written_as_the_service_reads_it() -> None:
    names = [f"worker {place}" for place in range(3)]
    shuffled = by_ordinal([names[place] for place in ORDER])
    for shape, steps in catalogue().items():
        plan = Plan(shape, (2, 0, 1, 2)[: len(steps)])
        text = plan_text(plan, ORDER)
        plan_read = read_plan(json.loads(text), shuffled, MOST_STEPS)
        assert [replace(step, answers=False) for step in plan_read] == list(workflow(plan, tuple(names)).steps)
        assert parse_plan(text, ORDER) == plan


@pytest.mark.parametrize("text", ["", "{", '{"steps":[]}', '{"steps":[{"worker":3,"subtask":"x","access":["user"]}]}'])
def test_what_is_no_plan_of_the_world_is_none(text: str) -> None:
    assert parse_plan(text, ORDER) is None


def test_a_prompt_is_what_the_service_sends_once_the_workers_are_calibrated() -> None:
    """The trials that a card stands for come to the numbers that the trainer shows."""
    chosen, task = draw_pool(Random(5), unseen_workers=True), draw_tasks("fresh", "words", 1)[0]
    order = Random(6).sample(range(len(chosen)), len(chosen))
    bare = {worker.name: _without_rates(worker) for worker in chosen}
    trials = [trial for worker in chosen for trial in _trials(worker)]
    calibrated = add_measurements(Catalog({}, bare, {}, {}, ""), trials).workers
    brief = Brief(
        Request((Message("user", (Text(task.text),)),)), tuple(calibrated[chosen[n].name] for n in order), Limits(), 9
    )
    cards, question = STYLES["cards"].messages(brief)
    assert (cards.text, question.text) == (prompt(chosen, order), task.text)


def test_a_lesson_shows_nobody_of_the_world_and_believes_in_cards_alone() -> None:
    lesson = Teacher(0, 0, texts=100).lesson(Random(1), 2)
    everyone = {worker.card for unseen in (False, True) for worker in worker_profiles(unseen=unseen)}
    assert everyone.isdisjoint(worker.card for worker in lesson.pool)
    for posed in lesson.tasks:
        assert sum(posed.chances) == pytest.approx(1)
        assert set(posed.plans) <= set(all_plans(len(lesson.pool)))


def test_lessons_and_exam_depend_on_the_seed_alone() -> None:
    teacher = Teacher(0, 0, texts=100)
    alone = teacher.lessons("a seed", 3, 1)
    assert alone == teacher.lessons("a seed", 3, 1, processes=2)
    assert alone[0].pool != alone[1].pool
    exam = teacher.exam("another seed", 2, 2)
    assert [len(lesson.worth) for lesson in exam] == [len(all_plans(len(lesson.pool))) for lesson in exam]
    assert {lesson.text for lesson in exam}.isdisjoint(posed.text for lesson in alone for posed in lesson.tasks)


def test_the_teacher_pays_for_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a plan's worth in the exam, only the price of its tokens is not what is believed of its reward."""
    teacher = Teacher(0, 0, texts=100)
    (priced,) = teacher.exam("a seed", 1, 1)
    monkeypatch.setattr("app.lab.world2.words_lessons.TOKEN_PRICE", 0.0)
    (free,) = teacher.exam("a seed", 1, 1)
    rewards = Rewards(priced.pool)
    paid = [(free.worth[plan] - worth) / TOKEN_PRICE for plan, worth in priced.worth.items()]
    sizes = [Size(parts, document, confidential=False) for parts in (1, 2, 3) for document in (0, 1, 2)]
    assert [size for size in sizes if paid == pytest.approx(tokens_of_all_plans(rewards, size).tolist())]


def test_tokens_are_those_that_workers_read_and_write() -> None:
    chosen = draw_pool(Random(5))
    task = next(task for task in draw_tasks("fresh", "words", 20) if not task.document and len(task.parts) == 1)
    rewards, size = Rewards(chosen), size_of(task)
    alone = rewards.tokens("solve", size)[0]
    assert alone == size.tokens + 60
    assert rewards.tokens("solve+solve combine", size)[0, 1, 2] > 3 * alone
    assert len(tokens_of_all_plans(rewards, size)) == len(all_plans(len(chosen)))


def _without_rates(worker: Worker) -> catalog.Worker:
    catalog_worker = as_catalog(worker)
    return replace(catalog_worker, card=replace(catalog_worker.card, measured=()))


def _trials(worker: Worker) -> list[Trial]:
    trials = []
    for domain, right in zip(DOMAINS, worker.card.right, strict=True):
        for number in range(worker.card.questions):
            score = float(number < right)
            task = f"{domain} {number}"
            trials.append(Trial(worker.name, worker.name, "1", task, domain, domain, 0, "", "", 1.0, score, 0, 1.0))
    return trials
