"""A run that is followed: what its page shows while the stream and the figures of the run are not at the same point."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest

from app.console import following
from app.console.api import Event, Session
from app.console.following import FollowedRun
from app.console.pages import Pages


class TwoCalls:
    """An API whose run waits for the results of two calls, the second of which comes in two chunks."""

    async def get(self, session: Session, path: str) -> dict[str, Any]:
        return {"state": "awaiting_tool", "nodes": [], "edges": []}

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

    async def get(self, session: Session, path: str) -> dict[str, Any]:
        return {"state": self.state, "nodes": [], "edges": []}

    @asynccontextmanager
    async def events(self, session: Session, path: str) -> AsyncIterator[AsyncIterator[Event]]:
        async def chunks() -> AsyncIterator[Event]:
            for text, state in self.streams.pop(0):
                baton = {"baton": {"state": state}} if state else {}
                yield Event("", "", orjson.dumps({"choices": [{"delta": {"content": text}}], **baton}).decode())
            self.state = "running"

        yield chunks()


async def test_an_answer_is_shown_as_it_comes_after_an_approval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "APPROVAL_POLL_SECONDS", 0.0)
    followed_run = FollowedRun(cast(Pages, SimpleNamespace(api=Approved())), Session(()), "run_a")
    await followed_run.read()
    words = []
    async with followed_run.stream() as events:
        async for _event in events:
            words.append((await followed_run.view())["words"])
    assert words == ["", "", "Yes", "Yes.", "Yes."]
