"""The graph, the timeline and the state of a run at every instant of runs that were played by chance."""

from collections.abc import Sequence
from random import Random

import pytest
from msgspec.structs import replace

from app.core.message.chat import Usage
from app.core.plan.workflow import Access
from app.core.run.events import (
    CallFinished,
    CallIntended,
    Event,
    Fact,
    PlanAccepted,
    PlanOpened,
    PlanRejected,
    PlanStep,
    StepQueued,
)
from app.core.run.fold import fold
from app.core.run.graph import Edge, Graph, graph
from app.core.run.instant import Instant, instant, snapshot
from app.core.run.layout import Place, layout
from app.core.run.recipients import EMBEDDING_TEMPLATE, steps_seen_by_recipient
from app.core.run.state import Proposal
from app.core.run.timeline import WITHOUT_MONEY, Span, timeline
from app.core.run.withheld import find_decider
from tests.core.play import Play, admission, intent, outcome, step_done, step_failed

RUNS = 20
PAUSE = 0.25


def play_by_chance(seed: int) -> tuple[Event, ...]:
    """A run that was played by chance, an event every `PAUSE` seconds."""
    play = Play(Random(seed))
    play.play()
    return time_facts(*[event.fact for event in play.events])


def time_facts(*written: Fact) -> tuple[Event, ...]:
    """A journal of these, an event every `PAUSE` seconds."""
    return tuple(Event.of("run", seq, 1_000.0 + seq * PAUSE, fact) for seq, fact in enumerate(written, 1))


def plan_facts(*steps: PlanStep, conductor: str = "model") -> list[Fact]:
    """A run with one accepted plan of these steps."""
    opened = PlanOpened(proposal=0, base=0, mode="first", conductor=conductor, instant=True)
    return [admission(), opened, *steps, PlanAccepted(proposal=0, call="", steps=len(steps), topology="chain")]


def step(n: int, *access: str | int, worker: str = "ada") -> PlanStep:
    step_access = Access("user" in access, tuple(place for place in access if isinstance(place, int)))
    return PlanStep(proposal=0, n=n, worker=worker, subtask=f"sub-{n}", access=step_access, answers=False)


def edges(whole: Graph, target: str) -> Sequence[Edge]:
    """The edges to a node, without that of its subtask."""
    return [edge for edge in whole.edges if edge.target == target and edge.what != "subtask"]


def test_a_node_keeps_its_place_when_the_streamed_plan_adds_another_one() -> None:
    for seed in range(RUNS):
        events = play_by_chance(seed)
        before: dict[str, Place] = {}
        for seq in range(1, len(events) + 1):
            whole = graph(instant(events, 0.0, seq=seq))
            places = {node.id: node.place for node in whole.nodes}
            assert before.items() <= places.items()
            assert len(set(places.values())) == len(places), "two nodes have the same place"
            before = places


def test_outputs_go_to_the_right_and_every_column_begins_at_the_mean_of_what_it_reads() -> None:
    for seed in range(RUNS):
        whole = graph(instant(play_by_chance(seed), 0.0))
        places = {node.id: node.place for node in whole.nodes}
        for edge in whole.edges:
            if edge.kind == "granted":
                assert places[edge.source].x < places[edge.target].x, edge
    fan = [("plan", []), ("a", ["plan"]), ("b", ["plan"]), ("c", ["plan"]), ("join", ["a", "b", "c"])]
    assert layout(fan)["join"] == Place(2, 1)


def test_a_sent_edge_is_drawn_for_exactly_what_a_call_contained() -> None:
    for seed in range(RUNS):
        events = play_by_chance(seed)
        whole = graph(instant(events, 0.0))
        for event in events:
            fact = event.fact
            if not isinstance(fact, CallIntended) or fact.n is None:
                continue
            sources = {edge.source for edge in edges(whole, f"step:{fact.n}") if edge.sent}
            assert {f"step:{n}" for n in steps_seen_by_recipient(fact)} <= sources
            assert ("caller" in sources) is fact.access.user
        assert not any(edge.sent for edge in whole.edges if edge.kind == "withheld")


def test_what_is_left_off_the_access_list_is_withheld_by_whoever_planned() -> None:
    whole = graph(instant(time_facts(*plan_facts(step(0, "user"), step(1), step(2, 1), conductor="caller")), 0.0))
    assert edges(whole, "step:0") == [Edge("caller", "step:0", "granted", "conversation")]
    withheld = [(edge.source, edge.kind, edge.reason, edge.by) for edge in edges(whole, "step:2")]
    assert withheld == [
        ("step:1", "granted", "", ""),
        ("caller", "withheld", "not_listed", "caller"),
        ("step:0", "withheld", "not_listed", "caller"),
    ]


