"""Pages of lists of the admin API."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from starlette.responses import Response

from app.errors import InvalidRequest, NotFound
from app.gateway.http.json_reply import json_reply


@contextmanager
def positions() -> Iterator[None]:
    """Raise `InvalidRequest` where the list has no entry from which it is to go on."""
    try:
        yield
    except NotFound:
        words = "It must be `next` of the page before."
        raise InvalidRequest(words, param="after", code="invalid_value") from None


def whole_list(entries: Sequence[Mapping[str, Any]]) -> Response:
    """Return a list that comes whole."""
    return json_reply({"object": "list", "data": list(entries), "has_more": False, "next": None})


def page(entries: Sequence[Mapping[str, Any]], field: str, limit: int) -> Response:
    """Return a page of at most `limit` entries, of a list of which one more was read where it goes on. `next` is the
    value of `field` of the last entry."""
    data, next_position = list(entries[:limit]), None
    if len(entries) > limit:
        next_position = str(data[-1][field])
    return json_reply({"object": "list", "data": data, "has_more": len(entries) > limit, "next": next_position})
