"""Custom tools, which take free text, as functions that any worker can call, and their calls as texts again.

A worker is offered functions only. Such a tool becomes a function of one text, `input`, whose grammar is described in
words, since no decoder of ours keeps to it. How the caller spelled it stands beside it in the task (`Tool.spelling`).
"""

import json
from collections.abc import Mapping
from typing import Any, Final, Literal

import orjson

from app.core.message.chat import Tool, Toolbox

Syntax = Literal["lark", "regex"]
PARAMETERS: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def as_function(
    name: str, description: str, spelled: Mapping[str, Any] | None, grammar: tuple[Syntax, str] | None
) -> Tool:
    """Return the function that stands for a tool; `spelled` is its format as the request has it, `grammar` what that
    asks."""
    rules = ""
    if grammar is not None:
        rules = f" It must follow this {grammar[0]} grammar:\n{grammar[1]}"
    described = f"{description}\n\nThe text `input` is passed on as it is.{rules}".strip()
    return Tool(name, described, PARAMETERS, spelling={"name": name, "said": description, "format": spelled})


def is_custom(tool: Tool) -> bool:
    """Return True if a function stands for a custom tool."""
    return tool.spelling is not None and "format" in tool.spelling


def names(toolbox: Toolbox) -> list[str]:
    """Return the names of the functions that stand for custom tools."""
    return [tool.name for tool in toolbox.tools if is_custom(tool)]


def arguments_of(text: str) -> str:
    """Return the arguments of a call that brings free text."""
    return json.dumps({"input": text})


def text_of(arguments: str) -> str:
    """Return the free text that arguments bring: all of the arguments, where a worker did not write them as it
    should."""
    text = parse_input(arguments)
    if text is None:
        return arguments
    return text


def parse_input(arguments: str) -> str | None:
    """Return the free text that arguments bring, once they are whole; None before, and where they are otherwise."""
    try:
        value = orjson.loads(arguments)  # as strict as replies are: no lone surrogates, no bottomless nesting
    except ValueError:
        return None
    if isinstance(value, dict) and isinstance(value.get("input"), str):
        text: str = value["input"]
        return text
    return None
