"""Which version of each conductor is in force, read from the database again and again.

A gateway follows an operator's change within `EVERY` seconds. While the database is away, what was read last stays.
"""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress

from app.core.versions import Standing, chosen, standings
from app.errors import StoreUnavailable
from app.store.protocol import Store
from app.telemetry import Telemetry

EVERY = 2.0
"""Seconds between two looks."""


class Succession:
    """The conductors' versions, for a process that conducts."""

    def __init__(self, store: Store, telemetry: Telemetry) -> None:
        self._store = store
        self._telemetry = telemetry
        self._known: Mapping[str, Standing] = {}

    def version(self, conductor: str, run: str) -> str:
        """The model that conducts this run in the conductor's name; empty for the pool file's own."""
        return chosen(self._known, conductor, run)

    async def look(self) -> None:
        """Read them once."""
        with suppress(StoreUnavailable):
            known = standings(await self._store.changes())
            if known != self._known:
                self._known = known
                live = {name: one.canary or one.live for name, one in known.items()}
                self._telemetry.log(logging.INFO, "conductors' versions have changed", versions=live)

    async def run(self, stopping: asyncio.Event) -> None:
        """Look until `stopping` is set."""
        while not stopping.is_set():
            await self.look()
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY):
                    await stopping.wait()
