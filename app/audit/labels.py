"""The labels of all that was read and written in a run, derived from its events alone, and the rules about them.

This module shares no code with the executor: the reading of a step is what its subtask, its access list and the
results of its tool calls bring, and its output carries that, less what the journal says that its worker took away.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from msgspec import Struct

from app.audit.audited_run import EMBEDS, AuditedRun, Call, Event, Proposal, Step
from app.audit.report import Violation
from app.core.pool.catalog import Catalog

FROM_CALLER, FROM_TOOL = "source:caller", "source:tool"
FROM_CONDUCTOR, FROM_STEP = "source:conductor", "source:step"


class Provenance(Struct, frozen=True):
    """The labels of something that is read, and the sources of its words."""

    labels: frozenset[str] = frozenset()
    sources: frozenset[str] = frozenset()

    def union(self, other: "Provenance") -> "Provenance":
        """Return both together."""
        return Provenance(self.labels | other.labels, self.sources | other.sources)


@dataclass(slots=True)
class Labels:
    """The labels of a run's steps, by number: of the subtask, of what is given to the step, and of its output."""

    run: AuditedRun
    subtasks: dict[int, Provenance] = field(default_factory=dict)
    inputs: dict[int, Provenance] = field(default_factory=dict)
    outputs: dict[int, frozenset[str]] = field(default_factory=dict)

    @property
    def conversation(self) -> Provenance:
        """Return the reading of somebody who is shown the caller's conversation."""
        return Provenance(frozenset(self.run.admission["labels"]), frozenset({FROM_CALLER}))

    def of_call(self, call: Call) -> Provenance:
        """Return what was read in a call, as it was when the call was intended."""
        if call.step is not None:
            step = self.run.step_of(call)
            if step is not None:
                return self._with_results(step, call.intent.seq)
            return self.conversation
        proposal = self.run.proposal(call.proposal)
        if proposal is None or call.intent.body["template"] == EMBEDS:
            return self.conversation
        return self.of_planner(proposal)

    def of_planner(self, proposal: Proposal) -> Provenance:
        """Return what the model reads that writes a proposal."""
        if proposal.parent is not None:
            return self.inputs.get(proposal.parent, self.conversation)
        provenance = self.conversation
        answering_step = self.run.previous_answer(proposal)
        if answering_step is None:
            return provenance
        for earlier in self.run.proposals_for():
            if earlier.round == proposal.round - 1 and earlier.acceptance is not None:
                for step in earlier.steps:
                    provenance = provenance.union(self.subtasks.get(step.n, Provenance()))
        answer = Provenance(self.outputs.get(answering_step.n, frozenset()), frozenset({FROM_STEP}))
        return provenance.union(answer)

    def add(self, step: Step, proposal: Proposal) -> None:
        """Derive the labels of a step from those of earlier ones."""
        self.subtasks[step.n] = provenance = self._of_subtask(step, proposal)
        if "user" in step.plan.body["access"]:
            provenance = provenance.union(self.conversation)
        if step.inherits_view and proposal.parent in self.inputs:
            provenance = provenance.union(self.inputs[proposal.parent])
        for n in step.inputs:
            if n in self.outputs and self._is_shown(n):
                output = Provenance(self.outputs[n], frozenset({FROM_STEP}))
                provenance = provenance.union(self.subtasks[n]).union(output)
        self.inputs[step.n] = provenance
        self.outputs[step.n] = self._output_labels(step)

    def _of_subtask(self, step: Step, proposal: Proposal) -> Provenance:
        """Return the labels of a step's subtask: those of what its planner read, less those that it took away. A plan
        that no model wrote has none."""
        if proposal.opening.body.get("instant"):
            return Provenance()
        sources: frozenset[str] = frozenset()
        if step.plan.body["subtask"]:
            sources = frozenset({FROM_CONDUCTOR})
        return Provenance(self.of_planner(proposal).labels - _declassified_labels(step.plan), sources)

    def _output_labels(self, step: Step) -> frozenset[str]:
        """Return the labels of a step's output: those of all that it read, less those that its worker took away. An
        output that a replay has taken over names its own."""
        labels = self._with_results(step, seq=None).labels
        if step.completion is None:
            return labels
        if step.completion.body.get("origin_run"):
            return _string_set(step.completion, "labels")
        return labels - _declassified_labels(step.completion)

    def _is_shown(self, n: int) -> bool:
        """Return False if a step ended without words: others then see nothing of it."""
        step = self.run.steps[n]
        return step.settlement is None or (step.completion is not None and step.completion.body["chars"] > 0)

    def _with_results(self, step: Step, seq: int | None) -> Provenance:
        provenance = self.inputs[step.n]
        for use in step.tool_uses:
            if use.results is not None and (seq is None or use.results.seq < seq):
                provenance = provenance.union(Provenance(_string_set(use.results, "labels"), frozenset({FROM_TOOL})))
        return provenance


def labels_of(run: AuditedRun) -> Labels:
    """Derive the labels of a run."""
    labels = Labels(run)
    for n in sorted(run.steps):
        step = run.steps[n]
        labels.add(step, run.proposals[step.plan.body["proposal"]])
    return labels


def check_declassification(run: AuditedRun, labels: Labels, call: Call, catalog: Catalog) -> Iterator[Violation]:
    """The texts that came of a call lost no other labels than those that its worker declassifies and had read."""
    worker = catalog.workers.get(call.intent.body["worker"])
    may = worker.declassifies if worker is not None else frozenset()
    if call.step is not None:
        step = run.step_of(call)
        completion = step.completion if step is not None else None
        if completion is None or completion.body["call"] != call.id:
            return
        if _declassified_labels(completion) - (may & labels.of_call(call).labels):
            fault = f"step {call.step} lost labels that {call.id} could not take away"
            yield run.violation("declassified", completion.seq, fault)
        return
    proposal = run.proposal(call.proposal)
    if proposal is None:
        return
    for planned in proposal.steps:
        if _declassified_labels(planned.plan) - (may & labels.of_call(call).labels):
            fault = f"the subtask of step {planned.n} lost labels that it carries"
            yield run.violation("declassified", planned.plan.seq, fault)


def check_losses_without_call(run: AuditedRun) -> Iterator[Violation]:
    """No text loses labels that no call was made for: nobody wrote it who could take them away."""
    for step in run.steps.values():
        proposal = step.plan.body["proposal"]
        has_writer = any(call.step is None and call.proposal == proposal for call in run.calls.values())
        if _declassified_labels(step.plan) and not has_writer:
            yield run.violation(
                "declassified", step.plan.seq, f"the subtask of step {step.n} lost labels without a writer"
            )
        if step.completion is not None and _declassified_labels(step.completion) and step.is_for_conductor:
            yield run.violation(
                "declassified", step.completion.seq, f"step {step.n} lost labels, and no worker wrote its output"
            )


def _declassified_labels(event: Event) -> frozenset[str]:
    return _string_set(event, "declassified")


def _string_set(event: Event, name: str) -> frozenset[str]:
    return frozenset(event.body.get(name) or ())
