"""THE STEP: from a ticket to an answer in the journal.

    take a ticket (a doorbell; any number of them may be lost, repeated or forged)
     └ fold the run's journal; nothing to do if the run has ended or the step is settled
     └ compose what the access list grants             see(): the only way from the store into a provider request
     └ one entry: claim + call.intended + reservation  before the socket is opened; fenced by the row's version
     └ stream; deltas of the answering step go to the run's driver as they come
     └ one entry: call.finished + step.done            fenced by the claim; then the driver is told

A worker that fails is retried once with full-jitter backoff and then replaced by the next eligible one, each time as
a new attempt with its own intent. Once an answer has begun to stream to a caller it cannot be unsaid, so that step
is not tried again.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import orjson
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from app.attempt import Attempt, Means, lost
from app.core.chat import Message, Sampling, Task, Words, task_from_json
from app.core.journal import AFTER_THE_END, Draft, Kind
from app.core.pool import Worker
from app.core.progress import fold
from app.core.state import RunState, StepState
from app.core.visibility import Seen, compose, granted
from app.errors import BatonError, LeaseLost, NotFound, QueueUnavailable, RunEnded, RunOverBudget, StoreUnavailable
from app.providers.protocol import Request
from app.stepqueue.protocol import Committed, Delta, Live, Ticket
from app.store.protocol import Entry, Ledger, Move, Store

BACKOFF, LONGEST_BACKOFF = 0.25, 8.0
"""Seconds: the first retry waits a random time below the one, no retry waits longer than the other."""
OUTCOME_PATIENCE = 90.0
"""Seconds for which an outcome is kept and written again while the database is away."""
HANDED_BACK = -1
"""No row has this version: whoever takes such a ticket looks at the row first."""


async def see(store: Store, state: RunState, n: int) -> tuple[Message, ...]:
    """The exact messages of step `n`: what its access list grants, nothing else. `NotFound` if content was erased."""
    return (await see_with_task(store, state, n))[0]


async def see_with_task(store: Store, state: RunState, n: int) -> tuple[tuple[Message, ...], Task]:
    """The same, and the whole task, from which a step may take only how to decode."""
    step = state.steps[n]
    earlier = [state.steps[m] for m in step.access.steps if state.steps[m].state == "done"]
    refs = {state.admitted.task, step.subtask, *(ref for one in earlier for ref in (one.subtask, one.output))}
    texts = await texts_of(store, state.run, refs)
    done = {one.n: Seen(one.n, texts[one.subtask], texts[one.output]) for one in earlier}
    task = task_from_json(orjson.loads(texts[state.admitted.task]))
    return compose(task if step.access.user else None, texts[step.subtask], granted(step.access, done)), task


async def texts_of(store: Store, run: str, refs: set[str]) -> Mapping[str, str]:
    """Stored texts by ref; the empty ref is the empty text. `NotFound` if one was erased."""
    wanted = sorted(refs - {""})
    bodies = await store.contents(run, wanted)
    if len(bodies) < len(wanted):
        raise NotFound("The content of this run was erased; its journal remains.")
    return {"": ""} | {ref: body.decode() for ref, body in bodies.items()}


@dataclass(slots=True)
class Work:
    """A ticket that this process is working on."""

    ticket: Ticket
    task: asyncio.Task[None]
    claim: int = 0
    interrupted: bool = False
    stopped: bool = False
    """Whether the run's driver asked for the end, as opposed to this process shutting down."""
    interruptible: bool = False
    """Whether it waits for a worker. It is never interrupted while it writes to the journal."""

    def interrupt(self, *, stopped: bool) -> None:
        """End the wait for the worker, now or as soon as there is one; its outcome is written all the same."""
        self.interrupted = True
        self.stopped = self.stopped or stopped
        if self.interruptible:
            self.interruptible = False
            self.task.cancel()

    def waits(self) -> None:
        """From here on it may be interrupted; raises `CancelledError` if it was to be already."""
        if self.interrupted:
            raise asyncio.CancelledError
        self.interruptible = True


Known = Callable[[str], tuple[RunState, bytes] | None]
"""State and salt of a run that this very process drives: a fold of a prefix of its journal, which is never stale."""


