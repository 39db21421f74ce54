"""The form that a caller wants the answer in: any JSON object, or JSON that validates against a schema.

Schemas and what is validated come from outside. Nothing is fetched for them, patterns are matched with bounded work,
and a schema that cannot be used is refused before a run begins.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, takewhile
from typing import Any, Final
from urllib.parse import unquote

from jsonschema_rs import Draft202012Validator, FancyRegexOptions, ValidationError
from msgspec import Struct

from app.core.message.chat import STRICT, Form, Message, Text

FAULTS = 8
"""The largest number of faults that are reported of one answer."""
FAULT_CHARS = 200
BACKTRACKS = 100_000
"""Steps after which a pattern counts as not matching."""
MOST_CHECKS: Final = 10_000
"""The most subschemas that a validator may apply to one value. Of 60 definitions, each of which refers twice to the
next one, it would apply 2**60, and the process does nothing else while it validates."""
MOST_DOCUMENTS: Final = 8
"""The most subschemas with an `$id`, each of which is a document of its own for references."""
FIELD_NAME: Final = re.compile(r"[A-Za-z_$][A-Za-z0-9_.-]{0,63}")
"""A key of a schema that may be told, because it looks like the name of a field."""
IN_PLACE: Final = frozenset({"allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas"})
"""Keywords whose subschemas apply to the same value as the schema itself, and not to a part of the value."""
OPEN: Final = frozenset(
    {"allOf", "oneOf", "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "patternProperties"}
)
"""Keywords that OpenAI's strict mode does not accept."""
INSTRUCTION: Final = "Answer with one JSON "
"""The beginning of the message that asks for the form."""
INSTRUCTING: Final = frozenset({"system", "developer", "user"})
"""Roles whose messages can ask for JSON."""


class Flaw(Struct, frozen=True):
    """An answer that is not of its form, and why; it is shown once more to the worker that gave it."""

    answer: str
    faults: tuple[str, ...]


def schema_fault(schema: Mapping[str, Any]) -> str | None:
    """Return the reason why a schema cannot be used, or None. The reason has no text of the schema but names."""
    try:
        validator(schema)
    except ValidationError as error:
        if not error.instance_path:
            return "a reference in it leads to nothing, or out of it"
        place = _place(list(takewhile(_is_field_name, error.instance_path)))
        return f"it is not a valid JSON schema of draft 2020-12 at {place}"
    except ValueError:
        return "it is not a valid JSON schema of draft 2020-12"
    checks = _Checks(schema)
    if len(checks.documents) > MOST_DOCUMENTS:
        return f"it has more than {MOST_DOCUMENTS} parts with an $id"
    if checks.most() > MOST_CHECKS:
        return f"one value would be checked by more than {MOST_CHECKS} schemas, once references are followed"
    return None


class _Checks:
    """Counts how many subschemas a validator applies to one value: a subschema itself, those that its keywords combine,
    and those to which its references lead."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._parts = [part for part in _all_in(schema) if isinstance(part, Mapping)]
        self.documents = [part for part in self._parts if part is schema or "$id" in part]
        self._anchored = defaultdict[str, list[object]](list)
        for part in self._parts:
            for keyword in ("$anchor", "$dynamicAnchor"):
                self._anchored[str(part.get(keyword))].append(part)
        self._counts: dict[int | str, int] = {}

    def most(self) -> int:
        """Return the largest count of any subschema."""
        try:
            return max(map(self._count, self._parts))
        except RecursionError:
            return MOST_CHECKS + 1

    def _count(self, part: object) -> int:
        """Return the count of a subschema. A text is a reference's fragment, and counts for all that it leads to."""
        key = part if isinstance(part, str) else id(part)
        if key not in self._counts:
            self._counts[key] = 0  # a validator does not follow a part that leads back to itself
            if isinstance(part, str):
                self._counts[key] = sum(map(self._count, self._targets(part)))
            else:
                self._counts[key] = 1 + sum(map(self._count, self._inner(part)))
        return self._counts[key]

    def _inner(self, part: object) -> Iterator[object]:
        """Yield the subschemas that apply to the same value, and the fragments of the references that do."""
        if not isinstance(part, Mapping):
            return
        for keyword in IN_PLACE & part.keys():
            yield part[keyword]
            yield from _items(part[keyword])
        for keyword in ("$ref", "$dynamicRef"):
            if keyword in part:
                yield unquote(str(part[keyword]).partition("#")[2])

    def _targets(self, fragment: str) -> Iterator[object]:
        """Yield what a reference with this fragment may lead to, in any document of the schema."""
        if fragment and not fragment.startswith("/"):
            yield from self._anchored[fragment]
            return
        for document in self.documents:
            target: object = document
            for name in fragment.split("/")[1:]:
                if isinstance(target, Mapping):
                    target = target.get(name.replace("~1", "/").replace("~0", "~"))
                else:
                    target = next(islice(_items(target), int(name), None), None) if name.isdecimal() else None
            yield target


def _all_in(value: object) -> Iterator[object]:
    """Yield a value and all that is in it."""
    left = [value]
    while left:
        value = left.pop()
        yield value
        left += _items(value)


