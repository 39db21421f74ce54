"""Responses over HTTP are stored, retrieved, continued, cancelled, deleted, and run in the background."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from app.core.roles import ROLES
from app.process.wiring import Runtime
from tests.harness.callers import add_key, client_over_socket
from tests.harness.in_process import client_of, pool_text, running_service
from tests.harness.waiting import until
from tests.stubs import Fail, ProviderStub, Reply, Reset, Stall
from tests.stubs.script import ToolCall

ASKED: dict[str, Any] = {"model": "baton-mini", "input": "What is 2 + 2?"}
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
CALLS = Reply(chunks=(), tool_calls=[ToolCall("add", '{"a": 2}', "c1")], finish="tool")
SLOW = Reply(chunks=("Fo", "ur", "."), header_delay=20.0)
UNKNOWN = f"resp_run_{'0' * 31}"


@pytest.fixture
async def stub() -> AsyncIterator[ProviderStub]:
    async with ProviderStub() as running:
        running.always("alpha", Reply(chunks=("Four.",)))
        yield running


async def create_response(client: httpx.AsyncClient, **more: Any) -> dict[str, Any]:
    """A response."""
    reply = await client.post("/v1/responses", json=ASKED | more)
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


async def read_refusal(client: httpx.AsyncClient, **more: Any) -> tuple[int, str | None, str | None]:
    """Status, param and code of a refusal."""
    reply = await client.post("/v1/responses", json=ASKED | more)
    error = reply.json()["error"]
    return reply.status_code, error["param"], error["code"]


async def status(client: httpx.AsyncClient, response: str, expected_status: str) -> dict[str, Any]:
    """The response, once it has that status."""

    async def find_reached() -> dict[str, Any] | None:
        body: dict[str, Any] = (await client.get(f"/v1/responses/{response}")).json()
        if body["status"] == expected_status:
            return body
        assert body["status"] in ("queued", "in_progress")
        return None

    body = await until(find_reached, what=f"the response is {expected_status}")
    assert body is not None
    return body


async def events(client: httpx.AsyncClient, response: str, **query: Any) -> list[dict[str, Any]]:
    """Return the events of a stream."""
    reply = await client.get(f"/v1/responses/{response}", params={"stream": "true"} | query)
    assert reply.status_code == 200, reply.text
    return [json.loads(line.removeprefix("data: ")) for line in reply.text.split("\n") if line.startswith("data: ")]


def text_of(body: Mapping[str, Any]) -> str:
    """The text of a response."""
    return "".join(part["text"] for item in body["output"] if item["type"] == "message" for part in item["content"])


async def foreigner(runtime: Runtime) -> dict[str, str]:
    """Headers of another tenant's key."""
    return {"authorization": f"Bearer {await add_key(runtime, 'other')}"}


async def test_it_is_kept_until_it_is_deleted(client: httpx.AsyncClient) -> None:
    first = await create_response(client, instructions="Be brief.", metadata={"a": "b"}, user="ann")
    path = f"/v1/responses/{first['id']}"
    assert (await client.get(path)).json() == first
    assert (await client.delete(path)).json() == {"id": first["id"], "object": "response", "deleted": True}
    for method, where in (("GET", path), ("DELETE", path), ("POST", f"{path}/cancel"), ("GET", f"{path}/input_items")):
        reply = await client.request(method, where)
        assert (reply.status_code, reply.json()["error"]["type"]) == (404, "invalid_request_error")
    run = await client.get(f"/v1/runs/{first['baton']['run']}")
    assert run.json()["state"] == "succeeded"  # the journal stays


async def test_nobody_else_sees_it(client: httpx.AsyncClient, runtime: Runtime) -> None:
    first = await create_response(client)
    path, theirs = f"/v1/responses/{first['id']}", await foreigner(runtime)
    admin = {"authorization": f"Bearer {await add_key(runtime, 'other', ('admin',))}"}
    for method, where in (("GET", path), ("DELETE", path), ("POST", f"{path}/cancel"), ("GET", f"{path}/input_items")):
        assert (await client.request(method, where, headers=theirs)).status_code == 404
        assert (await client.request(method, where, headers=admin)).status_code == 404
    assert (await client.get(path)).json() == first


