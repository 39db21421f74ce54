"""The rehearsal workers call the caller's tools where they fit, so that tools can be tried without any key."""

import json
import time

import pytest

from app.core.message.chat import (
    End,
    Form,
    Message,
    Sampling,
    Text,
    TextDelta,
    Tool,
    Toolbox,
    ToolCall,
    ToolCallCollector,
    ToolDelta,
    fault_of_calls,
)
from app.core.message.response_format import add_form_instructions, faults
from app.core.pool.catalog import Deadlines, ProviderSpec, Worker
from app.providers.protocol import Request
from app.providers.rehearsal.provider import RehearsalProvider

SOON = Deadlines(connect=5, first=5, gap=5, total=5)
CALCULATE = Tool(
    "calculate",
    "Evaluates an arithmetic expression.",
    {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
)
WEATHER = Tool(
    "get_weather",
    "Get the current weather of a city.",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
        "required": ["city", "unit"],
    },
)


async def turn(
    question: str, *results: str, box: Toolbox, failed: bool = False, form: Form | None = None
) -> tuple[list[ToolCall], str, str]:
    """Calls, words and finish of one turn, after these results if there are any."""
    calls = tuple(ToolCall(f"c-{n}", "calculate") for n in range(len(results)))
    messages = [Message("user", (Text(question),))]
    if results:
        messages.append(Message("assistant", (), calls=calls))
    messages += [Message("tool", (Text(text),), call_id=f"c-{n}", failed=failed) for n, text in enumerate(results)]
    if form is not None:
        messages = [*add_form_instructions(form, tuple(messages), constrained=False, flaw=None)]
    provider = RehearsalProvider(ProviderSpec("rehearsal", "rehearsal", options={"delay": "0"}))
    turn_request = Request(
        Worker("w", "rehearsal", "sage"), tuple(messages), Sampling(max_tokens=500), toolbox=box, form=form
    )
    pieces = [
        piece async for batch in provider.stream(turn_request, provider.render(turn_request), SOON) for piece in batch
    ]
    gathering = ToolCallCollector()
    for piece in pieces:
        if isinstance(piece, ToolDelta):
            gathering.take(piece)
    (end,) = [piece for piece in pieces if isinstance(piece, End)]
    return list(gathering.calls), "".join(piece.text for piece in pieces if isinstance(piece, TextDelta)), end.finish


async def test_an_argument_may_have_one_of_several_types() -> None:
    places = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    rounding = Tool("round_number", "Rounds.", {"type": "object", "properties": {"places": places}})
    calls, _, _ = await turn("Round it to 2 places.", box=Toolbox((rounding,)))
    assert [json.loads(call.arguments) for call in calls] == [{"places": 2}]


async def test_arguments_validate_where_the_words_of_the_question_would_not() -> None:
    fields = {"city": {"type": "string", "pattern": "^[A-Z]{3}$"}, "days": {"type": "integer", "multipleOf": 5}}
    parameters = {"type": "object", "properties": fields, "required": ["city", "days"]}
    box = Toolbox((Tool("get_weather", "Get the weather of a city.", parameters),))
    calls, _, _ = await turn("What is the weather in Paris and Rome for 7 days?", box=box)
    assert calls
    for call in calls:
        assert faults(Form(parameters), call.arguments) == ()


async def test_a_tool_that_stands_for_a_form_of_the_answer_gets_the_answer() -> None:
    """As frameworks ask for it: the tool must be called, and has nothing to do with the question."""
    fields = {"value": {"type": "integer"}, "chance": {"anyOf": [{"type": "number"}, {"type": "null"}]}}
    output = Tool("final_result", "The fields of the result.", {"type": "object", "properties": fields})
    calls, _, _ = await turn("What is 17 * 23?", box=Toolbox((output,), choice="named", named="final_result"))
    assert [json.loads(call.arguments) for call in calls] == [{"value": 391, "chance": 391}]


async def test_a_worker_that_is_asked_for_json_in_words_calls_tools_once() -> None:
    calls, _, _ = await turn("What is 17 * 23?", box=Toolbox((CALCULATE,)), form=Form())
    assert [json.loads(call.arguments) for call in calls] == [{"expression": "17 * 23"}]
    calls, answer, _ = await turn("What is 17 * 23?", "391", box=Toolbox((CALCULATE,)), form=Form())
    assert (calls, json.loads(answer)) == ([], {"answer": "391"})


