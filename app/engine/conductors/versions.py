"""The versions of conductors, and what serves tiers: which one is in force, and how that is changed.

`VersionReader` reads the changes from the database again and again, so that a process follows an operator's change
within `LOOK_SECONDS` seconds. What was read longer than `MOST_AGE_SECONDS` ago is read again before it is used. If the
database cannot be read just then, what was read last stays in force.

`check_change` refuses a change that does not fit what stands, or a version that the conductor's server no longer
serves or that no trusted key has signed; `check_service` does so for what serves a tier. `make_change` stores the
change with its author. They serve commands and the admin API.
"""

import asyncio
import json
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

from msgspec import Struct
from msgspec.structs import replace

from app.core.pool.catalog import Catalog
from app.core.pool.conductor_versions import (
    Change,
    ChangeKind,
    VersionsInForce,
    choose_version,
    refusal,
    refusal_in_place,
    versions_in_force,
)
from app.core.pool.serving import TIER, objection, tier_in
from app.core.transparency.version_signatures import TrustedSigners
from app.engine.periodic import look_repeatedly
from app.errors import ConfigInvalid, StoreUnavailable
from app.store.protocol import Actor, ConductorVersions, Store
from app.telemetry import Telemetry

LOOK_SECONDS = 2.0
"""Time between two looks at the database."""
MOST_AGE_SECONDS = 10.0
"""Time after which the versions are read again before they are used: after an outage, or where no task reads them."""


class VersionReader:
    """The versions in force, for a process that conducts or admits runs. `monotonic` gives the seconds of a clock that
    never goes back."""

    def __init__(
        self,
        store: ConductorVersions,
        telemetry: Telemetry,
        monotonic: Callable[[], float],
        catalog: Callable[[], Catalog],
    ) -> None:
        self._store = store
        self._telemetry = telemetry
        self._monotonic = monotonic
        self._catalog = catalog
        self._missing: Sequence[str] = ()
        self._in_force: Mapping[str, VersionsInForce] = {}
        self._read_at = -math.inf

    async def version(self, conductor: str, run: str) -> str:
        """Return the model that conducts this run in the conductor's name, or the subject that serves it in the place
        of `tier NAME`; empty for what the pool file says."""
        if self._monotonic() - self._read_at > MOST_AGE_SECONDS:
            await self.look()
        return choose_version(self._in_force, conductor, run)

    def live(self, tier: str) -> str:
        """Return the subject that serves a tier's runs, except for those of a canary; empty for its own definition."""
        return self._in_force.get(f"{TIER}{tier}", VersionsInForce()).live

    async def look(self) -> None:
        """Read the versions once."""
        with suppress(StoreUnavailable):
            asked_at = self._monotonic()
            in_force = versions_in_force(await self._store.changes())
            self._read_at = asked_at
            if in_force != self._in_force:
                self._in_force = in_force
                live = {name: version.canary or version.live for name, version in in_force.items()}
                self._telemetry.log(
                    logging.INFO,
                    "The versions of conductors, or what serves tiers, have changed; new runs use these.",
                    versions=live,
                )
        self._log_missing()

    def _log_missing(self) -> None:
        missing = missing_subjects(self._catalog(), self._in_force)
        if missing and missing != self._missing:
            self._telemetry.log(
                logging.ERROR,
                "The pool file lacks what operators have put in the place of tiers; the tiers' own definitions serve.",
                reason="; ".join(missing),
            )
        self._missing = missing

    async def run(self, stopping: asyncio.Event) -> None:
        """Look until `stopping` is set."""
        await look_repeatedly(self.look, stopping, LOOK_SECONDS, self._telemetry, "Reading the versions of conductors")


class RequestedChange(Struct, frozen=True):
    """A change that somebody asks for. `share` is that of a canary; a rollback names no version."""

    conductor: str
    """The conductor's worker, or `tier NAME`."""
    kind: ChangeKind
    version: str = ""
    share: float = 0.0


