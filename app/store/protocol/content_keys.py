"""The keys under which tenants' contents are encrypted at rest."""

from typing import Protocol


class ContentKeys(Protocol):
    """The keys are made and loaded as contents are written and read. All verbs raise `StoreUnavailable`."""

    async def load_content_keys(self) -> int:
        """Load every content key, and return their number. Raises `ContentKeyUnavailable` with the reason for one that
        cannot be used here."""
        ...

    async def rewrap_content_keys(self) -> tuple[int, int]:
        """Encrypt all content keys under the present master key. Returns their number, and how many were not before."""
        ...

    async def retire_content_keys(self, tenant: str, at: float) -> float:
        """Take a tenant's keys out of use for new contents. Returns the seconds until every process has followed; 0 if
        the tenant has none."""
        ...

    async def destroy_content_keys(self, tenant: str) -> int:
        """Destroy a tenant's keys that are out of use, and with them whatever is encrypted under them, copies of the
        contents included. Returns their number."""
        ...
