"""Rules about runs that are no longer stored: each was pruned, which leaves a row with a hash, or it was lost.

An earlier export shows more: every run of it must be stored with the same events, or must have been pruned with them.
The hash is the root of a Merkle tree as RFC 6962 builds it; the auditor computes it anew.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from app.audit.holds import HoldCheck, pruning_of
from app.audit.log.tree import event_hash, root_of
from app.audit.report import Report, Violation
from app.store.archive import Record, StoredEvent
from app.store.journal_file import Source
from app.store.protocol import PrunedRun

MAX_ORPHANS = 10_000
"""Most runs without a row that are reported."""
NOT_IN_THE_PART = "not in the file, which does not say that it has every run"


@dataclass(slots=True)
class EarlierExport:
    """The runs of an earlier export that were not found yet, each with the number of its events and their root."""

    runs: dict[str, tuple[int, bytes]] = field(default_factory=dict)

    @staticmethod
    async def read(source: Source | None, holds: HoldCheck, *, run: str | None, since: float | None) -> "EarlierExport":
        """Read an earlier export; without one there are no runs to look for. Note in `holds` whose they are."""
        export = EarlierExport()
        if source is not None:
            async for record in source.records(run=run, since=since):
                name = str(record.row["id"])
                export.runs[name] = (len(record.events), merkle_root(name, record.events))
                holds.learn_owner(record)
        return export

    def compare(self, record: Record) -> Iterator[Violation]:
        """Compare a run that is still stored: it has the events of the export, and perhaps later ones."""
        name = str(record.row["id"])
        exported = self.runs.pop(name, None)
        if exported is None:
            return
        count, root = exported
        if merkle_root(name, record.events[:count]) != root:
            yield Violation(name, 0, "journal-rewritten", f"its first {count} events are not those of the export")

    def compare_pruned(self, pruned_run: PrunedRun, report: Report) -> None:
        """Compare a run that was pruned. Of one that had later events by then, nothing can be said."""
        exported = self.runs.pop(pruned_run.id, None)
        if exported is None:
            return
        count, root = exported
        if count < pruned_run.events:
            report.unverifiable["pruned later"] += 1
        elif (count, root) != (pruned_run.events, pruned_run.root):
            report.add(
                Violation(pruned_run.id, 0, "journal-rewritten", "it was pruned with other events than the export has")
            )


async def check_missing_runs(
    source: Source, earlier: EarlierExport, holds: HoldCheck, report: Report, *, run: str | None, since: float | None
) -> None:
    """Apply all rules of this module, after all stored runs were compared. Note in `holds` what was pruned."""
    async for pruned_run in source.pruned_runs(run=run, since=since):
        report.pruned += 1
        earlier.compare_pruned(pruned_run, report)
        holds.add(pruning_of(pruned_run))
    if earlier.runs and not source.is_whole:
        report.unverifiable[NOT_IN_THE_PART] += len(earlier.runs)
        return
    for name in sorted(earlier.runs):
        report.add(Violation(name, 0, "run-lost", "the export has the run; it is not stored and was not pruned"))
    if run is not None or since is not None:
        return
    for name, pruned in await source.orphans(MAX_ORPHANS):
        if pruned:
            report.add(Violation(name, 0, "pruned-left", "the run was pruned, and rows of it are stored"))
        elif name not in earlier.runs:
            report.add(Violation(name, 0, "run-lost", "rows name the run; it is not stored and was not pruned"))


def merkle_root(run: str, events: Sequence[StoredEvent]) -> bytes:
    """Return the root over the events of a run."""
    return root_of([event_hash(run, event.seq, event.kind, event.at, event.body) for event in events])
