"""`baton top`: the overview of the configured database in the terminal."""

import time
from io import StringIO
from pathlib import Path

import orjson
import pytest
from msgspec.structs import replace
from rich.console import Console

from app.cli.commands import parse
from app.cli.operations import top
from app.core.run.events import Kind
from app.gateway.openapi.overview_replies import Overview
from app.process.config import read
from app.store.protocol import Projection
from app.store.sql import open_store
from tests.conformance.entries import admission_entry
from tests.harness.raw_facts import Raw

WORKER = {"calls": 9, "success_rate": 0.75, "input_tokens": 10, "output_tokens": 20}


async def test_the_document_of_the_api_is_printed_and_drawn_within_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path}/baton.db"
    settings = read({"BATON_DATA_DIR": str(tmp_path), "BATON_DATABASE_URL": url})
    now = time.time()
    ended = (Raw(Kind.FAILED, {"step": None, "error": "timeout"}),)
    async with open_store(url) as store:
        for name, state in (("run_1", "admitted"), ("run_2", "admitted"), ("run_3", "awaiting_approval")):
            await store.append(admission_entry(name, at=now - 1, row=Projection(state=state)))
        failed = Projection(state="failed", error="timeout")
        await store.append(replace(admission_entry("run_1", at=now), new=None, epoch=1, row=failed, events=ended))
    await top._top(settings, parse(["top", "--json", "--period", "hour"]), lambda: now)
    document = orjson.loads(capsys.readouterr().out)
    overview = Overview.model_validate(document)
    assert (overview.total.runs, overview.total.ended, overview.period) == (3, 1, "hour")
    assert set(overview.hidden) == {"breakers", "conductors", "service"}
    await top._top(settings, parse(["top"]), lambda: now)  # standard output is no terminal: it ends
    printed = capsys.readouterr().out
    for line in ("open runs  1 admitted", "approvals  1 wait", "runs       3, 1 ended", "success    0.0%"):
        assert line in printed
    assert [line.split() for line in printed.splitlines()][-1] == ["failed", "timeout", "1"]
    outcomes = {"ok": 6, "failed": 2, "open": 1}
    document["workers"] = [WORKER | {"worker": "w" * 70, "outcomes": outcomes}]
    narrow = Console(file=StringIO(), width=80, no_color=True, force_terminal=False)
    narrow.print(top.draw(document))
    assert isinstance(narrow.file, StringIO)
    drawing = narrow.file.getvalue()
    assert max(len(line) for line in drawing.splitlines()) <= 80
    assert "\x1b" not in drawing
    assert ["9", "2", "75.0%", "30"] in [line.split()[1:] for line in drawing.splitlines()]
