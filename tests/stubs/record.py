"""The stub's record of one request: headers, raw body, and when it came, ended or was abandoned."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from dataclasses import dataclass, field
from typing import Any

from tests.harness.waiting import PATIENCE_SECONDS


@dataclass(slots=True, eq=False)
class ReceivedRequest:
    """One request as it arrived. Times are `time.monotonic()`, which all processes of a Linux machine share."""

    wire: str
    method: str
    path: str
    query: dict[str, str]
    headers: tuple[tuple[str, str], ...]
    port: int = 0
    """The client's port: the same for all requests of one connection."""
    body: bytes = b""
    at: float = field(default_factory=time.monotonic)
    model: str = ""
    streaming: bool = False
    behaviour: str = ""
    status: int | None = None
    deltas_sent: int = 0
    first_byte_at: float | None = None
    finished_at: float | None = None
    disconnected_at: float | None = None
    cut_by_stub: bool = False
    _gone: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    @property
    def json(self) -> Any:
        """The body as JSON; raises ValueError when it is none."""
        return json.loads(self.body)

    def header(self, name: str) -> str | None:
        """Return the first header of that name, whatever its case."""
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)

    def mark_disconnected(self) -> None:
        """Note that the client closed before its answer was complete."""
        if self.disconnected_at is None and not self.cut_by_stub:
            self.disconnected_at = time.monotonic()
            self._gone.set()

    async def wait_until_gone(self, within: float = PATIENCE_SECONDS) -> float:
        """Wait until the client has left before the end, and return the monotonic time.

        Raises TimeoutError after `within` seconds.
        """
        await asyncio.wait_for(self._gone.wait(), within)
        assert self.disconnected_at is not None
        return self.disconnected_at

    def as_json(self) -> dict[str, Any]:
        """Return the record as the control endpoint sends it: the body as base64 and, where it is UTF-8, as text."""
        fields = (
            "wire",
            "method",
            "path",
            "query",
            "headers",
            "at",
            "model",
            "streaming",
            "behaviour",
            "status",
            "deltas_sent",
            "first_byte_at",
            "finished_at",
            "disconnected_at",
            "cut_by_stub",
        )
        document = {name: getattr(self, name) for name in fields}
        text: str | None
        try:
            text = self.body.decode()
        except UnicodeDecodeError:
            text = None
        return {**document, "body": text, "body_base64": base64.b64encode(self.body).decode()}
