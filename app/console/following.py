"""A run that is followed while it goes on: its plan, its steps, its answer, and how it ended, as regions of a page.

The words of the answer come with the run's stream; everything else is read from the API whenever a step's event has
come, so that a page that joins late shows the same. A stream is followed from its start, so that after a broken
connection the regions are those that a page of that moment has.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final

import orjson

from app.console import request_form
from app.console.api import Api, ApiError, Event, Session, path_segment, timeout_error
from app.console.live import changed_regions
from app.console.pages import Pages
from app.console.request_form import Refusal
from app.core.plan.workflow import CONDUCTOR
from app.core.run.kinds import ENDED
from app.errors import LeaseLost, Overloaded

SHOWN_CHARS: Final = 100_000
"""Characters of an answer that the page shows; it says how many are left out."""
READ_SECONDS: Final = 20.0
"""The longest that a page waits for the stream of a run that has ended."""
END_OF_STREAM: Final = "[DONE]"
REGIONS: Final = ("answer", "steps", "outcome")
"""The regions; each has a template, and the id `run-` with its name."""


class FollowedRun:
    """One run as one page shows it."""

    def __init__(self, pages: Pages, session: Session, run: str) -> None:
        self.run = run
        self._pages = pages
        self._api: Api = pages.api
        self._session = session
        self._path = f"/v1/runs/{path_segment(run)}"
        self._texts: list[str] = []
        self._chars = 0
        self._calls: dict[int, dict[str, str]] = {}
        self._has_all_calls = False
        """True if the stream has told the end of the turn. The state alone may be known before; it is read apart."""
        self._state = ""
        self._refusal: Refusal | None = None
        self._is_paused = False
        """True if the stream has ended because the plan waits for an approval."""
        self._graph: Mapping[str, Any] = {}
        self._sent_regions: dict[str, str] = {}
        """The regions as they were sent last."""
        self._is_changed = True
        """True if the steps have changed since they were read."""

    @property
    def is_over(self) -> bool:
        """Return True if nothing more comes by itself: the run has ended, or waits for the results of tools."""
        return self._state in ENDED or self._state == "awaiting_tool" or self._refusal is not None

    # -- the stream

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[AsyncIterator[Event]]:
        """Yield the events of the run's stream, and note them here. Raises `ApiError` where the service stops, or is
        overloaded."""
        async with aclosing(self._events()) as events:
            yield events

    async def read(self) -> None:
        """Read the steps of a run, and the whole stream too if the run is over."""
        await self._read_steps()
        if not self.is_over:
            return
        try:
            async with asyncio.timeout(READ_SECONDS), self.stream() as events:
                async for _event in events:
                    pass
        except TimeoutError:
            raise timeout_error(f"The run could not be read within {READ_SECONDS:.0f} seconds. Try again.") from None

    async def _read_steps(self) -> None:
        """Read the steps, where they have changed since they were read."""
        if self._is_changed:
            self._is_changed = False
            self._graph = await self._api.get(self._session, f"{self._path}/graph")
            self._state = self._graph["state"]

    async def _events(self) -> AsyncGenerator[Event]:
        while True:
            self._texts, self._chars, self._calls = [], 0, {}
            self._has_all_calls = self._is_paused = False
            try:
                async with self._api.events(self._session, f"{self._path}/stream") as events:
                    async for event in events:
                        self._take_event(event)
                        yield event
                if not self._is_paused:
                    return
                await self._wait_for_decision()
            except ApiError as error:
                if error.status == Overloaded.status:  # the run goes on: its page is to connect again
                    raise
                self._refusal = request_form.refusal(error)
                yield Event("", "error", self._refusal.message)
                return

    async def _wait_for_decision(self) -> None:
        """Wait until the plan was approved or refused. Raises `ApiError` where the stream of the run's events ends
        before that, as it does where the service stops."""
        run = await self._api.get(self._session, self._path)
        stream, last = f"{self._path}/events/stream", str(run["seq"])
        async with self._api.events(self._session, stream, last_event_id=last) as events:
            while run["state"] == "awaiting_approval":
                if await anext(events, None) is None:
                    raise ApiError(Overloaded.status, {})
                run = await self._api.get(self._session, self._path)
        self._state, self._is_changed = run["state"], True

    def _take_event(self, event: Event) -> None:
        """Take one event of the stream. Raises `ApiError` for a stream that ends because this process stops."""
        if not event.data or event.data == END_OF_STREAM:
            return
        body = orjson.loads(event.data)
        self._is_changed = self._is_changed or "error" in body or "baton" in body
        if "error" in body:
            error = ApiError(200, body)
            if error.code == LeaseLost.code:
                raise ApiError(LeaseLost.status, body)
            self._refusal = request_form.refusal(error)
            return
        for choice in body.get("choices", ()):
            self._add_delta(choice.get("delta", {}))
            self._has_all_calls = self._has_all_calls or choice.get("finish_reason") == "tool_calls"
        self._state = str(body.get("baton", {}).get("state", self._state))
        if self._state == "awaiting_approval":
            self._is_paused = True
            self._texts, self._chars = [], 0  # it was a sentence for clients that show nothing else

    def _add_delta(self, delta: Mapping[str, Any]) -> None:
        text = delta.get("content") or delta.get("refusal") or ""
        if text and self._chars < SHOWN_CHARS:
            self._texts.append(text)
        self._chars += len(text)
        for call in delta.get("tool_calls", ()):
            tool_call = self._calls.setdefault(call["index"], {"id": "", "type": "", "name": "", "arguments": ""})
            tool_call["id"] = call.get("id") or tool_call["id"]
            tool_call["type"] = call.get("type") or tool_call["type"]
            called = call.get("function") or call.get("custom") or {}
            tool_call["name"] = called.get("name") or tool_call["name"]
            tool_call["arguments"] += called.get("arguments") or called.get("input") or ""

    # -- the regions

    async def regions(self, _event: Event) -> dict[str, str]:
        """Return the page's regions that have changed since the last call. Raises `ApiError` if the run cannot be
        read."""
        view = await self.view()
        regions = {f"run-{name}": self._pages.region(f"playground_{name}.html", view=view) for name in REGIONS}
        changes = changed_regions(self._sent_regions, regions)
        self._sent_regions = regions
        return changes

    async def view(self) -> dict[str, Any]:
        """Return the values of the regions' templates. Raises `ApiError` where the run cannot be read."""
        await self._read_steps()
        answer = "".join(self._texts)
        words, left_out = "", 0
        if answer and self._state != "awaiting_approval":
            words = answer[:SHOWN_CHARS]
            left_out = max(self._chars - SHOWN_CHARS, 0)
        calls: list[dict[str, str]] = []
        if self._state == "awaiting_tool" and self._has_all_calls:
            calls = list(self._calls.values())
        turn, whole = "", await self._read_whole_run()
        if calls:
            turn = orjson.dumps(_assistant_message(answer, calls)).decode()
        return {
            "run": self.run,
            "state": self._state,
            "is_over": self.is_over,
            "plans": _plans(self._graph),
            "words": words,
            "left_out": left_out,
            "calls": calls,
            "turn": turn,
            "results": (),
            "comment": "",
            "refusal": self._refusal,
            "whole": whole,
            "workers": _workers(whole),
            "why": await self._read_explanation(),
        }

    async def _read_whole_run(self) -> Any:
        """Return the figures of a run that goes on no further by itself; None before that."""
        if self.is_over or self._state == "awaiting_approval":
            return await self._api.get(self._session, self._path)
        return None

    async def _read_explanation(self) -> str:
        """Return the explanation of a run that has ended."""
        if self._state not in ENDED:
            return ""
        return str((await self._api.get(self._session, f"{self._path}/explain"))["text"])


