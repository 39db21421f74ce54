"""The callers of a simulated world, and the answers that they receive.

A `Visit` is one conversation as its caller means it. Each request that is sent for it is a `CallerConnection`, served
as the gateway's handlers would serve it. A request with an Idempotency-Key may be sent again, to any process, and must
receive the same run. A caller that receives tool calls comes back with their results, to any process, once, twice or
never.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from app.core.message.chat import NO_TOOLS, Message, Task, Text, Tool, Toolbox
from app.core.pool.catalog import Catalog, Limits
from app.engine.delivery.messages import AnswerPart, CallerMessage, FollowedRun, TurnEnd
from app.engine.runs.admission import Order
from app.engine.runs.cancellation import ask
from app.errors import BatonError, Conflict
from app.store.protocol import TAKEN, IdempotencyRecord, RunRow
from tests.simulation.faults import Faults
from tests.simulation.operators import GATED
from tests.simulation.plans import callers_plan

if TYPE_CHECKING:
    from tests.simulation.process import Process

GRACE = 30.0
"""Seconds beyond a run's time limit after which the gateway gives it up."""
TIERS = ("single", "chain", "fan_out", "self_consistency", "model", "model", "model")
FOR_EVER = 1e11
TOOLS = Toolbox((Tool("look", "Looks something up."),))
TOOL_WAIT = 6.0
"""Seconds that a run waits for the results of its caller's tools."""
SECONDS = (8.0, 20.0, 30.0)
"""A run's time limits. The least is not enough for all the plans within plans that a conductor may think of, so nobody
is so short of time in a world in which nothing goes wrong."""

Mood = Coroutine[Any, Any, None]


@dataclass
class CallerConnection:
    """One connection. `told` are the words of the answer, in the order in which they came."""

    place: str
    """The process that it went to."""
    order: Order
    patience: int = 0
    """How often it is sent again if it is refused for the moment."""
    run: str = ""
    refused: str = ""
    text: str = ""
    ended: list[TurnEnd] = field(default_factory=list)
    left: bool = False
    """Whether the caller went away before the end."""
    gave_up: bool = False
    over: bool = False
    """Whether the gateway's handler has come to its end."""

    async def listen(self, followed_run: FollowedRun, seconds: float, pause: float = 0.0) -> None:
        """Hear a run to its end."""
        self.run = followed_run.run
        try:
            async with asyncio.timeout(seconds):
                while not self.ended:
                    self._hear(await followed_run.mailbox.take(10.0))
                    if pause:
                        await asyncio.sleep(pause)
        except TimeoutError:
            self.gave_up = True
        self._hear(await followed_run.mailbox.take(0.0))  # after the end there must be nothing

    def _hear(self, batch: list[CallerMessage]) -> None:
        for item in batch:
            if isinstance(item, AnswerPart):
                self.text += item.text
            elif isinstance(item, TurnEnd):
                self.ended.append(item)


@dataclass
class Visit:
    """A request and its story."""

    number: int
    order: Order
    unheard: bool = False
    """Whether it begins in the background, and nobody stays to hear it."""
    cancels_after: float | None = None
    leaves_after: float | None = None
    repeats_after: float | None = None
    erases_after: float | None = None
    pause: float = 0.0
    hearings: list[CallerConnection] = field(default_factory=list)
    answered: set[tuple[str, ...]] = field(default_factory=set)
    """The calls of its tools that it has heard of."""
    calls: Callable[["Visit", CallerConnection], None] = lambda _visit, _hearing: None
    """What it does about calls of its tools."""
    refused: Callable[["Visit", CallerConnection], None] = lambda _visit, _hearing: None
    waits: Callable[["Visit", CallerConnection], None] = lambda _visit, _hearing: None
    """What it does once it was told that its plan waits for an approval."""

    async def serve(self, process: "Process", hearing: CallerConnection) -> None:
        """Serve this request as a gateway does, from admission to the last chunk."""
        runs = process.running
        try:
            followed_run = await self._begin(process, hearing.order)
        except BatonError as error:
            hearing.refused = type(error).__name__
            hearing.over = True
            return self.refused(self, hearing)
        if self.unheard:
            hearing.run, hearing.over = followed_run.run, True
            return runs.leave(followed_run)
        try:
            async with asyncio.TaskGroup() as group:
                listening = group.create_task(
                    hearing.listen(followed_run, self.order.limits.seconds + GRACE, self.pause)
                )
                moods = [group.create_task(mood) for mood in self._moods(process, hearing, listening)]
                await asyncio.wait([listening])
                for mood in moods:
                    mood.cancel()
        finally:
            if not hearing.ended:
                runs.leave(followed_run)
            hearing.over = True
        if hearing.ended and hearing.ended[-1].calls:
            self.calls(self, hearing)
        elif hearing.ended and hearing.ended[-1].state.state == "awaiting_approval":
            self.waits(self, hearing)

    async def _begin(self, process: "Process", order: Order) -> FollowedRun:
        """As `http/idempotency.py` does it."""
        once, store, runs = order.once, process.store, process.running
        if once is None:
            return await runs.start(order)
        record = await store.find_idempotency_record(once.id, process.clock.now())
        if record is None:
            try:
                return await runs.start(order)
            except Conflict as conflict:
                if conflict.public_code != TAKEN:
                    raise
                record = await store.find_idempotency_record(once.id, process.clock.now())
        if record is None:
            raise Conflict(code=TAKEN)
        return await runs.attach(record.run, once=once.id, tenant=order.tenant)

    def _moods(self, process: "Process", hearing: CallerConnection, listening: asyncio.Task[None]) -> Iterator[Mood]:
        """Yield what its first connection does besides receiving."""
        first = self.hearings[0] is hearing
        if self.cancels_after is not None and first:
            yield self._cancel(process, hearing)
        if self.leaves_after is not None and first:
            yield self._leave(hearing, listening)

    async def _cancel(self, process: "Process", hearing: CallerConnection) -> None:
        await asyncio.sleep(self.cancels_after or 0.0)
        with suppress(BatonError):  # a 503: this caller does not insist
            await self.wish(process, hearing)

    async def wish(self, process: "Process", hearing: CallerConnection) -> RunRow:
        """Ask for the end of its run, which was that until then."""
        row = await process.store.run(hearing.run)
        await ask(process.store, process.queue, row, "caller", process.clock.now())
        return row

    async def _leave(self, hearing: CallerConnection, listening: asyncio.Task[None]) -> None:
        await asyncio.sleep(self.leaves_after or 0.0)
        hearing.left = True
        listening.cancel()

    def goes_on(self, ended: TurnEnd, results: Mapping[str, str], order: Order) -> Order:
        """The request that brings results: the conversation so far, the calls as they were told, and what came."""
        words = (Text(ended.answer),) if ended.answer else ()
        message = Message("assistant", words, calls=ended.calls)
        came = tuple(Message("tool", (Text(results[call.id]),), call_id=call.id) for call in ended.calls)
        once = order.once and replace(order.once, id=f"{order.once.id}+")
        return replace(order, task=replace(order.task, messages=(*order.task.messages, message, *came)), once=once)


