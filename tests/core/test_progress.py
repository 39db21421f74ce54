"""A run is the fold of its journal: random legal histories, and each decision on its own."""

from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from app.core.message.chat import Usage, sum_usages
from app.core.plan.workflow import Access, Step, topology
from app.core.pool.breaker import NO_TIME
from app.core.pool.catalog import Limits
from app.core.run import drafts
from app.core.run.caller_view import bill
from app.core.run.events import TERMINAL, Fact, Kind, RunSucceeded
from app.core.run.fold import advance, apply_facts, fold
from app.core.run.kinds import DRIVER_LOST, ENDED, Mode
from app.core.run.progress import Finish, Propose, Queue, Skip, decide, decide_end_again
from app.core.run.state import ROUND_OVER, RUN_ENDED, RunState, answer_of
from app.errors import EventMalformed
from tests.core.play import (
    DEADLINE,
    POOL,
    Play,
    admission,
    await_tools,
    intent,
    number_events,
    outcome,
    step_done,
    step_failed,
)
from tests.harness.ends import end_of
from tests.harness.raw_facts import fact_from_json

OVER = "run_over_budget"


def plan_facts(*steps: Step, mode: Mode = "first", number: int = 0, base: int = 0, close: bool = True) -> list[Fact]:
    """A proposal of these steps; the last one answers."""
    written = [drafts.plan_opened(Propose(number, base, mode), "model", POOL, instant=False)]
    for place, step in enumerate(steps):
        answers = place == len(steps) - 1
        written.append(
            drafts.plan_step(
                Propose(number, base, "first"), place, drafts.WrittenStep(replace(step, answers=answers), "ref")
            )
        )
    return [*written, drafts.plan_accepted(number, "", [step.access.steps for step in steps])] if close else written


def seeing(*inputs: int, user: bool = True) -> Step:
    """A step with this access list."""
    return Step("ada", "do it", Access(user, inputs))


def state_of(*written: Fact, **changes: Any) -> RunState:
    """The state after these."""
    return fold(number_events(admission(**changes), *written))


def queue_steps(*steps: int) -> list[Fact]:
    """`step.queued` of each."""
    return [fact_from_json(Kind.STEP_QUEUED, {"n": n}) for n in steps]


def answer_step(
    n: int, chars: int = 5, usage: Usage = Usage(), access: tuple[str | int, ...] = ("user",)
) -> list[Fact]:
    """A step from its ticket to its answer."""
    call = f"call-{n}"
    return [*queue_steps(n), intent(call, n, access=access), outcome(call, n, usage), step_done(n, call, chars)]


def reject_plan(number: int = 0, reason: str = "no", *, outage: bool = False, mode: Mode = "first") -> list[Fact]:
    """A proposal that came to nothing."""
    opened = drafts.plan_opened(Propose(number, 0, mode), "model", POOL, instant=False)
    return [opened, drafts.plan_rejected(number, "", [reason], outage=outage)]


# -- random histories


@settings(max_examples=150, deadline=None)
@given(st.integers(0))
@example(680)  # time runs out between the empty plan and the end
def test_every_history_ends_in_exactly_one_terminal_state(seed: int) -> None:
    played = Play(Random(seed))
    end = played.play()
    assert end.state in ENDED
    assert sum(event.kind in TERMINAL for event in played.events) == 1
    assert end == fold(tuple(played.events)) == fold(tuple(played.events))
    assert decide(end, 0.0) == decide(end, DEADLINE) == ()
    assert all(call.outcome for call in end.calls.values())
    if end.state == "succeeded":
        answer = end.steps[end_of(end).step]
        assert answer.state == "done"
        assert end_of(end).answer == answer.output
        workflow = end.steps_of_round(
            next(proposal.round for proposal in end.proposals if proposal.number == answer.proposal)
        )
        assert end_of(end).fell_back == (answer is not workflow[-1])
        last = end.proposals[-1]
        is_accepted = answer in end.current_steps or (last.state == "accepted" and not end.current_steps)
        if end_of(end).stopped and end.round == 1:
            assert answer.complete, "it stands in for the answering step, which had no money or time"
            assert workflow[-1].state != "done"
        else:
            assert workflow[-1].state == "done"
            assert bool(end_of(end).stopped) != is_accepted
    for proposal in end.proposals:
        access = [step.access.steps for step in end.steps.values() if step.proposal == proposal.number]
        before = end.answer_of_round(proposal.round - 1)
        earlier_answers = {before.step.n} if before is not None else set()
        assert all(
            n in earlier_answers or proposal.base <= n < proposal.base + at
            for at, inputs in enumerate(access)
            for n in inputs
        )


