"""The outcomes of calls whose process was lost: unknown, and possibly billed."""

from collections.abc import Sequence

from app.core.message.chat import Usage
from app.core.run.events import CallFinished
from app.core.run.state import Call
from app.store.protocol import Ledger


def lost(call: str, step: int | None, held: Ledger) -> CallFinished:
    """The outcome of an intent whose process was lost: possibly billed, so all that was held counts as spent."""
    usage = Usage(input=held.tokens, estimated=True)
    return CallFinished(call=call, n=step, outcome="unknown", usage=usage, usd=held.usd, seconds=0.0)


def given_up(calls: Sequence[Call]) -> tuple[tuple[CallFinished, ...], Ledger]:
    """Such outcomes for all of these, and what was held for them together."""
    held = [Ledger(call.usd_held, call.tokens_held) for call in calls]
    drafts = tuple(lost(call.id, call.step, each) for call, each in zip(calls, held, strict=True))
    return drafts, Ledger(sum(each.usd for each in held), sum(each.tokens for each in held))
