"""From a run's journal to a row, and from rows to the table: nothing is dropped, nothing is mixed."""

from typing import Any

import pytest
from msgspec.structs import asdict, replace

from app.lab.comparison import LAMBDAS, table
from app.lab.measurements import Measure, figures, incompatibilities, of_json
from app.lab.paired_statistics import Interval


def call(seconds: float, tokens: int, outcome: str | None = "ok") -> dict[str, Any]:
    outcome_fields = {"usage": {"input": tokens, "output": 1}, "seconds": seconds} if outcome else {}
    return {"outcome": outcome, **outcome_fields}


def step(n: int, round_: int, access: list[str | int], *calls: dict[str, Any], proposal: int = 0) -> dict[str, Any]:
    seconds = sum(call.get("seconds", 0.0) for call in calls)
    fields = {"n": n, "round": round_, "access": access, "attempts": list(calls), "seconds": seconds}
    return fields | {"proposal": proposal, "planned_worker": "abc"[n % 3]}


def plan(number: int, round_: int, state: str, *calls: dict[str, Any]) -> dict[str, Any]:
    return {"number": number, "round": round_, "state": state, "outage": False, "attempts": list(calls)}


RUN: dict[str, Any] = {
    "proposals": [plan(0, 1, "accepted", call(0.5, 100)), plan(1, 2, "accepted", call(0.25, 50))],
    "steps": [
        step(0, 1, ["user"], call(1.0, 10)),
        step(1, 1, ["user"], call(2.0, 10, "error"), call(1.0, 10)),
        step(2, 1, ["user", 0, 1], call(4.0, 10)),
        step(3, 2, ["user", 2], call(8.0, 10), proposal=1),
        step(4, 2, ["user"], proposal=1),
    ],
    "cost_usd": 0.25,
    "rounds": 2,
    "degraded": False,
    "catalog": "c" * 64,
}


def test_a_rows_figures_are_those_of_all_its_calls() -> None:
    run_figures = figures(RUN)
    assert (
        run_figures.conductor_input,
        run_figures.conductor_output,
        run_figures.worker_input,
        run_figures.worker_output,
    ) == (150, 2, 50, 5)
    assert (run_figures.calls, run_figures.steps, run_figures.rounds, run_figures.usd) == (7, 4, 2, 0.25)
    assert run_figures.path == 0.5 + 0.25 + (2.0 + 1.0) + 4.0 + 8.0, (
        "planning, the slower branch, the joint, the next round"
    )
    assert not run_figures.invalid


def test_a_plans_hash_is_that_of_workers_and_access_alone() -> None:
    other = RUN | {"steps": [step | {"seconds": 0.0} for step in RUN["steps"]]}
    assert figures(other).plan == figures(RUN).plan != ""
    first = RUN["steps"][0] | {"planned_worker": "c"}
    assert figures(RUN | {"steps": [first, *RUN["steps"][1:]]}).plan != figures(RUN).plan
    rejected = RUN | {"proposals": [proposal | {"state": "rejected"} for proposal in RUN["proposals"]]}
    assert (figures(rejected).plan, figures(rejected).invalid) == ("", True)
    unanswered = RUN | {"steps": [step(0, 1, ["user"], call(0.0, 0, None))]}
    assert figures(unanswered).worker_input == 0, "a call without an outcome has no usage"


def row(task: int, arm: str, right: float, usd: float = 1.0, repeat: int = 0, **more: Any) -> Measure:
    return Measure(task=str(task), arm=arm, right=right, usd=usd, repeat=repeat, tasks="t", catalog="c", **more)


def test_repeats_are_averaged_and_failures_are_wrong() -> None:
    rows = [row(n, "a", float(repeat == 0), repeat=repeat) for n in range(4) for repeat in range(2)]
    rows += [row(n, "b", 1.0, 3.0) for n in range(3)] + [row(3, "b", 0.0, 3.0, outcome="outage", degraded=True)]
    by_arm = {standing.arm: standing for standing in table(rows, ["a", "b"], "a", 0, 400).standings}
    assert (by_arm["a"].accuracy.value, by_arm["a"].accuracy.low, by_arm["a"].accuracy.high) == (0.5, 0.5, 0.5)
    assert (by_arm["b"].accuracy.value, by_arm["b"].outages, by_arm["b"].failures, by_arm["b"].degraded) == (
        0.75,
        1,
        0,
        1,
    )
    assert by_arm["b"].ahead is not None
    assert (by_arm["a"].ahead, by_arm["a"].p, by_arm["oracle"].p) == (None, None, None)
    assert (by_arm["b"].ahead.value, by_arm["b"].ahead.low) == (0.25, -0.25)
    assert by_arm["oracle"].accuracy.value == 0.875
    assert by_arm["oracle"].usd == pytest.approx((3 * 3.0 + 1.0) / 4), "where arms are as good, the cheaper one"
    assert by_arm["a"].rewards == pytest.approx([0.5 * (1 - share / 3) for share in LAMBDAS])
    assert (by_arm["a"].front, by_arm["b"].front, by_arm["a"].bought) == (True, True, None)
    assert by_arm["b"].bought is not None
    assert by_arm["b"].bought.value == pytest.approx(0.25)


def test_one_task_is_no_evidence_that_an_arm_is_better() -> None:
    by_arm = {arm.arm: arm for arm in table([row(0, "a", 0.0), row(0, "b", 1.0)], ["a", "b"], "a", 0, 400).standings}
    better = by_arm["b"]
    assert (better.p, better.ahead, better.accuracy) == (1.0, Interval(1.0, -1.0, 1.0), Interval(1.0, 0.0, 1.0))


def test_a_task_that_lacks_an_arms_row_is_left_out_and_told() -> None:
    rows = [row(n, "a", 1.0) for n in range(3)] + [row(n, "b", 0.0) for n in range(2)]
    standings = table(rows, ["a", "b"], "b", 0, 50)
    assert (standings.tasks, standings.missing) == (2, 1)
    with pytest.raises(ValueError, match="no task has a row of every arm"):
        table(rows, ["a", "b", "c"], "a", 0, 50)


def test_rows_of_other_tasks_pools_or_graders_are_not_compared() -> None:
    first = row(0, "a", 1.0, grading="g")
    refused = replace(first, catalog="")
    assert incompatibilities([first, refused]) == [], "a request that was refused has no run, and no pool"
    for name, words in (("tasks", "task sets"), ("catalog", "pools"), ("grading", "versions of the graders")):
        [fault] = incompatibilities([first, replace(first, **{name: "other"})])
        assert fault.startswith(f"rows of 2 {words} cannot be compared")


def test_a_row_is_read_as_it_was_written() -> None:
    first = row(0, "a", 1.0, reason="right")
    assert of_json(asdict(first) | {"of a later version": 1}) == first
