"""Tools of chat completions by every official client: choices, parallel and strict calls, whole and streamed alike."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.clients.reports import Report
from tests.stubs import ProviderStub, Reply, Stall, ToolCall
from tests.stubs.record import Received
from tests.stubs.script import Usage

pytestmark = pytest.mark.timeout(60)
Driven = Callable[[str], Awaitable[Report]]

STALL = 0.6
"""Seconds for which the worker says nothing more in the middle of its first call's arguments, when it streams."""
ADDS, LOOKS = ["add", '{"a": 2, "b": 2}'], ["look", '{"q": "four"}']
CALLS = tuple(ToolCall(name, arguments) for name, arguments in (ADDS, LOOKS))
COUNTED = Usage(input=40, cached=30, output=9, reasoning=4)
USAGE = {
    "prompt_tokens": 40,
    "completion_tokens": 9,
    "total_tokens": 49,
    "prompt_tokens_details": {
        "cached_tokens": 30,
        "orchestration_input_tokens": 0,
        "orchestration_input_cached_tokens": 0,
    },
    "completion_tokens_details": {"reasoning_tokens": 4, "orchestration_output_tokens": 0},
}


def worker(received: Received) -> Reply:
    """It does what its request says of tools, but knows nothing of `parallel_tool_calls`; then it tells the results."""
    body = received.json
    choice, came = body.get("tool_choice", "auto"), [one for one in body["messages"] if one["role"] == "tool"]
    if len(came) >= len(CALLS):
        return Reply(chunks=tuple(f"{one['content']};" for one in came), usage=COUNTED)
    if choice == "none":
        return Reply(chunks=("No ", "tools."), usage=COUNTED)
    if choice != "auto":
        calls = CALLS[:1] if choice == "required" else CALLS[1:]
        return Reply(chunks=(), tool_calls=calls, finish="tool", usage=COUNTED)
    words, fault = ("Let me ", "see."), Stall(after=3, seconds=STALL)
    if not received.streaming or came:
        fault = None
    return Reply(chunks=words, tool_calls=CALLS, finish="tool", usage=COUNTED, fault=fault)


def turn(text: str | None, *calls: list[str], finish: str = "tool_calls") -> dict[str, Any]:
    return {"text": text, "calls": list(calls), "finish": finish, "usage": USAGE}


EXPECTED = {
    "auto": turn("Let me see.", ADDS, LOOKS),
    "none": turn("No tools.", finish="stop"),
    "required": turn(None, ADDS),
    "named": turn(None, LOOKS),
    "one": turn("Let me see.", ADDS),
}
PIECES = {"auto": [2, 2], "none": [], "required": [2], "named": [2], "one": [2]}
"""Of the arguments of each call: as many as the worker sent."""


async def test_tools(driven: Driven, stub: ProviderStub) -> None:
    stub.always("alpha", worker)
    report = await driven("tools")
    how = {name: (report[name]["streamed"].pop("pieces"), report[name]["streamed"].pop("early")) for name in EXPECTED}
    loops = {"loop": "add;look;", "helped loop": "add;look;"}
    assert report == {name: {"whole": said, "streamed": said} for name, said in EXPECTED.items()} | loops
    assert {name: pieces for name, (pieces, _) in how.items()} == PIECES
    assert min(how[name][1] for name in ("auto", "one")) > STALL / 4, "they came while the worker was still at them"
    for received in stub.of("alpha"):
        add, look = (one["function"] for one in received.json["tools"])
        kinds = {name: one["type"] for name, one in add["parameters"]["properties"].items()}
        assert (kinds, add["strict"], add["parameters"]["required"]) == (
            {"a": "integer", "b": "integer"},
            True,
            ["a", "b"],
        )
        assert (look["parameters"], "strict" in look) == ({"type": "object"}, False)
