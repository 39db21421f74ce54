"""The dependencies of the admin API: one record, made in `process/`."""

from collections.abc import Callable, Sequence

from msgspec import Struct

from app.core.pool.catalog import Catalog, Worker
from app.core.transparency.version_signatures import TrustedSigners
from app.gateway.admin.people import People
from app.gateway.http.callers import Caller
from app.gateway.http.context import GatewayContext
from app.store.protocol import TenantAdministration


class AdminContext(Struct, frozen=True):
    """Dependencies of the admin API."""

    gateway: GatewayContext
    read_pool: Callable[[str], Catalog]
    """Reads the text of a pool file, whose secrets need not be set here. Raises `ConfigInvalid`."""
    versions: Callable[[str], Sequence[str]]
    """The names of the models that a conductor's server serves; it blocks while it asks. Raises `ConfigInvalid` for a
    conductor whose server cannot be asked, or a `WorkerError`."""
    trusted: TrustedSigners = TrustedSigners()
    """The keys of which one must have signed each version of a conductor that is put into force."""
    people: People | None = None
    """How people log in; None: only keys are accepted."""
    state: Callable[[Worker], str] | None = None
    """The state of a worker's breaker, as the engine of this process has measured it; None without an engine."""


def administration(context: AdminContext, caller: Caller) -> TenantAdministration:
    """Return what a caller may read and change: the administration of its tenant, or of every one."""
    return context.gateway.store.administration_of(caller.tenant)
