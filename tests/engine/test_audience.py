"""The parts of an answer that each caller receives, in order: with lost attempts, slow and distant readers."""

import pytest
from msgspec.structs import replace

from app.core.run.caller_view import ATTEMPT, DONE, Position, bill
from app.core.run.state import RunState
from app.engine.delivery import followers as module
from app.engine.delivery.followers import Audience
from app.engine.delivery.messages import AnswerPart, CallerMessage, Mailbox, StepEvent, TurnEnd
from app.errors import BatonError, QueueUnavailable, RunFailed
from app.stepqueue.protocol import Delta, Live
from tests.harness.stand_ins import TEXTS, journal_of, state_of

RUN, ANSWER = "run", "Four times four."
WHOLE = state_of(RUN)
ONE, TWO = "call_1", "call_2"
CALLS = {
    "call_0": WHOLE.calls["call_0"],
    ONE: replace(WHOLE.calls["call_1"], outcome=None),
    TWO: replace(WHOLE.calls["call_1"], id=TWO, outcome=None),
}
LIVE: RunState = replace(WHOLE, state="running", end=None, calls=CALLS)
"""A run whose answering step is at its second attempt."""


def words(text: str, offset: int = 0, call: str = ONE, step: int = 1) -> Delta:
    return Delta(RUN, step, call, offset, text)


def end_turn(answer: str = ANSWER, call: str = ONE, error: BatonError | None = None) -> TurnEnd:
    step = replace(WHOLE.steps[1], call=call, chars=len(answer))
    state = replace(WHOLE, calls=CALLS, steps={**WHOLE.steps, 1: step})
    return TurnEnd(state, answer if error is None else "", "stop", bill(WHOLE), error)


class Subscriber:
    """A caller, and what it was told."""

    def __init__(self, audience: Audience, at: Position = Position(), *, notes: bool = False, room: int = 100) -> None:
        self.line: Mailbox[CallerMessage] = Mailbox(room)
        audience.admit(self.line, at, wants_steps=notes)

    def take_messages(self) -> list[CallerMessage]:
        """Everything since the last look."""
        items = list(self.line._items)
        self.line._items.clear()
        return items

    def take_texts(self) -> list[tuple[str, int]]:
        """The words among it, each with its event number."""
        return [(event.text, event.at) for event in self.take_messages() if isinstance(event, AnswerPart)]

    def hear_to_end(self) -> tuple[str, str | None]:
        """All words until the end, and the code of the error there."""
        messages = self.take_messages()
        assert isinstance(messages[-1], TurnEnd)
        assert sum(isinstance(event, TurnEnd) for event in messages) == 1
        error = messages[-1].error
        return "".join(
            event.text for event in messages if isinstance(event, AnswerPart)
        ), error.public_code if error else None


def test_everybody_is_told_everything_from_wherever_it_begins() -> None:
    audience = Audience(RUN)
    first = Subscriber(audience)
    audience.receive(LIVE, words("Four "))
    second, later, ahead = (
        Subscriber(audience),
        Subscriber(audience, Position(1, 2)),
        Subscriber(audience, Position(1, 8)),
    )
    assert [follower.take_texts() for follower in (first, second, later, ahead)] == [
        [("Four ", 5)],
        [("Four ", 5)],
        [("ur ", 5)],
        [],
    ]
    audience.receive(LIVE, words("times ", 5))
    assert [follower.take_texts() for follower in (first, second, later, ahead)] == [[("times ", 11)]] * 3 + [
        [("es ", 11)]
    ]
    audience.end(end_turn())
    assert [follower.hear_to_end() for follower in (first, second, later, ahead)] == [("four.", None)] * 4


