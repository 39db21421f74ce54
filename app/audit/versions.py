"""Rules about the versions of a conductor, and about what serves tiers: a version that was asked, or a subject that has
served a run, had been put in force.

A process learns of a change a little later, and a plan that is being made is not interrupted. A version may therefore
be asked if it was in force at any time from `NOTICED` seconds before the plan was opened until the call was intended.
"""

import hashlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from app.audit.account import Account, Call
from app.audit.report import Report, Violation
from app.core.pool.conductor_versions import Change
from app.core.pool.serving import TIER

NOTICED = 30.0
"""Seconds within which a process must notice a change. It reads the changes every two seconds, and before a call if its
last reading is ten seconds old, so that a short outage of the database is covered."""
AHEAD = 5.0
"""Seconds by which the clock of a process may be behind the database's, which dates the changes."""
UNKNOWN = "no changes of versions in the export"


@dataclass(frozen=True, slots=True)
class Reign:
    """The versions in force from a time on. The empty version is the model that the pool file names."""

    since: float
    live: str = ""
    before: tuple[str, ...] = ()
    """The versions that were live before, the latest one last."""
    canary: str = ""
    share: float = 0.0

    def version(self, run: str) -> str:
        """Return the version that conducts this run."""
        drawn = int.from_bytes(hashlib.sha256(f"{self.canary}|{run}".encode()).digest()[:7], "big") / (1 << 56)
        if self.canary and drawn < self.share:
            return self.canary
        return self.live

    def followed_by(self, change: Change) -> "Reign":
        """Return the versions in force after one more change."""
        live, before, canary, share = self.live, self.before, self.canary, self.share
        if change.kind == "canary":
            canary, share = change.version, change.share
        elif change.kind == "promoted":
            before = before if live == change.version else (*before, live)
            live, canary = change.version, ""
        elif change.kind == "rolled_back" and canary:
            canary = ""
        elif change.kind == "rolled_back":
            live, before = before[-1] if before else "", before[:-1]
        elif change.kind == "unloaded":
            before = tuple(version for version in before if version != change.version)
        return Reign(change.at, live, before, canary, share)


@dataclass(frozen=True, slots=True)
class Reigns:
    """The history of the versions of all conductors. `known` is False for an export without changes."""

    known: bool = True
    of: defaultdict[str, list[Reign]] = field(default_factory=lambda: defaultdict(lambda: [Reign(float("-inf"))]))

    @classmethod
    def by(cls, changes: Iterable[Change] | None) -> "Reigns":
        """Return the history that these changes, in any order, have made."""
        made = cls(changes is not None)
        for change in sorted(changes or (), key=lambda row: (row.at, row.id)):
            reigns = made.of[change.conductor]
            reigns.append(reigns[-1].followed_by(change))
        return made

    def versions(self, conductor: str, run: str, since: float, until: float) -> set[str]:
        """Return all versions that were to conduct a run at some time of this span."""
        reigns = self.of[conductor]
        first = bisect_right(reigns, since, key=lambda reign: reign.since) - 1
        return {reign.version(run) for reign in reigns[first:] if reign.since <= max(until, since)}


def versions(run: Account, reigns: Reigns, report: Report) -> Iterator[Violation]:
    """Apply the rule of this module. Calls that cannot be verified are counted in the report."""
    yield from _served(run, reigns, report)
    for call in run.calls.values():
        version = call.intent.body.get("version", "")
        if call.step is not None and version:
            yield run.says("version-not-in-force", call.intent.seq, f"{call.id} is no conductor's, and names a version")
        elif call.step is None and not reigns.known:
            report.unverifiable[UNKNOWN] += bool(version)
        elif call.step is None and version not in _allowed(run, call, reigns):
            named = f"version {str(version)[:80]}" if version else "the pool file's own model"
            yield run.says("version-not-in-force", call.intent.seq, f"{call.id} asks {named}")


def _served(run: Account, reigns: Reigns, report: Report) -> Iterator[Violation]:
    """A run that repeats another one, or carries out its plan, is served as that one was."""
    tier, _, subject = run.placed
    if not subject or run.admitted.get("origin_kind") in ("replay", "plan"):
        return
    if not reigns.known:
        report.unverifiable[UNKNOWN] += 1
        return
    at = run.facts[0].at
    if subject not in reigns.versions(f"{TIER}{tier}", run.run, at - NOTICED, at + AHEAD):
        yield run.says("version-not-in-force", 1, f"{subject[:80]} was not put in the place of {tier}")


def _allowed(run: Account, call: Call, reigns: Reigns) -> set[str]:
    repeats = run.admitted.get("origin_kind") in ("shadow", "replay")
    tried = run.admitted["wire"].get("conductor") if repeats else None
    if tried:  # a shadow or a replay is conducted by the version that it tries
        return {tried}
    opened = run.proposals[call.proposal].opened if 0 <= call.proposal < len(run.proposals) else call.intent
    since, until = opened.at - NOTICED, call.intent.at + AHEAD
    return reigns.versions(call.intent.body["worker"], run.run, since, until)
