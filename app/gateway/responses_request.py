"""The request of `POST /v1/responses`: from checked JSON values to a `Task` and what else an order needs.

`parameters.py` decides what becomes of every top-level field. Input items become messages: calls of functions stand
with the assistant's words before them, outputs of functions are messages of their own. Values never occur in an error.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Final, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag, ValidationError

from app.core.chat import NO_TOOLS, Form, Image, Message, Part, Sampling, Task, Text, Tool, Toolbox, ToolCall
from app.errors import InvalidRequest
from app.gateway.asked import Extension, Wire
from app.gateway.forms import NamedSchema, schema_form
from app.gateway.openai_chat import IMAGE
from app.gateway.parameters import RESPONSES, is_ignored
from app.gateway.refusal import NAME, refusal, unknown

CallId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:|-]{1,256}$")]
FunctionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
ItemId = Annotated[str, StringConstraints(max_length=256)] | None
Status = Literal["in_progress", "completed", "incomplete"] | None
Role = Literal["user", "assistant", "system", "developer"]


class InputText(Wire):
    """Words of the caller's."""

    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = None


class InputImage(Wire):
    """An image inline or by reference."""

    type: Literal["input_image"]
    image_url: Annotated[str, StringConstraints(pattern=IMAGE)]
    detail: Literal["auto", "low", "high", "original"] | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


class OutputText(Wire):
    """Words of an earlier answer."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] | None = None


class Refused(Wire):
    """What an assistant said instead of an answer."""

    type: Literal["refusal"]
    refusal: str


AnyPart = Annotated[InputText | InputImage | OutputText | Refused, Discriminator("type")]


class MessageItem(Wire):
    """A message of the conversation, with or without its type."""

    type: Literal["message"] | None = None
    role: Role
    content: str | Annotated[list[AnyPart], Field(max_length=512, fail_fast=True)]
    id: ItemId = None
    status: Status = None
    phase: str | None = None


class CallItem(Wire):
    """An earlier answer's wish to call a function."""

    type: Literal["function_call"]
    call_id: CallId
    name: FunctionName
    arguments: str
    id: ItemId = None
    status: Status = None


class OutputItem(Wire):
    """What came of a call."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: str | list[Annotated[InputText | InputImage, Discriminator("type")]]
    id: ItemId = None
    status: Status = None


class ReasoningItem(Wire):
    """An earlier answer's thinking, which only the model that thought it could use; it is left out."""

    type: Literal["reasoning"]
    id: ItemId = None
    summary: list[Any] = []
    content: list[Any] | None = None
    encrypted_content: str | None = None
    status: Status = None


def _kind(value: Any) -> str | None:
    """A message may come without its type."""
    given = value.get("type", "message") if isinstance(value, dict) else getattr(value, "type", None)
    return given if isinstance(given, str) else None


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


class FunctionTool(Wire):
    """A function of the caller's."""

    type: Literal["function"]
    name: FunctionName
    description: Annotated[str, StringConstraints(max_length=16_384)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Wire):
    """The one function that must be called."""

    type: Literal["function"]
    name: FunctionName


class FreeText(Wire):
    """No form."""

    type: Literal["text"]


class AnyObject(Wire):
    """Some JSON object."""

    type: Literal["json_object"]


class BySchema(NamedSchema):
    """JSON that validates."""

    type: Literal["json_schema"]


