"""One process of the service in a world: a gateway's drivers, a dispatcher, or both, put together as `serving` does.

`context` is the one place where the product's `EngineContext` is made.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx

from app.conductor.fixed import FixedConductor
from app.conductor.model import ModelConductor
from app.conductor.protocol import Conductor
from app.conductor.styles import STYLES
from app.core.pool.catalog import Catalog, Tier
from app.engine.context import EngineContext, StandstillWatch
from app.engine.delivery.webhooks import Target, Webhooks
from app.engine.runs.admission import Order
from app.engine.runs.approvals import Decision
from app.engine.runs.client import RunClient
from app.engine.runs.registry import Drivers
from app.engine.steps.dispatcher import Dispatcher
from app.engine.worker_health import Health
from app.errors import BatonError, NotFound, Overloaded, StoreUnavailable
from app.gateway.runs import cancel
from app.process.clock import Clock
from app.stepqueue.protocol import StepQueue
from app.store.protocol import Store
from app.store.sql import SqlStore
from app.telemetry import Telemetry
from tests.simulation.callers import CallerConnection, Visit
from tests.simulation.loop import EPOCH, VirtualLoop
from tests.simulation.operators import DecisionRequest
from tests.simulation.receiver import SECRET, URL, Sender
from tests.simulation.seam import Seam
from tests.simulation.workers import SimProvider

DRAINS = (0.5, 3.0, 25.0)
"""Seconds that what is going on gets when a process is told to stop."""
TARGET = Target(URL, (SECRET,))


class Quiet(Telemetry):
    """Counts nothing, and leaves the product's log lines to the world."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: dict[str, float] = {}

    def count(self, name: str, *labels: str, by: float = 1) -> None:
        self.counted[name] = self.counted.get(name, 0) + by

    def observe(self, name: str, seconds: float, *labels: str) -> None:
        return

    def gauge(self, name: str, value: float) -> None:
        return


@dataclass
class Setting:
    """The parts that all processes of a world share."""

    loop: VirtualLoop
    catalog: Catalog
    """The pool file as it is now; a process has in force what it has read."""
    lease: float
    chance: Random
    telemetry: Telemetry
    notifies: bool = False
    """Whether there is a receiver of webhooks."""
    names: int = 0

    def name(self, prefix: str) -> str:
        """Return a fresh id, in the form of the product's own: ids of tool calls lead back to those of runs."""
        self.names += 1
        return f"{prefix}_{self.names:031x}" if prefix == "run" else f"{prefix}_{self.names:05d}"


def conductor(tier: Tier) -> Conductor:
    """Return the tier's policy."""
    if tier.conductor.worker is not None:
        style = STYLES[tier.conductor.prompt]
        return ModelConductor(tier.conductor.worker, style, positional=True, logprobs=False, temperature=0.0)
    return FixedConductor(tier.conductor)


@dataclass
class Watch:
    """A machine's own clocks: the wall's may be `wrong`, and the monotonic one stood still for `lag` seconds."""

    loop: VirtualLoop
    wrong: float = 0.0
    lag: float = 0.0

    def wall(self) -> float:
        """Return the seconds since 1970, as this machine believes."""
        return EPOCH + self.loop.time() + self.wrong

    def tick(self) -> float:
        """Return the seconds that never go back."""
        return self.loop.time() - self.lag


def context(
    setting: Setting, watch: Watch, clock: Clock, store: Store, queue: StepQueue, provider: SimProvider, health: Health
) -> EngineContext:
    """Return what drivers and dispatchers of one process work with."""
    return EngineContext(
        store=store,
        queue=queue,
        catalog=lambda: provider.catalog,
        provider=lambda _name: provider,
        conductor=conductor,
        health=health,
        telemetry=setting.telemetry,
        now=clock.now,
        monotonic=watch.tick,
        name=setting.name,
        random=setting.chance.random,
        salt=lambda: setting.chance.randbytes(16),
        lease=setting.lease,
        standstills=StandstillWatch(watch.tick, setting.lease),
        code="simulated",
        clock_is_set=lambda: clock.is_set,
        notifies=setting.notifies,
    )


