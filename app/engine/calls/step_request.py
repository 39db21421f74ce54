"""The request of a step, composed from what it may see, and the choice of the worker that gets it next.

This is the only way from the store into a provider request.

`look` reads what the step's access list grants, and its own transcript with the caller's tools; `View.request` composes
it for one worker. How to decode and which tools there are is what the caller said last: in its first request, or in the
one that brought tool results.

*Which worker* is called next: the planned one, once more after a passing fault, then the others in order. Workers that
are ejected, or have no retry budget left, are passed over (`worker_health.py`); the journal says why. After a failure
the same worker is waited for, with full-jitter backoff or as long as Retry-After says, but never beyond the run's time:
then the next one is called, or the step fails at once. If only workers are left whose providers limit the rate of
requests, the one that can be called first is waited for. A call that a rate limit refused is no attempt: a step may
make as many of those as it has attempts, and its attempts besides. A worker whose answer the run's money does not pay
for, even if it is cut to the floor of the tier, is passed over for a cheaper one.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import orjson

from app.core.message.chat import NO_TOOLS, Message, Sampling, Task, Toolbox, message_from_json, task_from_json
from app.core.message.response_format import Flaw, constrains, keeps, shown, suffices
from app.core.pool.breaker import NO_TIME, SHORTEST_ANSWER_SECONDS, Place
from app.core.pool.catalog import SPARED, Limits, ProviderSpec, Worker
from app.core.records import copy_with, record
from app.core.run.progress import gives_answer, parent_of
from app.core.run.state import RunState, StepState
from app.core.run.visibility import JSON_MODE, NESTED, TEMPLATE, EarlierStep, ToolUse, compose, visible_steps
from app.engine.worker_health import Health, WorkerChoice
from app.errors import (
    BatonError,
    NotFound,
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


@record(frozen=True, slots=True)
class View:
    """One step as it stands. `task` has the caller's conversation; `asked` is the latest request, without one."""

    step: StepState
    task: Task
    asked: Task
    subtask: str
    seen: tuple[EarlierStep, ...]
    used: tuple[ToolUse, ...]
    last: bool
    """True if its round is the run's last one, so that its answer is streamed as it comes; else another answer may take
    its place. The answer of a nested workflow is sent with its end."""
    speaks: bool
    """True if its output is the round's answer."""

    def template(self, worker: Worker, *, provider: ProviderSpec, flaw: Flaw | None = None) -> str:
        """Return the name of what the messages of `request` are made with."""
        if self.step.inherits:
            return NESTED
        form = self.asked.form if self.speaks else None
        if form is None or flaw is not None:
            return TEMPLATE
        bare = suffices(form, self.messages(worker.name), json_mode=provider.json_mode)
        return JSON_MODE if bare else TEMPLATE

    def messages(self, worker: str) -> tuple[Message, ...]:
        """Exactly what this worker sees: what is granted, nothing else."""
        task = self.task if self.step.access.user or self.step.inherits else None
        return compose(task, self.subtask, self.seen, self.used, worker, opens=self.step.opens_workflow)

    @property
    def toolbox(self) -> Toolbox:
        """Return the tools that the step may call. A choice that the caller demands binds the answering step alone."""
        box = self.asked.toolbox
        if self.speaks:
            return box
        if not self.step.tools:
            return NO_TOOLS
        return copy_with(box, choice="none" if box.choice == "none" else "auto")

    def request(
        self, worker: Worker, limits: Limits, *, streams: bool, provider: ProviderSpec, flaw: Flaw | None = None
    ) -> Request:
        """Return the call. What the caller says of its answer's form and length is for the answering step alone.

        `provider` is the worker's, `flaw` what was wrong with its answer before. An answer whose form has yet to be
        checked comes whole.
        """
        asked, answers = self.asked.sampling, self.speaks
        cap = min(limits.output_tokens, worker.card.max_output)
        sampling = Sampling(asked.temperature, asked.top_p, max_tokens=cap, seed=asked.seed)
        if answers:
            sampling = copy_with(asked, max_tokens=min(asked.max_tokens or cap, cap))
        form, messages = self.asked.form if answers else None, self.messages(worker.name)
        live = streams and answers and self.last
        if form is not None:
            structured, opened = provider.structured, provider.keeps_open
            bare = self.template(worker, provider=provider, flaw=flaw) == JSON_MODE
            messages = shown(form, messages, constrained=bare or constrains(form, structured), flaw=flaw)
            live = live and keeps(form, structured=structured, keeps_open=opened)
        return Request(
            worker,
            messages,
            sampling,
            form=form,
            logprobs=self.asked.logprobs if answers else None,
            toolbox=self.toolbox,
            live=live,
        )


