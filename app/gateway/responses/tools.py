"""The tools of `/v1/responses` as functions that any worker can call, and their calls as the caller knows them.

A worker is offered functions only. Those of a namespace get its name before theirs, and `custom_tools.py` makes one of
a tool that takes free text. How the caller spelled a tool stands beside it in the task (`Tool.spelling`), so that every
reply, of any process, spells it so again.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from msgspec.structs import replace
from pydantic import Discriminator, Field

from app.core.message.chat import NO_TOOLS, Tool, Toolbox, ToolCall
from app.core.message.response_format import is_closed
from app.errors import InvalidRequest
from app.gateway.responses.tool_search import (
    ToolSearch,
    arguments_in,
    build_search_items,
    find_loading_call,
    is_from_request,
    is_hidden,
    load,
    tools_on_offer,
)
from app.gateway.wire import custom_tools
from app.gateway.wire.parameters import MOST_TOOLS, ToolName, ToolText, WireModel
from app.gateway.wire.response_formats import check_parameters
from app.gateway.wire.tool_names import short_name

Kind = Literal["function", "custom", "search"]
TYPES: Final[Mapping[Kind, str]] = {
    "function": "function_call",
    "custom": "custom_tool_call",
    "search": "tool_search_call",
}
PREFIXES: Final[Mapping[Kind, str]] = {"function": "fc", "custom": "ctc", "search": "tsc"}
"""Of the ids of items."""
Direct = Annotated[list[Literal["direct"]], Field(max_length=1)] | None
"""The callers of a function: the model itself, and no program that it writes."""


class FunctionTool(WireModel):
    """A function of the caller's."""

    type: Literal["function"]
    name: ToolName
    description: ToolText | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: dict[str, Any] | None = None
    allowed_callers: Direct = None
    defer_loading: bool | None = None
    is_async: Annotated[Literal[False] | None, Field(alias="async")] = None


class AnyText(WireModel):
    """Whatever text."""

    type: Literal["text"]


class Grammar(WireModel):
    """Text by a grammar."""

    type: Literal["grammar"]
    syntax: custom_tools.Syntax
    definition: ToolText


class CustomTool(WireModel):
    """A tool of the caller's that takes free text."""

    type: Literal["custom"]
    name: ToolName
    description: ToolText | None = None
    format: Annotated[AnyText | Grammar, Discriminator("type")] | None = None
    allowed_callers: Direct = None
    defer_loading: bool | None = None
    is_async: Annotated[Literal[False] | None, Field(alias="async")] = None


class Namespace(WireModel):
    """Tools that belong together."""

    type: Literal["namespace"]
    name: ToolName
    description: ToolText | None = None
    tools: Annotated[
        list[Annotated[FunctionTool | CustomTool, Discriminator("type")]], Field(max_length=MOST_TOOLS, fail_fast=True)
    ]


class WebSearch(WireModel):
    """A web search by the server of the model that says what it may reach, as Codex sends it: left out and noted.

    Codex states `external_web_access: true` with full access to the machine, and else false.
    """

    type: Literal["web_search"]
    external_web_access: bool
    indexed_web_access: bool | None = None
    search_context_size: str | None = None
    user_location: dict[str, Any] | None = None
    filters: dict[str, Any] | None = None
    search_content_types: list[str] | None = None


AnyTool = Annotated[FunctionTool | CustomTool | Namespace | ToolSearch | WebSearch, Discriminator("type")]
Loadable = Annotated[FunctionTool | CustomTool | Namespace, Discriminator("type")]
"""Tools that the items of a conversation may add to those of the request."""


class Named(WireModel):
    """A tool by its name: the one that must be called, or one of those that may be."""

    type: Literal["function", "custom"]
    name: ToolName


