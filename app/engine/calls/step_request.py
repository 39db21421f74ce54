"""The request of a step, composed from what it may see, and the choice of the worker that gets it next.

This is the only way from the store into a provider request.

`view_of_step` reads what the step's access list grants, and its own transcript with the caller's tools; `View.request`
composes it for one worker. How to decode, and which tools there are, is what the caller said last: in its first
request, or in the one that brought tool results.

*Which worker* is called next: the planned one, once more after a passing fault, then the others in order. Workers that
are ejected, or have no retry budget left, are passed over (`worker_health.py`); the journal says why. After a failure
the same worker is waited for, with full-jitter backoff or as long as Retry-After says, but never beyond the run's time:
then the next one is called, or the step fails at once. If only workers are left whose providers limit the rate of
requests, the one that can be called first is waited for. A call that a rate limit refused is no attempt: a step may
make as many of those as it has attempts, and its attempts besides. A worker whose answer the run's money does not pay
for, even if it is cut to the floor of the tier, is passed over for a cheaper one.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any

import orjson
from msgspec import Struct
from msgspec.structs import replace

from app.core.message.chat import NO_TOOLS, Form, Message, Sampling, Task, Toolbox, message_from_json, task_from_json
from app.core.message.response_format import (
    Flaw,
    add_form_instructions,
    constrains_decoding,
    guarantees_form,
    has_keyword,
    json_mode_suffices,
)
from app.core.pool.breaker import NO_TIME, SHORTEST_ANSWER_SECONDS, Place
from app.core.pool.catalog import SILENT_SHARE, Limits, ProviderSpec, Worker
from app.core.pool.policy import UNPAID
from app.core.pool.wire_formats import FORMATS
from app.core.run.progress import gives_answer, parent_of
from app.core.run.state import RunState, StepState
from app.core.run.visibility import JSON_MODE, LOOSENED, NESTED, TEMPLATE, EarlierStep, ToolUse, compose, visible_steps
from app.engine.worker_health import Health, WorkerChoice
from app.errors import (
    BatonError,
    NotFound,
    RunFailed,
    RunOutOfQuota,
    RunOverBudget,
    RunTooLong,
    WorkerError,
    WorkerMisconfigured,
    WorkerRateLimited,
    WorkerRefused,
    WorkerTimeout,
)
from app.providers.protocol import Request
from app.store.protocol import ContentReads, Reader

BRIEF_SECONDS = 2.0
"""The longest time for which a worker may write unnoticed, where another one could take over from it."""
NOTHING: Mapping[str, bytes] = MappingProxyType({})
"""No contents."""


class View(Struct, frozen=True):
    """One step and what it may see. `task` has the caller's conversation; `latest_request` says how to answer now, and
    has no conversation."""

    step: StepState
    task: Task
    latest_request: Task
    subtask: str
    earlier_steps: tuple[EarlierStep, ...]
    tool_uses: tuple[ToolUse, ...]
    in_last_round: bool
    """True if its round is the run's last one, so that its answer is streamed as it comes; else another answer may take
    its place. False for the steps of a nested workflow, whose answer is sent with its end."""
    answers: bool
    """True if its output is the round's answer."""

    @property
    def form(self) -> Form | None:
        """Return the form that the step's answer is to have; None if its output is not the answer, or has no form."""
        if not self.answers:
            return None
        return self.latest_request.form

    def template(self, worker: Worker, *, provider: ProviderSpec, flaw: Flaw | None = None) -> str:
        """Return the name of what the messages of `request` are made with."""
        if self.step.inherits:
            return NESTED
        form = self.form
        if form is None:
            return TEMPLATE
        provider = provider.for_call(worker.model, with_tools=bool(self.toolbox.tools))
        undecoded = FORMATS[provider.format].undecoded
        if constrains_decoding(form, provider.structured) and has_keyword(form.schema, undecoded):
            return LOOSENED
        json_mode = flaw is None and provider.json_mode
        if json_mode_suffices(form, self.messages(worker.name), json_mode=json_mode):
            return JSON_MODE
        return TEMPLATE

    def messages(self, worker: str) -> tuple[Message, ...]:
        """Return exactly what this worker sees: what is granted, nothing else."""
        task = None
        if self.step.access.user or self.step.inherits:
            task = self.task
        return compose(task, self.subtask, self.earlier_steps, self.tool_uses, worker, opens=self.step.opens_workflow)

    @property
    def results(self) -> tuple[Message, ...]:
        """Return what came back for the step's calls of the caller's tools."""
        return tuple(chain.from_iterable(use.results for use in self.tool_uses))

    @property
    def toolbox(self) -> Toolbox:
        """Return the tools that the step may call. A choice that the caller demands binds the answering step alone."""
        toolbox = self.latest_request.toolbox
        if self.answers:
            return toolbox
        if not self.step.tools:
            return NO_TOOLS
        if toolbox.choice == "none":
            return toolbox
        return replace(toolbox, choice="auto")

    def request(
        self, worker: Worker, limits: Limits, *, streams: bool, provider: ProviderSpec, flaw: Flaw | None = None
    ) -> Request:
        """Return the call. What the caller says of its answer's form and length is for the answering step alone.

        `provider` is the worker's, `flaw` what was wrong with its answer before. An answer whose form has yet to be
        checked comes whole.
        """
        form = self.form
        messages = self.messages(worker.name)
        live = streams and self.answers and self.in_last_round
        if form is not None:
            provider = provider.for_call(worker.model, with_tools=bool(self.toolbox.tools))
            template = self.template(worker, provider=provider, flaw=flaw)
            structured = provider.structured and template != LOOSENED
            is_constrained = template == JSON_MODE or constrains_decoding(form, structured)
            messages = add_form_instructions(form, messages, constrained=is_constrained, flaw=flaw)
            live = live and guarantees_form(form, structured=structured, keeps_open=provider.keeps_open)
        logprobs = None
        if self.answers:
            logprobs = self.latest_request.logprobs
        return Request(
            worker,
            messages,
            self._sampling(worker, limits),
            form=form,
            logprobs=logprobs,
            toolbox=self.toolbox,
            live=live,
        )

    def _sampling(self, worker: Worker, limits: Limits) -> Sampling:
        """Return how the worker is to decode. Stop sequences and a shorter answer are for the answering step alone."""
        requested = self.latest_request.sampling
        most_tokens = min(limits.output_tokens, worker.card.max_output)
        if not self.answers:
            return Sampling(requested.temperature, requested.top_p, max_tokens=most_tokens, seed=requested.seed)
        if requested.max_tokens:
            most_tokens = min(requested.max_tokens, most_tokens)
        return replace(requested, max_tokens=most_tokens)


