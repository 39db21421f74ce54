"""Recordings of journals: plans in their own numbers, tool results for equal calls, and nothing lost in their JSON."""

import json

from app.core.message.chat import Message, Text, ToolCall
from app.core.plan.workflow import Access, Step
from app.core.run import drafts
from app.core.run.events import PlanAccepted
from app.core.run.fold import fold
from app.core.run.recording import (
    KeptOutput,
    RecordedPlan,
    Recording,
    build_recorded_plan,
    canonical_arguments,
    record_tool_use,
    results_for_calls,
)
from app.core.run.visibility import LabelFlow, labels_in_run
from tests.core.play import admission, number_events
from tests.core.test_comparison import chain, open_plan, plan_step


def test_a_plan_is_read_in_its_own_numbers_with_the_workers_as_planned() -> None:
    events = chain(base=2)
    state = fold(events)
    kept_outputs = {2: KeptOutput(2, "ref-2", "Said.", "stop", labels=frozenset({"phi"}))}
    texts = {"subtask-2": "Draft it", "subtask-3": "Answer it"}
    plan = build_recorded_plan(state.proposals[-1], events, texts, kept_outputs)
    assert plan.steps == (
        Step("ada", "Draft it", Access(True)),
        Step("bob", "Answer it", Access(True, (0,)), answers=True),
    )
    assert plan.kept_outputs == {0: kept_outputs[2]}
    recording = Recording("run", {"1": plan, "1.0": RecordedPlan((), instant=True)})
    assert Recording.from_json(json.loads(json.dumps(recording.to_json()))) == recording
    assert (recording.rounds, recording.nests, recording.workers) == (1, True, frozenset({"bob"}))


def turn_with_calls(*calls: tuple[str, str]) -> Message:
    return Message("assistant", (), calls=tuple([ToolCall(f"c{n}", *call) for n, call in enumerate(calls)]))


def result(text: str) -> Message:
    return Message("tool", (Text(text),), call_id="old")


def test_results_are_given_for_equal_calls_under_the_new_ids() -> None:
    came = [result("One."), Message("user", (Text("Go on."),))]
    first = record_tool_use(turn_with_calls(("look", '{"q": 1, "r": 2}')), came, "1.0", frozenset())
    second = record_tool_use(turn_with_calls(("look", '{"q":1,"r":2}')), [result("Two.")], "1.0", frozenset({"phi"}))
    recording = Recording("run", tools=(first, second))
    assert Recording.from_json(json.loads(json.dumps(recording.to_json()))) == recording
    same = turn_with_calls(("look", '{"r":2,"q":1}'))
    results = [
        results_for_calls(recording, place, index, same, ["new"])
        for place, index in (("1.0", 0), ("1.0", 1), ("2.5", 0))
    ]
    assert [recorded.results[0].text for recorded in results if recorded] == ["One.", "Two.", "One."]
    assert [recorded.results[0].call_id for recorded in results if recorded] == ["new"] * 3
    assert results[0] is not None
    assert results[0].results[1].text == "Go on."
    assert results_for_calls(recording, "1.0", 0, turn_with_calls(("look", '{"q":2}')), ["new"]) is None
    assert canonical_arguments("no JSON") == "no JSON"


def test_an_output_that_is_taken_over_keeps_the_labels_that_it_carried() -> None:
    """The labels of tool results, for example, stand nowhere else in the replay."""
    kept_output = KeptOutput(4, "ref-4", "Said.", "stop", labels=frozenset({"record"}))
    state = fold(
        number_events(
            admission(labels=[]),
            open_plan(0, 0),
            plan_step(0, "ada", "user"),
            plan_step(1, "bob", 0, answers=True),
            PlanAccepted(0, "", 2, "chain"),
            drafts.step_taken_over("run_x", 0, "ref-0", kept_output),
        )
    )
    assert (state.steps[0].state, state.state) == ("done", "planned")
    assert LabelFlow(state).readings[1].labels == labels_in_run(state) == {"record"}
