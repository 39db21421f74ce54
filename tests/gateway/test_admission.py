"""Admission: rates, open runs and the size of the process, and that every place comes back."""

import asyncio
from datetime import datetime
from typing import Any

import httpx
import pytest

from app.core.pool.rates import RateLimits
from app.engine.delivery.messages import CallerMessage, Mailbox
from app.engine.runs.admission import Order
from app.errors import ConfigInvalid, StoreUnavailable
from app.gateway.http.context import Rates
from app.process.config import rate_limits, read
from tests.harness.stand_ins import TOKENS_PER_RUN, GatewayStandIn, chat_body, turn_end
from tests.harness.waiting import until


async def post(gateway: GatewayStandIn, key: str, **more: Any) -> httpx.Response:
    async with gateway.client(key) as client:
        return await client.post("/v1/chat/completions", json=chat_body(**more))


async def test_a_rate_holds_for_every_minute(gateway: GatewayStandIn) -> None:
    key = gateway.add_key("slow", rpm=3)
    replies = [await post(gateway, key) for _ in range(4)]
    assert [reply.status_code for reply in replies] == [200, 200, 200, 429]
    assert [reply.headers["x-ratelimit-remaining-requests"] for reply in replies] == ["2", "1", "0", "0"]
    refused = replies[-1]
    assert refused.headers["retry-after"] == "60"
    assert refused.headers["x-ratelimit-limit-requests"] == "3"
    assert refused.headers["x-ratelimit-reset-requests"] == "60.000s"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    gateway.seconds += 59
    assert (await post(gateway, key)).headers["retry-after"] == "1"
    gateway.seconds += 1
    assert [(await post(gateway, key)).status_code for _ in range(2)] == [200, 200]
    assert len(gateway.runs.orders) == 5


RESERVED = 16 * 2 + 14 + 50
"""Tokens that are reserved for a run of a question of 14 bytes, and an answer of at most 50 tokens."""


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_are_reserved_and_settled_with_what_the_run_used(gateway: GatewayStandIn, stream: bool) -> None:
    key = gateway.add_key("slow", tpm=200)
    replies = [await post(gateway, key, stream=stream, max_tokens=50) for _ in range(4)]
    assert [reply.status_code for reply in replies] == [200, 200, 429, 429]
    left = [int(reply.headers["x-ratelimit-remaining-tokens"]) for reply in replies]
    assert left == [200 - RESERVED, 200 - TOKENS_PER_RUN - RESERVED, 200 - 2 * TOKENS_PER_RUN, 200 - 2 * TOKENS_PER_RUN]
    refused = replies[-1]
    assert refused.headers["retry-after"] == "60"
    assert refused.headers["x-ratelimit-limit-tokens"] == "200"
    assert refused.headers["x-ratelimit-reset-tokens"] == "60.000s"
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    gateway.seconds += 60
    assert (await post(gateway, key, max_tokens=50)).status_code == 200
    assert len(gateway.runs.orders) == 3


async def test_a_burst_reserves_the_most_output_of_each_run(gateway: GatewayStandIn) -> None:
    """Of the most output that its tier allows, where the request names none."""
    key = gateway.add_key("burst", tpm=3400)
    assert await together(gateway, [key] * 4) == [200, 429, 429, 429]
    gateway.seconds += 60
    assert await together(gateway, [key] * 4, max_tokens=1000) == [200, 200, 200, 429]


async def test_more_tokens_than_a_minute_has_are_served_alone(gateway: GatewayStandIn) -> None:
    key = gateway.add_key("small", tpm=5)
    assert [(await post(gateway, key)).status_code for _ in range(2)] == [200, 429]
    gateway.seconds += 60 * 60
    assert (await post(gateway, key)).status_code == 200


async def test_a_run_that_was_not_begun_reserves_nothing(gateway: GatewayStandIn) -> None:
    key = gateway.add_key("slow", tpm=200, concurrency=1)
    gateway.runs.refusal = StoreUnavailable()
    assert (await post(gateway, key, max_tokens=50)).status_code == 503
    gateway.runs.refusal = None
    reply = await post(gateway, key, max_tokens=50)
    assert (reply.status_code, reply.headers["x-ratelimit-remaining-tokens"]) == (200, str(200 - RESERVED))


async def test_a_request_without_limits_costs_no_query(gateway: GatewayStandIn) -> None:
    assert (await post(gateway, gateway.add_key())).status_code == 200
    assert (gateway.store.counted, gateway.store.windows) == (0, {})


async def test_while_the_limits_cannot_be_counted_nothing_is_begun(gateway: GatewayStandIn) -> None:
    limited, other = gateway.add_key("slow", rpm=9), gateway.add_key("other")
    for key in (limited, other):
        assert (await post(gateway, key)).status_code == 200
    gateway.store.fault = StoreUnavailable()
    assert [(await post(gateway, key)).status_code for key in (limited, other)] == [503, 200]


