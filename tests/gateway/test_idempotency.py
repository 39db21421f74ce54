"""`Idempotency-Key` over the real wiring: one run however often it is asked for, and always the same reply."""

import asyncio
import hashlib
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from app.core.run.events import Kind
from app.engine.runs import recovery
from app.process.wiring import Runtime
from app.store.protocol import IdempotencyRecord, RunQuery, RunRow
from tests.harness.callers import CALLER_SCOPES, add_key, client_over_socket, post_chat, stream_chat
from tests.harness.in_process import await_ended_row, events, kinds, pool_text, running_service
from tests.harness.stand_ins import GatewayStandIn, api_routes, chat_body
from tests.harness.waiting import until
from tests.stubs import Fail, ProviderStub, Reply, Stall


async def await_end(runtime: Runtime, run: str) -> RunRow:
    """The run's row once it has ended."""
    return await await_ended_row(runtime.gateway.store, run)


async def leave(stub: ProviderStub, asking: Coroutine[Any, Any, Any]) -> None:
    """Ask, and leave as soon as a worker has been called."""
    request = asyncio.create_task(asking)
    await stub.wait_for(1)
    request.cancel()
    with suppress(asyncio.CancelledError):
        await request


async def runs(runtime: Runtime) -> list[str]:
    return [row.id for row in await runtime.gateway.store.runs(RunQuery())]


async def test_the_same_request_gets_the_same_bytes_and_costs_once(stub: ProviderStub, runtime: Runtime) -> None:
    async with client_over_socket(runtime, await add_key(runtime)) as client:
        first, again = [await post_chat(client, chat_body(), "one") for _ in range(2)]
        other, none = await post_chat(client, chat_body(), "two"), await post_chat(client, chat_body())
    assert first.status_code == again.status_code == 200
    assert first.content == again.content
    assert first.headers["x-baton-run"] == again.headers["x-baton-run"]
    assert [reply.headers.get("idempotent-replayed") for reply in (first, again, other, none)] == [
        None,
        "true",
        None,
        None,
    ]
    assert len(stub.requests) == len(await runs(runtime)) == 3


async def test_a_reply_outlives_its_process(stub: ProviderStub, tmp_path: Path) -> None:
    request_body = chat_body(baton={"stream_steps": False})
    async with running_service(tmp_path, pool_text(stub)) as runtime:
        key = await add_key(runtime)
        async with client_over_socket(runtime, key) as client:
            first = await post_chat(client, request_body, "one")
            streamed = await stream_chat(client, request_body, "two")
    async with running_service(tmp_path, pool_text(stub)) as runtime, client_over_socket(runtime, key) as client:
        again, streamed_again = (
            await post_chat(client, request_body, "one"),
            await stream_chat(client, request_body, "two"),
        )
    assert again.headers["idempotent-replayed"] == "true"
    assert (first.status_code, first.content) == (again.status_code, again.content)
    assert streamed_again.chunks[-1] == streamed.chunks[-1]
    assert (streamed_again.text, streamed_again.done) == (streamed.text, True)
    assert len(stub.requests) == 2


@pytest.mark.long
async def test_equal_requests_to_two_gateways_are_one_run(stub: ProviderStub, tmp_path: Path) -> None:
    """Two processes over one database, without a queue between them."""
    stub.always("alpha", Reply(first_delay=0.2))
    async with (
        running_service(tmp_path, pool_text(stub)) as first,
        running_service(tmp_path, pool_text(stub)) as second,
    ):
        key = await add_key(first)
        async with client_over_socket(first, key) as here, client_over_socket(second, key) as there:
            replies = await asyncio.gather(*(post_chat(client, chat_body(), "one") for client in (here, there) * 6))
        assert len(await runs(first)) == 1
    assert {reply.content for reply in replies} == {replies[0].content}
    assert sorted("idempotent-replayed" in reply.headers for reply in replies) == [False] + [True] * 11
    assert len(stub.requests) == 1


async def test_an_equal_request_at_the_same_moment_is_told_its_rates_once(runtime: Runtime) -> None:
    """The one that comes too late has been counted as the beginning of a run before it follows the other one's."""
    async with client_over_socket(runtime, await add_key(runtime, rpm=100)) as client:
        replies = await asyncio.gather(*(post_chat(client, chat_body(), "one") for _ in range(8)))
    assert sorted("idempotent-replayed" in reply.headers for reply in replies) == [False] + [True] * 7
    assert [len(reply.headers.get_list("x-ratelimit-remaining-requests")) for reply in replies] == [1] * 8


