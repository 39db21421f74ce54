"""Arms over HTTP: they are models of the service, journaled like any run, and the auditor finds nothing wrong."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from app.core.plan.arms import tier_for
from app.gateway.http.api_keys import mint
from app.process.wiring import Runtime
from tests.harness.in_process import await_ended_row, client_of, order, plan_text, pool_text, running_service
from tests.stubs import Hang, ProviderStub, Reply

SWITCH = '\n[evaluation]\narms = true\nconductors = ["gamma"]\n'
CONDUCTED = "baton-ultra:conductor:gamma"
LEASE = {"BATON_LEASE_SECONDS": "0.6"}


@pytest.fixture
async def runtime(stub: ProviderStub, tmp_path: Path) -> AsyncIterator[Runtime]:
    async with running_service(tmp_path, pool_text(stub) + SWITCH) as running:
        yield running


async def ask(client: httpx.AsyncClient, model: str, **more: Any) -> dict[str, Any]:
    """The run that came of a question, as its auditor reads it; or the error."""
    body = {"model": model, "messages": [{"role": "user", "content": "What is 2 + 2?"}], **more}
    reply = (await client.post("/v1/chat/completions", json=body)).json()
    if "error" in reply:
        return reply
    run: dict[str, Any] = (await client.get(f"/v1/runs/{reply['baton']['run']}")).json()
    return run


def shape(run: dict[str, Any]) -> list[tuple[str, list[str | int]]]:
    return [(step["planned_worker"], step["access"]) for step in run["steps"]]


async def test_each_arm_runs_its_own_shape_under_its_own_name(client: httpx.AsyncClient) -> None:
    expected_calls: dict[str, list[tuple[str, list[str | int]]]] = {
        "baton-ultra:single:gamma": [("gamma", ["user"])],
        "baton-ultra:sc:2:gamma": [("gamma", ["user"]), ("gamma", ["user"]), ("gamma", ["user", 0, 1])],
        "baton-ultra:moa:2:gamma+alpha": [("gamma", ["user"]), ("alpha", ["user"]), ("gamma", ["user", 0, 1])],
        "baton-ultra:static:pev": [("alpha", ["user"]), ("beta", ["user", 0]), ("gamma", ["user", 0, 1])],
    }
    for model, steps in expected_calls.items():
        run = await ask(client, model)
        assert shape(run) == steps
        facts = run["model"], run["tier"], run["state"], run["degraded"]
        assert facts == (model, "baton-ultra", "succeeded", False)


async def test_another_model_conducts(client: httpx.AsyncClient, stub: ProviderStub) -> None:
    before = len(stub.requests_for("planner"))
    stub.script("gamma", Reply(chunks=(plan_text((0, "Do it.", ["user"])),)))
    run = await ask(client, CONDUCTED)
    [proposal] = run["proposals"]
    assert (proposal["state"], [call["worker"] for call in proposal["attempts"]]) == ("accepted", ["gamma"])
    assert len(stub.requests_for("planner")) == before


async def test_no_model_conducts_that_reads_nothing_without_an_approval(stub: ProviderStub, tmp_path: Path) -> None:
    """A conductor reads the task before anybody can approve a plan."""
    gated = '\n[tiers.baton-ultra.approval]\nworkers = ["beta"]\n[tiers.baton-mini.approval]\nproviders = ["stub"]\n'
    async with running_service(tmp_path, pool_text(stub) + SWITCH + gated) as runtime, client_of(runtime) as client:
        listed = [model["id"] for model in (await client.get("/v1/models")).json()["data"]]
        for model in ("baton-ultra:conductor:beta", "baton-mini:conductor:gamma"):
            assert (await ask(client, model))["error"]["code"] == "model_not_found"
            assert model not in listed
        assert CONDUCTED in listed
    assert not stub.requests


@pytest.mark.long
async def test_a_random_plan_is_drawn_anew_for_each_run_and_is_valid(client: httpx.AsyncClient) -> None:
    runs = await asyncio.gather(*(ask(client, "baton-ultra:random") for _ in range(6)))
    assert {run["state"] for run in runs} == {"succeeded"}
    assert {run["conductor"] for run in runs} == {"random"}
    assert len({str(shape(run)) for run in runs}) > 1


async def test_arms_are_listed_and_described(client: httpx.AsyncClient, runtime: Runtime) -> None:
    listed = {model["id"]: model["baton"] for model in (await client.get("/v1/models")).json()["data"]}
    assert {"baton-ultra:single:beta", "baton-ultra:conductor:gamma", "baton-mini:random"} < set(listed)
    arm = listed["baton-ultra:single:beta"]
    assert (arm["tier"], arm["alias"], arm["pool"], arm["conductor"]) == ("baton-ultra", True, ["beta"], "fixed")
    assert arm["catalog"] == runtime.pool.catalog().digest == (await ask(client, "baton-mini"))["catalog"]
    assert (await client.get("/v1/models/baton-ultra:sc:3:beta")).json()["id"] == "baton-ultra:sc:3:beta"


async def test_a_key_has_the_arms_of_its_own_tiers_alone(runtime: Runtime) -> None:
    key, row = mint(runtime.gateway.pepper, tenant="acme", name="mini", scopes=["runs:write"], now=0.0)
    row = replace(row, tiers=frozenset({"baton-mini"}))
    await runtime.gateway.store.add_key(row)
    async with client_of(runtime) as client:
        client.headers["authorization"] = f"Bearer {key}"
        assert (await ask(client, "baton-ultra:random"))["error"]["code"] == "model_not_found"
        ids = [model["id"] for model in (await client.get("/v1/models")).json()["data"]]
        assert "baton-mini:random" in ids
        assert not [name for name in ids if name.startswith("baton-ultra")]


async def test_a_shape_that_does_not_fit_is_refused_instead_of_cut(client: httpx.AsyncClient) -> None:
    assert (await ask(client, "baton-ultra:sc:5"))["error"]["code"] == "too_few_steps"
    narrow = {"baton": {"budget": {"steps": 2}}}
    refused = (await ask(client, "baton-ultra:static:pev", **narrow))["error"]
    assert (refused["code"], refused["param"]) == ("too_few_steps", "model")
    assert len((await ask(client, "baton-ultra:single:beta", **narrow))["steps"]) == 1


@pytest.mark.long
async def test_whoever_takes_a_run_over_goes_on_with_its_arm(stub: ProviderStub, tmp_path: Path) -> None:
    """The plan of a lost driver is made again by the arm's conductor, not by the tier's."""
    stub.script("gamma", Hang())
    async with running_service(tmp_path, pool_text(stub) + SWITCH, LEASE, dispatches=False) as first:
        arm = tier_for(first.pool.catalog(), CONDUCTED)
        assert arm is not None
        followed_run = await first.runs.start(replace(order(first, "baton-ultra"), tier=arm, model=CONDUCTED))
        await stub.wait_for(1, "gamma")
    stub.clear()
    stub.script("gamma", Reply(chunks=(plan_text((0, "Do it.", ["user"])),)))
    async with running_service(tmp_path, pool_text(stub) + SWITCH, LEASE) as second:
        row = await await_ended_row(second.context.store, followed_run.run)
        assert (row.state, row.degraded) == ("succeeded", False)
    assert not stub.requests_for("planner")
