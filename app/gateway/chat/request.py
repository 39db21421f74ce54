"""The request of `POST /v1/chat/completions`, with its tools: from checked JSON values to an `Order`.

`parameters.py` decides what becomes of every top-level field; nothing is dropped silently. A null stands for an absent
field. Values never occur in an error; names do, if they look like a name. A custom tool, which takes free text, is a
function to workers (`custom_tools.py`); a reply learns from its `wire` which of them are spelled as custom ones again.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Protocol, overload

from pydantic import Discriminator, Field, StringConstraints

from app.core.message.chat import (
    MOST_CALLS,
    NO_TOOLS,
    Image,
    Message,
    Part,
    Sampling,
    Task,
    Text,
    Tool,
    Toolbox,
    ToolCall,
    run_of,
)
from app.core.pool.catalog import Tier
from app.engine.runs.admission import Order
from app.errors import InvalidRequest
from app.gateway.wire import custom_tools
from app.gateway.wire.documents import FILE, file_parts
from app.gateway.wire.parameters import (
    MOST_TOOLS,
    PARAMETERS,
    BatonOptions,
    Effort,
    PartOptions,
    RequestOptions,
    ToolName,
    ToolText,
    WireModel,
    check_kinds,
    labels_on,
    order_of,
    read_fields,
    sort_fields,
)
from app.gateway.wire.response_formats import ResponseFormat, check_parameters, form_of
from app.store.protocol import KeyRow

AuthorName = Annotated[str, StringConstraints(pattern=r"^[^\s<|\\/>]{1,64}$")]
"""The name of a message's author; OpenAI has the same pattern."""
CallId = Annotated[str, StringConstraints(pattern=r"^[!-~]{1,256}$")]


class Function(WireModel):
    """A function's name, description and parameters."""

    name: ToolName
    description: ToolText | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(WireModel):
    """A function on offer."""

    type: Literal["function"]
    function: Function


class AnyText(WireModel):
    """Whatever text."""

    type: Literal["text"]


class Rules(WireModel):
    """The grammar of a text."""

    syntax: custom_tools.Syntax
    definition: ToolText


class Grammar(WireModel):
    """Text by a grammar."""

    type: Literal["grammar"]
    grammar: Rules


class Custom(WireModel):
    """A custom tool's name, description and format."""

    name: ToolName
    description: ToolText | None = None
    format: Annotated[AnyText | Grammar, Discriminator("type")] | None = None


class CustomTool(WireModel):
    """A tool of free text on offer."""

    type: Literal["custom"]
    custom: Custom


class Named(WireModel):
    """A tool by its name."""

    name: ToolName


class NamedFunction(WireModel):
    """A function by its name, as a tool."""

    type: Literal["function"]
    function: Named


class NamedCustom(WireModel):
    """A tool of free text by its name."""

    type: Literal["custom"]
    custom: Named


NamedTool = Annotated[NamedFunction | NamedCustom, Discriminator("type")]


class Allowed(WireModel):
    """Some of the tools on offer, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MOST_TOOLS, fail_fast=True)]


class AllowedTools(WireModel):
    """A choice among some of the tools on offer."""

    type: Literal["allowed_tools"]
    allowed_tools: Allowed


class Called(WireModel):
    """The function that is called, with its JSON text as it was written; the official clients add what they parsed."""

    name: ToolName
    arguments: str
    parsed_arguments: Any = None
    provider_specific_fields: Any = None


class AnyCall(WireModel):
    """A call in an assistant's message. Who put it together from a stream may leave the `index` in it."""

    id: CallId
    index: int | None = None
    """Of a stream's piece; some clients send it back."""
    provider_specific_fields: Any = None
    """LiteLLM's, as in a message."""


class Call(AnyCall):
    """A call of a function."""

    type: Literal["function"]
    function: Called


class Written(WireModel):
    """The custom tool that is called, with its text."""

    name: ToolName
    input: str


class CustomCall(AnyCall):
    """A call of a tool of free text."""

    type: Literal["custom"]
    custom: Written