@settings(max_examples=60, deadline=None)
@given(st.integers(0))
def test_no_conductor_gets_more_rounds_than_the_limits_allow(seed: int) -> None:
    """Not even one that wants another round whatever it is shown; what any round spends is the run's."""
    played = Play(Random(seed), insists=True)
    end = played.play()
    rounds = end.admitted.limits.rounds
    assert end.round_count <= rounds
    assert max((proposal.round for proposal in end.proposals), default=1) <= rounds
    assert sum(proposal.mode == "first" and proposal.state != "rejected" for proposal in end.proposals) <= rounds
    assert len([proposal for proposal in end.proposals if proposal.state == "accepted"]) <= rounds
    if end.round > 1 and not end.cancel_asked and end_of(end).error != "tool_results_missing":
        assert end.state == "succeeded", "the first round's answer is there"


@settings(max_examples=60, deadline=None)
@given(st.integers(0))
def test_a_conductor_that_always_takes_the_steps_itself_is_held(seed: int) -> None:
    """Every step of the conductor's holds a worker's in the end, and those are no more than the limit allows."""
    end = Play(Random(seed), itself=1.0).play()
    limits = end.admitted.limits
    assert len(end.nested) <= limits.steps * limits.depth * limits.rounds
    for n, tries in end.nested.items():
        assert len([trial for trial in tries if trial.state == "accepted"]) <= 1, "one workflow for a step"
        assert all(trial.room >= 1 for trial in tries)
        assert end.steps[n].state in ("done", "failed", "skipped")
        answer = answer_of(end.steps_of(tries[-1]))
        if end.steps[n].state == "done":
            assert answer is not None
            assert (end.steps[n].output, end.steps[n].call) == (answer.step.output, answer.step.call)


@settings(max_examples=25, deadline=None)
@given(st.integers(0))
def test_a_journal_can_be_heard_twice_but_not_with_gaps(seed: int) -> None:
    played = Play(Random(seed))
    end = played.play()
    events = tuple(played.events)
    for cut in range(1, len(events)):
        state = fold(events[:cut])
        for event in events[:cut]:
            assert advance(state, event) is state
        for event in events[cut + 1 : cut + 2]:
            with pytest.raises(EventMalformed, match=f"The event {event.seq - 1} of"):
                advance(state, event)
        state = advance(state, events[cut])
    assert state == end


@settings(max_examples=25, deadline=None)
@given(st.integers(0))
def test_a_preview_ends_with_its_plan_and_executes_nothing(seed: int) -> None:
    end = Play(Random(seed), preview=True).play()
    assert end.state in ENDED
    assert {step.state for step in end.current_steps} <= {"skipped"}
    assert not any(call.step is not None for call in end.calls.values())
    if end.state == "succeeded":
        assert end_of(end).step is None
        assert end.degraded == (end.proposals[-1].mode == "fallback")


# -- planning


def test_a_run_begins_with_a_proposal() -> None:
    assert decide(state_of(), 0.0) == (Propose(0, 0, "first"),)
    assert decide(state_of(*plan_facts(seeing(), close=False)[:1]), 0.0) == ()


