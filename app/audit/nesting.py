"""Rules about workflows inside steps: opened for a step of the conductor's whose turn has come, within the limits of
depth and of steps, and seeing nothing that this step may not see (D6)."""

from collections.abc import Iterator, Sequence

from app.audit.account import Account, Proposal, Step
from app.audit.report import Violation
from app.core.plan.workflow import CONDUCTOR


def itself(run: Account, proposal: Proposal) -> list[str]:
    """The conductor, where a plan may give it a step: where depth is left."""
    return [CONDUCTOR] if _depth(run, proposal) < run.limits.get("depth", 0) else []


def _depth(run: Account, proposal: Proposal) -> int:
    """How many steps a proposal is nested in, one in the other."""
    depth, parent = 0, proposal.parent
    while parent is not None and depth < len(run.proposals):
        depth += 1
        step = run.steps.get(parent)
        around = run.around(step) if step is not None else None
        parent = around.n if around is not None else None
    return depth


def room(run: Account, proposal: Proposal) -> int:
    """How many steps a proposal may have. Those nested in a round count to its limit: each step of a worker once, and
    each step of the conductor until its own workflow is accepted."""
    most: int = run.limits["steps"]
    if proposal.parent is None:
        return most
    seq = proposal.opened.seq
    standing = [one for one in run.proposals if one.round == proposal.round and _accepted_by(one, seq)]
    replaced = {proposal.parent, *(one.parent for one in standing)}
    return most - sum(step.n not in replaced for one in standing for step in one.steps)


def _accepted_by(proposal: Proposal, seq: int) -> bool:
    return proposal.accepted is not None and proposal.accepted.seq < seq


def own_inputs(run: Account, step: Step) -> Sequence[int]:
    """The steps on an access list that are not those of the step around it."""
    around = run.around(step) if step.inherits else None
    return [n for n in step.inputs if around is None or n not in around.inputs]


def nested(run: Account, proposal: Proposal) -> Iterator[Violation]:
    """All rules of this file; none for a proposal of the run's own."""
    if proposal.parent is None:
        for step in proposal.steps:
            if step.inherits or step.plan.body.get("parent") is not None:
                yield run.says("nested-wrong", step.plan.seq, f"step {step.n} is nested in no step")
        return
    parent, seq = run.steps.get(proposal.parent), proposal.opened.seq
    if parent is None or not _ready(run, proposal, parent):
        yield run.says("nested-wrong", seq, f"a plan is opened for step {proposal.parent}, which does not wait for one")
        return
    if proposal.opened.body.get("room") != room(run, proposal):
        yield run.says("steps-over-limit", seq, f"its room is {proposal.opened.body.get('room')}")
    if proposal.round != run.proposals[parent.plan.body["proposal"]].round:
        yield run.says("nested-wrong", seq, f"it is of another round than step {parent.n}")
    for step in proposal.steps:
        if step.plan.body.get("parent") != parent.n or _widens(step, parent, proposal):
            yield run.says("access-widened", step.plan.seq, f"step {step.n} may see what step {parent.n} may not")


def _ready(run: Account, proposal: Proposal, parent: Step) -> bool:
    """Whether a step is the conductor's and its turn has come: its plan is accepted, its inputs are settled, it is not,
    and no other plan for it is under way or has been carried out."""
    seq, plan = proposal.opened.seq, run.proposals[parent.plan.body["proposal"]]
    if not parent.opens or parent.settled_by(seq) or not _accepted_by(plan, seq):
        return False
    if any(n in run.steps and not run.steps[n].settled_by(seq) for n in parent.inputs):
        return False
    return all(one.rejected is not None for one in run.tries(parent.n) if one.opened.seq < seq)


def _widens(step: Step, parent: Step, proposal: Proposal) -> bool:
    """Whether an access list holds more than the parent's view as a whole, or nothing of it, and steps beside it."""
    access, view = step.plan.body["access"], parent.plan.body["access"]
    if step.inherits and access[: len(view)] != view:
        return True
    own = access[len(view) :] if step.inherits else access
    return not all(isinstance(n, int) and n >= proposal.opened.body["base"] for n in own)
