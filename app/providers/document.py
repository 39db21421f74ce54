"""Readers for the untrusted JSON of providers: each returns the type that it promises or raises WorkerMalformed.

NaN, infinities and numbers beyond a double are refused with the document; lone surrogates and broken UTF-8 become
U+FFFD (Gemini has been seen to cut a pair in two), so that every string handed on can be encoded; NUL is text like any
other.

Tools in the wire formats stand here too: definitions, choices, arguments, and calls that are streamed, with what all
readers share: a call gets its number when it begins, and is held back until its name has come. Sources: openai-openapi
2.3.0; Anthropic's tool use reference; Gemini's function calling reference.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import orjson

from app.core.message.chat import (
    ChosenToken,
    Finish,
    LikelyToken,
    Message,
    Piece,
    Tool,
    Toolbox,
    ToolCall,
    ToolDelta,
    Usage,
)
from app.core.message.response_format import is_closed
from app.providers.faults import malformed_reply

TOKENS = 100_000_000
"""Above any context window; a count beyond it is a fault, not a bill."""
_ESCAPES = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\."
)


def parse(data: bytes, sender: str) -> dict[str, Any]:
    """Parse one JSON object; raises WorkerMalformed for anything else."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        value = _repair_json(data, sender)
    if not isinstance(value, dict):
        raise malformed_reply(sender, "no JSON object")
    return value


def peek(data: bytes) -> object:
    """Parse the body of an error, or return None: it only refines what the HTTP status says."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return None


def object_or_empty(value: object, sender: str) -> dict[str, Any]:
    """Return an object, empty where it is absent."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise malformed_reply(sender, "a field of the wrong type")
    return value


def rows(value: object, sender: str) -> list[dict[str, Any]]:
    """Return a list of objects, empty where it is absent."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise malformed_reply(sender, "a field of the wrong type")
    for row in value:
        if not isinstance(row, dict):
            raise malformed_reply(sender, "a field of the wrong type")
    return value


def words(value: object, sender: str) -> str:
    """Return text, empty where it is absent."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise malformed_reply(sender, "a field of the wrong type")
    return value


def label(value: object) -> str | None:
    """Return a short name that is only reported and never relied upon, such as a model id."""
    if isinstance(value, str) and value:
        return value[:200]
    return None


def count(value: object) -> int | None:
    """Return a plausible number of tokens, or None."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is int and 0 <= value <= TOKENS:
        return value
    return None


def usage(
    input_tokens: object, output_tokens: object, cached: object = 0, reasoning: object = 0, stored: object = 0
) -> Usage | None:
    """Return the billed tokens, with `cached` and `reasoning` cut to the totals that they are part of; None if a total
    is missing or both are zero.

    `stored` is the part of the input that the provider wrote to its cache.
    """
    input_count, output_count = count(input_tokens), count(output_tokens)
    if input_count is None or output_count is None or input_count + output_count == 0:
        return None
    cached_tokens = min(count(cached) or 0, input_count)
    return Usage(
        input=input_count,
        cached=cached_tokens,
        output=output_count,
        reasoning=min(count(reasoning) or 0, output_count),
        written=min(count(stored) or 0, input_count - cached_tokens),
    )


def tokens(value: object, sender: str) -> list[ChosenToken]:
    """Return the tokens of an answer with their log-probabilities, which OpenAI's two formats write alike.

    The format lists the chosen token among the likeliest.
    """
    chosen_tokens: list[ChosenToken] = []
    for entry in rows(value, sender):
        likely = _likely(entry, sender)
        if likely is None:
            continue
        top: list[LikelyToken] = []
        alternatives: list[tuple[str, float]] = []
        for row in rows(entry.get("top_logprobs"), sender):
            alternative = _likely(row, sender)
            if alternative is None:
                continue
            top.append(alternative)
            if alternative.token != likely.token:
                alternatives.append((alternative.token, alternative.logprob))
        chosen_tokens.append(ChosenToken(likely.token, likely.logprob, tuple(alternatives), likely.raw, tuple(top)))
    return chosen_tokens


def _likely(entry: Mapping[str, Any], sender: str) -> LikelyToken | None:
    """Return a token with its log-probability, or None."""
    if not isinstance(entry.get("logprob"), float | int):
        return None
    try:
        raw = None
        if isinstance(entry.get("bytes"), list):
            raw = bytes(entry["bytes"])
    except (TypeError, ValueError):
        raw = None
    return LikelyToken(words(entry.get("token"), sender), float(entry["logprob"]), raw)


def _repair_json(data: bytes, sender: str) -> Any:
    text = data.decode("utf-8", "replace")
    text = _ESCAPES.sub(lambda match: "\\ufffd" if match[1] else match[0], text)
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        raise malformed_reply(sender, "no JSON") from None


# -- tools

EMPTY_SCHEMA: Mapping[str, Any] = {"type": "object", "properties": {}}


class StreamedCalls:
    """The tool calls of one reply, numbered from 0 as they begin."""

    __slots__ = ("_current", "_ids", "_nameless", "_sender")

    def __init__(self, sender: str) -> None:
        """`sender` is named in errors."""
        self._sender = sender
        self._ids: list[str] = []
        self._current: dict[object, int] = {}
        """The latest call under each of the server's keys."""
        self._nameless: dict[object, tuple[str, str]] = {}
        """Id and arguments that came before their call's name."""

    def __len__(self) -> int:
        return len(self._ids)

    def take(self, key: object, id_: str, name: str, arguments: str, pieces: list[Piece]) -> int | None:
        """Take more of the call that the server numbers `key`; return its number, or None while it has no name yet.

        A name with another id than before under the same key begins another call: some servers number all of them 0.
        """
        current = self._current.get(key)
        if name and (current is None or (id_ and id_ != self._ids[current])):
            waiting_id, waiting_arguments = self._nameless.pop(key, ("", ""))
            current = self._current[key] = len(self._ids)
            self._ids.append(id_ or waiting_id)
            pieces.append(ToolDelta(current, id_ or waiting_id, name, waiting_arguments + arguments))
        elif current is not None:
            if arguments:
                pieces.append(ToolDelta(current, arguments=arguments))
        else:
            waiting_id, waiting_arguments = self._nameless.get(key, ("", ""))
            self._nameless[key] = (id_ or waiting_id, waiting_arguments + arguments)
        return current

    def finish(self, reported: Finish) -> Finish:
        """Return the finish reason that fits the calls which came: OpenAI gives `stop` after a call that was demanded.
        Raises WorkerMalformed if a call never got its name."""
        if self._nameless:
            raise malformed_reply(self._sender, "a tool call without a name")
        if reported not in ("stop", "tool_calls"):
            return reported
        if self._ids:
            return "tool_calls"
        return "stop"


