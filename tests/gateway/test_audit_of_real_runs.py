"""Real runs over the real wiring, asked for and explained by HTTP: the audit trail reads what the journal wrote."""

from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from app.process.wiring import Runtime
from tests.harness.in_process import finish, order, plan
from tests.harness.waiting import PATIENCE_SECONDS
from tests.stubs import Fail, Hang, ProviderStub, Reply


async def ask(client: httpx.AsyncClient, **more: Any) -> httpx.Response:
    body = {"model": "baton-mini", "messages": [{"role": "user", "content": "What is 2 + 2?"}]} | more
    return await client.post("/v1/chat/completions", json=body, timeout=PATIENCE_SECONDS)


async def test_a_planned_run_is_explained_step_by_step(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    stub.always("alpha", Reply(chunks=("Two", " twos.")))
    stub.always("beta", Reply(chunks=("Four.",)))
    steps = plan(("alpha", "Think about it", ["user"]), ("beta", "Answer", [0]))
    reply = await ask(client, baton={"plan": steps, "labels": []})
    assert reply.status_code == 200, reply.text
    body = reply.json()
    assert body["choices"][0]["message"]["content"] == "Four."
    run = (await client.get(body["baton"]["audit"])).json()
    assert (run["state"], run["topology"], run["conductor"]) == ("succeeded", "chain", "caller")
    assert [(step["worker"], step["access"], step["state"]) for step in run["steps"]] == [
        ("alpha", ["user"], "done"),
        ("beta", [0], "done"),
    ]
    assert run["cost_usd"] == body["baton"]["cost_usd"] == run["spent"]["usd"] > 0
    assert run["usage"] == body["usage"]
    last = (await client.get(f"{body['baton']['audit']}/steps/1")).json()
    sent_messages = [received.json["messages"] for received in stub.requests][1]
    recorded_messages = [
        {"role": message["role"], "content": message["content"][0]["text"]} for message in last["messages"]
    ]
    assert recorded_messages == sent_messages
    assert "What is 2 + 2?" not in str(sent_messages)
    assert (last["output"], last["erased"]) == ("Four.", False)
    events = (await client.get(f"{body['baton']['audit']}/events")).json()["data"]
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    listed = (await client.get("/v1/runs?worker=beta&state=succeeded")).json()["data"]
    assert [entry["id"] for entry in listed] == [run["id"]]


async def test_a_replaced_worker_is_shown(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    stub.always("alpha", Fail(status=401))
    reply = await ask(client, stream=True)
    assert reply.text.endswith("data: [DONE]\n\n")
    run = (await client.get(f"/v1/runs/{reply.headers['x-baton-run']}")).json()
    [step] = run["steps"]
    assert (step["planned_worker"], step["worker"] != "alpha") == ("alpha", True)
    assert {attempt["worker"]: attempt["outcome"] for attempt in step["attempts"]} == {
        "alpha": "error",
        step["worker"]: "ok",
    }


async def test_a_bad_plan_of_the_caller_lists_every_fault(client: httpx.AsyncClient) -> None:
    steps = plan(("nobody7Q", "x", ["user"]), ("alpha", "y", [1]), ("beta", "z", [2, 7]))
    reply = await ask(client, baton={"plan": steps})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == "baton.plan"
    assert all(f"step {n}" in error["message"] for n in range(3))
    assert "nobody7Q" not in reply.text
    assert (await client.get("/v1/runs")).json()["data"] == []


async def test_a_huge_bad_plan_gets_a_small_answer(client: httpx.AsyncClient) -> None:
    reply = await ask(client, baton={"plan": {"steps": [{"worker": 5, "subtask": 7, "access": "x"}] * 5_000}})
    assert reply.status_code == 400
    assert len(reply.content) <= 4_096


async def test_pages_of_real_runs_hold_each_once(client: httpx.AsyncClient) -> None:
    run_ids = [(await ask(client)).json()["baton"]["run"] for _ in range(5)]
    listed_ids: list[str] = []
    path = "/v1/runs?limit=2"
    while path:
        page = (await client.get(path)).json()
        listed_ids += [entry["id"] for entry in page["data"]]
        path = f"/v1/runs?limit=2&after={page['next']}" if page["has_more"] else ""
    assert listed_ids == run_ids[::-1]


async def test_a_caller_learns_why_the_planned_worker_was_passed_over(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    stub.always("alpha", Fail(status=401))
    steps = plan(("alpha", "Answer", ["user"]))
    first, second = [(await ask(client, baton={"plan": steps})).json()["baton"]["audit"] for _ in range(2)]
    [refused, _] = (await client.get(first)).json()["steps"][0]["attempts"]
    assert (refused["blamed"], refused["retry_after"], refused["passed_over"]) == ("misconfigured", None, [])
    [step] = (await client.get(second)).json()["steps"]
    assert (step["planned_worker"], step["worker"], step["passed_over"]) == ("alpha", "beta", [])
    assert step["attempts"][0]["passed_over"] == [{"worker": "alpha", "reason": "misconfigured"}]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_the_content_of_any_run_can_be_erased(client: httpx.AsyncClient, path: str) -> None:
    question = {"input": "hello"} if path == "/v1/responses" else {"messages": [{"role": "user", "content": "hello"}]}
    more = {"max_tokens": 10} if path == "/v1/messages" else {}
    reply = await client.post(path, json={"model": "baton-mini", **question, **more})
    run = reply.headers["x-baton-run"]
    for _ in range(2):
        erased = await client.delete(f"/v1/runs/{run}")
        assert (erased.status_code, erased.json()) == (200, {"id": run, "object": "run", "erased": True})
    body = (await client.get(f"/v1/runs/{run}")).json()
    assert (body["erased"], body["state"]) == (True, "succeeded")
    step = (await client.get(f"/v1/runs/{run}/steps/0")).json()
    assert (step["erased"], step["output"], step["messages"]) == (True, None, None)


async def test_a_run_that_is_erased_is_ended_first(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    stub.always("*", Hang())
    reply_body = (
        await client.post("/v1/responses", json={"model": "baton-mini", "input": "hi", "background": True})
    ).json()
    run = reply_body["id"].removeprefix("resp_")
    assert (await client.delete(f"/v1/runs/{run}")).json()["erased"] is True
    body = (await client.get(f"/v1/runs/{run}")).json()
    assert (body["erased"], body["state"]) == (True, "cancelled")


async def test_an_idempotent_cancellation_keeps_no_content(client: httpx.AsyncClient) -> None:
    """Its reply is the whole response, which must not outlive an erasure."""
    request_body = {"model": "baton-mini", "input": "hi", "background": True}
    response = (await client.post("/v1/responses", json=request_body)).json()["id"]
    await client.get(f"/v1/responses/{response}", params={"stream": "true"})  # which ends when the run does
    body = (await client.get(f"/v1/responses/{response}")).json()
    path, once = f"/v1/responses/{body['id']}/cancel", {"Idempotency-Key": "cancel-it"}
    first = await client.post(path, json={}, headers=once)
    second_reply = await client.post(path, json={}, headers=once)
    assert (second_reply.status_code, second_reply.json()) == (first.status_code, first.json()) == (200, body)
    assert second_reply.headers["idempotent-replayed"] == "true"
    await client.delete(f"/v1/runs/{body['baton']['run']}")
    assert (await client.post(path, json={}, headers=once)).status_code == 404


async def test_a_run_that_follows_from_another_one_names_it(
    stub: ProviderStub, runtime: Runtime, client: httpx.AsyncClient
) -> None:
    first = (await ask(client)).json()["baton"]["run"]
    tenant = (await client.get(f"/v1/runs/{first}")).json()["tenant"]
    again = replace(order(runtime, "baton-mini"), origin_kind="replay", origin_run=first, tenant=tenant)
    ended = (await finish(await runtime.runs.start(again))).ended
    run = (await client.get(f"/v1/runs/{ended.state.run}")).json()
    assert run["origin"] == {"kind": "replay", "run": first}
    queries = {"origin_kind=replay": run["id"], f"origin_run={first}": run["id"], "origin_kind=none": first}
    for query, expected_run in queries.items():
        listed = (await client.get(f"/v1/runs?{query}")).json()["data"]
        assert [entry["id"] for entry in listed] == [expected_run]
    events = (await client.get(f"/v1/runs/{ended.state.run}/events")).json()["data"]
    assert (events[0]["body"]["origin_kind"], events[0]["body"]["origin_run"]) == ("replay", first)
