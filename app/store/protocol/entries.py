"""One entry: an atomic write to one run, and what it consists of.

An entry brings at most one of three rights to write facts: `new` (it creates the run), `epoch` (it comes from the
run's driver) or `move` (it comes from the dispatcher that holds one of the run's tickets). See `journal.py` for the
checks that follow from these.
"""

from typing import Literal

from msgspec import Struct

from app.core.pool.catalog import Amount
from app.core.run.events import Event, Fact
from app.core.run.kinds import OriginKind
from app.store.protocol.idempotency import IdempotencyRecord


class NewRun(Struct, frozen=True):
    """The columns of a run's row at its admission. The run begins in epoch 1.

    An id that exists already is refused with `Conflict`.
    """

    tenant: str
    key: str
    tier: str
    model: str
    """Model id as the caller wrote it."""
    salt: bytes
    """Prefix of every body that is hashed into a content address of this run. Erased together with the content."""
    driver: str
    lease_until: float
    deadline: float
    cap: Amount
    code: str
    """Version of the code that admitted the run."""
    budgets: tuple[str, ...] = ()
    """The accounts in which each hold of the run is reserved in addition to its own cap (see `budgets.py`)."""
    origin_kind: OriginKind = ""
    origin_run: str = ""
    """The id of the run from which this one follows; empty where `origin_kind` is."""


class Outbox(Struct, frozen=True):
    """A ticket that is written together with the event that caused it. The writer announces it after the commit.

    The ticket starts at `version`, which is higher for each turn of the run, so that no delivery from an earlier turn
    fits it. If the step still has a ticket, that ticket stays as it is and only reports to the new driver. The end of a
    run deletes the run's tickets that were never taken; a ticket that was taken stays until its call's outcome arrives.
    """

    step: int
    tier: str
    driver: str
    version: int = 0
    announced: bool = True
    """False if the writer is not going to announce the ticket. It is then overdue at once."""
    holder: str = ""
    """The dispatcher that takes the ticket in the very entry that writes it, until `until`. `Conflict` if the step
    still has a ticket."""
    until: float = 0.0


class TicketMove(Struct, frozen=True):
    """A dispatcher's change to its ticket's row, and the right by which it makes the change.

    * `take` needs `version` to be the row's version, and the row to have no claim, or one that lapsed by `at`. It sets
      `holder` and `until`, gives out a claim number higher than any before it in this run, and counts a claim that
      lapsed as lost.
    * `hold`, `finish` and `release` need `claim` to be the row's claim number. `hold` changes nothing but the version,
      `finish` deletes the row, `release` makes the ticket due again at `until`.
    """

    step: int
    verb: Literal["take", "hold", "finish", "release"]
    version: int = 0
    claim: int = 0
    holder: str = ""
    until: float = 0.0


class Lease(Struct, frozen=True):
    """The run's lease after this entry: the epoch is one higher, and `driver` has the lease until `until`.

    A driver gives the lease back by naming nobody (an empty address). No sweep takes the run over before `until` then,
    unless somebody writes a wish to it. After `deadline` anybody may end the run.
    """

    driver: str
    until: float
    deadline: float


class Projection(Struct, frozen=True):
    """Columns of the run's row that follow from its events, for lists and filters. None leaves a column as it is.

    The time at which the run ended is not among them: the store takes that from the terminal event alone, because
    outcomes that arrive after the end are written with a projection as well.
    """

    state: str | None = None
    topology: str | None = None
    degraded: bool | None = None
    steps: int | None = None
    error: str | None = None


class SharedContent(Struct, frozen=True):
    """The parts of one content of an entry, so that the store can keep those only once which other contents have too.

    They are `head`, `body` and `tail`, which joined are the content. Contents of the same owner whose heads begin with
    the same parts share these; they share tails that are equal.
    """

    ref: str
    owner: str
    """A keyed hash of those whose contents may be shared, as at least 32 hex digits."""
    head: tuple[bytes, ...]
    body: bytes
    tail: bytes = b""


class Entry(Struct, frozen=True):
    """One atomic write to one run."""

    run: str
    at: float
    """Time of the write, in seconds since 1970 by the writer's clock; the time of each of its events."""
    events: tuple[Fact, ...] = ()
    new: NewRun | None = None
    epoch: int | None = None
    move: TicketMove | None = None
    hold: Amount = Amount()
    """Reserved in addition to what is held."""
    release: Amount = Amount()
    """Given back from what was held."""
    spent: Amount = Amount()
    """Spent for good."""
    contents: tuple[tuple[str, bytes], ...] = ()
    """(ref, body) pairs. Writing the same ref twice is harmless."""
    shared: SharedContent | None = None
    """The parts of one of `contents`, if it is to be shared. With those of a new run, the outputs of its steps are
    shared as well, because a caller sends the answer back with the next turn."""
    outbox: tuple[Outbox, ...] = ()
    row: Projection = Projection()
    tags: tuple[tuple[str, str], ...] = ()
    """(name, value) pairs for filters, for example ("worker", "gpt") or ("label", "phi")."""
    once: IdempotencyRecord | None = None
    """The idempotency record of the request that this entry carries out."""
    notify: bool = False
    """True if the end of the turn that begins with this entry becomes a notice. The notice is written in the
    transaction of the event that ends the turn, whoever writes that event."""
    lease: Lease | None = None
    """A change of hands. It needs `epoch`; from then on a writer with the old epoch has lost the run."""
    tenant: str | None = None
    """The tenant in whose name the entry is written. A run of another tenant is as absent as one that never was
    (`NotFound`); the statement that writes the entry compares it. None for the service's own entries."""
    seq: int | None = None
    """Number of the last event that the writer knows. The entry is refused if there are later ones. An entry needs it
    that sums up all that came before (an end), or that an unseen wish would forbid (another turn)."""


class AppendResult(Struct, frozen=True):
    """The result of an entry."""

    events: tuple[Event, ...]
    """The entry's events with their sequence numbers."""
    claim: int = 0
    """Claim number, if the entry took a ticket."""
    outbox_claims: tuple[int, ...] = ()
    """Claim numbers of the rows of its outbox that have a holder, in their order."""


UNDECIDED = "store_undecided"
"""Code of the `StoreUnavailable` after which an entry may have been written all the same."""
MOVED = "run_has_moved_on"
"""Code of the `Conflict` that refuses an entry whose writer does not know the run's latest events."""
