"""The drawings of a run's page: what is drawn, what is said in words, and that nothing is left out without a count."""

import re
from typing import Any

import pytest

from app.console import drawing
from app.core.plan.workflow import Access
from app.core.run.events import PlanAccepted, PlanOpened, PlanStep, StepQueued
from app.core.run.graph import graph
from app.core.run.instant import instant
from app.core.run.timeline import timeline
from tests.core.play import admission, intent, number_events, outcome, step_done

FAILED = (intent("f", 0), outcome("f", 0, usd=3, kind="error"))
CALLS = (StepQueued(0), *FAILED, intent("c", 0), outcome("c", 0, usd=7), step_done(0, "c"))


def run_of(count: int) -> Any:
    """A run whose steps read nothing of each other."""
    opened = PlanOpened(proposal=0, base=0, mode="first", conductor="model", instant=True)
    steps = [PlanStep(0, n, "ada", subtask="", access=Access(user=True), answers=n == count - 1) for n in range(count)]
    accepted = PlanAccepted(proposal=0, call="", steps=count, topology="tree")
    return instant(number_events(admission(), opened, *steps, accepted), 0.0)


def link(step: str | int | None) -> str:
    return f"?step={step}"


def test_withheld_edges_that_are_too_many_are_counted_and_drawn_for_the_chosen_step() -> None:
    graph_data = graph(run_of(13)).to_json()
    svg = drawing.draw_graph(graph_data, "", link)
    assert (svg["withheld"], svg["not_drawn"]) == (78, 78)
    assert not [edge for edge in svg["edges"] if edge["kind"] == "withheld"]
    assert len([edge for edge in svg["list"] if edge["kind"] == "withheld"]) == 78, "the table has all of them"
    chosen = drawing.draw_graph(graph_data, "step:12", link)
    assert [edge["target"] for edge in chosen["edges"] if edge["kind"] == "withheld"] == ["step 12"] * 12
    assert chosen["not_drawn"] == 66
    few = drawing.draw_graph(graph(run_of(4)).to_json(), "", link)
    assert (few["withheld"], few["not_drawn"]) == (6, 0)
    many = graph(run_of(40)).to_json()
    assert [len(drawing.draw_graph(many, name, link)["list"]) for name in ("", "step:39")] == [40, 79]
    assert drawing.draw_graph(many, "", link)["rows"] == 820


def test_granted_edges_that_lead_far_are_counted_and_drawn_for_the_chosen_step() -> None:
    graph_data = graph(run_of(60)).to_json()
    places = {node["id"]: node["x"] for node in graph_data["nodes"]}
    far = [edge for edge in graph_data["edges"] if edge["what"] == "conversation" and places[edge["target"]] > 1]
    few = drawing.draw_graph(graph(run_of(4)).to_json(), "", link)
    assert few["far_not_drawn"] == 0
    svgs = {name: drawing.draw_graph(graph_data, name, link) for name in ("", "step:59", "caller")}
    assert [svgs[name]["far_not_drawn"] for name in svgs] == [len(far), len(far) - 1, 0]
    assert len(svgs["caller"]["edges"]) - len(svgs[""]["edges"]) == len(far)


def test_each_call_has_a_mark_and_a_replacement_is_named() -> None:
    node = {"worker": "bob", "planned_worker": "ada"}
    assert drawing._title("step 0", node, "bob") == "step 0, bob in place of ada"
    calls = [{"worker": "ada", "outcome": "error", "error": "late"}, {"worker": "bob", "outcome": None, "error": None}]
    assert [mark["title"] for mark in drawing._marks(calls, 0, 0)] == ["bob: goes on", "ada: error (late)"]


def test_every_reason_for_which_words_are_withheld_is_a_sentence() -> None:
    edge = {"kind": "withheld", "worker": "bob", "by": "conductor", "detail": "", "sent": False, "reason": "not_listed"}
    assert drawing.reason(edge) == "It is not on the access list, by the conductor's plan."
    policy = {"reason": "policy", "by": "clearance", "detail": "not cleared for phi"}
    assert drawing.reason(edge | policy) == "bob may not read it, by clearance: not cleared for phi."
    empty = {"reason": "no_output", "by": "failed", "detail": "no_time"}
    assert drawing.reason(edge | empty) == (
        "It is on the access list, but the step ended without words: failed (no_time)."
    )


def test_bars_lie_on_the_axis_by_time_and_by_money() -> None:
    events = number_events(*[event.fact for event in run_of(1).events], *CALLS)
    timed = tuple(type(event).of("run", event.seq, event.seq / 4, event.fact) for event in events)
    timeline_data = timeline(instant(timed, 0.0)).to_json()
    for by, whole in (("time", timeline_data["length_seconds"]), ("money", timeline_data["cost_usd"])):
        svg = drawing.draw_timeline(timeline_data, timeline_data["length_seconds"], by, "step:0", link)  # type: ignore[arg-type]
        assert svg["ticks"][-1]["value"] == pytest.approx(whole)
        bars = [bar for row in svg["rows"] for bar in row["bars"]]
        assert all(bar["x"] >= 0 and bar["x"] + bar["width"] <= 100.001 for bar in bars)
        [step] = [row for row in svg["rows"] if row["name"] == "step 0"]
        assert (step["chosen"], step["href"]) == (True, "?step=0")
        classes = [bar["class"].split() for bar in step["bars"]]
        assert {names[1] for names in classes} >= {"step", "attempt"}
        phases = [names for names in classes if names[1] in ("first_word", "stream")]
        assert any("of_failed" in names for names in phases) is (by == "time"), "the colour of a failed call is its own"


def test_the_neighbours_of_an_instant_are_the_changes_around_it() -> None:
    assert drawing.neighbours([0.0, 1.0, 2.0], 1.0) == (0.0, 2.0)
    assert drawing.neighbours([0.0, 1.0, 2.0], 1.5) == (1.0, 2.0)
    assert drawing.neighbours([0.0], 0.0) == (None, None)


@pytest.mark.parametrize(("source", "target"), [((0, 0), (3, 2)), ((0, 2), (2, 0)), ((1, 1), (4, 0))])
@pytest.mark.parametrize("is_withheld", [True, False])
def test_an_edge_between_two_rows_passes_no_node_between_them(
    source: tuple[int, int], target: tuple[int, int], is_withheld: bool
) -> None:
    ends = [{"x": x, "y": y} for x, y in (source, target)]
    path = drawing._path(ends[0], ends[1], is_withheld=is_withheld)
    across = re.search(r" (\d+)L(\d+) ", path)
    assert across is not None
    height, end = int(across[1]), int(across[2])
    assert (height - drawing.VERTICAL_MARGIN) % drawing.ROW_HEIGHT > drawing.NODE_HEIGHT, "it runs between two rows"
    assert end == drawing.MARGIN + (target[0] - 1) * drawing.COLUMN_WIDTH + drawing.NODE_WIDTH, (
        "it turns before its node"
    )