def conductor_names(catalog: Catalog) -> frozenset[str]:
    """Return the workers that plan for a tier, alone or as one of a selector's choices."""
    return frozenset(tier.conductor.worker for tier in catalog.tiers.values() if tier.conductor.worker is not None)


async def check_change(
    store: Store,
    wanted: RequestedChange,
    served: Callable[[], Collection[str]],
    trusted: TrustedSigners | None = None,
    warn: Callable[[str], object] | None = None,
) -> RequestedChange:
    """Return the change with its version, if it is possible; else raise `ConfigInvalid` with the reason.

    A version that is to conduct must have been signed by one of the `trusted` keys when it was deployed. Where other
    versions are only warned of, the reason is given to `warn`.

    `served` asks the conductor's server for the names of its models, and blocks. It is not asked for a rollback, which
    must be possible while the server is away.
    """
    changes = await store.changes()
    in_force = versions_in_force(changes).get(wanted.conductor, VersionsInForce())
    reason = refusal(in_force, wanted.kind, wanted.version)
    if reason:
        raise ConfigInvalid([reason])
    if wanted.kind in ("canary", "promoted") and trusted is not None:
        note = signature_of(changes, wanted.conductor, wanted.version)
        refuse_or_warn(trusted, trusted.objection(wanted.version, note), warn)
    if wanted.kind in ("canary", "promoted") and wanted.version not in await asyncio.to_thread(served):
        raise ConfigInvalid([f"the server no longer answers to {wanted.version}; deploy it again"])
    return replace(wanted, version=wanted.version or in_force.canary or in_force.live)


async def check_service(store: Store, catalog: Catalog, wanted: RequestedChange) -> RequestedChange:
    """Check a change of what serves a tier of the pool file, as `check_change` does."""
    in_force = versions_in_force(await store.changes()).get(wanted.conductor, VersionsInForce())
    reason = refusal_in_place(in_force, wanted.kind, wanted.version)
    if not reason and wanted.kind in ("canary", "promoted"):
        reason = objection(catalog, tier_in(wanted.conductor), wanted.version)
    if reason:
        raise ConfigInvalid([reason])
    return replace(wanted, version=wanted.version or in_force.canary or in_force.live)


def missing_subjects(catalog: Catalog, in_force: Mapping[str, VersionsInForce]) -> list[str]:
    """Return a sentence for each subject that is to serve a tier of the pool file and is missing from the file."""
    missing = []
    for name, now in sorted(in_force.items()):
        tier = tier_in(name)
        if tier not in catalog.tiers:
            continue
        for subject in (now.live, now.canary):
            if not subject:
                continue
            reason = objection(catalog, tier, subject)
            if reason:
                missing.append(f"{subject} is to serve {tier}, and {reason}")
    return missing


def refuse_or_warn(trusted: TrustedSigners, objection: str, warn: Callable[[str], object] | None = None) -> None:
    """Refuse a version for an objection to its signature (`ConfigInvalid`), or only warn of it, as the keys' setting
    says; an empty objection is none."""
    if objection and trusted.refuses:
        raise ConfigInvalid([objection])
    if objection and warn is not None:
        warn(objection)


def signature_of(changes: Sequence[Change], conductor: str, version: str) -> str:
    """Return the signature with which a version was deployed last; empty if it had none, as in older releases."""
    wanted = (conductor, "loaded", version)
    for change in reversed(changes):
        if (change.conductor, change.kind, change.version) == wanted:
            note = json.loads(change.note or "{}")
            return str(note.get("signature", ""))
    return ""


async def make_change(store: Store, wanted: RequestedChange, *, name: str, by: Actor, note: str = "") -> bool:
    """Store a change with the time of the database's clock: changes are ordered by it, and clocks differ. It comes
    after all others, also where that clock was put back, or another database has taken over whose clock is behind.
    False if there is a change of this name already."""
    at = await store.clock()
    changes = await store.changes()
    if changes:
        at = max(at, math.nextafter(changes[-1].at, math.inf))
    change = Change(name, at, by.id, wanted.conductor, wanted.kind, wanted.version, wanted.share, note)
    return await store.change(change, by=by)
