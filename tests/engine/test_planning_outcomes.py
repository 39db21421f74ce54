"""A planning call has exactly one outcome, whatever the database does between its intent and the plan's end."""

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.core.run.events import Fact, Kind
from app.engine.steps import claimed_step
from app.errors import StoreUnavailable, WorkerUnavailable
from app.store.protocol import AppendResult, Entry
from app.store.sql import SqlStore
from tests.harness.audited import violations_in
from tests.harness.in_process import events, finish, order, plan_text, pool_text, running_service
from tests.stubs import ProviderStub, Reply

AWAY = 0.8
"""Seconds for which what is refused stays refused."""


@pytest.fixture
async def stub() -> AsyncIterator[ProviderStub]:
    async with ProviderStub() as running:
        running.always("planner", Reply(chunks=(plan_text((0, "Solve it.", ["user"])),)))
        yield running


class PlanningOutage:
    """A database that is away for the entries of planning calls of one kind, from the first of them on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: Kind, seconds: float) -> None:
        self._kind, self._seconds, self._since = kind, seconds, 0.0
        self._append = SqlStore.append
        monkeypatch.setattr(SqlStore, "append", lambda store, entry: self(store, entry))

    def _is_meant(self, draft: Fact) -> bool:
        return draft.kind is self._kind and draft.to_json()["n"] is None

    async def __call__(self, store: SqlStore, entry: Entry) -> AppendResult:
        if any(map(self._is_meant, entry.events)):
            self._since = self._since or time.monotonic()
            if time.monotonic() < self._since + self._seconds:
                raise StoreUnavailable
        return await self._append(store, entry)


async def plan_one_run(stub: ProviderStub, folder: Path) -> tuple[list[str], list[str], bool]:
    """One run: the outcomes of its planning calls, what became of its proposals, and whether it had an answer."""
    async with running_service(folder, pool_text(stub)) as runtime:
        outcome = await finish(await runtime.runs.start(order(runtime, "baton-ultra")))
        journal = await events(runtime, outcome.ended.state.run)
    assert await violations_in(f"sqlite:///{folder / 'baton.db'}") == []
    calls = [event.body["outcome"] for event in journal if event.kind is Kind.CALL_FINISHED and event.body["n"] is None]
    ends = [event.kind.value for event in journal if event.kind in (Kind.PLAN_ACCEPTED, Kind.PLAN_REJECTED)]
    return calls, ends, outcome.ended.error is None


async def test_an_outcome_is_kept_until_it_can_be_written(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    PlanningOutage(monkeypatch, Kind.CALL_FINISHED, AWAY)
    assert await plan_one_run(stub, tmp_path) == (["ok"], ["plan.accepted"], True)


async def test_an_outcome_that_could_not_be_kept_is_unknown(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claimed_step, "OUTCOME_WAIT_SECONDS", 0.05)
    refusing = PlanningOutage(monkeypatch, Kind.CALL_FINISHED, 0.0)
    refusing._is_meant = lambda draft: draft.to_json().get("outcome") == "ok" and draft.to_json()["n"] is None  # type: ignore[method-assign]
    refusing._seconds = 60.0
    assert await plan_one_run(stub, tmp_path) == (["unknown"], ["plan.rejected", "plan.accepted"], True)


async def test_a_call_waits_until_its_intent_can_be_written(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    PlanningOutage(monkeypatch, Kind.CALL_INTENDED, AWAY)
    began = time.monotonic()
    assert await plan_one_run(stub, tmp_path) == (["ok"], ["plan.accepted"], True)
    assert stub.requests_for("planner")[0].at > began + AWAY


async def test_a_call_that_was_never_intended_is_named_by_nobody(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = SqlStore.append

    async def over_budget(store: SqlStore, entry: Entry) -> AppendResult:
        if any(draft.kind is Kind.CALL_INTENDED and draft.to_json()["n"] is None for draft in entry.events):
            raise WorkerUnavailable
        return await append(store, entry)

    monkeypatch.setattr(SqlStore, "append", over_budget)
    assert await plan_one_run(stub, tmp_path) == ([], ["plan.rejected", "plan.accepted"], True)
    assert stub.requests_for("planner") == []
