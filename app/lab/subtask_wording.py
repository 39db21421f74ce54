"""The meaning of a subtask's words: which role they ask for, what they say it is about, and phrases to begin with.

A worker of the rehearsal world goes by the words alone: by their marks they ask for a role, and they name the kind of
task rightly or wrongly, point at the task in general, or say nothing of it. The phrases are what the warm start
imitates; a conductor that writes in words may put any word of theirs after any other.
"""

import re
from collections.abc import Mapping
from functools import cache
from random import Random

from app.providers.rehearsal.task_families import DOMAINS

NAMED = 0.15
"""The gain in margin of a worker whose subtask names the right kind of task: 0.24 logits. Without written subtasks,
with one for all, a conductor loses 0.03 to 0.24 logits on four benchmarks (arXiv 2512.04388, ablations); this is the
most."""
MISNAMED, UNNAMED = -0.8, -0.3
"""The losses of a worker whose subtask names a wrong kind, and of one whose subtask names no task. Both are guesses."""
ASKS = (
    ("combine", r"\bweigh\b|\bcombine\b"),
    ("check", r"\bcheck\b|\bverify\b"),
    ("reason", r"step by step|following the plan|by the plan"),
    ("plan", r"\bplan\b|\boutline\b"),
)
"""The marks of roles, the first that is found; without any a step solves at once."""
NAMES: Mapping[str, str] = {
    "numbers": r"\barithmetic\b|\bnumbers?\b",
    "equations": r"\balgebra\b|\bequations?\b",
    "words": r"\bwords?\b|\bletters?\b",
    "calendar": r"\bcalendar\b|\bdates?\b",
}
"""The marks of domains."""
POINTS = r"\b(?:task|question|problem|answers?)\b"
"""The marks of there being a task."""


@cache
def role_of(subtask: str) -> str:
    """Return the role that a subtask asks for, by its words."""
    words = subtask.casefold()
    return next((role for role, mark in ASKS if re.search(mark, words)), "solve")


@cache
def shift(subtask: str, domain: int) -> float:
    """Return the amount that a subtask's words add to the margin of its worker, for a task of this domain."""
    words = subtask.casefold()
    domains = {place for place, name in enumerate(DOMAINS) if re.search(NAMES[name], words)}
    if domains:
        return NAMED if domains == {domain} else MISNAMED
    if not words or re.search(POINTS, words):
        return 0.0
    return UNNAMED


# What the warm start begins with.

PHRASES: Mapping[str, tuple[str, ...]] = {
    "plan": ("write a plan for {it}", "outline how to do {it}", "plan {it} but do not solve it"),
    "solve": ("solve {it} at once", "give the final answer to {it}", "do {it} directly"),
    "reason": ("solve {it} step by step", "work through {it} step by step", "do {it} step by step by the plan"),
    "check": (
        "check the answer to {it} and correct it",
        "verify what was said of {it}",
        "check {it} and mend any fault",
    ),
    "combine": ("weigh the answers to {it}", "combine what was said of {it} into one", "weigh what was said of {it}"),
}
SUBJECTS: tuple[tuple[str, ...], ...] = (
    ("the arithmetic task", "this question of numbers"),
    ("the algebra task", "this equation"),
    ("the task with words", "this question of letters"),
    ("the calendar task", "this question of dates"),
    ("the task", "this question"),
    ("it", "this"),
)
"""The subjects that a step may name: one of the domains in their order, the task, or nothing that says so."""
GENERAL = 4


def phrase(random: Random, role: str, subject: int) -> str:
    """Draw one of the phrases for a role."""
    return random.choice(PHRASES[role]).format(it=random.choice(SUBJECTS[subject]))


@cache
def vocabulary() -> tuple[str, ...]:
    """Return every word of the phrases."""
    texts = [text.replace("{it}", " ") for some in PHRASES.values() for text in some]
    return tuple(sorted({word for text in [*texts, *sum(SUBJECTS, ())] for word in text.split()}))
