"""The form of a plan: from its fields to the edits that make the next revision, from a refusal back to the field, and
the differences between two revisions.

A step's fields are named by its place: `worker-0`, `subtask-0`, `access-0` (once for each entry) and `tools-0`; those
of a step that is to be added end with `-new`.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, Final

from msgspec import Struct

from app.console.pages import last_value
from app.console.request_form import FormFault

Lists = Mapping[str, Sequence[str]]
"""The fields of a form, each with all of its values."""
Step = Mapping[str, Any]
NEW_STEP: Final = "new"
PARAM: Final = re.compile(r"plan\.steps\[(\d+)\]\.(worker|subtask|access|tools)")
PLACE_CHARS: Final = 4
COMPARED_WORDS: Final = 1_000
"""The longest instruction, in words, whose changes are shown word by word."""


class Button(Struct, frozen=True):
    """The button that was pressed: an action, and the step that it is about."""

    action: str
    step: int = -1


class Piece(Struct, frozen=True):
    """A piece of a text that two revisions have, or only one of them: `same`, `gone` or `new`."""

    kind: str
    text: str


class StepDifference(Struct, frozen=True):
    """A step of two revisions; a place is None in the revision that does not have it. `changes` are the fields besides
    the instruction, each with both values; `instruction` is empty where it is the same."""

    before: int | None
    after: int | None
    worker: str
    changes: tuple[tuple[str, str, str], ...] = ()
    instruction: tuple[Piece, ...] = ()


def read_button(text: str) -> Button:
    """Return a button's value, such as `up:2`."""
    action, _, step = text.partition(":")
    place = _place(step)
    if place is None:
        return Button(action)
    return Button(action, place)


def read(lists: Lists) -> list[dict[str, Any]]:
    """Return the steps as they stand in the form."""
    count = 0
    while f"worker-{count}" in lists:
        count += 1
    return [_step(lists, str(n)) for n in range(count)]


def new_step(lists: Lists) -> dict[str, Any]:
    """Return the step to be added as it stands in the form, with its place; a form that was not sent has an empty
    one."""
    step = _step(lists, NEW_STEP)
    if f"worker-{NEW_STEP}" not in lists:
        step["access"] = ["user"]
    return step | {"place": last_value(lists, f"place-{NEW_STEP}")}


def _step(lists: Lists, name: str) -> dict[str, Any]:
    access = [_entry(entry) for entry in lists.get(f"access-{name}", ())]
    return {
        "worker": last_value(lists, f"worker-{name}"),
        "subtask": last_value(lists, f"subtask-{name}"),
        "access": access,
        "tools": bool(lists.get(f"tools-{name}")),
    }


def _place(text: str) -> int | None:
    """Return the place of a step that a text says; None where it says none."""
    if text.isdecimal() and len(text) < PLACE_CHARS:
        return int(text)
    return None


def _entry(text: str) -> int | str:
    """Return an entry of an access list: the place of a step, or a word."""
    place = _place(text)
    if place is None:
        return text
    return place


def edits(before: Sequence[Step], form_steps: Sequence[Step], button: Button, lists: Lists) -> list[dict[str, Any]]:
    """Return the edits that make of the steps before what the form says, then what the button says. Raises
    `FormFault`."""
    changes: list[dict[str, Any]] = []
    for place, (old, new) in enumerate(zip(before, form_steps, strict=False)):
        fields = _changes(old, new)
        if fields:
            changes.append({"op": "change", "step": place, **fields})
    if button.action in ("up", "down"):
        earlier = button.step - (button.action == "up")
        _check_swap(form_steps, earlier)
        changes.append({"op": "move", "step": earlier + 1, "to": earlier})
    elif button.action == "remove":
        changes.append({"op": "remove", "step": button.step})
    elif button.action == "add":
        changes.append(_read_added_step(lists, len(before)))
    return changes


def _changes(old: Step, new: Step) -> dict[str, Any]:
    """Return the fields of a step that the form has changed."""
    fields: dict[str, Any] = {}
    for name in ("worker", "subtask"):
        if new[name] != old.get(name, ""):
            fields[name] = new[name]
    if set(new["access"]) != set(old.get("access", ())):
        fields["access"] = new["access"]
    if new["tools"] != bool(old.get("tools", False)):
        fields["tools"] = new["tools"]
    return fields


def _check_swap(form_steps: Sequence[Step], earlier: int) -> None:
    """Raise `FormFault` if two neighbours cannot change places because the later one is shown the earlier one."""
    if not 0 <= earlier < len(form_steps) - 1:
        raise FormFault({"plan": "There is no place to move this step to."})
    if earlier in form_steps[earlier + 1]["access"]:
        fault = f"Step {earlier + 1} is shown step {earlier}: take that away before they change places."
        raise FormFault({f"access-{earlier + 1}": fault})


def _read_added_step(lists: Lists, count: int) -> dict[str, Any]:
    step = _step(lists, NEW_STEP)
    place = _place(last_value(lists, f"place-{NEW_STEP}"))
    if not step["subtask"].strip():
        raise FormFault({f"subtask-{NEW_STEP}": "Write the instruction of the new step."})
    if place is None or place > count:
        place = count
    steps = [entry for entry in step["access"] if isinstance(entry, int)]
    later = [str(entry) for entry in steps if entry >= place]
    if later:
        fault = f"At that place it cannot be shown step {', '.join(later)}, which comes later."
        raise FormFault({f"access-{NEW_STEP}": fault})
    edit: dict[str, Any] = {"op": "add", "step": place}
    edit |= {name: step[name] for name in ("worker", "subtask", "access")}
    if step["tools"]:
        edit["tools"] = True
    return edit


