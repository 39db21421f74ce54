"""What the small conductor reads: the task's words, and the pool as cards with shuffled ordinals; one token a word.

The ids of plan tokens (`plans.py`) come first, then those of the prompt. A worker's card ends with the same token that
chooses it in a plan; names are never shown. Words that training does not know are one token, digits are single.
"""

import math
import re
from collections.abc import Sequence
from functools import cache
from random import Random

from app.learn.families import FAMILIES, Family
from app.learn.plans import FIRST_WORKER, TOKENS, Plan, PlanStep
from app.learn.world import Pool, Profile, profiles

WORD = re.compile(r"[a-z]+|\d|[-+*=()]")
MOST_WORDS = 56
"""Of a task; what is beyond is cut."""
PRICES = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8)
"""Dollars per million output tokens: a card shows the nearest of these, by ratio."""
SPECIAL = ("<pad>", "<unknown>", "<pool>")


@cache
def words() -> tuple[str, ...]:
    """The prompt's vocabulary, in the order of its ids, which begin at `plans.TOKENS`."""
    asked = " ".join(phrase for family in FAMILIES if not family.held_out for phrase in seen_phrasings(family))
    texts = re.sub(r"\{\w\}", " ", asked).lower() + " multiply it by add subtract x y and"
    months = " january february march april may june july august september october november december"
    cards = sorted({worker.strengths for worker in profiles().values()})
    known = sorted(set(WORD.findall(texts + months)))
    return (
        *SPECIAL, *"0123456789", *"-+*=()", *(word for word in known if word.isalpha()),
        *(f"card:{strengths}" for strengths in cards), *(f"card:${price}" for price in PRICES),
    )  # fmt: skip


def seen_phrasings(family: Family) -> tuple[str, ...]:
    """The phrasings of training; the last is held out."""
    return family.phrasings[:-1]


@cache
def _ids() -> dict[str, int]:
    return {word: TOKENS + place for place, word in enumerate(words())}


def size() -> int:
    """Plan and prompt tokens together."""
    return TOKENS + len(words())


def pad() -> int:
    """The id that fills up shorter prompts."""
    return _ids()["<pad>"]


def tokens(text: str, pool: Pool, order: Sequence[int], noise: Random | None = None, share: float = 0.0) -> list[int]:
    """The prompt for a task: ordinal n stands for the worker `pool[order[n]]`.

    With `noise`, each word of the task is taken for an unknown one with a chance of up to `share`, drawn anew for each
    task; digits and signs stay.
    """
    ids = _ids()
    unknown = ids["<unknown>"]
    hidden = noise.random() * share if noise is not None else 0.0
    task = [
        unknown if noise is not None and word.isalpha() and noise.random() < hidden else ids.get(word, unknown)
        for word in WORD.findall(text.lower())[:MOST_WORDS]
    ]
    cards = [one for ordinal, place in enumerate(order) for one in (*_card(pool[place]), FIRST_WORKER + ordinal)]
    return [*task, ids["<pool>"], *cards]


def _card(worker: Profile) -> list[int]:
    nearest = min(PRICES, key=lambda price: abs(math.log(price / worker.price)))
    return [_ids()[f"card:{words}"] for words in (worker.strengths, f"${nearest}")]


def drill(pool: Pool, order: Sequence[int], ordinal: int) -> list[int]:
    """A prompt that names a card instead of a task: whoever can read cards points to the worker whose it is."""
    cards = [one for n, place in enumerate(order) for one in (*_card(pool[place]), FIRST_WORKER + n)]
    return [*_card(pool[order[ordinal]])[:1], _ids()["<pool>"], *cards]


def placed(plan: Plan, order: Sequence[int]) -> Plan:
    """A plan over ordinals as the same plan over places of the pool."""
    return tuple(PlanStep(order[step.worker], step.role, step.user, step.sees) for step in plan)


def ordinals(plan: Plan, order: Sequence[int]) -> Plan:
    """The inverse of `placed`."""
    back = {place: ordinal for ordinal, place in enumerate(order)}
    return tuple(PlanStep(back[step.worker], step.role, step.user, step.sees) for step in plan)
