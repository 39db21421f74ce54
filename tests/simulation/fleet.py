"""A fleet of engines over one database in virtual time, in which nothing breaks: what an engine and a run ask of the
database as the fleet grows.

The product's own code runs in every simulated process; only the network, the servers and time are simulated. What is
counted are the reads and the writing transactions that reach the database.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace
from sqlalchemy import Connection

from app.core.message.chat import Message, Task, Text
from tests.simulation.bell import Bell
from tests.simulation.callers import visit
from tests.simulation.database import Database, SimRunner, SimStore
from tests.simulation.faults import FaultRates
from tests.simulation.process import Process, Watch
from tests.simulation.receiver import Sender
from tests.simulation.seam import Seam
from tests.simulation.witness import Witness
from tests.simulation.workers import SimProvider
from tests.simulation.world import World

T = TypeVar("T")
NOTHING_BREAKS = FaultRates(only={})
SETTLING_SECONDS = 10.0
"""Time after the start that is not counted: processes look at everything once when they start."""
WINDOW_SECONDS = 20.0
"""Time that is counted, in the idle and in the loaded fleet."""
GATEWAYS = 2
SLOTS = 64
TURNS = 500_000_000
LEASE_SECONDS = 4.0
GRACE_SECONDS = 25.0


class Demand(Struct, frozen=True):
    """The load of a fleet on its database in the window: reads, writing transactions, and ended runs."""

    reads: int
    writes: int
    runs: int


class CountingRunner(SimRunner):
    """Counts what reaches the database."""

    def __init__(self, database: Database, witness: Witness, seam: Seam, counts: Counter[str]) -> None:
        super().__init__(database, witness, seam)
        self.counts = counts

    async def read(self, work: Callable[[Connection], T], *, brief: bool = False, tenant: str | None = None) -> T:
        """One read."""
        self.counts["reads"] += 1
        return await super().read(work, brief=brief, tenant=tenant)

    async def write(
        self, work: Callable[[Connection], T], *, expected_result: object = None, tenant: str | None = None
    ) -> T:
        """One writing transaction."""
        self.counts["writes"] += 1
        return await super().write(work, expected_result=expected_result, tenant=tenant)


class Fleet(World):
    """`engines` engines and two gateways, to which `runs` requests of a tier come evenly within the window."""

    def __init__(self, engines: int, runs: int, tier: str) -> None:
        super().__init__(seed=0, fault_rates=NOTHING_BREAKS, turns=TURNS)
        self.setting.lease = LEASE_SECONDS
        self.counts: Counter[str] = Counter()
        self.demand = Demand(0, 0, 0)
        self._engines, self._runs, self._tier = engines, runs, tier

    def start(self, name: str, gateway: bool, dispatcher: bool, incarnation: int = 0) -> Process:
        """Start a process whose way to the database is counted."""
        machine = self.loop.machine(f"{name}.{incarnation}")
        seam = Seam(machine.name, machine, self.faults, self, self.chance)
        process = Process(
            setting=self.setting,
            seam=seam,
            watch=Watch(self.loop),
            store=SimStore(self._runner(seam), LEASE_SECONDS, self.loop.time, self.witness.giving),
            queue=Bell(self.queue, seam),
            provider=SimProvider(self.workers, seam, self.setting.catalog),
            sender=Sender(self.receiver, seam),
            gateway=gateway,
            dispatcher=dispatcher,
            slots=SLOTS,
            grace=GRACE_SECONDS,
            since=self.loop.time(),
        )
        self.processes.append(process)
        self.loop.spawn(machine, self._life(process))
        return process

    def _runner(self, seam: Seam) -> SimRunner:
        return CountingRunner(self.database, self.witness, seam, self.counts)

    async def _live(self) -> None:
        for number in range(GATEWAYS):
            self.start(f"gateway{number}", gateway=True, dispatcher=False)
        for number in range(self._engines):
            self.start(f"engine{number}", gateway=False, dispatcher=True)
        await asyncio.sleep(SETTLING_SECONDS)
        self.counts.clear()
        for number in range(self._runs):
            await asyncio.sleep(WINDOW_SECONDS / self._runs)
            self._ask(number)
        if not self._runs:
            await asyncio.sleep(WINDOW_SECONDS)
        ((ended,),) = self.database.rows("SELECT count(*) FROM runs WHERE ended_at IS NOT NULL")
        self.demand = Demand(self.counts["reads"], self.counts["writes"], ended)
        await self._rest()
        await self._stop()

    def _ask(self, number: int) -> None:
        """One streamed request of the tier, at one of the gateways."""
        visitor = visit(number, self.setting.catalog, self.faults, self.chance)
        tier = self.setting.catalog.tiers[self._tier]
        message = Message("user", (Text(f"<user:{number}> What is it?"),))
        visitor.order = replace(
            visitor.order,
            task=Task((message,)),
            tier=tier,
            model=tier.name,
            plan=None,
            streams=True,
            preview=False,
            on_disconnect=None,
            wire={},
            once=None,
        )
        visitor.unheard = False
        self.visits.append(visitor)
        self._expect(visitor.order.limits.seconds)
        self.processes[number % GATEWAYS].take(visitor, visitor.order)


def demand(engines: int, runs: int, tier: str = "single") -> Demand:
    """Play a fleet and return what it asked of its database. Raises AssertionError if a promise was broken."""
    fleet = Fleet(engines, runs, tier)
    report = fleet.run()
    if report.violations:
        raise AssertionError(report.violations)
    return fleet.demand
