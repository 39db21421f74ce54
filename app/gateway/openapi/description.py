"""`GET /openapi.json`: the API's own description, made of the routes that there are and of the models that they read.

Each route names its operation here; a test fails for one that has none. Without a key: it says nothing about this
installation.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import orjson
from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from app.core.records import record
from app.core.run.events import RUN_STATES
from app.gateway.anthropic.request import Asked, MessagesRequest
from app.gateway.chat.request import ChatRequest
from app.gateway.openapi import shapes
from app.gateway.responses.request import ResponsesRequest
from app.gateway.runs.feedback import FeedbackRequest
from app.gateway.wire.parameters import COMPLETIONS, PARAMETERS, Parameter
from app.gateway.wire.query import EVENT_PAGE, PAGE

JSON, EVENTS = "application/json", "text/event-stream"
REFUSALS: Final = (400, 401, 403, 404, 405, 408, 413, 415, 429, 499, 500, 502, 503, 504)
READING: Final = (400, 401, 403, 404, 500, 503)
MEANINGS: Final[Mapping[int, str]] = {
    400: "The request is not valid; `param` names the field.",
    401: "There is no key, or it is not valid.",
    403: "The key lacks a scope.",
    404: "There is nothing of that name, or the key may not see it.",
    408: "The body came too late.",
    409: "The Idempotency-Key was used with another request.",
    413: "The body is too large.",
    415: "The body is not UTF-8 JSON, or has a content encoding.",
    429: "A rate, a concurrency or a budget is used up; see Retry-After.",
    499: "The run was cancelled.",
    500: "A bug.",
    502: "No worker could complete the run.",
    503: "The service is at capacity, or its database is away; see Retry-After.",
    504: "The run reached its time limit.",
}


@record(frozen=True, slots=True)
class Operation:
    """One method of one path. `body` is the request's schema, `query` holds schemas by parameter."""

    summary: str
    reply: type[BaseModel] | str
    """The 200's model, or its media type."""
    body: str = ""
    query: Mapping[str, Mapping[str, Any]] | None = None
    errors: tuple[int, ...] = ()
    streams: bool = False
    key: bool = True
    error: str = "Error"
    """The schema of every other status."""


TEXT: Final = {"type": "string", "maxLength": 512}
MOMENT: Final = {"type": "string", "description": "Seconds since 1970, or RFC 3339."}
RUN_FILTERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "state": {"enum": list(RUN_STATES)},
    **dict.fromkeys(("tier", "key", "worker", "label"), TEXT),
    **dict.fromkeys(("since", "until"), MOMENT),
    "min_cost_usd": {"type": "number", "minimum": 0, "maximum": 1_000_000},
    "degraded": {"type": "boolean"},
    "limit": {"type": "integer", "minimum": 1, "maximum": PAGE},
    "after": {"type": "string", "description": "`next` of the page before."},
}
EVENT_FILTERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "after": {"type": "integer", "minimum": 0, "maximum": 10**15 - 1},
    "limit": {"type": "integer", "minimum": 1, "maximum": EVENT_PAGE},
}
IDEMPOTENCY: Final = {
    "name": "Idempotency-Key",
    "in": "header",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[ -~]+$"},
}
RUNNING: Final = (400, 401, 403, 404, 408, 409, 413, 415, 429, 499, 500, 502, 503, 504)