def is_long(request: Request, provider: ProviderSpec) -> bool:
    """Return True if a reply that nobody receives as it comes had better be asked for as a stream, where another worker
    could take over.

    A reply that comes whole says nothing until it is complete, so that a worker that hangs looks like one that
    writes. A stream costs half as much CPU again, so a reply that is written in `BRIEF_SECONDS` comes whole, and those
    of workers that have been quick as well.
    """
    if request.live or not provider.streams:
        return False
    tokens = request.sampling.max_tokens or request.worker.card.max_output
    return request.worker.writing_seconds(tokens) > BRIEF_SECONDS


async def messages_of_step(store: ContentReads, state: RunState, n: int) -> tuple[Message, ...]:
    """Return the exact messages of step `n` for its present worker. `NotFound` if content was erased."""
    view = await view_of_step(store, state, n)
    return view.messages(state.steps[n].worker)


async def view_of_step(store: ContentReads, state: RunState, n: int, at_hand: Mapping[str, bytes] = NOTHING) -> View:
    """Read what step `n` may see. `at_hand` are contents, by ref, that need not be read. `NotFound` if one was erased.

    Of what a nested step inherits, its task is made: the messages of the step that it is nested in.
    """
    step = state.steps[n]
    parent = parent_of(state, step)
    own = step.access
    if parent is not None and step.inherits:
        own = replace(own, steps=tuple([m for m in own.steps if m not in parent.access.steps]))
    earlier = [state.steps[m] for m in own.steps if state.steps[m].state == "done"]
    answered = [exchange for exchange in step.exchanges if exchange.results]
    wanted: set[tuple[str, Reader]] = {(state.admitted.task, _task), (step.subtask, _text)}
    if state.turn.request:
        wanted.add((state.turn.request, _task))
    for done in earlier:
        wanted |= {(done.subtask, _text), (done.output, _text)}
    for exchange in answered:
        wanted |= {(exchange.message, _message), (exchange.results, _messages)}
    records = await _read_records(store, state.run, wanted, at_hand)
    outputs = {}
    for done in earlier:
        outputs[done.n] = EarlierStep(done.n, records[done.subtask, _text], records[done.output, _text])
    tool_uses = []
    for exchange in answered:
        said, results = records[exchange.message, _message], records[exchange.results, _messages]
        tool_uses.append(ToolUse(exchange.worker, said, exchange.ids, results))
    task = records[state.admitted.task, _task]
    latest_request = task
    if state.turn.request:
        latest_request = records[state.turn.request, _task]
    if parent is not None and step.inherits:
        outer = await view_of_step(store, state, parent.n, at_hand)
        task = replace(task, messages=outer.messages(""))
    return View(
        step,
        task,
        latest_request,
        records[step.subtask, _text],
        visible_steps(own, outputs),
        tuple(tool_uses),
        in_last_round=state.is_last_round and parent is None,
        answers=gives_answer(state, step),
    )


