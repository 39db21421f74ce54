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
from app.gateway.responses.tools import hosted_search_items
from app.gateway.wire.parameters import PartOptions
from app.store.protocol import TenantStore

MOST_REFERENCES = 128
CALLS: Final = ("fc_", "ctc_", "tsc_", "tso_")
"""Beginnings of the ids of items that go by a call's id."""
FindResponse = Callable[[str], Awaitable[StoredResponse]]
"""From a response's id to the response, if the caller may see it; `NotFound`."""


async def resolve_references(
    store: TenantStore, request: ResponsesRequest, find_response: FindResponse
) -> ResponsesRequest:
    """Return the request with each reference replaced by what it names; `NotFound` or `InvalidRequest`."""
    if isinstance(request.input, str) or not any(isinstance(item, ItemReference) for item in request.input):
        return request
    if sum(isinstance(item, ItemReference) for item in request.input) > MOST_REFERENCES:
        raise InvalidRequest(
            f"At most {MOST_REFERENCES} items may be references.", param="input", code="array_above_max_length"
        )
    responses: dict[str, StoredResponse] = {}
    items = [
        await _find_item(store, item.id, place, responses, find_response) if isinstance(item, ItemReference) else item
        for place, item in enumerate(request.input)
    ]
    return request.model_copy(update={"input": items})


async def _find_item(
    store: TenantStore, item_id: str, place: int, responses: dict[str, StoredResponse], find_response: FindResponse
) -> AnyItem:
    """Return a message of an output, a call of one, or the search before it."""
    try:
        call = item_id.partition("_")[2] if item_id.startswith(CALLS) else None
        response = await _response_of_call(store, call) if call is not None else item_id.replace("msg_", "resp_", 1)
        if response not in responses:
            responses[response] = await find_response(response)
        end, labels = responses[response].end, PartOptions.model_construct(labels=sorted(responses[response].labels))
        if end is not None and call is None and end.answer:
            part = OutputText(type="output_text", text=end.answer)
            return MessageItem(type="message", role="assistant", content=[part], baton=labels)
        for tool_call in end.calls if end is not None else ():
            if tool_call.id == call:
                stored_item = _rebuild_item(
                    item_id,
                    tool_call,
                    hosted_search_items(responses[response].subject.turn_task.toolbox, tool_call, ()),
                )
                if isinstance(stored_item, CallItem):
                    return stored_item.model_copy(update={"baton": labels})
                return stored_item
        raise NotFound()
    except NotFound:
        raise NotFound(
            f"There is no stored item of the id in input[{place}], or this key may not see it; send the item itself.",
            param=f"input[{place}].id",
            code="item_not_found",
        ) from None


def _rebuild_item(item_id: str, call: ToolCall, search: list[dict[str, Any]]) -> AnyItem:
    """Return a call, or a part of the hosted search before it."""
    for item in search:
        if item["id"] == item_id:
            kind = SearchCallItem if item["type"] == "tool_search_call" else SearchOutputItem
            return kind.model_validate(item)
    return CallItem(type="function_call", call_id=call.id, name=call.name, arguments=call.arguments)


async def _response_of_call(store: TenantStore, call: str) -> str:
    """Return the response that made a call; `NotFound`."""
    run = run_of(call)
    if run is None:
        raise NotFound()
    state = endings.fold_until_reply((await store.journal(run)).events)
    for step in state.steps.values():
        for exchange in step.exchanges:
            if call in exchange.ids:
                return response_id(run, exchange.turn)
    raise NotFound()
