"""Access lists and the shapes that they draw."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.plan.workflow import Access, Step, Workflow, access_from_list, critical_path_seconds, topology


@pytest.mark.parametrize(
    ("inputs", "shape"),
    [
        ([()], "single"),
        ([(), (0,)], "chain"),
        ([(), (0,), (0, 1)], "chain"),
        ([(), (0,), (1,), (2,)], "chain"),
        ([(), (), (0, 1)], "fan-out"),
        ([(), (), (), (0, 1, 2)], "fan-out"),
        ([(), ()], "tree"),
        ([(), (), (0,)], "tree"),
        ([(), (0,), (0,), (1, 2)], "tree"),
        ([(), (), (0, 1), (0, 1), (2, 3)], "debate"),
        ([(), (), (0, 1), (0, 1)], "debate"),
        ([(), (), (0, 1), (0,), (2, 3)], "tree"),
    ],
)
def test_access_lists_draw_a_shape(inputs: list[tuple[int, ...]], shape: str) -> None:
    assert topology(inputs) == shape
    assert Workflow(tuple(Step("ada", access=Access(True, steps_read)) for steps_read in inputs)).topology == shape


def test_steps_side_by_side_take_the_time_of_the_longest() -> None:
    assert critical_path_seconds([(), (), (0, 1)], [3.0, 5.0, 1.0]) == 6.0
    assert critical_path_seconds([(), (0,), (1,)], [3.0, 5.0, 1.0]) == 9.0
    assert critical_path_seconds([(), (), (0, 1), (0,)], [2.0, 3.0, 1.0, 0.5]) == 4.0
    assert critical_path_seconds([], []) == 0.0


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sets(st.integers(0, 6)), min_size=1, max_size=7))
def test_every_acyclic_graph_has_one(inputs_drawn: list[set[int]]) -> None:
    inputs = []
    for place, steps_read in enumerate(inputs_drawn):
        inputs.append(sorted(n for n in steps_read if n < place))
    assert topology(inputs) in {"single", "chain", "fan-out", "tree", "debate"}


@settings(max_examples=40, deadline=None)
@given(st.booleans(), st.lists(st.integers(0, 9)), st.booleans(), st.integers(0, 5))
def test_an_access_list_comes_back_as_it_was(user: bool, steps: list[int], previous: bool, base: int) -> None:
    access = Access(user, tuple(steps), previous)
    assert access_from_list(access.as_list()) == access
    assert access.shift(base).steps == tuple(n + base for n in steps)
    assert access.shift(base).user == user
