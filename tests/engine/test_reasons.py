"""A conductor's reasons for its plan: asked for where a tier says so, stored as content, and sent to no worker."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.core.run.events import Kind
from app.process.wiring import Runtime
from tests.harness.in_process import (
    bodies_of,
    client_of,
    events,
    pool_text,
    running_service,
    script_answers,
    script_plans,
)
from tests.stubs import ProviderStub

WHY = ("It is quick at sums.", "It weighs answers well.")
WITHHELD, SHAPE = "The draft is all it needs.", "A draft and a check, since sums go wrong."
REASONS = (*WHY, WITHHELD, SHAPE)
ASK = {"model": "baton-ultra", "messages": [{"role": "user", "content": "What is 2 + 2?"}]}


def text(*, reasons: bool = True) -> str:
    """A plan of two steps as a conductor writes it."""
    steps: list[dict[str, Any]] = [
        {"worker": 0, "subtask": "Draft it.", "access": ["user"]},
        {"worker": 1, "subtask": "Give the final answer.", "access": [0]},
    ]
    if reasons:
        steps[0] |= {"why": WHY[0], "withheld": ""}
        steps[1] |= {"why": WHY[1], "withheld": WITHHELD}
    return json.dumps({"steps": steps, **({"shape": SHAPE} if reasons else {})})


@pytest.fixture
async def runtime(tmp_path: Path, stub: ProviderStub) -> AsyncIterator[Runtime]:
    """A service whose tier `baton-ultra` asks its conductor for reasons, and whose tier `baton-deep` does not."""
    script_answers(stub)
    pool = pool_text(stub).replace(
        'conductor = { kind = "model", worker = "planner" }',
        'conductor = { kind = "model", worker = "planner", reasons = true }',
        1,
    )
    async with running_service(tmp_path, pool) as service:
        yield service


@pytest.fixture
async def client(runtime: Runtime) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(runtime) as caller:
        yield caller


async def test_reasons_are_stored_shown_erased_and_sent_to_no_worker(
    runtime: Runtime, client: httpx.AsyncClient, stub: ProviderStub
) -> None:
    script_plans(stub, text())
    run = (await client.post("/v1/chat/completions", json=ASK)).json()["baton"]["run"]
    [request] = stub.requests_for("planner")
    schema = request.json["response_format"]["json_schema"]["schema"]
    assert "shape" in schema["required"]
    for worker in ("alpha", "beta", "gamma"):
        assert not any(reason in received.body.decode() for received in stub.requests_for(worker) for reason in REASONS)
    journal = await events(runtime, run)
    [planned] = bodies_of(journal, Kind.PLAN_OPENED)
    assert planned["reasons"] is True
    assert not any(reason in str(event.body) for event in journal for reason in REASONS)
    data = (await client.get(f"/v1/runs/{run}/explain")).json()
    assert data["shape"]["reason"] == {"state": "given", "text": SHAPE}
    assert [step["reason"]["text"] for step in data["steps"]] == list(WHY)
    assert data["steps"][1]["withheld"] == {
        "user": True,
        "steps": [],
        "by": "conductor",
        "reason": {"state": "given", "text": WITHHELD},
    }
    assert all(f'"{reason}"' in data["text"] for reason in REASONS)
    await client.delete(f"/v1/runs/{run}")
    body = (await client.get(f"/v1/runs/{run}/explain")).json()
    assert body["shape"]["reason"] == {"state": "erased", "text": None}
    assert not any(reason in str(body) for reason in REASONS)
    assert "the conductor's reason was erased" in body["text"]


async def test_a_tier_that_asks_for_none_has_the_same_journal_as_before(
    runtime: Runtime, client: httpx.AsyncClient, stub: ProviderStub
) -> None:
    script_plans(stub, text(reasons=False))
    run = (await client.post("/v1/chat/completions", json=ASK | {"model": "baton-deep"})).json()["baton"]["run"]
    journal = await events(runtime, run)
    kinds = (Kind.PLAN_OPENED, Kind.PLAN_STEP, Kind.PLAN_ACCEPTED)
    assert not [
        event for event in journal if event.kind in kinds and {"reasons", "why", "why_withheld"} & {*event.body}
    ]
    [request, *_] = stub.requests_for("planner")
    assert "shape" not in request.body.decode()
    data = (await client.get(f"/v1/runs/{run}/explain")).json()
    assert data["shape"]["reason"]["state"] == "not_asked"
    assert "no reasons were asked for" in data["text"]


async def test_a_plan_without_its_reasons_is_carried_out_and_said_to_have_none(
    client: httpx.AsyncClient, stub: ProviderStub
) -> None:
    script_plans(stub, text(reasons=False))
    reply = (await client.post("/v1/chat/completions", json=ASK)).json()
    assert reply["baton"]["topology"] == "chain"
    data = (await client.get(f"/v1/runs/{reply['baton']['run']}/explain")).json()
    assert {step["reason"]["state"] for step in data["steps"]} == {"none"}
    assert "the conductor was asked for its reasons and gave none" in data["text"]
