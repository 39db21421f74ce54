"""The store seam: where the journal, its contents, the outbox and the keys live.

There is one way to write to a run: `append(Entry)`. An entry is atomic; entries of many runs share a transaction (group
commit); `append` returns only when the entry is committed and durable. The store gives each event its `seq`, checks the
writer's fence under the run's row lock, and refuses the whole entry if it does not hold (D3):

* a driver writes with `epoch`: it must be the run's present epoch, else `LeaseLost`;
* a dispatcher writes with a `Move` of its ticket: the row must still be at the claim (or, for `take`, the version) that
  the move names, else `LeaseLost`;
* once a run has ended only `AFTER_THE_END` kinds are taken, else `RunEnded`; a second terminal event is impossible;
* `hold` is refused with `RunOverBudget` if spent + held + asked would pass a cap (D7).

Database faults become `StoreUnavailable`, after which nothing of the entry was written, or, when the connection died
during COMMIT, the store has looked the entry up again before it answers. Every wait inside is bounded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from app.core.journal import Draft, Event


@dataclass(frozen=True, slots=True)
class Ledger:
    """Money in micro-dollars and tokens, as a pair that is always reserved and settled together."""

    usd: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class NewRun:
    """A run's row at admission, in epoch 1; an id that exists already is refused with `Conflict`.

    `salt` goes into every content address of the run and is erased with its content.
    """

    tenant: str
    key: str
    tier: str
    model: str
    """The model id as the caller wrote it."""
    salt: bytes
    driver: str
    lease_until: float
    deadline: float
    cap: Ledger
    code: str
    """Version of the code that admitted it."""


@dataclass(frozen=True, slots=True)
class Outbox:
    """A ticket to be written with the event that caused it; it is rung after the commit.

    It starts at version 0. If the step still has a ticket, that one stays as it is and only reports to the new driver.
    The end of a run deletes its tickets that were never taken; the others stay for the outcome of their call.
    """

    step: int
    tier: str
    driver: str


@dataclass(frozen=True, slots=True)
class Move:
    """What a dispatcher does with its ticket's row, and by what right.

    `take` needs `version` to be the row's and its claim to have lapsed by `at` (or never made); it sets `holder`,
    `until` and a claim number higher than any that was given out in this run before. `hold`, `finish` and `release`
    need `claim` to be the row's. `hold` changes nothing but the version, `finish` deletes the row, `release` makes it
    due again at `until`.
    """

    step: int
    verb: Literal["take", "hold", "finish", "release"]
    version: int = 0
    claim: int = 0
    holder: str = ""
    until: float = 0.0


@dataclass(frozen=True, slots=True)
class Projection:
    """Columns of the run's row that follow from the events; None leaves a column as it is. For lists and filters."""

    state: str | None = None
    topology: str | None = None
    degraded: bool | None = None
    steps: int | None = None
    ended_at: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """One atomic write to one run."""

    run: str
    at: float
    events: tuple[Draft, ...] = ()
    new: NewRun | None = None
    epoch: int | None = None
    move: Move | None = None
    hold: Ledger = Ledger()
    release: Ledger = Ledger()
    """Given back of what was held; `spent` is added for good."""
    spent: Ledger = Ledger()
    contents: tuple[tuple[str, bytes], ...] = ()
    """(ref, body) pairs; writing the same ref twice is harmless."""
    outbox: tuple[Outbox, ...] = ()
    row: Projection = Projection()
    tags: tuple[tuple[str, str], ...] = ()
    """(name, value) pairs for filters, e.g. ("worker", "gpt") or ("label", "phi")."""


@dataclass(frozen=True, slots=True)
class Appended:
    """What an entry became: its numbered events, and the claim number if it took a ticket."""

    events: tuple[Event, ...]
    claim: int = 0


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run as lists show it, read from its row."""

    id: str
    tenant: str
    key: str
    tier: str
    model: str
    state: str
    created_at: float
    deadline: float
    epoch: int
    driver: str
    lease_until: float
    seq: int
    cap: Ledger
    held: Ledger
    spent: Ledger
    topology: str | None
    degraded: bool
    steps: int
    ended_at: float | None
    error: str | None


@dataclass(frozen=True, slots=True)
class Journal:
    """A run's salt and a prefix of its events. `salt` is empty once the run's content was erased."""

    salt: bytes
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Due:
    """An outbox row as a dispatcher or the sweeper sees it. `seq` is the run's last at reading time."""

    run: str
    step: int
    tier: str
    driver: str
    version: int
    claim: int
    until: float
    seq: int


