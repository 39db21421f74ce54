"""Declarations of routes for FastAPI's OpenAPI document: error replies, event streams, and request bodies.

Request bodies are read by `http/bodies.py`, which bounds them and reads them after the key was checked; FastAPI would
read a declared body before any dependency, and whole. So a route declares its body here, in `openapi_extra`, as FastAPI
documents it for bodies that a route parses itself. A route module lists its schemas of requests and of events in
`SCHEMAS`; schemas of whole replies are FastAPI's, from the response models.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel, TypeAdapter

from app.gateway.openapi.replies import Error

REFERENCE: Final = "#/components/schemas/"
HEADERS: Final = {"x-request-id": {"description": "The id of this request.", "schema": {"type": "string"}}}
MEANINGS: Final[Mapping[int, str]] = {
    400: "The request is not valid; `param` names the field.",
    401: "There is no key, or it is not valid.",
    403: "The key lacks a scope.",
    404: "There is nothing of that name, or the key may not see it.",
    405: "The route does not take this method.",
    408: "The body did not arrive in time.",
    409: "The request conflicts with the state of the run, or its Idempotency-Key was used with another request.",
    413: "The body is too large.",
    415: "The body is not UTF-8 JSON, or has a content encoding other than gzip and deflate.",
    429: "A rate, a concurrency or a budget is used up; see Retry-After.",
    499: "The run was cancelled.",
    500: "The service failed because of a bug, or what is stored is damaged (`record_damaged`).",
    502: "No worker could complete the run.",
    503: "The service is at capacity, or its database cannot be reached; see Retry-After.",
    504: "The run reached its time limit.",
}
READING: Final = (400, 401, 403, 404, 500, 503)
"""Errors of routes that read."""
FOLLOWING: Final = (*READING, 409, 429)
"""Errors of routes that stream a run which exists."""
WRITING: Final = (*READING, 408, 409, 413, 415)
"""Errors of routes that take a body and begin no run."""
RUNNING: Final = (*WRITING, 429, 499, 502, 504)
"""Errors of routes that begin runs."""
ENCODINGS: Final = "In UTF-8; as it is, or with `Content-Encoding: gzip` or `deflate`."
IDEMPOTENCY_KEY: Final = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "With the same key the same request is carried out once, however often it is sent.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[ -~]+$"},
}
LAST_EVENT_ID: Final = {
    "name": "Last-Event-ID",
    "in": "header",
    "required": False,
    "description": "The `id` of the last event that was received: the stream goes on behind it.",
    "schema": {"type": "string", "pattern": "^[0-9]{1,15}$"},
}

Responses = dict[int | str, dict[str, Any]]
Schemas = Mapping[str, Callable[[], dict[str, Any]]]
"""JSON schemas by name, each made when the document is: most processes are never asked for it."""


def replies(
    *errors: int,
    bodies: Sequence[type[BaseModel]] = (Error,),
    events: str = "",
    terminal: str = "",
    files: Sequence[str] = (),
) -> Responses:
    """Return the `responses` of a route: its 200 with the headers of every reply, and the statuses of its errors.

    `bodies` are the models of an error's body. They are referred to by name, so they must be part of some schema of
    events: FastAPI would compile a validator for each status of each route when the service starts, 30 ms in all, and
    give an error of a route that only streams the media type of its stream. `events` names the schema of a stream's
    events; `terminal` is the data of a last event that is no JSON. `files` are media types in which the reply may come
    as a file.
    """
    success: dict[str, Any] = {"description": "Success.", "headers": HEADERS}
    if events:
        success["content"] = {"text/event-stream": _stream(events, terminal)}
    if files:
        success["content"] = {file: {"schema": {"type": "string", "format": "binary"}} for file in files}
    declared: Responses = {200: success}
    for status in sorted(errors):
        content = {"application/json": {"schema": _one_of(bodies)}}
        declared[status] = {"description": MEANINGS[status], "headers": HEADERS, "content": content}
    return declared


def _one_of(models: Sequence[type[BaseModel]]) -> dict[str, Any]:
    references = [{"$ref": REFERENCE + model.__name__} for model in models]
    if len(references) == 1:
        return references[0]
    return {"anyOf": references}


def _stream(events: str, terminal: str) -> dict[str, Any]:
    """Return a stream in the form that FastAPI gives its own: `itemSchema` describes one event (OpenAPI 3.2)."""
    content = {"$ref": REFERENCE + events}
    data: dict[str, Any] = {"type": "string", "contentMediaType": "application/json", "contentSchema": content}
    if terminal:
        data = {"anyOf": [data, {"type": "string", "const": terminal}]}
    event = {
        "type": "object",
        "description": "One server-sent event.",
        "required": ["data"],
        "properties": {"data": data, "event": {"type": "string"}, "id": {"type": "string"}},
    }
    return {"itemSchema": event}


def body(name: str, *, example: Mapping[str, Any] | None = None, required: bool = True) -> dict[str, Any]:
    """Return the `openapi_extra` of a POST route whose body has the schema of the given name."""
    content: dict[str, Any] = {"schema": {"$ref": REFERENCE + name}}
    if example is not None:
        content["example"] = example
    return {
        "parameters": [IDEMPOTENCY_KEY],
        "requestBody": {"description": ENCODINGS, "required": required, "content": {"application/json": content}},
    }


def request_schema(model: type[BaseModel], name: str) -> dict[str, Any]:
    """Return a request model's JSON schema, in which whatever may be absent may be null, because that is how bodies are
    read. Its definitions are named `<name>.<class>`: wire formats share names of parts."""
    schema = model.model_json_schema(ref_template=REFERENCE + name + ".{model}")
    definitions = schema.pop("$defs", {})
    for field, described in schema.get("properties", {}).items():
        if field not in schema.get("required", ()):
            schema["properties"][field] = allow_null(described)
    return {**schema, "$defs": {f"{name}.{key}": value for key, value in definitions.items()}}


def allow_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a field's schema with null as one more value."""
    if "enum" in schema and "type" not in schema:
        return {**schema, "enum": [*schema["enum"], None]}
    choices = list(schema.get("anyOf", ()))
    if {"type": "null"} in choices:
        return dict(schema)
    outer = {key: schema[key] for key in ("title", "default", "description") if key in schema}
    inner = {key: value for key, value in schema.items() if key not in outer}
    return {**outer, "anyOf": [*(choices or [inner]), {"type": "null"}]}


