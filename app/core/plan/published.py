"""The published form of a plan as a JSON value: three lists of equal length.

    {"model_id": [2, 0], "subtasks": ["Plan it.", "Solve it."], "access_list": [[], ["all"]], "models": ["a", "b", "c"]}

Source: arXiv 2512.04388. A number in `model_id` is the place of a worker in `models`, or in the pool where `models` is
missing; the worker's name may stand in its place. In this form each step sees the caller's conversation; `[]` adds
nothing to that, `["all"]` every earlier step, and numbers these earlier steps. `parse.read_lists` reads the same form
from a conductor's text.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from app.core.plan.parse import published_access
from app.core.plan.workflow import Step
from app.errors import PlanRejected

LISTS = ("model_id", "subtasks", "access_list")
MODELS = "models"


def is_published(value: object) -> bool:
    """Return True if a plan is given as three lists."""
    return isinstance(value, Mapping) and "steps" not in value and any(name in value for name in LISTS)


def from_lists(value: Mapping[str, Any], pool: Sequence[str]) -> dict[str, Any]:
    """A plan in Baton's own form, which is yet to be checked. Raises `PlanRejected` with every fault."""
    reasons = ["the plan has an unknown field beside its lists"] if set(value) - {*LISTS, MODELS} else []
    reasons += [f"{name} must be a list" for name in LISTS if not isinstance(value.get(name), list)]
    models = value.get(MODELS, list(pool))
    if not isinstance(models, list):
        reasons.append("models must be a list of workers' names")
    if reasons:
        raise PlanRejected(reasons)
    ids, subtasks, access = (value[name] for name in LISTS)
    if not len(ids) == len(subtasks) == len(access):
        raise PlanRejected([f"the lists differ in length: {len(ids)}, {len(subtasks)}, {len(access)}"])
    steps = []
    for place, (model, subtask, seen) in enumerate(zip(ids, subtasks, access, strict=True)):
        steps.append(
            {
                "worker": _named(model, models, place, reasons),
                "subtask": subtask,
                "access": published_access(seen, place, further=False),
            }
        )
    if reasons:
        raise PlanRejected(reasons)
    return {"steps": steps}


def _named(model: object, models: Sequence[Any], place: int, reasons: list[str]) -> object:
    if isinstance(model, bool) or not isinstance(model, int):
        return model
    if 0 <= model < len(models):
        return models[model]
    reasons.append(f"step {place}: model_id is not the place of a worker")
    return None


def to_lists(steps: Sequence[Step], pool: Sequence[str]) -> dict[str, Any]:
    """A plan as three lists. Raises `PlanRejected` for what this form cannot say: a step that does not see the caller's
    conversation, and one that may call tools although it does not answer."""
    reasons = []
    for place, step in enumerate(steps):
        if not step.access.user:
            reasons.append(f"step {place}: access does not list user, which the three lists cannot say")
        if step.tools and not step.answers:
            reasons.append(f"step {place}: tools is true, which the three lists cannot say")
    if reasons:
        raise PlanRejected(reasons)
    models = list(dict.fromkeys([*pool, *[step.worker for step in steps]]))
    return {
        "model_id": [models.index(step.worker) for step in steps],
        "subtasks": [step.subtask for step in steps],
        "access_list": [_listed(step, place) for place, step in enumerate(steps)],
        MODELS: models,
    }


def _listed(step: Step, place: int) -> list[str | int]:
    seen = list(step.access.steps)
    if seen and seen == list(range(place)):
        return ["all"]
    return [*seen]
