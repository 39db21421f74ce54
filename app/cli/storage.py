"""The configured database, for commands that read or write it without the rest of the service."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from app.core.run.kinds import RUN_STATES
from app.errors import ConfigInvalid, NotFound, StoreUnavailable
from app.process.config import Settings, describe
from app.store.protocol import RunQuery, RunRow, Store
from app.store.sql import open_store

PAGE = 200
DEPTH = 10_000
"""The newest runs in which a prefix of an id is searched."""


@asynccontextmanager
async def opened(settings: Settings) -> AsyncIterator[Store]:
    """Open the store. The message of `StoreUnavailable` names the database; log lines of the store are suppressed."""
    logging.getLogger("app.store").setLevel(logging.ERROR)
    try:
        async with open_store(settings.database_url, connections=2) as store:
            yield store
    except StoreUnavailable:
        where = next(row.value for row in describe(settings) if row.name == "BATON_DATABASE_URL")
        raise StoreUnavailable(
            f"The database {where} cannot be used; `baton migrate` makes its tables, `baton doctor` says what is wrong."
        ) from None


async def find(store: Store, wanted: str) -> RunRow:
    """Find a run by its id, a prefix of it, the id of its chat completion, or `last`. Raises `NotFound`."""
    wanted = wanted.removeprefix("chatcmpl-")
    if wanted == "last":
        newest = await store.runs(RunQuery(limit=1))
        if not newest:
            raise NotFound("There are no runs yet; send a request first.")
        return newest[0]
    try:
        return await store.run(wanted)
    except NotFound:
        return await _by_prefix(store, wanted if wanted.startswith("run_") else f"run_{wanted}")


async def _by_prefix(store: Store, prefix: str) -> RunRow:
    found: list[RunRow] = []
    before: tuple[float, str] | None = None
    for _ in range(DEPTH // PAGE):
        rows = await store.runs(RunQuery(before=before, limit=PAGE))
        found += [row for row in rows if row.id.startswith(prefix)]
        if len(rows) < PAGE:
            break
        before = (rows[-1].created_at, rows[-1].id)
    if not found:
        raise NotFound("There is no such run; `baton runs ls` lists the newest.")
    if len(found) > 1:
        raise NotFound(f"{len(found)} runs begin like that; give more of the id.")
    return found[0]


def check_state(state: str | None) -> None:
    """Raise `ConfigInvalid` for a state that no run can have."""
    if state is not None and state not in RUN_STATES:
        raise ConfigInvalid([f"--state: there is no such state; there are {', '.join(RUN_STATES)}"])
