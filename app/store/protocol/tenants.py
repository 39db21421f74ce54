"""Tenants. A tenant exists once it was created, or once a key of it was made."""

from typing import Protocol

from app.core.records import record
from app.store.protocol.admin_events import PROCESS, Actor


@record(frozen=True, slots=True)
class TenantRow:
    """A tenant."""

    name: str
    created_at: float | None
    """Seconds since 1970; None for a tenant that keys have and nobody created."""
    disabled_at: float | None = None
    """The time from which none of its keys is accepted."""
    keys: int = 0
    """The number of its keys, revoked ones included."""


class Tenants(Protocol):
    """All verbs raise `StoreUnavailable`."""

    async def tenants(self) -> tuple[TenantRow, ...]:
        """Every tenant, by name."""
        ...

    async def add_tenant(self, name: str, at: float, *, by: Actor = PROCESS) -> bool:
        """Create a tenant. False if it was created already."""
        ...

    async def switch_tenant(self, name: str, at: float, *, enabled: bool, by: Actor = PROCESS) -> bool:
        """Disable a tenant, so that gateways accept none of its keys, or enable it again. False if there is none."""
        ...
