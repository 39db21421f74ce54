"""The rules of world 2 that the simulator (`outcome.py`) and the executor (`execution.py`) share: what each step reads
and writes, whose hands an answer has been through, and how answers are combined. It needs no numpy.
"""

from dataclasses import dataclass

from app.lab.world2.constants import DOCUMENT_TOKENS, DOMAINS, Constants, constants
from app.lab.world2.shapes import Shape, ShapeStep
from app.lab.world2.tasks import Task

PARTIAL = ("first", "second")
ANSWERING = ("solve", "reason", "check", "combine")
LANGUAGE = DOMAINS.index("language")


@dataclass(frozen=True, slots=True)
class Size:
    """All of a task that its bill depends on."""

    parts: int
    document: int
    confidential: bool

    @property
    def tokens(self) -> float:
        """Return the input tokens of the task with its document."""
        known = constants()
        return known.question_tokens + known.part_tokens * self.parts + DOCUMENT_TOKENS[self.document]


def size_of(task: Task) -> Size:
    """Return the size of a task."""
    return Size(len(task.parts), task.document, task.confidential)


def parts_handed_over(shape: Shape, step: ShapeStep, parts: int) -> dict[int, int]:
    """Return the place of the earlier step of `step.sees` that has worked out each part apart."""
    found = {}
    for place in step.sees:
        role = shape[place].role
        if role in PARTIAL and PARTIAL.index(role) < parts:
            found[PARTIAL.index(role)] = place
    return found


def output_tokens(role: str, parts: int, handed: int) -> float:
    """Return the output tokens of a step for a task of so many parts, of which so many were handed to it."""
    known = constants()
    brief = known.solve_tokens / 2
    if role in PARTIAL:
        if PARTIAL.index(role) < parts:
            return known.reason_tokens
        return brief
    fixed = {"plan": known.plan_tokens, "digest": known.digest_tokens}
    if role in fixed:
        return fixed[role]
    judged = {"check": known.check_tokens, "combine": known.combine_tokens}
    if role in judged:
        return judged[role] + brief * parts
    each = known.reason_tokens if role == "reason" else known.solve_tokens
    return each * (parts - handed) + brief * handed


def output_tokens_of_step(shape: Shape, step: ShapeStep, parts: int) -> float:
    """Return the output tokens of a step of a shape."""
    return output_tokens(step.role, parts, len(parts_handed_over(shape, step, parts)))


def tokens_passed_on(role: str, parts: int) -> float:
    """Return the input tokens of a step that is shown to a later one: results are passed on, the thoughts behind them
    are not."""
    known = constants()
    if role in ("plan", "digest"):
        return output_tokens(role, parts, 0)
    if role in PARTIAL:
        if PARTIAL.index(role) < parts:
            return known.solve_tokens
        return known.solve_tokens / 2
    return known.solve_tokens * parts


def input_tokens_of_step(shape: Shape, step: ShapeStep, size: Size) -> float:
    """Return the input tokens of a step, were its worker's context long enough."""
    shown = sum([tokens_passed_on(shape[place].role, size.parts) for place in step.sees])
    return (size.tokens if step.user else constants().question_tokens / 2) + shown


def contributing_steps(steps: Shape, at: int, parts: int) -> list[int]:
    """Return the steps whose workers had a hand in the answer of the step `at`, for a task of so many parts."""
    found = [at]
    for seen in steps[at].sees:
        role = steps[seen].role
        if role in ANSWERING or (role in PARTIAL and PARTIAL.index(role) < parts):
            found += contributing_steps(steps, seen, parts)
    return found


def combine_logit(right: int, count: int, known: Constants) -> float:
    """Return the logit of choosing a right answer for a part, if `right` of `count` are, for a worker of mean
    ability."""
    if right == count:
        return known.unanimous
    return known.pair + known.majority * (2 * right - count)
