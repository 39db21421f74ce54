"""The compact prompt: the question as a row of words, and each worker as a card of two words and its ordinal.

It is what conductors read that were trained from scratch in Baton's own worlds (`app/lab`). Every token stands apart,
between spaces: words are lower-case letters, digits are single, and nothing that a caller writes can come out as a card
or as a part of a plan, which hold `<`, `{` or `"`. Which of the words a model knows is its tokenizer's business. Tools,
pictures, earlier turns and the budget are not told, so the schema asks for none of it.
"""

import math
import re
from collections.abc import Iterable, Sequence

from app.conductor.protocol import Brief
from app.core.message.chat import Message, Text
from app.core.pool.catalog import MILLION, Worker

TEMPLATE = "compact-1"
"""The name of what `messages` makes, kept with each call; a change of the words is another template."""
WORD = re.compile(r"[a-z]+|\d|[-+*=()]")
MOST_WORDS = 56
"""Of a question; what is beyond is cut."""
PRICES = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8)
"""Dollars per million output tokens: a card shows the nearest of these, by ratio."""
POOL = "<pool>"
SUBTASK_CHARS = 120
"""Of the longest subtask that such a model was taught, and some. (Six hundred stop xgrammar 0.2.8 from compiling.)"""
TOKENS_PER_STEP, WORDED_PER_STEP, MARGIN = 4, 24, 8
"""A step is four tokens of such a model: worker, subtask, access list, and what comes after; of one that writes its
subtasks word by word up to 16, and some."""


def words(question: str) -> list[str]:
    """What is read of a question."""
    return WORD.findall(question.lower())[:MOST_WORDS]


def card(strengths: Iterable[str], price: float) -> tuple[str, str]:
    """A worker: what it is said to be good at, and its price in dollars per million output tokens."""
    nearest = min(PRICES, key=lambda known: abs(math.log(known / max(price, PRICES[0]))))
    return f"<{'-'.join(strengths)}>", f"<${nearest}>"


def ordinal(number: int) -> str:
    """How a worker is named, in a card and in a plan."""
    return f'{{"worker":{number},'


def text(question: str, cards: Sequence[tuple[str, str]]) -> str:
    """The whole prompt; a worker's ordinal is its place in `cards`."""
    shown = [word for number, one in enumerate(cards) for word in (*one, ordinal(number))]
    return " ".join([*words(question), POOL, *shown])


def messages(brief: Brief) -> tuple[Message, ...]:
    """The conductor's conversation for this brief: what the caller said last, and the cards."""
    asked = [message.text for message in brief.task.messages if message.role == "user"]
    return (Message("user", (Text(text(asked[-1] if asked else "", [_card(worker) for worker in brief.workers])),)),)


def answer_tokens(steps: int) -> int:
    """The most that a plan of so many steps may take."""
    return MARGIN + TOKENS_PER_STEP * steps


def worded_tokens(steps: int) -> int:
    """The same of a model that writes its subtasks word by word."""
    return MARGIN + WORDED_PER_STEP * steps


def _card(worker: Worker) -> tuple[str, str]:
    strengths = [word for strength in worker.card.strengths for word in strength.lower().split()]
    return card(strengths or ["general"], worker.price.output / MILLION)
