"""Fields of a provider's reply that have another type than its format says: the reply is malformed, or they are left
out where nothing depends on them. No reply may break its reader, whose bug it would be taken for."""

import asyncio
import json

import orjson
import pytest

from app.core.message.chat import End, Message, Piece, Text, TextDelta, ToolCall, ToolDelta
from app.errors import WorkerMalformed, WorkerUnavailable
from app.providers.adapters.anthropic import Reply
from app.providers.adapters.openai import Completion
from tests.conformance.failures import error_against
from tests.conformance.wire_formats import FORMATS, Format, connected, request
from tests.stubs import ProviderStub, Raw

CALL = {"id": "call-1", "function": {"name": "add", "arguments": "{}"}}
TOOL = {"type": "tool_use", "id": "call-1", "name": "add", "input": {}}


def chunk(delta: object, finish: str | None = None) -> bytes:
    return orjson.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


@pytest.mark.parametrize("index", [[], {}], ids=["list", "object"])
def test_an_index_that_is_none_is_malformed(index: object) -> None:
    with pytest.raises(WorkerMalformed):
        Completion("worker").event(chunk({"tool_calls": [CALL | {"index": index}]}), [])
    begin = {"type": "content_block_start", "index": index, "content_block": TOOL}
    more = {"type": "content_block_delta", "index": index, "delta": {"type": "thinking_delta", "thinking": "So"}}
    for event in (begin, more):
        with pytest.raises(WorkerMalformed):
            Reply("worker").event(orjson.dumps(event), [])


def test_reasoning_that_is_none_is_left_out() -> None:
    reader, pieces = Completion("worker"), list[Piece]()
    for details in (5, True, [{"type": "a", "text": 5}], [{"type": "a", "text": "So"}]):
        reader.event(chunk({"content": "Yes.", "reasoning_details": details}), pieces)
    reader.event(chunk({}, finish="stop"), pieces)
    assert pieces == [TextDelta("Yes.")] * 4
    assert isinstance(reader.end(), End)


def test_an_index_and_the_id_of_a_call_may_have_each_others_type() -> None:
    """Some servers write the index as a text, and Text Generation Inference before 2.1 a number as the id."""
    reader, pieces = Completion("worker"), list[Piece]()
    choice = {
        "index": "0",
        "delta": {"content": "So.", "tool_calls": [CALL | {"id": 0}]},
        "finish_reason": "tool_calls",
    }
    reader.event(orjson.dumps({"choices": [choice, choice | {"index": "1"}]}), pieces)
    deltas = [piece for piece in pieces if isinstance(piece, ToolDelta)]
    assert pieces[0] == TextDelta("So.")
    assert [(delta.id, delta.name, delta.arguments) for delta in deltas] == [("0", "add", "{}")]


DEEP = '{"a":' * 300 + "1" + "}" * 300
"""More levels than the JSON library writes; it reads them."""


@pytest.mark.parametrize("field", ["arguments", "extra_content", "reasoning_details"])
async def test_what_is_nested_too_deeply_to_be_written_again_is_malformed(stub: ProviderStub, field: str) -> None:
    call, message = CALL, {"role": "assistant"}
    if field == "arguments":
        call = CALL | {"function": {"name": "add", "arguments": orjson.loads(DEEP)}}
    elif field == "extra_content":
        call = CALL | {"extra_content": orjson.loads(DEEP)}
    else:
        message |= {"reasoning_details": [{"type": "a", "data": orjson.loads(DEEP)}]}
    choice = {"index": 0, "delta": message | {"tool_calls": [call]}, "finish_reason": "tool_calls"}
    stub.always("*", Raw(body=f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n"))
    async with connected(FORMATS["openai"], stub) as line:
        with pytest.raises(WorkerMalformed, match="JSON of more than 64 levels"):
            await line.pieces(request())


@pytest.mark.parametrize("form", FORMATS.values(), ids=list(FORMATS))
async def test_arguments_that_are_nested_too_deeply_are_sent_on_as_text(stub: ProviderStub, form: Format) -> None:
    called = Message("assistant", (), calls=(ToolCall("call-1", "add", DEEP),))
    question, result = Message("user", (Text("1 + 2"),)), Message("tool", (Text("3"),), call_id="call-1")
    async with connected(form, stub) as line:
        await line.pieces(request(question, called, result))
    assert "a" * 300 in stub.requests[-1].body.decode().replace('\\"', "").replace("{", "").replace(":", "")


async def test_a_reply_that_is_compressed_unasked_is_malformed_and_not_cut_off() -> None:
    """As by a proxy that compresses whatever passes through it. Nothing of it is unpacked, be it ever so large."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-encoding: gzip\r\n")
        writer.write(b"content-length: 2\r\n\r\n\x1f\x8b")

    error = await error_against(FORMATS["openai"], answer)
    assert isinstance(error, WorkerMalformed)
    assert "compressed" in str(error)


async def test_the_words_behind_a_status_may_be_in_any_encoding() -> None:
    """As those of a proxy that speaks its country's language."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write("HTTP/1.1 503 Überlastet\r\ncontent-length: 0\r\n\r\n".encode("latin-1"))

    error = await error_against(FORMATS["openai"], answer)
    assert isinstance(error, WorkerUnavailable)
    assert "HTTP 503" in str(error)
