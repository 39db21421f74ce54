"""What the small conductor reads: the task's words, and the pool as cards with shuffled ordinals; one token a word.

The ids of plan tokens (`plans.py`) come first, then those of the prompt. A worker's card ends with the same token that
chooses it in a plan; names are never shown. Words that training does not know are one token, digits are single.
"""

import re
from collections.abc import Sequence
from functools import cache
from random import Random

from app.conductor import compact
from app.learn.families import FAMILIES, Family
from app.learn.plans import FIRST_WORKER, TOKENS, Plan, PlanStep
from app.learn.world import Pool, Profile, profiles

PAD, UNKNOWN = "<pad>", "<unknown>"
SPECIAL = (PAD, UNKNOWN, compact.POOL)
DROPPED, EXCHANGED, FOLLOWED = 0.25, 0.2, 0.2
"""Of the words that training disturbs: left out; taken for any other; taken for an unknown one, with one more after it.
The rest are taken for an unknown one."""


@cache
def words() -> tuple[str, ...]:
    """The prompt's vocabulary, in the order of its ids, which begin at `plans.TOKENS`."""
    asked = " ".join(phrase for family in FAMILIES if not family.held_out for phrase in seen_phrasings(family))
    texts = re.sub(r"\{\w\}", " ", asked).lower() + " multiply it by add subtract x y and"
    months = " january february march april may june july august september october november december"
    cards = sorted({worker.strengths for worker in profiles().values()})
    known = sorted(set(compact.WORD.findall(texts + months)))
    return (
        *SPECIAL, *"0123456789", *"-+*=()", *(word for word in known if word.isalpha()),
        *(_strengths(one) for one in cards), *(f"<${price}>" for price in compact.PRICES),
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
    return _ids()[PAD]


def tokens(text: str, pool: Pool, order: Sequence[int], noise: Random | None = None, share: float = 0.0) -> list[int]:
    """The prompt for a task: ordinal n stands for the worker `pool[order[n]]`.

    With `noise`, each known word of the task is disturbed with a chance of up to `share`, drawn anew for each task;
    unknown words, digits and signs stay.
    """
    ids = _ids()
    task = [ids.get(word, ids[UNKNOWN]) for word in compact.words(text)]
    if noise is not None:
        task = _disturbed(task, noise, noise.random() * share)
    cards = [one for ordinal, place in enumerate(order) for one in (*_card(pool[place]), FIRST_WORKER + ordinal)]
    return [*task, ids[compact.POOL], *cards]


def _disturbed(task: Sequence[int], noise: Random, share: float) -> list[int]:
    """As a phrasing that nobody has learned might say it: words unknown, left out, others instead, or one too many."""
    plain, unknown = _plain(), _ids()[UNKNOWN]
    found: list[int] = []
    for word in task:
        if word not in plain or noise.random() >= share:
            found.append(word)
            continue
        kind = noise.random()
        if kind < DROPPED:
            continue
        other = noise.choice(plain)
        found.append(other if kind < DROPPED + EXCHANGED else unknown)
        if kind > 1 - FOLLOWED:
            found.append(noise.choice((unknown, other)))
    return found[: compact.MOST_WORDS]


@cache
def _plain() -> range:
    """The ids of words: they stand together."""
    alphabetic = [number for word, number in _ids().items() if word.isalpha()]
    return range(min(alphabetic), max(alphabetic) + 1)


def _card(worker: Profile) -> list[int]:
    return [_ids()[word] for word in compact.card(worker.strengths.split(), worker.price)]


def _strengths(words: str) -> str:
    return compact.card(words.split(), 1.0)[0]


def as_text(text: str, pool: Pool, order: Sequence[int]) -> str:
    """The prompt as a served conductor is sent it, which its tokenizer makes the same tokens of."""
    return compact.text(text, [compact.card(pool[place].strengths.split(), pool[place].price) for place in order])


def drill(pool: Pool, order: Sequence[int], ordinal: int) -> list[int]:
    """A prompt that names a card instead of a task: whoever can read cards points to the worker whose it is."""
    cards = [one for n, place in enumerate(order) for one in (*_card(pool[place]), FIRST_WORKER + n)]
    return [*_card(pool[order[ordinal]])[:1], _ids()[compact.POOL], *cards]


def placed(plan: Plan, order: Sequence[int]) -> Plan:
    """A plan over ordinals as the same plan over places of the pool."""
    return tuple(PlanStep(order[step.worker], step.role, step.user, step.sees) for step in plan)


def ordinals(plan: Plan, order: Sequence[int]) -> Plan:
    """The inverse of `placed`."""
    back = {place: ordinal for ordinal, place in enumerate(order)}
    return tuple(PlanStep(back[step.worker], step.role, step.user, step.sees) for step in plan)
