"""One installation for the fault suite: processes with crash points, proxies to their servers, and a stub as provider.

A scene outlives many cases, because starting it takes longer than any of them. Who breaks something mends it: processes
that died are started again by `mend`, proxies pass again, servers are started again.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import asyncpg
import httpx
import openai

from tests.faults.crash_points import ObeyedOrder, Orders
from tests.faults.failed_journals import journals_kept_on_failure
from tests.faults.network_proxy import NetworkProxy, Pass, run_proxy
from tests.harness import servers
from tests.harness.processes import KEY, Caller, Process, environment, open_caller, run_command
from tests.harness.servers import Server
from tests.harness.waiting import wait_until
from tests.stubs import KEYS, Reply, plan_reply
from tests.stubs.control import StubControl, stub_process

LEASE: Final = 1.5
"""Seconds; what is promised within a lease is measured in these."""
WORKERS: Final = ("alpha", "beta", "gamma", "delta", "epsilon")
CHAIN: Final = {
    "steps": [
        {"worker": name, "subtask": f"Do part {place}.", "access": ["user", *range(place)]}
        for place, name in enumerate(WORKERS)
    ]
}
"""A caller's plan of five steps, one after another, each by a worker of its own."""
TREE: Final = plan_reply(
    (0, "Answer on your own.", ["user"]), (1, "Answer otherwise.", ["user"]), (2, "Combine both.", ["user", 0, 1])
)
POOL: Final = """
[providers.stub]
format = "openai"
base_url = "{workers_url}"
key = "STUB_KEY"
[providers.planning]
format = "openai"
base_url = "{planner_url}"
options = {{ positional = true, logprobs = true }}
{workers}
[workers.planner]
provider = "planning"
model = "planner"
pooled = false
[tiers.baton-mini]
pool = "all"
conductor = {{ kind = "fixed", shape = "single", workers = ["alpha"] }}
limits = {{ seconds = {seconds} }}
[tiers.baton-ultra]
pool = "all"
conductor = {{ kind = "model", worker = "planner", probe = 0 }}
limits = {{ seconds = {seconds} }}
"""