AnyTool = FunctionTool | CustomTool
Tools = Annotated[list[Annotated[AnyTool, Discriminator("type")]], Field(max_length=MOST_TOOLS, fail_fast=True)]
Choice = (
    Literal["none", "auto", "required"] | Annotated[NamedFunction | NamedCustom | AllowedTools, Discriminator("type")]
)
CallsOfTurn = Annotated[
    list[Annotated[Call | CustomCall, Discriminator("type")]],
    Field(min_length=1, max_length=MOST_CALLS, fail_fast=True),
]


def toolbox_of(tools: Sequence[AnyTool], choice: Any, parallel: bool | None) -> Toolbox:
    """Return the tools of a request and how they are to be used; raises `InvalidRequest` naming the field at fault."""
    if not tools:
        if choice not in (None, "none"):
            raise invalid("tool_choice", "it needs tools")
        return NO_TOOLS
    offered: dict[str, Tool] = {}
    for place, tool in enumerate(tools):
        new_tool = _tool(tool, f"tools[{place}]")
        if new_tool.name in offered:
            raise invalid(f"tools[{place}].{tool.type}.name", "another tool has this name")
        offered[new_tool.name] = new_tool
    return _toolbox_by_choice(offered, choice, parallel is not False)


def _tool(tool: AnyTool, param: str) -> Tool:
    if isinstance(tool, FunctionTool):
        function = tool.function
        if function.parameters is not None:
            check_parameters(function.parameters, f"{param}.function.parameters")
        return Tool(function.name, function.description or "", function.parameters, function.strict or False)
    text_format, grammar, format_fields = tool.custom.format, None, None
    if isinstance(text_format, Grammar):
        grammar = (text_format.grammar.syntax, text_format.grammar.definition)
    if text_format is not None:
        format_fields = text_format.model_dump()
    return custom_tools.as_function(tool.custom.name, tool.custom.description or "", format_fields, grammar)


def _toolbox_by_choice(offered: dict[str, Tool], choice: Any, parallel: bool) -> Toolbox:
    """Return the tools on offer with the choice among them. Tools that are not allowed are not offered, which has the
    same effect."""
    if isinstance(choice, NamedFunction | NamedCustom):
        return Toolbox(tuple(offered.values()), "named", _resolve_tool_choice(choice, offered), parallel)
    if isinstance(choice, AllowedTools):
        allowed_names = {_resolve_tool_choice(tool, offered) for tool in choice.allowed_tools.tools}
        tools = tuple(tool for name, tool in offered.items() if name in allowed_names)
        return Toolbox(tools, choice.allowed_tools.mode, parallel=parallel)
    return Toolbox(tuple(offered.values()), choice or "auto", parallel=parallel)


def _resolve_tool_choice(choice: NamedFunction | NamedCustom, offered: dict[str, Tool]) -> str:
    is_custom = isinstance(choice, NamedCustom)
    name = choice.custom.name if isinstance(choice, NamedCustom) else choice.function.name
    if name not in offered or custom_tools.is_custom(offered[name]) != is_custom:
        raise invalid("tool_choice", "it names a tool that is not among tools")
    return name


def calls_of(calls: Sequence[Call | CustomCall]) -> tuple[ToolCall, ...]:
    """Return the calls of an assistant's message."""
    tool_calls: list[ToolCall] = []
    for call in calls:
        if isinstance(call, CustomCall):
            arguments = custom_tools.arguments_of(call.custom.input)
            tool_calls.append(ToolCall(call.id, call.custom.name, arguments))
        else:
            tool_calls.append(ToolCall(call.id, call.function.name, call.function.arguments))
    return tuple(tool_calls)


class Turn(Protocol):
    """One message of a conversation as the rules of conversations see it."""

    @property
    def tool_call_id(self) -> str | None:
        """Return the call that a result answers; None in all other messages."""
        ...

    @property
    def tool_calls(self) -> Sequence[AnyCall] | None:
        """Return the calls of an assistant's message."""
        ...


def check_conversation(messages: Sequence[Turn]) -> None:
    """Check that every call has its result, right behind the message that made it, and every result its call, as OpenAI
    demands.

    Raises `InvalidRequest`. Of the results that are missing it names the ids that Baton gave out, and the places of the
    others.
    """
    caller = 0
    open_calls: dict[str, int] = {}
    for place, message in enumerate(messages):
        if message.tool_call_id:
            if message.tool_call_id not in open_calls:
                raise invalid(
                    f"messages[{place}].tool_call_id", "it answers no call of the assistant's message before it"
                )
            del open_calls[message.tool_call_id]
            continue
        if open_calls:
            raise _missing_results_error(caller, open_calls)
        calls = message.tool_calls or ()
        caller = place
        open_calls = {call.id: number for number, call in enumerate(calls)}
        if len(open_calls) < len(calls):
            raise invalid(f"messages[{place}].tool_calls", "two calls have the same id")
    if open_calls:
        raise _missing_results_error(caller, open_calls)


