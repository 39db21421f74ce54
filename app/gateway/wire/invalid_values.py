"""Faults that pydantic finds in a request, as refusals of OpenAI's: which field is at fault, in the caller's spelling,
and in a plain sentence what it must be. Nothing of a value ever occurs in a message; names do where they look like one.

pydantic's own texts speak of inputs, instances and dictionaries, name one member of a union as if there were no other,
and are different from release to release.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from pydantic import ValidationError

from app.errors import InvalidRequest
from app.gateway.http.field_names import FIELD_NAME, MOST_PARAM_CHARS

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
QUERY_FAULT: Final = "query_parameter"
"""The kind of the errors that the readers of `query.py` raise, whose texts are sentences already."""
LENGTHS: Final = {
    "too_long": "array_above_max_length",
    "too_short": "empty_array",
    "string_too_long": "string_above_max_length",
    "string_too_short": "string_below_min_length",
}
"""The codes of values of a wrong length, by the kind of the error."""
Fault = Mapping[str, Any]
"""One of pydantic's errors."""


def invalid_request(error: ValidationError, body: Mapping[str, Any]) -> InvalidRequest:
    """Return the deepest of the faults in `body`, as a 400 with OpenAI's `param` and `code`."""
    faults = error.errors(include_url=False, include_input=False)
    deepest = choose_fault(faults, lambda fault: _path(fault, body)[1])
    param, value = _path(deepest, body)
    kind = deepest["type"]
    if kind == "union_tag_not_found" and isinstance(value, dict) and deepest["ctx"]["discriminator"] == "'type'":
        kind, param = "missing", f"{param}.type"
    if kind == "union_tag_invalid":
        param = f"{param}.type"
    if kind == "extra_forbidden":
        return unknown_parameter(param)
    if kind == "missing":
        return _missing_error(param)
    other_faults = [fault for fault in faults if fault is not deepest and _path(fault, body)[0] == param]
    reason = sentence(deepest, value, other_faults)
    return InvalidRequest(f"Invalid value for '{param}': {reason}.", param=param, code=_code(kind, value))


def _missing_error(param: str) -> InvalidRequest:
    return InvalidRequest(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")


def parameters_error(errors: Sequence[Mapping[str, Any]]) -> InvalidRequest:
    """Return the first fault that FastAPI found in a request's query parameters, as a 400."""
    first = errors[0]
    name = str(first["loc"][1])
    if first["type"] == "extra_forbidden":
        return unknown_parameter(name if FIELD_NAME.fullmatch(name) else None)
    if first["type"] == "missing":
        return _missing_error(name)
    reason = str(first["msg"])
    if first["type"] != QUERY_FAULT:
        reason = sentence(first, first.get("input"))
    return InvalidRequest(f"Invalid value for '{name}': {reason}.", param=name, code="invalid_value")


def unknown_parameter(param: str | None) -> InvalidRequest:
    """Return the refusal of a field that does not exist."""
    suffix = f": '{param}'" if param else ""
    return InvalidRequest(f"Unknown parameter{suffix}.", param=param, code="unknown_parameter")


def _is_tag(entry: int | str, following: int | str, value: Mapping[str, object]) -> bool:
    """Return True if an entry only names the member of a union that was tried, though a field has the same name."""
    return following in value and not isinstance(value.get(str(entry)), dict | list)


def _code(kind: str, value: object) -> str:
    if kind in TYPES:
        return "invalid_type"
    if kind in RANGES:
        number = "integer" if isinstance(value, int) else "decimal"
        if kind.startswith("greater"):
            return f"{number}_below_min_value"
        return f"{number}_above_max_value"
    return LENGTHS.get(kind, "invalid_value")


def _path(fault: Mapping[str, Any], body: object) -> tuple[str, object]:
    """Return the location of a fault as callers write it, and the value that stands there. pydantic's names of union
    members are left out, and so is all from a name that does not look like one. Only a field that is missing is named
    although it is not there.

    Of `{"type": "function", "function": {...}}` the first entry "function" is the union's member, and the next one is
    the field.
    """
    path, value = "", body
    tagged_value: object = None
    loc: Sequence[int | str] = fault["loc"]
    if loc[-1] == "[key]":
        loc = loc[:-2]
    for place, entry in enumerate(loc):
        last = place == len(loc) - 1
        if not last and isinstance(value, dict):
            if value.get("type") == entry and value is not tagged_value:
                tagged_value = value
                continue
            if _is_tag(entry, loc[place + 1], value):
                continue
        if isinstance(entry, int) and isinstance(value, list) and entry < len(value):
            path, value = f"{path}[{entry}]", value[entry]
        elif isinstance(entry, str) and isinstance(value, dict):
            is_missing_field = last and fault["type"] == "missing"
            if entry not in value and not is_missing_field:
                continue
            if not FIELD_NAME.fullmatch(entry):
                break
            path = f"{path}.{entry}" if path else entry
            value = value.get(entry)
    return path[:MOST_PARAM_CHARS], value


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
