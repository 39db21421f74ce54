"""A run that another process drives, as the callers in this one hear of it.

The journal is what counts: it is looked into every few seconds, whatever else is heard. For the words between, the
run's driver is asked to tell them here; if that is lost, or the driver is, nothing is missing in the end. Whoever takes
the run over is asked next.
"""

import asyncio
import logging
from contextlib import suppress

from app.core.run.progress import advance
from app.core.run.state import RunState
from app.engine.context import Means
from app.engine.delivery import turn_result
from app.engine.delivery.audience import Audience
from app.engine.delivery.mailbox import Mailbox
from app.errors import BatonError, LeaseLost, Overloaded, QueueUnavailable, StoreUnavailable
from app.stepqueue.protocol import Committed, Delta, Listen, Live, Stop

POLL_SECONDS = 2.0
"""After so long a follower looks into the journal by itself, whatever it has received."""
LISTEN_SECONDS = 3 * POLL_SECONDS
"""For so long a driver sends the answer to another process after it asked to listen."""
INBOX = 4_096
SOON = 0.1
"""Seconds until the second look at a run that nobody drives yet; each later one comes after twice as many."""
LET_GO = (
    "This process had to let go of the run, which goes on elsewhere. Send the request again with the same "
    "Idempotency-Key, or ask GET /v1/runs/{id}/stream; the last event's number as Last-Event-ID continues the stream."
)


class Follower:
    """Fills the audience of one run until the run has ended or nobody listens any more."""

    def __init__(self, means: Means, *, home: str, state: RunState, audience: Audience) -> None:
        """`home` is the address where this process hears."""
        self._means = means
        self._home = home
        self.state = state
        self.audience = audience
        self.inbox: Mailbox[Live] = Mailbox(INBOX)
        self.relieved = False
        """Whether a driver of this process fills the audience now."""

    async def follow(self) -> None:
        """Until there is nothing left to tell. Raises `NotFound` if the answer was erased."""
        wait = 0.0
        while not self.relieved and len(self.audience):
            try:
                if await self._look():
                    return
                driven = await self._ask()
                wait = min(2 * wait, POLL_SECONDS) or (POLL_SECONDS if driven else SOON)
            except StoreUnavailable:
                self._means.telemetry.log(logging.WARNING, "a run is followed in silence", run=self.state.run)
            await self._hear(self._means.tick() + (wait or POLL_SECONDS))

    async def _look(self) -> bool:
        """Fold what is new in the journal; whether the turn is over."""
        journal = await self._means.store.journal(self.state.run, after=self.state.seq)
        for event in journal.events:
            if not self.state.replied and event.seq == self.state.seq + 1:
                self.state = advance(self.state, event)
                self.audience.note(event)
        if self.state.replied:
            self.audience.end(await turn_result.read(self._means.store, self.state))
        return self.state.replied

    async def _ask(self) -> bool:
        """Ask whoever drives the run now to tell us what we lack; whether anybody does."""
        row = await self._means.store.run(self.state.run)
        with suppress(QueueUnavailable):
            await self._means.queue.tell(
                row.driver, [Listen(row.id, self._home, self.audience.call, self.audience.chars)]
            )
        return row.lease_until > self._means.now()

    async def _hear(self, until: float) -> None:
        """Pass on words until it is time to look again, or somebody says that there is something to see."""
        while not self.relieved and (left := until - self._means.tick()) > 0:
            messages = await self.inbox.take(left)
            for message in messages:
                if isinstance(message, Committed) or (isinstance(message, Delta) and not self._knows(message)):
                    return
                if isinstance(message, Delta):
                    self.audience.hear(self.state, message)

    def _knows(self, delta: Delta) -> bool:
        """Whether the call has been seen in the journal. If not, what it says will be asked for again."""
        return delta.call in self.state.calls


class Followers:
    """The runs that this process follows, while its drivers run."""

    def __init__(self, means: Means, *, home: str, bound: int) -> None:
        self._means = means
        self._home = home
        self._bound = bound
        self._followers: dict[str, Follower] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._group: asyncio.TaskGroup | None = None

    def open(self, group: asyncio.TaskGroup) -> None:
        """From now on runs can be followed."""
        self._group = group

    def close(self) -> None:
        """Tell everybody that this process hears no more."""
        self._group = None
        for task in self._tasks:
            task.cancel()

    def of(self, run: str) -> Follower | None:
        """Who follows a run."""
        return self._followers.get(run)

    def hear(self, message: Live) -> None:
        """A message that no driver of this process wants."""
        if not isinstance(message, Stop) and message.run in self._followers:
            self._followers[message.run].inbox.put(message)

    def follow(self, state: RunState, audience: Audience) -> None:
        """Let an audience hear a run that goes on elsewhere; raises `Overloaded`."""
        if self._group is None or len(self._followers) >= self._bound:
            raise Overloaded(retry_after=1.0)
        follower = Follower(self._means, home=self._home, state=state, audience=audience)
        self._followers[state.run] = follower
        task = self._group.create_task(self._guard(follower))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def relieve(self, run: str) -> Audience:
        """The audience of a run that this process drives from now on."""
        follower = self._followers.pop(run, None)
        if follower is None:
            return Audience(run)
        follower.relieved = True
        return follower.audience

    async def _guard(self, follower: Follower) -> None:
        run, error = follower.state.run, BatonError()
        try:
            await follower.follow()
        except asyncio.CancelledError:
            error = LeaseLost(LET_GO)
            raise
        except BatonError as caught:
            error = caught
        except Exception as bug:
            self._means.telemetry.log(logging.ERROR, "a follower broke", run=run)
            logging.getLogger("baton").error("follower", exc_info=bug)
        finally:
            if not follower.relieved:
                self._followers.pop(run, None)
                follower.audience.end(turn_result.without(follower.state, error))