@pytest.mark.parametrize(
    ("journal", "command"),
    [
        (reject_plan(), Propose(1, 0, "repair")),
        (reject_plan(outage=True), Propose(1, 0, "fallback")),
        (reject_plan(reason=DRIVER_LOST, outage=True), Propose(1, 0, "first")),
        (reject_plan(reason=DRIVER_LOST, outage=True, mode="repair"), Propose(1, 0, "repair")),
        (reject_plan(mode="repair"), Propose(1, 0, "fallback")),
        (reject_plan(mode="fallback"), Finish(Kind.FAILED, error="plan_rejected")),
        (reject_plan(reason=OVER, outage=True), Propose(1, 0, "fallback")),
        (reject_plan(reason=OVER, outage=True, mode="fallback"), Finish(Kind.OVER_BUDGET, error=OVER)),
    ],
)
def test_a_rejected_proposal_is_repaired_once_and_then_replaced(journal: list[Fact], command: Any) -> None:
    assert decide(state_of(*journal), 0.0) == (command,)


def test_a_plan_that_three_engines_were_lost_over_is_not_made_again() -> None:
    """What they met while they made it may be what ended them."""
    lost = [fact for number in range(3) for fact in reject_plan(number, DRIVER_LOST, outage=True)]
    assert decide(state_of(*lost[:-2]), 0.0) == (Propose(2, 0, "first"),)
    assert decide(state_of(*lost), 0.0) == (Propose(3, 0, "fallback"),)
    further = [*plan_further_round()[:1], drafts.plan_rejected(1, "", [DRIVER_LOST], outage=True)]
    for number in (2, 3):
        further += [*plan_further_round(number=number)[:1]]
        further += [drafts.plan_rejected(number, "", [DRIVER_LOST], outage=True)]
    stopped = Finish(Kind.SUCCEEDED, 0, stopped="plan_rejected")
    assert decide(state_of(*FIRST_ROUND, *further, limits=ROUNDS), 0.0) == (stopped,)


def test_a_new_proposal_counts_its_steps_on() -> None:
    first = plan_facts(seeing(), seeing(0), close=False)
    skips = drafts.steps_skipped(state_of(*first).current_steps, "plan_rejected")
    state = state_of(*first, *skips, reject_plan()[1])
    assert decide(state, 0.0) == (Propose(1, 2, "repair"),)
    again = state_of(
        *first, *skips, reject_plan()[1], *plan_facts(seeing(), seeing(0), mode="repair", number=1, base=2)
    )
    assert [(step.n, step.access.steps) for step in again.current_steps] == [(2, ()), (3, (2,))]
    assert decide(again, 0.0) == (Queue((2,)),)
    assert not again.degraded


def test_steps_start_while_the_plan_streams_but_the_answer_waits() -> None:
    opened = plan_facts(seeing(), seeing(), close=False)
    assert decide(state_of(*opened[:2]), 0.0) == (Queue((0,)),)
    assert decide(state_of(*opened), 0.0) == (Queue((0,)),)
    running = state_of(*opened, *queue_steps(0))
    assert (decide(running, 0.0), running.state, running.answering_step) == ((), "admitted", None)
    accepted = advance(running, number_events(*[admission()] * running.seq, plan_facts(seeing(), seeing())[-1])[-1])
    assert (accepted.state, decide(accepted, 0.0)) == ("running", (Queue((1,)),))


def test_a_plan_that_starts_after_its_end_passes_through_planned() -> None:
    state = state_of(*plan_facts(seeing()))
    assert (state.state, state.has_workflow) == ("planned", True)
    assert state_of(*plan_facts(seeing()), *queue_steps(0)).state == "running"


# -- scheduling


def test_steps_run_as_soon_as_their_inputs_are_settled() -> None:
    plan = plan_facts(seeing(), seeing(), seeing(0), seeing(0, 1, 2))
    assert decide(state_of(*plan), 0.0) == (Queue((0, 1)),)
    assert decide(state_of(*plan, *queue_steps(1), *answer_step(0)), 0.0) == (Queue((2,)),)
    rest = [*answer_step(0), *answer_step(1), *answer_step(2)]
    assert decide(state_of(*plan, *rest), 0.0) == (Queue((3,)),)