def field_of_refusal(param: str, button: Button, count: int, added_at: int) -> str:
    """Return the field of the form that a refusal's `param` names, whose places are those after the edits; "" for
    none."""
    match = PARAM.fullmatch(param)
    if match is None:
        return ""
    place: int | str = _place_before(int(match[1]), button, added_at)
    if place == NEW_STEP or int(place) < count:
        return f"{match[2]}-{place}"
    return ""


def _place_before(place: int, button: Button, added_at: int) -> int | str:
    if button.action == "remove":
        return place + (place >= button.step)
    if button.action == "add":
        if place == added_at:
            return NEW_STEP
        return place - (place > added_at)
    if button.action in ("up", "down"):
        earlier = button.step - (button.action == "up")
        return {earlier: earlier + 1, earlier + 1: earlier}.get(place, place)
    return place


# -- differences


def differences(before: Sequence[Step], after: Sequence[Step]) -> list[StepDifference]:
    """Return the steps that differ, in the order of the later revision; those that are gone come last.

    Steps are paired by their instruction, then by their order among those that are left.
    """
    pairs = _pair_steps(before, after)
    places = {old: new for old, new in pairs if old is not None and new is not None}
    step_differences: list[StepDifference] = []
    for old, new in pairs:
        if old is None and new is not None:
            step_differences.append(StepDifference(None, new, after[new]["worker"]))
        elif new is None and old is not None:
            step_differences.append(StepDifference(old, None, before[old]["worker"]))
        elif old is not None and new is not None:
            step_differences += _difference(old, new, before[old], after[new], places)
    return step_differences


def _pair_steps(before: Sequence[Step], after: Sequence[Step]) -> list[tuple[int | None, int | None]]:
    """Return the place of each step in both revisions; None in the revision that does not have it.

    Steps with the same instruction are paired first. Of the others, those are paired that stand behind a pair, or at
    the same place in both revisions."""
    remaining = list(range(len(before)))
    pairs: dict[int, int] = {}
    for new, step in enumerate(after):
        same = next((old for old in remaining if before[old]["subtask"] == step["subtask"]), None)
        if same is not None:
            remaining.remove(same)
            pairs[new] = same
    neighbours_before = _last_paired_before(len(before), set(pairs.values()))
    neighbours_after = _last_paired_before(len(after), set(pairs))
    for new in range(len(after)):
        if new in pairs:
            continue
        place = pairs.get(neighbours_after[new], -1)
        match = next((old for old in remaining if neighbours_before[old] == place), None)
        if match is None and new in remaining:
            match = new
        if match is not None:
            remaining.remove(match)
            pairs[new] = match
    places: list[tuple[int | None, int | None]] = []
    for new in range(len(after)):
        places.append((pairs.get(new), new))
    for old in remaining:
        places.append((old, None))
    return places


def _last_paired_before(count: int, paired_places: Collection[int]) -> list[int]:
    """Return for each place the last paired place before it; -1 if there is none."""
    neighbours: list[int] = []
    last = -1
    for place in range(count):
        neighbours.append(last)
        if place in paired_places:
            last = place
    return neighbours


def _difference(old: int, new: int, first: Step, second: Step, places: Mapping[int, int]) -> list[StepDifference]:
    changes = []
    if first["worker"] != second["worker"]:
        changes.append(("worker", str(first["worker"]), str(second["worker"])))
    if _access_with_later_places(first["access"], places) != set(second["access"]):
        changes.append(("shown", _entries(first["access"]), _entries(second["access"])))
    if bool(first.get("tools")) != bool(second.get("tools")):
        changes.append(("tools", _yes_or_no(first.get("tools")), _yes_or_no(second.get("tools"))))
    instruction = compare_texts(str(first["subtask"]), str(second["subtask"]))
    if not changes and not instruction and old == new:
        return []
    return [StepDifference(old, new, str(second["worker"]), tuple(changes), instruction)]


def _access_with_later_places(access: Sequence[Any], places: Mapping[int, int]) -> set[Any]:
    """Return the entries of an access list with the places of the later revision, without steps that are gone."""
    entries: set[Any] = set()
    for entry in access:
        if not isinstance(entry, int):
            entries.add(entry)
        elif entry in places:
            entries.add(places[entry])
    return entries


def _entries(access: Sequence[Any]) -> str:
    if not access:
        return "nothing"
    return ", ".join([_entry_text(entry) for entry in access])


def _entry_text(entry: int | str) -> str:
    if entry == "user":
        return "the conversation"
    return f"step {entry}"


def _yes_or_no(flag: object) -> str:
    if flag:
        return "yes"
    return "no"


def compare_texts(first: str, second: str) -> tuple[Piece, ...]:
    """Return the second text with its differences from the first, word by word; empty if they are equal."""
    if first == second:
        return ()
    old, new = re.findall(r"\S+\s*", first), re.findall(r"\S+\s*", second)
    if max(len(old), len(new)) > COMPARED_WORDS:
        return (Piece("gone", first), Piece("new", second))
    pieces: list[Piece] = []
    # Words that are all over a long text begin no match, as is the default: each of their places would be tried, for a
    # minute in which the process answers nobody.
    for kind, start, end, begin, stop in SequenceMatcher(None, old, new).get_opcodes():
        if kind == "equal":
            pieces.append(Piece("same", "".join(new[begin:stop])))
            continue
        if end > start:
            pieces.append(Piece("gone", "".join(old[start:end])))
        if stop > begin:
            pieces.append(Piece("new", "".join(new[begin:stop])))
    return tuple(pieces)
