"""Checkable tasks in plain language: twelve families in four domains, each at three levels.

One template both writes a task and reads it back, and the answer is always computed from what the text says, so a
worker that sees the text can be really right or really wrong. Each family has five phrasings; the last is held out from
training. The last family of each domain is held out altogether.
"""

import re
from collections.abc import Callable, Mapping
from functools import cache
from random import Random

from msgspec import Struct

from app.providers.rehearsal import calendar_tasks, number_tasks, word_tasks
from app.providers.rehearsal.worked_task import Slots, WorkedTask

DOMAINS = ("numbers", "equations", "words", "calendar")
LEVELS = 3
"""Easy, medium, hard."""


class Family(Struct, frozen=True):
    """A kind of task. `draw` makes the slots of a task of one level; `work` computes the answer and a slip from them
    and the level, or raises ValueError for slots that make no task."""

    name: str
    domain: str
    draw: Callable[[Random, int], Slots]
    work: Callable[[Slots], WorkedTask]
    slots: Mapping[str, str]
    """The pattern of each slot's text."""
    phrasings: tuple[str, ...]
    held_out: bool = False


class Problem(Struct, frozen=True):
    """A task that was written or read: `slip` is a plausible wrong answer."""

    text: str
    family: str
    domain: int
    level: int
    answer: str
    slip: str

    @property
    def kind(self) -> tuple[int, int]:
        """Return its class: domain and level, which is all that its workers' odds depend on."""
        return (self.domain, self.level)


def _sum(text: str) -> str:
    return rf"{number_tasks.NUMBER}(?: [-+*] {number_tasks.NUMBER}){{{text}}}"


FAMILIES: tuple[Family, ...] = (
    Family(
        "sum",
        "numbers",
        number_tasks.draw_sum,
        number_tasks.sum_of,
        {"e": _sum("1,8")},
        (
            "What is {e}?",
            "Compute {e}.",
            "Work out the value of {e}.",
            "How much is {e}?",
            "Please evaluate {e} for me.",
        ),
    ),
    Family(
        "divisor",
        "numbers",
        number_tasks.draw_pair,
        number_tasks.divisor,
        {"a": r"\d+", "b": r"\d+"},
        (
            "What is the greatest common divisor of {a} and {b}?",
            "Find the largest number that divides both {a} and {b}.",
            "Which is the highest common factor of {a} and {b}?",
            "Give the greatest number dividing {a} as well as {b}.",
            "What is the biggest divisor that {a} and {b} share?",
        ),
    ),
    Family(
        "remainder",
        "numbers",
        number_tasks.draw_pair,
        number_tasks.remainder,
        {"a": r"\d+", "b": r"\d+"},
        (
            "What is the remainder when {a} is divided by {b}?",
            "Divide {a} by {b}: what is left over?",
            "Find the remainder of {a} after division by {b}.",
            "Compute {a} modulo {b}.",
            "How much of {a} is left by {b}?",
        ),
        held_out=True,
    ),
    Family(
        "unknown",
        "equations",
        number_tasks.draw_equation,
        number_tasks.equation,
        {"q": r"[-+*()=\dxy ]+(?: and [-+*()=\dxy ]+)?"},
        (
            "Solve {q} for x.",
            "What is x if {q}?",
            "Find the x for which {q}.",
            "Which x satisfies {q}?",
            "Determine x, given that {q}.",
        ),
    ),
    Family(
        "thought",
        "equations",
        number_tasks.draw_chain,
        number_tasks.chain,
        {"s": r"[a-z\d, ]+?", "c": r"-?\d+"},
        (
            "I think of a number, {s}, and get {c}. What is the number?",
            "A number is changed like this: {s}. The result is {c}. Find the number.",
            "Take an unknown number, {s}: it gives {c}. Which number is it?",
            "After these steps, {s}, a number has become {c}. What was it?",
            "Guess my number: when I {s}, I end with {c}.",
        ),
    ),
    Family(
        "neighbours",
        "equations",
        number_tasks.draw_neighbours,
        number_tasks.neighbours,
        {"n": r"\d+", "t": r"\d+"},
        (
            "The sum of {n} consecutive integers is {t}. What is the smallest?",
            "{n} integers in a row add up to {t}. Find the first.",
            "Find the least of {n} consecutive integers whose sum is {t}.",
            "Which integer starts {n} consecutive ones that sum to {t}?",
            "{n} neighbouring integers total {t}: which is lowest?",
        ),
        held_out=True,
    ),
    Family(
        "sort",
        "words",
        word_tasks.draw_list,
        word_tasks.sort,
        {"w": word_tasks.LIST},
        (
            "Sort these words: {w}.",
            "Put the words {w} in alphabetical order.",
            "Arrange alphabetically: {w}.",
            "List the following words from a to z: {w}.",
            "Bring these words into the order of a dictionary: {w}.",
        ),
    ),
    Family(
        "count",
        "words",
        word_tasks.draw_count,
        word_tasks.count,
        {"l": r"[a-z]", "w": word_tasks.LIST},
        (
            "How many times does the letter {l} occur in these words: {w}?",
            "Count the letter {l} in: {w}.",
            "How often does {l} appear in the words {w}?",
            "Tell how many letters {l} there are in {w}.",
            "What is the number of occurrences of {l} in the text {w}?",
        ),
    ),
    Family(
        "reverse",
        "words",
        word_tasks.draw_list,
        word_tasks.reverse,
        {"w": word_tasks.LIST},
        (
            "Reverse the order of these words: {w}.",
            "Write the words {w} in reverse order.",
            "Turn this list of words around: {w}.",
            "Give these words from last to first: {w}.",
            "Read out these words backwards, word by word: {w}.",
        ),
        held_out=True,
    ),
    Family(
        "between",
        "calendar",
        calendar_tasks.draw_two,
        calendar_tasks.count_days_between,
        {"a": calendar_tasks.DATE, "b": calendar_tasks.DATE},
        (
            "How many days are there from {a} to {b}?",
            "Count the days between {a} and {b}.",
            "What is the number of days from {a} until {b}?",
            "How many days lie between {a} and {b}?",
            "If today is {a}, in how many days is it {b}?",
        ),
    ),
    Family(
        "weekday",
        "calendar",
        calendar_tasks.draw_one,
        calendar_tasks.weekday,
        {"a": calendar_tasks.DATE},
        (
            "What day of the week is {a}?",
            "On which weekday does {a} fall?",
            "Which day of the week is the date {a}?",
            "Name the weekday of {a}.",
            "Is {a} a Monday, a Tuesday, or which day?",
        ),
    ),
    Family(
        "away",
        "calendar",
        calendar_tasks.draw_away,
        calendar_tasks.add_days,
        {"n": r"\d+", "a": calendar_tasks.DATE},
        (
            "Which date is {n} days after {a}?",
            "What is the date {n} days later than {a}?",
            "Add {n} days to {a}: which date is it?",
            "Find the date that comes {n} days after {a}.",
            "Starting from {a}, where in the calendar are we {n} days on?",
        ),
        held_out=True,
    ),
)


