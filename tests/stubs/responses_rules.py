"""Refusals of OpenAI's responses endpoint, in its words (Source: its reference, observed errors)."""

from __future__ import annotations

import json
from typing import Any

from .openai_rules import REASONING, refuse
from .rules import TOOL_NAME, check_strict_schema, is_int, names, within

FIELDS = names(
    "background conversation include input instructions max_output_tokens max_tool_calls metadata model "
    "parallel_tool_calls previous_response_id prompt prompt_cache_key prompt_cache_retention reasoning "
    "safety_identifier service_tier store stream stream_options temperature text tool_choice tools top_logprobs top_p "
    "truncation user"
)
INCLUDES = ("reasoning.encrypted_content", "message.output_text.logprobs")
ROLES = ("user", "assistant", "system", "developer")
NOT_REASONING = ("gpt-4", "gpt-3", "chatgpt-", "gpt-5-chat")


def check(body: dict[str, Any]) -> None:
    """Raise ProviderRefusal unless the real API would take that body."""
    for name in body:
        if name not in FIELDS:
            refuse(f"Unknown parameter: '{name}'.", name, "unknown_parameter")
    if not isinstance(body.get("model"), str) or not body["model"]:
        refuse("Missing required parameter: 'model'.", "model", "missing_required_parameter")
    _check_input(body)
    _check_sampling(body)
    _check_include(body)
    _check_tools(body)
    _check_format(body)
    for name in ("stream", "store"):
        if not isinstance(body.get(name), bool | None):
            refuse(f"Invalid type for '{name}': expected a boolean.", name, "invalid_type")


def _check_input(body: dict[str, Any]) -> None:
    items = body.get("input")
    if not isinstance(items, list) or not items:
        refuse("Missing required parameter: 'input'.", "input", "missing_required_parameter")
    calls: list[str] = []
    results: list[str] = []
    for i, item in enumerate(items):
        where = f"input[{i}]"
        kind = item.get("type", "message")
        if kind == "message":
            _check_message(item, where)
        elif kind == "function_call":
            calls.append(_check_call(item, where))
        elif kind == "function_call_output":
            if item.get("call_id") not in calls:
                refuse(
                    f"No tool call found for function call output with call_id {item.get('call_id')}.", "input", None
                )
            _check_content(item.get("output"), "user", f"{where}.output")
            results.append(item["call_id"])
        elif kind == "reasoning":
            _check_reasoning(body, item, items[i + 1 :], where)
        else:
            refuse(f"Invalid value: '{kind}'.", f"{where}.type")
    for call in calls:
        if call not in results:
            refuse(f"No tool output found for function call {call}.", "input", None)


def _check_message(item: dict[str, Any], where: str) -> None:
    if item.get("role") not in ROLES:
        supported = ", ".join(f"'{role}'" for role in ROLES)
        refuse(f"Invalid value: '{item.get('role')}'. Supported values are: {supported}.", f"{where}.role")
    if extra := item.keys() - {"type", "role", "content", "phase", "id", "status"}:
        refuse(f"Unknown parameter: '{where}.{min(extra)}'.", where, "unknown_parameter")
    _check_content(item.get("content"), item["role"], f"{where}.content")


def _check_content(content: Any, role: str, where: str) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list) or not content:
        refuse(f"Invalid type for '{where}': expected a string or an array.", where, "invalid_type")
    allowed = ("output_text", "refusal") if role == "assistant" else ("input_text", "input_image", "input_file")
    for k, part in enumerate(content):
        if part.get("type") not in allowed:
            words = " and ".join(f"'{name}'" for name in allowed)
            refuse(f"Invalid value: '{part.get('type')}'. Supported values are: {words}.", f"{where}[{k}]")
        if part["type"] == "input_image" and not isinstance(part.get("image_url"), str):
            refuse(f"Invalid type for '{where}[{k}].image_url': expected an image URL.", f"{where}[{k}].image_url")


def _check_call(item: dict[str, Any], where: str) -> str:
    if not TOOL_NAME.fullmatch(str(item.get("name", ""))) or not isinstance(item.get("arguments"), str):
        refuse(f"Invalid '{where}.name': string does not match pattern '^[a-zA-Z0-9_-]+$'.", f"{where}.name")
    call_id = item.get("call_id")
    if not isinstance(call_id, str) or not 0 < len(call_id) <= 64:
        words = "string too long. Expected a string with maximum length 64"
        refuse(f"Invalid '{where}.call_id': {words}.", f"{where}.call_id", "string_above_max_length")
    return call_id


