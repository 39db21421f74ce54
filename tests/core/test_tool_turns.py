"""A run that calls the caller's tools: when it waits, what its turns cost, and which results it goes on with."""

from typing import Any

import pytest
from msgspec.structs import replace

from app.core.message.chat import Message, Text, Usage, mint_call_id, sum_usages
from app.core.plan.workflow import Access, Step
from app.core.run import drafts
from app.core.run.caller_view import (
    ReturnedResults,
    bill,
    classify_results,
    find_returned_results,
    latest_exchanges,
    messages_by_step,
)
from app.core.run.events import Fact, Kind, StepToolResults
from app.core.run.progress import Await, Finish, Queue, decide, decide_end_again
from app.core.run.state import NO_RESULTS, RunState
from app.errors import EventMalformed, InvalidRequest
from tests.core.play import await_tools, intent, outcome, resume, step_done, step_failed
from tests.core.test_progress import (
    FIRST_ROUND,
    MENDING,
    ROUNDS,
    answer_step,
    plan_facts,
    plan_further_round,
    queue_steps,
    seeing,
    state_of,
)
from tests.harness.raw_facts import fact_from_json

UNTIL = 60.0
RUN, OTHER = ("run_" + digit * 31 for digit in "12")
ONE, TWO, THREE = (mint_call_id(RUN, token * 9) for token in (b"a", b"b", b"c"))
"""Ids of calls; the journals here belong to a run of another name, which no rule looks at."""


def wanting(n: int, *ids: str, usage: Usage = Usage(), call: str = "", user: bool = True) -> list[Fact]:
    """A call of a step that ends with tool calls."""
    name = call or f"call-{n}"
    access: tuple[str | int, ...] = ("user",) if user else ()
    return [intent(name, n, access=access), outcome(name, n, usage, usd=usage.output), await_tools(n, name, *ids)]


def waits(*steps: int) -> Fact:
    """`run.awaiting_tool`, with no usage in it."""
    return drafts.run_awaiting_tool(state_of(), Await(steps), UNTIL)


def back(*results: tuple[int, tuple[str, ...]]) -> list[Fact]:
    """`run.resumed` with results for steps."""
    return [resume(1, 2_000.0), *(StepToolResults(n, f"results-{n}", ids) for n, ids in results)]


SINGLE = [*plan_facts(seeing()), *queue_steps(0), *wanting(0, ONE, TWO)]
PARALLEL = [*plan_facts(seeing(), seeing(), seeing(0, 1)), *queue_steps(0, 1)]


def test_a_run_waits_once_nothing_goes_on_by_itself() -> None:
    assert decide(state_of(*SINGLE), 0.0) == (Await((0,)),)
    assert decide(state_of(*PARALLEL, *wanting(0, ONE)), 0.0) == ()
    assert decide(state_of(*PARALLEL, *wanting(0, ONE), intent("x", 1)), 0.0) == ()
    assert decide(state_of(*PARALLEL, *wanting(0, ONE), *wanting(1, TWO)), 0.0) == (Await((0, 1)),)
    one_done = [*PARALLEL, *wanting(0, ONE), intent("x", 1), outcome("x", 1), step_done(1, "x")]
    assert decide(state_of(*one_done), 0.0) == (Await((0,)),)
    open_plan = [*plan_facts(seeing(), close=False)[:-1]]
    assert decide(state_of(*open_plan), 0.0) == ()


def test_a_wait_that_was_found_to_be_over_is_over_whatever_clocks_say_since() -> None:
    """And whatever an earlier round has answered: it is the caller who does not want to know any more."""
    second = [*FIRST_ROUND, *plan_further_round(MENDING), *queue_steps(1), *wanting(1, ONE), waits(1)]
    state = state_of(*second, limits=ROUNDS)
    (end,) = decide(state, UNTIL)
    assert end == Finish(Kind.EXPIRED, error=NO_RESULTS)
    assert decide_end_again(end, state, UNTIL) == decide_end_again(end, state, UNTIL - 9) == end