def test_the_choice_of_a_later_round_decides_nothing_about_an_earlier_plan() -> None:
    events: list[Event] = []
    proposals: list[Proposal] = []
    for number, action in enumerate(["model", "accept", "answer ada"]):
        decided = {"action": action}
        opened = PlanOpened(number, number, "first", "selector", round=number + 1, instant=False, decision=decided)
        events += time_facts(opened)
        proposals.append(Proposal(number, number, "first", "selector"))
    assert [find_decider(proposal, events) for proposal in proposals] == ["conductor", "selector", "selector"]
    repaired = Proposal(1, 0, "repair", "selector")
    assert find_decider(repaired, events[:1]) == "conductor"


def test_the_embedding_that_a_selector_looks_at_belongs_to_the_plan_that_follows() -> None:
    admitted, *planned = plan_facts(step(0, "user"), conductor="selector")
    call = replace(intent("c0", None, worker="eye"), template=EMBEDDING_TEMPLATE, attempt=0)  # type: ignore[type-var]
    whole = graph(instant(time_facts(admitted, call, outcome("c0", None, usd=3), *planned), 0.0))
    plan = next(node for node in whole.nodes if node.id == "plan:0")
    assert ([attempt.worker for attempt in plan.attempts], plan.usd, plan.worker) == (["eye"], 3, "")
    assert [(edge.source, edge.what, edge.sent) for edge in edges(whole, "plan:0")] == [
        ("caller", "conversation", True)
    ]


def test_the_embedding_for_a_later_plan_is_no_part_of_the_plan_before_it() -> None:
    facts: list[Fact] = [admission()]
    for number in range(2):
        call = replace(intent(f"c{number}", None), template=EMBEDDING_TEMPLATE, attempt=number)  # type: ignore[type-var]
        opened = PlanOpened(proposal=number, base=0, mode="first", conductor="selector", instant=False)
        facts += [call, outcome(call.call, None, usd=3), opened]
        facts.append(PlanRejected(proposal=number, call="", reasons=("the driver was lost",), outage=False))
    whole = timeline(instant(time_facts(*facts), 0.0))
    spent = {span.id: span.usd for span in whole.spans if span.kind in ("planning", "run")}
    assert spent == {"run": 6, "plan:0": 0, "plan:1": 0}
    assert {span.id: span.parent for span in whole.spans if span.kind == "attempt"} == {
        "call:c0": "run",
        "call:c1": "round:1",
    }


def test_an_output_without_words_is_withheld_because_there_is_none() -> None:
    facts_planned = plan_facts(step(0, "user"), step(1, "user", 0))
    facts = [*facts_planned, intent("c0", 0), outcome("c0", 0, kind="error"), step_failed(0)]
    [edge] = [
        edge
        for edge in edges(graph(instant(time_facts(*queue_steps(facts, 0)), 0.0)), "step:1")
        if edge.source == "step:0"
    ]
    assert (edge.kind, edge.reason, edge.by, edge.detail) == ("withheld", "no_output", "failed", "worker_failed")


def test_a_worker_that_may_not_read_the_labels_is_named_with_the_reason() -> None:
    facts_planned = plan_facts(step(0, "user", worker="bob"))
    passed = (("bob", "not cleared for phi"), ("cyd", "misconfigured"), ("eve", "excluded by the rule r-7"))
    call = replace(intent("c0", 0), passed_over=passed)  # type: ignore[type-var]
    whole = graph(instant(time_facts(*queue_steps([*facts_planned, call], 0)), 0.0))
    withheld = [
        (edge.worker, edge.reason, edge.by, edge.detail) for edge in edges(whole, "step:0") if edge.kind == "withheld"
    ]
    assert withheld == [
        ("bob", "policy", "clearance", "not cleared for phi"),
        ("eve", "policy", "rule", "excluded by the rule r-7"),
    ]
    node = whole.nodes[-1]
    assert (node.worker, node.planned_worker, [attempt.worker for attempt in node.attempts]) == ("ada", "bob", ["ada"])


def queue_steps(facts: Sequence[Fact], *steps: int) -> list[Fact]:
    """These facts with the tickets of steps behind the plan."""
    place = next(n for n, fact in enumerate(facts) if isinstance(fact, PlanAccepted)) + 1
    return [*facts[:place], *(StepQueued(n) for n in steps), *facts[place:]]


