"""Checks what is stored against the entries of the log: runs with their events, tags and texts, and all other rows."""

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import orjson

from app.audit.administration import check_administration
from app.audit.audited_run import AuditedRun, read_run
from app.audit.budgets import JournalSums, check_windows
from app.audit.contents import content_ref, named_refs
from app.audit.disclosures import check_disclosures
from app.audit.holds import HoldCheck, Moment, erasure_of, pruning_of, read_holds
from app.audit.log.entries import (
    BEFORE,
    DISCLOSURES,
    END,
    FIXED,
    PRIVATE,
    PRUNED,
    ROW,
    RUN,
    LogEntry,
    commits_to,
    has_salt_before,
    read_entry,
)
from app.audit.log.findings import UNSEALED_SECONDS, Finding, Verification
from app.audit.log.tree import GrowingTree, LogFormatError, event_hash, node_hash
from app.audit.log.verify import LOG, LogCheck, StoredEntry
from app.audit.money import check_row_amounts
from app.audit.report import Report, Violation
from app.audit.requests import Pools
from app.audit.run_row import check_columns
from app.core.pool.catalog import ProviderSpec
from app.providers.protocol import Provider
from app.store.archive import Administration, Record, StoredEvent
from app.store.protocol import PrunedRun
from app.store.sealed_rows import KINDS, LogRow, Row, SealedRows, SealedRun

ADMISSION_COLUMNS = ("id", "tenant", "key", "tier", "model", "code", "created_at")
"""Columns of a run that are sealed as they were at its admission."""
MONEY_COLUMNS = ("cap_usd", "cap_tokens", "spent_usd", "spent_tokens")
END_COLUMNS = ("state", "topology", "degraded", "steps", *MONEY_COLUMNS, "ended_at", "error")
"""Columns of a run that are sealed with its end. An approval may lower its caps before."""
ORIGIN_COLUMNS = ("origin_kind", "origin_run")
"""Columns of a run that stand in its first event as well, and are NULL where that has an empty text."""
TIME_COLUMNS = ("at", "placed_at", "pruned_at", "created_at", "made_at")
"""Columns of rows with the time at which they were written, the first of which counts."""
UNSEALED_COLUMNS = {"feedback": ("comment",), "budget": ("slices",)}
"""Columns that are not sealed with their row: a rating's words are erased with its run, and the log of changes says how
many slices a budget has."""
INTENT, OUTCOME = "call.intended", "call.finished"
DEADLINE_KINDS = frozenset(
    {
        "run.admitted",
        "run.awaiting_tool",
        "run.resumed",
        "run.awaiting_approval",
        "run.approved",
        "run.approval_expired",
    }
)
"""Kinds of events that set the deadline of a run, or the end of its wait for others."""
ERASURE_COLUMNS = ("id", "erased_at", "erased_by")
"""Columns of a run that are sealed with the erasure of its content."""
RELEASES_WITHOUT_DATES = ("0.1.", "0.2.")
"""Releases that did not note when they erased the content of a run, and gave previews no tag."""
PREVIEW_TAG = ("plan", "shown")
"""The tag of a preview that is no plan to be edited."""
HELD_COLUMNS = {"held_usd": "usd_held", "held_tokens": "tokens_held"}
"""Columns of a run with what its open calls hold, and the fields of their intents."""
MAX_NAMED_CHANGES = 10
"""Most of what has changed since it was sealed that is named."""
GROWING_COLUMNS: Mapping[str, tuple[str, str]] = {"policy": ("number", "number"), "trial": ("at", "written")}
"""The column that grows with each change of a row, and the field of the entries with its value, by the kind."""
DELETABLE_KIND = "budget"
"""The one kind of rows that the service deletes, apart from those that go with their runs."""
LEDGER_KIND = "ledger"
"""The kind of a waiting change of a run's rows in the ledger of disclosures, made without an event."""
TAGGING_KINDS = {"run.admitted", "run.resumed", "step.tool_results", "plan.step", "run.awaiting_approval"}
"""Kinds of events that give a run its tags."""


