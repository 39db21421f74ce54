"""All plans that a policy can choose in world 2: a shape of at most four steps, and a worker for each step.

A step's role is what its subtask asks for, and `SUBTASKS` are the words of it. Its access list is `user` (the caller's
task with its document) and earlier steps. Where a digest is made, later steps see the digest instead of the task: that
is cheaper, does not distract, and keeps a confidential text from workers who retain data, but a digest can leave out
what matters. Every baseline and every trained policy chooses from this one catalogue, and so does the search.
"""

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from app.core.plan.workflow import Access, Step, Workflow

SUBTASKS: Mapping[str, str] = {
    "plan": "Make a plan for this task; do not solve it.",
    "digest": "Write a digest of all that the task needs, without names; do not solve it.",
    "solve": "Solve the task, taking over what is worked out already.",
    "reason": "Solve the task step by step, taking over what is worked out already.",
    "first": "Work out the first part only, step by step.",
    "second": "Work out the second part only, step by step.",
    "check": "Check the answer that you see, and correct it where it is wrong.",
    "combine": "Compare the answers that you see, and choose for each part the one that is right.",
}
MOST_STEPS = 4


class ShapeStep(NamedTuple):
    """A step without its worker."""

    role: str
    sees: tuple[int, ...] = ()
    user: bool = True


Shape = tuple[ShapeStep, ...]


class Plan(NamedTuple):
    """A shape by its name, and for each of its steps the place of a worker in the pool."""

    shape: str
    workers: tuple[int, ...]


@cache
def catalogue() -> Mapping[str, Shape]:
    """Return all shapes by name. A name lists the roles in order; `a+b` work apart from each other."""
    shapes: dict[str, Shape] = {}
    for solve in ("solve", "reason"):
        shapes |= _make_whole_task_shapes(solve) | _in_parts(solve) | _make_digest_shapes(solve)
    return shapes


def workflow(plan: Plan, names: tuple[str, ...]) -> Workflow:
    """Return the plan as the executor takes it; `names` are the workers of the pool."""
    steps = []
    for (role, sees, user), worker in zip(catalogue()[plan.shape], plan.workers, strict=True):
        steps.append(Step(names[worker], SUBTASKS[role], Access(user, sees)))
    return Workflow(tuple(steps))


def _make_whole_task_shapes(solve: str) -> dict[str, Shape]:
    """Return the shapes in which every worker sees the task and works on all of it."""
    alone, plan, check = ShapeStep(solve), ShapeStep("plan"), ShapeStep("check", (0,))
    by_plan = ShapeStep(solve, (0,))
    return {
        solve: (alone,),
        f"plan {solve}": (plan, by_plan),
        f"{solve} check": (alone, check),
        f"{solve} check check": (alone, check, ShapeStep("check", (1,))),
        f"plan {solve} check": (plan, by_plan, ShapeStep("check", (1,))),
        f"plan {solve} check check": (plan, by_plan, ShapeStep("check", (1,)), ShapeStep("check", (2,))),
        f"{solve}+{solve} combine": (alone, alone, ShapeStep("combine", (0, 1))),
        f"{solve}+{solve}+{solve} combine": (alone, alone, alone, ShapeStep("combine", (0, 1, 2))),
        f"{solve}+{solve} combine check": (alone, alone, ShapeStep("combine", (0, 1)), ShapeStep("check", (2,))),
        f"plan {solve}+{solve} combine": (plan, by_plan, by_plan, ShapeStep("combine", (1, 2))),
    }


def _in_parts(solve: str) -> dict[str, Shape]:
    """Return the shapes in which parts of the task are worked out apart, and the worker that solves takes them over."""
    first, second = ShapeStep("first"), ShapeStep("second")
    solver, both = ShapeStep(solve, (0,)), ShapeStep(solve, (0, 1))
    return {
        f"first {solve}": (first, solver),
        f"first {solve} check": (first, solver, ShapeStep("check", (1,))),
        f"first+second {solve}": (first, second, both),
        f"first+second {solve} check": (first, second, both, ShapeStep("check", (2,))),
    }


def _make_digest_shapes(solve: str) -> dict[str, Shape]:
    """Return the shapes in which the first worker alone sees the task, and all others see its digest."""
    digest = ShapeStep("digest")
    alone, check = _from_digest(solve), _from_digest("check", 1)
    first, second = _from_digest("first"), _from_digest("second")
    return {
        f"digest {solve}": (digest, alone),
        f"digest plan {solve}": (digest, _from_digest("plan"), _from_digest(solve, 1)),
        f"digest {solve} check": (digest, alone, check),
        f"digest {solve} check check": (digest, alone, check, _from_digest("check", 2)),
        f"digest {solve}+{solve} combine": (digest, alone, alone, _from_digest("combine", 1, 2)),
        f"digest first {solve}": (digest, first, _from_digest(solve, 1)),
        f"digest first {solve} check": (digest, first, _from_digest(solve, 1), _from_digest("check", 2)),
        f"digest first+second {solve}": (digest, first, second, _from_digest(solve, 1, 2)),
    }


def _from_digest(role: str, *others: int) -> ShapeStep:
    return ShapeStep(role, (0, *others), user=False)