class Execution:
    """One step under one claim."""

    def __init__(self, means: Means, name: str, ticket: Ticket, work: Work, known: Known) -> None:
        self._means = means
        self._name = name
        self._known = known
        self._ticket = ticket
        self._work = work
        self._version = ticket.version
        self._salt = b""
        self._settled: tuple[Attempt, ...] = ()
        """At most one attempt whose outcome travels in the next entry."""

    async def perform(self) -> None:
        """Claim the step and bring it to its end, unless there is nothing to do or somebody else has it."""
        state = await self._fold(self._ticket.seq if self._version == 0 else None)
        for _ in range(3):
            if self._idle(state):
                return await self._tidy(state)
            try:
                return await self._attempts(state)
            except LeaseLost:
                if self._work.claim:
                    raise
            due = await self._means.store.due(self._ticket.run, self._ticket.step)
            if due is None or due.until > self._means.now():
                return
            self._version = due.version
            state = await self._fold(None)

    async def _fold(self, upto: int | None) -> RunState:
        """The run's state up to `upto` at least; None for all of it, as the database has it now."""
        known = self._known(self._ticket.run) if upto is not None else None
        if known is not None and upto is not None and known[0].seq >= upto:
            self._salt = known[1]
            return known[0]
        journal = await self._means.store.journal(self._ticket.run, upto=upto)
        self._salt = journal.salt
        return fold(journal.events)

    def _idle(self, state: RunState) -> bool:
        step = state.steps.get(self._ticket.step)
        return state.ended or step is None or step.settled

    async def _tidy(self, state: RunState) -> None:
        """Close what a lost dispatcher left open on a step that nobody needs any more: its intents and its ticket."""
        due = await self._means.store.due(self._ticket.run, self._ticket.step)
        step = state.steps.get(self._ticket.step)
        if due is None or due.until > self._means.now() or step is None:
            return
        self._version = due.version
        await self._append(self._entry(self._lost(state, step)))
        await self._append(self._entry((), move=Move(step.n, "finish", claim=self._work.claim)))

    async def _attempts(self, state: RunState) -> None:
        step = state.steps[self._ticket.step]
        messages, task = await see_with_task(self._means.store, state, step.n)
        number = sum(call.step == step.n for call in state.calls.values())
        candidates = Candidates(self._workers(state, step), state.admitted.limits.attempts - number)
        openers = self._lost(state, step)
        while True:
            worker = candidates.current
            if worker is None:
                return await self._fail(candidates.last_error or "run_failed", openers)
            if self._work.interrupted:
                return await self._withdraw()
            if self._means.now() >= state.admitted.deadline:
                return await self._fail("run_expired", openers)
            number += 1
            attempt = self._attempt(state, step, task, messages, worker, number)
            try:
                await self._intend(attempt, openers)
            except RunOverBudget:
                return await self._fail("run_over_budget", openers)
            openers = ()
            if await self._stream(state, step, attempt):
                return await self._end(
                    attempt, self._done(step, attempt), Move(step.n, "finish", claim=self._work.claim)
                )
            told = state.admitted.streams and step.answers and attempt.began_to_answer
            self._settled = (attempt,)
            await asyncio.sleep(candidates.after(attempt.error, told, self._means.chance()))

    def _workers(self, state: RunState, step: StepState) -> list[Worker]:
        known = self._means.catalog().workers
        names = [step.worker, *(name for name in state.admitted.pool if name != step.worker)]
        return [known[name] for name in names if name in known]

    def _lost(self, state: RunState, step: StepState) -> tuple[Draft, ...]:
        """Outcomes for the intents of a dispatcher that is no more: `unknown`, and possibly billed."""
        return tuple(
            lost(call.id, step.n, Ledger(call.usd_held, call.tokens_held))
            for call in state.open_calls
            if call.step == step.n
        )

    def _attempt(
        self, state: RunState, step: StepState, task: Task, messages: tuple[Message, ...], worker: Worker, number: int
    ) -> Attempt:
        asked = task.sampling
        cap = min(state.admitted.limits.output_tokens, worker.card.max_output)
        if step.answers:
            sampling = replace(asked, max_tokens=min(asked.max_tokens or cap, cap))
        else:
            sampling = Sampling(asked.temperature, asked.top_p, max_tokens=cap, seed=asked.seed)
        return Attempt(
            self._means,
            call=self._means.name("call"),
            step=step.n,
            worker=worker,
            request=Request(worker, messages, sampling, live=state.admitted.streams and step.answers),
            access=step.access,
            number=number,
            salt=self._salt,
            deadline=state.admitted.deadline,
        )

    async def _intend(self, attempt: Attempt, openers: tuple[Draft, ...]) -> None:
        """Claim (the first time), settle the attempt before, and reserve for this one: all in one entry."""
        await self._append(self._entry((*openers, *self._outcomes(), attempt.intended()), hold=attempt.hold))
        self._settled = ()

    async def _fail(self, code: str, openers: tuple[Draft, ...]) -> None:
        body = {"n": self._ticket.step, "error": code}
        if not self._work.claim:
            await self._append(self._entry(openers))
            openers = ()
        move = Move(self._ticket.step, "finish", claim=self._work.claim)
        await self._append(self._entry((*openers, *self._outcomes(), Draft(Kind.STEP_FAILED, body)), move=move))

    def _outcomes(self) -> tuple[Draft, ...]:
        return tuple(attempt.finished() for attempt in self._settled)

    def _entry(self, events: tuple[Draft, ...], *, hold: Ledger = Ledger(), move: Move | None = None) -> Entry:
        now, n = self._means.now(), self._ticket.step
        if move is None and self._work.claim:
            move = Move(n, "hold", claim=self._work.claim)
        elif move is None:
            move = Move(n, "take", version=self._version, holder=self._name, until=now + self._means.lease)
        given_up = [draft for draft in events if draft.body.get("outcome") == "unknown"]
        lost_usd = sum(draft.body["usd"] for draft in given_up)
        lost_tokens = sum(draft.body["usage"]["input"] for draft in given_up)
        held, spent = _sum(a.hold for a in self._settled), _sum(a.spent for a in self._settled)
        return Entry(
            run=self._ticket.run,
            at=now,
            events=events,
            move=move,
            hold=hold,
            release=Ledger(held.usd + lost_usd, held.tokens + lost_tokens),
            spent=Ledger(spent.usd + lost_usd, spent.tokens + lost_tokens),
            contents=tuple(content for attempt in self._settled for content in attempt.contents),
        )

    async def _stream(self, state: RunState, step: StepState, attempt: Attempt) -> bool:
        """Whether the call succeeded; its end is noted in the attempt. A cancellation is journaled, then goes on."""
        relayed = state.admitted.streams and step.answers
        offset = 0
        try:
            self._work.waits()
            async for pieces in attempt.stream():
                text = "".join(piece.text for piece in pieces if isinstance(piece, Words))
                if text and relayed:
                    await self._tell(Delta(state.run, step.n, attempt.call, offset, text))
                    offset += len(text)
        except asyncio.CancelledError:
            self._settled = (attempt,)
            await self._withdraw()
            raise
        except BatonError:
            return False
        finally:
            self._work.interruptible = False
        return True

    async def _withdraw(self) -> None:
        """Stopped by the driver, or handed back because this process shuts down: outcomes are written either way."""
        n, claim, stopped = self._ticket.step, self._work.claim, self._work.stopped
        if not claim:
            return
        verb = Move(n, "finish", claim=claim) if stopped else Move(n, "release", claim=claim, until=self._means.now())
        await self._write(self._entry(self._outcomes(), move=verb))
        if not stopped:
            await self._means.queue.ring([replace(self._ticket, version=HANDED_BACK)])

    def _done(self, step: StepState, attempt: Attempt) -> tuple[Draft, ...]:
        body = {
            "n": step.n,
            "call": attempt.call,
            "output": attempt.output,
            "chars": len(attempt.text),
            "finish": attempt.finish,
        }
        return (Draft(Kind.STEP_DONE, body),)

    async def _end(self, attempt: Attempt, then: tuple[Draft, ...], move: Move) -> None:
        self._settled = (attempt,)
        await self._write(self._entry((attempt.finished(), *then), move=move))

    async def _write(self, entry: Entry) -> None:
        """Write the last entry of this claim, again and again while the database is away."""
        try:
            return await self._append(entry)
        except StoreUnavailable:
            retrying = AsyncRetrying(
                retry=retry_if_exception_type(StoreUnavailable),
                wait=wait_random_exponential(0.1, max=5),
                stop=stop_after_delay(OUTCOME_PATIENCE),
                reraise=True,
            )
        await retrying(self._append, entry)

    async def _append(self, entry: Entry) -> None:
        """Commit, and tell the driver. If the run has ended meanwhile only outcomes are kept, and `RunEnded` is
        raised."""
        try:
            appended = await self._means.store.append(entry)
        except RunEnded:
            outcomes = tuple(event for event in entry.events if event.kind in AFTER_THE_END)
            if self._work.claim:
                move = Move(self._ticket.step, "finish", claim=self._work.claim)
                await self._means.store.append(replace(entry, events=outcomes, hold=Ledger(), move=move))
            raise
        self._work.claim = appended.claim or self._work.claim
        if appended.events:
            await self._tell(Committed(entry.run, appended.events))

    async def _tell(self, message: Live) -> None:
        with suppress(QueueUnavailable):
            await self._means.queue.tell(self._ticket.driver, [message])


