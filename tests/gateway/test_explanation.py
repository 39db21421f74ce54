"""The explanation of a run: nothing in its words that is not in its data, and data that agrees with the journal."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from app.core.plan.workflow import CONDUCTOR, Access
from app.core.pool.catalog import Card, Price, Worker
from app.core.rating.decision import LAYER
from app.core.rating.feedback import Feedback
from app.core.run.events import (
    Event,
    Fact,
    PlanAccepted,
    PlanOpened,
    PlanRejected,
    PlanStep,
    RunAdmitted,
    RunCancelled,
    RunSucceeded,
    StepDone,
    StepQueued,
    StepSkipped,
)
from app.core.run.fold import fold
from app.core.run.kinds import DRIVER_LOST
from app.core.run.state import RunState
from app.gateway.runs import audit, explanation_words
from app.gateway.runs.explanation import ReadRun, explanation_of
from app.store.protocol import Journal
from tests.core.play import POOL, Play, admission, intent, number_events, outcome, step_done, step_failed
from tests.harness.in_process import plan
from tests.harness.stand_ins import GatewayStandIn, row_of, store_contents
from tests.stubs import Fail, ProviderStub, Reply

RUNS = 60
WORD, NUMBER = re.compile(r"[^\W\d_]+"), re.compile(r"\d+(?:\.\d+)?(?:e-?\d+)?")
PRICE = Price(input=1_000_000, output=2_000_000)
WORKERS = {
    name: Worker(name, "stub", name, PRICE if n else Price(500_000, 900_000), Card(strengths=("proofs",)))
    for n, name in enumerate(POOL)
}
DECISION = {
    "layer": LAYER,
    "policy": "selector-2/mini",
    "version": "3-abc",
    "features": "ref",
    "candidates": {"answer ada": 0.62499999999, "answer bob": 0.25 + 1e-11, "reason cyd": 0.125},
    "action": "answer bob",
    "propensity": 0.25 + 1e-11,
    "explored": True,
    "explore": 0.05,
    "seed": "run/0",
    "predicted": {"answer ada": {"success": 0.71, "usd": 1_234}, "answer bob": {"success": 0.685, "usd": 777}},
    "masked": {"judge ada": {"usd": 9_999}},
}


APPROVALS = [
    {
        "proposal": 0,
        "needed_because": ["the price is above $0.5"],
        "worst_case_usd": price,
        "decision": decision,
        "by": by,
        "max_usd": most,
        "reason": {"state": "given" if text else "none", "text": text},
    }
    for decision, by, price, most, text in (
        ("approved", "key9", 0.25, 0.75, "Within budget 12."),
        ("refused", "boss", None, None, None),
        ("expired", None, 0.25, None, None),
        (None, None, 0.25, None, None),
    )
]


def play_by_chance(seed: int) -> tuple[RunState, list[Event]]:
    """A run that was played by chance, with reasons, decisions and exclusions strewn over its events."""
    chance = Random(seed)
    play = Play(chance)
    play.play()
    conductor = chance.choice(["model", "model", "caller", "fixed", "random", "selector"])
    written = [_with_more(event.fact, chance, conductor) for event in play.events]
    return play.state, [Event.of("run", seq, 1.0, fact) for seq, fact in enumerate(written, 1)]


def _with_more(fact: Fact, chance: Random, conductor: str) -> Fact:
    if isinstance(fact, RunAdmitted):
        excluded = {"dee": chance.choice(["not cleared for phi", "excluded by the rule r-7", "cannot call tools"])}
        return replace(fact, conductor=conductor, excluded=excluded)
    if isinstance(fact, PlanOpened):
        decision = DECISION if conductor == "selector" and fact.mode == "first" else None
        kind = conductor if fact.mode != "fallback" else "fallback"
        return replace(fact, reasons=chance.random() < 0.7, decision=decision, conductor=kind)
    if isinstance(fact, PlanStep):
        return replace(fact, why=chance.choice(["", "why"]), why_withheld=chance.choice(["", "lost"]))
    return replace(fact, why=chance.choice(["", "shape"])) if isinstance(fact, PlanAccepted) else fact


def literals() -> set[str]:
    """The words of the phrases of the module that writes the sentences."""
    tree = ast.parse(Path(explanation_words.__file__).read_text())
    constants = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return {word for constant in constants if isinstance(constant, str) for word in WORD.findall(constant)}


def values(data: Any) -> Iterator[Any]:
    """Every text and number of the data, save its words and the definition of a figure."""
    if isinstance(data, dict):
        for name, value in data.items():
            if name not in ("text", "method") or isinstance(value, type(None)) or set(data) == {"state", "text"}:
                yield from values(value)
    elif isinstance(data, list):
        for value in data:
            yield from values(value)
    elif data is not None and not isinstance(data, bool):
        yield data


def find_invented(data: dict[str, Any], vocabulary: set[str]) -> list[str]:
    """The words and figures of an explanation that are neither in its data nor in the module's phrases."""
    data_values = list(values(data))
    left = data["text"]
    for text in sorted({value for value in data_values if isinstance(value, str) and value}, key=len, reverse=True):
        left = re.sub(rf"(?<!\w){re.escape(text)}(?!\w)", " ", left)
    figures = [value for value in data_values if not isinstance(value, str)]
    numbers = []
    for number in NUMBER.findall(left):
        if not any(abs(float(number) - figure) < 1e-9 for figure in figures):
            numbers.append(number)
    return numbers + [word for word in WORD.findall(left) if word not in vocabulary]


