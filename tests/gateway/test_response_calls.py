"""Calls and outputs in the input of `/v1/responses`: in whatever order they come, an output stands behind its call."""

from typing import Any

import httpx
import pytest

from app.core.message.chat import Message, Text, ToolCall
from app.core.message.tools import TOKEN_BYTES, mint
from app.errors import InvalidRequest
from app.gateway.responses.calls import paired
from tests.gateway.test_response_tools import SPAWN, asked, calling
from tests.stubs import ProviderStub, Reply

HI, OURS = Message("user", (Text("Hi"),)), mint("run_" + "7" * 31, bytes(TOKEN_BYTES))


def call(*ids: str) -> Message:
    return Message("assistant", (), calls=tuple(ToolCall(id_, "f") for id_ in ids))


def output(id_: str, text: str = "") -> Message:
    return Message("tool", (Text(text),), call_id=id_)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (
            (HI, call("a", "b"), output("b"), HI, output("a"), HI),
            (HI, call("a", "b"), output("a"), output("b"), HI, HI),
        ),
        ((call("a"), call("b"), output("a"), output("b")), (call("a"), output("a"), call("b"), output("b"))),
        ((call("a"), output("a", "1"), call("a"), output("a", "2")),) * 2,
        ((HI, output(OURS), HI),) * 2,
        ((HI,),) * 2,
    ],
    ids=["behind a message", "behind another call", "one id twice", "of a run of ours", "none"],
)
def test_outputs_stand_behind_their_calls(given: tuple[Message, ...], found: tuple[Message, ...]) -> None:
    assert paired(given) == found


@pytest.mark.parametrize(
    ("given", "code", "says"),
    [
        ((call("a", "b"), output("a")), "tool_results_missing", "of: 1 in all"),
        ((call(OURS, "b"), HI), "tool_results_missing", f"of: {OURS}"),
        ((HI, output("a")), "unknown_tool_call", "answers no call"),
        ((call("a"), output("a"), output("a")), "unknown_tool_call", "answers no call"),
    ],
)
def test_what_has_no_other_half_is_refused(given: tuple[Message, ...], code: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        paired(given)
    assert (refused.value.public_code, refused.value.param, says in refused.value.message) == (code, "input", True)


async def test_outputs_in_any_order(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    """A run goes on by an output behind the user's next words; words in its place are refused, not sent to a worker."""
    stub.script("alpha", calling("spawn", "{}"), Reply(chunks=("Done.",)))
    first = await asked(client, tools=[SPAWN])
    result = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "begun"}
    go, now = ({"role": "user", "content": said} for said in ("Go.", "Now?"))
    behind: dict[str, Any] = {"model": "baton-mini", "tools": [SPAWN], "previous_response_id": first["id"]}
    error = (await client.post("/v1/responses", json=behind | {"input": "Now?"})).json()["error"]
    assert (error["code"], result["call_id"] in error["message"]) == ("tool_results_missing", True)
    last = await asked(client, tools=[SPAWN], input=[go, first["output"][0], now, result])
    assert (last["id"].startswith(first["id"]), last["output"][0]["content"][0]["text"]) == (True, "Done.")
    assert [one["role"] for one in stub.of("alpha")[1].json["messages"]] == ["user", "assistant", "tool", "user"]
