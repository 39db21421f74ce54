"""The words that the plan of a run kept from a step, and who decided that, by the journal."""

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct

from app.core.plan.templates import MODEL
from app.core.run.events import Event, PlanOpened, facts
from app.core.run.state import Proposal, RunState, StepState

DECIDERS: Final[Mapping[str, str]] = {
    "model": "conductor",
    "caller": "caller",
    "fixed": "fixed_plan",
    "random": "random_plan",
    "selector": "selector",
    "fallback": "fallback",
    "replay": "repeated_plan",
}
"""The one who decided a plan, by the name of the proposal's conductor."""
OUTER_STEP: Final = "outer_step"
"""The step around a nested one, which did not see the words either."""


class Withheld(Struct, frozen=True):
    """The words and outputs that a plan could have shown to a step and did not."""

    user: bool
    """True if the caller's words were withheld."""
    steps: tuple[int, ...]
    """Earlier steps of the same plan, and the one that answered the round before."""
    by: str
    """The one who decided so: a value of `DECIDERS`, or `OUTER_STEP`; empty if nothing was withheld."""


def find_decider(proposal: Proposal, events: Sequence[Event]) -> str:
    """Return who decided a plan. A selector that lets a model plan has decided nothing else."""
    if proposal.conductor == "selector" and proposal.mode != "fallback":
        by_model = proposal.mode == "repair" or _selector_choice(events, proposal.number) == MODEL
        return "conductor" if by_model else "selector"
    return DECIDERS.get(proposal.conductor, proposal.conductor)


def _selector_choice(events: Sequence[Event], number: int) -> str | None:
    """Return the choice of a selector for the proposal of this number; None if it made none."""
    for opened in facts(events, PlanOpened):
        if opened.proposal == number and opened.decision:
            return str(opened.decision["action"])
    return None


def find_withheld(
    state: RunState, step: StepState, proposal: Proposal, by: str, among: Sequence[StepState]
) -> Withheld:
    """Return what a plan withheld from a step: the caller's words, earlier steps of the plan, the answer of the round
    before. `by` is who decided the plan, and `among` has all of its steps."""
    earlier = [other.n for other in among if other.n < step.n]
    if proposal.parent is None and proposal.round > 1:
        before = state.answer_of_round(proposal.round - 1)
        if before is not None:
            earlier.append(before.step.n)
    steps = tuple(sorted([n for n in earlier if n not in step.access.steps]))
    user = not step.access.user
    if not user and not steps:
        return Withheld(user=False, steps=(), by="")
    if user and proposal.parent is not None and not state.steps[proposal.parent].access.user:
        return Withheld(user, steps, OUTER_STEP)
    return Withheld(user, steps, by)
