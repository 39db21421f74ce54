"""Graders: what counts as right, what does not, and that no answer breaks them."""

import time
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.lab.grading import FIELDS, Grade, conclusion, grader, number_in

SCHEMA = {"type": "object", "required": ["x"], "properties": {"x": {"type": "integer"}}}
SPECS: dict[str, dict[str, Any]] = {
    "exact": {"kind": "exact", "expected": "Paris"},
    "numeric": {"kind": "numeric", "expected": "42"},
    "choice": {"kind": "choice", "expected": "B", "options": ["London", "Paris", "Rome"]},
    "regex": {"kind": "regex", "pattern": "(a+)+$"},
    "schema": {"kind": "schema", "schema": SCHEMA},
}


@pytest.mark.parametrize(
    ("spec", "answer", "right"),
    [
        (SPECS["exact"], "Paris", True),
        (SPECS["exact"], '  "paris".\n', True),
        (SPECS["exact"], "I thought of Rome first.\nThe answer is **Paris**.", True),
        (SPECS["exact"], "Paris or Rome", False),
        (SPECS["exact"], "Not Paris", False),
        (SPECS["exact"] | {"case": True}, "paris", False),
        (SPECS["exact"] | {"expected": ["Rome", "Paris"]}, "#### Paris", True),
        (SPECS["numeric"], "42", True),
        (SPECS["numeric"], "First 7, then 35; so 42.", True),
        (SPECS["numeric"], "The answer is 42 apples, in 3 bags.", True),
        (SPECS["numeric"], "The answer is 6 * 7 = 42", True),
        (SPECS["numeric"], "So it is \\boxed{42}, after 100 steps.", True),
        (SPECS["numeric"], "The answer is 41. Or is it 42?", False),
        (SPECS["numeric"], "It is 4.2e1", True),
        (SPECS["numeric"], "It is 84/2", True),
        (SPECS["numeric"], "none", False),
        (SPECS["numeric"], "1/0", False),
        (SPECS["numeric"] | {"expected": -1234.5}, "Answer: \u22121,234.50 dollars", True),
        (SPECS["numeric"] | {"tolerance": "0.5"}, "42.5", True),
        (SPECS["numeric"] | {"tolerance": "0.5"}, "42.51", False),
        (SPECS["numeric"] | {"relative": 0.1}, "46.2", True),
        (SPECS["numeric"] | {"relative": 0.1}, "46.3", False),
        (SPECS["choice"], "B", True),
        (SPECS["choice"], "(b)", True),
        (SPECS["choice"], "Paris", True),
        (SPECS["choice"], "The answer is B, since A is wrong.", True),
        (SPECS["choice"], "Answer: London", False),
        (SPECS["choice"], "A city in France: option B", True),
        (SPECS["choice"], "(A) is tempting, but I take (B)", True),
        (SPECS["choice"], "A capital is asked for.", False),
        (SPECS["choice"], "D", False),
        (SPECS["numeric"] | {"expected": "1/2"}, "So \\boxed{\\frac{1}{2}}", True),
        (SPECS["numeric"] | {"expected": 1}, "So \\boxed{\\frac{1}{2}}", False),
        (SPECS["numeric"] | {"expected": "-5/2"}, "So \\boxed{-2\\dfrac{1}{2}}", True),
        (SPECS["numeric"] | {"expected": 1234}, "So \\boxed{1{,}234}", True),
        (SPECS["numeric"] | {"expected": 1}, "So \\boxed{1{,}234}", False),
        (SPECS["numeric"] | {"expected": ".5"}, "We have 3 items. The answer is .5", True),
        (SPECS["numeric"] | {"expected": 3}, "We have 3 items. The answer is .5", False),
        (SPECS["numeric"] | {"expected": 3}, "We have 3 items. The answer is x2", False),
        (SPECS["numeric"] | {"expected": 3}, "We have 3 items. The answer is as above", True),
        (SPECS["choice"] | {"expected": "A"}, "The answer is a city on the Seine: Paris", False),
        (SPECS["choice"], "The answer is b, since A is wrong.", True),
        (SPECS["choice"], "The answer is, I believe, B", True),
        (SPECS["choice"] | {"expected": "C"}, "A) London\nB) Paris\nC) Rome\nIt is in France.", False),
        (SPECS["choice"], "A) London\nB) Paris\nC) Rome\nI take (B).", True),
        (SPECS["choice"], "(A) London\n(B) Paris\n(C) Rome\nIn France:\nB) Paris", True),
        ({"kind": "choice", "expected": "d"}, "D.", True),
        ({"kind": "regex", "pattern": "(?i)\\byes\\b"}, "Well, YES", True),
        ({"kind": "regex", "pattern": "^yes$"}, "Well, yes", False),
        ({"kind": "regex", "pattern": 'a "\\\\" b\n'}, 'x a "\\" b\n', True),
        (SPECS["schema"], '{"x": 1}', True),
        (SPECS["schema"], '```json\n{"x": 1}\n```', True),
        (SPECS["schema"], '{"x": "1"}', False),
        (SPECS["schema"], 'Here: {"x": 1}', False),
    ],
)
def test_what_is_right(spec: dict[str, Any], answer: str, right: bool) -> None:
    assert (grader(spec).grade(answer).score == 1.0) is right


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (None, "must be an object whose kind is one of exact"),
        ({"kind": "taste"}, "must be an object whose kind is one of exact"),
        ({"kind": "exact"}, "needs expected"),
        ({"kind": "exact", "expected": []}, "needs expected"),
        ({"kind": "exact", "expected": [""]}, "needs expected"),
        ({"kind": "exact", "expected": "a", "case": 1}, "true or false"),
        ({"kind": "exact", "expected": "a", "pattern": "b"}, "has no field pattern"),
        ({"kind": "numeric", "expected": "many"}, "needs expected"),
        ({"kind": "numeric", "expected": True}, "needs expected"),
        ({"kind": "numeric", "expected": float("nan")}, "needs expected"),
        ({"kind": "numeric", "expected": "1/0"}, "needs expected"),
        ({"kind": "numeric", "expected": 1, "tolerance": -1}, "must not be negative"),
        ({"kind": "choice", "expected": "BB"}, "one letter from A to Z"),
        ({"kind": "choice", "expected": "C", "options": ["x", "y"]}, "one letter from A to B"),
        ({"kind": "choice", "expected": "A", "options": "xy"}, "must be a list"),
        ({"kind": "regex", "pattern": "("}, "needs pattern"),
        ({"kind": "schema", "schema": {"type": "thing"}}, "cannot be used"),
        ({"kind": "schema"}, "needs schema"),
    ],
)
def test_a_grader_that_is_none_is_refused_with_words(spec: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        grader(spec)


def test_unit_tests_get_the_code_of_the_answer_and_are_run_by_whoever_asks() -> None:
    ran: list[tuple[str, str, float]] = []

    def execute(code: str, tests: str, seconds: float) -> str | None:
        ran.append((code, tests, seconds))
        return None if "right" in code else "a test fails"

    spec = {"kind": "tests", "tests": "assert f()", "seconds": 2}
    result = grader(spec, execute)
    answers = [
        ("right = 1", "right = 1"),
        ("```\nold\n```\nBetter:\n```python\nright\n```\n```sh\nrun it\n```", "right\n"),
        ("```\nold\n```\n```js\nwrong\n```", "wrong\n"),
        ("```python\nnever closed right", "```python\nnever closed right"),
    ]
    for answer, code in answers:
        assert result.grade(answer) == (Grade(1.0, "right") if "right" in code else Grade(0.0, "a test fails"))
        assert ran[-1] == (code, "assert f()", 2.0)
    for wrong in ({"tests": " "}, {"seconds": 0}, {"seconds": 61}, {"seconds": True}):
        with pytest.raises(ValueError, match="tests grader"):
            grader(spec | wrong, execute)
    for nothing in (
        "def check(f):\n    assert f()",
        "import os",
        "class Checks:\n    def test_it(self):\n        assert 0",
    ):
        with pytest.raises(ValueError, match="check nothing"):
            grader(spec | {"tests": nothing}, execute)
    for something in ("def check(f):\n    assert f()\ncheck(f)", "async def test_it():\n    assert f()"):
        assert grader(spec | {"tests": something}, execute).kind == "tests"
    with pytest.raises(ValueError, match="no Python"):
        grader(spec | {"tests": "assert ("}, execute)
    with pytest.raises(ValueError, match="nothing is run here"):
        grader(spec)
    assert set(FIELDS) == {*SPECS, "tests"}


def test_conclusions_and_numbers() -> None:
    assert conclusion("\\boxed{1} then \\boxed{\\frac{1}{2}}") == "\\frac{1}{2}"
    assert conclusion("\\boxed{1") is None
    assert conclusion("Answer: no. The answer is: yes") == "yes"
    assert conclusion("An answer would be good") is None
    assert number_in("1,234,567") == 1_234_567
    assert number_in("3 / 4") == Fraction(3, 4)
    assert number_in("version v2.10 of x7") is None


@pytest.mark.parametrize("kind", sorted(SPECS))
def test_half_a_pair_of_surrogates_breaks_no_grader(kind: str) -> None:
    assert grader(SPECS[kind]).grade('{"x": "\ud800"}').score == 0.0


@settings(max_examples=150, deadline=None)
@given(st.text(), st.sampled_from(sorted(SPECS)))
def test_no_answer_breaks_a_grader(answer: str, kind: str) -> None:
    grade = grader(SPECS[kind]).grade(answer)
    assert isinstance(grade, Grade)
    assert grade.score in (0.0, 1.0)


@pytest.mark.parametrize("kind", sorted(SPECS))
@pytest.mark.parametrize(
    "answer",
    [
        "a" * 50_000 + "!",
        "9" * 100_000,
        "1," * 50_000,
        "1e999 " * 9_000,
        "answer is " * 9_000,
        "{" * 90_000,
        "\n(A)" * 50_000,
    ],
)
def test_long_answers_are_graded_in_bounded_time(kind: str, answer: str) -> None:
    began = time.process_time()
    grader(SPECS[kind]).grade(answer)
    assert time.process_time() - began < 5.0, "its mechanism needs milliseconds"
