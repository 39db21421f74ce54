"""The versions of conductors: which one is in force, and how that is changed.

`VersionReader` reads the versions from the database again and again, so that a gateway follows an operator's change
within `EVERY` seconds. Nobody is asked on the strength of what is older than `FRESH` seconds, unless the database
cannot be read just then: what was read last stays in force.

`checked_change` refuses a change that does not fit what stands, or a version that the conductor's server no longer
serves or that no trusted key has signed; `make_change` stores the change with its author. Both serve commands and the
admin API.
"""

import asyncio
import json
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

from app.core.pool.catalog import Catalog
from app.core.pool.conductor_versions import Change, ChangeKind, VersionsInForce, chosen, refusal, versions_in_force
from app.core.records import changed, record
from app.core.transparency.version_signatures import TrustedSigners
from app.errors import ConfigInvalid, StoreUnavailable
from app.store.protocol import Actor, ConductorVersions, Store
from app.telemetry import Telemetry

EVERY = 2.0
"""Seconds between two looks."""
FRESH = 10.0
"""Seconds after which what was read is read again before it is used: after an outage, or where nobody else looks."""


class VersionReader:
    """The conductors' versions, for a process that conducts. `tick` is a clock in seconds that never goes back."""

    def __init__(self, store: ConductorVersions, telemetry: Telemetry, tick: Callable[[], float]) -> None:
        self._store = store
        self._telemetry = telemetry
        self._tick = tick
        self._known: Mapping[str, VersionsInForce] = {}
        self._read_at = -math.inf

    async def version(self, conductor: str, run: str) -> str:
        """The model that conducts this run in the conductor's name; empty for the pool file's own."""
        if self._tick() - self._read_at > FRESH:
            await self.look()
        return chosen(self._known, conductor, run)

    async def look(self) -> None:
        """Read them once."""
        with suppress(StoreUnavailable):
            asked_at = self._tick()
            known = versions_in_force(await self._store.changes())
            self._read_at = asked_at
            if known != self._known:
                self._known = known
                live = {name: one.canary or one.live for name, one in known.items()}
                self._telemetry.log(
                    logging.INFO, "The versions of conductors have changed; new runs use these.", versions=live
                )

    async def run(self, stopping: asyncio.Event) -> None:
        """Look until `stopping` is set."""
        while not stopping.is_set():
            await self.look()
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY):
                    await stopping.wait()


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


async def checked_change(
    store: Store,
    wanted: Wanted,
    served: Callable[[], Collection[str]],
    trusted: TrustedSigners | None = None,
    warn: Callable[[str], object] | None = None,
) -> Wanted:
    """The change with its version, if it is possible; else raises `ConfigInvalid` with the reason.

    A version that is to conduct must have been signed by one of the `trusted` keys when it was deployed. Where other
    versions are only warned of, the reason is given to `warn`.

    `served` asks the conductor's server for the names of its models, and blocks. It is not asked for a rollback, which
    must be possible while the server is away.
    """
    changes = await store.changes()
    known = versions_in_force(changes).get(wanted.conductor, VersionsInForce())
    reason = refusal(known, wanted.kind, wanted.version)
    if reason:
        raise ConfigInvalid([reason])
    if wanted.kind in ("canary", "promoted") and trusted is not None:
        note = signature_of(changes, wanted.conductor, wanted.version)
        accept(trusted, trusted.objection(wanted.version, note), warn)
    if wanted.kind in ("canary", "promoted") and wanted.version not in await asyncio.to_thread(served):
        raise ConfigInvalid([f"the server no longer answers to {wanted.version}; deploy it again"])
    return changed(wanted, version=wanted.version or known.canary or known.live)


def accept(trusted: TrustedSigners, objection: str, warn: Callable[[str], object] | None = None) -> None:
    """Refuse a version for an objection to its signature (`ConfigInvalid`), or only warn of it, as the keys' setting
    says; an empty objection is none."""
    if objection and trusted.refuses:
        raise ConfigInvalid([objection])
    if objection and warn is not None:
        warn(objection)


def signature_of(changes: Sequence[Change], conductor: str, version: str) -> str:
    """The signature with which a version was deployed last; empty if it had none, or was deployed by an older Baton."""
    notes = [one.note for one in changes if (one.conductor, one.kind, one.version) == (conductor, "loaded", version)]
    if not notes:
        return ""
    return str(json.loads(notes[-1] or "{}").get("signature", ""))


async def make_change(store: Store, wanted: Wanted, *, name: str, by: Actor, note: str = "") -> None:
    """Store a change with the time of the database's clock: changes are ordered by it, and clocks differ."""
    at = await store.clock()
    change = Change(name, at, by.id, wanted.conductor, wanted.kind, wanted.version, wanted.share, note)
    await store.change(change, by=by)
