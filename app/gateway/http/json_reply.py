"""Replies of routes that answer with a JSON object or with a page of a list."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from starlette.responses import Response


def json_reply(body: Mapping[str, Any]) -> Response:
    """Return a reply with a JSON object."""
    return Response(orjson.dumps(body), media_type="application/json")


def list_page(entries: Sequence[Mapping[str, Any]], *, has_more: bool, key: str = "id") -> dict[str, Any]:
    """Return a page of a list in OpenAI's shape; `key` is the field that names an entry."""
    first_id, last_id = None, None
    if entries:
        first_id, last_id = str(entries[0][key]), str(entries[-1][key])
    return {"object": "list", "data": entries, "first_id": first_id, "last_id": last_id, "has_more": has_more}