def _missing_results_error(place: int, open_calls: dict[str, int]) -> InvalidRequest:
    names: list[str] = []
    for id_, number in open_calls.items():
        names.append(id_ if run_of(id_) else f"messages[{place}].tool_calls[{number}]")
    return InvalidRequest(
        "An assistant message with tool_calls must be followed by tool messages with the results of all of them. "
        f"Missing are those of: {', '.join(names)}",
        param=f"messages[{place}].tool_calls",
        code="tool_results_missing",
    )


def invalid(param: str, reason: str) -> InvalidRequest:
    """Return the refusal of a value, with what is wrong with it."""
    return InvalidRequest(f"Invalid value for '{param}': {reason}.", param=param, code="invalid_value")


def wire_calls(calls: Sequence[ToolCall], custom: Container[str] = ()) -> list[dict[str, Any]]:
    """Return `tool_calls` of a message. `custom` has the names of the tools that take free text, which are functions to
    workers."""
    rows: list[dict[str, Any]] = []
    for call in calls:
        if call.name in custom:
            custom_call = {"name": call.name, "input": custom_tools.text_of(call.arguments)}
            rows.append({"id": call.id, "type": "custom", "custom": custom_call})
        else:
            function = {"name": call.name, "arguments": call.arguments}
            rows.append({"id": call.id, "type": "function", "function": function})
    return rows


IMAGE = r"^(https?://[!-~]+|data:image/(png|jpe?g|gif|webp);base64,[A-Za-z0-9+/=_-]+)$"

