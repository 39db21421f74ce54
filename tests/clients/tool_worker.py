"""Workers that call tools, for the drives of official clients."""

import json

from tests.stubs import Reply, Stall, ToolCall
from tests.stubs.record import ReceivedRequest
from tests.stubs.script import Usage

STALL = 1.5
"""Seconds for which the worker says nothing more in the middle of its first call's arguments, when it streams."""
ADDS, LOOKS = ["add", '{"a": 2, "b": 2}'], ["look", '{"q": "four"}']
CALLS = tuple(ToolCall(name, arguments) for name, arguments in (ADDS, LOOKS))
COUNTED = Usage(input=40, cached=30, output=9, reasoning=4)


def worker(received: ReceivedRequest) -> Reply:
    """It does what its request says of tools, but knows nothing of `parallel_tool_calls`; then it tells the results."""
    body = received.json
    choice, came = (
        body.get("tool_choice", "auto"),
        [message for message in body["messages"] if message["role"] == "tool"],
    )
    if len(came) >= len(CALLS):
        return Reply(chunks=tuple(f"{result['content']};" for result in came), usage=COUNTED)
    if choice == "none":
        return Reply(chunks=("No ", "tools."), usage=COUNTED)
    if choice != "auto":
        calls = CALLS[:1] if choice == "required" else CALLS[1:]
        return Reply(chunks=(), tool_calls=calls, finish="tool", usage=COUNTED)
    words, fault = ("Let me ", "see."), Stall(after=3, seconds=STALL)
    if not received.streaming or came:
        fault = None
    return Reply(chunks=words, tool_calls=CALLS, finish="tool", usage=COUNTED, fault=fault)


TEXT = 'say "4"\n'
"""What the next worker writes for a tool of free text."""


def writer(received: ReceivedRequest) -> Reply:
    """It calls a tool of free text and a function, and then tells the results."""
    came = [message["content"] for message in received.json["messages"] if message["role"] == "tool"]
    if came:
        return Reply(chunks=tuple(f"{result};" for result in came), usage=COUNTED)
    calls = (ToolCall("patch", json.dumps({"input": TEXT})), CALLS[1])
    return Reply(chunks=("Let me ", "write."), tool_calls=calls, finish="tool", usage=COUNTED)
