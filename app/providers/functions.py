"""Tools in the wire formats: definitions, choices, arguments, and calls that are streamed.

Sources: openai-openapi 2.3.0; Anthropic's tool use reference; Gemini's function calling reference. What
all readers share is here too: a call gets its number when it begins, and is held back until its name has come.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import orjson

from app.core.message.chat import Finish, Message, Piece, Tool, Toolbox, ToolCall, ToolDelta
from app.core.message.response_format import is_closed
from app.providers.document import words
from app.providers.faults import malformed

EMPTY_SCHEMA: Mapping[str, Any] = {"type": "object", "properties": {}}


class StreamedCalls:
    """The tool calls of one reply, numbered from 0 as they begin."""

    __slots__ = ("_current", "_held", "_ids", "_who")

    def __init__(self, who: str) -> None:
        """`who` is named in errors."""
        self._who = who
        self._ids: list[str] = []
        self._current: dict[object, int] = {}
        """The latest call under each of the server's keys."""
        self._held: dict[object, tuple[str, str]] = {}
        """Id and arguments that came before their call's name."""

    def __len__(self) -> int:
        return len(self._ids)

    def take(self, key: object, id_: str, name: str, arguments: str, pieces: list[Piece]) -> int | None:
        """Take more of the call that the server numbers `key`; return its number, or None while it has no name yet.

        A name with another id than before under the same key begins another call: some servers number all of them 0.
        """
        current = self._current.get(key)
        if name and (current is None or (id_ and id_ != self._ids[current])):
            held_id, held = self._held.pop(key, ("", ""))
            current = self._current[key] = len(self._ids)
            self._ids.append(id_ or held_id)
            pieces.append(ToolDelta(current, id_ or held_id, name, held + arguments))
        elif current is not None:
            if arguments:
                pieces.append(ToolDelta(current, arguments=arguments))
        else:
            held_id, held = self._held.get(key, ("", ""))
            self._held[key] = (id_ or held_id, held + arguments)
        return current

    def finish(self, reported: Finish) -> Finish:
        """Return the finish reason that fits the calls which came: OpenAI gives `stop` after a call that was demanded.
        Raises WorkerMalformed if a call never got its name."""
        if self._held:
            raise malformed(self._who, "a tool call without a name")
        if reported in ("stop", "tool_calls"):
            return "tool_calls" if self._ids else "stop"
        return reported


def text_of(arguments: object, who: str) -> str:
    """Return arguments as JSON text, whether they came as text or as an object."""
    if isinstance(arguments, dict):
        return orjson.dumps(arguments).decode()
    return words(arguments, who)


def object_of(arguments: str) -> dict[str, Any]:
    """Return arguments as an object, for formats that want one; other values, from another history, are wrapped."""
    try:
        value = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        value = arguments
    if isinstance(value, dict):
        return value
    return {"arguments": value}


def for_openai(toolbox: Toolbox, *, strict: bool) -> dict[str, Any]:
    """Return `tools`, `tool_choice` and `parallel_tool_calls`; `strict` says that the endpoint constrains decoding.

    OpenAI refuses a strict tool that has optional arguments, so such a tool is offered without `strict`.
    """
    if not toolbox.tools:
        return {}
    tools = [{"type": "function", "function": _function(tool, strict)} for tool in toolbox.tools]
    body: dict[str, Any] = {"tools": tools}
    if toolbox.choice == "named":
        body["tool_choice"] = {"type": "function", "function": {"name": toolbox.named}}
    elif toolbox.choice != "auto":
        body["tool_choice"] = toolbox.choice
    if toolbox.parallel:
        return body
    return body | {"parallel_tool_calls": False}


def _function(tool: Tool, strict: bool) -> dict[str, Any]:
    described = {"description": tool.description} if tool.description else {}
    typed = {"parameters": tool.parameters} if tool.parameters is not None else {}
    constrained = strict and tool.strict and is_closed(tool.parameters or {})
    return {"name": tool.name, **described, **typed, **({"strict": True} if constrained else {})}


def openai_calls(calls: Iterable[ToolCall], id_of: Callable[[str], str]) -> list[dict[str, Any]]:
    """Return `tool_calls` of an assistant message; `id_of` converts an id to one that the endpoint accepts."""
    return [
        {"id": id_of(call.id), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]


def for_anthropic(toolbox: Toolbox, messages: Iterable[Message], strict: Callable[[Any], Any] | None) -> dict[str, Any]:
    """Return `tools` and `tool_choice`; `strict` converts a schema to one that the endpoint can constrain decoding to.

    A conversation that has calls but offers no tools needs their definitions all the same: they are made from the
    names, and may not be called.
    """
    if not toolbox.tools:
        called = dict.fromkeys(call.name for message in messages for call in message.calls)
        past = [{"name": name, "input_schema": EMPTY_SCHEMA} for name in called]
        if not past:
            return {}
        return {"tools": past, "tool_choice": {"type": "none"}}
    kinds = {"auto": "auto", "none": "none", "required": "any", "named": "tool"}
    choice: dict[str, Any] = {"type": kinds[toolbox.choice]}
    if toolbox.choice == "named":
        choice["name"] = toolbox.named
    if not toolbox.parallel and toolbox.choice != "none":
        choice["disable_parallel_tool_use"] = True
    body: dict[str, Any] = {"tools": [_anthropic_tool(tool, strict) for tool in toolbox.tools]}
    if choice == {"type": "auto"}:
        return body
    return body | {"tool_choice": choice}


def _anthropic_tool(tool: Tool, strict: Callable[[Any], Any] | None) -> dict[str, Any]:
    described = {"description": tool.description} if tool.description else {}
    schema = {"type": "object", **(tool.parameters or EMPTY_SCHEMA)}
    if strict is None or not tool.strict:
        return {"name": tool.name, **described, "input_schema": schema}
    return {"name": tool.name, **described, "input_schema": strict(schema), "strict": True}


def for_gemini(toolbox: Toolbox) -> dict[str, Any]:
    """Return `tools` and `toolConfig`; the format cannot ask for one call at a time."""
    if not toolbox.tools:
        return {}
    body: dict[str, Any] = {"tools": [{"functionDeclarations": [_declaration(tool) for tool in toolbox.tools]}]}
    if toolbox.choice == "auto":
        return body
    config: dict[str, Any] = {"mode": "NONE" if toolbox.choice == "none" else "ANY"}
    if toolbox.choice == "named":
        config["allowedFunctionNames"] = [gemini_name(toolbox.named)]
    return body | {"toolConfig": {"functionCallingConfig": config}}


def _declaration(tool: Tool) -> dict[str, Any]:
    typed = {"parametersJsonSchema": tool.parameters} if tool.parameters is not None else {}
    return {"name": gemini_name(tool.name), "description": tool.description or tool.name, **typed}


def gemini_name(name: str) -> str:
    """Return a name as Gemini accepts it: it begins with a letter or an underscore."""
    if re.match(r"[A-Za-z_]", name):
        return name
    return f"_{name}"
