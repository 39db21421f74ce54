"""The orders that a gateway gives for runs, and the message that a run's journal has moved."""

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from app.core.message.chat import Task
from app.core.pool.catalog import Limits, Tier
from app.core.pool.policy import Overrides
from app.core.records import record
from app.core.run.kinds import OnDisconnect
from app.store.protocol import Once


@record(frozen=True, slots=True)
class Owner:
    """The tenant and the API key to which a run belongs."""

    tenant: str
    key: str


@record(frozen=True, slots=True)
class Order:
    """The order of a gateway: a run, or the next turn of the one whose tool calls the conversation's end answers.

    `limits` are the effort level's, already narrowed by the request's and the key's budget.

    `plan` is the caller's own plan as a JSON value, untrusted; it is checked against the pool before admission.
    """

    task: Task
    tier: Tier
    model: str
    effort: str
    limits: Limits
    tenant: str
    key: str
    labels: frozenset[str] = frozenset()
    overrides: Overrides = Overrides()
    plan: object | None = None
    streams: bool = False
    followed: bool = True
    """True if a caller waits for the reply; a response in the background is retrieved later."""
    stream_steps: bool = False
    preview: bool = False
    """Only plan: the run ends with its plan, and nothing of it is executed."""
    ignored: tuple[str, ...] = ()
    """Parameters that the request has and no worker honours, for the journal."""
    explore: bool = True
    """True if a selector may draw the plan at random."""
    on_disconnect: OnDisconnect | None = None
    """None: `finish` if there is a claim, by which the caller can come back, else `cancel`."""
    wire: Mapping[str, Any] = field(default_factory=dict)
    """The wire format and the request's options for the reply: with them, the journal is enough to write it again."""
    once: Once | None = None
    """The request's claim to be carried out once; made together with the admission."""

    @property
    def owner(self) -> Owner:
        """The owner of the run that is begun, or is to go on."""
        return Owner(self.tenant, self.key)


@record(frozen=True, slots=True)
class Moved:
    """The run's journal has reached the event `seq`, which may not have been received here."""

    seq: int