@pytest.mark.long
def test_the_words_of_many_runs_have_no_figure_and_no_name_that_is_not_in_the_data() -> None:
    vocabulary, covered = literals(), set()
    texts = {"why": "Because Ada is\x1b[31m good at 90 proofs.", "shape": 'Two of 3 "steps" check.'}
    for seed in range(RUNS):
        state, events = play_by_chance(seed)
        row = row_of("run", "acme", state=state.state)
        rating = Feedback("f", "run", "acme", "", 1.0, "explicit", "caller", "", 1 / 3, "fine")
        ratings = [rating] if seed % 2 else []
        pool = WORKERS if seed % 3 else None
        journal = Journal(b"salt", tuple(events))
        folded = fold(journal.events)
        whole = audit.render_run(row, journal, ratings, folded)
        data = explanation_of(ReadRun(row, journal, folded, whole), pool, texts if seed % 5 else None)
        data |= {"approvals": APPROVALS[: seed % 5], "origin": {"kind": "replay", "run": "run_other"}}
        data["text"] = explanation_words.text(data)
        clean = {name: " ".join(text.replace("\x1b", " ").split()) for name, text in texts.items()}
        assert "\x1b" not in data["text"]
        assert find_invented(data | {"quoted": list(clean.values())}, vocabulary) == [], data["text"]
        covered |= {gap["cause"] for gap in data["unknown"]}
        covered |= {part["reason"]["state"] for step in data["steps"] for part in (step, step["withheld"])}
        covered |= {data["shape"]["decided_by"]}
    expected = {"not_asked", "none", "given", "erased", "not_shown", "not_reported", "no_prices", "outcome_lost"}
    assert covered >= expected | {"conductor", "caller", "fixed_plan", "random_plan", "selector", "not_rated"}


def test_an_invented_figure_or_name_would_be_found() -> None:
    _, events = play_by_chance(1)
    row, journal = row_of("run", "acme"), Journal(b"salt", tuple(events))
    state = fold(journal.events)
    data = explanation_of(ReadRun(row, journal, state, audit.render_run(row, journal, (), state)), WORKERS)
    assert find_invented(data, literals()) == []
    assert find_invented(data | {"text": data["text"] + " It saved 17 % for zoe."}, literals()) == [
        "17",
        "saved",
        "zoe",
    ]


