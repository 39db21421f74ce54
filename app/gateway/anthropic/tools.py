"""The tools of `POST /v1/messages`, and which of them are on offer."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Field, StringConstraints

from app.core.message.chat import NO_TOOLS, Tool, Toolbox
from app.errors import InvalidRequest
from app.gateway.wire.baton_options import WireModel
from app.gateway.wire.response_formats import check

CHOICES: Final[Mapping[str, Literal["auto", "none", "required", "named"]]] = {
    "auto": "auto",
    "any": "required",
    "tool": "named",
    "none": "none",
}
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class CacheMark(WireModel):
    """The end of a prefix that a provider might cache."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: Annotated[str, StringConstraints(max_length=64)] | None = None
    """Claude Code says who else may use the cache."""


class WireTool(WireModel):
    """A function of the caller's."""

    type: Literal["custom"] | None = None
    name: Name
    description: Annotated[str, StringConstraints(max_length=65_536)] | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheMark | None = None
    eager_input_streaming: bool | None = None
    input_examples: Annotated[list[dict[str, Any]], Field(max_length=64)] | None = None
    defer_loading: bool | None = None
    allowed_callers: Annotated[list[Literal["direct"]], Field(max_length=1)] | None = None


class ToolChoice(WireModel):
    """Which tools the worker must or may use."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


def toolbox_of(asked: Sequence[WireTool], choice: ToolChoice | None, referred: Iterable[tuple[str, str]]) -> Toolbox:
    """The tools on offer and how they are to be used; `referred`: the tools that results refer to, and where.

    A deferred tool is offered once a result has referred to it, or where it must be called. Raises `InvalidRequest`.
    """
    if not asked:
        allow(choice is None or choice.type in ("auto", "none"), "tool_choice", "there are no tools to choose from")
        return NO_TOOLS
    names = [tool.name for tool in asked]
    allow(len(set(names)) == len(names), "tools", "two tools have the same name")
    for place, tool in enumerate(asked):
        check(tool.input_schema, f"tools[{place}].input_schema")
    named = choice.name or "" if choice is not None and choice.type == "tool" else ""
    found = {named}
    for name, where in referred:
        allow(name in names, where, "it refers to a tool that is not among tools")
        found.add(name)
    tools = tuple(
        Tool(tool.name, tool.description or "", tool.input_schema, tool.strict or False)
        for tool in asked
        if not tool.defer_loading or tool.name in found
    )
    allow(bool(tools), "tools", "one of them at least must not be deferred")
    if choice is None:
        return Toolbox(tools)
    allow(choice.type != "tool" or named in names, "tool_choice.name", "it names none of the tools")
    return Toolbox(tools, CHOICES[choice.type], named, not choice.disable_parallel_tool_use)


def allow(allowed: bool, param: str, said: str) -> None:
    """`InvalidRequest` for a field that is not as it may be."""
    if not allowed:
        raise InvalidRequest(f"Invalid value for '{param}': {said}.", param=param, code="invalid_value")
