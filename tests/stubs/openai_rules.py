"""Refusals of OpenAI's chat completions, in its words (Source: openai-openapi 2.3.0, observed errors)."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from .rules import TOOL_NAME, check_strict_schema, is_int, names, unmet, within
from .wire import ProviderRefusal

FIELDS = names(
    "audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens "
    "max_tokens messages metadata "
    "modalities model moderation n parallel_tool_calls prediction presence_penalty prompt_cache_key "
    "prompt_cache_options "
    "prompt_cache_retention reasoning_effort response_format safety_identifier seed service_tier stop store stream "
    "stream_options "
    "temperature tool_choice tools top_logprobs top_p user verbosity web_search_options"
)
ROLES = ("system", "assistant", "user", "function", "tool", "developer")
PARTS = {
    "system": ("text",),
    "developer": ("text",),
    "tool": ("text",),
    "assistant": ("text", "refusal"),
    "user": ("text", "image_url", "input_audio", "file"),
}
REASONING = ("o1", "o3", "o4", "gpt-5")


def refuse(message: str, param: str | None, code: str | None = "invalid_value") -> NoReturn:
    """Raise the 400."""
    raise ProviderRefusal(400, message, code, param)


def check(body: dict[str, Any], strict: bool) -> None:
    """Raise ProviderRefusal unless the real API would take that body; `strict` False is a compatible server (vLLM)."""
    if not isinstance(body.get("model"), str) or not body["model"]:
        refuse("you must provide a model parameter", None, None)
    for name in body:
        if strict and name not in FIELDS:
            refuse(f"Unrecognized request argument supplied: {name}", None, None)
    _check_messages(body)
    _check_sampling(body)
    if strict:
        _check_reasoning_model(body)
    _check_stream(body)
    _check_tools(body)
    _check_format(body)


def _check_messages(body: dict[str, Any]) -> None:
    messages = body.get("messages")
    if messages is None:
        refuse("Missing required parameter: 'messages'.", "messages", "missing_required_parameter")
    if not isinstance(messages, list):
        refuse("Invalid type for 'messages': expected an array of objects.", "messages", "invalid_type")
    if not messages:
        refuse(
            "Invalid 'messages': empty array. Expected an array with minimum length 1, but got an empty array instead.",
            "messages",
            "empty_array",
        )
    open_calls: list[str] = []
    results: list[str] = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            refuse(f"Invalid type for 'messages[{i}]': expected an object.", f"messages[{i}]", "invalid_type")
        role = message.get("role")
        if role not in ROLES:
            supported = "'system', 'assistant', 'user', 'function', 'tool', and 'developer'"
            refuse(f"Invalid value: '{role}'. Supported values are: {supported}.", f"messages[{i}].role")
        if role == "tool":
            if not open_calls or message.get("tool_call_id") not in open_calls:
                refuse(
                    "Invalid parameter: messages with role 'tool' must be a response to a preceeding message with "
                    "'tool_calls'.",
                    f"messages.[{i}].role",
                    None,
                )
            results.append(message["tool_call_id"])
        else:
            _check_answered(open_calls, results, i)
            open_calls, results = _check_calls(message, i), []
        _check_content(message, i)
    _check_answered(open_calls, results, len(messages))


def _check_calls(message: dict[str, Any], i: int) -> list[str]:
    """The ids of an assistant's calls; ids and names have their bounds, and there are no empty lists."""
    calls = message.get("tool_calls")
    if calls is None:
        return []
    where = f"messages[{i}].tool_calls"
    if message["role"] != "assistant" or not isinstance(calls, list) or not calls:
        refuse(f"Invalid '{where}': empty array. Expected an array with minimum length 1.", where, "empty_array")
    for k, call in enumerate(calls):
        function = call.get("function") or {}
        if call.get("type") != "function" or not isinstance(function.get("arguments"), str):
            refuse(
                f"Missing required parameter: '{where}[{k}].function.arguments'.", where, "missing_required_parameter"
            )
        if not TOOL_NAME.fullmatch(str(function.get("name", ""))):
            refuse(f"Invalid '{where}[{k}].function.name': string does not match pattern.", f"{where}[{k}]")
        if not 0 < len(str(call.get("id", ""))) <= 40:
            words = "string too long. Expected a string with maximum length 40"
            refuse(f"Invalid '{where}[{k}].id': {words}.", f"{where}[{k}].id", "string_above_max_length")
    return [call["id"] for call in calls]


def _check_answered(calls: list[str], results: list[str], i: int) -> None:
    if missing := unmet(calls, results):
        refuse(
            "An assistant message with 'tool_calls' must be followed by tool messages responding to each "
            "'tool_call_id'. "
            f"The following tool_call_ids did not have response messages: {', '.join(missing)}",
            f"messages.[{i}].role",
            None,
        )


def _check_content(message: dict[str, Any], i: int) -> None:
    content, role, where = message.get("content"), message["role"], f"messages[{i}].content"
    if content is None:
        if role == "assistant" and (message.get("tool_calls") or message.get("refusal") or message.get("audio")):
            return
        refuse("Invalid value for 'content': expected a string, got null.", f"messages.[{i}].content", None)
    if isinstance(content, str):
        return
    if not isinstance(content, list) or not content:
        refuse(f"Invalid type for '{where}': expected one of a string or array of objects.", where, "invalid_type")
    for k, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        allowed = PARTS.get(role, ("text",))
        if kind not in allowed:
            words = ", ".join(f"'{name}'" for name in allowed)
            refuse(f"Invalid value: '{kind}'. Supported values are: {words}.", f"{where}[{k}].type")
        if kind == "text" and not isinstance(part.get("text"), str):
            refuse(
                f"Missing required parameter: '{where}[{k}].text'.", f"{where}[{k}].text", "missing_required_parameter"
            )
        if kind == "image_url" and not (isinstance(part.get("image_url"), dict) and "url" in part["image_url"]):
            refuse(
                f"Missing required parameter: '{where}[{k}].image_url'.",
                f"{where}[{k}].image_url",
                "missing_required_parameter",
            )


