"""The execution of a step, from its ticket to an answer in the journal.

    take a ticket (a notice; any number of them may be lost, repeated or forged)
     └ fold the run's journal; nothing to do if the run has ended, or is asked to, or the step is settled
     └ delivered again: claim first; a step that several dispatchers took and none finished is a dead letter
     └ compose what the access list grants             view_of_step(): the only way from the store to a provider
     └ one entry: claim + call.intended + reservation  before the socket is opened; fenced by the row's version. If
        it is refused, another engine came first: go on as for a ticket that is delivered again
     └ stream; deltas of the answering step go to the gateways that follow the run
     └ one entry: call.finished + step.done            fenced by the claim; then it is sent to the driver. A
        or, where it calls tools, step.awaiting_tool   driver in this process adds what follows to the same entry

A worker that fails is retried once with full-jitter backoff and then replaced by the next eligible one, each time as
a new attempt with its own intent. Once an answer has begun to stream to a caller it cannot be taken back, so that
step is not tried again; one that nobody has received yet is. A worker whose answer is empty is replaced once, too.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

import orjson
from msgspec.structs import replace

from app.core.contents import content_ref
from app.core.message.chat import TOKEN_BYTES, message_to_json, mint_call_id
from app.core.plan.pricing import question_tokens
from app.core.pool.breaker import NO_TIME
from app.core.pool.catalog import Amount, Catalog, ProviderSpec, Worker
from app.core.pool.policy import exclude_unable
from app.core.pool.rules import Reading
from app.core.run import approvals, visibility
from app.core.run.caller_view import spendable_by_steps
from app.core.run.events import CallFinished, Fact, NamedCall, PassedOver, StepAwaitingTool, StepDone, StepFailed
from app.core.run.fold import fold
from app.core.run.identifiers import Trace, trace_of_turn
from app.core.run.kinds import AFTER_THE_END
from app.core.run.progress import EXPIRED
from app.core.run.share import share
from app.core.run.state import Call, RunState, StepState
from app.core.run.visibility import find_readers
from app.engine.calls.attempt import (
    Attempt,
    CallTime,
    PlannedCall,
    Purpose,
    outcomes_of_lost_calls,
    read_open_calls,
    tier_seconds,
)
from app.engine.calls.step_request import NOTHING, Candidates, View, is_long, view_of_step
from app.engine.commit.colocation import LocalRuns
from app.engine.context import EngineContext
from app.engine.steps.claimed_step import ClaimedStep, PendingOutcomes, Relay, StepBasis, StepLog
from app.engine.worker_health import WorkerChoice
from app.errors import (
    BatonError,
    BudgetExhausted,
    EventMalformed,
    LeaseLost,
    NotFound,
    QueueUnavailable,
    RunEnded,
    RunOverBudget,
    StoreUnavailable,
)
from app.providers.protocol import Request
from app.stepqueue.protocol import AGAIN, CommittedEvents, Live
from app.store.protocol import Entry, TicketMove, TicketRow

OUTCOME_DELAY_SECONDS = 1.0
"""Seconds for which an outcome may wait for the next entry of its step. Before a longer pause it is written at once, so
that the journal shows the pause; a shorter one counts to the call."""
MOST_DELIVERIES = 3
"""Dispatchers that may stop while they execute one step before it is given up as a dead letter."""
MOST_REFUSALS = 2
"""Refused reservations after which a step fails for want of money; each time it asks for a share of what is left."""
INTERNAL = "internal_error"
"""The error of a step that a bug of ours has ended."""
CLAIM_TRIES = 3
"""Tries at a claim that others move at the same time."""


class Execution:
    """One step under one claim."""

    def __init__(
        self,
        context: EngineContext,
        name: str,
        work: ClaimedStep,
        *,
        local: LocalRuns,
        outcomes: PendingOutcomes,
        has_last_delivery: Callable[[], bool],
    ) -> None:
        """`name` is the dispatcher's; `local` finds the runs that are driven in this process. `has_last_delivery` says
        if the dispatcher works on a step that is given up if this engine stops."""
        self._context = context
        self._has_last_delivery = has_last_delivery
        self._pending = outcomes
        self._name = name
        self._local_run = local
        self._ticket = work.ticket
        self._work = work
        self._version = work.ticket.version
        self._salt = b""
        self._contents: Mapping[str, bytes] = NOTHING
        """Contents that were read together with the journal."""
        self._catalog: Catalog | None = None
        """The pool file from which the workers are that may be called."""
        self._reading = Reading()
        """The labels of what the step may see; nothing where that can exclude nobody."""
        self._ids: list[str] = []
        self._flawed: Attempt | None = None
        """The attempt before, if its answer did not have the form that was asked for."""
        self._unrecorded: Attempt | None = None
        """The latest attempt, from its call on until an entry with its outcome is committed: each entry has it."""
        self._empty: Attempt | None = None
        """The attempt whose answer was empty, after which another worker is asked."""
        self._was_streamed = False
        """True if text of the latest attempt may have been sent to a caller, so that it cannot be taken back."""
        self._number = 0
        """The number of the latest attempt."""
        self._gateway: tuple[str, ...] = ()
        """The address of the gateway that follows the run, of one that is driven elsewhere."""
        self._prepared: tuple[StepBasis, Attempt] | None = None
        """The first call, if it was composed before the step was queued, and its intent is committed."""
        self._log = StepLog(context)

    async def prepare(self, state: RunState, salt: bytes, contents: Mapping[str, bytes]) -> Attempt | None:
        """Compose the first call of a step that is yet to be queued; None if it cannot be made right now.

        The writer commits the intent together with the claim, and then has the step performed; see `colocation.py`.
        """
        self._salt = salt
        self._gateway = (state.turn.gateway,) if state.turn.gateway else ()
        basis = await self._read_basis(state, contents)
        seconds_left = self._seconds_left(state)
        if seconds_left <= 0 or basis.candidates.take_pause(seconds_left):
            return None
        attempt = self._affordable(basis, seconds_left)
        if isinstance(attempt, WorkerChoice):
            return None
        with attempt.abandon_on_error():
            await self._context.pin(attempt.catalog)
        self._prepared = basis, attempt
        self._log.begin(state, self._ticket.step)
        self._log.call(attempt.worker.name)
        return attempt

    async def perform(self) -> None:
        """Claim the step and bring it to its end, unless there is nothing to do or another engine has it."""
        if self._prepared is not None:
            return await self._keeping_unwritten_outcomes(self._call_until_done(*self._prepared))
        if self._version != AGAIN:
            state = await self._read_state(self._ticket.seq)
            if self._is_not_queued(state):
                state = await self._read_state(None)
            try:
                if not (self._is_not_queued(state) or self._has_nothing_to_do(state)):
                    return await self._keeping_unwritten_outcomes(self._begin_calls(state))
            except LeaseLost:
                if self._work.claim:
                    raise
        await self._perform_again()

    async def _perform_again(self) -> None:
        """Claim before anything else: this is not the first delivery, so the step may have ended another process."""
        claimed = await self._claim()
        if claimed is None:
            return
        due, state = claimed
        lost_calls, deliveries = self._outcomes_of_lost_calls(state), _deliveries(due)
        if self._has_nothing_to_do(state):  # only the calls of a lost dispatcher get their outcomes
            await self._append(self._entry(lost_calls, move=TicketMove(due.step, "finish", claim=self._work.claim)))
        elif deliveries >= MOST_DELIVERIES:
            self._log.begin(state, due.step)
            self._context.telemetry.count("baton_dead_letters_total", due.tier)
            self._context.telemetry.log(
                logging.ERROR,
                "A step is a dead letter: several engines took it and none finished; see what ended them.",
                run=due.run,
                step=due.step,
            )
            await self._fail(StepFailed(due.step, "dead_letter", deliveries=deliveries), lost_calls)
        else:
            await self._keeping_unwritten_outcomes(self._begin_calls(state))

    async def _claim(self) -> tuple[TicketRow, RunState] | None:
        """Take the ticket as its row is now, with the state from which to go on.

        None if there is nothing to do now: the step is done, another engine has it or may still have it, it is left to
        a later delivery, or its run has ended and cannot be read.
        """
        for _ in range(CLAIM_TRIES):
            due = await self._context.store.find_ticket(self._ticket.run, self._ticket.step)
            if due is None or due.until > self._context.now():
                return None
            is_held_elsewhere = due.holder not in (None, self._name)
            if is_held_elsewhere and not self._context.may_judge_leases():
                return None
            if self._is_postponed(due):
                return None
            self._version = due.version
            try:
                state = await self._read_state(None)
            except EventMalformed:
                if (await self._context.store.run(due.run)).ended_at is None:
                    raise
                await self._finish_unread(due)
                return None
            with suppress(LeaseLost):
                await self._append(self._entry(()))
                return due, state
        return None

    async def _finish_unread(self, due: TicketRow) -> None:
        """Finish a step of a run that has ended, whose journal has events that this process does not know. Its calls
        are `unknown`, so that no budget keeps what was held for them, and its ticket does not come back for ever."""
        await self._append(self._entry(()))
        open_calls = read_open_calls(await self._context.store.call_events(due.run), due.step)
        outcomes, _ = outcomes_of_lost_calls(open_calls)
        await self._append(self._entry(outcomes, move=TicketMove(due.step, "finish", claim=self._work.claim)))

    def _is_postponed(self, due: TicketRow) -> bool:
        """Return whether the step is left to a later delivery, because this engine works on another one that is given
        up if the engine stops.

        An engine that stops takes all of its steps with it, and nothing shows which of them was the cause. Those that
        were executed together with the cause come back together with it. On their last delivery each of them has an
        engine to itself, as far as such steps are concerned, so that only the cause is given up.
        """
        self._work.is_last_delivery = False
        if _deliveries(due) != MOST_DELIVERIES - 1:
            return False
        if self._has_last_delivery():
            return True
        self._work.is_last_delivery = True
        return False

    async def _read_state(self, upto: int | None) -> RunState:
        """The run's state up to `upto` at least; None for all of it, as the database has it now."""
        local_run = self._local_run(self._ticket.run)
        if local_run is not None and upto is not None and local_run.state.seq >= upto:
            self._salt = local_run.salt
            return local_run.state
        read = await self._context.store.step_input(self._ticket.run)
        self._salt, self._contents = read.salt, read.contents
        state = fold(read.events)
        self._gateway = (state.turn.gateway,) if state.turn.gateway else ()
        return state

    def _is_not_queued(self, state: RunState) -> bool:
        """True if the step was not queued yet in that state, or not in this turn. How far to read is only what a ticket
        says, and everything that the step may see must have been folded."""
        step = state.steps.get(self._ticket.step)
        return step is None or step.state == "waiting" or state.turn.number != self._version

    def _has_nothing_to_do(self, state: RunState) -> bool:
        step = state.steps.get(self._ticket.step)
        over = state.ended or state.cancel_asked
        return over or step is None or step.settled or step.state == "awaiting_tool"

    async def _keeping_unwritten_outcomes(self, calls: Coroutine[Any, Any, None]) -> None:
        """Make calls, of which none is made that could not be recorded. The outcome of the one before is kept until the
        database is back, and then the step is left to any engine with a free slot. A step that a bug of ours ends after
        a call fails with the outcome of that call, so that nobody pays for it again."""
        try:
            await calls
        except StoreUnavailable:
            if self._unrecorded is None or not self._work.claim:
                raise
            await self._pending.write_later(self._entry(()), self._settle_and_release)
        except BatonError:
            raise
        except Exception as bug:
            if self._unrecorded is None or not self._work.claim:
                raise
            self._context.telemetry.log(
                logging.ERROR,
                "A step failed because of a bug after its worker was called; the outcome of the call is kept.",
                bug,
                run=self._ticket.run,
                step=self._ticket.step,
            )
            await self._fail(StepFailed(self._ticket.step, INTERNAL), ())

    async def _begin_calls(self, state: RunState) -> None:
        self._log.begin(state, self._ticket.step)
        ticket = self._ticket
        if ticket.at and ticket.version != AGAIN:
            waited = {"baton.step": ticket.step}
            self._context.tracing.record_wait(self._trace(state), ticket.at, self._context.now(), waited)
        lost_outcomes = self._outcomes_of_lost_calls(state)
        try:
            basis = await self._read_basis(state, self._contents)
        except NotFound:
            return await self._fail(StepFailed(self._ticket.step, "content_erased"), lost_outcomes)
        attempt = await self._next_attempt(basis, lost_outcomes)
        if attempt is not None:
            await self._call_until_done(basis, attempt)

    async def _read_basis(self, state: RunState, contents: Mapping[str, bytes] = NOTHING) -> StepBasis:
        view = await view_of_step(self._context.store, state, self._ticket.step, contents)
        calls = [call for call in state.calls.values() if call.step == view.step.n]
        self._number = len(calls)
        workers, excluded = self._callable_workers(state, view)
        calls_of_turn = [call for call in calls if call.turn == state.turn.number]
        candidates = self._candidates(workers, calls_of_turn, state.admitted.limits.attempts)
        return StepBasis(state, view, candidates, excluded)

    def _callable_workers(self, state: RunState, view: View) -> tuple[list[Worker], PassedOver]:
        """The workers that may be called for the step as the pool file is now, and why others of the run may not."""
        self._catalog = catalog = self._context.catalog()
        workers, unable = exclude_unable(_workers(catalog, state, view.step), view.results)
        unapproved: PassedOver = ()
        if state.admitted.approval is not None:
            approval = state.approvals.get(view.step.proposal)
            workers, unapproved = approvals.exclude_unapproved(workers, state.admitted.approval, approval, catalog)
        self._reading, workers, excluded = find_readers(state, view.step.n, workers)
        return workers, (*unable, *unapproved, *excluded)

    def _candidates(self, workers: list[Worker], calls: Sequence[Call], most_attempts: int) -> Candidates:
        """The workers that may still be called after these calls of the turn, which other engines may have made."""
        rate_limited = min(sum(call.limited for call in calls), most_attempts)
        attempts_left = most_attempts - (len(calls) - rate_limited)
        answered_nothing = {call.worker for call in calls if call.empty}
        others = [worker for worker in workers if worker.name not in answered_nothing]
        return Candidates(self._context.health, others or workers, attempts_left, most_attempts - rate_limited)

    async def _call_until_done(self, basis: StepBasis, attempt: Attempt) -> None:
        """Make one call after the other, from a committed intent to the step's end."""
        next_attempt: Attempt | None = attempt
        while next_attempt is not None:
            attempt = next_attempt
            answered = await self._stream(basis.state, basis.step, attempt)
            if answered and not self._should_ask_another(basis.candidates, attempt):
                return await self._write_last_entry(self._last_entry(basis.step, attempt))
            if answered:
                next_attempt = await self._next_attempt(basis)
                continue
            self._flawed = attempt if attempt.reply.flaw is not None else None
            basis.candidates.note_failure(
                attempt.worker,
                attempt.error,
                streamed=self._was_streamed,
                jitter=self._context.random(),
                seconds_left=self._seconds_left(basis.state),
            )
            if attempt.has_used_all_time:
                return await self._fail(StepFailed(self._ticket.step, NO_TIME), ())
            next_attempt = await self._next_attempt(basis)

    async def _next_attempt(
        self, basis: StepBasis, lost_outcomes: tuple[Fact, ...] = (), refusals: int = 0
    ) -> Attempt | None:
        """The next attempt, its intent committed; None if there is none, and what becomes of the step is written.

        `refusals` counts how often the store has refused to reserve for it.
        """
        n = self._ticket.step
        await self._pause(basis.candidates, basis.state)
        if self._work.interrupted:
            await self._withdraw(lost_outcomes)
            return None
        seconds_left = self._seconds_left(basis.state)
        if seconds_left <= 0:
            await self._fail(StepFailed(n, EXPIRED), lost_outcomes)
            return None
        attempt = self._affordable(basis, seconds_left)
        if isinstance(attempt, WorkerChoice) and basis.candidates.has_only_rate_limited:  # the others cannot be paid
            return await self._next_attempt(basis, lost_outcomes, refusals)
        if isinstance(attempt, WorkerChoice):
            await self._fail(self._without_worker(basis, attempt, seconds_left), lost_outcomes)
            return None
        try:
            await self._commit_intent(attempt, lost_outcomes)
            return attempt
        except RunOverBudget as error:
            refusal = error
        self._number -= 1  # this attempt was not recorded
        if refusals < MOST_REFUSALS:  # calls that were not known here hold what this one was to have
            latest = replace(basis, state=await self._read_state(None), refusal=refusal)
            return await self._next_attempt(latest, lost_outcomes, refusals + 1)
        failed = StepFailed(n, RunOverBudget.code, budget=refusal.budget, budget_until=refusal.until)
        await self._fail(failed, lost_outcomes)
        return None

    def _without_worker(self, basis: StepBasis, choice: WorkerChoice, seconds_left: float) -> StepFailed:
        """The failure of a step that no worker can be called for."""
        error = basis.candidates.error(choice)
        refusal = basis.refusal if error == RunOverBudget.code else None
        return StepFailed(
            n=self._ticket.step,
            error=error,
            retry_after=basis.candidates.retry_after(error, seconds_left),
            left=round(seconds_left, 3),
            passed_over=(*basis.excluded, *choice.passed_over),
            despite=choice.despite,
            budget=refusal.budget if refusal is not None else "",
            budget_until=refusal.until if refusal is not None else None,
        )

    def _affordable(self, basis: StepBasis, seconds_left: float) -> Attempt | WorkerChoice:
        """The next attempt by the first worker that the run's money pays for, its output cut to what is left of it; the
        choice that names nobody if there is none. `seconds_left` are the run's."""
        candidates = basis.candidates
        if self._context.catalog() is not self._catalog:  # the pool file was read again since the last call
            candidates.use_only(self._callable_workers(basis.state, basis.view)[0])
        while (choice := candidates.choose(seconds_left)).worker is not None:
            try:
                attempt = self._within_means(basis, choice, seconds_left)
            except BaseException:
                self._context.health.cancel_call(choice.worker, extra=choice.extra)
                raise
            if attempt is not None:
                self._number += 1
                return attempt
            self._context.health.cancel_call(choice.worker, extra=choice.extra)
            candidates.leave_out_unpaid(choice.worker)
        return choice

    def _within_means(self, basis: StepBasis, choice: WorkerChoice, seconds_left: float) -> Attempt | None:
        """Return the attempt that calls this worker within the step's share of the money, and within what is left in a
        budget over several runs that has refused; None if that is too little. `seconds_left` are the run's."""
        attempt, state = self._attempt(basis, choice, seconds_left), self._latest_state(basis.state)
        means = self._unspent(state)
        if len(state.active_steps) > 1:
            floor = attempt.least(state.admitted.limits.floor)
            means = share(state, basis.step.n, means, floor, attempt.catalog.workers, question_tokens(basis.view.task))
        if isinstance(basis.refusal, BudgetExhausted):
            means = Amount(min(means.usd, basis.refusal.left), means.tokens)
        return attempt.within(means, state.admitted.limits.floor)

    def _latest_state(self, state: RunState) -> RunState:
        """The run's state as this process knows it now."""
        local_run = self._local_run(state.run)
        if local_run is not None and local_run.state.seq > state.seq:
            return local_run.state
        return state

    def _unspent(self, state: RunState) -> Amount:
        """The amount that the run may still hold once the outcome that travels with the next intent is written."""
        unspent, attempt = spendable_by_steps(state), self._unrecorded
        call = state.calls.get(attempt.call) if attempt is not None else None
        if attempt is None or call is None or call.outcome is not None:
            return unspent
        return (unspent + attempt.hold).minus(attempt.spent)

    def _seconds_left(self, state: RunState) -> float:
        return state.turn.deadline - self._context.now()

    async def _pause(self, candidates: Candidates, state: RunState) -> None:
        """Wait until a worker should be called. A stop interrupts the wait, and the outcome of the attempt before is
        committed first if the wait is long."""
        while (seconds := candidates.take_pause(self._seconds_left(state))) and not self._work.interrupted:
            if seconds > OUTCOME_DELAY_SECONDS and self._unrecorded is not None:
                await self._write_last_entry(self._entry(()))
            try:
                self._work.allow_interruption()
                await asyncio.sleep(seconds)
            except asyncio.CancelledError:
                await self._withdraw()
                raise
            finally:
                self._work.interruptible = False

    def _outcomes_of_lost_calls(self, state: RunState) -> tuple[Fact, ...]:
        """Outcomes for the intents of a dispatcher that is no more: `unknown`, and possibly billed."""
        outcomes, _ = outcomes_of_lost_calls([call for call in state.open_calls if call.step == self._ticket.step])
        return outcomes

    def _attempt(self, basis: StepBasis, choice: WorkerChoice, seconds_left: float) -> Attempt:
        """The attempt that calls the chosen worker."""
        self._ids = []
        state, view, worker = basis.state, basis.view, choice.chosen
        catalog = self._context.catalog()
        provider = catalog.providers[worker.provider]
        repaired, flaw = "", None
        if self._flawed is not None and self._flawed.worker.name == worker.name:
            repaired, flaw = self._flawed.call, self._flawed.reply.flaw
        request = view.request(worker, state.admitted.limits, streams=state.turn.streams, provider=provider, flaw=flaw)
        most_seconds = tier_seconds(catalog, state)
        time = CallTime(
            state.turn.deadline,
            spare=basis.candidates.can_replace(worker, seconds_left),
            tier_seconds=most_seconds,
            cuts=_may_be_cut(state, view.step, request, most_seconds),
        )
        watched = self._is_watched(basis.candidates, request, provider, time)
        planned = PlannedCall(
            call=self._context.name("call"),
            step=view.step.n,
            request=replace(request, live=True) if watched else request,
            access=view.step.access,
            number=self._number + 1,
            salt=self._salt,
            extra=choice.extra,
            trace=self._trace(state),
            purpose=Purpose(
                template=view.template(worker, provider=provider, flaw=flaw),
                passed_over=(*basis.excluded, *choice.passed_over),
                despite=choice.despite,
                repairs=repaired,
                run=state.run,
                tenant=state.admitted.tenant,
                shadow=state.admitted.origin_kind == "shadow",
                watched=watched,
                budgets=state.admitted.budgets,
                disclosed=visibility.disclosure_to_step(state, view.step, self._reading.labels),
            ),
        )
        return Attempt(self._context, catalog, planned, time)

    def _is_watched(self, candidates: Candidates, request: Request, provider: ProviderSpec, time: CallTime) -> bool:
        """Return whether a reply is streamed only for this process to see that the worker goes on, or to have its text
        when the run's time is over; no caller is sent it as it comes."""
        is_first_of_quick = candidates.is_untried and self._context.health.is_quick(request.worker)
        if time.spare and not is_first_of_quick and is_long(request, provider):
            return True
        return time.cuts and provider.streams and not request.live

    def _trace(self, state: RunState) -> Trace:
        """The span of the run's engine; where that is not known, that of the caller's request."""
        run = self._local_run(state.run)
        if run is not None:
            return run.trace
        return self._ticket.trace or trace_of_turn(state.admitted.trace, state.turn.trace)

    async def _commit_intent(self, attempt: Attempt, lost_outcomes: tuple[Fact, ...]) -> None:
        """Claim (the first time), settle the attempt before, and reserve for this one: all in one entry."""
        with attempt.abandon_on_error():
            await self._context.pin(attempt.catalog)
            await self._append(self._entry((*lost_outcomes, attempt.build_intent()), hold=attempt.hold))

    def _should_ask_another(self, candidates: Candidates, attempt: Attempt) -> bool:
        """Return whether another worker is asked because the answer of this one is empty: once for each step, unless a
        part of a call that was cut off has reached the caller."""
        if self._empty is not None or self._was_streamed or not candidates.spare:
            return False
        if not attempt.build_outcome().is_empty_answer:
            return False
        self._empty = attempt
        candidates.note_empty_answer(attempt.worker)
        return True

    async def _fail(self, failed: StepFailed, lost_outcomes: tuple[Fact, ...]) -> None:
        if not self._work.claim:
            await self._append(self._entry(lost_outcomes))
            lost_outcomes = ()
        move = TicketMove(self._ticket.step, "finish", claim=self._work.claim)
        settled: Fact = failed
        if self._empty is not None and not self._was_streamed:
            settled = self._step_done(failed.n, self._empty)
        await self._write_last_entry(self._entry((*lost_outcomes, settled), move=move))

    def _entry(
        self,
        events: tuple[Fact, ...],
        *,
        hold: Amount = Amount(),
        move: TicketMove | None = None,
        contents: tuple[tuple[str, bytes], ...] = (),
    ) -> Entry:
        """The next entry under this claim: first the outcome that is not recorded yet, if there is one, then `events`.

        Without a `move` it takes the ticket, or keeps it once it is taken.
        """
        now, n = self._context.now(), self._ticket.step
        if move is None and self._work.claim:
            move = TicketMove(n, "hold", claim=self._work.claim)
        elif move is None:
            move = TicketMove(n, "take", version=self._version, holder=self._name, until=now + self._context.lease)
        lost = Amount()
        for fact in events:
            if isinstance(fact, CallFinished) and fact.outcome == "unknown":
                lost += Amount(fact.usd, fact.usage.input)
        released = spent = lost
        attempt = self._unrecorded
        if attempt is not None:
            events = (attempt.build_outcome(), *events)
            released, spent = lost + attempt.hold, lost + attempt.spent
            contents = (*attempt.contents, *contents)
        return Entry(
            run=self._ticket.run,
            at=now,
            events=events,
            move=move,
            hold=hold,
            release=released,
            spent=spent,
            contents=contents,
        )

    async def _stream(self, state: RunState, step: StepState, attempt: Attempt) -> bool:
        """Make the call; True if it succeeded. Its end is noted in the attempt. A cancellation is journaled, then goes
        on."""
        relay = Relay(state.run, step.n, attempt.call, attempt.reply, self._id)
        self._unrecorded = attempt
        self._work.relay = relay if attempt.live else None
        try:
            with attempt.abandon_on_error():  # a stop that came with the intent ends the call before it was begun
                self._work.allow_interruption()
            async with aclosing(attempt.stream()) as stream:  # a call that is stopped ends before its outcome is made
                async for pieces in stream:
                    if not attempt.live or attempt.reply.end is not None:  # what comes with the end is sent with it
                        continue
                    if (delta := relay.delta(pieces)) is not None:
                        followers = self._followers(state)
                        relay.was_sent = relay.was_sent or bool(followers)
                        await self._send(followers, delta)
        except asyncio.CancelledError:
            await self._withdraw()
            raise
        except BatonError as error:
            error.without_frames()  # the attempt keeps it
            return False
        finally:
            self._was_streamed = relay.was_sent
            self._work.interruptible = False
            self._work.relay = None
        return True

    async def _settle_and_release(self) -> None:
        calls = (await self._read_state(None)).calls  # the entry that failed may have been committed all the same
        if self._unrecorded is not None and calls[self._unrecorded.call].outcome is not None:
            self._unrecorded = None
        move = TicketMove(self._ticket.step, "release", claim=self._work.claim, until=self._context.now())
        await self._append(self._entry((), move=move))

    async def _withdraw(self, lost_outcomes: tuple[Fact, ...] = ()) -> None:
        """Stopped by the driver, or handed back because this process shuts down: the outcome that is not recorded yet
        is written either way, and `lost_outcomes` with it."""
        n, claim, stopped = self._ticket.step, self._work.claim, self._work.stopped
        if not claim:
            return
        if stopped:
            await self._write_last_entry(self._entry(lost_outcomes, move=TicketMove(n, "finish", claim=claim)))
            self._log.write("cancelled")
            return
        move = TicketMove(n, "release", claim=claim, until=self._context.now())
        await self._write_last_entry(self._entry(lost_outcomes, move=move))
        with suppress(QueueUnavailable):
            await self._context.queue.enqueue([replace(self._ticket, version=AGAIN)])

    def _id(self, place: int) -> str:
        """The id under which the caller knows a tool call of the present attempt."""
        while len(self._ids) <= place:
            self._ids.append(mint_call_id(self._ticket.run, self._context.salt()[:TOKEN_BYTES]))
        return self._ids[place]

    def _last_entry(self, step: StepState, attempt: Attempt) -> Entry:
        """The entry that ends the step after a call that succeeded: it is done, or waits for results of tool calls."""
        move = TicketMove(step.n, "finish", claim=self._work.claim)
        if not attempt.reply.calls:
            return self._entry((self._step_done(step.n, attempt),), move=move)
        awaiting, contents = self._step_awaiting_tool(step, attempt)
        return self._entry((awaiting,), move=move, contents=contents)

    def _step_done(self, n: int, attempt: Attempt) -> StepDone:
        return StepDone(
            n=n,
            call=attempt.call,
            output=attempt.output,
            chars=len(attempt.reply.text),
            finish=attempt.reply.finish,
            logprobs=attempt.logprobs,
            refusal=attempt.reply.refuses,
            stop_sequence=attempt.reply.stop_sequence,
            declassified=attempt.worker.declassifies & self._reading.labels,
        )

    def _step_awaiting_tool(self, step: StepState, attempt: Attempt) -> tuple[Fact, tuple[tuple[str, bytes], ...]]:
        """The event of a step that waits for results of tool calls, with the content that it names."""
        calls = attempt.reply.calls
        ids = [self._id(place) for place in range(len(calls))]
        said = orjson.dumps(message_to_json(attempt.reply.message(ids)), default=dict)
        ref = content_ref(self._salt, said)
        named = tuple(NamedCall(id_, call.name) for id_, call in zip(ids, calls, strict=True))
        return StepAwaitingTool(step.n, attempt.call, ref, len(attempt.reply.text), named), ((ref, said),)

    async def _write_last_entry(self, entry: Entry) -> None:
        """Write the last entry of this claim; it is kept while the database is away."""
        with suppress(StoreUnavailable):
            return await self._append(entry)
        try:
            await self._pending.write_later(entry, partial(self._append, entry))
        except StoreUnavailable:
            self._unrecorded = None  # given up for good
            raise

    async def _append(self, entry: Entry) -> None:
        """Commit, and send what was committed to the run's engine and gateway.

        If the run has ended meanwhile only outcomes are kept, with the texts that they name, and `RunEnded` is raised.
        """
        run = self._local_run(entry.run)
        ends_step = bool(entry.events) and entry.move is not None and entry.move.verb == "finish"
        try:
            if run is not None and ends_step:
                appended = await run.commit_step_end(entry)
            else:
                appended = await self._context.store.append(entry)
        except RunOverBudget:  # the run ends later: the step's own end is written first, under this claim
            raise
        except RunEnded:
            await self._keep_outcomes(entry)
            self._log.write("cancelled")
            raise
        self._unrecorded = None
        self._log.note_committed(entry.events)
        self._work.claim = appended.claim or self._work.claim
        if appended.events:
            if run is None:
                await self._send(self._engine_and_gateway(), CommittedEvents(entry.run, appended.events))
            elif not ends_step:  # else the run's writer has folded them
                await run.receive(appended.events)

    async def _keep_outcomes(self, entry: Entry) -> None:
        outcomes = tuple(fact for fact in entry.events if fact.kind in AFTER_THE_END)
        if not self._work.claim:
            return
        move = TicketMove(self._ticket.step, "finish", claim=self._work.claim)
        named = orjson.dumps([fact.to_json() for fact in outcomes])
        texts = tuple(content for content in entry.contents if content[0].encode() in named)
        await self._context.store.append(replace(entry, events=outcomes, contents=texts, hold=Amount(), move=move))

    def _followers(self, state: RunState) -> Sequence[str]:
        """The gateways that follow the run, as far as this process knows."""
        run = self._local_run(state.run)
        if run is not None:
            return run.followers()
        gateway, listening = state.turn.gateway, self._work.listening
        if gateway and gateway not in listening:
            return (gateway, *listening)
        return listening

    def _engine_and_gateway(self) -> Sequence[str]:
        """The receivers of what was committed to a run that is driven elsewhere: its engine, and its gateway, so that
        events come before the text that follows them."""
        return (self._work.engine or self._ticket.driver, *self._gateway)

    async def _send(self, addresses: Sequence[str], message: Live) -> None:
        for receiver in addresses:
            with suppress(QueueUnavailable):
                await self._context.queue.publish(receiver, [message])


def _may_be_cut(state: RunState, step: StepState, request: Request, tier_seconds: float) -> bool:
    """Return whether the text that has come by the end of the run's time counts as the step's answer: where the caller
    has given the run, or this turn of it, less time than its tier does, and the text needs no form."""
    is_answer = step.answers or step.complete
    seconds = min(state.turn.seconds, state.admitted.limits.seconds)  # a wait for an approval has moved the deadline
    return is_answer and request.form is None and seconds < tier_seconds


def _deliveries(due: TicketRow) -> int:
    """The number of dispatchers that took a ticket and did not finish its step."""
    return due.lost + (due.holder is not None)


def _workers(catalog: Catalog, state: RunState, step: StepState) -> list[Worker]:
    """Return the workers of the run's pool, as they are now: a pool file that was read again may have taken a clearance
    away (D6)."""
    names = [step.worker, *[name for name in state.admitted.pool if name != step.worker]]
    present = [catalog.workers[name] for name in names if name in catalog.workers]
    return [worker for worker in present if worker.priced or not state.admitted.needs_prices]
