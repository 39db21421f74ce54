"""What a dispatcher writes ahead of a run's driver, where that is another process.

At a step's end it is mostly plain what follows: `decide` is pure, and the dispatcher has folded the journal. So it
commits the end together with what follows, under the driver's epoch, and takes the next steps in the same entry; the
driver hears of it as of anything else. That spares a workflow, at each of its steps, word to the driver, an entry of
the driver's, the bell, and an entry that takes the ticket.

The entry names the event that it follows, so it is refused once anybody has written what this process has not folded,
and where the run has got another driver. Then the end goes alone, and what follows is for the driver to say: as it is
wherever a conductor is to be asked, or running calls are to be stopped.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from weakref import WeakValueDictionary

from app.core.records import changed
from app.core.run.events import TERMINAL, Event, Kind
from app.core.run.progress import advance
from app.core.run.state import RunState
from app.engine.calls.step_request import NOTHING
from app.engine.commit.colocation import DispatcherBeside, DriverBeside, Known, held, together
from app.engine.commit.transition import Consequences, foregone, possible, whole
from app.engine.commit.waiting_runs import Waiting
from app.engine.context import Means
from app.errors import Conflict, LeaseLost, QueueUnavailable, RunEnded
from app.stepqueue.protocol import Committed, Delta, Ticket
from app.store.protocol import BRIEF, Appended, Entry, Outbox, StepInput


class Ahead:
    """A run that another process drives, as far as this one can tell what follows. It is a `DriverBeside`, but what is
    committed has to be told to the driver."""

    far = True

    def __init__(self, means: Means, *, state: RunState, read: StepInput, home: str, beside: DispatcherBeside) -> None:
        """`read` is what the state was folded from; `home` is the driver's address."""
        self._means = means
        self._beside = beside
        self._home = home
        self._writing = asyncio.Lock()
        self._contents = dict(read.contents)
        self.epoch = read.epoch
        self.salt = read.salt
        self.state = state

    @property
    def contents(self) -> Mapping[str, bytes]:
        """Brief contents, by ref, of the steps that were executed here."""
        return self._contents

    def heard(self, events: tuple[Event, ...]) -> None:
        """Fold what was committed here; if something is missing before it, nothing follows from here on."""
        for event in events:
            if event.seq == self.state.seq + 1:
                self.state = advance(self.state, event)

    def relay(self, delta: Delta) -> bool:
        """Nobody hears it here."""
        return False

    async def join(self, entry: Entry) -> Appended:
        """Commit the end of a step, with what follows from it where that is plain."""
        async with self._writing:
            follows = self._follows(entry)
            appended = await self._together(entry, follows) if follows is not None else None
            if appended is None:
                appended = await self._means.store.append(entry)
            self.heard(appended.events)
            self._contents |= {ref: body for ref, body in entry.contents if len(body) <= BRIEF}
        if follows is not None:
            await ring(self._means, self.state, follows.outbox)
        return appended

    def _follows(self, entry: Entry) -> Consequences | None:
        after = possible(self.state, entry.events)
        sound = self._means.queue.sound
        return foregone(after, self._means.now(), self._home, dict(entry.contents), sound=sound) if after else None

    async def _together(self, entry: Entry, follows: Consequences) -> Appended | None:
        """None if it was refused: of what stands in the entry itself, whoever writes it alone will hear."""
        joint = changed(entry, at=self._means.now(), epoch=self.epoch, seq=self.state.seq)
        try:
            return await taking(self._beside, self.salt, joint, follows, self._commit, self._contents)
        except (Conflict, LeaseLost, RunEnded):
            follows.outbox = []
            return None

    async def _commit(self, entry: Entry, follows: Consequences) -> Appended:
        return await self._means.store.append(whole(entry, follows))


REPLIES = frozenset(TERMINAL) | {Kind.AWAITING}
"""Events that end a turn."""
Write = Callable[[Entry, Consequences], Awaitable[Appended]]


async def taking(
    beside: DispatcherBeside | None,
    salt: bytes,
    entry: Entry,
    follows: Consequences,
    write: Write,
    known: Mapping[str, bytes] = NOTHING,
) -> Appended:
    """Commit an entry with what follows from it; the dispatcher beside us takes what it has slots for, and need not
    read the contents that are `known`.

    What is left in `follows.outbox` is to be rung. Where a step cannot be paid for, its own dispatcher says so.
    """
    if beside is not None and follows.outbox:
        fresh = {**known, **dict((*entry.contents, *follows.contents))}
        begun = await beside.begin(follows.state, salt, fresh, follows.outbox)
        if begun:
            hold = changed(entry, hold=held(begun))
            if (appended := await together(begun, write(hold, follows.begin(begun)))) is not None:
                taken = {one.row.step for one in begun}
                follows.outbox = [row for row in follows.outbox if row.step not in taken]
                return appended
    return await write(entry, follows)


async def ring(means: Means, state: RunState, outbox: Iterable[Outbox]) -> None:
    """Tell dispatchers of committed tickets; if the bell is down they look into the outbox by themselves."""
    tickets = [Ticket(state.run, row.step, row.tier, row.driver, state.seq, row.version) for row in outbox if row.rung]
    try:
        if tickets:
            await means.queue.ring(tickets)
    except QueueUnavailable:
        means.telemetry.log(logging.WARNING, "the bell is down; dispatchers poll", run=state.run)


def told(entry: Entry, appended: Appended, rows: Sequence[object]) -> Committed:
    """An entry for the run's driver elsewhere: with the texts in it where they are the answer, unless they are long."""
    ends = bool(appended.events) and appended.events[-1].kind in REPLIES
    brief = [(ref, body.decode()) for ref, body in entry.contents if ends and len(body) <= BRIEF]
    return Committed(entry.run, appended.events, rows, tuple(brief))


class Aheads:
    """The runs of which steps are executed here, driven here or not."""

    def __init__(self, means: Means, known: Known, beside: DispatcherBeside) -> None:
        """`known` finds the drivers of this process."""
        self._means = means
        self._known = known
        self._beside = beside
        self._met: WeakValueDictionary[str, Ahead] = WeakValueDictionary()
        self._waiting: Waiting[Ahead] = Waiting()

    def of(self, run: str) -> DriverBeside | None:
        """The driver of a run in this process, or who writes ahead of the one elsewhere."""
        return self._known(run) or self._met.get(run)

    def met(self, run: str) -> Ahead | None:
        """The latter alone, which is there for as long as anybody with a step of the run keeps it, and may be while the
        run waits for its caller."""
        return self._met.get(run)

    def meet(self, state: RunState, read: StepInput, home: str) -> Ahead | None:
        """The same, for a run whose journal was just read, and whose driver is at `home`."""
        run = state.run
        if self._known(run) is None:
            ahead = self._met.get(run)
            if ahead is None or ahead.epoch != read.epoch or ahead.state.seq < state.seq:
                self._met[run] = ahead = Ahead(self._means, state=state, read=read, home=home, beside=self._beside)
                self._waiting.take(run)
            return ahead
        return None

    def keep(self, run: str) -> None:
        """A step of it waits for its caller, whose next turn may come here: then only that has to be read."""
        if (ahead := self._met.get(run)) is not None:
            self._waiting.keep(run, ahead, ahead.state.seq, sum(map(len, ahead.contents.values())))
