"""JSON of a schema's shape with an answer in it: enough to rehearse structured answers with."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any, Final
from urllib.parse import unquote

from app.core.message.response_format import validator
from app.errors import Failure, WorkerRefused
from app.providers.rehearsal.patterns import matching_texts

DEEPEST: Final = 40
"""Levels of objects and arrays that are filled in."""
MOST_VALUES: Final = 2_000
"""Values of one document: a schema could ask for any number."""
MOST_CHARACTERS: Final = 20_000
CHOICES: Final = 16
"""Multiples of a number that are tried on each side of the one that is wished for."""
NUMBER: Final = re.compile(r"-?\d+(?:\.\d+)?")
TYPES: Final = {
    "properties": "object", "additionalProperties": "object", "required": "object", "minProperties": "object",
    "items": "array", "prefixItems": "array", "minItems": "array", "minimum": "number", "maximum": "number",
    "exclusiveMinimum": "number", "exclusiveMaximum": "number", "multipleOf": "number",
}  # fmt: skip
"""The type of a value whose schema names none but has this keyword."""
FORMATS: Final = {
    "date-time": "2026-01-01T12:00:00Z", "date": "2026-01-01", "time": "12:00:00Z", "duration": "PT1H",
    "email": "user@example.com", "idn-email": "user@example.com", "hostname": "example.com",
    "idn-hostname": "example.com", "ipv4": "192.0.2.1", "ipv6": "2001:db8::1", "uri": "https://example.com/",
    "uri-reference": "https://example.com/", "iri": "https://example.com/", "iri-reference": "https://example.com/",
    "uuid": "123e4567-e89b-42d3-a456-426614174000", "json-pointer": "/answer", "regex": ".*",
}  # fmt: skip
"""A text of each format: by draft 2020-12 the keyword demands nothing, but callers' libraries check it."""
LEAF_KEYWORDS: Final = frozenset({
    "type", "enum", "const", "pattern", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf",
})  # fmt: skip
"""Keywords by which a value without parts is checked when it is chosen. None refers to another part of the schema."""


class _Unfilled(Exception):
    """No value of a part of the schema was found, because of what the message names; it contains nothing of the
    schema but words of the standard."""


def fill_schema(schema: Mapping[str, Any], text: str) -> str:
    """Return a document that validates: as far as the schema lets them, its strings are `text` and its numbers are the
    first number in it. Raises WorkerRefused if none is found."""
    reason = "keywords that exclude what was found"
    try:
        value = _Document(schema, text).value(schema, 0)
        if validator(schema).is_valid(value):
            return json.dumps(value)
    except _Unfilled as unfilled:
        reason = str(unfilled)
    finding = f"A simulated worker finds no value for the JSON schema, because of {reason}."
    message = f"{finding} Simplify it, or ask a real worker."
    raise WorkerRefused(message, failure=Failure("refused", excerpt=message))


def find_numbers(text: str) -> list[float]:
    """Return the numbers in a text, without those that are too large for a float, for which JSON has no word."""
    return [number for number in map(float, NUMBER.findall(text)) if math.isfinite(number)]


