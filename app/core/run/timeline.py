"""The timeline of a run at an instant: spans on one axis, in seconds since the admission, nested in each other.

    run
      queue ........... from the admission until an engine plans
      round ........... one for each workflow of the run's own
        planning ...... a proposal, until it was accepted or rejected; its calls are attempts
        people ........ the wait for an approval of a plan
        step .......... from its queueing until it was settled; the steps of a nested workflow are in the step around it
          queue ....... until its first call, and after results of tools until the next one
          retry ....... from the end of a call until the next one
          attempt ..... one provider call
            first_word  until the provider's first word; the whole call if none came
            stream .... from the first word until the end
          tools ....... the wait for results of the caller's tools

Attempts have money and tokens; the other spans have those of the attempts in them, and phases of an attempt have none,
because a provider bills a call as a whole. A span that goes on has no end, and counts up to the instant.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from msgspec import Struct

from app.core.message.chat import Usage, sum_usages, usage_to_json
from app.core.pool.catalog import MILLION
from app.core.run.events import (
    TERMINAL,
    CallFinished,
    CallIntended,
    Event,
    Fact,
    PlanAccepted,
    PlanOpened,
    PlanRejected,
    PlanStep,
    RunApprovalExpired,
    RunApproved,
    RunAwaitingApproval,
    RunEnd,
    RunRefused,
    StepAwaitingTool,
    StepDone,
    StepFailed,
    StepQueued,
    StepSkipped,
    StepToolResults,
)
from app.core.run.instant import Instant, instant_to_json, round_seconds
from app.core.run.recipients import proposal_of_call

SpanKind = Literal[
    "run", "queue", "round", "planning", "people", "step", "retry", "attempt", "first_word", "stream", "tools"
]
WITHOUT_MONEY: Final = frozenset({"queue", "people", "retry", "first_word", "stream", "tools"})
"""The kinds of spans that have no money of their own: waits, and the phases of one call."""


class Span(Struct, frozen=True):
    """One stretch of time. `start`, `end` and `seconds` are in seconds; `end` is None while it goes on."""

    id: str
    kind: SpanKind
    parent: str | None
    """The span that it is in; None for the run itself."""
    depth: int
    """The number of spans around it."""
    start: float
    end: float | None
    seconds: float
    """Its length; up to the instant while it goes on."""
    round: int
    step: int | None = None
    proposal: int | None = None
    call: str = ""
    worker: str = ""
    state: str = ""
    """The outcome of a call, the state of a step, a plan or the run; empty for a wait."""
    error: str = ""
    usd: int = 0
    """Micro-dollars of the attempts in it."""
    usd_before: int = 0
    """Micro-dollars of the attempts that stand before it where areas are drawn by money."""
    usage: Usage = Usage()

    def to_json(self) -> dict[str, Any]:
        """Return the span in plain JSON values. Money is in dollars, and null where it is not known of the kind."""
        fields: dict[str, Any] = {
            "id": self.id,
            "kind": self.kind,
            "parent": self.parent,
            "depth": self.depth,
            "start": round_seconds(self.start),
            "end": round_seconds(self.end) if self.end is not None else None,
            "seconds": round_seconds(self.seconds),
            "round": self.round,
            "step": self.step,
            "proposal": self.proposal,
            "call": self.call or None,
            "worker": self.worker or None,
            "state": self.state or None,
            "error": self.error or None,
            "cost_usd": None,
            "cost_start_usd": None,
            "tokens": None,
        }
        if self.kind not in WITHOUT_MONEY:
            fields |= {"cost_usd": self.usd / MILLION, "cost_start_usd": self.usd_before / MILLION}
            fields["tokens"] = usage_to_json(self.usage)
        return fields


class Timeline(Struct, frozen=True):
    """The spans of a run at an instant, in the order of a tree: each is followed by those that are in it."""

    at: Instant
    spans: tuple[Span, ...]

    def totals(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the number, the seconds and the money of the spans of each kind. Spans that overlap count each by
        itself."""
        totals_by_kind: dict[str, dict[str, Any]] = {}
        for span in self.spans:
            total = totals_by_kind.setdefault(span.kind, {"count": 0, "seconds": 0.0, "usd": 0})
            total["count"] += 1
            total["seconds"] += span.seconds
            total["usd"] += span.usd
        for kind, total in totals_by_kind.items():
            usd = total.pop("usd")
            total["seconds"] = round_seconds(total["seconds"])
            total["cost_usd"] = usd / MILLION if kind not in WITHOUT_MONEY else None
        return totals_by_kind

    def to_json(self) -> dict[str, Any]:
        """Return the timeline in plain JSON values."""
        return {
            "object": "run.timeline",
            "run": self.at.state.run,
            "state": self.at.state.state,
            **instant_to_json(self.at),
            "cost_usd": self.spans[0].usd / MILLION,
            "spans": [span.to_json() for span in self.spans],
            "totals": self.totals(),
        }


