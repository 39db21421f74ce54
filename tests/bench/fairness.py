"""Measure how long a small tenant's runs take, with and without another tenant's flood.

`python -m tests.bench.fairness [--flood 500]` opens the service in this process, with four slots and workers that take
20 ms, once with the queue of one process and once over Redis. The small tenant asks one question after the other; the
flood keeps so many runs waiting. A run of the small tenant is to wait for about one more slot, and not for the flood.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path

from msgspec.structs import replace

from app.process.wiring import Runtime
from tests.harness import servers
from tests.harness.in_process import finish, order, pool_text, running_service
from tests.stubs import ProviderStub, Reply

SLOTS = 4
WORKER_SECONDS = 0.02
QUESTIONS = 100


async def one(runtime: Runtime, tenant: str) -> float:
    """The milliseconds that one run of a tenant takes."""
    began = time.perf_counter()
    new_order = replace(order(runtime, "baton-mini"), tenant=tenant)
    ended = (await finish(await runtime.runs.start(new_order), within=600.0)).ended
    if ended.error is not None:
        raise ended.error
    return 1000 * (time.perf_counter() - began)


async def measure_runs(settings: Mapping[str, str], flood: int) -> tuple[list[float], list[float]]:
    """Return the milliseconds of the small tenant's runs, and those of the flood that ended meanwhile, both sorted."""
    took: list[float] = []
    theirs: list[float] = []
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stub = await stack.enter_async_context(ProviderStub())
        stub.always("alpha", Reply(chunks=("Four",), header_delay=WORKER_SECONDS))
        own = {"BATON_CONCURRENT_STEPS": str(SLOTS), "BATON_CONCURRENT_RUNS": "2000", **settings}
        opened = await stack.enter_async_context(running_service(folder, pool_text(stub), own, audits=False))
        await one(opened, "small")

        started = asyncio.Event()

        async def keep_waiting() -> None:
            while True:
                theirs.append(await one(opened, "flood"))
                started.set()

        waiting = [asyncio.create_task(keep_waiting()) for _ in range(flood)]
        if waiting:
            await started.wait()
        took += [await one(opened, "small") for _ in range(QUESTIONS)]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    return sorted(took), sorted(theirs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flood", type=int, default=500, help="Runs of the other tenant that wait.")
    flood = parser.parse_args().flood
    print("| queue | runs of the other tenant | small tenant, median ms | p99 ms | the other's median ms |")
    print("|---|---|---|---|---|")
    with servers.redis() as redis:
        for name, settings in (("in the process", {}), ("Redis", {"BATON_REDIS_URL": redis.url})):
            for others in (0, flood):
                took, theirs = asyncio.run(measure_runs(settings, others))
                median = f"{theirs[len(theirs) // 2]:.0f}" if theirs else ""
                print(
                    f"| {name} | {others} | {took[len(took) // 2]:.0f} | {took[len(took) * 99 // 100]:.0f} | {median} |"
                )


if __name__ == "__main__":
    main()