@dataclass
class Process:
    """A running process. `gateway` and `dispatcher` are its roles."""

    setting: Setting
    seam: Seam
    watch: Watch
    store: SqlStore
    queue: StepQueue
    provider: SimProvider
    sender: Sender
    gateway: bool
    dispatcher: bool
    slots: int
    grace: float
    since: float
    """When it was started, in the world's time."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    drivers: Drivers | None = None
    runs: RunClient | None = None
    broke: BaseException | None = None
    ended: bool = False
    clock: Clock = field(init=False)
    health: Health = field(init=False)
    _requests: asyncio.TaskGroup | None = None
    _serving: list[asyncio.Task[Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = Clock(self.watch.wall, self.watch.tick, self.store.clock)
        self.health = Health(self.setting.telemetry, monotonic=self.watch.tick, random=self.setting.chance.random)
        self.read_pool_file()

    def read_pool_file(self) -> None:
        """Have it in force as it is now, as at the start and after a SIGHUP."""
        self.provider.catalog = self.setting.catalog
        self.health.use_catalog(self.setting.catalog)

    @property
    def name(self) -> str:
        """Its address, which no other process ever had."""
        return self.seam.name

    @property
    def serves(self) -> bool:
        """Return True if a request can be sent to it."""
        gone = self.ended or self.stopping.is_set() or self.seam.machine.dead
        return self._requests is not None and not gone

    async def run(self) -> None:
        """From start to an orderly stop."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.store.availability.run())
                group.create_task(self.store.writer.run())
                try:
                    await self._serve()
                finally:
                    await self.store.close()
        except Exception as error:
            self.broke = error
        self.ended = True

    async def _serve(self) -> None:
        new_context = context(self.setting, self.watch, self.clock, self.store, self.queue, self.provider, self.health)
        drivers = self.drivers = Drivers(new_context, home=self.name, bound=50)
        self.runs = RunClient(
            new_context,
            home=f"{self.name}-gateway",
            bound=50,
            waiting_bound=50,
            engine=drivers if self.dispatcher else None,
        )
        dispatcher = Dispatcher(new_context, drivers, name=self.name, slots=self.slots, grace=self.grace)
        drivers.dispatcher = dispatcher
        runs_end, steps_end = asyncio.Event(), asyncio.Event()
        await self.clock.read()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.clock.keep_reading(self.stopping))
            driving = [group.create_task(drivers.run(runs_end))] if self.dispatcher else []
            if self.gateway:
                driving.append(group.create_task(self.runs.run(runs_end)))
            if self.setting.notifies:
                webhooks = Webhooks(
                    new_context, TARGET, client=lambda: httpx.AsyncClient(transport=self.sender, trust_env=False)
                )
                driving.append(group.create_task(webhooks.run(runs_end)))
            working = group.create_task(dispatcher.run(steps_end)) if self.dispatcher else None
            await self._answer_requests()
            steps_end.set()
            if working is not None:
                await asyncio.wait([working])
            runs_end.set()
            await asyncio.wait(driving)

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=self.sender, trust_env=False)

    async def _answer_requests(self) -> None:
        """Until the process is told to stop; then requests get the drain time."""
        async with asyncio.TaskGroup() as group:
            self._requests = group if self.gateway else None
            try:
                await self.stopping.wait()
            finally:
                self._requests = None
            if self._serving:
                await asyncio.wait(self._serving, timeout=self.grace)
            for task in self._serving:
                task.cancel()

    @property
    def running(self) -> RunClient:
        """The runs of its callers; it must serve."""
        if self.runs is None:
            raise AssertionError(f"{self.name} does not serve")
        return self.runs

    def take(self, visit: Visit, order: Order, patience: int = 0) -> None:
        """A request comes in over the wire."""
        hearing = CallerConnection(self.name, order, patience)
        if self._begin(visit.serve(self, hearing)):
            visit.hearings.append(hearing)

    def call_off(self, visit: Visit, hearing: CallerConnection) -> None:
        """Somebody wants a run to end, by the command line: nobody sweeps for that."""
        self._begin(self._call_off(visit, hearing))

    def recall(self, run: str, hearing: CallerConnection) -> None:
        """Somebody asks for a run that is over."""
        self._begin(self._tell(run, hearing))

    def forget(self, hearing: CallerConnection) -> None:
        """Somebody wants the content of a run erased."""
        self._begin(self._erase(hearing))

    def decide(self, request: DecisionRequest, unanswered: Callable[[DecisionRequest], None]) -> None:
        """Somebody decides on a plan that waits for an approval."""
        self._begin(self._decide(request, unanswered))

    def _begin(self, work: Coroutine[Any, Any, None]) -> bool:
        if self._requests is None:
            work.close()
            return False
        self._serving.append(self.seam.machine.context.copy().run(self._requests.create_task, work))
        return True

    async def _call_off(self, visit: Visit, hearing: CallerConnection) -> None:
        with suppress(BatonError):
            await visit.wish(self, hearing)

    async def _tell(self, run: str, hearing: CallerConnection) -> None:
        try:
            followed_run = await self.running.attach(run, tenant=None)
            await hearing.listen(followed_run, 5.0)
        except NotFound as error:
            hearing.refused = type(error).__name__
        hearing.over = True

    async def _decide(self, request: DecisionRequest, unanswered: Callable[[DecisionRequest], None]) -> None:
        """As `POST /v1/approvals/{id}` does it."""
        decision = Decision(
            verdict=request.verdict,
            digest=request.digest,
            by=request.by,
            key="approver",
            replacements=request.replacements,
            max_usd=request.max_usd,
        )
        try:
            await self.running.decide(request.run, None, decision)
            request.accepted = True
        except (StoreUnavailable, Overloaded):
            unanswered(request)
        except BatonError as error:
            request.refused = error.public_code or type(error).__name__

    async def _erase(self, hearing: CallerConnection) -> None:
        """As `DELETE /v1/responses/{id}` does it."""
        try:
            row = await self.store.run(hearing.run)
            await cancel.stop(self.store, self.queue, row, self.now())
            await self.store.erase(hearing.run)
        except BatonError as error:
            hearing.refused = type(error).__name__
        hearing.over = True

    def now(self) -> float:
        """Return the time, as a gateway context has it."""
        return self.clock.now()
