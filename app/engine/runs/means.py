"""The means of one run: the money, tokens and seconds that are left to it, and the plans that they bear.

Money is compared with a plan's least price (`plan/pricing.py`); time with its likely duration, from what the workers'
latest calls took in this process, else from the speed on their cards. A worker of which neither is known is expected to
take no time, so that nothing is refused for what nobody knows.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property

from app.conductor.prompt import count_left_out_chars
from app.core.message.chat import Task
from app.core.plan.pricing import best_alone, every_plan_fits, least_price, plan_price, plan_seconds, question_tokens
from app.core.plan.workflow import Step
from app.core.pool.catalog import MILLION, Amount, Worker
from app.core.pool.policy import permits
from app.core.run import approvals
from app.core.run.caller_view import unspent_amount
from app.core.run.share import amount_for_steps
from app.core.run.state import RunState, StepState
from app.core.run.visibility import conversation_reading
from app.engine.context import EngineContext

PROMPT_BYTES, CARD_BYTES = 2_500, 250
"""About the bytes of a prompt for a plan, apart from the question, and those of each worker's card."""
PLAN_TOKENS = 512
"""Output tokens to which a call for a plan may be cut where money is short: those of a plan of about three steps."""


class Means:
    """The means of one run, as its planner uses them."""

    def __init__(self, context: EngineContext, task: Task) -> None:
        self._context = context
        self._task = task

    @cached_property
    def question_tokens(self) -> int:
        """Return the input tokens of the caller's conversation, at the most."""
        return question_tokens(self._task)

    def seconds_left(self, state: RunState) -> float:
        """Return the seconds until the run's deadline, and no more than the run was given: the clock of this process is
        late until it is corrected, if the machine stood still."""
        return min(state.turn.deadline - self._context.now(), state.admitted.limits.seconds)

    def workers(self, state: RunState) -> Sequence[Worker]:
        """Return the workers of the run's pool that the pool file still has."""
        catalog = self._context.catalog().workers
        return [catalog[name] for name in state.admitted.pool if name in catalog]

    def paces(self, workers: Sequence[Worker]) -> Mapping[str, float]:
        """Return the seconds that a call of each of these workers is likely to take, by name; 0 where that is not
        known."""
        return {worker.name: self._context.health.usual_seconds(worker) for worker in workers}

    # -- the call for a plan

    def planner(self, state: RunState) -> Worker | None:
        """Return the model that plans for the run's tier; None if none does."""
        tier = self._context.tier_of(state.admitted)
        if tier is None or tier.conductor.worker is None:
            return None
        return self._context.catalog().workers.get(tier.conductor.worker)

    def planning_amount(self, state: RunState, workers: Sequence[Worker]) -> Amount:
        """Return the amount that a call of that model for a plan needs; nothing if no model plans for the tier."""
        worker = self.planner(state)
        if worker is None:
            return Amount()
        prompt = self.question_tokens - self._count_omitted_characters(state) + PROMPT_BYTES + CARD_BYTES * len(workers)
        size = 2 * prompt  # a request with a schema counts with all of its bytes once more: see `Attempt`
        return least_price(worker, size, max(PLAN_TOKENS, state.admitted.limits.floor))

    def _count_omitted_characters(self, state: RunState) -> int:
        """Return the number of characters of the conversation that the model is not shown."""
        tier = self._context.tier_of(state.admitted)
        if tier is None:
            return 0
        return count_left_out_chars(self._task.messages, tier.conductor.message_chars)

    def planning_seconds(self, state: RunState) -> float:
        """Return the seconds that a call for a plan is likely to take; 0 if no model plans for the tier."""
        worker = self.planner(state)
        if worker is None:
            return 0.0
        return self._context.health.usual_seconds(worker)

    def has_time_to_plan(self, state: RunState, workers: Sequence[Worker]) -> bool:
        """Return True if a worker could answer after the tier's model has planned."""
        quickest = min(self.paces(workers).values(), default=0.0)
        return self.planning_seconds(state) + quickest <= self.seconds_left(state)

    # -- plans

    def are_short(self, state: RunState, workers: Sequence[Worker], steps: int) -> bool:
        """Return True if a plan of so many steps over these workers could cost more, or take longer, than what is
        left."""
        slowest_worker = max(self.paces(workers).values(), default=0.0)
        if self.planning_seconds(state) + steps * slowest_worker > self.seconds_left(state):
            return True
        floor = state.admitted.limits.floor
        return not every_plan_fits(workers, steps, self.question_tokens, floor, unspent_amount(state))

    def objections(self, state: RunState, steps: Sequence[Step]) -> list[str]:
        """Return the reasons why a plan does not fit; none if it does."""
        catalog = self._context.catalog().workers
        workers = [catalog[step.worker] for step in steps if step.worker in catalog]
        price = plan_price(steps, workers, self.question_tokens, state.admitted.limits.floor)
        shape = [(step.worker, step.access.steps) for step in steps]
        return self._objections(state, workers, price, shape)

    def objections_to(self, state: RunState, steps: Sequence[StepState]) -> list[str]:
        """Return the reasons why a plan whose steps are journaled does not fit; none if it does."""
        catalog = self._context.catalog().workers
        unsettled = [step for step in steps if not step.settled]
        price = amount_for_steps(state, unsettled, catalog, self.question_tokens)
        places = {step.n: place for place, step in enumerate(steps)}
        steps_with_inputs = []
        for step in steps:
            inputs = [places[n] for n in step.access.steps if n in places]
            steps_with_inputs.append((step.worker, inputs))
        return self._objections(state, self.workers(state), price, steps_with_inputs)

    def worst_case(self, state: RunState, steps: Sequence[Step]) -> int | None:
        """Return the price of a plan in micro-dollars if each step makes one call and writes as much as it may; None if
        the price of one of its workers is not known."""
        catalog = self._context.catalog().workers
        for step in steps:
            if step.worker in catalog and not catalog[step.worker].priced:
                return None
        most_tokens = state.admitted.limits.output_tokens
        return plan_price(steps, self.workers(state), self.question_tokens, most_tokens).usd

    def _objections(
        self, state: RunState, workers: Sequence[Worker], price: Amount, shape: Sequence[tuple[str, Sequence[int]]]
    ) -> list[str]:
        money_left, time_left = unspent_amount(state), self.seconds_left(state)
        seconds = plan_seconds(shape, self.paces(workers), state.admitted.limits.fan_out)
        reasons = []
        if price.usd > money_left.usd:
            reasons.append(
                f"the plan costs ${price.usd / MILLION:.6f} at the least, and ${money_left.usd / MILLION:.6f} is left: "
                "name fewer steps or cheaper workers"
            )
        if price.tokens > money_left.tokens:
            reasons.append(f"the plan takes {price.tokens} tokens at the least, and {money_left.tokens} are left")
        if seconds > time_left:
            reasons.append(
                f"the plan takes about {seconds:.1f} s, and {time_left:.1f} s are left: name fewer steps one after the "
                "other, or quicker workers"
            )
        return reasons

    def lone_worker(self, state: RunState) -> str:
        """Return the worker that answers alone where nothing else was planned: the tier's fallback, or the best worker
        that may read the conversation and for which the run has money and time."""
        usual = self._usual_fallback(state)
        workers = self._within_terms(state, self._readers(state))
        if not workers:
            return usual
        paces, seconds_left = self.paces(workers), self.seconds_left(state)
        quick = [worker for worker in workers if paces[worker.name] <= seconds_left]
        if not quick:
            quick = [min(workers, key=lambda worker: paces[worker.name])]
        return best_alone(quick, usual, self.question_tokens, state.admitted.limits, unspent_amount(state))

    def _usual_fallback(self, state: RunState) -> str:
        """Return the tier's fallback if the run's pool has it, else the first worker of that pool."""
        tier, pool = self._context.tier_of(state.admitted), state.admitted.pool
        if tier is not None and tier.fallback in pool:
            return tier.fallback
        return pool[0]

    def _readers(self, state: RunState) -> Sequence[Worker]:
        """Return the workers that may be called without an approval and may read the conversation; all that need no
        approval if none of them may read it."""
        workers = self._without_approval(state)
        reading = conversation_reading(state)
        return [worker for worker in workers if permits(worker, reading)] or workers

    def _without_approval(self, state: RunState) -> Sequence[Worker]:
        """Return the workers that may be called without an approval; all of them if each one needs one."""
        workers, terms = self.workers(state), state.admitted.approval
        if terms is None:
            return workers
        return [worker for worker in workers if not approvals.needs_approval(worker, terms)] or workers

    def _within_terms(self, state: RunState, workers: Sequence[Worker]) -> Sequence[Worker]:
        """Return those of these workers whose answer costs no more than needs no approval; all of them if none does."""
        terms = state.admitted.approval
        if terms is None or terms.above_usd is None:
            return workers
        within = []
        for worker in workers:
            price = self.worst_case(state, [Step(worker.name, answers=True)])
            if price is not None and state.usd + price <= terms.above_usd:
                within.append(worker)
        return within or workers
