"""Refusals of Anthropic's messages endpoint, in its words (Source: the client's types, observed errors)."""

from __future__ import annotations

import re
from typing import Any, NoReturn

from .rules import is_int, names, unmet, within
from .wire import ProviderRefusal

FIELDS = names(
    "cache_control container diagnostics inference_geo max_tokens messages metadata model output_config "
    "service_tier speed "
    "stop_sequences stream system temperature thinking tool_choice tools top_k top_p"
)
BLOCKS = {
    "user": ("text", "image", "document", "search_result", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use", "server_tool_use", "web_search_tool_result"),
}
MEDIA = ("image/jpeg", "image/png", "image/gif", "image/webp")
OLD_VERSION = "2023-06-01"
"""The last version that takes sampling parameters: 2026-10-21 answers 400 to them, even at their defaults."""
TOOL_ID = re.compile(r"[a-zA-Z0-9_-]+")
UNSUPPORTED = names("minimum maximum minLength maxLength minItems maxItems uniqueItems multipleOf")
TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")


def refuse(message: str) -> NoReturn:
    """Raise the 400."""
    raise ProviderRefusal(400, message)


def check(body: dict[str, Any], version: str) -> None:
    """Raise ProviderRefusal unless the real API would take that body under that `anthropic-version`."""
    for name in ("model", "max_tokens", "messages"):
        if body.get(name) is None:
            refuse(f"{name}: Field required")
    for name in body:
        if name not in FIELDS:
            refuse(f"{name}: Extra inputs are not permitted")
    if not is_int(body["max_tokens"]):
        refuse("max_tokens: Input should be a valid integer")
    if body["max_tokens"] < 0:
        refuse("max_tokens: Input should be greater than or equal to 0")
    _check_system(body.get("system"))
    _check_messages(body["messages"])
    if body["messages"][-1]["role"] == "assistant" and re.search(r"claude-(opus|sonnet)-(4-6|5)", str(body["model"])):
        refuse("This model does not support assistant message prefill. The conversation must end with a user message.")
    _check_sampling(body, version)
    _check_thinking(body)
    _check_tools(body)


def _check_system(system: Any) -> None:
    if system is None or isinstance(system, str):
        return
    for i, block in enumerate(system):
        if block.get("type") != "text":
            refuse(f"system.{i}.type: Input should be 'text'")
        if not block.get("text"):
            refuse("system: text content blocks must be non-empty")


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list):
        refuse("messages: Input should be a valid list")
    if not messages:
        refuse("messages: at least one message is required")
    calls: list[str] = []
    used: set[str] = set()
    for i, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role == "system":
            refuse(
                'messages: Unexpected role "system". The Messages API accepts a top-level `system` parameter, not '
                '"system" as an input message role.'
            )
        if role not in BLOCKS:
            refuse(f"messages.{i}.role: Input should be 'user' or 'assistant'")
        if i == 0 and role != "user":
            refuse('messages: first message must use the "user" role')
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list):
            refuse(f"messages.{i}.content: Input should be a valid list")
        final = i == len(messages) - 1 and role == "assistant"
        _check_blocks(blocks, i, role, final)
        calls = _check_tool_turn(blocks, i, calls)
        if len(set(calls)) < len(calls) or used & set(calls):
            refuse(f"messages.{i}: `tool_use` ids must be unique")
        used |= set(calls)
    if calls:
        refuse(_describe_unanswered(len(messages) - 1, calls))


def _check_blocks(blocks: list[Any], i: int, role: str, final: bool) -> None:
    if not final and (not blocks or blocks == [{"type": "text", "text": ""}]):
        refuse(
            f"messages.{i}: all messages must have non-empty content except for the optional final assistant message"
        )
    texts = [str(block.get("text", "")) for block in blocks if block.get("type") == "text"]
    if texts and not "".join(texts).strip():
        refuse("messages: text content blocks must contain non-whitespace text")
    for k, block in enumerate(blocks):
        kind = block.get("type")
        if kind not in BLOCKS[role]:
            refuse(
                f"messages.{i}.content.{k}: Input tag '{kind}' found using 'type' does not match any of the "
                "expected tags"
            )
        if kind == "text" and not block.get("text") and not final:
            refuse("messages: text content blocks must be non-empty")
        if kind == "text" and final and block["text"] != block["text"].rstrip():
            refuse("messages: final assistant content cannot end with trailing whitespace")
        if kind == "text" and role == "user" and block.get("citations"):
            refuse(f"messages.{i}.content.{k}.text.citations: citations are not permitted in user messages")
        if kind == "image":
            _check_image(block.get("source", {}), f"messages.{i}.content.{k}.image.source")
        if kind in ("tool_use", "tool_result"):
            _check_tool_block(block, f"messages.{i}.content.{k}")


