"""Rules about the versions of a conductor, and about what serves tiers: a version that was asked, or a subject that has
served a run, had been put in force.

A process learns of a change a little later, and a plan that is being made is not interrupted. A version may therefore
be asked if it was in force at any time from `NOTICED` seconds before the plan was opened until the call was intended.
"""

import hashlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator

import msgspec
from msgspec import Struct

from app.audit.audited_run import AuditedRun, Call
from app.audit.report import Report, Violation
from app.core.pool.conductor_versions import Change
from app.core.pool.serving import TIER

NOTICE_SECONDS = 30.0
"""Seconds within which a process must notice a change. It reads the changes every two seconds, and before a call if its
last reading is ten seconds old, so that a short outage of the database is covered."""
CLOCK_SKEW_SECONDS = 5.0
"""Seconds by which the clock of a process may be behind the database's, which dates the changes."""
UNKNOWN = "no changes of versions in the export"


class VersionsInForce(Struct, frozen=True):
    """The versions in force from a time on. The empty version is the model that the pool file names."""

    since: float
    live: str = ""
    earlier: tuple[str, ...] = ()
    """The versions that were live before, the latest one last."""
    canary: str = ""
    share: float = 0.0

    def version(self, run: str) -> str:
        """Return the version that conducts this run."""
        draw = int.from_bytes(hashlib.sha256(f"{self.canary}|{run}".encode()).digest()[:7], "big") / (1 << 56)
        if self.canary and draw < self.share:
            return self.canary
        return self.live

    def after(self, change: Change) -> "VersionsInForce":
        """Return the versions in force after one more change."""
        live, before, canary, share = self.live, self.earlier, self.canary, self.share
        if change.kind == "canary":
            canary, share = change.version, change.share
        elif change.kind == "promoted":
            before = before if live == change.version else (*before, live)
            live, canary = change.version, ""
        elif change.kind == "rolled_back" and canary and change.version in (canary, ""):
            canary = ""
        elif change.kind == "rolled_back" and change.version in (live, ""):
            live, before = before[-1] if before else "", before[:-1]
        elif change.kind == "unloaded":
            before = tuple(version for version in before if version != change.version)
        return VersionsInForce(change.at, live, before, canary, share)


class VersionHistory(Struct, frozen=True):
    """The history of the versions of all conductors. `known` is False for an export without changes."""

    is_known: bool = True
    by_conductor: defaultdict[str, list[VersionsInForce]] = msgspec.field(
        default_factory=lambda: defaultdict(lambda: [VersionsInForce(float("-inf"))])
    )

    @classmethod
    def from_changes(cls, changes: Iterable[Change] | None) -> "VersionHistory":
        """Return the history that these changes, in any order, have made."""
        versions = cls(changes is not None)
        for change in sorted(changes or (), key=lambda row: (row.at, row.id)):
            history = versions.by_conductor[change.conductor]
            history.append(history[-1].after(change))
        return versions

    def versions(self, conductor: str, run: str, since: float, until: float) -> set[str]:
        """Return all versions that were to conduct a run at some time of this span."""
        history = self.by_conductor[conductor]
        first = bisect_right(history, since, key=lambda reign: reign.since) - 1
        return {reign.version(run) for reign in history[first:] if reign.since <= max(until, since)}


def check_versions(run: AuditedRun, history: VersionHistory, report: Report) -> Iterator[Violation]:
    """Apply the rule of this module. Calls that cannot be verified are counted in the report."""
    yield from _check_served_subject(run, history, report)
    for call in run.calls.values():
        version = call.intent.body.get("version", "")
        if call.step is not None and version:
            yield run.violation(
                "version-not-in-force", call.intent.seq, f"{call.id} is no conductor's, and names a version"
            )
        elif call.step is None and not history.is_known:
            report.unverifiable[UNKNOWN] += bool(version)
        elif call.step is None and version not in _allowed_versions(run, call, history):
            model = f"version {str(version)[:80]}" if version else "the pool file's own model"
            yield run.violation("version-not-in-force", call.intent.seq, f"{call.id} asks {model}")


def _check_served_subject(run: AuditedRun, history: VersionHistory, report: Report) -> Iterator[Violation]:
    """A run that repeats another one, or carries out its plan, is served as that one was."""
    tier, _, subject = run.tier_reference
    if not subject or run.admission.get("origin_kind") in ("replay", "plan"):
        return
    if not history.is_known:
        report.unverifiable[UNKNOWN] += 1
        return
    at = run.events[0].at
    if subject not in history.versions(f"{TIER}{tier}", run.id, at - NOTICE_SECONDS, at + CLOCK_SKEW_SECONDS):
        yield run.violation("version-not-in-force", 1, f"{subject[:80]} was not put in the place of {tier}")


def _allowed_versions(run: AuditedRun, call: Call, history: VersionHistory) -> set[str]:
    repeats = run.admission.get("origin_kind") in ("shadow", "replay")
    tried = run.admission["wire"].get("conductor") if repeats else None
    if tried:  # a shadow or a replay is conducted by the version that it tries
        return {tried}
    proposal = run.proposal(call.proposal)
    opening = proposal.opening if proposal is not None else call.intent
    since, until = opening.at - NOTICE_SECONDS, call.intent.at + CLOCK_SKEW_SECONDS
    return history.versions(call.intent.body["worker"], run.id, since, until)