async def task_of(store: ContentReads, run: str, ref: str, at_hand: Mapping[str, bytes] = NOTHING) -> Task:
    """Return a task by its ref; `at_hand` are contents that need not be read. `NotFound` if it was erased."""
    task: Task = (await _read_records(store, run, {(ref, _task)}, at_hand))[ref, _task]
    return task


async def bodies_of(
    store: ContentReads, run: str, refs: Sequence[str], at_hand: Mapping[str, bytes] = NOTHING
) -> Mapping[str, bytes]:
    """Return contents by ref; `at_hand` are some that need not be read. `NotFound` if one was erased."""
    found = await _read_records(store, run, {(ref, bytes) for ref in refs}, at_hand)
    return {ref: found[ref, bytes] for ref in refs}


def _text(body: bytes) -> str:
    return body.decode()


def _task(body: bytes) -> Task:
    return task_from_json(orjson.loads(body))


def _message(body: bytes) -> Message:
    return message_from_json(orjson.loads(body))


def _messages(body: bytes) -> tuple[Message, ...]:
    return tuple([message_from_json(message) for message in orjson.loads(body)])


async def _read_records(
    store: ContentReads, run: str, wanted: set[tuple[str, Reader]], at_hand: Mapping[str, bytes] = NOTHING
) -> Mapping[tuple[str, Reader], Any]:
    """Return what is read from contents, stored or at hand; the empty ref is the empty text. `NotFound` if one was
    erased."""
    records: dict[tuple[str, Reader], Any] = {("", _text): ""}
    for ref, read in wanted:
        if ref in at_hand:
            records[ref, read] = read(at_hand[ref])
    stored = wanted - records.keys()
    if stored:
        records |= await store.records(run, stored)
    if wanted - records.keys():
        raise NotFound("The content of this run was erased; its journal remains.", code="content_erased")
    return records


async def texts_of(store: ContentReads, run: str, refs: Iterable[str]) -> Mapping[str, str]:
    """Return texts by ref; the empty ref is the empty text. `NotFound` if one was erased."""
    found = await _read_records(store, run, {(ref, _text) for ref in refs})
    return {ref: text for (ref, _), text in found.items()}


BACKOFF_SECONDS, MOST_BACKOFF_SECONDS = 0.25, 8.0
"""The first retry waits a random time below the one, each later one below twice as much, up to the other."""
ONLY_WORKER_BACKOFF_SECONDS = 30.0
"""Time that is waited for the only worker there is, if it asks for them."""
WAIT_FOR_OTHERS_SECONDS, LOOK_SECONDS = 30.0, 0.2
"""Seconds to wait in all for what the first replacements find, and between two looks."""