class _Document:
    """One document that is being filled in."""

    def __init__(self, root: Mapping[str, Any], text: str) -> None:
        self._root = root
        self._text = text
        self._number = Fraction(next(iter(find_numbers(text)), 0.0))
        self._left = MOST_VALUES
        self._inside: frozenset[str] = frozenset()
        """The references that lead to the part of the schema that is being filled in."""
        self._variant = 0
        """Which of the values that fit is taken: another one for each item of an array without duplicates."""

    def value(self, schema: object, depth: int) -> Any:
        """Return a value of this part of the schema. Raises _Unfilled."""
        self._left -= 1
        if self._left < 0 or depth > DEEPEST:
            raise _Unfilled("too many values, or too deep ones")
        outside = self._inside
        references: set[str] = set()
        inlined = self._inlined(schema, references)
        self._inside |= references
        try:
            return self._value_of(inlined, depth)
        finally:
            self._inside = outside

    def _inlined(self, schema: object, references: set[str]) -> dict[str, Any]:
        """Return the schema together with those that `$ref` and `allOf` name, and add the references to the set.

        One that leads to the schema in which it stands is not followed: where another value is allowed, the document
        ends there.
        """
        if schema is False:
            raise _Unfilled("the schema `false`")
        if not isinstance(schema, Mapping):
            return {}
        merged = {keyword: schema[keyword] for keyword in schema if keyword not in ("$ref", "allOf")}
        others = list(schema.get("allOf", ()))
        reference = schema.get("$ref")
        if reference in self._inside:
            raise _Unfilled("a reference that contains itself")
        if reference is not None and reference not in references:
            references.add(reference)
            others.append(self._look_up(reference))
        for part in others:
            other = self._inlined(part, references)
            properties = {**other.get("properties", {}), **merged.get("properties", {})}
            required = [*other.get("required", ()), *merged.get("required", ())]
            merged = {**other, **merged}
            if properties:
                merged["properties"] = properties
            if required:
                merged["required"] = required
        return merged

    def _look_up(self, reference: str) -> object:
        """Return the part of the whole schema that a reference such as `#/$defs/Item` names."""
        target: Any = self._root
        for name in unquote(reference).removeprefix("#").split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            try:
                target = target[int(name) if isinstance(target, list) else name]
            except (IndexError, KeyError, TypeError, ValueError):
                raise _Unfilled("a reference that is no path") from None
        return target

    def _value_of(self, schema: Mapping[str, Any], depth: int) -> Any:
        """Return a value of a schema that neither refers to another one nor has `allOf`."""
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return self._alternative(schema, keyword, schema[keyword], depth)
        if "const" in schema or "enum" in schema:
            return self._leaf(schema, [schema["const"]] if "const" in schema else schema["enum"])
        kind = schema.get("type", next((TYPES[keyword] for keyword in TYPES if keyword in schema), "string"))
        if isinstance(kind, list):
            return self._alternative(schema, "type", [{"type": name} for name in kind], depth)
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            return self._array(schema, depth)
        if kind in ("integer", "number"):
            return self._leaf(schema, self._numbers(schema, is_whole=kind == "integer"))
        if kind == "string":
            return self._leaf(schema, self._texts(schema))
        return self._leaf(schema, [None] if kind == "null" else [True, False])

    def _alternative(self, schema: Mapping[str, Any], keyword: str, alternatives: Iterable[object], depth: int) -> Any:
        """Return a value of the first alternative that has one."""
        rest = {other: schema[other] for other in schema if other != keyword}
        reason = _Unfilled(f"no {keyword}")
        for alternative in alternatives:
            try:
                return self.value({**rest, "allOf": [alternative]}, depth)
            except _Unfilled as unfilled:
                reason = unfilled
        raise reason

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        properties, required = dict(schema.get("properties", {})), schema.get("required", ())
        others = schema.get("additionalProperties", True)
        for name in required:
            properties.setdefault(name, others)
        for number in range(min(schema.get("minProperties", 0), MOST_VALUES) - len(properties)):
            properties[f"field_{number + 1}"] = others
        filled: dict[str, Any] = {}
        for name, inner in properties.items():
            try:
                filled[name] = self.value(inner, depth + 1)
            except _Unfilled:
                if name in required:
                    raise
        return filled

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        first, others = schema.get("prefixItems", []), schema.get("items")
        items: list[Any] = []
        outer_variant = self._variant
        while len(items) < max(len(first), schema.get("minItems", 0)):
            if schema.get("uniqueItems"):
                self._variant = len(items)
            items.append(self.value(first[len(items)] if len(items) < len(first) else others, depth + 1))
        self._variant = outer_variant
        return items

    def _leaf(self, schema: Mapping[str, Any], candidates: Iterable[Any]) -> Any:
        """Return the candidate that is wanted among those that fit."""
        check = validator({keyword: schema[keyword] for keyword in LEAF_KEYWORDS & schema.keys()})
        fitting: list[Any] = []
        for candidate in candidates:
            if candidate not in fitting and check.is_valid(candidate):
                fitting.append(candidate)
            if len(fitting) > self._variant:
                break
        if not fitting:
            keywords = ", ".join(sorted(LEAF_KEYWORDS & schema.keys()))
            raise _Unfilled(f"a part that has {keywords}")
        return fitting[-1]

    def _numbers(self, schema: Mapping[str, Any], *, is_whole: bool) -> Iterator[int | float]:
        """Yield numbers, those in the schema's bounds and near to the answer's first."""
        low = max((_exact(schema[name]) for name in ("minimum", "exclusiveMinimum") if name in schema), default=None)
        high = min((_exact(schema[name]) for name in ("maximum", "exclusiveMaximum") if name in schema), default=None)
        wished = self._number if low is None else max(self._number, low)
        wished = wished if high is None else min(wished, high)
        step = _exact(schema.get("multipleOf", 1))
        if is_whole:
            step = Fraction(step.numerator)  # the least multiple that is whole
        elif "multipleOf" not in schema:
            yield _plain(wished)
            if low is not None and high is not None:
                yield _plain((low + high) / 2)
        nearest = round(wished / step)
        for distance in range(self._variant + CHOICES):
            yield _plain((nearest + distance) * step)
            yield _plain((nearest - distance) * step)

    def _texts(self, schema: Mapping[str, Any]) -> Iterator[str]:
        """Yield texts: one of the schema's format, the answer, its number, and what matches the schema's pattern."""
        least, most = int(schema.get("minLength", 0)), int(schema.get("maxLength", MOST_CHARACTERS))
        if least > MOST_CHARACTERS:
            return
        if schema.get("format") in FORMATS:
            yield FORMATS[schema["format"]]
        else:
            yield self._text[:most].ljust(least, ".")
            for number in range(self._variant):
                yield f"{number + 2}. {self._text}"[:most].ljust(least, ".")
        if "pattern" in schema:
            yield str(_plain(self._number))
            for text in matching_texts(schema["pattern"], least):
                yield text.ljust(least, ".")


def _exact(number: float) -> Fraction:
    """Return a number as it is written."""
    return Fraction(str(number))


def _plain(number: Fraction) -> int | float:
    return number.numerator if number.denominator == 1 else float(number)
