"""How many calls one budget of a tenant admits, beside what the database admits without it.

`python -m tests.bench.hot_budget [--processes 3] [--seconds 4] [--rounds 3]` lets processes append the entries of
calls, an intent that holds money and an outcome that settles it, to a real Postgres that waits for its disk. They do so
for runs without a budget, for runs of one tenant with one budget, whose row every hold and every outcome changes, and
for runs of 64 tenants with a budget each. The three kinds alternate; the medians are printed, and the holds that the
budget's row has left, which must be none.
"""

import argparse
import asyncio
import itertools
import logging
import multiprocessing
import time
from statistics import median

from app.core.message.chat import Usage
from app.core.plan.workflow import Access
from app.core.pool.budgets import Budget
from app.core.run.events import CallFinished, CallIntended
from app.store.protocol import Entry, Ledger
from app.store.sql import SqlStore, open_store
from app.store.sqlkit.migrate import migrate
from tests.conformance.entries import admitted
from tests.harness import servers

KINDS = {"no budget": 0, "one budget": 1, "64 budgets": 64}
RUNS = 64
"""Runs that each process has at the same time, of which each makes one call after the other."""
ENOUGH = 1_000_000_000


def tenant_of(kind: str, run: int) -> str:
    """The tenant of a run, by its number."""
    return f"{kind} {run % max(KINDS[kind], 1)}"


async def calls_of(store: SqlStore, kind: str, run: str, number: int, until: float) -> int:
    """Make calls for a run until a time; how many they were."""
    tenant = tenant_of(kind, number)
    accounts = await store.budget_accounts(tenant, {"key": "k"})
    assert len(accounts) == bool(KINDS[kind])
    await store.append(admitted(run, tenant=tenant, budgets=accounts, cap=Ledger(ENOUGH, ENOUGH)))
    for made in itertools.count():
        if time.monotonic() >= until:
            return made
        call, held = f"{run} {made}", Ledger(10, 10)
        intent = CallIntended(call=call, n=None, worker="w", access=Access(True, ()), usd_held=10, tokens_held=10)
        await store.append(Entry(run, 2.0, (intent,), epoch=1, hold=held))
        done = CallFinished(call=call, n=None, outcome="ok", usage=Usage(input=1), usd=4, seconds=0.0)
        await store.append(Entry(run, 3.0, (done,), epoch=1, release=held, spent=Ledger(4, 4)))
    raise AssertionError("it counts without end")


async def played(url: str, kind: str, name: str, seconds: float) -> int:
    """The calls that one process makes."""
    async with open_store(url, connections=4, patience=60.0) as store:
        until = time.monotonic() + seconds
        work = [calls_of(store, kind, f"{name} {number}", number, until) for number in range(RUNS)]
        return sum(await asyncio.gather(*work))


def process(url: str, kind: str, name: str, seconds: float) -> int:
    """The same, in a process of its own."""
    logging.disable(logging.WARNING)
    return asyncio.run(played(url, kind, name, seconds))


async def prepared(url: str) -> None:
    """Set the budgets of all kinds."""
    async with open_store(url) as store:
        for kind, tenants in KINDS.items():
            for number in range(tenants):
                await store.set_budget(Budget(tenant_of(kind, number), "tenant", "", "month", ENOUGH))


async def held(url: str) -> int:
    """What the one budget's row still has in holds."""
    async with open_store(url) as store:
        budget = Budget(tenant_of("one budget", 0), "tenant", "", "month", ENOUGH)
        return sum(one.held for one in await store.budget_use(budget.id, 9))


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.hot_budget")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    spawning = multiprocessing.get_context("spawn")
    with servers.postgres(fsync=True) as server, spawning.Pool(given.processes) as pool:
        migrate(server.url)
        asyncio.run(prepared(server.url))
        for turn in range(given.rounds):
            for kind in KINDS:
                names = [f"{kind} {turn} {number}" for number in range(given.processes)]
                made = pool.starmap(process, [(server.url, kind, name, given.seconds) for name in names])
                rates[kind].append(sum(made) / given.seconds)
        left = asyncio.run(held(server.url))
    for kind, found in rates.items():
        rounds = ", ".join(f"{rate:.0f}" for rate in found)
        print(f"{kind:12} {median(found):6.0f} calls a second ({rounds})")
    print(f"held in the end: {left}")


if __name__ == "__main__":
    main()
