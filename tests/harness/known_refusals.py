"""Requests of well-known clients that Baton refuses, by name; `known_clients.py` has those that it accepts."""

from collections.abc import Mapping
from typing import Any

from tests.harness.known_clients import CHAT, HI, LEGACY, MESSAGES, RESPONSES, SCHEMA

REFUSED: Mapping[str, tuple[str, dict[str, Any], str | None, str]] = {
    "agents sdk, web search": (
        RESPONSES,
        {"input": "Hi", "tools": [{"type": "web_search", "search_context_size": "medium"}]},
        "tools[0].type",
        "leave it out, or offer a function",
    ),
    "claude code, hosted search": (
        MESSAGES,
        {"max_tokens": 9, "messages": [HI], "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "tools.0.type",
        "Nobody here would run a tool of another type: leave it out",
    ),
    "claude code, a document": (
        MESSAGES,
        {
            "max_tokens": 9,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "x"}}
                    ],
                }
            ],
        },
        None,
        "cannot read PDFs",
    ),
    "anthropic sdk, clearing of tool results": (
        MESSAGES,
        {"max_tokens": 9, "messages": [HI], "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        "context_management.edits.0.type",
        "must be 'clear_thinking_20251015'",
    ),
    "claude code, a tool that is not there": (
        MESSAGES,
        {
            "max_tokens": 9,
            "messages": [
                HI,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "find", "input": {}}]},
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
            "tools": [{"name": "find", "input_schema": SCHEMA}],
        },
        "messages.2.content.0.content",
        "refers to a tool that is not among tools",
    ),
    "claude code, nothing but deferred tools": (
        MESSAGES,
        {
            "max_tokens": 9,
            "messages": [HI],
            "tools": [{"name": "look", "input_schema": SCHEMA, "defer_loading": True}],
        },
        "tools",
        "must not be deferred",
    ),
    "anthropic sdk, servers of tools": (
        MESSAGES,
        {"max_tokens": 9, "messages": [HI], "mcp_servers": [{"type": "url", "url": "https://x.example", "name": "x"}]},
        "mcp_servers",
        "offer functions in `tools`",
    ),
    "vercel, a file": (
        RESPONSES,
        {
            "input": [
                {"role": "user", "content": [{"type": "input_file", "file_data": "data:application/pdf;base64,x"}]}
            ]
        },
        None,
        "cannot read PDFs",
    ),
    "vercel, what another server stored": (
        RESPONSES,
        {"input": [{"type": "item_reference", "id": "msg_67"}, HI]},
        "input[0].id",
        "send the item itself",
    ),
    "cursor, the other format": (CHAT, {"input": [HI]}, "input", "Unknown parameter"),
    "continue, completion of a gap": (LEGACY, {"prompt": "a", "suffix": "b"}, "suffix", "a text that follows"),
    "openrouter": (CHAT, {"messages": [HI], "provider": {"order": ["x"]}}, "provider", "Unknown parameter"),
    "vllm": (CHAT, {"messages": [HI], "chat_template_kwargs": {}}, "chat_template_kwargs", "Unknown parameter"),
    "open webui, ollama's options": (CHAT, {"messages": [HI], "top_k": 40}, "top_k", "Unknown parameter"),
    "several answers": (CHAT, {"messages": [HI], "n": 3}, "n", "one answer"),
    "a predicted answer": (
        CHAT,
        {"messages": [HI], "prediction": {"type": "content", "content": "x"}},
        "prediction",
        "Workers are sent no prediction",
    ),
    "a choice without tools": (CHAT, {"messages": [HI], "tool_choice": "auto"}, "tool_choice", "needs tools"),
    "functions of old": (CHAT, {"messages": [HI], "functions": [{"name": "f"}]}, "functions", "in favour of `tools`"),
    "an empty list of calls": (
        CHAT,
        {"messages": [HI, {"role": "assistant", "content": "x", "tool_calls": []}, HI]},
        "messages[1].tool_calls",
        "at least 1 entry",
    ),
}
"""Each by its client: the route, the body beside `model`, the field that is named and what is said of it."""
