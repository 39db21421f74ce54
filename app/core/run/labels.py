"""The labels of everything that the steps of a run read and write, derived from its journal (D6).

    the conversation .... the labels of its request, of the API key, and of its messages and their parts
    a subtask ........... all that its writer read; none where no model wrote it, as in fixed plans and the caller's own
    a step reads ........ its subtask; what its access list grants, with the subtasks of the steps that it lists; the
                          results of its tool calls; inside another step what that step reads, if it inherits its task
    its output .......... all that the step read, without what its worker declassifies
                          that of a step whose output is taken over from an earlier run: those that it carried there
    a model that plans .. the conversation, and in a further round the subtasks and the answer of the round before; for
                          a step, what that step reads

Labels go with words through steps and rounds; the source of the words (`rules.py`) does not. The answer of a nested
workflow carries all that the step around it reads, whoever wrote it.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from app.core.plan.arms import tier_of
from app.core.plan.workflow import Step
from app.core.pool.catalog import Catalog, Limits, Worker
from app.core.pool.policy import exclusion, permits
from app.core.pool.rules import CALLER, CONDUCTOR, NOTHING, STEP, TOOL, Reading
from app.core.run import drafts
from app.core.run.events import Fact, PassedOver, RunAdmitted, StepDone
from app.core.run.progress import Propose
from app.core.run.state import CALLER as CALLERS_PLAN
from app.core.run.state import Proposal, RunState, StepState, Turn, tentative

NO_LABELS: Mapping[int, frozenset[str]] = MappingProxyType({})
"""No outputs that are taken over."""


class Flow:
    """The labels of one run: what every step reads, and the labels that its output carries, by the step's number.

    A step that is not settled yet is expected to be done by its worker as it is known; without a `catalog` it lowers
    nothing. With `lowered_now`, workers lower what they declassify in this catalog, whatever the journal says.
    """

    def __init__(self, state: RunState, catalog: Catalog | None = None, *, lowered_now: bool = False) -> None:
        self._state = state
        self._catalog = catalog
        self._lowered_now = lowered_now
        self.readings: dict[int, Reading] = {}
        self.outputs: dict[int, frozenset[str]] = {}
        self._subtasks: dict[int, Reading] = {}
        self._planners: dict[int, Reading] = {}
        """The input that the planning model of each proposal read, by the number of the proposal."""
        proposals = {one.number: one for one in state.all_proposals}
        for n in sorted(state.steps):  # a step reads earlier ones only
            step = state.steps[n]
            self._subtasks[n] = self._subtask(step, proposals[step.proposal])
            self.readings[n] = self._reading(step, proposals[step.proposal])
            self.outputs[n] = self.readings[n].labels - self._lowered(step)
            if step.origin_labels is not None:  # its output is of an earlier run, where it may have read more
                self.outputs[n] = step.origin_labels

    def planner(self, number: int, parent: int | None) -> Reading:
        """Return what a model reads that plans the round of this number, or that plans for the step `parent`."""
        if parent is not None:
            return self.readings[parent]
        read, before = conversation(self._state), self._state.answer(number - 1)
        if before is None:
            return read
        for step in self._state.workflow(number - 1):
            read |= self._subtasks[step.n]
        return read | Reading(self.outputs[before.step.n], frozenset({STEP}))

    def _subtask(self, step: StepState, proposal: Proposal) -> Reading:
        if proposal.instant:
            return Reading()
        if proposal.number not in self._planners:
            self._planners[proposal.number] = self.planner(proposal.round, proposal.parent)
        labels = self._planners[proposal.number].labels - self._lost(step)
        return Reading(labels, frozenset({CONDUCTOR}) if step.subtask else NOTHING)

    def _lost(self, step: StepState) -> frozenset[str]:
        """The labels that a subtask has lost."""
        if self._catalog is None or not self._lowered_now:
            return step.subtask_lost
        admitted = self._state.admitted
        tier = tier_of(self._catalog, admitted.tier, admitted.model, admitted.served_by)
        model = self._catalog.workers.get(tier.conductor.worker or "") if tier is not None else None
        if model is not None:
            return model.declassifies
        return NOTHING

    def _reading(self, step: StepState, proposal: Proposal) -> Reading:
        read = self._subtasks[step.n]
        if step.access.user:
            read |= conversation(self._state)
        if step.inherits and proposal.parent is not None:
            read |= self.readings[proposal.parent]
        for m in step.access.steps:
            earlier = self._state.steps[m]
            if not earlier.settled or earlier.chars:  # a step that has no answer leaves no trace
                read |= self._subtasks[m] | Reading(self.outputs[m], frozenset({STEP}))
        for use in step.exchanges:
            if use.results:
                read |= Reading(use.labels, frozenset({TOOL}))
        return read

    def _lowered(self, step: StepState) -> frozenset[str]:
        if self._catalog is None or (step.settled and not self._lowered_now):
            return step.output_lost
        worker = self._catalog.workers.get(step.worker)
        if worker is not None:
            return worker.declassifies
        return NOTHING


def conversation(state: RunState) -> Reading:
    """Return what somebody reads who is shown the caller's conversation."""
    return Reading(state.admitted.labels, frozenset({CALLER}))