def _check_image(source: dict[str, Any], where: str) -> None:
    if source.get("type") not in ("base64", "url", "file"):
        refuse(f"{where}: Input tag does not match any of the expected tags")
    if source["type"] == "base64" and source["media_type"] not in MEDIA:
        refuse(f"{where}.base64.media_type: Input should be {', '.join(map(repr, MEDIA[:-1]))} or {MEDIA[-1]!r}")


def _check_tool_block(block: dict[str, Any], where: str) -> None:
    kind = block["type"]
    fields = ("id", "name", "input") if kind == "tool_use" else ("tool_use_id",)
    for name in fields:
        if name not in block:
            refuse(f"{where}.{kind}.{name}: Field required")
    if not TOOL_ID.fullmatch(str(block[fields[0]])):
        refuse(f"{where}.{kind}.{fields[0]}: String should match pattern '^[a-zA-Z0-9_-]+$'")
    if kind == "tool_use" and not isinstance(block["input"], dict):
        refuse(f"{where}.tool_use.input: Input should be a valid dictionary")
    content = block.get("content", "") if kind == "tool_result" else ""
    if block.get("is_error") and not content:
        refuse(f"{where}.tool_result: content cannot be empty if `is_error` is true")
    for inner in content if isinstance(content, list) else ():
        if inner.get("type") not in ("text", "image", "document", "search_result"):
            refuse(f"{where}.tool_result.content: Input tag '{inner.get('type')}' found using 'type'")
        if inner["type"] == "text" and not inner.get("text"):
            refuse("messages: text content blocks must be non-empty")
        if inner["type"] == "image":
            _check_image(inner.get("source", {}), f"{where}.tool_result.content.image.source")


def _check_tool_turn(blocks: list[Any], i: int, calls: list[str]) -> list[str]:
    results = [block.get("tool_use_id", "") for block in blocks if block["type"] == "tool_result"]
    for k, block in enumerate(blocks):
        if block["type"] == "tool_result" and block.get("tool_use_id") not in calls:
            refuse(
                f"messages.{i}.content.{k}: unexpected `tool_use_id` found in `tool_result` blocks: "
                f"{block.get('tool_use_id')}. Each `tool_result` block must have a corresponding `tool_use` block "
                "in the "
                "previous message."
            )
    if missing := unmet(calls, results):
        refuse(_describe_unanswered(i - 1, missing))
    return [block["id"] for block in blocks if block["type"] == "tool_use"]


def _describe_unanswered(i: int, ids: list[str]) -> str:
    return (
        f"messages.{i}: `tool_use` ids were found without `tool_result` blocks immediately after: {', '.join(ids)}. "
        "Each `tool_use` block must have a corresponding `tool_result` block in the next message."
    )


def _check_sampling(body: dict[str, Any], version: str) -> None:
    for name in ("temperature", "top_p", "top_k"):
        if version != OLD_VERSION and name in body:
            refuse(f"{name}: Extra inputs are not permitted")
    for name in ("temperature", "top_p"):
        if not within(body.get(name), 0, 1):
            refuse(f"{name}: range: 0..1")
    if body.get("temperature") is not None and body.get("top_p") is not None:
        refuse("`temperature` and `top_p` cannot both be specified for this model. Please use only one.")
    if any(not stop.strip() for stop in body.get("stop_sequences") or []):
        refuse("stop_sequences: each stop sequence must contain non-whitespace")
    if not isinstance(body.get("stream"), bool | None):
        refuse("stream: Input should be a valid boolean")


def _check_thinking(body: dict[str, Any]) -> None:
    thinking = body.get("thinking") or {}
    if thinking.get("type") != "enabled":
        return
    budget = thinking.get("budget_tokens")
    if not is_int(budget) or budget < 1024:
        refuse("thinking.enabled.budget_tokens: Input should be greater than or equal to 1024")
    if budget >= body["max_tokens"]:
        refuse("`max_tokens` must be greater than `thinking.budget_tokens`.")
    if body.get("temperature") not in (None, 1, 1.0):
        refuse("`temperature` may only be set to 1 when thinking is enabled.")


