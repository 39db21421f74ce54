"""OpenAI's `response_format`: the format of the answer, checked before a run begins."""

from functools import lru_cache
from typing import Annotated, Any, Final, Literal

import orjson
from msgspec.structs import replace
from pydantic import Discriminator, Field, StringConstraints

from app.core.message.chat import Form
from app.core.message.nesting import is_deeper
from app.core.message.response_format import is_closed, schema_fault
from app.errors import InvalidRequest
from app.gateway.wire.parameters import ToolName, WireModel

SCHEMA_BYTES: Final = 64 * 1024
SCHEMA_DEPTH: Final = 16
"""Levels of objects and lists in a schema; each step into a property takes two."""
CACHED_SCHEMAS: Final = 512
CACHED_SCHEMA_BYTES: Final = 8 * 1024
"""The number of schemas whose faults are cached, and the most bytes of one."""


class TextFormat(WireModel):
    """Text without a format."""

    type: Literal["text"]


class JsonObjectFormat(WireModel):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(WireModel):
    """A schema with its name."""

    name: ToolName
    description: Annotated[str, StringConstraints(max_length=4096)] | None = None
    form: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class JsonSchemaFormat(WireModel):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Discriminator("type")]


def form_of(response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat) -> Form | None:
    """Return the form of the answer, None for free text; raises `InvalidRequest` for a schema that cannot be used."""
    if isinstance(response_format, JsonSchemaFormat):
        return schema_form(response_format.json_schema, "response_format.json_schema.schema")
    if not isinstance(response_format, JsonObjectFormat):
        return None
    return Form()


def schema_form(schema_format: NamedSchema, param: str) -> Form:
    """Return the form that a schema stands for; without one, any JSON object."""
    if schema_format.form is not None:
        check(schema_format.form, param)
    form = Form(schema_format.form, schema_format.name, schema_format.description or "")
    return replace(form, strict=bool(schema_format.strict) and form.is_object and is_closed(schema_format.form))


def check(schema: dict[str, Any], param: str) -> None:
    """Raise `InvalidRequest` for a schema that cannot be used."""
    text = orjson.dumps(schema)
    if len(text) > SCHEMA_BYTES:
        fault: str | None = f"it is longer than {SCHEMA_BYTES:,} bytes"
    elif len(text) <= CACHED_SCHEMA_BYTES:
        fault = _cached_fault(text)
    else:
        fault = _fault(schema)
    if fault is not None:
        raise InvalidRequest(f"Invalid schema for '{param}': {fault}.", param=param, code="invalid_json_schema")


def check_parameters(schema: dict[str, Any], param: str) -> None:
    """Raise `InvalidRequest` for a schema of a function's arguments that cannot be used. They are an object, so that
    every provider refuses a schema which allows none."""
    check(schema, param)
    kinds = schema.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        message = f"Invalid schema for '{param}': its type must be \"object\", because a function's arguments are one."
        raise InvalidRequest(message, param=param, code="invalid_function_parameters")


@lru_cache(CACHED_SCHEMAS)
def _cached_fault(text: bytes) -> str | None:
    """Return the fault of a schema, by its text. An agent sends its tools with every turn, and checking one takes 100
    us."""
    return _fault(orjson.loads(text))


def _fault(schema: dict[str, Any]) -> str | None:
    if is_deeper(schema, SCHEMA_DEPTH):
        return f"it is nested deeper than {SCHEMA_DEPTH} levels"
    return schema_fault(schema)
