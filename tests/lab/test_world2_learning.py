"""World 2: a policy that learns from verdicts alone; its derivatives, its reading, and its model of workflows."""

from random import Random

import numpy as np
import pytest

from app.lab.world2 import tasks as composed
from app.lab.world2.bounds import OptimumByCards
from app.lab.world2.gradients import Value
from app.lab.world2.learning import LearnedPolicy, Learner, Row, _Chances
from app.lab.world2.reading import Reader
from app.lab.world2.shapes import Plan, catalogue
from app.lab.world2.workers import pool, workers


@pytest.fixture(scope="module")
def reader() -> Reader:
    """A reader of labelled texts."""
    return Reader(composed.tasks("train", "reader", 400))


def test_a_reader_finds_the_parts_and_the_confidence_of_texts_that_it_has_not_seen(reader: Reader) -> None:
    found = parts = right = confident = 0
    for task in composed.tasks("fresh", "reader", 80):
        read = reader.read(task)
        assert sum(one.weight for one in reader.readings(task)) == pytest.approx(1)
        parts += len(task.parts)
        for place, part in zip(read.families, task.parts, strict=True):
            right += reader.families[place].name == part.family.name
        confident += read.confidential == task.confidential
        found += 1
    assert right / parts > 0.75
    assert confident / found > 0.9


def test_derivatives_are_those_of_small_differences() -> None:
    random = np.random.default_rng(0)
    start, places = random.normal(size=6), np.array([0, 3, 3, 5])

    def loss(row: np.ndarray) -> Value:
        value = Value(row)
        seen = value.at(places)
        chances = (seen.column() * np.array([[1.0, 2.0]]) - 0.5).logistic()
        return (1 - chances * seen.column()).mean_of_rows()

    first = Value(start)
    seen = first.at(places)
    result = (1 - (seen.column() * np.array([[1.0, 2.0]]) - 0.5).logistic() * seen.column()).mean_of_rows()
    result.backward(np.ones(4))
    for place in range(6):
        step = np.zeros(6)
        step[place] = 1e-6
        difference = (loss(start + step).array.sum() - loss(start - step).array.sum()) / 2e-6
        assert first.gradient is not None
        assert first.gradient[place] == pytest.approx(difference, abs=1e-6)


def test_what_a_learner_fits_is_what_it_then_expects_of_every_shape() -> None:
    """The chances whose derivatives are taken are those by which plans are chosen, for any figures."""
    random = Random(3)
    learner = Learner(0, [], texts=150)
    noise = np.random.default_rng(2)
    learner.figures = {name: array + noise.normal(0, 0.2, array.shape) for name, array in learner.figures.items()}
    chosen = pool(random)
    members = [[one.name for one in workers(unseen=False)].index(one.name) for one in chosen]
    rewards = learner.believed(chosen)
    for name, steps in catalogue().items():
        (task,) = composed.tasks("train", name, 1)
        read = learner.reader.read(task)
        plan = Plan(name, tuple(random.randrange(len(chosen)) for _ in steps))
        row = Row(name, read, tuple(members[worker] for worker in plan.workers), passed=True)
        figures = {key: Value(array) for key, array in learner.figures.items()}
        fitted = _Chances(figures, steps, len(read.families), learner._arrays([row]), learner._cards).right()
        expected = rewards.right(name, learner.understood(task, read)).mean(axis=0)[plan.workers]
        assert fitted.array[0] == pytest.approx(float(expected)), name


def test_verdicts_teach_what_workers_can_do_beyond_their_cards() -> None:
    """After 300 executions that always pass for one worker and fail for all others, that worker is believed in."""
    random = Random(0)
    chosen = pool(random)
    learner = Learner(0, [chosen], texts=150)
    places = [[one.name for one in workers(unseen=False)].index(one.name) for one in chosen]
    read = learner.reader.read(composed.tasks("train", "one", 1)[0])
    for at in range(300):
        worker = at % len(places)
        learner._rows.append(Row("solve", read, (places[worker],), passed=worker == 1))
    learner._learn()
    believed = [worker.ability for worker in learner.believed(chosen).pool]
    assert believed.index(max(believed)) == 1
    assert OptimumByCards().name != LearnedPolicy(learner, 300).name
