"""The dependencies of the gateway: one record, made in `process/wiring.py` and passed to every route."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from app.core.pool.catalog import Catalog
from app.core.pool.rates import RateLimits
from app.engine.runs.client import RunClient
from app.network.tracing import Tracing
from app.stepqueue.protocol import StepQueue
from app.store.protocol import Store
from app.telemetry import Telemetry


@dataclass(slots=True)
class PendingBodies:
    """The bodies that are being read or parsed; `bodies.py` counts them."""

    bytes: int = 0


class Bounds(Struct, frozen=True):
    """Bounds on the bodies of requests."""

    body: int = 8 << 20
    """The most bytes of one body."""
    seconds: float = 60.0
    """The time within which a body must arrive."""
    depth: int = 32
    """The most levels of objects and arrays."""
    nodes: int = 50_000
    """The most values and keys together."""
    key: int = 256
    """The most characters of a key."""
    keys: int = 1_000
    """The most keys of one object."""
    all_bodies: int = 64 << 20
    """The most bytes of all bodies that arrive at the same time; one alone may always have `body`."""
    large_numbers: bool = False
    """True if numbers of more than 64 bits are read, as the nearest double."""
    pending: PendingBodies = msgspec.field(default_factory=PendingBodies)


class Rates(Struct, frozen=True):
    """Admission limits: of this process, and of each key, tenant and user over all gateways."""

    running: int = 1_000
    """The most requests that this process serves at one time, over all keys."""
    key: RateLimits = RateLimits()
    """The limits of each key, as far as it has none of its own."""
    tenant: RateLimits = RateLimits()
    """The limits of each tenant, over all of its keys."""
    user: RateLimits = RateLimits()
    """The limits of each end user whom a tenant's requests name."""

    @property
    def limited(self) -> bool:
        """Return True if there are limits for requests whose key has none of its own."""
        return bool(self.key or self.tenant or self.user)


class GatewayContext(Struct, frozen=True):
    """Dependencies of the gateway.

    `now` gives seconds since 1970, `tick` a monotonic time, `name` a fresh id with the given prefix. `peppers` gives
    the secret under which API keys are hashed, then the earlier ones that are still accepted.
    """

    store: Store
    queue: StepQueue
    runs: RunClient
    catalog: Callable[[], Catalog]
    telemetry: Telemetry
    peppers: Callable[[], tuple[bytes, ...]]
    now: Callable[[], float]
    tick: Callable[[], float]
    name: Callable[[str], str]
    tracing: Tracing = msgspec.field(default_factory=Tracing)
    bounds: Bounds = msgspec.field(default_factory=Bounds)
    rates: Rates = Rates()
    key_ttl: float = 4.5
    """Seconds for which a key lookup is remembered. A revocation takes effect within five: the rest is for the next
    lookup, after which a stream that is open is ended."""
    ping: float = 10.0
    """Seconds after which a stream on which nothing was sent gets a keep-alive."""
    origins: frozenset[str] = frozenset()
    """Origins whose pages may read replies; see `cross_origin.py`."""
    remembered: float = 86_400.0
    """Seconds for which an Idempotency-Key is remembered, counted from its run's time limit."""
    conducts: Callable[[], bool | None] = lambda: None
    """True if the models that conduct are healthy; None if there are none."""
    breakers: Callable[[], Mapping[str, str] | None] = lambda: None
    """The state of each worker's breaker, as the engine of this process has measured it; None without an engine."""
    serves: Callable[[str], str] = lambda _tier: ""
    """The subject that serves all runs of a tier but those of a canary; empty for the tier's own definition."""
    stop_requested: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    """Set when the process was told to stop: it is not ready any more, and still serves for a while."""
    omits_search: bool = True
    """False if a web search that Codex offers with access to the web is refused instead of left out."""
    grace: float = 30.0
    """Seconds beyond its time limit after which the gateway no longer waits for a run that has not ended."""

    @property
    def pepper(self) -> bytes:
        """Return the secret under which new API keys are hashed."""
        return self.peppers()[0]
