"""Pages of lists of the admin API."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from starlette.responses import Response

from app.errors import InvalidRequest, NotFound
from app.gateway.http.json_reply import json_reply


def as_page(entries: Sequence[Mapping[str, Any]], field: str, limit: int) -> Response:
    """Return a page of at most `limit` entries, of a list of which one more was read where it goes on. `next` is the
    value of `field` of the last entry."""
    return page(entries[:limit], field, has_more=len(entries) > limit)


@contextmanager
def positions() -> Iterator[None]:
    """Raise `InvalidRequest` where the list has no entry from which it is to go on."""
    try:
        yield
    except NotFound:
        words = "It must be `next` of the page before."
        raise InvalidRequest(words, param="after", code="invalid_value") from None


def page(entries: Sequence[Mapping[str, Any]], field: str, *, has_more: bool) -> Response:
    """Return a page of a list."""
    next_position = None
    if has_more:
        next_position = str(entries[-1][field])
    return json_reply({"object": "list", "data": list(entries), "has_more": has_more, "next": next_position})