class TextOptions(Wire):
    """The form of the answer."""

    format: Annotated[FreeText | AnyObject | BySchema, Discriminator("type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Wire):
    """How much to think."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class StreamOptions(Wire):
    """Accepted and not needed."""

    include_obfuscation: bool = False


class ResponsesRequest(Wire):
    """The fields that are read."""

    model: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    input: str | Annotated[list[Item], Field(min_length=1, max_length=2_048, fail_fast=True)]
    instructions: str | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=128, fail_fast=True)] = []
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool = True
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: Annotated[list[str], Field(max_length=16, fail_fast=True)] = []
    metadata: Annotated[dict[str, str], Field(max_length=16)] = {}
    user: Annotated[str, StringConstraints(max_length=512)] | None = None
    previous_response_id: Annotated[str, StringConstraints(pattern=r"^resp_[A-Za-z0-9_]{1,120}$")] | None = None
    store: bool = True
    background: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    baton: Extension | None = None
    # Checked and noted; see parameters.py.
    truncation: Literal["auto", "disabled"] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    safety_identifier: Annotated[str, StringConstraints(max_length=128)] | None = None
    prompt_cache_key: Annotated[str, StringConstraints(max_length=1024)] | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: dict[str, Any] | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None


def read_request(body: Mapping[str, Any]) -> tuple[ResponsesRequest, tuple[str, ...]]:
    """The request, and the names of parameters that are ignored; raises `InvalidRequest` naming the field at fault."""
    given = {name: value for name, value in body.items() if value is not None}
    for name in given:
        if name not in RESPONSES:
            raise unknown(name if NAME.fullmatch(name) else None)
    ignored = tuple(sorted(name for name, value in given.items() if is_ignored(name, value, RESPONSES)))
    given = {name: value for name, value in given.items() if RESPONSES[name].decision != "refused"}
    try:
        request = ResponsesRequest.model_validate(given)
    except ValidationError as error:
        raise refusal(error, given) from None
    if request.background and not request.store:
        raise InvalidRequest("A background response must be stored: leave store out.", param="store")
    return request, ignored


def task_of(request: ResponsesRequest, before: tuple[Message, ...]) -> Task:
    """The task: instructions, the conversation before, and what this request adds to it."""
    first = (Message("developer", (Text(request.instructions),)),) if request.instructions else ()
    sampling = Sampling(request.temperature, request.top_p, max_tokens=request.max_output_tokens)
    told = request.top_logprobs is not None or "message.output_text.logprobs" in request.include
    return Task(
        (*first, *before, *given(request)),
        sampling,
        request.user,
        request.metadata,
        toolbox=_toolbox(request),
        logprobs=(request.top_logprobs or 0) if told else None,
        form=_form(request),
    )


def given(request: ResponsesRequest) -> tuple[Message, ...]:
    """What this request adds to the conversation."""
    if isinstance(request.input, str):
        return (Message("user", (Text(request.input),)),)
    return tuple(_joined(_messages(request.input)))


def _messages(items: Iterable[MessageItem | CallItem | OutputItem | ReasoningItem]) -> Iterator[Message]:
    for place, item in enumerate(items):
        if isinstance(item, MessageItem):
            yield Message(item.role, _parts(item, place))
        elif isinstance(item, CallItem):
            yield Message("assistant", (), calls=(ToolCall(item.call_id, item.name, item.arguments),))
        elif isinstance(item, OutputItem):
            output = item.output
            parts = (Text(output),) if isinstance(output, str) else tuple(map(_part, output))
            yield Message("tool", parts, call_id=item.call_id)


def _joined(messages: Iterable[Message]) -> Iterator[Message]:
    """Calls join the assistant's turn that they follow."""
    last: Message | None = None
    for message in messages:
        if last is not None and last.role == "assistant" == message.role and message.calls and not message.parts:
            last = replace(last, calls=(*last.calls, *message.calls))
            continue
        if last is not None:
            yield last
        last = message
    if last is not None:
        yield last


def _parts(item: MessageItem, place: int) -> tuple[Part, ...]:
    if isinstance(item.content, str):
        return (Text(item.content),)
    for at, part in enumerate(item.content):
        if isinstance(part, InputImage) and item.role != "user":
            param = f"input[{place}].content[{at}]"
            raise InvalidRequest(f"Invalid value for '{param}': only a user's message holds images.", param=param)
    return tuple(map(_part, item.content))


def _part(part: InputText | InputImage | OutputText | Refused) -> Part:
    if isinstance(part, InputImage):
        return Image(part.image_url, part.detail)
    return Text(part.refusal if isinstance(part, Refused) else part.text)


CHOICES: Final[Mapping[str, Literal["auto", "none", "required"]]] = {
    "auto": "auto",
    "none": "none",
    "required": "required",
}


def _toolbox(request: ResponsesRequest) -> Toolbox:
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "auto", "none"):
            raise InvalidRequest("There are no tools to choose from.", param="tool_choice", code="invalid_value")
        return NO_TOOLS
    names = [tool.name for tool in request.tools]
    if len(set(names)) < len(names):
        raise InvalidRequest("Two tools have the same name.", param="tools", code="invalid_value")
    tools = tuple(
        Tool(one.name, one.description or "", one.parameters, True if one.strict is None else one.strict)
        for one in request.tools
    )
    if isinstance(choice, NamedFunction):
        if choice.name not in names:
            raise InvalidRequest("It names none of the tools.", param="tool_choice.name", code="invalid_value")
        return Toolbox(tools, "named", choice.name, request.parallel_tool_calls)
    return Toolbox(tools, CHOICES[choice or "auto"], parallel=request.parallel_tool_calls)


def _form(request: ResponsesRequest) -> Form | None:
    asked = request.text.format if request.text is not None else None
    if isinstance(asked, BySchema):
        return schema_form(asked, "text.format.schema")
    return Form() if isinstance(asked, AnyObject) else None
