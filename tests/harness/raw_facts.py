"""Facts of bodies that a test makes up: read as the service reads them, or raw, for tests of stores and queues, which
carry bodies and do not read them."""

from collections.abc import Mapping
from typing import Any

import orjson

from app.core.run.events import FACT_CLASSES, Fact, Kind

_READERS = {fact.kind: fact.from_json for fact in FACT_CLASSES}


def fact_from_json(kind: Kind, body: Mapping[str, Any]) -> Fact:
    """Return the record of a kind."""
    fact: Fact = _READERS[kind](body)
    return fact


class Raw(Fact, frozen=True):
    """A fact of any kind with any body."""

    kind: Kind  # type: ignore[misc]
    made_up_body: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the body as JSON brings it back. Raises TypeError for a body that is not JSON."""
        body: dict[str, Any] = orjson.loads(orjson.dumps(self.made_up_body))
        return body