def visit(number: int, catalog: Catalog, faults: Faults, chance: Random, *, notifies: bool = False) -> Visit:
    """One more request, as varied as callers are; `notifies`: ends of those in the background are told."""
    tier = catalog.tiers[chance.choice(TIERS)]
    tools = chance.random() < 0.4
    background = chance.random() < (0.6 if notifies else 0.2)
    streams = chance.random() < 0.5
    limits = Limits(
        steps=chance.randint(1, 5),
        fan_out=chance.randint(1, 4),
        rounds=chance.choice((1, 1, 2, 3)) if tier.name == "model" else 1,
        depth=chance.choice((0, 1, 2)) if tier.name == "model" else 0,
        attempts=chance.randint(1, 4),
        output_tokens=200,
        floor_tokens=20 if number % 2 else 200,
        usd=chance.randint(20, 2_000) if faults.hit("caller.brings_little_money") else 2_000_000,
        seconds=max(chance.choice(SECONDS), SECONDS[0] if faults.rates else SECONDS[1]),
        tool_wait=TOOL_WAIT,
    )
    repeats = 6.0 * chance.random() if faults.hit("caller.repeats") else None
    keyed = repeats is not None or chance.random() < 0.3
    order = Order(
        task=Task((Message("user", (Text(f"<user:{number}> What is it?"),)),), toolbox=TOOLS if tools else NO_TOOLS),
        tier=tier,
        model=tier.name,
        effort=tier.effort,
        limits=limits,
        tenant="tenant",
        key="key",
        plan=callers_plan(tier.pool, f"c{number}", limits.steps, chance) if chance.random() < 0.15 else None,
        streams=streams or background,
        stream_steps=chance.random() < 0.3,
        preview=chance.random() < 0.04,
        on_disconnect="finish" if background else None,
        wire={"format": "responses", "background": True, "store": True} if background else {},
        once=IdempotencyRecord(f"claim {number}", b"fingerprint", FOR_EVER) if keyed else None,
    )
    if not order.preview and faults.hit("caller.needs_approval"):
        order = _with_approval(order, catalog, faults.persons)
    if order.plan is None and faults.hit("caller.labels"):
        order = replace(order, labels=frozenset({"phi"}))
    return Visit(
        number,
        order,
        unheard=background and not streams and not tools,
        cancels_after=4.0 * chance.random() if faults.hit("caller.cancels") else None,
        leaves_after=4.0 * chance.random() if faults.hit("caller.leaves") else None,
        repeats_after=repeats,
        erases_after=8.0 * chance.random() if faults.hit("caller.erases") else None,
        pause=2.0 * chance.random() if faults.hit("caller.reads_slowly") else 0.0,
    )


def _with_approval(order: Order, catalog: Catalog, chance: Random) -> Order:
    """Return the order with plans that need an approval: all of them, or, in the tier's twin, some."""
    if chance.random() < 0.5:
        return replace(order, approval=True)
    twin = catalog.tiers[order.tier.name + GATED]
    return replace(order, tier=twin, model=twin.name)
