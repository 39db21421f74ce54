"""Versions of a conductor: the changes made to each, and the version that conducts a run as a result. Pure.

A version is a further model name that the conductor's server serves in addition to the one that the pool file names,
usually an adapter. Changes of what serves a tier are made in the same way: there `tier NAME` stands in the place of the
conductor, and a subject in that of the version (`serving.py`), which is not loaded or unloaded, since it stands in the
pool file. Changes are only ever added; what stands is their fold:

    loaded ──> shadowed (as often as you like) ──> canary (a share of the runs) ──> promoted (all of them)
       └──> unloaded          rolled_back: ends a canary; without one, what was live before is live again

A rollback names what it was to undo. It changes nothing if that is neither the canary nor live any more: two operators,
or an operator and the watch over promotions, undo the same thing once.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from app.core.sampling import draw

ChangeKind = Literal["loaded", "shadowed", "canary", "promoted", "rolled_back", "unloaded"]


class Change(Struct, frozen=True):
    """One decision about a version of a conductor, or about what serves a tier."""

    id: str
    at: float
    """Seconds since 1970."""
    who: str
    conductor: str
    """The conductor's worker, by its name in the pool file; or `tier NAME`."""
    kind: ChangeKind
    version: str
    """The model's name on its server; or a subject."""
    share: float = 0.0
    """The share of the runs that a canary conducts, or serves."""
    note: str = ""
    """Findings: golden prompts, comparisons."""


class VersionsInForce(Struct, frozen=True):
    """The versions that conduct, or what serves a tier, after all changes so far. The empty version is the model that
    the pool file names, or the tier's own definition."""

    loaded: tuple[str, ...] = ()
    live: str = ""
    before: tuple[str, ...] = ()
    """Versions that were live before, the latest last."""
    canary: str = ""
    share: float = 0.0


def versions_in_force(changes: Iterable[Change]) -> dict[str, VersionsInForce]:
    """Return the versions of each conductor that are in force, from changes in the order of (at, id)."""
    versions: dict[str, VersionsInForce] = {}
    for change in changes:
        versions[change.conductor] = _after(versions.get(change.conductor, VersionsInForce()), change)
    return versions


class HistoryEntry(Struct, frozen=True):
    """One change of a conductor, or of what serves a tier, and the versions that are in force from it on."""

    change: Change
    versions: VersionsInForce


def history_of(changes: Iterable[Change], conductor: str) -> tuple[HistoryEntry, ...]:
    """Return every change of a conductor, or of what serves a tier, with the versions in force after it; the earliest
    first."""
    history: list[HistoryEntry] = []
    versions = VersionsInForce()
    for change in changes:
        if change.conductor == conductor:
            versions = _after(versions, change)
            history.append(HistoryEntry(change, versions))
    return tuple(history)


def latest_change_of_live(history: Sequence[HistoryEntry]) -> HistoryEntry | None:
    """Return the change that made the present live version live; None if that has always been the pool file's own."""
    live = ""
    latest: HistoryEntry | None = None
    for entry in history:
        if entry.versions.live != live:
            live, latest = entry.versions.live, entry
    return latest


def live_since(changes: Sequence[Change], conductor: str) -> float:
    """Return when the conductor's live version, or for `tier NAME` what serves the tier, last became another one; 0 if
    it is the pool file's own. What was compared with an earlier one speaks neither for nor against the present one."""
    latest = latest_change_of_live(history_of(changes, conductor))
    if latest is None:
        return 0.0
    return latest.change.at


def _after(now: VersionsInForce, change: Change) -> VersionsInForce:
    version = change.version
    match change.kind:
        case "loaded":
            return replace(now, loaded=(*_without(now.loaded, version), version))
        case "unloaded":
            return replace(now, loaded=_without(now.loaded, version), before=_without(now.before, version))
        case "canary":
            return replace(now, canary=version, share=change.share)
        case "promoted":
            before = now.before if now.live == version else (*now.before, now.live)
            return replace(now, live=version, before=before, canary="", share=0.0)
        case "rolled_back" if now.canary and version in (now.canary, ""):
            return replace(now, canary="", share=0.0)
        case "rolled_back" if version in (now.live, ""):
            before = now.before
            while before and before[-1] == now.live:  # what was live in between is unloaded
                before = before[:-1]
            live = ""
            if before:
                live = before[-1]
            return replace(now, live=live, before=before[:-1])
        case _:
            return now


def _without(versions: tuple[str, ...], version: str) -> tuple[str, ...]:
    return tuple([other for other in versions if other != version])


def refusal(now: VersionsInForce, kind: ChangeKind, version: str) -> str:
    """Return the reason why a change cannot be made; empty if it can."""
    if kind in ("shadowed", "canary", "promoted", "unloaded") and version not in now.loaded:
        return f"{version} is not loaded; `baton conductor deploy` loads and checks it first"
    return refusal_in_place(now, kind, version)


def refusal_in_place(now: VersionsInForce, kind: ChangeKind, version: str) -> str:
    """Return why a change cannot be made to what is in force; empty if it can. Nothing needs to be loaded for it."""
    if kind in ("canary", "promoted") and version == now.live:
        return f"{version} is live already"
    if kind == "unloaded" and version in (now.live, now.canary):
        return f"{version} still conducts; roll it back first"
    if kind == "rolled_back" and not now.canary and not now.live:
        return "there is nothing to roll back: what the pool file says is in force"
    return ""


def choose_version(versions: Mapping[str, VersionsInForce], conductor: str, run: str) -> str:
    """Return the version that conducts a run, or the subject that serves it; empty for what the pool file says.

    Every process finds the same one for all of a run's plans, unless a change comes between.
    """
    now = versions.get(conductor)
    if now is None:
        return ""
    if now.canary and draw(f"{now.canary}|{run}") < now.share:
        return now.canary
    return now.live