async def test_another_key_of_the_tenant_reads_it_with_audit_read_only(
    stub: ProviderStub, client: httpx.AsyncClient, runtime: Runtime
) -> None:
    first = await create_response(client)
    path, count_before = f"/v1/responses/{first['id']}", len(stub.requests)
    operator = {"authorization": f"Bearer {await add_key(runtime, scopes=tuple(ROLES['operator']))}"}
    for method, where in (("GET", path), ("POST", f"{path}/cancel"), ("GET", f"{path}/input_items")):
        assert (await client.request(method, where, headers=operator)).status_code == 404, where
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    for more in ({"previous_response_id": first["id"]}, {"input": [reference]}):
        reply = await client.post("/v1/responses", json=ASKED | more, headers=operator)
        assert reply.status_code in (400, 404), more
    assert len(stub.requests) == count_before
    auditor = {"authorization": f"Bearer {await add_key(runtime, scopes=('runs:read', 'audit:read'))}"}
    assert (await client.get(path, headers=auditor)).json() == first
    assert (await client.delete(path, headers=operator)).json()["deleted"] is True


async def test_a_key_of_all_tenants_takes_no_conversation_into_its_own_tenant(
    stub: ProviderStub, client: httpx.AsyncClient, runtime: Runtime
) -> None:
    """It may read the response; but a run of its own tenant would show the words to others of that tenant, and an
    erasure of the tenant that they belong to would not reach them."""
    first = await create_response(client)
    root = {"authorization": f"Bearer {await add_key(runtime, 'ops', ('admin',), all_tenants=True)}"}
    assert (await client.get(f"/v1/responses/{first['id']}", headers=root)).json() == first
    count_before = len(stub.requests)
    continuing = ASKED | {"previous_response_id": first["id"]}
    for path in ("/v1/responses", "/v1/responses/compact", "/v1/responses/input_tokens"):
        reply = await client.post(path, json=continuing, headers=root)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "previous_response_not_found"), path
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    reply = await client.post("/v1/responses", json=ASKED | {"input": [reference]}, headers=root)
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "item_not_found")
    assert len(stub.requests) == count_before


async def test_nobody_else_refers_to_its_items(stub: ProviderStub, client: httpx.AsyncClient, runtime: Runtime) -> None:
    calls = Reply(chunks=("Let me add.",), tool_calls=CALLS.tool_calls, finish="tool")
    stub.script("alpha", calls)
    response = await create_response(client, tools=[ADD])
    secret = await create_response(client, store=False)
    theirs, count_before = await foreigner(runtime), len(stub.requests)
    for item, headers in (*((item, theirs) for item in response["output"]), (secret["output"][0], {})):
        request_body = {"input": [{"type": "item_reference", "id": item["id"]}, {"role": "user", "content": "Hi"}]}
        reply = await client.post("/v1/responses", json=ASKED | request_body, headers=headers)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"], error["code"]) == (404, "input[0].id", "item_not_found")
    assert len(stub.requests) == count_before


@pytest.mark.parametrize("content", ["Hi", [{"type": "input_text", "text": "Hi"}]])
async def test_an_item_of_an_earlier_request_by_reference(
    stub: ProviderStub, client: httpx.AsyncClient, content: object
) -> None:
    first = await create_response(client, input=[{"role": "developer", "content": content}])
    (item,) = (await client.get(f"/v1/responses/{first['id']}/input_items")).json()["data"]
    await create_response(client, input=[{"type": "item_reference", "id": item["id"]}])
    first_messages, second_messages = [received.json["messages"] for received in stub.requests_for("alpha")]
    assert first_messages == second_messages
    for id_ in (first["id"], item["id"].replace("_in0", "_in1")):
        refusal = await read_refusal(client, input=[{"type": "item_reference", "id": id_}])
        assert refusal == (404, "input[0].id", "item_not_found")


