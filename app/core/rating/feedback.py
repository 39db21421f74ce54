"""Feedback: ratings of a run's answer, each with its source and the version of its rule. It is stored apart from the
journal and changes nothing in it; a rating is never altered, a later one from the same source replaces it.

There are three kinds: `explicit` is what a caller said, `grader` what a rule found (`grading.py`), `implicit` what
callers did: those are signs, not judgements, and have no score.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from app.core.message.chat import Message
from app.core.run.events import Event, Kind, RunCancelAsked, facts

FeedbackKind = Literal["explicit", "grader", "implicit"]
SIGNS = "signs-1"
"""The version of what `sign` and `repeats` look for."""
AGAIN_SECONDS = 600.0
"""Seconds within which the same question from the same key counts as asked again."""


class Feedback(Struct, frozen=True):
    """One rating of one run. `score` is from 0 (worthless) to 1 (right); it or `label` is there."""

    id: str
    run: str
    tenant: str
    key: str
    """The API key that gave it; empty for what nobody sent."""
    at: float
    kind: FeedbackKind
    source: str
    version: str
    score: float | None = None
    label: str = ""
    comment: str = ""
    """Content: it is erased with the run's."""


def identify(rating: Feedback, rule: str = "") -> Feedback:
    """Return a program's rating with its id: the same one however often the program finds it. `rule` is the grader's
    rule in full, which distinguishes graders of one kind."""
    parts = (rating.run, rating.kind, rating.source, rating.version, rule)
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return replace(rating, id=f"fb_{digest[:32]}")


def latest_scores(ratings: Iterable[Feedback]) -> Mapping[FeedbackKind, Mapping[str, float]]:
    """Return the latest score from each source, by kind of rating. Signs have no score."""
    latest: dict[FeedbackKind, dict[str, float]] = {}
    for rating in sorted(ratings, key=lambda rating: (rating.at, rating.id)):
        if rating.score is not None:
            latest.setdefault(rating.kind, {})[rating.source] = rating.score
    return latest


def sign(events: Sequence[Event]) -> str:
    """Return the implicit sign in a run's journal of what its caller did; empty if there is none.

    `abandoned`: the caller left before the end, and the run was stopped for it. `cancelled`: the caller asked for that.
    """
    by = [fact.by for fact in facts(events, RunCancelAsked)]
    ended = any(event.kind is Kind.CANCELLED for event in events)
    if by and ended:
        return {"client": "abandoned", "caller": "cancelled"}.get(by[0], "")
    return ""


def repeats(earlier: Sequence[Message], later: Sequence[Message], seconds: float) -> bool:
    """Return whether a request asks for another answer to the same conversation as one `seconds` before it."""
    return 0 <= seconds <= AGAIN_SECONDS and tuple(earlier) == tuple(later)
