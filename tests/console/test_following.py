"""A run that is followed: what its page shows while the stream and the figures of the run are not at the same point."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import orjson

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