def test_no_more_steps_run_at_once_than_the_limit_says() -> None:
    plan = plan_facts(*[seeing()] * 5)
    assert decide(state_of(*plan, limits=Limits(fan_out=3)), 0.0) == (Queue((0, 1, 2)),)
    assert decide(state_of(*plan, *queue_steps(0, 1), limits=Limits(fan_out=3)), 0.0) == (Queue((2,)),)
    assert decide(state_of(*plan, *queue_steps(0, 1), limits=Limits(fan_out=1)), 0.0) == ()


def test_a_failed_input_is_left_out() -> None:
    plan = plan_facts(seeing(), seeing(), seeing(0, 1, user=False))
    state = state_of(*plan, *queue_steps(0), step_failed(0), *answer_step(1))
    assert decide(state, 0.0) == (Queue((2,)),)
    assert state.degraded


@pytest.mark.parametrize("lost", [[*queue_steps(0), step_failed(0)], answer_step(0, chars=0)])
def test_a_step_that_can_see_nothing_is_skipped_unless_it_sees_the_user(lost: list[Fact]) -> None:
    blind = plan_facts(seeing(), seeing(0, user=False), seeing(1, user=False), seeing(2))
    assert decide(state_of(*blind, *lost), 0.0) == (Skip(1),)
    skip = drafts.steps_skipped([state_of(*blind).steps[1]], "inputs_lost")
    assert decide(state_of(*blind, *lost, *skip), 0.0) == (Skip(2),)
    assert decide(state_of(*plan_facts(seeing(), seeing(0)), *lost), 0.0) == (Queue((1,)),)
    assert decide(state_of(*plan_facts(seeing(user=False))), 0.0) == (Queue((0,)),)


# -- the end


@pytest.mark.parametrize(
    ("chars", "finish"),
    [
        ((5, 5), Finish(Kind.SUCCEEDED, 1)),
        ((5, 0), Finish(Kind.SUCCEEDED, 0, fell_back=True)),
        ((0, 0), Finish(Kind.SUCCEEDED, 1)),
        ((0, 5), Finish(Kind.SUCCEEDED, 1)),
    ],
)
def test_the_last_answer_that_is_not_empty_is_the_answer(chars: tuple[int, int], finish: Finish) -> None:
    journal = [*plan_facts(seeing(), seeing()), *answer_step(0, chars[0]), *answer_step(1, chars[1])]
    state = state_of(*journal)
    assert decide(state, 0.0) == (finish,)
    body = drafts.run_ended(state, finish).to_json()
    assert (body["answer"], body["fell_back"]) == (state.steps[finish.step or 0].output, finish.fell_back)
    assert not state.degraded


@pytest.mark.parametrize(
    ("end", "error"), [(step_failed(0, "worker_timeout"), "worker_timeout"), (step_failed(0, ""), "run_failed")]
)
def test_without_its_answering_step_a_run_fails(end: Fact, error: str) -> None:
    assert decide(state_of(*plan_facts(seeing()), *queue_steps(0), end), 0.0) == (Finish(Kind.FAILED, error=error),)


@pytest.mark.parametrize("state", ["failed", "skipped"])
def test_what_an_earlier_step_said_is_no_answer_where_the_answering_one_failed(state: str) -> None:
    """An empty output is stood in for, a missing one is not: a plan or a draft must not pass for an answer."""
    ending = (
        step_failed(1, "worker_timeout")
        if state == "failed"
        else fact_from_json(Kind.STEP_SKIPPED, {"n": 1, "reason": "gone"})
    )
    spoken = state_of(*plan_facts(seeing(), seeing(0)), *answer_step(0, 5), *queue_steps(1), ending)
    assert [step.chars for step in spoken.current_steps] == [5, 0]
    error = "worker_timeout" if state == "failed" else "gone"
    assert decide(spoken, 0.0) == (Finish(Kind.FAILED, error=error),)


