"""Baton under measurement: its pool file, its environment, its processes, and how a request reaches a given worker.

Everything that knows Baton's command line, environment and pool format is here, so that a change of those is a change
of this file.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct

from tests.harness.servers import free_port

from .processes import ROOT, RunningProcess, run_to_end, start_process

KEY = "bt_bench_" + "0123456789abcdef" * 2
WORKERS: Mapping[str, str] = {
    "fast": "",
    "slow": "/d50",
    "a": "/d20",
    "b": "/d20",
    "c": "/d20",
    "talker": "/d20/c100/g1000",
    "idle": "/d600000",
    "10s": "/d10000",
    "20s": "/d20000",
    "30s": "/d30000",
    "drip": "/d1000/c200/g1000000",
    "half": "/d500",
    "steady": "/d200",
    "caller": "/d20/t1",
    "short": "/d20/c40",
}
"""The workers of the pool and the upstream's behaviour for each."""
STARTING = 60.0
"""Seconds within which a process listens."""
QUESTION = "Explain the trade-offs of queues in orchestration. " * 12


SATURATED_SLOTS = 16
"""Steps that each process of a saturated subject executes at once."""
FAN = 4
"""Steps of `fan_out` that are ready together."""


class Tree(Struct, frozen=True):
    """A checkout of Baton with its own interpreter. Its processes run in its folder, so that its `app` is imported."""

    root: Path = ROOT

    @property
    def python(self) -> str:
        """The interpreter of the tree's virtual environment; the running one where the tree has none."""
        own = self.root / ".venv" / "bin" / "python"
        return str(own) if own.exists() else sys.executable

    def command(self, module: str, *words: str) -> list[str]:
        """Return the command line that runs a module of this tree."""
        return [self.python, "-m", module, *words]

    @property
    def environ(self) -> dict[str, str]:
        """The variables that make this tree's modules win over an installed `app` of another checkout."""
        return {"PYTHONPATH": str(self.root)}


class Target(Struct, frozen=True):
    """Something that answers chat completions: Baton, the bare reference, or the upstream itself."""

    name: str
    url: str
    processes: tuple[RunningProcess, ...]
    conducts: bool = False
    database: str = ""
    """The URL of its database; for SQLite with the absolute path of the file. Empty where there is none."""

    def address(self, worker: str) -> str:
        """Return the URL to post to for a worker. Baton has one; the others have the worker in the path."""
        prefix = "" if self.conducts else WORKERS[worker]
        return f"{self.url}{prefix}/v1/chat/completions"

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers that authenticate the caller."""
        return headers() if self.conducts else {}


def headers() -> dict[str, str]:
    """Return what authenticates a caller of Baton."""
    return {"Authorization": f"Bearer {KEY}"}


def step(worker: str, *access: str | int) -> dict[str, Any]:
    """Return one step of a plan in the request."""
    return {"worker": worker, "subtask": f"Do the part of {worker}.", "access": list(access)}


def body(*steps: dict[str, Any], stream: bool = False) -> str:
    """Return a chat completion that runs exactly these steps."""
    request_body: dict[str, Any] = {
        "model": "baton-mini",
        "messages": [{"role": "user", "content": QUESTION}],
        "baton": {"plan": {"steps": list(steps)}},
    }
    if stream:
        request_body |= {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(request_body)


def one_step(worker: str, stream: bool = False) -> str:
    """Return the shortest run."""
    return body(step(worker, "user"), stream=stream)


def one_two_one() -> str:
    """Four steps on three levels; 20 ms each, so that the critical path is 60 ms of work."""
    return body(step("a", "user"), step("b", "user", 0), step("c", "user", 0), step("a", "user", 1, 2))


def fan_out() -> str:
    """Four steps of 200 ms that are ready at once, and a fifth that joins them."""
    ready = [step("steady", "user") for _ in range(FAN)]
    return body(*ready, step("steady", *range(FAN)))


def pool_text(upstream: str) -> str:
    """Return the pool file: one provider for each behaviour of the one upstream, every worker in one tier."""
    lines: list[str] = []
    for name, prefix in WORKERS.items():
        lines += [
            f"[providers.bench-{name}]",
            'format = "openai"',
            f'base_url = "{upstream}{prefix}/v1"',
            'key = "BENCH_KEY"',
            f"[workers.{name}]",
            f'provider = "bench-{name}"',
            'model = "bench"',
            'price = { input = "0.15", output = "0.60" }',
            "tools = true",
            "",
        ]
    return "\n".join([*lines, "[tiers.baton-mini]", 'pool = "all"', "limits = { seconds = 900 }", ""])


def environment(folder: Path, port: int, pool: Path, database: str | None, redis: str | None) -> dict[str, str]:
    """Return the environment of the processes; no database means SQLite, no Redis means the in-process queue."""
    settings = {
        "BATON_HOST": "127.0.0.1",
        "BATON_PORT": str(port),
        "BATON_DATA_DIR": str(folder),
        "BATON_BOOTSTRAP_KEY": KEY,
        "BATON_POOL": str(pool),
        "BATON_LOG_LEVEL": "warning",
        "BATON_CONCURRENT_RUNS": "4096",
        "BATON_CONCURRENT_STEPS": "4096",
        "BENCH_KEY": "sk-bench",
        "PYTHONDONTWRITEBYTECODE": "",
    }
    return (
        settings
        | ({"BATON_DATABASE_URL": database} if database else {})
        | ({"BATON_REDIS_URL": redis} if redis else {})
    )


@contextmanager
def baton(
    upstream: str,
    *,
    name: str,
    roles: Sequence[str] = ("serve",),
    database: str | None = None,
    redis: str | None = None,
    more: Mapping[str, str] | None = None,
    tree: Tree | None = None,
) -> Iterator[Target]:
    """Baton as `roles`: the first one listens. The target's first process is the gateway; `more` is added to its
    environment; `tree` is the checkout that runs, this one if None. Raises DidNotStart."""
    ran = tree or Tree()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-")))
        pool = folder / "pool.toml"
        pool.write_text(pool_text(upstream))
        port = free_port()
        env = environment(folder, port, pool, database, redis) | ran.environ | dict(more or {})
        if database is not None:
            run_to_end(ran.command("app", "migrate"), env=env, folder=ran.root)
        processes = tuple(
            stack.enter_context(
                start_process(
                    ran.command("app", role), port=None if i else port, env=env, folder=ran.root, within=STARTING
                )
            )
            for i, role in enumerate(roles)
        )
        where = database or f"sqlite:///{folder / 'baton.db'}"
        yield Target(name, f"http://127.0.0.1:{port}", processes, conducts=True, database=where)