def test_spans_lie_in_each_other_and_add_up_to_the_money_of_the_run() -> None:
    for seed in range(RUNS):
        events = play_by_chance(seed)
        state = fold(events)
        for seq in sorted({1, len(events) // 2, len(events)}):
            at = instant(events, 0.0, seq=seq)
            whole = timeline(at)
            spans = {span.id: span for span in whole.spans}
            assert len(spans) == len(whole.spans), "every span has an id of its own"
            path = [whole.spans[0].id]
            for span in whole.spans[1:]:
                around = spans[span.parent or ""]
                assert around.id in path, "what is in a span follows it, before the next beside it"
                path = [*path[: around.depth + 1], span.id]
                assert around.start <= span.start
                assert around.end is None or _end(span, at) <= around.end or span.kind in AFTER_THE_END
                assert span.depth == around.depth + 1
                assert span.end is None or span.end >= span.start
            assert whole.spans[0].usd == at.state.usd
            attempts = [span for span in whole.spans if span.kind == "attempt"]
            assert {span.call for span in attempts} == set(at.state.calls)
            assert sum(span.usd for span in attempts) == at.state.usd
        assert all(span.end is not None for span in timeline(instant(events, 0.0)).spans), state.state


AFTER_THE_END = ("attempt", "first_word", "stream")
"""Calls in flight get their outcomes after the end of their run."""


def _end(span: Span, at: Instant) -> float:
    return span.end if span.end is not None else at.seconds


def test_areas_by_money_lie_side_by_side_inside_the_area_around_them() -> None:
    for seed in range(RUNS):
        whole = timeline(instant(play_by_chance(seed), 0.0))
        spans = {span.id: span for span in whole.spans}
        reached: dict[str, int] = {}
        for span in whole.spans[1:]:
            if span.kind in WITHOUT_MONEY:
                continue
            around = spans[span.parent or ""]
            assert span.usd_before == reached.get(around.id, around.usd_before)
            reached[around.id] = span.usd_before + span.usd
            assert reached[around.id] <= around.usd_before + around.usd


def test_a_call_has_the_time_until_its_first_word_and_that_of_its_stream() -> None:
    end = CallFinished("c0", 0, "ok", Usage(10, 0, 5), usd=7, seconds=0.25, first=0.1, output="out")
    events = time_facts(*queue_steps([*plan_facts(step(0, "user")), intent("c0", 0), end, step_done(0, "c0")], 0))
    spans = {span.kind: span for span in timeline(instant(events, 0.0)).spans if span.step == 0}
    assert spans["queue"].seconds == pytest.approx(PAUSE)
    assert spans["first_word"].seconds == pytest.approx(0.1)
    assert spans["stream"].seconds == pytest.approx(PAUSE - 0.1)
    assert (spans["step"].usd, spans["attempt"].usd, spans["stream"].to_json()["cost_usd"]) == (7, 7, None)


def test_the_pause_between_two_calls_of_a_step_is_a_span_of_its_own() -> None:
    calls = [intent("c0", 0), outcome("c0", 0, kind="error"), intent("c1", 0), outcome("c1", 0), step_done(0, "c1")]
    spans = timeline(instant(time_facts(*queue_steps([*plan_facts(step(0, "user")), *calls], 0)), 0.0)).spans
    [retry] = [span for span in spans if span.kind == "retry"]
    assert retry.seconds == pytest.approx(PAUSE)
    assert [span.state for span in spans if span.kind == "attempt"] == ["error", "ok"]


def test_the_state_at_an_instant_is_the_fold_of_the_events_until_then() -> None:
    for seed in range(RUNS):
        events = play_by_chance(seed)
        for seq in range(1, len(events) + 1):
            at = instant(events, 0.0, seq=seq)
            assert at.state == fold(events[:seq])
            assert instant(events, 0.0, seconds=round(events[seq - 1].at - events[0].at, 6)).state.seq == seq
            state_shown = snapshot(at)
            assert {step["n"]: step["state"] for step in state_shown["steps"]} == {
                step.n: step.state for step in at.state.steps.values()
            }
            assert (state_shown["seq"], state_shown["last_seq"], state_shown["state"]) == (
                seq,
                len(events),
                at.state.state,
            )
        assert instant(events, 0.0, seconds=10_000.0).seconds == pytest.approx(events[-1].at - events[0].at)


def test_an_event_that_the_journal_does_not_have_is_refused() -> None:
    events = play_by_chance(1)
    for seq in (0, len(events) + 1):
        with pytest.raises(ValueError, match=f"{len(events)} events"):
            instant(events, 0.0, seq=seq)


def test_a_run_that_goes_on_is_as_long_as_the_time_that_has_passed() -> None:
    events = time_facts(*plan_facts(step(0, "user")))
    at = instant(events, events[0].at + 60.0)
    assert (at.seconds, at.length) == (60.0, 60.0)
    assert timeline(at).spans[0].seconds == 60.0
    assert timeline(at).spans[0].end is None
