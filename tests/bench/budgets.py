"""`python -m tests.bench.budgets`: the race table of budgets over several runs.

Several processes of the product run against the same budgets over one real Postgres, at the same time and as fast as
they can: each is a gateway with an engine, or, with `--engines`, `--processes` are gateways alone, and a real Redis
carries their runs to the engines. A stub provider bills as each row says. After each row the table has, of the
budget that came closest to its amount: what was spent of it, and by how much it was overshot. That is computed twice,
from the accounts and from the outcomes in the journal, and the two must be equal.

Rows: one budget for all; users that nobody has seen before; calls beside the boundary of two prices; a worker of
unknown price; a provider that bills beyond the worst case, which is an overrun and no overshoot; processes that are
killed between hold and send; processes whose clocks jump by a day; and a tenant's, a user's and a key's budget at once.
`--runs 200 --processes 8` are the defaults; about a minute of CPU. The other set-up is
`--runs 400 --processes 3 --engines 3`. With `--slices N` all budgets are held in slices.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
from msgspec import Struct
from msgspec.structs import astuple, replace

from app.core.message.chat import Message, Task, Text
from app.core.pool.budgets import Budget
from app.engine.calls.attempt import Attempt
from app.errors import BatonError, BudgetExhausted
from app.process.wiring import Runtime
from app.store.protocol import Store
from app.store.sql import open_store
from app.store.sqlkit.migrate import migrate
from tests.harness import servers
from tests.harness.in_process import finish, order, running_service
from tests.stubs import Reply
from tests.stubs.control import StubControl, stub_process
from tests.stubs.script import Usage

MILLION = 1_000_000
AT_ONCE = 4
"""Runs that each process has going at the same time."""
KILLED = 3
"""Processes that are killed in the row of kills."""
CALLS_BEFORE_KILL = 5
SETTLE_SECONDS = 60.0
"""Seconds within which all holds are settled once no run goes on: those of killed processes wait for their leases."""
LEASE_SECONDS = "10"
"""Longer than a crowded machine keeps a process from renewing it: a call whose lease is lost is unknown."""
JUMP_SECONDS = 26 * 3_600.0
LONG_TEXT = "What is 2 + 2, and why? " * 8
WORKER = """
[workers.{name}]
provider = "stub"
model = "{name}"
{price}

[tiers.{name}]
pool = ["{name}"]
conductor = {{ kind = "fixed", shape = "single", workers = ["{name}"] }}
fallback = "{name}"
limits = {{ steps = 1, attempts = 1, seconds = 60, output_tokens = 1000, floor_tokens = 1000 }}
"""
PRICES = {
    "usual": "price = { input = 1, output = 2 }",
    "tiered": "price = { input = 1, output = 2, long = { above = 100, input = 50, output = 50 } }",
    "unpriced": "",
    "greedy": "price = { input = 1, output = 2 }",
}
BILLS = {
    "usual": Usage(input=20, output=900),
    "tiered": Usage(input=101, output=900),
    "unpriced": Usage(input=20),
    "greedy": Usage(input=20, output=3_000),
}


class Row(Struct, frozen=True):
    """One race: its budgets, and what the processes do. `users` and `keys` are how many share the runs."""

    name: str
    budgets: tuple[Budget, ...]
    tier: str = "usual"
    share: float = 1.0
    """The share of `--runs` that each process does."""
    users: int = 1
    keys: int = 1
    jumps: bool = False
    kills: bool = False
    is_fine: bool = False
    """True if a call's hold is at most 1 % of the budget and no call is unknown, so that 97 % are to be used."""

    @property
    def tenant(self) -> str:
        """The tenant, which no other row has."""
        return self.budgets[0].tenant


def budget(tenant: str, scope: Any = "tenant", name: str = "", usd: float = 1.0) -> Budget:
    """Return a budget of a month, in dollars."""
    return Budget(tenant, scope, name, "month", round(usd * MILLION), zone="Europe/Berlin")


