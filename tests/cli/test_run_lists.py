"""`baton runs ls --follow`: a line for each run of the list, and again once it has changed."""

import asyncio
import time
from io import StringIO
from pathlib import Path

import orjson
import pytest
from msgspec.structs import replace
from rich.console import Console

from app.cli import storage
from app.cli.commands import parse
from app.cli.runs import run_list
from app.core.run.events import Kind
from app.errors import NotFound
from app.process.config import read
from app.store.protocol import Projection
from app.store.sql import open_store
from tests.conformance.entries import admission_entry
from tests.harness.raw_facts import Raw
from tests.harness.stand_ins import row_of
from tests.harness.waiting import until


async def test_a_list_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_list, "POLL_SECONDS", 0.01)
    url = f"sqlite:///{tmp_path}/baton.db"
    settings = read({"BATON_DATA_DIR": str(tmp_path), "BATON_DATABASE_URL": url})
    now, printed = time.time(), ""

    def has(*expected: tuple[str, str]) -> bool:
        nonlocal printed
        printed += capsys.readouterr().out
        lines = [orjson.loads(line) for line in printed.splitlines()]
        return [(line["id"], line["state"]) for line in lines] == list(expected)

    async with open_store(url) as store:
        await store.append(admission_entry("run_1", at=now - 1, row=Projection(state="admitted")))
        options = parse(["runs", "ls", "--follow", "--json", "--tier", "mini"])
        following = asyncio.create_task(run_list._follow(settings, options, lambda: now))
        first, second = ("run_1", "admitted"), ("run_2", "admitted")
        await until(lambda: has(first))
        await store.append(admission_entry("run_2", at=now, row=Projection(state="admitted")))
        await until(lambda: has(first, second))
        ended = (Raw(Kind.FAILED, {"step": None, "error": "timeout"}),)
        failed = replace(
            admission_entry("run_1", at=now), new=None, epoch=1, row=Projection(state="failed"), events=ended
        )
        await store.append(failed)
        await until(lambda: has(first, second, ("run_1", "failed")))
        following.cancel()
        await asyncio.wait([following])


@pytest.mark.parametrize("tier", ["baton-ultra", "a-tier-with-a-very-long-name"])
def test_a_list_at_80_columns_cuts_neither_times_nor_money(tier: str) -> None:
    rows = (
        row_of("run_" + "a" * 31, "acme", tier=tier),
        row_of("run_" + "b" * 31, "acme", tier=tier, state="awaiting_approval", ended_at=None),
    )
    console = Console(file=StringIO(), width=80)
    console.print(run_list._table(rows, {}, frozenset({rows[0].id}), console.width))
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "run_aaaaaaaaaaaaaaa 09-09 01:46" in text
    assert "$0.0001" in text
    assert text.count("…") == 1, "the mark of a run that goes on"


async def test_a_run_that_is_searched_among_the_newest_alone_is_not_said_to_be_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "PAGE_RUNS", 1)
    async with open_store(f"sqlite:///{tmp_path}/baton.db") as store:
        for age, run in enumerate(("run_new", "run_newer", "run_old")):
            await store.append(admission_entry(run, at=time.time() - age, row=Projection(state="admitted")))
        assert (await storage.find_run(store, "run_ol")).id == "run_old"
        monkeypatch.setattr(storage, "MAX_SEARCHED_RUNS", 2)
        with pytest.raises(NotFound, match="None of the newest 2 runs begins like that"):
            await storage.find_run(store, "run_ol")
        with pytest.raises(NotFound, match="2 runs begin like that"):
            await storage.find_run(store, "run_ne")
