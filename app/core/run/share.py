"""The share of a run's money and tokens that the next call of one step may hold (D7).

Each step that has yet to call keeps what it needs at the floor of its tier. What is left beyond that is divided evenly
between the steps that may call now, so that neither parallel steps nor later ones are starved by the first call.
"""

from collections.abc import Mapping, Sequence

from app.core.plan.pricing import FRAME_BYTES, SUBTASK_BYTES, least_price, step_bytes_at_floor
from app.core.pool.catalog import Amount, Worker
from app.core.run.state import RunState, StepState

BYTES_A_CHARACTER = 2
"""Bytes that are reckoned for each character of an earlier output."""


def share(
    state: RunState, n: int, remaining: Amount, own: Amount, workers: Mapping[str, Worker], question: int
) -> Amount:
    """Return the amount that the next call of step `n` may hold of what is `remaining`; `own` is its need at the floor.

    `question` is the number of input tokens of the caller's conversation.
    """
    others = [step for step in state.active_steps if step.n != n and not step.settled and not step.opens_workflow]
    calling = {call.step for call in state.open_calls}
    waiting = [step for step in others if step.n not in calling]
    if not waiting:
        return remaining
    reserved = amount_for_steps(state, waiting, workers, question)
    spare = remaining.minus(reserved + own)
    ready = 1 + sum(step.state in ("queued", "running") for step in waiting)
    return Amount(
        min(own.usd + spare.usd // ready, remaining.usd), min(own.tokens + spare.tokens // ready, remaining.tokens)
    )


def amount_for_steps(
    state: RunState, steps: Sequence[StepState], workers: Mapping[str, Worker], question: int
) -> Amount:
    """Return the amount that the next calls of all these steps need at the floor."""
    total = Amount()
    for step in steps:
        total += _amount_for_step(state, step, workers, question)
    return total


def _amount_for_step(state: RunState, step: StepState, workers: Mapping[str, Worker], question: int) -> Amount:
    """Return the amount that the next call of a step needs at the floor, as far as its input is known."""
    worker = workers.get(step.worker)
    if worker is None:
        return Amount()
    floor = state.admitted.limits.floor
    size = question if step.access.user or step.inherits else 0
    for n in step.access.steps:
        earlier = state.steps[n]
        size += BYTES_A_CHARACTER * earlier.chars + SUBTASK_BYTES if earlier.settled else step_bytes_at_floor(floor)
    if step.subtask or step.access.steps:
        size += SUBTASK_BYTES + FRAME_BYTES
    return least_price(worker, size, floor)
