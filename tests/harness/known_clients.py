"""Requests of well-known clients: bodies as in their sources and as seen on the wire, cut to what is particular.

`known_refusals.py` has those that are refused.
"""

from collections.abc import Mapping
from typing import Any

CHAT, RESPONSES, MESSAGES, LEGACY = "/v1/chat/completions", "/v1/responses", "/v1/messages?beta=true", "/v1/completions"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
CLOSED = SCHEMA | {"additionalProperties": False, "$schema": "http://json-schema.org/draft-07/schema#"}
OPTIONAL = {"type": "object", "properties": SCHEMA["properties"], "additionalProperties": False}
FUNCTION = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": SCHEMA}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"q": "x"}'}}
BESIDE = {"provider_specific_fields": {"refusal": None}}
HI = {"role": "user", "content": "Hi"}
MARK = {"type": "ephemeral"}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}


def text(said: str, kind: str = "text", **more: Any) -> dict[str, Any]:
    """Return a part."""
    return {"type": kind, "text": said} | more


WORK: Mapping[str, tuple[str, dict[str, Any]]] = {
    # LangChain: ChatOpenAI, with tools bound, streaming, and a transcript sent back.
    "langchain": (
        CHAT,
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                HI | {"name": "ann"},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": "found"},
            ],
            "tools": [FUNCTION | {"function": FUNCTION["function"] | {"strict": False}}],  # type: ignore[operator]
            "parallel_tool_calls": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "n": 1,
            "temperature": 0.7,
        },
    ),
    "langchain, structured": (
        CHAT,
        {
            "messages": [HI],
            "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}},
        },
    ),
    "langchain, responses": (
        RESPONSES,
        {
            "input": [
                {"role": "developer", "content": [text("Be brief.", "input_text")]},
                {"role": "user", "content": [text("Hi", "input_text")]},
                {"type": "reasoning", "id": "rs_1", "summary": [text("Hm.", "summary_text")], "encrypted_content": "x"},
                {
                    "type": "message",
                    "role": "assistant",
                    "id": "msg_1",
                    "content": [text("Hello.", "output_text", annotations=[])],
                },
                {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "call_1", "output": "found"},
            ],
            "include": ["reasoning.encrypted_content"],
            "reasoning": {"effort": "medium", "summary": "auto"},
            "tools": [{"type": "function", "name": "look", "parameters": SCHEMA}],
            "truncation": "auto",
            "store": False,
        },
    ),
    # LangChain: ChatAnthropic. What is optional is in no strict schema of OpenAI's, which Anthropic's are.
    "langchain, anthropic's structured": (
        MESSAGES,
        {
            "max_tokens": 4096,
            "messages": [HI],
            "output_config": {"format": {"type": "json_schema", "schema": OPTIONAL | {"title": "Place"}}},
        },
    ),
    "langchain, anthropic's strict tools": (
        MESSAGES,
        {
            "max_tokens": 4096,
            "messages": [HI],
            "tools": [{"name": "look", "description": "Looks.", "input_schema": OPTIONAL, "strict": True}],
        },
    ),
    "strict, with what is optional": (
        CHAT,
        {
            "messages": [HI],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": OPTIONAL, "strict": True},
            },
        },
    ),
    # LlamaIndex: OpenAILike.
    "llamaindex": (
        CHAT,
        {
            "messages": [{"role": "system", "content": [text("Be brief.")]}, {"role": "user", "content": [text("Hi")]}],
            "tools": [FUNCTION],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "max_tokens": None,
            "temperature": 0.1,
            "stream": False,
        },
    ),
    # Vercel's AI SDK: provider `openai-compatible`, then provider `openai` (responses).
    "vercel, compatible": (
        CHAT,
        {
            "messages": [
                {"role": "user", "content": [text("Hi")]},
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": '{"found":true}'},
            ],
            "tools": [{"type": "function", "function": {"name": "look", "parameters": CLOSED}}],
            "tool_choice": "auto",
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    "vercel, responses": (
        RESPONSES,
        {
            "input": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [text("Hi", "input_text")]},
            ],
            "tools": [{"type": "function", "name": "look", "description": "Looks.", "parameters": CLOSED}],
            "tool_choice": "auto",
            "store": True,
            "stream": True,
            "max_output_tokens": 500,
        },
    ),
    # OpenAI's Agents SDK.
    "agents sdk": (
        RESPONSES,
        {
            "instructions": "Be brief.",
            "input": [{"role": "user", "content": "Hi"}],
            "include": [],
            "tools": [],
            "metadata": {"trace": "1"},
            "parallel_tool_calls": True,
            "prompt_cache_retention": "24h",
        },
    ),
    # The same in JavaScript, on the older route: what stood beside a text in a reply stands in its part.
    "agents sdk, javascript": (
        CHAT,
        {
            "messages": [
                HI,
                {
                    "role": "assistant",
                    "content": [text("Hm.", role="assistant", refusal=None, annotations=[], tool_calls=[CALL])],
                    "tool_calls": [CALL],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": "found"},
            ],
            "tools": [FUNCTION],
        },
    ),
    # Claude Code, with a tier's name as its model.
    "claude code": (
        MESSAGES,
        {
            "max_tokens": 32_000,
            "system": [
                text("x-anthropic-billing-header: cc_version=2"),
                text("You are Claude Code.", cache_control=MARK | {"ttl": "1h", "scope": "global"}),
            ],
            "messages": [
                {"role": "user", "content": [text("<system-reminder>x</system-reminder>"), text("Hi")]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "", "signature": "s"},
                        {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "toolu_1",
                            "content": [text("a.py")],
                            "is_error": False,
                            "cache_control": MARK,
                        },
                        text("<system-reminder>y</system-reminder>"),
                    ],
                },
            ],
            "tools": [
                {"name": "Bash", "description": "Runs. " * 4_000, "input_schema": CLOSED, "eager_input_streaming": True}
            ],
            "metadata": {"user_id": '{"device_id":"1","session_id":"2"}'},
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "medium"},
            "stream": True,
        },
    ),
    # Claude Code keeps tools back until its own search has found them.
    "claude code, deferred tools": (
        MESSAGES,
        {
            "max_tokens": 32_000,
            "messages": [
                HI,
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "toolu_1", "name": "ToolSearch", "input": {"q": "look"}}],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "toolu_1",
                            "content": [{"type": "tool_reference", "tool_name": "look"}],
                        }
                    ],
                },
            ],
            "tools": [
                {"name": "ToolSearch", "description": "Finds.", "input_schema": SCHEMA},
                {"name": "look", "description": "Looks.", "input_schema": SCHEMA, "defer_loading": True},
                {"name": "later", "description": "Waits.", "input_schema": SCHEMA, "defer_loading": True},
            ],
        },
    ),
    "claude code, its small model": (
        MESSAGES,
        {
            "max_tokens": 512,
            "system": [text("Name the conversation.")],
            "messages": [HI, {"role": "assistant", "content": "{"}],
            "tools": [],
            "temperature": 1,
            "stop_sequences": ["</x>"],
            "metadata": {"user_id": "x"},
        },
    ),
    "anthropic sdk, thinking": (
        MESSAGES,
        {"max_tokens": 2048, "thinking": {"type": "enabled", "budget_tokens": 1024}, "messages": [HI], "top_k": 40},
    ),
    # Cursor: what it sends to check a key, and an agent's turn.
    "cursor, the check": (CHAT, {"messages": [HI], "max_tokens": 10, "temperature": 0, "stream": False}),
    "cursor": (
        CHAT,
        {
            "messages": [{"role": "system", "content": [text("Rules.", cache_control=MARK)]}, HI],
            "tools": [FUNCTION],
            "tool_choice": "auto",
            "stream": True,
            "stream_options": {"include_usage": True},
            "user": "auth0|1",
        },
    ),
    # aider, by litellm.
    "aider": (
        CHAT,
        {
            "messages": [
                {"role": "system", "content": "Act as an expert."},
                HI,
                {"role": "assistant", "content": "Ok.", "reasoning_content": "Hm."},
                HI,
            ],
            "temperature": 0,
            "stream": True,
        },
    ),
    "litellm, with tools": (
        CHAT,
        {
            "messages": [
                HI,
                {"role": "assistant", "content": "", "tool_calls": [CALL | {"index": 0}], "function_call": None},
                {"role": "tool", "tool_call_id": "call_1", "name": "look", "content": [text("found")]},
            ],
            "tools": [FUNCTION],
        },
    ),
    "litellm, what it was told": (
        CHAT,
        {
            "messages": [
                HI,
                {
                    "role": "assistant",
                    "tool_calls": [
                        CALL | {"function": dict(CALL["function"]) | {"provider_specific_fields": {}}} | BESIDE,
                    ],
                    **BESIDE,
                },
                {"role": "tool", "tool_call_id": "call_1", "content": "found"},
            ],
            "tools": [FUNCTION],
        },
    ),
    # Continue: a chat, and an edit with its stop words.
    "continue": (
        CHAT,
        {
            "messages": [HI],
            "max_tokens": 2048,
            "stream": True,
            "stop": ["<|eot_id|>"],
            "stream_options": {"include_usage": True},
        },
    ),
    "continue, legacy": (LEGACY, {"prompt": "Hi", "max_tokens": 16, "stop": ["\n\n"], "stream": True}),
    # Open WebUI: a chat whose tools it drives itself, and its title.
    "open webui": (
        CHAT,
        {
            "messages": [
                HI,
                {"role": "assistant", "content": "", "tool_calls": [CALL | {"index": 0}]},
                {"role": "tool", "tool_call_id": "call_1", "content": "found"},
            ],
            "stream": True,
            "stream_options": {"include_usage": True},
            "tools": [FUNCTION],
        },
    ),
    "open webui, a title": (CHAT, {"messages": [HI], "stream": False, "max_completion_tokens": 1000}),
    # Cline and Roo Code: parts everywhere, caching marks.
    "cline": (
        CHAT,
        {
            "messages": [
                {"role": "system", "content": [text("Rules.", cache_control=MARK)]},
                {"role": "user", "content": [text("Hi"), text("Go on.", cache_control=MARK)]},
            ],
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "reasoning_effort": "medium",
        },
    ),
    "everything that asks for nothing": (
        CHAT,
        {
            "messages": [HI],
            "tools": [],
            "tool_choice": None,
            "response_format": {"type": "text"},
            "stop": [],
            "logit_bias": {},
            "metadata": {},
            "functions": [],
            "modalities": ["text"],
            "store": False,
            "service_tier": "auto",
            "verbosity": "medium",
            "user": "",
        },
    ),
}
"""Each by its client: the route, and the body beside `model`."""

HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "anthropic-dangerous-direct-browser-access": "true",
    "openai-beta": "responses=experimental",
    "originator": "codex_cli_rs",
    "session_id": "1",
    "http-referer": "https://x.example",
    "x-title": "x",
    "x-stainless-lang": "js",
    "user-agent": "x/1",
}
"""Headers and query parameters that they send, all at once: none of them may matter."""
