"""`baton runs ls --follow`: a line for each run of the list, and again once it has changed."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from app.cli import runs
from app.cli.commands import parse
from app.core.run.events import Kind
from app.process.config import read
from app.store.protocol import Projection
from app.store.sql import open_store
from tests.conformance.entries import admitted
from tests.harness.raw_facts import Raw
from tests.harness.waiting import until


async def test_a_list_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runs, "LIST_POLL_SECONDS", 0.01)
    url = f"sqlite:///{tmp_path}/baton.db"
    settings = read({"BATON_DATA_DIR": str(tmp_path), "BATON_DATABASE_URL": url})
    now, printed = time.time(), ""

    def has(*expected: tuple[str, str]) -> bool:
        nonlocal printed
        printed += capsys.readouterr().out
        lines = [orjson.loads(line) for line in printed.splitlines()]
        return [(line["id"], line["state"]) for line in lines] == list(expected)

    async with open_store(url) as store:
        await store.append(admitted("run_1", at=now - 1, row=Projection(state="admitted")))
        asked = parse(["runs", "ls", "--follow", "--json", "--tier", "mini"])
        following = asyncio.create_task(runs._follow(settings, asked, now))
        first, second = ("run_1", "admitted"), ("run_2", "admitted")
        await until(lambda: has(first))
        await store.append(admitted("run_2", at=now, row=Projection(state="admitted")))
        await until(lambda: has(first, second))
        ended = (Raw(Kind.FAILED, {"step": None, "error": "timeout"}),)
        failed = replace(admitted("run_1", at=now), new=None, epoch=1, row=Projection(state="failed"), events=ended)
        await store.append(failed)
        await until(lambda: has(first, second, ("run_1", "failed")))
        following.cancel()
        await asyncio.wait([following])
