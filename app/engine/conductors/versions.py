"""Which version of each conductor is in force, read from the database again and again.

A gateway follows an operator's change within `EVERY` seconds. Nobody is asked on the strength of what is older than
`FRESH` seconds, unless the database cannot be read just then: what was read last stays in force.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import suppress

from app.core.pool.conductor_versions import Standing, chosen, standings
from app.errors import StoreUnavailable
from app.store.protocol import ConductorVersions
from app.telemetry import Telemetry

EVERY = 2.0
"""Seconds between two looks."""
FRESH = 10.0
"""Seconds after which what was read is read again before it is used: after an outage, or where nobody else looks."""


class VersionReader:
    """The conductors' versions, for a process that conducts. `tick` is a clock in seconds that never goes back."""

    def __init__(self, store: ConductorVersions, telemetry: Telemetry, tick: Callable[[], float]) -> None:
        self._store = store
        self._telemetry = telemetry
        self._tick = tick
        self._known: Mapping[str, Standing] = {}
        self._read_at = -math.inf

    async def version(self, conductor: str, run: str) -> str:
        """The model that conducts this run in the conductor's name; empty for the pool file's own."""
        if self._tick() - self._read_at > FRESH:
            await self.look()
        return chosen(self._known, conductor, run)

    async def look(self) -> None:
        """Read them once."""
        with suppress(StoreUnavailable):
            asked_at = self._tick()
            known = standings(await self._store.changes())
            self._read_at = asked_at
            if known != self._known:
                self._known = known
                live = {name: one.canary or one.live for name, one in known.items()}
                self._telemetry.log(
                    logging.INFO, "The versions of conductors have changed; new runs use these.", versions=live
                )

    async def run(self, stopping: asyncio.Event) -> None:
        """Look until `stopping` is set."""
        while not stopping.is_set():
            await self.look()
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY):
                    await stopping.wait()
