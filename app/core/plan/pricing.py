"""The least price of a plan before it is carried out, for comparing it with what a run may still spend (D7).

It is what the plan's steps hold together if each of them may write no more than the floor of its tier
(`Limits.floor`): the worst case of each at that length, with an input that holds whatever the steps that it sees
may have written. A plan whose least price fits can be carried out, because the executor cuts output caps down to the
floor where money is short.
"""

from collections.abc import Iterable, Mapping, Sequence

from app.core.message.chat import NO_TOOLS, Task
from app.core.plan.workflow import CONDUCTOR, Step, critical_path_seconds
from app.core.pool.catalog import Amount, Limits, Worker
from app.core.pool.policy import definition_bytes, input_bound, worst_case

BYTES_A_TOKEN = 4
"""Bytes of a usual token: a step that sees an output of so many tokens is sent this many times as many bytes."""
FRAME_BYTES = 400
"""Bytes around what a step sees of others: the introduction, the fences and the framing of messages."""
SUBTASK_BYTES = 200
"""Bytes of a usual subtask."""


def question_tokens(task: Task) -> int:
    """Return an upper bound of the input tokens of a request that has the caller's conversation and nothing else.

    The schema of an answer's form counts twice, because some workers are also asked for it in words.
    """
    bound = input_bound(task.messages, definition_bytes(task.toolbox, task.form))
    if task.form is not None:
        bound += definition_bytes(NO_TOOLS, task.form) + FRAME_BYTES
    return bound


def least_price(worker: Worker, input_tokens: int, floor: int) -> Amount:
    """Return the amount that one call holds if it may write `floor` tokens."""
    return worst_case(worker, input_tokens, min(floor, worker.card.max_output))


def step_bytes_at_floor(floor: int) -> int:
    """Return about the most bytes of a finished step that another one is sent, if it wrote no more than `floor`
    tokens."""
    return BYTES_A_TOKEN * floor + SUBTASK_BYTES + FRAME_BYTES


def plan_price(steps: Sequence[Step], workers: Iterable[Worker], question: int, floor: int) -> Amount:
    """Return the least price of a plan whose conversation has `question` tokens.

    A step that the conductor takes itself costs as much as one by the cheapest worker; so does one by a worker that
    is not there, which another one will replace.
    """
    workers_by_name = {worker.name: worker for worker in workers}
    total = Amount()
    for step in steps:
        size = len(step.subtask.encode())
        if step.access.user:
            size += question
        size += step_bytes_at_floor(floor) * (len(step.access.steps) + step.access.previous)
        if step.subtask or step.access.steps:
            size += FRAME_BYTES
        total += _step_price(step.worker, workers_by_name, size, floor)
    return total


def _step_price(name: str, workers_by_name: Mapping[str, Worker], size: int, floor: int) -> Amount:
    if name != CONDUCTOR and name in workers_by_name:
        return least_price(workers_by_name[name], size, floor)
    prices = [least_price(worker, size, floor) for worker in workers_by_name.values()]
    return min(prices, key=lambda price: price.usd, default=Amount())


def every_plan_fits(workers: Sequence[Worker], steps: int, question: int, floor: int, remaining: Amount) -> bool:
    """Return True if any plan of so many steps over these workers fits, so that none needs to be priced."""
    size = question + SUBTASK_BYTES + FRAME_BYTES + step_bytes_at_floor(floor) * (steps - 1)
    prices = [least_price(worker, size, floor) for worker in workers]
    usd = max([price.usd for price in prices], default=0)
    tokens = max([price.tokens for price in prices], default=0)
    return remaining.covers(Amount(steps * usd, steps * tokens))


def best_alone(workers: Sequence[Worker], preferred: str, question: int, limits: Limits, remaining: Amount) -> str:
    """Return the worker that is to answer alone, by name: the preferred one if the run can pay it at the floor.

    Else the most expensive one that the run can pay at its full length, else the cheapest at the floor. The preferred
    one, or the first, if nobody can be paid.
    """
    floor = limits.floor
    workers_by_name = {worker.name: worker for worker in workers}
    usual = workers_by_name.get(preferred, workers[0])
    if remaining.covers(least_price(usual, question, floor)):
        return usual.name
    whole = [worker for worker in workers if remaining.covers(least_price(worker, question, limits.output_tokens))]
    if whole:
        return max(whole, key=lambda worker: worker.price.output).name
    short = [worker for worker in workers if remaining.covers(least_price(worker, question, floor))]
    return min(short, key=lambda worker: worker.price.output, default=usual).name


def plan_seconds(steps: Sequence[tuple[str, Sequence[int]]], paces: Mapping[str, float], fan_out: int) -> float:
    """Return the likely seconds of a plan: along its longest path, and at least what `fan_out` steps at once can do.

    Each step is given as its worker and the earlier steps that it reads, counted from 0; `paces` are the seconds of a
    call of each worker. A step of a worker that is not among them takes no time.
    """
    seconds = [paces.get(worker, 0.0) for worker, _ in steps]
    along_path = critical_path_seconds([inputs for _, inputs in steps], seconds)
    return max(along_path, sum(seconds) / max(fan_out, 1))
