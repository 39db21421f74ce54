"""The reply of a route that answers with a JSON object."""

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response


def json_reply(body: Mapping[str, Any]) -> Response:
    """Return a reply with a JSON object."""
    return Response(orjson.dumps(body), media_type="application/json")
