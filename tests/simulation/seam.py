"""The outer side of a seam, as one process has it: dice, delays, and the blows that hit the whole process there."""

import asyncio
import random
from typing import Protocol

from tests.simulation.faults import Faults
from tests.simulation.loop import Machine


class Blows(Protocol):
    """Faults that are done to a process from outside."""

    def crash(self, machine: Machine) -> None:
        """It is gone: nothing that it would still do has any effect."""
        ...

    def freeze(self, machine: Machine) -> None:
        """It stands still for a while, and then goes on as if nothing had been."""
        ...


class Seam:
    """Every await of a simulated seam passes here. Once `closed`, whoever still comes is sent away."""

    def __init__(self, name: str, machine: Machine, faults: Faults, blows: Blows, chance: random.Random) -> None:
        self.name = name
        self.machine = machine
        self.closed = False
        self._faults = faults
        self._blows = blows
        self._random = chance

    def hit(self, site: str) -> bool:
        """Return whether this fault happens now."""
        return self._faults.hit(site)

    def chance(self) -> float:
        """Return a number in [0, 1)."""
        return self._random.random()

    def time(self) -> float:
        """Return the world's own time, whatever this process's clock says."""
        return asyncio.get_running_loop().time()

    async def lag(self, usual: float) -> None:
        """The way through a network."""
        await asyncio.sleep(usual * (0.2 + 1.6 * self.chance()))
        self.check()

    async def strike(self, point: str) -> None:
        """Perhaps the process is killed or frozen exactly here."""
        self.check()
        if self._faults.hit(f"crash at {point}"):
            self._blows.crash(self.machine)
            await asyncio.sleep(0)  # which never returns
        if self._faults.hit(f"freeze at {point}"):
            self._blows.freeze(self.machine)
            await asyncio.sleep(0)

    def check(self) -> None:
        """The world is over: what is left of the process must come to its end."""
        if self.closed:
            raise asyncio.CancelledError
