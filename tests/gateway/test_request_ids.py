"""The ids by which a run is found: of its HTTP requests (`x-request-id`), and of its replies in every format."""

from typing import Any

import httpx
import pytest

from tests.harness.conversations import look_call, tool_call_reply
from tests.stubs import ProviderStub, Reply

ASK = {"role": "user", "content": "What is 2 + 2?"}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


async def complete(client: httpx.AsyncClient, id_: str, **more: Any) -> httpx.Response:
    body = {"model": "baton-mini", "messages": [ASK]} | more
    return await client.post("/v1/chat/completions", json=body, headers={"x-request-id": id_})


async def run_ids_of(client: httpx.AsyncClient, id_: str) -> list[str]:
    reply = await client.get("/v1/runs", params={"request_id": id_})
    return [run["id"] for run in reply.json()["data"]]


async def test_a_run_is_found_by_the_id_of_its_request(client: httpx.AsyncClient, stub: ProviderStub) -> None:
    stub.always("alpha", Reply(chunks=("Four.",)))
    reply = await complete(client, "edge-7:a.b")
    run = reply.headers["x-baton-run"]
    assert (reply.status_code, reply.headers["x-request-id"]) == (200, "edge-7:a.b")
    await complete(client, "edge-8")
    assert await run_ids_of(client, "edge-7:a.b") == [run]
    assert await run_ids_of(client, "edge-9") == []
    body = (await client.get(f"/v1/runs/{run}")).json()
    assert body["request_id"] == "edge-7:a.b"


async def test_a_turn_with_tool_results_is_found_too(client: httpx.AsyncClient, stub: ProviderStub) -> None:
    stub.script("alpha", tool_call_reply(look_call("a")))
    message = (await complete(client, "first", tools=TOOLS)).json()["choices"][0]["message"]
    stub.always("alpha", Reply(chunks=("Four.",)))
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "4"}
    reply = await complete(client, "second", tools=TOOLS, messages=[ASK, message, result])
    run = reply.headers["x-baton-run"]
    assert await run_ids_of(client, "first") == await run_ids_of(client, "second") == [run]
    body = (await client.get(f"/v1/runs/{run}")).json()
    assert [turn["request_id"] for turn in body["turns"]] == ["first", "second"]


HI = {"model": "baton-mini", "messages": [ASK]}
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "chatcmpl-run_": ("/v1/chat/completions", HI),
    "cmpl-run_": ("/v1/completions", {"model": "baton-mini", "prompt": "Hi"}),
    "resp_run_": ("/v1/responses", {"model": "baton-mini", "input": "Hi"}),
    "msg_run_": ("/v1/messages", HI | {"max_tokens": 9}),
}


@pytest.mark.long
async def test_a_run_has_the_id_of_its_reply_and_is_found_by_it(client: httpx.AsyncClient) -> None:
    for prefix, (path, body) in FORMATS.items():
        reply = (await client.post(path, json=body)).json()
        assert reply["id"].startswith(prefix)
        run = (await client.get(f"/v1/runs/{reply['id']}")).json()
        assert (run["id"], run["turns"][0]["reply_id"]) == (reply["baton"]["run"], reply["id"])


async def test_each_turn_has_the_id_of_its_own_reply(client: httpx.AsyncClient, stub: ProviderStub) -> None:
    stub.script("alpha", tool_call_reply(look_call("a")), Reply(chunks=("Four.",)))
    first = (await complete(client, "first", tools=TOOLS)).json()
    message = first["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "4"}
    second = (await complete(client, "second", tools=TOOLS, messages=[ASK, message, result])).json()
    body = (await client.get(f"/v1/runs/{second['id']}")).json()
    assert [turn["reply_id"] for turn in body["turns"]] == [first["id"], second["id"]]


@pytest.mark.parametrize("request_id", ["", "two words", 'quoted"name', "x" * 129, "-leading"])
async def test_an_id_that_is_none_is_replaced(client: httpx.AsyncClient, request_id: str) -> None:
    reply = await client.get("/healthz", headers={"x-request-id": request_id})
    assert reply.headers["x-request-id"].startswith("req_")


async def test_errors_have_the_id_as_well(client: httpx.AsyncClient) -> None:
    bad = await complete(client, "bad", messages=[])
    stranger = await client.get("/v1/runs", headers={"authorization": "", "x-request-id": "stranger"})
    nowhere = await client.get("/nowhere", headers={"x-request-id": "nowhere"})
    replies = {reply.headers["x-request-id"]: reply.status_code for reply in (bad, stranger, nowhere)}
    assert replies == {"bad": 400, "stranger": 401, "nowhere": 404}