async def test_the_output_of_a_call_by_reference(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    stub.script("alpha", Reply(chunks=(), tool_calls=CALLS.tool_calls[:1], finish="tool"))
    calling = await create_response(client, tools=[ADD])
    (call,) = calling["output"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "4"}
    told = await create_response(client, tools=[ADD], previous_response_id=calling["id"], input=[output])
    (item,) = (await client.get(f"/v1/responses/{told['id']}/input_items")).json()["data"]
    references = [{"type": "item_reference", "id": id_} for id_ in (call["id"], item["id"])]
    await create_response(client, tools=[ADD], input=[{"role": "user", "content": "Hi"}, *references])
    *_, result = stub.requests_for("alpha")[-1].json["messages"]
    assert (result["role"], result["content"]) == ("tool", "4")


async def test_a_reply_of_another_format_is_no_response(client: httpx.AsyncClient) -> None:
    chat = {"model": "baton-mini", "messages": [{"role": "user", "content": "Hi"}]}
    run = (await client.post("/v1/chat/completions", json=chat)).json()["baton"]["run"]
    assert (await client.get(f"/v1/responses/resp_{run}")).status_code == 404
    assert await read_refusal(client, previous_response_id=f"resp_{run}") == (
        400,
        "previous_response_id",
        "previous_response_not_found",
    )


async def test_what_cannot_be_followed_up(client: httpx.AsyncClient, runtime: Runtime) -> None:
    """Never there, another tenant's, not stored, deleted, of no such form."""
    theirs = await client.post("/v1/responses", json=ASKED, headers=await foreigner(runtime))
    deleted = (await create_response(client))["id"]
    await client.delete(f"/v1/responses/{deleted}")
    secret = (await create_response(client, store=False))["id"]
    for name in (UNKNOWN, theirs.json()["id"], secret, deleted, f"{(await create_response(client))['id']}_7"):
        refusal = await read_refusal(client, previous_response_id=name)
        assert refusal == (400, "previous_response_id", "previous_response_not_found")
    assert (await read_refusal(client, previous_response_id="resp-1"))[:2] == (400, "previous_response_id")


async def test_a_chain_carries_everything_but_instructions(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    first = await create_response(client, instructions="Be brief.")
    second = await create_response(client, input="And 3?", instructions="Be long.", previous_response_id=first["id"])
    third = await create_response(client, input="And 4?", previous_response_id=second["id"])
    assert (second["instructions"], third["instructions"]) == ("Be long.", None)
    branch = await create_response(client, input="No, 5?", previous_response_id=first["id"])
    bodies = []
    for request in stub.requests_for("alpha")[1:]:
        bodies.append([(message["role"], message["content"]) for message in request.json["messages"]])
    begin = [("user", "What is 2 + 2?"), ("assistant", "Four.")]
    second_turn = [*begin, ("user", "And 3?")]
    assert [message[1] for message in bodies[0]] == ["Be long.", *(message[1] for message in second_turn)]
    assert bodies[1] == [*second_turn, ("assistant", "Four."), ("user", "And 4?")]
    assert bodies[2] == [*begin, ("user", "No, 5?")]
    assert branch["previous_response_id"] == first["id"]


async def test_a_chain_goes_on_from_what_failed_with_what_was_asked(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    stub.always("gamma", Fail(status=400))
    failed = await create_response(client, background=True, baton={"pool": {"pin": "gamma"}})
    body = await status(client, failed["id"], "failed")
    assert (body["error"]["code"], body["output"], body["completed_at"]) == ("invalid_prompt", [], None)
    await create_response(client, input="Again.", previous_response_id=failed["id"])
    assert [message["content"] for message in stub.requests_for("alpha")[-1].json["messages"]] == [
        ASKED["input"],
        "Again.",
    ]


async def test_a_waiting_run_goes_on_with_its_results(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    stub.script("alpha", CALLS, Reply(chunks=("Four.",)))
    first = await create_response(client, tools=[ADD], instructions="Be brief.")
    [call] = first["output"]
    result = [{"type": "function_call_output", "call_id": call["call_id"], "output": "4"}]
    later = {"previous_response_id": first["id"], "instructions": "Be long."}
    second = await create_response(client, input=result, tools=[ADD], **later)
    assert second["instructions"] == "Be brief."
    assert stub.requests_for("alpha")[-1].json["messages"][0]["content"] == "Be brief."
    assert (text_of(second), second["id"], second["previous_response_id"]) == ("Four.", f"{first['id']}_1", first["id"])
    assert (await client.get(f"/v1/responses/{first['id']}")).json() == first
    assert (await client.get(f"/v1/responses/{second['id']}")).json() == second
    [item] = (await client.get(f"/v1/responses/{second['id']}/input_items")).json()["data"]
    assert (item["type"], item["call_id"], item["output"]) == ("function_call_output", call["call_id"], "4")


async def test_the_input_of_a_turn_that_sent_its_whole_history_is_listed(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    stub.script("alpha", CALLS, CALLS, Reply(chunks=("Eight.",)))
    history: list[dict[str, Any]] = [{"role": "user", "content": "What is 2 + 2 + 4?"}]
    for turn in range(2):
        waiting = await create_response(client, input=history, tools=[ADD], metadata={"turn": str(turn)})
        assert (waiting["metadata"], waiting["previous_response_id"]) == ({"turn": str(turn)}, None)
        [call] = waiting["output"]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "4"}
        history += [call, output, *[{"role": "user", "content": "Go on."}] * 2]
    whole = await create_response(client, input=history, tools=[ADD])
    assert whole["id"] == waiting["id"].removesuffix("_1") + "_2", "it is the same run's third turn"
    listed = (await client.get(f"/v1/responses/{whole['id']}/input_items?order=asc")).json()["data"]
    assert [item["type"] for item in listed] == [item.get("type", "message") for item in history]
    assert [item.get("call_id") for item in listed] == [item.get("call_id") for item in history]


async def test_input_items_come_in_pages(client: httpx.AsyncClient) -> None:
    items = [{"role": "user", "content": f"Word {number}."} for number in range(5)]
    response = (await create_response(client, input=items))["id"]
    path = f"/v1/responses/{response}/input_items"

    async def page(**query: Any) -> tuple[list[str], bool, dict[str, Any]]:
        body = (await client.get(path, params=query)).json()
        return [item["content"][0]["text"] for item in body["data"]], body["has_more"], body

    words = [message["content"] for message in items]
    assert (await page())[:2] == (words[::-1], False)
    first, more, body = await page(order="asc", limit=2)
    assert (first, more) == (words[:2], True)
    assert (await page(order="asc", limit=2, after=body["last_id"]))[:2] == (words[2:4], True)
    assert (await page(order="asc", after=body["last_id"]))[:2] == (words[2:], False)
    assert (await page(**{"include[]": "message.input_image.image_url"}))[0] == words[::-1]
    for query in ({"order": "up"}, {"after": "msg_1"}, {"limit": "0"}, {"foo": "1"}, {"include[]": "x"}):
        assert (await client.get(path, params=query)).status_code == 400


async def test_a_request_that_adds_no_message_has_no_input_items(client: httpx.AsyncClient) -> None:
    first = await create_response(client, input="Hi.")
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": []}
    second = await create_response(client, input=[reasoning], previous_response_id=first["id"])
    assert (await client.get(f"/v1/responses/{second['id']}/input_items")).json()["data"] == []


async def test_input_items_have_the_images_of_an_output(stub: ProviderStub, tmp_path: Path) -> None:
    pool = pool_text(stub).replace("tools = true", 'tools = true\nmodalities = ["text", "image"]')
    image = {"type": "input_image", "image_url": "https://example.com/a.png", "detail": "auto"}
    items = [
        {"role": "user", "content": "Look."},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "Here:"}, image]},
    ]
    async with running_service(tmp_path, pool) as runtime, client_of(runtime) as client:
        response = await create_response(client, input=items)
        listed = (await client.get(f"/v1/responses/{response['id']}/input_items")).json()["data"][0]
    assert listed["output"] == [{"type": "input_text", "text": "Here:"}, image | {"file_id": None}]


@pytest.mark.long
async def test_a_background_response_is_there_at_once_and_done_later(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    stub.script("alpha", Reply(chunks=("Fo", "ur", "."), header_delay=1.0))
    queued = await create_response(client, background=True, metadata={"a": "b"})
    assert (queued["background"], queued["output"], queued["usage"], queued["error"]) == (True, [], None, None)
    await status(client, queued["id"], "in_progress")
    assert await read_refusal(client, previous_response_id=queued["id"]) == (409, "previous_response_id", "conflict")
    completed = await status(client, queued["id"], "completed")
    assert (text_of(completed), completed["metadata"], completed["usage"]["output_tokens"] > 0) == (
        "Four.",
        {"a": "b"},
        True,
    )
    assert text_of(await create_response(client, previous_response_id=queued["id"])) == "Four."


async def test_a_background_request_that_is_sent_again_gets_the_response_as_it_is(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    """Who has lost the first reply may have missed the webhook as well."""
    headers = {"idempotency-key": "one"}
    first = (await client.post("/v1/responses", json=ASKED | {"background": True}, headers=headers)).json()
    completed = await status(client, first["id"], "completed")
    again = await client.post("/v1/responses", json=ASKED | {"background": True}, headers=headers)
    assert again.headers["idempotent-replayed"] == "true"
    assert again.json() == completed
    assert len(stub.requests) == 1


async def test_a_background_stream_is_left_and_taken_up(stub: ProviderStub, runtime: Runtime) -> None:
    stub.script("alpha", Reply(chunks=("Fo", "ur", "."), gap=0.1))
    async with client_over_socket(runtime, await add_key(runtime)) as client:
        body = ASKED | {"background": True, "stream": True}
        async with client.stream("POST", "/v1/responses", json=body) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: ") and "output_text.delta" in line:
                    break
        event = json.loads(line.removeprefix("data: "))
        response = event["item_id"].replace("msg_", "resp_")
        rest = await events(client, response, starting_after=event["sequence_number"])
        text = event["delta"] + "".join(event["delta"] for event in rest if event["type"].endswith("_text.delta"))
        assert text == "Four."
        assert [event["type"] for event in rest][-1] == "response.completed"
        header = {"last-event-id": str(event["sequence_number"])}
        second_reply = await client.get(f"/v1/responses/{response}?stream=true", headers=header)
        assert (
            json.loads(second_reply.text.split("data: ")[1].split("\n")[0])["sequence_number"]
            > event["sequence_number"]
        )
    assert len(stub.requests_for("alpha")) == 1


async def test_a_background_response_can_be_heard_as_it_comes(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    stub.script("alpha", Reply(chunks=("Fo", "ur", "."), header_delay=0.3, gap=0.2))
    queued = await create_response(client, background=True)
    stream_events = await events(client, queued["id"])
    deltas = [event["delta"] for event in stream_events if event["type"] == "response.output_text.delta"]
    assert ("".join(deltas), len(deltas) > 1) == ("Four.", True)


@pytest.mark.long
async def test_openais_client_reads_a_stream_with_the_events_of_steps(client: httpx.AsyncClient) -> None:
    """It takes each blank line for an event once it has seen an id, and fails at one without data."""
    openai = AsyncOpenAI(base_url="http://baton/v1", api_key="none", http_client=client, max_retries=0)
    headers = {"authorization": client.headers["authorization"]}
    extension = {"baton": {"stream_steps": True}}
    stream = await openai.responses.create(**ASKED, stream=True, extra_headers=headers, extra_body=extension)
    kinds = [event.type async for event in stream]
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    text = (await client.post("/v1/responses", json=ASKED | extension | {"stream": True})).text
    assert '\n: baton {"event":"step.done"' in text


def number_characters(stream_events: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """Each character of text and arguments with its number: that of its event less those behind it."""
    deltas = [(event["sequence_number"], event["delta"]) for event in stream_events if event["type"].endswith(".delta")]
    return [(number - len(text) + place + 1, char) for number, text in deltas for place, char in enumerate(text)]


@pytest.mark.long
async def test_a_stream_goes_on_behind_any_character_of_a_calls_arguments(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    """No byte of them twice and none missing, while the worker still speaks and after its end."""
    calls = [ToolCall("add", '{"a": 2, "b": 3}', "c1"), ToolCall("add", '{"a": 40}', "c2")]
    script = Reply(chunks=("Hm.",), tool_calls=calls, finish="tool", gap=0.1, fault=Stall(after=3, seconds=1.0))
    stub.script("alpha", script)
    queued = await create_response(client, background=True, tools=[ADD])
    whole = asyncio.create_task(events(client, queued["id"]))
    [received] = await stub.wait_for(1)
    await until(lambda: received.deltas_sent >= script.fault.after, what="the worker is in the middle of its answer")
    assert (await client.get(f"/v1/responses/{queued['id']}")).json()["status"] == "in_progress"
    early = {n: asyncio.create_task(events(client, queued["id"], starting_after=n)) for n in range(5, 24, 6)}
    text_by_number = number_characters(await whole)
    assert "".join(char for _, char in text_by_number) == 'Hm.{"a": 2, "b": 3}{"a": 40}'
    assert [number for number, _ in text_by_number] == sorted({number for number, _ in text_by_number}), (
        "each has one of its own"
    )
    late = {n: events(client, queued["id"], starting_after=n) for n in range(3, text_by_number[-1][0] + 1, 5)}
    for after, rest in [*early.items(), *late.items()]:
        assert number_characters(await rest) == [(number, char) for number, char in text_by_number if number > after]


async def test_a_stream_that_broke_off_in_the_middle_is_taken_up_to_its_failure(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    stub.always("alpha", Reply(chunks=("Fo", "ur", "."), fault=Reset(after=2), gap=0.1))
    queued = await create_response(client, background=True)
    numbers = {event["sequence_number"]: event["type"] for event in await events(client, queued["id"])}
    assert list(numbers.values())[-2:] == ["response.output_text.delta", "response.failed"]
    for number in numbers:
        assert (await events(client, queued["id"], starting_after=number))[-1]["type"] == "response.failed"


async def test_a_background_response_is_cancelled_at_work_and_after(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    stub.script("alpha", SLOW)
    queued = await create_response(client, background=True)
    await status(client, queued["id"], "in_progress")
    for _ in range(2):
        body = (await client.post(f"/v1/responses/{queued['id']}/cancel")).json()
        assert (body["id"], body["status"], body["output"]) == (queued["id"], "cancelled", [])
    assert [event["type"] for event in await events(client, queued["id"])][-1] == "response.failed"
    over = await create_response(client, background=True)
    await status(client, over["id"], "completed")
    reply = await client.post(f"/v1/responses/{over['id']}/cancel")
    assert reply.json() == (await client.get(f"/v1/responses/{over['id']}")).json()


async def test_cancelling_a_response_that_is_over_leaves_the_later_ones_alone(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    stub.script("alpha", CALLS, SLOW)
    first = await status(client, (await create_response(client, background=True, tools=[ADD]))["id"], "completed")
    over = (await client.post(f"/v1/responses/{first['id']}/cancel")).json()
    assert (over["status"], over["output"]) == ("completed", first["output"])
    assert (await client.get(f"/v1/runs/{first['id']}")).json()["state"] == "awaiting_tool"
    result = [{"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "4"}]
    second = await create_response(client, input=result, previous_response_id=first["id"], tools=[ADD], background=True)
    await client.post(f"/v1/responses/{first['id']}/cancel")
    assert (await client.get(f"/v1/responses/{second['id']}")).json()["status"] != "cancelled"
    assert (await client.post(f"/v1/responses/{second['id']}/cancel")).json()["status"] == "cancelled"


async def test_a_response_in_the_foreground_is_not_cancelled_by_its_id(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    """Neither one that is over nor one that is streamed; the error names the way to stop the run."""
    stub.script("alpha", Reply(), SLOW)
    over = await create_response(client)
    request_body = {"model": "baton-mini", "input": "Hi", "stream": True}
    streamed = asyncio.create_task(client.post("/v1/responses", json=request_body))
    await until(lambda: len(stub.requests) == 2)
    [run] = (await client.get("/v1/runs", params={"state": "running"})).json()["data"]
    for response in (over["id"], f"resp_{run['id']}"):
        reply = await client.post(f"/v1/responses/{response}/cancel")
        error = reply.json()["error"]
        assert (reply.status_code, error["type"], error["param"]) == (400, "invalid_request_error", None)
        assert "Cannot cancel a synchronous response" in error["message"]
        assert "/v1/runs/{id}/cancel" in error["message"]
    assert (await client.get(f"/v1/runs/{run['id']}")).json()["state"] == "running"
    assert (await client.post(f"/v1/runs/{run['id']}/cancel")).json()["state"] == "cancelled"
    await streamed


@pytest.mark.long
async def test_a_response_that_nobody_works_on_is_queued_and_can_be_cancelled(
    stub: ProviderStub, tmp_path: Path
) -> None:
    async with running_service(tmp_path, pool_text(stub), dispatches=False) as runtime, client_of(runtime) as client:
        queued = await create_response(client, background=True)
        assert queued["status"] == "queued"
        head = await client.head(f"/v1/responses/{queued['id']}", params={"stream": "true"})  # no wait for its end
        assert head.headers["content-type"].startswith("text/event-stream")
        assert (await client.get(f"/v1/responses/{queued['id']}")).json()["status"] == "queued"
        body = (await client.post(f"/v1/responses/{queued['id']}/cancel")).json()
        assert body["status"] == "cancelled"
    assert not stub.requests


async def test_deleting_stops_what_is_under_way(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    stub.script("alpha", SLOW)
    queued = await create_response(client, background=True)
    assert (await client.delete(f"/v1/responses/{queued['id']}")).json()["deleted"] is True
    assert (await client.get(f"/v1/responses/{queued['id']}")).status_code == 404
    run = queued["id"].removeprefix("resp_")
    assert (await client.get(f"/v1/runs/{run}")).json()["state"] == "cancelled"


async def test_a_stream_is_taken_up_only_where_it_was(client: httpx.AsyncClient) -> None:
    response = (await create_response(client))["id"]
    last = (await events(client, response))[-1]["sequence_number"]
    assert await events(client, response, starting_after=last) == []
    [beyond] = await events(client, response, starting_after=last + 1)
    assert (beyond["type"], beyond["code"]) == ("error", "unknown_event")
    for query in ({"starting_after": "x"}, {"starting_after": str(2**33 + 5)}, {"stream": "maybe"}, {"foo": "1"}):
        reply = await client.get(f"/v1/responses/{response}", params={"stream": "true"} | query)
        assert (reply.status_code, "error" in reply.json()) == (400, True), query
    both = {"include[]": ["reasoning.encrypted_content", "message.output_text.logprobs"]}
    whole = await client.get(f"/v1/responses/{response}", params=both)
    assert whole.json()["id"] == response
    error = (await client.get(f"/v1/responses/{response}", params={"include[]": "usage"})).json()["error"]
    assert ("include" in error["param"], "'message.output_text.logprobs'" in error["message"]) == (True, True)


@pytest.mark.parametrize(
    ("more", "status_and_param"),
    [
        ({"metadata": {f"k{n}": "v" for n in range(17)}}, (400, "metadata")),
        ({"metadata": {"k" * 65: "v"}}, (400, "metadata")),
        ({"metadata": {"k": "v" * 513}}, (400, "metadata")),
        ({"metadata": {"k": 1}}, (400, "metadata")),
        ({"input": []}, (400, "input")),
        ({"input": [{"role": "user", "content": []}], "instructions": "Be brief."}, (400, "input")),
        ({"input": [{"type": "reasoning", "id": "rs_1", "summary": []}]}, (400, "input")),
        ({"input": [{"role": "robot", "content": "Hi"}]}, (400, "input[0].role")),
        ({"input": [{"type": "item_reference", "id": f"msg_run_{'0' * 31}"}]}, (404, "input[0].id")),
        ({"input": [{"type": "item_reference", "id": f"msg_{n}"} for n in range(129)]}, (400, "input")),
        ({"background": True, "store": False}, (400, "store")),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": 5}}}},
            (400, "text.format.schema"),
        ),
        ({"text": {"verbosity": "loud"}}, (400, "text.verbosity")),
        ({"max_output_tokens": 0}, (400, "max_output_tokens")),
        ({"top_logprobs": 21}, (400, "top_logprobs")),
        ({"tools": [ADD, ADD]}, (400, "tools")),
        ({"tool_choice": "required"}, (400, "tool_choice")),
        ({"model": "nothing"}, (404, "model")),
    ],
)
async def test_what_is_wrong_is_named(
    client: httpx.AsyncClient, more: dict[str, Any], status_and_param: tuple[int, str]
) -> None:
    code, param, _ = await read_refusal(client, **more)
    assert (code, (param or "").split(".k")[0]) == status_and_param


async def test_most_metadata_is_kept(client: httpx.AsyncClient) -> None:
    metadata = {f"{n:02}".ljust(64, "k"): "v" * 512 for n in range(16)}
    assert (await create_response(client, metadata=metadata))["metadata"] == metadata


async def test_a_form_is_held_to(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    form = {"type": "json_schema", "name": "number", "schema": schema, "strict": False}
    stub.script("alpha", Reply(chunks=("four",)), Reply(chunks=('{"n": 4}',)))
    body = await create_response(client, text={"format": form})
    assert json.loads(text_of(body)) == {"n": 4}
    assert body["text"]["format"] == form | {"description": None}


async def test_what_is_cut_off_is_incomplete(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    stub.script("alpha", Reply(chunks=("Fo",), finish="length"))
    cut = await create_response(client, max_output_tokens=1)
    details = {"reason": "max_output_tokens"}
    assert (cut["status"], cut["incomplete_details"], cut["completed_at"]) == ("incomplete", details, None)
    assert (cut["output"][0]["status"], text_of(cut)) == ("incomplete", "Fo")


async def test_a_failure_of_the_run_is_an_error_of_the_request(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    stub.always("alpha", Fail(status=400))
    reply = await client.post("/v1/responses", json=ASKED | {"baton": {"pool": {"pin": "alpha"}}})
    error = reply.json()["error"]
    assert (reply.status_code, error["type"], error["code"]) == (400, "invalid_request_error", "worker_refused")
    second_reply = await client.get(f"/v1/responses/resp_{reply.headers['x-baton-run']}")
    assert (second_reply.json()["status"], second_reply.json()["error"]["message"]) == ("failed", error["message"])
