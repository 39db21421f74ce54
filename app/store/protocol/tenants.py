"""Tenants, and what they have spent. A tenant exists once it was created, or once a key of it was made."""

from typing import Literal, Protocol

from msgspec import Struct

from app.store.protocol.admin_events import PROCESS, Actor


class TenantRow(Struct, frozen=True):
    """A tenant."""

    name: str
    created_at: float | None
    """Seconds since 1970; None for a tenant that keys have and nobody created."""
    disabled_at: float | None = None
    """The time from which none of its keys is accepted."""
    keys: int = 0
    """The number of its keys, revoked ones included."""


class SpendQuery(Struct, frozen=True):
    """A report on the runs that were admitted from `since` until just before `until`, in seconds since 1970."""

    since: float
    until: float
    tenant: str | None = None
    """None: every tenant."""
    by: Literal["tenant", "key"] = "tenant"
    limit: int = 100


class SpendRow(Struct, frozen=True):
    """The sums of a tenant's runs, or of a key's. Money is in micro-dollars."""

    tenant: str
    key: str | None
    runs: int
    usd: int
    held: int
    tokens: int


class Tenants(Protocol):
    """All verbs raise `StoreUnavailable`."""

    async def tenants(
        self, name: str | None = None, *, after: str | None = None, limit: int | None = None
    ) -> tuple[TenantRow, ...]:
        """Return every tenant, or the one of this name: in the order of their names, from the one that follows
        `after`."""
        ...

    async def add_tenant(self, name: str, at: float, *, by: Actor = PROCESS) -> bool:
        """Create a tenant. False if it was created already."""
        ...

    async def switch_tenant(self, name: str, at: float, *, enabled: bool, by: Actor = PROCESS) -> bool:
        """Disable a tenant, so that gateways accept none of its keys, or enable it again. False if there is none."""
        ...

    async def spending(self, query: SpendQuery) -> tuple[SpendRow, ...]:
        """Sums over the runs of a window, by tenant or by key, the highest first."""
        ...