def timeline(at: Instant) -> Timeline:
    """Return the timeline of a run at an instant."""
    reader = _SpanReader(at.admitted_at)
    for event in at.events:
        reader.take(event)
    return Timeline(at, tuple(_with_sums(reader.spans, at)))


@dataclass(slots=True)
class _OpenSpan:
    """A span that is being read; its fields are those of `Span`."""

    id: str
    kind: SpanKind
    parent: "_OpenSpan | None"
    start: float
    round: int = 1
    step: int | None = None
    proposal: int | None = None
    end: float | None = None
    call: str = ""
    worker: str = ""
    state: str = ""
    error: str = ""
    usd: int = 0
    usage: Usage = Usage()


class _SpanReader:
    """Reads events one after the other into spans."""

    def __init__(self, admitted_at: float) -> None:
        self.spans: list[_OpenSpan] = []
        self._admitted_at = admitted_at
        self._now = 0.0
        self._spans_by_id: dict[str, _OpenSpan] = {}
        """The spans of rounds, plans, steps and calls by their ids."""
        self._waits: dict[int, _OpenSpan] = {}
        """The wait of each step that waits."""
        self._call_ends: dict[int, float] = {}
        """When the latest call of each step ended."""
        self._planned_steps: dict[int, tuple[PlanStep, _OpenSpan]] = {}
        """Each planned step, with the span that it is in."""
        self._counts: dict[str, int] = {}
        self._run = self._open("run", "run", None)
        self._queue: _OpenSpan | None = self._open("queue", "queue", self._run)
        self._round = self._run
        self._approval_wait: _OpenSpan | None = None

    def take(self, event: Event) -> None:
        """Read the next event."""
        self._now = max(event.at - self._admitted_at, 0.0)
        fact = event.fact
        match fact:
            case PlanOpened() | PlanAccepted() | PlanRejected() | PlanStep():
                self._take_plan(fact)
            case CallIntended():
                self._take_intent(fact)
            case CallFinished():
                self._take_outcome(fact)
            case RunAwaitingApproval() | RunApproved() | RunRefused() | RunApprovalExpired():
                self._take_approval(fact)
            case RunEnd():
                self._end(fact)
            case _:
                self._take_step(fact)

    def _open(self, name: str, kind: SpanKind, parent: _OpenSpan | None, start: float | None = None) -> _OpenSpan:
        if start is None:
            start = self._now
        span = _OpenSpan(name, kind, parent, start)
        if parent is not None:
            span.round, span.step, span.proposal = parent.round, parent.step, parent.proposal
        self.spans.append(span)
        return span

    def _close(self, span: _OpenSpan | None, state: str = "", error: str = "") -> None:
        if span is not None and span.end is None:
            span.end = max(self._now, span.start)
            span.state, span.error = state or span.state, error or span.error

    # -- plans

    def _take_plan(self, fact: PlanOpened | PlanAccepted | PlanRejected | PlanStep) -> None:
        if isinstance(fact, PlanOpened):
            self._open_plan(fact)
        elif isinstance(fact, PlanStep):
            parent = self._spans_by_id[f"plan:{fact.proposal}"].parent
            self._planned_steps[fact.n] = fact, parent or self._run
        else:
            plan = self._spans_by_id[f"plan:{fact.proposal}"]
            if isinstance(fact, PlanRejected):
                self._close(plan, "rejected", "; ".join(fact.reasons))
            else:
                self._close(plan, "accepted")

    def _open_plan(self, fact: PlanOpened) -> None:
        self._close(self._queue)
        if fact.parent is None and f"round:{fact.round}" not in self._spans_by_id:
            if self._round is not self._run:
                self._close(self._round)
            self._round = self._spans_by_id[f"round:{fact.round}"] = self._open(
                f"round:{fact.round}", "round", self._run
            )
            self._round.round = fact.round
        parent = self._step_span(fact.parent) if fact.parent is not None else self._round
        plan = self._spans_by_id[f"plan:{fact.proposal}"] = self._open(f"plan:{fact.proposal}", "planning", parent)
        plan.proposal, plan.state = fact.proposal, "open"

    def _take_approval(self, fact: Fact) -> None:
        if isinstance(fact, RunAwaitingApproval):
            plan = self._spans_by_id.get(f"plan:{fact.proposal}")
            parent = self._run
            if plan is not None and plan.parent is not None:
                parent = plan.parent
            self._approval_wait = self._open(self._next_id("people"), "people", parent)
            self._approval_wait.proposal = fact.proposal
        else:
            self._close(self._approval_wait, fact.kind.value.removeprefix("run."))

    # -- steps

    def _take_step(self, fact: Fact) -> None:
        match fact:
            case StepQueued():
                step = self._step_span(fact.n)
                self._waits[fact.n] = self._open(self._next_id(f"{step.id}/queue"), "queue", step)
            case StepAwaitingTool():
                self._close_wait(fact.n)
                step = self._step_span(fact.n)
                step.state = "awaiting_tool"
                self._waits[fact.n] = self._open(self._next_id(f"{step.id}/tools"), "tools", step)
            case StepToolResults():
                self._close_wait(fact.n)
                step = self._step_span(fact.n)
                step.state = "running"
                self._waits[fact.n] = self._open(self._next_id(f"{step.id}/queue"), "queue", step)
            case StepDone():
                self._close_step(fact.n, "done")
            case StepFailed():
                self._close_step(fact.n, "failed", fact.error)
            case StepSkipped():
                self._close_step(fact.n, "skipped", fact.reason)
            case _:
                pass

    def _step_span(self, n: int) -> _OpenSpan:
        """Return the span of a step, which begins when it is first needed."""
        name = f"step:{n}"
        if name not in self._spans_by_id:
            fact, parent = self._planned_steps[n]
            step = self._spans_by_id[name] = self._open(name, "step", parent)
            step.step, step.proposal, step.worker, step.state = n, fact.proposal, fact.worker, "running"
        return self._spans_by_id[name]

    def _close_step(self, n: int, state: str, error: str = "") -> None:
        self._close_wait(n)
        if f"step:{n}" in self._spans_by_id or state == "done":
            self._close(self._step_span(n), state, error)

    def _close_wait(self, n: int) -> None:
        self._close(self._waits.pop(n, None))

    # -- calls

    def _take_intent(self, fact: CallIntended) -> None:
        if fact.n is None:
            # an embedding is asked for before its plan is opened
            parent = self._spans_by_id.get(f"plan:{proposal_of_call(fact)}", self._round)
        else:
            parent = self._step_span(fact.n)
            parent.worker = fact.worker
            self._end_wait_for_call(fact.n, parent)
        call = self._spans_by_id[fact.call] = self._open(f"call:{fact.call}", "attempt", parent)
        call.call, call.worker = fact.call, fact.worker

    def _end_wait_for_call(self, n: int, step: _OpenSpan) -> None:
        """End the wait of a step for its next call, or note the pause after the call before it."""
        if n in self._waits:
            self._close_wait(n)
        elif n in self._call_ends and self._call_ends[n] < self._now:
            pause = self._open(self._next_id(f"{step.id}/retry"), "retry", step, self._call_ends[n])
            self._close(pause)
        self._call_ends.pop(n, None)

    def _take_outcome(self, fact: CallFinished) -> None:
        call = self._spans_by_id[fact.call]
        call.usd, call.usage = fact.usd, fact.usage
        self._close(call, fact.outcome, fact.error or "")
        end = call.end or call.start
        words = min(call.start + fact.first, end) if fact.first else end
        self._add_phase(call, "first_word", call.start, words)
        if fact.first:
            self._add_phase(call, "stream", words, end)
        if fact.n is not None:
            self._call_ends[fact.n] = end

    def _add_phase(self, call: _OpenSpan, kind: SpanKind, start: float, end: float) -> None:
        phase = self._open(f"{call.id}/{kind}", kind, call, start)
        phase.call, phase.worker, phase.end = call.call, call.worker, end

    def _end(self, fact: RunEnd) -> None:
        """End all spans but calls that are in flight, which get their outcomes later."""
        for span in self.spans:
            if span.kind != "attempt":
                self._close(span)
        self._run.state, self._run.error = TERMINAL[fact.kind], fact.error

    def _next_id(self, name: str) -> str:
        """Return an id for one of several spans of the same name."""
        self._counts[name] = self._counts.get(name, -1) + 1
        return f"{name}:{self._counts[name]}"


