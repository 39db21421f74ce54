"""The only parser of plans: what a schema permits is accepted, everything else is rejected with all its faults."""

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from app.core.plan import proposals
from app.core.plan.workflow import Access, Step
from app.errors import PlanRejected
from tests.core.plans import NAMES, lists, mutant, read, step, text_of, values_of_schema

TWO = text_of(step(0, "Plan", ("user",)), step(1, "Solve", ("user", 0)))
TWO_STEPS = [Step("ada", "Plan"), Step("bob", "Solve", Access(True, (0,)), answers=True)]


def reasons_of(call: Any, *arguments: Any) -> list[str]:
    """Return the reasons for which a plan was rejected."""
    with pytest.raises(PlanRejected) as caught:
        call(*arguments)
    assert caught.value.reasons
    return list(caught.value.reasons)


def accept_or_none(call: Callable[[], Sequence[Step]]) -> Sequence[Step] | None:
    """The steps, or None if they were rejected for some reason."""
    try:
        return call()
    except PlanRejected as rejected:
        return None if rejected.reasons else []


def read_given_plan(value: Any, most: int = 5) -> tuple[Step, ...]:
    """A caller's plan."""
    return proposals.read_plan(value, proposals.by_name(NAMES), most)


# -- the schema


def test_the_worker_comes_first_and_nothing_else_is_permitted() -> None:
    schema = proposals.schema(3, 2, 600)
    assert schema["required"] == ["steps"]
    places = schema["properties"]["steps"]["prefixItems"]
    assert len(places) == schema["properties"]["steps"]["maxItems"] == 2
    assert all(list(place["properties"]) == ["worker", "subtask", "access"] for place in places)
    assert all(place["additionalProperties"] is False for place in places)
    assert places[0]["properties"]["access"] == {"enum": [["user"]]}
    assert places[1]["properties"]["access"] == {"enum": [["user"], [0], ["user", 0]]}


def test_a_server_without_prefix_items_gets_one_schema_for_all_places() -> None:
    steps = proposals.schema(3, 2, 600, positional=False)["properties"]["steps"]
    assert set(steps) == {"type", "items"}
    assert steps["items"]["properties"]["access"] == {"type": "array", "items": {"enum": ["user", 0]}}


def test_where_tools_are_offered_each_step_says_whether_it_may_call_them() -> None:
    for positional in (True, False):
        steps = proposals.schema(3, 2, 600, positional=positional, tools=True)["properties"]["steps"]
        place = steps["prefixItems"][1] if positional else steps["items"]
        assert list(place["properties"]) == place["required"] == ["worker", "subtask", "access", "tools"]
    tooled = [entry | {"tools": place == 0} for place, entry in enumerate(json.loads(TWO)["steps"])]
    assert [step.tools for step in read(json.dumps({"steps": tooled}))] == [True, False]
    assert [step.tools for step in read(TWO)] == [False, False]
    faulty = [tooled[0] | {"tools": "yes"}, tooled[1]]
    assert reasons_of(read, json.dumps({"steps": faulty})) == ["step 0: tools must be true or false"]


def test_enumerations_of_access_lists_stay_small() -> None:
    schema = proposals.schema(1, 8, 10)
    assert len(json.dumps(schema)) < 20_000
    last = schema["properties"]["steps"]["prefixItems"][7]["properties"]["access"]
    assert last["maxItems"] == 8


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_plan_that_the_schema_permits_is_accepted(data: st.DataObject) -> None:
    most = data.draw(st.integers(1, 8))
    value = data.draw(values_of_schema(proposals.schema(len(NAMES), most, 30)))
    steps = proposals.read_plan(value, proposals.by_ordinal(NAMES), most)
    assert read(json.dumps(value), most=most) == list(steps)
    assert [step.answers for step in steps] == [False] * (len(steps) - 1) + [True]
    assert all(n < place for place, step in enumerate(steps) for n in step.access.steps)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_what_a_flat_schema_lets_through_is_accepted_or_rejected(data: st.DataObject) -> None:
    value = data.draw(values_of_schema(proposals.schema(len(NAMES), 4, 30, positional=False)))
    ordinal = proposals.by_ordinal(NAMES)
    steps = accept_or_none(lambda: read(json.dumps(value), most=4))
    assert steps == accept_or_none(lambda: list(proposals.read_plan(value, ordinal, 4)))


# -- the reader


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 400), max_size=12),
    st.sampled_from(["", "Here it is:\n```json\n", '<think>{"steps": [</think>']),
)
def test_a_text_in_any_pieces_gives_the_same_steps(cuts: list[int], before: str) -> None:
    text = before + text_of(step(0, 'brackets ] } [ { and "quotes" \\ é'), step(2, "<think> </think>", (0,))) + "\n```"
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(edges)]
    assert read(*pieces) == read(text) == read(*text)
    assert len(read(text)) == 2


