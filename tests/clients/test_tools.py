"""Tools of chat completions by every official client: choices, parallel and strict calls, whole and streamed alike."""

from collections.abc import Awaitable, Callable
from typing import Any

from tests.clients.reports import Report
from tests.clients.tool_worker import ADDS, LOOKS, STALL, TEXT, worker, writer
from tests.stubs import ProviderStub

Driven = Callable[[str], Awaitable[Report]]

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
    assert report == {name: {"whole": expected, "streamed": expected} for name, expected in EXPECTED.items()} | loops
    assert {name: pieces for name, (pieces, _) in how.items()} == PIECES
    assert min(how[name][1] for name in ("auto", "one")) > STALL / 10, "they came while the worker was still at them"
    for received in stub.requests_for("alpha"):
        add, look = (tool["function"] for tool in received.json["tools"])
        kinds = {name: parameter["type"] for name, parameter in add["parameters"]["properties"].items()}
        assert (kinds, add["strict"], add["parameters"]["required"]) == (
            {"a": "integer", "b": "integer"},
            True,
            ["a", "b"],
        )
        assert (look["parameters"], "strict" in look) == ({"type": "object"}, False)


async def test_tools_of_free_text(driven: Driven, stub: ProviderStub) -> None:
    stub.always("alpha", writer)
    calls = [["custom", "patch", TEXT], ["function", *LOOKS]]
    assert await driven("custom") == {"whole": calls, "streamed": calls, "last": "custom;function;"}
