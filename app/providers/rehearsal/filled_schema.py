"""JSON of a schema's shape with an answer in it: enough to rehearse structured answers with."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final

DEEPEST: Final = 8
"""Levels of objects and arrays, and references and alternatives in a row, that are followed."""
MOST_VALUES: Final = 2_000
"""Values of one document: a schema that refers to itself could ask for any number."""
NUMBER: Final = re.compile(r"-?\d+(?:\.\d+)?")


def fill_schema(schema: Mapping[str, Any], text: str) -> str:
    """Return a document of the schema, whose strings are `text` and whose numbers the first number in it."""
    return json.dumps(_Document(schema, text).value(schema, 0))


def find_numbers(text: str) -> list[float]:
    """Return the numbers in a text, without those that are too large for a float, for which JSON has no word."""
    return [number for number in map(float, NUMBER.findall(text)) if math.isfinite(number)]


class _Document:
    """One document that is being filled in."""

    def __init__(self, root: Mapping[str, Any], text: str) -> None:
        self._root = root
        self._text = text
        self._number = next(iter(find_numbers(text)), 0.0)
        self._left = MOST_VALUES

    def value(self, schema: object, depth: int) -> Any:
        """Return a value of this part of the schema."""
        schema = self._resolve(schema)
        self._left -= 1
        if "enum" in schema or "const" in schema:
            return schema.get("const", (schema.get("enum") or [None])[0])
        kind = schema.get("type", "object" if "properties" in schema else "string")
        kind = kind[0] if isinstance(kind, list) and kind else kind
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            least = min(int(schema.get("minItems", 0)), DEEPEST)
            return [self.value(schema.get("items"), depth + 1) for _ in range(least) if self._goes_on(depth)]
        if kind in ("integer", "number"):
            return self._figure(schema, is_whole=kind == "integer")
        return {"boolean": True, "null": None}.get(kind, self._text[: int(schema.get("maxLength", len(self._text)))])

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        properties = dict(schema.get("properties", {}))
        for name in schema.get("required", ()):
            properties.setdefault(name, True)
        return {name: self.value(inner, depth + 1) for name, inner in properties.items() if self._goes_on(depth)}

    def _goes_on(self, depth: int) -> bool:
        return depth < DEEPEST and self._left > 0

    def _figure(self, schema: Mapping[str, Any], *, is_whole: bool) -> int | float:
        """Return the number, within the schema's bounds."""
        value: int | float = max(self._number, schema.get("minimum", self._number))
        value = min(value, schema.get("maximum", value))
        if is_whole or value == int(value):
            return int(value)
        return value

    def _resolve(self, schema: object) -> Mapping[str, Any]:
        """Return the schema to which references and the first of several alternatives lead; {} where they lead
        nowhere."""
        for _ in range(DEEPEST):
            if not isinstance(schema, Mapping):
                break
            alternatives = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
            if "$ref" in schema:
                schema = self._look_up(schema["$ref"])
            elif alternatives:
                schema = alternatives[0]
            else:
                return schema
        return {}

    def _look_up(self, reference: str) -> object:
        """Return the part of the whole schema that a reference such as `#/$defs/Item` names."""
        target: Any = self._root
        for name in reference.removeprefix("#").split("/")[1:]:
            target = target.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        return target
