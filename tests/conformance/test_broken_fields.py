"""Fields of a provider's reply that have another type than its format says: the reply is malformed, or they are left
out where nothing depends on them. No reply may break its reader, whose bug it would be taken for."""

import orjson
import pytest

from app.core.message.chat import End, Piece, Words
from app.errors import WorkerMalformed
from app.providers.adapters.anthropic import Reply
from app.providers.adapters.openai import Completion

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
    assert pieces == [Words("Yes.")] * 4
    assert isinstance(reader.end(), End)
