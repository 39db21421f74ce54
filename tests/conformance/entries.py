"""Entries as the tests of the store write them."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Any

from msgspec.structs import replace

from app.core.pool.catalog import Amount
from app.core.run.events import Kind
from app.store.protocol import (
    Entry,
    NewRun,
    Outbox,
    Projection,
    TicketMove,
)
from app.store.sql import SqlStore
from tests.harness.raw_facts import Raw

GRACE = 5.0
SALT = b"salt-of-this-run"
Opener = Callable[[], AbstractAsyncContextManager[SqlStore]]


def new_run(**changes: Any) -> NewRun:
    plain = NewRun("tenant", "key", "mini", "baton-mini", SALT, "driver", 100.0, 500.0, Amount(1000, 1000), "v1")
    return replace(plain, **changes)


def admission_entry(run: str, at: float = 1.0, row: Projection | None = None, **changes: Any) -> Entry:
    event = Raw(Kind.ADMITTED, {"tier": "mini"})
    return Entry(run, at, (event,), new=new_run(**changes), row=row or Projection())


def note(run: str, **fields: Any) -> Entry:
    """Any event that asks for no right."""
    return Entry(run, 2.0, (Raw(Kind.CANCEL_ASKED, {}),), **fields)


def queue_entry(run: str, step: int = 0, at: float = 2.0) -> Entry:
    return Entry(run, at, (Raw(Kind.STEP_QUEUED, {"step": step}),), epoch=1, outbox=(Outbox(step, "mini", "driver"),))


def take(run: str, version: int, holder: str, at: float = 3.0, until: float = 10.0) -> Entry:
    return Entry(run, at, move=TicketMove(0, "take", version=version, holder=holder, until=until))


def move_entry(run: str, verb: Any, claim: int, until: float = 0.0) -> Entry:
    return Entry(run, 4.0, (Raw(Kind.CALL_FINISHED, {}),), move=TicketMove(0, verb, claim=claim, until=until))


async def gather_outcomes(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*calls, return_exceptions=True)
