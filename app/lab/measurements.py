"""The measurements of an arm on a task: one row for each task, arm and repeat, made from the run's own journal.

A row without an answer counts as wrong and is never dropped. Where nobody could be reached to answer (`outage`) the row
says so apart: that is no verdict on the plan, and a table shows how many there were.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

Outcome = Literal["answered", "failed", "outage"]
OUTAGE_STATUS = (502, 503)
"""A run that no worker completes, and a service that is at capacity."""
OUTAGE_CODES = ("rate_limit_exceeded", "insufficient_quota")
"""The errors of runs whose providers have limited the rate, or had no quota left, as may a budget over several runs."""


class Figures(Struct, frozen=True):
    """The figures of one run; tokens are those of all its calls, retries included."""

    conductor_input: int = 0
    conductor_output: int = 0
    worker_input: int = 0
    worker_output: int = 0
    usd: float = 0.0
    path: float = 0.0
    """Seconds of calls on the longest way to the answer: each round's planning, then its longest chain of steps."""
    calls: int = 0
    steps: int = 0
    """The number of steps that were begun."""
    rounds: int = 0
    plan: str = ""
    """Hash of the accepted plans' workers and access lists; the words of subtasks do not count."""
    degraded: bool = False
    invalid: bool = False
    """True if a plan was rejected."""
    catalog: str = ""
    """Digest of the pool that the run was admitted with."""

    @property
    def conductor_tokens(self) -> int:
        """Return the tokens that the conductor read and wrote."""
        return self.conductor_input + self.conductor_output

    @property
    def worker_tokens(self) -> int:
        """Return the tokens that the workers read and wrote."""
        return self.worker_input + self.worker_output


class Measure(Figures, frozen=True):
    """One row. `wall` is in seconds as the caller sees them; `tasks` is the digest of the task set."""

    task: str = ""
    arm: str = ""
    repeat: int = 0
    right: float = 0.0
    """The grade, from 0 to 1."""
    outcome: Outcome = "answered"
    reason: str = ""
    """The grader's words, or the error's code."""
    run: str = ""
    wall: float = 0.0
    tasks: str = ""
    grading: str = ""
    at: float = 0.0

    @property
    def place(self) -> tuple[str, str, int]:
        """Return the task, arm and repeat that this row belongs to."""
        return self.task, self.arm, self.repeat


def of_json(value: Mapping[str, Any]) -> Measure:
    """Return a row as it was written; fields that this version does not know are left out."""
    return Measure(**{name: value[name] for name in Measure.__struct_fields__ if name in value})


def figures(run: Mapping[str, Any]) -> Figures:
    """Return the figures of a run as `GET /v1/runs/{id}` shows it."""
    proposals, steps = run["proposals"], run["steps"]
    planning = _calls(proposals)
    working = _calls(steps)
    return Figures(
        conductor_input=_tokens(planning, "input"),
        conductor_output=_tokens(planning, "output"),
        worker_input=_tokens(working, "input"),
        worker_output=_tokens(working, "output"),
        usd=run["cost_usd"],
        path=_path(proposals, steps),
        calls=len(planning) + len(working),
        steps=sum(bool(step["attempts"]) for step in steps),
        rounds=run["rounds"],
        plan=_plan_hash(proposals, steps),
        degraded=bool(run["degraded"]),
        invalid=_has_invalid_plan(proposals),
        catalog=run["catalog"],
    )


def _calls(entries: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the calls of proposals or of steps, one after the other."""
    calls: list[Mapping[str, Any]] = []
    for entry in entries:
        calls += entry["attempts"]
    return calls


def _has_invalid_plan(proposals: Iterable[Mapping[str, Any]]) -> bool:
    """Return True if a plan was rejected for what it said."""
    for proposal in proposals:
        if proposal["state"] == "rejected" and not proposal["outage"]:
            return True
    return False


def _tokens(calls: Iterable[Mapping[str, Any]], kind: str) -> int:
    return sum(call["usage"][kind] for call in calls if call["outcome"] is not None)


def _path(proposals: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds of planning, and of the longest chain of steps of each round."""
    round_of_step = {step["n"]: step["round"] for step in steps}
    ends: dict[int, float] = {}
    longest: dict[int, float] = {}
    for step in steps:
        begin = 0.0
        for entry in step["access"]:
            if round_of_step.get(entry) == step["round"]:
                begin = max(begin, ends.get(entry, 0.0))
        ends[step["n"]] = begin + step["seconds"]
        longest[step["round"]] = max(longest.get(step["round"], 0.0), ends[step["n"]])
    planning = sum([call.get("seconds", 0.0) for call in _calls(proposals)])
    return float(planning + sum(longest.values()))


def _plan_hash(proposals: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]) -> str:
    """Return the hash of the accepted plans' workers and access lists; empty if no plan was accepted."""
    accepted = {proposal["number"] for proposal in proposals if proposal["state"] == "accepted"}
    plan = []
    for step in steps:
        if step["proposal"] in accepted:
            plan.append([step["round"], step["planned_worker"], step["access"]])
    if not plan:
        return ""
    return hashlib.sha256(json.dumps(plan).encode()).hexdigest()[:16]


def incompatibilities(measures: Iterable[Measure]) -> list[str]:
    """Return the reasons why these rows cannot be compared with each other; empty if they can. A row without a run has
    no pool."""
    rows = list(measures)
    names = {"tasks": "task sets", "catalog": "pools", "grading": "versions of the graders"}
    faults = []
    for name, plural in names.items():
        digests = sorted({getattr(row, name) for row in rows} - {""})
        if len(digests) > 1:
            beginnings = ", ".join([digest[:12] for digest in digests])
            faults.append(f"rows of {len(digests)} {plural} cannot be compared: {beginnings}")
    return faults
