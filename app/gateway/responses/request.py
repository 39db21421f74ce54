"""The request of `POST /v1/responses`: from checked JSON values to a `Task` and what else an order needs.

`parameters.py` decides what becomes of every top-level field, `input.py` reads the items. Values never occur
in an error.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import Discriminator, Field, StringConstraints

from app.core.message.chat import Form, Message, Sampling, Task, Text, Tool
from app.errors import InvalidRequest
from app.gateway.chat.request import MetadataKey, MetadataValue
from app.gateway.responses.calls import pair_outputs
from app.gateway.responses.input import Item, conversation, find_loaded_tools
from app.gateway.responses.tools import (
    AllowedTools,
    AnyTool,
    Choice,
    check_search,
    list_ignored_tools,
    response_tools,
    toolbox_of,
)
from app.gateway.wire.parameters import (
    MOST_LISTED,
    RESPONSES,
    BatonOptions,
    Effort,
    Includable,
    Parameter,
    WireModel,
    check_kinds,
    read_fields,
    sort_fields,
)
from app.gateway.wire.response_formats import JsonObjectFormat, NamedSchema, TextFormat, schema_form

ECHOED: Final = ("max_tool_calls", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "truncation")
"""Parameters without effect that the response repeats, as OpenAI's does."""


class JsonSchemaFormat(NamedSchema):
    """JSON that matches a schema."""

    type: Literal["json_schema"]


class TextOptions(WireModel):
    """The format of the answer."""

    format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Discriminator("type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(WireModel):
    """The effort that the request asks for."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: Literal["standard"] | None = None


class StreamOptions(WireModel):
    """Accepted and not needed."""

    include_obfuscation: bool | None = None


class ResponsesRequest(WireModel):
    """The fields that are read."""

    model: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    input: str | Annotated[list[Item], Field(min_length=1, max_length=2_048, fail_fast=True)]
    instructions: str | None = None
    tools: Annotated[list[AnyTool], Field(max_length=MOST_LISTED, fail_fast=True)] = []
    tool_choice: Choice | None = None
    parallel_tool_calls: bool = True
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: Annotated[list[Includable], Field(max_length=16, fail_fast=True)] = []
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] = {}
    user: Annotated[str, StringConstraints(max_length=512)] | None = None
    previous_response_id: Annotated[str, StringConstraints(pattern=r"^resp_[A-Za-z0-9_]{1,120}$")] | None = None
    store: bool = True
    background: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    baton: BatonOptions | None = None
    # Checked and noted; see parameters.py.
    truncation: Literal["auto", "disabled"] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"] | None = None
    safety_identifier: Annotated[str, StringConstraints(max_length=128)] | None = None
    prompt_cache_key: Annotated[str, StringConstraints(max_length=1024)] | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: dict[str, Any] | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    client_metadata: Annotated[dict[str, str], Field(max_length=64)] = {}


class CountRequest(ResponsesRequest):
    """The fields of which `INPUT_TOKENS` has rows are read."""

    model: Annotated[str, StringConstraints(max_length=256)] = ""
    input: str | Annotated[list[Item], Field(max_length=2_048, fail_fast=True)] = []


Read = TypeVar("Read", bound=ResponsesRequest)


def read_request(body: Mapping[str, Any], *, omits_search: bool = True) -> tuple[ResponsesRequest, tuple[str, ...]]:
    """Return the request, and the names of parameters that are ignored; raises `InvalidRequest` naming the field at
    fault.

    `omits_search` is false where a web search with access to the web is refused instead of left out.
    """
    request, ignored = validate_body(body, RESPONSES, ResponsesRequest, omits_search=omits_search)
    if request.background and not request.store:
        raise InvalidRequest("A background response must be stored: leave store out.", param="store")
    return request, ignored


def validate_body(
    body: Mapping[str, Any], table: Mapping[str, Parameter], model: type[Read], *, omits_search: bool
) -> tuple[Read, tuple[str, ...]]:
    """Return the fields of a body that `table` lets be read, and the names of those that are ignored, as
    `read_request`."""
    fields, ignored = sort_fields(body, table)
    for tools, param in _tool_lists(fields):
        check_search(tools, param, omitted=omits_search)
    check_kinds(fields.get("tools"), "function", "custom", "namespace", "tool_search", "web_search")
    request = read_fields(model, fields)
    return request, (*ignored, *list_ignored_tools(request.tools))


def _tool_lists(fields: Mapping[str, Any]) -> Iterator[tuple[list[object], str]]:
    """Yield the lists of tools in a request that has not been validated, each with its place."""
    tools = fields.get("tools")
    if isinstance(tools, list):
        yield tools, "tools"
    items = fields.get("input")
    if not isinstance(items, list):
        return
    for place, item in enumerate(items):
        if isinstance(item, dict) and item.get("type") == "additional_tools" and isinstance(item.get("tools"), list):
            yield item["tools"], f"input[{place}].tools"


def task_of(request: ResponsesRequest, before: tuple[Message, ...], loaded_before: Iterable[Tool] = ()) -> Task:
    """Return the task: instructions, the conversation before with the tools that it put on offer, and what this request
    adds.

    Raises `InvalidRequest`.
    """
    messages: list[Message] = []
    if request.instructions:
        messages.append(Message("developer", (Text(request.instructions),)))
    messages += pair_outputs((*before, *new_messages(request)))
    sampling = Sampling(request.temperature, request.top_p, max_tokens=request.max_output_tokens)
    loaded_tools = list(loaded_before)
    if not isinstance(request.input, str):
        loaded_tools += find_loaded_tools(request.input)
    logprobs = None
    if request.top_logprobs or "message.output_text.logprobs" in request.include:
        logprobs = request.top_logprobs or 0
    return Task(
        tuple(messages),
        sampling,
        request.user,
        request.metadata,
        toolbox=toolbox_of(request.tools, request.tool_choice, request.parallel_tool_calls, loaded_tools),
        logprobs=logprobs,
        form=_form(request),
        echoed=_collect_echoed_parameters(request, loaded_tools),
    )


def new_messages(request: ResponsesRequest) -> tuple[Message, ...]:
    """Return the messages that this request adds to the conversation."""
    if isinstance(request.input, str):
        return (Message("user", (Text(request.input),)),)
    return conversation(request.input)


def _collect_echoed_parameters(request: ResponsesRequest, loaded_tools: Iterable[Tool]) -> dict[str, Any]:
    """Return the parameters of `ECHOED` that the request has, and what of the others the task does not keep as it was
    sent.

    A turn that brings tool results keeps neither the user nor the metadata, a task without tools nothing about them,
    and one with a choice among some of the tools only those.
    """
    echoed = {name: getattr(request, name) for name in ECHOED}
    echoed["verbosity"] = request.text.verbosity if request.text is not None else None
    echoed |= {"user": request.user, "metadata": request.metadata or None}
    if not request.tools and not request.parallel_tool_calls:
        echoed["parallel_tool_calls"] = False
    if isinstance(request.tool_choice, AllowedTools):
        echoed["tool_choice"] = request.tool_choice.model_dump()
        echoed["tools"] = response_tools(toolbox_of(request.tools, None, request.parallel_tool_calls, loaded_tools))
    elif not request.tools:
        echoed["tool_choice"] = request.tool_choice
    return {name: value for name, value in echoed.items() if value is not None}


def _form(request: ResponsesRequest) -> Form | None:
    if request.text is None:
        return None
    text_format = request.text.format
    if isinstance(text_format, JsonSchemaFormat):
        return schema_form(text_format, "text.format.schema")
    if isinstance(text_format, JsonObjectFormat):
        return Form()
    return None
