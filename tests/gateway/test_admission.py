"""Admission: rates, concurrency and the size of the process, and that every place comes back."""

import asyncio
import math
from dataclasses import replace
from datetime import datetime
from typing import Any

import httpx
import pytest

from app.core.message.chat import Usage
from app.engine.delivery.mailbox import Mailbox
from app.engine.delivery.messages import Told
from app.engine.runs.admission import Order
from app.errors import StoreUnavailable
from app.gateway.http.context import Rates
from tests.harness.stand_ins import GatewayStandIn, ask, ended
from tests.harness.waiting import until


async def post(gateway: GatewayStandIn, key: str, **more: Any) -> httpx.Response:
    async with gateway.client(key) as client:
        return await client.post("/v1/chat/completions", json=ask(**more))


async def test_a_rate_is_a_bucket_that_refills(gateway: GatewayStandIn) -> None:
    key = gateway.add_key("slow", rpm=3)
    replies = [await post(gateway, key) for _ in range(4)]
    assert [reply.status_code for reply in replies] == [200, 200, 200, 429]
    assert [reply.headers["x-ratelimit-remaining-requests"] for reply in replies] == ["2", "1", "0", "0"]
    refused = replies[-1]
    assert refused.headers["retry-after"] == "20"
    assert refused.headers["x-ratelimit-limit-requests"] == "3"
    assert refused.headers["x-ratelimit-reset-requests"] == "60.000s"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    gateway.ticks += 20
    assert [(await post(gateway, key)).status_code for _ in range(2)] == [200, 429]
    assert len(gateway.runs.orders) == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_are_settled_with_what_the_run_used(gateway: GatewayStandIn, stream: bool) -> None:
    key = gateway.add_key("slow", tpm=120)
    replies = [await post(gateway, key, stream=stream) for _ in range(4)]
    assert [reply.status_code for reply in replies] == [200, 200, 200, 429]
    expected = 11  # of the input, in tokens; each run uses 53
    left = [int(reply.headers["x-ratelimit-remaining-tokens"]) for reply in replies]
    assert left == [120 - expected, 120 - 53 - expected, 120 - 2 * 53 - expected, 0]
    refused = replies[-1]
    debt = 3 * 53 - 120
    assert refused.headers["retry-after"] == str(math.ceil((debt + expected) / 2))
    assert refused.headers["x-ratelimit-limit-tokens"] == "120"
    assert refused.headers["x-ratelimit-reset-tokens"] == f"{3 * 53 / 2:.3f}s"
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    gateway.ticks += (debt + expected) / 2
    assert [(await post(gateway, key)).status_code for _ in range(2)] == [200, 429]
    assert len(gateway.runs.orders) == 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["chat/completions", "messages"])
async def test_a_turn_is_settled_with_its_own_tokens(gateway: GatewayStandIn, path: str, stream: bool) -> None:
    """Those of the turns before were settled with their replies."""
    key = gateway.add_key("patient", tpm=1000)

    async def script(_order: Order, run: str, line: Mailbox[Told]) -> None:
        end = ended(run)
        line.put(replace(end, bill=replace(end.bill, total=Usage(input=900))))

    gateway.runs.script = script
    body = {"model": "baton-mini", "max_tokens": 9, "messages": [{"role": "user", "content": "?"}], "stream": stream}
    async with gateway.client(key) as client:
        left = [(await client.post(f"/v1/{path}", json=body)).headers["x-ratelimit-remaining-tokens"] for _ in range(2)]
    assert int(left[0]) - int(left[1]) == 53


async def test_more_tokens_than_a_minute_has_are_served_from_a_full_bucket(gateway: GatewayStandIn) -> None:
    key = gateway.add_key("small", tpm=5)
    assert [(await post(gateway, key)).status_code for _ in range(2)] == [200, 429]
    gateway.ticks += 60 * 60
    assert (await post(gateway, key)).status_code == 200


