"""The forecast of a plan over one gateway: from the newest runs of its tenant, and the steps as they would be sent."""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

from app.core.message.chat import Message, Task, message_to_json
from app.core.plan.workflow import Access, Step
from app.core.pool.catalog import MILLION, Catalog, Limits
from app.core.pool.policy import tool_bytes
from app.core.pool.wire_formats import FORMATS
from app.core.rating.forecast import Forecast, History, PlannedStep, Spread, StepForecast, forecast
from app.core.run.state import Proposal, RunState
from app.core.run.visibility import EarlierStep, compose
from app.engine.calls.step_request import task_of, texts_of
from app.errors import NotFound
from app.gateway.http.context import GatewayContext
from app.store.protocol import RunQuery, TenantStore

MOST_RUNS: Final = 300
"""The newest runs of a tenant that a forecast looks at."""
CACHE_SECONDS: Final = 10.0
"""Seconds for which a tenant's history is used without looking again."""
MOST_TENANTS: Final = 64
"""Tenants whose history is kept."""


class Histories:
    """The tokens, cost and seconds of steps of tenants' past runs, read again after `CACHE_SECONDS`."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._cache: OrderedDict[str, tuple[float, History]] = OrderedDict()

    async def of(self, tenant: str) -> History:
        """Return the history of a tenant."""
        now = self._context.tick()
        until, cached = self._cache.get(tenant, (0.0, History(())))
        if now < until:
            return cached
        history = await read_history(self._context.store.of_tenant(tenant), tenant)
        self._cache[tenant] = (now + CACHE_SECONDS, history)
        self._cache.move_to_end(tenant)
        if len(self._cache) > MOST_TENANTS:
            self._cache.popitem(last=False)
        return history


async def read_history(store: TenantStore, tenant: str) -> History:
    """Read the history of a tenant's newest runs that succeeded."""
    runs = await store.journaled_runs(RunQuery(tenant=tenant, state="succeeded", limit=MOST_RUNS))
    return await asyncio.to_thread(History, runs)


def of_plan(catalog: Catalog, task: Task, steps: Sequence[Step], limits: Limits, history: History) -> Forecast | None:
    """Return the forecast of a plan; None if a worker of it has left the pool file."""
    if any(step.worker not in catalog.workers for step in steps):
        return None
    planned_steps = [_build_planned_step(catalog, task, steps, place, limits) for place in range(len(steps))]
    return forecast(planned_steps, limits, history)


async def of_proposal(
    catalog: Catalog, store: TenantStore, state: RunState, proposal: Proposal, history: History
) -> Forecast | None:
    """Return the forecast of a run's plan; None where a text of it was erased, or if a worker has left the pool
    file."""
    plan_steps, admitted = state.steps_of(proposal), state.admitted
    try:
        task = await task_of(store, state.run, admitted.task)
        texts = await texts_of(store, state.run, {step.subtask for step in plan_steps})
    except NotFound:
        return None
    places = {step.n: place for place, step in enumerate(plan_steps)}
    steps = []
    for step in plan_steps:
        inputs = tuple([places[n] for n in step.access.steps if n in places])
        access = Access(step.access.user, inputs)
        steps.append(Step(step.worker, texts[step.subtask], access, answers=step.answers, tools=step.tools))
    return of_plan(catalog, task, steps, admitted.limits, history)


def _build_planned_step(catalog: Catalog, task: Task, steps: Sequence[Step], place: int, limits: Limits) -> PlannedStep:
    step = steps[place]
    worker = catalog.workers[step.worker]
    size = _bytes(task, steps, place)
    size += FORMATS[catalog.providers[worker.provider].format].envelope_bytes + len(worker.model)
    output_tokens = min(limits.output_tokens, worker.card.max_output)
    if step.answers and task.sampling.max_tokens is not None:
        output_tokens = min(output_tokens, task.sampling.max_tokens)
    return PlannedStep(worker, size, step.access.steps, step.answers, output_tokens)


def _bytes(task: Task, steps: Sequence[Step], place: int) -> int:
    """Return the bytes of a step's messages as they would be sent, without what earlier steps will have written."""
    step = steps[place]
    earlier_steps = [EarlierStep(n, steps[n].subtask, "?") for n in step.access.steps]
    conversation = None
    if step.access.user:
        conversation = task
    size = _size(compose(conversation, step.subtask, earlier_steps)) - len(earlier_steps)
    if step.answers and task.form is not None:
        size += len(json.dumps(task.form.schema, default=dict))
    if step.answers or step.tools:
        return size + tool_bytes(task.toolbox)
    return size


def _size(messages: Sequence[Message]) -> int:
    return len(json.dumps([message_to_json(message) for message in messages], default=dict, separators=(",", ":")))


# -- the estimate


def estimate(plan_forecast: Forecast | None) -> dict[str, Any] | None:
    """Return a forecast in dollars and seconds; None where there is none."""
    if plan_forecast is None:
        return None
    return {
        "basis": plan_forecast.basis,
        "runs": plan_forecast.runs,
        "cost_usd": _render_quantiles(plan_forecast.usd, MILLION),
        "seconds": _render_quantiles(plan_forecast.seconds),
        "unpriced": list(plan_forecast.unpriced),
        "steps": [_step_estimate(n, step) for n, step in enumerate(plan_forecast.steps)],
    }


def _step_estimate(n: int, step_forecast: StepForecast) -> dict[str, Any]:
    return {
        "n": n,
        "worker": step_forecast.worker,
        "basis": step_forecast.basis,
        "samples": step_forecast.samples,
        "cost_usd": _render_quantiles(step_forecast.usd, MILLION),
        "seconds": _render_quantiles(step_forecast.seconds),
        "input_tokens": _render_quantiles(step_forecast.input),
        "output_tokens": _render_quantiles(step_forecast.output),
    }


def _render_quantiles(spread: Spread, unit: int = 1) -> dict[str, float]:
    """Quantiles, in dollars where the unit is a million of micro-dollars."""
    figures = {"p10": spread.p10, "p50": spread.p50, "p90": spread.p90, "worst": spread.most}
    return {name: round(value / unit, 8) for name, value in figures.items()}
