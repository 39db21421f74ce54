"""The published Conductor format (arXiv 2512.04388): a plan as three lists of equal length.

    {"model_id": [1, 0], "subtasks": ["Plan it.", "Solve it."], "access_list": [[], ["all"]], "models": ["a", "b"]}

Each step sees the caller's conversation. In `access_list`, `[]` adds nothing to that, `["all"]` every earlier step, and
numbers these earlier steps. `read_lists` finds the lists in a conductor's text, whose `model_id` has ordinals of the
brief. `from_lists` and `to_lists` are for JSON values: there a number in `model_id` is the place of a worker in
`models`, or in the pool where `models` is missing, and the worker's name may stand in its place. What is read is yet to
be checked (`proposals.py`).
"""

import ast
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from app.core.plan.workflow import Access, Step
from app.errors import PlanRejected

LISTS = ("model_id", "subtasks", "access_list")
"""The fields of the three lists."""
MODELS = "models"
"""The field of the names of the workers, which may be missing."""
_LABELS: Mapping[str, re.Pattern[str]] = {
    "model_id": re.compile(r"model[_ ]ids?\W{0,4}[:=]", re.IGNORECASE),
    "subtasks": re.compile(r"subtasks?\W{0,4}[:=]", re.IGNORECASE),
    "access_list": re.compile(r"access(?:[_ ]list)?\W{0,4}[:=]", re.IGNORECASE),
}


def read_lists(text: str, *, further: bool = False) -> dict[str, Any]:
    """Return the plan of a text with the three lists, in Baton's own form, which is yet to be checked. Raises
    `PlanRejected`.

    In a further round `"all"` means the previous answer, too. Three empty lists are the empty plan.
    """
    body = text.rpartition("</think>")[2].replace("“", '"').replace("”", '"')
    lists = {label: _list_after(pattern, body) for label, pattern in _LABELS.items()}
    missing = [label for label, values in lists.items() if values is None]
    if missing:
        raise PlanRejected([f"no plan found: neither a steps object nor the list {', '.join(missing)}"])
    models, subtasks, access = (lists[label] or [] for label in _LABELS)
    return _join_lists(models, subtasks, access, further=further)


def _join_lists(
    workers: Sequence[object], subtasks: Sequence[object], access: Sequence[object], *, further: bool
) -> dict[str, Any]:
    """Return a plan in Baton's own form. Raises `PlanRejected` if the lists are not equally long."""
    if not len(workers) == len(subtasks) == len(access):
        raise PlanRejected([f"the lists differ in length: {len(workers)}, {len(subtasks)}, {len(access)}"])
    steps = []
    for place, (worker, subtask, access_value) in enumerate(zip(workers, subtasks, access, strict=True)):
        step_access = _convert_access(access_value, place, further=further)
        steps.append({"worker": worker, "subtask": subtask, "access": step_access})
    return {"steps": steps}


def _convert_access(access_value: object, place: int, *, further: bool) -> object:
    """Return the access list of the step at this place in Baton's own form, as the published one writes it."""
    if access_value in ("all", ["all"]):
        return Access(True, tuple(range(place)), previous=further).as_list()
    if isinstance(access_value, list):
        return ["user", *access_value]
    return access_value


def _list_after(label: re.Pattern[str], text: str) -> list[Any] | None:
    match = label.search(text)
    if match is None:
        return None
    start = text.find("[", match.end())
    if start < 0:
        return None
    end = _closing(text, start)
    if end < 0:
        return None
    return _literal(text[start:end])


def _closing(text: str, start: int) -> int:
    """Return the place behind the bracket that closes the list begun at `start`, or -1. Brackets in strings do not
    count."""
    depth, quote, at = 0, "", start
    while at < len(text):
        char = text[at]
        if quote:
            at += char == "\\"
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "[]":
            depth += 1 if char == "[" else -1
            if not depth:
                return at + 1
        at += 1
    return -1


def _literal(text: str) -> list[Any] | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an escape that Python does not know, as in "\\d"
            value = ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    return value if isinstance(value, list) else None


def is_published(value: object) -> bool:
    """Return True if a plan is given as three lists."""
    return isinstance(value, Mapping) and "steps" not in value and any(name in value for name in LISTS)


def from_lists(value: Mapping[str, Any], pool: Sequence[str]) -> dict[str, Any]:
    """Return a plan in Baton's own form, which is yet to be checked. Raises `PlanRejected` with every fault."""
    reasons = ["the plan has an unknown field beside its lists"] if set(value) - {*LISTS, MODELS} else []
    reasons += [f"{name} must be a list" for name in LISTS if not isinstance(value.get(name), list)]
    models = value.get(MODELS, list(pool))
    if not isinstance(models, list):
        reasons.append("models must be a list of workers' names")
    if reasons:
        raise PlanRejected(reasons)
    ids, subtasks, access = (value[name] for name in LISTS)
    workers = [_resolve_model_id(model, models, place, reasons) for place, model in enumerate(ids)]
    plan = _join_lists(workers, subtasks, access, further=False)
    if reasons:
        raise PlanRejected(reasons)
    return plan


def _resolve_model_id(model: object, models: Sequence[Any], place: int, reasons: list[str]) -> object:
    if isinstance(model, bool) or not isinstance(model, int):
        return model
    if 0 <= model < len(models):
        return models[model]
    reasons.append(f"step {place}: model_id is not the place of a worker")
    return None


def to_lists(steps: Sequence[Step], pool: Sequence[str]) -> dict[str, Any]:
    """Return a plan as three lists. Raises `PlanRejected` for what this form cannot say: a step that does not see the
    caller's conversation, and one that may call tools although it does not answer."""
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
        "access_list": [_publish_access(step, place) for place, step in enumerate(steps)],
        MODELS: models,
    }


def _publish_access(step: Step, place: int) -> list[str | int]:
    earlier_steps = list(step.access.steps)
    if earlier_steps and earlier_steps == list(range(place)):
        return ["all"]
    return [*earlier_steps]
