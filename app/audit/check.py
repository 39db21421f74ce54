"""The audit: applies every rule to the account of each run. Memory is bounded by the largest page of runs."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from app.audit.account import Account, account
from app.audit.administration import administration
from app.audit.approvals import approvals
from app.audit.budgets import Books, budgets
from app.audit.calls import calls, pending
from app.audit.conductor_text import conductor_text
from app.audit.contents import contents
from app.audit.disclosures import disclosures
from app.audit.lifecycle import lifecycle
from app.audit.missing_runs import Earlier, missing_runs
from app.audit.money import money
from app.audit.plans import plans
from app.audit.replays import Claims, replays
from app.audit.report import Report, Violation
from app.audit.requests import Pools, requests
from app.audit.run_row import run_row
from app.audit.steps import steps
from app.audit.tooling import tooling
from app.audit.versions import Reigns, versions
from app.core.pool.catalog import ProviderSpec
from app.providers.protocol import Provider
from app.store.archive import AccountSums, Record
from app.store.journal_file import Source

Rule = Callable[[Account], Iterator[Violation]]
RULES: tuple[Rule, ...] = (
    lifecycle,
    plans,
    approvals,
    steps,
    tooling,
    replays,
    calls,
    money,
    budgets,
    run_row,
    contents,
)


@dataclass(frozen=True, slots=True)
class Auditor:
    """Applies all rules to runs.

    `now` is the time at which the journal was read, in seconds since 1970; `adapter` returns the object that renders a
    provider's requests. With `patient` a call of an ended run that may still be in flight is only counted as pending.
    """

    now: float
    adapter: Callable[[ProviderSpec], Provider]
    patient: bool = True

    async def audit(
        self, source: Source, *, run: str | None = None, since: float | None = None, against: Source | None = None
    ) -> Report:
        """Check every run that is chosen. With `against`, an earlier export, also whether any of it is missing."""
        report = Report()
        books, before, claims = Books(), await source.accounts() or {}, Claims()
        earlier = await Earlier.of(against, run=run, since=since)
        pools, reigns = Pools(self.adapter, await source.catalogs()), Reigns.by(await source.changes())
        async for record in source.records(run=run, since=since):
            self.check(record, pools, reigns, report, books, claims)
            for violation in earlier.compare(record):
                report.add(violation)
        for violation in await claims.compare(source, report, self.now):
            report.add(violation)
        await missing_runs(source, earlier, report, run=run, since=since)
        if run is None and since is None:
            await self._check_all(source, report, books, before)
        return report

    async def _check_all(self, source: Source, report: Report, books: Books, before: Mapping[str, AccountSums]) -> None:
        """Check what belongs to no single run."""
        if left := await source.unnamed_texts():
            report.add(Violation("all runs", 0, "text-left", f"{left:,} texts are stored and belong to no run"))
        found = await source.administration()
        for violation in administration(found, report) if found is not None else ():
            report.add(violation)
        after = await source.accounts()
        if found is None or after is None:
            return
        removed = {event["target"] for event in found.events if event["action"] == "budget.removed"}
        for violation in books.compare(before, after, removed=removed, pruned=report.pruned > 0):
            report.add(violation)

    def check(
        self,
        record: Record,
        pools: Pools,
        reigns: Reigns,
        report: Report,
        books: Books | None = None,
        claims: Claims | None = None,
    ) -> None:
        """Check one run and add its violations to the report. What it says of other runs is added to `claims`."""
        run = account(record, self.now, self.patient)
        report.runs += 1
        report.events += len(record.events)
        report.calls += len(run.calls)
        for flaw in run.flaws:
            report.add(flaw)
        if not run.begun:
            return
        report.pending += pending(run)
        if books is not None:
            books.add(run)
        if claims is not None:
            claims.add(run)
        for rule in RULES:
            for violation in rule(run):
                report.add(violation)
        for violation in (*conductor_text(run, report), *requests(run, pools, report), *versions(run, reigns, report)):
            report.add(violation)
        for violation in disclosures(run, pools, report):
            report.add(violation)