ROWS = (
    Row("one budget", (budget("one"),), is_fine=True),
    Row("unknown users", (budget("unknown", "user", "*", usd=0.04),), share=0.5, users=10),
    Row("tier boundary", (budget("tiered"),), tier="tiered", share=0.25),
    Row("unknown price", (budget("unpriced"),), tier="unpriced", share=0.1),
    Row("bills beyond the worst case", (budget("greedy", usd=0.4),), tier="greedy", share=0.25),
    Row("kill -9 between hold and send", (budget("killed", usd=0.4),), share=0.25, kills=True),
    Row("a clock that jumps", (budget("jumping", usd=0.4),), share=0.25, jumps=True),
    Row(
        "tenant, user and key at once",
        (budget("three", usd=0.6), budget("three", "user", "*", usd=0.3), budget("three", "key", "*", usd=0.4)),
        share=0.5,
        users=3,
        keys=2,
        is_fine=True,
    ),
)


@dataclass(slots=True)
class Result:
    """The outcome of a row. Money is in micro-dollars."""

    name: str
    answered: int = 0
    refused: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    amount: int = 0
    spent: int = 0
    held_usd: int = 0
    overshoot: int = 0
    overrun: int = 0
    billed: int = 0
    unknown: int = 0
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)


# -- one process


class Place(Struct, frozen=True):
    """The surroundings of a process, and its role there: both, gateway or engine. `redis` is empty where it needs
    none. An engine is given rows without runs, in which only its clock may jump."""

    database: str
    stub: str
    redis: str = ""
    role: str = "both"


async def work(folder: Path, place: Place, doomed: bool) -> None:
    """Play the rows that arrive on standard input, one JSON object a line, and answer each with its counts."""
    pool = f'[providers.stub]\nformat = "openai"\nbase_url = "{place.stub}"\n'
    pool += "".join(WORKER.format(name=name, price=price) for name, price in PRICES.items())
    if doomed:
        _kill_at_send(CALLS_BEFORE_KILL)
    environ = {"BATON_DATABASE_URL": place.database, "BATON_LEASE_SECONDS": LEASE_SECONDS}
    if place.redis:
        environ["BATON_REDIS_URL"] = place.redis
    async with running_service(folder, pool, environ, drives=place.role != "gateway", audits=False) as runtime:
        print("ready", flush=True)
        jumped = 0.0
        while line := await asyncio.to_thread(sys.stdin.readline):
            row = json.loads(line)
            if place.role == "engine":  # its clock is wrong until the next row begins
                runtime.clock._offset -= jumped
                jumped = JUMP_SECONDS if row["jumps"] else 0.0
                runtime.clock._offset += jumped
            print(json.dumps(await _play(runtime, row)), flush=True)


def _kill_at_send(calls: int) -> None:
    """Have this process killed when it is about to send its call of that number, whose hold is committed."""
    sent_count = 0
    stream = Attempt.stream

    def count_and_stream(self: Attempt) -> Any:
        nonlocal sent_count
        sent_count += 1
        if sent_count >= calls:
            os.kill(os.getpid(), signal.SIGKILL)
        return stream(self)

    Attempt.stream = count_and_stream  # type: ignore[method-assign]


async def _play(runtime: Runtime, row: Mapping[str, Any]) -> dict[str, int]:
    counts: dict[str, int] = {}
    numbers = iter(range(row["runs"]))

    async def one_after_the_other() -> None:
        for number in numbers:
            if row["jumps"] and number == row["runs"] // 3:
                runtime.clock._offset += JUMP_SECONDS  # as if the machine's clock were set
            word = await _run(runtime, row, number)
            counts[word] = counts.get(word, 0) + 1

    await asyncio.gather(*(one_after_the_other() for _ in range(AT_ONCE)))
    if row["jumps"]:
        runtime.clock._offset -= JUMP_SECONDS
    return counts


