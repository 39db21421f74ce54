"""The bodies of the events that a driver writes; `progress.py` reads them. Calls' bodies are made in `attempt.py`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from app.core.message.chat import usage_to_json
from app.core.plan.workflow import Step, topology
from app.core.pool.catalog import Limits
from app.core.run.bill import bill
from app.core.run.commands import Await, Conclude, Finish, Propose, Skip
from app.core.run.events import Draft, Kind
from app.core.run.nesting import granted
from app.core.run.state import OnDisconnect, RunState, StepState, Turn


def admitted(
    *,
    task: str,
    tier: str,
    model: str,
    effort: str,
    limits: Limits,
    deadline: float,
    pool: Sequence[str],
    excluded: Mapping[str, str],
    labels: Iterable[str],
    conductor: str,
    catalog: str,
    rehearsal: bool,
    streams: bool,
    preview: bool,
    ignored: Sequence[str],
    on_disconnect: OnDisconnect,
    wire: Mapping[str, Any],
    explore: bool = True,
) -> Draft:
    """`run.admitted`: the task by its ref, and everything that bounds the run, pinned as it was at this moment."""
    body = {
        "task": task,
        "tier": tier,
        "model": model,
        "effort": effort,
        "limits": {name: getattr(limits, name) for name in Limits.__slots__},
        "deadline": deadline,
        "pool": list(pool),
        "excluded": dict(excluded),
        "labels": sorted(labels),
        "conductor": conductor,
        "catalog": catalog,
        "rehearsal": rehearsal,
        "streams": streams,
        "preview": preview,
        "ignored": list(ignored),
        "on_disconnect": on_disconnect,
        "wire": dict(wire),
        "explore": explore,
    }
    return Draft(Kind.ADMITTED, body)


def opened(
    command: Propose, conductor: str, order: Sequence[str], instant: bool, decision: Mapping[str, Any] | None = None
) -> Draft:
    """`plan.opened`: who is asked, and the workers in the order in which they are shown; of a selector its decision."""
    body: dict[str, Any] = {
        "proposal": command.number,
        "base": command.base,
        "mode": command.mode,
        "round": command.round,
        "conductor": conductor,
        "order": list(order),
        "instant": instant,
    }
    if decision is not None:
        body["decision"] = dict(decision)
    if command.parent is not None:
        body |= {"parent": command.parent, "room": command.room}
    return Draft(Kind.PLAN_OPENED, body)


def planned(
    proposal: int,
    base: int,
    place: int,
    step: Step,
    subtask: str,
    previous: int | None = None,
    parent: StepState | None = None,
) -> Draft:
    """`plan.step`: one step with its access list in the run's own numbers; `subtask` is its text's ref, `previous` the
    step that gave the answer of the round before, `parent` the one that it is nested in."""
    access = granted(step.access, parent, base) if parent is not None else step.access.shifted(base, previous)
    body: dict[str, Any] = {
        "proposal": proposal,
        "n": base + place,
        "worker": step.worker,
        "subtask": subtask,
        "access": access.as_list(),
        "answers": step.answers,
    }
    if step.probability is not None:
        body["probability"] = step.probability
    if step.tools:
        body["tools"] = True
    if parent is not None:
        body |= {"parent": parent.n, "inherits": step.access.user}
    return Draft(Kind.PLAN_STEP, body)


def accepted(proposal: int, call: str, inputs: Sequence[Sequence[int]]) -> Draft:
    """`plan.accepted`: `call` is the planning call whose text this plan is, or empty; `inputs` count from 0. The empty
    plan has no shape."""
    shape = topology(inputs) if inputs else ""
    body = {"proposal": proposal, "call": call, "steps": len(inputs), "topology": shape}
    return Draft(Kind.PLAN_ACCEPTED, body)


def rejected(proposal: int, call: str, reasons: Sequence[str], outage: bool) -> Draft:
    """`plan.rejected`: all reasons. `outage` says that the conductor failed, not that it planned badly."""
    body = {"proposal": proposal, "call": call, "reasons": list(reasons)[:50], "outage": outage}
    return Draft(Kind.PLAN_REJECTED, body)


def skipped(steps: Iterable[StepState], reason: str) -> tuple[Draft, ...]:
    """`step.skipped` for those of the steps that are not settled."""
    return tuple(Draft(Kind.STEP_SKIPPED, {"n": step.n, "reason": reason}) for step in steps if not step.settled)


def settled(state: RunState, command: Skip | Conclude) -> tuple[Draft, ...]:
    """What a driver says of a step by itself: that it is skipped, or what has become of it with what is nested in it.
    An answer is told in the words of the step that gave it."""
    if isinstance(command, Skip):
        return skipped([state.steps[command.step]], command.reason)
    if command.answer is None:
        return (Draft(Kind.STEP_FAILED, {"n": command.step, "error": command.error or "run_failed"}),)
    said = command.answer.step
    body: dict[str, Any] = {name: getattr(said, name) for name in ("call", "output", "chars", "finish")}
    body |= {"n": command.step, "from": said.n} | ({"logprobs": said.logprobs} if said.logprobs else {})
    return (Draft(Kind.STEP_DONE, body | ({"refusal": True} if said.refusal else {})),)


def tool_calls(n: int, call: str, said: str, chars: int, calls: Sequence[tuple[str, str]]) -> Draft:
    """`step.awaiting_tool`: `said` is the ref of the worker's message, whose text has `chars` characters; `calls` are
    the caller's ids and the names."""
    named = [{"id": id_, "name": name} for id_, name in calls]
    return Draft(Kind.STEP_AWAITING, {"n": n, "call": call, "said": said, "chars": chars, "calls": named})


def awaiting(state: RunState, command: Await, until: float) -> Draft:
    """`run.awaiting_tool`: the end of a turn, what it used, and when the wait for results is over."""
    split = bill(replace(state, state="awaiting_tool"))
    body = {
        "turn": state.turn.number,
        "steps": list(command.steps),
        "until": until,
        "usd": split.turn_usd,
        "usage": usage_to_json(split.turn),
        "visible": usage_to_json(split.visible),
    }
    return Draft(Kind.AWAITING, body)


def resumed(turn: Turn, once: str) -> Draft:
    """`run.resumed`: the next turn as its request wants it; `once` is the id of the claim that the request makes, or
    empty."""
    body = {
        "turn": turn.number,
        "deadline": turn.deadline,
        "streams": turn.streams,
        "request": turn.request,
        "at": turn.at,
        "on_disconnect": turn.on_disconnect,
        "wire": dict(turn.wire),
        "once": once,
    }
    return Draft(Kind.RESUMED, body)


def tool_results(n: int, results: str, ids: Sequence[str]) -> Draft:
    """`step.tool_results`: what came back for a step, by its ref, and the calls that it answers."""
    return Draft(Kind.STEP_RESULTS, {"n": n, "results": results, "ids": list(ids)})


def ended(state: RunState, command: Finish) -> Draft:
    """The terminal event: which step answered, by the ref of its text, and what the run used."""
    answered = state.steps[command.step] if command.step is not None else None
    told = {"step": command.step} | ({"stopped": command.stopped} if command.stopped else {})
    state = replace(state, end=told)
    split = bill(state)
    body: dict[str, Any] = {
        **told,
        "usd": split.usd,
        "usage": usage_to_json(split.total),
        "visible": usage_to_json(split.visible),
        "degraded": state.degraded,
    }
    if answered is not None:
        body |= {"answer": answered.output, "finish": answered.finish, "fell_back": command.fell_back}
    if command.error:
        body["error"] = command.error
    return Draft(command.kind, body)
