"""`POST /v1/responses/compact`: the user's messages and notes of the rest, which go on in the conversation's place."""

import typing
from typing import Any

import httpx
import pytest
from openai.types.responses import CompactedResponse, input_token_count_params, response_compact_params

from app.gateway.responses.compaction_item import PREFACE
from app.gateway.wire.parameters import COMPACTION, INPUT_TOKENS
from tests.gateway.test_response_tools import SPAWN, calling, respond
from tests.harness.exact_replies import assert_published_schema
from tests.stubs import ProviderStub, Reply

MINI = {"model": "baton-mini"}
NOTES = Reply(chunks=("It was ", "begun."))


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def messages_of(stub: ProviderStub) -> list[tuple[str, str]]:
    """The messages of the last request to a worker."""
    return [(message["role"], message["content"]) for message in stub.requests[-1].json["messages"]]


async def compact(client: httpx.AsyncClient, **more: Any) -> dict[str, Any]:
    """The reply, which the official client takes without conversions and would send back as it is."""
    reply = await client.post("/v1/responses/compact", json=MINI | more)
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    assert CompactedResponse.construct(**body).model_dump(exclude_unset=True, warnings=False) == body
    assert_published_schema("CompactionBody", body["output"][-1])
    for item in body["output"][:-1]:
        assert_published_schema("InputMessageResource", item)
    return body


def test_every_parameter_of_the_official_client_has_a_row() -> None:
    assert set(COMPACTION) == {*typing.get_type_hints(response_compact_params.ResponseCompactParams), "baton"}
    assert set(INPUT_TOKENS) == set(typing.get_type_hints(input_token_count_params.InputTokenCountParams))


@pytest.mark.parametrize("reply", [Reply(chunks=()), Reply(chunks=(), refusal="I cannot help with that.")])
async def test_no_notes_are_no_compaction(stub: ProviderStub, client: httpx.AsyncClient, reply: Reply) -> None:
    """The caller would send an empty item, or a refusal, in the place of the conversation."""
    stub.always("*", reply)
    refused = await client.post("/v1/responses/compact", json=MINI | {"input": [user("Go.")]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (502, "no_notes")
    assert refused.headers["x-baton-run"] in refused.json()["error"]["message"]


@pytest.mark.long
async def test_a_conversation_goes_on_from_its_notes(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    """Twice, since notes are themselves compacted; and the worker of the notes sees everything, tools included."""
    stub.script("alpha", Reply(chunks=("Hello.",)), NOTES)
    first = await respond(client, input="Hi.")
    items = [
        user("Go."),
        {"type": "function_call", "call_id": "x", "name": "spawn", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "x", "output": "begun"},
    ]
    body = await compact(client, previous_response_id=first["id"], input=items, instructions="Be brief.")
    roles = [role for role, _ in messages_of(stub)]
    assert roles == ["system", "user", "assistant", "user", "assistant", "tool", "user"]
    assert [item["type"] for item in body["output"]] == ["message", "message", "compaction"]
    assert [item["content"][0]["text"] for item in body["output"][:2]] == ["Hi.", "Go."]
    assert body["usage"]["output_tokens"] > 0
    run = (await client.get(f"/v1/runs/{body['id']}")).json()
    assert (run["id"], run["state"]) == (body["baton"]["run"], "succeeded")

    stub.always("alpha", Reply(chunks=("Then.",)))
    second = await respond(client, input=[*body["output"], user("And now?")])
    listed = (await client.get(f"/v1/responses/{second['id']}/input_items")).json()
    assert_published_schema("ResponseItemList", listed)
    notes_item = body["output"][-1]
    assert listed["data"][1] == notes_item | {"id": listed["data"][1]["id"]}
    notes = ("user", f"{PREFACE}It was begun.")
    assert messages_of(stub) == [("user", "Hi."), ("user", "Go."), notes, ("user", "And now?")]
    again = await compact(client, input=[*body["output"], user("And now?")])
    assert messages_of(stub)[:4] == [("user", "Hi."), ("user", "Go."), notes, ("user", "And now?")]
    assert [item["content"][0]["text"] for item in again["output"][:-1]] == ["Hi.", "Go.", "And now?"]


@pytest.mark.long
async def test_a_compacted_conversation_is_found_by_its_user_so_that_it_is_erased_with_it(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    stub.always("alpha", NOTES)
    first = await respond(client, input="Hi.", user="ann", safety_identifier="ann-hash")
    compacted = await compact(client, previous_response_id=first["id"])
    for name in ("ann", "ann-hash"):
        runs = (await client.get("/v1/runs", params={"user": name})).json()["data"]
        assert {run["id"] for run in runs} == {first["baton"]["run"], compacted["baton"]["run"]}


async def test_a_run_that_waits_for_results_does_not_go_on_by_being_compacted(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    stub.script("alpha", calling("spawn", "{}"), NOTES)
    first = await respond(client, tools=[SPAWN])
    [call] = first["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "begun"}
    body = await compact(client, input=[user("Go."), call, result])
    assert body["baton"]["run"] != first["baton"]["run"]
    waiting = (await client.get(f"/v1/runs/{first['baton']['run']}")).json()
    assert waiting["state"] == "awaiting_tool"
    alone = await client.post("/v1/responses/compact", json=MINI | {"input": [result]})
    assert (alone.status_code, alone.json()["error"]["code"]) == (400, "unknown_tool_call")


FOREIGN, BROKEN = ([{"type": "compaction", "encrypted_content": text}] for text in ("gAAAAA", "baton1.%"))


@pytest.mark.parametrize(
    ("path", "more", "param", "code"),
    [
        ("/compact", {}, "input", "missing_required_parameter"),
        ("/compact", {"input": "Hi", "stream": True}, "stream", "unknown_parameter"),
        ("/compact", {"previous_response_id": "resp_run_1"}, "previous_response_id", "previous_response_not_found"),
        ("", {"input": FOREIGN}, "input[0].encrypted_content", "invalid_encrypted_content"),
        ("", {"input": BROKEN}, "input[0].encrypted_content", "invalid_encrypted_content"),
    ],
    ids=["nothing", "a stream", "after nothing", "of another server", "broken"],
)
async def test_what_cannot_be_compacted_or_read_is_named(
    client: httpx.AsyncClient, path: str, more: dict[str, Any], param: str, code: str
) -> None:
    reply = await client.post(f"/v1/responses{path}", json=MINI | more)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (400, param, code)


async def test_the_tokens_of_input_are_counted_with_what_stands_before_it(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    async def count_tokens(**more: Any) -> int:
        reply = await client.post("/v1/responses/input_tokens", json=MINI | more)
        assert (reply.status_code, reply.json()["object"]) == (200, "response.input_tokens")
        return int(reply.json()["input_tokens"])

    first = await respond(client, input="What is 2 + 2?")
    calls = len(stub.requests)
    alone = await count_tokens(input="Hi")
    after = await count_tokens(input="Hi", previous_response_id=first["id"])
    offered = await count_tokens(input="Hi", tools=[SPAWN], instructions="Be brief.")
    assert 0 < alone < after
    assert alone < offered
    assert 0 < await count_tokens() < await count_tokens(instructions="Be brief.") < offered
    assert len(stub.requests) == calls
    wrong = await client.post("/v1/responses/input_tokens", json={"model": "gpt-x", "input": "Hi"})
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "model_not_found")
