"""The recipient of a call and what it sees, as the intent of the call says it."""

from typing import Literal

from msgspec import Struct

from app.core.run.events import CallIntended

RecipientKind = Literal["worker", "conductor", "embedder", "shadow"]
EMBEDDING_TEMPLATE = "features-1"
"""The template of a call for an embedding: what the caller said last."""


class Recipient(Struct, frozen=True):
    """The recipient of a call, or of a step that is only planned: what it is shown, and by whose decision."""

    step: int | None
    """The step that the call is made for; None for a plan or an embedding."""
    kind: RecipientKind
    recipient: str
    """The worker by its name."""
    provider: str
    model: str
    region: str
    """The region on the worker's card; empty where it is not known."""
    labels: tuple[str, ...]
    """The labels of all that it reads."""
    saw_user: bool
    saw_steps: tuple[int, ...]
    saw_results: bool
    unseen: tuple[int, ...]
    """Steps on its access list that ended without words."""
    planned_by: str
    """The kind of conductor whose plan grants it; `tier` for calls that no plan asks for."""

    @property
    def withheld(self) -> tuple[tuple[str, str], ...]:
        """Return the parts of the run that it is not shown, each with the reason: `not_listed` on the access list, or
        `no_words` to be shown."""
        parts: list[tuple[str, str]] = []
        if not self.saw_user:
            parts.append(("user", "not_listed"))
        for n in range(self.step or 0):
            if n in self.saw_steps:
                continue
            if n in self.unseen:
                parts.append((f"step:{n}", "no_words"))
            else:
                parts.append((f"step:{n}", "not_listed"))
        return tuple(parts)


def proposal_of_call(fact: CallIntended) -> int:
    """Return the number of the proposal that a call was made for which is of no step. An embedding is asked for before
    the proposal that it is for is opened, so its attempt is one less than that of the planning call."""
    if fact.template == EMBEDDING_TEMPLATE:
        return fact.attempt
    return fact.attempt - 1


def steps_seen_by_recipient(fact: CallIntended) -> tuple[int, ...]:
    """Return the steps whose outputs the recipient of a call sees. An embedder sees what the caller said, and nothing
    else."""
    if fact.template == EMBEDDING_TEMPLATE:
        return ()
    return tuple([n for n in fact.access.steps if n not in fact.unseen])
