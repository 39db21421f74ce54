"""Measure lists and the overview over many runs, and pages that follow a list in which nothing happens.

    python -m tests.bench.run_lists [--runs 10000] [--database sqlite|postgres] [--streams 50] [--seconds 10]

Prints the time of each reply over HTTP in process with the CPU of this process, and the share of a core that the
streams add.
"""

import argparse
import asyncio
import logging
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import Connection, insert, select, text

from app.console.api import Api, Session
from app.process.wiring import Runtime
from app.store.sqlkit.migrate import migrate
from app.store.sqlkit.tables import DISCLOSURES, EVENTS, RUNS
from tests.harness import servers
from tests.harness.console import console_client, sign_in
from tests.harness.in_process import app_over, ask, client_of, pool_text, running_service, script_answers
from tests.stubs import ProviderStub

REPEATS = 20
AT_ONCE = 200
"""Runs that are copied in one transaction."""
SPAN_SECONDS = 86_000.0
PATHS = (
    "/v1/overview?period=day",
    "/v1/runs?limit=100&include=count&include=workers&include=preview",
    "/v1/runs?state=failed&include=count",
    "/v1/runs?worker=m&include=count",
    "/console?period=day",
    "/console/runs?limit=100",
)


@contextmanager
def database(kind: str, folder: Path) -> Iterator[str]:
    """The URL of an empty database."""
    if kind == "sqlite":
        yield f"sqlite:///{folder}/baton.db"
        return
    with servers.postgres() as server:
        migrate(server.url)
        yield server.url


def copy_run(conn: Connection, run: str, numbers: range, number: int, now: float) -> None:
    """Make copies of a run with its events and disclosures. All `number` copies are spread over a day."""
    originals = [(table, conn.execute(select(table).where(column == run)).mappings().all()) for table, column in OF_RUN]
    for table, rows in originals:
        key = "id" if table is RUNS else "run"
        copied_rows: list[dict[str, Any]] = []
        for copy in numbers:
            since = now - SPAN_SECONDS * copy / number
            for row in rows:
                changed = {**row, key: f"run_copy{copy:07}"}
                if table is RUNS:
                    changed |= {"created_at": since, "ended_at": since + 0.2 + copy % 7}
                elif table is DISCLOSURES:
                    changed["at"] = since
                copied_rows.append(changed)
        conn.execute(insert(table), copied_rows)


OF_RUN = ((RUNS, RUNS.c.id), (EVENTS, EVENTS.c.run), (DISCLOSURES, DISCLOSURES.c.run))


@asynccontextmanager
async def run_filled_service(folder: Path, url: str, runs: int) -> AsyncIterator[tuple[Runtime, httpx.AsyncClient]]:
    """A service with so many runs, and a client of it."""
    environ = {"BATON_DATABASE_URL": url}
    async with ProviderStub() as stub, running_service(folder, pool_text(stub), environ, audits=False) as runtime:
        script_answers(stub)
        async with client_of(runtime) as client:
            run = (await ask(client, model="baton-ultra")).json()["baton"]["run"]
            store: Any = runtime.gateway.store
            for start in range(0, runs, AT_ONCE):
                numbers = range(start, min(start + AT_ONCE, runs))
                await store._write(partial(copy_run, run=run, numbers=numbers, number=runs, now=runtime.gateway.now()))
            await store._write(lambda conn: conn.execute(text("ANALYZE")))
            yield runtime, client


async def time_replies(runtime: Runtime, client: httpx.AsyncClient) -> None:
    """Print the times of the replies."""
    key = client.headers["authorization"].removeprefix("Bearer ")
    with app_over(runtime.gateway) as app:
        async with console_client(app) as browser:
            await sign_in(browser, key)
            for path in PATHS:
                requester = browser if path.startswith("/console") else client
                seconds, used = [], time.process_time()
                for _ in range(REPEATS):
                    began = time.perf_counter()
                    reply = await requester.get(path)
                    seconds.append(time.perf_counter() - began)
                    assert reply.status_code == 200, reply.text
                cpu = (time.process_time() - used) / REPEATS * 1e3
                middle, most = sorted(seconds)[REPEATS // 2] * 1e3, sorted(seconds)[-2] * 1e3
                print(f"{path:66} median {middle:6.1f} ms, p95 {most:6.1f} ms, CPU {cpu:6.1f} ms")


async def time_streams(runtime: Runtime, client: httpx.AsyncClient, streams: int, seconds: float) -> None:
    """Print the share of a core that so many streams add while nothing happens."""
    session = Session((("authorization", client.headers["authorization"]),))
    before = await _share(seconds)
    with app_over(runtime.gateway) as app:
        async with AsyncExitStack() as stack:
            for _ in range(streams):
                events = await stack.enter_async_context(Api(app).events(session, "/v1/runs/live"))
                await anext(events)
            await asyncio.sleep(2.0)
            during = await _share(seconds)
    print(f"{streams} streams: {during:.2%} of a core, {before:.2%} without them, {during - before:.2%} added")


async def _share(seconds: float) -> float:
    began, used = time.perf_counter(), time.process_time()
    await asyncio.sleep(seconds)
    return (time.process_time() - used) / (time.perf_counter() - began)


async def measure(folder: Path, url: str, options: argparse.Namespace) -> None:
    """Fill the database and print all figures."""
    async with run_filled_service(folder, url, options.runs) as (runtime, client):
        await time_replies(runtime, client)
        await time_streams(runtime, client, options.streams, options.seconds)


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.run_lists")
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--database", choices=["sqlite", "postgres"], default="sqlite")
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as name, database(options.database, Path(name)) as url:
        print(f"{options.runs:,} runs on {options.database}")
        asyncio.run(measure(Path(name), url, options))


if __name__ == "__main__":
    main()