def test_a_call_that_is_not_accounted_for_yet_is_waited_for() -> None:
    assert decide(state_of(*SINGLE[:3], intent("plan", None), *SINGLE[3:]), 0.0) == ()


def test_a_run_does_not_wait_for_what_its_answer_does_not_need() -> None:
    apart = [*plan_facts(seeing(), seeing()), *queue_steps(0, 1), *wanting(0, ONE)]
    assert decide(state_of(*apart, intent("x", 1), outcome("x", 1), step_done(1, "x")), 0.0) == (
        Finish(Kind.SUCCEEDED, 1),
    )
    (end,) = decide(state_of(*apart, step_failed(1)), 0.0)
    assert isinstance(end, Finish)
    assert end.kind is Kind.FAILED


def test_steps_that_are_ready_are_queued_before_a_run_waits() -> None:
    apart = [*plan_facts(seeing(), seeing(), seeing(0, 1)), *queue_steps(0), *wanting(0, ONE)]
    assert decide(state_of(*apart), 0.0) == (Queue((1,)),)


def test_while_it_waits_only_results_a_wish_or_time_move_it() -> None:
    waiting = [*SINGLE, waits(0)]
    state = state_of(*waiting)
    assert (state.state, state.turn.until) == ("awaiting_tool", UNTIL)
    assert decide(state, UNTIL - 1) == ()
    assert decide(state, UNTIL) == (Finish(Kind.EXPIRED, error="tool_results_missing"),)
    state_with_wish = state_of(*waiting, fact_from_json(Kind.CANCEL_ASKED, {"by": "caller"}))
    assert decide(state_with_wish, 0.0) == (Finish(Kind.CANCELLED, error="run_cancelled"),)
    again = state_of(*waiting, *back((0, (ONE, TWO))))
    assert (again.state, again.turn.number, again.turn.deadline, again.turn.streams) == ("running", 1, 2_000.0, True)
    assert (again.steps[0].state, again.steps[0].exchanges[0].results) == ("running", "results-0")
    assert decide(again, 1_999.0) == ()
    assert decide(again, 2_000.0) == (Finish(Kind.EXPIRED, error="run_expired"),)


def test_the_same_step_goes_on_and_answers() -> None:
    again = [
        *SINGLE,
        waits(0),
        *back((0, (ONE, TWO))),
        intent("second", 0),
        outcome("second", 0),
        step_done(0, "second"),
    ]
    assert decide(state_of(*again), 0.0) == (Finish(Kind.SUCCEEDED, 0),)
    assert state_of(*again).calls["second"].turn == 1


@pytest.mark.parametrize(
    "wrong",
    [
        [*SINGLE, intent("early", 0)],
        [*SINGLE, StepToolResults(0, "r", (ONE,)), StepToolResults(0, "r", (ONE,))],
        [*SINGLE, *back((0, (ONE, TWO)))],
        [*SINGLE, waits(0), waits(0)],
        [*SINGLE, waits(0), StepToolResults(0, "r", (ONE,))],
        [*SINGLE[:3], await_tools(0, "none", ONE)],
    ],
)
def test_nothing_comes_out_of_turn(wrong: list[Fact]) -> None:
    with pytest.raises(EventMalformed, match="does not fit"):
        state_of(*wrong)


def test_results_for_a_step_that_was_given_up_change_nothing() -> None:
    skipped = drafts.steps_skipped([state_of(*SINGLE).steps[0]], "plan_rejected")
    assert state_of(*SINGLE, *skipped, StepToolResults(0, "r", (ONE, TWO))).steps[0].state == "skipped"


def test_a_plan_says_which_steps_may_call_tools() -> None:
    state = state_of(*plan_facts(replace(seeing(), tools=True), seeing(0)))
    assert [state.steps[n].tools for n in (0, 1)] == [True, False]


# -- the bill