def test_what_is_missed_comes_with_what_follows_or_with_the_end() -> None:
    audience = Audience(RUN)
    ear = Subscriber(audience)
    assert audience.receive(LIVE, words("Four "))
    assert not audience.receive(LIVE, words("four.", 11))  # the piece between got lost
    assert not audience.receive(LIVE, words("our ", 1))  # and this one came twice
    assert audience.receive(LIVE, words("r times", 3))  # told again from a little earlier
    assert ear.take_texts() == [("Four ", 5), ("times", 10)]
    audience.end(end_turn())
    assert ear.hear_to_end() == (" four.", None)


def test_a_turn_in_which_a_plan_waits_for_an_approval_takes_no_text_back() -> None:
    """The answering step is done, and a plan in another step waits; there is no answer yet to compare the text with."""
    audience = Audience(RUN)
    ear = Subscriber(audience)
    assert audience.receive(LIVE, words("Four times"))
    audience.end(TurnEnd(replace(LIVE, state="awaiting_approval"), "", "stop", bill(WHOLE), None))
    assert ear.hear_to_end() == ("Four times", None)


def test_only_the_answering_step_is_told_and_only_calls_that_are_known() -> None:
    audience = Audience(RUN)
    ear = Subscriber(audience)
    assert not audience.receive(LIVE, words("Two twos.", call="call_0", step=0))
    assert not audience.receive(LIVE, words("Four", call="unheard-of"))
    assert ear.take_messages() == []


def test_a_reader_that_falls_behind_gets_the_rest_in_one_piece() -> None:
    audience = Audience(RUN)
    slow = Subscriber(audience, room=1)
    for place, letter in enumerate(ANSWER[:10]):
        audience.receive(LIVE, words(letter, place))
    assert slow.take_texts() == [("F", 1)]
    audience.receive(LIVE, words(ANSWER[10], 10))
    assert slow.take_texts() == [(ANSWER[1:11], 11)]
    audience.end(end_turn())
    assert slow.hear_to_end() == (ANSWER[11:], None)


def test_whoever_was_told_nothing_follows_the_next_attempt_at_once() -> None:
    audience = Audience(RUN)
    ears = [Subscriber(audience), Subscriber(audience, Position(1, 0))]
    audience.receive(LIVE, words("Four ", call=TWO))
    audience.end(end_turn(call=TWO))
    for ear in ears:
        assert ear.take_texts() == [("Four ", ATTEMPT + 5), ("times four.", ATTEMPT + len(ANSWER))]


def test_a_lost_attempt_strands_whoever_heard_it_and_nobody_else() -> None:
    audience = Audience(RUN)
    stranded = Subscriber(audience)
    audience.receive(LIVE, words("Fünf"))
    audience.receive(LIVE, words("Fo", call=TWO))
    fresh = Subscriber(audience)
    assert not audience.receive(LIVE, words(" mal", 4))  # the first attempt's dispatcher does not know yet
    audience.receive(LIVE, words("ur", 2, call=TWO))
    assert stranded.take_texts() == [("Fünf", 4)]
    assert fresh.take_texts() == [("Fo", ATTEMPT + 2), ("ur", ATTEMPT + 4)]
    audience.end(end_turn(call=TWO))
    assert stranded.hear_to_end() == ("", "answer_changed")
    assert fresh.hear_to_end() == (ANSWER[4:], None)


def test_who_comes_back_after_a_lost_attempt_is_not_taken_for_one_who_was_sent_nothing() -> None:
    audience = Audience(RUN)
    before = Subscriber(audience, Position(1, 4))
    audience.receive(LIVE, words("Four times"))
    audience.lose()
    after = Subscriber(audience, Position(1, 4))
    audience.end(end_turn(call=TWO))
    assert before.hear_to_end() == (ANSWER[4:], None)
    assert after.hear_to_end() == ("", "answer_changed"), "nobody here knows what it was sent"


def test_a_lost_attempt_strands_nobody_if_the_next_one_says_the_same() -> None:
    audience = Audience(RUN)
    ear = Subscriber(audience)
    audience.receive(LIVE, words("Four"))
    audience.receive(LIVE, words("Four times", call=TWO))
    audience.end(end_turn(call=TWO))
    assert ear.hear_to_end() == (ANSWER, None)


