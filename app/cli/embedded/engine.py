"""The service without its gateway, for commands that start runs, which are journaled and budgeted like all others."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from msgspec.structs import replace

from app.engine.delivery.messages import FollowedRun, TurnEnd
from app.engine.runs.admission import Order
from app.errors import Overloaded, RunExpired
from app.process.config import Configuration
from app.process.wiring import Runtime, open_runtime

START_SECONDS = 5.0
"""How long an engine may take until it is ready for a run."""


@asynccontextmanager
async def start_engine(config: Configuration, runs: int, *, dispatches: bool = False) -> AsyncIterator[Runtime]:
    """Start an engine for so many runs of this command at once, and for no run of anybody else's.

    Without `dispatches` it plans runs and executes no steps.
    """
    settings = config.settings.model_copy(update={"concurrent_runs": runs})
    async with open_runtime(replace(config, settings=settings)) as runtime:
        runs_over, steps_over = asyncio.Event(), asyncio.Event()
        runtime.drivers.recovers = False
        if not dispatches:
            runtime.drivers.dispatcher = None
        await runtime.clock.read()
        await runtime.versions.look()
        runtime.pool.apply_trials(await runtime.context.store.trials())
        async with asyncio.TaskGroup() as group:
            group.create_task(runtime.clock.keep_reading(runs_over))
            group.create_task(runtime.drivers.run(runs_over))
            group.create_task(runtime.runs.run(runs_over))
            dispatching = None
            if dispatches:
                dispatching = group.create_task(runtime.dispatcher.run(steps_over))
            try:
                yield runtime
            finally:
                steps_over.set()
                if dispatching is not None:
                    await asyncio.wait([dispatching])
                runs_over.set()


async def run_to_end(runtime: Runtime, order: Order) -> TurnEnd:
    """Carry out one run to its end, and return that. Raises `RunExpired` if it does not end in its time."""
    followed_run = await _start(runtime, order)
    try:
        async with asyncio.timeout(order.limits.seconds + START_SECONDS):
            while True:
                for message in await followed_run.mailbox.take(1.0):
                    if isinstance(message, TurnEnd):
                        return message
    except TimeoutError:
        raise RunExpired() from None


async def _start(runtime: Runtime, order: Order) -> FollowedRun:
    """Begin a run. The engine needs a moment until it is ready; raises `Overloaded` if it still is not after
    `START_SECONDS`."""
    time = asyncio.get_running_loop().time
    ready_by = time() + START_SECONDS
    while True:
        try:
            return await runtime.runs.start(order)
        except Overloaded:
            if time() > ready_by:
                raise
        await asyncio.sleep(0.02)
