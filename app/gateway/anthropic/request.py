"""The request of `POST /v1/messages`: Anthropic's wire format to a `Task` and what else an order needs.

Every field of the published format is read, noted as ignored, or refused with a 400 that names it; unknown fields are
errors. Values never occur in an error.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal, TypeVar

import orjson
from msgspec.structs import replace
from pydantic import BaseModel, Field, StringConstraints

from app.core.message.chat import Form, Message, Part, Sampling, Task, Text, ToolCall, run_of
from app.core.message.response_format import is_closed
from app.errors import InvalidRequest
from app.gateway.anthropic.blocks import (
    Block,
    DocumentBlock,
    ImageBlock,
    SearchResultBlock,
    TextBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    parts_of,
    result_of,
)
from app.gateway.anthropic.tools import KNOWN, AnyTool, CacheMark, ToolChoice, allow, toolbox_of
from app.gateway.wire.parameters import (
    MOST_LISTED,
    BatonOptions,
    PartOptions,
    WireModel,
    check_kinds,
    drop_nulls,
    labels_on,
    read_fields,
)
from app.gateway.wire.response_formats import check
from app.gateway.wire.tool_names import short_name

IGNORED: Final = (
    *("service_tier", "speed", "top_k", "cache_control", "inference_geo", "diagnostics", "workspace_id"),
    *("user_profile_id", "context_management"),
)
"""Checked and noted; without effect. Cache marks inside the conversation are not noted: providers cache by prefix."""
REFUSED: Final[Mapping[str, str]] = {
    "container": "there are no containers",
    "mcp_servers": "no worker calls servers of yours; offer functions in `tools`",
    "thread": "no conversation is kept; send all of it with each request",
}
THREAD_UNSUPPORTED: Final = "thread_unsupported_request"
"""The code by which Anthropic's clients know that they must go on without a thread; their tool runners begin with
one."""
THINKING_EFFORT: Final = "high"
"""The effort that thinking stands for, where the request does not name one itself."""

Read = TypeVar("Read", bound=BaseModel)


class Turn(WireModel):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(max_length=1_024, fail_fast=True)]
    baton: PartOptions | None = None


class Thinking(WireModel):
    """The thinking that the request asks for."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(WireModel):
    """The form of the answer."""

    type: Literal["json_schema"]
    form: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(WireModel):
    """Form and effort."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class ClearThinking(WireModel):
    """Earlier thinking is to be left out, which it always is."""

    type: Literal["clear_thinking_20251015"]
    keep: Any = None


class ContextManagement(WireModel):
    """The parts of the conversation to leave out: only earlier thinking is known."""

    edits: Annotated[list[ClearThinking], Field(max_length=16)] = []


class Metadata(WireModel):
    """The end user."""

    user_id: Annotated[str, StringConstraints(max_length=512)] | None = None


class TokenCountRequest(WireModel):
    """The fields of a request to count tokens, which a request for a message has too."""

    model: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    messages: Annotated[list[Turn], Field(min_length=1, max_length=2_048, fail_fast=True)]
    system: str | Annotated[list[TextBlock], Field(max_length=512, fail_fast=True)] | None = None
    tools: Annotated[list[AnyTool], Field(max_length=MOST_LISTED, fail_fast=True)] = []
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The name that `output_config.format` had at first; clients of that time send it."""
    cache_control: CacheMark | None = None
    context_management: ContextManagement | None = None
    speed: Literal["standard", "fast"] | None = None
    workspace_id: Annotated[str, StringConstraints(max_length=256)] | None = None
    user_profile_id: Annotated[str, StringConstraints(max_length=256)] | None = None
    container: None = None
    mcp_servers: Annotated[list[Any], Field(max_length=0)] = []
    thread: None = None
    """These three are `REFUSED`; what they may be all the same asks for nothing."""


class MessagesRequest(TokenCountRequest):
    """The fields that are read."""

    max_tokens: Annotated[int, Field(ge=1, le=10_000_000)]
    stop_sequences: Annotated[
        list[Annotated[str, StringConstraints(min_length=1, max_length=1024)]], Field(max_length=16, fail_fast=True)
    ] = []
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    inference_geo: str | None = None
    diagnostics: dict[str, Any] | None = None
    baton: BatonOptions | None = None


