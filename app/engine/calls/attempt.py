"""One provider call, from the reservation to the settled outcome (D4, D7).

An `Attempt` is made for a step by `execution.py` and for a plan by `planning.py`. It opens no transaction by itself: it
gives the drafts and ledgers that its owner commits, so that an intent travels in one entry with the ticket's claim
and an outcome with the step's end. The order is fixed:

    attempt = Attempt(...)           renders the exact bytes and their salted hash
    commit attempt.build_intent()    with attempt.hold        before the socket is opened
    async for ... attempt.stream()   at most one request on the wire
    commit attempt.build_outcome()   with attempt.spent       whatever happened, exactly once
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from math import inf

import orjson
from msgspec import Struct
from msgspec.structs import replace

from app.core.contents import content_ref, trim_capacity
from app.core.message.chat import (
    ChosenToken,
    Decoded,
    End,
    Keepsake,
    Message,
    Piece,
    Text,
    TextDelta,
    ToolCall,
    ToolCallCollector,
    ToolDelta,
    Usage,
    append_piece,
    calls_that_count,
    fault_of_calls,
    token_size,
    token_to_json,
)
from app.core.message.response_format import Flaw, faults
from app.core.plan.arms import tier_of
from app.core.plan.workflow import Access
from app.core.pool import policy
from app.core.pool.breaker import Verdict
from app.core.pool.catalog import Amount, Catalog, Deadlines
from app.core.run.events import CallFinished, CallIntended, Event, Kind, PassedOver
from app.core.run.identifiers import NO_TRACE, Trace
from app.core.run.state import Call, RunState
from app.core.run.visibility import DisclosureFacts
from app.engine.context import EngineContext
from app.errors import (
    BatonError,
    Failure,
    WorkerError,
    WorkerMalformed,
    WorkerTimeout,
    WorkerTruncated,
)
from app.network.tracing import CallSpan
from app.providers.faults import VERDICTS, malformed_reply
from app.providers.protocol import Provider, Request

ADAPTER_BROKE = "adapter_broke"
"""The code of a call that ended with a bug of ours."""


class Purpose(Struct, frozen=True):
    """The facts from which a call's request can be composed again, and why this worker was called.

    `CallIntended` explains the fields; the `tenant`, and whether the run is a `shadow`, are for metrics, and the `run`
    is for the log.
    """

    template: str = ""
    usd_left: int | None = None
    seconds_left: int | None = None
    rejected: str = ""
    left_out: int = 0
    version: str = ""
    passed_over: PassedOver = ()
    despite: str = ""
    repairs: str = ""
    run: str = ""
    tenant: str = ""
    shadow: bool = False
    watched: bool = False
    budgets: tuple[str, ...] = ()
    wanted_tokens: int = 0
    disclosed: DisclosureFacts = DisclosureFacts()


CUT_SECONDS, CUT_SHARE, CUT_TOLERANCE_SECONDS = 0.25, 0.02, 0.01
"""A call whose text may be cut off at the end of the run's time ends so many seconds before it, and at most this share
of the time that is left, so that the answer is written in time; it has ended by that if it took this much less."""
SPARE_TOKENS, DECODED_CHARS = 256, 2_048
"""Bounds of tokens with log-probabilities: so many more than were asked for, and so many characters each."""
TOKEN_CHARS, SPARE_CHARS = 64, 65_536
"""A reply may have so many characters for each token of its bound, and so many more; a longer one is refused."""
TOOL_FAULT, FORM_FAULT = "tool_call_malformed", "answer_off_form"
"""Codes of errors that say nothing bad of the worker's health: the caller's tools or schema may be to blame as well."""


class Reply:
    """The worker's reply in one call: gathered piece by piece, bounded, and judged where it calls tools."""

    def __init__(self, request: Request, max_output: int, *, decodes: bool) -> None:
        """`max_output` is in tokens; `decodes` says whether tokens with log-probabilities are kept."""
        self._toolbox = request.toolbox
        self._form = request.form
        self._stops = request.sampling.stop
        self.flaw: Flaw | None = None
        """The fault of the answer's form, once it was judged."""
        self._who = f"{request.worker.name} at {request.worker.provider}"
        self._texts: list[str] = []
        self._has_answer = False
        """True once text has come that is not a refusal."""
        self._gathering = ToolCallCollector()
        self._calls: tuple[ToolCall, ...] | None = None
        """The tool calls that it ended with, computed when they are first asked for after the latest piece."""
        self._keepsake: Keepsake | None = None
        self._decodes = decodes
        self._decoded: list[Decoded] = []
        self._decoded_room = (max_output + SPARE_TOKENS) * DECODED_CHARS
        self._room = max_output * TOKEN_CHARS + SPARE_CHARS
        self.end: End | None = None
        """The stream's terminal marker, once it has come."""

    def take(self, pieces: list[Piece]) -> None:
        """Note what one read gave. Raises `WorkerMalformed` for more than the call's tokens can hold, and for a call of
        a tool that is not offered, before it is sent to anybody."""
        self._calls, fault = None, ""
        for piece in pieces:
            if isinstance(piece, TextDelta):
                append_piece(self._texts, piece.text)
                self._has_answer = self._has_answer or not piece.refusal
                self._room -= len(piece.text)
            elif isinstance(piece, ToolDelta):
                fault = fault or self._take_call(piece)
            elif isinstance(piece, Keepsake):
                self._keepsake = piece
            elif isinstance(piece, ChosenToken) and self._decodes:
                self._decoded.append(token_to_json(piece))
                self._decoded_room -= token_size(self._decoded[-1])
            elif isinstance(piece, End):
                self.end = piece
        self._raise_fault(fault)
        if self._room < 0 or self._decoded_room < 0:
            raise malformed_reply(self._who, "more text than its tokens can hold")

    def _take_call(self, piece: ToolDelta) -> str:
        """Note a tool call; returns what is wrong with it, or "". A faulty one is noted too: it was written, and is
        billed."""
        self._gathering.take(piece)
        self._room -= len(piece.name) + len(piece.arguments)
        if not piece.name:
            return ""
        return fault_of_calls([ToolCall("", piece.name)], self._toolbox)

    def cut(self) -> None:
        """End it where it is: the text that has come is all of it."""
        self.end = End("length", usage=None)

    @property
    def can_be_cut(self) -> bool:
        """Return True if what has come is text alone, and of an answer."""
        return bool(self._texts) and not self.refuses and not len(self._gathering)

    def judge(self) -> None:
        """Raise `WorkerMalformed` for tool calls that cannot be handed on, for missing ones, and for an answer that has
        not the form that was asked for. A reply that was cut off has no calls that count, and no form; nor has a
        refusal."""
        if self.finish not in ("stop", "tool_calls") or (self._refused and not self.calls):
            return
        self._raise_fault(fault_of_calls(self.calls, self._toolbox))
        if self._form is None or self.calls:
            return
        form_faults = faults(self._form, self.text)
        if form_faults:
            self.flaw = Flaw(self.text, form_faults)
            message = f"What {self._who} answered does not have the form that was asked for."
            raise WorkerMalformed(message, code=FORM_FAULT, failure=Failure("invalid_answer"))

    @property
    def _refused(self) -> bool:
        return self.end is not None and self.end.refused

    def _raise_fault(self, fault: str) -> None:
        """Raise `WorkerMalformed` for a fault of a tool call, if there is one."""
        if fault:
            message = f"The worker {self._who} made {fault}."
            raise WorkerMalformed(message, code=TOOL_FAULT, failure=Failure("invalid_answer"))

    @property
    def parallel(self) -> bool:
        """Return True if more than its first tool call counts."""
        return self._toolbox.parallel

    @property
    def began(self) -> bool:
        """Return True once anything has come that could be sent to a caller."""
        return bool(self._texts) or len(self._gathering) > 0

    @property
    def text(self) -> str:
        """Return the text that has come so far, of an answer or of a refusal."""
        return "".join(self._texts)

    @property
    def refuses(self) -> bool:
        """Return True if all of the text is a refusal, given instead of an answer."""
        return bool(self._texts) and not self._has_answer

    @property
    def written(self) -> str:
        """Return all that it has written, tool calls included."""
        written = [self.text]
        for call in self._gathering.calls:
            written += [call.name, call.arguments]
        return "".join(written)

    @property
    def finish(self) -> str:
        """Return the finish reason, or empty."""
        if self.end is None:
            return ""
        return self.end.finish

    @property
    def stop_sequence(self) -> int | None:
        """Return the place, among those of the request, of the stop sequence at which it ended, if the provider names
        one."""
        if self.end is None or self.end.stop_sequence not in self._stops:
            return None
        return self._stops.index(self.end.stop_sequence)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """Return the tool calls that it ended with."""
        if self.finish != "tool_calls":
            return ()
        if self._calls is None:
            self._calls = calls_that_count(self._gathering.calls, self._toolbox)
        return self._calls

    def message(self, ids: Sequence[str]) -> Message:
        """The whole reply as a turn of the conversation; a call that has no id of its own gets the caller's."""
        calls = self.calls
        own_ids = [call.id for call in calls]
        if not all(own_ids) or len(set(own_ids)) != len(own_ids):
            calls = tuple([replace(call, id=id_) for call, id_ in zip(calls, ids, strict=True)])
        parts: tuple[Text, ...] = ()
        if self._texts:
            parts = (Text(self.text),)
        keepsake = None
        if self._keepsake is not None:
            keepsake = self._keepsake.data
        return Message("assistant", parts, calls=calls, keepsake=keepsake)

    def tokens_since(self, since: int) -> tuple[Decoded, ...]:
        """The tokens with their log-probabilities that have come, from one on."""
        return tuple(self._decoded[since:])

    @property
    def logprobs(self) -> bytes:
        """Return all of them, as they are stored; empty if there are none."""
        if not self._decoded:
            return b""
        return orjson.dumps(self._decoded)


