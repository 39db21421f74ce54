"""Faults that pydantic finds in a request, as plain sentences: what the field must be. Nothing of its value is in them.

pydantic's own texts speak of inputs, instances and dictionaries, name one member of a union as if there were no other,
and are different from release to release.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

TYPES: Final[Mapping[str, str]] = {
    "string_type": "a string",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "union_tag_not_found": "an object",
}
"""The type that a field must have, in words, by the kind of the validator's error."""
CONTAINERS: Final[Mapping[str, type]] = {"a string": str, "a list": list, "an object": dict}
NUMBERS: Final[Mapping[type, str]] = {bool: "true or false", int: "a number", float: "a number"}
RANGES: Final[Mapping[str, tuple[str, str]]] = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}
"""The words of a bound, and the name under which the error has it."""
Fault = Mapping[str, Any]
"""One of pydantic's errors."""


def choose_fault(faults: Sequence[Fault], value_at: Callable[[Fault], object]) -> Fault:
    """Return the fault to report: the deepest, and of several members of a union the one whose type the value has."""

    def weight(fault: Fault) -> tuple[int, bool]:
        noun = TYPES.get(fault["type"])
        return len(fault["loc"]), noun is None and not _is_missed(fault, value_at(fault))

    return max(faults, key=weight)


def _is_missed(fault: Fault, value: object) -> bool:
    """Return True for a text that a value of another type was compared with: it says least of several faults."""
    return fault["type"] == "literal_error" and not isinstance(value, str)


def sentence(fault: Fault, value: object, alternatives: Sequence[Fault] = ()) -> str:
    """Return the rule that a field breaks, as words that follow its name and a colon. `alternatives` are the faults of
    the other members of a union at the same place."""
    kind, context = fault["type"], fault.get("ctx", {})
    whose = "each of its keys" if fault["loc"][-1] == "[key]" else "it"
    if kind in TYPES:
        nouns = [TYPES[error["type"]] for error in (fault, *alternatives) if error["type"] in TYPES]
        return _describe_type_fault(nouns, value)
    if kind in RANGES:
        return _describe_range_fault(kind, context)
    if kind in ("too_long", "too_short"):
        return f"{whose} {_describe_length_fault(context, 'entry', 'entries')}"
    if kind in ("string_too_long", "string_too_short"):
        return f"{whose} {_describe_length_fault(context, 'character', 'characters')}"
    if kind == "literal_error":
        return f"it must be {context['expected']}"
    if kind == "string_pattern_mismatch":
        return f"{whose} must match the regular expression {context['pattern']}"
    if kind == "none_required":
        return "it must be null: leave it out"
    if kind == "finite_number":
        return "it must be a finite number"
    if kind == "union_tag_invalid":  # the tags that there are, without the one that was given
        return f"it must be one of {context['expected_tags']}"
    return "it does not have the form that GET /openapi.json describes"


def _describe_type_fault(nouns: Sequence[str], value: object) -> str:
    *others, last = dict.fromkeys(nouns)
    expected = last
    if others:
        expected = f"{', '.join(others)} or {last}"
    actual = _json_type_of(value)
    fits = actual in nouns or (actual == "a number" and "a whole number" in nouns)
    if fits or not actual:
        return f"it must be {expected}"
    return f"it must be {expected}, not {actual}"


def _json_type_of(value: object) -> str:
    """Return the type of a JSON value."""
    if value is None or isinstance(value, int | float):
        return NUMBERS.get(type(value), "null")
    for noun, kind in CONTAINERS.items():
        if isinstance(value, kind):
            return noun
    return ""


def _describe_range_fault(kind: str, context: Mapping[str, Any]) -> str:
    words, name = RANGES[kind]
    bound = context[name]
    if bound == int(bound):
        bound = int(bound)
    return f"it must be {words} {bound}"


def _describe_length_fault(context: Mapping[str, Any], singular: str, several: str) -> str:
    bound, number = "at most", context.get("max_length")
    if number is None:
        bound, number = "at least", context["min_length"]
    noun = singular if number == 1 else several
    return f"must have {bound} {number} {noun}"
