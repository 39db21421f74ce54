"""A worker that does what it is asked: calls the tools that are named, fills in schemas, and says what it heard."""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from tests.stubs import Reply, ToolCall
from tests.stubs.record import ReceivedRequest
from tests.stubs.script import Usage

COUNTED: Final = Usage(input=40, cached=30, output=9, reasoning=4)
FOUND: Final = "These tools are on offer now"
"""What it hears of a search whose output has found some: it calls them."""
SAMPLES: Final[Mapping[str, Any]] = {"string": "Oslo", "integer": 7, "number": 0.5, "boolean": True, "null": None}


def worker(received: ReceivedRequest) -> Reply:
    """Return the reply, which follows from the request alone.

    Results of tools are told; tools that the last user's words name are called, and those that must be. A form is
    filled in from its schema. Otherwise it says all that the user said, so that what was remembered can be seen.
    """
    body = received.json
    messages, tools = body["messages"], _functions(body)
    last, choice = messages[-1], body.get("tool_choice", "auto")
    if called := _choose_calls(_text(last), last["role"], tools, choice):
        calls = tuple(ToolCall(name, json.dumps(_arguments(name, body, tools))) for name in called)
        return Reply(chunks=(), tool_calls=calls, finish="tool", usage=COUNTED)
    if schema := _form(body) or _find_prompted_schema(messages):
        return _reply_in_pieces(json.dumps(sample(schema)))
    if last["role"] == "tool":
        return _reply_in_pieces(" ".join(_text(message) for message in _latest_results(messages)))
    return _reply_in_pieces("Heard: " + " | ".join(_text(message) for message in messages if message["role"] == "user"))


def _functions(body: Mapping[str, Any]) -> dict[str, Any]:
    offered = (tool["function"] for tool in body.get("tools", ()))
    return {tool["name"]: tool.get("parameters") or {} for tool in offered}


def _choose_calls(words: str, role: str, tools: Mapping[str, Any], choice: Any) -> list[str]:
    """The tools to call now: the named one; else those that the user names, or a search, and if one must be called, the
    last."""
    if isinstance(choice, dict):
        return [choice["function"]["name"]]
    if choice == "none" or not tools:
        return []
    tool_names = [name for name in tools if name in words] if role == "user" or words.startswith(FOUND) else []
    return tool_names or ([list(tools)[-1]] if choice == "required" else [])


def _arguments(name: str, body: Mapping[str, Any], tools: Mapping[str, Any]) -> Any:
    """The plainest; a search is for all that its description lists, if it takes names."""
    [about] = [tool["function"].get("description", "") for tool in body["tools"] if tool["function"]["name"] == name]
    plain = sample(tools[name])
    return plain | {"paths": re.findall(r"^- (\w+):", about, re.MULTILINE)} if "paths" in plain else plain


def _form(body: Mapping[str, Any]) -> dict[str, Any] | None:
    response_format = body.get("response_format") or {"type": "text"}
    if response_format["type"] == "json_object":
        return {"type": "object", "properties": {"city": {"type": "string"}, "degrees": {"type": "integer"}}}
    schema: dict[str, Any] | None = (
        response_format["json_schema"]["schema"] if response_format["type"] == "json_schema" else None
    )
    return schema


def _find_prompted_schema(messages: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The schema that somebody has put into words."""
    for message in messages:
        text = _text(message)
        for place in (at.start() for at in re.finditer(r"\{", text)):
            try:
                schema, _ = json.JSONDecoder().raw_decode(text[place:])
            except ValueError:
                continue
            if "properties" in schema:
                return dict(schema)
    return None


def sample(schema: Mapping[str, Any], root: Mapping[str, Any] | None = None) -> Any:
    """The plainest value of a schema, with every field that it names."""
    root = root or schema
    if "$ref" in schema:
        return sample(root[schema["$ref"].split("/")[1]][schema["$ref"].split("/")[2]], root)
    for key in ("const", "enum", "anyOf", "allOf", "oneOf"):
        if key in schema:
            first = schema[key] if key == "const" else schema[key][0]
            return sample(first, root) if key.endswith("Of") else first
    kind = schema.get("type", "object")
    if kind == "object":
        return {name: sample(inner, root) for name, inner in schema.get("properties", {}).items()}
    if kind == "array":
        return [sample(schema.get("items", {"type": "string"}), root)]
    return SAMPLES[kind[0] if isinstance(kind, list) else kind]


def _latest_results(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    since = max(place for place, message in enumerate(messages) if message["role"] != "tool")
    return messages[since + 1 :]


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "<image>") for part in content)


def _reply_in_pieces(text: str) -> Reply:
    """In pieces of five characters."""
    return Reply(chunks=tuple(text[at : at + 5] for at in range(0, len(text), 5)), usage=COUNTED)
