"""The words of the commands: texts, figures and a run's story."""

from collections.abc import Mapping
from typing import Any

import pytest

from app.cli import terminal
from app.cli.runs import run_words


def test_texts_cannot_steer_the_terminal() -> None:
    assert "\x1b" not in terminal.clean("\x1b[2J\x1b]0;owned\x07 hello\u202e")
    assert terminal.clean("tab\tand\nline äöü ★ \u2764\ufe0f") == "tab\tand\nline äöü ★ \u2764\ufe0f"
    assert terminal.clean("a\U000e0148\ufe00\u3164") == "a\ufffd\ufffd\ufffd"


def test_no_text_that_is_printed_can_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.stdout().print("key \x1b[2J\u202e is revoked")
    table = terminal.table("name")
    table.add_row("\x1b]0;owned\x07")
    terminal.stderr().print(table)
    printed = capsys.readouterr()
    assert printed.out == "key \ufffd[2J\ufffd is revoked\n"
    assert "\x1b" not in printed.err


def test_square_brackets_are_printed_as_they_stand(capsys: pytest.CaptureFixture[str]) -> None:
    table = terminal.table("worker[red]")
    table.add_row("a[/x]")
    terminal.print_table(table, "")
    terminal.stdout().print("b[/y]: 1 call failed")
    assert capsys.readouterr().out.split() == ["worker[red]", "a[/x]", "b[/y]:", "1", "call", "failed"]


@pytest.mark.parametrize(
    ("micro", "words"), [(0, "$0.00"), (7, "$0.000007"), (500_000, "$0.50"), (12_340_000, "$12.34"), (2e9, "$2,000.00")]
)
def test_dollars(micro: float, words: str) -> None:
    assert terminal.dollars(micro) == words


@pytest.mark.parametrize(
    ("access", "words"),
    [
        (["user"], "the conversation"),
        (["user", 0, 1], "the conversation and steps 0, 1"),
        ([2], "step 2, not the conversation"),
        ([], "nothing but its subtask"),
    ],
)
def test_access_lists_in_words(access: list[str | int], words: str) -> None:
    assert run_words.sees(access) == words


def test_a_replaced_worker_is_explained() -> None:
    step: Mapping[str, Any] = {
        "probability": 0.5,
        "planned_worker": "a",
        "worker": "b",
        "attempts": [{"worker": "a", "error": "worker_timeout", "outcome": "error"}],
    }
    assert run_words.choice(step) == (
        "the conductor chose a with probability 0.50; b took over from a after worker_timeout"
    )


def test_a_worker_is_not_replaced_after_its_calls_that_went_well() -> None:
    answers = [
        {"worker": "a", "error": None, "outcome": "ok"},
        {"worker": "a", "error": "worker_timeout", "outcome": "error"},
    ]
    step: Mapping[str, Any] = {"probability": None, "planned_worker": "a", "worker": "b", "attempts": answers}
    assert run_words.choice(step) == "b took over from a after worker_timeout", "it had called tools before"


def test_a_worker_that_was_passed_over_is_explained() -> None:
    call = {"worker": "b", "error": None, "outcome": "ok", "passed_over": [{"worker": "a", "reason": "failing"}]}
    step: Mapping[str, Any] = {"probability": None, "planned_worker": "a", "worker": "b", "attempts": [call]}
    assert run_words.choice(step) == "b took over from a, which was passed over (failing)"
    assert run_words.describe_passed_over_workers(call) == ["a passed over (failing)"]


def test_a_dead_letter_is_explained() -> None:
    assert run_words.error("dead_letter") == (
        "dead_letter (several engines in a row stopped while they worked on it, so it was given up; "
        "see BatonDeadLetter in deploy/docs/alerts.md)"
    )
    assert (run_words.error("worker_timeout"), run_words.error(None)) == ("worker_timeout", None)
