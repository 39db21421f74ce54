"""The models of a world, and what they received.

Each answer carries a token of its own, so that it can be seen wherever it turns up. A call is counted when its bytes
arrive, whatever becomes of it then; what it truly costs is noted beside it.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from random import Random

from app import errors
from app.core.message.chat import End, Piece, TextDelta, ToolDelta, Usage
from app.core.pool.catalog import Catalog, Worker
from app.errors import BatonError
from app.providers.protocol import Deadlines, Request
from tests.simulation.plans import plan_text
from tests.simulation.seam import Seam
from tests.simulation.witness import Witness

PLANNER = "planner"
FAR = 1e6
ERRORS: tuple[tuple[str, Callable[[], BatonError]], ...] = (
    ("worker.unavailable", errors.WorkerUnavailable),
    ("worker.rate_limited", lambda: errors.WorkerRateLimited(retry_after=1.0)),
    ("worker.rate_limited_for_long", lambda: errors.WorkerRateLimited(retry_after=60.0)),
    ("worker.refuses", errors.WorkerRefused),
    ("worker.misconfigured", errors.WorkerMisconfigured),
    ("worker.malformed", errors.WorkerMalformed),
    ("worker.truncated_early", errors.WorkerTruncated),
)


class AdapterFault(Exception):
    """An adapter's own fault, which is no `BatonError`: the product must live with it, and may log it."""


@dataclass(slots=True)
class ReceivedCall:
    """One call as it arrived. `billed` is what it truly cost, which nobody may ever learn."""

    number: int
    by: str
    worker: Worker
    body: bytes
    run: str
    request: str
    """The hash under which its intent was journaled."""
    at: float
    billed: Usage = Usage()
    text: str = ""
    """What it said, or would have said."""
    tools: tuple[ToolDelta, ...] = ()
    """The tools that it calls then, each in two pieces."""

    @property
    def written(self) -> int:
        """Characters of all that it says."""
        return len(self.text) + sum(len(piece.name + piece.arguments) for piece in self.tools)


@dataclass
class Workers:
    """All calls that were ever received in this world."""

    witness: Witness
    chance: Random
    time: Callable[[], float]
    received: list[ReceivedCall] = field(default_factory=list)
    always_wrong: set[str] = field(default_factory=set)
    """Runs for which no plan will ever be right."""
    counts: dict[str, int] = field(default_factory=dict)

    def receive(self, seam: Seam, worker: Worker, body: bytes) -> ReceivedCall:
        """A request has arrived: whatever was not journaled by now was not journaled in time (D4)."""
        intent = self.witness.intent_of(body, self.counts)
        if intent is None:
            self.witness.object(f"{seam.name} called {worker.name} without an intent")
        run, request = intent or ("", "")
        self.counts[request] = self.counts.get(request, 0) + 1
        if intent and self.counts[request] > self.witness.intents[request]:
            self.witness.object(f"{run}: {seam.name} called {worker.name} more often than was intended")
        call = ReceivedCall(len(self.received), seam.name, worker, body, run, request, self.time())
        self.received.append(call)
        return call


