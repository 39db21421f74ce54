"""The input items of `POST /v1/responses`, and the conversation that they come to.

Calls of functions stand with the assistant's words before them, outputs of functions are messages of their own.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

from msgspec.structs import replace
from pydantic import AliasChoices, Discriminator, Field, StringConstraints, Tag

from app.core.message.chat import Image, Message, Part, Text, Tool, ToolCall
from app.errors import InvalidRequest
from app.gateway.chat.request import IMAGE, CallId
from app.gateway.responses import compaction_item, tool_search
from app.gateway.responses.compaction_item import CompactionItem
from app.gateway.responses.tool_search import Execution, ToolSearch
from app.gateway.responses.tools import AnyTool, Loadable, flat, functions, names_of
from app.gateway.wire import custom_tools
from app.gateway.wire.documents import FILE, file_parts, unsupported_error
from app.gateway.wire.parameters import MOST_TOOLS, PartOptions, ToolName, WireModel, labels_on

ItemId = Annotated[str, StringConstraints(max_length=256)] | None
Status = Literal["in_progress", "completed", "incomplete"] | None
Role = Literal["user", "assistant", "system", "developer"]


class Caller(WireModel):
    """The caller of a function: the model itself."""

    type: Literal["direct"]


class InputText(WireModel):
    """Words of the caller's."""

    type: Literal["input_text"]
    text: str
    baton: PartOptions | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


class InputImage(WireModel):
    """An image inline or by reference. Images by the id of a file are refused by name."""

    type: Literal["input_image"]
    image_url: Annotated[str, StringConstraints(pattern=IMAGE)] | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None
    file_id: str | None = None
    baton: PartOptions | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


class InputFile(WireModel):
    """A file inline. Files by id and by address are refused by name."""

    type: Literal["input_file"]
    file_data: Annotated[str, StringConstraints(pattern=FILE)] | None = None
    file_id: str | None = None
    file_url: str | None = None
    filename: Annotated[str, StringConstraints(max_length=512)] | None = None
    detail: Literal["auto", "low", "high"] | None = None
    baton: PartOptions | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


class OutputText(WireModel):
    """Words of an earlier answer; `parsed` is what the official clients' helpers have read in them."""

    type: Literal["output_text"]
    text: str
    parsed: Any = None
    baton: PartOptions | None = None
    annotations: list[Any] = []
    logprobs: list[Any] | None = None


class Refused(WireModel):
    """A refusal by the assistant instead of an answer."""

    type: Literal["refusal"]
    refusal: str
    baton: PartOptions | None = None


AnyPart = Annotated[InputText | InputImage | InputFile | OutputText | Refused, Discriminator("type")]


class MessageItem(WireModel):
    """A message of the conversation, with or without its type."""

    type: Literal["message"] | None = None
    role: Role
    content: str | Annotated[list[AnyPart], Field(max_length=512, fail_fast=True)]
    baton: PartOptions | None = None
    id: ItemId = None
    status: Status = None
    phase: Literal["commentary", "final_answer"] | None = None


class AnyCall(WireModel):
    """An earlier answer's wish to call a tool."""

    call_id: CallId
    name: ToolName
    baton: PartOptions | None = None
    id: ItemId = None
    status: Status = None
    caller: Caller | None = None
    namespace: ToolName | None = None
    is_async: Annotated[
        Literal[False] | None, Field(alias="async", validation_alias=AliasChoices("async", "async_"))
    ] = None
    """`async_` is the name that OpenAI's Python client gives it in `model_dump`."""


class CallItem(AnyCall):
    """An earlier answer's wish to call a function. The official clients' helpers add what they have parsed."""

    type: Literal["function_call"]
    arguments: str
    parsed_arguments: Any = None


class CustomCallItem(AnyCall):
    """An earlier answer's wish to call a tool of free text."""

    type: Literal["custom_tool_call"]
    input: str


class OutputItem(WireModel):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: CallId
    output: str | list[Annotated[InputText | InputImage | InputFile, Discriminator("type")]]
    baton: PartOptions | None = None
    id: ItemId = None
    status: Status = None
    name: str | None = None
    caller: Caller | None = None
    namespace: ToolName | None = None


class SearchCallItem(WireModel):
    """An earlier answer's search for tools."""

    type: Literal["tool_search_call"]
    arguments: Any
    call_id: CallId | None = None
    execution: Execution | None = None
    baton: PartOptions | None = None
    id: ItemId = None
    status: Status = None
    created_by: str | None = None


class SearchOutputItem(WireModel):
    """The tools that a search has found, which are offered to workers from here on."""

    type: Literal["tool_search_output"]
    tools: Annotated[list[Loadable], Field(max_length=MOST_TOOLS, fail_fast=True)]
    call_id: CallId | None = None
    execution: Execution | None = None
    baton: PartOptions | None = None
    id: ItemId = None
    status: Status = None
    created_by: str | None = None


class MoreTools(WireModel):
    """Tools that are on offer from here on."""

    type: Literal["additional_tools"]
    role: Literal["developer"]
    tools: Annotated[list[AnyTool], Field(max_length=MOST_TOOLS, fail_fast=True)]
    id: ItemId = None


class ReasoningItem(WireModel):
    """An earlier answer's thinking, which only the model that thought it could use; it is left out."""

    type: Literal["reasoning"]
    id: ItemId = None
    summary: list[Any] = []
    content: list[Any] | None = None
    encrypted_content: str | None = None
    status: Status = None


class ItemReference(WireModel):
    """An item of an earlier response's output, by its id; `references.py` puts the item in its place."""

    type: Literal["item_reference"] | None = None
    id: Annotated[str, StringConstraints(max_length=256)]


