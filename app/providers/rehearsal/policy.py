"""The learned policy of the rehearsal conductor, evaluated in plain Python from `policy.json`.

It was learned from verdicts in world 2 of the lab, whose workers the rehearsal pool has (`app/lab/world2/shipped.py`
says how, and makes the file). It is shown what any conductor is shown: the question or the parts of it that are sent,
the cards, and the money that is left. It finds its workers again by the strengths on their cards, and knows nothing of
the answers or of how hard a task is.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from msgspec import Struct

WORD = re.compile(r"[a-z]+")
DOCUMENTS = (6_500, 32_000)
"""The characters of a request from which on it has a short document, or a long one."""
LEAST_WORDS = 12
"""Different words that a task must have: shorter questions are none of those that the policy knows."""
SURE, LIKELY = 0.95, 0.55
"""The shares of known words from which on a question is one of those that the policy knows, and is likely to be one."""
FLOOR = 256
"""The fewest output tokens for which a step's price is held: the default of tiers."""
FRAME_BYTES, SEEN_BYTES = 400, 1_624
"""Bytes around what a step sees, and of each earlier step that it sees, as `core/plan/pricing.py` counts them."""
PLANNING = 0.0002
"""Dollars of the money that is left which the call for the plan itself may cost."""


class PlanStep(Struct, frozen=True):
    """A step of a plan: the place of its worker among those of the policy, and the most tokens that it writes."""

    worker: int
    subtask: str
    access: tuple[str | int, ...]
    writes: int


class LearnedPlan(Struct, frozen=True):
    """A plan with the weights of its worth over `terms`."""

    steps: tuple[PlanStep, ...]
    scores: tuple[float, ...]


class Policy(Struct, frozen=True):
    """The numbers of the file."""

    workers: tuple[str, ...]
    start: tuple[float, ...]
    words: Mapping[str, tuple[float, ...]]
    plans: tuple[LearnedPlan, ...]


class Card(Struct, frozen=True):
    """A worker as the prompt shows it: its ordinal, its strengths, and dollars per token."""

    ordinal: int
    strengths: str
    input: float
    output: float


class ReadQuestion(Struct, frozen=True):
    """A question as the policy reads it: parts by domain and the chance of confidence, and the size of its document."""

    latent: tuple[float, ...]
    document: int
    size: int
    """Characters of the whole request, also of what the conductor was not shown."""


@cache
def policy() -> Policy:
    """Return the policy that is shipped."""
    value: dict[str, Any] = json.loads(files(__package__).joinpath("policy.json").read_text("utf-8"))
    plans = []
    for plan in value["plans"]:
        steps = tuple(PlanStep(place, text, tuple(access), writes) for place, text, access, writes in plan["steps"])
        plans.append(LearnedPlan(steps, tuple(plan["scores"])))
    words = {word: tuple(row) for word, row in value["words"].items()}
    return Policy(tuple(value["workers"]), tuple(value["start"]), words, tuple(plans))


def familiarity(question: str) -> float:
    """Return the share of a question's words that the policy knows; 0 for a question of few words."""
    words = _words_of(question)
    if len(words) >= LEAST_WORDS:
        return sum(word in policy().words for word in words) / len(words)
    return 0.0


def read(question: str, size: int) -> ReadQuestion:
    """Read a question; `size` is the number of characters of the whole request."""
    weights = policy()
    rows = [weights.start, *[weights.words[word] for word in _words_of(question) if word in weights.words]]
    latent = tuple(math.fsum(column) for column in zip(*rows, strict=True))
    return ReadQuestion(latent, sum(size >= least for least in DOCUMENTS), size)


def terms(latent: Sequence[float], document: int) -> list[float]:
    """Return what a plan's worth is a weighted sum of, from parts by domain, the chance of confidence and a document's
    place among none, short and long."""
    *parts, confidential = latent
    secret, count = min(1.0, max(0.0, confidential)), math.fsum(parts)
    short, long = float(document == 1), float(document == 2)
    crossed = [short * secret, long * secret, short * count, long * count, count * secret]
    return [1.0, short, long, secret, *parts, *crossed, count * count, math.fsum([part * part for part in parts])]


def best(
    question: ReadQuestion, cards: Sequence[Card], most_steps: int, usd: float
) -> list[tuple[int, PlanStep]] | None:
    """Return the steps of the plan that is worth most, each with its worker's ordinal, among those whose workers are
    shown and whose least price fits the money; None if there is none."""
    by_strengths = {card.strengths: card for card in cards}
    cards_by_worker = [by_strengths.get(strengths) for strengths in policy().workers]
    best_plan, best_value = None, -math.inf
    question_terms = terms(question.latent, question.document)
    for plan in policy().plans:
        staffed = _assign_cards(plan, cards_by_worker)
        if staffed is None or len(staffed) > most_steps or least_price(staffed, question.size) > usd - PLANNING:
            continue
        value = math.fsum([weight * term for weight, term in zip(plan.scores, question_terms, strict=True)])
        if value > best_value:
            best_plan, best_value = staffed, value
    if best_plan is None:
        return None
    return [(card.ordinal, step) for card, step in best_plan]


def _assign_cards(plan: LearnedPlan, cards_by_worker: Sequence[Card | None]) -> list[tuple[Card, PlanStep]] | None:
    """Return the steps of a plan, each with the card of its worker; None if a worker is not shown."""
    staffed: list[tuple[Card, PlanStep]] = []
    for step in plan.steps:
        card = cards_by_worker[step.worker]
        if card is None:
            return None
        staffed.append((card, step))
    return staffed


def least_price(staffed: Sequence[tuple[Card, PlanStep]], size: int) -> float:
    """Return the least price of a plan in dollars, as the executor compares it with the money that is left: each byte
    of a step's messages as a token, and what each step is likely to write."""
    total = 0.0
    for card, step in staffed:
        read = len(step.subtask) + FRAME_BYTES
        for entry in step.access:
            if isinstance(entry, int):
                read += SEEN_BYTES
        if "user" in step.access:
            read += size
        total += card.output * max(step.writes, FLOOR) + card.input * read
    return total


def _words_of(question: str) -> set[str]:
    """Return the words of the first paragraph: a document may follow it."""
    return set(WORD.findall(question.strip().partition("\n\n")[0].lower()))
