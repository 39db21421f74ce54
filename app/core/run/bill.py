"""The usage of a run, split into what its caller sees and what the orchestration added (DESIGN §6)."""

from app.core.message.chat import Usage, summed
from app.core.pool.catalog import Amount
from app.core.records import record
from app.core.run.state import RunState


@record(frozen=True, slots=True)
class Bill:
    """The present turn's usage as its caller sees it, and the whole run's.

    `visible` follows OpenAI's identity; `visible + orchestration = turn`, exactly. The turns of a run add up to
    `total`, and `turn` is `total` where no tools were called. Money is in micro-dollars.
    """

    visible: Usage
    orchestration: Usage
    turn: Usage
    turn_usd: int
    total: Usage
    usd: int


def bill(state: RunState) -> Bill:
    """Split the journal's sum over the calls of the latest turn (DESIGN §6).

    Visible input is that of the first successful worker call that saw the caller's conversation (the first successful
    call of any kind if none did); visible output is that of the call whose text is the answer, or of the calls whose
    tool calls are.
    """
    total = summed(call.usage for call in state.calls.values())
    calls = [call for call in state.calls.values() if call.turn == state.turn.number]
    turn = summed(call.usage for call in calls) if state.turn.number else total
    fine = [call for call in calls if call.outcome == "ok"]
    seers = [call for call in fine if call.step is not None and call.sees_user] or fine
    first = seers[0].usage if seers else Usage()
    said = _said(state)
    visible = Usage(first.input, first.cached, said.output, said.reasoning, turn.estimated)
    rest = Usage(
        turn.input - first.input,
        turn.cached - first.cached,
        turn.output - said.output,
        turn.reasoning - said.reasoning,
        turn.estimated,
    )
    return Bill(visible, rest, turn, sum(call.usd for call in calls), total, state.usd)


def unspent(state: RunState) -> Amount:
    """Return the amount that calls of a run may still hold: its limits without what open calls hold and others cost."""
    usd, tokens = state.admitted.limits.usd, state.admitted.limits.tokens
    for call in state.calls.values():
        is_open = call.outcome is None
        usd -= call.usd_held if is_open else call.usd
        tokens -= call.tokens_held if is_open else call.usage.total
    return Amount(max(usd, 0), max(tokens, 0))


def spendable(state: RunState) -> Amount:
    """Return the amount that calls of steps may still hold: what is unspent, within what was approved, or within what
    needs no approval."""
    left, terms = unspent(state), state.admitted.approval
    if terms is None:
        return left
    cap = terms.above_usd
    if state.approvals:
        cap = list(state.approvals.values())[-1].max_usd
    if cap is None:
        return left
    return Amount(max(min(left.usd, cap - state.admitted.limits.usd + left.usd), 0), left.tokens)


def _said(state: RunState) -> Usage:
    """Return the usage of the calls whose output the caller gets. The answer of an earlier turn was paid for there."""
    speakers = []
    if state.state == "awaiting_tool":
        waiting = [step for step in state.steps.values() if step.state == "awaiting_tool"]
        speakers = [step.exchanges[-1].call for step in waiting]
    elif state.end is not None and state.end.step is not None:
        speakers = [state.steps[state.end.step].call]
    calls = [state.calls[name] for name in speakers if name]  # an output that was taken over has no call
    return summed(call.usage for call in calls if call.turn == state.turn.number)
