"""The conductor seam, which has one verb.

`propose` yields steps in order, each as soon as it is known, so that the first one can be queued before the plan is
complete. It raises `PlanRejected` with every reason when it received no valid plan, and lets `WorkerError` pass when
its model fails. Its steps are not trusted: the engine validates each of them against the run's pool and limits.

A conductor that needs a model gets `ask`, the only journaled way to call one. It holds no key, opens no socket, and
keeps no state between runs.

A *chooser* is not a conductor: it draws one for each run (the selector does). Its choice is journaled with its
probabilities before the chosen conductor is asked for anything.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any, Protocol

from msgspec import Struct

from app.core.message.chat import Message, Piece, Task
from app.core.plan.workflow import Step
from app.core.pool.catalog import Amount, Limits, Worker
from app.core.rating.decision import ArmChoice
from app.core.rating.features import Features

NO_LIMIT = 1 << 62
"""More tokens than any run has."""


class PastStep(Struct, frozen=True):
    """A step of the previous round; `worker` worked on it last, `access` is the access list as its plan wrote it."""

    worker: str
    subtask: str
    access: tuple[str | int, ...]
    done: bool


class Previous(Struct, frozen=True):
    """The previous round: its plan, and its answer, which is a worker's text and not trusted."""

    steps: tuple[PastStep, ...]
    answer: str


class Brief(Struct, frozen=True):
    """The information that a conductor gets. A worker's ordinal is its place in `workers`, shuffled for each run."""

    task: Task
    workers: tuple[Worker, ...]
    limits: Limits
    usd_left: int
    """Micro-dollars."""
    objections: tuple[str, ...] = ()
    """The reasons why the previous proposal was rejected; not empty only for the repair."""
    rejected: str = ""
    """The text of the rejected proposal, if it had one."""
    run: str = ""
    """The run's id, which seeds a conductor that draws at random."""
    round: int = 1
    """The number of the workflow that is asked for. From the second one on the conductor may propose no step at all,
    which accepts the previous answer."""
    previous: Previous | None = None
    """The previous round, for a conductor that asks a model and for a chooser; None in the first round, and for a
    chooser where it cannot be read."""
    nests: bool = False
    """True if a step may be given to the conductor itself (`CONDUCTOR`), which then opens a workflow for it. Its
    ordinal follows those of the workers. `task` may be the task of such a step."""
    tokens_left: int = NO_LIMIT
    """Input and output tokens that the run's calls may still hold."""
    planning: Amount = Amount()
    """The least amount that a planning call of the tier's model holds, for a chooser that may let it plan."""
    planning_seconds: float = 0.0
    """The seconds that such a call is likely to take."""
    seconds_left: float | None = None
    """Seconds until the run's deadline; None where nobody says."""
    paces: Mapping[str, float] = {}
    """The seconds that a call of each worker is likely to take, for a chooser."""
    reasons: bool = False
    """True if the conductor is asked for the reasons of its plan."""
    tenant: str = ""
    """The tenant of the run, for a chooser that learns from ratings."""
    message_chars: int = 0
    """Characters of one message that a model is shown, as the general prompt says; 0: all of every message."""

    def last_question(self) -> str:
        """Return the caller's last message; empty if there is none."""
        for message in reversed(self.task.messages):
            if message.role == "user":
                return message.text
        return ""


class Rationale(Struct, frozen=True):
    """A conductor's reason for the shape of its plan, which is not trusted and decides nothing."""

    why: str


class Question(Struct, frozen=True):
    """A question of a conductor to a worker."""

    worker: str
    messages: tuple[Message, ...]
    max_tokens: int
    schema: Mapping[str, Any] | None = None
    """The JSON schema of the answer; None for free text."""
    temperature: float = 0.0
    logprobs: int = 0
    """The number of alternatives whose log-probabilities are asked for, for each token of the answer."""
    template: str = ""
    """The name of the prompt from which the messages were made, so that an auditor can make them again."""


Ask = Callable[[Question], AsyncGenerator[list[Piece], None]]
"""Makes one journaled call on the conductor's behalf, and yields the pieces of the answer. Raises the errors of
`Provider.stream`, and `RunOverBudget`."""


class Conductor(Protocol):
    """A policy that proposes a workflow for a task."""

    @property
    def instant(self) -> bool:
        """Return True if `propose` never waits. Its plan is then committed together with the admission."""
        ...

    def propose(self, brief: Brief, ask: Ask) -> AsyncIterator[Step | Rationale]:
        """Yield the steps of a workflow for this task; none at all accepts the answer of the previous round. The reason
        for its shape may follow the last step, where the brief asks for reasons.

        The module's docstring has the errors that it raises.
        """
        ...


class FixedPlanConductor(Struct, frozen=True):
    """A conductor that returns a fixed plan: the one that the caller sent, or the fallback."""

    steps: tuple[Step, ...]
    instant: bool = True

    async def propose(self, brief: Brief, ask: Ask) -> AsyncIterator[Step]:
        """Yield the given steps."""
        for step in self.steps:
            yield step


class RequestEmbedding(Struct, frozen=True):
    """The embedding of a request as features; `blind` gives the reason if there are none."""

    vector: tuple[tuple[int, float], ...] = ()
    blind: str = ""


class ConductorChoice(Struct, frozen=True):
    """A chooser's choice: the conductor that is to propose, and the facts that are journaled."""

    conductor: Conductor
    choice: ArmChoice
    policy: str
    version: str
    """The version of the posterior that the choice was computed from."""
    seen: Features
    explore: float
    seed: str
    masked: Mapping[str, Mapping[str, float]] = {}
    """The choices that were left out before the draw because the run could not pay them: see `rating.decision`."""
    lent: float = 0.0
    """The share of such choices that are made by the beliefs of other tenants."""


class Chooser(ABC):
    """A policy over conductors.

    It is an abstract class and not a protocol, because every run checks for it, and an `isinstance` check against a
    protocol takes twenty microseconds.
    """

    embedder: str | None
    """The worker that makes an embedding of the request before each choice, or None."""
    patience: float
    """Seconds that the embedding may take."""
    model: Conductor | None
    """The conductor among its choices that asks a model, which also repairs its own proposals."""

    @abstractmethod
    def choose(
        self, brief: Brief, seed: str, *, explores: bool, asks: bool, embedding: RequestEmbedding
    ) -> ConductorChoice:
        """Choose a conductor for this task. Equal briefs, seeds, sights and posteriors give equal choices.

        Without `explores` the best choice is made with certainty; without `asks` no model may be asked for a plan.
        """


Policy = Conductor | Chooser
