"""Publishing over Redis: many steps stream at once, and their messages during one publish share the next.

A publish costs some 150 microseconds of processor time whatever it carries, a delta in it only a few. Nobody waits for
it either: to wait for one's turn, under a time limit, cost as much again for each delta. Messages of a quiet process
are published at once; many steady streams share a publish every few milliseconds.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Final

from app.errors import QueueUnavailable
from app.stepqueue.codec import pack_live, sealed
from app.stepqueue.connections import Lines, Words
from app.stepqueue.protocol import Live

BREATH: Final = 20_000
"""Messages that may wait for the next publish: as many as two thousand streams say in ten seconds."""
PACE: Final = 0.005
"""Seconds between two publishes of a process that streams steadily."""
FREELY: Final = 20
"""Publishes of a process that has been silent for a while which may come sooner."""


class Voice:
    """Publishes in the order of the calls. One task takes a `breath` and `publish`es it, again and again."""

    def __init__(self, commands: Lines, key: bytes) -> None:
        """`key` seals what is said."""
        self._commands = commands
        self._key = key
        self._next: dict[str, list[Live]] = {}
        self._waiting = 0
        self._said = asyncio.Event()
        self._free = 0.0
        """When the next publish could leave, had all before it been spaced evenly."""
        self.silent = asyncio.Event()
        """Set while there is nothing to be published, nor on its way."""
        self.silent.set()
        self.unencodable = 0

    def say(self, channel: str, messages: Sequence[Live]) -> None:
        """Have it published soon; `QueueUnavailable` if too much waits already."""
        self._waiting += len(messages)
        if self._waiting > BREATH:
            self._waiting -= len(messages)
            raise QueueUnavailable("More is told than the step queue carries away.")
        self._next.setdefault(channel, []).extend(messages)
        self._said.set()
        self.silent.clear()

    async def breath(self) -> Mapping[str, Sequence[Live]]:
        """Wait until something was said and may be published, and take all of it, by channel."""
        if not self._next:
            self.silent.set()
        await self._said.wait()
        self._free = max(self._free, time.monotonic() - FREELY * PACE) + PACE
        if (early := self._free - time.monotonic()) > 0:
            await asyncio.sleep(early)
        self._said.clear()
        taken, self._next, self._waiting = self._next, {}, 0
        return taken

    async def publish(self, said: Mapping[str, Sequence[Live]]) -> None:
        """One round trip. Raises redis-py's errors; then all of it may be lost."""
        words: list[Words] = []
        for channel, messages in said.items():
            payloads, refused = pack_live(messages)
            self.unencodable += refused
            words += [("PUBLISH", channel, sealed(payload, channel, self._key)) for payload in payloads]
        await self._commands.must(*words)