async def test_every_reply_of_a_limited_key_says_its_rates() -> None:
    gateway = GatewayStandIn(rates=Rates(rpm=2, tpm=1000, concurrency=0))
    reply = await post(gateway, gateway.add_key())
    assert reply.status_code == 429
    names = {name for name in reply.headers if name.startswith("x-ratelimit")}
    assert names == {f"x-ratelimit-{a}-{b}" for a in ("limit", "remaining", "reset") for b in ("requests", "tokens")}
    assert reply.headers["x-ratelimit-remaining-requests"] == "2"
    assert int(reply.headers["retry-after"]) >= 1


async def test_keys_do_not_share_a_rate() -> None:
    gateway = GatewayStandIn(rates=Rates(rpm=1))
    keys = [gateway.add_key("one1"), gateway.add_key("two2")]
    assert [(await post(gateway, key)).status_code for key in keys * 2] == [200, 200, 429, 429]


async def together(gateway: GatewayStandIn, keys: list[str], **more: Any) -> list[int]:
    """Statuses of requests that run at the same time."""
    release, running = asyncio.Event(), []

    async def script(_order: Order, run: str, line: Mailbox[Told]) -> None:
        running.append(run)
        await release.wait()
        line.put(ended(run))

    gateway.runs.script = script
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(post(gateway, key, **more)) for key in keys]
        await until(lambda: len(running) + sum(task.done() for task in tasks) == len(keys))
        release.set()
    return sorted(task.result().status_code for task in tasks)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_key_has_its_concurrency(gateway: GatewayStandIn, stream: bool) -> None:
    key = gateway.add_key("two2", concurrency=2)
    for _ in range(2):
        assert await together(gateway, [key] * 3, stream=stream) == [200, 200, 429]


@pytest.mark.parametrize("stream", [False, True])
async def test_whoever_knows_the_end_may_ask_again(gateway: GatewayStandIn, stream: bool) -> None:
    key = gateway.add_key("one1", concurrency=1)
    again: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def heard(message: Any) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body"):
                again.append((await post(gateway, key)).status_code)
            await send(message)

        await gateway.app(scope, receive, heard)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        headers = {"authorization": f"Bearer {key}"}
        reply = await client.post("/v1/chat/completions", json=ask(stream=stream), headers=headers)
    assert (reply.status_code, again) == (200, [200])


@pytest.mark.parametrize("stream", [False, True])
async def test_the_process_has_its_size(stream: bool) -> None:
    gateway = GatewayStandIn(rates=Rates(running=2))
    keys = [gateway.add_key("one1"), gateway.add_key("two2"), gateway.add_key("three3")]
    for _ in range(2):
        assert await together(gateway, keys, stream=stream) == [200, 200, 503]


async def test_a_run_that_cannot_start_gives_its_place_back() -> None:
    gateway = GatewayStandIn(rates=Rates(running=1))
    key = gateway.add_key()
    gateway.runs.refusal = StoreUnavailable()
    for stream in (False, True):
        assert (await post(gateway, key, stream=stream)).status_code == 503
    gateway.runs.refusal = None
    assert (await post(gateway, key)).status_code == 200


async def test_nothing_is_counted_for_a_bad_request(gateway: GatewayStandIn) -> None:
    key = gateway.add_key("slow", rpm=1)
    assert (await post(gateway, key, n=2)).status_code == 400
    assert (await post(gateway, key)).status_code == 200


async def test_anthropics_clients_are_told_their_rates_under_its_names() -> None:
    stand_in = GatewayStandIn()
    key = stand_in.add_key("slow", rpm=3, tpm=600)
    asked = {"model": "baton-mini", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
    async with stand_in.client(key) as client:
        replies = [await client.post("/v1/messages", json=asked) for _ in range(4)]
        other = await client.post("/v1/chat/completions", json=ask())
    assert [reply.status_code for reply in replies] == [200, 200, 200, 429]
    assert [reply.headers["anthropic-ratelimit-requests-remaining"] for reply in replies] == ["2", "1", "0", "0"]
    refused = replies[-1].headers
    assert (refused["anthropic-ratelimit-requests-limit"], refused["anthropic-ratelimit-tokens-limit"]) == ("3", "600")
    reset = datetime.fromisoformat(refused["anthropic-ratelimit-requests-reset"]).timestamp()
    assert stand_in.context.now() < reset <= stand_in.context.now() + 61
    assert not [name for name in other.headers if name.startswith("anthropic")]