@pytest.mark.parametrize(
    ("question", "called"),
    [
        ("What is 17 * 23?", [("calculate", {"expression": "17 * 23"})]),
        ("What is 3 plus 4 times 5?", [("calculate", {"expression": "3 + 4 * 5"})]),
        ("What is the weather in Paris?", [("get_weather", {"city": "Paris", "unit": "celsius"})]),
        (
            "Compare the weather of Paris and New York in fahrenheit.",
            [("get_weather", {"city": city, "unit": "fahrenheit"}) for city in ("Paris", "New York")],
        ),
        ("Reverse the word 'orchestra'", []),
    ],
)
async def test_a_worker_calls_the_tool_that_fits(question: str, called: list[tuple[str, object]]) -> None:
    calls, answer, finish = await turn(question, box=Toolbox((WEATHER, CALCULATE)))
    assert [(call.name, json.loads(call.arguments)) for call in calls] == called
    assert (finish == "tool_calls", answer == "") == (bool(called), bool(called))
    assert len({call.id for call in calls}) == len(calls)


@pytest.mark.parametrize(
    ("results", "answer"),
    [
        (("391",), "The answer is 391."),
        (('{"result": 391}',), "The answer is 391."),
        (('{"temperature": "18 C"}', "rain"), "The answer is 18 C; rain."),
        (('{"a": 1, "b": 2}',), 'The answer is {"a": 1, "b": 2}.'),
    ],
)
async def test_with_the_results_it_answers(results: tuple[str, ...], answer: str) -> None:
    assert await turn("What is 17 * 23?", *results, box=Toolbox((CALCULATE,))) == ([], answer, "stop")


async def test_a_failed_tool_is_told_of() -> None:
    _, answer, _ = await turn("What is 17 * 23?", "division by zero", box=Toolbox((CALCULATE,)), failed=True)
    assert answer == "The answer is The tool failed: division by zero."


@pytest.mark.parametrize(
    ("box", "names"),
    [
        (Toolbox((WEATHER, CALCULATE), "none"), []),
        (Toolbox((WEATHER, CALCULATE), "required"), ["calculate"]),
        (Toolbox((WEATHER, CALCULATE), "named", "get_weather"), ["get_weather"]),
        (Toolbox((Tool("ping"),), "required"), ["ping"]),
    ],
)
async def test_a_worker_does_what_is_demanded(box: Toolbox, names: list[str]) -> None:
    calls, answer, _ = await turn("What is 17 * 23?", box=box)
    assert [call.name for call in calls] == names
    assert all(fault_of_calls([call], box) == "" for call in calls)
    assert answer == ("" if names else "The answer is 391.")


async def test_one_at_a_time_if_the_caller_says_so() -> None:
    calls, _, _ = await turn("Is the weather better in Rome or in Oslo?", box=Toolbox((WEATHER,), parallel=False))
    assert len(calls) == 1


async def test_arguments_of_every_kind_are_made() -> None:
    kinds = {
        "count": {"type": "integer"},
        "share": {"type": ["number", "null"]},
        "exact": {"type": "boolean"},
        "nothing": {"type": "null"},
        "list": {"type": "array", "items": {"type": "number"}},
        "inner": {"type": "object", "properties": {"query": {"type": "string"}}},
        "anything": True,
        "things": {"type": "array", "items": True},
        "open": {"type": "object", "required": ["name"]},
    }
    (call,), _, _ = await turn("Order 3 of 2.5 at 7", box=Toolbox((Tool("order", parameters={"properties": kinds}),)))
    question = "Order 3 of 2.5 at 7"
    expected = {"count": 3, "share": 7, "exact": True, "nothing": None, "list": [2.5], "inner": {"query": question}}
    expected |= {"anything": question, "things": [question], "open": {"name": question}}
    assert json.loads(call.arguments) == expected


@pytest.mark.parametrize("filling", ["(" * 50_000, ". " * 50_000, "Ab " * 50_000], ids=["brackets", "points", "names"])
@pytest.mark.parametrize("parameter", ["expression", "city"])
async def test_a_long_question_does_not_hold_up_others(parameter: str, filling: str) -> None:
    properties = {name: {"type": "string"} for name in (parameter, "note")}
    box = Toolbox((Tool("lookup", "", {"type": "object", "properties": properties}),))
    begin = time.process_time()
    calls, _, _ = await turn(f"Please lookup {filling}", box=box)
    assert time.process_time() - begin < 2
    assert [call.name for call in calls] == ["lookup"]


async def test_a_number_that_no_program_can_hold_is_left_out_of_arguments() -> None:
    kinds = {"count": {"type": "integer"}, "share": {"type": "number"}}
    box = Toolbox((Tool("order", parameters={"properties": kinds}),))
    (call,), _, _ = await turn(f"Order {'9' * 400} of 3", box=box)
    assert json.loads(call.arguments) == {"count": 3, "share": 0}


async def test_a_result_with_a_number_that_no_program_can_hold_fills_a_form() -> None:
    form = Form({"type": "object", "properties": {"value": {"type": "integer"}, "note": {"type": "string"}}})
    _, answer, _ = await turn("What is 17 * 23?", "9" * 400, box=Toolbox((CALCULATE,)), form=form)
    assert json.loads(answer)["value"] == 0
