"""Lists of runs: how many there are, details of a page's runs, and whether any run has changed."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from app.store.protocol.journal import RunQuery


class RunDetails(Struct, frozen=True):
    """Facts about a run that its row does not have."""

    workers: tuple[str, ...] = ()
    """The workers that were sent something for a step, by name."""
    is_preview: bool = False
    """True if the run was only planned."""


class Period(Struct, frozen=True):
    """The runs that figures are about: those of a tenant (None: of any) that began from `since` on and before `until`,
    in `buckets` of equal length."""

    tenant: str | None
    since: float
    until: float
    buckets: int
    most_runs: int
    most_calls: int
    """The newest runs, calls and ratings that are read; of a longer period, the earlier ones are left out."""


class RunGroup(Struct, frozen=True):
    """Runs that are alike."""

    bucket: int
    tier: str
    state: str
    topology: str | None
    degraded: bool
    origin: str
    error: str | None
    runs: int
    micro_usd: int
    tokens: int


class CallGroup(Struct, frozen=True):
    """Calls of one recipient with the same outcome; None while they go on."""

    recipient: str
    kind: str
    outcome: str | None
    calls: int
    input_tokens: int
    output_tokens: int


class EjectedWorker(Struct, frozen=True):
    """A worker that a plan left out because its calls failed."""

    worker: str
    reason: str
    run: str
    at: float


class RunFigures(Struct, frozen=True):
    """Figures of the runs of a period. Times are seconds since 1970."""

    since: float
    """The beginning of what was read: later than that of the period if there are more runs than may be read."""
    groups: tuple[RunGroup, ...]
    seconds: tuple[tuple[int, str, float], ...]
    """Of each run that has succeeded its bucket, its tier, and the seconds from its admission to its end."""
    calls_since: float
    """The beginning of the calls that were read."""
    calls: tuple[CallGroup, ...]
    ratings: tuple[tuple[str, int, int], ...]
    """By worker, the runs with scores in which it was sent something, and those among them of half a point or more."""
    first_seconds: tuple[float, ...]
    """Seconds from the sending of a call to its first word, of the calls of the newest runs."""
    first_runs: int
    """The number of those runs."""
    ejected: tuple[EjectedWorker, ...]
    """The workers that plans of those runs left out because their calls failed, each with the latest such plan."""
    open: tuple[tuple[str, int, float], ...]
    """By state, the open runs of the tenant, whenever they began, and the time at which the oldest of them began."""


class RunLists(Protocol):
    """All verbs raise `StoreUnavailable`."""

    async def count(self, query: RunQuery, most: int) -> int:
        """Return the number of runs that the query selects, whatever its limit; counted up to `most`."""
        ...

    async def details(self, runs: Sequence[str]) -> Mapping[str, RunDetails]:
        """Return the details of each of these runs."""
        ...

    async def mark(self) -> tuple[object, ...]:
        """Return a value that is another one once a run was admitted, an open run has another event, or a run has
        ended."""
        ...

    async def figures(self, period: Period) -> RunFigures:
        """Return the figures of a period's runs."""
        ...
