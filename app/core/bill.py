"""What a run used, split into what its caller sees and what the orchestration added (DESIGN §6)."""

from dataclasses import dataclass

from app.core.chat import Usage
from app.core.state import RunState


@dataclass(frozen=True, slots=True)
class Bill:
    """A run's usage as a caller sees it. `visible` keeps OpenAI's identity; `visible + orchestration = total`,
    exactly."""

    visible: Usage
    orchestration: Usage
    total: Usage
    usd: int


def bill(state: RunState) -> Bill:
    """Split the journal's sum over all calls (DESIGN §6).

    Visible input is that of the first successful worker call that saw the caller's conversation (the first successful
    call of any kind if none did); visible output is that of the call whose text is the answer.
    """
    total = sum((call.usage for call in state.calls.values()), Usage())
    fine = [call for call in state.calls.values() if call.outcome == "ok"]
    seers = [call for call in fine if call.step is not None and call.sees_user] or fine
    first = seers[0].usage if seers else Usage()
    answer = state.end.get("step")
    said = state.calls[state.steps[answer].call].usage if answer is not None else Usage()
    visible = Usage(first.input, first.cached, said.output, said.reasoning, total.estimated)
    rest = Usage(
        total.input - first.input,
        total.cached - first.cached,
        total.output - said.output,
        total.reasoning - said.reasoning,
        total.estimated,
    )
    return Bill(visible, rest, total, state.usd)