def _kind(value: Any) -> str | None:
    """Messages and references may come without their type. What is no item has none, and a type that is no text is none
    of the known ones."""
    if not isinstance(value, dict):
        return getattr(value, "type", None)
    if (kind := value.get("type")) is None:
        return "item_reference" if value.keys() <= {"id", "type"} else "message"
    return kind if isinstance(kind, str) else ""


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[OutputItem, Tag("custom_tool_call_output")]
    | Annotated[SearchCallItem, Tag("tool_search_call")]
    | Annotated[SearchOutputItem, Tag("tool_search_output")]
    | Annotated[MoreTools, Tag("additional_tools")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[CompactionItem, Tag("compaction")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_kind),
]


AnyItem = (
    MessageItem
    | CallItem
    | CustomCallItem
    | OutputItem
    | SearchCallItem
    | SearchOutputItem
    | MoreTools
    | ReasoningItem
    | CompactionItem
    | ItemReference
)


def conversation(items: Iterable[AnyItem]) -> tuple[Message, ...]:
    """Return the messages that input items come to; references are resolved before. Raises `InvalidRequest`."""
    items = tuple(items)
    _check_outputs(items)
    return tuple(_join_calls(_messages(items)))


def _check_outputs(items: Iterable[AnyItem]) -> None:
    """Raise `InvalidRequest` for an output whose call, where the input has it, is of the other type of tools."""
    outputs: dict[str, str] = {}
    for place, item in enumerate(items):
        if isinstance(item, CallItem | CustomCallItem):
            outputs[item.call_id] = f"{item.type}_output"
        elif isinstance(item, OutputItem) and outputs.get(item.call_id, item.type) != item.type:
            param, expected = f"input[{place}].type", outputs[item.call_id]
            message = f"Invalid value for '{param}': the output of this call is a '{expected}'."
            raise InvalidRequest(message, param=param, code="invalid_value")


def _messages(items: Iterable[AnyItem]) -> Iterator[Message]:
    for place, item in enumerate(items):
        if isinstance(item, MessageItem):
            yield Message(item.role, _parts(item, place), labels=labels_on(item))
        elif isinstance(item, CallItem):
            call = ToolCall(item.call_id, flat(item.namespace, item.name), item.arguments)
            yield Message("assistant", (), calls=(call,), labels=labels_on(item))
        elif isinstance(item, CustomCallItem):
            call = ToolCall(item.call_id, flat(item.namespace, item.name), custom_tools.arguments_of(item.input))
            yield Message("assistant", (), calls=(call,), labels=labels_on(item))
        elif isinstance(item, OutputItem):
            output = item.output
            parts = (Text(output),) if isinstance(output, str) else _convert_parts(output, f"input[{place}].output")
            yield Message("tool", parts, call_id=item.call_id, labels=labels_on(item))
        elif isinstance(item, CompactionItem):
            yield compaction_item.message_of(item, place)
        elif isinstance(item, SearchCallItem | SearchOutputItem):
            yield from _search_messages(item)


def _search_messages(item: SearchCallItem | SearchOutputItem) -> Iterator[Message]:
    """Yield a search by the caller's side. One that a server ran is over, and is left out; what it found is on
    offer."""
    if item.call_id is None or item.execution == "server":
        return
    if isinstance(item, SearchCallItem):
        call = ToolCall(item.call_id, tool_search.NAME, tool_search.arguments_of(item.arguments))
        yield Message("assistant", (), calls=(call,), labels=labels_on(item))
    else:
        outcome = tool_search.outcome(names_of(item.tools))
        yield Message("tool", (Text(outcome),), call_id=item.call_id, labels=labels_on(item))


def find_loaded_tools(items: Iterable[AnyItem]) -> Iterator[Tool]:
    """Yield the tools that input items put on offer. Raises `InvalidRequest`."""
    for place, item in enumerate(items):
        if isinstance(item, SearchOutputItem | MoreTools):
            by = item.call_id if isinstance(item, SearchOutputItem) else None
            searches = [tool for tool in item.tools if isinstance(tool, ToolSearch) and tool.execution == "client"]
            new_tools = functions(item.tools, f"input[{place}].tools")
            for tool in (*new_tools, *(tool_search.as_function(search, ()) for search in searches)):
                yield tool_search.load(tool, by or "")


def _join_calls(messages: Iterable[Message]) -> Iterator[Message]:
    """Calls join the assistant's turn that they follow."""
    last: Message | None = None
    for message in messages:
        if last is not None and last.role == "assistant" == message.role and message.calls and not message.parts:
            last = replace(last, calls=(*last.calls, *message.calls), labels=last.labels | message.labels)
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
        if isinstance(part, InputImage | InputFile) and item.role != "user":
            param, held = f"input[{place}].content[{at}]", "images" if isinstance(part, InputImage) else "files"
            raise InvalidRequest(f"Invalid value for '{param}': only a user's message holds {held}.", param=param)
    return _convert_parts(item.content, f"input[{place}].content")


def _convert_parts(parts: Sequence[AnyPart], where: str) -> tuple[Part, ...]:
    message_parts: list[Part] = []
    for at, part in enumerate(parts):
        if isinstance(part, InputImage):
            message_parts.append(_image(part, f"{where}[{at}]"))
        elif isinstance(part, InputFile):
            message_parts += file_parts(part.file_data, part.filename, f"{where}[{at}]")
        else:
            message_parts.append(Text(part.refusal if isinstance(part, Refused) else part.text))
    return tuple(message_parts)


def _image(part: InputImage, param: str) -> Image:
    if part.image_url is None or part.file_id is not None:
        raise unsupported_error(
            param, "Baton keeps no files: send `image_url`, which is a data: URL in base64 or the image's address"
        )
    return Image(part.image_url, part.detail)
