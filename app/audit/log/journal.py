"""Checks a file of journals against the entries of a log: every event of a run is as it was sealed.

The salts of the commitments to rows are in the database alone, so of a file the events are checked, which have no salt.
"""

import base64
from collections.abc import Sequence

from app.audit.log.entries import RUN, LogEntry, read_entry
from app.audit.log.findings import Finding, Verification
from app.audit.log.tree import GrowingTree, LogFormatError, leaf_hash
from app.audit.log.verify import StoredEntry
from app.store.archive import Record
from app.store.journal_file import Source


async def check_journal(source: Source, entries: Sequence[StoredEntry], report: Verification) -> None:
    """Check every run of a file, whose log has these entries."""
    sealed_entries: dict[str, list[LogEntry]] = {}
    for stored in entries:
        try:
            entry = read_entry(stored.place, stored.entry, stored.salt)
        except LogFormatError:
            continue
        if entry.kind == RUN:
            sealed_entries.setdefault(entry.id, []).append(entry)
    async for record in source.records():
        report.runs += 1
        report.events += len(record.events)
        _check_run(record, sealed_entries.pop(str(record.row["id"]), []), report)
    async for pruned_run in source.pruned_runs():
        report.pruned += 1
        last = sealed_entries.pop(pruned_run.id, None)
        if last and (last[-1].events, last[-1].root) != (pruned_run.events, base64.b64encode(pruned_run.root).decode()):
            words = "it was pruned with other events than were sealed"
            report.add(Finding("altered", f"run {pruned_run.id}", words, last[-1].place))
    report.notes.append(
        "Of the file, the events of runs were compared. `baton audit check FILE` derives rows and the ledger from "
        "them; keys and ratings are proven by the database alone."
    )
    if sealed_entries:
        report.notes.append(f"{len(sealed_entries):,} runs of the log are not in the file, which may be a part.")


def _check_run(record: Record, entries: Sequence[LogEntry], report: Verification) -> None:
    thing = f"run {record.row['id']}"
    if not entries:
        report.add(Finding("surplus", thing, "the file has the run, and it was never sealed"))
        return
    tree = GrowingTree()
    for entry in entries:
        before = tree.size
        for event in record.events[before : entry.events]:
            line = f"{record.row['id']}\n{event.seq}\n{event.kind}\n{event.at!r}\n".encode()
            tree.add(leaf_hash(line + event.body))
        if tree.size < entry.events:
            report.pending += 1  # the file was written before the log was saved
            return
        if base64.b64encode(tree.root()).decode() != entry.root:
            words = f"one of the events {before + 1} to {entry.events} is not as it was sealed"
            report.add(Finding("altered", thing, words, entry.place))
            return
    report.pending += len(record.events) - tree.size
