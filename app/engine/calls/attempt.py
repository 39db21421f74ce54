"""THE CALL: one provider call, from the reservation to the settled outcome (D4, D7).

An `Attempt` is made for a step by `execution.py` and for a plan by `planner.py`. It opens no transaction by itself: it
gives the drafts and ledgers that its owner commits, so that an intent travels in one entry with the ticket's claim
and an outcome with the step's end. The order is fixed:

    attempt = Attempt(...)          renders the exact bytes and their salted hash
    commit attempt.intended()       with attempt.hold        before the socket is opened
    async for ... attempt.stream()  at most one request on the wire
    commit attempt.finished()       with attempt.spent       whatever happened, exactly once
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property

from app.core.buffers import fitted
from app.core.message.chat import Piece, Usage
from app.core.plan.workflow import Access
from app.core.pool import budget
from app.core.pool.breaker import Verdict
from app.core.pool.catalog import Deadlines, Worker
from app.core.records import record
from app.core.run.events import CallFinished, CallIntended, PassedOver
from app.engine.calls.response import FORM_FAULT, TOOL_FAULT, Reply
from app.engine.context import EngineContext
from app.errors import (
    BatonError,
    Failure,
    WorkerError,
    WorkerMalformed,
    WorkerMisconfigured,
    WorkerRateLimited,
    WorkerTimeout,
    WorkerTruncated,
    WorkerUnavailable,
)
from app.providers.protocol import Request, endpoint_of
from app.store.protocol import Ledger
from app.store.rows.content import address
from app.telemetry import SPAN_CALL

VERDICTS: Mapping[type, Verdict] = {
    WorkerTimeout: "failing",
    WorkerUnavailable: "failing",
    WorkerMalformed: "failing",
    WorkerTruncated: "failing",
    WorkerRateLimited: "rate_limited",
    WorkerMisconfigured: "misconfigured",
}
"""The verdict that each error gives on the worker; others, such as a request that it refused, say nothing of it."""

ADAPTER_BROKE = "adapter_broke"
"""The code of a call that ended with a bug of ours."""


@record(frozen=True, slots=True)
class Purpose:
    """The facts from which a call's request can be composed again, and why this worker was called.

    `CallIntended` explains the fields.
    """

    template: str = ""
    usd_left: int | None = None
    rejected: str = ""
    version: str = ""
    passed_over: PassedOver = ()
    despite: str = ""
    repairs: str = ""


class Attempt:
    """One provider call for `step` of a run (None: for its plan)."""

    def __init__(
        self,
        context: EngineContext,
        *,
        call: str,
        step: int | None,
        worker: Worker,
        request: Request,
        access: Access,
        number: int,
        salt: bytes,
        deadline: float,
        spare: bool,
        purpose: Purpose,
        extra: bool = False,
    ) -> None:
        """`deadline` is the run's, in seconds since 1970; `number` counts a step's attempts from 1; `spare` says that
        something else could be done if this worker hangs; `purpose` is what else belongs into the intent; `extra` is
        the choice's.
        """
        self.call = call
        self.step = step
        self.worker = worker
        self._context = context
        self._request = request
        self._access = access
        self._number = number
        self._salt = salt
        self._deadline = deadline
        self._spare = spare
        self._extra = extra
        self._purpose = purpose
        self._given: Deadlines | None = None
        """None: nothing was sent."""
        self.catalog = context.catalog()
        self._provider = context.provider(worker.provider)
        self._body = fitted(self._provider.render(request))
        schema_bytes = len(self._body) if request.form or request.toolbox.tools else 0
        self._input_bound = budget.input_bound(request.messages, schema_bytes)
        self._max_output = request.sampling.max_tokens or worker.card.max_output
        self.hold = Ledger(*budget.worst_case(worker, self._input_bound, self._max_output))
        decodes = request.logprobs is not None and step is not None
        # A plan has a reader of its own, which reports every fault, so that the conductor can correct them.
        judged = request if step is not None else replace(request, form=None)
        self.reply = Reply(judged, self._max_output, decodes=decodes)
        self._began = self._first = 0.0
        self._last_piece_at = 0.0
        self._seconds = 0.0
        self.verdict: Verdict = "silent"
        """The verdict of the call on its worker."""
        self.told = False
        """True once text of the worker may have been sent to the caller; what comes with its end is sent when that is
        committed."""
        self.outcome = "cancelled"
        """`unknown` is for others to say: it is what `lost` writes."""
        self.error: BatonError | None = None
        self._finished: CallFinished | None = None

    @property
    def live(self) -> bool:
        """True if its text is streamed to the caller as it comes."""
        return self._request.live

    @property
    def may_call(self) -> bool:
        """True if the worker has tools to call."""
        return bool(self._request.toolbox.tools)

    def intended(self) -> CallIntended:
        """The intent: worker, access list, hash of the exact bytes, what is reserved, and what cannot be honoured."""
        unsupported = sorted(self._provider.unsupported | self.worker.drops)
        return CallIntended(
            call=self.call,
            n=self.step,
            worker=self.worker.name,
            access=self._access,
            usd_held=self.hold.usd,
            tokens_held=self.hold.tokens,
            attempt=self._number,
            provider=self.worker.provider,
            model=self.worker.model,
            request=address(self._salt, self._body),
            bytes=len(self._body),
            max_tokens=self._max_output,
            catalog=self.catalog.digest,
            template=self._purpose.template,
            usd_left=self._purpose.usd_left,
            rejected=self._purpose.rejected,
            version=self._purpose.version,
            passed_over=self._purpose.passed_over,
            despite=self._purpose.despite,
            repairs=self._purpose.repairs,
            ignored=tuple(name for name in unsupported if getattr(self._request.sampling, name)),
            endpoint=endpoint_of(self._provider),
        )

    @contextmanager
    def promised(self) -> Iterator[None]:
        """Around the commit of the intent: if that fails there is no call, and the worker's breaker must know."""
        try:
            yield
        except BaseException:
            self.forgo()
            raise

    def forgo(self) -> None:
        """There is no call."""
        self._context.health.forgo(self.worker, extra=self._extra)

    async def stream(self) -> AsyncIterator[list[Piece]]:
        """Make the call and pass on its pieces. Raises the `WorkerError` that ended it, after noting it, also
        where that is a bug of ours."""
        self._began = self._last_piece_at = self._context.tick()
        attributes = {"gen_ai.operation.name": SPAN_CALL, "gen_ai.request.model": self.worker.model}
        try:
            deadlines = self._deadlines()
            with self._context.telemetry.span(SPAN_CALL, attributes):
                async for pieces in self._provider.stream(self._request, self._body, deadlines):
                    self._last_piece_at = self._context.tick()
                    began = self.reply.began
                    self.reply.take(pieces)
                    if self.reply.began and not began:
                        self._first = self._last_piece_at - self._began
                    self.told = self.told or (self.live and self.reply.began and self.reply.end is None)
                    yield pieces
            if self.reply.end is None:
                raise WorkerTruncated()
            if self.step is not None:  # a plan is judged by its reader, so that it can be repaired with all reasons
                self.reply.judge()
            self.outcome = "ok"
        except BatonError as error:
            self.error = error
            self.outcome = "truncated" if isinstance(error, WorkerTruncated) else "error"
            raise
        except Exception as bug:
            self._broken(bug)
            raise self.error or asyncio.CancelledError from bug
        finally:
            self._seconds = self._context.tick() - self._began
            self._judge()

    def _broken(self, bug: Exception) -> None:
        """A bug of ours in the adapter: to the run a worker that cannot be understood. One that came of a cancellation
        is no more than that."""
        self._context.telemetry.log(
            logging.ERROR,
            "A provider's adapter failed by a bug; the call counts as malformed, and the step goes on.",
            bug,
            call=self.call,
            worker=self.worker.name,
        )
        task = asyncio.current_task()
        if task is None or not task.cancelling():
            self.outcome = "error"
            failure = Failure("internal")
            self.error = WorkerMalformed(
                "The adapter of the worker's provider broke.", code=ADAPTER_BROKE, failure=failure
            )

    def _deadlines(self) -> Deadlines:
        left = self._deadline - self._context.now()
        if left <= 0:
            raise WorkerTimeout()
        self._given = self.worker.deadlines.within(left, live=self._request.live, spare=self._spare)
        return self._given

    def _judge(self) -> None:
        """Report the verdict of this call to the worker's breaker."""
        self.verdict = "good" if self.outcome == "ok" else VERDICTS.get(type(self.error), "silent")
        code = self.error.public_code if self.error is not None else None
        if code in (TOOL_FAULT, FORM_FAULT):  # an answer came; that it lacks the form says nothing bad of its health
            self.verdict = "silent" if code == TOOL_FAULT else "good"
        if isinstance(self.error, WorkerTimeout):
            silence = self._began + self._seconds - self._last_piece_at
            given, own = self._given, self.worker.deadlines
            if given is None or not own.fair(given, self._seconds, silence):
                self.verdict = "silent"
        if self._elsewhere:  # the worker has another endpoint, which is healthy
            self.verdict = "silent"
        self._context.health.settle(
            self.call, self.worker, self.verdict, self._began, self._retry_after, extra=self._extra
        )

    @property
    def _elsewhere(self) -> bool:
        return isinstance(self.error, WorkerError) and self.error.elsewhere

    @property
    def _retry_after(self) -> float | None:
        """Seconds for which the worker asked to be left alone; None where only one of its endpoints did."""
        return None if self.error is None or self._elsewhere else self.error.retry_after

    @cached_property
    def output(self) -> str:
        """The content address of the text, or empty if there is none."""
        return address(self._salt, self.reply.text.encode()) if self.reply.text else ""

    @cached_property
    def logprobs(self) -> str:
        """The content address of the tokens with their log-probabilities, or empty if there are none."""
        return address(self._salt, self.reply.logprobs) if self.reply.logprobs else ""

    @property
    def contents(self) -> tuple[tuple[str, bytes], ...]:
        """The (ref, body) pairs to store with the outcome."""
        found = ((self.output, self.reply.text.encode()), (self.logprobs, self.reply.logprobs))
        return tuple((ref, body) for ref, body in found if ref)

    @property
    def usage(self) -> Usage:
        """The usage as reported; else estimated: the likely figure for a complete call, an upper bound for a broken
        one.

        A call that failed before it said anything is not billed, but one that was given up may well be, and one whose
        adapter broke for words that we never saw.
        """
        written = self.reply.written
        if self.reply.end is not None and self.reply.end.usage is not None:
            return self.reply.end.usage
        if self.outcome == "ok":
            return budget.estimate(self._request.messages, written)
        broke = self.error is not None and self.error.public_code == ADAPTER_BROKE
        given_up = broke or isinstance(self.error, WorkerTimeout)
        if self._given is None or (self.outcome == "error" and not written and not given_up):
            return Usage()
        unreceived = self._max_output if broke or not self._request.live else 0
        return budget.broken(self._input_bound, self._max_output, written, unreceived)

    @property
    def spent(self) -> Ledger:
        """The cost of the call, for settling."""
        usage = self.usage
        return Ledger(self.worker.price.cost(usage), usage.total)

    def finished(self) -> CallFinished:
        """The outcome, exactly one for each intent; it may be asked for again, where it could not be written."""
        if self._finished is None:
            self._finished = self._end()
        return self._finished

    def _end(self) -> CallFinished:
        usage = self.usage
        spent = Ledger(self.worker.price.cost(usage), usage.total)
        error, failure = self.error, self.failure
        self._count(usage, spent)
        if failure is not None:
            self._report(failure)
        return CallFinished(
            call=self.call,
            n=self.step,
            outcome=self.outcome,
            usage=usage,
            usd=spent.usd,
            seconds=round(self._seconds, 6),
            first=round(self._first, 6),
            finish=self.reply.finish,
            output=self.output,
            logprobs=self.logprobs,
            refused=self.reply.end is not None and self.reply.end.refused,
            error=error.public_code if error is not None else None,
            blamed=self.verdict if error is not None and self.verdict != "good" else "silent",
            retry_after=self._retry_after,
            reason=failure.reason if failure is not None else "",
            http_status=failure.status if failure is not None else None,
            provider_code=failure.code if failure is not None else "",
            request_id=failure.request_id if failure is not None else "",
            excerpt=failure.excerpt if failure is not None else "",
        )

    @property
    def failure(self) -> Failure | None:
        """The cause of its error; None for a call that succeeded or was cancelled."""
        if self.error is None:
            return None
        return self.error.failure if isinstance(self.error, WorkerError) else Failure("internal")

    def _report(self, failure: Failure) -> None:
        """Count the failure by its reason, and log it without the provider's words."""
        telemetry, name = self._context.telemetry, self.worker.name
        telemetry.count("baton_call_failures_total", name, failure.reason)
        if failure.reason == "internal":  # it was logged with its place
            return
        telemetry.log(
            logging.WARNING,
            "A provider call failed.",
            call=self.call,
            step=self.step,
            worker=name,
            reason=failure.reason,
            status=failure.status,
            code=failure.code,
            provider_request=failure.request_id,
            seconds=round(self._seconds, 3),
        )

    def _count(self, usage: Usage, spent: Ledger) -> None:
        telemetry, name = self._context.telemetry, self.worker.name
        telemetry.count("baton_calls_total", name, self.outcome)
        telemetry.count("baton_tokens_total", name, "input", by=usage.input)
        telemetry.count("baton_tokens_total", name, "output", by=usage.output)
        telemetry.count("baton_cost_micro_usd_total", name, by=spent.usd)
        telemetry.observe("baton_call_seconds", self._seconds, name)
