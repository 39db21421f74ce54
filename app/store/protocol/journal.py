"""The journal of runs: how a run is written, and how its row and its events are read.

There is one way to write to a run: `append(Entry)`. An entry is atomic; entries of many runs share a transaction (group
commit); `append` returns only when the entry is committed and durable. The store gives each event its `seq`, checks the
writer's fence under the run's row lock, and refuses the whole entry if a check fails (D3):

* a driver writes with `epoch`: it must be the run's present epoch, else `LeaseLost`;
* a dispatcher writes with a `TicketMove` of its ticket: the row must still have the claim (or, for `take`, the version)
  that the move names, else `LeaseLost`;
* a writer that has neither (nor brings a new run) may write the kinds in `WITHOUT_LEASE` only, else `LeaseLost`; a run
  that has no driver because it waits for its caller is then taken over by the next sweep;
* once a run has ended only `AFTER_THE_END` kinds are accepted, else `RunEnded`; a second terminal event is impossible;
* an entry that names the `seq` that it follows is refused with `Conflict` (code `MOVED`) if there are later events,
  and one that begins a turn of a run whose content was erased with `NotFound`;
* `once` is refused with `Conflict` (code `TAKEN`) while the record of another entry with that id lasts;
* `hold` is refused with `RunOverBudget` if spent + held + asked would exceed a cap (D7).

Database faults become `StoreUnavailable`, after which nothing of the entry was written. When the connection breaks
during COMMIT the store looks the entry up before it answers; if the database does not come back for that within ten
seconds, the code is `UNDECIDED`, and the entry may have been written. Every wait inside is bounded.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from msgspec import Struct

from app.core.pool.catalog import Amount
from app.core.run.events import Event
from app.core.run.kinds import OriginKind
from app.store.protocol.entries import AppendResult, Entry


class Journal(Struct, frozen=True):
    """A run's salt and a part of its events. `salt` is empty once the run's content was erased."""

    salt: bytes
    events: tuple[Event, ...]


BRIEF = 16_384
"""Bytes of the largest content that is read together with a journal, and buffered for the run's next steps."""


class StepInput(Struct, frozen=True):
    """A run's journal, and those of its contents that are small. Other contents have to be read apart."""

    salt: bytes
    events: tuple[Event, ...]
    contents: Mapping[str, bytes]
    epoch: int
    """Epoch of the run when it was read."""
    driver: str
    """Address of the engine that drives the run, or that drove it until its lease lapsed; empty if there is none."""


ErasedBy = Literal["request", "retention", "tenant", "user", "operator"]
"""The cause of an erasure: a caller's request for that run, the end of its time, an operator's erasure of everything of
the run's tenant or of its end user, or another command of an operator."""


class RunRow(Struct, frozen=True):
    """A run's row, as lists show it."""

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
    cap: Amount
    held: Amount
    spent: Amount
    topology: str | None
    degraded: bool
    steps: int
    ended_at: float | None
    error: str | None
    code: str = ""
    """Version of the code that admitted the run."""
    erased: bool = False
    """True once the run's content, and the salt with it, were erased."""
    erased_at: float | None = None
    """The time of that, in seconds since 1970; None also where a release before 0.3 erased it."""
    erased_by: ErasedBy | None = None
    origin_kind: OriginKind = ""
    origin_run: str = ""
    """The id of the run from which this one follows; empty where `origin_kind` is."""


REQUEST_TAG = "request"
"""The name of the tag that holds the id of an HTTP request which began a run or a turn of it."""
TRACE_TAG = "trace"
"""The name of the tag that holds the id of the trace to which such a request belongs."""
PLAN_TAG = "plan"
"""The name of the tag of runs that were only planned. It finds the revisions of plans: its value is `FIRST_REVISION`,
or for a further revision the run of the first one. `SHOWN_ONCE` is a preview that is no plan to be edited or run."""
FIRST_REVISION = "first"
SHOWN_ONCE = "shown"
APPROVAL_TAG = "approval"
"""The name of the tag of runs that have asked for an approval: its value is `ASKED`."""
ASKED = "asked"
USER_TAG = "user"
"""The name of the tag that holds an end user whom the request named, by `user` or by `safety_identifier`."""
METADATA_TAG = "metadata"
"""The name of the tag that holds a field of the request's metadata, as `metadata_tag` writes it."""
ERASED_TAGS = (METADATA_TAG, USER_TAG)
"""The names of the tags with words of the caller's, which are erased together with the run's content."""
TAG_BYTES = 2_000
"""Most bytes of a value in UTF-8 that is kept as a tag, since an index of Postgres has no room for longer ones."""
RunSort = Literal["time", "cost"]
Place = tuple[float, str]
"""The place of a run in a list: when it was admitted, or its cost in micro-dollars, and its id."""


