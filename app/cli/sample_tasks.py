"""The task set that comes with `baton eval`: small tasks that the rehearsal workers can solve, or fail at.

They are drawn from the task families of the rehearsal pool, half of them easy and half of the next level. Against real
models they measure nothing: bring your own. Another choice of tasks is another `VERSION`.
"""

import json
from random import Random

from app.providers.rehearsal.task_families import named, write

VERSION = "eval-2"
FAMILIES = ("sum", "unknown", "divisor", "remainder", "weekday", "sort")
PER_FAMILY = 10
NUMERIC = ("sum", "unknown", "divisor", "remainder")
"""Families whose answers are numbers; the others' are compared as text."""


def lines() -> list[str]:
    """The task set as JSON lines: the same in every process."""
    random = Random(VERSION)
    return [_line(random, name, number) for name in FAMILIES for number in range(PER_FAMILY)]


def _line(random: Random, name: str, number: int) -> str:
    problem = write(random, named(name), level=number % 2, phrasing=0)
    kind = "numeric" if name in NUMERIC else "exact"
    grader = {"kind": kind, "expected": problem.answer}
    return json.dumps({"id": f"{name} {number}", "question": problem.text, "grader": grader})
