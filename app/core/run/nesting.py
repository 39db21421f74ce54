"""Workflows inside steps (recursion): a step that the conductor itself takes is the task of a workflow of its own.

Its plan's `user` is that step's view: the subtask, and what the step's access list grants, nothing else. So authority
never widens inside, and what is nested is no new kind of thing: the same proposals, steps, tickets and calls, in the
same run, with the same pool, labels, budget and deadline. It ends because a plan may name the conductor only down to
the limit of depth, and because the steps of a round, nested ones included, are never more than the limit of steps.
"""

from app.core.plan.workflow import Access
from app.core.run.state import RunState, StepState


def parent_of(state: RunState, step: StepState) -> StepState | None:
    """Return the step whose nested workflow contains this one; None for a step of the run's own workflow."""
    for n, tries in state.nested.items():
        if any(one.number == step.proposal for one in tries):
            return state.steps[n]
    return None


def speaks(state: RunState, step: StepState) -> bool:
    """Return true if the output of the step becomes the answer of its round: it answers, and so does every step around
    it."""
    parent = parent_of(state, step) if step.answers else None
    return step.answers and (parent is None or speaks(state, parent))


def depth(state: RunState, parent: int | None) -> int:
    """Return the nesting depth of the workflow of the step `parent`; 0 for the run's own."""
    if parent is None:
        return 0
    around = parent_of(state, state.steps[parent])
    return 1 + depth(state, around.n if around is not None else None)


def may_nest(state: RunState, parent: int | None) -> bool:
    """Return true if a plan for `parent` (None: for the run itself) may name the conductor."""
    return depth(state, parent) < state.admitted.limits.depth


def room(state: RunState, parent: int) -> int:
    """Return how many steps a workflow for `parent` may have, so that a round never has more steps than the limit.

    A step that the conductor takes counts until its workflow is accepted; then that workflow's steps do.
    """
    accepted = {tries[-1].number for tries in state.nested.values() if tries[-1].state == "accepted"}
    taken = {n for n, tries in state.nested.items() if tries[-1].number in accepted} | {parent}
    known = accepted | {one.number for one in state.proposals}
    others = sum(step.n not in taken and step.proposal in known for step in state.live)
    return state.admitted.limits.steps - others


def granted(access: Access, parent: StepState, base: int) -> Access:
    """Return an access list as a nested plan writes it, in the run's own numbers: its `user` is what the parent may
    see."""
    own = tuple(n + base for n in access.steps)
    return Access(parent.access.user, (*parent.access.steps, *own)) if access.user else Access(False, own)