def _check_tools(body: dict[str, Any]) -> None:
    tools = body.get("tools") or []
    blocks = [block for message in body["messages"] for block in message["content"] if isinstance(block, dict)]
    if not tools and any(block.get("type") in ("tool_use", "tool_result") for block in blocks):
        refuse("Requests which have `tool_use` or `tool_result` blocks in messages must include `tools`.")
    if body.get("tool_choice") is not None and not tools:
        refuse("tool_choice: tool_choice may only be specified while providing tools.")
    for i, tool in enumerate(tools):
        if not TOOL_NAME.fullmatch(str(tool.get("name", ""))):
            refuse(f"tools.{i}.custom.name: String should match pattern '^[a-zA-Z0-9_-]{{1,128}}$'")
        if tool.get("type") in (None, "custom") and "input_schema" not in tool:
            refuse(f"tools.{i}.custom.input_schema: Field required")
        if tool.get("type") in (None, "custom") and tool["input_schema"].get("type") != "object":
            refuse(f"tools.{i}.custom.input_schema.type: Input should be 'object'")
        if {"oneOf", "allOf", "anyOf"} & tool.get("input_schema", {}).keys():
            words = "input_schema does not support oneOf, allOf, or anyOf at the top level"
            refuse(f"tools.{i}.custom.input_schema: {words}")
        if tool.get("strict"):
            _check_schema(tool["input_schema"], f"tools.{i}.custom")
    _check_strict_limits([tool["input_schema"] for tool in tools if tool.get("strict")])
    output = (body.get("output_config") or {}).get("format")
    if output is not None:
        _check_schema(output["schema"], "output_config.format.schema")
    _check_choice(body.get("tool_choice") or {}, [tool["name"] for tool in tools])


def _check_choice(choice: dict[str, Any], offered: list[str]) -> None:
    if len(set(offered)) < len(offered):
        refuse("tools: Tool names must be unique.")
    if choice.get("type", "auto") not in ("auto", "any", "tool", "none"):
        refuse("tool_choice: Input tag does not match any of the expected tags: 'auto', 'any', 'tool', 'none'")
    if choice.get("type") == "tool" and choice.get("name") not in offered:
        refuse(f"Tool '{choice.get('name')}' not found in provided tools")
    if choice.get("type") == "none" and "disable_parallel_tool_use" in choice:
        refuse("tool_choice.none.disable_parallel_tool_use: Extra inputs are not permitted")


def _check_schema(schema: Any, where: str) -> None:
    """Refuse what no decoder is constrained to: some keywords, and objects that are not closed. What stands in
    `properties` are names."""
    if not isinstance(schema, dict):
        return
    if unsupported := sorted(UNSUPPORTED & schema.keys()):
        refuse(f"{where}: property '{unsupported[0]}' is not supported")
    if combined := sorted({"oneOf", "not", "if"} & schema.keys()):
        refuse(f"{where}: Schema type '{combined[0]}' is not supported")
    if schema.get("type") == "object" and schema.get("additionalProperties") is not False:
        refuse(f"{where}: For 'object' type, 'additionalProperties' must be explicitly set to false")
    definitions = schema.get("$defs", {})
    for inner in (*schema.get("properties", {}).values(), *definitions.values(), *schema.get("anyOf", ())):
        _check_schema(inner, where)
    _check_schema(schema.get("items"), where)


def _check_strict_limits(schemas: list[Any]) -> None:
    """Refuse more than the decoders take of the strict tools of one request."""
    if len(schemas) > 20:
        refuse(f"Too many strict tools ({len(schemas)}). The maximum number of strict tools supported is 20.")
    optional = unions = 0
    left = list(schemas)
    while left:
        schema = left.pop()
        if not isinstance(schema, dict):
            continue
        properties = schema.get("properties", {})
        optional += len(set(properties) - set(schema.get("required", [])))
        unions += "anyOf" in schema or isinstance(schema.get("type"), list)
        left += [*properties.values(), *schema.get("anyOf", ()), *schema.get("$defs", {}).values(), schema.get("items")]
    if optional > 24:
        refuse(f"Schemas contains too many optional parameters ({optional}), limit: 24.")
    if unions > 16:
        refuse(f"Schemas contains too many parameters with union types ({unions} parameters with type arrays or anyOf)")