MARKS: Final = ("prompt_cache_breakpoint", "cache_control")
"""Fields of parts that are noted as ignored."""
ROLES_BY_PART: Final[Mapping[str, Container[str]]] = {
    "text": ("system", "developer", "user", "assistant", "tool"),
    "image_url": ("user", "tool"),
    "file": ("user", "tool"),
    "refusal": ("assistant",),
}
"""The roles whose messages can hold a part, by its type."""
TokenCap = Annotated[int, Field(ge=1, le=10_000_000)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
StopText = Annotated[str, StringConstraints(min_length=1, max_length=1024)]


class CacheBreakpoint(WireModel):
    """The end of a prefix that a provider might cache; noted as ignored."""

    mode: Literal["explicit"]
    ttl: Literal["30m", "12h"] | None = None


class CacheMark(WireModel):
    """A cache breakpoint in the form of Anthropic's clients, some of which send it to any server."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextPart(WireModel):
    """A text part."""

    type: Literal["text"]
    text: str
    baton: PartOptions | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None
    cache_control: CacheMark | None = None
    # The reply that it came in: OpenAI's Agents SDK for JavaScript writes the rest of that next to the text. It has no
    # effect; calls that are to be answered stand in the message.
    role: Literal["assistant"] | None = None
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=512)] | None = None
    tool_calls: Any = None


class RefusalPart(WireModel):
    """A refusal by the assistant instead of an answer."""

    type: Literal["refusal"]
    refusal: str
    baton: PartOptions | None = None


class ImageUrl(WireModel):
    """A picture inline or by reference."""

    url: Annotated[str, StringConstraints(pattern=IMAGE)]
    detail: Literal["auto", "low", "high", "original"] | None = None


class ImagePart(WireModel):
    """An image part."""

    type: Literal["image_url"]
    image_url: ImageUrl
    baton: PartOptions | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None
    cache_control: CacheMark | None = None


class FileData(WireModel):
    """A file inline. Files by id are refused by name."""

    file_data: Annotated[str, StringConstraints(pattern=FILE)] | None = None
    file_id: str | None = None
    filename: Annotated[str, StringConstraints(max_length=512)] | None = None


class FilePart(WireModel):
    """A file part."""

    type: Literal["file"]
    file: FileData
    baton: PartOptions | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None
    cache_control: CacheMark | None = None


AnyPart = Annotated[TextPart | ImagePart | FilePart | RefusalPart, Discriminator("type")]


class WireMessage(WireModel):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[AnyPart], Field(min_length=1, max_length=512, fail_fast=True)] | None = None
    name: AuthorName | None = None
    refusal: str | None = None
    tool_calls: CallsOfTurn | None = None
    tool_call_id: CallId | None = None
    baton: PartOptions | None = None
    # Of replies that are sent back as they came; `parsed` is what the official clients' helpers have read in them.
    annotations: Annotated[list[Any], Field(max_length=512)] | None = None
    audio: None = None
    function_call: None = None
    parsed: Any = None
    # Earlier thinking, as other servers tell it: only the model that thought it could use it, so it is left out.
    reasoning_content: str | None = None
    reasoning: str | None = None
    # Fields that LiteLLM adds to OpenAI's own in a reply, and that its users send back.
    provider_specific_fields: Any = None


class StreamOptions(WireModel):
    """`include_obfuscation` is accepted and not needed."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


MetadataKey = Annotated[str, StringConstraints(min_length=1, max_length=64)]
MetadataValue = Annotated[str, StringConstraints(max_length=512)]


class ChatRequest(WireModel):
    """The fields that are read. A default that is a list is made anew, because pydantic would copy one for each
    request, which takes 1.3 us."""

    model: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    messages: Annotated[list[WireMessage], Field(min_length=1, max_length=2_048, fail_fast=True)]
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    max_tokens: TokenCap | None = None
    max_completion_tokens: TokenCap | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=4, fail_fast=True)] | None = None
    seed: int | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict, max_length=1_024)
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: Annotated[str, StringConstraints(max_length=512)] | None = None
    metadata: dict[MetadataKey, MetadataValue] = Field(default_factory=dict, max_length=16)
    reasoning_effort: Effort | None = None
    response_format: ResponseFormat | None = None
    tools: Tools = Field(default_factory=list)
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    baton: BatonOptions | None = None
    # Checked and noted; see parameters.py.
    store: bool | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"] | None = None
    safety_identifier: Annotated[str, StringConstraints(max_length=128)] | None = None
    prompt_cache_key: Annotated[str, StringConstraints(max_length=1024)] | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


def read_request(body: Mapping[str, Any]) -> tuple[ChatRequest, tuple[str, ...]]:
    """Return the request, and the names of parameters that are ignored; raises `InvalidRequest` naming the field at
    fault."""
    fields, ignored = sort_fields(body, PARAMETERS)
    check_kinds(fields.get("tools"), "function", "custom")
    request = read_fields(ChatRequest, fields)
    if request.stream_options and not request.stream:
        raise InvalidRequest("stream_options needs stream: true.", param="stream_options")
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true.", param="top_logprobs")
    if None not in (request.max_tokens, request.max_completion_tokens):
        raise InvalidRequest("Send max_tokens or max_completion_tokens, not both.", param="max_tokens")
    return request, (*ignored, *_marks(request))


def _marks(request: ChatRequest) -> list[str]:
    """Return the names of `MARKS` that a part of the conversation has."""
    parts: list[object] = []
    for message in request.messages:
        if isinstance(message.content, list):
            parts += message.content
    marks: list[str] = []
    for name in MARKS:
        if any(getattr(part, name, None) is not None for part in parts):
            marks.append(name)
    return marks


def order_of_chat(request: ChatRequest, ignored: tuple[str, ...], tier: Tier, key: KeyRow) -> Order:
    """Return the order of a run for a request."""
    task = _task(request)
    wire: dict[str, Any] = {"format": "chat"}
    if request.stream_options is not None and request.stream_options.include_usage:
        wire["usage"] = True
    custom = custom_tools.names(task.toolbox) if task.toolbox.tools else []
    if custom:
        wire["custom"] = custom
    options = RequestOptions(
        model=request.model,
        wire=wire,
        effort=request.reasoning_effort,
        extension=request.baton,
        streams=request.stream,
        ignored=ignored,
        on_messages=labels_on(*request.messages),
    )
    return order_of(task, tier, key, options)


