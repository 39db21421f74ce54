"""Items of earlier responses that a request names by their ids instead of repeating them."""

from collections.abc import Awaitable, Callable
from typing import Final

from app.core.message.chat import Toolbox, ToolCall, run_of
from app.core.run.notices import response_id
from app.engine.delivery import messages as endings
from app.errors import InvalidRequest, NotFound
from app.gateway.responses.history import StoredResponse
from app.gateway.responses.input import (
    AnyCall,
    AnyItem,
    CallItem,
    CustomCallItem,
    ItemReference,
    MessageItem,
    OutputText,
    SearchCallItem,
    SearchOutputItem,
)
from app.gateway.responses.request import ResponsesRequest
from app.gateway.responses.tools import hosted_search_items, kind_of
from app.gateway.wire import custom_tools
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
    items: list[AnyItem] = []
    for place, item in enumerate(request.input):
        if isinstance(item, ItemReference):
            items.append(await _find_item(store, item.id, place, responses, find_response))
        else:
            items.append(item)
    return request.model_copy(update={"input": items})


async def _find_item(
    store: TenantStore, item_id: str, place: int, responses: dict[str, StoredResponse], find_response: FindResponse
) -> AnyItem:
    """Return a message of an output, a call of one, or the search before it."""
    call, name = None, item_id.replace("msg_", "resp_", 1)
    try:
        if item_id.startswith(CALLS):
            call = item_id.partition("_")[2]
            name = await _response_of_call(store, call)
        if name not in responses:
            responses[name] = await find_response(name)
        return _item_of(responses[name], item_id, call)
    except NotFound:
        raise NotFound(
            f"There is no stored item of the id in input[{place}], or this key may not see it; send the item itself.",
            param=f"input[{place}].id",
            code="item_not_found",
        ) from None


def _item_of(response: StoredResponse, item_id: str, call: str | None) -> AnyItem:
    """Return the item of a response that goes by the id of this call, or, without one, its message; `NotFound`."""
    labels = PartOptions.model_construct(labels=sorted(response.labels))
    if response.end is None:
        raise NotFound()
    if call is None and response.end.answer:
        part = OutputText(type="output_text", text=response.end.answer)
        return MessageItem(type="message", role="assistant", content=[part], baton=labels)
    for tool_call in response.end.calls:
        if tool_call.id == call:
            stored_item = _rebuild_item(item_id, tool_call, response.subject.turn_task.toolbox)
            if isinstance(stored_item, AnyCall):
                return stored_item.model_copy(update={"baton": labels})
            return stored_item
    raise NotFound()


def _rebuild_item(item_id: str, call: ToolCall, toolbox: Toolbox) -> AnyItem:
    """Return a call, which has the name that workers know, or a part of the hosted search before it."""
    for item in hosted_search_items(toolbox, call, ()):
        if item["id"] == item_id:
            kind = SearchCallItem if item["type"] == "tool_search_call" else SearchOutputItem
            return kind.model_validate(item)
    if kind_of(toolbox, call.name) == "custom":
        text = custom_tools.text_of(call.arguments)
        return CustomCallItem(type="custom_tool_call", call_id=call.id, name=call.name, input=text)
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