async def _run(runtime: Runtime, row: Mapping[str, Any], number: int) -> str:
    place = row["first"] + number
    task = Task((Message("user", (Text(LONG_TEXT),)),), user=f"user {place % row['users']}")
    new_order = replace(order(runtime, row["tier"], task=task), tenant=row["tenant"], key=f"key {place % row['keys']}")
    try:
        error = (await finish(await runtime.runs.start(new_order))).ended.error
    except BatonError as refusal:
        error = refusal
    if error is None:
        return "answered"
    return "refused" if isinstance(error, BudgetExhausted) else str(error.public_code)


# -- all of them


class Process:
    """One process of the race."""

    def __init__(self, folder: Path, place: Place, *, doomed: bool = False) -> None:
        folder.mkdir()
        words = ["--doomed"] if doomed else []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.budgets", "--work", str(folder), *astuple(place), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "log").open("w"),
            text=True,
        )
        self._folder = folder

    def wait_until_ready(self) -> None:
        """Wait for its first line. Raises RuntimeError with the end of its log if there is none."""
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise RuntimeError((self._folder / "log").read_text()[-4000:])

    def begin(self, row: Mapping[str, Any]) -> None:
        """Have it play a row."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(row) + "\n")
        self._process.stdin.flush()

    def counts(self) -> dict[str, int]:
        """Return its answer to a row; empty if it was killed."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else {}

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


@contextmanager
def processes(folder: Path, count: int, place: Place, *, doomed: bool = False) -> Iterator[list[Process]]:
    """Start processes, and end them when the block is left."""
    with ExitStack() as stack:
        workers = []
        for number in range(count):
            workers.append(Process(folder / f"{'doomed' if doomed else place.role}{number}", place, doomed=doomed))
            stack.callback(workers[-1].close)
        for server in workers:
            server.wait_until_ready()
        yield workers


def race(row: Row, players: Sequence[Process], engines: Sequence[Process], runs: int) -> dict[str, int]:
    """Have the processes play a row at the same time; the sum of their counts."""
    each = max(1, round(runs * row.share))
    for place, player in enumerate([*players, *engines]):
        player.begin(
            {
                "tier": row.tier,
                "tenant": row.tenant,
                "runs": each if player in players else 0,
                "first": place * each,
                "users": row.users,
                "keys": row.keys,
                "jumps": row.jumps and place % 4 == 1,
            }
        )
    total: dict[str, int] = {}
    for player in [*players, *engines]:
        for word, count in player.counts().items():
            total[word] = total.get(word, 0) + count
    return total


async def _figures(store: Store, database: str, row: Row, result: Result) -> None:
    """Read the accounts of a row once nothing is held, and compare them with the outcomes in the journal."""
    until = time.monotonic() + SETTLE_SECONDS
    while True:
        uses = [(budget, use) for budget in row.budgets for use in await store.budget_use(budget.id, 1_000)]
        if not any(use.held for _, use in uses) or time.monotonic() > until:
            break
        await asyncio.sleep(0.5)
    result.held_usd = sum(use.held for _, use in uses)
    result.overrun = max([0, *(use.overrun for _, use in uses)])
    result.overshoot = max([0, *(use.spent + use.held - use.overrun - budget.usd for budget, use in uses)])
    dearest = max(uses, key=lambda pair: pair[1].spent / pair[0].usd, default=None)
    result.amount = dearest[0].usd if dearest is not None else row.budgets[0].usd
    result.spent = dearest[1].spent if dearest is not None else 0
    connection = await asyncpg.connect(database)
    try:
        query = """SELECT coalesce(sum((b->>'usd')::bigint), 0), count(*) FILTER (WHERE b->>'outcome' = 'unknown')
            FROM events JOIN runs ON runs.id = events.run
            CROSS JOIN LATERAL (SELECT convert_from(events.body, 'UTF8')::jsonb AS b) AS decoded
            WHERE events.kind = 'call.finished' AND runs.tenant = $1"""
        result.billed, result.unknown = await connection.fetchrow(query, row.tenant)
    finally:
        await connection.close()
    for scope in {budget.scope for budget in row.budgets}:
        spent = sum(use.spent for account, use in uses if account.scope == scope)
        if spent != result.billed:
            result.faults.append(f"the accounts of each {scope} have {spent}, the journal {result.billed}")


