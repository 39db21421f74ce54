"""What follows from a run's state, in the words of the store: drafts, tickets, columns. Pure, and between two awaits.

A driver gathers `Consequences` by deciding on tentative states until nothing follows any more, and commits them in one
entry.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from app.core.records import changed
from app.core.run import drafts
from app.core.run.commands import Await, Conclude, Finish, Propose, Queue, Skip
from app.core.run.events import Draft, Kind, PlanStep, StepQueued
from app.core.run.progress import advanced, decide
from app.core.run.state import RUN_ENDED, RunState
from app.engine.commit.colocation import Begun
from app.store.protocol import Entry, Lease, Outbox, Projection


@dataclass(slots=True)
class Consequences:
    """What follows from a state, ready to be committed; `pending` is a command that needs waiting first."""

    state: RunState
    events: list[Draft] = field(default_factory=list)
    outbox: list[Outbox] = field(default_factory=list)
    contents: list[tuple[str, bytes]] = field(default_factory=list)
    pending: Propose | Finish | None = None
    lease: Lease | None = None
    """Set where the run is let go of."""
    whole: bool = False
    """Whether nothing more follows from `state` until it is late, or somebody does something."""

    def plain(self, command: Queue | Skip | Conclude, home: str, *, sound: bool) -> list[Draft]:
        """The events of a command that needs nobody to be asked; its tickets report to `home`, and are rung if the bell
        is `sound`."""
        if not isinstance(command, Queue):
            return list(drafts.settled(self.state, command))
        tier, turn = self.state.admitted.tier, self.state.turn.number
        self.outbox += [Outbox(n, tier, home, turn, sound) for n in command.steps]
        return [StepQueued(n) for n in command.steps]

    def let_go(self, command: Await, now: float) -> Draft:
        """The event of a turn that ends with tool calls: nobody drives the run until its caller is back."""
        until = now + self.state.admitted.limits.tool_wait
        self.lease = Lease("", until, until)
        return drafts.awaiting(self.state, command, until)

    def add(self, fresh: Sequence[Draft]) -> None:
        """Events that follow from the state as it is here."""
        self.events += fresh
        self.state = tentative(self.state, fresh)

    def begin(self, begun: Sequence[Begun]) -> "Consequences":
        """The same, with the intents of these steps, whose tickets are taken."""
        rows, intents = {one.row.step: one.row for one in begun}, [one.intent for one in begun]
        outbox = [rows.get(row.step, row) for row in self.outbox]
        return replace(self, state=tentative(self.state, intents), events=[*self.events, *intents], outbox=outbox)

    def unqueued(self, before: RunState) -> "Consequences":
        """What follows from the state `before`, up to the first step that is queued: that is for another driver."""
        events = list(takewhile(lambda draft: draft.kind is not Kind.STEP_QUEUED, self.events))
        return Consequences(tentative(before, events), events, contents=self.contents)


def foregone(
    state: RunState, now: float, home: str, contents: Mapping[str, bytes], *, sound: bool
) -> Consequences | None:
    """All that follows from a state, if no conductor needs to be asked and no call to be stopped;
    None if nothing does, or not all of it is plain. `contents` are those that are committed with it."""
    follows = Consequences(state)
    while commands := decide(follows.state, now):
        fresh: list[Draft] = []
        for command in commands:
            if isinstance(command, Queue | Skip | Conclude):
                fresh += follows.plain(command, home, sound=sound)
            elif isinstance(command, Await):
                fresh.append(follows.let_go(command, now))
            elif isinstance(command, Finish) and at_hand(follows.state, command, contents):
                fresh += ending(follows.state, command)
            else:
                return None
        follows.add(fresh)
    return follows if follows.events else None


def at_hand(state: RunState, command: Finish, contents: Mapping[str, bytes]) -> bool:
    """Whether a run ends well with nothing to wait for, and with an answer that is among these contents."""
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


def tentative(state: RunState, events: Iterable[Draft]) -> RunState:
    """What the state would be if these were committed next."""
    for draft in events:
        state = advanced(state, draft, at=0.0)
    return state


def possible(state: RunState, events: Iterable[Draft]) -> RunState | None:
    """The same, or None if the state does not know yet what these follow."""
    try:
        return tentative(state, events)
    except (KeyError, ValueError):
        return None


def ending(state: RunState, command: Finish) -> tuple[Draft, ...]:
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


def tags(events: Iterable[Draft]) -> tuple[tuple[str, str], ...]:
    """The filters that these events add."""
    return tuple(("worker", draft.worker) for draft in events if isinstance(draft, PlanStep))