def metadata_tag(field: str, value: str) -> str:
    """Return the value of the tag that stands for a field of a request's metadata."""
    return f"{field}={value}"


class RatingFilter(Struct, frozen=True):
    """A condition on the mean score of a run's ratings that were given in a time."""

    good: bool
    """True: it is that of a success; False: it is lower."""
    since: float | None = None
    until: float | None = None


class RunQuery(Struct, frozen=True):
    """Filters for a list of runs: all optional, joined by AND.

    `sort` says by what the list is ordered: `time` is the admission, `cost` what the run spent. The newest or most
    expensive run comes first unless `ascending`; runs that are equal are in the order of their ids. A list by cost has
    only runs that have ended, because the cost of the others still changes and pages would repeat or miss them.

    `before` is the place of the last row of the page before, under the same order.
    """

    tenant: str | None = None
    state: str | None = None
    tier: str | None = None
    key: str | None = None
    since: float | None = None
    until: float | None = None
    min_usd: int | None = None
    max_usd: int | None = None
    topology: str | None = None
    model: str | None = None
    """The model id as the caller wrote it."""
    user: str | None = None
    """An end user whom the request named, by `user` or by `safety_identifier`."""
    degraded: bool | None = None
    preview: bool | None = None
    """True: only runs that made a plan for `POST /v1/plans` or an edit and executed nothing. False: the others."""
    outcome: str | None = None
    """The outcome of some call; `open`: a call has not ended. With the tag of a worker: of some call of that one."""
    error: str | None = None
    """The code of the error with which a run ended."""
    rated: RatingFilter | None = None
    untaken_at: float | None = None
    """Only runs of which the outbox had something at this time that nobody had taken: for keys of all tenants."""
    origin_kind: OriginKind | None = None
    """Empty: runs that follow from no other."""
    origin_run: str | None = None
    """The run from which they follow."""
    ids: tuple[str, ...] = ()
    """Only these runs; empty: any."""
    tags: tuple[tuple[str, str], ...] = ()
    request_id: str | None = None
    """The id of an HTTP request that began the run, or a turn of it."""
    trace_id: str | None = None
    """The id of the trace to which such a request belongs."""
    sort: RunSort = "time"
    ascending: bool = False
    before: Place | None = None
    limit: int = 20


class RunJournal(Protocol):
    """See the module docstring. All verbs raise `StoreUnavailable`."""

    async def append(self, entry: Entry) -> AppendResult:
        """Commit one entry.

        Raises `LeaseLost`, `RunEnded`, `RunOverBudget`, `NotFound`, `Conflict` or `StoreUnavailable`. A body that is
        not JSON is a TypeError, and a release of more than is held a ValueError: these are faults of the caller.
        """
        ...

    async def journal(self, run: str, upto: int | None = None, after: int = 0) -> Journal:
        """Return the events with `seq > after`: all of them, or at least those up to `upto`, which a cache may serve.

        Raises `NotFound`.
        """
        ...

    async def step_input(self, run: str, after: int = 0) -> StepInput:
        """Return all that a step of a run begins from, in one round trip; with `after`, the later events and the
        contents that they name.

        Raises `NotFound`.
        """
        ...

    async def call_events(self, run: str) -> tuple[Event, ...]:
        """Return the intents and outcomes of a run's calls, in their order. They can be read also where its journal has
        events of kinds that this release does not know, for which `journal` raises KeyError."""
        ...

    async def run(self, run: str) -> RunRow:
        """Return the row of one run. Raises `NotFound`."""
        ...

    async def runs(self, query: RunQuery) -> tuple[RunRow, ...]:
        """Return at most `query.limit` rows in the order of the query."""
        ...

    async def last_seqs(self, names: Sequence[str]) -> Mapping[str, int]:
        """Return the sequence number of the last event of each of these runs, which costs less than reading their
        journals."""
        ...

    async def count_waiting_runs(self, most: int) -> int:
        """Return the number of runs that wait for tool results, counted up to `most`."""
        ...
