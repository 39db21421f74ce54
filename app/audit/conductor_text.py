"""Rules about the text of a conductor, which the auditor's own parser reads again and compares with the journaled steps
(I-5).

An accepted plan has all steps of the text. The steps of a rejected one that were journaled while it streamed are the
beginning of the text.
"""

import ast
import json
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from app.audit.audited_run import AuditedRun, Call, Proposal, Step
from app.audit.report import Report, Violation
from app.audit.request_rebuilding import RebuildError, text_of

START = re.compile(r'\{\s*"steps"\s*:\s*\[')
THOUGHT = re.compile(r"<think>.*?(</think>|$)", re.DOTALL)
LABELS = (r"model[_ ]ids?\W{0,4}[:=]", r"subtasks?\W{0,4}[:=]", r"access(?:[_ ]list)?\W{0,4}[:=]")
MAX_BRACKETS = 400
MAX_REASON_CHARS = 400
"""Characters of a reason that are kept."""
JSON = json.JSONDecoder(strict=False)


def check_conductor_text(run: AuditedRun, report: Report) -> Iterator[Violation]:
    """Apply all rules of this module. Texts that were erased are counted in the report."""
    for proposal in run.proposals:
        planning_calls = [call for call in run.calls.values() if call.step is None and call.proposal == proposal.number]
        if not planning_calls or not planning_calls[-1].outcomes or not proposal.verdicts:
            continue
        if planning_calls[-1].outcome_kind == "unknown":  # its text was lost with the process that received it
            report.unverifiable["plan: unknown"] += 1
            continue
        try:
            further = proposal.round > 1 and proposal.parent is None
            entries, whole = read_plan(text_of(run, planning_calls[-1].outcomes[0].body["output"]), further)
            yield from _compare_steps(run, proposal, planning_calls[-1], entries, whole)
        except RebuildError as reason:
            report.unverifiable[f"plan: {reason}"] += 1


def _compare_steps(
    run: AuditedRun, proposal: Proposal, call: Call, entries: Sequence[Any], whole: bool
) -> Iterator[Violation]:
    accepted = proposal.acceptance
    if accepted is not None and (not whole or len(entries) != len(proposal.steps)):
        fault = f"{call.id} said {len(entries)} steps, {len(proposal.steps)} are journaled"
        yield run.violation("plan-not-what-was-said", accepted.seq, fault)
    for place, step in enumerate(proposal.steps):
        entry = entries[place] if place < len(entries) else None
        problem = _difference(run, proposal, step, entry)
        if problem:
            yield run.violation(
                "plan-not-what-was-said", step.plan.seq, f"step {step.n}: {problem} is not what was said"
            )


def _difference(run: AuditedRun, proposal: Proposal, step: Step, entry: Any) -> str:
    """Return the first field in which a journaled step differs from the text; empty if none does."""
    order, body = proposal.opening.body["order"], step.plan.body
    if not isinstance(entry, dict):
        return "the step"
    ordinal = entry.get("worker")
    if type(ordinal) is not int or not 0 <= ordinal < len(order) or order[ordinal] != body["worker"]:
        return "the worker"
    if text_of(run, body["subtask"]) != entry.get("subtask"):
        return "the subtask"
    for field, written in (("why", "why"), ("withheld", "why_withheld")):
        if body.get(written) and text_of(run, body[written]) != str(entry.get(field))[:MAX_REASON_CHARS]:
            return "a reason"
    if entry.get("tools", False) is not body.get("tools", False):
        return "its permission to call tools"
    return _access_difference(run, proposal, step, entry.get("access"))


def _access_difference(run: AuditedRun, proposal: Proposal, step: Step, stated: Any) -> str:
    """Return in what a step's access list differs from the text, which counts steps from the beginning of the plan;
    empty if in nothing."""
    if not isinstance(stated, list):
        return "the access list"
    base = proposal.opening.body["base"]
    expected: list[str | int] = []
    parent = run.parent_of(step)
    if parent is not None:
        if step.inherits_view is not ("user" in stated):
            return "the view that it inherits"
        if step.inherits_view:
            expected += parent.plan.body["access"]
    else:
        previous = run.previous_answer(proposal)
        if "user" in stated:
            expected.append("user")
        if previous is not None and "previous" in stated:
            expected.append(previous.n)
    expected += sorted({entry + base for entry in stated if type(entry) is int})
    if step.plan.body["access"] != expected:
        return "the access list"
    return ""


def read_plan(text: str, further: bool = False) -> tuple[list[Any], bool]:
    """Return the entries of the plan in a text, and True if its list was closed. `further` is for rounds after the
    first."""
    at = 0
    while opening := START.search(text, at):
        thought = THOUGHT.search(text, at)
        if thought is None or thought.start() > opening.start():
            return _read_entries(text, opening.end())
        at = thought.end()
    return _read_three_lists(text, further)


def _read_entries(text: str, at: int) -> tuple[list[Any], bool]:
    entries: list[Any] = []
    while at < len(text):
        if text[at] in " \t\r\n,":
            at += 1
        elif text[at] == "]":
            return entries, True
        else:
            try:
                entry, at = JSON.raw_decode(text, at)
            except (ValueError, RecursionError):
                break
            entries.append(entry)
    return entries, False


def _read_three_lists(text: str, further: bool) -> tuple[list[Any], bool]:
    """Read the published format: three lists, of workers, subtasks and access lists."""
    body = text.rpartition("</think>")[2].replace("\u201c", '"').replace("\u201d", '"')
    lists = [_first_list(body, label) for label in LABELS]
    if any(entries is None for entries in lists) or len({len(entries or ()) for entries in lists}) != 1:
        return [], False
    workers, subtasks, access_lists = (entries or [] for entries in lists)
    steps: list[Any] = []
    for worker, subtask, access_list in zip(workers, subtasks, access_lists, strict=True):
        access = _access_entries(access_list, len(steps), further)
        steps.append({"worker": worker, "subtask": subtask, "access": access})
    return steps, True


def _access_entries(access_list: Any, place: int, further: bool) -> Any:
    """Return the access list of the step at this place as Baton's own format writes it."""
    if access_list == "all" or access_list == ["all"]:
        if further:
            return ["user", "previous", *range(place)]
        return ["user", *range(place)]
    if isinstance(access_list, list):
        return ["user", *access_list]
    return access_list


def _first_list(text: str, label: str) -> list[Any] | None:
    """Return the first list after a label: up to the first bracket that makes it valid."""
    label_match = re.search(label, text, re.IGNORECASE)
    if label_match is None:
        return None
    start = text.find("[", label_match.end())
    if start < 0:
        return None
    ends = [match.end() for match in re.finditer(r"\]", text[start:])]
    for end in ends[:MAX_BRACKETS]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                value = ast.literal_eval(text[start : start + end])
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
        return value if isinstance(value, list) else None
    return None
