"""Journals that released versions have written, and a summary of a run in terms that do not change with its records.

A later release must fold each of them to the summary that the release itself recorded (`test_old_journals.py`).
"""

from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from app.core.message.chat import usage_to_json
from app.core.run.caller_view import bill
from app.core.run.state import RunState, StepState

FOLDER = Path(__file__).parent


def summary(state: RunState) -> dict[str, Any]:
    """Return the outcome of a run in plain JSON values."""
    split = bill(state)
    return {
        "state": state.state,
        "seq": state.seq,
        "turn": state.turn.number,
        "until": state.turn.until,
        "deadline": state.turn.deadline,
        "topology": state.topology,
        "rounds": state.round_count,
        "degraded": state.degraded,
        "cancel_asked": state.cancel_asked,
        "pool": list(state.admitted.pool),
        "labels": sorted(state.admitted.labels),
        "limits": asdict(state.admitted.limits),
        "steps": [_step(step) for step in state.steps.values()],
        "calls": {call.id: [call.step, call.outcome, call.usd, call.turn] for call in state.calls.values()},
        "proposals": [
            [proposal.number, proposal.state, proposal.mode, proposal.round, proposal.parent, len(proposal.reasons)]
            for proposal in state.all_proposals
        ],
        "visible": usage_to_json(split.visible),
        "total": usage_to_json(split.total),
        "usd": split.usd,
    }


def _step(step: StepState) -> dict[str, Any]:
    return {
        "n": step.n,
        "state": step.state,
        "worker": step.worker,
        "access": step.access.as_list(),
        "output": step.output,
        "chars": step.chars,
        "error": step.error,
        "call": step.call,
        "exchanges": [[exchange.call, *exchange.ids] for exchange in step.exchanges],
    }
