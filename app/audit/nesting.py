"""Rules about workflows inside steps: each is opened for a step of the conductor whose inputs are settled, within the
limits of depth and steps, and sees nothing that this step may not see (D6)."""

from collections.abc import Iterator, Sequence

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
    if proposal.parent is None:
        return 0
    depth = 1
    step = run.steps.get(proposal.parent)
    while step is not None and depth < len(run.proposals):
        step = run.parent_of(step)
        if step is not None:
            depth += 1
    return depth


def steps_allowed(run: AuditedRun, proposal: Proposal) -> int:
    """Return the number of steps that a proposal may have.

    Nested steps count towards the limit of their round: each step of a worker once, and each step of the conductor
    until its own workflow is accepted.
    """
    limit: int = run.limits["steps"]
    if proposal.parent is None:
        return limit
    accepted = []
    for other in run.proposals:
        if other.round == proposal.round and _is_accepted_before(other, proposal.opening.seq):
            accepted.append(other)
    replaced_by_plan = {proposal.parent, *[other.parent for other in accepted]}
    counted = 0
    for other in accepted:
        counted += len([step for step in other.steps if step.n not in replaced_by_plan])
    return limit - counted


def _is_accepted_before(proposal: Proposal, seq: int) -> bool:
    return proposal.acceptance is not None and proposal.acceptance.seq < seq


def own_inputs(run: AuditedRun, step: Step) -> Sequence[int]:
    """Return the steps on an access list that the step around it does not have."""
    parent = run.parent_of(step)
    if parent is None or not step.inherits_view:
        return step.inputs
    return [n for n in step.inputs if n not in parent.inputs]


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
    for n in parent.inputs:
        if n in run.steps and not run.steps[n].is_settled_before(seq):
            return False
    earlier = [other for other in run.proposals_for(parent.n) if other.opening.seq < seq]
    return all(other.rejection is not None for other in earlier)


def _widens_access(step: Step, parent: Step, proposal: Proposal) -> bool:
    """Return True if an access list has more than the whole view of the parent, or none of it, and steps of its own
    plan."""
    access, view = step.plan.body["access"], parent.plan.body["access"]
    if step.inherits_view:
        if access[: len(view)] != view:
            return True
        access = access[len(view) :]
    first_own_step = proposal.opening.body["base"]
    return not all(isinstance(n, int) and n >= first_own_step for n in access)
