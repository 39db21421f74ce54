"""What an engine does again and again beside its runs goes on after an error, and never ends the engine."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from msgspec.structs import replace

from app.engine import log_export, retention, sealer
from app.engine.conductors import probe, ratings, versions, watch
from app.engine.log_export import CheckpointExport
from app.engine.periodic import look_repeatedly
from app.engine.renewal import renew_regularly
from app.engine.retention import ContentRetention, RunRetention
from app.engine.runs import shadows
from app.errors import ServiceUnavailable, StoreUnavailable
from app.process.wiring import Runtime
from app.store.archive_files import Folder
from tests.harness.waiting import PATIENCE_SECONDS


class Looks:
    """Looks of which the first ones fail with these errors; the one after them sets `stopping`."""

    def __init__(self, *errors: Exception) -> None:
        self.stopping = asyncio.Event()
        self.errors = list(errors)

    async def look(self, *_: object) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.stopping.set()


async def test_an_outage_and_a_bug_are_told_and_the_next_look_comes(
    runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    looks, outages = Looks(StoreUnavailable(), ValueError("the bug")), list[ServiceUnavailable]()
    telemetry = runtime.context.telemetry
    await look_repeatedly(looks.look, looks.stopping, 0.0, telemetry, "The work", on_outage=outages.append)
    assert [type(error) for error in outages] == [StoreUnavailable]
    (line,) = [line for line in caplog.records if line.levelno == logging.ERROR]
    assert line.message == "The work failed because of a bug; it is tried again."


TASKS: dict[str, Callable[[Runtime, Any], Any]] = {
    "sealer": lambda runtime, _: sealer.Sealer(runtime.context, ()),
    "export": lambda runtime, folder: CheckpointExport(runtime.context, Folder(folder)),
    "erasure": lambda runtime, _: ContentRetention(runtime.context, seconds=1.0),
    "pruning": lambda runtime, _: RunRetention(runtime.context, nullcontext, None, seconds=1.0, claim_seconds=1.0),
    "shadows": lambda runtime, _: shadows.Shadows(runtime.context, runtime.drivers),
    "promotions": lambda runtime, _: watch.PromotionWatch(runtime.context),
    "ratings": lambda runtime, _: runtime.ratings,
    "versions": lambda runtime, _: runtime.versions,
}


@pytest.mark.parametrize("name", TASKS)
async def test_a_bug_in_one_look_ends_no_task_of_an_engine(
    runtime: Runtime, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for module in (sealer, log_export, retention, ratings, versions):
        monkeypatch.setattr(module, "LOOK_SECONDS", 0.0)
    for module in (shadows, watch):
        monkeypatch.setattr(module, "EVERY_SECONDS", 0.0)
    task, looks = TASKS[name](runtime, tmp_path), Looks(ValueError("a bug"))
    monkeypatch.setattr(task, "look", looks.look)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await task.run(looks.stopping)
    assert looks.errors == []


async def test_a_bug_in_one_look_does_not_end_the_probe_of_conductors(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopping, bugs = asyncio.Event(), [KeyError("a worker that is gone")]

    def find_conductors(_catalog: object) -> list[Any]:
        if bugs:
            raise bugs.pop()
        stopping.set()
        return []

    monkeypatch.setattr(probe, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(probe, "conductors", find_conductors)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await runtime.conductor_probe.run(stopping)
    assert bugs == []


async def test_what_is_missing_twice_is_lost_and_what_is_missing_once_was_just_finished(
    runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    renewals: list[set[str] | Exception] = [{"finished", "taken"}, StoreUnavailable(), {"taken"}, set()]
    lost: list[str] = []

    async def renew() -> set[str]:
        missing = renewals.pop(0)
        if isinstance(missing, Exception):
            raise missing
        return missing

    context = replace(runtime.context, lease=0.0)
    await renew_regularly(context, renew, lost.append, is_over=lambda: not renewals, failed="Nothing was renewed.")
    assert lost == ["taken"]
    assert "Nothing was renewed." in caplog.text