def arguments_text(arguments: object, sender: str) -> str:
    """Return arguments as JSON text, whether they came as text or as an object."""
    if isinstance(arguments, dict):
        return orjson.dumps(arguments).decode()
    return words(arguments, sender)


def arguments_object(arguments: str) -> dict[str, Any]:
    """Return arguments as an object, for formats that want one; other values, from another history, are wrapped."""
    try:
        value = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        value = arguments
    if isinstance(value, dict):
        return value
    return {"arguments": value}


def tools_for_openai(toolbox: Toolbox, *, strict: bool) -> dict[str, Any]:
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
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters is not None:
        function["parameters"] = tool.parameters
    if strict and tool.strict and is_closed(tool.parameters or {}):
        function["strict"] = True
    return function


def openai_calls(calls: Iterable[ToolCall], id_of: Callable[[str], str]) -> list[dict[str, Any]]:
    """Return `tool_calls` of an assistant message; `id_of` converts an id to one that the endpoint accepts."""
    return [
        {"id": id_of(call.id), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]


def tools_for_anthropic(
    toolbox: Toolbox, messages: Iterable[Message], strict: Callable[[Any], Any] | None
) -> dict[str, Any]:
    """Return `tools` and `tool_choice`; `strict` converts a schema to one that the endpoint can constrain decoding to.

    A conversation that has calls but offers no tools needs their definitions all the same: they are made from the
    names, and may not be called.
    """
    if not toolbox.tools:
        earlier: dict[str, dict[str, Any]] = {}
        for message in messages:
            for call in message.calls:
                earlier[call.name] = {"name": call.name, "input_schema": EMPTY_SCHEMA}
        if not earlier:
            return {}
        return {"tools": list(earlier.values()), "tool_choice": {"type": "none"}}
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
    definition: dict[str, Any] = {"name": tool.name}
    if tool.description:
        definition["description"] = tool.description
    schema = {"type": "object", **(tool.parameters or EMPTY_SCHEMA)}
    if strict is None or not tool.strict:
        return definition | {"input_schema": schema}
    return definition | {"input_schema": strict(schema), "strict": True}


def tools_for_gemini(toolbox: Toolbox) -> dict[str, Any]:
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
    declaration: dict[str, Any] = {"name": gemini_name(tool.name), "description": tool.description or tool.name}
    if tool.parameters is not None:
        declaration["parametersJsonSchema"] = tool.parameters
    return declaration


def gemini_name(name: str) -> str:
    """Return a name as Gemini accepts it: it begins with a letter or an underscore."""
    if re.match(r"[A-Za-z_]", name):
        return name
    return f"_{name}"
