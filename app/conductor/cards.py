"""The prompt of cards: what was measured of each worker, in numbers and words, and the question. It explains no rules.

Conductors that were trained to plan by cards (`app/lab/world2/words.py`) read it. It says nothing that only one pool or
one world could say: no names, and the domains, rates, prices and speeds of whatever was calibrated. Of a long question
both ends and the headings are shown, so that a document does not go to the conductor whole. The prompt does not
mention tools, pictures, earlier turns or the budget, so the schema does not ask for them.
"""

from collections.abc import Sequence

from app.conductor.prompt import shorten
from app.conductor.protocol import Brief
from app.core.message.chat import Message, Text
from app.core.pool.catalog import MILLION, CalibrationResult, Worker

TEMPLATE = "cards-1"
"""The name of the prompt, recorded with each call. Whoever changes the words must change the name."""
QUESTION_CHARS = 1_600
"""Characters of a question from which on it is shown in parts."""
SUBTASK_CHARS = 120
"""Characters of a subtask. (xgrammar 0.2.8 cannot compile 600.)"""
TOKENS_PER_STEP, MARGIN = 24 + SUBTASK_CHARS, 16
"""The most tokens of one step and of the rest of a plan."""


def messages(brief: Brief) -> tuple[Message, ...]:
    """Return the conductor's conversation for this brief: the cards, and the caller's last message."""
    cards = "\n".join([card(ordinal, worker) for ordinal, worker in enumerate(brief.workers)])
    question_text = question(brief.last_question())
    return Message("system", (Text(cards),)), Message("user", (Text(question_text),))


def question(text: str) -> str:
    """Return what is shown of a question."""
    return shorten(text, QUESTION_CHARS)


def card(ordinal: int, worker: Worker) -> str:
    """Return the line of one worker: pass rates by domain with the number of tasks, price, speed, context, whether the
    worker retains what it reads, and last its number, which a small model copies most easily from behind the facts."""
    worker_card = worker.card
    facts = []
    if worker_card.strengths:
        facts.append(f"good at {', '.join(worker_card.strengths)}")
    rates = [rate for rate in worker_card.measured if rate.tried]
    if rates:
        facts.append(_pass_rates(rates))
    facts.append(f"${_round_to_two_digits(worker.price.output / MILLION)} per million output tokens")
    if worker_card.speed:
        facts.append(f"{_round_to_two_digits(worker_card.speed)} tokens a second")
    facts.append(f"context {worker_card.context}")
    if worker_card.retention == "none":
        facts.append("retains nothing")
    else:
        facts.append("may retain data")
    return f"{'; '.join(facts)}: worker #{ordinal}"


def _pass_rates(rates: Sequence[CalibrationResult]) -> str:
    """Return measured pass rates in words; the number of tasks is said once where it is the same for all domains."""
    shares = [f"{rate.domain} {rate.passed / rate.tried:.0%}" for rate in rates]
    counts = [rate.tried for rate in rates]
    if len(set(counts)) == 1:
        return f"of {counts[0]} tasks each {', '.join(shares)}"
    return ", ".join([f"{share} of {count} tasks" for share, count in zip(shares, counts, strict=True)])


def answer_tokens(steps: int) -> int:
    """Return the most tokens that a plan of so many steps may take."""
    return MARGIN + TOKENS_PER_STEP * steps


def _round_to_two_digits(value: float) -> str:
    """Return a number with two significant digits."""
    return f"{float(f'{value:.2g}'):g}"
