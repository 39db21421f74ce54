"""The span of a run: one for each turn, and another one for each engine that takes the run from a lost one.

All of them belong to the trace of the admission. A turn whose request belongs to another trace is linked to it.
"""

from app.core.run.kinds import Kind
from app.core.run.state import RunState
from app.core.run.trace import continued
from app.engine.context import EngineContext
from app.tracing import SPAN_RUN, Span

UNFAILED = (Kind.SUCCEEDED, Kind.CANCELLED)
"""The ends that are no errors."""


def start(context: EngineContext, state: RunState, *, taken_over: bool) -> Span:
    """Start the span of the present turn. `taken_over`: another engine has worked on this turn."""
    tier = state.admitted.tier
    attributes: dict[str, str | int | bool] = {
        "gen_ai.operation.name": SPAN_RUN,
        "gen_ai.workflow.name": tier,
        "baton.run": state.run,
        "baton.tier": tier,
        "baton.turn": state.turn.number,
        "baton.taken_over": taken_over,
    }
    parent = continued(state.admitted.trace, state.turn.trace)
    return context.tracing.start(f"{SPAN_RUN} {tier}", parent, attributes, links=[state.turn.trace])


def end(span: Span, state: RunState, error: str) -> None:
    """End it with the state of the run. `error` says why this engine does not go on with the run; empty if it would."""
    if not span.is_recording:
        return span.end()
    ended = state.end
    attributes: dict[str, str | int | bool] = {"baton.state": state.state, "baton.rounds": state.rounds}
    if state.topology:
        attributes["baton.topology"] = state.topology
    if ended is not None:
        attributes |= {"baton.cost_micro_usd": ended.usd, "baton.degraded": ended.degraded}
        failed = ended.kind not in UNFAILED
        error = (ended.error or ended.kind.value) if failed else ""
    span.set(attributes)
    return span.end(error)
