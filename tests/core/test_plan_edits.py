"""Edits of plans, and the published form of three lists."""

from typing import Any

import pytest

from app.core.plan.edits import Edit, apply_edits
from app.core.plan.proposals import by_name, read_plan
from app.core.plan.published_format import from_lists, to_lists
from app.errors import PlanRejected

POOL = ("a", "b", "c")


def step(worker: str, *access: str | int) -> dict[str, Any]:
    return {"worker": worker, "subtask": f"Ask {worker}.", "access": list(access)}


FAN = [step("a", "user"), step("b", "user"), step("c", "user", 0, 1)]


def test_access_lists_keep_naming_the_same_steps() -> None:
    added = apply_edits(FAN, [Edit("add", 1, step("c", "user"))])
    assert [step["worker"] for step in added] == ["a", "c", "b", "c"]
    assert added[3]["access"] == ["user", 0, 2]
    removed = apply_edits(added, [Edit("remove", 0)])
    assert [step["access"] for step in removed] == [["user"], ["user"], ["user", 1]]
    assert apply_edits(added, [Edit("remove", 1)]) == FAN


@pytest.mark.parametrize(
    ("step_moved", "to", "order", "last"),
    [(1, 0, "bac", ["user", 1, 0]), (0, 1, "bac", ["user", 1, 0]), (1, 1, "abc", ["user", 0, 1])],
)
def test_a_step_that_is_moved_keeps_what_it_is_shown(step_moved: int, to: int, order: str, last: list[Any]) -> None:
    moved = apply_edits(FAN, [Edit("move", step_moved, to=to)])
    assert "".join(step["worker"] for step in moved) == order
    assert moved[2]["access"] == last


@pytest.mark.parametrize("edit", [Edit("move", 0), Edit("move", 0, to=3), Edit("move", 0, to=-1), Edit("add", 0, to=1)])
def test_a_move_to_no_place_is_refused(edit: Edit) -> None:
    with pytest.raises(PlanRejected) as refused:
        apply_edits(FAN, [edit])
    assert refused.value.reasons[0].startswith("edits[0].to:")


def test_a_changed_step_keeps_its_other_fields() -> None:
    changed = apply_edits(FAN, [Edit("change", 2, {"worker": "a"})])
    assert changed[2] == FAN[2] | {"worker": "a"}
    assert FAN[2]["worker"] == "c", "what was given stays as it is"


@pytest.mark.parametrize(
    "edit", [Edit("change", 3), Edit("remove", 3), Edit("add", 4), Edit("change", -1), Edit("change", 0)]
)
def test_an_edit_of_no_step_or_of_nothing_is_refused_by_its_place(edit: Edit) -> None:
    with pytest.raises(PlanRejected) as refused:
        apply_edits(FAN, [Edit("change", 0, {"worker": "a"}), edit])
    assert refused.value.reasons[0].startswith("edits[1].step:")


def test_three_lists_say_the_same_plan() -> None:
    plan = read_plan({"steps": FAN}, by_name(POOL), 5)
    lists = to_lists(plan, POOL)
    assert lists["access_list"] == [[], [], ["all"]]
    assert read_plan(from_lists(lists, ()), by_name(POOL), 5) == plan
    some = [*FAN[:2], step("c", "user", 1)]
    assert to_lists(read_plan({"steps": some}, by_name(POOL), 5), POOL)["access_list"][2] == [1]


@pytest.mark.parametrize(
    ("lists", "reason"),
    [
        ({"model_id": [0], "subtasks": ["x"]}, "access_list must be a list"),
        ({"model_id": [0, 1], "subtasks": ["x"], "access_list": [[]]}, "the lists differ in length: 2, 1, 1"),
        ({"model_id": [3], "subtasks": ["x"], "access_list": [[]]}, "step 0: model_id is not the place of a worker"),
    ],
)
def test_lists_that_are_no_plan_are_refused(lists: dict[str, Any], reason: str) -> None:
    with pytest.raises(PlanRejected) as refused:
        from_lists(lists, POOL)
    assert refused.value.reasons == (reason,)


def test_what_three_lists_cannot_say_is_refused() -> None:
    hidden = read_plan({"steps": [FAN[0] | {"tools": True}, step("b", 0)]}, by_name(POOL), 5)
    with pytest.raises(PlanRejected) as refused:
        to_lists(hidden, POOL)
    assert len(refused.value.reasons) == 2