@dataclass(slots=True)
class RowCheck:
    """One verification of everything that is stored."""

    report: Verification
    stored: SealedRows
    sealed_at: float
    """When the last entry was sealed, in seconds since 1970."""
    contents: bool = True
    """True if texts are checked as well, and runs that go on in full."""
    is_settled: bool = False
    """True if nothing writes to the database, so that all of it must be sealed."""
    _expected_tag_count: int = 0
    """Tags that the events of runs demand."""
    _expected_tags: list[tuple[str, str, str]] = field(default_factory=list)
    _pools: Pools | None = None
    _now: float = 0.0
    """By the clock of the database: whatever claims to be of later is not taken for new."""
    _waiting: frozenset[tuple[str, str]] = frozenset()
    """Kind and id of what was changed in the last moments, after it was sealed; see `_is_changing`."""
    _changing: list[str] = field(default_factory=list)
    """Names of the rows that were changed after they were sealed, and not sealed again yet: a kind and an id each."""
    _sums: JournalSums = field(default_factory=JournalSums)
    """The money that each account of a budget must have spent, added up from the outcomes of calls."""
    _holds: HoldCheck = field(default_factory=HoldCheck)
    """The comparison of erased contents and pruned runs with the legal holds."""
    _undated_erasures: int = 0
    """Runs whose content was erased by a release that did not note when."""

    def check(self) -> None:
        """Check everything. The log itself is checked elsewhere."""
        if not self.is_settled:
            self._now = self.stored.clock()
            queued = self.stored.read_queued_changes()
            self._waiting = frozenset([(kind, id_) for kind, id_, at in queued if self._is_new(at)])
        administration = self.stored.administration()
        self._holds.holds = read_holds(administration.events, self._sealed_hold_changes(administration))
        for run in self.stored.runs(contents=self.contents):
            self._check_run(run)
        self._flush_tags()
        self._check_surplus_tags()
        for kind in KINDS:
            self._check_table(kind)
        self._check_absent_runs()
        self._check_forgotten_salts()
        for name, pruned in self.stored.orphans():
            rule, fault = "missing", "rows name it, and its own is not stored"
            if pruned:
                rule, fault = "surplus", "it was pruned, and rows of it are stored"
            self._add(rule, f"run {name}", fault, self._place_of(name))
        self._check_shared_texts()
        self._check_administration(administration)
        self._check_holds()
        if self._undated_erasures:
            self.report.notes.append(
                f"{self._undated_erasures:,} runs were erased by release 0.2 or older, without a date."
            )
        if self._changing:
            names = self._changing[:MAX_NAMED_CHANGES]
            if len(self._changing) > MAX_NAMED_CHANGES:
                names.append("...")
            self.report.notes.append(f"Changed since it was sealed, and not sealed again yet: {', '.join(names)}.")

    def _add(self, rule: str, thing: str, words: str, place: int | None = None) -> None:
        self.report.add(Finding(rule, thing, words, place))

    def _is_new(self, at: float) -> bool:
        """Return True for something so new that it need not be sealed yet."""
        earliest, latest = self.sealed_at - UNSEALED_SECONDS, self._now + UNSEALED_SECONDS
        return not self.is_settled and earliest < at < latest

    def _is_changing(self, kind: str, id_: str) -> bool:
        """Return True for what waits to be sealed again, which is counted as pending: its last entry stands for the
        state before.

        Whatever is sealed again is compared with its new entry from then on.
        """
        is_waiting = (kind, id_) in self._waiting
        self.report.pending += is_waiting
        if is_waiting:
            self._changing.append(f"{kind} {id_}".replace("\n", " "))
        return is_waiting

    def _entries(self, rows: Sequence[LogRow]) -> list[LogEntry]:
        """Return the entries of these rows that can be read; the others are findings of the log's own check."""
        entries = []
        for row in rows:
            try:
                entries.append(read_entry(row.place, row.entry, row.salt))
            except LogFormatError:
                continue
        return entries

    # -- runs

    def _check_run(self, run: SealedRun) -> None:
        name = str(run.row["id"])
        self.report.runs += 1
        self.report.events += len(run.events)
        self.report.erased += run.row["salt"] is None
        entries = self._entries(run.entries)
        expected_amounts = self._settle_calls(run)
        if not entries:
            if self._is_new(run.row["created_at"]):
                self.report.pending += 1
            else:
                self._add("surplus", f"run {name}", "the run is stored and was never sealed")
            return
        self._check_events(name, run, entries)
        self._check_row(name, run, entries)
        self._check_erasure(f"run {name}", run, entries[-1])
        if run.row["ended_at"] is not None:
            self._check_amounts(name, run, expected_amounts, entries[-1].place)
        self._expect_tags(name, run)
        is_ledger_proven = self._is_ledger_as_sealed(f"run {name}", run, _of_last_events(entries))
        if self.contents:
            self._check_texts(name, run, entries[-1].place)
            if not is_ledger_proven or run.row["ended_at"] is None:
                self._check_derived_rows(name, run, entries[-1].place)

    def _check_events(self, name: str, run: SealedRun, entries: Sequence[LogEntry]) -> None:
        """The events are those that were sealed, one batch after the other."""
        thing, sealed = f"run {name}", entries[-1].events
        numbers = [event[0] for event in run.events]
        if len(numbers) < sealed or numbers[:sealed] != list(range(1, sealed + 1)):
            self._report_gap(thing, numbers, entries)
        else:
            self._check_roots(thing, run, entries)
        for seq, _, at, _ in run.events[sealed:]:
            if self._is_new(at):
                self.report.pending += 1
            else:
                self._add("surplus", thing, f"event {seq} is stored and was never sealed", entries[-1].place)
        if run.row["seq"] != len(numbers):
            words = f"its row counts {run.row['seq']} events, and {len(numbers)} are stored"
            self._add("missing", thing, words, entries[-1].place)

    def _check_amounts(self, name: str, run: SealedRun, amounts: Mapping[str, int], place: int) -> None:
        """The row of a run that has ended holds what its calls without an outcome hold."""
        for column, amount in amounts.items():
            if run.row[column] != amount:
                self._add("altered", f"run {name}", f"its row has another `{column}` than its calls", place)

    def _report_gap(self, thing: str, numbers: Sequence[int], entries: Sequence[LogEntry]) -> None:
        stored_numbers = set(numbers)
        first = next(seq for seq in range(1, entries[-1].events + 2) if seq not in stored_numbers)
        batch = next((entry for entry in entries if entry.events >= first), entries[-1])
        self._add("missing", thing, f"event {first} was sealed and is not stored", batch.place)

    def _check_roots(self, thing: str, run: SealedRun, entries: Sequence[LogEntry]) -> None:
        tree = GrowingTree()
        for entry in entries:
            before = tree.size
            for seq, kind, at, body in run.events[before : entry.events]:
                tree.add(event_hash(run.row["id"], seq, kind, at, body))
            if base64.b64encode(tree.root()).decode() != entry.root:
                words = f"one of the events {before + 1} to {entry.events} is not as it was sealed"
                self._add("altered", thing, words, entry.place)
                return
        for stored, entry in zip(run.entries, entries, strict=False):
            if stored.place == entry.place and not _is_frontier(stored.frontier, entry):
                self._add("altered", thing, "the state from which sealing goes on is another one", entry.place)

    def _check_row(self, name: str, run: SealedRun, entries: Sequence[LogEntry]) -> None:
        thing, last = f"run {name}", entries[-1]
        admitted = {column: run.row[column] for column in ADMISSION_COLUMNS}
        for entry in entries:
            if entry.salt is None or not commits_to(entry, ROW, admitted, entry.salt):
                self._add(
                    "altered",
                    thing,
                    f"its row ({', '.join(ADMISSION_COLUMNS[1:])}) is not as it was sealed",
                    entry.place,
                )
                break
        self._check_origin(thing, run, last)
        self._check_unsealed_columns(thing, run, last)
        self._check_deadline(thing, run, last)
        for entry in _of_last_events(entries):
            if len(run.events) == entry.events and entry.salt is not None:
                self._check_end(thing, run, entry, entry.salt)
            self._check_private_tags(thing, run, entry)

    def _check_origin(self, thing: str, run: SealedRun, last: LogEntry) -> None:
        """The row names the run from which it follows, and its accounts of budgets, as its first event does, which was
        compared with the log."""
        try:
            admitted = _read_body(run.events[0][3])
            expected = {column: admitted.get(column) or None for column in ORIGIN_COLUMNS}
            expected["budgets"] = orjson.dumps(admitted["budgets"]).decode() if admitted.get("budgets") else None
        except (IndexError, BodyUnreadable):
            return  # it is missing or altered, and a finding already
        for column, value in expected.items():
            if run.row[column] != value:
                self._add("altered", thing, f"its row has another `{column}` than its first event", last.place)

    def _check_unsealed_columns(self, thing: str, run: SealedRun, last: LogEntry) -> None:
        """The columns that are sealed with no entry fit what is stored beside them."""
        row = run.row
        if row["ended_at"] is None and row["error"] is not None:
            self._add("altered", thing, "its row has an `error`, and it has not ended", last.place)
        if row["claims"] < run.last_claim:
            words = f"its row counts {row['claims']} claims, and a ticket has the claim {run.last_claim}"
            self._add("altered", thing, words, last.place)
        threads: list[str | None] = [owner.to_bytes(8, signed=True).hex() + head for owner, head in run.threads]
        if row["thread"] not in (threads or [None]):
            self._add("altered", thing, "its row has another `thread` than its texts", last.place)

    def _check_deadline(self, thing: str, run: SealedRun, last: LogEntry) -> None:
        """The deadline of a run that has ended is that of the latest event that sets one."""
        if run.row["ended_at"] is None:
            return
        try:
            body = next(_read_body(event[3]) for event in reversed(run.events) if event[1] in DEADLINE_KINDS)
            deadline = body["until"] if "until" in body else body["deadline"]
        except (StopIteration, KeyError, BodyUnreadable):
            return  # the event is missing or altered, and a finding already
        if run.row["deadline"] != deadline:
            self._add("altered", thing, "its row has another `deadline` than its events", last.place)

    def _check_erasure(self, thing: str, run: SealedRun, last: LogEntry) -> None:
        """Check that the time and the cause of the content's erasure are those which were sealed."""
        row, entries = run.row, self._entries(run.erasures)
        words = "its row does not say when and by what its content was erased as it was sealed"
        values = {column: row[column] for column in ERASURE_COLUMNS}
        for entry in entries:
            if entry.salt is None or not commits_to(entry, ROW, values, entry.salt):
                self._add("altered", thing, words, entry.place)
        is_dated = row["erased_at"] is not None
        self._holds.add(erasure_of(row, _moment(row["erased_at"], entries)))
        if row["salt"] is not None and (entries or is_dated or row["erased_by"] is not None):
            self._add("altered", thing, "its row says that its content was erased, and has its salt", last.place)
        elif row["salt"] is None and not is_dated and str(row["code"]).startswith(RELEASES_WITHOUT_DATES):
            self._undated_erasures += 1
        elif row["salt"] is None and not is_dated:
            self._add("content", thing, "its content is gone, and its row does not say since when", last.place)
        elif row["salt"] is None and not entries and self._is_new(row["erased_at"]):
            self.report.pending += 1
        elif row["salt"] is None and not entries:
            self._add("surplus", thing, "its content was erased, and the erasure was never sealed", last.place)

    def _settle_calls(self, run: SealedRun) -> Mapping[str, int]:
        """Add the cost of a run's finished calls to the accounts of budgets that they name, and return the amounts that
        the run's row must hold for the calls that go on.

        The result is empty if an event cannot be read, which is a finding elsewhere.
        """
        kinds = [event[1] for event in run.events]
        if run.row["budgets"] is None and kinds.count(INTENT) == kinds.count(OUTCOME):
            return dict.fromkeys(HELD_COLUMNS, 0)
        calls: dict[str, dict[str, Any]] = {}
        try:
            for _, kind, _, raw in run.events:
                if kind == INTENT:
                    body = orjson.loads(raw)
                    calls[body["call"]] = body
                elif kind == OUTCOME:
                    body = orjson.loads(raw)
                    self._sums.settle(calls.pop(body["call"]), body)
            amounts = dict.fromkeys(HELD_COLUMNS, 0)
            for body in calls.values():
                for column, name in HELD_COLUMNS.items():
                    amounts[column] += body[name]
            return amounts
        except (KeyError, TypeError, ValueError):
            return {}

    def _check_end(self, thing: str, run: SealedRun, last: LogEntry, salt: bytes) -> None:
        """Check the end of a run, all of whose events are sealed."""
        ended = {column: run.row[column] for column in END_COLUMNS}
        if (END in last.fields) != (run.row["ended_at"] is not None):
            self._add("altered", thing, "its row does not say whether it has ended as it was sealed", last.place)
        elif END in last.fields and not commits_to(last, END, ended, salt):
            self._add("altered", thing, f"its end ({', '.join(END_COLUMNS)}) is not as it was sealed", last.place)

    def _check_private_tags(self, thing: str, run: SealedRun, last: LogEntry) -> None:
        """The tags with words of the caller's are as they were sealed, or erased with the content."""
        salt = run.row["salt"]
        if salt is None:
            if run.private:
                self._add("surplus", thing, "its content was erased, and tags of the caller are left", last.place)
        elif PRIVATE in last.fields:
            if not commits_to(last, PRIVATE, run.private, salt):
                self._add("altered", thing, "its tags `user` and `metadata` are not as they were sealed", last.place)
        elif run.private:
            self._add("surplus", thing, "it has tags `user` or `metadata` that were not sealed", last.place)

    # -- texts

    def _check_shared_texts(self) -> None:
        """Shared texts belong to a run, follow each other, and have one tenant."""
        if not self.contents:
            return
        if unnamed := self.stored.count_unnamed_texts():
            self._add("content", "texts", f"{unnamed:,} texts are stored that belong to no run")
        if lacking := self.stored.count_missing_texts():
            self._add("content", "texts", f"{lacking:,} texts or contents name a text that is not stored")
        if misplaced := self.stored.count_misplaced_texts():
            self._add("content", "texts", f"{misplaced:,} texts have another tenant than what names them")

    def _check_texts(self, name: str, run: SealedRun, place: int) -> None:
        """Each stored text has the hash that an event names, and each that is named is stored or was erased."""
        thing, salt = f"run {name}", run.row["salt"]
        self.report.contents += len(run.contents)
        bodies = b"".join([event[3] for event in run.events])
        for ref, body in run.contents.items():
            if salt is None or ref.encode() not in bodies:
                self._add("content", thing, f"the text {ref[:12]} is stored and should not be", place)
            elif content_ref(salt, body) != ref:
                self._add("content", thing, f"the text {ref[:12]} does not have its hash", place)
        if salt is None:
            return
        for _, kind, _, raw in run.events:
            for ref in _read_refs(kind, raw):
                if ref not in run.contents:
                    self._add("content", thing, f"the text {ref[:12]} is not stored, and the run was not erased", place)

    def _is_ledger_as_sealed(self, thing: str, run: SealedRun, entries: Sequence[LogEntry]) -> bool:
        """Return True if the run's rows in the ledger of disclosures are as they were sealed with its last event.

        `entries` have all events. The second and later ones were made when the ledger was completed, or was altered and
        sealed again: then the events decide.
        """
        last = entries[-1]
        if len(run.events) != last.events or last.salt is None:
            return False
        if DISCLOSURES not in last.fields:
            return not run.disclosures and len(entries) == 1
        if commits_to(last, DISCLOSURES, run.disclosures, last.salt):
            return len(entries) == 1
        if not self._is_changing(LEDGER_KIND, last.id):
            self._add("altered", thing, "its rows in the ledger of disclosures are not as they were sealed", last.place)
        return False

    def _check_derived_rows(self, name: str, run: SealedRun, place: int) -> None:
        """The ledger of disclosures says what the events say, which were compared with the log before. So does the row
        of a run that goes on, of which only the admission is sealed."""
        thing = f"run {name}"
        events = tuple([StoredEvent(*event) for event in run.events])
        record = Record(row=run.row, events=events, contents={}, tickets=(), disclosures=tuple(run.disclosures))
        try:
            rebuilt = read_run(record, self.sealed_at)
            violations = None
            if rebuilt.has_admission and not rebuilt.flaws:
                violations = list(self._derived_violations(rebuilt))
        except (AttributeError, LookupError, TypeError, ValueError):
            violations = None  # an event is no JSON any more, or lacks a field: it differs from the sealed one
        if violations is None and run.disclosures:
            self._add("surplus", thing, "its rows of the ledger of disclosures do not follow from its events", place)
        for violation in violations or ():
            self._add("altered", thing, violation.what, place)

    def _derived_violations(self, rebuilt: AuditedRun) -> Iterator[Violation]:
        yield from check_disclosures(rebuilt, self._known_pools(), Report())
        if rebuilt.end is None:
            yield from check_columns(rebuilt)
            yield from check_row_amounts(rebuilt)

    def _known_pools(self) -> Pools:
        if self._pools is None:
            self._pools = Pools(_no_adapter, self.stored.catalogs())
        return self._pools

    # -- tags

    def _expect_tags(self, name: str, run: SealedRun) -> None:
        tags: set[tuple[str, str, str]] = set()
        for _, kind, _, body in run.events:
            if kind in TAGGING_KINDS:
                tags |= {(tag, value, name) for tag, value in _tags_of_event(kind, body)}
        if str(run.row["code"]).startswith(RELEASES_WITHOUT_DATES):
            tags.discard((*PREVIEW_TAG, name))
        self._expected_tag_count += len(tags)
        self._expected_tags += sorted(tags)
        if len(self._expected_tags) >= 2_000:
            self._flush_tags()

    def _flush_tags(self) -> None:
        stored = self.stored.tags(self._expected_tags)
        for name, value, run in self._expected_tags:
            if (name, value, run) not in stored:
                self._expected_tag_count -= 1
                self._add("missing", f"run {run}", f"its tag `{name}` is not stored", self._place_of(run))
        self._expected_tags.clear()

    def _place_of(self, run: str) -> int | None:
        entries = self.stored.entries_about(RUN, [run]).get(run, ())
        return entries[0].place if entries else None

    def _check_surplus_tags(self) -> None:
        """Look for tags that no event demands, if there are any more than those that were found."""
        if self.stored.count_tags() <= self._expected_tag_count:
            return
        tags_by_run: dict[str, set[tuple[str, str]]] = {}
        for run in self.stored.runs(contents=False):
            if not run.entries:
                continue
            theirs = tags_by_run.setdefault(str(run.row["id"]), set())
            for _, kind, _, body in run.events:
                if kind in TAGGING_KINDS:
                    theirs |= set(_tags_of_event(kind, body))
        for name, value, of in self.stored.all_tags():
            if of in tags_by_run and (name, value) not in tags_by_run[of]:
                self._add("surplus", f"run {of}", f"a tag `{name}` is stored that no event gave it", self._place_of(of))

    # -- all other rows

    def _check_table(self, kind: str) -> None:
        salts: Mapping[str, bytes | None] = {}
        for id_, row, rows in self.stored.rows(kind):
            self.report.rows += 1
            thing = f"{kind} {id_}".replace("\n", " ")
            entries = self._entries(rows)
            if not entries or entries[-1].is_deletion:
                if kind == PRUNED:
                    self._check_pruned(thing, row, [])
                if not self._is_changing(kind, id_):
                    self._check_unsealed_row(kind, thing, row)
                continue
            if kind == "feedback":
                salts = self.stored.salts([row["run"]])
            self._check_sealed_row(kind, thing, row, entries, salts)
        for missing in self.stored.find_entries_without_row(kind):
            self._check_absent(kind, missing)

    def _check_unsealed_row(self, kind: str, thing: str, row: Row) -> None:
        moment = next((row[name] for name in TIME_COLUMNS if name in row), None)
        if moment is not None and self._is_new(moment):
            self.report.pending += 1
        else:
            self._add("surplus", thing, "it is stored and was never sealed")

    def _check_history(self, kind: str, thing: str, entries: Sequence[LogEntry]) -> None:
        """The entries about a row follow each other as the service would have changed it."""
        if kind != DELETABLE_KIND and any(entry.is_deletion for entry in entries):
            self._add("altered", thing, "it was deleted for a time, which the service never does", entries[0].place)
        for earlier, later in pairwise(entries):
            if BEFORE in later.fields and not has_salt_before(later, earlier.salt):
                self._add("altered", thing, "the salt of an earlier entry about it is another one", earlier.place)
            if kind in GROWING_COLUMNS and not _is_higher(later.fields.get(GROWING_COLUMNS[kind][1]), kind, earlier):
                self._add("altered", thing, f"its {GROWING_COLUMNS[kind][0]} is no higher than before", later.place)

    def _check_sealed_row(
        self, kind: str, thing: str, row: Row, entries: Sequence[LogEntry], salts: Mapping[str, bytes | None]
    ) -> None:
        self._check_history(kind, thing, entries)
        values = {name: value for name, value in row.items() if name not in UNSEALED_COLUMNS.get(kind, ())}
        for entry in entries if kind in FIXED else entries[-1:]:
            if entry.salt is None or not commits_to(entry, ROW, values, entry.salt):
                if kind in FIXED or not self._is_new_state(kind, row, entry) or not self._is_changing(kind, entry.id):
                    self._add("altered", thing, "its row is not as it was sealed", entry.place)
                return
        if kind not in FIXED and len(entries) > 1 and not _is_of_later(row, entries[-2]):
            self._add("altered", thing, "its state has another time than its last change", entries[-1].place)
        if kind == "feedback":
            self._check_comment(thing, row, entries[0], salts.get(row["run"]))
        if kind == PRUNED:
            self._check_pruned(thing, row, entries)

    def _is_new_state(self, kind: str, row: Row, last: LogEntry) -> bool:
        """Return True if the service may have given the row another state since its last entry: then it has a later
        time, and what grows with each change is higher, if such rows have them."""
        is_past = "at" not in row or row["at"] < self._now + UNSEALED_SECONDS
        has_grown = kind not in GROWING_COLUMNS or _is_higher(row[GROWING_COLUMNS[kind][0]], kind, last)
        return is_past and has_grown and _is_of_later(row, last)

    def _check_comment(self, thing: str, row: Row, sealed: LogEntry, salt: bytes | None) -> None:
        """The comment of a rating is as it was sealed, or erased with the content of the run."""
        if salt is None:
            if row["comment"]:
                self._add("surplus", thing, "its run's content was erased, and its comment is stored", sealed.place)
            return
        is_sealed = PRIVATE in sealed.fields
        comment = {"comment": row["comment"]}
        if is_sealed != bool(row["comment"]) or (is_sealed and not commits_to(sealed, PRIVATE, comment, salt)):
            self._add("altered", thing, "its comment is not as it was sealed", sealed.place)

    def _check_pruned(self, thing: str, row: Row, prunings: Sequence[LogEntry]) -> None:
        """The row that is left of a run names the events that were sealed."""
        self.report.pruned += 1
        self._holds.add(pruning_of(PrunedRun(**row), _moment(row["pruned_at"], prunings)))
        entries = self._entries(self.stored.entries_about(RUN, [row["id"]]).get(row["id"], ()))
        if entries:
            last = entries[-1]
            if (last.events, last.root) != (row["events"], base64.b64encode(row["root"]).decode()):
                self._add("altered", thing, "it was pruned with other events than were sealed", last.place)

    def _check_absent(self, kind: str, missing: LogRow) -> None:
        for entry in self._entries([missing]):
            if kind == DELETABLE_KIND and (entry.is_deletion or self._is_changing(kind, entry.id)):
                continue
            if kind == "feedback" and self.stored.find_pruned_runs([entry.run]):
                continue
            thing = f"{kind} {entry.id}".replace("\n", " ")
            self._add("missing", thing, "it was sealed and is not stored", entry.place)

    def _check_forgotten_salts(self) -> None:
        """The entries of pruned runs have lost their salts. Those of runs that 0.2 pruned have them, all of them."""
        count = 0
        for entry in self.stored.find_entries_with_secrets():
            count += 1
            if entry.kind == RUN and None in (entry.salt, entry.frontier):
                self._add(
                    "altered", f"run {entry.subject}", "it was pruned, and an entry has a salt again", entry.place
                )
        if count:
            self.report.notes.append(f"{count:,} entries about pruned runs have salts, as release 0.2 leaves them.")

    def _check_absent_runs(self) -> None:
        absent = list(self.stored.find_entries_without_row(RUN))
        pruned = self.stored.find_pruned_runs([entry.id for entry in absent])
        for entry in absent:
            if entry.id not in pruned:
                self._add(
                    "missing", f"run {entry.id}", "it was sealed; it is not stored, and was not pruned", entry.place
                )

    def _sealed_hold_changes(self, administration: Administration) -> Mapping[int, Moment]:
        """Return when each placement and each release of a hold was made, of those that are sealed."""
        times = {event["seq"]: event["at"] for event in administration.events if event["action"].startswith("hold.")}
        entries = self.stored.entries_about("admin_event", [str(seq) for seq in times])
        moments = {seq: _moment(at, self._entries(entries.get(str(seq), ()))) for seq, at in times.items()}
        return {seq: moment for seq, moment in moments.items() if moment is not None}

    def _check_holds(self) -> None:
        """Nothing was erased or pruned while a hold covered it."""
        for removal, words in self._holds.find_broken(self._holds.holds):
            self._add("hold", f"run {removal.run}", words, removal.latest.place)
        for reason, number in self._holds.unverifiable.items():
            self.report.notes.append(f"{number:,} runs: {reason}.")

    def _check_administration(self, administration: Administration) -> None:
        """Keys, tenants, budgets, holds and conductors are as the log of changes says, whose entries are sealed, and
        the accounts of budgets as the outcomes of calls say."""
        removed = {event["target"] for event in administration.events if event["action"] == "budget.removed"}
        sums = self.stored.accounts()
        for violation in self._sums.compare(sums, sums, removed=removed, pruned=self.report.pruned > 0):
            self._add("altered", violation.run, violation.what)
        try:
            violations = [
                *check_administration(administration, Report()),
                *check_windows(self.stored.windows(), administration),
            ]
        except (ValueError, KeyError, TypeError):
            self._add("altered", "the log of changes", "an entry, or a list of a key, is not JSON any more", 0)
            return
        for violation in violations:
            self._add("altered", violation.run, violation.what, self._place_of_change(violation.seq))

    def _place_of_change(self, seq: int) -> int | None:
        entries = self.stored.entries_about("admin_event", [str(seq)]).get(str(seq), ())
        return entries[0].place if entries else None


