"""Deferred tools of `/v1/responses`, and the search that puts them on offer.

A hosted search is no model's here: what it could find is offered at once, which costs the worker the definitions'
tokens, and the first call of each tool stands behind a search that has found it, without which clients would not know
the tool. A search by the caller's side is a function to workers. What its outputs bring is on offer from then on, in
this request and in those that go on with its response.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import orjson
from msgspec.structs import replace

from app.core.message.chat import Tool
from app.errors import InvalidRequest
from app.gateway.wire.parameters import ToolText, WireModel

NAME: Final = "tool_search"
"""The name of the search's function for workers."""
DESCRIPTION_CHARS: Final = 400
"""Characters of a deferred tool's description that the search's description contains."""
DEFAULT_DESCRIPTION: Final = "Finds tools that are not offered yet. Those that it finds are offered from then on."
Execution = Literal["server", "client"]


class ToolSearch(WireModel):
    """A search for deferred tools."""

    type: Literal["tool_search"]
    execution: Execution | None = None
    description: ToolText | None = None
    parameters: dict[str, Any] | None = None


def tools_on_offer(
    tools: Sequence[Tool], searches: Sequence[ToolSearch], loaded: Iterable[Tool], most: int
) -> list[Tool]:
    """Return the tools that a worker is offered: the request's own, whose definitions count, and those that were
    `loaded`.

    Where all would be more than `most`, those that were loaded first give way. Raises `InvalidRequest`.
    """
    deferred = {tool.name for tool in tools if _is_deferred(tool)}
    loaded_by_name: dict[str, Tool] = {}
    for tool in loaded:
        loaded_by_name.pop(tool.name, None)
        loaded_by_name[tool.name] = tool
    if len(searches) > 1:
        raise _invalid_tools("one tool_search at most")
    if not searches and NAME not in loaded_by_name and deferred - loaded_by_name.keys():
        raise _invalid_tools("a deferred tool needs a tool_search that finds it")
    client_searches = [search for search in searches if search.execution == "client"]
    hidden = deferred if client_searches else set()
    always = {tool.name for tool in tools} - hidden
    if client_searches:
        always.add(NAME)
    loaded_names = [name for name in loaded_by_name if name not in always]
    surplus = max(len(loaded_names) + len(always) - most, 0)
    loaded_names = loaded_names[surplus:]
    own = [_with_search(tool, loaded_by_name) for tool in tools if tool.name not in hidden or tool.name in loaded_names]
    searchable = [tool for tool in tools if tool.name in deferred]
    functions = [as_function(search, searchable) for search in client_searches]
    missing_names = set(loaded_names) - {tool.name for tool in own}
    return [*own, *functions, *(loaded_by_name[name] for name in loaded_names if name in missing_names)]


def _is_deferred(tool: Tool) -> bool:
    return "deferred" in (tool.spelling or {})


def _invalid_tools(reason: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid value for 'tools': {reason}.", param="tools", code="invalid_value")


def _with_search(tool: Tool, loaded_by_name: Mapping[str, Tool]) -> Tool:
    """Return the tool; if it is deferred and was found, with the search that found it."""
    if tool.name not in loaded_by_name or not _is_deferred(tool):
        return tool
    return replace(
        tool, spelling={**(tool.spelling or {}), "loaded": find_loading_call(loaded_by_name[tool.name]), "asked": True}
    )


def load(tool: Tool, call_id: str) -> Tool:
    """Return a tool that was put on offer by the output of a call; or, without one, otherwise."""
    return replace(tool, spelling={**(tool.spelling or {}), "loaded": call_id})


def find_loading_call(tool: Tool) -> str | None:
    """Return the call whose output put it on offer; empty if none did, None for a tool that was not loaded."""
    return (tool.spelling or {}).get("loaded")


def is_hidden(tool: Tool) -> bool:
    """Return True if a tool is offered to workers though no search that the caller knows of has found it."""
    return _is_deferred(tool) and find_loading_call(tool) is None


def build_search_items(tool: Tool, call_id: str, spelled: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a search that has found a tool for a call, and its output, as items; `spelled` is the tool as the caller
    spells it."""
    head = {"status": "completed", "execution": "server", "call_id": None}
    arguments = {"paths": [_search_entry(tool)[0]]}
    call = {"id": f"tsc_{call_id}", "type": "tool_search_call", **head, "arguments": arguments}
    output = {"id": f"tso_{call_id}", "type": "tool_search_output", **head, "tools": spelled}
    return [call, output]


def in_progress(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return such an item as it is before it is complete."""
    fields = {**item, "status": "in_progress"}
    if "arguments" in item:
        return fields | {"arguments": {}}
    return fields | {"tools": []}


def is_from_request(tool: Tool) -> bool:
    """Return True if a tool is one of the request's own."""
    return find_loading_call(tool) is None or "asked" in (tool.spelling or {})


def as_function(search: ToolSearch, deferred: Sequence[Tool]) -> Tool:
    """Return a search by the caller's side. Unless the request says what it takes, it takes names, as OpenAI's does."""
    entries = dict(_search_entry(tool) for tool in deferred)
    description = search.description or DEFAULT_DESCRIPTION
    if entries:
        lines = "".join(f"\n- {name}: {about[:DESCRIPTION_CHARS]}" for name, about in entries.items())
        description += f"\n\nIt can find:{lines}"
    parameters = search.parameters or _paths(list(entries))
    return Tool(NAME, description, parameters, spelling={"search": search.model_dump(exclude_none=True)})


def _search_entry(tool: Tool) -> tuple[str, str]:
    """Return the name by which a deferred tool is found (its own or its namespace's), and its description."""
    spelling = tool.spelling or {}
    if "namespace" in spelling:
        return spelling["namespace"], spelling["about"] or ""
    return tool.name, spelling.get("said", tool.description)


def _paths(names: list[str]) -> dict[str, Any]:
    path: dict[str, Any] = {"type": "string"}
    if names:
        path["enum"] = names
    properties = {"paths": {"type": "array", "items": path}}
    return {"type": "object", "properties": properties, "required": ["paths"], "additionalProperties": False}


def arguments_of(arguments: object) -> str:
    """Return the arguments of an earlier call, as a worker would have written them."""
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments)


def arguments_in(text: str) -> object:
    """Return the arguments of a call as its item has them; none for a call that has only begun."""
    if not text:
        return {}
    try:
        return orjson.loads(text)
    except ValueError:  # what replies cannot hold, such as half of a surrogate pair, is passed on as it was written
        return {"arguments": text}


def outcome(names: Sequence[str]) -> str:
    """Return the result of a search for the worker, whose tools include those that were found."""
    if not names:
        return "No tool was found."
    return f"These tools are on offer now: {', '.join(names)}."
