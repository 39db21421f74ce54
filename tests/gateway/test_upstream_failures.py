"""Every worker fails in the same way, and callers receive the right error in all formats, streamed or not.

Here are the kinds that callers act upon; `tests/faults/test_upstream_failures.py` walks the whole table.
"""

from pathlib import Path
from typing import Any

import httpx
import pytest

from app.core.run.caller_view import answer_changed_error
from app.errors import (
    BatonError,
    Conflict,
    Overloaded,
    OverQuota,
    RunExpired,
    RunFailed,
    RunOutOfQuota,
    RunOverBudget,
    RunRateLimited,
    WorkerTimeout,
)
from app.gateway.http.fault import headers_of
from app.store.protocol.idempotency import TAKEN
from tests.conformance.upstream_failures import INBOUND, KINDS, receive_reply
from tests.harness.in_process import client_of, pool_text, running_service
from tests.harness.stand_ins import chat_body
from tests.harness.waiting import until
from tests.stubs import Fail, ProviderStub, Reply, Truncate

SHOWN = ("refused", "too-long", "rate-limit", "no-credit", "wrong-key")
TOO_LONG = "This model's maximum context length is 4096 tokens."


@pytest.mark.long
async def test_a_caller_receives_what_it_can_act_upon(stub: ProviderStub, tmp_path: Path) -> None:
    async with running_service(tmp_path, pool_text(stub)) as runtime, client_of(runtime) as client:
        for kind in KINDS:
            if kind.name not in SHOWN:
                continue
            for model in ("alpha", "beta", "gamma"):
                stub.always(model, kind.act)
            for inbound in INBOUND:
                for streams in (False, True):
                    outcome, _ = await receive_reply(client, inbound, streams=streams)
                    assert outcome == kind.seen_by(inbound, streams=streams), (kind.name, inbound, streams)


