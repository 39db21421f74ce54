"""Cancels a run at its caller's request, which `app/engine/runs/cancellation.py` journals, and waits for its end."""

import asyncio
from contextlib import suppress

from app.core.run.kinds import COPIES
from app.engine.runs import cancellation
from app.stepqueue.protocol import StepQueue
from app.store.protocol import PLAN_TAG, RunQuery, RunRow, TenantStore
from app.store.run_pages import run_pages

PATIENCE, PAUSE = 3.0, 0.05
"""Seconds that a caller waits for the end that it has asked for, and between two looks."""
COPIES_PAGE = 1_000
"""Copies of one run that are read at a time."""


async def stop(store: TenantStore, queue: StepQueue, row: RunRow, now: float) -> RunRow:
    """Ask for a run's end in its caller's name, and wait for it a little; the row as it is then. `store` is that of the
    caller's tenant."""
    await cancellation.ask(store, queue, row, "caller", now)
    return await wait_until_ended(store, row, PATIENCE)


async def stop_with_copies(store: TenantStore, queue: StepQueue, row: RunRow, now: float) -> None:
    """Stop a run that is to be erased, and the runs that are erased with it: one that goes on would
    store texts after the erasure."""
    rows = [row, *await copies(store, row.id)]
    for copy in rows:
        await cancellation.ask(store, queue, copy, "caller", now)
    await asyncio.gather(*[wait_until_ended(store, copy, PATIENCE) for copy in rows])


async def copies(store: TenantStore, run: str) -> list[RunRow]:
    """Return the shadows and replays of a run, and theirs, and its further revisions if it is a plan: all have its
    request."""
    all_copies: list[RunRow] = []
    origins = [run]
    while origins:
        origin = origins.pop()
        new_copies: list[RunRow] = []
        async for rows in run_pages(store.runs, RunQuery(origin_run=origin, limit=COPIES_PAGE)):
            new_copies += [row for row in rows if row.origin_kind in COPIES]
        new_copies += await store.runs(RunQuery(tags=((PLAN_TAG, origin),), limit=COPIES_PAGE))
        all_copies += new_copies
        origins += [row.id for row in new_copies]
    return all_copies


async def wait_until_ended(store: TenantStore, row: RunRow, patience: float) -> RunRow:
    """Return the run's row once it has ended, or as it is when patience ends (seconds)."""
    with suppress(TimeoutError):
        async with asyncio.timeout(patience):
            while row.ended_at is None:
                await asyncio.sleep(PAUSE)
                row = await store.run(row.id)
    return row
