"""`GET /v1/responses/{id}/input_items`: the `input` of a request, as items, in pages."""

from collections.abc import Iterator, Mapping
from typing import Any

from app.core.message.chat import Document, Image, Message, Text
from app.errors import InvalidRequest
from app.gateway.http.json_reply import list_page
from app.gateway.responses.compaction_item import find_notes, item_of
from app.gateway.responses.history import read_input
from app.gateway.responses.reply import Subject
from app.gateway.responses.tool_search import find_loading_call
from app.gateway.responses.tools import Kind, call_item, kind_of, tools_for_caller
from app.gateway.wire.query import ItemFilters
from app.store.protocol import ContentReads


async def page(store: ContentReads, subject: Subject, filters: ItemFilters) -> dict[str, Any]:
    """Return a list object; newest first unless `order=asc`."""
    all_items = await items_of_request(store, subject)
    if filters.order == "desc":
        all_items.reverse()
    if filters.after is not None:
        ids = [item["id"] for item in all_items]
        if filters.after not in ids:
            raise InvalidRequest("after must be the id of an item of this list.", param="after", code="invalid_value")
        all_items = all_items[ids.index(filters.after) + 1 :]
    data = all_items[: filters.limit]
    return list_page(data, has_more=len(data) < len(all_items))


async def items_of_request(store: ContentReads, subject: Subject) -> list[dict[str, Any]]:
    """Return the items of the request's `input`, in their order. What a `previous_response_id` stands for is not among
    them."""
    conversation = await read_input(store, subject)
    toolbox = subject.turn_task.toolbox
    kinds = {call.id: kind_of(toolbox, call.name) for message in conversation for call in message.calls}
    earlier = max(len(conversation) - subject.state.turn.wire["given"], 0)
    all_items: list[dict[str, Any]] = []
    for place, message in enumerate(conversation[earlier:]):
        all_items += _items(subject, place, message, kinds)
    return all_items


def _items(subject: Subject, place: int, message: Message, kinds: Mapping[str, Kind]) -> Iterator[dict[str, Any]]:
    name = f"{subject.id.removeprefix('resp_')}_in{place}"
    if message.call_id:
        yield _output(subject, name, message, kinds.get(message.call_id, "function"))
        return
    notes = find_notes(message)
    if notes is not None:
        yield item_of(name, notes)
    elif message.parts:
        yield message_item(name, message)
    for call in message.calls:
        yield call_item(subject.turn_task.toolbox, call, "completed")


def message_item(name: str, message: Message) -> dict[str, Any]:
    """Return a message of the input as an item; `name` is its id without the prefix."""
    head = {"id": f"msg_{name}", "type": "message", "status": "completed", "role": message.role}
    return head | {"content": [_part(part, message.role) for part in message.parts]}


def _output(subject: Subject, name: str, message: Message, kind: Kind) -> dict[str, Any]:
    """Return the result of a call as an item; of a search, with the tools that it was the first to offer."""
    fields = {"call_id": message.call_id, "status": "completed"}
    if kind == "search":
        loaded_tools = tools_for_caller(
            tool for tool in subject.turn_task.toolbox.tools if find_loading_call(tool) == message.call_id
        )
        return {
            "id": f"tso_{name}",
            "type": "tool_search_output",
            **fields,
            "execution": "client",
            "tools": loaded_tools,
        }
    prefix, type_ = ("ctco", "custom_tool_call_output") if kind == "custom" else ("fco", "function_call_output")
    output: str | list[dict[str, Any]] = message.text
    if not all(isinstance(part, Text) for part in message.parts):
        output = [_part(part, message.role) for part in message.parts]
    return {"id": f"{prefix}_{name}", "type": type_, **fields, "output": output}


def _part(part: Any, role: str) -> dict[str, Any]:
    if isinstance(part, Image):
        return {"type": "input_image", "image_url": part.url, "detail": part.detail or "auto", "file_id": None}
    if isinstance(part, Document):
        return {"type": "input_file", "filename": part.name, "file_data": part.url, "file_id": None}
    if role == "assistant":
        return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}
    return {"type": "input_text", "text": part.text}
