"""The log of what operators change, such as keys, tenants, budgets, holds, conductors and retention: who changed what,
when, and from what to what."""

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from msgspec import Struct

Via = Literal["key", "oidc", "command", "process"]


class Actor(Struct, frozen=True):
    """The one who makes a change: an API key's id, a person's subject at the OpenID provider, a user of the operating
    system who runs a command, or the service itself."""

    id: str
    via: Via


PROCESS = Actor("baton", "process")
"""The service itself, for example when it makes the first key or hashes one anew."""


class AdminEvent(Struct, frozen=True):
    """One change. `before` and `after` have the public fields of what was changed, and no secret; None: there was
    nothing before. `seq` counts changes in the order in which they were made; numbers may be missing."""

    seq: int
    at: float
    """Seconds since 1970, by the database's clock."""
    actor: str
    via: Via
    action: str
    """The kind of the target and what was done with it, such as `key.revoked`."""
    target: str
    """The key's id, the tenant's name, or the conductor's worker."""
    tenant: str
    """The tenant whose key or tenant was changed; empty for what all tenants share."""
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None


class AdminEventQuery(Struct, frozen=True):
    """A filter of changes, which are listed with the newest first. None means any value."""

    limit: int = 100
    before: int | None = None
    """Changes with a lower `seq` than this."""
    tenant: str | None = None
    target: str | None = None
    actor: str | None = None
    action: str | None = None
    """Changes of this kind. What is done with single runs (`ABOUT_RUNS`) is listed only where it is asked for."""
    since: float | None = None
    """Changes from this time on, in seconds since 1970."""


CONTENT_READ = "content.read"
"""The action of an entry that is no change: somebody has read texts of callers or workers. `after` says which."""
CONTENT_ERASED = "content.erased"
"""The action of an entry that is written for each run whose content somebody has erased. `after` has the cause, as the
run's row. None is written where the time of the content was over, which nobody asked for."""
RUN_PRUNED = "run.pruned"
"""The action of an entry that is written for each run that somebody has pruned. None is written where its time was
over."""
ABOUT_RUNS = (CONTENT_READ, CONTENT_ERASED, RUN_PRUNED)
RETENTION_SET = "retention.set"
"""The action of an entry that an engine writes when it starts with other retention settings than the latest one had."""


class AdminEvents(Protocol):
    """Changes are written by the verbs that make them, in the same transaction, and never altered or deleted."""

    async def note_read(self, run: str, tenant: str, what: str, *, by: Actor, digest: str = "") -> None:
        """Log that texts of a run (empty: of several) are read; `what` names the part. With `digest`, which stands for
        exactly these texts, nothing is logged if the log has it of this actor already. Raises `StoreUnavailable`."""
        ...

    async def note_retention(self, periods: Mapping[str, str]) -> None:
        """Log by which settings engines erase texts and delete runs from now on, unless the latest entry has the same.
        Raises `StoreUnavailable`."""
        ...

    async def admin_events(self, query: AdminEventQuery) -> tuple[AdminEvent, ...]:
        """Return the changes that a query chooses, the newest first. Raises `StoreUnavailable`, and `RecordDamaged` for
        one that cannot be read."""
        ...
