"""The recipient of a call and what it sees, as the intent of the call says it."""

from typing import Literal

from app.core.run.events import CallIntended

RecipientKind = Literal["worker", "conductor", "embedder", "shadow"]
EMBEDS = "features-1"
"""The template of a call for an embedding: what the caller said last."""
SHADOW = "shadow"
"""The `origin` of calls of runs that shadow another one."""


def recipient_kind(fact: CallIntended) -> RecipientKind:
    """The kind of recipient that a call has."""
    if fact.origin == SHADOW:
        return "shadow"
    if fact.n is not None:
        return "worker"
    return "embedder" if fact.template == EMBEDS else "conductor"


def seen_steps(fact: CallIntended) -> tuple[int, ...]:
    """The steps whose outputs the recipient of a call sees. An embedder sees what the caller said, and nothing else."""
    if fact.template == EMBEDS:
        return ()
    return tuple([n for n in fact.access.steps if n not in fact.unseen])
