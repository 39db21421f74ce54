"""Samples of plans in words: the share that the service can read, and some plans to look at."""

from collections.abc import Sequence

from app.core.plan.workflow import PlanReader, by_ordinal
from app.errors import PlanRejected
from app.lab import prompt
from app.lab.lessons import Lesson
from app.lab.plan_grammar import Form
from app.lab.plans import STEPS, Plan

SHOWN = 12
Samples = Sequence[tuple[Lesson, Plan]]
"""Tasks and the plans for them, over places of the pool."""


def format_samples(form: Form, samples: Samples) -> str:
    """Return as text the share of valid plans, the number of different subtasks, and some plans, evenly from all."""
    read = sum(is_valid(form, lesson, plan) for lesson, plan in samples)
    different = len({step.text for _, plan in samples for step in plan})
    head = f"valid plans: {read} of {len(samples)}, with {different} different subtasks; for example"
    return "\n".join(
        [head, *(line for lesson, plan in samples[:: -(-len(samples) // SHOWN)] for line in _format_plan(lesson, plan))]
    )


def is_valid(form: Form, lesson: Lesson, plan: Plan) -> bool:
    """Return True if the service reads the plan's text as a plan of so many steps by the same workers."""
    names = [lesson.pool[place].name for place in lesson.order]
    reader = PlanReader(by_ordinal(names), STEPS)
    try:
        steps = (*reader.feed(form.text(form.encode(prompt.over_ordinals(plan, lesson.order)))), *reader.finish())
    except PlanRejected:
        return False
    return [step.worker for step in steps] == [lesson.pool[step.worker].name for step in plan]


def _format_plan(lesson: Lesson, plan: Plan) -> list[str]:
    steps = [
        f"    {place}  {lesson.pool[step.worker].name}: {step.text}"
        + (f" (sees {', '.join(map(str, step.sees))})" if step.sees else "")
        for place, step in enumerate(plan)
    ]
    return [f"  {lesson.problem.text}", *steps]