def _with_sums(spans: Sequence[_OpenSpan], at: Instant) -> Iterator[Span]:
    """Yield the spans with the money and the tokens of the attempts in them, and with their places among each other."""
    parts_by_span: dict[str, list[_OpenSpan]] = {}
    for span in spans:
        if span.parent is not None:
            parts_by_span.setdefault(span.parent.id, []).append(span)
    for span in reversed(spans):  # a span comes after the one that it is in
        _cover(span)
        if span.kind not in ("attempt", *WITHOUT_MONEY):
            parts = parts_by_span.get(span.id, ())
            span.usd, span.usage = sum(part.usd for part in parts), sum_usages(part.usage for part in parts)
    before: dict[str, tuple[int, int]] = {}
    spent: dict[str, int] = {}
    for span in _tree(spans[0], parts_by_span):
        depth, offset = 0, 0
        if span.parent is not None:
            parent = span.parent.id
            depth = before[parent][0] + 1
            offset = before[parent][1] + spent.get(parent, 0)
            spent[parent] = spent.get(parent, 0) + span.usd
        before[span.id] = depth, offset
        yield _span(span, at, depth, offset)


def _tree(span: _OpenSpan, parts_by_span: Mapping[str, Sequence[_OpenSpan]]) -> Iterator[_OpenSpan]:
    """Yield a span and all that are in it, each behind the one that it is in, and the earliest first."""
    yield span
    for part in parts_by_span.get(span.id, ()):
        yield from _tree(part, parts_by_span)


def _cover(span: _OpenSpan) -> None:
    """Let the span around this one last as long as it does; but a call may have its outcome after the end of all."""
    parent = span.parent
    if parent is None or parent.end is None or span.kind == "attempt" or parent.kind == "attempt":
        return
    if span.end is not None:
        parent.end = max(parent.end, span.end)


def _span(span: _OpenSpan, at: Instant, depth: int, offset: int) -> Span:
    end = span.end if span.end is not None else max(at.seconds, span.start)
    state = at.state.state if span.kind == "run" and not span.state else span.state
    return Span(
        id=span.id,
        kind=span.kind,
        parent=span.parent.id if span.parent is not None else None,
        depth=depth,
        start=span.start,
        end=span.end,
        seconds=end - span.start,
        round=span.round,
        step=span.step,
        proposal=span.proposal,
        call=span.call,
        worker=span.worker,
        state=state,
        error=span.error,
        usd=span.usd,
        usd_before=offset,
        usage=span.usage,
    )
