"""Workflows inside steps, as a journal folds: when one is opened, how many steps it may have, what it comes to."""

import pytest
from msgspec.structs import replace

from app.core.plan.workflow import CONDUCTOR, Access, Step
from app.core.pool.catalog import Limits
from app.core.run import caller_view, drafts
from app.core.run.caller_view import Position
from app.core.run.events import Event, Fact, Kind
from app.core.run.fold import advance
from app.core.run.kinds import DRIVER_LOST, Mode
from app.core.run.progress import (
    Conclude,
    Finish,
    Propose,
    Queue,
    Skip,
    access_in_run,
    decide,
    decide_end_again,
    gives_answer,
    may_nest,
    nested_step_limit,
    nesting_depth,
    parent_of,
)
from app.core.run.state import ROUND_OVER, RunState
from app.errors import EventMalformed
from tests.core.play import POOL, intent, outcome, step_done, step_failed
from tests.core.test_progress import answer_step, plan_facts, queue_steps, state_of
from tests.harness.raw_facts import fact_from_json

ITSELF = Step(CONDUCTOR, "take it apart", Access(True))
LIMITS = Limits(steps=4, fan_out=2, depth=2)


def at(*written: Fact) -> RunState:
    """The state after these, where plans may be nested."""
    return state_of(*written, limits=LIMITS)


def after(state: RunState, *written: Fact) -> RunState:
    """The state after these too."""
    for draft in written:
        state = advance(state, Event.of("run", state.seq + 1, 0.0, draft))
    return state


def inside(state: RunState, parent: int, *steps: Step, mode: Mode = "first", close: bool = True) -> RunState:
    """Return the state with a plan for a step of the conductor's; the last step of the plan answers."""
    number, base, around = state.proposal_count, len(state.steps), state.steps[parent]
    opened = drafts.plan_opened(
        Propose(number, base, mode, state.round, parent, nested_step_limit(state, parent)),
        "model",
        POOL,
        instant=False,
    )
    written = [opened]
    for place, step in enumerate(steps):
        last = replace(step, answers=place == len(steps) - 1)
        written.append(
            drafts.plan_step(Propose(number, base, "first"), place, drafts.WrittenStep(last, "ref"), None, around)
        )
    closing = [drafts.plan_accepted(number, "", [step.access.steps for step in steps])] if close else []
    return after(state, *written, *closing)


def reject_proposal(state: RunState, reason: str = "no", *, outage: bool = False) -> RunState:
    """Return the state with its open proposal rejected."""
    assert state.open_proposal is not None
    skips = drafts.steps_skipped(state.steps_of(state.open_proposal), "plan_rejected")
    return after(state, *skips, drafts.plan_rejected(state.open_proposal.number, "", [reason], outage=outage))


OPENED = at(*plan_facts(Step("ada"), replace(ITSELF, access=Access(False, (0,)))), *answer_step(0))
"""Step 1 is the conductor's: its turn has come, and it may see step 0 alone."""


def test_a_plan_is_asked_for_once_the_inputs_are_settled() -> None:
    waiting = at(*plan_facts(Step("ada"), replace(ITSELF, access=Access(False, (0,)))))
    assert decide(waiting, 0.0) == (Queue((0,)),)
    assert decide(after(waiting, *queue_steps(0)), 0.0) == ()
    assert decide(OPENED, 0.0) == (Propose(1, 2, "first", 1, 1, 3),)
    lost = after(waiting, *queue_steps(0), step_failed(0))
    assert decide(lost, 0.0) == (Skip(1),), "there is nothing that it could be told"
    assert not decide(at(*plan_facts(ITSELF, close=False)), 0.0), "the one around it is made first"


def test_the_first_plan_inside_sets_the_run_going() -> None:
    state = at(*plan_facts(ITSELF))
    assert state.state == "planned"
    nested = inside(state, 0, Step("bob"), close=False)
    assert (nested.state, nested.steps[0].state) == ("running", "running")
    assert (nested.open_proposal, nested.nested[0][0].parent) == (nested.nested[0][0], 0)
    assert inside(state, 0, Step("bob")).state == "running"


def test_what_is_inside_sees_the_view_around_it_or_nothing_of_it() -> None:
    around = OPENED.steps[1]
    assert access_in_run(Access(True, (0,)), around, 7) == Access(False, (0, 7)), "its `user` is what the step may see"
    assert access_in_run(Access(False, (0,)), around, 7) == Access(False, (7,))
    assert access_in_run(Access(True), replace(around, access=Access(True, (3,))), 7) == Access(True, (3,))
    nested = inside(OPENED, 1, Step("bob"), Step("cyd", "x", Access(False, (0,))))
    assert [nested.steps[n].inherits for n in (2, 3)] == [True, False]
    assert (nested.steps[2].access, nested.steps[3].access) == (Access(False, (0,)), Access(False, (2,)))


