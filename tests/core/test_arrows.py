"""All pairs of a state and an event: every arrow that `journal.py` draws happens, and no other."""

from itertools import product

import pytest
from msgspec.structs import replace

from app.core.message.chat import Usage
from app.core.plan.workflow import Access, Step
from app.core.run import drafts, kinds
from app.core.run.events import (
    TERMINAL,
    Event,
    Fact,
    Kind,
    RunAdmitted,
    RunApprovalExpired,
    RunApproved,
    RunAwaitingApproval,
    RunAwaitingTool,
    RunRefused,
    StepToolResults,
)
from app.core.run.fold import advance, fold
from app.core.run.kinds import AFTER_THE_END, ENDED, OUTCOMES, RUN_ARROWS, RUN_STATES, STEP_ARROWS
from app.core.run.progress import Propose
from app.core.run.state import Call, Exchange, Proposal, RunState, StepState
from app.errors import EventMalformed
from tests.core.play import POOL, admission, await_tools, intent, number_events, outcome, resume, step_done, step_failed
from tests.harness.raw_facts import fact_from_json

STEP_KINDS = {
    Kind.STEP_QUEUED: "queued",
    Kind.CALL_INTENDED: "running",
    Kind.STEP_AWAITING: "awaiting_tool",
    Kind.STEP_RESULTS: "running",
    Kind.STEP_DONE: "done",
    Kind.STEP_FAILED: "failed",
    Kind.STEP_SKIPPED: "skipped",
}
LEAVES = {Kind.CALL_INTENDED: {"queued"}, Kind.STEP_RESULTS: {"awaiting_tool"}}
"""Two kinds lead to `running`, each from one state."""
SETTLED = {"done", "failed", "skipped"}
ASKED = RunAwaitingApproval(
    turn=0,
    proposal=0,
    digest="digest",
    plan="plan",
    until=7.0,
    seconds=2.0,
    reasons=("tier",),
    price=None,
    workers={"ada": "mark"},
    catalog="catalog",
    discloses={"ada": ["user"]},
)
DRAFTS = {
    Kind.ADMITTED: admission(),
    Kind.CANCEL_ASKED: fact_from_json(Kind.CANCEL_ASKED, {"by": "client"}),
    Kind.PLAN_OPENED: drafts.plan_opened(Propose(1, 1, "repair"), "model", POOL, instant=False),
    Kind.PLAN_STEP: drafts.plan_step(Propose(0, 0, "first"), 1, drafts.WrittenStep(Step("ada"), "")),
    Kind.PLAN_ACCEPTED: drafts.plan_accepted(0, "", [()]),
    Kind.PLAN_REJECTED: drafts.plan_rejected(0, "", ["no"], outage=False),
    Kind.STEP_QUEUED: fact_from_json(Kind.STEP_QUEUED, {"n": 0}),
    Kind.CALL_INTENDED: intent("fresh", 0),
    Kind.CALL_FINISHED: outcome("open", 0),
    Kind.STEP_AWAITING: await_tools(0, "open", "id"),
    Kind.STEP_RESULTS: StepToolResults(0, "results", ("id",)),
    Kind.STEP_DONE: step_done(0, "open"),
    Kind.STEP_FAILED: step_failed(0),
    Kind.STEP_SKIPPED: fact_from_json(Kind.STEP_SKIPPED, {"n": 0, "reason": "inputs_lost"}),
    Kind.AWAITING: RunAwaitingTool(turn=0, until=7.0),
    Kind.RESUMED: resume(1, 9.0),
    Kind.AWAITING_APPROVAL: ASKED,
    Kind.APPROVED: RunApproved(0, "digest", "binding", "key:boss", 9.0, {"ada": "mark"}, 5),
    Kind.REFUSED: RunRefused(0, "digest", "key:boss"),
    Kind.APPROVAL_EXPIRED: RunApprovalExpired(0, 9.0),
    **{kind: fact_from_json(kind, {"step": None}) for kind in TERMINAL},
}

EXCHANGE = Exchange("open", "ada", "said", ("id",), 0)