async def test_another_request_under_the_same_key_is_a_conflict(stub: ProviderStub, runtime: Runtime) -> None:
    async with client_over_socket(runtime, await add_key(runtime)) as client:
        await post_chat(client, chat_body(), "one")
        different = [
            chat_body("What is 3 + 3?"),
            chat_body(stream=True),
            chat_body(temperature=0.5),
            chat_body() | {"model": "baton-ultra"},
        ]
        replies = [await post_chat(client, body, "one") for body in different]
        spelled = dict(reversed(chat_body().items()))
        same = await client.post(
            "/v1/chat/completions",
            content=repr(spelled).replace("'", '"').replace(",", " ,\n"),
            headers={"idempotency-key": "one", "content-type": "application/json"},
        )
    assert [reply.status_code for reply in replies] == [409] * 4
    error = replies[0].json()["error"]
    assert (error["type"], error["code"], error["param"]) == (
        "invalid_request_error",
        "idempotency_key_reuse",
        "Idempotency-Key",
    )
    assert (same.status_code, same.headers["idempotent-replayed"]) == (200, "true")
    assert len(stub.requests) == 1


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/compact"])
async def test_a_reply_is_repeated_although_the_response_before_was_deleted(runtime: Runtime, path: str) -> None:
    async with client_over_socket(runtime, await add_key(runtime)) as client:
        first = await client.post("/v1/responses", json={"model": "baton-mini", "input": "One?"})
        body = {"model": "baton-mini", "input": "Two?", "previous_response_id": first.json()["id"]}
        reply, deleted, again = [
            await client.post(path, json=body, headers={"Idempotency-Key": "one"}),
            await client.delete(f"/v1/responses/{first.json()['id']}"),
            await client.post(path, json=body, headers={"Idempotency-Key": "one"}),
        ]
    assert (reply.status_code, deleted.status_code, again.status_code) == (200, 200, 200), again.text
    assert (again.content, again.headers["idempotent-replayed"]) == (reply.content, "true")


async def test_a_key_belongs_to_its_tenant(stub: ProviderStub, runtime: Runtime) -> None:
    names = [await add_key(runtime, tenant) for tenant in ("acme", "acme", "other")]
    replies = []
    for name in names:
        async with client_over_socket(runtime, name) as client:
            replies.append(await post_chat(client, chat_body(), "one"))
    assert replies[0].content == replies[1].content != replies[2].content
    assert len(stub.requests) == 2


@pytest.mark.parametrize("streams", [False, True])
async def test_a_failed_run_fails_the_same_way_again(stub: ProviderStub, runtime: Runtime, streams: bool) -> None:
    stub.always("*", Fail(status=500))
    async with client_over_socket(runtime, await add_key(runtime)) as client:
        first, again = [await post_chat(client, chat_body(stream=streams), "one") for _ in range(2)]
    assert first.status_code == again.status_code == (200 if streams else 502)
    assert first.content == again.content
    assert b'"worker_unavailable"' in first.content
    assert len(await runs(runtime)) == 1


async def test_what_was_refused_before_a_run_claims_nothing(stub: ProviderStub, runtime: Runtime) -> None:
    async with client_over_socket(runtime, await add_key(runtime)) as client:
        refused = await post_chat(client, chat_body(baton={"labels": ["phi"]}), "one")
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "no_eligible_worker")
        assert (await post_chat(client, chat_body(), "one")).status_code == 200


@pytest.mark.parametrize("bad", ["", "x" * 256, "caf\xe9", "a\tb"])
async def test_a_key_that_is_none_is_refused(runtime: Runtime, bad: str) -> None:
    async with client_over_socket(runtime, await add_key(runtime)) as client:
        headers = [(b"idempotency-key", bad.encode("latin-1"))]
        reply = await client.post("/v1/chat/completions", json=chat_body(), headers=headers)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "invalid_idempotency_key", "Idempotency-Key")
    assert await runs(runtime) == []


async def test_a_run_with_a_key_goes_on_without_its_client(stub: ProviderStub, runtime: Runtime) -> None:
    stub.always("alpha", Reply(first_delay=0.6))
    async with client_over_socket(runtime, await add_key(runtime)) as client:
        await leave(stub, post_chat(client, chat_body(), "one"))
        again = await post_chat(client, chat_body(), "one")
        assert (again.status_code, again.headers["idempotent-replayed"]) == (200, "true")
        assert Kind.CANCEL_ASKED not in kinds(await events(runtime, again.headers["x-baton-run"]))
    assert len(stub.requests) == 1


