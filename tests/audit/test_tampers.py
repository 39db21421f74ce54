"""Whoever falsifies a journal is caught, by the rule that names what was done; and every rule catches something."""

import functools
import random
import time

import pytest

from app.audit.bodies import FIELDS
from app.audit.check import Auditor
from app.audit.report import RULES, Report
from app.audit.requests import Pools
from app.audit.versions import VersionHistory
from app.core.run.events import Kind
from app.providers.formats import adapter
from tests.audit import (
    tampers_of_approvals,
    tampers_of_choices,
    tampers_of_disclosures,
    tampers_of_nesting,
    tampers_of_runs,
    tampers_of_steps,
    tampers_of_tools,
    tampers_of_versions,
)
from tests.audit.forgery import Case, ForgedRun, Line
from tests.audit.scenes import Journal

LATER = 120.0
"""Seconds after which a forgotten run is overdue."""
CASES = (
    *tampers_of_approvals.CASES,
    *tampers_of_runs.CASES,
    *tampers_of_steps.CASES,
    *tampers_of_tools.CASES,
    *tampers_of_choices.CASES,
    *tampers_of_nesting.CASES,
    *tampers_of_versions.CASES,
    *tampers_of_disclosures.CASES,
)


def audit_run(run: ForgedRun) -> Report:
    """The audit of one falsified run."""
    report = Report()
    pools_of_run, reigns = pools(tuple(sorted(run.catalogs.items()))), VersionHistory.from_changes(run.changes)
    Auditor(time.time() + LATER, adapter).check(run.record(), pools_of_run, reigns, report)
    return report


@functools.cache
def pools(catalogs: tuple[tuple[str, bytes], ...]) -> Pools:
    return Pools(adapter, dict(catalogs))


def test_a_clock_that_is_behind_does_not_make_an_end_early(journal: Journal) -> None:
    run = ForgedRun.of(journal.runs["expired"], journal)
    # Its step fails in the moment in which the run ends, which skips it where that is written first.
    [step_end] = run.all("step.failed") or run.all("step.skipped")
    step_end.kind, step_end.body = "step.failed", {"n": 0, "error": "run_expired"}
    run.events[-1].at = run.row["created_at"]
    assert "end-unfounded" not in audit_run(run).rules


def test_what_comes_after_the_end_degrades_nothing(journal: Journal) -> None:
    run = ForgedRun.of(journal.runs["single"], journal)
    [finished] = run.all("call.finished")
    finished.body["out_of_time"] = True
    assert "degraded-wrong" in audit_run(run).rules
    run.move(finished, run.events[-1])
    run.move(run.events[-1], finished)
    assert "degraded-wrong" not in audit_run(run).rules


def test_a_run_that_is_to_end_needs_no_tickets(journal: Journal) -> None:
    run = ForgedRun.of(journal.runs["single"], journal)
    tampers_of_runs.unclaimed_work(run)
    assert "ticket-missing" in audit_run(run).rules
    run.insert(len(run.events), "run.cancel_asked", {"by": "client"})
    assert "ticket-missing" not in audit_run(run).rules


def test_the_journal_is_clean_before_anybody_falsifies_it(journal: Journal) -> None:
    for name, record in journal.runs.items():
        report = audit_run(ForgedRun.of(record, journal))
        assert (name, [str(violation) for violation in report.violations]) == (name, [])
        assert (report.rebuilt_requests, report.unverifiable.total()) == (report.calls, 0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_falsification_is_caught_by_its_rule(journal: Journal, case: Case) -> None:
    for scene in case.scenes:
        forged = ForgedRun.of(journal.runs[scene], journal)
        case.tamper(forged)
        assert case.rule in audit_run(forged).rules, scene


UNTOLD = {
    ("call.finished", "finish"),
    ("call.intended", "usd_held"),
    ("plan.rejected", "outage"),
    ("plan.rejected", "reasons"),
    ("run.admitted", "streams"),
    ("run.awaiting_tool", "until"),
    ("run.resumed", "deadline"),
    ("run.approval_expired", "deadline"),
    ("run.approved", "reason"),
    ("run.refused", "by"),
    ("run.refused", "reason"),
    ("run.awaiting_approval", "reasons"),
    ("run.awaiting_approval", "seconds"),
    ("run.awaiting_approval", "until"),
    ("run.approved", "deadline"),
    ("run.admitted", "deadline"),
    ("step.failed", "error"),
    ("step.skipped", "reason"),
}
"""What a journal says only once, may say too high, or nearly so: to show a change of these takes a seal, no audit."""


def is_untold(forged: ForgedRun, line: Line, field: str) -> bool:
    """Nothing else in the journal depends on this field of a line: the labels of a run without calls, and which step of
    a rejected plan was to answer, are among these."""
    if (line.kind, field) == ("run.admitted", "labels"):
        return not forged.all("call.intended")
    if (line.kind, field) == ("plan.step", "answers"):
        return bool(forged.all("plan.rejected", proposal=line.body["proposal"]))
    if (line.kind, field) == ("plan.step", "worker"):  # of a step whose output was taken over: test_replays.py
        return any("origin_run" in done.body for done in forged.all("step.done", n=line.body["n"]))
    return (line.kind, field) in UNTOLD


def change_value(value: object) -> object:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, dict):
        return {name: change_value(entry) for name, entry in value.items()} or {"x": "x"}
    return [*value, "x"] if isinstance(value, list) else f"{value or ''}x"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.long
def test_a_changed_field_is_caught_unless_nothing_else_depends_on_it(journal: Journal, seed: int) -> None:
    chance = random.Random(seed)
    silent = set()
    for record in journal.runs.values():
        for place in range(len(record.events)):
            forged = ForgedRun.of(record, journal)
            line = forged.events[place]
            names = sorted(FIELDS[Kind(line.kind)].keys() & line.body.keys())
            if not names or "origin_run" in line.body:  # compared with the other run: test_replays.py
                continue
            field = chance.choice(names)
            line.body[field] = change_value(line.body[field])
            if audit_run(forged).is_clean and not is_untold(forged, line, field):
                silent.add((line.kind, field))
    assert not silent


def test_the_fields_of_every_kind_of_event_are_checked() -> None:
    assert set(FIELDS) == set(Kind)


def test_every_rule_catches_something() -> None:
    # test_shared_texts.py, test_missing_runs.py, test_administration.py, test_holds.py, test_replays.py
    of_all_runs = {"text-left", "run-lost", "pruned-left", "journal-rewritten", "change-unlogged", "change-log-broken"}
    of_all_runs |= {"budget-wrong", "kept-altered", "hold-broken"}
    assert {case.rule for case in CASES} == set(RULES) - of_all_runs
    assert len(CASES) >= 100


def test_a_plan_may_wait_longer_for_its_approval_than_its_turn_may_take(journal: Journal) -> None:
    """The decision moves the deadline by as much."""
    forged = ForgedRun.of(journal.runs["approved"], journal)
    decided = forged.all("run.approved")[0]
    for event in forged.events[forged.events.index(decided) :]:
        event.at += 1_000.0
    assert "call-after-deadline" in audit_run(forged).rules, "the time was not given back"
    decided.body["deadline"] += 1_000.0
    assert "call-after-deadline" not in audit_run(forged).rules
