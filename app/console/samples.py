"""A request as code: curl, Python, Node, and Anthropic's client. The first three send exactly the body that the console
has sent; the last one sends the same request in Anthropic's format.

The API key is not part of the code: it is read from `BATON_API_KEY`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from app.console.templating import VISIBLE

JSON: Final = ("null", "true", "false")
PYTHON: Final = ("None", "True", "False")
INDENT: Final = "    "
ANTHROPIC_TOKENS: Final = 1_024
"""`max_tokens` of Anthropic's code where the request has no maximum: that format demands one."""
NEAREST_EFFORTS: Final = {"none": "low", "minimal": "low"}
"""Levels of effort that Anthropic's format lacks, each with the nearest that it has."""
ESCAPED: Final = {code: f"\\u{code:04x}" for code in VISIBLE if code >= 127}
"""Invisible characters that JSON need not escape; they would not survive the page on which the code is shown."""


class Sample(Struct, frozen=True):
    """A piece of code; `language` heads it."""

    language: str
    code: str
    about: str = ""


def samples(origin: str, body: Mapping[str, Any]) -> list[Sample]:
    """Return the code of a chat completion; `origin` is the address of the service, without a path."""
    return [
        Sample("curl", curl(f"{origin}/v1/chat/completions", body)),
        Sample("Python (openai)", _python(origin, body)),
        Sample("Node (openai)", _node(origin, body)),
        Sample("Python (anthropic)", _anthropic(origin, body), "The same request in Anthropic's format."),
    ]


def curl(url: str, body: Mapping[str, Any]) -> str:
    """Return a command that sends a body."""
    text = _literal(body, JSON, "  ").replace("'", "'\\''")
    return (
        f"curl -sN {url} \\\n"
        '  -H "Authorization: Bearer $BATON_API_KEY" \\\n'
        '  -H "Content-Type: application/json" \\\n'
        f"  --data-raw '{text}'\n"
    )


def _python(origin: str, body: Mapping[str, Any]) -> str:
    arguments = {name: value for name, value in body.items() if name != "baton"}
    if "baton" in body:
        arguments["extra_body"] = {"baton": body["baton"]}
    return f"""import os

from openai import OpenAI

client = OpenAI(base_url="{origin}/v1", api_key=os.environ["BATON_API_KEY"])
stream = client.chat.completions.create(
{_arguments(arguments)})
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
"""


def _node(origin: str, body: Mapping[str, Any]) -> str:
    return f"""import OpenAI from "openai";

const client = new OpenAI({{ baseURL: "{origin}/v1", apiKey: process.env.BATON_API_KEY }});
const stream = await client.chat.completions.create({_literal(body, JSON, "  ")});
for await (const chunk of stream) {{
  process.stdout.write(chunk.choices[0]?.delta?.content ?? "");
}}
"""


def _anthropic(origin: str, body: Mapping[str, Any]) -> str:
    return f"""import os

from anthropic import Anthropic

client = Anthropic(base_url="{origin}", api_key=os.environ["BATON_API_KEY"])
with client.messages.stream(
{_arguments(to_messages(body))}) as stream:
    for text in stream.text_stream:
        print(text, end="", flush=True)
"""


def to_messages(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by which Anthropic's client sends the same request."""
    system: list[str] = []
    conversation: list[Mapping[str, Any]] = []
    for message in body["messages"]:
        if message["role"] == "system":
            system.append(str(message["content"]))
        else:
            conversation.append(message)
    arguments: dict[str, Any] = {
        "model": body["model"],
        "max_tokens": body.get("max_completion_tokens", ANTHROPIC_TOKENS),
    }
    if system:
        arguments["system"] = "\n\n".join(system)
    arguments["messages"] = _turns(conversation)
    tools = [_tool(tool["function"]) for tool in body.get("tools", ())]
    if tools:
        arguments["tools"] = tools
    further: dict[str, Any] = {}
    config = _output_config(body)
    if config is not None:
        further["output_config"] = config
    if "baton" in body:
        further["baton"] = body["baton"]
    if not further:
        return arguments
    return arguments | {"extra_body": further}


def _turns(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the conversation, with the results of tools in turns of the user."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            result = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
            if turns and turns[-1]["role"] == "user" and isinstance(turns[-1]["content"], list):
                turns[-1]["content"].append(result)
            else:
                turns.append({"role": "user", "content": [result]})
        elif calls := message.get("tool_calls"):
            blocks: list[dict[str, Any]] = []
            if message.get("content"):
                blocks.append({"type": "text", "text": message["content"]})
            blocks += map(_use, calls)
            turns.append({"role": "assistant", "content": blocks})
        else:
            turns.append({"role": message["role"], "content": message["content"]})
    return turns


def _use(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        arguments = {}
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments}


def _tool(function: Mapping[str, Any]) -> dict[str, Any]:
    tool = {"name": function.get("name", ""), "input_schema": function.get("parameters") or {"type": "object"}}
    if not function.get("description"):
        return tool
    return tool | {"description": function["description"]}


def _output_config(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return form and effort in Anthropic's words; a free JSON object is any object there."""
    config: dict[str, Any] = {}
    answer_format = body.get("response_format")
    if answer_format is not None:
        schema = {"type": "object"}
        if answer_format["type"] == "json_schema":
            schema = answer_format["json_schema"]["schema"]
        config["format"] = {"type": "json_schema", "schema": schema}
    if "reasoning_effort" in body:
        config["effort"] = NEAREST_EFFORTS.get(body["reasoning_effort"], body["reasoning_effort"])
    return config or None


def _arguments(arguments: Mapping[str, Any]) -> str:
    """Return keyword arguments, one on each line."""
    return "".join(f"{INDENT}{name}={_literal(value, PYTHON, INDENT, 1)},\n" for name, value in arguments.items())


def _literal(value: object, words: Sequence[str], indent: str, depth: int = 0) -> str:
    """Return a value as JSON or Python writes it, which differ only in three words; long ones have a line for each
    entry."""
    flat = _literal_text(value, words)
    if not isinstance(value, Mapping | list) or len(flat) + len(indent) * depth <= 80:
        return flat
    inner, outer = indent * (depth + 1), indent * depth
    if isinstance(value, Mapping):
        entries = [f"{_text(str(name))}: {_literal(item, words, indent, depth + 1)}" for name, item in value.items()]
        opening, closing = "{", "}"
    else:
        entries = [_literal(item, words, indent, depth + 1) for item in value]
        opening, closing = "[", "]"
    lines = f",\n{inner}".join(entries)
    return f"{opening}\n{inner}{lines}\n{outer}{closing}"


def _literal_text(value: object, words: Sequence[str]) -> str:
    if value is None:
        return words[0]
    if isinstance(value, bool):
        if value:
            return words[1]
        return words[2]
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        entries = [f"{_text(str(name))}: {_literal_text(item, words)}" for name, item in value.items()]
        return "{" + ", ".join(entries) + "}"
    if isinstance(value, list):
        entries = [_literal_text(item, words) for item in value]
        return "[" + ", ".join(entries) + "]"
    return repr(value)


def _text(text: str) -> str:
    """Return a string in double quotes, as JSON, Python and JavaScript read it alike."""
    return json.dumps(text, ensure_ascii=False).translate(ESCAPED)