def _assistant_message(words: str, calls: list[dict[str, str]]) -> dict[str, Any]:
    """Return the assistant's message with its calls of tools, as the request with their results repeats it."""
    tool_calls: list[dict[str, Any]] = []
    for call in calls:
        kind = call["type"]
        arguments = "input" if kind == "custom" else "arguments"
        called = {"name": call["name"], arguments: call["arguments"]}
        tool_calls.append({"id": call["id"], "type": kind, kind: called})
    return {"role": "assistant", "content": words or None, "tool_calls": tool_calls}


def _workers(whole: Mapping[str, Any] | None) -> list[str]:
    """Return the workers that were called for the steps of a run, each once, as the list of runs has them."""
    names: set[str] = set()
    if whole is not None:
        for step in whole["steps"]:
            names.update([attempt["worker"] for attempt in step["attempts"]])
    return sorted(names)


def _plans(graph: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the plans of a run in order, each with its steps, and of each step what it was shown and what not."""
    plans = [{**node, "steps": []} for node in graph["nodes"] if node["kind"] == "plan"]
    by_number = {plan["number"]: plan for plan in plans}
    for node in graph["nodes"]:
        if node["kind"] == "step" and node["proposal"] in by_number:
            by_number[node["proposal"]]["steps"].append(_step(node, graph["edges"]))
    return plans


def _step(node: Mapping[str, Any], edges: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a step with the sources that it was or will be shown, each once, and the edges of what was withheld from
    it."""
    was_called = bool(node["attempts"]) or node["worker"] == CONDUCTOR
    sources: list[str] = []
    withheld: list[Mapping[str, Any]] = []
    for edge in edges:
        if edge["target"] != node["id"] or edge["what"] == "subtask":
            continue
        if edge["kind"] == "withheld":
            withheld.append(edge)
        elif edge["source"] not in sources and (was_called or node["state"] not in ("done", "failed", "skipped")):
            sources.append(edge["source"])
    return {**node, "shown": sources, "withheld": withheld, "failures": _failures(node)}


def _failures(node: Mapping[str, Any]) -> list[str]:
    """Return the attempts of a step that gave no answer, in words."""
    failures: list[str] = []
    for attempt in node["attempts"]:
        if attempt["outcome"] not in (None, "ok"):
            failures.append(f"{attempt['worker']}: {attempt['error'] or attempt['outcome']}")
    return failures
