"""The auditor reads contents in parts as it reads whole ones, and finds texts that an erasure has left."""

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from app.audit.check import Auditor
from app.audit.export import Export
from app.core.message.chat import Message, Task, Text
from app.process.wiring import Runtime
from app.providers.formats import adapter
from app.store.archive import open_archive
from app.store.journal_file import write
from tests.harness.audited import audit_report
from tests.harness.in_process import finish, order, pool_text, running_service
from tests.stubs import ProviderStub, Reply

LONG = "A long answer. " * 40


@pytest.fixture
async def runtime(stub: ProviderStub, tmp_path: Path) -> AsyncIterator[Runtime]:
    stub.always("alpha", Reply(chunks=(LONG,)))
    async with running_service(tmp_path, pool_text(stub), audits=False) as running:
        yield running


async def second_turn(runtime: Runtime) -> str:
    messages = [Message("user", (Text("One?"),)), Message("assistant", (Text(LONG),)), Message("user", (Text("Two?"),))]
    followed_run = await runtime.runs.start(order(runtime, "baton-mini", task=Task(tuple(messages))))
    return (await finish(followed_run)).ended.state.run


def falsify(runtime: Runtime, statement: str) -> None:
    engine = create_engine(runtime.pool.configuration.settings.database_url)
    with engine.begin() as conn:
        conn.execute(text(statement))
    engine.dispose()


@pytest.mark.parametrize(
    ("statement", "rule"),
    [
        ("UPDATE texts SET body = CAST(replace(CAST(body AS TEXT), 'long', 'LONG') AS BLOB)", "content-altered"),
        ("DELETE FROM texts WHERE before IS NULL", "content-missing"),
        ("DELETE FROM shared_contents", "text-left"),
    ],
)
async def test_a_text_that_was_changed_or_taken_or_left_is_found(runtime: Runtime, statement: str, rule: str) -> None:
    await second_turn(runtime)
    url = runtime.pool.configuration.settings.database_url
    assert (await audit_report(url)).is_clean
    falsify(runtime, statement)
    assert rule in (await audit_report(url)).rules


async def test_an_export_has_every_content_as_a_whole(runtime: Runtime, tmp_path: Path) -> None:
    await second_turn(runtime)
    url, path = runtime.pool.configuration.settings.database_url, tmp_path / "journal.jsonl"
    async with open_archive(url) as archive:
        await write(archive, path, now=time.time())
    falsify(runtime, "DELETE FROM texts")
    report = await Auditor(time.time(), adapter).audit(Export(path))
    assert (report.violations, report.calls, report.rebuilt_requests) == ([], 1, 1)
