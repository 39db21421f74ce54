"""The dependencies that every part of the engine works with: one record, made in `wiring.py` and passed to each; and
what several parts need beside it: leadership, the memory of waiting runs, and a watch for standstills of this process.

Runs that wait for their callers are remembered for those who take part in their next turns. A prefix of a journal never
changes, so what is kept can be behind but not wrong.
"""

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from math import inf
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct

from app.conductor.protocol import Policy
from app.core.plan.arms import tier_of
from app.core.pool.catalog import Catalog, Tier
from app.core.pool.snapshot import snapshot
from app.core.run.events import RunAdmitted
from app.engine.worker_health import Health
from app.network.tracing import Tracing
from app.providers.protocol import Provider
from app.stepqueue.protocol import StepQueue
from app.store.protocol import IdempotencyRecord, Store
from app.telemetry import Telemetry


async def _return_no_version(_conductor: str, _run: str) -> str:
    return ""


LONGEST_PAUSE_SECONDS = 2.0
"""Seconds between two looks of an engine that runs, at the most: it looks at every sweep, and may be busy."""


class StandstillWatch:
    """Notices that this process stood still, as when its machine was suspended.

    It has not seen then whether the database was away as well, so that nobody could renew leases and claims.
    """

    def __init__(self, monotonic: Callable[[], float], lease: float) -> None:
        """`lease` is in seconds: leases that are renewed in time outlive half of it."""
        self._monotonic = monotonic
        self._longest_pause = max(lease / 2, LONGEST_PAUSE_SECONDS)
        self._looked_at = inf
        self._ended_at = -inf

    def look(self) -> float:
        """Return the seconds since the latest standstill ended; infinite if there was none."""
        now = self._monotonic()
        if now - self._looked_at > self._longest_pause:
            self._ended_at = now
        self._looked_at = now
        return now - self._ended_at


class EngineContext(Struct, frozen=True):
    """The dependencies of drivers, dispatchers and gateways; made in `wiring.py`, never changed.

    `now` gives seconds since 1970, `monotonic` seconds of a clock that never goes back, `name` a fresh id with
    a prefix, and `random` a number in [0, 1).
    """

    store: Store
    queue: StepQueue
    catalog: Callable[[], Catalog]
    provider: Callable[[str], Provider]
    conductor: Callable[[Tier], Policy]
    health: Health
    telemetry: Telemetry
    now: Callable[[], float]
    monotonic: Callable[[], float]
    name: Callable[[str], str]
    random: Callable[[], float]
    salt: Callable[[], bytes]
    lease: float
    standstills: StandstillWatch
    code: str
    """Version of this code, kept with each run."""
    clock_is_set: Callable[[], bool] = lambda: True
    """True once `now` is the time that all processes agree on. Until then nothing is begun, and no lease or claim of
    others is judged by it."""
    version: Callable[[str, str], Awaitable[str]] = _return_no_version
    """The model that conducts a run in a conductor's name, or the subject that serves it in the place of `tier NAME`;
    empty for what the pool file says."""
    tracing: Tracing = msgspec.field(default_factory=Tracing)
    sharing_key: Callable[[], bytes] = lambda: b""
    """The key of the hashes that say whose texts may be stored together."""
    notifies: bool = False
    """True if the operator's webhook is notified of the ends of background responses."""

    def tier_of(self, admitted: RunAdmitted) -> Tier | None:
        """The tier of a run, with the conductor of its arm if its model is one, and as it is while a subject serves it,
        as the pool file has it now; None if it is gone."""
        return tier_of(self.catalog(), admitted.tier, admitted.model, admitted.served_by)

    def may_judge_leases(self) -> bool:
        """Return False while others may hold leases and claims that they could not renew: for the length of a lease
        after the database came back, or after this process stood still and cannot know whether it was away."""
        seconds = min(self.store.seconds_since_recovery, self.standstills.look())
        return seconds >= self.lease

    async def pin(self, catalog: Catalog) -> None:
        """Store a pool before anything that names its digest is stored."""
        await self.store.keep_catalog(catalog.digest, partial(snapshot, catalog))


class Leadership:
    """The leadership of one engine in one kind of work, which one engine of the service does at a time."""

    def __init__(self, context: EngineContext, work: str, seconds: float) -> None:
        """`seconds` is how long it lasts after each `acquire`. It must be longer than the time between two of them."""
        self._context = context
        self._work = work
        self._seconds = seconds
        self._mine = context.name("turns").encode()

    async def acquire(self, *, prolongs: bool = True) -> bool:
        """Take the leadership, or keep it for so many seconds from now. False while another engine has it.

        Who does not prolong it has it until it ends, and then lets others have it.
        """
        store, now = self._context.store, self._context.now()
        mine = IdempotencyRecord(self._work, self._mine, now + self._seconds)
        if prolongs:
            return await store.acquire_leadership(mine, now)
        return (await store.add_idempotency_record(mine, now)).fingerprint == self._mine


T = TypeVar("T")

DEFAULT_BYTES = 16 * 2**20
EVENT_BYTES = 250
"""The size that an event leaves in a run's state, roughly, in bytes."""


class WaitingRuns(Generic[T]):
    """A bounded memory by run; the one that waits longest goes first."""

    def __init__(self, size: int = DEFAULT_BYTES) -> None:
        """`size` is what all of it may take, in bytes."""
        self._byte_bound = size
        self._bytes = 0
        self._runs: OrderedDict[str, tuple[T, int]] = OrderedDict()

    def keep(self, run: str, known: T, events: int) -> None:
        """Take note of a run that waits, after so many events."""
        self.take(run)
        size = EVENT_BYTES * events
        self._runs[run] = known, size
        self._bytes += size
        while self._bytes > self._byte_bound:
            self.take(next(iter(self._runs)))

    def take(self, run: str) -> T | None:
        """Return what is kept of a run, if anything, and forget it."""
        known, size = self._runs.pop(run, (None, 0))
        self._bytes -= size
        return known
