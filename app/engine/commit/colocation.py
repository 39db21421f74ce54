"""What a driver and a dispatcher are to each other where they share a process.

Then nothing needs to be told that the other can see: a dispatcher folds what its neighbour has folded already, a step's
end travels in one entry with what follows from it, and a step that is queued may be taken in the very entry that queues
it, with the intent of its first call. Apart from each other both do the same over the journal and the queue, and
whatever fails here falls back to that.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Protocol

from app.core.records import record
from app.core.run.events import Draft, Event
from app.core.run.state import RunState
from app.errors import Conflict, RunOverBudget
from app.stepqueue.protocol import Delta
from app.store.protocol import MOVED, Appended, Entry, Ledger, Outbox


class DriverBeside(Protocol):
    """The driver of a run, in this very process. Its state is a fold of a prefix of the journal, which is never
    stale."""

    @property
    def far(self) -> bool:
        """Whether the driver is elsewhere after all, and has to be told of what is committed: see `speculative.py`."""
        ...

    @property
    def state(self) -> RunState:
        """What the run has come to."""
        ...

    @property
    def salt(self) -> bytes:
        """What its content addresses are made with."""
        ...

    def heard(self, events: tuple[Event, ...]) -> None:
        """Take note of what was committed."""
        ...

    def relay(self, delta: Delta) -> bool:
        """Pass on what a worker says, if it can be done at once; else it is to be told as from elsewhere."""
        ...

    async def join(self, entry: Entry) -> Appended:
        """Commit the entry that ends a step together with what follows from it, and let the driver know."""
        ...


Known = Callable[[str], DriverBeside | None]


@record(frozen=True, slots=True)
class Begun:
    """A step whose first call is composed. Exactly one of `go` and `forgo` is called."""

    row: Outbox
    """Its ticket, taken."""
    intent: Draft
    """To be committed in the entry that queues the step."""
    hold: Ledger
    """What that entry reserves for the call."""
    go: Callable[[int], None]
    """The entry is committed, with this claim: make the call."""
    forgo: Callable[[], None]
    """It is not: there is no call."""


class DispatcherBeside(Protocol):
    """The dispatcher of this process, as far as drivers use it."""

    async def begin(
        self, state: RunState, salt: bytes, fresh: Mapping[str, bytes], rows: Sequence[Outbox]
    ) -> Sequence[Begun]:
        """Those of the steps that can be begun at once; the bell rings for the others.

        `rows` are tickets that are about to be committed, `state` is what the run will be then, and `fresh` the content
        that is committed with them. Raises nothing that concerns one step alone.
        """
        ...


def held(begun: Sequence[Begun]) -> Ledger:
    """What an entry reserves for all of them."""
    return Ledger(sum(one.hold.usd for one in begun), sum(one.hold.tokens for one in begun))


async def together(begun: Sequence[Begun], commit: Awaitable[Appended]) -> Appended | None:
    """Commit the entry that these steps wait for, and let them go; None if it is refused because of them."""
    try:
        appended = await commit
    except BaseException as error:
        for one in begun:
            one.forgo()
        moved = isinstance(error, Conflict) and error.public_code == MOVED  # which has nothing to do with them
        if isinstance(error, RunOverBudget | Conflict) and not moved:
            return None
        raise
    for one, claim in zip_longest(begun, appended.taken):
        # Found again after an outage, an entry no longer says its claims: those tickets lapse and are taken anew.
        one.go(claim) if claim is not None else one.forgo()
    return appended