class Times(Struct):
    """The times at which a call began and its reply came, in seconds on the engine's monotonic clock."""

    began: float = 0.0
    last_piece_at: float = 0.0
    first: float = 0.0
    """From its beginning to the first words; 0 if none came."""
    seconds: float = 0.0
    """From its beginning to its end; 0 while it goes on."""

    @property
    def silence(self) -> float:
        """Return the seconds from the last piece to the end."""
        return self.began + self.seconds - self.last_piece_at


class PlannedCall(Struct, frozen=True):
    """A provider call that is to be made for `step` of a run, or for its plan where that is None.

    `number` counts the attempts of the step from 1; `purpose` is what else belongs in the intent; `extra` says that
    the choice of the worker counts as an extra attempt. `trace` is the span of which the call is a part.
    """

    call: str
    step: int | None
    request: Request
    access: Access
    number: int
    salt: bytes
    purpose: Purpose
    extra: bool = False
    trace: Trace = NO_TRACE


class CallTime(Struct, frozen=True):
    """The time that a call has.

    `deadline` is the run's, in seconds since 1970. `spare` says that something else could be done if the worker hangs.
    `tier_seconds` is how long runs of its tier and effort may take. With `cuts` the text that has come by the end of
    the run's time is the answer.
    """

    deadline: float
    spare: bool
    tier_seconds: float = inf
    cuts: bool = False