@dataclass(frozen=True, slots=True)
class RunQuery:
    """Filters, all optional, joined by AND; newest first; `before` is the (created_at, id) of the last row seen."""

    tenant: str | None = None
    state: str | None = None
    tier: str | None = None
    key: str | None = None
    since: float | None = None
    until: float | None = None
    min_usd: int | None = None
    degraded: bool | None = None
    tags: tuple[tuple[str, str], ...] = ()
    before: tuple[float, str] | None = None
    limit: int = 20


@dataclass(frozen=True, slots=True)
class KeyRow:
    """An API key: everything but its secret. `digest` is the HMAC-SHA-256 of the secret under the service's pepper."""

    id: str
    tenant: str
    name: str
    digest: bytes
    scopes: frozenset[str]
    created_at: float
    tiers: frozenset[str] = frozenset()
    """Empty means every tier."""
    labels: frozenset[str] = frozenset()
    """Put on every task of this key."""
    max_usd: int | None = None
    """Cap on one run, micro-dollars."""
    rpm: int | None = None
    concurrency: int | None = None
    expires_at: float | None = None
    revoked_at: float | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """A ticket that a dispatcher is working on."""

    run: str
    step: int
    claim: int


class Store(Protocol):
    """See the module docstring for what every implementation promises."""

    async def append(self, entry: Entry) -> Appended:
        """Commit one entry.

        Raises `LeaseLost`, `RunEnded`, `RunOverBudget`, `NotFound`, `Conflict` or `StoreUnavailable`. A body
        that is not JSON is a TypeError, and a release of more than is held a ValueError: faults of the caller.
        """
        ...

    async def journal(self, run: str, upto: int | None = None, after: int = 0) -> Journal:
        """Events with after < seq: all, or at least those up to `upto` (which a cache may serve). `NotFound`."""
        ...

    async def contents(self, run: str, refs: Sequence[str]) -> Mapping[str, bytes]:
        """The bodies that are still stored; a missing ref was erased."""
        ...

    async def erase(self, run: str) -> bool:
        """Forget all content of a run, and its salt; the journal stays. False if there is no such run."""
        ...

    async def run(self, run: str) -> RunRow:
        """One row, or `NotFound`."""
        ...

    async def runs(self, query: RunQuery) -> tuple[RunRow, ...]:
        """At most `query.limit` rows, newest first."""
        ...

    async def renew(self, driver: str, epochs: Mapping[str, int], until: float) -> frozenset[str]:
        """Prolong the leases of a driver's runs; returns those that are still its own and not ended."""
        ...

    async def orphans(self, driver: str, now: float, until: float, limit: int) -> tuple[RunRow, ...]:
        """Take over runs whose lease lapsed, and their tickets: epoch + 1, this driver; the rows as they are then."""
        ...

    async def keep(self, held: Sequence[Held], until: float) -> frozenset[Held]:
        """Prolong ticket claims; returns those that are still ours."""
        ...

    async def due(self, run: str, step: int) -> Due | None:
        """One outbox row as it is now, or None if the step is finished."""
        ...

    async def overdue(self, now: float, limit: int) -> tuple[Due, ...]:
        """Outbox rows that nobody holds and that have been due for long enough to ring again.

        They count as rung from then on: the next call leaves them out until they went unanswered for as long again.
        """
        ...

    async def key(self, public_id: str) -> KeyRow | None:
        """A key by its public id, revoked and expired ones included."""
        ...

    async def keys(self) -> tuple[KeyRow, ...]:
        """Every key, newest first."""
        ...

    async def add_key(self, row: KeyRow) -> bool:
        """Store a new key; False if the id exists already."""
        ...

    async def revoke_key(self, public_id: str, at: float) -> bool:
        """Mark a key as revoked; False if there is none."""
        ...

    async def ready(self) -> None:
        """Return if the database takes a write transaction within two seconds, else raise `StoreUnavailable`."""
        ...

    async def close(self) -> None:
        """Commit what is waiting, then let go of connections and threads."""
        ...