OPERATIONS: Final[Mapping[tuple[str, str], Operation]] = {
    ("POST", "/v1/chat/completions"): Operation(
        "Answer a conversation.", shapes.ChatCompletion, "ChatRequest", errors=RUNNING, streams=True
    ),
    ("POST", "/v1/completions"): Operation(
        "Answer a prompt (legacy).", shapes.TextCompletion, "CompletionRequest", errors=RUNNING, streams=True
    ),
    ("POST", "/v1/messages"): Operation(
        "Answer a conversation (Anthropic's format).",
        JSON,
        "MessagesRequest",
        errors=RUNNING,
        streams=True,
        error="MessagesError",
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        "Estimate a conversation's tokens (Anthropic's format).",
        JSON,
        "Asked",
        errors=(*READING, 408, 409, 413, 415),
        error="MessagesError",
    ),
    ("POST", "/v1/responses"): Operation("Answer input.", JSON, "ResponsesRequest", errors=RUNNING, streams=True),
    ("GET", "/v1/responses/{response}"): Operation(
        "Retrieve a response, or hear it from behind an event.",
        JSON,
        query={"stream": {"type": "boolean"}, "starting_after": EVENT_FILTERS["after"]},
        errors=(*READING, 409, 429),
        streams=True,
    ),
    ("DELETE", "/v1/responses/{response}"): Operation("Delete a response and its content.", JSON, errors=READING),
    ("POST", "/v1/responses/{response}/cancel"): Operation(
        "Stop a response.", JSON, "Nothing", errors=(*READING, 408, 409, 413, 415)
    ),
    ("GET", "/v1/responses/{response}/input_items"): Operation(
        "List what a response was asked.",
        JSON,
        query={"order": {"enum": ["asc", "desc"]}, "limit": RUN_FILTERS["limit"], "after": TEXT},
        errors=READING,
    ),
    ("GET", "/v1/models"): Operation("List the models.", shapes.ModelList, errors=(401, 500, 503)),
    ("GET", "/v1/models/{model}"): Operation("Describe a model.", shapes.Model, errors=(401, 404, 500, 503)),
    ("GET", "/v1/runs"): Operation("List runs, newest first.", shapes.RunList, query=RUN_FILTERS, errors=READING),
    ("GET", "/v1/runs/{run}"): Operation("Explain a run.", shapes.WholeRun, errors=READING),
    ("GET", "/v1/runs/{run}/events"): Operation(
        "Read a run's journal.", shapes.EventList, query=EVENT_FILTERS, errors=READING
    ),
    ("GET", "/v1/runs/{run}/steps/{n}"): Operation("Read what a step saw and said.", shapes.StepInFull, errors=READING),
    ("GET", "/v1/runs/{run}/stream"): Operation(
        "Hear a run's answer, from its start or from behind an event.",
        EVENTS,
        query={"starting_after": EVENT_FILTERS["after"]},
        errors=(*READING, 409, 429),
    ),
    ("POST", "/v1/runs/{run}/cancel"): Operation(
        "Stop a run.", shapes.Run, "Nothing", errors=(*READING, 408, 409, 413, 415)
    ),
    ("POST", "/v1/runs/{run}/feedback"): Operation(
        "Rate a run's answer.", shapes.RunRating, "FeedbackRequest", errors=(*READING, 408, 409, 413, 415)
    ),
    ("GET", "/healthz"): Operation("Whether the process lives.", shapes.Health, key=False),
    ("GET", "/readyz"): Operation("Whether it can do its work.", shapes.Readiness, key=False),
    ("GET", "/metrics"): Operation("Prometheus metrics.", "text/plain", key=False),
    ("GET", "/openapi.json"): Operation("This description.", JSON, key=False),
}


MESSAGES_ERROR: Final = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": "string"},
    },
}


def routes(public: Iterable[APIRouter], version: str) -> APIRouter:
    """The route of the description of all of `public`, itself included.

    It is made when it is asked for first, off the loop: 40 ms of work that few processes ever need.
    """
    router = APIRouter()
    found = [*(route for one in public for route in one.routes)]
    described: list[bytes] = []

    @router.get("/openapi.json")
    async def openapi() -> Response:
        if not described:
            described.append(await asyncio.to_thread(lambda: orjson.dumps(document(found, version))))
        return Response(described[0], media_type=JSON)

    return router


