"""A run at one instant: the prefix of its journal up to then, and the state that this prefix stands for.

An instant is given as the number of an event, or as seconds since the admission, or it is the present. Nothing is
estimated: what is shown at an instant is the fold of all events that were committed by then, and of no other.
"""

from collections.abc import Sequence
from typing import Any, Final

from msgspec import Struct

from app.core.message.chat import sum_usages, usage_to_json
from app.core.pool.catalog import MILLION
from app.core.run.events import TERMINAL, Event
from app.core.run.fold import fold
from app.core.run.state import Call, Proposal, RunState, StepState

DIGITS: Final = 6
"""Decimal places of seconds."""
TOLERANCE_SECONDS: Final = 2e-6
"""Seconds by which an event may be later than an instant that was rounded to `DIGITS` places."""


class Instant(Struct, frozen=True):
    """A run at one instant. `now` is that instant in seconds since 1970."""

    events: tuple[Event, ...]
    """The events up to the instant, at least the admission."""
    state: RunState
    now: float
    last_seq: int
    """The number of the latest event of the whole journal, which may be later than the instant."""
    length: float
    """Seconds from the admission to the run's end, or to the present while it goes on."""

    @property
    def admitted_at(self) -> float:
        """Return the time of the admission, in seconds since 1970."""
        return self.events[0].at

    @property
    def seconds(self) -> float:
        """Return the seconds since the admission."""
        return max(self.now - self.admitted_at, 0.0)

    @property
    def is_latest(self) -> bool:
        """Return True if nothing has been committed since."""
        return self.state.seq == self.last_seq


def instant(
    events: tuple[Event, ...], present: float, *, seq: int | None = None, seconds: float | None = None
) -> Instant:
    """Return the run of this journal after its event `seq`, or `seconds` after its admission, or at present.

    Raises ValueError if the journal has no event of that number.
    """
    if seq is not None and not 1 <= seq <= len(events):
        raise ValueError(f"the journal has {len(events)} events")
    admitted_at, last = events[0].at, len(events)
    end = now = _end(events, present)
    if seq is not None:
        events = events[:seq]
        now = max(event.at for event in events)
    elif seconds is not None:
        now = min(admitted_at + seconds, end)
        events = events[: _until(events, now)]
    return Instant(events, fold(events), max(now, admitted_at), last, max(end - admitted_at, 0.0))


def _end(events: Sequence[Event], present: float) -> float:
    """Return the end of the time axis: that of the latest event once the run has ended, else the present."""
    latest = max(event.at for event in events)
    if any(event.kind in TERMINAL for event in reversed(events)):
        return latest
    return max(latest, present)


def _until(events: Sequence[Event], now: float) -> int:
    """Return the number of events that were committed by then. Clocks of processes differ a little: an event counts
    once all before it count."""
    for place, event in enumerate(events):
        if place and event.at > now + TOLERANCE_SECONDS:
            return place
    return len(events)


def round_seconds(seconds: float) -> float:
    """Return seconds to the microsecond, as the JSON has them; never below 0."""
    return round(max(seconds, 0.0), DIGITS)


# -- the state as JSON


def snapshot(at: Instant) -> dict[str, Any]:
    """Return the state of the run at the instant in plain JSON values, without any text. Money is in dollars."""
    state = at.state
    planned = {step.n for step in state.planned_steps}
    calls: dict[int | None, list[Call]] = {}
    for call in state.calls.values():
        calls.setdefault(call.step, []).append(call)
    return {
        "object": "run.state",
        "run": state.run,
        **instant_to_json(at),
        "event": at.events[-1].kind.value,
        "state": state.state,
        "turn": state.turn.number,
        "deadline": state.turn.deadline,
        "rounds": state.round_count,
        "topology": state.topology or None,
        "degraded": state.degraded,
        "cancel_asked": state.cancel_asked,
        "waits": _waits(state),
        "cost_usd": state.usd / MILLION,
        "held_usd": sum(call.usd_held for call in state.open_calls) / MILLION,
        "usage": usage_to_json(sum_usages(call.usage for call in state.calls.values())),
        "proposals": [_proposal(state, proposal) for proposal in state.all_proposals],
        "planning": [_call(call) for call in calls.get(None, ())],
        "steps": [_step(step, calls.get(step.n, []), replaced=step.n not in planned) for step in state.steps.values()],
        "answer_step": state.end.step if state.end is not None else None,
        "error": (state.end.error or None) if state.end is not None else None,
    }


def instant_to_json(at: Instant) -> dict[str, Any]:
    """Return the place of an instant in its run, as each view of a run begins."""
    return {
        "seq": at.state.seq,
        "last_seq": at.last_seq,
        "at": at.now,
        "seconds": round_seconds(at.seconds),
        "length_seconds": round_seconds(at.length),
    }


def _waits(state: RunState) -> dict[str, Any] | None:
    """Return the kind of thing that the run waits for, and until when; None if it waits for nothing."""
    if state.state == "awaiting_tool":
        return {"kind": "tools", "until": state.turn.until}
    if state.state == "awaiting_approval" and state.approval_question is not None:
        return {"kind": "approval", "until": state.approval_question.until}
    return None


def _proposal(state: RunState, proposal: Proposal) -> dict[str, Any]:
    return {
        "number": proposal.number,
        "round": proposal.round,
        "parent": proposal.parent,
        "mode": proposal.mode,
        "conductor": proposal.conductor,
        "state": proposal.state,
        "outage": proposal.outage,
        "reasons": list(proposal.reasons),
        "topology": proposal.topology or None,
        "steps": [step.n for step in state.steps_of(proposal)],
    }


def _step(step: StepState, calls: Sequence[Call], *, replaced: bool) -> dict[str, Any]:
    return {
        "n": step.n,
        "proposal": step.proposal,
        "worker": step.worker,
        "state": step.state,
        "replaced": replaced,
        "error": step.error or None,
        "chars": step.chars,
        "finish": step.finish or None,
        "tool_calls": sum(len(exchange.ids) for exchange in step.exchanges),
        "cost_usd": sum(call.usd for call in calls) / MILLION,
        "usage": usage_to_json(sum_usages(call.usage for call in calls)),
        "calls": [_call(call) for call in calls],
    }


def _call(call: Call) -> dict[str, Any]:
    return {
        "id": call.id,
        "worker": call.worker,
        "outcome": call.outcome,
        "cost_usd": call.usd / MILLION,
        "held_usd": call.usd_held / MILLION,
        "seconds": round_seconds(call.seconds),
    }