def _moment(at: float | None, entries: Sequence[LogEntry]) -> Moment | None:
    """Return when a change was made that has this time and these entries in the log; None if it has none of either."""
    if at is None or not entries:
        return None
    return Moment(at, entries[0].place, entries[0].at)


def _stored_entry(row: LogRow) -> StoredEntry:
    return StoredEntry(row.place, row.entry, row.salt, row.kind, row.id, row.subject, row.events, row.frontier)


def check_database(check: LogCheck, stored: SealedRows, *, contents: bool = True, settled: bool = False) -> None:
    """Check the log of a database, and everything that is stored in it against the log. See `RowCheck`."""
    report = check.report
    for table, key, column, type_name in stored.find_mistyped_values():
        report.add(Finding("type", f"{table} {key}", f"its column `{column}` has a value of the type {type_name}"))
    if not report.is_clean:
        report.notes.append("Nothing else was checked, because values of other types cannot be read.")
        return
    check.tiles, check.stored_tiles = stored.tile, stored.count_tiles()
    state = stored.state()
    checkpoint = state["checkpoint"] if state is not None else None
    check.check(map(_stored_entry, stored.entries()), checkpoint)
    if state is None:
        report.add(Finding("state", LOG, "its state is not stored", 0))
    elif stored.count_states() > 1:
        report.add(Finding("state", LOG, "it has more than one state", 0))
    else:
        check.check_state(state, settled=settled)
        check.check_transactions(state["xid"], stored.latest_transaction(), stored.count_skipped_changes(state["xid"]))
    RowCheck(report, stored, check.last_at, contents=contents, is_settled=settled).check()


