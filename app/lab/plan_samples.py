"""Samples of plans in words: the share that the service can read, and some plans to look at."""

import math
from collections.abc import Sequence

from app.core.plan.proposals import read_plan_text
from app.lab import prompt
from app.lab.lessons import Lesson
from app.lab.plan_grammar import Form
from app.lab.plans import STEPS, Plan

SHOWN = 12
Samples = Sequence[tuple[Lesson, Plan]]
"""Tasks and the plans for them, over places of the pool."""


def format_samples(form: Form, samples: Samples) -> str:
    """Return as text the share of valid plans, the number of different subtasks, and some plans, evenly from all."""
    valid = 0
    subtasks: set[str] = set()
    for lesson, plan in samples:
        valid += is_valid(form, lesson, plan)
        subtasks.update([step.text for step in plan])
    lines = [f"valid plans: {valid} of {len(samples)}, with {len(subtasks)} different subtasks; for example"]
    stride = math.ceil(len(samples) / SHOWN)
    for lesson, plan in samples[::stride]:
        lines += _format_plan(lesson, plan)
    return "\n".join(lines)


def is_valid(form: Form, lesson: Lesson, plan: Plan) -> bool:
    """Return True if the service reads the plan's text as a plan of so many steps by the same workers."""
    names = [lesson.pool[place].name for place in lesson.order]
    text = form.text(form.encode(prompt.over_ordinals(plan, lesson.order)))
    steps = read_plan_text(text, names, STEPS)
    if steps is None:
        return False
    return [step.worker for step in steps] == [lesson.pool[step.worker].name for step in plan]


def _format_plan(lesson: Lesson, plan: Plan) -> list[str]:
    """Return the task and the steps of its plan, line by line."""
    lines = [f"  {lesson.problem.text}"]
    for place, step in enumerate(plan):
        line = f"    {place}  {lesson.pool[step.worker].name}: {step.text}"
        if step.sees:
            line += f" (sees {', '.join(map(str, step.sees))})"
        lines.append(line)
    return lines
