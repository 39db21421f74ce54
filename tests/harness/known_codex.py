"""Requests of Codex, by name; `known_clients.py` has them among the others."""

from collections.abc import Mapping
from typing import Any

from tests.harness.known_clients import RESPONSES, SCHEMA, text

CODEX: Mapping[str, tuple[str, dict[str, Any]]] = {
    # Codex, as it comes.
    "codex": (
        RESPONSES,
        {
            "instructions": "You are Codex.",
            "input": [
                {"type": "message", "role": "developer", "content": [text("Rules.", "input_text")]},
                {"type": "message", "role": "user", "content": [text("Hi", "input_text")]},
                {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "x"},
                {"type": "function_call", "name": "shell", "arguments": '{"command":["ls"]}', "call_id": "call_1"},
                {"type": "function_call_output", "call_id": "call_1", "output": "a.py"},
            ],
            "tools": [
                {"type": "function", "name": "shell", "description": "Runs.", "strict": False, "parameters": SCHEMA},
                {
                    "type": "namespace",
                    "name": "agents",
                    "description": "Agents.",
                    "tools": [{"type": "function", "name": "spawn", "strict": False, "parameters": SCHEMA}],
                },
                {
                    "type": "custom",
                    "name": "apply_patch",
                    "format": {"type": "grammar", "syntax": "lark", "definition": ""},
                },
                {"type": "web_search", "external_web_access": False},
            ],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "3c2a",
            "text": {"verbosity": "medium"},
            "client_metadata": {"x-codex-installation-id": "1"},
        },
    ),
    # Codex with --dangerously-bypass-approvals-and-sandbox: its web search may reach the web.
    "codex, full access": (
        RESPONSES,
        {
            "input": [{"type": "message", "role": "user", "content": [text("Hi", "input_text")]}],
            "tools": [
                {"type": "function", "name": "exec_command", "strict": False, "parameters": SCHEMA},
                {"type": "web_search", "external_web_access": True},
            ],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "3c2a",
            "client_metadata": {"thread_id": "1"},
        },
    ),
    # Codex looks for the tools of its servers itself.
    "codex, its own search": (
        RESPONSES,
        {
            "input": [
                {"type": "message", "role": "user", "content": [text("Hi", "input_text")]},
                {
                    "type": "tool_search_call",
                    "call_id": "call_1",
                    "execution": "client",
                    "arguments": {"query": "calendar", "limit": 1},
                },
                {
                    "type": "tool_search_output",
                    "call_id": "call_1",
                    "status": "completed",
                    "execution": "client",
                    "tools": [
                        {
                            "type": "namespace",
                            "name": "mcp__calendar",
                            "description": "Calendars.",
                            "tools": [
                                {
                                    "type": "function",
                                    "name": "create",
                                    "description": "Creates.",
                                    "strict": False,
                                    "defer_loading": True,
                                    "parameters": SCHEMA,
                                }
                            ],
                        }
                    ],
                },
            ],
            "tools": [
                {"type": "tool_search", "execution": "client", "description": "# Tool discovery", "parameters": SCHEMA}
            ],
            "store": False,
            "stream": True,
        },
    ),
    # Codex offers all of its tools in the conversation to the newest of its models.
    "codex, tools in the conversation": (
        RESPONSES,
        {
            "input": [
                {
                    "type": "additional_tools",
                    "id": "at_01a2046c",
                    "role": "developer",
                    "tools": [
                        {
                            "type": "namespace",
                            "name": "functions",
                            "description": "",
                            "tools": [
                                {
                                    "type": "custom",
                                    "name": "exec",
                                    "description": "Runs.",
                                    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /./"},
                                },
                                {"type": "function", "name": "wait", "strict": False, "parameters": SCHEMA},
                            ],
                        },
                        {"type": "tool_search", "execution": "client", "description": "x", "parameters": SCHEMA},
                        {"type": "web_search", "external_web_access": False},
                    ],
                },
                {"type": "message", "id": "msg_1", "role": "user", "content": [text("Hi", "input_text")]},
            ],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "reasoning": {"effort": "low", "context": "all_turns"},
            "store": False,
            "stream": True,
        },
    ),
}
