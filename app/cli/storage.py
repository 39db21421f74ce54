"""The configured database, for commands that read or write it without the rest of the service."""

import asyncio
import getpass
import logging
import re
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from datetime import UTC, datetime

from msgspec.structs import replace

from app.cli import terminal
from app.core.run.identifiers import run_of_reply
from app.core.run.kinds import ENDED, RUN_STATES
from app.errors import ContentKeyUnavailable, NotFound, RunPruned, StoreUnavailable
from app.process.config import Settings, content_keys, describe, read
from app.store.archive import Archive, open_archive
from app.store.protocol import Actor, RunQuery, RunRow, Store
from app.store.run_pages import run_pages
from app.store.sql import open_store
from app.store.sqlkit import revisions
from app.store.sqlkit.runner import Fault

PAGE_RUNS = 200
MAX_SEARCHED_RUNS = 10_000
"""Most runs among which a prefix of an id is searched, the newest first."""
TIME_DIGITS = 11
"""Hexadecimal digits of an id that are its time, in milliseconds."""
SKEW_SECONDS = 3_600.0
"""Longest time between the making of an id and the admission of its run, by clocks that differ."""


def database_name(settings: Settings) -> str:
    """Return the URL of the configured database without its password."""
    return next(row.value for row in describe(settings) if row.name == "BATON_DATABASE_URL")


def print_database(settings: Settings) -> None:
    """Name the configured database on standard error."""
    print(f"database: {database_name(settings)}", file=sys.stderr, flush=True)


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Read the settings for a command on the configured database, and name that on standard error, where warnings of
    the log go, too. Raises `ConfigInvalid`."""
    settings = read(environ)
    terminal.log_to_stderr("warning")
    print_database(settings)
    return settings


def operator() -> Actor:
    """Return the author of the changes that a command makes: the user of the operating system."""
    try:
        return Actor(getpass.getuser(), "command")
    except (KeyError, OSError):  # a container's user may have no name
        return Actor("unknown", "command")


@contextmanager
def name_database_in_failures(settings: Settings) -> Iterator[None]:
    """Give every `StoreUnavailable` a message that names the database."""
    try:
        yield
    except StoreUnavailable as error:
        words = error.message.removeprefix("The database cannot be used: ")
        raise StoreUnavailable(f"The database {database_name(settings)} cannot be used: {words}") from None


@asynccontextmanager
async def existing_database(settings: Settings) -> AsyncIterator[None]:
    """Require that the configured database exists, and explain why it could not be used.

    The message of `StoreUnavailable` names the database and the cause, or the key of a content that cannot be used; log
    lines of the store are suppressed.
    """
    logging.getLogger("app.store").setLevel(logging.ERROR)
    if not revisions.exists(settings.database_url):
        raise StoreUnavailable(
            f"There is no database {database_name(settings)} yet; `baton serve` or `baton migrate` makes it. "
            "BATON_DATA_DIR and BATON_DATABASE_URL name another one."
        )
    try:
        yield
    except ContentKeyUnavailable:
        raise
    except StoreUnavailable as error:
        cause = await asyncio.to_thread(revisions.cause, settings.database_url)
        words = cause or f"it did not carry this out{quoted_refusal(error)}; `baton doctor` looks further"
        raise StoreUnavailable(f"The database {database_name(settings)} cannot be used: {words}.") from None


def quoted_refusal(error: StoreUnavailable) -> str:
    """Return what the database said, in brackets; empty where that is not known."""
    fault = error.__cause__
    words = fault.describe_cause() if isinstance(fault, Fault) else ""
    if not words:
        return ""
    return f" ({terminal.clean(words)})"


def open_journals(settings: Settings) -> AbstractAsyncContextManager[Archive]:
    """Open the configured database for reading its journal, within `existing_database`."""
    return open_archive(settings.database_url, content_keys(settings))


@asynccontextmanager
async def open_configured_store(settings: Settings) -> AsyncIterator[Store]:
    """Open the store of the configured database, as `existing_database` does."""
    opening = open_store(settings.database_url, connections=2, content_keys=content_keys(settings))
    async with existing_database(settings), opening as store:
        yield store


async def every_run(store: Store, query: RunQuery) -> AsyncIterator[RunRow]:
    """Yield all runs that a query selects, in its order. Its limit is not regarded: they are read page by page."""
    async for rows in run_pages(store.runs, replace(query, limit=PAGE_RUNS)):
        for row in rows:
            yield row


async def open_runs(store: Store) -> list[RunRow]:
    """Return every run that has not ended, the oldest first."""
    rows: list[RunRow] = []
    for state in RUN_STATES:
        if state not in ENDED:
            rows += [row async for row in every_run(store, RunQuery(state=state))]
    return sorted(rows, key=lambda row: (row.created_at, row.id))


async def find_run(store: Store, name: str) -> RunRow:
    """Find a run by its id, a prefix of it, the id of any of its replies, or `last`. Raises `NotFound`."""
    if name == "last":
        newest = await store.runs(RunQuery(limit=1))
        if not newest:
            raise NotFound("There are no runs yet; send a request first.")
        return newest[0]
    run = run_id(name)
    try:
        return await store.run(run)
    except NotFound:
        await _raise_if_pruned(store, run)
        return await _find_by_prefix(store, run)


def run_id(name: str) -> str:
    """Return the id of a run, or the beginning of one, that is named by the id of a reply or without its `run_`."""
    run = run_of_reply(name)
    if run.startswith("run_"):
        return run
    return f"run_{run}"


async def _raise_if_pruned(store: Store, run: str) -> None:
    """Raise `RunPruned` with the place of its archive for a run that was pruned."""
    try:
        record = await store.pruned_run(run)
    except NotFound:
        return
    day = datetime.fromtimestamp(record.pruned_at, UTC).date()
    archive_text = "it was not archived"
    if record.archive:
        archive_text = f"its journal is in {record.archive}; read it with `baton audit check FILE --run {run}`"
    raise RunPruned(f"The run ended as {record.state} and was pruned on {day}; {archive_text}.")


async def _find_by_prefix(store: Store, prefix: str) -> RunRow:
    matches: list[RunRow] = []
    searched = 0
    since, until = _times_of_prefix(prefix)
    async for row in every_run(store, RunQuery(since=since, until=until)):
        searched += 1
        if row.id.startswith(prefix):
            matches.append(row)
        if searched == MAX_SEARCHED_RUNS:
            break
    if not matches and searched == MAX_SEARCHED_RUNS:  # there may be more, and one of them may begin like that
        raise NotFound(f"None of the newest {MAX_SEARCHED_RUNS:,} runs begins like that; give more of the id.")
    if not matches:
        raise NotFound("There is no such run; `baton runs ls` lists the newest.")
    if len(matches) > 1:
        raise NotFound(f"{len(matches)} runs begin like that; give more of the id.")
    return matches[0]


def _times_of_prefix(prefix: str) -> tuple[float | None, float | None]:
    """Return the times between which runs were admitted whose ids begin like that: an id begins with its time."""
    digits = prefix.removeprefix("run_")[:TIME_DIGITS]
    if not re.fullmatch("[0-9a-f]+", digits):
        return None, None
    first, last = int(digits.ljust(TIME_DIGITS, "0"), 16), int(digits.ljust(TIME_DIGITS, "f"), 16)
    return first / 1000 - SKEW_SECONDS, last / 1000 + SKEW_SECONDS