@dataclass(slots=True)
class Scene:
    """The service and its surroundings."""

    folder: Path
    stub: StubControl
    postgres: Server
    redis: Server
    to_postgres: NetworkProxy
    to_redis: NetworkProxy
    to_stub: NetworkProxy
    orders: Orders
    environ: Mapping[str, str]
    gateways: list[Process] = field(default_factory=list)
    dispatchers: list[Process] = field(default_factory=list)
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(64))

    @property
    def gateway(self) -> Process:
        """The first one."""
        return self.gateways[0]

    @property
    def processes(self) -> list[Process]:
        """All of the service."""
        return [*self.gateways, *self.dispatchers]

    @property
    def database(self) -> str:
        """Its URL past the line."""
        return self.postgres.url

    def aside(self, call: Any, *words: Any, **arguments: Any) -> "Future[Any]":
        """A call beside the test's own."""
        return self.threads.submit(call, *words, **arguments)

    def reset(self) -> None:
        """As if nothing had happened: a stub that plans a tree and otherwise answers at once, and everything whole."""
        self.orders.withdraw()
        for each in (self.to_postgres, self.to_redis, self.to_stub):
            each.set(Pass())
        self.stub.clear()
        self.stub.always("planner", TREE)
        for name in WORKERS:
            self.stub.always(name, Reply(chunks=(f"{name} ", "says ", "so.")))
        asyncio.run(empty(self.database, ("tickets", "runs", "events", "contents", "tags", "once", "disclosures")))
        self.mend()

    def mend(self) -> None:
        """Start again what has ended, and wait until all are there and the gateways ready."""
        for process in self.processes:
            if not process.alive:
                process.start(wait=False)
        for process in self.processes:
            process.wait_until_announced()
        for gateway in self.gateways:
            wait_until(gateway.ready, within=20, what="the gateway is ready")

    def struck(self, seconds: float = 15.0) -> ObeyedOrder:
        """Return who obeyed the order, once that has happened. A process that is killed may take a moment to end."""
        strike: ObeyedOrder = wait_until(
            lambda: (self.orders.obeyed_orders or [None])[0], within=seconds, what="the order is obeyed"
        )
        return strike

    def killed(self) -> ObeyedOrder:
        """Return who obeyed an order to die, once its process has ended, so that `mend` starts it again."""
        strike = self.struck()
        wait_until(
            lambda: not any(process.alive and process.pid == strike.pid for process in self.processes),
            what="the killed process has ended",
        )
        return strike

    def process(self, pid: int) -> Process:
        """The process with that id."""
        return next(process for process in self.processes if process.alive and process.pid == pid)

    def wait_for_requests(self, model: str, count: int = 1, seconds: float = 10.0) -> list[dict[str, Any]]:
        """Return the stub's records of that model, as soon as there are so many."""

        def enough_records() -> list[dict[str, Any]] | None:
            records = self.stub.requests(model)
            return records if len(records) >= count else None

        records: list[dict[str, Any]] = wait_until(
            enough_records, within=seconds, what=f"{model} is asked {count} times"
        )
        return records

    def rows(self, statement: str) -> list[Any]:
        """Return what a statement of SQL gives, past the line."""
        return asyncio.run(execute(self.database, statement))

    def script(self, statements: str) -> None:
        """Several statements of SQL, past the line."""
        asyncio.run(execute(self.database, statements, script=True))

    def open_runs(self) -> int:
        """Return how many runs have not ended."""
        return int(self.rows("SELECT count(*) FROM runs WHERE ended_at IS NULL")[0][0])

    def latest(self) -> str:
        """Return the run that was admitted last."""
        rows = wait_until(
            lambda: self.rows("SELECT id FROM runs ORDER BY created_at DESC LIMIT 1"), within=10, what="a run is there"
        )
        return str(rows[0][0])

    def latest_of(self, worker: str) -> str:
        """Return the run that has this worker in its plan and was admitted last."""
        rows = self.rows(f"SELECT run FROM tags WHERE name = 'worker' AND value = '{worker}' ORDER BY run DESC LIMIT 1")
        return str(rows[0][0])

    def has_ended(self, run: str) -> bool:
        """Return whether a run has ended, without asking a gateway."""
        rows = self.rows(f"SELECT ended_at FROM runs WHERE id = '{run}'")
        return bool(rows) and rows[0][0] is not None

    def holders(self) -> set[int]:
        """Return the ids of the processes that hold a step now."""
        rows = self.rows("SELECT DISTINCT holder FROM tickets WHERE holder IS NOT NULL")
        return {int(row[0].split("-")[-2]) for row in rows}

    def holding(self) -> Process:
        """Return the dispatcher that holds the one running step."""
        holders = wait_until(self.holders, within=5, what="a step is held")
        return next(dispatcher for dispatcher in self.dispatchers if dispatcher.alive and dispatcher.pid in holders)


async def execute(url: str, statement: str, *, script: bool = False) -> list[Any]:
    """One statement of SQL and its rows, or a script of several."""
    connection = await asyncpg.connect(url, timeout=10)
    try:
        if script:
            await connection.execute(statement)
            return []
        return list(await connection.fetch(statement))
    finally:
        await connection.close()


async def empty(url: str, tables: Iterable[str]) -> None:
    """Empty tables one by one: the processes are reading meanwhile, and no lock is held while another is awaited."""
    connection = await asyncpg.connect(url, timeout=10)
    try:
        for table in tables:
            await connection.execute(f"TRUNCATE {table}")
    finally:
        await connection.close()


def pool(stub: StubControl, to_stub: NetworkProxy, seconds: float = 40) -> str:
    """Five workers and a planner, each under its own name, so that each can be told apart and made to misbehave."""
    workers = "".join(
        f'[workers.{name}]\nprovider = "stub"\nmodel = "{name}"\nprice = {{ input = 1, output = 2 }}\n'
        for name in WORKERS
    )
    openai_url, vllm_url = over(to_stub, stub)
    return POOL.format(workers=workers, workers_url=openai_url, planner_url=vllm_url, seconds=seconds)


def over(line: NetworkProxy, stub: StubControl) -> tuple[str, str]:
    """Return the stub's URLs, strict and lenient, over a line to it."""
    there = f":{line.target}/"
    return stub.openai_url.replace(there, f":{line.port}/"), stub.vllm_url.replace(there, f":{line.port}/")


SPREAD = {"BATON_STEPS": "spread"}
"""The setting under which every step goes through the queue, to any engine."""


