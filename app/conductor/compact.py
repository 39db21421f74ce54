"""The compact prompt: the question as a row of words, and each worker as a card of two words and its ordinal.

Conductors that were trained from scratch in Baton's own worlds (`app/lab`) read it. All tokens are separated by spaces:
words are lower-case letters, digits are single, and no text of a caller can turn into a card or a part of a plan, since
those contain `<`, `{` or `"`. The model's tokenizer decides which words it knows. The prompt does not mention tools,
pictures, earlier turns or the budget, so the schema does not ask for them.
"""

import math
import re
from collections.abc import Iterable, Sequence

from app.conductor.protocol import Brief
from app.core.message.chat import Message, Text
from app.core.pool.catalog import MILLION, Worker

TEMPLATE = "compact-1"
"""The name of the prompt, recorded with each call. Whoever changes the words must change the name."""
WORD = re.compile(r"[a-z]+|\d|[-+*=()]")
MAX_WORDS = 56
"""Words of a question that are read; the rest is cut off."""
PRICES = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8)
"""Dollars per million output tokens: a card shows the nearest of these, by ratio."""
POOL = "<pool>"
SUBTASK_CHARS = 120
"""Characters of a subtask: a little more than the longest one in training. (xgrammar 0.2.8 cannot compile 600.)"""
TOKENS_PER_STEP, WORDED_PER_STEP, MARGIN = 4, 24, 8
"""Tokens for one step (worker, subtask, access list, separator), for one step of a model that writes its subtasks word
by word (up to 16, with some reserve), and for the whole plan."""


def words(question: str) -> list[str]:
    """Return the words of a question that the prompt contains."""
    return WORD.findall(question.lower())[:MAX_WORDS]


def card(strengths: Iterable[str], price: float) -> tuple[str, str]:
    """Return the card of a worker: its strengths, and its price in dollars per million output tokens."""
    nearest = min(PRICES, key=lambda candidate: abs(math.log(candidate / max(price, PRICES[0]))))
    return f"<{'-'.join(strengths)}>", f"<${nearest}>"


def ordinal(number: int) -> str:
    """Return the token that names a worker in cards and plans."""
    return f'{{"worker":{number},'


def text(question: str, cards: Sequence[tuple[str, str]]) -> str:
    """Return the whole prompt; a worker's ordinal is its place in `cards`."""
    card_words: list[str] = []
    for number, card in enumerate(cards):
        card_words += (*card, ordinal(number))
    return " ".join([*words(question), POOL, *card_words])


def messages(brief: Brief) -> tuple[Message, ...]:
    """Return the conductor's conversation for this brief: the caller's last message, and the cards."""
    cards = [_card(worker) for worker in brief.workers]
    return (Message("user", (Text(text(brief.last_question(), cards)),)),)


def answer_tokens(steps: int) -> int:
    """Return the most tokens that a plan of so many steps may take."""
    return MARGIN + TOKENS_PER_STEP * steps


def max_worded_tokens(steps: int) -> int:
    """Return the most tokens of a plan whose model writes its subtasks word by word."""
    return MARGIN + WORDED_PER_STEP * steps


def _card(worker: Worker) -> tuple[str, str]:
    strengths = " ".join(worker.card.strengths).lower().split()
    return card(strengths or ["general"], worker.price.output / MILLION)
