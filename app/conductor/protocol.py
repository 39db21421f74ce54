"""The conductor seam: one verb.

`propose` yields steps in order, each as soon as it is known, so that the first can be dispatched before the plan is
complete. It raises `PlanRejected` with every reason when what it received is no plan, and lets `WorkerError` pass
when its model fails. What it yields is untrusted: `planner.py` validates each step against the run's pool and limits.

A conductor that needs a model gets `ask`: the one journaled way to call one. It holds no key, opens no socket, and
keeps no state between runs.

A *chooser* is no conductor but picks one for each run, by chance: the selector. Its choice is journaled with its
probabilities before the conductor that it chose is asked for anything.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from app.core.message.chat import Message, Piece, Task
from app.core.plan.workflow import Step
from app.core.pool.catalog import Limits, Worker
from app.core.rating.decision import Choice
from app.core.rating.features import Features
from app.core.records import record


@record(frozen=True, slots=True)
class PastStep:
    """A step of the round before; `worker` is who worked on it last, `access` is as its plan wrote it."""

    worker: str
    subtask: str
    access: tuple[str | int, ...]
    done: bool


@record(frozen=True, slots=True)
class Previous:
    """The round before: its plan, and the answer that it came to, which is a worker's text and untrusted."""

    steps: tuple[PastStep, ...]
    answer: str


@record(frozen=True, slots=True)
class Brief:
    """What a conductor may know. A worker's ordinal is its place in `workers`, which was shuffled for this run."""

    task: Task
    workers: tuple[Worker, ...]
    limits: Limits
    usd_left: int
    """Micro-dollars."""
    objections: tuple[str, ...] = ()
    """Why the previous proposal was rejected; not empty means: this is the one repair."""
    rejected: str = ""
    """The previous proposal's text, where there was one."""
    run: str = ""
    """Its id, for a conductor that draws lots."""
    round: int = 1
    """Which of the run's workflows is asked for. In a further one the conductor may propose no step at all: then the
    previous answer is the run's."""
    previous: Previous | None = None
    """What a conductor that asks a model is shown of the round before; None in the first round."""
    nests: bool = False
    """Whether a step may be given to the conductor itself (`CONDUCTOR`), which then opens a workflow for it. Its
    ordinal is the one behind those of the workers. `task` may be such a step's own."""


class Ask(Protocol):
    """One journaled call of a worker on the conductor's behalf."""

    def __call__(
        self,
        worker: str,
        messages: tuple[Message, ...],
        *,
        schema: Mapping[str, Any] | None,
        max_tokens: int,
        temperature: float,
        logprobs: int = 0,
        template: str = "",
    ) -> AsyncIterator[list[Piece]]:
        """Yields the pieces of the answer; raises what `Provider.stream` raises, and `RunOverBudget`.

        `template` names the prompt that made the messages out of the brief, for whoever audits the call.
        """
        ...


class Conductor(Protocol):
    """A policy."""

    @property
    def instant(self) -> bool:
        """True if `propose` never waits: its plan is then committed together with the admission."""
        ...

    def propose(self, brief: Brief, ask: Ask) -> AsyncIterator[Step]:
        """The steps of a workflow for this task; none takes the previous round's answer for final. See the module
        docstring."""
        ...


@record(frozen=True, slots=True)
class Given:
    """A plan that is there already, as a conductor: the caller's own, or the fallback."""

    steps: tuple[Step, ...]
    instant: bool = True

    async def propose(self, brief: Brief, ask: Ask) -> AsyncIterator[Step]:
        """The steps as they are."""
        for step in self.steps:
            yield step


@record(frozen=True, slots=True)
class Sight:
    """What an embedder said of a request: features, or in `blind` why there are none."""

    vector: tuple[tuple[int, float], ...] = ()
    blind: str = ""


@record(frozen=True, slots=True)
class Chosen:
    """A chooser's choice: who is to propose, and what the journal keeps of it."""

    conductor: Conductor
    choice: Choice
    policy: str
    version: str
    """Of the posterior that it rests on."""
    seen: Features
    explore: float
    seed: str


class Chooser(ABC):
    """A policy over conductors. A class to be inherited from: to ask whether something has a protocol's shape takes
    twenty microseconds, and every run is asked."""

    embedder: str | None
    """The worker that is to be asked for an embedding of the request before each choice."""
    patience: float
    """Seconds that this may take."""
    model: Conductor | None
    """The one conductor among those it chooses from that asks a model; it also repairs what it proposed."""

    @abstractmethod
    def choose(self, brief: Brief, seed: str, *, explores: bool, asks: bool, sight: Sight) -> Chosen:
        """Pick a conductor for this task. The same brief, seed, sight and posterior give the same choice; without
        `explores` nothing is left to chance, and unless it `asks` no model may be asked for a plan."""


Policy = Conductor | Chooser