def test_its_answer_is_the_steps() -> None:
    nested = inside(OPENED, 1, Step("bob"), Step("cyd", "x", Access(True, (0,))))
    assert decide(nested, 0.0) == (Queue((2,)),)
    over = after(nested, *answer_step(2), *answer_step(3))
    [command] = decide(over, 0.0)
    assert isinstance(command, Conclude)
    settled = drafts.steps_settled(over, command)
    assert [(fact.kind, fact.to_json()["n"], fact.to_json()["from"], fact.to_json()["output"]) for fact in settled] == [
        (Kind.STEP_DONE, 1, 3, "ref-3")
    ]
    closed = after(over, *settled)
    assert (closed.steps[1].state, closed.steps[1].call) == ("done", "call-3")
    assert decide(closed, 0.0) == (Finish(Kind.SUCCEEDED, 1),)
    assert [step.n for step in closed.planned_steps] == [0, 1, 2, 3]
    assert not closed.degraded


def test_what_is_told_of_an_answer_is_told_of_the_step() -> None:
    nested = inside(OPENED, 1, Step("bob"))
    body = step_done(2, "call-2").to_json() | {"logprobs": "ref-l", "refusal": True}
    over = after(
        nested, *queue_steps(2), intent("call-2", 2), outcome("call-2", 2), fact_from_json(Kind.STEP_DONE, body)
    )
    [command] = decide(over, 0.0)
    closed = after(over, *drafts.steps_settled(over, command))  # type: ignore[arg-type]
    assert (closed.steps[1].logprobs, closed.steps[1].refusal) == ("ref-l", True)


def test_one_without_an_answer_is_a_failed_step() -> None:
    lost = after(inside(OPENED, 1, Step("bob")), *queue_steps(2), step_failed(2, "worker_failed"))
    assert decide(lost, 0.0) == (Conclude(1, None, "worker_failed"),)
    ended = after(lost, *drafts.steps_settled(lost, Conclude(1, None, "worker_failed")))
    assert (ended.steps[1].state, ended.steps[1].error) == ("failed", "worker_failed")
    [unnamed] = drafts.steps_settled(lost, Conclude(1))
    assert unnamed.to_json()["error"] == "run_failed"
    assert decide(after(lost, unnamed), 0.0) == (Finish(Kind.FAILED, error="run_failed"),)


def test_steps_that_its_answer_did_not_need_are_skipped_first() -> None:
    """Two branches have no slot yet when the answering step turns out to see nothing."""
    sides = [Step("ada", "x", Access(True)), Step("bob", "y", Access(True)), Step("cyd", "z", Access(False, (0,)))]
    nested = inside(at(*plan_facts(ITSELF)), 0, *sides)
    none_left = replace(nested.admitted, limits=replace(LIMITS, fan_out=1))
    state = after(replace(nested, admitted=none_left), *queue_steps(1), step_failed(1))
    assert decide(state, 0.0) == (Skip(3), Queue((2,)))
    state = after(state, *drafts.steps_skipped([state.steps[3]], "inputs_lost"))
    stuck = replace(state, admitted=replace(state.admitted, limits=replace(LIMITS, fan_out=0)))
    assert decide(stuck, 0.0) == (Skip(2, ROUND_OVER),)


def test_a_rejected_plan_is_mended_then_a_worker_answers_alone() -> None:
    opened = inside(OPENED, 1, Step("bob"), close=False)
    assert decide(opened, 0.0) == (), "the step that answers waits for the whole plan"
    once = reject_proposal(opened)
    assert decide(once, 0.0) == (Propose(2, 3, "repair", 1, 1, 3),)
    twice = reject_proposal(inside(once, 1, mode="repair", close=False))
    assert decide(twice, 0.0) == (Propose(3, 3, "fallback", 1, 1, 3),)
    assert decide(reject_proposal(opened, outage=True), 0.0) == (Propose(2, 3, "fallback", 1, 1, 3),)
    assert decide(reject_proposal(opened, DRIVER_LOST), 0.0) == (Propose(2, 3, "first", 1, 1, 3),)
    broke = reject_proposal(opened, "run_over_budget", outage=True)
    assert decide(broke, 0.0) == (Propose(2, 3, "fallback", 1, 1, 3),), "a worker alone may be cheap enough"
    alone = inside(twice, 1, Step("cyd"), mode="fallback")
    assert alone.degraded
    gone = reject_proposal(inside(twice, 1, mode="fallback", close=False))
    assert decide(gone, 0.0) == (Conclude(1, error="plan_rejected"),)


