"""A service over scripted workers on a real port, and the programs that drive it in environments of their own.

Nothing here is collected unless `tests/clients/frameworks/run` says so: `make test` needs no package of theirs.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import pytest

from tests.clients.conftest import Address, break_off, run_service
from tests.clients.frameworks.obliging import worker
from tests.harness.in_process import plan_text, pool_text
from tests.stubs import ProviderStub, Reply

collect_ignore_glob = [] if os.environ.get("BATON_TEST_CLIENTS") else ["test_*.py"]

ROOT: Final = Path(__file__).resolve().parents[3]
DRIVES: Final = Path(__file__).parent / "drives"
RUN_SECONDS: Final = 150.0
SIGHTED: Final = 'tools = true\nmodalities = ["text", "image"]'
QUIET: Final = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "ANONYMIZED_TELEMETRY": "False", "LANGSMITH_TRACING": "false"}
"""They would ask the network for prices and tell it what they do."""


@pytest.fixture
async def stub() -> AsyncIterator[ProviderStub]:
    """Two obliging workers, one that breaks off, and a conductor that has one think and the other answer."""
    plan = plan_text(("beta", "Think.", ["user"]), ("alpha", "Answer.", ["user", 0]))
    async with ProviderStub() as running:
        running.always("alpha", worker)
        running.always("beta", worker)
        running.always("gamma", break_off)
        running.always("planner", Reply(chunks=(plan,)))
        yield running


@pytest.fixture
async def address(stub: ProviderStub, tmp_path: Path) -> AsyncIterator[Address]:
    async with run_service(tmp_path, pool_text(stub).replace("tools = true", SIGHTED)) as opened:
        yield opened


def _command(venv: Path, program: str) -> list[str]:
    """Node finds the packages beside the link to the programs, if it takes the link for a folder."""
    if venv.name.endswith("-node"):
        keep = ("--preserve-symlinks", "--preserve-symlinks-main")
        return [str(venv / "bin" / "node"), *keep, str(venv / "drives" / f"by_{program}.mjs")]
    return [str(venv / "bin" / "python"), str(DRIVES / f"by_{program}.py")]


Drive = Callable[[str, str], Awaitable[dict[str, Any]]]


@pytest.fixture
def drive(address: Address, tmp_path: Path) -> Drive:
    """Runs a program in an environment, by their names, and gives its report."""

    async def run(program: str, venv: str) -> dict[str, Any]:
        process = await asyncio.create_subprocess_exec(
            *_command(ROOT / f".venv-clients-{venv}", program),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "BATON_URL": address.url}
            | {"BATON_API_KEY": address.key, **QUIET},
        )
        async with asyncio.timeout(RUN_SECONDS):
            out, err = await process.communicate()
        assert process.returncode == 0, err.decode()[-2000:]
        report: dict[str, Any] = json.loads(out.splitlines()[-1])
        return report

    return run