def in_state(run: str = "running", *, step: str = "waiting", proposal: str = "accepted") -> RunState:
    """A run that stands like this, with one step, one proposal and one open call."""
    admitted_state = fold(number_events(admission()))
    plan = Proposal(0, 0, "first", "model", state=proposal)  # type: ignore[arg-type]
    return replace(
        admitted_state,
        seq=9,
        state=run,
        proposals=(plan,),
        steps={0: StepState(0, 0, "ada", "", Access(), True, state=step, exchanges=(EXCHANGE,))},
        calls={"open": Call("open", 0, "ada", True, 9, 90)},
    )


def require_approval(run: str = "running") -> RunState:
    """A run that stands like this, whose plan needs an approval and has none."""
    state = in_state(run)
    terms = RunAdmitted.from_json(state.admitted.to_json() | {"approval": {"reasons": ["tier"]}})
    plan = replace(state.proposals[0], needs=("tier",))
    question = ASKED if run == "awaiting_approval" else None
    return replace(state, admitted=terms, proposals=(plan,), approval_question=question)


def after(state: RunState, draft: Fact) -> RunState | None:
    """The next state, or None if the event is refused."""
    try:
        return advance(state, Event.of("run", state.seq + 1, 0.0, draft))
    except EventMalformed:
        return None


def test_every_kind_is_walked() -> None:
    assert set(DRAFTS) == set(Kind)


def test_steps_take_every_legal_arrow_and_no_other() -> None:
    arrows_taken = set()
    for (kind, target), start in product(STEP_KINDS.items(), STEP_ARROWS):
        came = after(in_state(step=start), DRAFTS[kind])
        if start in SETTLED:
            assert came is not None, "what comes too late is no fault"
            assert came.steps[0] == in_state(step=start).steps[0]
        elif (kind, start) == (Kind.STEP_DONE, "waiting"):
            assert came is None, "an output without a call is one of an earlier run"
            came = after(in_state(step=start), replace(step_done(0, ""), origin_run="earlier", origin_step=4))
            assert came is not None
            assert came.steps[0].state == target
            arrows_taken.add((start, target))
        elif target in STEP_ARROWS[start] and start in LEAVES.get(kind, STEP_ARROWS):
            assert came is not None
            assert came.steps[0].state == target
            arrows_taken.add((start, target))
        else:
            assert came is None or (start, came.steps[0].state) == ("running", "running"), (start, kind)
    arrows_allowed = {(start, end) for start, ends in STEP_ARROWS.items() for end in ends}
    assert arrows_taken == arrows_allowed


def test_results_for_a_step_that_has_called_no_tool_are_refused() -> None:
    state = in_state(step="done")
    done = replace(state.steps[0], exchanges=())
    assert after(replace(state, steps={0: done}), DRAFTS[Kind.STEP_RESULTS]) is None


def test_other_kinds_leave_a_step_alone() -> None:
    for kind, start in product(set(Kind) - set(STEP_KINDS), STEP_ARROWS):
        came = after(in_state(step=start, proposal="open"), DRAFTS[kind])
        assert came is None or came.steps[0].state == start


def test_runs_take_every_legal_arrow_and_no_other() -> None:
    arrows_taken = set()
    for kind, start, step, plan in product(Kind, RUN_STATES, ("waiting", "queued"), ("open", "accepted", "rejected")):
        came = after(in_state(start, step=step, proposal=plan), DRAFTS[kind])
        if came is None or came.state == start:
            continue
        assert came.state in RUN_ARROWS[start], (start, kind)
        arrows_taken.add((start, came.state))
    for kind, start in product(Kind, RUN_STATES):
        came = after(require_approval(start), DRAFTS[kind])
        if came is not None and came.state != start:
            assert came.state in RUN_ARROWS[start], (start, kind)
            arrows_taken.add((start, came.state))
    arrows_allowed = {(start, end) for start, ends in RUN_ARROWS.items() for end in ends}
    assert arrows_taken == arrows_allowed


