"""The built-in task set of `baton eval`: small tasks that the rehearsal workers can solve, or fail at.

Every answer is computed here, from the figures of the question and by other code than the workers'. At least half of
the tasks are hard for the rehearsal pool. They say nothing about real models; use a task set of your own for those.
"""

import calendar
import json
import math
from collections.abc import Callable, Mapping
from datetime import date, timedelta
from random import Random
from typing import Any

PER_KIND = 10
WORDS = (
    "amber", "basin", "candle", "delta", "ember", "fjord", "garnet", "harbor", "indigo", "jasper", "kettle", "lantern",
    "meadow", "nectar", "orchid", "pebble", "quartz", "raven", "saddle", "timber",
)  # fmt: skip
ROMAN = ((1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"), (40, "XL"), (10, "X"))
ROMAN_SMALL = ((9, "IX"), (5, "V"), (4, "IV"), (1, "I"))

Drawn = tuple[str, Mapping[str, Any]]
"""A question and its grader."""


def lines() -> list[str]:
    """Return the task set as JSON lines, which never change."""
    random = Random("baton eval")
    kinds: Mapping[str, Callable[[Random, bool], Drawn]] = {
        "arithmetic": _arithmetic,
        "equations": _equation,
        "number theory": _divisor,
        "roman numerals": _roman,
        "dates": _days,
        "words": _sorted,
    }
    found = []
    for kind, draw in kinds.items():
        for n in range(PER_KIND):
            question, grader = draw(random, n % 2 == 1)
            found.append(json.dumps({"id": f"{kind} {n}", "question": question, "grader": grader}))
    return found


def _number(value: int) -> Mapping[str, Any]:
    return {"kind": "numeric", "expected": value}


def _arithmetic(random: Random, hard: bool) -> Drawn:
    a, b, c = random.randint(12, 99), random.randint(12, 99), random.randint(2, 9)
    if hard:
        d = random.randint(1_001, 9_999)
        return f"What is ({a} + {b}) * {c} - {d}?", _number((a + b) * c - d)
    return f"What is {a} * {c} + {b}?", _number(a * c + b)


def _equation(random: Random, hard: bool) -> Drawn:
    x, a, b = random.randint(2, 30), random.randint(4, 9), random.randint(1, 40)
    if hard:
        c = a - random.randint(1, 3)
        return f"Solve {a}x - {b} = {c}x + {(a - c) * x - b} for x.", _number(x)
    return f"Solve {a}x + {b} = {a * x + b}.", _number(x)


def _divisor(random: Random, hard: bool) -> Drawn:
    factor = random.randint(3, 40) * (37 if hard else 1)
    a, b = factor * random.randint(2, 30), factor * random.randint(31, 60)
    return f"What is the greatest common divisor of {a} and {b}?", _number(math.gcd(a, b))


def _roman(random: Random, hard: bool) -> Drawn:
    number = left = random.randint(101, 3_000) if hard else random.randint(4, 99)
    text = ""
    for value, letters in (*ROMAN, *ROMAN_SMALL):
        text += letters * (left // value)
        left %= value
    return f"Write {number} in Roman numerals.", {"kind": "exact", "expected": text}


def _days(random: Random, hard: bool) -> Drawn:
    day = date(random.randint(1901, 1999) if hard else random.randint(2020, 2030), 1, 1)
    day += timedelta(days=random.randrange(365))
    names = list(calendar.day_name)
    return f"What day of the week was {day.isoformat()}?", {"kind": "exact", "expected": names[day.weekday()]}


def _sorted(random: Random, hard: bool) -> Drawn:
    words = random.sample(WORDS, 8 if hard else 4)
    asked = ", ".join(words)
    return f"Sort these words alphabetically: {asked}.", {"kind": "exact", "expected": ", ".join(sorted(words))}
