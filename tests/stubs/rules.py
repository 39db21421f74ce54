"""Small checks that the wire formats share; each raises through a callback, in the words of its provider."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, TypeGuard

from .record import ReceivedRequest
from .wire import ProviderRefusal

TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def names(text: str) -> frozenset[str]:
    """Return the words of that text."""
    return frozenset(text.split())


def parse(received: ReceivedRequest, words: str) -> dict[str, Any]:
    """Return the body as a JSON object; raises ProviderRefusal with a 400 and the message of the provider."""

    def no_constant(name: str) -> Any:
        raise ValueError(name)

    try:
        body = json.loads(received.body, parse_constant=no_constant)
        json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as problem:
        raise ProviderRefusal(400, words) from problem
    if not isinstance(body, dict):
        raise ProviderRefusal(400, words)
    return body


def is_int(value: Any) -> TypeGuard[int]:
    """Return True for an integer that is not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[float]:
    """Return True for an integer or a float."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def within(value: Any, low: float, high: float) -> bool:
    """Return True for a number between the limits, and for None, which is an absent value."""
    return value is None or (is_number(value) and low <= value <= high)


def unmet(calls: list[str], results: list[str]) -> list[str]:
    """Return the ids of tool calls that got no result."""
    return [call for call in calls if call not in results]


def check_strict_schema(schema: Any, refuse: Callable[[str], None], context: tuple[str, ...] = ()) -> None:
    """Refuse what OpenAI refuses for `strict`: every object must close its properties and require all of them."""
    if not isinstance(schema, dict):
        return
    if schema.get("type") == "object":
        if schema.get("additionalProperties") is not False:
            refuse(f"In context={context}, 'additionalProperties' is required to be supplied and to be false.")
        names = list(schema.get("properties", {}))
        if sorted(schema.get("required", [])) != sorted(names):
            refuse(
                f"In context={context}, 'required' is required to be supplied and to be an array including every "
                "key in properties."
            )
    for name, inner in schema.get("properties", {}).items():
        check_strict_schema(inner, refuse, (*context, "properties", name))
    check_strict_schema(schema.get("items"), refuse, (*context, "items"))
    for keyword in ("anyOf", "prefixItems"):
        for i, inner in enumerate(schema.get(keyword, [])):
            check_strict_schema(inner, refuse, (*context, keyword, str(i)))
    for name, inner in schema.get("$defs", {}).items():
        check_strict_schema(inner, refuse, (*context, "$defs", name))