@pytest.mark.parametrize(
    ("policy", "key", "ends"),
    [
        (None, None, "cancelled"),
        ("cancel", None, "cancelled"),
        ("cancel", "one", "cancelled"),
        ("finish", None, "succeeded"),
        (None, "one", "succeeded"),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
async def test_what_becomes_of_a_run_whose_client_leaves(
    stub: ProviderStub, runtime: Runtime, policy: str | None, key: str | None, ends: str, streams: bool
) -> None:
    stub.always("alpha", Reply(first_delay=15.0 if ends == "cancelled" else 0.3))
    async with client_over_socket(runtime, await add_key(runtime)) as client:
        await leave(stub, post_chat(client, chat_body(stream=streams, baton={"on_disconnect": policy}), key))
        (run,) = await runs(runtime)
        row = await await_end(runtime, run)
        assert row.state == ends
        if ends == "cancelled":  # long before the worker would have answered, who hears of it
            await until(lambda: stub.requests[0].disconnected_at is not None, within=10)
    journal = await events(runtime, run)
    assert journal[0].body["on_disconnect"] == ("cancel" if ends == "cancelled" else "finish")


async def test_a_replay_takes_no_place_of_its_key(stub: ProviderStub, runtime: Runtime) -> None:
    answer = asyncio.Event()
    stub.script("alpha", Reply(fault=Stall(seconds=answer)))
    async with client_over_socket(runtime, await add_key(runtime, concurrency=1)) as client:
        first = asyncio.create_task(post_chat(client, chat_body(), "one"))
        await stub.wait_for(1)
        again = asyncio.create_task(post_chat(client, chat_body(), "one"))
        assert (await post_chat(client, chat_body(), "two")).status_code == 429
        answer.set()
        assert (await again).content == (await first).content
        assert (await post_chat(client, chat_body(), "two")).status_code == 200


async def test_erased_content_is_not_replayed(stub: ProviderStub, runtime: Runtime) -> None:
    async with client_over_socket(runtime, await add_key(runtime)) as client:
        first = await post_chat(client, chat_body(), "one")
        assert await runtime.gateway.store.erase(first.headers["x-baton-run"])
        again = await post_chat(client, chat_body(), "one")
    assert (again.status_code, again.json()["error"]["code"]) == (404, "content_erased")
    assert len(stub.requests) == 1


@pytest.mark.parametrize("streams", [False, True])
async def test_the_refusal_of_an_erased_response_keeps_no_slot(
    stub: ProviderStub, tmp_path: Path, streams: bool
) -> None:
    body = {"model": "baton-mini", "input": "Hi", "background": True, "stream": streams}
    body["baton"] = {"approval": "required"}  # so that the run has no answer yet when it is erased
    async with (
        running_service(tmp_path, pool_text(stub), {"BATON_CONCURRENT_RUNS": "4"}) as runtime,
        client_over_socket(runtime, await add_key(runtime)) as client,
    ):
        first = await client.post("/v1/responses", json=body, headers={"idempotency-key": "one"})
        await client.delete(f"/v1/runs/{first.headers['x-baton-run']}")
        for _ in range(5):
            again = await client.post("/v1/responses", json=body, headers={"idempotency-key": "one"})
            assert (again.status_code, again.json()["error"]["code"]) == (404, "content_erased")
        assert (await post_chat(client, chat_body())).status_code == 200


async def test_a_run_is_heard_by_all_who_ask(stub: ProviderStub, runtime: Runtime) -> None:
    stub.always("alpha", Reply(first_delay=0.4))
    async with client_over_socket(runtime, await add_key(runtime)) as client:
        streams = await asyncio.gather(*(stream_chat(client, chat_body(), "one") for _ in range(5)))
    assert {stream.text for stream in streams} == {"Hello there."}
    assert len(stub.requests) == 1


@pytest.mark.long
async def test_keys_are_forgotten_after_their_time_and_not_before(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "FORGET", 2)
    async with running_service(tmp_path, pool_text(stub), {"BATON_LEASE_SECONDS": "0.5"}) as runtime:
        store, now = runtime.gateway.store, runtime.context.now()
        for n in range(5):
            await store.add_idempotency_record(IdempotencyRecord(f"old-{n}", b"", now - 1), now - 2)
        async with client_over_socket(runtime, await add_key(runtime)) as client:
            run = (await post_chat(client, chat_body(), "one")).headers["x-baton-run"]

            async def forgotten() -> bool:
                return not any([await store.find_idempotency_record(f"old-{n}", 0.0) for n in range(5)])

            await until(forgotten)
            again = await post_chat(client, chat_body(), "one")
        assert again.headers["x-baton-run"] == run
        record = await store.find_idempotency_record(hashlib.sha256(b"acme\0one").hexdigest(), now)
        assert record is not None
        assert (record.run, record.reply) == (run, b"")
        assert record.until >= (await store.run(run)).deadline + 24 * 3600 - 1


async def test_a_lookup_that_fails_starts_nothing() -> None:
    """Else a request that was carried out might be carried out again."""
    gateway = GatewayStandIn()
    key = gateway.add_key()
    async with gateway.client(key) as client:
        assert (await post_chat(client, chat_body(), "one")).status_code == 200
        gateway.store.fault = RuntimeError("broken")
        assert (await post_chat(client, chat_body(), "two")).status_code == 500
    assert len(gateway.runs.orders) == 1


EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/approvals/{approval}": {"decision": "refuse"},
    "/v1/chat/completions": chat_body(),
    "/v1/completions": {"model": "baton-mini", "prompt": "What is 2 + 2?"},
    "/v1/messages": chat_body(max_tokens=64),
    "/v1/messages/count_tokens": chat_body(),
    "/v1/plans": chat_body(),
    "/v1/plans/{plan}/run": {"revision": 1},
    "/v1/responses": {"model": "baton-mini", "input": "What is 2 + 2?"},
    "/v1/responses/compact": {"model": "baton-mini", "input": "What is 2 + 2?"},
    "/v1/responses/input_tokens": {"model": "baton-mini", "input": "What is 2 + 2?"},
    "/v1/responses/{response}/cancel": {},
    "/v1/runs/{run}/cancel": {},
    "/v1/runs/{run}/feedback": {"score": 0.5},
    "/v1/runs/{run}/replay": {"wait": 30},
}
"""A request to each POST route. `{run}` stands for a run in the background that has ended."""
OTHERS: dict[str, dict[str, Any]] = {
    "/v1/approvals/{approval}": {"reason": "Another one."},
    "/v1/responses/compact": {"instructions": "Others."},
    "/v1/responses/input_tokens": {"instructions": "Others."},
    "/v1/runs/{run}/replay": {"effort": "low"},
}
"""The field by which another request to these routes differs; to the others it is `user`."""
DECIDING = (*CALLER_SCOPES, "approvals:decide")


def posts() -> list[str]:
    """Every POST route of the application under /v1, from the route table."""
    routes = api_routes(GatewayStandIn().app.routes)
    return sorted(route.path for route in routes if "POST" in (route.methods or ()) and route.path.startswith("/v1"))


def test_every_post_route_has_an_example() -> None:
    assert posts() == sorted(EXAMPLES), "a new POST route hands its body to Idempotency, and gets an example here"


async def waiting(runtime: Runtime, key: str) -> dict[str, str]:
    """The run of a request by this key that asks for an approval, and the digest that is to be approved."""
    async with client_over_socket(runtime, key) as client:
        reply = await client.post("/v1/chat/completions", json=chat_body(baton={"approval": "required"}))
    extension = reply.json()["baton"]
    return {"run": extension["run"], "digest": extension["approval"]["digest"]}


@pytest.mark.parametrize("path", posts())
async def test_no_post_route_ignores_the_key(stub: ProviderStub, runtime: Runtime, path: str) -> None:
    example, route = EXAMPLES[path], path
    asker = await add_key(runtime)
    async with client_over_socket(runtime, await add_key(runtime, scopes=DECIDING)) as client:
        background = EXAMPLES["/v1/responses"] | {"background": True}
        run = (await client.post("/v1/responses", json=background)).json()["id"].removeprefix("resp_")
        await client.get(f"/v1/runs/{run}/stream")  # which ends when the run does
        planned = (await client.post("/v1/plans", json=chat_body())).json()["id"] if "{plan}" in path else ""
        if "{approval}" in path:
            approval = await waiting(runtime, asker)
            path, example = path.replace("{approval}", approval["run"]), example | {"digest": approval["digest"]}
        path = path.replace("{run}", run).replace("{response}", f"resp_{run}").replace("{plan}", planned)
        calls, headers = len(stub.requests), {"idempotency-key": "one"}
        first, again = [await client.post(path, json=example, headers=headers) for _ in range(2)]
        calls = len(stub.requests) - calls
        assert first.status_code == 200, first.text
        assert (again.status_code, again.content) == (first.status_code, first.content)
        assert [reply.headers.get("idempotent-replayed") for reply in (first, again)] == [None, "true"]
        assert calls <= 1
        other = OTHERS.get(route, {"user": "another"})
        reused = await client.post(path, json=example | other, headers=headers)
        assert (reused.status_code, "used with another request" in reused.text) == (409, True)
        bad = await client.post(path, json=example, headers={"idempotency-key": "x" * 256})
        assert (bad.status_code, "Send one Idempotency-Key" in bad.text) == (400, True)


async def test_a_key_of_one_route_is_no_key_of_another(runtime: Runtime) -> None:
    async with client_over_socket(runtime, await add_key(runtime)) as client:
        run = (await post_chat(client, chat_body(), "one")).headers["x-baton-run"]
        reply = await client.post(f"/v1/runs/{run}/cancel", headers={"idempotency-key": "one"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "idempotency_key_reuse")
