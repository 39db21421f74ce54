"""Measure the console: `python -m tests.bench.console [--runs 10000] [--live 50] [--browser /usr/bin/chromium]`.

A gateway and an engine over Postgres and Redis carry out one run of a hundred steps (four rounds of 25) and one of
three; the latter is copied until there are so many runs, spread over thirty days. Then, of each page, the time that the
server takes (through HTTP, one request after the other), and with `--browser` its first paint in Chromium; the
processor's time of the gateway while so many live pages are open and nothing happens; and the patches that one of them
gets in a second while a run is busy.
"""

import argparse
import asyncio
import re
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import asyncpg
import httpx
import psutil
from msgspec import Struct

from tests.browser.distributed import Service, serving
from tests.harness import servers
from tests.harness.processes import KEY
from tests.harness.waiting import wait_until
from tests.integration import installation
from tests.stubs import Reply, Stall, plan_reply

ROUNDS, STEPS = 4, 25
DAYS_SECONDS = 30 * 86_400.0
WARM_UP = 3
LOOKS = 30
IDLE_SECONDS = 10.0
BUSY_SECONDS = 5.0
LOOK_SECONDS = 25.0
"""Longer than a stream is silent: its server sends a ping."""
COPIED = ("runs", "events", "tags", "disclosures", "feedback")
"""The tables of which a run's rows are copied."""


class Pace(Struct, frozen=True):
    """Durations of one kind, in milliseconds."""

    name: str
    times: Sequence[float]

    def __str__(self) -> str:
        ordered = sorted(self.times)
        p95 = ordered[min(int(0.95 * len(ordered)), len(ordered) - 1)]
        return (
            f"{self.name:<54} median {statistics.median(ordered):7.1f} ms   p95 {p95:7.1f}   longest {ordered[-1]:7.1f}"
        )


@contextmanager
def service() -> Iterator[Service]:
    """The distributed service, with a tier whose runs have a hundred steps."""
    limits = f"limits = {{ seconds = 600, steps = {STEPS}, rounds = {ROUNDS}, tokens = 10000000, usd = 100 }}"
    with (
        servers.postgres() as postgres,
        servers.redis() as redis,
        serving(postgres.url, redis.url, limits) as new_service,
    ):
        yield new_service


def largest(service: Service) -> str:
    """Carry out the run of a hundred steps; return its id."""
    steps = [(n % 3, f"Do part {n}.", ["user", *range(max(0, n - 3), n)]) for n in range(STEPS)]
    service.stub.always("planner", plan_reply(*steps))
    return str(service.caller.ask_whole("baton-ultra", "A long task.")[1]["baton"]["run"])


def smaller(service: Service) -> str:
    """Carry out a run of three steps, whose answer the conductor accepts; return its id."""
    service.stub.clear()
    service.stub.script("planner", installation.TREE, plan_reply())
    return str(service.caller.ask_whole("baton-ultra", "A task.")[1]["baton"]["run"])


async def copy_run(url: str, run: str, count: int) -> None:
    """Copy the rows of a run so often, admitted at times that are spread over thirty days."""
    connection = await asyncpg.connect(url)
    try:
        for table in COPIED:
            rows = await connection.fetch(
                "SELECT column_name, is_identity, column_default FROM information_schema.columns "
                "WHERE table_name = $1 AND is_generated = 'NEVER' ORDER BY ordinal_position",
                table,
            )
            names = [row["column_name"] for row in rows if row["is_identity"] == "NO" and "nextval" not in str(row[2])]
            copies = [_sql_of_copied_column(table, name) for name in names]
            key = "id" if table == "runs" else "run"
            await connection.execute(
                f"INSERT INTO {table} ({', '.join(names)}) SELECT {', '.join(copies)} "
                f"FROM {table} t, generate_series(1, {count}) AS n WHERE t.{key} = '{run}'"
            )
        await connection.execute("ANALYZE")
    finally:
        await connection.close()


