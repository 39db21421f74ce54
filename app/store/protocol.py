"""The store seam: where the journal, its contents, the outbox and the keys live.

There is one way to write to a run: `append(Entry)`. An entry is atomic; entries of many runs share a transaction (group
commit); `append` returns only when the entry is committed and durable. The store gives each event its `seq`, checks the
writer's fence under the run's row lock, and refuses the whole entry if it does not hold (D3):

* a driver writes with `epoch`: it must be the run's present epoch, else `LeaseLost`;
* a dispatcher writes with a `Move` of its ticket: the row must still be at the claim (or, for `take`, the version) that
  the move names, else `LeaseLost`;
* whoever has neither (nor brings a new run) may write the kinds in `ANYBODY` only, else `LeaseLost`; a run that nobody
  drives, because it waits for its caller, is then taken up by the next sweep;
* once a run has ended only `AFTER_THE_END` kinds are taken, else `RunEnded`; a second terminal event is impossible;
* an entry that names the `seq` that it follows is refused with `Conflict` (code `MOVED`) once there are later events,
  and one that begins a turn of a run whose content was erased with `NotFound`;
* `once` is refused with `Conflict` (code `TAKEN`) while another entry's claim on that id lasts;
* `hold` is refused with `RunOverBudget` if spent + held + asked would pass a cap (D7).

Database faults become `StoreUnavailable`, after which nothing of the entry was written. When the connection dies during
COMMIT the store looks the entry up before it answers; if the database does not come back for that within ten seconds,
the code is `UNDECIDED`, and the entry may have been written. Every wait inside is bounded.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

from app.core.rating.calibration import Trial
from app.core.rating.evidence import Learned, Rated
from app.core.rating.feedback import Feedback
from app.core.records import record
from app.core.run.events import Draft, Event, Kind
from app.core.run.notices import Notice
from app.store.bodies import Bodies
from app.store.step_input import StepInputs
from app.store.versions import Versions


@record(frozen=True, slots=True)
class Ledger:
    """Money in micro-dollars and tokens, as a pair that is always reserved and settled together."""

    usd: int = 0
    tokens: int = 0


@record(frozen=True, slots=True)
class NewRun:
    """A run's row at admission, in epoch 1; an id that exists already is refused with `Conflict`.

    `salt` goes into every content address of the run and is erased with its content.
    """

    tenant: str
    key: str
    tier: str
    model: str
    """The model id as the caller wrote it."""
    salt: bytes
    driver: str
    lease_until: float
    deadline: float
    cap: Ledger
    code: str
    """Version of the code that admitted it."""


@record(frozen=True, slots=True)
class Outbox:
    """A ticket to be written with the event that caused it; it is rung after the commit.

    It starts at `version`, which is higher for each turn of the run, so that no delivery of an earlier turn fits it. If
    the step still has a ticket, that one stays as it is and only reports to the new driver. The end of a run deletes
    its tickets that were never taken; the others stay for the outcome of their call.
    """

    step: int
    tier: str
    driver: str
    version: int = 0
    rung: bool = True
    """False if nobody is going to ring: then it is overdue at once."""
    holder: str = ""
    """The dispatcher that takes it in the very entry that writes it, until `until`; `Conflict` if the step still has
    a ticket."""
    until: float = 0.0


@record(frozen=True, slots=True)
class Move:
    """What a dispatcher does with its ticket's row, and by what right.

    `take` needs `version` to be the row's and its claim to have lapsed by `at` (or never made); it sets `holder`,
    `until` and a claim number higher than any that was given out in this run before, and counts a claim that lapsed as
    lost. `hold`, `finish` and `release`
    need `claim` to be the row's. `hold` changes nothing but the version, `finish` deletes the row, `release` makes it
    due again at `until`.
    """

    step: int
    verb: Literal["take", "hold", "finish", "release"]
    version: int = 0
    claim: int = 0
    holder: str = ""
    until: float = 0.0


@record(frozen=True, slots=True)
class Lease:
    """A driver's lease changes hands together with an entry: epoch + 1, this driver, until then.

    A driver lets go of a run by giving the lease to nobody (an empty address): no sweep takes it up before `until`,
    unless somebody wishes something of it. `deadline` is when anybody may end the run.
    """

    driver: str
    until: float
    deadline: float


@record(frozen=True, slots=True)
class Projection:
    """Columns of the run's row that follow from the events; None leaves a column as it is. For lists and filters.

    When the run ended is none of them: the store takes that from the terminal event alone, since outcomes that come
    after it are written with a projection as well.
    """

    state: str | None = None
    topology: str | None = None
    degraded: bool | None = None
    steps: int | None = None
    error: str | None = None


TAKEN = "idempotency_key_in_use"
"""The code of the `Conflict` that refuses a claim."""
UNDECIDED = "store_undecided"
"""The code of the `StoreUnavailable` after which an entry may have been written all the same."""
MOVED = "run_has_moved_on"
"""The code of the `Conflict` that refuses an entry whose writer has not heard of the latest events."""


@record(frozen=True, slots=True)
class Once:
    """A claim: the request of this id is carried out once, and whoever sends it again gets what came of it.

    `fingerprint` tells another request under the same id. `run` is the run that came of it (an entry's own, whatever
    stands here). Its journal has the reply, unless `status` and `reply` do. Both are forgotten after `until`.
    """

    id: str
    fingerprint: bytes
    until: float
    run: str = ""
    status: int = 0
    reply: bytes = b""


@record(frozen=True, slots=True)
class Entry:
    """One atomic write to one run."""

    run: str
    at: float
    events: tuple[Draft, ...] = ()
    new: NewRun | None = None
    epoch: int | None = None
    move: Move | None = None
    hold: Ledger = Ledger()
    release: Ledger = Ledger()
    """Given back of what was held; `spent` is added for good."""
    spent: Ledger = Ledger()
    contents: tuple[tuple[str, bytes], ...] = ()
    """(ref, body) pairs; writing the same ref twice is harmless."""
    outbox: tuple[Outbox, ...] = ()
    row: Projection = Projection()
    tags: tuple[tuple[str, str], ...] = ()
    """(name, value) pairs for filters, e.g. ("worker", "gpt") or ("label", "phi")."""
    once: Once | None = None
    notify: bool = False
    """Whether the end of the turn that begins with this entry becomes a notice: it is then written in the transaction
    of the event that ends the turn, whoever writes that."""
    lease: Lease | None = None
    """Needs `epoch`, which is one more from then on: whoever writes under the old one has lost the run."""
    seq: int | None = None
    """The number of the event that this entry must follow: for what sums up all that came before, such as an end, or
    what a wish would forbid, such as another turn."""


@record(frozen=True, slots=True)
class Appended:
    """What an entry became: its numbered events, and the claim number if it took a ticket."""

    events: tuple[Event, ...]
    claim: int = 0
    taken: tuple[int, ...] = ()
    """The claim numbers of the rows of its outbox that have a holder, in their order."""


@record(frozen=True, slots=True)
class RunRow:
    """A run as lists show it, read from its row."""

    id: str
    tenant: str
    key: str
    tier: str
    model: str
    state: str
    created_at: float
    deadline: float
    epoch: int
    driver: str
    lease_until: float
    seq: int
    cap: Ledger
    held: Ledger
    spent: Ledger
    topology: str | None
    degraded: bool
    steps: int
    ended_at: float | None
    error: str | None
    code: str = ""
    """Version of the code that admitted it."""
    erased: bool = False
    """Whether its content, and the salt with it, are gone."""


@record(frozen=True, slots=True)
class Lapsed:
    """How many open runs of one kind nobody holds a lease on, and how many of them are past their deadline."""

    tier: str
    code: str
    runs: int
    expired: int


@record(frozen=True, slots=True)
class Journal:
    """A run's salt and a prefix of its events. `salt` is empty once the run's content was erased."""

    salt: bytes
    events: tuple[Event, ...]


@record(frozen=True, slots=True)
class Due:
    """An outbox row as a dispatcher or the sweeper sees it. `seq` is the run's last at reading time."""

    run: str
    step: int
    tier: str
    driver: str
    version: int
    claim: int
    until: float
    seq: int
    holder: str | None = None
    """Whose claim it is, lapsed or not; None if nobody has it."""
    lost: int = 0
    """How many dispatchers have let their claim lapse without a word, before the present holder."""


