"""An operator over Postgres and Redis: doctor, migrate, doctor, two processes, an answer and its explanation.

The gateway has an interpreter, and so a hash seed, of its own, which the engine does not share.
"""

import asyncio
import re
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.cli.test_commands import HARD, KEY, apart, baton, environment
from tests.harness.processes import Process
from tests.harness.waiting import PATIENCE_SECONDS

pytestmark = [pytest.mark.long, pytest.mark.integration]


def play(folder: Path, environ: dict[str, str]) -> None:
    assert "run `baton migrate`" in baton(folder, "doctor", **environ).out
    assert apart(folder, "migrate", **environ).status == 0
    checked = baton(folder, "doctor", **environ)
    assert checked.status == 0, checked.out
    assert re.findall(r"^ok\s+(schema|database|redis)", checked.out, re.MULTILINE) == ["schema", "database", "redis"]
    with ExitStack() as stack:
        own = environment(folder, **environ)
        gateway, engine = Process("gateway", folder, own, forked=False), Process("dispatcher", folder, own)
        for process in (gateway, engine):
            stack.callback(process.kill)
            process.start(wait=False)
        for process in (gateway, engine):
            process.wait_until_announced()
        body = {"model": "baton-ultra", "messages": [{"role": "user", "content": HARD}]}
        headers = {"Authorization": f"Bearer {KEY}"}
        reply = httpx.post(
            f"{gateway.url}/v1/chat/completions", json=body, headers=headers, timeout=PATIENCE_SECONDS
        ).json()
        assert reply["choices"][0]["message"]["content"] == "The answer is x = 5."
        output = apart(folder, "runs", "show", reply["baton"]["run"], **environ)
        assert "its output is the answer" in output.out
        assert "estimate: " in baton(folder, "plan", HARD, **environ).out
        for process in (engine, gateway):
            assert process.stop() == 0
            assert "Traceback" not in process.log


async def test_from_an_empty_database_to_an_explained_answer(tmp_path: Path, postgres_url: str, redis_url: str) -> None:
    environ = {
        "BATON_DATABASE_URL": postgres_url,
        "BATON_REDIS_URL": redis_url,
        "BATON_PEPPER": "p" * 40,
    }
    await asyncio.to_thread(play, tmp_path, environ)
