"""Versions of a conductor through the whole service: who plans a run, what the journal says of it, and the way back.

`running_service` ends with the independent auditor, who recomposes each planning request under its version's name.
"""

import re
from asyncio import to_thread
from pathlib import Path
from time import time
from typing import Any

import httpx
import pytest

from app.cli.promotion import shadow_plans
from app.cli.runs.run_words import proposal
from app.core.pool.conductor_versions import Change, ChangeKind
from app.process.wiring import Runtime
from app.providers.vllm import Management
from app.store.archive import open_archive
from tests.harness.in_process import client_of, plan_text, pool_text, running_service
from tests.stubs import Fail, ProviderStub, Reply

PLAN = Reply(chunks=(plan_text((0, "Solve it.", ["user"])),))


async def store_changes(runtime: Runtime, *changes: tuple[ChangeKind, str] | tuple[ChangeKind, str, float]) -> None:
    """Store changes of the conductor `planner`, and let the gateway look."""
    for kind, version, *share in changes:
        n = len(await runtime.context.store.changes())
        at = runtime.context.now()
        await runtime.context.store.change(Change(f"change_{n:03}", at, "me", "planner", kind, version, *share))
    await runtime.versions.look()


async def plan_one_run(client: httpx.AsyncClient) -> tuple[str, dict[str, Any]]:
    """The model that was asked for one run's plan, and the run; nobody, if its breaker is open."""
    body = {"model": "baton-ultra", "messages": [{"role": "user", "content": "What is 2 + 2?"}]}
    reply = await client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    run = (await client.get(reply.json()["baton"]["audit"])).json()
    return next((attempt["model"] for attempt in run["proposals"][0]["attempts"]), "nobody"), run


VERSION_CALLS = re.compile(
    r'^baton_version_calls_total\{outcome="([a-z]+)",version="planner@1",worker="planner"\} [1-9]', re.MULTILINE
)


@pytest.mark.long
async def test_the_alias_moves_and_the_journal_names_the_version(tmp_path: Path) -> None:
    async with ProviderStub() as stub:
        for model in ("planner", "planner@1", "planner@2"):
            stub.always(model, PLAN)
        async with running_service(tmp_path, pool_text(stub)) as runtime, client_of(runtime) as client:
            assert (await plan_one_run(client))[0] == "planner"
            await store_changes(runtime, ("loaded", "planner@1"), ("shadowed", "planner@1"))
            assert (await plan_one_run(client))[0] == "planner"
            await store_changes(runtime, ("promoted", "planner@1"), ("loaded", "planner@2"))
            model, run = await plan_one_run(client)
            assert model == "planner@1"
            assert proposal(run["proposals"][0]).endswith("(planner, version planner@1) · accepted · single of 1 step")
            await store_changes(runtime, ("promoted", "planner@2"))
            assert (await plan_one_run(client))[0] == "planner@2"
            await store_changes(runtime, ("rolled_back", ""))
            assert (await plan_one_run(client))[0] == "planner@1"
            await store_changes(runtime, ("rolled_back", ""))
            model, run = await plan_one_run(client)
            assert (model, run["degraded"]) == ("planner", False)
            events = (await client.get(f"/v1/runs/{run['id']}/events")).json()["data"]
            assert all("version" not in event["body"] for event in events)
            assert "version" not in proposal(run["proposals"][0])
            for path in ("load_lora_adapter", "unload_lora_adapter"):  # the server's management is nobody's business
                assert (await client.post(f"/v1/{path}", json={"lora_name": "x"})).status_code == 404
        assert [request.json["model"] for request in stub.requests if "planner" in request.json["model"]] == [
            "planner", "planner", "planner@1", "planner@2", "planner@1", "planner",
        ]  # fmt: skip


@pytest.mark.long
async def test_a_canary_conducts_some_runs_and_one_that_fails_ends_in_the_fallback(tmp_path: Path) -> None:
    async with ProviderStub() as stub:
        stub.always("planner", PLAN)
        stub.always("planner@1", PLAN)
        async with running_service(tmp_path, pool_text(stub)) as runtime, client_of(runtime) as client:
            await store_changes(runtime, ("loaded", "planner@1"), ("canary", "planner@1", 0.5))
            models = [(await plan_one_run(client))[0] for _ in range(16)]
            assert set(models) == {"planner", "planner@1"}
            stub.always("planner@1", Fail(status=404))
            plans = [await plan_one_run(client) for _ in range(10)]
            assert {run["degraded"] for model, run in plans if model == "planner"} == {False}
            assert {run["degraded"] for model, run in plans if model != "planner"} == {True}
            counted = VERSION_CALLS.findall(runtime.context.telemetry.exposition().decode())
            assert ("ok" in counted, len(counted)) == (True, 2), counted


@pytest.mark.long
async def test_a_shadow_is_asked_what_the_live_conductor_was_asked_and_conducts_nothing(tmp_path: Path) -> None:
    """The very messages and schema come from the journal; the comparison counts what differs and what is no plan."""
    async with ProviderStub() as stub:
        stub.always("planner", PLAN)
        same, other, none = PLAN, Reply(chunks=(plan_text((1, "Solve it.", ["user"])),)), Reply(chunks=("No idea.",))
        async with running_service(tmp_path, pool_text(stub)) as runtime, client_of(runtime) as client:
            for _ in range(3):
                assert (await plan_one_run(client))[0] == "planner"
            stub.script("planner@1", PLAN, same, other, none)
            stub.always("planner@2", PLAN)
            for version in ("planner@1", "planner@2"):
                await store_changes(runtime, ("loaded", version), ("canary", version, 1.0))
                assert (await plan_one_run(client))[0] == version
        before = len(stub.requests)
        live = [request.json for request in stub.requests if request.json["model"] == "planner"]
        compared, server = shadow_plans.PlanComparison(), Management(stub.vllm_url, None)
        async with open_archive(runtime.pool.configuration.settings.database_url) as archive:
            async for case in shadow_plans.read_cases(archive, "planner", "", 0.0, time(), compared):
                await to_thread(shadow_plans.compare, server, "planner@1", case, compared)
        server.close()
        bodies = [body.json for body in stub.requests[before:]]
    assert (compared.plans, compared.valid, compared.same) == (3, 2, 1)
    assert compared.left_out == {"planned by a version that is not live": 2}
    assert (compared.steps, compared.steps_live) == (2, 3)
    assert shadow_plans.summary(compared.as_json()) == "2 of 3 plans valid, 1 the same as the live conductor's"
    assert [request["model"] for request in bodies] == ["planner@1"] * 3
    assert [(request["messages"], request["response_format"]["json_schema"]["schema"]) for request in bodies] == [
        (request["messages"], request["response_format"]["json_schema"]["schema"]) for request in live
    ]