def write(random: Random, family: Family, level: int, phrasing: int) -> Problem:
    """Return a task of this family."""
    slots = family.draw(random, level)
    answer, slip, actual_level = family.work(slots)
    if actual_level != level:
        raise ValueError(f"{family.name} drew level {actual_level} for {level}")
    text = family.phrasings[phrasing].format(**slots)
    return Problem(text, family.name, DOMAINS.index(family.domain), level, answer, slip)


def read(text: str) -> Problem | None:
    """Return the task in this text, with its answer computed; None if no phrasing fits."""
    for family, pattern in _readers():
        match = pattern.fullmatch(text.strip())
        if match is None:
            continue
        try:
            answer, slip, level = family.work(match.groupdict())
        except ValueError:
            continue
        return Problem(text, family.name, DOMAINS.index(family.domain), level, answer, slip)
    return None


def find_family(name: str) -> Family:
    """Return the family with this name; KeyError if there is none."""
    return {family.name: family for family in FAMILIES}[name]


def is_reserved_for_evaluation(problem: Problem) -> bool:
    """Return True for a task of a family, or in a phrasing, that training never meets."""
    family = find_family(problem.family)
    seen = [pattern for owner, pattern in _readers() if owner is family][:-1]
    return family.held_out or not any(pattern.fullmatch(problem.text.strip()) for pattern in seen)


@cache
def _readers() -> tuple[tuple[Family, re.Pattern[str]], ...]:
    return tuple((family, _pattern(family, phrasing)) for family in FAMILIES for phrasing in family.phrasings)


def _pattern(family: Family, phrasing: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w)\}", phrasing)
    pieces = [f"(?P<{part}>{family.slots[part]})" if place % 2 else re.escape(part) for place, part in enumerate(parts)]
    return re.compile("".join(pieces))
