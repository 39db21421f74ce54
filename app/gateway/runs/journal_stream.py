"""`GET /v1/runs/{id}/events/stream`: a run's journal as server-sent events, as they are committed.

The id of each event is its number in the journal, so a client that reconnects with `Last-Event-ID` goes on exactly
behind what it has. All streams of this process share one look at the database every `LOOK_SECONDS`, so that many open
streams cost hardly more than one. A stream ends behind the last event of a run that has ended, and after ten minutes at
most.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import orjson

from app.core.run.events import Event
from app.core.run.fold import advance, fold
from app.core.run.state import RunState
from app.errors import NotFound, StoreUnavailable
from app.gateway.http.context import GatewayContext
from app.gateway.runs.open_streams import AWAY_SECONDS
from app.store.protocol import TenantStore

LOOK_SECONDS: Final = 0.2
"""Time between two looks whether journals have moved."""


class JournalWatch:
    """Finds out which of the runs that are followed here have new events: one query for all of them at a time.

    Those who look at a list of runs need less, and wait for `RunChanges`: it says that any run has changed.
    """

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._followed: Counter[str] = Counter()
        self._seqs: Mapping[str, int] = {}
        self._looked = -LOOK_SECONDS
        self._looking = asyncio.Lock()

    def begin(self, run: str) -> None:
        """Count a stream of a run."""
        self._followed[run] += 1

    def end(self, run: str) -> None:
        """Forget a stream of a run."""
        self._followed[run] -= 1
        if not self._followed[run]:
            del self._followed[run]

    async def wait_for_event(self, run: str, seq: int, seconds: float) -> bool:
        """Wait until the run has an event behind `seq`, for at most so many seconds; True if it has one."""
        end = self._context.tick() + seconds
        while self._context.tick() < end:
            async with self._looking:  # whoever comes first looks for all
                if self._context.tick() - self._looked >= LOOK_SECONDS:
                    await self._look()
            if self._seqs.get(run, 0) > seq:
                return True
            await asyncio.sleep(LOOK_SECONDS)
        return False

    async def _look(self) -> None:
        with suppress(StoreUnavailable):  # the streams stay open until the database is back
            self._seqs = await self._context.store.last_seqs(list(self._followed))
        self._looked = self._context.tick()


def frames(
    context: GatewayContext,
    watch: JournalWatch,
    store: TenantStore,
    events: tuple[Event, ...],
    after: int,
    to_json: Callable[[RunState, Sequence[Event]], Sequence[Mapping[str, Any]]],
) -> AsyncGenerator[bytes]:
    """Return the frames of a stream of the events behind number `after`, until the run has ended. `events` is the
    journal as far as it was read; `to_json` turns events into JSON by the run's state behind them. Raises
    `EventMalformed`."""
    state = fold(events)

    async def follow() -> AsyncGenerator[bytes]:
        watch.begin(state.run)
        try:
            async for new_events, state_behind in _follow_events(context, watch, store, events, state):
                bodies = to_json(state_behind, [event for event in new_events if event.seq > after])
                yield b"".join(map(_frame, bodies)) or b": ping\n\n"
        finally:
            watch.end(state.run)

    return follow()


async def _follow_events(
    context: GatewayContext, watch: JournalWatch, store: TenantStore, events: tuple[Event, ...], state: RunState
) -> AsyncIterator[tuple[Sequence[Event], RunState]]:
    """The events, and new ones, with the state behind them; none whenever nothing has come for the time of a
    keep-alive."""
    yield events, state
    while not _is_over(state):
        new_events: Sequence[Event] = ()
        if await watch.wait_for_event(state.run, state.seq, context.ping):
            try:
                new_events = (await store.journal(state.run, after=state.seq)).events
            except NotFound:
                return
            except StoreUnavailable:
                await asyncio.sleep(AWAY_SECONDS)
        for event in new_events:
            state = advance(state, event)
        yield new_events, state


def _is_over(state: RunState) -> bool:
    """Return True if the journal gets no further event."""
    return state.ended and not state.open_calls


def _frame(body: Mapping[str, Any]) -> bytes:
    return b"id: %d\ndata: %b\n\n" % (body["seq"], orjson.dumps(body))
