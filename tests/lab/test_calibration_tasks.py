"""The built-in tasks: all families at all levels, the same for ever, and graded fairly however an answer is written."""

import hashlib
import json
from collections import Counter
from random import Random

import pytest

from app.lab.calibration_tasks import EACH, MOST, VERSION, make_built_in_tasks, rule
from app.providers.rehearsal.task_families import FAMILIES, LEVELS, read, write


def test_every_family_is_asked_at_every_level() -> None:
    tasks = make_built_in_tasks()
    assert Counter((task.family, task.level) for task in tasks) == {
        (family.name, level): EACH for family in FAMILIES for level in range(LEVELS)
    }
    assert len({task.name for task in tasks}) == len({task.question for task in tasks}) == 72
    assert make_built_in_tasks(MOST)[:72] == tasks, (
        "fewer tasks are the first of more, so that a calibration can be extended"
    )


def test_a_version_means_the_same_tasks_for_ever() -> None:
    content = json.dumps([(task.name, task.question) for task in make_built_in_tasks(MOST)])
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    assert (VERSION, digest) == ("calibration-1", "2b450300faa92e40")


def test_right_answers_pass_and_slips_do_not() -> None:
    random = Random(0)
    for family in FAMILIES:
        for level in range(LEVELS):
            problem = write(random, family, level, random.randrange(5))
            grader = rule(problem)
            assert grader.grade(problem.answer).score == 1.0
            assert grader.grade(f"First I look at it.\n\n**Answer:** {problem.answer}").score == 1.0
            assert grader.grade(f"Answer: {problem.slip}").score == 0.0, (problem.text, problem.slip)


@pytest.mark.parametrize(
    ("question", "answers"),
    [
        (
            "Which date is 16 days after 24 March 2020?",
            ["9 April 2020", "2020-04-09", "April 9, 2020", "09 April 2020"],
        ),
        ("Sort these words: pear, apple, fig.", ["apple, fig, pear", "apple fig pear", "apple, fig and pear"]),
        ("Solve 4x + 6 = 38 for x.", ["8", "x = 8", "$x = 8$", "8.0"]),
        ("What day of the week is 22 November 2026?", ["Sunday", "sunday", "*Sunday*"]),
    ],
)
def test_a_right_answer_may_be_written_in_many_ways(question: str, answers: list[str]) -> None:
    problem = read(question)
    assert problem is not None
    for answer in answers:
        assert rule(problem).grade(f"Answer: {answer}").score == 1.0, answer
