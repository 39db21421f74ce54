"""Items of earlier responses that a request names by their ids instead of repeating them."""

import re
from collections.abc import Awaitable, Callable
from typing import Any, Final

from pydantic import TypeAdapter

from app.core.message.chat import run_of
from app.core.run.notices import response_id
from app.engine.delivery import messages as endings
from app.errors import InvalidRequest, NotFound
from app.gateway.responses import reply
from app.gateway.responses.history import StoredResponse
from app.gateway.responses.input import AnyItem, Item, ItemReference
from app.gateway.responses.items import items_of_request
from app.gateway.responses.request import ResponsesRequest
from app.gateway.wire.parameters import PartOptions
from app.store.protocol import TenantStore

MOST_REFERENCES = 128
CALLS: Final = ("fc", "ctc", "tsc", "tso")
"""Beginnings of the ids of items that go by a call's id."""
INPUT_ITEM: Final = re.compile(r"[a-z]+_(run_[0-9a-z]+(?:_[0-9]+)?)_in[0-9]+")
"""The id of an item of a request, with the id of its response in it."""
ITEM: Final = TypeAdapter[AnyItem](Item)
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
    """Return an item of an output, or of what a request has added to its conversation."""
    try:
        name = await _response_of_item(store, item_id)
        if name not in responses:
            responses[name] = await find_response(name)
        return await _item_of(store, responses[name], item_id)
    except NotFound:
        raise NotFound(
            f"There is no stored item of the id in input[{place}], or this key may not see it; send the item itself.",
            param=f"input[{place}].id",
            code="item_not_found",
        ) from None


async def _response_of_item(store: TenantStore, item_id: str) -> str:
    """Return the response of whose input or output an item is; `NotFound`."""
    prefix, _, rest = item_id.partition("_")
    if is_input := INPUT_ITEM.fullmatch(item_id):
        return f"resp_{is_input[1]}"
    if prefix == "msg":
        return f"resp_{rest}"
    if prefix in CALLS:
        return await _response_of_call(store, rest)
    raise NotFound()


async def _item_of(store: TenantStore, response: StoredResponse, item_id: str) -> AnyItem:
    """Return the item of a response as its caller sees it, with the labels of the response; `NotFound`."""
    items: list[dict[str, Any]] = []
    if INPUT_ITEM.fullmatch(item_id):
        items = await items_of_request(store, response.subject)
    elif response.end is not None:
        items = reply.items(response.subject, response.end, "completed")
    labels = PartOptions.model_construct(labels=sorted(response.labels))
    for fields in items:
        if fields["id"] == item_id:
            item = ITEM.validate_python(fields)
            return item.model_copy(update={"baton": labels}) if hasattr(item, "baton") else item
    raise NotFound()


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
