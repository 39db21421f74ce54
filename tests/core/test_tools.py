"""Tool calls as values: gathered from deltas, judged against what was offered, and named by ids that lead back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.message.chat import (
    MOST_CALLS,
    Image,
    Message,
    Task,
    Text,
    Tool,
    Toolbox,
    ToolCall,
    ToolCallCollector,
    ToolDelta,
    calls_that_count,
    fault_of_calls,
    mint_call_id,
    run_of,
    task_from_json,
    task_to_json,
    unsent_deltas,
)

ADD = Tool("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}}, strict=True)
LOOK = Tool("look")
BOX = Toolbox((ADD, LOOK))
RUN = "run_" + ("0123456789abcdef" * 2)[:31]


@given(st.integers(0, 16**31 - 1), st.binary(min_size=9, max_size=9))
def test_a_minted_id_leads_back_to_its_run(number: int, token: bytes) -> None:
    run = f"run_{number:031x}"
    minted = mint_call_id(run, token)
    assert run_of(minted) == run
    assert len(minted) == 40
    assert minted.isascii()
    assert minted.replace("_", "").isalnum()


@given(st.binary(min_size=9, max_size=9), st.binary(min_size=9, max_size=9))
def test_two_ids_of_a_run_differ_unless_71_bits_agree(first: bytes, second: bytes) -> None:
    same = int.from_bytes(first) >> 1 == int.from_bytes(second) >> 1
    assert (mint_call_id(RUN, first) == mint_call_id(RUN, second)) == same


@pytest.mark.parametrize(
    "foreign",
    [
        "",
        "call_abc",
        "toolu_01A",
        "call_bt",
        "call_bt" + "z" * 33,
        "call_bt" + "0" * 32 + "-",
        "x" + mint_call_id(RUN, b"r" * 9),
    ],
)
def test_an_id_of_another_form_leads_nowhere(foreign: str) -> None:
    assert run_of(foreign) is None


def test_only_run_ids_get_minted_ids() -> None:
    with pytest.raises(ValueError, match="run id"):
        mint_call_id("run_1", b"r" * 9)


def test_mixed_deltas_become_whole_calls_in_the_order_in_which_they_began() -> None:
    gathering = ToolCallCollector()
    for delta in (
        ToolDelta(0, "a", "add", '{"a"'),
        ToolDelta(1, "b", "look"),
        ToolDelta(0, arguments=": 1}"),
        ToolDelta(1, arguments=" "),
    ):
        gathering.take(delta)
    assert gathering.calls == (ToolCall("a", "add", '{"a": 1}'), ToolCall("b", "look", " {}"))
    assert (len(gathering), gathering.name(1)) == (2, "look")


@given(st.integers(0, 9), st.integers(0, 3))
def test_what_was_told_and_what_is_left_make_the_whole(chars: int, calls_begun: int) -> None:
    calls = tuple(ToolCall(f"id-{n}", f"tool-{n}", "x" * (3 * n)) for n in range(3))
    deltas = []
    for index, call in enumerate(calls[:calls_begun]):
        deltas += [ToolDelta(index, call.id, call.name), ToolDelta(index, arguments=call.arguments[:chars])]
    whole = ToolCallCollector()
    for delta in (*deltas, *unsent_deltas(calls, deltas)):
        whole.take(delta)
    assert [(call.id, call.name, call.arguments.removesuffix("{}")) for call in whole.calls] == [
        (call.id, call.name, call.arguments) for call in calls
    ]
    assert unsent_deltas(calls, (*deltas, *unsent_deltas(calls, deltas))) == ()


def test_where_one_call_is_allowed_the_first_one_counts() -> None:
    two = (ToolCall("a", "add"), ToolCall("b", "look"))
    assert calls_that_count(two, BOX) == two
    assert calls_that_count(two, Toolbox((ADD, LOOK), parallel=False)) == two[:1]


@pytest.mark.parametrize(
    ("arguments", "fine"),
    [
        ("{}", True),
        (' {"a": [1, "x"]} ', True),
        ("[]", False),
        ("", False),
        ('{"a": NaN}', False),
        ('{"a"', False),
        ('{"a":' * 5000, False),
    ],
)
def test_arguments_must_be_a_json_object(arguments: str, fine: bool) -> None:
    assert (fault_of_calls([ToolCall("1", "add", arguments)], BOX) == "") is fine


def test_what_cannot_be_handed_on_is_said() -> None:
    look, add = ToolCall("1", "look"), ToolCall("2", "add")
    assert fault_of_calls([], BOX) == fault_of_calls([look, add], BOX) == ""
    assert "not offered" in fault_of_calls([ToolCall("1", "rm")], BOX)
    assert "not offered" in fault_of_calls([look], Toolbox(BOX.tools, "none"))
    assert fault_of_calls([], Toolbox(BOX.tools, "none")) == ""
    assert "demanded" in fault_of_calls([], Toolbox(BOX.tools, "required"))
    assert fault_of_calls([look], Toolbox(BOX.tools, "required")) == ""
    assert fault_of_calls([add], Toolbox(BOX.tools, "named", "add")) == ""
    assert "another tool" in fault_of_calls([look], Toolbox(BOX.tools, "named", "add"))
    assert "demanded" in fault_of_calls([], Toolbox(BOX.tools, "named", "add"))
    assert "too many" in fault_of_calls([look] * (MOST_CALLS + 1), BOX)


def test_a_task_with_tools_survives_its_storage() -> None:
    messages = (
        Message("user", (Text("Add."), Image("https://example.org/a.png"))),
        Message("assistant", (), calls=(ToolCall("a", "add", '{"a":1}'),), keepsake={"signatures": ["x", None]}),
        Message("tool", (Text("1"),), call_id="a", failed=True),
    )
    task = Task(messages, toolbox=Toolbox((ADD, LOOK), "named", "add", parallel=False))
    assert task_from_json(task_to_json(task)) == task
    plain = Task(messages[:1])
    assert task_from_json(task_to_json(plain)) == plain


def test_tools_are_needed_for_offered_ones_and_for_a_history_of_calls() -> None:
    ask, call = Message("user", (Text("?"),)), Message("assistant", (), calls=(ToolCall("a", "add"),))
    result = Message("tool", (Text("1"),), call_id="a")
    assert not Task((ask,)).needs_tools
    assert Task((ask,), toolbox=BOX).needs_tools
    assert Task((ask, call, result)).needs_tools
    assert Task((result,)).needs_tools
