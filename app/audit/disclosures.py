"""Rules about the ledger of disclosures: each call has its row, which says what the journal says; others have none.

What a call discloses is derived here from the events before its intent, by code that shares nothing with the
executor, and compared with the intent and with the row. An intent of release 0.2 or older does not say what it
discloses, and its row is missing until somebody derives it; such calls are counted.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from app.audit.audited_run import EMBEDS, AuditedRun, Call, Step
from app.audit.labels import Labels, labels_of
from app.audit.report import Report, Violation
from app.audit.requests import Pools
from app.core.run.kinds import Kind

NOT_DERIVED = "not in the ledger of disclosures yet"
ALWAYS_STATED = "planned_by"
"""The one field that every intent has which says what it discloses besides its access list."""


def check_disclosures(run: AuditedRun, pools: Pools, report: Report) -> Iterator[Violation]:
    """Apply all rules of this module."""
    labels = labels_of(run) if _may_have_labels(run) else None
    stored = run.record.disclosures
    rows = {str(row["call"]): row for row in stored or ()}
    for call in run.calls.values():
        expected = _expected_fields(run, call, labels, pools)
        if ALWAYS_STATED in call.intent.body:
            yield from _check_intent(run, call, expected)
        if stored is None:
            continue
        row = rows.pop(call.id, None)
        if row is not None:
            yield from _check_row(run, call, expected, row)
        elif ALWAYS_STATED in call.intent.body:
            yield run.violation(
                "disclosure-missing", call.intent.seq, f"{call.id} has no row in the ledger of disclosures"
            )
        else:
            report.unverifiable[NOT_DERIVED] += 1
    for name in rows:
        yield run.violation(
            "disclosure-surplus", 0, f"the ledger of disclosures has a row for {name}, which nobody intended"
        )


def _may_have_labels(run: AuditedRun) -> bool:
    """Return False if nothing in the run can carry a label."""
    uses = [use for step in run.steps.values() for use in step.tool_uses]
    has_labels = bool(run.admission["labels"]) or any(use.results and use.results.body.get("labels") for use in uses)
    return has_labels or any(event.body.get("labels") for event in run.events_of(Kind.STEP_DONE))  # of outputs kept


def _expected_fields(run: AuditedRun, call: Call, labels: Labels | None, pools: Pools) -> dict[str, Any]:
    """Return the values of the fields by which an intent says what it discloses besides its access list; without a
    region where its pool is not known."""
    body, step = call.intent.body, run.step_of(call)
    listed = _listed_steps(call)
    fields: dict[str, Any] = {
        "planned_by": _planner(run, step),
        "labels": sorted(labels.of_call(call).labels) if labels is not None else [],
        "unseen": [n for n in listed if not _had_output(run, n, call.intent.seq)],
        "results": step is not None and _has_results(step, call.intent.seq),
        "origin": run.admission.get("origin_kind", ""),
    }
    catalog = pools.catalog(body["catalog"])
    worker = catalog.workers.get(body["worker"]) if catalog is not None else None
    if worker is not None:
        fields["region"] = worker.card.region or ""
    return fields


def _listed_steps(call: Call) -> list[int]:
    """Return the steps on a call's access list. An embedding is made of the caller's words alone."""
    if call.intent.body["template"] == EMBEDS:
        return []
    return [entry for entry in call.intent.body["access"] if entry != "user"]


def _planner(run: AuditedRun, step: Step | None) -> str:
    if step is None or not 0 <= step.plan.body["proposal"] < len(run.proposals):
        return "tier"
    return str(run.proposals[step.plan.body["proposal"]].opening.body["conductor"])


def _had_output(run: AuditedRun, n: int, seq: int) -> bool:
    """Return True if a step had an output with words before this event."""
    completion = run.steps[n].completion if n in run.steps else None
    return completion is not None and completion.seq < seq and completion.body["chars"] > 0


def _has_results(step: Step, seq: int) -> bool:
    return any(use.results is not None and use.results.seq < seq for use in step.tool_uses)


def _check_intent(run: AuditedRun, call: Call, expected: Mapping[str, Any]) -> Iterator[Violation]:
    """The intent says what the journal before it makes of the call."""
    for name, value in expected.items():
        stated = call.intent.body.get(name) or type(value)()
        if stated != value:
            yield run.violation(
                "disclosed-wrong", call.intent.seq, f"{call.id} says another {name} than the journal before it"
            )


def _check_row(run: AuditedRun, call: Call, expected: Mapping[str, Any], row: Mapping[str, Any]) -> Iterator[Violation]:
    wrong = [name for name, value in _expected_columns(run, call, expected).items() if row[name] != value]
    if wrong:
        words = f"{', '.join(wrong)} of {call.id} in the ledger of disclosures are not what the journal says"
        yield run.violation("disclosure-altered", call.intent.seq, words)


def _expected_columns(run: AuditedRun, call: Call, expected: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that a row must have."""
    body = call.intent.body
    passed_over = body.get("passed_over")
    visible_steps = [n for n in _listed_steps(call) if n not in expected["unseen"]]
    columns: dict[str, Any] = {
        "at": call.intent.at,
        "step": call.step,
        "kind": _kind(call, str(expected["origin"])),
        "recipient": body["worker"],
        "provider": body["provider"],
        "model": body["model"],
        "tenant": run.record.row["tenant"],
        "key": run.record.row["key"],
        "labels": orjson.dumps(expected["labels"]).decode() if expected["labels"] else None,
        "saw_user": "user" in body["access"],
        "saw_steps": _numbers(visible_steps),
        "saw_results": expected["results"],
        "unseen": _numbers(expected["unseen"]),
        "planned_by": expected["planned_by"],
        "attempt": body.get("attempt", 1),
        "passed_over": orjson.dumps(passed_over).decode() if passed_over else None,
        "bytes": body["bytes"],
        "outcome": None,
        "input_tokens": None,
        "output_tokens": None,
    }
    if call.outcome is not None:
        usage = call.outcome.body["usage"]
        columns["outcome"] = call.outcome.body["outcome"]
        columns["input_tokens"] = usage["input"]
        columns["output_tokens"] = usage["output"]
    if "region" in expected:
        columns["region"] = expected["region"]
    return columns


def _kind(call: Call, origin: str) -> str:
    if origin == "shadow":
        return "shadow"
    if call.step is not None:
        return "worker"
    if call.intent.body["template"] == EMBEDS:
        return "embedder"
    return "conductor"


def _numbers(steps: list[int]) -> str:
    if not steps:
        return ""
    return f",{','.join(str(n) for n in sorted(steps))},"
