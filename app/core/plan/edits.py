"""Edits of a plan that is given as JSON values: change a step, add one, remove one. The result is yet to be checked."""

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, Literal

from app.core.records import record
from app.errors import PlanRejected

Change = Literal["change", "add", "remove"]


@record(frozen=True, slots=True)
class Edit:
    """One edit. `step` counts from 0 in the plan as the edits before this one have left it.

    `add` puts the new step at that place, behind the last one at the most. `fields` are the fields of the step that are
    set: of a step that is changed the others stay as they are.
    """

    op: Change
    step: int
    fields: Mapping[str, Any] = field(default_factory=dict)


def edited(steps: Sequence[Mapping[str, Any]], edits: Sequence[Edit]) -> list[dict[str, Any]]:
    """The steps after these edits. Access lists keep naming the same steps; a step that was removed is named by none.

    Raises `PlanRejected`, whose reason begins with the place of the edit, for a step that does not exist.
    """
    found = [dict(step) for step in steps]
    for place, edit in enumerate(edits):
        last = len(found) - (edit.op != "add")
        if not 0 <= edit.step <= last:
            raise PlanRejected([f"edits[{place}].step: the plan has {len(found)} steps, counted from 0"])
        if edit.op == "change":
            found[edit.step] = found[edit.step] | dict(edit.fields)
        elif edit.op == "add":
            moved = {n: n + (n >= edit.step) for n in range(len(found))}
            found = [_renumbered(step, moved) for step in found]
            found.insert(edit.step, dict(edit.fields))
        else:
            kept = {n: n - (n > edit.step) for n in range(len(found)) if n != edit.step}
            del found[edit.step]
            found = [_renumbered(step, kept) for step in found]
    return found


def _renumbered(step: Mapping[str, Any], numbers: Mapping[int, int]) -> dict[str, Any]:
    """A step whose access list has the new numbers of the steps; one that has none is left out of it."""
    access = step.get("access")
    if not isinstance(access, list):
        return dict(step)
    kept = [entry for entry in access if not _is_number(entry) or entry in numbers]
    return {**step, "access": [numbers[entry] if _is_number(entry) else entry for entry in kept]}


def _is_number(entry: object) -> bool:
    return isinstance(entry, int) and not isinstance(entry, bool)
