"""Tools as OpenAI's chat completions write them: definitions, choices, calls, and the rules of such a conversation.

Functions only: what is called in free text (`custom`) has no place in most workers' formats.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Discriminator, Field, StringConstraints

from app.core.chat import NO_TOOLS, Message, Tool, Toolbox, ToolCall
from app.core.tools import MOST_CALLS, run_of
from app.errors import InvalidRequest
from app.gateway.asked import Wire
from app.gateway.forms import check

MOST_TOOLS: Final = 128
FunctionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
CallId = Annotated[str, StringConstraints(pattern=r"^[!-~]{1,256}$")]


class Function(Wire):
    """What a function is called, does and takes."""

    name: FunctionName
    description: Annotated[str, StringConstraints(max_length=65_536)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Wire):
    """A function on offer."""

    type: Literal["function"]
    function: Function


class Named(Wire):
    """A function by its name."""

    name: FunctionName


class NamedTool(Wire):
    """A function by its name, as a tool."""

    type: Literal["function"]
    function: Named


class Allowed(Wire):
    """Some of the functions on offer, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MOST_TOOLS, fail_fast=True)]


class AllowedTools(Wire):
    """A choice among some of the functions on offer."""

    type: Literal["allowed_tools"]
    allowed_tools: Allowed


class Called(Wire):
    """What is called, with JSON text as it was written; the official clients' helpers add what they have read in it."""

    name: FunctionName
    arguments: str
    parsed_arguments: Any = None
    provider_specific_fields: Any = None


class Call(Wire):
    """A call in an assistant's message. Who put it together from a stream may leave the `index` in it."""

    id: CallId
    type: Literal["function"]
    function: Called
    index: int | None = None
    """Of a stream's piece; some clients send it back."""
    provider_specific_fields: Any = None
    """LiteLLM's, as in a message."""


Tools = Annotated[list[FunctionTool], Field(max_length=MOST_TOOLS, fail_fast=True)]
Choice = Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedTools, Discriminator("type")]
CallsOfTurn = Annotated[list[Call], Field(min_length=1, max_length=MOST_CALLS, fail_fast=True)]


def toolbox_of(tools: Sequence[FunctionTool], choice: Any, parallel: bool | None) -> Toolbox:
    """The tools of a request and how they are to be used; raises `InvalidRequest` naming the field at fault."""
    if not tools:
        if choice not in (None, "none"):
            raise _refusal("tool_choice", "it needs tools")
        return NO_TOOLS
    offered: dict[str, Tool] = {}
    for place, tool in enumerate(tools):
        param = f"tools[{place}].function"
        if tool.function.name in offered:
            raise _refusal(f"{param}.name", "another tool has this name")
        if tool.function.parameters is not None:
            check(tool.function.parameters, f"{param}.parameters")
        offered[tool.function.name] = _tool(tool.function)
    return _chosen(offered, choice, parallel is not False)


def _tool(function: Function) -> Tool:
    return Tool(function.name, function.description or "", function.parameters, function.strict or False)


def _chosen(offered: dict[str, Tool], choice: Any, parallel: bool) -> Toolbox:
    """Tools that are not allowed are not offered, which comes to the same."""
    if isinstance(choice, NamedTool):
        name = _known(choice, offered)
        return Toolbox(tuple(offered.values()), "named", name, parallel)
    if isinstance(choice, AllowedTools):
        allowed = {_known(tool, offered) for tool in choice.allowed_tools.tools}
        kept = tuple(tool for name, tool in offered.items() if name in allowed)
        return Toolbox(kept, choice.allowed_tools.mode, parallel=parallel)
    return Toolbox(tuple(offered.values()), choice or "auto", parallel=parallel)


def _known(tool: NamedTool, offered: dict[str, Tool]) -> str:
    if tool.function.name not in offered:
        raise _refusal("tool_choice", "it names a tool that is not among tools")
    return tool.function.name


def calls_of(calls: Sequence[Call]) -> tuple[ToolCall, ...]:
    """The calls of an assistant's message."""
    return tuple(ToolCall(call.id, call.function.name, call.function.arguments) for call in calls)


def check_conversation(messages: Sequence[Message]) -> None:
    """Every call has its result, right behind the message that made it, and every result its call (as OpenAI wants it).

    Raises `InvalidRequest`; of what is missing it names the ids that we gave out, and the place of the others.
    """
    caller, waiting = 0, dict[str, int]()
    for place, message in enumerate(messages):
        if message.role == "tool":
            if message.call_id not in waiting:
                raise _refusal(
                    f"messages[{place}].tool_call_id", "it answers no call of the assistant's message before it"
                )
            del waiting[message.call_id]
            continue
        if waiting:
            raise _unanswered(caller, waiting)
        caller, waiting = place, {call.id: number for number, call in enumerate(message.calls)}
        if len(waiting) < len(message.calls):
            raise _refusal(f"messages[{place}].tool_calls", "two calls have the same id")
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


def _refusal(param: str, said: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid value for '{param}': {said}.", param=param, code="invalid_value")


def wire_calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """`tool_calls` of a reply."""
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]