class AllowedTools(WireModel):
    """Some of the tools on offer, and whether one of them must be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[Named], Field(min_length=1, max_length=MOST_TOOLS, fail_fast=True)]


Choice = Literal["none", "auto", "required"] | Annotated[Named | AllowedTools, Discriminator("type")]


def check_search(tools: Iterable[object], param: str, *, omitted: bool) -> None:
    """Raise `InvalidRequest` for a web search of `tools` that is not left out; `param` names their place.

    Left out is one that states what it may reach, if that is not the web itself or if `omitted` is true.
    """
    for place, tool in enumerate(tools):
        if not isinstance(tool, Mapping) or tool.get("type") != "web_search":
            continue
        access = tool.get("external_web_access")
        if isinstance(access, bool) and (omitted or not access):
            continue
        remedy = "or state its external_web_access, as Codex does, to have it left out"
        if isinstance(access, bool):
            remedy = 'in Codex set web_search = "cached" or "disabled", or ask the operator for BATON_WEB_SEARCH=omit'
        raise InvalidRequest(
            "Nobody here searches the web for a worker: leave it out, or offer a function that searches on your side; "
            f"{remedy}.",
            param=f"{param}[{place}].type",
            code="unsupported_value",
        )


def list_ignored_tools(tools: Iterable[AnyTool]) -> tuple[str, ...]:
    """Return the names of the tools that are noted as ignored."""
    if not any(isinstance(tool, WebSearch) for tool in tools):
        return ()
    return ("tools.web_search",)


def flat(namespace: str | None, name: str) -> str:
    """Return the name of a namespace's tool for workers; it depends on the two names alone.

    OpenAI has a function that a search has found in a namespace of its own name.
    """
    if namespace is None or namespace == name:
        return name
    separator = "" if namespace.endswith("_") else "__"
    return short_name(f"{namespace}{separator}{name}")


def toolbox_of(
    requested: Sequence[AnyTool], choice: Choice | None, parallel: bool, loaded: Iterable[Tool] = ()
) -> Toolbox:
    """Return the functions of a request and how they are to be used; `loaded` are those that its conversation put on
    offer.

    Raises `InvalidRequest` naming the field at fault.
    """
    searches = [tool for tool in requested if isinstance(tool, ToolSearch)]
    tools = tuple(tools_on_offer(tuple(functions(requested, "tools")), searches, loaded, MOST_TOOLS))
    if not tools:
        if choice not in (None, "auto", "none"):
            message = "Invalid value for 'tool_choice': there are no tools to choose from."
            raise InvalidRequest(message, param="tool_choice", code="invalid_value")
        return NO_TOOLS
    names = {tool.name for tool in tools}
    if len(names) < len(tools):
        raise InvalidRequest(
            "Invalid value for 'tools': two tools have the same name.", param="tools", code="invalid_value"
        )
    if len(tools) > MOST_TOOLS:
        message = f"At most {MOST_TOOLS} tools are on offer at once; of more, let a tool_search of your side find some."
        raise InvalidRequest(message, param="tools", code="array_above_max_length")
    if isinstance(choice, Named):
        return Toolbox(tools, "named", _check_names([choice], tools, "tool_choice.name").pop(), parallel)
    if isinstance(choice, AllowedTools):
        allowed = _check_names(choice.tools, tools, "tool_choice.tools")
        return Toolbox(tuple(tool for tool in tools if tool.name in allowed), choice.mode, parallel=parallel)
    return Toolbox(tools, choice or "auto", parallel=parallel)


def _check_names(choices: Iterable[Named], tools: Iterable[Tool], param: str) -> set[str]:
    """Return the names of the chosen tools. Raises `InvalidRequest` for one that is not offered, or is of the other
    type."""
    offered = {(tool.name, custom_tools.is_custom(tool)) for tool in tools}
    chosen = {(choice.name, choice.type == "custom") for choice in choices}
    if not chosen <= offered:
        message = f"Invalid value for '{param}': it names a tool that is not among tools."
        raise InvalidRequest(message, param=param, code="invalid_value")
    return {name for name, _ in chosen}


def functions(requested: Iterable[AnyTool], param: str) -> Iterator[Tool]:
    """Yield tools as functions; `param` is where they stand in the request. Raises `InvalidRequest`."""
    for place, tool in enumerate(requested):
        if isinstance(tool, Namespace):
            for at, member in enumerate(tool.tools):
                yield _member(tool, member, f"{param}[{place}].tools[{at}]")
        elif isinstance(tool, ToolSearch):
            _check_parameters(tool.parameters, f"{param}[{place}]")
        elif not isinstance(tool, WebSearch):
            yield _function(tool, f"{param}[{place}]")


def _member(namespace: Namespace, member: FunctionTool | CustomTool, param: str) -> Tool:
    """Return a tool of a namespace as a function: its name and description have those of the namespace before them."""
    function = _function(member, param)
    descriptions = [text for text in (namespace.description, function.description) if text]
    spelling = {
        "name": member.name,
        "namespace": namespace.name,
        "about": namespace.description,
        "said": function.description,
        **(function.spelling or {}),
    }
    name = flat(namespace.name, member.name)
    return replace(function, name=name, description="\n\n".join(descriptions), spelling=spelling)


def _function(tool: FunctionTool | CustomTool, param: str) -> Tool:
    """Return the tool for workers. Without `strict`, a function is strict if its schema allows that, as with OpenAI."""
    description = tool.description or ""
    if isinstance(tool, CustomTool):
        grammar, text_format = None, None
        if isinstance(tool.format, Grammar):
            grammar = (tool.format.syntax, tool.format.definition)
        if tool.format is not None:
            text_format = tool.format.model_dump()
        function = custom_tools.as_function(tool.name, description, text_format, grammar)
    else:
        _check_parameters(tool.parameters, param)
        strict = is_closed(tool.parameters) if tool.strict is None else tool.strict
        function = Tool(tool.name, description, tool.parameters, strict)
    if tool.defer_loading:
        return replace(function, spelling={**(function.spelling or {}), "deferred": True})
    return function


def _check_parameters(parameters: dict[str, Any] | None, param: str) -> None:
    if parameters is not None:
        check_parameters(parameters, f"{param}.parameters")


def names_of(tools: Iterable[FunctionTool | CustomTool | Namespace]) -> list[str]:
    """Return the names of tools for workers."""
    names: list[str] = []
    for tool in tools:
        if isinstance(tool, Namespace):
            names += [flat(tool.name, member.name) for member in tool.tools]
        else:
            names.append(tool.name)
    return names


def response_tools(toolbox: Toolbox) -> list[dict[str, Any]]:
    """Return `tools` of a response: as they were sent."""
    return tools_for_caller(tool for tool in toolbox.tools if is_from_request(tool))


def tools_for_caller(tools: Iterable[Tool]) -> list[dict[str, Any]]:
    """Return tools as the caller knows them."""
    rows: list[dict[str, Any]] = []
    for tool in tools:
        spelling = tool.spelling or {}
        if "namespace" not in spelling:
            rows.append(_tool_for_caller(tool))
            continue
        head = {"type": "namespace", "name": spelling["namespace"], "description": spelling["about"] or ""}
        if not rows or rows[-1].get("type") != "namespace" or rows[-1]["name"] != head["name"]:
            rows.append(head | {"tools": []})
        rows[-1]["tools"].append(_tool_for_caller(tool))
    return rows


def _tool_for_caller(tool: Tool) -> dict[str, Any]:
    spelling: Mapping[str, Any] = tool.spelling or {}
    if "search" in spelling:
        return dict(spelling["search"])
    fields: dict[str, Any] = {
        "type": "custom" if "format" in spelling else "function",
        "name": spelling.get("name", tool.name),
        "description": spelling.get("said", tool.description) or None,
    }
    if "deferred" in spelling:
        fields["defer_loading"] = True
    if "format" in spelling:
        return fields | {"format": spelling["format"] or {"type": "text"}}
    return fields | {"parameters": tool.parameters, "strict": tool.strict}


def tool_choice_of(toolbox: Toolbox) -> object:
    """Return `tool_choice` of a response."""
    if toolbox.choice != "named":
        return toolbox.choice
    kind = "custom" if kind_of(toolbox, toolbox.named) == "custom" else "function"
    return {"type": kind, "name": toolbox.named}


def kind_of(toolbox: Toolbox, name: str) -> Kind:
    """Return the kind of the caller's tool that a function stands for."""
    spelling = _spelling(toolbox, name)
    if "search" in spelling:
        return "search"
    if "format" in spelling:
        return "custom"
    return "function"