class Attempt:
    """One provider call for `step` of a run (None: for its plan)."""

    def __init__(
        self,
        context: EngineContext,
        catalog: Catalog,
        planned: PlannedCall,
        time: CallTime,
        provider: Provider | None = None,
    ) -> None:
        """The context has the provider's adapter (None: it is chosen now) and the clocks; nothing is sent before
        `stream`."""
        self.call = planned.call
        self.step = planned.step
        self._context = context
        self._planned = planned
        self._time = time
        self._request = planned.request
        self.worker = planned.request.worker
        """The worker that is called."""
        self._purpose = planned.purpose
        self._out_of_time = False
        self.has_used_all_time = False
        """True if it ended a little before the run's time is over, so that its text could have been the answer."""
        self._deadlines_given: Deadlines | None = None
        """None: nothing was sent."""
        self.catalog = catalog
        self._provider = provider or context.provider(self.worker.provider)
        self._endpoint: str = getattr(self._provider, "endpoint", "")  # empty where the provider has only one
        self._body = trim_capacity(self._provider.render(self._request))
        definition_bytes = policy.definition_bytes(self._request.toolbox, self._request.form)
        self._input_bound = policy.input_bound(self._request.messages, definition_bytes)
        self._max_output = self._request.sampling.max_tokens or self.worker.card.max_output
        self.hold = policy.worst_case(self.worker, self._input_bound, self._max_output)
        decodes = self._request.logprobs is not None and self.step is not None
        judged = self._request
        if self.step is None:  # a plan has a reader of its own, which reports every fault for the conductor to correct
            judged = replace(judged, form=None)
        self.reply = Reply(judged, self._max_output, decodes=decodes)
        self._times = Times()
        self.verdict: Verdict = "silent"
        """The verdict of the call on its worker."""
        self.outcome = "cancelled"
        """`unknown` is for others to say: it is what `outcome_of_lost_call` writes."""
        self.error: BatonError | None = None
        self._finished: CallFinished | None = None

    def least(self, floor: int) -> Amount:
        """The amount that it would hold if its output were cut to the floor."""
        return policy.worst_case(self.worker, self._input_bound, min(floor, self._max_output))

    def within(self, left: Amount, floor: int) -> "Attempt | None":
        """This attempt, with its output cut to what the amount that is left pays for, if that is needed; None if it
        does not pay for `floor` tokens. Only an attempt that is not made yet can be cut."""
        if left.covers(self.hold):
            return self
        fits = policy.affordable_output(self.worker, self._input_bound, self._max_output, floor=floor, left=left)
        if not fits:
            return None
        request = replace(self._request, sampling=replace(self._request.sampling, max_tokens=fits))
        purpose = replace(self._purpose, wanted_tokens=self._max_output)
        planned = replace(self._planned, request=request, purpose=purpose)
        return Attempt(self._context, self.catalog, planned, self._time, self._provider)

    @property
    def live(self) -> bool:
        """Return True if its text is streamed to the caller as it comes."""
        return self._request.live and not self._purpose.watched

    def build_intent(self) -> CallIntended:
        """The intent: worker, access list, hash of the exact bytes, what is reserved, and what cannot be honoured."""
        unsupported = sorted(self._provider.unsupported | self.worker.drops)
        ignored = tuple([name for name in unsupported if getattr(self._request.sampling, name) not in (None, ())])
        disclosed = self._purpose.disclosed
        return CallIntended(
            call=self.call,
            n=self.step,
            worker=self.worker.name,
            access=self._planned.access,
            usd_held=self.hold.usd,
            tokens_held=self.hold.tokens,
            attempt=self._planned.number,
            provider=self.worker.provider,
            model=self.worker.model,
            request=content_ref(self._planned.salt, self._body),
            bytes=len(self._body),
            max_tokens=self._max_output,
            catalog=self.catalog.digest,
            template=self._purpose.template,
            usd_left=self._purpose.usd_left,
            seconds_left=self._purpose.seconds_left,
            rejected=self._purpose.rejected,
            left_out=self._purpose.left_out,
            version=self._purpose.version,
            passed_over=self._purpose.passed_over,
            despite=self._purpose.despite,
            repairs=self._purpose.repairs,
            ignored=ignored,
            endpoint=self._endpoint,
            wanted_tokens=self._purpose.wanted_tokens,
            watched=self._purpose.watched,
            budgets=self._purpose.budgets,
            planned_by=disclosed.planned_by,
            region=self.worker.card.region or "",
            labels=disclosed.labels,
            unseen=disclosed.unseen,
            results=disclosed.results,
            origin=disclosed.origin,
        )

    @contextmanager
    def abandon_on_error(self) -> Iterator[None]:
        """Around the commit of the intent: if that fails there is no call, and the worker's breaker must know."""
        try:
            yield
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Note that the call is not made after all, for the worker's breaker."""
        self._context.health.cancel_call(self.worker, extra=self._planned.extra)

    async def stream(self) -> AsyncGenerator[list[Piece], None]:
        """Make the call and pass on its pieces. Raises the `WorkerError` that ended it, after noting it, also
        where that is a bug of ours."""
        times = self._times
        times.began = times.last_piece_at = self._context.monotonic()
        spec = self.catalog.providers[self.worker.provider]
        span = CallSpan(
            self._context.tracing,
            self._planned.trace,
            spec,
            self.worker,
            self._endpoint,
            sampling=self._request.sampling,
            live=self._request.live,
        )
        request = self._request
        if span.headers:
            request = replace(request, headers=span.headers)
        try:
            deadlines = self._deadlines()
            async for pieces in self._provider.stream(request, self._body, deadlines):
                times.last_piece_at = self._context.monotonic()
                began = self.reply.began
                self.reply.take(pieces)
                if self.reply.began and not began:
                    times.first = times.last_piece_at - times.began
                yield pieces
            if self.reply.end is None:
                raise WorkerTruncated()
            if self.step is not None:  # a plan is judged by its reader, so that it can be repaired with all reasons
                self.reply.judge()
            self.outcome = "ok"
        except BatonError as error:
            if self._is_cut(error):
                return
            self.error = error
            self.outcome = _outcome_of(error)
            raise
        except Exception as bug:
            self._note_bug(bug)
            raise self.error or asyncio.CancelledError from bug
        finally:
            times.seconds = self._context.monotonic() - times.began
            self._judge()
            if span.is_wanted:
                span.end(self.build_outcome(), self._planned.number, self.reply.end)

    def _is_cut(self, error: BatonError) -> bool:
        """End the reply with what has come, if the run's time is over and that may be the answer; return whether it
        is."""
        if not self._time.cuts or self._deadlines_given is None or not isinstance(error, WorkerTimeout):
            return False
        seconds, total = self._context.monotonic() - self._times.began, self._deadlines_given.total
        if seconds < total - CUT_TOLERANCE_SECONDS or total == self.worker.deadlines.total:
            return False
        self.has_used_all_time = True
        if not self.reply.can_be_cut:
            return False
        self.reply.cut()
        self.outcome, self._out_of_time = "ok", True
        return True

    def _note_bug(self, bug: Exception) -> None:
        """Note a bug of ours in the adapter. To the run it is a worker that cannot be understood, unless the call was
        being cancelled."""
        self._context.telemetry.log(
            logging.ERROR,
            "A provider's adapter failed because of a bug; the call counts as malformed, and the step goes on.",
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
        seconds_left = self._time.deadline - self._context.now()
        if seconds_left <= 0:
            raise WorkerTimeout()
        if self._time.cuts:
            seconds_left -= min(CUT_SECONDS, seconds_left * CUT_SHARE)
        self._deadlines_given = self.worker.deadlines.within(
            seconds_left, live=self._request.live, spare=self._time.spare, patience=self._patience
        )
        return self._deadlines_given

    @property
    def _patience(self) -> float:
        """Return the seconds of silence after which another worker is asked, if there is one."""
        if self._time.tier_seconds == inf:
            return inf
        writing_seconds = 0.0
        if not self.catalog.providers[self.worker.provider].streams:  # it is silent until its whole reply is written
            writing_seconds = self.worker.writing_seconds(self._max_output)
        return self.worker.deadlines.patience(self._time.tier_seconds, writing_seconds)

    def _judge(self) -> None:
        """Report the verdict of this call to the worker's breaker."""
        self.verdict = self._verdict()
        if self.outcome == "ok" or isinstance(self.error, WorkerTimeout):
            whole = self.outcome == "ok" and not self._out_of_time
            self._context.health.note_reply_time(self.worker, self._times.seconds, self._patience, whole=whole)
        self._context.health.note_own_call(
            self.call, self.worker, self.verdict, self._times.began, self._retry_after, extra=self._planned.extra
        )

    def _verdict(self) -> Verdict:
        """Return what the end of the call says of the worker's health; `silent` for nothing."""
        if self.outcome == "ok":
            return "good"
        if self._elsewhere:  # the worker has another endpoint, which is healthy
            return "silent"
        if self._has_code(TOOL_FAULT):
            return "silent"
        if self._has_code(FORM_FAULT):  # an answer came; that it lacks the form says nothing bad of its health
            return "good"
        if isinstance(self.error, WorkerTimeout) and not self._had_fair_time:
            return "silent"
        return VERDICTS.get(type(self.error), "silent")

    @property
    def _had_fair_time(self) -> bool:
        """Return True if the worker had as much time as its deadlines promise."""
        given = self._deadlines_given
        if given is None:
            return False
        return self.worker.deadlines.fair(given, self._times.seconds, self._times.silence, self._patience)

    def _has_code(self, code: str) -> bool:
        return self.error is not None and self.error.public_code == code

    @property
    def _elsewhere(self) -> bool:
        """Return True if only one of the worker's endpoints has failed, and another one takes the call."""
        return isinstance(self.error, WorkerError) and self.error.elsewhere

    @property
    def _retry_after(self) -> float | None:
        """Return the seconds for which the worker asked to be left alone; None where only one of its endpoints did."""
        if self.error is None or self._elsewhere:
            return None
        return self.error.retry_after

    @cached_property
    def output(self) -> str:
        """Return the content address of the text, or empty if there is none."""
        if not self.reply.text:
            return ""
        return content_ref(self._planned.salt, self.reply.text.encode())

    @cached_property
    def logprobs(self) -> str:
        """Return the content address of the tokens with their log-probabilities, or empty if there are none."""
        if not self.reply.logprobs:
            return ""
        return content_ref(self._planned.salt, self.reply.logprobs)

    @property
    def contents(self) -> tuple[tuple[str, bytes], ...]:
        """Return the (ref, body) pairs to store with the outcome."""
        contents = []
        if self.output:
            contents.append((self.output, self.reply.text.encode()))
        if self.logprobs:
            contents.append((self.logprobs, self.reply.logprobs))
        return tuple(contents)

    @property
    def usage(self) -> Usage:
        """Return the usage as reported; else estimated: the likely figure for a call that is complete or was cancelled,
        an upper bound for a broken one.

        A call that failed before it said anything is not billed, but one that was given up may well be, and one whose
        adapter broke for words that we never saw.
        """
        if self.reply.end is not None and self.reply.end.usage is not None:
            return self.reply.end.usage
        written = self.reply.written
        if self.reply.end is not None and not self._out_of_time:
            return policy.estimate_usage(self._request.messages, self._request.toolbox, written)
        if self._deadlines_given is None:
            return Usage()
        was_stopped = self._out_of_time or self.outcome == "cancelled"
        if was_stopped and self._request.live:
            return policy.usage_of_cancelled(self._request.messages, self._request.toolbox, self._max_output, written)
        adapter_broke = self._has_code(ADAPTER_BROKE)
        was_sent = self.failure is None or self.failure.reason != "connection"
        was_given_up = adapter_broke or (isinstance(self.error, WorkerTimeout) and was_sent)
        if self.outcome == "error" and not written and not was_given_up:
            return Usage()
        unreceived = 0
        if adapter_broke or not self._request.live:
            unreceived = self._max_output
        return policy.usage_of_broken(self._input_bound, self._max_output, written, unreceived)

    @property
    def spent(self) -> Amount:
        """Return the cost of the call, for settling."""
        finished = self.build_outcome()
        return Amount(finished.usd, finished.usage.total)

    def build_outcome(self) -> CallFinished:
        """The outcome, exactly one for each intent; it may be asked for again, where it could not be written."""
        if self._finished is None:
            self._finished = self._end()
        return self._finished

    def _end(self) -> CallFinished:
        usage = self.usage
        spent = Amount(self.worker.price.cost(usage), usage.total)
        error, failure = self.error, self.failure
        self._count(usage, spent)
        if failure is not None:
            self._report(failure)
        blamed: Verdict = "silent"
        if error is not None and self.verdict != "good":
            blamed = self.verdict
        finished = CallFinished(
            call=self.call,
            n=self.step,
            outcome=self.outcome,
            usage=usage,
            usd=spent.usd,
            seconds=round(self._times.seconds, 6),
            first=round(self._times.first, 6),
            finish=self.reply.finish,
            out_of_time=self._out_of_time,
            output=self.output,
            logprobs=self.logprobs,
            refused=self.reply.end is not None and self.reply.end.refused,
            error=error.public_code if error is not None else None,
            blamed=blamed,
            retry_after=self._retry_after,
        )
        if failure is None:
            return finished
        return replace(
            finished,
            reason=failure.reason,
            http_status=failure.status,
            provider_code=failure.code,
            request_id=failure.request_id,
            excerpt=failure.excerpt,
        )

    @property
    def failure(self) -> Failure | None:
        """Return the cause of its error; None for a call that succeeded or was cancelled."""
        if self.error is None:
            return None
        if isinstance(self.error, WorkerError):
            return self.error.failure
        return Failure("internal")

    def _report(self, failure: Failure) -> None:
        """Count the failure by its reason, and log it without the provider's words."""
        telemetry, name = self._context.telemetry, self.worker.name
        telemetry.count("baton_call_failures_total", name, failure.reason)
        if failure.reason == "internal":  # it was logged with its place
            return
        telemetry.log(
            logging.WARNING,
            "A provider call failed.",
            run=self._purpose.run,
            call=self.call,
            step=self.step,
            worker=name,
            reason=failure.reason,
            status=failure.status,
            code=failure.code,
            provider_request=failure.request_id,
            seconds=round(self._times.seconds, 3),
        )

    def _count(self, usage: Usage, spent: Amount) -> None:
        telemetry, name = self._context.telemetry, self.worker.name
        telemetry.count("baton_calls_total", name, self.outcome)
        if self._purpose.version:
            telemetry.count("baton_version_calls_total", name, self._purpose.version, self.outcome)
        telemetry.count("baton_tokens_total", name, "input", by=usage.input)
        telemetry.count("baton_tokens_total", name, "output", by=usage.output)
        telemetry.count("baton_cost_micro_usd_total", name, by=spent.usd)
        if self._purpose.shadow:
            telemetry.count("baton_shadow_cost_micro_usd_total", name, by=spent.usd)
        else:
            telemetry.spend(self._purpose.tenant, spent.usd)
        telemetry.observe("baton_call_seconds", self._times.seconds, name)


def _outcome_of(error: BatonError) -> str:
    """Return the outcome of a call that ended with this error."""
    if isinstance(error, WorkerTruncated):
        return "truncated"
    return "error"


def tier_seconds(catalog: Catalog, state: RunState) -> float:
    """The seconds that runs of this one's tier and effort may take, before a caller's budget shortens them."""
    admitted = state.admitted
    tier = tier_of(catalog, admitted.tier, admitted.model, admitted.served_by)
    limits = tier.efforts.get(state.admitted.effort) if tier is not None else None
    if limits is not None:
        return limits.seconds
    return state.admitted.limits.seconds


def outcome_of_lost_call(call: Call) -> CallFinished:
    """The outcome of an intent whose process was lost: possibly billed, so all that was held counts as spent."""
    usage = Usage(input=call.tokens_held, estimated=True)
    return CallFinished(call=call.id, n=call.step, outcome="unknown", usage=usage, usd=call.usd_held, seconds=0.0)


def outcomes_of_lost_calls(calls: Sequence[Call]) -> tuple[tuple[CallFinished, ...], Amount]:
    """The outcomes of calls whose process was lost, and what was held for them together."""
    outcomes = []
    held = Amount()
    for call in calls:
        outcomes.append(outcome_of_lost_call(call))
        held += Amount(call.usd_held, call.tokens_held)
    return tuple(outcomes), held


def read_open_calls(events: Sequence[Event], step: int | None) -> tuple[Call, ...]:
    """Return the calls of a step, or those for plans (None), that have no outcome, given the events of a run's calls.

    For a journal that this process cannot fold: only fields are read that every release writes.
    """
    calls: dict[str, Call] = {}
    for event in events:
        body = event.body
        if event.kind is Kind.CALL_FINISHED:
            calls.pop(body["call"], None)
        elif body["n"] == step:
            held = {"usd_held": body["usd_held"], "tokens_held": body["tokens_held"]}
            calls[body["call"]] = Call(body["call"], step, body["worker"], sees_user=True, **held)
    return tuple(calls.values())