def test_cancel_comes_before_the_deadline_and_the_deadline_before_everything_else() -> None:
    cancel = fact_from_json(Kind.CANCEL_ASKED, {"by": "client"})
    running = [*plan_facts(seeing()), *queue_steps(0)]
    assert decide(state_of(*running, cancel), DEADLINE) == (Finish(Kind.CANCELLED, error="run_cancelled"),)
    assert decide(state_of(*running), DEADLINE) == (Finish(Kind.EXPIRED, error="run_expired"),)
    assert decide(state_of(*running), DEADLINE - 0.1) == ()
    assert decide(state_of(), DEADLINE) == (Finish(Kind.EXPIRED, error="run_expired"),)


def test_a_step_over_budget_ends_the_run() -> None:
    branch = [*plan_facts(seeing(), seeing()), *queue_steps(0, 1), step_failed(0, OVER)]
    assert decide(state_of(*branch), 0.0) == (), "the answering step is still at work"
    assert decide(state_of(*branch, step_failed(1, OVER)), 0.0) == (Finish(Kind.OVER_BUDGET, error=OVER),)
    skipped = plan_facts(seeing(user=False), seeing(0, user=False))
    lost = [*skipped, *queue_steps(0), step_failed(0, OVER)]
    assert decide(state_of(*lost), 0.0) == (Skip(1),)
    gone = drafts.steps_skipped([state_of(*skipped).steps[1]], "inputs_lost")
    assert decide(state_of(*lost, *gone), 0.0) == (Finish(Kind.OVER_BUDGET, error=OVER),)


WHOLE = Step("bob", "Solve it. Give the complete final answer.")
"""A step that is asked for the whole answer, whichever step answers."""


@pytest.mark.parametrize(("error", "now"), [(OVER, 0.0), (NO_TIME, 0.0), ("", DEADLINE)])
def test_a_run_without_money_or_time_for_its_answer_ends_with_the_best_output_so_far(error: str, now: float) -> None:
    plan = plan_facts(WHOLE, seeing(), WHOLE, WHOLE, seeing(0, 1))
    written = [*plan, *answer_step(0), *answer_step(1), *answer_step(2, chars=0), *queue_steps(3, 4)]
    state = state_of(*written, *([step_failed(4, error)] if error else []))
    [end] = decide(state, now)
    assert end == Finish(Kind.SUCCEEDED, 0, True, stopped=OVER if error == OVER else "run_expired")
    assert decide_end_again(end, state, now) == end
    later = apply_facts(state, [intent("call-3", 3), outcome("call-3", 3), step_done(3, "call-3")])
    assert decide_end_again(end, later, now) == replace(end, step=3), "a better one has come meanwhile"
    ended = apply_facts(later, [drafts.run_ended(later, end)])
    assert (ended.degraded, ended.end and ended.end.fell_back) == (True, True)


def test_what_was_not_asked_for_the_answer_or_failed_otherwise_does_not_stand_in() -> None:
    for step in (
        seeing(),
        Step("bob", "Plan it. Do not give the final answer."),
        replace(WHOLE, access=Access(False)),
    ):
        lost = [*plan_facts(step, seeing(0)), *answer_step(0), *queue_steps(1), step_failed(1, OVER)]
        assert decide(state_of(*lost), 0.0) == (Finish(Kind.OVER_BUDGET, error=OVER),)
    failing = [*plan_facts(WHOLE, seeing(0)), *answer_step(0), *queue_steps(1), step_failed(1)]
    assert decide(state_of(*failing), 0.0) == (Finish(Kind.FAILED, error="worker_failed"),), "an outage is no answer"


