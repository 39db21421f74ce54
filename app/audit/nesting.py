"""Rules about workflows inside steps: each is opened for a step of the conductor whose inputs are settled, within the
limits of depth and steps, and sees nothing that this step may not see (D6)."""

from collections.abc import Iterator, Sequence
from itertools import chain

from app.audit.audited_run import AuditedRun, Proposal, Step
from app.audit.report import Violation
from app.core.plan.workflow import CONDUCTOR


def conductor_if_allowed(run: AuditedRun, proposal: Proposal) -> list[str]:
    """Return the conductor, if a plan may give it a step because depth is left."""
    if _depth(run, proposal) < run.limits.get("depth", 0):
        return [CONDUCTOR]
    return []


def _depth(run: AuditedRun, proposal: Proposal) -> int:
    """Return the number of steps in which a proposal is nested, one in the other."""
    depth, parent = 0, proposal.parent
    while parent is not None and depth < len(run.proposals):
        depth += 1
        step = run.steps.get(parent)
        around = run.parent_of(step) if step is not None else None
        parent = around.n if around is not None else None
    return depth


def steps_allowed(run: AuditedRun, proposal: Proposal) -> int:
    """Return the number of steps that a proposal may have.

    Nested steps count towards the limit of their round: each step of a worker once, and each step of the conductor
    until its own workflow is accepted.
    """
    most: int = run.limits["steps"]
    if proposal.parent is None:
        return most
    seq = proposal.opening.seq
    standing = [other for other in run.proposals if other.round == proposal.round and _is_accepted_before(other, seq)]
    replaced = {proposal.parent, *(other.parent for other in standing)}
    steps = chain.from_iterable([other.steps for other in standing])
    numbers = [step.n for step in steps]
    return most - sum(n not in replaced for n in numbers)


def _is_accepted_before(proposal: Proposal, seq: int) -> bool:
    return proposal.acceptance is not None and proposal.acceptance.seq < seq


def own_inputs(run: AuditedRun, step: Step) -> Sequence[int]:
    """Return the steps on an access list that the step around it does not have."""
    around = run.parent_of(step) if step.inherits_view else None
    return [n for n in step.inputs if around is None or n not in around.inputs]


def check_nesting(run: AuditedRun, proposal: Proposal) -> Iterator[Violation]:
    """Apply all rules of this module. A proposal that is not nested only must not look nested."""
    if proposal.parent is None:
        for step in proposal.steps:
            if step.inherits_view or step.plan.body.get("parent") is not None:
                yield run.violation("nested-wrong", step.plan.seq, f"step {step.n} is nested in no step")
        return
    parent, seq = run.steps.get(proposal.parent), proposal.opening.seq
    if parent is None or not _is_ready_for_plan(run, proposal, parent):
        yield run.violation(
            "nested-wrong", seq, f"a plan is opened for step {proposal.parent}, which does not wait for one"
        )
        return
    if proposal.opening.body.get("room") != steps_allowed(run, proposal):
        yield run.violation("steps-over-limit", seq, f"its room is {proposal.opening.body.get('room')}")
    if proposal.round != run.proposals[parent.plan.body["proposal"]].round:
        yield run.violation("nested-wrong", seq, f"it is of another round than step {parent.n}")
    for step in proposal.steps:
        if step.plan.body.get("parent") != parent.n or _widens_access(step, parent, proposal):
            yield run.violation("access-widened", step.plan.seq, f"step {step.n} may see what step {parent.n} may not")


def _is_ready_for_plan(run: AuditedRun, proposal: Proposal, parent: Step) -> bool:
    """Return True if a step is the conductor's and ready: its plan is accepted, its inputs are settled, it is not
    settled itself, and no other plan for it is open or accepted."""
    seq, plan = proposal.opening.seq, run.proposals[parent.plan.body["proposal"]]
    if not parent.is_for_conductor or parent.is_settled_before(seq) or not _is_accepted_before(plan, seq):
        return False
    if any(n in run.steps and not run.steps[n].is_settled_before(seq) for n in parent.inputs):
        return False
    return all(attempt.rejection is not None for attempt in run.proposals_for(parent.n) if attempt.opening.seq < seq)


def _widens_access(step: Step, parent: Step, proposal: Proposal) -> bool:
    """Return True if an access list has more than the whole view of the parent, or none of it, and steps of its own
    plan."""
    access, view = step.plan.body["access"], parent.plan.body["access"]
    if step.inherits_view and access[: len(view)] != view:
        return True
    own = access[len(view) :] if step.inherits_view else access
    return not all(isinstance(n, int) and n >= proposal.opening.body["base"] for n in own)