def is_long(request: Request, provider: ProviderSpec) -> bool:
    """Return whether a reply that nobody receives as it comes had better be asked for as a stream, where another worker
    could take over.

    A reply that comes whole says nothing until it is complete, so that a worker that hangs looks like one that
    writes. A stream costs half as much CPU again, so a reply that is written in `BRIEF_SECONDS` comes whole, and those
    of workers that have been quick as well.
    """
    tokens = request.sampling.max_tokens or request.worker.card.max_output
    return not request.live and provider.streams and request.worker.writing_seconds(tokens) > BRIEF_SECONDS


async def see(store: ContentReads, state: RunState, n: int) -> tuple[Message, ...]:
    """Return the exact messages of step `n` for its present worker. `NotFound` if content was erased."""
    return (await look(store, state, n)).messages(state.steps[n].worker)


async def look(store: ContentReads, state: RunState, n: int, at_hand: Mapping[str, bytes] = NOTHING) -> View:
    """Read what step `n` may see. `at_hand` are contents, by ref, that need not be read. `NotFound` if one was erased.

    Of what a nested step inherits, its task is made: the messages of the step that it is nested in.
    """
    step = state.steps[n]
    parent = parent_of(state, step)
    inherited = parent.access.steps if parent is not None and step.inherits else ()
    own = step.access
    if inherited:
        own = copy_with(own, steps=tuple(m for m in own.steps if m not in inherited))
    earlier = [state.steps[m] for m in own.steps if state.steps[m].state == "done"]
    answered = [exchange for exchange in step.exchanges if exchange.results]
    wanted: set[tuple[str, Reader]] = {(ref, _task) for ref in (state.admitted.task, state.turn.request) if ref}
    wanted.add((step.subtask, _text))
    for needed in earlier:
        wanted |= {(needed.subtask, _text), (needed.output, _text)}
    for use in answered:
        wanted |= {(use.said, _message), (use.results, _messages)}
    found = await _records(store, state.run, wanted, at_hand)
    done = {step.n: EarlierStep(step.n, found[step.subtask, _text], found[step.output, _text]) for step in earlier}
    task = found[state.admitted.task, _task]
    asked = found[state.turn.request, _task] if state.turn.request else task
    used = []
    for use in answered:
        used.append(ToolUse(use.worker, found[use.said, _message], use.ids, found[use.results, _messages]))
    if parent is not None and step.inherits:
        task = copy_with(task, messages=(await look(store, state, parent.n, at_hand)).messages(""))
    last = state.is_last_round and parent is None
    return View(
        step,
        task,
        asked,
        found[step.subtask, _text],
        visible_steps(own, done),
        tuple(used),
        last,
        gives_answer(state, step),
    )


async def task_of(store: ContentReads, run: str, ref: str, at_hand: Mapping[str, bytes] = NOTHING) -> Task:
    """Return a task by its ref; `at_hand` are contents that need not be read. `NotFound` if it was erased."""
    task: Task = (await _records(store, run, {(ref, _task)}, at_hand))[ref, _task]
    return task


async def bodies_of(
    store: ContentReads, run: str, refs: Sequence[str], at_hand: Mapping[str, bytes] = NOTHING
) -> Mapping[str, bytes]:
    """Contents by ref; `at_hand` are some that need not be read. `NotFound` if one was erased."""
    found = await _records(store, run, {(ref, bytes) for ref in refs}, at_hand)
    return {ref: found[ref, bytes] for ref in refs}


def _text(body: bytes) -> str:
    return body.decode()


def _task(body: bytes) -> Task:
    return task_from_json(orjson.loads(body))


def _message(body: bytes) -> Message:
    return message_from_json(orjson.loads(body))


def _messages(body: bytes) -> tuple[Message, ...]:
    return tuple([message_from_json(message) for message in orjson.loads(body)])


async def _records(
    store: ContentReads, run: str, wanted: set[tuple[str, Reader]], at_hand: Mapping[str, bytes] = NOTHING
) -> Mapping[tuple[str, Reader], Any]:
    """Records that are read from contents, stored or at hand; the empty ref is the empty text. `NotFound` if one was
    erased."""
    found: dict[tuple[str, Reader], Any] = {("", _text): ""}
    found |= {(ref, read): read(at_hand[ref]) for ref, read in wanted if ref in at_hand}
    if stored := wanted - found.keys():
        found |= await store.records(run, stored)
    if wanted - found.keys():
        raise NotFound("The content of this run was erased; its journal remains.", code="content_erased")
    return found


