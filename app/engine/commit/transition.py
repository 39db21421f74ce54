"""The transition that follows from a run's state, in the terms of the store: events, tickets, columns. Pure.

A `RunWriter` gathers `Consequences` by deciding on tentative states until nothing follows any more, and commits them in
one entry.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from app.core.records import changed
from app.core.run import drafts
from app.core.run.commands import Await, Conclude, Finish, Propose, Queue, Skip
from app.core.run.events import Fact, Kind, PlanStep, StepQueued
from app.core.run.state import RUN_ENDED, RunState, tentative
from app.engine.commit.colocation import BegunStep
from app.store.protocol import Entry, Lease, Outbox, Projection


@dataclass(slots=True)
class Consequences:
    """The consequences of a state, ready to be committed; `pending` is a command that needs waiting first."""

    state: RunState
    events: list[Fact] = field(default_factory=list)
    outbox: list[Outbox] = field(default_factory=list)
    contents: list[tuple[str, bytes]] = field(default_factory=list)
    pending: Propose | Finish | None = None
    lease: Lease | None = None
    """Set where the run is let go of."""
    whole: bool = False
    """True if nothing more follows from `state` until its deadline, or until somebody writes to the run."""

    def plain(self, command: Queue | Skip | Conclude, home: str, *, enqueues: bool) -> list[Fact]:
        """The events of a command that needs nobody to be asked. Its tickets report to `home`; without `enqueues` they
        are not put into the queue, and dispatchers find them in the outbox."""
        if not isinstance(command, Queue):
            return list(drafts.settled(self.state, command))
        tier, turn = self.state.admitted.tier, self.state.turn.number
        self.outbox += [Outbox(n, tier, home, turn, enqueues) for n in command.steps]
        return [StepQueued(n) for n in command.steps]

    def let_go(self, command: Await, now: float) -> Fact:
        """The event of a turn that ends with tool calls: nobody drives the run until its caller is back."""
        until = now + self.state.admitted.limits.tool_wait
        self.lease = Lease("", until, until)
        return drafts.awaiting(self.state, command, until)

    def add(self, fresh: Sequence[Fact]) -> None:
        """Events that follow from the state as it is here."""
        self.events += fresh
        self.state = tentative(self.state, fresh)

    def begin(self, begun: Sequence[BegunStep]) -> "Consequences":
        """These consequences with the intents of some steps, whose tickets are taken."""
        rows, intents = {one.row.step: one.row for one in begun}, [one.intent for one in begun]
        outbox = [rows.get(row.step, row) for row in self.outbox]
        return replace(self, state=tentative(self.state, intents), events=[*self.events, *intents], outbox=outbox)


def at_hand(state: RunState, command: Finish, contents: Mapping[str, bytes]) -> bool:
    """True if a run succeeds with nothing to wait for, and with an answer that is among these contents."""
    if command.kind is not Kind.SUCCEEDED or command.step is None or state.open_calls:
        return False
    return state.steps[command.step].output in contents


def whole(entry: Entry, follows: Consequences) -> Entry:
    """An entry with what follows from it."""
    events = (*entry.events, *follows.events)
    return changed(
        entry,
        events=events,
        contents=(*entry.contents, *follows.contents),
        outbox=(*entry.outbox, *follows.outbox),
        row=projection(follows.state),
        tags=(*entry.tags, *tags(events)),
        lease=follows.lease or entry.lease,
    )


def ending(state: RunState, command: Finish) -> tuple[Fact, ...]:
    """The terminal event, and before it what becomes of steps that are not settled."""
    skips = drafts.skipped(state.live, RUN_ENDED)
    return (*skips, drafts.ended(tentative(state, skips), command))


def projection(state: RunState) -> Projection:
    """The columns of the run's row that lists and filters read."""
    return Projection(
        state=state.state,
        topology=state.topology or None,
        degraded=state.degraded,
        steps=len(state.planned),
        error=state.end.error or None if state.end is not None else None,
    )


def tags(events: Iterable[Fact]) -> tuple[tuple[str, str], ...]:
    """The filters that these events add."""
    return tuple(("worker", draft.worker) for draft in events if isinstance(draft, PlanStep))