def verdict(row: Row, result: Result) -> list[str]:
    """Return what is wrong with a row; empty if nothing is."""
    faults = list(result.faults)
    if result.overshoot:
        faults.append(f"overshot by {result.overshoot} micro-dollars")
    if result.held_usd:
        faults.append(f"{result.held_usd} micro-dollars are held for good")
    if row.is_fine and result.spent < 0.97 * result.amount:
        faults.append("less than 97 % was used")
    if row.tier == "unpriced" and (result.answered or result.billed):
        faults.append("a worker of unknown price was called")
    if bool(result.overrun) != (row.tier == "greedy"):
        faults.append("what was billed beyond the worst case is not the overrun")
    if row.kills and not result.unknown:
        faults.append("no call was unknown")
    return faults


async def table(
    folder: Path, chosen: Sequence[Row], runs: int, count: int, engines: int, slices: int | None = None
) -> bool:
    """Play the rows and print the table. True if nothing is wrong with any. Without `engines` each process is one."""
    fine = True
    print(
        f"{'':34}{'answered':>9}{'refused':>9}{'other':>7}{'unknown':>9}{'used':>8}{'overshoot':>11}{'overrun':>9}{'seconds':>9}"
    )
    with servers.postgres(fsync=True) as server, stub_process() as stub, ExitStack() as stack:
        await asyncio.to_thread(migrate, server.url)
        _teach(stub)
        place = Place(server.url, stub.vllm_url)
        if engines:
            place = replace(place, redis=stack.enter_context(servers.redis()).url, role="gateway")
        async with open_store(server.url) as store:
            for cap in [budget for row in chosen for budget in row.budgets]:
                await store.set_budget(replace(cap, slices=slices))
            others = replace(place, role="engine")
            with processes(folder, engines, others) as driving, processes(folder, count, place) as players:
                for row in chosen:
                    result = await _race(folder, row, players, driving, runs, others if engines else place)
                    await _figures(store, server.url, row, result)
                    wrong = verdict(row, result)
                    fine = fine and not wrong
                    print(line(result), *wrong, flush=True)
    return fine


async def _race(
    folder: Path, row: Row, players: Sequence[Process], engines: Sequence[Process], runs: int, place: Place
) -> Result:
    began = time.monotonic()
    with ExitStack() as stack:
        if row.kills:
            doomed = stack.enter_context(processes(folder, KILLED, place, doomed=True))
            players, engines = (players, [*engines, *doomed]) if engines else ([*players, *doomed], engines)
        total = await asyncio.to_thread(race, row, players, engines, runs)
    result = Result(row.name, total.pop("answered", 0), total.pop("refused", 0), total)
    result.seconds = time.monotonic() - began
    return result


def _teach(stub: StubControl) -> None:
    for name, bill in BILLS.items():
        stub.always(name, Reply(usage=bill))


def line(result: Result) -> str:
    """Return the row as it is printed."""
    other = sum(result.failed.values())
    used = f"{result.spent / result.amount:.1%}"
    return (
        f"{result.name:34}{result.answered:>9}{result.refused:>9}{other:>7}{result.unknown:>9}{used:>8}"
        f"{result.overshoot:>11}{result.overrun:>9}{result.seconds:>9.1f}"
    )


def main() -> int:
    """Play the table, or be one of its processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200, help="runs of each process in the first row")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--row", help="only the rows whose name has these words")
    parser.add_argument("--engines", type=int, default=0, help="engines of their own; the processes are gateways then")
    parser.add_argument("--slices", type=int, help="slices of each budget")
    parser.add_argument("--work", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--doomed", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        folder, *place = options.work
        asyncio.run(work(Path(folder), Place(*place), options.doomed))
        return 0
    chosen = [row for row in ROWS if options.row is None or options.row in row.name]
    with tempfile.TemporaryDirectory() as folder:
        played = table(Path(folder), chosen, options.runs, options.processes, options.engines, options.slices)
        return 0 if asyncio.run(played) else 1


if __name__ == "__main__":
    sys.exit(main())
