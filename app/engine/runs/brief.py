"""The brief of a conductor, as `step_request.py` has the request of a step: the task, the workers that may take part,
the money that is left, why its last proposal was rejected, and in a further round the round before.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from app.conductor.protocol import Brief, PastStep, Previous
from app.core.message.chat import Task
from app.core.plan.workflow import PREVIOUS
from app.core.pool.catalog import Catalog, Worker
from app.core.run.commands import Propose
from app.core.run.progress import may_nest
from app.core.run.state import RunState
from app.engine.calls.step_request import look, texts_of
from app.engine.commit.retry import patiently
from app.network.retries import Left
from app.store.protocol import Store
from app.store.rows.content import address


def brief(catalog: Catalog, task: Task, state: RunState, command: Propose, *, instant: bool, rejected: str) -> Brief:
    """All but what is read from the store. `instant` is for a conductor that needs no model; `rejected` is the text of
    the last proposal."""
    known = catalog.workers
    workers = [known[name] for name in state.admitted.pool if name in known]
    earlier = state.proposals if command.parent is None else state.nested.get(command.parent, ())
    last = next((one for one in reversed(earlier) if one.number < command.number), None)
    repairs = last is not None and command.mode == "repair"
    limits = state.admitted.limits
    return Brief(
        task=task,
        workers=tuple(workers if instant else _shuffled(workers, state.run)),
        limits=replace(limits, steps=command.room) if command.room else limits,
        usd_left=max(limits.usd - state.usd, 0),
        objections=last.reasons if last and repairs else (),
        rejected=rejected if repairs else "",
        run=state.run,
        round=command.round if command.parent is None else 1,
        nests=not instant and may_nest(state, command.parent),
    )


async def shown(store: Store, state: RunState, command: Propose, known: Brief, left: Left) -> Brief:
    """The brief with the round before, if there was one, or with the view of the step that it is for. `NotFound` if
    that was erased, `StoreUnavailable` if the database is away until nothing is `left`."""
    if command.parent is not None:
        view = await patiently(store, partial(look, store, state, command.parent), left)
        return replace(known, task=replace(known.task, messages=view.messages("")))
    answer = state.answer(command.round - 1)
    if answer is None:
        return known
    steps = state.workflow(command.round - 1)
    refs = {answer.step.output, *(step.subtask for step in steps)}
    texts = await patiently(store, partial(texts_of, store, state.run, refs), left)
    before = state.answer(command.round - 2)
    names: dict[int, str | int] = {step.n: place for place, step in enumerate(steps)}
    if before is not None:
        names[before.step.n] = PREVIOUS
    past = []
    for step in steps:
        read = tuple(["user" if one == "user" else names[int(one)] for one in step.access.as_list()])
        past.append(PastStep(step.worker, texts[step.subtask], read, step.state == "done"))
    return replace(known, previous=Previous(tuple(past), texts[answer.step.output]))


def _shuffled(workers: Iterable[Worker], run: str) -> list[Worker]:
    """An order that depends on the run alone, so that it can be made again; `plan.opened` has it too."""
    return sorted(workers, key=lambda worker: address(run.encode(), worker.name.encode()))
