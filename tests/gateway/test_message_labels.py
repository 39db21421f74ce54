"""Labels on messages, parts and results, as callers of each wire format send them."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import httpx2
import pytest
from anthropic import AsyncAnthropic, BadRequestError
from openai import AsyncOpenAI

from app.process.wiring import Runtime
from tests.gateway.test_response_tools import SPAWN, calling
from tests.harness.in_process import WORKERS, client_of, pool_text, running_service
from tests.stubs import ProviderStub, Reply


@pytest.fixture
async def runtime(stub: ProviderStub, tmp_path: Path) -> AsyncIterator[Runtime]:
    """A service whose workers but beta are cleared for `phi`."""
    text = pool_text(stub)
    for name in WORKERS:
        if name != "beta":
            text = text.replace(f"[workers.{name}]", f'[workers.{name}]\nclearance = ["phi"]')
    async with running_service(tmp_path, text) as running:
        yield running


MARK = {"labels": ["phi"]}
ASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat, a message": ("chat/completions", {"messages": [{"role": "user", "content": "Hi", "baton": MARK}]}),
    "chat, a part": (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "baton": MARK}]}]},
    ),
    "messages, a turn": ("messages", {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi", "baton": MARK}]}),
    "messages, a block": (
        "messages",
        {"max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "baton": MARK}]}]},
    ),
    "messages, a system block": (
        "messages",
        {
            "max_tokens": 9,
            "system": [{"type": "text", "text": "Be brief.", "baton": MARK}],
            "messages": [{"role": "user", "content": "Hi"}],
        },
    ),
    "responses, a message": ("responses", {"input": [{"role": "user", "content": "Hi", "baton": MARK}]}),
    "responses, a part": (
        "responses",
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi", "baton": MARK}]}]},
    ),
}


async def test_labels_stand_on_messages_and_parts_of_every_format(stub: ProviderStub, runtime: Runtime) -> None:
    async with client_of(runtime) as client:
        for what, (route, body) in ASKS.items():
            reply = await client.post(f"/v1/{route}", json={"model": "baton-mini"} | body)
            assert reply.status_code == 200, (what, reply.text)
            run = (await client.get(f"/v1/runs/{reply.headers['x-baton-run']}")).json()
            assert [(step["labels"], step["declassified"]) for step in run["steps"]] == [(["phi"], [])]
            assert (run["labels"], run["excluded"]) == (["phi"], {"beta": "not cleared for phi"}), what
    assert stub.requests_for("alpha")
    assert "phi" not in json.dumps([received.json for received in stub.requests])


@pytest.mark.long
async def test_openais_client_sends_labels(runtime: Runtime) -> None:
    marked: Any = {"role": "user", "content": "Hi", "baton": MARK}
    async with client_of(runtime) as client:
        openai = AsyncOpenAI(base_url="http://baton/v1", api_key="none", http_client=client, max_retries=0)
        mini: Any = {"model": "baton-mini", "extra_headers": {"authorization": client.headers["authorization"]}}
        for reply in (
            await openai.chat.completions.with_raw_response.create(messages=[marked], **mini),
            await openai.responses.with_raw_response.create(input=[marked], **mini),
        ):
            run = await client.get(f"/v1/runs/{reply.headers['x-baton-run']}")
            assert run.json()["labels"] == ["phi"]


async def test_anthropics_client_sends_labels() -> None:
    bodies: list[Any] = []

    def receive(request: httpx2.Request) -> httpx2.Response:
        bodies.append(json.loads(request.content))
        return httpx2.Response(400)

    marked: Any = {"role": "user", "content": "Hi", "baton": MARK}
    transport = httpx2.AsyncClient(transport=httpx2.MockTransport(receive))
    async with AsyncAnthropic(base_url="http://baton", api_key="none", http_client=transport, max_retries=0) as client:
        with pytest.raises(BadRequestError):
            await client.messages.create(model="baton-mini", messages=[marked], max_tokens=9)
    assert bodies[0]["messages"] == [marked]


async def respond(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    reply = await client.post("/v1/responses", json={"model": "baton-mini"} | body)
    assert reply.status_code == 200, reply.text
    run = (await client.get(f"/v1/runs/{reply.headers['x-baton-run']}")).json()
    return {"id": reply.json()["id"], "output": reply.json()["output"], "labels": run["labels"]}


async def test_labels_of_earlier_turns_persist(runtime: Runtime) -> None:
    """With the response before, with an item of it, and with what a compaction leaves of it."""
    async with client_of(runtime) as client:
        first = await respond(client, input=[{"role": "user", "content": "Hi", "baton": MARK}])
        second = await respond(client, input="And?", previous_response_id=first["id"])
        third = await respond(client, input=[{"id": second["output"][0]["id"]}, {"role": "user", "content": "And?"}])
        assert (first["labels"], second["labels"], third["labels"]) == (["phi"], ["phi"], ["phi"])
        compacted = await client.post(
            "/v1/responses/compact", json={"model": "baton-mini", "previous_response_id": first["id"]}
        )
        again = await respond(client, input=[*compacted.json()["output"], {"role": "user", "content": "And?"}])
        assert again["labels"] == ["phi"]


async def test_a_result_with_a_label_may_be_followed_by_further_results(stub: ProviderStub, runtime: Runtime) -> None:
    stub.script("alpha", calling("spawn", "{}"), calling("spawn", "{}"), Reply(chunks=("Done.",)))
    async with client_of(runtime) as client:
        turn = await respond(client, input="Go.", tools=[SPAWN])
        for mark in (MARK, None):
            result = {"type": "function_call_output", "call_id": turn["output"][0]["call_id"], "output": "fine"}
            input_ = [result | {"baton": mark}]
            turn = await respond(client, input=input_, previous_response_id=turn["id"], tools=[SPAWN])
        assert turn["output"][0]["content"][0]["text"] == "Done."
        after = await respond(client, input="And?", previous_response_id=turn["id"])
        assert after["labels"] == ["phi"]


async def test_a_search_for_tools_has_labels(stub: ProviderStub, runtime: Runtime) -> None:
    """Those of its item and of its output, and where an item is named by its id those of the earlier response."""
    search = {"type": "tool_search", "execution": "client"}
    stub.script("alpha", calling("tool_search", '{"goal": "what the record says"}'), Reply(chunks=("Done.",)))
    async with client_of(runtime) as client:
        first = await respond(client, input=[{"role": "user", "content": "Hi", "baton": MARK}], tools=[search])
        (call,) = first["output"]
        found = {"type": "tool_search_output", "call_id": "c2", "execution": "client", "tools": []}
        other = call | {"id": "tsc_c2", "call_id": "c2"}
        await client.post(f"/v1/runs/{first['id'].removeprefix('resp_')}/cancel")
        for items in (
            [{"id": call["id"]}, found | {"call_id": call["call_id"]}],
            [other | {"baton": MARK}, found],
            [other, found | {"baton": MARK}],
        ):
            again = await respond(client, input=[{"role": "user", "content": "Go."}, *items], tools=[search])
            assert again["labels"] == ["phi"]


async def test_a_label_that_is_none_is_refused_where_it_stands(runtime: Runtime) -> None:
    async with client_of(runtime) as client:
        body = {"messages": [{"role": "user", "content": "Hi", "baton": {"labels": ["two words"]}}]}
        refused = await client.post("/v1/chat/completions", json={"model": "baton-mini"} | body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "messages[0].baton.labels[0]"


REHEARSAL = """
[providers.near]
format = "rehearsal"

[workers.sage]
provider = "near"
model = "sage"
tools = true
price = { input = 0.25, output = 1.25 }
clearance = ["phi"]

[tiers.baton-mini]
pool = ["sage"]
conductor = { kind = "fixed", shape = "single", workers = ["sage"] }
"""


async def test_a_labelled_result_for_a_simulated_worker_is_no_falsification(tmp_path: Path) -> None:
    """The auditor renders the request as it was sent, in which a result has no labels; it looks when the service has
    closed."""
    add = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    question = {"role": "user", "content": "What is 2 + 2?"}
    body = {"model": "baton-mini", "tools": [add]}
    environ = {"BATON_REHEARSAL_DELAY": "0"}
    async with running_service(tmp_path, REHEARSAL, environ) as runtime, client_of(runtime) as client:
        asked = body | {"messages": [question], "tool_choice": "required"}
        [choice] = (await client.post("/v1/chat/completions", json=asked)).json()["choices"]
        [call] = choice["message"]["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "4", "baton": MARK}
        reply = await client.post(
            "/v1/chat/completions", json=body | {"messages": [question, choice["message"], result]}
        )
        assert reply.json()["choices"][0]["finish_reason"] == "stop", reply.text