REASONED = (
    '{"steps": [{"worker": 0, "subtask": "Plan", "access": ["user"], "why": "It plans well.", "withheld": ""}, '
    '{"worker": 2, "subtask": "Solve", "access": [0], "why": "Cheap.", "withheld": "It needs the plan alone."}], '
    '"shape": "Two steps, since \\"plan first\\" helps."}'
)


def test_reasons_come_behind_the_steps_and_hold_nothing_up() -> None:
    reader = proposals.PlanReader(proposals.by_ordinal(NAMES), 5, reasoned=True)
    given_at = {at: got for at, char in enumerate(REASONED) if (got := reader.feed(char))}
    assert list(given_at) == [REASONED.index("}, {") + 1, REASONED.rindex("]")]
    first, last = [steps[0] for steps in given_at.values()]
    assert (first.why, first.why_withheld) == ("It plans well.", "")
    assert (last.why, last.why_withheld, last.answers) == ("Cheap.", "It needs the plan alone.", True)
    assert reader.finish() == []
    assert reader.why == 'Two steps, since "plan first" helps.'
    Draft202012Validator(proposals.schema(3, 2, 600, reasons=True)).validate(json.loads(REASONED))


@pytest.mark.parametrize(
    ("spoilt", "why"),
    [
        (REASONED.replace("Cheap.", "x" * 5_000), "x" * proposals.MAX_REASON_CHARS),
        (REASONED.replace('"Cheap."', "7"), ""),
        (REASONED.replace("Cheap.", "a\\u0000b"), ""),
        (REASONED.replace('"why": "Cheap.", ', ""), ""),
        (REASONED[:-20], "Cheap."),
        (REASONED[: REASONED.rindex(", ")] + "}", "Cheap."),
    ],
)
def test_a_reason_is_cut_or_dropped_and_never_rejects_a_plan(spoilt: str, why: str) -> None:
    reader = proposals.PlanReader(proposals.by_ordinal(NAMES), 5, reasoned=True)
    steps = reader.feed(spoilt)
    assert reader.finish() == []
    assert [step.worker for step in steps] == [NAMES[0], NAMES[2]]
    assert steps[1].why == why


def test_reasons_that_nobody_asked_for_are_unknown_fields() -> None:
    reader = proposals.PlanReader(proposals.by_ordinal(NAMES), 5)
    assert reader.feed(REASONED) == []
    with pytest.raises(PlanRejected) as rejected:
        reader.finish()
    assert {reason.partition(": ")[2] for reason in rejected.value.reasons} == {"unknown field", ""}
    other = proposals.PlanReader(proposals.by_ordinal(NAMES), 5, reasoned=True)
    other.feed(REASONED.replace('"shape"', '"steps"'))
    with pytest.raises(PlanRejected):
        other.finish()


def test_a_step_is_given_at_the_comma_or_bracket_behind_it() -> None:
    reader = proposals.PlanReader(proposals.by_ordinal(NAMES), 5)
    given_at = {at: got for at, char in enumerate(TWO) if (got := reader.feed(char))}
    comma, bracket = TWO.index("}, {") + 1, TWO.rindex("]")
    assert given_at == {comma: TWO_STEPS[:1], bracket: TWO_STEPS[1:]}
    assert reader.finish() == []
    assert reader.text == TWO


@pytest.mark.parametrize(
    "text",
    [
        f"I will use two workers.\n```json\n{TWO}\n```\nDone.",
        f'<think>First {{"steps": [ maybe ]}} then</think>{TWO}',
        f"<think>a</think><think>b</think> {TWO}",
        TWO.replace("{", "{ \n").replace(":", " : "),
        TWO + TWO,
        TWO.replace("Plan", "Plan").replace('"Solve"', '"Sol\\u0076e"'),
    ],
)
def test_prose_thoughts_and_fences_are_passed_over(text: str) -> None:
    assert read(text) == TWO_STEPS


