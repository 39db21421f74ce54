"""Feedback over the real wiring: what is taken, from whom, once; and where it is shown."""

import asyncio
from typing import Any

import httpx
import pytest

from app.gateway.http.api_keys import mint
from app.process.wiring import Runtime
from app.store.protocol import RunQuery
from tests.stubs import Hang, ProviderStub

ASKED = {"model": "baton-mini", "messages": [{"role": "user", "content": "What is 2 + 2?"}]}


async def answer_one_run(client: httpx.AsyncClient) -> str:
    """A run that has ended."""
    return str((await client.post("/v1/chat/completions", json=ASKED)).headers["x-baton-run"])


async def rate(client: httpx.AsyncClient, run: str, key: str = "", **body: Any) -> httpx.Response:
    headers = {"idempotency-key": key} if key else {}
    return await client.post(f"/v1/runs/{run}/feedback", json=body, headers=headers)


@pytest.mark.parametrize(
    ("body", "score", "label"),
    [
        ({"score": 0.75}, 0.75, None),
        ({"score": 1}, 1.0, None),
        ({"thumbs": "up"}, 1.0, None),
        ({"thumbs": "down", "label": "wrong_unit"}, 0.0, "wrong_unit"),
        ({"label": "off-topic", "score": None}, None, "off-topic"),
    ],
)
async def test_a_score_a_thumb_or_a_label(
    runtime: Runtime, client: httpx.AsyncClient, body: dict[str, Any], score: float | None, label: str | None
) -> None:
    run = await answer_one_run(client)
    reply = await rate(client, run, source="widget", version="2.1", comment="Hm.", **body)
    assert reply.status_code == 200, reply.text
    reply_body = reply.json()
    assert reply_body["object"] == "run.feedback"
    assert (
        reply_body["score"],
        reply_body["label"],
        reply_body["kind"],
        reply_body["source"],
        reply_body["version"],
        reply_body["commented"],
    ) == (
        score,
        label,
        "explicit",
        "widget",
        "2.1",
        True,
    )
    assert "Hm." not in reply.text
    feedback = (await client.get(f"/v1/runs/{run}")).json()["feedback"]
    assert feedback == {"explicit": [{k: reply_body[k] for k in feedback["explicit"][0]}], "grader": [], "implicit": []}
    [rating] = await runtime.context.store.feedback(run)
    assert (rating.tenant, rating.comment) == ("acme", "Hm.")
    assert (
        'baton_feedback_total{kind="explicit",tier="baton-mini"} 1.0' in runtime.context.telemetry.exposition().decode()
    )


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "score", None),
        ({"comment": "Nice."}, "score", None),
        ({"score": 1.5}, "score", "decimal_above_max_value"),
        ({"score": -1}, "score", "integer_below_min_value"),
        ({"score": "high"}, "score", "invalid_type"),
        ({"score": True}, "score", "invalid_type"),
        ({"score": 1, "thumbs": "up"}, "thumbs", None),
        ({"thumbs": "sideways"}, "thumbs", "invalid_value"),
        ({"label": "has space"}, "label", "invalid_value"),
        ({"label": "x", "comment": "y" * 4_001}, "comment", "string_above_max_length"),
        ({"score": 1, "source": ""}, "source", "invalid_value"),
        ({"score": 1, "version": 2}, "version", "invalid_type"),
        ({"score": 1, "stars": 5}, "stars", "unknown_parameter"),
    ],
)
async def test_what_rates_nothing_is_refused(
    runtime: Runtime, client: httpx.AsyncClient, body: dict[str, Any], param: str, code: str | None
) -> None:
    run = await answer_one_run(client)
    reply = await rate(client, run, **body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param), reply.text
    assert code is None or error["code"] == code
    assert await runtime.context.store.feedback(run) == ()


async def test_the_same_request_rates_once_and_another_rates_again(runtime: Runtime, client: httpx.AsyncClient) -> None:
    run = await answer_one_run(client)
    replies = await asyncio.gather(*(rate(client, run, "one", thumbs="up") for _ in range(5)))
    assert {reply.content for reply in replies} == {replies[0].content}
    assert len(await runtime.context.store.feedback(run)) == 1
    assert (await rate(client, run, "one", thumbs="down")).status_code == 409
    assert (await rate(client, run, "two", thumbs="down")).status_code == 200
    assert (await rate(client, run, thumbs="down")).status_code == 200
    assert [rating.score for rating in await runtime.context.store.feedback(run)] == [1.0, 0.0, 0.0]


async def test_a_key_that_is_forgotten_rates_another_run(runtime: Runtime, client: httpx.AsyncClient) -> None:
    first, second = await answer_one_run(client), await answer_one_run(client)
    await rate(client, first, "one", score=1)
    assert await runtime.context.store.forget_idempotency_records(2e12, 10)
    assert (await rate(client, second, "one", score=0)).json()["score"] == 0
    scores = [rating.score for run in (first, second) for rating in await runtime.context.store.feedback(run)]
    assert scores == [1.0, 0.0]


async def test_another_tenants_run_is_not_there(runtime: Runtime, client: httpx.AsyncClient) -> None:
    run = await answer_one_run(client)
    key, row = mint(runtime.gateway.pepper, tenant="other", name="x", scopes=["runs:write", "runs:read"], now=0.0)
    assert await runtime.gateway.store.add_key(row)
    reply = await client.post(f"/v1/runs/{run}/feedback", json={"score": 0}, headers={"authorization": f"Bearer {key}"})
    assert reply.status_code == 404
    assert await runtime.context.store.feedback(run) == ()


async def test_a_run_that_goes_on_cannot_be_rated_yet(
    stub: ProviderStub, runtime: Runtime, client: httpx.AsyncClient
) -> None:
    stub.script("alpha", Hang())
    going = asyncio.create_task(client.post("/v1/chat/completions", json=ASKED))
    await stub.wait_for(1, "alpha")
    [row] = await runtime.context.store.runs(RunQuery())
    reply = await rate(client, row.id, "one", score=1)
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "run_not_ended")
    await client.post(f"/v1/runs/{row.id}/cancel")
    await going
    assert (await rate(client, row.id, "one", score=1)).status_code == 200, "a refusal was not kept"
