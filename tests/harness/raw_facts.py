"""Facts whose bodies a test makes up, for tests of stores and queues, which carry bodies and do not read them."""

from collections.abc import Mapping
from typing import Any

import orjson

from app.core.run.events import Fact, Kind


class Raw(Fact):
    """A fact of any kind with any body."""

    __slots__ = ("_body", "kind")

    def __init__(self, kind: Kind, body: Mapping[str, Any]) -> None:
        self.kind = kind  # type: ignore[misc]
        self._body = body

    def to_json(self) -> dict[str, Any]:
        """Return the body as JSON brings it back. Raises TypeError for a body that is not JSON."""
        body: dict[str, Any] = orjson.loads(orjson.dumps(self._body))
        return body
