"""Measure how many calls a tenant's one budget admits, beside what the database admits without it.

`python -m tests.bench.hot_budget [--processes 3] [--engines 1] [--runs 64] [--slices 16] [--seconds 4] [--rounds 3]`
lets engines append the entries of calls, an intent that holds money and an outcome that settles it, to a real Postgres
that waits for its disk; `--engines` are the stores of each process, each with a queue and connections of its own as
that of an engine. They do so for runs without a budget, for runs of one tenant with one budget, whose row every hold
and every outcome changes, for runs of one tenant with one budget in slices, and for runs of a tenant with a budget for
each engine, which is what slices are at their best. Each engine takes a slice by chance, as processes do, so that two
may take the same.

The kinds alternate, and the medians are printed: calls a second, how long an entry waits until it is committed, entries
of a transaction, and for how long a transaction has the rows of its budgets locked, from the answer to the statement
that locks them until that to its commit. Two entries are a call, so the last two figures say what one row bears at the
most, however many engines there are. What is held in the end of all budgets must be nothing.
"""

import argparse
import asyncio
import itertools
import logging
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from contextvars import ContextVar
from statistics import mean, median
from typing import Any
from unittest import mock

from msgspec import Struct
from msgspec.structs import astuple, replace

from app.core.message.chat import Usage
from app.core.plan.workflow import Access
from app.core.pool.budgets import Budget
from app.core.pool.catalog import Amount
from app.core.run.events import CallFinished, CallIntended
from app.store.protocol import Entry
from app.store.rows import budget_windows
from app.store.sql import SqlStore, open_store
from app.store.sqlkit.migrate import migrate
from app.store.writing.group_commit import GroupCommit
from tests.conformance.entries import admission_entry
from tests.harness import servers

SLICED, EACH = "one budget in slices", "a budget for each engine"
KINDS = ("no budget", "one budget", SLICED, EACH)
ENOUGH = 1_000_000_000


def tenant_of(kind: str, engine: int) -> str:
    """The tenant of the runs of an engine."""
    if kind == EACH:
        return f"{kind} {engine}"
    return kind


LOCKED_AT: ContextVar[list[float]] = ContextVar("LOCKED_AT")
"""The times at which the transaction of a store has locked rows of budgets."""