def _sql_of_copied_column(table: str, column: str) -> str:
    """Return the SQL of a column of a copy: another run, and everything that is a time as much earlier."""
    name = "'run_copy' || lpad(n::text, 9, '0')"
    if column == ("id" if table == "runs" else "run"):
        return name
    if column in ("created_at", "ended_at", "deadline", "at", "updated_at"):
        return f"t.{column} - (n * {DAYS_SECONDS} / 10000.0)"
    if column in ("id", "call") and table in ("feedback", "disclosures"):
        return f"t.{column} || n::text"
    return f"t.{column}"


def sign_in(url: str) -> httpx.Client:
    """Return a client that has signed in to the console."""
    client = httpx.Client(base_url=url, trust_env=False, timeout=60)
    client.post("/console/sign-in", data={"key": KEY}, headers={"sec-fetch-site": "same-origin"})
    return client


def addresses(large: str, small: str) -> dict[str, str]:
    """Return the pages by name."""
    return {
        "overview": "/console",
        "overview of 30 days": "/console?period=month",
        "list of runs": "/console/runs",
        "list of runs, filtered": "/console/runs?state=succeeded&tier=baton-ultra",
        "run of three steps": f"/console/runs/{small}?step=2",
        "run of a hundred steps": f"/console/runs/{large}",
        "its step 50": f"/console/runs/{large}?step=50",
        "its middle, by money": f"/console/runs/{large}?t=0.3&by=money",
        "its explanation": f"/console/runs/{large}/explain",
        "compared with another run": f"/console/compare?a={large}&b={small}",
        "playground": "/console/playground",
        "plans": "/console/plans",
        "approvals": "/console/approvals",
    }


def measure_page(client: httpx.Client, pid: int, name: str, address: str) -> Pace:
    """Return the server's time of a page, with the processor's time of the gateway in the name: a machine that is busy
    with other things lengthens the former only."""
    times = []
    for _ in range(WARM_UP):
        reply = client.get(address, follow_redirects=True)
        if reply.status_code != 200:
            sys.exit(f"{address}: {reply.status_code}")
    before = read_used_seconds(pid)
    for _ in range(LOOKS):
        began = time.perf_counter()
        client.get(address, follow_redirects=True)
        times.append((time.perf_counter() - began) * 1000)
    cpu = (read_used_seconds(pid) - before) / LOOKS * 1000
    return Pace(f"{name} ({len(reply.content) / 1024:,.0f} kB, {cpu:.0f} ms of CPU)", times)


def measure_paints(program: str, url: str, pages: dict[str, str]) -> list[Pace]:
    """Return the first paint of each page, without a cache of documents."""
    from playwright.sync_api import sync_playwright

    paint_times = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, chromium_sandbox=False, args=["--disable-gpu"])
        page = browser.new_page(base_url=url)
        page.goto("/console/sign-in")
        page.fill("#key", KEY)
        page.click("button.main")
        for name, address in pages.items():
            times = []
            for _ in range(8):
                page.goto(address)
                page.wait_for_load_state()
                script = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? -1"
                page.wait_for_function(f"() => ({script}) >= 0")
                times.append(page.evaluate(script))
            paint_times.append(Pace(name, times[1:]))
        browser.close()
    return paint_times


class LivePages:
    """Open live pages, each of which counts its patches."""

    def __init__(self, client: httpx.Client, address: str, count: int) -> None:
        self.patches: list[list[float]] = [[] for _ in range(count)]
        self._client = client
        page = client.get(address).text
        match = re.search(r'hx-sse:connect="([^"]*)"', page)
        if match is None:
            sys.exit(f"{address} has nothing live")
        self._address = match[1].replace("&amp;", "&")
        self._left = threading.Event()
        self._threads = [threading.Thread(target=self._follow, args=(n,), daemon=True) for n in range(count)]

    def __enter__(self) -> "LivePages":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        for thread in self._threads:
            thread.join()

    def _follow(self, n: int) -> None:
        client_options = {"base_url": self._client.base_url, "cookies": self._client.cookies, "trust_env": False}
        own = httpx.Client(**client_options, timeout=LOOK_SECONDS)  # type: ignore[arg-type]
        with own, own.stream("GET", self._address) as reply:
            lines = reply.iter_lines()
            while not self._left.is_set():
                try:
                    line = next(lines)
                except (StopIteration, httpx.ReadTimeout):
                    return
                if line.startswith("id: "):
                    self.patches[n].append(time.monotonic())


