"""Wishes to cancel runs, journaled by the process that has them and carried out by the run's engine.

A wish is an event that any process may write. It is written at once while the database is there, else as soon as it has
returned; it is sent to the engine, which would find it at the latest when it renews its leases. Two kinds of runs are
cancelled this way: those whose caller has left, and those that may or may not have been admitted, because the
database went away between a COMMIT and its answer (their callers got an error that says so, with the run's id).
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from app.core.run.events import RunCancelAsked
from app.core.run.state import Turn
from app.engine.context import EngineContext
from app.errors import NotFound, QueueUnavailable, RunEnded, RunUndecided, StoreUnavailable
from app.stepqueue.protocol import Committed
from app.store.protocol import UNDECIDED, Entry

BOUND = 4_096
"""Wishes that wait for the database; of any beyond them, the runs are finished instead of cancelled."""
RETRY_SECONDS = 1.0
"""Time between two tries while the database is unavailable."""


class Cancellations:
    """The wishes of one process."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._wishes: dict[str, str] = {}
        """The name in which each run is cancelled: `client`, `caller` or `operator`; by run."""
        self._added = asyncio.Event()
        self._refused = False
        """True if the database did not take the latest wish that was tried."""

    async def run(self, stopping: asyncio.Event) -> None:
        """Write wishes until `stopping` is set and those that are known have been tried once more."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._wake_at(stopping))
            while not stopping.is_set():
                await self._wait()
                await self._write_all()
        await self._write_all()

    def ask(self, run: str, by: str) -> None:
        """Cancel a run soon."""
        if len(self._wishes) < BOUND:
            self._wishes.setdefault(run, by)
            self._added.set()

    @contextmanager
    def undecided(self, run: str, turn: Turn | None = None) -> Iterator[None]:
        """Around the commit that admits a run, or that begins a later turn of it (then without `turn`).

        Raises `RunUndecided` if the commit went unanswered. A run that was to stop when its caller leaves is then
        cancelled, should it exist.
        """
        try:
            yield
        except StoreUnavailable as error:
            if error.public_code != UNDECIDED:
                raise
            if turn is not None and turn.on_disconnect == "cancel":
                self.ask(run, "client")
            raise RunUndecided(run) from error

    async def _wake_at(self, stopping: asyncio.Event) -> None:
        """End the wait for further wishes as soon as `stopping` is set."""
        await stopping.wait()
        self._added.set()

    async def _wait(self) -> None:
        """Wait until there is something to write that can be written, or the process stops."""
        if self._wishes and not self._context.store.healthy:
            await self._context.store.wait_until_healthy(RETRY_SECONDS)
            return
        if self._wishes and not self._refused:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(RETRY_SECONDS):
                await self._added.wait()
        self._added.clear()

    async def _write_all(self) -> None:
        for run, by in list(self._wishes.items()):
            try:
                await self._write(run, by)
            except StoreUnavailable:
                self._refused = True
                return
            self._wishes.pop(run, None)
        self._refused = False

    async def _write(self, run: str, by: str) -> None:
        with suppress(NotFound, RunEnded):
            row = await self._context.store.run(run)
            wish = Entry(run, self._context.now(), (RunCancelAsked(by),))
            appended = await self._context.store.append(wish)
            with suppress(QueueUnavailable):
                await self._context.queue.publish(row.driver, [Committed(run, appended.events)])
