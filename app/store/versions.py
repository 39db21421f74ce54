"""What a store promises about conductors' versions, beside all that `protocol.py` has."""

from typing import Protocol

from app.core.pool.conductor_versions import Change


class Versions(Protocol):
    """Changes are only ever added. Both raise `StoreUnavailable`."""

    async def change(self, made: Change) -> None:
        """Store what an operator has done with a version of a conductor."""
        ...

    async def changes(self) -> tuple[Change, ...]:
        """All of that, in the order of (at, id); of tens of thousands, the latest."""
        ...