@record(frozen=True, slots=True)
class RunQuery:
    """Filters, all optional, joined by AND; newest first; `before` is the (created_at, id) of the last row seen."""

    tenant: str | None = None
    state: str | None = None
    tier: str | None = None
    key: str | None = None
    since: float | None = None
    until: float | None = None
    min_usd: int | None = None
    degraded: bool | None = None
    tags: tuple[tuple[str, str], ...] = ()
    before: tuple[float, str] | None = None
    limit: int = 20


@record(frozen=True, slots=True)
class KeyRow:
    """An API key: everything but its secret. `digest` is the HMAC-SHA-256 of the secret under the service's pepper."""

    id: str
    tenant: str
    name: str
    digest: bytes
    scopes: frozenset[str]
    created_at: float
    tiers: frozenset[str] = frozenset()
    """Empty means every tier."""
    labels: frozenset[str] = frozenset()
    """Put on every task of this key."""
    max_usd: int | None = None
    """Cap on one run, micro-dollars."""
    rpm: int | None = None
    tpm: int | None = None
    """Tokens a minute, over all calls of its runs."""
    concurrency: int | None = None
    expires_at: float | None = None
    revoked_at: float | None = None


class Held(NamedTuple):
    """A ticket that a dispatcher is working on. A tuple, as the rows that thousands of them are looked up in."""

    run: str
    step: int
    claim: int