async def texts_of(store: ContentReads, run: str, refs: Iterable[str]) -> Mapping[str, str]:
    """Texts by ref; the empty ref is the empty text. `NotFound` if one was erased."""
    found = await _records(store, run, {(ref, _text) for ref in refs})
    return {ref: text for (ref, _), text in found.items()}


BACKOFF_SECONDS, MOST_BACKOFF_SECONDS = 0.25, 8.0
"""The first retry waits a random time below the one, each later one below twice as much, up to the other."""
ONLY_WORKER_BACKOFF_SECONDS = 30.0
"""Time that is waited for the only worker there is, if it asks for them."""
UNPAID = "over_budget"
"""The reason for which a worker is passed over whose answer the run cannot pay, however short it is cut."""
WAIT_FOR_OTHERS_SECONDS, LOOK_SECONDS = 30.0, 0.2
"""Seconds to wait in all for what the first replacements find, and between two looks."""


class Candidates:
    """The workers that one step may still call."""

    def __init__(self, health: Health, workers: list[Worker], attempts: int, free: int) -> None:
        """`workers` in the order of preference; `attempts` are left to the step, and `free` calls that do not count as
        attempts if a rate limit refuses them."""
        self._health = health
        self._workers = workers
        self._left = attempts
        self._free = free
        self._tries: dict[str, int] = {}
        self._wait = 0.0
        self._wait_for_others = WAIT_FOR_OTHERS_SECONDS
        self._errors: list[BatonError | None] = []
        """The error of each attempt that failed."""
        self._limited: dict[str, tuple[Worker, float]] = {}
        """Workers that are not called because of a rate limit, each with the seconds that the run will have left when
        it can be called again."""
        self._unpaid: dict[str, Worker] = {}
        """Workers that are not called because the run's money does not pay for their answer."""
        self._rate_limited: dict[str, float] = {}
        """Each worker whose latest answer was a rate limit, with the same seconds."""

    @property
    def spare(self) -> bool:
        """Return True if another worker could take over from the current one."""
        return len(self._workers) > 1 and self._left > 1

    def can_replace(self, worker: Worker, seconds_left: float) -> bool:
        """Return True if another worker could take over from this one after its share of the seconds that the run has
        left, and answer in the rest of them."""
        rest = seconds_left * (1 - SPARED)
        others = [other for other in self._workers if other.name != worker.name]
        return self.spare and any(self._health.hopeless(other) <= rest for other in others)

    def pause(self, seconds_left: float) -> float:
        """Return the seconds to wait before asking again; 0: `choose` now. `seconds_left` are the run's seconds."""
        wait, self._wait = self._wait, 0.0
        if not self._workers and self._left > 0:
            return self._until_callable(seconds_left)
        # A first call never lacks the retry budget.
        again = bool(self._tries) and self._left > 0 and self._wait_for_others > 0
        if not wait and again and self._health.worth_waiting(self._offers(), seconds_left):
            wait = min(LOOK_SECONDS, self._wait_for_others)
            self._wait_for_others -= wait
        return wait

    def choose(self, seconds_left: float) -> WorkerChoice:
        """Choose the worker to call now; none when all means are exhausted."""
        choice = self._health.choose(self._offers() if self._left > 0 else [], seconds_left)
        if not self._unpaid:
            return choice
        unpaid = tuple((name, UNPAID) for name in self._unpaid)
        return copy_with(choice, passed_over=(*unpaid, *choice.passed_over))

    def unaffordable(self, worker: Worker) -> None:
        """Leave out a worker for whose answer the run's money does not suffice: a cheaper one is asked in its stead."""
        self._unpaid[worker.name] = worker
        self._workers = [other for other in self._workers if other is not worker]

    def _until_callable(self, seconds_left: float) -> float:
        """Return the seconds until the first rate limit is over, if that leaves time for an answer; its worker is
        called then."""
        fitting = [limited for limited in self._limited.values() if limited[1] > self._health.hopeless(limited[0])]
        if not fitting:
            return 0.0
        worker, then = max(fitting, key=lambda limited: limited[1])
        del self._limited[worker.name]
        self._workers = [worker]
        return max(seconds_left - then, 0.0)

    def error(self, choice: WorkerChoice) -> str:
        """Return the code of the error with which the step fails when that choice is none."""
        if self._unpaid and self._left > 0:
            return RunOverBudget.code
        if choice.hopeless:
            return NO_TIME
        return _summary(self._errors)

    def retry_after(self, error: str, seconds_left: float) -> float | None:
        """Return the seconds until the first worker can be called again, if the step fails with that error because of
        rate limits; None if no provider said so. `seconds_left` are the run's seconds."""
        if error != WorkerRateLimited.code:
            return None
        return min((round(max(seconds_left - then, 0.0), 3) for then in self._rate_limited.values()), default=None)

    def failed(
        self, worker: Worker, error: BatonError | None, *, streamed: bool, chance: float, seconds_left: float
    ) -> None:
        """Note a failed attempt; `streamed` says that the answer has begun to reach the caller, so that no other may
        follow."""
        if isinstance(error, WorkerRateLimited) and self._free > 0:
            self._free -= 1
        else:
            self._left -= 1
        self._tries[worker.name] = self._tries.get(worker.name, 0) + 1
        self._errors.append(error)
        self._rate_limited.pop(worker.name, None)
        if isinstance(error, WorkerRateLimited) and error.retry_after is not None:
            self._rate_limited[worker.name] = seconds_left - error.retry_after
        wait = self._patience(worker, error, chance, seconds_left)
        if streamed:
            self._workers, self._unpaid = [], {}
        elif wait is None:
            self._workers = [other for other in self._workers if other is not worker]
            if worker.name in self._rate_limited:
                self._limited[worker.name] = worker, self._rate_limited[worker.name] - chance * BACKOFF_SECONDS
        elif self._health.affords(worker, "retry"):
            self._wait = wait
        self._consider_unpaid()

    def answered_nothing(self, worker: Worker) -> None:
        """Note an attempt whose answer is empty: another worker is asked in its stead."""
        self._left -= 1
        self._tries[worker.name] = self._tries.get(worker.name, 0) + 1
        self._workers = [other for other in self._workers if other is not worker]
        self._consider_unpaid()

    def _consider_unpaid(self) -> None:
        """Offer those again that the run's money did not pay for: what others held may be there by now. Not while there
        is nobody else but workers to wait for."""
        if self._workers or not self._limited:
            self._workers, self._unpaid = [*self._unpaid.values(), *self._workers], {}

    def _patience(self, worker: Worker, error: BatonError | None, chance: float, seconds_left: float) -> float | None:
        """Return the seconds to wait for the worker that has just failed; None if it is not called again."""
        alone = len(self._workers) == 1 and not self._limited
        if isinstance(error, WorkerError) and error.elsewhere:  # another endpoint of it takes the call at once
            return 0.0
        if error is None or not error.retryable or self._tries[worker.name] > 1:
            return None
        if isinstance(error, WorkerTimeout) and not alone:  # it has had its share of the run's time
            return None
        backoff = chance * min(BACKOFF_SECONDS * 2 ** (sum(self._tries.values()) - 1), MOST_BACKOFF_SECONDS)
        wait: float = max(error.retry_after or 0.0, backoff)
        longest = ONLY_WORKER_BACKOFF_SECONDS if alone else MOST_BACKOFF_SECONDS
        if wait > min(longest, seconds_left - SHORTEST_ANSWER_SECONDS):
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


def _summary(errors: Sequence[BatonError | None]) -> str:
    """Return the code of the error with which a step fails after these ones.

    A provider that failed counts before one that limits the rate of requests, because trying again may help; that one
    before a refusal, which others may not share; and a refusal before a worker that only an operator can put right.
    """
    if not errors:
        return "run_failed"
    refused = [error for error in errors if isinstance(error, WorkerRefused)]
    limited = [error for error in errors if isinstance(error, WorkerRateLimited)]
    misconfigured = [error for error in errors if isinstance(error, WorkerMisconfigured)]
    failed = [error for error in errors if error not in (*refused, *limited, *misconfigured)]
    if failed or limited:
        last = (failed or limited)[-1]
        if last is None or not last.public_code:
            return "worker_failed"
        return last.public_code
    if any(error.failure.reason == "context_length" for error in refused):
        return RunTooLong.code
    if refused:
        return WorkerRefused.code
    if all(error.failure.reason == "quota" for error in misconfigured):
        return RunOutOfQuota.code
    return WorkerMisconfigured.code