def test_each_turn_is_billed_by_itself_and_the_turns_add_up() -> None:
    first, second = Usage(10, 4, 5, 1), Usage(30, 20, 7, 2)
    head = [
        *plan_facts(seeing(user=False), seeing(0)),
        *answer_step(0, usage=Usage(3, 0, 2), access=()),
        *queue_steps(1),
    ]
    waiting = [*head, *wanting(1, ONE, usage=first)]
    state = state_of(*waiting, waits(1))
    split = bill(state)
    assert (split.visible, split.orchestration) == (first, Usage(3, 0, 2))
    assert (split.turn, split.total, split.turn_usd, split.usd) == (split.total, Usage(13, 4, 7, 1), 5, 5)
    body = drafts.run_awaiting_tool(state_of(*waiting), Await((1,)), UNTIL).to_json()
    assert (body["visible"]["output"], body["usage"]["input"], body["usd"], body["turn"]) == (5, 13, 5, 0)
    again = [*waiting, waits(1), *back((1, (ONE,))), intent("2", 1), outcome("2", 1, second, usd=9), step_done(1, "2")]
    end = state_of(*again, fact_from_json(Kind.SUCCEEDED, {"step": 1}))
    split = bill(end)
    assert (split.visible, split.orchestration, split.turn, split.turn_usd) == (second, Usage(), second, 9)
    assert (split.total, split.usd) == (sum_usages((Usage(13, 4, 7, 1), second)), 14)


def test_the_calls_of_several_steps_are_all_visible_output() -> None:
    first, second = Usage(10, 0, 5), Usage(20, 0, 7)
    state = state_of(*PARALLEL, *wanting(0, ONE, usage=first), *wanting(1, TWO, usage=second), waits(0, 1))
    assert bill(state).visible == Usage(10, 0, 12)
    assert bill(state).orchestration == Usage(20, 0, 0)


def test_an_answer_of_an_earlier_turn_was_paid_for_there() -> None:
    """The last step said nothing, so what an earlier one said in the first turn is the answer."""
    head = [*plan_facts(seeing(), seeing(0)), *answer_step(0, usage=Usage(9, 0, 8)), *queue_steps(1), *wanting(1, ONE)]
    again = [*head, waits(1), *back((1, (ONE,))), intent("2", 1), outcome("2", 1, Usage(4, 0, 1)), step_done(1, "2", 0)]
    split = bill(state_of(*again, fact_from_json(Kind.SUCCEEDED, {"step": 0})))
    assert (split.visible, split.orchestration) == (Usage(4, 0, 0), Usage(0, 0, 1))


# -- results that come back

ASK = Message("user", (Text("Look."),))


def result(id_: str, text: str = "r") -> Message:
    """A tool's result."""
    return Message("tool", (Text(text),), call_id=id_)


HURRY = Message("user", (Text("Hurry."),))


@pytest.mark.parametrize(
    ("messages", "ids", "tail"),
    [
        ([ASK], None, 0),
        ([], None, 0),
        ([ASK, result("call_abc")], None, 0),
        ([ASK, result(ONE), Message("assistant", ()), HURRY], None, 0),
        ([ASK, result(ONE), Message("system", ())], None, 0),
        ([ASK, Message("assistant", ()), result(TWO), result(ONE)], [TWO, ONE], 0),
        ([ASK, result(ONE), HURRY, HURRY], [ONE], 2),
        ([ASK, result(ONE), Message("assistant", ()), result(TWO)], [TWO], 0),
    ],
)
def test_only_results_at_the_end_are_brought_back(messages: list[Message], ids: list[str] | None, tail: int) -> None:
    came = find_returned_results(messages)
    assert (None if came is None else list(came.results)) == ids
    assert came is None or (came.run, len(came.tail)) == (RUN, tail)


