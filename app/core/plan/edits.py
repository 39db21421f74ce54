"""Edits of a plan that is given as JSON values: change a step, add one, remove one, move one. The result is yet to be
checked."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from app.errors import PlanRejected

Change = Literal["change", "add", "remove", "move"]


class Edit(Struct, frozen=True):
    """One edit. `step` counts from 0 in the plan as the edits before this one have left it.

    `add` puts the new step at that place, behind the last one at the most. `fields` are the fields of the step that are
    set: of a step that is changed the others stay as they are. `move` puts the step at the place `to`, counted as if it
    had been taken out before.
    """

    op: Change
    step: int
    fields: Mapping[str, Any] = {}
    to: int | None = None


def apply_edits(steps: Sequence[Mapping[str, Any]], edits: Sequence[Edit]) -> list[dict[str, Any]]:
    """Return the steps after these edits. Access lists keep naming the same steps; a step that was removed is named by
    none.

    Raises `PlanRejected`, whose reason begins with the place of the edit, for a step that does not exist, and for a
    change of nothing.
    """
    plan = [dict(step) for step in steps]
    for place, edit in enumerate(edits):
        last = len(plan) - (edit.op != "add")
        if not 0 <= edit.step <= last:
            raise PlanRejected([f"edits[{place}].step: the plan has {len(plan)} steps, counted from 0"])
        if edit.op != "move" and edit.to is not None:
            raise PlanRejected([f"edits[{place}].to: only a step that is moved has a new place"])
        if edit.op == "move" and (edit.to is None or not 0 <= edit.to <= last):
            raise PlanRejected([f"edits[{place}].to: give the step's new place, of {len(plan)} counted from 0"])
        if edit.op == "change" and not edit.fields:
            raise PlanRejected([f"edits[{place}].step: say what changes: its worker, subtask, access or tools"])
        plan = _apply_edit(plan, edit)
    return plan


def _apply_edit(steps: list[dict[str, Any]], edit: Edit) -> list[dict[str, Any]]:
    """Return the steps after one edit, which fits them."""
    places = list(range(len(steps)))
    """The old place of each step that stays, in the new order."""
    if edit.op == "change":
        changed = steps[edit.step] | dict(edit.fields)
        return [*steps[: edit.step], changed, *steps[edit.step + 1 :]]
    if edit.op == "add":
        moved = {n: n + (n >= edit.step) for n in places}
        renumbered = [_renumber_access(step, moved) for step in steps]
        return [*renumbered[: edit.step], dict(edit.fields), *renumbered[edit.step :]]
    del places[edit.step]
    if edit.op == "move" and edit.to is not None:
        places.insert(edit.to, edit.step)
    numbers = {old: new for new, old in enumerate(places)}
    return [_renumber_access(steps[old], numbers) for old in places]


def _renumber_access(step: Mapping[str, Any], numbers: Mapping[int, int]) -> dict[str, Any]:
    """Return a step whose access list has the new numbers of the steps; one that has none is left out of it."""
    access = step.get("access")
    if not isinstance(access, list):
        return dict(step)
    entries: list[Any] = []
    for entry in access:
        if not _is_number(entry):
            entries.append(entry)
        elif entry in numbers:
            entries.append(numbers[entry])
    return {**step, "access": entries}


def _is_number(entry: object) -> bool:
    return isinstance(entry, int) and not isinstance(entry, bool)