def explain(*written: Fact) -> dict[str, Any]:
    """The explanation of the run of these facts."""
    journal = Journal(b"salt", number_events(*written))
    state = fold(journal.events)
    row = row_of("run", "acme", state=state.state)
    return explanation_of(ReadRun(row, journal, state, audit.render_run(row, journal, (), state)), WORKERS)


def planned(*steps: tuple[str, Access], number: int = 0, base: int = 0, **opening: Any) -> list[Fact]:
    """The facts of an accepted plan of these workers, each with what it may see; the last one answers."""
    facts: list[Fact] = [PlanOpened(number, base, "first", "caller", **opening)]
    for n, (worker, access) in enumerate(steps, base):
        answers = n == base + len(steps) - 1
        facts.append(PlanStep(number, n, worker, "", access, answers, parent=opening.get("parent")))
    return [*facts, PlanAccepted(number, "", len(steps), "chain")]


def called(n: int, *, fails: bool = False) -> list[Fact]:
    """The facts of a step that one call is made for."""
    call = f"call-{n}"
    if fails:
        return [StepQueued(n), intent(call, n), outcome(call, n, kind="error"), step_failed(n)]
    return [StepQueued(n), intent(call, n), outcome(call, n), step_done(n, call)]


def gaps(data: dict[str, Any]) -> set[str]:
    return {gap["about"] for gap in data["unknown"]}


USER = Access(user=True)


def test_of_what_a_step_was_granted_only_what_there_was_has_been_seen() -> None:
    plan_facts = planned(("ada", USER), ("bob", USER), ("cyd", Access(user=False, steps=(0, 1))))
    before = [admission(), *plan_facts, *called(0), *called(1, fails=True)]
    waiting = explain(*before)["steps"][2]
    assert (waiting["has_begun"], waiting["saw"]["steps"]) == (False, [0, 1])
    data = explain(*before, *called(2), RunSucceeded(step=2, answer="ref-2", finish="stop"))
    assert data["steps"][2]["saw"] == {"user": False, "task_of": None, "steps": [0], "unseen": [1], "tool_results": 0}
    assert data["answer"]["rests_on"] == [0]
    assert "It saw the output of step 0. Withheld: the caller's words" in data["text"]
    assert "Nothing was shown of step 1, which ended without an output." in data["text"]


def test_of_a_step_that_was_skipped_nothing_is_still_to_come() -> None:
    plan_facts = planned(("ada", USER), ("bob", Access(user=False, steps=(0,))))
    text = explain(admission(), *plan_facts, *called(0, fails=True), StepSkipped(1, "input_lost"))["text"]
    assert "It would have seen the output of step 0." in text
    assert "would see" not in text
    uncalled = explain(admission(), *plan_facts, StepQueued(0), step_failed(0))["text"]
    assert "It would have seen the caller's conversation." in uncalled
    skipped = [StepSkipped(0, "run_ended"), StepSkipped(1, "run_ended")]
    preview = explain(admission(preview=True), *plan_facts, *skipped)["text"]
    assert "It would see the output of step 0." in preview, "if the plan were executed"


def test_a_preview_that_was_cancelled_is_not_said_to_be_planned() -> None:
    opened = PlanOpened(0, 0, "first", "model")
    assert explain(admission(preview=True), opened, RunCancelled(error="run_cancelled"))["text"].startswith(
        "run of baton-mini was cancelled."
    )


def test_an_output_that_a_replay_kept_is_named_as_such() -> None:
    kept = StepDone(0, "", "ref-0", 5, "stop", origin_run="run_earlier", origin_step=3, origin_output="ref")
    data = explain(admission(), *planned(("ada", USER)), kept)
    assert data["steps"][0]["kept_from"] == {"run": "run_earlier", "step": 3}
    assert "Nobody was called for it: its output is that of step 3 of run_earlier." in data["text"]


