"""JSON schemas of requests for `/openapi.json`, from the request models and the tables of parameters."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from app.gateway.openapi.operations import allow_null, request_schema
from app.gateway.wire.parameters import Parameter


def build_schema(
    model: type[BaseModel], name: str, decisions: Mapping[str, Parameter], required: Sequence[str]
) -> dict[str, Any]:
    """Return a request's schema by its table of parameters: each row is a property, described by the row's note.

    `model` describes what is read. What is refused has only its neutral values; whatever may be absent may be null.
    """
    read = request_schema(model, name)
    properties: dict[str, Any] = {}
    for field, row in decisions.items():
        if row.decision == "refused":
            schema = allow_null({"enum": list(row.neutral)})
        else:
            schema = _forbid_other_keys(read["properties"][field])
        properties[field] = schema | {"description": row.note}
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
        "$defs": read["$defs"],
    }


def _forbid_other_keys(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A map whose keys follow a pattern has no others."""
    if "patternProperties" in schema:
        return {**schema, "additionalProperties": False}
    if "anyOf" in schema:
        return {**schema, "anyOf": [_forbid_other_keys(choice) for choice in schema["anyOf"]]}
    return dict(schema)
