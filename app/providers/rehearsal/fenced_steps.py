"""Earlier steps as `core/run/visibility.py` fences them in a worker's message, read again.

Callers can write anything into a message, forged fences too, so that reading takes time in proportion to its length.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence

from msgspec import Struct

HEAD = re.compile(r'<step\s+index="\d+"\s+id="(?P<id>[^"]*)">\s*(?P<opening><subtask>|<answer>)')
MIDDLE = re.compile(r"</subtask>\s*<answer>")
TAIL = re.compile(r'</answer>\s*</step\s+id="(?P<id>[^"]*)">')


class FencedStep(Struct, frozen=True):
    """The subtask and the answer of an earlier step."""

    subtask: str
    """Empty where the message does not have it."""
    answer: str
    end: int
    """The place in the text behind the step."""


def read_steps(text: str) -> list[FencedStep]:
    """Return the steps that are fenced in a text, in order. A step goes to the first end with its id, and what is
    inside of it is no step."""
    middles = list(MIDDLE.finditer(text))
    tails: dict[str, list[re.Match[str]]] = {}
    for tail in TAIL.finditer(text):
        tails.setdefault(tail["id"], []).append(tail)
    steps: list[FencedStep] = []
    for head in HEAD.finditer(text):
        if steps and head.start() < steps[-1].end:
            continue
        subtask, start = "", head.end()
        if head["opening"] == "<subtask>":
            middle = _first_from(start, middles)
            if middle is None:
                continue
            subtask, start = text[start : middle.start()], middle.end()
        last = _first_from(start, tails.get(head["id"], ()))
        if last is not None:
            steps.append(FencedStep(subtask, text[start : last.start()], last.end()))
    return steps


def _first_from(start: int, matches: Sequence[re.Match[str]]) -> re.Match[str] | None:
    """Return the first of these matches, which are in order, that begins at a place of the text or later."""
    place = bisect_left(matches, start, key=re.Match.start)
    if place == len(matches):
        return None
    return matches[place]
