"""A journal or a transparency log that is damaged in the database: requests for it say so, and others are answered."""

import logging
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from app.process.wiring import Runtime
from tests.gateway.test_log import seal
from tests.harness.in_process import ask, client_of, pool_text, running_service
from tests.stubs import ProviderStub

PATHS = ("", "/events", "/explain", "/steps/0", "/graph", "/timeline", "/state", "/stream", "/views", "/events/stream")
CHANGES = ["body = '{}'", "body = 'no json'", "kind = 'step.dreamt'"]
OTHER_STEP = "body = json_set(CAST(body AS TEXT), '$.n', 7)"
"""An event that can be read, about a step that there is not."""


@pytest.fixture
async def runtime(stub: ProviderStub, tmp_path: Path) -> AsyncIterator[Runtime]:
    """A service whose database is damaged by the test."""
    async with running_service(tmp_path, pool_text(stub), audits=False) as running:
        yield running


MESSAGE = {"role": "user", "content": "What is 6 times 7?"}


def change(folder: Path, statement: str) -> None:
    with closing(sqlite3.connect(folder / "baton.db", timeout=30)) as database, database:
        database.execute(statement)


@pytest.mark.parametrize("damage", CHANGES)
async def test_an_event_that_cannot_be_read_is_named(
    runtime: Runtime, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with client_of(runtime) as client:
        damaged, whole = [(await ask(client)).json()["baton"]["run"] for _ in range(2)]
        change(tmp_path, f"UPDATE events SET {damage} WHERE run = '{damaged}' AND seq = 3")
        paths = [f"/v1/runs/{damaged}{path}" for path in PATHS]
        for path in (*paths, f"/v1/runs/{damaged}/compare/{whole}"):
            if path.endswith("/events") and damage == CHANGES[0]:  # which shows bodies as they are
                continue
            reply = await client.get(path)
            error = reply.json()["error"]
            assert (reply.status_code, error["code"], error["type"]) == (500, "record_damaged", "server_error"), path
            assert f"The event 3 of the run {damaged} cannot be read" in error["message"]
            assert "report it to the operator" in error["message"]
            assert reply.headers["x-should-retry"] == "false"
        listed = (await client.get("/v1/runs")).json()["data"]
        other = await client.get(f"/v1/runs/{whole}")
    assert {run["id"] for run in listed} == {damaged, whole}
    assert other.status_code == 200
    errors = [record.__dict__["fields"] for record in caplog.records if record.levelno == logging.ERROR]
    assert all(f"The event 3 of the run {damaged}" in fields["error"] for fields in errors)
    assert errors, "an operator is told"


@pytest.mark.parametrize(("kind", "field"), [("step.done", "n"), ("plan.step", "proposal"), ("run.succeeded", "step")])
async def test_an_event_that_does_not_fit_those_before_it_is_named(
    runtime: Runtime, tmp_path: Path, kind: str, field: str
) -> None:
    async with client_of(runtime) as client:
        run = (await ask(client)).json()["baton"]["run"]
        altered = OTHER_STEP.replace("$.n", f"$.{field}")
        change(tmp_path, f"UPDATE events SET {altered} WHERE run = '{run}' AND kind = '{kind}'")
        for path in [f"/v1/runs/{run}{path}" for path in PATHS if path != "/events"]:
            reply = await client.get(path)
            error = reply.json()["error"]
            assert (reply.status_code, error["code"]) == (500, "record_damaged"), path
            assert f"of the run {run} does not fit those before it: it was altered" in error["message"]


@pytest.mark.parametrize("damage", [*CHANGES[:2], OTHER_STEP])
async def test_a_damaged_run_is_left_out_of_figures_over_many(runtime: Runtime, tmp_path: Path, damage: str) -> None:
    async with client_of(runtime) as client:
        damaged, *_ = [(await ask(client)).json()["baton"]["run"] for _ in range(3)]
        change(tmp_path, f"UPDATE events SET {damage} WHERE run = '{damaged}' AND kind = 'call.finished'")
        report = (await client.get("/v1/reports", params={"by": "worker"})).json()
        summary = await client.get("/v1/reports", params={"format": "csv", "part": "summary"})
        plan = await client.post("/v1/plans", json={"model": "baton-mini", "messages": [MESSAGE]})
    whole = 3 if damage == OTHER_STEP else 2
    assert (report["total"]["runs"], report["left_out"]["damaged"]) == (whole, 3 - whole)
    assert [group["runs"] for group in report["groups"]] == [whole]
    assert f"left_out.damaged,{3 - whole:.1f}" in summary.text
    assert plan.status_code == 200, "its estimate is made from past runs"


@pytest.mark.parametrize("kind", ["run.admitted", "plan.opened", "call.finished"])
async def test_a_damaged_run_hides_no_other_in_lists_and_in_the_overview(
    runtime: Runtime, tmp_path: Path, kind: str
) -> None:
    async with client_of(runtime) as client:
        damaged, whole = [(await ask(client)).json()["baton"]["run"] for _ in range(2)]
        change(tmp_path, f"UPDATE events SET {CHANGES[1]} WHERE run = '{damaged}' AND kind = '{kind}'")
        listed = await client.get("/v1/runs?include=workers&include=preview")
        overview = await client.get("/v1/overview")
    assert (listed.status_code, overview.status_code) == (200, 200)
    assert {run["id"]: run["workers"] for run in listed.json()["data"]} == {damaged: ["alpha"], whole: ["alpha"]}


@pytest.mark.long
async def test_a_plan_that_cannot_be_read_hides_no_other_plan_that_waits(stub: ProviderStub, tmp_path: Path) -> None:
    """Read by another process than the one that wrote the plans, which still knows them."""
    plan = {"steps": [{"worker": "alpha", "subtask": "Answer.", "access": ["user"]}]}
    async with running_service(tmp_path, pool_text(stub), audits=False) as writer, client_of(writer) as client:
        replies = [await ask(client, baton={"plan": plan, "approval": "required"}) for _ in range(2)]
    damaged, whole = [reply.json()["baton"]["run"] for reply in replies]
    change(tmp_path, f"UPDATE events SET {CHANGES[1]} WHERE run = '{damaged}' AND seq = 3")
    service = running_service(tmp_path, pool_text(stub), audits=False, drives=False)
    async with service as reader, client_of(reader, "reader") as client:
        listed = (await client.get("/v1/approvals")).json()["data"]
        one = await client.get(f"/v1/approvals/{damaged}")
    assert [approval["run"] for approval in listed] == [whole]
    assert (one.status_code, one.json()["error"]["code"]) == (500, "record_damaged")


@pytest.mark.parametrize("damage", ["DELETE FROM log_tiles", "UPDATE log_state SET checkpoint = 'none'"])
async def test_a_damaged_transparency_log_proves_nothing(runtime: Runtime, tmp_path: Path, damage: str) -> None:
    async with client_of(runtime) as client:
        run = (await ask(client)).json()["baton"]["run"]
        await seal(runtime)
        change(tmp_path, damage)
        reply = await client.get(f"/v1/runs/{run}/proof")
        assert (await client.get(f"/v1/runs/{run}")).status_code == 200
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "record_damaged")
    assert "`baton audit verify`" in reply.json()["error"]["message"]
