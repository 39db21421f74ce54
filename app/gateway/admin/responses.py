"""Replies of the admin API: JSON, and pages of lists."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from starlette.responses import Response

from app.errors import InvalidRequest


def as_json(body: Mapping[str, Any]) -> Response:
    """A reply with a JSON object. No cache may keep it."""
    return Response(orjson.dumps(dict(body)), headers={"cache-control": "no-store"}, media_type="application/json")


def as_page(entries: Sequence[Mapping[str, Any]], field: str, limit: int, after: str | None) -> Response:
    """A page of a list that was read as a whole. `next` is the value of `field` of its last entry.

    Raises `InvalidRequest` if no entry has the value `after`.
    """
    if after is not None:
        places = [place for place, entry in enumerate(entries) if str(entry[field]) == after]
        if not places:
            raise InvalidRequest("It must be `next` of the page before.", param="after", code="invalid_value")
        entries = entries[places[0] + 1 :]
    return page(entries[:limit], field, has_more=len(entries) > limit)


def page(entries: Sequence[Mapping[str, Any]], field: str, *, has_more: bool) -> Response:
    """A page of a list."""
    following = str(entries[-1][field]) if has_more else None
    return as_json({"object": "list", "data": list(entries), "has_more": has_more, "next": following})