def test_what_is_lost_for_want_of_money_or_time_ends_the_run() -> None:
    nested = after(inside(OPENED, 1, Step("bob"), Step("cyd", "x", Access(True, (0,)))), *queue_steps(2))
    for error, end in (
        ("run_over_budget", Finish(Kind.SUCCEEDED, 0, True, stopped="run_over_budget")),
        ("no_time", Finish(Kind.SUCCEEDED, 0, True, stopped="run_expired")),
    ):
        branch = after(nested, step_failed(2, error))
        assert decide(branch, 0.0) == (Queue((3,)),), "the step that answers may do without it"
        lost = after(branch, *queue_steps(3), step_failed(3, error))
        assert decide(lost, 0.0) == (Conclude(1, None, error),)
        assert decide(after(lost, *drafts.steps_settled(lost, Conclude(1, None, error))), 0.0) == (end,)


def test_an_end_that_was_decided_on_is_not_taken_back_for_a_step_that_could_go_on() -> None:
    """The steps that ran have been stopped, so they would give no answer any more."""
    journal = plan_facts(
        ITSELF, Step("bob", "w"), Step("ada", "x", Access(True, (1,))), Step("cyd", "y", Access(True, (0, 2)))
    )
    running = state_of(*journal, *queue_steps(1), intent("c", 1), limits=Limits(steps=8, fan_out=2, depth=2))
    broke = reject_proposal(inside(running, 0, Step("bob"), mode="fallback", close=False), "run_over_budget")
    (end,) = decide(broke, 0.0)
    assert end == Finish(Kind.OVER_BUDGET, error="run_over_budget")
    later = after(broke, outcome("c", 1), step_done(1, "c"))
    assert decide(later, 0.0) == (Queue((2,)),)
    assert decide_end_again(end, later, 0.0) == end


def test_the_steps_of_a_round_are_never_more_than_the_limit() -> None:
    state = at(*plan_facts(ITSELF, ITSELF, Step("ada", "x", Access(True, (0, 1)))))
    assert (nested_step_limit(state, 0), nested_step_limit(state, 1)) == (2, 2), "the other one needs a step as well"
    state = inside(state, 0, ITSELF, Step("bob"))
    assert (nested_step_limit(state, 1), nested_step_limit(state, 3)) == (1, 1)
    state = inside(state, 3, Step("bob"))
    assert nested_step_limit(state, 1) == 1
    state = inside(state, 1, Step("cyd"))
    assert sum(not step.opens_workflow for step in state.active_steps) == LIMITS.steps


def test_plans_are_nested_no_deeper_than_the_limit() -> None:
    state = inside(inside(at(*plan_facts(ITSELF)), 0, ITSELF), 1, Step("bob"))
    assert [nesting_depth(state, n) for n in (None, 0, 1)] == [0, 1, 2]
    assert [may_nest(state, n) for n in (None, 0, 1)] == [True, True, False]
    assert not may_nest(state_of(*plan_facts(Step("ada"))), None), "0 is the default"
    assert [parent_of(state, state.steps[n]) for n in (0, 1, 2)] == [None, state.steps[0], state.steps[1]]


def test_a_step_speaks_if_all_around_it_answer() -> None:
    state = inside(at(*plan_facts(ITSELF, Step("ada"))), 0, Step("bob"))
    assert [gives_answer(state, state.steps[n]) for n in (0, 1, 2)] == [False, True, False]
    state = inside(inside(at(*plan_facts(ITSELF)), 0, Step("ada"), ITSELF), 2, Step("bob"))
    assert [gives_answer(state, state.steps[n]) for n in (0, 1, 2, 3)] == [True, False, True, True]


@pytest.mark.parametrize("fault", ["worker", "open", "accepted", "twice"])
def test_a_plan_is_opened_for_no_step_that_does_not_wait_for_one(fault: str) -> None:
    states = {
        "worker": at(*plan_facts(Step("ada"))),
        "open": at(*plan_facts(ITSELF, close=False)),
        "accepted": inside(at(*plan_facts(ITSELF)), 0, Step("bob")),
        "twice": inside(at(*plan_facts(ITSELF)), 0, Step("bob"), close=False),
    }
    with pytest.raises(EventMalformed, match="does not fit"):
        inside(states[fault], 0, Step("bob"))


def test_the_end_of_a_stream_is_that_of_the_call_inside() -> None:
    """A nested answer is told at once, so whoever takes its stream up again has all of it or nothing."""
    over = after(inside(OPENED, 1, Step("bob")), *answer_step(2, 9))
    assert caller_view.attempt_of(over, "call-2") == 0, "not yet the answer"
    [command] = decide(over, 0.0)
    closed = after(over, *drafts.steps_settled(over, command))  # type: ignore[arg-type]
    ended = after(closed, drafts.run_ended(closed, Finish(Kind.SUCCEEDED, 1)))
    assert caller_view.attempt_of(ended, "call-2") == 1
    assert caller_view.attempt_of(ended, "call-0") == 1, "of another step"
    assert caller_view.end_position(ended) == Position(1, 9)
    caller_view.check_position(ended, Position(1, 9 + caller_view.DONE))
