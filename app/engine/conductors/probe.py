"""Probes of conductors, apart from runs: a server's `/health` may answer 200 although it cannot generate.

A conductor that has not answered anything for two seconds is asked for one token. If that does not come in time, twice,
its breaker opens with the reason `out`: tiers that it conducts go to the fallback at once, and plans that wait for it
are given up. The next token closes the breaker. Nothing of this is journaled, and next to nothing of it costs money:
one that has a price is asked only after a real call has failed, until a token comes.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import aclosing

from app.core.message.chat import End, Message, Sampling, Text, TextDelta
from app.core.pool.catalog import Catalog, Deadlines, Price, Worker
from app.engine.context import EngineContext
from app.engine.periodic import look_repeatedly
from app.errors import BatonError, WorkerRateLimited, WorkerRefused, WorkerTruncated
from app.providers.protocol import Request

LOOK_SECONDS = 2.0
"""Time between two looks, and the silence after which it is in doubt whether a conductor still answers."""


class ConductorProbe:
    """Probes all conductors in force, for the process that conducts."""

    def __init__(self, context: EngineContext, *, on_out: Callable[[str], None]) -> None:
        """`on_out` is called with the worker's name of a conductor that has just been found not to answer."""
        self._context = context
        self._on_out = on_out
        self._being_probed: set[str] = set()
        """The names of the conductors that were asked for a token and have not answered yet."""

    async def run(self, stopping: asyncio.Event) -> None:
        """Look until `stopping` is set. Each conductor is asked on its own: a slow one keeps nobody waiting."""
        async with asyncio.TaskGroup() as group:

            async def look() -> None:
                for worker, seconds in conductors(self._context.catalog()):
                    if worker.name not in self._being_probed and self._is_in_doubt(worker):
                        self._being_probed.add(worker.name)
                        group.create_task(self._probe(worker, seconds))

            await look_repeatedly(look, stopping, LOOK_SECONDS, self._context.telemetry, "The probe of conductors")

    def _is_in_doubt(self, worker: Worker) -> bool:
        health = self._context.health
        if health.seconds_silent(worker) < LOOK_SECONDS:
            return False
        is_free = worker.price == Price()
        return is_free or health.is_suspect(worker)

    async def _probe(self, worker: Worker, seconds: float) -> None:
        """Ask a conductor for one token, and a second time before it is ejected; note in its breaker what came."""
        health = self._context.health
        try:
            was_out = health.is_out(worker)
            alive = await self._answers(worker, seconds)
            if not alive and not was_out:
                alive = await self._answers(worker, seconds)
            health.note_probe(worker, alive=alive)
            if not alive and not was_out:
                self._on_out(worker.name)
        except Exception as bug:  # it must not end the watch over the others
            self._context.telemetry.log(
                logging.ERROR,
                "A conductor could not be probed because of a bug; it is probed again.",
                bug,
                worker=worker.name,
            )
        finally:
            self._being_probed.discard(worker.name)

    async def _answers(self, worker: Worker, seconds: float) -> bool:
        """Ask for one token; True if it comes. A refusal in good form is a sign of life as well."""
        try:
            async with asyncio.timeout(seconds):
                await self._generate(worker, seconds)
            outcome = "ok"
        except (WorkerRateLimited, WorkerRefused):
            outcome = "refused"
        except (BatonError, OSError, TimeoutError):
            outcome = "dead"
        self._context.telemetry.count("baton_probes_total", worker.name, outcome)
        return outcome != "dead"

    async def _generate(self, worker: Worker, seconds: float) -> None:
        request = Request(worker, (Message("user", (Text("Say ok."),)),), Sampling(max_tokens=1))
        provider = self._context.provider(worker.provider)
        deadlines = Deadlines(min(seconds, worker.deadlines.connect), seconds, seconds, seconds)
        async with aclosing(provider.stream(request, provider.render(request), deadlines)) as batches:  # type: ignore[type-var]
            async for pieces in batches:
                if any(isinstance(piece, TextDelta | End) for piece in pieces):
                    return
        raise WorkerTruncated


def conductors(catalog: Catalog) -> Iterator[tuple[Worker, float]]:
    """Yield the models that conduct and may be probed, each with the longest time that one token may take."""
    seconds: dict[str, float] = {}
    for tier in catalog.tiers.values():
        spec = tier.conductor
        if spec.kind != "fixed" and spec.worker is not None and spec.probe:
            seconds[spec.worker] = max(spec.probe, seconds.get(spec.worker, 0.0))
    for name, longest in seconds.items():
        worker = catalog.workers[name]
        if catalog.providers[worker.provider].format != "rehearsal":
            yield worker, longest
