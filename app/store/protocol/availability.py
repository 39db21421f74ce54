"""The availability of the database, its clock, and the end of the store."""

from typing import Protocol


class Availability(Protocol):
    """The availability of the database, as far as this process knows."""

    @property
    def healthy(self) -> bool:
        """Return False from a call that did not reach the database until one that did. No I/O.

        While it is False, new runs and key lookups are refused at once; everything else may be tried.
        """
        ...

    @property
    def seconds_since_recovery(self) -> float:
        """Return the seconds since the database came back; 0 while it is away, infinite if it was never away. No I/O.

        Leases and claims lapse during an outage, so their holders get as long as a lease to renew them before they are
        taken over.
        """
        ...

    @property
    def server_changes(self) -> int:
        """Return the number of times that this process found the database on another server than before, as after a
        failover. No I/O.

        That server may lack the latest commits. All epochs and claims were raised there before anything else was
        written, so that no writer of the time before can go on; whoever keeps states of runs reads them again.
        """
        ...

    async def wait_until_healthy(self, seconds: float) -> bool:
        """Wait for the database, at most `seconds`. False if it is still away. Waiters are served in their order."""
        ...

    async def clock(self) -> float:
        """Return the database's own time, in seconds since 1970. Raises `StoreUnavailable`."""
        ...

    async def schema(self) -> tuple[str | None, str]:
        """Return the revision of the database's schema, None without tables, and the newest that this program knows.
        Raises `StoreUnavailable`."""
        ...

    async def ready(self) -> None:
        """Return if the database takes a write transaction within two seconds, else raise `StoreUnavailable`."""
        ...

    async def close(self) -> None:
        """Commit what is waiting, then release connections and threads."""
        ...
