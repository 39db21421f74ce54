"""Measure what partitions of the table of events would cost each run.

`python -m tests.bench.partitions [--partitions 13] [--rounds 4] [--seconds 3]` starts two services, each with a
gateway, an engine and a Postgres of its own. In one of them `events` is split by ranges of the run's id, a month each,
with the same indexes, triggers, policies and grants. Both carry out runs of one step in turns, and the CPU time of each
part is compared. With `--partitions 0` both are alike, which shows how far two equal services differ.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from contextlib import ExitStack

import asyncpg

from tests.bench.load import Load, run
from tests.bench.scaleout import CONNECTIONS, spent
from tests.bench.scaleout import service as one_service
from tests.bench.scenarios import one_step
from tests.bench.subject import Target
from tests.harness.servers import Server

MONTH_MS = 30 * 86_400_000
PARTS = ("Postgres", "gateway", "engine")
WARM_UP_SECONDS = 3.0

Service = tuple[Target, Server]


async def split(url: str, count: int) -> None:
    """Replace `events` by a table of so many partitions, of which the last is the month that has just begun, and one
    more for what came before."""
    connection = await asyncpg.connect(url)
    try:
        policies = await connection.fetch("SELECT * FROM pg_policies WHERE tablename = 'events'")
        grants = await connection.fetch(
            "SELECT grantee, privilege_type FROM information_schema.role_table_grants WHERE table_name = 'events'"
        )
        indexes = await connection.fetch("SELECT indexname, indexdef FROM pg_indexes WHERE tablename = 'events'")
        triggers = await connection.fetch(
            "SELECT pg_get_triggerdef(oid) AS made FROM pg_trigger "
            "WHERE tgrelid = 'events'::regclass AND NOT tgisinternal"
        )
        await connection.execute("ALTER TABLE events RENAME TO events_before")
        columns = "LIKE events_before INCLUDING DEFAULTS INCLUDING CONSTRAINTS"
        await connection.execute(f"CREATE TABLE events ({columns}) PARTITION BY RANGE (run)")
        bound = "MINVALUE"
        for number in range(count + 1):
            begins = int(time.time() * 1000) + (number + 1 - count) * MONTH_MS
            following = f"'run_{begins:011x}'"
            await connection.execute(
                f"CREATE TABLE events_{number} PARTITION OF events FOR VALUES FROM ({bound}) TO ({following})"
            )
            bound = following
        for index in indexes:
            name_of_all = index["indexdef"].replace(index["indexname"], f"{index['indexname']}_of_all")
            await connection.execute(name_of_all)
        await connection.execute("INSERT INTO events SELECT * FROM events_before")
        for trigger in triggers:
            await connection.execute(trigger["made"])
        for policy in policies:
            await connection.execute(
                f"CREATE POLICY {policy['policyname']} ON events AS {policy['permissive']} FOR {policy['cmd']} "
                f"TO {', '.join(policy['roles'])} USING ({policy['qual']})"
            )
        await connection.execute("ALTER TABLE events ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY")
        for grant in grants:
            await connection.execute(f'GRANT {grant["privilege_type"]} ON events TO "{grant["grantee"]}"')
    finally:
        await connection.close()


def cpu_of(service: Service, seconds: float) -> list[float]:
    """Return the milliseconds of CPU time for a run, in each part."""
    target, database = service
    load = Load(
        url=target.address("fast"),
        body=one_step("fast"),
        connections=CONNECTIONS,
        seconds=seconds,
        headers=dict(target.headers),
    )
    before = spent(target.processes, database)
    result = run(load)
    if result.errors or not result.requests:
        raise SystemExit(f"The load failed: {result.first_error or 'no request was answered'}")
    after = spent(target.processes, database)
    return [1000 * (late - early) / result.requests for early, late in zip(before, after, strict=True)]


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.partitions", description=__doc__)
    parser.add_argument("--partitions", type=int, default=13)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    with ExitStack() as stack:
        plain, split_up = (stack.enter_context(one_service(engines=1)) for _ in range(2))
        if options.partitions:
            asyncio.run(split(split_up[1].url, options.partitions))
        for service in (plain, split_up):
            cpu_of(service, WARM_UP_SECONDS)
        rounds = [(cpu_of(plain, options.seconds), cpu_of(split_up, options.seconds)) for _ in range(options.rounds)]
    for place, part in enumerate(PARTS):
        whole = statistics.median(before[place] for before, _ in rounds)
        parted = statistics.median(after[place] for _, after in rounds)
        ratios = sorted(after[place] / before[place] for before, after in rounds)
        print(
            f"{part}: {whole:.2f} ms of CPU for a run with one table, {parted:.2f} with {options.partitions} "
            f"partitions; ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )


if __name__ == "__main__":
    main()
