"""Changes of the version that conducts: which are possible, and how one is made. Commands and the admin API use this.

`checked` refuses a change that does not fit what stands, or a version that the conductor's server no longer serves;
`made` stores the change with its author, and engines follow within `versions.EVERY` seconds.
"""

import asyncio
from collections.abc import Callable, Collection

from app.core.pool.catalog import Catalog
from app.core.pool.conductor_versions import Change, ChangeKind, Standing, refusal, standings
from app.core.records import changed, record
from app.errors import ConfigInvalid
from app.store.protocol import Actor, Store


@record(frozen=True, slots=True)
class Wanted:
    """A change that somebody asks for. `share` is that of a canary; a rollback names no version."""

    conductor: str
    kind: ChangeKind
    version: str = ""
    share: float = 0.0


def conducted(catalog: Catalog) -> frozenset[str]:
    """Return the workers that plan for a tier, alone or as one of a selector's choices."""
    return frozenset(tier.conductor.worker for tier in catalog.tiers.values() if tier.conductor.worker is not None)


async def checked(store: Store, wanted: Wanted, served: Callable[[], Collection[str]]) -> Wanted:
    """The change with its version, if it is possible; else raises `ConfigInvalid` with the reason.

    `served` asks the conductor's server for the names of its models, and blocks. It is not asked for a rollback, which
    must be possible while the server is away.
    """
    known = standings(await store.changes()).get(wanted.conductor, Standing())
    reason = refusal(known, wanted.kind, wanted.version)
    if reason:
        raise ConfigInvalid([reason])
    if wanted.kind in ("canary", "promoted") and wanted.version not in await asyncio.to_thread(served):
        raise ConfigInvalid([f"the server no longer answers to {wanted.version}; deploy it again"])
    return changed(wanted, version=wanted.version or known.canary or known.live)


async def made(store: Store, wanted: Wanted, *, name: str, by: Actor, note: str = "") -> None:
    """Store a change with the time of the database's clock: changes are ordered by it, and clocks differ."""
    at = await store.clock()
    change = Change(name, at, by.id, wanted.conductor, wanted.kind, wanted.version, wanted.share, note)
    await store.change(change, by=by)
