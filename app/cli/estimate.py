"""The likely cost and duration of a plan, estimated from prices, cards and limits without any call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.core.message.chat import Usage
from app.core.pool.budget import worst_case
from app.core.pool.catalog import Limits, Worker

OUTPUT_TOKENS = 400
"""Tokens of a usual answer of one step."""
SUBTASK_TOKENS = 120
"""Tokens of a usual subtask with its framing."""
FIRST_SECONDS = 0.6
"""Seconds until a usual worker begins to answer."""
SPEED = 60.0
"""Output tokens per second of a worker whose card does not give its speed."""


@dataclass(frozen=True, slots=True)
class Planned:
    """The properties of a step on which its estimate depends."""

    n: int
    worker: Worker
    user: bool
    inputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Estimate:
    """The likely and the largest cost in micro-dollars, and the likely seconds along the longest path."""

    usd: int
    usd_most: int
    seconds: float


def estimate(steps: Sequence[Planned], question_tokens: int, limits: Limits) -> Estimate:
    """Estimate the execution of these steps, once each. The run's money limit caps the largest cost."""
    output = min(OUTPUT_TOKENS, limits.output_tokens)
    usd = most = 0
    ready: dict[int, float] = {}
    for step in steps:
        seen = (question_tokens if step.user else 0) + SUBTASK_TOKENS
        usd += step.worker.price.cost(Usage(input=seen + output * len(step.inputs), output=output))
        most += worst_case(step.worker, seen + limits.output_tokens * len(step.inputs), limits.output_tokens)[0]
        ready[step.n] = _begins(ready, step.inputs) + FIRST_SECONDS + output / (step.worker.card.speed or SPEED)
    return Estimate(usd, min(most, limits.usd), max(ready.values(), default=0.0))


def _begins(ready: Mapping[int, float], inputs: Sequence[int]) -> float:
    return max((ready.get(n, 0.0) for n in inputs), default=0.0)
