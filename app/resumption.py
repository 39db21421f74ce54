"""A caller that comes back with tool results: the next turn of a run, begun in whatever process it comes to.

the run waits for exactly these ...... run.resumed, step.tool_results and a ticket for each step that waited, in the
                                       one entry that takes the lease
the same once more, while it runs .... the caller hears that turn
the run has ended .................... the conversation is the history of a new run
anything else ........................ 400 (core/results.py)
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace

import orjson

from app.attempt import Means
from app.core import drafts, notices, results
from app.core.chat import Image, Message, message_to_json, task_to_json
from app.core.journal import Event, Kind
from app.core.progress import advance, fold
from app.core.results import Returned, Standing
from app.core.state import RunState, Turn
from app.errors import InvalidRequest, NotFound
from app.order import Order
from app.store.content import address
from app.store.protocol import Entry, Lease, RunRow

KEPT = 256
"""Runs that wait for their callers and whose journals this process need not fold again."""


class Waiting:
    """What runs had come to when this process let go of them. A prefix of a journal never changes, so what is kept can
    be behind but not wrong; the run that waits longest goes first."""

    def __init__(self, most: int = KEPT) -> None:
        self._most = most
        self._states: OrderedDict[str, tuple[bytes, RunState]] = OrderedDict()

    def keep(self, salt: bytes, state: RunState) -> None:
        """Take note of a run that waits."""
        self._states[state.run] = salt, state
        self._states.move_to_end(state.run)
        while len(self._states) > self._most:
            self._states.popitem(last=False)

    def take(self, run: str) -> tuple[bytes, RunState] | None:
        """What is kept of a run, its salt first; it is kept no longer."""
        return self._states.pop(run, None)


@dataclass(frozen=True, slots=True)
class Found:
    """The run that results belong to, and what they are to it."""

    row: RunRow
    salt: bytes
    state: RunState
    standing: Standing
    shares: Mapping[int, tuple[str, bytes]]
    """What each step gets, as content with its ref."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """How a turn of that number begins: its first entry, and the steps that go on."""

    turn: int
    entry: Entry
    steps: tuple[int, ...]


async def find(means: Means, order: Order, came: Returned, waiting: Waiting) -> Found | None:
    """The run that these results go on with, or None where the conversation makes a new one.

    Raises `InvalidRequest` for results that nothing can be made of. A run of somebody else is not there.
    """
    try:
        row = await means.store.run(came.run)
    except NotFound:
        raise results.unknown() from None
    if row.tenant != order.tenant or (row.tier != order.tier.name and row.key != order.key):
        raise results.unknown()
    salt, state = await _now(means, row, waiting.take(came.run))
    standing = results.standing(state, came)
    if standing == "history" or row.erased or not salt or row.tier not in means.catalog().tiers:
        return None
    portions = results.portions(state, came)
    bodies = {n: orjson.dumps([message_to_json(message) for message in share]) for n, share in portions.items()}
    shares = {n: (address(salt, body), body) for n, body in bodies.items()}
    if standing == "repeat":
        _check_same(state, shares)
    else:
        _check_authority(means, order, state, portions)
    return Found(row, salt, state, standing, shares)


async def _now(means: Means, row: RunRow, known: tuple[bytes, RunState] | None) -> tuple[bytes, RunState]:
    """The run's salt, and its state now: at least as far as its row has got."""
    if known is None:
        journal = await means.store.journal(row.id, upto=row.seq)
        return journal.salt, fold(journal.events)
    salt, state = known
    if state.seq < row.seq:
        for event in (await means.store.journal(row.id, upto=row.seq, after=state.seq)).events:
            state = advance(state, event)
    return salt, state


def _check_same(state: RunState, shares: Mapping[int, tuple[str, bytes]]) -> None:
    """What was sent before cannot be taken back."""
    for n, (ref, _) in shares.items():
        if all(exchange.results != ref for exchange in state.steps[n].exchanges):
            raise results.answered()


def _check_authority(means: Means, order: Order, state: RunState, portions: Mapping[int, tuple[Message, ...]]) -> None:
    """Workers were chosen for the run's labels and for what it showed them; neither may grow behind their back."""
    if not order.labels <= state.admitted.labels:
        raise InvalidRequest(
            "The run that these results belong to was begun without some of the labels of this request; send the "
            "conversation without the last tool calls to begin another one.",
            param="baton.labels",
            code="labels_changed",
        )
    workers = means.catalog().workers
    for n, messages in portions.items():
        worker = workers.get(state.steps[n].worker)
        pictured = any(isinstance(part, Image) for message in messages for part in message.parts)
        if pictured and worker is not None and "image" not in worker.card.modalities:
            raise InvalidRequest(
                "The worker that called this tool cannot see images; send the result as text.",
                param="messages",
                code="no_eligible_worker",
            )


def begin(means: Means, order: Order, found: Found, home: str) -> Beginning:
    """The turn that the request begins, and that `home` drives. How to decode, and the tools, are as it says now."""
    state, now = found.state, means.now()
    asked = orjson.dumps(task_to_json(replace(order.task, messages=(), user=None, metadata={})), default=dict)
    request = (address(found.salt, asked), asked)
    turn = Turn(
        number=state.turn.number + 1,
        deadline=now + min(order.limits.seconds, state.admitted.limits.seconds),
        streams=order.streams,
        request=request[0],
        at=now,
        on_disconnect=order.on_disconnect or ("finish" if order.once is not None else "cancel"),
        wire=order.wire,
    )
    resumed = drafts.resumed(turn, order.once.id if order.once is not None else "")
    came = tuple(drafts.tool_results(n, ref, state.steps[n].exchanges[-1].ids) for n, (ref, _) in found.shares.items())
    entry = Entry(
        run=state.run,
        at=now,
        events=(resumed, *came),
        epoch=found.row.epoch,
        contents=(request, *found.shares.values()),
        once=order.once,
        notify=means.notifies and notices.wanted(order.wire),
        lease=Lease(home, now + means.lease, turn.deadline),
    )
    return Beginning(turn.number, entry, tuple(found.shares))


def turn_of(events: tuple[Event, ...], once: str) -> int:
    """The turn that a claim was made for: the admission's, unless a later one names it."""
    return next(
        (event.body["turn"] for event in events if event.kind is Kind.RESUMED and event.body["once"] == once), 0
    )
