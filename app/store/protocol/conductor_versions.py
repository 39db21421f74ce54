"""The log of changes that operators make to the versions of conductors."""

from typing import Protocol

from app.core.pool.conductor_versions import Change


class ConductorVersions(Protocol):
    """Changes are only ever added. Both verbs raise `StoreUnavailable`."""

    async def change(self, made: Change) -> None:
        """Store a change."""
        ...

    async def changes(self) -> tuple[Change, ...]:
        """All changes in the order of (at, id); of more than ten thousand, the latest."""
        ...