def test_a_terminal_event_ends_any_open_run_once() -> None:
    for (kind, name), start in product(TERMINAL.items(), RUN_STATES):
        came = after(in_state(start), DRAFTS[kind])
        assert (came is None) == (start in ENDED)
        assert came is None or (came.state, came.ended) == (name, True)


def test_nothing_but_outcomes_comes_after_the_end() -> None:
    for kind, end in product(Kind, sorted(ENDED)):
        came = after(in_state(end, proposal="open"), DRAFTS[kind])
        assert (came is not None) == (kind in AFTER_THE_END)
        assert came is None or came.state == end


def test_a_run_is_admitted_once() -> None:
    fresh = replace(in_state("admitted"), seq=0)
    assert after(fresh, admission()) == replace(fresh, seq=1)
    assert after(in_state("admitted"), admission()) is None


@pytest.mark.parametrize("plan", ["none", "open", "accepted", "rejected"])
def test_plans_open_one_after_the_other(plan: str) -> None:
    state = in_state("admitted", proposal=plan)
    state = replace(state, proposals=()) if plan == "none" else state
    assert (after(state, DRAFTS[Kind.PLAN_OPENED]) is not None) == (plan in {"none", "rejected"})
    for kind in (Kind.PLAN_STEP, Kind.PLAN_ACCEPTED, Kind.PLAN_REJECTED):
        assert (after(state, DRAFTS[kind]) is not None) == (plan == "open")
    assert after(state, drafts.plan_step(Propose(0, 0, "first"), 0, drafts.WrittenStep(Step("ada"), ""))) is None, (
        "a step is planned once"
    )


@pytest.mark.parametrize("kind", sorted(OUTCOMES))
def test_a_call_has_one_intent_and_one_outcome(kind: str) -> None:
    ended = after(in_state(), outcome("open", 0, Usage(3), kind=kind))
    assert ended is not None
    assert ended.calls["open"].outcome == kind
    assert ended.open_calls == ()
    assert after(ended, outcome("open", 0)) is None
    assert after(ended, intent("open", None)) is None


def test_a_running_step_may_be_tried_again_by_another_worker() -> None:
    again = after(in_state(step="running"), intent("second", 0, worker="bob"))
    assert again is not None
    assert (again.steps[0].state, again.steps[0].worker) == ("running", "bob")


def test_no_step_begins_whose_plan_is_not_approved() -> None:
    """Whatever the run's state is, and whoever writes it."""
    for start in ("admitted", "planned", "running", "awaiting_approval"):
        assert after(require_approval(start), DRAFTS[Kind.STEP_QUEUED]) is None
        queued = replace(require_approval(start), steps={0: replace(require_approval(start).steps[0], state="queued")})
        assert after(queued, DRAFTS[Kind.CALL_INTENDED]) is None
    approved = after(require_approval("awaiting_approval"), DRAFTS[Kind.APPROVED])
    assert approved is not None
    assert after(approved, DRAFTS[Kind.STEP_QUEUED]) is not None


def test_a_decision_is_about_what_was_asked() -> None:
    waiting = require_approval("awaiting_approval")
    for altered in (
        replace(DRAFTS[Kind.APPROVED], digest="other"),
        replace(DRAFTS[Kind.APPROVED], proposal=1),
    ):
        assert after(waiting, altered) is None
    refused = after(waiting, DRAFTS[Kind.REFUSED])
    assert refused is not None
    assert after(refused, DRAFTS[Kind.APPROVED]) is None


def test_the_arrows_are_drawn_for_every_state() -> None:
    assert tuple(RUN_ARROWS) == (
        "admitted",
        "planned",
        "running",
        "awaiting_tool",
        "awaiting_approval",
        *[s for s in RUN_ARROWS if s in ENDED],
    )
    assert set(RUN_ARROWS) == set(RUN_STATES)
    drawing = str(kinds.__doc__)
    assert all(word in drawing for word in {*RUN_STATES, *STEP_ARROWS, *OUTCOMES})
    assert not any(RUN_ARROWS[end] for end in ENDED)
    assert {state for state, ends in STEP_ARROWS.items() if not ends} == SETTLED
