"""Live regions of a page: a stream of patches, each with the regions anew as a fresh page would show them.

A patch replaces whole regions by their element ids, so that a page which missed any number of patches is right after
the next one. Its id is that of the last event that it shows; a browser that reconnects names it, and goes on from
there. At most `PATCHES_PER_SECOND` are sent: what happens in between is shown by the next.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Final

from starlette.types import Receive, Scope, Send

from app.console.api import ApiError, Event

PATCHES_PER_SECOND: Final = 10
PING_SECONDS: Final = 15.0
"""Silence after which a comment is sent, so that a connection that is gone is noticed."""
END: Final = "end"
"""The name of the event behind which nothing more comes; the page then closes the stream (`hx-sse:close`)."""
END_EVENT: Final = f"event: {END}\ndata: \n\n"

LINE_END: Final = re.compile(r"\r\n|\r|\n")
"""The line ends of event streams. Other characters that end a line elsewhere are part of a text."""

Regions = Mapping[str, str]
"""HTML of regions by element id."""
Source = AbstractAsyncContextManager[AsyncIterator[Event]]


class Live:
    """The reply to a page that follows something: an event stream of patches.

    `source` gives the events to follow. `render` makes the regions as they are behind an event; an empty mapping: this
    event changes nothing. `Pages.route` sets `seconds`, after which the stream ends with the session.

    The event `END` tells the browser not to ask again. It is sent when the session is over or the API refuses what is
    followed, of which the page then tells its reader (`REFUSED`), and when the source has ended if `is_finite` says
    that nothing can come after that. Where the service restarts or is overloaded the stream is closed without it, so
    that the browser asks again.
    """

    seconds: float | None = None

    def __init__(
        self, source: Source, render: Callable[[Event], Awaitable[Regions]], *, is_finite: bool = True
    ) -> None:
        self._source = source
        self._render = render
        self._is_final = is_finite
        self._is_refused = False
        self._latest: Event | None = None
        self._is_over = False
        self._changed = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send patches until the source ends or the browser leaves."""
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(self._read())
            leaving = group.create_task(_wait_for_disconnect(receive))
            writing = group.create_task(self._write(send))
            tasks = (leaving, writing)
            finished, _ = await asyncio.wait(tasks, timeout=self.seconds, return_when=asyncio.FIRST_COMPLETED)
            for task in (reading, leaving, writing):
                task.cancel()
        if leaving.cancelled():
            if self._is_refused or not finished:  # not ended: the session's time is over
                await _send(send, REFUSED)
            elif self._is_final:
                await _send(send, END_EVENT)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _read(self) -> None:
        """Keep the latest event; those before it are part of what it shows."""
        try:
            async with self._source as events:
                async for event in events:
                    if event.id or event.data:
                        self._latest = event
                        self._changed.set()
        except ApiError as error:
            self._fail(error)
        self._is_over = True
        self._changed.set()

    async def _write(self, send: Send) -> None:
        while True:
            try:
                async with asyncio.timeout(PING_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                await _send(send, ": ping\n\n")
                continue
            self._changed.clear()
            is_over, event, self._latest = self._is_over, self._latest, None
            if event is not None:
                try:
                    regions = await self._render(event)
                except ApiError as error:
                    self._fail(error)
                    return  # a browser that asks again names the event before this one
                if regions:
                    await _send(send, patch(event.id, regions))
            if is_over:
                return
            await asyncio.sleep(1 / PATCHES_PER_SECOND)

    def _fail(self, error: ApiError) -> None:
        """Note an error of the API: it would refuse the same again, unless it is overloaded or has a fault."""
        self._is_final = False
        self._is_refused = error.status < 500 and error.status != 429


def changed_regions(earlier: Regions, now: Regions) -> dict[str, str]:
    """Return the regions that are not as they were."""
    return {name: html for name, html in now.items() if earlier.get(name) != html}


def patch(event_id: str, regions: Regions) -> str:
    """Return one event as text. In the browser its regions replace the elements that have the same ids."""
    partials: list[str] = []
    for name, html in regions.items():
        partials.append(f'<hx-partial hx-target="#{name}" hx-swap="outerMorph">{html}</hx-partial>')
    lines = [f"data: {line}" for line in LINE_END.split("\n".join(partials))]
    if event_id:
        lines.insert(0, f"id: {event_id}")
    return "\n".join(lines) + "\n\n"


STALE: Final = (
    '<p id="stale" class="fault" role="alert">This page is not updated any more, because you are not signed in or may '
    'not see it. <a href="">Load it anew</a></p>'
)
REFUSED: Final = patch("", {"stale": STALE}) + END_EVENT
"""The end of a stream that its reader may not follow any more: it fills the place that each page has for that."""


async def _send(send: Send, text: str) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})


async def _wait_for_disconnect(receive: Receive) -> None:
    """Return once the browser has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