@pytest.mark.parametrize("stranger", ["call_abc", mint_call_id(OTHER, b"z" * 9)])
def test_results_of_one_reply_belong_to_one_run(stranger: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        find_returned_results([ASK, result(ONE), result(stranger)])
    assert refused.value.public_code == "tool_results_mixed"
    assert stranger not in refused.value.message


def bringing(*ids: str, tail: bool = False) -> ReturnedResults:
    """Results for these calls."""
    return ReturnedResults(RUN, {id_: result(id_) for id_ in ids}, (HURRY,) if tail else ())


def refusal(state: RunState, came: ReturnedResults) -> tuple[Any, str]:
    """Code and message of the 400."""
    with pytest.raises(InvalidRequest) as refused:
        classify_results(state, came)
    return refused.value.public_code, refused.value.message


def test_all_results_together_let_a_run_go_on() -> None:
    waiting = state_of(*PARALLEL, *wanting(0, ONE, TWO), *wanting(1, THREE), waits(0, 1))
    came = bringing(THREE, TWO, ONE)
    assert classify_results(waiting, came) == "go_on"
    assert messages_by_step(waiting, came) == {0: (result(ONE), result(TWO)), 1: (result(THREE),)}
    code, message = refusal(waiting, bringing(TWO, THREE))
    assert code == "tool_results_missing"
    assert ONE in message
    assert TWO not in message


def test_ids_that_were_never_given_out_are_refused() -> None:
    waiting = state_of(*SINGLE, waits(0))
    for came in (bringing(THREE), bringing(ONE, TWO, THREE)):
        code, message = refusal(waiting, came)
        assert code == "unknown_tool_call"
        assert not any(id_ in message for id_ in came.results)


def test_results_that_came_before_are_a_repeat_of_the_present_turn_or_refused() -> None:
    running = state_of(*SINGLE, waits(0), *back((0, (ONE, TWO))))
    assert classify_results(running, bringing(ONE, TWO)) == "repeat"
    assert set(latest_exchanges(running)) == {ONE, TWO}
    assert refusal(running, bringing(ONE))[0] == "tool_call_answered"
    later = [*SINGLE, waits(0), *back((0, (ONE, TWO))), *wanting(0, THREE, call="second")]
    for state in (state_of(*later), state_of(*later, waits(0))):
        assert classify_results(state, bringing(ONE, TWO)) == "repeat"
    assert classify_results(state, bringing(THREE)) == "go_on"
    assert messages_by_step(state, bringing(THREE)) == {0: (result(THREE),)}
    assert refusal(state, bringing(ONE, THREE))[0] == "tool_call_answered"


def test_results_for_a_run_that_is_not_waiting_yet_are_no_answer() -> None:
    """The ids of one step may be told while another still runs."""
    assert refusal(state_of(*PARALLEL, *wanting(0, ONE)), bringing(ONE))[0] == "tool_call_answered"


def test_the_conversation_of_an_ended_run_is_history() -> None:
    ended = state_of(*SINGLE, waits(0), fact_from_json(Kind.EXPIRED, {"step": None}))
    for ids in ((ONE, TWO), (ONE,), (THREE,)):
        assert classify_results(ended, bringing(*ids)) == "history"


def test_words_of_the_user_go_to_the_step_that_may_see_the_user() -> None:
    waiting = state_of(*SINGLE, waits(0))
    came = bringing(ONE, TWO, tail=True)
    assert classify_results(waiting, came) == "go_on"
    assert messages_by_step(waiting, came)[0][-1] == HURRY


@pytest.mark.parametrize(
    "steps",
    [
        [seeing(), Step("ada", "x", Access(False, (0,)))],
        [Step("ada", "x", Access(False)), seeing(0)],
        [seeing(), seeing(0)],
    ],
)
def test_words_that_not_everybody_would_hear_make_a_new_run(steps: list[Step]) -> None:
    head = plan_facts(*steps)
    waiting = state_of(*head, *queue_steps(0), *wanting(0, ONE, user=steps[0].access.user), waits(0))
    assert classify_results(waiting, bringing(ONE, tail=True)) == "history"
    assert classify_results(waiting, bringing(ONE)) == "go_on"
    assert len(messages_by_step(waiting, bringing(ONE, tail=True))[0]) == 1 + steps[0].access.user