def _task(request: ChatRequest) -> Task:
    if isinstance(request.stop, str):
        stop: tuple[str, ...] = (request.stop,)
    else:
        stop = tuple(request.stop or ())
    sampling = Sampling(
        temperature=request.temperature,
        top_p=request.top_p,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        stop=stop,
        seed=request.seed,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=tuple(request.logit_bias.items()),
    )
    for place, message in enumerate(request.messages):
        _check(message, place)
    check_conversation(request.messages)
    toolbox = toolbox_of(request.tools, request.tool_choice, request.parallel_tool_calls)
    logprobs = None
    if request.logprobs:
        logprobs = request.top_logprobs or 0
    form = None
    if request.response_format is not None:
        form = form_of(request.response_format)
    messages = LazyConversation(request.messages, _message)
    echoed: dict[str, Any] = {}
    if request.safety_identifier is not None:
        echoed["safety_identifier"] = request.safety_identifier
    return Task(messages, sampling, request.user, request.metadata, toolbox, logprobs, form, echoed)


def _check(message: WireMessage, place: int) -> None:
    """Raise `InvalidRequest` for what a message of its role cannot have: `_message` then finds nothing wrong."""
    role, content = message.role, message.content
    if message.tool_calls and role != "assistant":
        raise invalid(f"messages[{place}].tool_calls", "only an assistant calls tools")
    if bool(message.tool_call_id) != (role == "tool"):
        raise invalid(f"messages[{place}].tool_call_id", "a tool's message has one, and no other")
    if content is None:
        may_be_empty = role == "assistant" and (message.refusal is not None or message.tool_calls is not None)
        if not may_be_empty:
            raise invalid(f"messages[{place}].content", "it must be a text or a list of parts")
    if not isinstance(content, list):
        return
    for number, part in enumerate(content):
        param = f"messages[{place}].content[{number}]"
        if role not in ROLES_BY_PART[part.type]:
            raise invalid(param, "a message of this role cannot hold such a part")
        if isinstance(part, FilePart):
            file_parts(part.file.file_data, part.file.filename, f"{param}.file")


def _message(message: WireMessage) -> Message:
    calls = calls_of(message.tool_calls) if message.tool_calls else ()
    return Message(
        role=message.role,
        parts=_parts(message),
        name=message.name,
        calls=calls,
        call_id=message.tool_call_id or "",
        labels=labels_on(message),
    )


def _parts(message: WireMessage) -> tuple[Part, ...]:
    content = message.content
    if isinstance(content, list):
        parts: list[Part] = []
        for part in content:
            parts += _convert_part(part)
        return tuple(parts)
    text = content
    if not content and message.refusal is not None:
        text = message.refusal
    if text is None or (not text and message.tool_calls):
        return ()
    return (Text(text),)


def _convert_part(part: TextPart | ImagePart | FilePart | RefusalPart) -> tuple[Part, ...]:
    if isinstance(part, ImagePart):
        return (Image(part.image_url.url, part.image_url.detail),)
    if isinstance(part, FilePart):
        return file_parts(part.file.file_data, part.file.filename, "messages")
    if isinstance(part, RefusalPart):
        return (Text(part.refusal),)
    return (Text(part.text),)


class LazyConversation(Sequence[Message]):
    """The messages that `convert` makes of those of a request, which have been validated. Iteration converts all of
    them once.

    A request that brings tool results repeats the whole conversation before them, of which the waiting run needs only
    the results. So messages are converted when they are first read.
    """

    __slots__ = ("_convert", "_messages", "_originals")

    def __init__(self, originals: Sequence[Any], convert: Callable[[Any], Message]) -> None:
        self._originals = originals
        self._convert = convert
        self._messages: tuple[Message, ...] | None = None

    def __len__(self) -> int:
        return len(self._originals)

    @overload
    def __getitem__(self, place: int) -> Message: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Message, ...]: ...
    def __getitem__(self, place: int | slice) -> Message | tuple[Message, ...]:
        if self._messages is None and isinstance(place, int):
            return self._convert(self._originals[place])
        return self._all()[place]

    def __iter__(self) -> Any:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._all() == tuple(other)

    def _all(self) -> tuple[Message, ...]:
        """Return all messages; the originals are dropped."""
        if self._messages is None:
            self._originals = self._messages = tuple(map(self._convert, self._originals))
        return self._messages