def test_no_step_begins_before_a_plan_that_waits_is_accepted() -> None:
    opened = replace(drafts.plan_opened(Propose(0, 0, "first"), "model", POOL, instant=False), waits=True)
    steps = plan_facts(seeing(), seeing(0))[1:]
    assert decide(state_of(opened, *steps[:-1]), 0.0) == ()
    assert decide(state_of(opened, *steps), 0.0) == (Queue((0,)),)


@pytest.mark.parametrize("error", [NO_TIME, "run_expired"])
def test_a_step_that_nobody_could_do_in_time_ends_the_run_before_its_deadline(error: str) -> None:
    state = state_of(*plan_facts(seeing(), seeing()), *queue_steps(0, 1), step_failed(0, error), step_failed(1, error))
    assert decide(state, 0.0) == (Finish(Kind.EXPIRED, error="run_expired"),)


def test_only_what_was_lost_degrades_a_run() -> None:
    running = state_of(*plan_facts(seeing()), *queue_steps(0))
    ended = [*plan_facts(seeing()), *queue_steps(0), *drafts.steps_skipped(running.current_steps, RUN_ENDED)]
    assert not state_of(*ended).degraded
    assert state_of(*plan_facts(seeing(), mode="fallback")).degraded
    assert not state_of().degraded


# -- rounds

ROUNDS = Limits(rounds=2)


def plan_further_round(*steps: Step, number: int = 1, base: int = 1, round: int = 2) -> list[Fact]:
    """The proposal of a further round, whose steps may see step 0 as the answer before; without steps, the empty
    plan."""
    written = [drafts.plan_opened(Propose(number, base, "first", round), "model", POOL, instant=False)]
    for place, step in enumerate(steps):
        answers = place == len(steps) - 1
        written.append(
            drafts.plan_step(
                Propose(number, base, "first"),
                place,
                drafts.WrittenStep(replace(step, answers=answers), "ref"),
                previous=0,
            )
        )
    return [*written, drafts.plan_accepted(number, "", [step.access.steps for step in steps])]


FIRST_ROUND = [*plan_facts(seeing()), *answer_step(0)]
MENDING = Step("ada", "mend it", Access(False, (), previous=True))


def test_a_round_that_has_answered_is_followed_by_another_one() -> None:
    state = state_of(*FIRST_ROUND, limits=ROUNDS)
    assert not state_of(*plan_facts(seeing()), limits=ROUNDS).is_last_round
    assert decide(state, 0.0) == (Propose(1, 1, "first", 2),)
    assert decide(state_of(*FIRST_ROUND), 0.0) == (Finish(Kind.SUCCEEDED, 0),)
    second = state_of(*FIRST_ROUND, *plan_further_round(MENDING), limits=ROUNDS)
    assert (second.round, second.is_last_round, second.state) == (2, True, "running")
    assert second.current_steps[0].access == Access(False, (0,))
    assert decide(second, 0.0) == (Queue((1,)),)
    both = state_of(*FIRST_ROUND, *plan_further_round(MENDING), *answer_step(1), limits=ROUNDS)
    assert decide(both, 0.0) == (Finish(Kind.SUCCEEDED, 1),)
    assert (both.round_count, [step.n for step in both.planned_steps]) == (2, [0, 1])


def test_the_empty_plan_takes_the_answer_before() -> None:
    state = state_of(*FIRST_ROUND, *plan_further_round(), limits=ROUNDS)
    assert decide(state, 0.0) == (Finish(Kind.SUCCEEDED, 0),)
    assert (state.answering_step, state.round_count, state.topology, state.degraded) == (None, 1, "single", False)


def test_a_round_is_not_opened_before_the_one_before_is_over() -> None:
    for journal in ([], plan_facts(seeing()), [*plan_facts(seeing()), *queue_steps(0)]):
        with pytest.raises(EventMalformed, match="does not fit"):
            state_of(*journal, *plan_further_round(), limits=ROUNDS)
    with pytest.raises(EventMalformed, match="does not fit"):
        state_of(*FIRST_ROUND, *plan_further_round(round=3), limits=Limits(rounds=3))
    failing = [*plan_facts(seeing()), *queue_steps(0), step_failed(0)]
    with pytest.raises(EventMalformed, match="does not fit"):
        state_of(*failing, *plan_further_round(), limits=ROUNDS)