class Store(Bodies, StepInputs, Versions, Protocol):
    """See the module docstring for what every implementation promises."""

    @property
    def healthy(self) -> bool:
        """Whether the database is there, as far as is known; while it is not, new runs and key lookups are refused at
        once, and everything else may be tried. Asking costs nothing."""
        ...

    @property
    def seconds_since_recovery(self) -> float:
        """Seconds since the database came back, infinite if it was never away: what others held lapsed in the meantime,
        and they get as long as a lease to prolong it before it is taken from them."""
        ...

    async def wait_until_healthy(self, seconds: float) -> bool:
        """Until the database is there, but no longer than `seconds`; whether it is. Who waits first goes first."""
        ...

    async def append(self, entry: Entry) -> Appended:
        """Commit one entry.

        Raises `LeaseLost`, `RunEnded`, `RunOverBudget`, `NotFound`, `Conflict` or `StoreUnavailable`. A body
        that is not JSON is a TypeError, and a release of more than is held a ValueError: faults of the caller.
        """
        ...

    async def journal(self, run: str, upto: int | None = None, after: int = 0) -> Journal:
        """Events with after < seq: all, or at least those up to `upto` (which a cache may serve). `NotFound`."""
        ...

    async def keep_catalog(self, digest: str, snapshot: Callable[[], bytes]) -> None:
        """Keep a pool's snapshot under its digest, for the audit; what this store has kept already costs nothing."""
        ...

    async def run(self, run: str) -> RunRow:
        """One row, or `NotFound`."""
        ...

    async def runs(self, query: RunQuery) -> tuple[RunRow, ...]:
        """At most `query.limit` rows, newest first."""
        ...

    async def renew_leases(self, driver: str, epochs: Mapping[str, int], until: float) -> Mapping[str, int]:
        """Prolong the leases of a driver's runs; those that are still its own and not ended, with their last seq."""
        ...

    async def last_seqs(self, names: Sequence[str]) -> Mapping[str, int]:
        """The last seq of each of these runs: whether a journal has moved, for less than reading it."""
        ...

    async def lapsed(self, now: float) -> tuple[Lapsed, ...]:
        """How many runs there are to be taken over, by tier and code."""
        ...

    async def waiting(self, most: int) -> int:
        """How many runs wait for tool results, counted up to `most`."""
        ...

    async def take_over(
        self, driver: str, now: float, until: float, limit: int, kinds: Sequence[tuple[str, str]]
    ) -> tuple[RunRow, ...]:
        """Take over runs whose lease lapsed, and their tickets: epoch + 1, this driver; the rows as they are then.

        Only those whose (tier, code) is among `kinds`, and those past their deadline.
        """
        ...

    async def renew_claims(self, held: Sequence[Held], until: float) -> frozenset[Held]:
        """Prolong ticket claims; returns those that are still ours."""
        ...

    async def due(self, run: str, step: int) -> Due | None:
        """One outbox row as it is now, or None if the step is finished."""
        ...

    async def overdue(self, now: float, limit: int, grace: float | None = None) -> tuple[Due, ...]:
        """Outbox rows that nobody holds and whose last ring went unanswered for `grace` seconds (None: for a lease).

        They count as rung from then on: the next call leaves them out until they went unanswered for as long again.
        """
        ...

    async def find_request_claim(self, claim: str, now: float) -> Once | None:
        """What holds the claim of that id, if anything does."""
        ...

    async def claim_request(self, once: Once, now: float) -> Once:
        """Make a claim beside any entry, for a request whose effect may be repeated; what holds it then, ours or an
        earlier one."""
        ...

    async def forget_request_claims(self, now: float, limit: int) -> int:
        """Delete claims that have run out, the oldest first and at most `limit`; how many there were."""
        ...

    async def take_notices(self, now: float, until: float, limit: int) -> tuple[Notice, ...]:
        """Notices that are due, each as one more try; nobody else is given them before `until`."""
        ...

    async def close_notice(self, notice: Notice) -> bool:
        """Forget a notice that was delivered or given up, whoever holds it by now; False if it is gone already."""
        ...

    async def put_off_notice(self, notice: Notice, due: float) -> bool:
        """Have a notice tried again from `due` on; False if it is gone, or somebody else has taken it meanwhile."""
        ...

    async def pending_notices(self, most: int) -> int:
        """How many notices are not delivered yet, counted up to `most`."""
        ...

    async def forget_notices(self, before: float, limit: int) -> int:
        """Delete at most `limit` notices of turns that ended before then and that are due since; how many."""
        ...

    async def rate(self, given: Feedback) -> Feedback:
        """Store a rating of a run; of two with one id the first is kept, and returned. Raises `NotFound`, and
        `Conflict` where a run has been rated too often."""
        ...

    async def feedback(self, run: str) -> tuple[Feedback, ...]:
        """All ratings of a run, oldest first."""
        ...

    async def feedback_after(self, last: tuple[float, str], limit: int) -> tuple[Feedback, ...]:
        """Ratings of all runs in the order of (at, id), behind the last that was seen: for whoever learns from them.

        Clocks differ: look again some seconds back, and take a rating that was seen before for the same one.
        """
        ...

    async def note_trial(self, trial: Trial) -> None:
        """Keep what a worker was worth at a built-in task, in the place of an earlier trial of the same name."""
        ...

    async def trials(self, news: float | None = None) -> tuple[Trial, ...]:
        """All of them, oldest first; with `news`, none at all unless one is later than that."""
        ...

    async def rated(
        self, given: Sequence[Feedback], kinds: Sequence[Kind], looked_at: Callable[[Sequence[Event]], str]
    ) -> tuple[Rated, ...]:
        """The runs of these ratings, each with its events of these kinds and the content that `looked_at` names."""
        ...

    async def learned(self, policy: str, after: int) -> Learned | None:
        """What was learned for a policy, if its number is higher than `after`."""
        ...

    async def learn(self, policy: str, learned: Learned, at: float) -> bool:
        """Replace what was learned; False, and nothing is written, if somebody else has replaced it."""
        ...

    async def key(self, public_id: str) -> KeyRow | None:
        """A key by its public id, revoked and expired ones included."""
        ...

    async def keys(self) -> tuple[KeyRow, ...]:
        """Every key, newest first."""
        ...

    async def add_key(self, row: KeyRow) -> bool:
        """Store a new key; False if the id exists already."""
        ...

    async def revoke_key(self, public_id: str, at: float) -> bool:
        """Mark a key as revoked; False if there is none."""
        ...

    async def clock(self) -> float:
        """The database's own time, in seconds since 1970."""
        ...

    async def ready(self) -> None:
        """Return if the database takes a write transaction within two seconds, else raise `StoreUnavailable`."""
        ...

    async def close(self) -> None:
        """Commit what is waiting, then let go of connections and threads."""
        ...