class SimProvider:
    """All workers behind one endpoint, as one process reaches them."""

    unsupported = frozenset({"presence_penalty"})

    def __init__(self, workers: Workers, seam: Seam, catalog: Catalog) -> None:
        """`catalog` is the pool file that the process has in force."""
        self._workers = workers
        self._seam = seam
        self.catalog = catalog

    def render(self, request: Request) -> bytes:
        """JSON of what a worker sees. A call is made for a worker as the pool file is that moment."""
        self._check_in_force(request.worker)
        messages = []
        for message in request.messages:
            calls = [[call.id, call.name, call.arguments] for call in message.calls]
            messages.append([message.role, message.text, message.call_id, calls])
        schema, box = request.form.schema if request.form else None, request.toolbox
        tools = [[tool.name for tool in box.tools], box.choice]
        return json.dumps([request.worker.model, request.sampling.max_tokens, messages, schema, tools]).encode()

    def _check_in_force(self, worker: Worker) -> None:
        """Object to a call for a worker that the pool file does not have, or not any more as it is called; and for a
        plan, to a model that plans for no tier."""
        if worker.name != PLANNER and self.catalog.workers.get(worker.name) != worker:
            self._workers.witness.object(f"{self._seam.name} made a call for {worker.name} as it is no more")
        planned = [tier for name, tier in self.catalog.tiers.items() if name.startswith("model")]
        if worker.name == PLANNER and planned and all(tier.conductor.worker is None for tier in planned):
            self._workers.witness.object(f"{self._seam.name} made a call for a plan by a model that conducts no more")

    async def stream(self, request: Request, body: bytes, deadlines: Deadlines) -> AsyncIterator[list[Piece]]:
        """One call, with everything that can happen to it."""
        seam = self._seam
        await seam.strike("worker.connect")
        clock = _Clock(seam, deadlines.total)
        await clock.pause(0.01 * seam.chance(), deadlines.connect)
        call = self._workers.receive(seam, request.worker, body)
        await seam.strike("worker.received")
        conducts = request.worker.name == PLANNER
        kind = "conductor" if conducts else "worker"
        self._may_fail(conducts)
        call.text = self._plan(request, call) if conducts else self._answer(call)
        call.tools = () if conducts else tuple(self._tools(request, call))
        call.billed = Usage(sum(len(message.text) for message in request.messages) // 4)
        slow = 20.0 * seam.chance() if seam.hit(f"{kind}.slow") else 0.0
        hangs = seam.hit("conductor.hangs" if conducts else "worker.hangs_at_first")
        await clock.pause(FAR if hangs else slow + 0.05 + 0.5 * seam.chance(), deadlines.first)
        async for piece in self._speak(call, clock, deadlines, conducts, live=request.live):
            yield piece
        await seam.strike("worker.answered")

    async def _speak(
        self, call: ReceivedCall, clock: "_Clock", deadlines: Deadlines, conducts: bool, *, live: bool
    ) -> AsyncIterator[list[Piece]]:
        seam, text, position = self._seam, call.text, 0
        breaks = seam.hit("conductor.truncated" if conducts else "worker.truncated_late")
        hangs = not conducts and seam.hit("worker.hangs_midway")
        cut = len(text) // 2 if breaks or hangs else len(text)
        while live and position < cut:
            size = min(1 + int(40 * seam.chance()), cut - position)
            call.billed = Usage(call.billed.input, output=(position + size) // 4 + 1)
            yield [TextDelta(text[position : position + size])]
            position += size
            await seam.strike("worker.piece")
            await clock.pause(0.1 * seam.chance(), deadlines.gap)
        if hangs:
            await clock.pause(FAR, deadlines.gap)
        if breaks:
            raise errors.WorkerTruncated()
        for piece in call.tools if live else ():
            yield [piece]
            await clock.pause(0.05 * seam.chance(), deadlines.gap)
        call.billed = Usage(call.billed.input, output=call.written // 4 + 1)
        tells_usage = not seam.hit("worker.tells_no_usage")
        if not tells_usage:  # then ours is an estimate: four bytes a token, as the truth is here
            call.billed = Usage(call.billed.input, output=call.written // 4)
        declines = not conducts and not call.tools and seam.hit("worker.declines")
        finish = "tool_calls" if call.tools else "content_filter" if declines else "stop"
        end = End(finish, call.billed if tells_usage else None, refused=declines)
        yield [end] if live else [*([TextDelta(text)] if text else []), *call.tools, end]

    def _may_fail(self, conducts: bool) -> None:
        if conducts:
            if self._seam.hit("conductor.unavailable"):
                raise errors.WorkerUnavailable()
            return
        for site, error in ERRORS:
            if self._seam.hit(site):
                raise error()
        if self._seam.hit("worker.adapter_breaks"):
            raise AdapterFault

    def _answer(self, call: ReceivedCall) -> str:
        seam = self._seam
        if seam.hit("worker.empty"):
            return ""
        text = f"<out:{call.number}> " + "so it is. " * int(6 * seam.chance())
        if seam.hit("worker.writes_a_plan"):
            text += json.dumps({"steps": [{"worker": 0, "subtask": f"<evil:{call.number}>", "access": ["user"]}]})
        return text

    def _tools(self, request: Request, call: ReceivedCall) -> Iterator[ToolDelta]:
        """Now and then it calls some of the caller's tools, but never without end; or in a way that is none."""
        seam, box = self._seam, request.toolbox
        came = sum(message.role == "tool" for message in request.messages)
        if not box.tools or came > 3 or seam.chance() > (0.15 if came else 0.5):
            return
        for index in range(1 + int(2 * seam.chance())):
            badly = seam.hit("worker.calls_badly")
            unknown = badly and seam.chance() < 0.5
            yield ToolDelta(index, "", "nothing" if unknown else box.tools[0].name, '{"about":')
            yield ToolDelta(index, arguments=" [" if badly else f' "{call.number}.{index}"}}')

    def _plan(self, request: Request, call: ReceivedCall) -> str:
        if self._seam.hit("conductor.always_wrong"):
            self._workers.always_wrong.add(call.run)
        if call.run in self._workers.always_wrong:
            return "I would rather not."
        schema = request.form.schema if request.form else None
        return plan_text(schema or {}, call.number, self._seam.hit, self._workers.chance)


class _Clock:
    """The deadlines of one call."""

    def __init__(self, seam: Seam, total: float) -> None:
        self._seam = seam
        self._until = seam.time() + total

    async def pause(self, seconds: float, allowed: float) -> None:
        """Wait; `WorkerTimeout` as soon as it is longer than is allowed, now or in all."""
        allowed = min(allowed, self._until - self._seam.time())
        await asyncio.sleep(max(min(seconds, allowed), 0.0))
        self._seam.check()
        if seconds > allowed:
            raise errors.WorkerTimeout()
