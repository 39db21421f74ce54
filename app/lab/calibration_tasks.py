"""The built-in tasks of a calibration: every family at every level, the same for all workers and for ever.

A change of the tasks, of the words around them or of what counts as right is another `VERSION`: trials of two versions
are never compared. The question stands alone in the user's message, and what form the answer must have in the system's.
"""

import re
from calendar import month_name
from random import Random

from msgspec import Struct

from app.core.message.chat import Message, Task, Text
from app.lab.grading import Exact, Grader, grader
from app.providers.rehearsal.dates import all_dates
from app.providers.rehearsal.task_families import DOMAINS, FAMILIES, LEVELS, Family, Problem, write

VERSION = "calibration-1"
EACH, MOST = 2, 3
"""Tasks of each family and level: 72 in all, or 108 at the most."""
FORM = (
    "Answer the user's question. You may work it out first. Then write the result, and nothing else, in a last line "
    "that begins with 'Answer:'. A number is written in digits and alone, words are separated by commas, and a date is "
    "written like 5 March 2024."
)
WHOLE = re.compile(r"-?\d+")


class BuiltIn(Struct, frozen=True):
    """A task, its name within the version, and the rule that grades its answers."""

    name: str
    domain: str
    family: str
    level: int
    question: str
    grader: Grader
    version: str = VERSION
    """The version of the tasks that it belongs to."""
    messages: tuple[Message, ...] = ()
    """The whole conversation of a task that is not built in."""

    @property
    def task(self) -> Task:
        """Return the task as a worker is asked it."""
        if self.messages:
            return Task(self.messages)
        return Task((Message("system", (Text(FORM),)), Message("user", (Text(self.question),))))


def make_built_in_tasks(each: int = EACH) -> list[BuiltIn]:
    """Return `each` tasks of every family and level; a smaller number gives the first ones of a larger."""
    cells = [(family, level) for family in FAMILIES for level in range(LEVELS)]
    return [_task(family, level, number) for number in range(each) for family, level in cells]


def _task(family: Family, level: int, number: int) -> BuiltIn:
    name = f"{family.name}-{level}-{number}"
    random = Random(f"{VERSION} {name}")
    problem = write(random, family, level, random.randrange(len(family.phrasings)))
    return BuiltIn(name, DOMAINS[problem.domain], family.name, level, problem.text, rule(problem))


def rule(problem: Problem) -> Grader:
    """Return the rule for right answers: the number, or the words or the date however they are written."""
    answer = problem.answer
    if WHOLE.fullmatch(answer):
        return grader({"kind": "numeric", "expected": answer})
    if problem.family in ("sort", "reverse"):
        words = answer.split(", ")
        return Exact((answer, ",".join(words), " ".join(words), f"{', '.join(words[:-1])} and {words[-1]}"))
    return Exact((answer, *_dates(answer)))


def _dates(answer: str) -> list[str]:
    """Return other ways to write a date; an empty list for what is no date."""
    dates = all_dates(answer.lower())
    if not dates:
        return []
    day, month = dates[0], month_name[dates[0].month]
    return [day.isoformat(), f"{month} {day.day}, {day.year}", f"{day.day:02d} {month} {day.year}"]