def document(found: Iterable[object], version: str) -> dict[str, Any]:
    """The description of those of `found` that are API routes."""
    paths: dict[str, dict[str, Any]] = {}
    served = [(route.path, method) for route in found if isinstance(route, APIRoute) for method in route.methods or ()]
    for path, method in [*served, ("/openapi.json", "GET")]:
        template = path.replace(":path}", "}")
        if method != "HEAD":
            operation = OPERATIONS.get((method, template)) or Operation("", JSON)
            paths.setdefault(template, {})[method.lower()] = _operation(template, operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": version, "description": "An orchestration API; OpenAI-compatible."},
        "paths": paths,
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(path: str, operation: Operation) -> dict[str, Any]:
    parameters = [
        {"name": name.strip("{}"), "in": "path", "required": True, "schema": {"type": "string"}}
        for name in path.split("/")
        if name.startswith("{")
    ]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in (operation.query or {}).items()]
    described: dict[str, Any] = {
        "summary": operation.summary,
        "security": [{"bearer": []}, {"header": []}] if operation.key else [],
        "parameters": parameters,
        "responses": {
            "200": _success(operation),
            **{str(status): _error(status, operation.error) for status in operation.errors},
        },
    }
    if path == "/readyz":
        described["responses"]["503"] = _content("Not ready.", JSON, _ref("Readiness"))
    if operation.body:
        required = operation.body != "Nothing"
        described["requestBody"] = {"required": required, "content": {JSON: {"schema": _ref(operation.body)}}}
        described["parameters"].append(IDEMPOTENCY)
    return described


def _success(operation: Operation) -> dict[str, Any]:
    schema = {} if isinstance(operation.reply, str) else _ref(operation.reply.__name__)
    reply = _content("Success.", operation.reply if isinstance(operation.reply, str) else JSON, schema)
    if operation.streams:
        reply["content"][EVENTS] = {"schema": {}}  # OpenAPI 3.1 cannot say what the events of a stream are
    return reply


def _error(status: int, schema: str) -> dict[str, Any]:
    return _content(MEANINGS[status], JSON, _ref(schema))


def _content(said: str, media: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    headers = {"x-request-id": {"schema": {"type": "string"}}}
    return {"description": said, "headers": headers, "content": {media: {"schema": schema}}}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _schemas() -> dict[str, Any]:
    replies: list[tuple[type[BaseModel], Literal["serialization", "validation"]]] = [
        (model, "serialization")
        for model in (shapes.Error, *(one.reply for one in OPERATIONS.values()))
        if not isinstance(model, str)
    ]
    requests: list[tuple[type[BaseModel], Literal["serialization", "validation"]]] = [
        (ChatRequest, "validation"),
        (MessagesRequest, "validation"),
        (Asked, "validation"),
        (ResponsesRequest, "validation"),
        (FeedbackRequest, "validation"),
    ]
    _, made = models_json_schema([*dict.fromkeys(replies), *requests], ref_template="#/components/schemas/{model}")
    schemas: dict[str, Any] = made["$defs"]
    read = schemas["ChatRequest"]
    text = {"type": "string"}
    prompt = {"anyOf": [text, {"type": "array", "items": text, "minItems": 1, "maxItems": 1}]}
    legacy = {"prompt": prompt, **{name: one for name, one in read["properties"].items() if name in COMPLETIONS}}
    schemas["ChatRequest"] = _request(read["properties"], read["required"], PARAMETERS)
    schemas["Nothing"] = {"type": "object"}
    schemas["MessagesError"] = MESSAGES_ERROR
    schemas["CompletionRequest"] = _request(legacy, ["model", "prompt"], COMPLETIONS)
    return schemas


def _request(read: Mapping[str, Any], required: Sequence[str], decisions: Mapping[str, Parameter]) -> dict[str, Any]:
    """A request's schema with what is refused unless it asks for nothing, and with null for whatever may be absent."""
    properties: dict[str, Any] = {}
    for name, row in decisions.items():
        found = {"enum": list(row.neutral)} if row.decision == "refused" else _closed(read[name])
        properties[name] = (found if name in required else _or_null(found)) | {"description": row.note}
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Maps whose keys follow a pattern have no others."""
    return {**schema, "additionalProperties": False} if "patternProperties" in schema else dict(schema)


def _or_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None]}
    choices = list(schema.get("anyOf", ()))
    if {"type": "null"} in choices:
        return dict(schema)
    kept = {name: schema[name] for name in ("title", "default") if name in schema}
    inner = {name: value for name, value in schema.items() if name not in kept}
    return {**kept, "anyOf": [*(choices or [inner]), {"type": "null"}]}
