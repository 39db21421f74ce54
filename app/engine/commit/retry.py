"""The store while the database is away: its calls return when it has returned, or give up when their time is over.

An entry is committed once, although a commit that went unanswered may have been one.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from math import inf
from typing import TypeVar

import orjson

from app.core.run.events import Event, Fact
from app.network import retries
from app.network.retries import Left, retried
from app.store.protocol import Appended, Entry, Journal, Store

T = TypeVar("T")


async def patiently(store: Store, call: Callable[[], Awaitable[T]], left: Left) -> T:
    """Return what `call` returns once the database takes it; raises `StoreUnavailable` when no seconds are `left`.

    While the database is away, callers are woken in the order in which they came.
    """

    async def sleep(pause: float) -> None:
        if store.healthy:
            await asyncio.sleep(min(pause, left()))
        else:
            await store.wait_until_healthy(min(retries.DATABASE_LONGEST, left()))

    return await retried(call, lambda: retries.database(left=left, sleep=sleep))


class Patient:
    """The store for the driver of one run; `left` gives the seconds for which it is still worth waiting."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def append(self, entry: Entry, seq: int, left: Left, within: float = inf) -> Appended:
        """Commit an entry of at least one event, once, and within so many seconds. `seq` is that of an event that was
        known before."""
        tries = 0
        loop = asyncio.get_running_loop()
        until = loop.time() + within

        async def once() -> Appended:
            nonlocal tries
            tries += 1
            # A commit that went unanswered may have been one.
            landed = await self._landed(entry, seq) if tries > 1 else None
            return landed or await self._store.append(entry)

        return await patiently(self._store, once, lambda: min(left(), until - loop.time()))

    async def _landed(self, entry: Entry, seq: int) -> Appended | None:
        events = (await self._store.journal(entry.run, after=seq)).events
        wanted = [_as_stored(draft, entry.at) for draft in entry.events]
        for start in range(len(events) - len(wanted) + 1):
            found = events[start : start + len(wanted)]
            if [_stored(event) for event in found] == wanted:
                return Appended(found)
        return None

    async def journal(self, run: str, after: int, left: Left) -> Journal:
        """The journal of a run, from the event after `after` on."""
        return await patiently(self._store, partial(self._store.journal, run, after=after), left)

    async def contents(self, run: str, refs: Sequence[str], left: Left) -> dict[str, bytes]:
        """The bodies, by ref, that are still stored."""
        return dict(await patiently(self._store, partial(self._store.contents, run, refs), left))


def _as_stored(draft: Fact, at: float) -> tuple[str, float, object]:
    return draft.kind.value, at, orjson.loads(orjson.dumps(draft.to_json()))


def _stored(event: Event) -> tuple[str, float, object]:
    return event.kind.value, event.at, event.body
