"""Tools as OpenAI's chat completions write them: definitions, choices, calls, and the rules of such a conversation.

A custom tool, which takes free text, is a function to workers (`custom_tools.py`); a reply learns from its `wire` which
of them are spelled as custom ones again.
"""

from collections.abc import Container, Sequence
from typing import Annotated, Any, Final, Literal, Protocol

from pydantic import Discriminator, Field, StringConstraints

from app.core.message.chat import NO_TOOLS, Tool, Toolbox, ToolCall
from app.core.message.tools import MOST_CALLS, run_of
from app.errors import InvalidRequest
from app.gateway.wire import custom_tools
from app.gateway.wire.baton_options import WireModel
from app.gateway.wire.response_formats import check

MOST_TOOLS: Final = 128
FunctionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
CallId = Annotated[str, StringConstraints(pattern=r"^[!-~]{1,256}$")]
Description = Annotated[str, StringConstraints(max_length=65_536)] | None


class Function(WireModel):
    """A function's name, description and parameters."""

    name: FunctionName
    description: Description = None
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
    definition: Annotated[str, StringConstraints(max_length=65_536)]


class Grammar(WireModel):
    """Text by a grammar."""

    type: Literal["grammar"]
    grammar: Rules


class Custom(WireModel):
    """A custom tool's name, description and format."""

    name: FunctionName
    description: Description = None
    format: Annotated[AnyText | Grammar, Discriminator("type")] | None = None


class CustomTool(WireModel):
    """A tool of free text on offer."""

    type: Literal["custom"]
    custom: Custom


class Named(WireModel):
    """A tool by its name."""

    name: FunctionName


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

    name: FunctionName
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

    name: FunctionName
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
        made = _tool(tool, f"tools[{place}]")
        if made.name in offered:
            raise invalid(f"tools[{place}].{tool.type}.name", "another tool has this name")
        offered[made.name] = made
    return _chosen(offered, choice, parallel is not False)


def _tool(tool: AnyTool, param: str) -> Tool:
    if isinstance(tool, FunctionTool):
        function = tool.function
        if function.parameters is not None:
            check(function.parameters, f"{param}.function.parameters")
        return Tool(function.name, function.description or "", function.parameters, function.strict or False)
    asked = tool.custom.format
    grammar = (asked.grammar.syntax, asked.grammar.definition) if isinstance(asked, Grammar) else None
    spelled = asked.model_dump() if asked is not None else None
    return custom_tools.as_function(tool.custom.name, tool.custom.description or "", spelled, grammar)


def _chosen(offered: dict[str, Tool], choice: Any, parallel: bool) -> Toolbox:
    """Tools that are not allowed are not offered, which comes to the same."""
    if isinstance(choice, NamedFunction | NamedCustom):
        return Toolbox(tuple(offered.values()), "named", _known(choice, offered), parallel)
    if isinstance(choice, AllowedTools):
        allowed = {_known(tool, offered) for tool in choice.allowed_tools.tools}
        kept = tuple(tool for name, tool in offered.items() if name in allowed)
        return Toolbox(kept, choice.allowed_tools.mode, parallel=parallel)
    return Toolbox(tuple(offered.values()), choice or "auto", parallel=parallel)


def _known(choice: NamedFunction | NamedCustom, offered: dict[str, Tool]) -> str:
    name = choice.custom.name if isinstance(choice, NamedCustom) else choice.function.name
    if name not in offered or custom_tools.is_custom(offered[name]) != isinstance(choice, NamedCustom):
        raise invalid("tool_choice", "it names a tool that is not among tools")
    return name


def calls_of(calls: Sequence[Call | CustomCall]) -> tuple[ToolCall, ...]:
    """Return the calls of an assistant's message."""
    return tuple(
        ToolCall(call.id, call.custom.name, custom_tools.arguments_of(call.custom.input))
        if isinstance(call, CustomCall)
        else ToolCall(call.id, call.function.name, call.function.arguments)
        for call in calls
    )


class Turn(Protocol):
    """One message of a conversation as the rules of conversations see it."""

    @property
    def tool_call_id(self) -> str | None:
        """The call that a result answers; None in all other messages."""
        ...

    @property
    def tool_calls(self) -> Sequence[AnyCall] | None:
        """The calls of an assistant's message."""
        ...


def check_conversation(messages: Sequence[Turn]) -> None:
    """Every call has its result, right behind the message that made it, and every result its call (as OpenAI wants it).

    Raises `InvalidRequest`; of what is missing it names the ids that we gave out, and the place of the others.
    """
    caller, waiting = 0, dict[str, int]()
    for place, message in enumerate(messages):
        if message.tool_call_id:
            if message.tool_call_id not in waiting:
                raise invalid(
                    f"messages[{place}].tool_call_id", "it answers no call of the assistant's message before it"
                )
            del waiting[message.tool_call_id]
            continue
        if waiting:
            raise _unanswered(caller, waiting)
        calls = message.tool_calls or ()
        caller, waiting = place, {call.id: number for number, call in enumerate(calls)}
        if len(waiting) < len(calls):
            raise invalid(f"messages[{place}].tool_calls", "two calls have the same id")
    if waiting:
        raise _unanswered(caller, waiting)


def _unanswered(place: int, waiting: dict[str, int]) -> InvalidRequest:
    names = [id_ if run_of(id_) else f"messages[{place}].tool_calls[{number}]" for id_, number in waiting.items()]
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
    """`tool_calls` of a message; `custom` has the names of those that bring free text. Workers call functions only."""
    return [{"id": call.id, **(_written(call) if call.name in custom else _called(call))} for call in calls]


def _called(call: ToolCall) -> dict[str, Any]:
    return {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _written(call: ToolCall) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": call.name, "input": custom_tools.text_of(call.arguments)}}
