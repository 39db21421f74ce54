"""The log of changes that operators make to the versions of conductors, and to what serves tiers."""

from typing import Protocol

from app.core.pool.conductor_versions import Change
from app.store.protocol.admin_events import Actor


class ConductorVersions(Protocol):
    """Changes are only ever added. Both verbs raise `StoreUnavailable`."""

    async def change(self, change: Change, *, by: Actor | None = None) -> bool:
        """Store a change, and log it in the same transaction. `by` is its author; None: `change.who`, the
        user of a command. False if its id exists already."""
        ...

    async def changes(self) -> tuple[Change, ...]:
        """Return all changes in the order of (at, id); of more than ten thousand, the latest."""
        ...
