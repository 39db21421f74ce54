"""The audit: applies every rule to each run. Memory is bounded by the largest page of runs, and by
the ids of all runs where a file is read."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from msgspec import Struct

from app.audit.administration import check_administration
from app.audit.approvals import check_approvals
from app.audit.audited_run import AuditedRun, read_run
from app.audit.budgets import JournalSums, check_budgets
from app.audit.calls import check_calls, count_pending
from app.audit.conductor_text import check_conductor_text
from app.audit.contents import check_contents
from app.audit.disclosures import check_disclosures
from app.audit.holds import HoldCheck, erasure_of, read_holds
from app.audit.lifecycle import check_lifecycle
from app.audit.missing_runs import EarlierExport, check_missing_runs
from app.audit.money import check_money
from app.audit.plans import check_plans
from app.audit.replays import ReusedOutputs, check_replays
from app.audit.report import Report, Violation
from app.audit.requests import Pools, check_requests
from app.audit.run_row import check_run_row
from app.audit.steps import check_steps
from app.audit.tooling import check_tool_uses
from app.audit.versions import VersionHistory, check_versions
from app.core.pool.catalog import ProviderSpec
from app.providers.protocol import Provider
from app.store.archive import AccountSums, Record
from app.store.journal_file import Source

Rule = Callable[[AuditedRun], Iterator[Violation]]
RULES: tuple[Rule, ...] = (
    check_lifecycle,
    check_plans,
    check_approvals,
    check_steps,
    check_tool_uses,
    check_replays,
    check_calls,
    check_money,
    check_budgets,
    check_run_row,
    check_contents,
)

CLOCK_SECONDS = 60.0
"""Seconds by which the auditor's clock may be ahead of the database's."""
WRONG_TYPE_ERRORS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""The exceptions that a rule raises where a field has another type than the rule expects."""


class Auditor(Struct, frozen=True):
    """Applies all rules to runs.

    `now` is the time at which the journal was read, in seconds since 1970; `adapter` returns the object that renders a
    provider's requests. With `allows_pending` a call of an ended run that may still be in flight is only counted
    as pending.
    """

    now: float
    adapter: Callable[[ProviderSpec], Provider]
    allows_pending: bool = True

    async def audit(
        self, source: Source, *, run: str | None = None, since: float | None = None, against: Source | None = None
    ) -> Report:
        """Check every run that is chosen. With `against`, an earlier export, also whether any of it is missing."""
        report = Report()
        journal_sums, before, reused_outputs = JournalSums(), await source.accounts() or {}, ReusedOutputs()
        holds = HoldCheck(read_holds(await source.hold_changes()))
        earlier = await EarlierExport.read(against, holds, run=run, since=since)
        pools, history = await self._read_pools_and_versions(source)
        async for record in source.records(run=run, since=since):
            of_run = Report()
            audited = self.check(record, pools, history, of_run)
            if not of_run.is_clean and self._is_recent(record):
                pools, history = await self._read_pools_and_versions(source)
                of_run = Report()
                audited = self.check(record, pools, history, of_run)
            report.include(of_run)
            if audited is not None:
                _add_up(audited, report, journal_sums, reused_outputs)
            holds.add(erasure_of(record.row))
            for violation in earlier.compare(record):
                report.add(violation)
        for violation in await reused_outputs.compare(source, report, self.now):
            report.add(violation)
        await check_missing_runs(source, earlier, holds, report, run=run, since=since)
        for removal, words in holds.find_broken(read_holds(await source.hold_changes())):
            report.add(Violation(removal.run, 0, "hold-broken", words))
        report.unverifiable += holds.unverifiable
        if run is None and since is None:
            await self._check_all(source, report, journal_sums, before)
        return report

    async def _read_pools_and_versions(self, source: Source) -> tuple[Pools, VersionHistory]:
        pools = Pools(self.adapter, await source.catalogs())
        return pools, VersionHistory.from_changes(await source.changes())

    def _is_recent(self, record: Record) -> bool:
        """Return True for a run that may name a pool or a version which came after these were read."""
        return bool(record.events) and record.events[-1].at > self.now - CLOCK_SECONDS

    async def _check_all(
        self, source: Source, report: Report, journal_sums: JournalSums, before: Mapping[str, AccountSums]
    ) -> None:
        """Check what belongs to no single run."""
        unnamed_texts = await source.count_unnamed_texts()
        if unnamed_texts:
            fault = f"{unnamed_texts:,} texts are stored and belong to no run"
            report.add(Violation("all runs", 0, "text-left", fault))
        administration = await source.administration()
        if administration is None:
            return
        for violation in check_administration(administration, report):
            report.add(violation)
        after = await source.accounts()
        if after is None:
            return
        removed = {event["target"] for event in administration.events if event["action"] == "budget.removed"}
        for violation in journal_sums.compare(before, after, removed=removed, pruned=report.pruned > 0):
            report.add(violation)

    def check(self, record: Record, pools: Pools, history: VersionHistory, report: Report) -> AuditedRun | None:
        """Check one run and add its violations to the report. Return the run, if it can be compared with others."""
        report.runs += 1
        report.events += len(record.events)
        try:
            run = read_run(record, self.now, self.allows_pending)
        except WRONG_TYPE_ERRORS as error:
            report.add(_describe_wrong_type(str(record.row["id"]), "reading its events", error))
            return None
        report.calls += len(run.calls)
        for flaw in run.flaws:
            report.add(flaw)
        if not run.has_admission:
            return None
        try:
            report.pending += count_pending(run)
        except WRONG_TYPE_ERRORS as error:
            report.add(_describe_wrong_type(run.id, "counting what is pending", error))
        for rule in RULES:
            _apply(rule, run, report)
        _apply(check_conductor_text, run, report, report)
        _apply(check_requests, run, report, pools, report)
        _apply(check_versions, run, report, history, report)
        _apply(check_disclosures, run, report, pools, report)
        return run


def _add_up(run: AuditedRun, report: Report, journal_sums: JournalSums, reused_outputs: ReusedOutputs) -> None:
    """Note what a run says of accounts and of other runs."""
    try:
        journal_sums.add(run)
        reused_outputs.add(run)
    except WRONG_TYPE_ERRORS as error:
        report.add(_describe_wrong_type(run.id, "adding up", error))


def _apply(rule: Callable[..., Iterator[Violation]], run: AuditedRun, report: Report, *arguments: Any) -> None:
    """Add what a rule says of a run to the report.

    An event may have been altered so that a field is of a type that no version of Baton writes. That is a violation,
    and the other rules and runs are checked all the same.
    """
    try:
        for violation in rule(run, *arguments):
            report.add(violation)
    except WRONG_TYPE_ERRORS as error:
        report.add(_describe_wrong_type(str(run.record.row["id"]), rule.__name__, error))


def _describe_wrong_type(run: str, rule: str, error: Exception) -> Violation:
    words = f"a field is of a wrong type, so {rule} could not go on ({type(error).__name__})"
    return Violation(run, 0, "body-malformed", words)