class Candidates:
    """Whom to call next: the planned worker, once more after a passing fault, then the other eligible ones in order."""

    def __init__(self, workers: list[Worker], attempts: int) -> None:
        self._workers = workers
        self._left = attempts
        self._tries = 0
        self.last_error = ""

    @property
    def current(self) -> Worker | None:
        """The worker to call now; None when all means are exhausted."""
        return self._workers[0] if self._workers and self._left > 0 else None

    def after(self, error: BatonError | None, told: bool, chance: float) -> float:
        """Note a failed attempt; the seconds to wait before the next. `told`: the answer has begun to reach the
        caller."""
        self._left -= 1
        self._tries += 1
        self.last_error = (error.public_code if error else None) or "worker_failed"
        asked = (error.retry_after if error else None) or 0.0
        if told:
            self._workers = []
            return 0.0
        if error is not None and error.retryable and self._tries == 1 and asked <= LONGEST_BACKOFF:
            return max(asked, chance * BACKOFF)
        self._workers = self._workers[1:]
        self._tries = 0
        return 0.0


def _sum(ledgers: Iterable[Ledger]) -> Ledger:
    usd = tokens = 0
    for ledger in ledgers:
        usd, tokens = usd + ledger.usd, tokens + ledger.tokens
    return Ledger(usd, tokens)