def test_the_answer_of_a_nested_workflow_does_not_agree_with_itself() -> None:
    nested = planned(("ada", USER), number=1, base=1, parent=0, room=3)
    done = StepDone(0, "call-1", "ref-1", 5, "stop", from_step=1)
    end = RunSucceeded(step=0, answer="ref-1", finish="stop")
    data = explain(admission(), *planned((CONDUCTOR, USER)), *nested, *called(1), done, end)
    assert (data["answer"]["same_text"], data["answer"]["other_answers"]) == ([], [])
    assert "agreement" not in gaps(data)
    assert "the output of step 0 (the conductor itself)" in data["text"]
    assert "would see" not in data["text"], "the conductor was shown it when it was asked for a plan"


def test_a_nested_step_that_was_shown_the_task_of_the_step_around_it_is_said_to_have_seen_it() -> None:
    *before, conductor, accepted = planned(("ada", USER), (CONDUCTOR, Access(user=False)))
    [opened, inner, inner_accepted] = planned(("bob", Access(user=False)), number=1, base=2, parent=1, room=3)
    assert isinstance(inner, PlanStep)
    nested = [opened, replace(inner, inherits=True), inner_accepted]
    text = explain(admission(), *before, conductor, accepted, *called(0), *nested, *called(2))["text"]
    assert "It saw the task of step 1. Withheld: the caller's words" in text
    assert "nothing but its subtask" not in text.partition("Step 2")[2]


def test_the_shape_is_explained_by_the_choice_of_the_round_that_it_is_of() -> None:
    """In a further round the selector chooses to accept the answer, which has no shape."""
    opened, *first = planned(("ada", USER))
    assert isinstance(opened, PlanOpened)
    chosen = replace(opened, conductor="selector", decision=DECISION)
    accepts = DECISION | {"action": "accept", "candidates": {"accept": 1.0}}
    second = PlanOpened(1, 1, "first", "selector", round=2, decision=accepts)
    shape = explain(admission(), chosen, *first, *called(0), second, PlanAccepted(1, "", 0, ""))["shape"]
    assert shape["decided_by"] == "selector"
    assert (shape["choice"]["action"], shape["choice"]["proposal"]) == ("answer bob", 0)


def test_equal_texts_leave_no_question_whether_they_agree() -> None:
    end = RunSucceeded(step=1, answer="ref-1", finish="stop")
    facts = [admission(), *planned(("ada", USER), ("bob", USER)), *called(0), *called(1), end]
    assert "agreement" in gaps(explain(*facts))
    same = [replace(fact, output="ref-1") if isinstance(fact, StepDone) else fact for fact in facts]
    assert "agreement" not in gaps(explain(*same))


def test_prices_are_not_called_unknown_before_a_step_has_cost_anything() -> None:
    planning = [intent("call-p", None), outcome("call-p", None)]
    assert "cheapest" not in gaps(explain(admission(), *planning))
    running = [*planned(("ada", USER)), StepQueued(0), intent("call-0", 0)]
    assert "cheapest" not in gaps(explain(admission(), *running))


def test_a_plan_that_was_cut_short_is_told_apart_from_a_further_round_that_failed() -> None:
    plan_facts = planned(("ada", USER), ("bob", Access(user=True, steps=(0,))))
    short = RunSucceeded(step=0, stopped="run_over_budget", answer="ref-0", finish="stop", fell_back=True)
    cut_short = explain(admission(), *plan_facts, *called(0), *called(1, fails=True), short)["text"]
    assert "could not be carried out to its end (run_over_budget)" in cut_short
    assert "the last step returned nothing" not in cut_short
    further = [PlanOpened(1, 1, "first", "model", round=2), PlanRejected(1, "", ("worker_refused",), outage=True)]
    end = RunSucceeded(step=0, stopped="plan_rejected", answer="ref-0", finish="stop")
    failed = explain(admission(), *planned(("ada", USER)), *called(0), *further, end)["text"]
    assert "a further round was begun, and it has no answer (plan_rejected)" in failed
    assert "could not be carried out to its end" not in failed


