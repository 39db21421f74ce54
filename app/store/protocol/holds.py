"""Legal holds: while one is in force, nobody erases or deletes what is stored of the runs that it covers."""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from msgspec import Struct

from app.store.protocol.admin_events import PROCESS, Actor

HoldScope = Literal["run", "user", "tenant", "key"]


class Hold(Struct, frozen=True):
    """One legal hold. It covers runs of before and of after its beginning. Times are seconds since 1970."""

    id: str
    scope: HoldScope
    name: str
    """The run's id, the user as requests name it, the tenant's name, or the public id of the key."""
    tenant: str
    """The tenant whose runs it covers; empty for a user's runs in every tenant."""
    reason: str
    placed_at: float
    placed_by: str
    released_at: float | None = None
    """None while it is in force."""
    released_by: str | None = None


class HoldQuery(Struct, frozen=True):
    """The holds of a list."""

    tenant: str | None = None
    """None: those of every tenant."""
    id: str | None = None
    """The one hold that is meant; None: all."""
    in_force: bool | None = None
    """True: those that were not released; false: the others."""
    after: str | None = None
    """The id of the last hold of the page before."""
    limit: int | None = None


EVERY_HOLD = HoldQuery()


class Holds(Protocol):
    """All verbs raise `StoreUnavailable`."""

    async def place_hold(self, hold: Hold, *, by: Actor = PROCESS) -> Hold:
        """Put a hold in force, in the name of `by`; as it is stored then. One of its id that is in force stays as it
        is. Raises `NotFound` if nothing has its name, and `Conflict` if a hold of its id was released.

        The tenant of a run's or a key's hold is found here. An erasure that is under way is waited for, and none that
        begins later reaches what the hold covers.
        """
        ...

    async def release_hold(self, id_: str, at: float, *, by: Actor = PROCESS) -> Hold:
        """End a hold, and keep its row. One that was released already stays as it is. Raises `NotFound`."""
        ...

    async def holds(self, query: HoldQuery = EVERY_HOLD) -> tuple[Hold, ...]:
        """Return the holds of a query, the newest first. Raises `NotFound` if its tenant has no hold `after`."""
        ...

    async def find_holds_by_run(self, runs: Sequence[str]) -> Mapping[str, str]:
        """Return the runs among these that a hold covers, each with the id of one that does."""
        ...

    async def count_released_holds(self) -> int:
        """Return the number of holds that were ever released: it grows when content may be erased that could not be
        before."""
        ...
