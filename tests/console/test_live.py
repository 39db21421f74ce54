"""Live pages: streams of patches that survive any text, any pace and any break."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from app.console import api
from app.console.api import Api, ApiError, ApiRequest, Event, Session
from app.console.live import Live, Regions, patch
from tests.harness.waiting import PATIENCE_SECONDS

NOBODY = Session(())


@asynccontextmanager
async def coming(*events: Event, pause: float = 0.0) -> AsyncIterator[AsyncIterator[Event]]:
    async def each() -> AsyncIterator[Event]:
        for event in events:
            yield event
            await asyncio.sleep(pause)

    yield each()


async def regions_of_event(event: Event) -> Regions:
    return {"it": f"<p id=it>{event.data}</p>"}


async def receive_in_browser(live: Live, *, leaves_behind: str | None = None) -> str:
    """Return what a browser receives until it has received some text, or until the end."""
    parts: list[str] = []
    leaves = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await leaves.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        parts.append(message.get("body", b"").decode())
        if leaves_behind is not None and leaves_behind in parts[-1]:
            leaves.set()

    async with asyncio.timeout(PATIENCE_SECONDS):
        await live({}, receive, send)
    return "".join(parts)


def data_of(text: str) -> str:
    """The data of one event, by the rules of the standard: lines end with CR LF, LF or CR."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return "\n".join(line.removeprefix("data:").removeprefix(" ") for line in lines if line.startswith("data:"))


@pytest.mark.parametrize(
    "text",
    [
        "two\nlines",
        "dos\r\nlines",
        "mac\rlines",
        "unicode\u2028lines\x85and\x0bmore",
        "\n\n",
        "event: end\n\ndata: x",
        "",
    ],
)
def test_a_patch_brings_any_text_whole(text: str) -> None:
    event = patch("7", {"it": f"<p>{text}</p>"})
    assert event.count("\n\n") == 1, "a text has ended the event"
    as_html = text.replace("\r\n", "\n").replace("\r", "\n")  # as a parser of HTML reads a page with this text
    assert data_of(event) == f'<hx-partial hx-target="#it" hx-swap="outerMorph"><p>{as_html}</p></hx-partial>'


async def test_what_comes_faster_than_pages_are_patched_is_shown_by_the_next() -> None:
    events = [Event(str(n), "", f"{n}") for n in range(500)]
    text = await receive_in_browser(Live(coming(*events, pause=0.001), regions_of_event))
    patches = text.count("<hx-partial")
    assert "<p id=it>499</p>" in text
    assert "id: 499\n" in text
    assert patches < 500 / 2, "events were not gathered"
    assert text.endswith("event: end\ndata: \n\n")


async def test_a_silent_stream_is_kept_open_until_the_browser_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.console.live.PING_SECONDS", 0.02)
    closed: list[bool] = []

    @asynccontextmanager
    async def silent() -> AsyncIterator[AsyncIterator[Event]]:
        async def each() -> AsyncIterator[Event]:
            await asyncio.Event().wait()
            yield Event("", "", "")

        try:
            yield each()
        finally:
            closed.append(True)

    text = await receive_in_browser(Live(silent(), regions_of_event), leaves_behind=": ping")
    assert ": ping\n\n" in text
    assert closed == [True]


async def test_a_refusal_ends_the_stream_without_a_fault() -> None:
    @asynccontextmanager
    async def refuse() -> AsyncIterator[AsyncIterator[Event]]:
        raise ApiError(404, {})
        yield

    assert (await receive_in_browser(Live(refuse(), regions_of_event))).endswith("event: end\ndata: \n\n")


async def unreadable(event: Event) -> Regions:
    """The regions of an event whose data is a status that the API answers in place of them."""
    raise ApiError(int(event.data), {})


async def is_told_to_stop(*events: Event, status: int = 0, is_finite: bool, render: Any = regions_of_event) -> bool:
    """True if the browser is told not to ask again, where the source ends behind these events or with a refusal."""

    @asynccontextmanager
    async def source() -> AsyncIterator[AsyncIterator[Event]]:
        if status:
            raise ApiError(status, {})
        async with coming(*events) as page_regions:
            yield page_regions

    return "event: end" in await receive_in_browser(Live(source(), render, is_finite=is_finite))


async def test_a_browser_asks_again_where_a_service_restarts_and_not_where_it_refuses() -> None:
    assert await is_told_to_stop(Event("1", "", "x"), is_finite=True)
    assert not await is_told_to_stop(Event("1", "", "x"), is_finite=False)
    for is_finite in (True, False):
        assert [await is_told_to_stop(status=status, is_finite=is_finite) for status in (401, 403, 404)] == [True] * 3
        assert [await is_told_to_stop(status=status, is_finite=is_finite) for status in (429, 503, 504)] == [False] * 3


async def test_a_page_that_has_missed_a_patch_because_of_a_fault_asks_again() -> None:
    """The missed patch may be the last one, behind which nothing would come that mends the page."""
    for status, is_told in ((403, True), (404, True), (429, False), (503, False)):
        events = (Event("1", "", f"{status}"),)
        assert await is_told_to_stop(*events, is_finite=True, render=unreadable) is is_told


def replying(status: int, parts: Sequence[bytes]) -> Any:
    """An ASGI application that answers everybody with these parts."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": status, "headers": []})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return app


async def events_of(app: Any) -> list[Event]:
    async with Api(app).events(NOBODY, "/v1/x") as events:
        return [event async for event in events]


async def test_a_stream_of_the_api_is_read_however_it_is_cut() -> None:
    whole = b': ping\n\nid: 1\nevent: a\ndata: {"x":\ndata: 1}\n\nid: 2\ndata: [DONE]\n\n'
    expected = [Event("", "", ""), Event("1", "a", '{"x":\n1}'), Event("2", "", "[DONE]")]
    for size in (1, 2, 3, 7, len(whole)):
        parts = [whole[at : at + size] for at in range(0, len(whole), size)]
        assert await events_of(replying(200, parts)) == expected


async def test_a_stream_that_comes_in_one_large_part_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the journal of a long run does, of which no event is large."""
    monkeypatch.setattr(api, "EVENT_BYTES", 30)
    events = [Event(str(n), "", "{}") for n in range(20)]
    text = b"".join(b"id: %s\ndata: {}\n\n" % event.id.encode() for event in events)
    assert await events_of(replying(200, (text, b"data: " + b"x" * 31, b"\n\n"))) == events, "and no large event"


async def test_a_refused_stream_raises_the_apis_words() -> None:
    body = b'{"error": {"message": "No such run.", "code": "not_found"}}'
    with pytest.raises(ApiError) as raised:
        await events_of(replying(404, [body[:10], body[10:]]))
    assert (raised.value.status, raised.value.code, raised.value.message) == (404, "not_found", "No such run.")


async def test_leaving_a_stream_disconnects_from_the_api() -> None:
    left = asyncio.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            while True:
                await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
                await asyncio.sleep(0)
        finally:
            left.set()

    async with asyncio.timeout(PATIENCE_SECONDS):
        async with Api(endless).events(NOBODY, "/v1/x") as events:
            async for _ in events:
                break
    assert left.is_set()


async def test_an_api_that_hangs_is_given_up() -> None:
    async def hangs(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()

    with pytest.raises(ApiError) as raised:
        await Api(hangs).request(NOBODY, ApiRequest("GET", "/v1/x"), within=0.01)
    assert raised.value.status == 504
