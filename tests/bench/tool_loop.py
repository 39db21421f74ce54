"""An agent's loop of tools as a load: one connection, each request the conversation so far with one more tool result.

No fixed body can do that: the ids of the calls come with the replies. Only the time from the request's first byte to
the reply's last one counts; a loop begins anew after `TURNS` turns.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

from .subject import QUESTION, Target

TURNS = 20
"""Turns that a coding agent takes for a small task."""
RESULT = "def part(): return 42\n" * 40
"""A file of a kilobyte."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Reads a file.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
]


class NoToolCall(RuntimeError):
    """A reply failed, broke off, or calls no tool."""


def measure_turns(target: Target, worker: str, seconds: float, *, stream: bool) -> list[float]:
    """Return the milliseconds of each turn that brought back a result. Raises `NoToolCall`."""
    url = urlsplit(target.address(worker))
    times: list[float] = []
    with closing(HTTPConnection(url.hostname or "", url.port, timeout=30)) as connection:
        ends = time.perf_counter() + seconds
        while time.perf_counter() < ends:
            times += list(_loop(connection, url.path, target.headers, worker, stream))[1:]
    return times


def _loop(connection: HTTPConnection, path: str, headers: dict[str, str], worker: str, stream: bool) -> Iterator[float]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
    request_body = {"model": "baton-mini", "tools": TOOLS, "baton": {"pool": {"pin": worker}}, "stream": stream}
    for _ in range(TURNS + 1):
        body = json.dumps(request_body | {"messages": messages})
        began = time.perf_counter()
        connection.request("POST", path, body, {"Content-Type": "application/json", **headers})
        reply = connection.getresponse()
        reply_body = reply.read()
        yield (time.perf_counter() - began) * 1000
        if reply.status != 200:
            raise NoToolCall(reply_body.decode(errors="replace"))
        calls = (
            read_streamed_calls(reply_body)
            if stream
            else json.loads(reply_body)["choices"][0]["message"].get("tool_calls")
        )
        if not calls:
            raise NoToolCall(reply_body.decode(errors="replace"))
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": RESULT} for call in calls]


def read_streamed_calls(reply_body: bytes) -> list[dict[str, Any]]:
    """Return the calls of a streamed reply, put together. Raises `NoToolCall` if it broke off."""
    calls: list[dict[str, Any]] = []
    lines = [line.removeprefix(b"data: ") for line in reply_body.split(b"\n") if line.startswith(b"data: ")]
    if not lines or lines[-1] != b"[DONE]":
        raise NoToolCall(reply_body.decode(errors="replace"))
    for line in lines[:-1]:
        for choice in json.loads(line)["choices"]:
            for piece in choice["delta"].get("tool_calls") or ():
                if piece["index"] == len(calls):
                    calls.append({"id": piece["id"], "type": "function", "function": {"name": "", "arguments": ""}})
                for name, text in piece["function"].items():
                    calls[piece["index"]]["function"][name] += text
    return calls
