"""Checks a file of journals against the entries of a log: every event of a run is as it was sealed.

The salts of the commitments to rows are in the database alone, so of a file the events are checked, which have no salt.
"""

import base64
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from math import inf

from msgspec import Struct

from app.audit.log.entries import RUN, LogEntry, read_entry
from app.audit.log.findings import UNSEALED_SECONDS, Finding, Verification
from app.audit.log.tree import GrowingTree, LogFormatError, event_hash
from app.audit.log.verify import StoredEntry
from app.store.archive import Record
from app.store.journal_file import Source
from app.store.protocol import PrunedRun


class Moments(Struct, frozen=True):
    """The times by which an alteration is told apart from something too new to be in both copies, in seconds since
    1970. Both are infinite if nothing was written between the copies."""

    exported_at: float
    """The time at which the file was written. All that was sealed before must be in it."""
    sealed_at: float
    """The time at which the last entry of the log was sealed. All that was written before must be sealed."""

    def must_be_in_file(self, entry: LogEntry) -> bool:
        """Return True if the file must have the events of an entry."""
        return entry.at < self.exported_at - UNSEALED_SECONDS

    def must_be_sealed(self, at: float) -> bool:
        """Return True if the log must have what was written at this time. What claims to be later than its file is not
        taken for new."""
        return at < self.sealed_at - UNSEALED_SECONDS or self.is_later_than_file(at)

    def is_later_than_file(self, at: float) -> bool:
        """Return True for what cannot have been written or sealed before the file was."""
        return at > self.exported_at + UNSEALED_SECONDS


async def check_journal(
    source: Source,
    entries: Sequence[StoredEntry],
    report: Verification,
    *,
    exported_at: float,
    whole: bool | None,
    settled: bool = False,
) -> None:
    """Check every run of a file that was written at this time, whose log has these entries.

    `whole` is what the file says of itself: True for all runs, False for some; None if it does not say so. If the
    copies are `settled`, they were made while nothing was written, and what only one of them has is a finding.
    """
    sealed_entries, sealed_at = _read_run_entries(entries)
    moments = Moments(exported_at, sealed_at)
    if settled:
        moments = Moments(inf, inf)
    async for record in source.records():
        report.runs += 1
        report.events += len(record.events)
        _check_run(record, sealed_entries.pop(str(record.row["id"]), []), moments, report)
    async for pruned_run in source.pruned_runs():
        report.pruned += 1
        last = sealed_entries.pop(pruned_run.id, None)
        if last:
            _check_pruned_run(pruned_run, last[-1], moments, report)
    written_at = _time_in_words(exported_at)
    report.notes.append(f"The file says that it was written at {written_at}, so what was sealed before must be in it.")
    report.notes.append(
        "Of the file, the events of runs were compared. `baton audit check FILE` derives rows and the ledger from "
        "them; keys and ratings are proven by the database alone."
    )
    if whole or (whole is None and settled):
        _check_absent_runs(sealed_entries, moments, report)
    elif sealed_entries:
        says = "says that it has not all of them" if whole is False else "does not say whether it has all of them"
        report.notes.append(f"{len(sealed_entries):,} runs of the log are not in the file, which {says}.")


def _read_run_entries(entries: Sequence[StoredEntry]) -> tuple[dict[str, list[LogEntry]], float]:
    """Return the entries about each run, and the time at which the last entry was sealed, in seconds since 1970."""
    run_entries: dict[str, list[LogEntry]] = {}
    sealed_at = 0.0
    for stored in entries:
        try:
            entry = read_entry(stored.place, stored.entry, stored.salt)
        except LogFormatError:
            continue
        sealed_at = entry.at
        if entry.kind == RUN:
            run_entries.setdefault(entry.id, []).append(entry)
    return run_entries, sealed_at


def _time_in_words(at: float) -> str:
    try:
        return datetime.fromtimestamp(at, UTC).isoformat(" ", "seconds")
    except (OverflowError, ValueError, OSError):  # no calendar has it
        return f"{at:g} seconds since 1970"


def _check_run(record: Record, entries: Sequence[LogEntry], moments: Moments, report: Verification) -> None:
    thing = f"run {record.row['id']}"
    if not entries:
        if not record.events or any(moments.must_be_sealed(event.at) for event in record.events):
            report.add(Finding("surplus", thing, "the file has the run, and it was never sealed"))
        else:
            report.pending += 1
        return
    tree = GrowingTree()
    for entry in entries:
        before = tree.size
        for event in record.events[before : entry.events]:
            tree.add(event_hash(record.row["id"], event.seq, event.kind, event.at, event.body))
        if tree.size < entry.events:
            _add_missing_events(thing, tree.size, entry, moments, report)
            return
        if base64.b64encode(tree.root()).decode() != entry.root:
            words = f"one of the events {before + 1} to {entry.events} is not as it was sealed"
            report.add(Finding("altered", thing, words, entry.place))
            return
    last = entries[-1]
    if tree.size and moments.is_later_than_file(min(last.at, record.events[tree.size - 1].at)):
        words = f"event {tree.size} comes after the time at which the file says that it was written"
        report.add(Finding("surplus", thing, words, last.place))
    for event in record.events[tree.size :]:
        if moments.must_be_sealed(event.at):
            words = f"the file has event {event.seq}, and it was never sealed"
            report.add(Finding("surplus", thing, words, entries[-1].place))
        else:
            report.pending += 1


def _check_pruned_run(pruned_run: PrunedRun, last: LogEntry, moments: Moments, report: Verification) -> None:
    """The row that is left of a run names the events that were sealed, or later ones as well if the run went on after
    the last entry of the log."""
    if pruned_run.events > last.events and not moments.must_be_sealed(pruned_run.ended_at):
        report.pending += 1
    elif (pruned_run.events, base64.b64encode(pruned_run.root).decode()) != (last.events, last.root):
        words = "it was pruned with other events than were sealed"
        report.add(Finding("altered", f"run {pruned_run.id}", words, last.place))


def _check_absent_runs(
    sealed_entries: Mapping[str, Sequence[LogEntry]], moments: Moments, report: Verification
) -> None:
    """Report the runs of which the file has neither the events nor what is left after pruning. One is pending, and not
    missing, if the file may have been written before its first entry."""
    for name, entries in sealed_entries.items():
        if moments.must_be_in_file(entries[0]):
            words = "it was sealed; the file neither has it nor says that it was pruned"
            report.add(Finding("missing", f"run {name}", words, entries[0].place))
        else:
            report.pending += 1


def _add_missing_events(thing: str, count: int, entry: LogEntry, moments: Moments, report: Verification) -> None:
    """Report that the file has only `count` events of a run, and the entry seals more. They are pending, and not
    missing, if the file may have been written before the entry."""
    if not moments.must_be_in_file(entry):
        report.pending += 1
        return
    words = f"event {count + 1} was sealed and is not in the file"
    report.add(Finding("missing", thing, words, entry.place))