@pytest.mark.parametrize(("at", "error"), [(Position(1, 4), "answer_changed"), (Position(2, 4), None)])
def test_a_caller_who_comes_back_is_held_to_the_attempt_that_it_heard(at: Position, error: str | None) -> None:
    """Nobody here knows what it was told, only of which attempt that was."""
    audience = Audience(RUN)
    ear = Subscriber(audience, at)
    audience.receive(LIVE, words("Four times", call=TWO))
    audience.end(end_turn(call=TWO))
    assert ear.hear_to_end() == ("" if error else ANSWER[4:], error)


@pytest.mark.parametrize("behind", range(DONE + 2))
def test_a_caller_may_have_heard_part_of_the_end(behind: int) -> None:
    audience = Audience(RUN)
    ear = Subscriber(audience, Position(1, len(ANSWER) + behind))
    audience.end(end_turn())
    assert ear.hear_to_end() == ("", "unknown_event" if behind > DONE else None)


@pytest.mark.parametrize(("state", "said"), [("succeeded", "has succeeded"), ("awaiting_tool", "waits for the")])
def test_the_error_says_where_the_answer_is(state: str, said: str) -> None:
    message = module.answer_changed(replace(WHOLE, state=state)).message
    assert f"GET /v1/runs/{RUN}/stream" in message
    assert said in message
    assert "Idempotency-Key" in message


def test_a_failed_run_fails_for_everybody() -> None:
    audience = Audience(RUN)
    ears = [Subscriber(audience), Subscriber(audience, Position(1, 3))]
    audience.receive(LIVE, words("Four"))
    audience.end(end_turn(error=RunFailed()))
    assert [ear.hear_to_end()[1] for ear in ears] == ["run_failed"] * 2


def test_an_end_is_told_once_and_also_to_those_who_come_after_it() -> None:
    audience = Audience(RUN)
    ear = Subscriber(audience)
    audience.end(end_turn())
    audience.end(end_turn(error=RunFailed()))
    assert ear.hear_to_end() == Subscriber(audience).hear_to_end() == (ANSWER, None)


def test_who_is_gone_is_told_the_end_and_nothing_before_it() -> None:
    audience = Audience(RUN)
    ear, other = Subscriber(audience, notes=True), Subscriber(audience)
    assert len(audience) == 2
    audience.leave(ear.line)
    audience.receive(LIVE, words("Four"))
    audience.note(journal_of(RUN, TEXTS)[4:5])
    assert ear.take_messages() == []
    assert len(audience) == 1
    audience.leave(other.line)
    assert not len(audience)
    audience.end(end_turn())
    assert isinstance(ear.take_messages()[-1], TurnEnd)


def test_events_are_noted_once_for_those_who_asked() -> None:
    audience = Audience(RUN)
    subscriber, other = Subscriber(audience, notes=True), Subscriber(audience)
    journal = journal_of(RUN, TEXTS)
    for event in (*journal[:5], *journal[2:6]):
        audience.note([event])
    assert [event.kind for event in subscriber.take_messages() if isinstance(event, StepEvent)] == [
        "plan.step",
        "plan.step",
        "plan.accepted",
    ]
    assert other.take_messages() == []


def test_a_reader_that_falls_behind_misses_no_event() -> None:
    """Text comes later in a larger piece; an event would not come at all."""
    audience = Audience(RUN)
    slow = Subscriber(audience, notes=True, room=1)
    audience.receive(LIVE, words("Four "))
    audience.note(journal_of(RUN, TEXTS)[:6])
    events = [event.kind for event in slow.take_messages() if isinstance(event, StepEvent)]
    assert events == ["plan.step", "plan.step", "plan.accepted"]


class Wire:
    """A queue that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Live]] = []
        self.down = False

    async def publish(self, address: str, messages: list[Live]) -> None:
        if self.down:
            raise QueueUnavailable()
        self.told += [(address, message) for message in messages]
