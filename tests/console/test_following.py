"""A run that is followed: what its page shows while the stream and the figures of the run are not at the same point."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest

from app.console.api import ApiError, Event, Session
from app.console.following import FollowedRun
from app.console.live import END, Live
from app.console.pages import Pages
from app.errors import LeaseLost, Overloaded
from tests.console.test_live import receive_in_browser


class TwoCalls:
    """An API whose run waits for the results of two calls, the second of which comes in two chunks."""

    async def get(self, session: Session, path: str) -> dict[str, Any]:
        return {"state": "awaiting_tool", "nodes": [], "edges": [], "steps": []}

    @asynccontextmanager
    async def events(self, session: Session, path: str) -> AsyncIterator[AsyncIterator[Event]]:
        async def chunks() -> AsyncIterator[Event]:
            for deltas, finish in (
                ([call(0, '{"q": "a"}'), call(1, '{"q":')], None),
                ([call(1, ' "b"}')], None),
                ([], "tool_calls"),
            ):
                choice = {"delta": {"tool_calls": deltas}, "finish_reason": finish}
                yield Event("", "", orjson.dumps({"choices": [choice]}).decode())

        yield chunks()


def call(index: int, arguments: str) -> dict[str, Any]:
    return {"index": index, "id": f"call_{index}", "function": {"name": "look", "arguments": arguments}}


async def test_calls_of_tools_are_shown_once_all_of_them_have_come() -> None:
    """The run's state is read elsewhere, and may be ahead of its stream."""
    pages = cast(Pages, SimpleNamespace(api=TwoCalls()))
    followed_run = FollowedRun(pages, Session(()), "run_a")
    views = []
    async with followed_run.stream() as events:
        async for _event in events:
            views.append(await followed_run.view())
    assert [len(view["calls"]) for view in views] == [0, 0, 2]
    assert [view["state"] for view in views] == ["awaiting_tool"] * 3
    assert views[-1]["calls"][1]["arguments"] == '{"q": "b"}'


class Approved:
    """An API whose run waits for an approval at first, and answers in pieces once it has it."""

    def __init__(self) -> None:
        self.state = "awaiting_approval"
        self.streams = [[("Please wait.", None), ("", "awaiting_approval")], [("Yes", None), (".", None), ("", "done")]]
        self.is_stopped = False

    async def get(self, session: Session, path: str) -> dict[str, Any]:
        return {"state": self.state, "seq": 5, "nodes": [], "edges": [], "steps": []}

    @asynccontextmanager
    async def events(
        self, session: Session, path: str, last_event_id: str | None = None
    ) -> AsyncIterator[AsyncIterator[Event]]:
        async def chunks() -> AsyncIterator[Event]:
            for text, state in self.streams.pop(0):
                baton = {"baton": {"state": state}} if state else {}
                yield Event("", "", orjson.dumps({"choices": [{"delta": {"content": text}}], **baton}).decode())

        async def journal() -> AsyncIterator[Event]:
            assert last_event_id == "5"
            if not self.is_stopped:
                self.state = "running"
                yield Event("6", "", "{}")

        yield journal() if path.endswith("/events/stream") else chunks()


async def test_a_page_that_waits_for_an_approval_is_to_connect_again_where_the_service_stops() -> None:
    """The service waits for its open streams."""
    api = Approved()
    api.is_stopped = True
    pages = cast(Pages, SimpleNamespace(api=api, region=lambda name, view: f"{name} {view['refusal']}"))
    followed_run = FollowedRun(pages, Session(()), "run_a")
    received = await receive_in_browser(Live(followed_run.stream(), followed_run.regions))
    assert f"event: {END}" not in received
    assert "Refusal" not in received


async def test_an_answer_is_shown_as_it_comes_after_an_approval() -> None:
    followed_run = FollowedRun(cast(Pages, SimpleNamespace(api=Approved())), Session(()), "run_a")
    await followed_run.read()
    words = []
    async with followed_run.stream() as events:
        async for _event in events:
            words.append((await followed_run.view())["words"])
    assert words == ["", "", "Yes", "Yes.", "Yes."]


class Restarting:
    """An API that stops in the middle of an answer: it ends the stream, or takes no further ones."""

    def __init__(self, *, is_stopped: bool) -> None:
        self.is_stopped = is_stopped

    async def get(self, session: Session, path: str) -> dict[str, Any]:
        return {"state": "running", "nodes": [], "edges": [], "steps": []}

    @asynccontextmanager
    async def events(self, session: Session, path: str) -> AsyncIterator[AsyncIterator[Event]]:
        async def chunks() -> AsyncIterator[Event]:
            if self.is_stopped:
                raise ApiError(Overloaded.status, {"error": {"code": Overloaded.code}})
            yield Event("", "", orjson.dumps({"choices": [{"delta": {"content": "Yes"}}]}).decode())
            yield Event("", "", orjson.dumps({"error": {"code": LeaseLost.code, "message": "Let go."}}).decode())

        yield chunks()


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_a_page_is_to_connect_again_where_the_service_restarts(*, is_stopped: bool) -> None:
    """Its run goes on. To say that it was refused, and that nothing more comes, would be wrong."""

    def render(name: str, view: dict[str, Any]) -> str:
        return f"{name} {view['words']} {view['refusal']}"

    pages = cast(Pages, SimpleNamespace(api=Restarting(is_stopped=is_stopped), region=render))
    followed_run = FollowedRun(pages, Session(()), "run_a")
    received = await receive_in_browser(Live(followed_run.stream(), followed_run.regions))
    assert f"event: {END}" not in received
    assert "Refusal" not in received
