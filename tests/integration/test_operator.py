"""An operator over Postgres and Redis: doctor, migrate, doctor, three processes, an answer and its explanation."""

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.cli.test_commands import HARD, KEY, apart, baton, environment, started

pytestmark = pytest.mark.integration


@contextmanager
def process(folder: Path, verb: str, environ: dict[str, str]) -> "Iterator[subprocess.Popen[str]]":
    """One process of the service; it must stop with 0 when told to."""
    with (
        (folder / f"{verb}.log").open("a") as log,
        subprocess.Popen(
            [sys.executable, "-m", "app", verb],
            cwd=folder,
            env=environment(folder, **environ),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as running,
    ):
        try:
            yield running
        finally:
            running.send_signal(signal.SIGTERM)
            assert running.wait(20) == 0


def play(folder: Path, environ: dict[str, str]) -> None:
    assert "run `baton migrate`" in baton(folder, "doctor", **environ).out
    assert apart(folder, "migrate", **environ).status == 0
    checked = baton(folder, "doctor", **environ)
    assert checked.status == 0, checked.out
    assert re.findall(r"^ok\s+(schema|database|redis)", checked.out, re.MULTILINE) == ["schema", "database", "redis"]
    with ExitStack() as stack:
        gateway = stack.enter_context(process(folder, "gateway", environ))
        stack.enter_context(process(folder, "dispatcher", environ))
        stack.enter_context(process(folder, "dispatcher", environ))
        url = re.search(r"listening on (\S+)", started(gateway))
        assert url
        body = {"model": "baton-ultra", "messages": [{"role": "user", "content": HARD}]}
        headers = {"Authorization": f"Bearer {KEY}"}
        reply = httpx.post(f"{url[1]}/v1/chat/completions", json=body, headers=headers, timeout=20).json()
        assert reply["choices"][0]["message"]["content"] == "The answer is x = 5."
        shown = apart(folder, "runs", "show", reply["baton"]["run"], **environ)
        assert "its output is the answer" in shown.out
        assert "estimate: " in baton(folder, "plan", HARD, **environ).out
    assert "Traceback" not in (folder / "gateway.log").read_text() + (folder / "dispatcher.log").read_text()


async def test_from_an_empty_database_to_an_explained_answer(tmp_path: Path, postgres_url: str, redis_url: str) -> None:
    environ = {
        "BATON_DATABASE_URL": postgres_url,
        "BATON_REDIS_URL": redis_url,
        "BATON_PEPPER": "p" * 40,
        "BATON_PORT": "0",
    }
    await asyncio.to_thread(play, tmp_path, environ)