class Candidates:
    """The workers that one step may still call."""

    def __init__(self, health: Health, workers: list[Worker], attempts: int, free: int) -> None:
        """`workers` in the order of preference; `attempts` are left to the step, and `free` calls that do not count as
        attempts if a rate limit refuses them."""
        self._health = health
        self._workers = workers
        self._attempts_left = attempts
        self._free_refusals = free
        self._tries: dict[str, int] = {}
        self._backoff_seconds = 0.0
        """The seconds to wait before the next call, because of the latest failure."""
        self._seconds_for_others = WAIT_FOR_OTHERS_SECONDS
        """The seconds that may still be waited for workers that are ejected now."""
        self._errors: list[BatonError | None] = []
        """The error of each attempt that failed."""
        self._set_aside: dict[str, tuple[Worker, float]] = {}
        """Workers that are called only once their rate limit is over, each with the seconds that the run will have left
        then."""
        self._unpaid: dict[str, Worker] = {}
        """Workers that are not called because the run's money does not pay for their answer."""
        self._rate_limited: dict[str, float] = {}
        """Each worker whose latest answer was a rate limit, with the same seconds."""

    @property
    def spare(self) -> bool:
        """Return True if another worker could take over from the current one."""
        return len(self._workers) > 1 and self._attempts_left > 1

    @property
    def is_untried(self) -> bool:
        """Return True before the first attempt of this turn has ended."""
        return not self._tries and not self._errors

    def can_replace(self, worker: Worker, seconds_left: float) -> bool:
        """Return True if another worker could take over from this one after its share of the seconds that the run has
        left, and answer in the rest of them."""
        if not self.spare:
            return False
        rest_seconds = seconds_left * (1 - SILENT_SHARE)
        for other in self._workers:
            if other.name != worker.name and self._health.least_answer_seconds(other) <= rest_seconds:
                return True
        return False

    @property
    def has_only_rate_limited(self) -> bool:
        """Return True if only workers are left whose rate limits have to be waited for."""
        return not self._workers and bool(self._set_aside) and self._attempts_left > 0

    def take_pause(self, seconds_left: float) -> float:
        """Return the seconds to wait before asking again; 0: `choose` now. Each pause is given once. `seconds_left` are
        the run's seconds."""
        backoff, self._backoff_seconds = self._backoff_seconds, 0.0
        if self.has_only_rate_limited:
            return self._wait_for_rate_limit(seconds_left)
        is_first_call = not self._tries  # which never lacks the retry budget
        if backoff or is_first_call or self._attempts_left <= 0 or self._seconds_for_others <= 0:
            return backoff
        if not self._health.is_worth_waiting(self._offers(), seconds_left):
            return 0.0
        seconds = min(LOOK_SECONDS, self._seconds_for_others)
        self._seconds_for_others -= seconds
        return seconds

    def choose(self, seconds_left: float) -> WorkerChoice:
        """Choose the worker to call now; none when all means are exhausted."""
        offers: list[tuple[Worker, Place]] = []
        if self._attempts_left > 0:
            offers = self._offers()
        choice = self._health.choose(offers, seconds_left)
        if not self._unpaid:
            return choice
        unpaid = tuple((name, UNPAID) for name in self._unpaid)
        return replace(choice, passed_over=(*unpaid, *choice.passed_over))

    def use_only(self, workers: Sequence[Worker]) -> None:
        """Call only these from now on, as they are here: the pool file was read again."""
        present = {worker.name: worker for worker in workers}
        self._workers = [present[worker.name] for worker in self._workers if worker.name in present]
        self._unpaid = {name: present[name] for name in self._unpaid if name in present}
        self._set_aside = {
            name: (present[name], left) for name, (_, left) in self._set_aside.items() if name in present
        }

    def leave_out_unpaid(self, worker: Worker) -> None:
        """Leave out a worker for whose answer the run's money does not suffice: a cheaper one is asked in its stead."""
        self._unpaid[worker.name] = worker
        self._workers = [other for other in self._workers if other is not worker]

    def _wait_for_rate_limit(self, seconds_left: float) -> float:
        """Return the seconds until the first rate limit is over, if that leaves time for an answer; its worker is
        called then. If none does, they are left out."""
        next_worker = None
        most_left = 0.0
        for worker, left_then in self._set_aside.values():
            if left_then > max(self._health.least_answer_seconds(worker), most_left):
                next_worker, most_left = worker, left_then
        if next_worker is None:
            self._set_aside = {}
            return 0.0
        del self._set_aside[next_worker.name]
        self._workers = [next_worker]
        return max(seconds_left - most_left, 0.0)

    def error(self, choice: WorkerChoice) -> str:
        """Return the code of the error with which the step fails when that choice is none.

        A conversation that is too long for a worker counts before the money that others lack: a shorter one helps both.
        """
        summary = _summary(self._errors)
        if self._unpaid and self._attempts_left > 0 and summary != RunTooLong.code:
            return RunOverBudget.code
        if choice.lacks_time:
            return NO_TIME
        return summary

    def retry_after(self, error: str, seconds_left: float) -> float | None:
        """Return the seconds until the first worker can be called again, if the step fails with that error because of
        rate limits; None if no provider said so. `seconds_left` are the run's seconds."""
        if error != WorkerRateLimited.code:
            return None
        if not self._rate_limited:
            return None
        most_left = max(self._rate_limited.values())
        return round(max(seconds_left - most_left, 0.0), 3)

    def note_failure(
        self, worker: Worker, error: BatonError | None, *, streamed: bool, jitter: float, seconds_left: float
    ) -> None:
        """Note a failed attempt; `streamed` says that the answer has begun to reach the caller, so that no other may
        follow."""
        if isinstance(error, WorkerRateLimited) and self._free_refusals > 0:
            self._free_refusals -= 1
        else:
            self._attempts_left -= 1
        if not _failed_elsewhere(error):  # else the worker has not failed, and needs no retry budget
            self._tries[worker.name] = self._tries.get(worker.name, 0) + 1
        self._errors.append(error)
        self._rate_limited.pop(worker.name, None)
        if isinstance(error, WorkerRateLimited) and error.retry_after is not None:
            self._rate_limited[worker.name] = seconds_left - error.retry_after
        wait = self._retry_wait(worker, error, jitter, seconds_left)
        if streamed:
            self._attempts_left = 0
        elif wait is None:
            self._workers = [other for other in self._workers if other is not worker]
            if worker.name in self._rate_limited:
                self._set_aside[worker.name] = worker, self._rate_limited[worker.name] - jitter * BACKOFF_SECONDS
        elif self._health.has_retry_budget(worker, "retry"):
            self._backoff_seconds = wait
        self._consider_unpaid()

    def note_empty_answer(self, worker: Worker) -> None:
        """Note an attempt whose answer is empty: another worker is asked in its stead."""
        self._attempts_left -= 1
        self._tries[worker.name] = self._tries.get(worker.name, 0) + 1
        self._workers = [other for other in self._workers if other is not worker]
        self._consider_unpaid()

    def _consider_unpaid(self) -> None:
        """Offer those again that the run's money did not pay for: what others held may be there by now. Not while there
        is nobody else but workers to wait for."""
        if self._workers or not self._set_aside:
            self._workers, self._unpaid = [*self._unpaid.values(), *self._workers], {}

    def _retry_wait(self, worker: Worker, error: BatonError | None, jitter: float, seconds_left: float) -> float | None:
        """Return the seconds to wait for the worker that has just failed; None if it is not called again."""
        is_only_one = len(self._workers) == 1 and not self._set_aside
        if _failed_elsewhere(error):
            return 0.0
        if error is None or not error.retryable or self._tries[worker.name] > 1:
            return None
        if isinstance(error, WorkerTimeout) and not is_only_one:  # it has had its share of the run's time
            return None
        doublings = sum(self._tries.values()) - 1
        backoff = jitter * min(BACKOFF_SECONDS * 2**doublings, MOST_BACKOFF_SECONDS)
        wait: float = max(error.retry_after or 0.0, backoff)
        longest_wait = MOST_BACKOFF_SECONDS
        if is_only_one:
            longest_wait = ONLY_WORKER_BACKOFF_SECONDS
        if wait > min(longest_wait, seconds_left - SHORTEST_ANSWER_SECONDS):
            return None
        return wait

    def _offers(self) -> list[tuple[Worker, Place]]:
        return [(worker, self._place(worker)) for worker in self._workers]

    def _place(self, worker: Worker) -> Place:
        if not self._tries:
            return "first"
        if worker.name in self._tries:
            return "retry"
        return "replacement"


def _failed_elsewhere(error: BatonError | None) -> bool:
    """Return True if only one endpoint of the worker has failed, and another one takes the call at once."""
    return isinstance(error, WorkerError) and error.elsewhere


def _summary(errors: Sequence[BatonError | None]) -> str:
    """Return the code of the error with which a step fails after these ones.

    A provider that failed counts before one that limits the rate of requests, because trying again may help; that one
    before a refusal, which others may not share; and a refusal before a worker that only an operator can put right.
    """
    if not errors:
        return RunFailed.code
    refused = [error for error in errors if isinstance(error, WorkerRefused)]
    limited = [error for error in errors if isinstance(error, WorkerRateLimited)]
    misconfigured = [error for error in errors if isinstance(error, WorkerMisconfigured)]
    failed = [error for error in errors if error not in (*refused, *limited, *misconfigured)]
    passing = failed or limited
    if passing:
        last = passing[-1]
        if last is None or not last.public_code:
            return WorkerError.code
        return last.public_code
    if any(error.failure.reason == "context_length" for error in refused):
        return RunTooLong.code
    if refused:
        return WorkerRefused.code
    if all(error.failure.reason == "quota" for error in misconfigured):
        return RunOutOfQuota.code
    return WorkerMisconfigured.code
