"""The rules of world 2 that the simulator (`outcome.py`) and the executor (`execution.py`) share: what each step reads
and writes, whose hands an answer has been through, and how answers are combined. It needs no numpy.
"""

from msgspec import Struct

from app.lab.world2.constants import DOCUMENT_TOKENS, DOMAINS, Constants, constants
from app.lab.world2.shapes import Shape, ShapeStep
from app.lab.world2.tasks import Task

PARTIAL = ("first", "second")
ANSWERING = ("solve", "reason", "check", "combine")
LANGUAGE = DOMAINS.index("language")


class Size(Struct, frozen=True):
    """All of a task that its bill depends on."""

    parts: int
    document: int
    confidential: bool

    @property
    def tokens(self) -> float:
        """Return the input tokens of the task with its document."""
        world = constants()
        return world.question_tokens + world.part_tokens * self.parts + DOCUMENT_TOKENS[self.document]


def size_of(task: Task) -> Size:
    """Return the size of a task."""
    return Size(len(task.parts), task.document, task.confidential)


def parts_handed_over(shape: Shape, step: ShapeStep, parts: int) -> dict[int, int]:
    """Return the place of the earlier step of `step.sees` that has worked out each part apart."""
    step_of_part = {}
    for place in step.sees:
        role = shape[place].role
        if role in PARTIAL and PARTIAL.index(role) < parts:
            step_of_part[PARTIAL.index(role)] = place
    return step_of_part


def shows_plan(shape: Shape, step: ShapeStep) -> bool:
    """Return True if a step sees the plan of an earlier one."""
    for place in step.sees:
        if shape[place].role == "plan":
            return True
    return False


def answers_seen(shape: Shape, step: ShapeStep) -> list[int]:
    """Return the places of the earlier steps with a whole answer that a step sees."""
    return [place for place in step.sees if shape[place].role in ANSWERING]


def output_tokens(role: str, parts: int, handed: int) -> float:
    """Return the output tokens of a step for a task of so many parts, of which so many were handed to it."""
    world = constants()
    brief = world.solve_tokens / 2
    if role in PARTIAL:
        if PARTIAL.index(role) < parts:
            return world.reason_tokens
        return brief
    fixed = {"plan": world.plan_tokens, "digest": world.digest_tokens}
    if role in fixed:
        return fixed[role]
    judged = {"check": world.check_tokens, "combine": world.combine_tokens}
    if role in judged:
        return judged[role] + brief * parts
    tokens_of_part = world.solve_tokens
    if role == "reason":
        tokens_of_part = world.reason_tokens
    return tokens_of_part * (parts - handed) + brief * handed


def output_tokens_of_step(shape: Shape, step: ShapeStep, parts: int) -> float:
    """Return the output tokens of a step of a shape."""
    return output_tokens(step.role, parts, len(parts_handed_over(shape, step, parts)))


def tokens_passed_on(role: str, parts: int) -> float:
    """Return the input tokens of a step that is shown to a later one: results are passed on, the thoughts behind them
    are not."""
    world = constants()
    if role in ("plan", "digest"):
        return output_tokens(role, parts, 0)
    if role in PARTIAL:
        if PARTIAL.index(role) < parts:
            return world.solve_tokens
        return world.solve_tokens / 2
    return world.solve_tokens * parts


def input_tokens_of_step(shape: Shape, step: ShapeStep, size: Size) -> float:
    """Return the input tokens of a step, were its worker's context long enough."""
    earlier_tokens = sum([tokens_passed_on(shape[place].role, size.parts) for place in step.sees])
    if step.user:
        return size.tokens + earlier_tokens
    return constants().question_tokens / 2 + earlier_tokens


def contributing_steps(steps: Shape, at: int, parts: int) -> list[int]:
    """Return the steps whose workers had a hand in the answer of the step `at`, for a task of so many parts."""
    places = [at]
    for place in steps[at].sees:
        role = steps[place].role
        if role in ANSWERING or (role in PARTIAL and PARTIAL.index(role) < parts):
            places += contributing_steps(steps, place, parts)
    return places


def combine_logit(right: int, count: int, world: Constants) -> float:
    """Return the logit of choosing a right answer for a part, if `right` of `count` are, for a worker of mean
    ability."""
    if right == count:
        return world.unanimous
    return world.pair + world.majority * (2 * right - count)