def event_schema(events: Any) -> dict[str, Any]:
    """Return the JSON schema of a stream's events; its definitions are named as those of replies."""
    return TypeAdapter(events).json_schema(ref_template=REFERENCE + "{model}", mode="serialization")


def complete(document: dict[str, Any], schemas: Schemas) -> dict[str, Any]:
    """FastAPI's document with the given schemas among its components, and without its 422.

    FastAPI adds a 422 to every route with parameters; here a parameter that is not valid is a 400. Raises ValueError
    if two schemas have one name.
    """
    components: dict[str, Any] = document["components"]["schemas"]
    for unused in ("HTTPValidationError", "ValidationError"):
        components.pop(unused, None)
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            stream = operation["responses"]["200"].get("content", {}).get("text/event-stream", {})
            stream.pop("schema", None)  # of a stream as one text, where `itemSchema` describes its events
    for name, make in schemas.items():
        schema = _without_nulls(make())
        for part, definition in {**schema.pop("$defs", {}), name: schema}.items():
            if components.setdefault(part, definition) != definition:
                raise ValueError(f"two schemas are named {part}")
    return document


def _without_nulls(node: Any) -> Any:
    """Return a schema without keywords that are null, such as `default`: FastAPI leaves them out of its own."""
    if isinstance(node, dict):
        return {key: _without_nulls(value) for key, value in node.items() if value is not None}
    if isinstance(node, list):
        return [_without_nulls(value) for value in node]
    return node