def _items(value: object) -> Iterable[object]:
    """Return the values of a table or a list; of anything else nothing."""
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def is_closed(schema: object) -> bool:
    """Return whether OpenAI's strict mode accepts a schema: objects have all the fields that they name, and no others.

    Its endpoint refuses a request with any other schema that is called strict.
    """
    if not isinstance(schema, Mapping) or schema.keys() & OPEN:
        return False
    properties = schema.get("properties", {})
    if schema.get("type") == "object" or properties:
        required = schema.get("required")
        if schema.get("additionalProperties") is not False or not isinstance(properties, Mapping):
            return False
        if not isinstance(required, list | tuple) or set(map(str, required)) != set(properties):
            return False
    inner_schemas = [*properties.values(), *(schema.get("$defs") or {}).values(), *(schema.get("anyOf") or ())]
    if "items" in schema:
        inner_schemas.append(schema["items"])
    return all(map(is_closed, inner_schemas))


def faults(form: Form, text: str) -> tuple[str, ...]:
    """Return the reasons why a text does not match the form; () if it does."""
    try:
        value = STRICT.decode(text)
    except (ValueError, RecursionError):
        return ("it is not JSON, or not JSON alone",)
    if form.schema is None:
        if isinstance(value, dict):
            return ()
        return ("it is not a JSON object",)
    its_validator, reasons = validator(form.schema), list[str]()
    try:
        for error in islice(its_validator.iter_errors(value), FAULTS):
            reasons.append(f"at {_place(error.instance_path)}: {error.message}"[:FAULT_CHARS])
    except ValueError:  # the validator cannot take the value
        return ("it has half of a surrogate pair, or is nested too deeply",)
    return tuple(reasons)


def constrains_decoding(form: Form, structured: bool) -> bool:
    """Return whether a worker's decoding is constrained to the whole form, by a provider that treats it as strict.

    `structured` says whether its provider constrains decoding to schemas at all.
    """
    return structured and form.strict and form.schema is not None


def json_mode_suffices(form: Form, messages: Iterable[Message], *, json_mode: bool) -> bool:
    """Return whether a worker's JSON mode needs no words about the form: it is any object, and a message asks for it.

    OpenAI refuses the mode where no message mentions JSON; other models may then write white space without end.
    """
    if not json_mode or form.schema is not None:
        return False
    return any(message.role in INSTRUCTING and "json" in message.text.lower() for message in messages)


def guarantees_form(form: Form, *, structured: bool, keeps_open: bool) -> bool:
    """Return whether every output of a worker matches the form, so that its answer can be streamed.

    `keeps_open` is `ProviderSpec.keeps_open` of its provider. No decoder is trusted with keywords that combine or
    negate schemas.
    """
    return constrains_decoding(form, structured) or (
        keeps_open and form.schema is not None and not has_keyword(form.schema, OPEN)
    )


def has_keyword(schema: object, keywords: frozenset[str]) -> bool:
    """Return whether one of the keywords, or a field of such a name, occurs anywhere in a schema."""
    return any(isinstance(part, Mapping) and bool(part.keys() & keywords) for part in _all_in(schema))


def add_form_instructions(
    form: Form, messages: tuple[Message, ...], *, constrained: bool, flaw: Flaw | None
) -> tuple[Message, ...]:
    """Return the messages of an answering step, with what they need so that its answer has the form.

    A worker whose decoding is `constrained` to the form, or whose JSON mode suffices, and that has not failed it gets
    them as they are.
    """
    if constrained and flaw is None:
        return messages
    instructed = (*messages, Message("user", (Text(_instruction(form)),)))
    if flaw is None:
        return instructed
    listed = "\n".join(f"- {fault}" for fault in flaw.faults)
    objection = f"This does not have the form that was asked for:\n{listed}\n\nAnswer again: the corrected JSON alone."
    return (*instructed, Message("assistant", (Text(flaw.answer),)), Message("user", (Text(objection),)))


def without_instruction(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return the messages before those that `add_form_instructions` has added about the form of the answer."""
    for place in range(len(messages) - 1, 0, -1):
        if messages[place].role == "user" and messages[place].text.startswith(INSTRUCTION):
            return messages[:place]
    return messages


def _instruction(form: Form) -> str:
    alone = f"{INSTRUCTION}object and nothing else: no code fence, no comment."
    if form.schema is None:
        return alone
    description = f"{form.description}\n\n" if form.description else ""
    schema = json.dumps(form.schema, ensure_ascii=False, sort_keys=True)
    return f"{alone.replace('object', 'value')}\n\n{description}It must validate against this JSON schema:\n{schema}"


def validator(schema: Mapping[str, Any]) -> Draft202012Validator:
    """Return what validates values by the schema. Raises ValidationError or ValueError for one that cannot be used."""
    limits = FancyRegexOptions(backtrack_limit=BACKTRACKS)
    return Draft202012Validator(dict(schema), pattern_options=limits, offline=True)


def _is_field_name(part: str | int) -> bool:
    return isinstance(part, int) or FIELD_NAME.fullmatch(part) is not None


def _place(path: Sequence[str | int]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".") or "the top"