def _no_adapter(spec: ProviderSpec) -> Provider:
    """Stands for the adapters of providers, which render requests: none is rendered here."""
    raise ValueError(f"no request to {spec.name} is rendered here")


class BodyUnreadable(ValueError):
    """The body of an event is no JSON object any more, which is a finding elsewhere."""


def _read_body(raw: bytes) -> dict[str, Any]:
    """Return the body of an event. Raises `BodyUnreadable`."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BodyUnreadable from error
    if not isinstance(body, dict):
        raise BodyUnreadable
    return body


def _tags_of_event(kind: str, raw: bytes) -> Iterator[tuple[str, str]]:
    """Yield the tags that an event gives its run."""
    try:
        body = _read_body(raw)
    except BodyUnreadable:
        return
    if kind == "plan.step":
        yield "worker", str(body.get("worker"))
        return
    if kind == "run.awaiting_approval":
        yield "approval", "asked"
        return
    if kind in ("run.admitted", "step.tool_results"):
        yield from _tags_of_labels(body)
    if kind == "run.admitted":
        yield from _tags_of_plan(body)
    if body.get("request_id"):
        yield "request", str(body["request_id"])
    trace = str(body.get("traceparent") or "").split("-")
    if len(trace) > 1:
        yield "trace", trace[1]


def _tags_of_labels(body: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in ("labels", "recorded_labels"):
        labels = body.get(name)
        if isinstance(labels, list):
            for label in labels:
                yield "label", str(label)


def _tags_of_plan(body: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    wire = body.get("wire")
    if isinstance(wire, dict) and wire.get("format") == "plan":
        yield "plan", str(body.get("origin_run") or "first")
    elif body.get("preview"):
        yield PREVIEW_TAG


def _read_refs(kind: str, raw: bytes) -> Iterator[str]:
    """Yield the refs of the contents that an event names."""
    try:
        yield from named_refs(kind, _read_body(raw))
    except BodyUnreadable:
        return


def _is_higher(value: Any, kind: str, before: LogEntry) -> bool:
    """Return True if what grows with each change is higher than in an entry before, as far as entries name it. Of an
    entry that names no number, nothing is."""
    earlier = before.fields.get(GROWING_COLUMNS[kind][1])
    if earlier is None or value is None:
        return True
    return isinstance(value, int | float) and isinstance(earlier, int | float) and value > earlier


def _is_of_later(row: Row, before: LogEntry) -> bool:
    """Return True if the state of a row was written after an entry before was sealed, if such rows say when."""
    return "at" not in row or row["at"] > before.at - UNSEALED_SECONDS


def _of_last_events(entries: Sequence[LogEntry]) -> Sequence[LogEntry]:
    """Return the entries of a run that stand for all of its events that are sealed."""
    return [entry for entry in entries if entry.events == entries[-1].events]


def _is_frontier(stored: bytes | None, last: LogEntry) -> bool:
    """Return True if the subtrees from which sealing goes on have the root of the entry."""
    if stored is None:
        return False
    peaks = [stored[at : at + 32] for at in range(0, len(stored), 32)]
    if not peaks:
        return last.events == 0
    digest = peaks[-1]
    for peak in reversed(peaks[:-1]):
        digest = node_hash(peak, digest)
    return base64.b64encode(digest).decode() == last.root
