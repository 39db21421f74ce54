"""A pydantic error as OpenAI's: which field is at fault, in the caller's spelling, and what is wrong with it.

Nothing of a value ever occurs in a message; names do, if they look like a name.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from pydantic import ValidationError

from app.errors import InvalidRequest

NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
TYPES: Final = frozenset(
    {"string_type", "int_type", "float_type", "bool_type", "list_type", "dict_type", "model_type", "int_from_float"}
    | {"model_attributes_type"}
)
RANGES: Final = frozenset({"greater_than", "greater_than_equal", "less_than", "less_than_equal"})
LENGTHS: Final = {
    "too_long": "array_above_max_length",
    "too_short": "empty_array",
    "string_too_long": "string_above_max_length",
    "string_too_short": "string_below_min_length",
}
SAFE_TEXTS: Final = TYPES | RANGES | frozenset(LENGTHS) | {"finite_number", "literal_error"}
"""Kinds of errors whose texts contain nothing of the input."""


def invalid_request(error: ValidationError, given: Mapping[str, Any]) -> InvalidRequest:
    """The deepest of the faults in `given`, as a 400 with OpenAI's `param` and `code`."""
    found = error.errors(include_url=False, include_input=False)
    deepest = max(found, key=lambda one: len(one["loc"]))
    param, value = _path(deepest["loc"], given)
    kind = deepest["type"]
    if kind == "union_tag_not_found" and isinstance(value, dict) and deepest["ctx"]["discriminator"] == "'type'":
        kind, param = "missing", f"{param}.type"
    if kind == "extra_forbidden":
        return unknown_parameter(param)
    if kind == "missing":
        return InvalidRequest(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    said = deepest["msg"] if kind in SAFE_TEXTS else "This is not a valid value"
    if kind == "union_tag_invalid":  # the tags that there are, without the one that was given
        said = f"its type must be one of {deepest['ctx']['expected_tags']}"
    return InvalidRequest(f"Invalid value for '{param}': {said}.", param=param, code=_code(kind, value))


def of_parameters(errors: Sequence[Mapping[str, Any]]) -> InvalidRequest:
    """The first fault that FastAPI found in a request's query parameters, as a 400."""
    first = errors[0]
    if first["type"] == "extra_forbidden":
        said = "Unknown query parameter; GET /openapi.json describes those of this route."
        return InvalidRequest(said, code="unknown_parameter")
    name = str(first["loc"][1])
    return InvalidRequest(f"Invalid value for '{name}': {first['msg']}.", param=name, code="invalid_value")


def check_kinds(tools: object, *kinds: str, spared: Callable[[Mapping[str, Any]], bool] = lambda _: False) -> None:
    """`InvalidRequest` for the first tool of another type, unless it is `spared`: the caller's side would not run it.

    What is no tool, or has no type, passes.
    """
    for place, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind not in kinds and not spared(tool):
            param, known = f"tools[{place}].type", " or ".join(map(repr, kinds))
            raise InvalidRequest(
                f"Invalid value for '{param}': it should be {known}. Nobody here would run a tool of another type: "
                "leave it out, or offer a function that your side runs.",
                param=param,
                code="unsupported_value",
            )


def unknown_parameter(param: str | None) -> InvalidRequest:
    """A field that there is not."""
    shown = f": '{param}'" if param else ""
    return InvalidRequest(f"Unknown parameter{shown}.", param=param, code="unknown_parameter")


def _is_tag(entry: int | str, following: int | str, value: Mapping[str, object]) -> bool:
    """True if an entry only names the member of a union that was tried, though a field has the same name."""
    return following in value and not isinstance(value.get(str(entry)), dict | list)


def _code(kind: str, value: object) -> str:
    if kind in TYPES:
        return "invalid_type"
    if kind in RANGES:
        number = "integer" if isinstance(value, int) else "decimal"
        return f"{number}_below_min_value" if kind.startswith("greater") else f"{number}_above_max_value"
    return LENGTHS.get(kind, "invalid_value")


def _path(loc: Sequence[int | str], given: object) -> tuple[str, object]:
    """A location as callers write it, without pydantic's names of union members and without names that are none; and
    the value that stands there."""
    path, value = "", given
    loc = loc[:-2] if loc[-1] == "[key]" else loc
    for place, entry in enumerate(loc):
        last = place == len(loc) - 1
        if not last and isinstance(value, dict) and _is_tag(entry, loc[place + 1], value):
            continue
        if isinstance(entry, int) and isinstance(value, list) and entry < len(value):
            path, value = f"{path}[{entry}]", value[entry]
        elif isinstance(entry, str) and isinstance(value, dict) and (entry in value or last):
            if not NAME.fullmatch(entry):
                break
            path, value = f"{path}.{entry}" if path else entry, value.get(entry)
    return path[:256], value