def test_a_further_round_that_cannot_be_planned_leaves_the_answer_before() -> None:
    opened, no = plan_further_round()[0], drafts.plan_rejected(1, "", ["no"], outage=False)
    once = state_of(*FIRST_ROUND, opened, no, limits=ROUNDS)
    assert decide(once, 0.0) == (Propose(2, 1, "repair", 2),)
    out = state_of(*FIRST_ROUND, opened, drafts.plan_rejected(1, "", ["conductor_out"], outage=True), limits=ROUNDS)
    end_with_kept_answer = Finish(Kind.SUCCEEDED, 0, stopped="plan_rejected")
    assert decide(out, 0.0) == (end_with_kept_answer,), "no worker answers in place of an answer that is there"
    assert drafts.run_ended(out, end_with_kept_answer).stopped == "plan_rejected"
    assert drafts.run_ended(out, end_with_kept_answer).degraded is True
    lost = state_of(*FIRST_ROUND, opened, drafts.plan_rejected(1, "", [DRIVER_LOST], outage=True), limits=ROUNDS)
    assert decide(lost, 0.0) == (Propose(2, 1, "first", 2),)


@pytest.mark.parametrize(
    ("lost", "now", "stopped"),
    [
        ([*queue_steps(1), step_failed(1)], 0.0, "worker_failed"),
        ([*queue_steps(1), step_failed(1, OVER)], 0.0, OVER),
        ([*queue_steps(1), step_failed(1, NO_TIME)], 0.0, "run_expired"),
        (queue_steps(1), DEADLINE, "run_expired"),
    ],
)
def test_whatever_is_lost_in_a_further_round_leaves_the_answer_before(
    lost: list[Fact], now: float, stopped: str
) -> None:
    state = state_of(*FIRST_ROUND, *plan_further_round(MENDING), *lost, limits=ROUNDS)
    assert decide(state, now) == (Finish(Kind.SUCCEEDED, 0, stopped=stopped),)


def test_an_answer_that_comes_before_the_end_is_written_is_the_end() -> None:
    """Even one in place of an answer that was empty when the end was decided on, and whatever clocks say since."""
    late = [*plan_facts(seeing()), *answer_step(0), *plan_further_round(seeing(user=True), MENDING), *queue_steps(1, 2)]
    running = state_of(*late, intent("a", 1), intent("b", 2), limits=ROUNDS)
    (stopped,) = decide(running, DEADLINE)
    assert stopped == Finish(Kind.SUCCEEDED, 0, stopped="run_expired")
    assert decide_end_again(stopped, running, DEADLINE) == stopped
    empty = [*late, intent("a", 1), intent("b", 2), outcome("b", 2), step_done(2, "b", 0)]
    (silent,) = decide(state_of(*empty, limits=ROUNDS), DEADLINE)
    assert silent == Finish(Kind.SUCCEEDED, 2)
    spoken = state_of(*empty, outcome("a", 1), step_done(1, "a"), limits=ROUNDS)
    for first in (stopped, silent):
        assert decide_end_again(first, spoken, DEADLINE) == Finish(Kind.SUCCEEDED, 1, fell_back=True)
        assert decide_end_again(first, spoken, DEADLINE - 9) == Finish(Kind.SUCCEEDED, 1, fell_back=True)
    state_with_wish = state_of(*late, fact_from_json(Kind.CANCEL_ASKED, {"by": "caller"}), limits=ROUNDS)
    assert decide_end_again(stopped, state_with_wish, DEADLINE).kind is Kind.CANCELLED


