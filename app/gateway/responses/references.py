"""Items of earlier responses that a request names by their ids instead of repeating them."""

from collections.abc import Awaitable, Callable
from typing import Any, Final

from app.core.message.chat import ToolCall, run_of
from app.core.run.notices import response_id
from app.engine.delivery import messages as endings
from app.errors import InvalidRequest, NotFound
from app.gateway.responses.history import StoredResponse
from app.gateway.responses.input import (
    AnyItem,
    CallItem,
    ItemReference,
    MessageItem,
    OutputText,
    SearchCallItem,
    SearchOutputItem,
)
from app.gateway.responses.request import ResponsesRequest
from app.gateway.responses.tools import searched
from app.gateway.wire.parameters import PartOptions
from app.store.protocol import TenantStore

MOST = 128
CALLS: Final = ("fc_", "ctc_", "tsc_", "tso_")
"""Beginnings of the ids of items that go by a call's id."""
Look = Callable[[str], Awaitable[StoredResponse]]
"""From a response's id to the response, if the caller may see it; `NotFound`."""


async def resolved(store: TenantStore, request: ResponsesRequest, look: Look) -> ResponsesRequest:
    """Return the request with each reference replaced by what it names; `NotFound` or `InvalidRequest`."""
    if isinstance(request.input, str) or not any(isinstance(item, ItemReference) for item in request.input):
        return request
    if sum(isinstance(item, ItemReference) for item in request.input) > MOST:
        raise InvalidRequest(f"At most {MOST} items may be references.", param="input", code="array_above_max_length")
    found: dict[str, StoredResponse] = {}
    items = [
        await _named(store, item.id, place, found, look) if isinstance(item, ItemReference) else item
        for place, item in enumerate(request.input)
    ]
    return request.model_copy(update={"input": items})


async def _named(store: TenantStore, name: str, place: int, found: dict[str, StoredResponse], look: Look) -> AnyItem:
    """Return a message of an output, a call of one, or the search before it."""
    try:
        call = name.partition("_")[2] if name.startswith(CALLS) else None
        response = await _caller(store, call) if call is not None else name.replace("msg_", "resp_", 1)
        if response not in found:
            found[response] = await look(response)
        ended, labels = found[response].end, PartOptions.model_construct(labels=sorted(found[response].labels))
        if ended is not None and call is None and ended.answer:
            part = OutputText(type="output_text", text=ended.answer)
            return MessageItem(type="message", role="assistant", content=[part], baton=labels)
        for tool_call in ended.calls if ended is not None else ():
            if tool_call.id == call:
                again = _again(name, tool_call, searched(found[response].subject.turn_task.toolbox, tool_call, ()))
                if isinstance(again, CallItem):
                    return again.model_copy(update={"baton": labels})
                return again
        raise NotFound()
    except NotFound:
        raise NotFound(
            f"There is no stored item of the id in input[{place}], or this key may not see it; send the item itself.",
            param=f"input[{place}].id",
            code="item_not_found",
        ) from None


def _again(name: str, call: ToolCall, search: list[dict[str, Any]]) -> AnyItem:
    """Return a call, or a part of the hosted search before it."""
    for item in search:
        if item["id"] == name:
            kind = SearchCallItem if item["type"] == "tool_search_call" else SearchOutputItem
            return kind.model_validate(item)
    return CallItem(type="function_call", call_id=call.id, name=call.name, arguments=call.arguments)


async def _caller(store: TenantStore, call: str) -> str:
    """Return the response that made a call; `NotFound`."""
    run = run_of(call)
    if run is None:
        raise NotFound()
    state = endings.until_end((await store.journal(run)).events)
    for step in state.steps.values():
        for exchange in step.exchanges:
            if call in exchange.ids:
                return response_id(run, exchange.turn)
    raise NotFound()
