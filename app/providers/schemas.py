"""JSON schemas of tools' arguments in the form that providers take."""

from collections.abc import Iterable, Mapping
from typing import Any

from app.providers.document import EMPTY_SCHEMA

COMBINING = ("allOf", "anyOf", "oneOf")
"""Keywords that combine other schemas. Anthropic refuses them at the root of a tool's schema."""
OPENAI_REFUSES = (*COMBINING, "not", "enum", "const")
"""The keywords that OpenAI refuses there. It also wants a type."""


def with_plain_root(schema: Mapping[str, Any], refused: Iterable[str]) -> Mapping[str, Any]:
    """Return a schema without the keywords that are refused at its root. The arguments that the schemas combined there
    have are described then, and which of them go together is not."""
    refused = [keyword for keyword in refused if keyword in schema]
    if not refused:
        return schema
    properties: dict[str, Any] = {}
    for keyword in COMBINING:
        for branch in schema.get(keyword, ()):
            if isinstance(branch, Mapping):
                properties |= branch.get("properties", {})
    properties |= schema.get("properties", {})
    return {name: value for name, value in schema.items() if name not in refused} | {"properties": properties}


def for_openai(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema as OpenAI itself takes it."""
    if "type" not in schema:
        schema = {**EMPTY_SCHEMA, **schema}
    return with_plain_root(schema, OPENAI_REFUSES)