def test_what_a_round_did_not_need_is_settled_before_the_next() -> None:
    """A step that waits for the caller's tools and whose round has its answer keeps nobody waiting."""
    journal = [
        *plan_facts(seeing(), seeing()),
        *queue_steps(0, 1),
        intent("a", 0),
        outcome("a", 0),
        await_tools(0, "a", "id"),
    ]
    journal += [intent("b", 1), outcome("b", 1), step_done(1, "b")]
    state = state_of(*journal, limits=ROUNDS)
    assert decide(state, 0.0) == (Skip(0, ROUND_OVER),)
    skipped = state_of(*journal, *drafts.steps_skipped([state.steps[0]], ROUND_OVER), limits=ROUNDS)
    assert decide(skipped, 0.0) == (Propose(1, 2, "first", 2),)
    assert not skipped.degraded


def test_a_fallback_has_no_further_round() -> None:
    state = state_of(*plan_facts(seeing(), mode="fallback"), *answer_step(0), limits=ROUNDS)
    assert state.is_last_round
    assert decide(state, 0.0) == (Finish(Kind.SUCCEEDED, 0),)


# -- the bill

SEEN, HIDDEN, PLAN = Usage(10, 2, 5, 1), Usage(100, 20, 50, 10), Usage(7, 0, 3)


def split_of(*written: Fact, step: int | None) -> tuple[Usage, Usage]:
    """Return what the caller sees, and the rest; together they must be everything."""
    state = state_of(*written)
    split = bill(replace(state, end=RunSucceeded(step=step)))
    assert sum_usages((split.visible, split.orchestration)) == split.total
    return split.visible, split.orchestration


def test_a_single_step_has_no_orchestration() -> None:
    journal = [*plan_facts(seeing()), *answer_step(0, usage=SEEN)]
    assert split_of(*journal, step=0) == (SEEN, Usage())


def test_an_answer_that_saw_no_user_counts_the_input_of_the_first_that_did() -> None:
    plan = plan_facts(seeing(user=False), seeing(), seeing(1, user=False))
    steps = [
        *answer_step(0, usage=HIDDEN, access=()),
        *answer_step(1, usage=SEEN),
        *answer_step(2, usage=HIDDEN, access=(1,)),
    ]
    visible, rest = split_of(*plan, *steps, step=2)
    assert visible == Usage(SEEN.input, SEEN.cached, HIDDEN.output, HIDDEN.reasoning)
    assert rest == Usage(200, 40, 55, 11)


def test_where_no_step_saw_the_user_the_first_good_call_counts() -> None:
    call = [intent("plan", None), outcome("plan", None, PLAN)]
    journal = [*plan_facts(seeing(user=False), close=False)[:1], *call, *plan_facts(seeing(user=False))[1:]]
    assert split_of(*journal, *answer_step(0, usage=SEEN, access=()), step=0) == (Usage(7, 0, 5, 1), Usage(10, 2, 3, 0))


def test_failed_calls_are_orchestration_and_estimates_mark_everything() -> None:
    broken = Usage(50, 0, 9, 0, estimated=True)
    lost = [*queue_steps(0), intent("lost", 0), outcome("lost", 0, broken, kind="error")]
    retried = [intent("again", 0), outcome("again", 0, SEEN), step_done(0, "again")]
    visible, rest = split_of(*plan_facts(seeing()), *lost, *retried, step=0)
    assert (visible, rest) == (replace(SEEN, estimated=True), broken)


def test_a_run_without_calls_costs_nothing() -> None:
    assert split_of(step=None) == (Usage(), Usage())
    assert bill(state_of()).usd == 0


def test_topology_and_the_rest_of_a_run_are_kept() -> None:
    state = state_of(*plan_facts(seeing(), seeing(0)), intent("plan", None))
    assert state.proposals[0].topology == topology([(), (0,)]) == "chain"
    assert [call.id for call in state.open_calls] == ["plan"]
    assert state.admitted.pool == POOL
