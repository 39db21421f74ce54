"""The prompt of the small conductor: the task's words, and the pool as cards with shuffled ordinals; one token a word.

The ids of plan tokens (of its form, `plan_grammar.py`) come first, then those of the prompt. A worker's card ends
with the same token that chooses it in a plan; names are never shown. Words that training does not know are one token,
digits single.
"""

import re
from collections.abc import Sequence
from functools import cache
from random import Random

from app.conductor import compact
from app.lab.plan_grammar import ROLES, Form
from app.lab.plans import FIRST_WORKER, Plan
from app.lab.world import Pool, Profile, profiles
from app.providers.rehearsal.task_families import FAMILIES, Family

PAD, UNKNOWN = "<pad>", "<unknown>"
SPECIAL = (PAD, UNKNOWN, compact.POOL)
DROPPED, EXCHANGED, FOLLOWED = 0.25, 0.2, 0.2
"""Shares of the words that training disturbs: those that are left out; those replaced by any other; those replaced by
an unknown one, with one more after it. The rest are replaced by an unknown one."""


@cache
def words(form: Form = ROLES) -> tuple[str, ...]:
    """Return the prompt's vocabulary, in the order of its ids, which begin after those of plan tokens."""
    phrasings = " ".join(phrase for family in FAMILIES if not family.held_out for phrase in training_phrasings(family))
    texts = re.sub(r"\{\w\}", " ", phrasings).lower() + " multiply it by add subtract x y and"
    months = " january february march april may june july august september october november december"
    strengths = {word for worker in profiles().values() for word in form.strengths(worker)}
    vocabulary = {*compact.WORD.findall(texts + months), *strengths}
    return (
        *SPECIAL, *"0123456789", *"-+*=()", *sorted(word for word in vocabulary if word.isalpha()),
        *sorted((word for word in strengths if not word.isalpha()), key=lambda word: word.rstrip(">")),
        *(f"<${price}>" for price in compact.PRICES),
    )  # fmt: skip


def training_phrasings(family: Family) -> tuple[str, ...]:
    """Return the phrasings of training; the last is held out."""
    return family.phrasings[:-1]


@cache
def _ids(form: Form) -> dict[str, int]:
    return {word: len(form.tokens) + place for place, word in enumerate(words(form))}


def size(form: Form = ROLES) -> int:
    """Plan and prompt tokens together."""
    return len(form.tokens) + len(words(form))


def pad(form: Form = ROLES) -> int:
    """Return the id that fills up shorter prompts."""
    return _ids(form)[PAD]


def tokens(
    text: str, pool: Pool, order: Sequence[int], noise: Random | None = None, share: float = 0.0, form: Form = ROLES
) -> list[int]:
    """Return the prompt for a task: ordinal n stands for the worker `pool[order[n]]`.

    With `noise`, each known word of the task is disturbed with a chance of up to `share`, drawn anew for each task;
    unknown words, digits and signs stay.
    """
    ids = _ids(form)
    task = [ids.get(word, ids[UNKNOWN]) for word in compact.words(text)]
    if noise is not None:
        task = _add_noise(task, noise, noise.random() * share, form)
    return [*task, ids[compact.POOL], *_cards(pool, order, form)]


def _add_noise(task: Sequence[int], noise: Random, share: float, form: Form) -> list[int]:
    """Disturb a task's words as an unknown phrasing might: words unknown, left out, others instead, or one too many."""
    known_words, unknown = _plain(form), _ids(form)[UNKNOWN]
    noisy_task: list[int] = []
    for word in task:
        if word not in known_words or noise.random() >= share:
            noisy_task.append(word)
            continue
        kind = noise.random()
        if kind < DROPPED:
            continue
        other = noise.choice(known_words)
        if kind < DROPPED + EXCHANGED:
            noisy_task.append(other)
        else:
            noisy_task.append(unknown)
        if kind > 1 - FOLLOWED:
            noisy_task.append(noise.choice((unknown, other)))
    return noisy_task[: compact.MAX_WORDS]


@cache
def _plain(form: Form) -> range:
    """Return the ids of words, which stand together."""
    alphabetic = [number for word, number in _ids(form).items() if word.isalpha()]
    return range(min(alphabetic), max(alphabetic) + 1)


def _cards(pool: Pool, order: Sequence[int], form: Form) -> list[int]:
    """Return the tokens of all cards: of each worker its strengths, its price and its ordinal."""
    tokens: list[int] = []
    for ordinal, place in enumerate(order):
        tokens += [*_strengths(pool[place], form), _price(pool[place], form), FIRST_WORKER + ordinal]
    return tokens


def _strengths(worker: Profile, form: Form) -> list[int]:
    return [_ids(form)[word] for word in form.strengths(worker)]


def _price(worker: Profile, form: Form) -> int:
    return _ids(form)[compact.card((), worker.price)[1]]


def as_text(text: str, pool: Pool, order: Sequence[int]) -> str:
    """Return the prompt as a served conductor is sent it, which its tokenizer makes the same tokens of."""
    cards = []
    for place in order:
        cards.append(compact.card(pool[place].strengths.split(), pool[place].price))
    return compact.text(text, cards)


def drill_prompt(pool: Pool, order: Sequence[int], ordinal: int, form: Form = ROLES) -> list[int]:
    """Return a prompt that names a card instead of a task: a conductor that can read cards points to the worker of that
    card."""
    return [*_strengths(pool[order[ordinal]], form), _ids(form)[compact.POOL], *_cards(pool, order, form)]


def over_places(plan: Plan, order: Sequence[int]) -> Plan:
    """Return a plan over ordinals as the same plan over places of the pool."""
    return tuple(step._replace(worker=order[step.worker]) for step in plan)


def over_ordinals(plan: Plan, order: Sequence[int]) -> Plan:
    """Return a plan over places of the pool as the same plan over ordinals: the inverse of `over_places`."""
    back = {place: ordinal for ordinal, place in enumerate(order)}
    return tuple(step._replace(worker=back[step.worker]) for step in plan)
