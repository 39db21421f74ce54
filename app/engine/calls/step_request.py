"""The request of a step, composed from what it may see: the only way from the store into a provider request.

`look` reads what the step's access list grants, and its own transcript with the caller's tools; `View.request` composes
it for one worker. How to decode and which tools there are is what the caller said last: in its first request, or in the
one that brought tool results.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import orjson

from app.core.message.chat import NO_TOOLS, Message, Sampling, Task, Toolbox, message_from_json, task_from_json
from app.core.message.response_format import Flaw, constrains, keeps, shown, suffices
from app.core.pool.catalog import Limits, ProviderSpec, Worker
from app.core.records import changed, record
from app.core.run.progress import parent_of, speaks
from app.core.run.state import RunState, StepState
from app.core.run.visibility import JSON_MODE, NESTED, TEMPLATE, EarlierStep, ToolUse, compose, granted
from app.errors import NotFound
from app.providers.protocol import Request
from app.store.protocol import ContentReads, Reader

BRIEF_SECONDS = 2.0
"""The longest time for which a worker may write unnoticed, where another one could take over from it."""
NOTHING: Mapping[str, bytes] = MappingProxyType({})
"""No fresh content."""


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
        return compose(task, self.subtask, self.seen, self.used, worker, opens=self.step.opens)

    @property
    def toolbox(self) -> Toolbox:
        """The tools that the step may call. A choice that the caller demands binds the answering step alone."""
        box = self.asked.toolbox
        if self.speaks:
            return box
        if not self.step.tools:
            return NO_TOOLS
        return changed(box, choice="none" if box.choice == "none" else "auto")

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
            sampling = changed(asked, max_tokens=min(asked.max_tokens or cap, cap))
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


async def look(store: ContentReads, state: RunState, n: int, fresh: Mapping[str, bytes] = NOTHING) -> View:
    """Read what step `n` may see; `fresh` is content that is yet to be stored. `NotFound` if content was erased.

    Of what a nested step inherits, its task is made: the messages of the step that it is nested in.
    """
    step = state.steps[n]
    parent = parent_of(state, step)
    inherited = parent.access.steps if parent is not None and step.inherits else ()
    own = step.access
    if inherited:
        own = changed(own, steps=tuple(m for m in own.steps if m not in inherited))
    earlier = [state.steps[m] for m in own.steps if state.steps[m].state == "done"]
    answered = [exchange for exchange in step.exchanges if exchange.results]
    wanted: set[tuple[str, Reader]] = {(ref, _task) for ref in (state.admitted.task, state.turn.request) if ref}
    wanted.add((step.subtask, _text))
    for needed in earlier:
        wanted |= {(needed.subtask, _text), (needed.output, _text)}
    for use in answered:
        wanted |= {(use.said, _message), (use.results, _messages)}
    found = await _records(store, state.run, wanted, fresh)
    done = {step.n: EarlierStep(step.n, found[step.subtask, _text], found[step.output, _text]) for step in earlier}
    task = found[state.admitted.task, _task]
    asked = found[state.turn.request, _task] if state.turn.request else task
    used = tuple(
        [ToolUse(use.worker, found[use.said, _message], use.ids, found[use.results, _messages]) for use in answered]
    )
    if parent is not None and step.inherits:
        task = changed(task, messages=(await look(store, state, parent.n, fresh)).messages(""))
    last = state.is_last_round and parent is None
    return View(step, task, asked, found[step.subtask, _text], granted(own, done), used, last, speaks(state, step))


async def task_of(store: ContentReads, run: str, ref: str, fresh: Mapping[str, bytes] = NOTHING) -> Task:
    """Return a task by its ref; `fresh` are contents that are at hand. `NotFound` if it was erased."""
    task: Task = (await _records(store, run, {(ref, _task)}, fresh))[ref, _task]
    return task


async def bodies_of(
    store: ContentReads, run: str, refs: Sequence[str], fresh: Mapping[str, bytes] = NOTHING
) -> Mapping[str, bytes]:
    """ContentReads by ref; `fresh` are some that are at hand. `NotFound` if one was erased."""
    found = await _records(store, run, {(ref, bytes) for ref in refs}, fresh)
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
    store: ContentReads, run: str, wanted: set[tuple[str, Reader]], fresh: Mapping[str, bytes] = NOTHING
) -> Mapping[tuple[str, Reader], Any]:
    """Records that are read from contents, stored or fresh; the empty ref is the empty text. `NotFound` if one was
    erased."""
    found: dict[tuple[str, Reader], Any] = {("", _text): ""}
    found |= {(ref, read): read(fresh[ref]) for ref, read in wanted if ref in fresh}
    if stored := wanted - found.keys():
        found |= await store.records(run, stored)
    if wanted - found.keys():
        raise NotFound("The content of this run was erased; its journal remains.", code="content_erased")
    return found


async def texts_of(store: ContentReads, run: str, refs: Iterable[str]) -> Mapping[str, str]:
    """Texts by ref; the empty ref is the empty text. `NotFound` if one was erased."""
    found = await _records(store, run, {(ref, _text) for ref in refs})
    return {ref: text for (ref, _), text in found.items()}
