"""A recording: what a replay takes over from the journal of an earlier run, as plain values that can be stored.

    plans ............. the workflows that were accepted, each under the *key* of what it is for: the number of its
                        round, or the place of the step that it is nested in
    kept outputs ...... the outputs of the steps before the one from which the replay begins; these are not called again
    tool results ...... what the caller returned for each call of its tools, to be given again for equal calls
    requests .......... how the turns after the first were to be decoded, and with which tools

The *place* of a step is its round, counted from 1, and its position in the plan, counted from 0 (`1.0`, `1.1`); for a
nested step the place of the step around it and the position in there (`1.1.0`). Unlike the numbers of steps, places do
not depend on how many proposals were rejected.

A recording holds texts, so it is stored as content of the new run, under its salt, and erased with it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from app.core.message.chat import Message, message_from_json, message_to_json
from app.core.plan.workflow import CONDUCTOR, Access, Step, access_from_list
from app.core.run.events import Event, PlanStep, facts
from app.core.run.state import Proposal, RunState, StepState


class KeptOutput(Struct, frozen=True):
    """The output of a step of the earlier run, which stands for the call that is not made again."""

    step: int
    """The number of that step in the earlier run."""
    ref: str
    """Its ref there: the salted hash of the text, by which the earlier journal names it."""
    text: str
    finish: str
    refusal: bool = False
    labels: frozenset[str] = frozenset()
    """The labels that it carries."""

    def to_json(self) -> dict[str, Any]:
        """Return the output in plain JSON values."""
        return {
            "step": self.step,
            "ref": self.ref,
            "text": self.text,
            "finish": self.finish,
            "refusal": self.refusal,
            "labels": sorted(self.labels),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "KeptOutput":
        """Return the inverse of `to_json`."""
        return cls(**{**value, "labels": frozenset(value["labels"])})


class RecordedPlan(Struct, frozen=True):
    """A workflow as it was accepted; positions count from 0."""

    steps: tuple[Step, ...]
    instant: bool = False
    """True if no model wrote it, so that its subtasks carry no labels."""
    kept_outputs: Mapping[int, KeptOutput] = {}
    """The outputs that are taken over, by position."""

    def to_json(self) -> dict[str, Any]:
        """Return the plan in plain JSON values."""
        return {
            "steps": [_step_to_json(step) for step in self.steps],
            "instant": self.instant,
            "kept": {str(position): output.to_json() for position, output in self.kept_outputs.items()},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "RecordedPlan":
        """Return the inverse of `to_json`."""
        steps = tuple([_step_from_json(step) for step in value["steps"]])
        kept_outputs = {int(position): KeptOutput.from_json(output) for position, output in value["kept"].items()}
        return cls(steps, value["instant"], kept_outputs)


class RecordedTools(Struct, frozen=True):
    """One use of the caller's tools: the calls of one message, and the results that came back, in the same order."""

    place: str
    """The place of the step that made the calls."""
    calls: tuple[tuple[str, str], ...]
    """Name and arguments of each call, the arguments as canonical JSON."""
    results: tuple[Message, ...]
    """A result for each call, and what the caller's user said after them."""
    labels: frozenset[str] = frozenset()

    def to_json(self) -> dict[str, Any]:
        """Return the exchange in plain JSON values."""
        return {
            "place": self.place,
            "calls": [list(call) for call in self.calls],
            "results": [message_to_json(result) for result in self.results],
            "labels": sorted(self.labels),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "RecordedTools":
        """Return the inverse of `to_json`."""
        calls = tuple([(name, arguments) for name, arguments in value["calls"]])
        results = tuple([message_from_json(result) for result in value["results"]])
        return cls(value["place"], calls, results, frozenset(value["labels"]))


class Recording(Struct, frozen=True):
    """All that a replay takes over from the run `run`. Without plans a conductor plans anew."""

    run: str
    plans: Mapping[str, RecordedPlan] = {}
    tools: tuple[RecordedTools, ...] = ()
    requests: tuple[Mapping[str, Any], ...] = ()
    """The request of each turn after the first, in plain JSON values."""

    @property
    def rounds(self) -> int:
        """Return the number of recorded rounds."""
        return sum(key.isdecimal() for key in self.plans)

    @property
    def labels(self) -> frozenset[str]:
        """Return the labels of the recorded tool results and kept outputs."""
        labels: set[str] = set()
        for tools in self.tools:
            labels |= tools.labels
        for plan in self.plans.values():
            for output in plan.kept_outputs.values():
                labels |= output.labels
        return frozenset(labels)

    @property
    def nests(self) -> bool:
        """Return True if a plan is nested in a step."""
        return any(not key.isdecimal() for key in self.plans)

    @property
    def workers(self) -> frozenset[str]:
        """Return the workers that are to be called."""
        called: set[str] = set()
        for plan in self.plans.values():
            for position, step in enumerate(plan.steps):
                if position not in plan.kept_outputs:
                    called.add(step.worker)
        return frozenset(called)

    def to_json(self) -> dict[str, Any]:
        """Return the recording in plain JSON values."""
        plans = {key: plan.to_json() for key, plan in self.plans.items()}
        tools = [tool.to_json() for tool in self.tools]
        return {"run": self.run, "plans": plans, "tools": tools, "requests": list(self.requests)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Recording":
        """Return the inverse of `to_json`."""
        plans = {key: RecordedPlan.from_json(plan) for key, plan in value["plans"].items()}
        tools = tuple([RecordedTools.from_json(tool) for tool in value["tools"]])
        return cls(value["run"], plans, tools, tuple(value["requests"]))


# -- places


def places(state: RunState) -> Mapping[int, str]:
    """Return the place of each step of a run, by its number. A step of a rejected proposal has the proposal's number,
    too."""
    place_of_step: dict[int, str] = {}
    for proposal in state.all_proposals:
        key = plan_key(proposal, place_of_step)
        if proposal.state == "rejected":
            key += f".rejected-{proposal.number}"
        for position, step in enumerate(state.steps_of(proposal)):
            place_of_step[step.n] = f"{key}.{position}"
    return place_of_step


def plan_key(proposal: Proposal, place_of_step: Mapping[int, str]) -> str:
    """Return the key of a proposal's plan, given the places of earlier steps."""
    if proposal.parent is not None:
        return place_of_step[proposal.parent]
    return str(proposal.round)


def steps_without_plan(plans: Mapping[str, RecordedPlan]) -> Sequence[str]:
    """Return the places of the steps that the conductor was to take and for which none of these plans is."""
    places_without_plan = []
    for key, plan in plans.items():
        for position, step in enumerate(plan.steps):
            place = f"{key}.{position}"
            if step.worker == CONDUCTOR and position not in plan.kept_outputs and place not in plans:
                places_without_plan.append(place)
    return places_without_plan


# -- reading a journal


def list_executed_plans(state: RunState) -> Sequence[Proposal]:
    """Return the proposals that were carried out and have steps, in order."""
    return [proposal for proposal in state.all_proposals if proposal.state == "accepted" and state.steps_of(proposal)]


def build_recorded_plan(
    proposal: Proposal,
    events: Iterable[Event],
    texts: Mapping[str, str],
    kept_outputs: Mapping[int, KeptOutput],
) -> RecordedPlan:
    """Return an accepted plan as its conductor wrote it: with the workers as planned, and access lists in its own
    numbers.

    `texts` are the subtasks by ref. `kept_outputs` are by number of step; those of other plans are left out.
    """
    steps: list[Step] = []
    outputs_of_plan: dict[int, KeptOutput] = {}
    for fact in facts(events, PlanStep):
        if fact.proposal != proposal.number:
            continue
        steps.append(_build_planned_step(proposal, fact, texts))
        if fact.n in kept_outputs:
            outputs_of_plan[fact.n - proposal.base] = kept_outputs[fact.n]
    return RecordedPlan(tuple(steps), proposal.instant, outputs_of_plan)


def _build_planned_step(proposal: Proposal, fact: PlanStep, texts: Mapping[str, str]) -> Step:
    """Return a step as it was planned; positions in its access list count from the first step of its plan."""
    positions = fact.access.places(proposal.base)
    if proposal.parent is not None:
        access = Access(fact.inherits, positions)
    else:
        sees_round_before = any(n < proposal.base for n in fact.access.steps)
        access = Access(fact.access.user, positions, previous=sees_round_before)
    return Step(fact.worker, texts[fact.subtask], access, answers=fact.answers, tools=fact.tools)


def steps_before(state: RunState, n: int) -> Sequence[StepState]:
    """Return the steps that were planned before step `n` and carried out, in order; not those of rejected proposals."""
    numbers = {plan.number for plan in list_executed_plans(state)}
    return [step for step in state.steps.values() if step.n < n and step.proposal in numbers]


def canonical_arguments(arguments: str) -> str:
    """Return the arguments of a call in a form that is equal for equal JSON; text that is no JSON stays as it is."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return arguments


def record_tool_use(message: Message, results: Sequence[Message], place: str, labels: frozenset[str]) -> RecordedTools:
    """Return the record of one message with calls, and of what came back for it."""
    calls = tuple([(call.name, canonical_arguments(call.arguments)) for call in message.calls])
    return RecordedTools(place, calls, tuple(results), labels)


def results_for_calls(
    recording: Recording, place: str, index: int, message: Message, ids: Sequence[str]
) -> RecordedTools | None:
    """Return the recorded results for the calls of a message, under the ids of these calls; None if nothing equal was
    called.

    The exchange of the same step comes first, by `index` among those of the step; then any other with equal calls. A
    step is given as many results as there are: one that repeats its calls would go on until the run's money is spent.
    """
    if index >= len(recording.tools):
        return None
    calls = record_tool_use(message, (), place, frozenset()).calls
    of_step = [tool_use for tool_use in recording.tools if tool_use.place == place]
    for tool_use in (*of_step[index : index + 1], *recording.tools):
        if tool_use.calls == calls:
            return _with_ids(tool_use, ids)
    return None


def _with_ids(tool_use: RecordedTools, ids: Sequence[str]) -> RecordedTools:
    """Return recorded results under other ids of their calls. What the user said after them stays as it is."""
    own = [replace(result, call_id=id_) for result, id_ in zip(tool_use.results, ids, strict=False)]
    return replace(tool_use, results=(*own, *tool_use.results[len(own) :]))


def _step_to_json(step: Step) -> dict[str, Any]:
    return {
        "worker": step.worker,
        "subtask": step.subtask,
        "access": step.access.as_list(),
        "answers": step.answers,
        "tools": step.tools,
    }


def _step_from_json(value: Mapping[str, Any]) -> Step:
    access = access_from_list(value["access"])
    return Step(value["worker"], value["subtask"], access, answers=value["answers"], tools=value["tools"])