def test_control_characters_in_a_subtask_are_kept() -> None:
    assert read('{"steps": [{"worker": 0, "subtask": "a\nb\tc\x01", "access": ["user"]}]}')[0].subtask == "a\nb\tc\x01"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no plan found"),
        ("I would rather not.", "no plan found"),
        (f"<think>{TWO}", "no plan found"),
        (TWO[:-30], "breaks off before its list of steps is closed"),
        (TWO[:-1], "an unknown field beside steps, or breaks off"),
        (TWO[:-1] + ', "why": 1}', "an unknown field beside steps"),
        ('{"steps": []}', "the plan has no steps"),
        ('{"steps": [}', "not closed by a bracket"),
        ('{"steps": [1]}', "not valid JSON"),
        ('{"steps": ["worker"]}', "not valid JSON"),
        (TWO.replace("}, {", "} {"), "not valid JSON"),
        (TWO.replace("}, {", "},, {"), "not valid JSON"),
        (TWO.replace("[{", "[,{"), "not valid JSON"),
        (TWO.replace("}]}", "},]}"), "not valid JSON"),
        (TWO.replace("}, {", "}, null, {"), "not valid JSON"),
        (TWO.replace('"Plan",', '"Plan"'), "step 0: is not valid JSON"),
        ('{"steps": [[1]]}', "step 0: must be an object"),
        ('{"steps": [' + "[" * 50_000 + "]" * 50_000 + "]}", "longer than"),
        ('{"steps": [' + "[" * 30_000 + "]" * 30_000 + "]}", "step 0: is not valid JSON"),
        ("{" * 70_000, "longer than 64000 characters"),
        (TWO + " " * 64_000, "longer than 64000 characters"),
        (text_of(step(subtask="a\x00b")), "NUL or unpaired surrogate"),
        (text_of(step(subtask="a\ud800b")), "NUL or unpaired surrogate"),
        (text_of(step(subtask="x" * 4_001)), "longer than 4000 characters"),
        (text_of(*[step()] * 7), "more than 5 steps"),
        (
            '{"steps": [{"worker": 0, "subtask": "a", "access": ["user"], "worker": 1}]}',
            "step 0: has the same key twice",
        ),
        (
            '{"steps": [{"worker": 0, "subtask": "a", "acc\\u0065ss": [], "access": ["user"]}]}',
            "has the same key twice",
        ),
        (TWO[:-1] + ', "steps": []}', "unknown field beside steps"),
    ],
)
def test_other_text_is_rejected(text: str, reason: str) -> None:
    reasons = reasons_of(read, text)
    assert any(reason in problem for problem in reasons)
    assert reasons_of(read, *[text[at : at + 97] for at in range(0, len(text), 97)]) == reasons


def test_no_step_is_given_behind_an_invalid_one() -> None:
    reader = proposals.PlanReader(proposals.by_ordinal(NAMES), 5)
    assert reader.feed(text_of(step(9), step(0), step(1, access=(7,)))) == []
    assert len(reasons_of(reader.finish)) == 2


# -- a caller's plan, and every fault at once


def test_all_faults_are_told_at_once() -> None:
    entries = [
        step("ada", "x", (0,)),
        step("nobody", "y", ("user", 2)),
        step(True, 5, (True, -1, "all", 1.5)),
        {"worker": "ada", "subtask": "", "access": [], "why": 1, "model": 2},
        {"worker": "ada"},
        "step",
    ]
    reasons = reasons_of(read_given_plan, {"steps": entries, "note": 1})
    assert reasons == [
        "the plan has an unknown field beside steps",
        "the plan has 6 steps; at most 5 are allowed here",
        "step 0: access lists a step that is not an earlier one (forward access or a cycle)",
        "step 1: worker is not an eligible worker",
        "step 1: access lists a step that is not an earlier one (forward access or a cycle)",
        "step 2: worker is not an eligible worker",
        "step 2: subtask must be a string",
        *['step 2: access may hold only "user" and numbers of earlier steps'] * 4,
        "step 3: unknown field",
        "step 3: unknown field",
        "step 3: a step without a subtask must be able to see user",
        "step 4: access is missing",
        "step 4: subtask is missing",
        "step 4: a step without a subtask must be able to see user",
        "step 5: must be an object with worker, subtask and access",
    ]


@pytest.mark.parametrize("value", [None, [], "steps", {"steps": {}}, {"steps": None}, {}])
def test_a_value_without_a_list_of_steps_is_rejected(value: Any) -> None:
    assert reasons_of(read_given_plan, value) == ["the plan must be an object whose field steps is a list"]


def test_an_empty_plan_and_access_of_another_type_are_rejected() -> None:
    assert reasons_of(read_given_plan, {"steps": []}) == ["the plan has no steps"]
    assert "access must be a list" in reasons_of(read_given_plan, {"steps": [step("ada", "x", "user")]})[0]


def test_a_long_list_is_not_judged_to_its_end() -> None:
    assert len(reasons_of(read_given_plan, {"steps": [7] * 100_000})) == 33


def test_access_is_sorted_and_listed_once() -> None:
    access = (1, 0, "user", 1, "user")
    steps = read_given_plan({"steps": [step("ada"), step("bob"), step("cyd", "join", access)]})
    assert steps[2].access == Access(True, (0, 1))