class Transactions:
    """The entries of each transaction of this process, and the seconds for which it had rows of budgets locked."""

    def __init__(self) -> None:
        self.entries: list[int] = []
        self.seconds: list[float] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note all of them until the block is left."""
        commit, lock = GroupCommit._commit, budget_windows.lock

        async def note_commit(group: GroupCommit, batch: Any, **how: Any) -> Any:
            locked_at: list[float] = []
            LOCKED_AT.set(locked_at)
            outcomes = await commit(group, batch, **how)
            self.entries.append(len(batch))
            self.seconds.append(time.monotonic() - locked_at[-1] if locked_at else 0.0)
            return outcomes

        def note_lock(*arguments: Any) -> Any:
            key_of_lock = lock(*arguments)
            LOCKED_AT.get().append(time.monotonic())
            return key_of_lock

        with (
            mock.patch.object(GroupCommit, "_commit", note_commit),
            mock.patch.object(budget_windows, "lock", note_lock),
        ):
            yield


class Part(Struct, frozen=True):
    """The part of one process in one kind: its number and name, its engines, and the runs of each at the same time."""

    url: str
    kind: str
    number: int
    name: str
    engines: int
    runs: int
    seconds: float


class Figures(Struct, frozen=True):
    """Calls a second, the median seconds until an entry is committed, the mean entries of a transaction, and its mean
    seconds with rows of budgets locked."""

    calls: float
    wait: float
    entries: float
    locked: float


async def calls_of(store: SqlStore, run: str, tenant: str, accounts: tuple[str, ...], until: float) -> list[float]:
    """Make calls for a run until a time; how long each of their entries took."""
    took: list[float] = []
    await store.append(admission_entry(run, tenant=tenant, budgets=accounts, cap=Amount(ENOUGH, ENOUGH)))
    for number in itertools.count():
        if time.monotonic() >= until:
            return took
        call, hold = f"{run} {number}", Amount(10, 10)
        intent = CallIntended(call=call, n=None, worker="w", access=Access(True, ()), usd_held=10, tokens_held=10)
        call_finished = CallFinished(call=call, n=None, outcome="ok", usage=Usage(input=1), usd=4, seconds=0.0)
        for entry in (
            Entry(run, 2.0, (intent,), epoch=1, hold=hold),
            Entry(run, 3.0, (call_finished,), epoch=1, release=hold, spent=Amount(4, 4)),
        ):
            began = time.monotonic()
            await store.append(entry)
            took.append(time.monotonic() - began)
    raise AssertionError("it counts without end")


async def play_part(part: Part) -> list[float]:
    """The calls of all engines of a process: how long each of their entries took."""
    async with AsyncExitStack() as stack:
        engines = []
        for number in range(part.engines):
            store = await stack.enter_async_context(open_store(part.url, connections=2, patience=60.0))
            tenant = tenant_of(part.kind, part.number * part.engines + number)
            accounts = await store.budget_accounts(tenant, {"key": "k"})
            assert len(accounts) == (part.kind != KINDS[0])
            engines.append((store, tenant, accounts))
        until, work = time.monotonic() + part.seconds, []
        for number, (store, tenant, accounts) in enumerate(engines):
            for run in range(part.runs):
                work.append(calls_of(store, f"{part.name} {number} {run}", tenant, accounts, until))
        results = await asyncio.gather(*work)
    return [seconds for took in results for seconds in took]


def process(part: Part) -> Figures:
    """Do the same in a process of its own."""
    logging.disable(logging.WARNING)
    transactions = Transactions()
    with transactions.watched():
        took = asyncio.run(play_part(part))
    calls = len(took) / 2 / part.seconds
    return Figures(calls, median(took), mean(transactions.entries), mean(transactions.seconds))


def together(parts: Sequence[Figures]) -> Figures:
    """The figures of several processes at the same time."""
    calls, wait, entries, locked = zip(*map(astuple, parts), strict=True)
    return Figures(sum(calls), mean(wait), mean(entries), mean(locked))


async def prepare_budgets(url: str, engines: int, slices: int) -> None:
    """Set the budgets of all kinds."""
    async with open_store(url) as store:
        for kind in KINDS[1:]:
            for tenant in sorted({tenant_of(kind, number) for number in range(engines)}):
                budget = Budget(tenant, "tenant", "", "month", ENOUGH)
                await store.set_budget(replace(budget, slices=slices) if kind == SLICED else budget)


async def sum_held(url: str) -> int:
    """Return the sum that all budgets still have in holds."""
    total = 0
    async with open_store(url) as store:
        for budget in await store.budgets():
            total += sum(window.held for window in await store.budget_use(budget.id, 9))
    return total


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.hot_budget")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--engines", type=int, default=1, help="engines of each process")
    parser.add_argument("--runs", type=int, default=64, help="runs that each engine has at the same time")
    parser.add_argument("--slices", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    figures: dict[str, list[Figures]] = {kind: [] for kind in KINDS}
    spawning = multiprocessing.get_context("spawn")
    with servers.postgres(fsync=True) as server, spawning.Pool(options.processes) as pool:
        migrate(server.url)
        asyncio.run(prepare_budgets(server.url, options.processes * options.engines, options.slices))
        for turn in range(options.rounds):
            for kind in KINDS:
                parts = []
                for number in range(options.processes):
                    name = f"{kind} {turn} {number}"
                    parts.append(Part(server.url, kind, number, name, options.engines, options.runs, options.seconds))
                figures[kind].append(together(pool.map(process, parts, chunksize=1)))
        left = asyncio.run(sum_held(server.url))
    for kind, rounds in figures.items():
        calls = ", ".join(f"{figures.calls:.0f}" for figures in rounds)
        usual = Figures(*[median(column) for column in zip(*map(astuple, rounds), strict=True)])
        words = f"{kind:24} {usual.calls:6.0f} calls a second ({calls}), an entry in {usual.wait * 1_000:.0f} ms, "
        words += f"{usual.entries:.0f} entries a transaction"
        if usual.locked:
            most = usual.entries / 2 / usual.locked
            words += f", rows locked for {usual.locked * 1_000:.1f} ms of it: at most {most:.0f} calls a second"
        print(words)
    print(f"held in the end: {left}")


if __name__ == "__main__":
    main()