async def test_a_tenant_has_its_limits_over_all_of_its_keys() -> None:
    gateway = GatewayStandIn(rates=Rates(tenant=RateLimits(rpm=2)))
    keys = [gateway.add_key("one1"), gateway.add_key("two2"), gateway.add_key("three3", tenant="other")]
    replies = [await post(gateway, key) for key in (keys[0], keys[1], keys[1], keys[2])]
    assert [reply.status_code for reply in replies] == [200, 200, 429, 200]
    assert "this tenant" in replies[2].json()["error"]["message"]


async def test_an_end_user_has_limits_within_a_tenant() -> None:
    gateway = GatewayStandIn(rates=Rates(user=RateLimits(rpm=1)))
    acme, other = gateway.add_key("one1"), gateway.add_key("two2", tenant="other")
    requests = ((acme, "ann"), (acme, "bob"), (acme, "ann"), (other, "ann"), (acme, None), (acme, None))
    statuses = [(await post(gateway, key, **({"user": user} if user else {}))).status_code for key, user in requests]
    assert statuses == [200, 200, 429, 200, 200, 200]


@pytest.mark.parametrize("text", ["rpm", "rpm=", "rpm=-1", "rps=4", "rpm=4 tpm=5", "tpm=1e3"])
def test_a_setting_of_limits_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigInvalid, match="rpm=60, tpm=100000"):
        read({"BATON_TENANT_LIMITS": text})


def test_a_setting_names_any_of_the_limits() -> None:
    limits = read({"BATON_KEY_LIMITS": "rpm=60, concurrency = 8", "BATON_USER_LIMITS": ""})
    assert rate_limits(limits.key_limits) == RateLimits(rpm=60, concurrency=8)
    assert not rate_limits(limits.user_limits)


async def test_every_reply_of_a_limited_key_says_its_rates() -> None:
    gateway = GatewayStandIn(rates=Rates(key=RateLimits(rpm=2, tpm=1000, concurrency=0)))
    reply = await post(gateway, gateway.add_key())
    assert reply.status_code == 429
    names = {name for name in reply.headers if name.startswith("x-ratelimit")}
    assert names == {f"x-ratelimit-{a}-{b}" for a in ("limit", "remaining", "reset") for b in ("requests", "tokens")}
    assert reply.headers["x-ratelimit-remaining-requests"] == "2"
    assert int(reply.headers["retry-after"]) >= 1


async def test_keys_do_not_share_a_rate() -> None:
    gateway = GatewayStandIn(rates=Rates(key=RateLimits(rpm=1)))
    keys = [gateway.add_key("one1"), gateway.add_key("two2")]
    assert [(await post(gateway, key)).status_code for key in keys * 2] == [200, 200, 429, 429]


async def together(gateway: GatewayStandIn, keys: list[str], **more: Any) -> list[int]:
    """Statuses of requests that run at the same time."""
    release, running = asyncio.Event(), []

    async def script(_order: Order, run: str, line: Mailbox[CallerMessage]) -> None:
        running.append(run)
        await release.wait()
        line.put(turn_end(run))

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
        async def send_and_ask_again(message: Any) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body"):
                again.append((await post(gateway, key)).status_code)
            await send(message)

        await gateway.app(scope, receive, send_and_ask_again)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        headers = {"authorization": f"Bearer {key}"}
        reply = await client.post("/v1/chat/completions", json=chat_body(stream=stream), headers=headers)
    assert (reply.status_code, again) == (200, [200])


@pytest.mark.parametrize("stream", [False, True])
async def test_the_process_has_its_size(stream: bool) -> None:
    gateway = GatewayStandIn(rates=Rates(running=2))
    keys = [gateway.add_key("one1"), gateway.add_key("two2"), gateway.add_key("three3")]
    for _ in range(2):
        assert await together(gateway, keys, stream=stream) == [200, 200, 503]


async def test_a_flood_of_one_tenant_leaves_places_for_others() -> None:
    gateway = GatewayStandIn(rates=Rates(running=16))
    flood, other = gateway.add_key("flood"), gateway.add_key("other", tenant="other")
    assert await together(gateway, [flood] * 20) == [200] * 16 + [503] * 4, "a tenant alone has all places"
    assert await together(gateway, [other]) == [200]
    assert await together(gateway, [flood] * 20 + [other] * 2) == [200] * 16 + [503] * 6
    gateway.ticks += 600.1
    assert await together(gateway, [flood] * 20) == [200] * 16 + [503] * 4


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
    request_body = {"model": "baton-mini", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
    async with stand_in.client(key) as client:
        replies = [await client.post("/v1/messages", json=request_body) for _ in range(4)]
        other = await client.post("/v1/chat/completions", json=chat_body())
    assert [reply.status_code for reply in replies] == [200, 200, 200, 429]
    assert [reply.headers["anthropic-ratelimit-requests-remaining"] for reply in replies] == ["2", "1", "0", "0"]
    refused = replies[-1].headers
    assert (refused["anthropic-ratelimit-requests-limit"], refused["anthropic-ratelimit-tokens-limit"]) == ("3", "600")
    reset = datetime.fromisoformat(refused["anthropic-ratelimit-requests-reset"]).timestamp()
    assert stand_in.context.now() < reset <= stand_in.context.now() + 61
    assert not [name for name in other.headers if name.startswith("anthropic")]