def test_ordinals_and_names_do_not_mix() -> None:
    ordinal, name = proposals.by_ordinal(NAMES), proposals.by_name(NAMES)
    assert [ordinal(value) for value in (0, 2, 3, -1, True, 1.0, "ada", None)] == ["ada", "cyd", *[None] * 6]
    assert [name(value) for value in ("ada", "eve", 0, None, ["ada"])] == ["ada", *[None] * 4]


# -- the published form


@pytest.mark.parametrize(
    "text",
    [
        lists([0, 1], ["Plan", "Solve"], [[], ["all"]]),
        lists([0, 1], ["Plan", "Solve"], [[], "all"]),
        lists([0, 1], ["Plan", "Solve"], [[], [0]]),
        "```python\n" + lists([0, 1], ["Plan", "Solve"], [[], ["all"]]) + "\n```",
        "<think>model_id = [2]</think>First a plan.\n" + lists([0, 1], ["Plan", "Solve"], [[], ["all"]]),
        "Model IDs: [0, 1]\n- **Subtasks**: [“Plan”, “Solve”]\n- Access list: [[], [“all”]]",
    ],
)
def test_three_lists_are_a_plan(text: str) -> None:
    assert read(text) == TWO_STEPS
    assert read(*text) == TWO_STEPS


def test_brackets_quotes_and_unknown_escapes_in_a_list_are_text() -> None:
    text = 'model_id = [0]\nsubtasks = ["Match \\d+ in a[0]] or [0, 1), say \\"it\'s\\""]\naccess_list = [[]]'
    assert read(text)[0].subtask == 'Match \\d+ in a[0]] or [0, 1), say "it\'s"'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("model_id = [0]\nsubtasks = ['a']", "nor the list access_list"),
        ("model_id = 0, subtasks = none, access_list = none", "nor the list model_id, subtasks, access_list"),
        (lists([0, 1], ["a"], [[]]), "the lists differ in length: 2, 1, 1"),
        (lists([0, 7], ["a", "b"], [[], []]), "step 1: worker is not an eligible worker"),
        (lists([0], ["a"], [[0]]), "step 0: access lists a step that is not an earlier one"),
        (lists([0], ["a"], [5]), "step 0: access must be a list"),
        (lists([0], [b"a"], [[]]), "step 0: subtask must be a string"),
        (lists([], [], []), "the plan has no steps"),
        (lists([0] * 6, ["a"] * 6, [[]] * 6), "the plan has 6 steps"),
        ("model_id = [{[]: 1}]\nsubtasks = [{[1]}]\naccess_list = [[]]", "nor the list model_id, subtasks"),
        ("model_id = [0\nsubtasks = ['a'\naccess_list = [[]", "nor the list model_id, subtasks, access_list"),
        ("model_id = [open]\nsubtasks = [0][0]\naccess_list = [" + "[" * 500 + "]" * 501, "nor the list"),
    ],
)
def test_lists_that_are_no_plan_are_rejected(text: str, reason: str) -> None:
    assert reason in reasons_of(read, text)[0]


@pytest.mark.parametrize("piece", ["[x]", "['x]", "[0][", '["\\"', '"[]', "model_id=[", '{"steps": ['])
def test_no_text_keeps_the_parser_busy(piece: str) -> None:
    began = time.process_time()
    reasons_of(read, "model_id = subtasks = access = " + piece * 8_000)
    assert time.process_time() - began < 1.0


# -- anything at all


@settings(max_examples=85, deadline=None)
@given(st.integers(0), st.sampled_from([TWO, text_of(*[step()] * 5), lists([0, 1], ["a", "b"], [[], ["all"]])]))
def test_a_mutated_plan_is_a_plan_or_rejected(seed: int, text: str) -> None:
    random = Random(seed)
    for _ in range(60):
        broken = mutant(text, random)
        steps = accept_or_none(partial(read, broken))
        if steps is None:
            continue
        assert 1 <= len(steps) <= 5
        assert [step.answers for step in steps] == [False] * (len(steps) - 1) + [True]
        assert all(step.worker in NAMES for step in steps)
        assert all(n < place for place, step in enumerate(steps) for n in step.access.steps)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["user", "steps"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["steps", "worker", "subtask", "access", "x"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=40, deadline=None)
@given(JSON, st.lists(JSON, max_size=6))
def test_no_json_value_breaks_the_parser(value: Any, entries: list[Any]) -> None:
    for whole in (value, {"steps": entries}):
        steps = accept_or_none(partial(read_given_plan, whole))
        assert steps is None or steps[-1].answers