def call_item(toolbox: Toolbox, call: ToolCall, status: str) -> dict[str, Any]:
    """Return a call as an item of the output; `arguments` need not be whole yet."""
    spelling, kind = _spelling(toolbox, call.name), kind_of(toolbox, call.name)
    head = {"id": item_id(toolbox, call), "type": TYPES[kind], "call_id": call.id}
    if kind == "search":
        return head | {"status": status, "execution": "client", "arguments": arguments_in(call.arguments)}
    name = spelling.get("name", call.name)
    head["name"] = name
    if "namespace" in spelling:
        namespace = spelling["namespace"]
    elif spelling.keys() & {"deferred", "loaded"}:
        namespace = name  # as in OpenAI's own calls, because one of its clients reads it there
    else:
        namespace = None
    if namespace is not None:
        head["namespace"] = namespace
    if kind == "custom":
        return head | {"input": custom_tools.text_of(call.arguments)}
    return head | {"status": status, "arguments": call.arguments}


def hosted_search_items(toolbox: Toolbox, call: ToolCall, before: Iterable[ToolCall]) -> list[dict[str, Any]]:
    """Return the items of a hosted search that stand before a call: of each tool, before the first of a reply's
    calls."""
    if any(earlier.name == call.name for earlier in before):
        return []
    tool = _tool_named(toolbox, call.name)
    if tool is None or not is_hidden(tool):
        return []
    return build_search_items(tool, call.id, tools_for_caller([tool]))


def tools_loaded_after(toolbox: Toolbox, calls: Iterable[ToolCall]) -> list[Tool]:
    """Return the tools that are on offer from a response on: those that were loaded before, and those that its calls
    named."""
    called_names = {call.name for call in calls}
    loaded: list[Tool] = []
    called: list[Tool] = []
    for tool in toolbox.tools:
        if find_loading_call(tool) is not None:
            loaded.append(tool)
        elif is_hidden(tool) and tool.name in called_names:
            called.append(load(tool, ""))
    return loaded + called


def item_id(toolbox: Toolbox, call: ToolCall) -> str:
    """Return the id of a call's item, which has the call's own id in it."""
    return f"{PREFIXES[kind_of(toolbox, call.name)]}_{call.id}"


def _spelling(toolbox: Toolbox, name: str) -> Mapping[str, Any]:
    tool = _tool_named(toolbox, name)
    if tool is None:
        return {}
    return tool.spelling or {}


def _tool_named(toolbox: Toolbox, name: str) -> Tool | None:
    return next((tool for tool in toolbox.tools if tool.name == name), None)
