"""One installation of several processes over Postgres and Redis, with the provider stub as all of its providers."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import asyncpg
from msgspec import Struct

from tests.harness.processes import KEY, Process, environment, running_process
from tests.harness.waiting import wait_until
from tests.stubs import KEYS, plan_reply
from tests.stubs.control import StubControl

LEASE: Final = 1.5
RUN_SECONDS: Final = 40
"""The time limit of runs, unless a test names another one."""
WORKERS: Final = ("alpha", "beta", "gamma")
TREE: Final = plan_reply(
    (0, "Answer on your own.", ["user"]), (1, "Answer otherwise.", ["user"]), (2, "Combine both.", ["user", 0, 1])
)
CHAIN: Final = {
    "steps": [
        {"worker": "alpha", "subtask": "Plan it.", "access": ["user"]},
        {"worker": "beta", "subtask": "Do it.", "access": ["user", 0]},
    ]
}


def pool(stub: StubControl, run_seconds: int = RUN_SECONDS) -> str:
    """Three workers and a planner, each under its own name, so that each can be told apart and made to misbehave.

    `run_seconds` is the time limit of runs.
    """
    workers = "".join(
        f'[workers.{name}]\nprovider = "stub"\nmodel = "{name}"\nprice = {{ input = 1, output = 2 }}\ntools = true\n'
        for name in WORKERS
    )
    return f"""
[providers.stub]
format = "openai"
base_url = "{stub.openai_url}"
key = "STUB_KEY"
[providers.planning]
format = "openai"
base_url = "{stub.vllm_url}"
options = {{ positional = true, logprobs = true }}
{workers}
[workers.planner]
provider = "planning"
model = "planner"
pooled = false
[tiers.baton-mini]
pool = "all"
conductor = {{ kind = "fixed", shape = "single", workers = ["alpha"] }}
limits = {{ seconds = {run_seconds} }}
[tiers.baton-ultra]
pool = "all"
conductor = {{ kind = "model", worker = "planner", probe = 0 }}
limits = {{ seconds = {run_seconds} }}
"""


class Installation(Struct, frozen=True):
    """The service and its surroundings."""

    stub: StubControl
    database: str
    redis: str
    gateway: Process
    dispatchers: Sequence[Process]

    def holders(self) -> set[int]:
        """The process ids of the dispatchers that hold a step now."""
        rows = asyncio.run(execute(self.database, "SELECT DISTINCT holder FROM tickets WHERE holder IS NOT NULL"))
        return {int(row[0].split("-")[-2]) for row in rows}

    def has_ended(self, run: str) -> bool:
        """Return True if a run has ended, without asking a gateway."""
        rows = asyncio.run(execute(self.database, f"SELECT ended_at FROM runs WHERE id = '{run}'"))
        return rows[0][0] is not None

    def holding(self) -> Process:
        """The dispatcher that holds the one running step."""
        holders = wait_until(self.holders, what="a step is held")
        return next(dispatcher for dispatcher in self.dispatchers if dispatcher.pid in holders)


async def execute(url: str, statement: str) -> list[Any]:
    """One statement of SQL."""
    connection = await asyncpg.connect(url)
    try:
        return list(await connection.fetch(statement))
    finally:
        await connection.close()


def settings(
    folder: Path, stub: StubControl, database: str, redis: str, run_seconds: int = RUN_SECONDS
) -> dict[str, str]:
    """Return the settings of all processes of one installation, whose runs may take so many seconds."""
    (folder / "pool.toml").write_text(pool(stub, run_seconds))
    return environment(
        folder,
        BATON_DATABASE_URL=database,
        BATON_REDIS_URL=redis,
        BATON_POOL=str(folder / "pool.toml"),
        BATON_BOOTSTRAP_KEY=KEY,
        BATON_PEPPER="pepper" * 8,
        BATON_LEASE_SECONDS=str(LEASE),
        STUB_KEY=KEYS["openai"],
    )


@contextmanager
def launch(folder: Path, environ: Mapping[str, str], *verbs: str) -> Iterator[list[Process]]:
    """A process of each of these roles, all of which have announced themselves."""
    with ExitStack() as stack:
        processes = [stack.enter_context(running_process(verb, folder, environ, wait=False)) for verb in verbs]
        for process in processes:
            process.wait_until_announced()
        yield processes
