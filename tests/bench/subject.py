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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .processes import Running, free_port, started

KEY = "bt_bench_" + "0123456789abcdef" * 2
WORKERS: Mapping[str, str] = {
    "fast": "",
    "slow": "/d50",
    "a": "/d20",
    "b": "/d20",
    "c": "/d20",
    "talker": "/d20/c100/g1000",
    "idle": "/d600000",
}
"""The workers of the pool and the upstream's behaviour for each."""
QUESTION = "Explain the trade-offs of queues in orchestration. " * 12


@dataclass(frozen=True, slots=True)
class Target:
    """Something that answers chat completions: Baton, the bare reference, or the upstream itself."""

    name: str
    url: str
    processes: tuple[Running, ...]
    conducts: bool = False

    def address(self, worker: str) -> str:
        """Where to post for that worker: Baton has one address, the others show the worker in the path."""
        prefix = "" if self.conducts else WORKERS[worker]
        return f"{self.url}{prefix}/v1/chat/completions"

    @property
    def headers(self) -> dict[str, str]:
        """What authenticates the caller."""
        return {"Authorization": f"Bearer {KEY}"} if self.conducts else {}


def step(worker: str, *access: str | int) -> dict[str, Any]:
    """One step of a plan in the request."""
    return {"worker": worker, "subtask": f"Do the part of {worker}.", "access": list(access)}


def body(*steps: dict[str, Any], stream: bool = False) -> str:
    """A chat completion that runs exactly these steps."""
    asked: dict[str, Any] = {
        "model": "baton-mini",
        "messages": [{"role": "user", "content": QUESTION}],
        "baton": {"plan": {"steps": list(steps)}},
    }
    if stream:
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(asked)


def one_step(worker: str, stream: bool = False) -> str:
    """The shortest run."""
    return body(step(worker, "user"), stream=stream)


def one_two_one() -> str:
    """Four steps on three levels; 20 ms each, so that the critical path is 60 ms of work."""
    return body(step("a", "user"), step("b", "user", 0), step("c", "user", 0), step("a", "user", 1, 2))


def pool_text(upstream: str) -> str:
    """The pool file: every worker behind the one upstream, in one tier."""
    lines = ["[providers.bench]", 'format = "openai"', f'base_url = "{upstream}/v1"', 'api_key = "env:BENCH_KEY"', ""]
    for name, prefix in WORKERS.items():
        lines += [
            f"[workers.{name}]",
            'provider = "bench"',
            f'base_url = "{upstream}{prefix}/v1"',
            'model = "bench"',
            "input_price = 0.15",
            "output_price = 0.60",
            "context = 128000",
            "max_output = 4096",
            "",
        ]
    listed = ", ".join(f'"{name}"' for name in WORKERS)
    lines += [
        "[tiers.mini]",
        'model = "baton-mini"',
        f"workers = [{listed}]",
        'conductor = "fixed"',
        "max_steps = 5",
        "",
    ]
    return "\n".join(lines)


def environment(folder: Path, port: int, pool: Path, database: str | None, redis: str | None) -> dict[str, str]:
    """What the processes are told; no database means SQLite, no Redis means in-process."""
    named = {
        "BATON_HOST": "127.0.0.1",
        "BATON_PORT": str(port),
        "BATON_DATA_DIR": str(folder),
        "BATON_BOOTSTRAP_KEY": KEY,
        "BATON_POOL": str(pool),
        "BENCH_KEY": "sk-bench",
        "PYTHONDONTWRITEBYTECODE": "",
    }
    return (
        named | ({"BATON_DATABASE_URL": database} if database else {}) | ({"BATON_REDIS_URL": redis} if redis else {})
    )


@contextmanager
def baton(
    upstream: str,
    *,
    name: str,
    roles: Sequence[str] = ("serve",),
    database: str | None = None,
    redis: str | None = None,
) -> Iterator[Target]:
    """Baton as `roles`: the first one listens. The target's first process is the gateway. Raises DidNotStart."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-")))
        pool = folder / "pool.toml"
        pool.write_text(pool_text(upstream))
        port = free_port()
        env = environment(folder, port, pool, database, redis)
        processes = tuple(
            stack.enter_context(started([sys.executable, "-m", "app", role], port=None if i else port, env=env))
            for i, role in enumerate(roles)
        )
        yield Target(name, f"http://127.0.0.1:{port}", processes, conducts=True)