def read_request(body: Mapping[str, Any]) -> tuple[MessagesRequest, tuple[str, ...]]:
    """Return the request, and the names of fields that are ignored; raises `InvalidRequest` naming the field at
    fault."""
    fields = _check_fields(body)
    request = _validate(MessagesRequest, fields)
    ignored = sorted(name for name in IGNORED if name in fields)
    return request, tuple(ignored)


def stop_sequences(body: Mapping[str, Any]) -> list[str]:
    """Return the stop sequences of a request that was read before, by whoever sent it first."""
    return body.get("stop_sequences") or []


def read_count(body: Mapping[str, Any]) -> TokenCountRequest:
    """Return the request of `count_tokens`."""
    return _validate(TokenCountRequest, _check_fields(body))


def _check_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a body without those that are null; raises `InvalidRequest` for one that is refused."""
    fields = drop_nulls(body)
    for name, reason in REFUSED.items():
        if fields.get(name, []) != []:
            code = THREAD_UNSUPPORTED if name == "thread" else "unsupported_parameter"
            raise InvalidRequest(f"'{name}' is not supported: {reason}.", param=name, code=code)
    return fields


def _validate(model: type[Read], fields: dict[str, Any]) -> Read:
    check_kinds(fields.get("tools"), "custom", *KNOWN)
    return read_fields(model, fields)


def task_of(request: TokenCountRequest) -> Task:
    """Return the conversation, the tools and the form of the answer; how to decode is not in it."""
    parts: tuple[Part, ...] = ()
    labels: frozenset[str] = frozenset()
    if isinstance(request.system, str):
        parts = (Text(request.system),)
    elif request.system is not None:
        parts = tuple([Text(block.text) for block in request.system])
        labels = labels_on(*request.system)
    messages: list[Message] = []
    if parts:
        messages.append(Message("system", parts, labels=labels))
    for place, turn in enumerate(request.messages):
        messages += _messages(turn, place)
    return Task(
        _join_neighbours(messages),
        toolbox=toolbox_of(request.tools, request.tool_choice, _tool_references(request.messages)),
        form=_form(request),
    )


def build_task(request: MessagesRequest) -> Task:
    """`task_of` with the sampling parameters and the end user. Raises `InvalidRequest` for messages without any
    content, for a call without its result, and for a result without its call."""
    allow(any(turn.content != [] for turn in request.messages), "messages", "at least one of them must have content")
    _check_results(request.messages)
    stop = tuple(request.stop_sequences)
    sampling = Sampling(request.temperature, request.top_p, max_tokens=request.max_tokens, stop=stop)
    user = request.metadata.user_id if request.metadata is not None else None
    return replace(task_of(request), sampling=sampling, user=user)


def effort_of(request: MessagesRequest) -> str | None:
    """Return the effort that is asked for, if any."""
    if request.output_config is not None and request.output_config.effort is not None:
        return request.output_config.effort
    if request.thinking is not None and request.thinking.type == "enabled":
        return THINKING_EFFORT
    return None


def _check_results(turns: list[Turn]) -> None:
    """Check that the results of an assistant's calls come in the user's turns right behind it, as Anthropic demands: no
    worker takes another conversation. Neighbouring turns of one role count as one."""
    open_calls: dict[str, str] = {}
    """The places of the calls without a result yet, by their ids."""
    role_before = "user"
    for place, turn in enumerate(turns):
        blocks = turn.content if isinstance(turn.content, list) else []
        has_results = False
        for at, block in enumerate(blocks):
            if isinstance(block, ToolResultBlock):
                if block.tool_use_id not in open_calls:
                    raise _unknown_call_error(f"messages.{place}.content.{at}")
                del open_calls[block.tool_use_id]
                has_results = True
        goes_on = turn.role == "assistant" and role_before == "assistant"
        if open_calls and not has_results and not goes_on:
            raise _missing_results_error(open_calls)
        for at, block in enumerate(blocks):
            if isinstance(block, ToolUseBlock) and turn.role == "assistant":
                where = f"messages.{place}.content.{at}"
                allow(block.id not in open_calls, f"{where}.id", "another call that has no result yet has the same id")
                open_calls[block.id] = where
        role_before = turn.role
    if open_calls:
        raise _missing_results_error(open_calls)


def _unknown_call_error(where: str) -> InvalidRequest:
    return InvalidRequest(
        f"Invalid value for '{where}.tool_use_id': a tool_result needs its tool_use in the assistant's turn before it. "
        "Send that turn too, or leave the result out.",
        param=f"{where}.tool_use_id",
        code="unknown_tool_call",
    )


def _missing_results_error(open_calls: Mapping[str, str]) -> InvalidRequest:
    """Return the refusal, which names the ids that Baton gave out, and the places of the other calls."""
    missing: list[str] = []
    for id_, where in open_calls.items():
        missing.append(id_ if run_of(id_) else where)
    return InvalidRequest(
        "Every tool_use needs its tool_result in the user's turn right behind it. Missing are those of: "
        f"{', '.join(missing)}",
        param=next(iter(open_calls.values())),
        code="tool_results_missing",
    )


def _messages(turn: Turn, place: int) -> Iterator[Message]:
    """Yield a turn as messages: results of tools first, each a message of its own, then the rest of the turn."""
    if isinstance(turn.content, str):
        yield Message(turn.role, (Text(turn.content),), labels=labels_on(turn))
        return
    calls: list[ToolCall] = []
    parts: list[Part] = []
    turn_labels = frozenset(turn.baton.labels or ()) if turn.baton is not None else frozenset()
    labels = turn_labels
    for at, block in enumerate(turn.content):
        where = f"messages.{place}.content.{at}"
        if isinstance(block, ToolResultBlock):
            allow(turn.role == "user" and not parts, where, "results of tools come first in a user's turn")
            result = result_of(block, where)
            yield Message(
                "tool",
                result,
                call_id=block.tool_use_id,
                failed=bool(block.is_error),
                labels=turn_labels | labels_on(block),
            )
        elif isinstance(block, ToolUseBlock):
            allow(turn.role == "assistant", where, "only an assistant's turn calls tools")
            calls.append(ToolCall(block.id, short_name(block.name), orjson.dumps(block.input).decode()))
        elif isinstance(block, TextBlock | ImageBlock | DocumentBlock | SearchResultBlock):
            allow(isinstance(block, TextBlock) or turn.role == "user", where, "only a user's turn holds such a block")
            parts += parts_of(block, where)
            labels |= labels_on(block)
    if calls:
        yield Message("assistant", tuple(parts), calls=tuple(calls), labels=labels)
    elif parts:
        yield Message(turn.role, tuple(parts), labels=labels)


def _join_neighbours(messages: list[Message]) -> tuple[Message, ...]:
    """Return the messages with the calls of neighbouring turns of the assistant in one message, and the results of
    neighbouring turns of the user before their words: OpenAI's format has results only right behind one message."""
    joined: list[Message] = []
    for message in messages:
        before = joined[-1] if joined else None
        if before is not None and before.calls and message.role == "assistant":
            parts, calls = before.parts + message.parts, before.calls + message.calls
            joined[-1] = replace(before, parts=parts, calls=calls, labels=before.labels | message.labels)
            continue
        place = len(joined)
        while message.call_id and place and joined[place - 1].role == "user":
            place -= 1
        joined.insert(place, message)
    return tuple(joined)


def _tool_references(turns: list[Turn]) -> Iterator[tuple[str, str]]:
    """Yield the tools that results refer to, each with its place."""
    for place, turn in enumerate(turns):
        if not isinstance(turn.content, list):
            continue
        for at, block in enumerate(turn.content):
            if not isinstance(block, ToolResultBlock) or not isinstance(block.content, list):
                continue
            for part in block.content:
                if isinstance(part, ToolReferenceBlock):
                    yield part.tool_name, f"messages.{place}.content.{at}.content"


def _form(request: TokenCountRequest) -> Form | None:
    config = request.output_config
    newer = config.format if config is not None else None
    allow(newer is None or request.output_format is None, "output_format", "it stands in output_config.format already")
    output = newer or request.output_format
    if output is None:
        return None
    schema = output.form
    check(schema, "output_config.format.schema" if newer is not None else "output_format.schema")
    return Form(schema, strict=Form(schema).is_object and is_closed(schema))