async def test_the_smallest_wait_of_all_workers_counts(stub: ProviderStub, tmp_path: Path) -> None:
    for model, wait in (("alpha", 50), ("beta", 40), ("gamma", 45)):
        stub.always(model, Fail(status=429, retry_after=wait))
    async with running_service(tmp_path, pool_text(stub)) as runtime, client_of(runtime) as client:
        reply = await client.post("/v1/chat/completions", json=chat_body())
    assert (reply.status_code, reply.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert reply.headers["retry-after"] == "40"
    assert len(stub.requests) == 3


async def test_the_wait_is_taken_where_the_deadline_allows_it(stub: ProviderStub, tmp_path: Path) -> None:
    stub.script("alpha", *[Fail(status=429, retry_after=0.1)] * 3)
    async with running_service(tmp_path, pool_text(stub)) as runtime, client_of(runtime) as client:
        reply = await client.post("/v1/chat/completions", json=chat_body(baton={"pool": {"pin": "alpha"}}))
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["message"]["content"] == "Hello there."


async def test_one_worker_that_may_answer_later_decides(stub: ProviderStub, tmp_path: Path) -> None:
    stub.always("alpha", Fail(status=400, message=TOO_LONG))
    stub.always("beta", Fail(status=500))
    stub.always("gamma", Fail(status=401))
    async with running_service(tmp_path, pool_text(stub)) as runtime, client_of(runtime) as client:
        mixed = await client.post("/v1/chat/completions", json=chat_body())
        stub.always("beta", Fail(status=400, message="No."))
        refused = await client.post("/v1/chat/completions", json=chat_body())
    assert (mixed.status_code, mixed.json()["error"]["code"]) == (502, "worker_unavailable")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_conversation_that_is_known_to_be_too_long_for_every_worker_is_to_be_shortened(
    stub: ProviderStub, tmp_path: Path
) -> None:
    words = [{"role": "user", "content": "word " * 200_000}]
    async with running_service(tmp_path, pool_text(stub)) as runtime, client_of(runtime) as client:
        refused = await client.post("/v1/chat/completions", json=chat_body() | {"messages": words})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "alpha: the conversation is longer than its context" in refused.json()["error"]["message"]
    assert not stub.requests


async def test_an_empty_answer_is_tried_once_more_with_another_worker(stub: ProviderStub, tmp_path: Path) -> None:
    stub.always("alpha", Reply(chunks=()))
    async with running_service(tmp_path, pool_text(stub)) as runtime, client_of(runtime) as client:
        for streams in (False, True):
            reply = await client.post("/v1/chat/completions", json=chat_body(stream=streams))
            assert "there" in reply.text
        stub.always("beta", Reply(chunks=()))
        empty = await client.post("/v1/chat/completions", json=chat_body())
        assert (empty.status_code, empty.json()["choices"][0]["message"]["content"]) == (200, "")
        assert [request.model for request in stub.requests[-2:]] == ["alpha", "beta"]
        for model in ("beta", "gamma"):
            stub.always(model, Fail(status=401))
        second_reply = await client.post("/v1/chat/completions", json=chat_body())
    assert (second_reply.status_code, second_reply.json()["choices"][0]["message"]["content"]) == (200, "")


CUT = Reply(fault=Truncate(after=1, clean=False), gap=0.01)


async def test_a_cut_answer_is_continued_where_nobody_has_received_any_of_it(
    stub: ProviderStub, tmp_path: Path
) -> None:
    stub.script("alpha", CUT, CUT, CUT)
    async with running_service(tmp_path, pool_text(stub)) as runtime, client_of(runtime) as client:
        buffered = await client.post("/v1/chat/completions", json=chat_body())
        request_body = {"model": "baton-mini", "input": "What is 2 + 2?", "background": True}
        began = (await client.post("/v1/responses", json=request_body)).json()
        ended = await _await_end(client, began["id"])
        streamed = await client.get(f"/v1/responses/{began['id']}", params={"stream": "true"})
        stub.script("alpha", CUT)
        cut = await client.post("/v1/chat/completions", json=chat_body(stream=True))
    assert buffered.json()["choices"][0]["message"]["content"] == "Hello there."
    assert ended["status"] == "completed"
    assert ended["output"][0]["content"][0]["text"] == "Hello there."
    assert "response.completed" in streamed.text
    assert '"code":"worker_truncated"' in cut.text


async def test_no_empty_answer_takes_the_place_of_one_that_broke_off_before_a_caller(
    stub: ProviderStub, tmp_path: Path
) -> None:
    stub.always("alpha", Reply(chunks=()))
    stub.always("beta", CUT)
    async with running_service(tmp_path, pool_text(stub)) as runtime, client_of(runtime) as client:
        cut = await client.post("/v1/chat/completions", json=chat_body(stream=True))
        [run] = (await client.get("/v1/runs")).json()["data"]
    assert '"code":"worker_truncated"' in cut.text
    assert run["state"] == "failed"


async def _await_end(client: httpx.AsyncClient, response: str) -> dict[str, Any]:
    """A response in the background, once it is over."""
    body: dict[str, Any] = {}

    async def over() -> bool:
        body.update((await client.get(f"/v1/responses/{response}")).json())
        return body["status"] not in ("queued", "in_progress")

    await until(over)
    return body


@pytest.mark.parametrize(
    "error",
    [
        RunOverBudget(),
        RunExpired(),
        WorkerTimeout(),
        RunOutOfQuota(),
        Conflict(code="idempotency_key_reuse"),
        answer_changed_error("run_1"),
    ],
)
def test_what_is_not_worth_sending_again_says_so(error: BatonError) -> None:
    assert headers_of(error)["x-should-retry"] == "false"


@pytest.mark.parametrize(
    "error",
    [RunRateLimited(), RunFailed(), OverQuota(limit="requests", retry_after=1.0), Overloaded(), Conflict(code=TAKEN)],
)
def test_what_may_pass_leaves_it_to_the_client(error: BatonError) -> None:
    assert "x-should-retry" not in headers_of(error)
