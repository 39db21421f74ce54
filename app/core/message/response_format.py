"""The form that a caller wants the answer in: any JSON object, or JSON that validates against a schema.

Schemas and what is validated come from outside. Nothing is fetched for them, patterns are matched with bounded work,
and a schema that cannot be used is refused before a run begins.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from jsonschema_rs import Draft202012Validator, FancyRegexOptions, ValidationError

from app.core.message.chat import STRICT, Form, Message, Text
from app.core.records import record

FAULTS = 8
"""The largest number of faults that are reported of one answer."""
FAULT_CHARS = 200
BACKTRACKS = 100_000
"""Steps after which a pattern counts as not matching."""
OPEN: Final = frozenset(
    {"allOf", "oneOf", "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "patternProperties"}
)
"""Keywords that OpenAI's strict mode does not accept."""
INSTRUCTION: Final = "Answer with one JSON "
"""The beginning of the message that asks for the form."""
INSTRUCTING: Final = frozenset({"system", "developer", "user"})
"""Roles whose messages can ask for JSON."""


@record(frozen=True, slots=True)
class Flaw:
    """An answer that is not of its form, and why; it is shown once more to the worker that gave it."""

    answer: str
    faults: tuple[str, ...]


def schema_fault(schema: Mapping[str, Any]) -> str | None:
    """Return the reason why a schema cannot be used, or None. The reason contains no text of the schema."""
    try:
        validator(schema)
    except (ValidationError, ValueError):
        return "it is not a valid JSON schema of draft 2020-12 whose references stay inside it"
    return None


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
    reasons = []
    for error in validator(form.schema).iter_errors(value):
        reasons.append(f"at {_place(error.instance_path)}: {error.message}"[:FAULT_CHARS])
        if len(reasons) == FAULTS:
            break
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
        keeps_open and form.schema is not None and not _combines(form.schema)
    )


def _combines(schema: object) -> bool:
    """Return whether a keyword of `OPEN`, or a field of such a name, occurs anywhere in a schema."""
    if isinstance(schema, Mapping):
        return bool(schema.keys() & OPEN) or any(map(_combines, schema.values()))
    return isinstance(schema, list | tuple) and any(map(_combines, schema))


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


def _place(path: Sequence[str | int]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".") or "the top"
