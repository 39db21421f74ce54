"""The journal's words, the records of a task as JSON, and the bodies of a driver's events."""

import json
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.message.chat import (
    Image,
    Message,
    Sampling,
    Task,
    Text,
    Usage,
    message_from_json,
    message_to_json,
    sum_usages,
    task_from_json,
    task_to_json,
    usage_from_json,
    usage_to_json,
)
from app.core.plan.workflow import Access, Step
from app.core.run import drafts
from app.core.run.events import TERMINAL, Event, Kind, RunAdmitted
from app.core.run.fold import fold
from app.core.run.kinds import AFTER_THE_END, ENDED, RUN_STATES
from app.core.run.progress import Finish, Propose
from app.errors import EventMalformed
from tests.core.play import POOL, admission, number_events
from tests.harness.raw_facts import fact_from_json

PARTS = st.builds(Text, st.text()) | st.builds(Image, st.text(), st.none() | st.text())
MESSAGES = st.builds(
    Message,
    st.sampled_from(["system", "developer", "user", "assistant", "tool"]),
    st.lists(PARTS, max_size=3).map(tuple),
    st.none() | st.text(),
)
SAMPLING = st.builds(Sampling, st.none() | st.floats(0, 2), stop=st.lists(st.text(), max_size=4).map(tuple))
TASKS = st.builds(
    Task,
    st.lists(MESSAGES, max_size=3).map(tuple),
    SAMPLING,
    st.none() | st.text(),
    st.dictionaries(st.text(), st.text()),
)
COUNTS = st.integers(0, 10**9)
USAGES = st.builds(Usage, COUNTS, COUNTS, COUNTS, COUNTS, st.booleans())


def test_terminal_kinds_have_states_of_their_own() -> None:
    assert len(set(TERMINAL.values())) == len(TERMINAL) == len(ENDED) == 5
    assert set(RUN_STATES) >= ENDED
    assert not AFTER_THE_END & set(TERMINAL)
    assert all(kind.value == f"run.{state}" for kind, state in TERMINAL.items())


@settings(max_examples=40, deadline=None)
@given(TASKS)
def test_a_task_comes_back_from_json_as_it_was(task: Task) -> None:
    assert task_from_json(json.loads(json.dumps(task_to_json(task)))) == task
    for message in task.messages:
        assert message_from_json(json.loads(json.dumps(message_to_json(message)))) == message
    assert task.has_images == any(isinstance(part, Image) for message in task.messages for part in message.parts)


@settings(max_examples=40, deadline=None)
@given(USAGES, USAGES, USAGES)
def test_usages_add_up_and_come_back_from_json(usage: Usage, two: Usage, three: Usage) -> None:
    assert usage_from_json(json.loads(json.dumps(usage_to_json(usage)))) == usage
    assert sum_usages((usage, two)) == sum_usages((two, usage))
    assert (
        sum_usages((sum_usages((usage, two)), three))
        == sum_usages((usage, two, three))
        == sum_usages((usage, sum_usages((two, three))))
    )
    assert sum_usages((usage, two)).total == usage.total + two.total
    assert sum_usages((usage,)) == sum_usages((usage, Usage())) == usage
    assert sum_usages(()) == Usage()


def test_admission_pins_what_bounds_the_run() -> None:
    draft = admission(labels=("z", "a"), excluded={"eve": "why"})
    body = json.loads(json.dumps(draft.to_json()))
    assert (body["labels"], body["excluded"], body["pool"]) == (["a", "z"], {"eve": "why"}, list(POOL))
    [event] = number_events(fact_from_json(draft.kind, body))
    assert fold((event,)) == fold(number_events(draft))


@pytest.mark.parametrize("value", [None, 5, "text", [], [1], {}])
def test_an_admission_with_a_field_of_another_type_is_malformed_or_read(value: object) -> None:
    """An engine ends a late run whose journal it cannot read. It goes by this exception."""
    for field in RunAdmitted.decodings:
        body = admission().to_json() | {field.key: value}
        with suppress(EventMalformed):
            assert Event("run", 1, Kind.ADMITTED, 0.0, body).fact


def test_a_planned_step_is_numbered_within_the_run() -> None:
    step = Step("ada", "text", Access(True, (0, 1)), answers=True, probability=0.25)
    assert drafts.plan_step(Propose(2, 5, "first"), 2, drafts.WrittenStep(step, "ref")).to_json() == {
        "proposal": 2,
        "n": 7,
        "worker": "ada",
        "subtask": "ref",
        "access": ["user", 5, 6],
        "answers": True,
        "probability": 0.25,
    }
    assert (
        "probability" not in drafts.plan_step(Propose(0, 0, "first"), 0, drafts.WrittenStep(Step("ada"), "")).to_json()
    )


def test_a_rejection_keeps_a_bounded_number_of_reasons() -> None:
    assert len(drafts.plan_rejected(0, "", ["no"] * 900, outage=False).reasons) == 50


def test_only_open_steps_are_skipped_and_a_failed_run_says_why() -> None:
    opened = drafts.plan_opened(Propose(0, 0, "first"), "fixed", POOL, instant=True)
    state = fold(
        number_events(
            admission(),
            opened,
            drafts.plan_step(Propose(0, 0, "first"), 0, drafts.WrittenStep(Step("ada", answers=True), "")),
        )
    )
    [skip] = drafts.steps_skipped(state.steps.values(), "run_ended")
    assert skip.to_json() == {"n": 0, "reason": "run_ended"}
    skipped = fold(
        number_events(
            admission(),
            opened,
            drafts.plan_step(Propose(0, 0, "first"), 0, drafts.WrittenStep(Step("ada", answers=True), "")),
            skip,
        )
    )
    assert drafts.steps_skipped(skipped.steps.values(), "again") == ()
    body = drafts.run_ended(skipped, Finish(Kind.EXPIRED, error="run_expired")).to_json()
    assert (body["error"], body["step"], body["usd"]) == ("run_expired", None, 0)
    assert "answer" not in body