def _check_sampling(body: dict[str, Any]) -> None:
    ranges = {
        "temperature": (0, 2),
        "top_p": (0, 1),
        "frequency_penalty": (-2, 2),
        "presence_penalty": (-2, 2),
        "n": (1, 128),
        "top_logprobs": (0, 20),
        "max_tokens": (1, 1 << 31),
        "max_completion_tokens": (1, 1 << 31),
    }
    for name, (low, high) in ranges.items():
        value = body.get(name)
        if (
            value is not None
            and name in ("n", "top_logprobs", "max_tokens", "max_completion_tokens")
            and not is_int(value)
        ):
            refuse(f"Invalid type for '{name}': expected an integer.", name, "invalid_type")
        if not within(value, low, high):
            code = "integer_below_min_value" if is_int(value) and value < low else "decimal_above_max_value"
            refuse(f"Invalid '{name}': expected a value between {low} and {high}, but got {value} instead.", name, code)
    if body.get("top_logprobs") is not None and not body.get("logprobs"):
        refuse(
            "The 'logprobs' parameter must be set to true when the 'top_logprobs' parameter is used.",
            "top_logprobs",
            None,
        )
    if isinstance(body.get("stop"), list) and len(body["stop"]) > 4:
        refuse(
            "Invalid 'stop': array too long. Expected an array with maximum length 4.", "stop", "array_above_max_length"
        )


def _check_reasoning_model(body: dict[str, Any]) -> None:
    if not body["model"].startswith(REASONING) or body["model"].startswith("gpt-5-chat"):
        return
    if body.get("max_tokens") is not None:
        refuse(
            "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' "
            "instead.",
            "max_tokens",
            "unsupported_parameter",
        )
    if body.get("temperature") not in (None, 1, 1.0):
        refuse(
            f"Unsupported value: 'temperature' does not support {body['temperature']} with this model. Only the "
            "default (1) "
            "value is supported.",
            "temperature",
            "unsupported_value",
        )


def _check_stream(body: dict[str, Any]) -> None:
    if not isinstance(body.get("stream"), bool | None):
        refuse("Invalid type for 'stream': expected a boolean.", "stream", "invalid_type")
    if body.get("stream_options") is not None and not body.get("stream"):
        refuse("The 'stream_options' parameter is only allowed when 'stream' is enabled.", "stream_options", None)


def _check_tools(body: dict[str, Any]) -> None:
    tools = body.get("tools")
    if tools is None:
        for name in ("tool_choice", "parallel_tool_calls"):
            if body.get(name) not in (None, "none"):
                refuse(f"'{name}' is only allowed when 'tools' are specified.", name, None)
        return
    if not isinstance(tools, list) or not tools:
        refuse("Invalid 'tools': empty array. Expected an array with minimum length 1.", "tools", "empty_array")
    for i, tool in enumerate(tools):
        if tool.get("type") not in ("function", "custom"):
            refuse(
                f"Invalid value: '{tool.get('type')}'. Supported values are: 'function' and 'custom'.",
                f"tools[{i}].type",
            )
        function = tool.get(tool["type"])
        if not isinstance(function, dict) or not TOOL_NAME.fullmatch(str(function.get("name", ""))):
            refuse(
                f"Invalid 'tools[{i}].function.name': string does not match pattern '^[a-zA-Z0-9_-]+$'.",
                f"tools[{i}].function.name",
            )
        if function.get("strict"):
            words = f"Invalid schema for function '{function['name']}': "
            check_strict_schema(
                function.get("parameters"), lambda why, words=words: refuse(words + why, "tools", "invalid_schema")
            )
    _check_choice(body, [tool[tool["type"]]["name"] for tool in tools])


def _check_choice(body: dict[str, Any], offered: list[str]) -> None:
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        name = (choice.get("function") or {}).get("name")
        if choice.get("type") != "function" or name not in offered:
            refuse(f"Tool choice '{name}' not found in 'tools' parameter.", "tool_choice", None)
    elif choice not in (None, "none", "auto", "required"):
        refuse(f"Invalid value: '{choice}'. Supported values are: 'none', 'auto', and 'required'.", "tool_choice")
    if not isinstance(body.get("parallel_tool_calls"), bool | None):
        refuse("Invalid type for 'parallel_tool_calls': expected a boolean.", "parallel_tool_calls", "invalid_type")


def _check_format(body: dict[str, Any]) -> None:
    response_format = body.get("response_format")
    if response_format is None:
        return
    kind = response_format.get("type")
    if kind == "json_object" and "json" not in json.dumps(body["messages"]).lower():
        refuse(
            "'messages' must contain the word 'json' in some form, to use 'response_format' of type 'json_object'.",
            "messages",
            None,
        )
    elif kind == "json_schema":
        schema = response_format.get("json_schema") or {}
        name = schema.get("name")
        if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
            refuse(
                "Missing required parameter: 'response_format.json_schema.name'.",
                "response_format.json_schema.name",
                "missing_required_parameter",
            )
        if schema.get("strict"):
            words = f"Invalid schema for response_format '{name}': "
            check_strict_schema(
                schema.get("schema"), lambda why: refuse(words + why, "response_format", "invalid_schema")
            )
    elif kind not in ("text", "json_object"):
        refuse(
            f"Invalid value: '{kind}'. Supported values are: 'json_object', 'json_schema', and 'text'.",
            "response_format.type",
        )