def test_a_conductor_is_not_blamed_for_an_engine_that_was_lost_while_planning() -> None:
    for reason, failure in (("worker_refused", "the conductor failed"), (DRIVER_LOST, "the engine was lost")):
        lost = [PlanOpened(0, 0, "first", "model"), PlanRejected(0, "", (reason,), outage=True)]
        assert f"Proposal 0 was not used, because {failure}: " in explain(admission(), *lost)["text"]


@pytest.mark.long
async def test_a_run_is_explained_by_the_figures_of_its_record_and_of_reports(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    stub.script("alpha", Fail(status=401))
    stub.always("*", Reply(chunks=("Four.",)))
    steps = plan(("alpha", "Think", ["user"]), ("beta", "Draft", ["user"]), ("gamma", "Answer", [1]))
    request_body = {"model": "baton-mini", "messages": [{"role": "user", "content": "What is 2 + 2?"}]}
    run = (await client.post("/v1/chat/completions", json=request_body | {"baton": {"plan": steps}})).json()["baton"][
        "run"
    ]
    whole, data = [(await client.get(f"/v1/runs/{run}{path}")).json() for path in ("", "/explain")]
    assert (data["object"], data["run"], data["shape"]["decided_by"]) == ("run.explanation", run, "caller")
    first, _, last = data["steps"]
    assert (first["planned_worker"], first["replaced"], first["failed_calls"]) == ("alpha", True, 1)
    assert last["saw"] == {"user": False, "task_of": None, "steps": [1], "unseen": [], "tool_results": 0}
    assert {name: last["withheld"][name] for name in ("user", "steps", "by")} == {
        "user": True,
        "steps": [0],
        "by": "caller",
    }
    assert data["answer"]["same_text"] == [0, 1], "equal outputs are recognised without reading them"
    report = (await client.get("/v1/reports")).json()["cheapest"]
    assert data["cost"]["cost_usd"] == whole["cost_usd"] > 0
    assert data["cost"]["cheapest_usd"] == report["cheapest_cost_usd"]
    assert data["cost"]["steps_usd"] == report["cost_usd"]
    assert "by the caller's plan" in data["text"]
    assert "took over from alpha" in data["text"]
    assert "nobody has rated it" in data["text"]
    again = (await client.post("/v1/chat/completions", json=request_body | {"baton": {"plan": steps}})).json()["baton"][
        "run"
    ]
    passed = (await client.get(f"/v1/runs/{again}/explain")).json()
    assert passed["steps"][0]["not_called"] == [
        {"worker": "alpha", "reason": "misconfigured", "by": "health", "proposal": None}
    ]
    assert "alpha was not called because it fails: misconfigured." in passed["text"]


async def test_only_who_may_read_an_answer_reads_the_reasons_of_its_plan(
    gateway: GatewayStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_contents(gateway.store)
    gateway.store.rows = [row_of("run_mine", "acme", key="owner")]
    gateway.store.stored_contents["why"] = b"Beta is good at sums."
    _, events = play_by_chance(1)
    written = [replace(event.fact, why="why") if isinstance(event.fact, PlanStep) else event.fact for event in events]
    whole_journal = Journal(
        b"salt", tuple([Event.of("run_mine", seq, 1.0, fact) for seq, fact in enumerate(written, 1)])
    )

    async def journal(_run: str) -> Journal:
        return whole_journal

    monkeypatch.setattr(gateway.store, "journal", journal)
    states = {}
    for name, scopes in (("owner", ["runs:read"]), ("other", ["runs:read"]), ("auditor", ["runs:read", "audit:read"])):
        async with gateway.client(gateway.add_key(name, scopes=scopes)) as client:
            reply = await client.get("/v1/runs/run_mine/explain")
        states[name] = {step["reason"]["state"] for step in reply.json()["steps"]}
        assert ("good at sums" in reply.text) is (name != "other")
    assert states == {"owner": {"given"}, "other": {"not_shown"}, "auditor": {"given"}}
