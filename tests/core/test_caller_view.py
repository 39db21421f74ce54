"""Event numbers: what they stand for, and from where a stream can go on."""

import pytest
from msgspec.structs import replace

from app.core.run import caller_view, drafts
from app.core.run.caller_view import ATTEMPT, DONE, Position
from app.core.run.events import ENDS, Fact, Kind
from app.core.run.fold import fold
from app.core.run.progress import give_up
from app.core.run.state import RunState, StepState
from app.errors import Conflict, InvalidRequest
from tests.core.play import admission, intent, number_events, outcome, step_failed
from tests.core.test_progress import FIRST_ROUND, MENDING, ROUNDS, plan_further_round, queue_steps
from tests.harness.stand_ins import TEXTS, journal_of, state_of


@pytest.mark.parametrize("attempt", [1, 2, 7, 32])
@pytest.mark.parametrize("chars", [0, 1, ATTEMPT - 1])
def test_a_number_is_read_back(attempt: int, chars: int) -> None:
    at = Position(attempt, chars)
    assert caller_view.read_position(at.number) == at
    assert at.number < 2**31, "for clients that read 32 bits"


def test_numbers_never_fall() -> None:
    numbers = [Position(attempt, chars).number for attempt in (1, 2, 3) for chars in (1, 5, ATTEMPT - 1)]
    assert numbers == sorted(set(numbers))


def running(outcomes: list[str | None]) -> RunState:
    """A run whose answering step has made so many attempts."""
    state = fold(journal_of("run", TEXTS)[:-4])
    intended = next(call for call in fold(journal_of("run", TEXTS)).calls.values() if call.step == 1)
    calls = {f"call_{n}": replace(intended, id=f"call_{n}", outcome=outcome) for n, outcome in enumerate(outcomes, 1)}
    return replace(state, state="running", calls=calls)


def with_answer(state: RunState, call: str) -> RunState:
    """Return the state once that call has given the answer."""
    step: StepState = replace(state.steps[1], state="done", call=call, chars=5)
    return replace(state, steps={**state.steps, 1: step})


def test_where_the_end_is() -> None:
    assert caller_view.end_position(state_of("run")) == Position(1, 5)
    assert caller_view.end_position(state_of("run", Kind.FAILED)) == Position()


def test_an_open_attempt_is_believed() -> None:
    caller_view.check_position(running(["unknown", None]), Position(2, 10**6))


def test_a_lost_attempt_cannot_be_continued() -> None:
    for went in ("unknown", "cancelled", "truncated", "error"):
        with pytest.raises(Conflict, match="not part of the answer"):
            caller_view.check_position(running([went, None]), Position(1, 3))
    with pytest.raises(Conflict, match="Run run is not affected"):
        caller_view.check_position(with_answer(running(["unknown", "ok"]), "call_2"), Position(1, 3))


def test_nothing_told_can_always_be_continued() -> None:
    for attempt in (1, 9):
        caller_view.check_position(running(["unknown"]), Position(attempt, 0))
        caller_view.check_position(fold(journal_of("run", TEXTS)[:1]), Position(attempt, 0))


@pytest.mark.parametrize(
    ("state", "at"),
    [
        (fold(journal_of("run", TEXTS)[:1]), Position(1, 1)),
        (running([None]), Position(2, 1)),
        (with_answer(running(["ok"]), "call_1"), Position(1, 5 + DONE + 1)),
        (state_of("run"), Position(1, 5 + DONE + 1)),
        (state_of("run"), Position(2, 1)),
    ],
)
def test_a_number_that_was_never_given_out_is_refused(state: RunState, at: Position) -> None:
    with pytest.raises(InvalidRequest) as refused:
        caller_view.check_position(state, at)
    assert refused.value.public_code == "unknown_event"


def test_every_number_of_an_ended_stream_is_known() -> None:
    for chars in range(5 + DONE + 1):
        caller_view.check_position(state_of("run"), Position(1, chars))
    assert ATTEMPT > 5 + DONE


def second_round(*after: Fact) -> RunState:
    """A run whose second round was answering when these came."""
    opened, *rest = plan_further_round(MENDING)
    streamed = [*queue_steps(1), intent("second", 1, access=(0,))]
    return fold(number_events(admission(limits=ROUNDS), *FIRST_ROUND, opened, *rest, *streamed, *after))


def test_attempts_are_counted_on_over_the_rounds() -> None:
    """Else a caller who heard words of the second round could be given the rest of the first one's answer."""
    state = second_round()
    assert [caller_view.attempt_of(state, call) for call in ("call-0", "second")] == [1, 2]
    caller_view.check_position(state, Position(2, 3))
    with pytest.raises(Conflict, match="not part of the answer"):
        caller_view.check_position(state, Position(1, 3))
    lost = [outcome("second", 1, kind="cancelled"), step_failed(1)]
    gone = second_round(*lost)
    second_state = second_round(*lost, drafts.run_ended(gone, give_up(gone, Kind.EXPIRED, "run_expired")))
    assert caller_view.end_position(second_state) == Position(1, 5)
    caller_view.check_position(second_state, Position(1, 3))
    with pytest.raises(Conflict, match="not part of the answer"):
        caller_view.check_position(second_state, Position(2, 3))
    with pytest.raises(InvalidRequest):
        caller_view.check_position(second_state, Position(3, 3))


def test_words_of_the_answering_step_are_not_continued_by_those_of_the_step_that_stands_in_for_it() -> None:
    """It has answered nothing after all, and words of its lost second attempt were sent."""
    state = with_answer(running(["ok", "truncated"]), "call_1")
    draft = replace(state.calls["call_1"], id="draft", step=0)
    steps = {0: replace(state.steps[0], call="draft"), 1: replace(state.steps[1], chars=0)}
    ended = replace(state, state="succeeded", calls={"draft": draft, **state.calls}, steps=steps)
    ended = replace(ended, end=ENDS[Kind.SUCCEEDED](step=0, fell_back=True))
    assert caller_view.end_position(ended) == Position(3, ended.steps[0].chars)
    caller_view.check_position(ended, Position(3, 1))
    for attempt in (1, 2):
        with pytest.raises(Conflict, match="not part of the answer"):
            caller_view.check_position(ended, Position(attempt, 1))