@contextmanager
def scene(
    folder: Path,
    *,
    gateways: int = 1,
    dispatchers: int = 2,
    lease: float = LEASE,
    seconds: float = 40,
    postgres: Sequence[str] = (),
    program: Mapping[str, tuple[str, ...]] | None = None,
    pools: Callable[[StubControl, NetworkProxy], str] | None = None,
    start: bool = True,
    **settings: str,
) -> Iterator[Scene]:
    """A fresh installation with servers of its own.

    `program` has further words for the launcher of each role; `pools` writes another pool file than the usual one.
    """
    with ExitStack() as stack:
        stub = stack.enter_context(stub_process())
        database = stack.enter_context(servers.postgres(settings=postgres))
        redis = stack.enter_context(servers.redis())
        lines = [stack.enter_context(run_proxy(port)) for port in (database.port, redis.port, _port(stub.url))]
        orders = Orders(folder / "orders")
        (folder / "pool.toml").write_text(pools(stub, lines[2]) if pools else pool(stub, lines[2], seconds))
        environ = environment(
            folder,
            BATON_DATABASE_URL=lines[0].url(database.url),
            BATON_REDIS_URL=redis.url.replace(f":{redis.port}", f":{lines[1].port}"),
            BATON_POOL=str(folder / "pool.toml"),
            BATON_BOOTSTRAP_KEY=KEY,
            BATON_PEPPER="pepper" * 8,
            BATON_LEASE_SECONDS=str(lease),
            STUB_KEY=KEYS["openai"],
            **settings,
        )
        new_scene = Scene(folder, stub, database, redis, lines[0], lines[1], lines[2], orders, environ)
        stack.callback(new_scene.threads.shutdown, cancel_futures=True)
        for verb, count, them in (
            ("gateway", gateways, new_scene.gateways),
            ("dispatcher", dispatchers, new_scene.dispatchers),
        ):
            words = (
                "tests.faults.crashing_process",
                "--orders",
                str(orders.path),
                *(program or {}).get(verb, ()),
                "--",
            )
            them += [Process(verb, folder, environ, program=words) for _ in range(count)]
        for process in new_scene.processes:
            stack.callback(process.kill)
        if start:
            migrated = run_command(folder, environ, "migrate")
            assert migrated.returncode == 0, migrated.stderr
            new_scene.reset()
        with journals_kept_on_failure(folder, environ, database.url):
            yield new_scene


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


@contextmanager
def caller(process: Process, **options: Any) -> Iterator[Caller]:
    """A caller of that gateway, which retries nothing."""
    with open_caller(process.url, **options) as new_caller:
        yield new_caller


@dataclass(slots=True)
class CallResult:
    """The outcome of one call: an answer, or the status and code of the error that came instead."""

    text: str = ""
    document: dict[str, Any] = field(default_factory=dict)
    status: int = 200
    code: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def run(self) -> str:
        """The run's id, where the reply told it."""
        return str(self.document.get("baton", {}).get("run") or self.headers.get("x-baton-run", ""))


def ask(
    process: Process, model: str, question: str = "Go on.", *, timeout: float = 60.0, streams: bool = False, **more: Any
) -> CallResult:
    """One question to a gateway, whatever comes of it; status 0 means that the connection broke."""
    began = time.monotonic()
    with open_caller(process.url, timeout=timeout) as caller:
        try:
            text, document = (caller.ask_streaming if streams else caller.ask_whole)(model, question, **more)
            answer = CallResult(text, document)
        except openai.APIStatusError as error:
            body = error.body if isinstance(error.body, dict) else {}
            code = str(body.get("code") or body.get("error", {}).get("code", ""))
            answer = CallResult(status=error.status_code, code=code, headers=dict(error.response.headers))
        except openai.APIConnectionError:
            answer = CallResult(status=0, code="connection")
        except openai.APIError as error:
            answer = CallResult(status=200, code=str(error.code or "error"))
        except httpx.HTTPError:
            answer = CallResult(status=0, code="connection")
    answer.seconds = time.monotonic() - began
    return answer


def probe(process: Process, path: str) -> int:
    """The status of a probe; 0 while nobody answers."""
    with suppress(httpx.TransportError):
        return httpx.get(f"{process.url}{path}", timeout=5, trust_env=False).status_code
    return 0
