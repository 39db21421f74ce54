"""The prompt of cards: what of a brief it tells, and that a calibration is what it shows."""

from msgspec.structs import replace

from app.conductor import cards
from app.conductor.protocol import Brief
from app.conductor.styles import STYLES
from app.core.message.chat import Message, Task, Text
from app.core.pool.catalog import CalibrationResult, Card, Limits, Price, Worker

MEASURED = (CalibrationResult("code", 9.0, 20), CalibrationResult("logic", 14.0, 20))
ADA = Worker("ada", "stub", "ada-1", Price(1, 4_460_000), Card(context=32_000, speed=123.0, measured=MEASURED))
BOB = Worker("bob", "stub", "bob-1", Price(0, 910_000), Card(strengths=("poems",), context=8_000, retention="none"))


def prompt_for(question: str, *workers: Worker) -> list[tuple[str, str]]:
    """The prompt for these workers, as pairs of role and text."""
    messages = (
        Message("user", (Text("Hello."),)),
        Message("assistant", (Text("Hi."),)),
        Message("user", (Text(question),)),
    )
    brief = Brief(Task(messages), workers, Limits(steps=4), usd_left=9)
    return [(message.role, message.text) for message in STYLES["cards"].messages(brief)]


def test_it_shows_each_worker_by_number_with_all_that_was_measured_and_the_last_question() -> None:
    assert prompt_for("What is 12+30?", ADA, BOB) == [
        (
            "system",
            "of 20 tasks each code 45%, logic 70%; $4.5 per million output tokens; 120 tokens a second; "
            "context 32000; may retain data: worker #0\n"
            "good at poems; $0.91 per million output tokens; context 8000; retains nothing: worker #1",
        ),
        ("user", "What is 12+30?"),
    ]


def test_it_names_the_number_of_tasks_of_each_domain_where_they_differ() -> None:
    mixed = replace(
        ADA.card, measured=(MEASURED[0], CalibrationResult("logic", 3.0, 4), CalibrationResult("poems", 0.0, 0))
    )
    assert "code 45% of 20 tasks, logic 75% of 4 tasks; $" in prompt_for("x", replace(ADA, card=mixed))[0][1]


def test_of_a_long_question_it_shows_the_beginning_and_the_end() -> None:
    text = "a" * 5_000 + "b" * 5_000
    prompt = prompt_for(text, ADA)[1][1]
    assert len(prompt) < cards.QUESTION_CHARS
    assert (prompt[:800], prompt[-400:]) == ("a" * 800, "b" * 400)
    assert "8800 characters are left out here" in prompt