def _check_reasoning(body: dict[str, Any], item: dict[str, Any], rest: list[dict[str, Any]], where: str) -> None:
    id_ = item.get("id", "")
    if not id_.startswith("rs_") or not isinstance(item.get("summary"), list):
        refuse(f"Missing required parameter: '{where}.summary'.", f"{where}.summary", "missing_required_parameter")
    if body.get("store") is False and not item.get("encrypted_content"):
        refuse(f"Item with id '{id_}' not found. Items are not persisted when `store` is set to false.", "input", None)
    if not rest or rest[0].get("type") not in ("message", "function_call", "reasoning"):
        refuse(f"Item '{id_}' of type 'reasoning' was provided without its required following item.", "input", None)


def _check_sampling(body: dict[str, Any]) -> None:
    cap = body.get("max_output_tokens")
    if cap is not None and (not is_int(cap) or cap < 16):
        words = f"integer below minimum value. Expected a value >= 16, but got {cap} instead"
        refuse(f"Invalid 'max_output_tokens': {words}.", "max_output_tokens", "integer_below_min_value")
    for name, high in (("temperature", 2), ("top_p", 1), ("top_logprobs", 20)):
        if not within(body.get(name), 0, high):
            refuse(f"Invalid '{name}': expected a value between 0 and {high}.", name, "decimal_above_max_value")
        if body.get(name) is not None and body["model"].startswith(REASONING) and name != "top_logprobs":
            refuse(f"Unsupported parameter: '{name}' is not supported with this model.", name)


def _check_include(body: dict[str, Any]) -> None:
    for value in body.get("include") or ():
        if value not in INCLUDES:
            refuse(f"Invalid value: '{value}'.", "include")
        if value == INCLUDES[0] and body["model"].startswith(NOT_REASONING):
            refuse("Encrypted content is not supported with this model.", "include", None)


def _check_tools(body: dict[str, Any]) -> None:
    tools = body.get("tools") or []
    for i, tool in enumerate(tools):
        if tool.get("type") != "function":
            refuse(f"Invalid value: '{tool.get('type')}'.", f"tools[{i}].type")
        if not TOOL_NAME.fullmatch(str(tool.get("name", ""))):
            refuse(f"Missing required parameter: 'tools[{i}].name'.", f"tools[{i}].name", "missing_required_parameter")
        root = tool.get("parameters") or {}
        if root.get("type") != "object" or root.keys() & {"oneOf", "anyOf", "allOf", "enum", "const", "not"}:
            words = "schema must have type 'object' and not have 'oneOf'/'anyOf'/'allOf'/'enum'/'not' at the top level."
            refuse(f"Invalid schema for function '{tool['name']}': {words}", f"tools[{i}].parameters")
        if tool.get("strict", True):
            words = f"Invalid schema for function '{tool['name']}': "
            check_strict_schema(
                tool.get("parameters"), lambda why, words=words: refuse(words + why, "tools", "invalid_schema")
            )
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        if choice.get("type") != "function" or choice.get("name") not in [tool["name"] for tool in tools]:
            refuse(f"Tool choice '{choice.get('name')}' not found in 'tools' parameter.", "tool_choice", None)
    elif choice not in (None, "none", "auto", "required") or (choice == "required" and not tools):
        refuse(f"Invalid value: '{choice}'. Supported values are: 'none', 'auto', and 'required'.", "tool_choice")


def _check_format(body: dict[str, Any]) -> None:
    response_format = (body.get("text") or {}).get("format")
    if response_format is None:
        return
    kind = response_format.get("type")
    if kind == "json_object" and "json" not in json.dumps(body["input"]).lower():
        words = "must contain the word 'json' in some form to use 'text.format' of type 'json_object'."
        refuse(f"Response input messages {words}", "input", None)
    elif kind == "json_schema":
        if not TOOL_NAME.fullmatch(str(response_format.get("name", ""))) or not isinstance(
            response_format.get("schema"), dict
        ):
            refuse("Missing required parameter: 'text.format.name'.", "text.format.name", "missing_required_parameter")
        if (root := response_format["schema"].get("type")) != "object":
            words = f"schema must be a JSON Schema of 'type: \"object\"', got 'type: \"{root}\"'."
            refuse(f"Invalid schema for response_format '{response_format['name']}': {words}", "text.format.schema")
        if response_format.get("strict"):
            words = f"Invalid schema for response_format '{response_format['name']}': "
            check_strict_schema(
                response_format["schema"], lambda why: refuse(words + why, "text.format.schema", "invalid_schema")
            )
    elif kind not in ("text", "json_object"):
        refuse(f"Invalid value: '{kind}'.", "text.format.type")