def carried(state: RunState) -> frozenset[str]:
    """Return all labels that anything in the run carries: the conversation, the result of a tool, or an output that was
    taken over."""
    found = state.admitted.labels
    for step in state.steps.values():
        found |= step.origin_labels or NOTHING
        for use in step.exchanges:
            found |= use.labels
    return found


def matters(state: RunState, workers: Iterable[Worker]) -> bool:
    """True if the labels of a run can exclude anybody: something of it carries a label, or rules bind the workers."""
    for worker in workers:  # a generator takes longer than all of the rest, and each step of each run asks
        if worker.bars:
            return True
    return bool(carried(state))


def reading_of(state: RunState, n: int, workers: Sequence[Worker]) -> Reading:
    """Return what a step reads whose inputs are settled; nothing where that can exclude none of these workers."""
    if matters(state, workers):
        return Flow(state).readings[n]
    return Reading()


def readers(state: RunState, n: int, workers: list[Worker]) -> tuple[Reading, list[Worker], PassedOver]:
    """Return what a step reads whose inputs are settled, the workers that may read that, and why the others may not."""
    if not matters(state, workers):
        return Reading(), workers, ()
    reading = reading_of(state, n, workers)
    reasons = [(worker.name, exclusion(worker, reading)) for worker in workers]
    excluded = tuple([one for one in reasons if one[1]])
    if excluded:
        workers = [worker for worker in workers if permits(worker, reading)]
    return reading, workers, excluded


def refusals(catalog: Catalog, state: RunState, steps: Sequence[Fact]) -> list[str]:
    """Return the reasons why planned steps of the open proposal may not be given to their workers, by places in it.

    `steps` are facts that follow the state: `plan.step` of one or several steps, after `plan.opened` where that is not
    in the state yet, and `step.done` of those whose output is taken over.
    """
    workers = catalog.workers
    labelled = any(isinstance(fact, StepDone) and fact.labels for fact in steps)
    if not labelled and not matters(state, [workers[name] for name in state.admitted.pool if name in workers]):
        return []
    planned = tentative(state, steps)
    found, readings = [], Flow(planned, catalog).readings
    open_steps = planned.steps_of(planned.unmade) if planned.unmade is not None else ()
    for place, step in enumerate(open_steps):
        if step.n in state.steps or step.settled or step.worker not in workers:
            continue
        reason = exclusion(workers[step.worker], readings[step.n])
        if reason:
            found.append(f"step {place}: its worker may not read what the step reads: {reason}")
    return found


def refused_plan(
    catalog: Catalog,
    labels: frozenset[str],
    steps: Sequence[Step],
    kept: Mapping[int, frozenset[str]] = NO_LABELS,
    *,
    instant: bool = True,
) -> list[str]:
    """Return the reasons why the steps of a plan that is at hand may not be given to their workers.

    A plan that a model wrote is not `instant`: its subtasks carry the labels of the conversation. `kept` has the labels
    of the outputs that are taken over, by position; nobody is called for these.
    """
    pool = tuple({step.worker: None for step in steps})
    admitted = RunAdmitted(
        task="",
        tier="",
        limits=Limits(),
        deadline=0.0,
        pool=pool,
        conductor=CALLERS_PLAN,
        preview=False,
        rehearsal=False,
        streams=False,
        labels=labels,
    )
    state = RunState(run="", admitted=admitted, turn=Turn())
    opened = drafts.opened(Propose(0, 0, "first", 1), CALLERS_PLAN, pool, instant=instant)
    planned = [drafts.planned(0, 0, place, step, step.subtask) for place, step in enumerate(steps)]
    taken = [StepDone(n, "", "", 1, "", origin_run="earlier", labels=carried) for n, carried in kept.items()]
    return refusals(catalog, state, [opened, *planned, *taken])
