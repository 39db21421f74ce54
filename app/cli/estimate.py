"""What a plan will probably cost and how long it will take, from prices, cards and limits; nothing is called."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.core.message.chat import Usage
from app.core.pool.budget import worst_case
from app.core.pool.catalog import Limits, Worker

OUTPUT_TOKENS = 400
"""A usual answer of one step."""
SUBTASK_TOKENS = 120
"""A usual subtask with its framing."""
FIRST_SECONDS = 0.6
"""Until a usual worker begins to answer."""
SPEED = 60.0
"""Output tokens per second of a worker whose card says nothing."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One step of the plan, by what its estimate depends on."""

    n: int
    worker: Worker
    user: bool
    inputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Estimate:
    """Micro-dollars, likely and at most, and likely seconds along the longest path."""

    usd: int
    usd_most: int
    seconds: float


def estimate(steps: Sequence[Planned], question_tokens: int, limits: Limits) -> Estimate:
    """Of executing these steps once each; the limit on money caps what retries could add."""
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