def read_used_seconds(process: int) -> float:
    """Return the processor's time that a process has used, in seconds."""
    times = psutil.Process(process).cpu_times()
    return float(times.user + times.system)


def core_share(process: int, seconds: float) -> float:
    """Return the share of a core that a process uses within so many seconds."""
    before = read_used_seconds(process)
    time.sleep(seconds)
    return (read_used_seconds(process) - before) / seconds


def most_in_a_second(moments: Sequence[float]) -> int:
    """Return the most patches of one page within any second."""
    most = 0
    for start in moments:
        within = [moment for moment in moments if 0 <= moment - start < 1.0]
        most = max(most, len(within))
    return most


def live(service: Service, client: httpx.Client, count: int) -> None:
    """Print what live pages cost while nothing happens, and how many patches a busy run makes."""
    pid = service.gateway.pid
    alone = core_share(pid, IDLE_SECONDS)
    service.stub.always("planner", plan_reply((0, "Wait.", ["user"])))
    for worker in installation.WORKERS:
        service.stub.always(worker, Reply(chunks=("word ",) * 3, fault=Stall(after=1)))
    background = threading.Thread(target=lambda: _ask_and_wait(service), daemon=True)
    background.start()
    run = _newest_open(service)
    for name, address in (("one run that waits", f"/console/runs/{run}"), ("the list of runs", "/console/runs")):
        try:
            with LivePages(client, address, count):
                time.sleep(2.0)
                with_pages = core_share(pid, IDLE_SECONDS)
        except SystemExit as error:
            print(error)
            continue
        print(f"{count} live pages of {name}: {100 * (with_pages - alone):+.1f} % of a core while nothing happens")
    service.stub.always("planner", plan_reply(*[(n, f"Do part {n}.", ["user"]) for n in range(3)]))
    for worker in installation.WORKERS:
        service.stub.always(worker, Reply(chunks=("word ",) * 100, gap=0.01))
    again = threading.Thread(target=lambda: _ask_and_wait(service), daemon=True)
    again.start()
    run = _newest_open(service, run)
    with LivePages(client, f"/console/runs/{run}", count) as pages:
        time.sleep(BUSY_SECONDS)
    most = max(most_in_a_second(moments) for moments in pages.patches)
    print(f"patches in a second of any of {count} live pages of a busy run: at most {most}")


def _ask_and_wait(service: Service) -> None:
    """Ask and wait; the service ends before some of these runs do."""
    with suppress(httpx.HTTPError):
        service.caller.http.post(
            "/v1/chat/completions",
            json={"model": "baton-ultra", "messages": [{"role": "user", "content": "Wait."}]},
            timeout=300,
        )


def _newest_open(service: Service, but: str = "") -> str:
    """Return the id of the newest run that is open, other than one."""

    def newest_id() -> str:
        rows = service.caller.read("/v1/runs", limit=5)["data"]
        names = [str(row["id"]) for row in rows if row["ended_at"] is None and row["id"] != but]
        return names[0] if names else ""

    return str(wait_until(newest_id, what="a run is open"))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--live", type=int, default=50)
    parser.add_argument("--browser", default="", help="Chromium's program, for first paints")
    options = parser.parse_args()
    with service() as new_service:
        large = largest(new_service)
        small = smaller(new_service)
        asyncio.run(copy_run(new_service.database, small, options.runs))
        client = sign_in(new_service.url)
        pages = addresses(large, small)
        print(f"{options.runs:,} runs; the server's time of a page, over HTTP:")
        for name, address in pages.items():
            print("  ", measure_page(client, new_service.gateway.pid, name, address))
        if options.browser:
            print("first contentful paint:")
            for pace in measure_paints(options.browser, new_service.url, pages):
                print("  ", pace)
        live(new_service, client, options.live)


if __name__ == "__main__":
    main()
