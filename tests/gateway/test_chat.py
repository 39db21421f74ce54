"""Chat completions: replies and streams byte for byte, against OpenAI's own types."""

import asyncio
from typing import Any

import httpx
import orjson
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from app.core.pool.catalog import MILLION
from app.engine.delivery.messages import AnswerPart, CallerMessage, Mailbox, StepEvent
from app.engine.runs.admission import Order
from app.errors import Overloaded, PlanRejected, RunFailed, StoreUnavailable
from app.gateway.http.context import Rates
from tests.harness.stand_ins import GatewayStandIn, answer_four, chat_body, turn_end
from tests.harness.waiting import until

GAP_SECONDS = 0.001
"""The pause between two pieces of an answer that nobody reads."""


async def post(gateway: GatewayStandIn, key: str, body: dict[str, Any]) -> httpx.Response:
    async with gateway.client(key) as client:
        return await client.post("/v1/chat/completions", json=body)


def frames(reply: httpx.Response) -> list[str]:
    assert reply.text.endswith("\n\n")
    return reply.text[:-2].split("\n\n")


def chunks(reply: httpx.Response) -> list[dict[str, Any]]:
    data = [frame.partition("data: ")[2] for frame in frames(reply) if "data: {" in frame]
    return [orjson.loads(line) for line in data]


async def test_a_reply_is_a_chat_completion(gateway: GatewayStandIn, key: str) -> None:
    reply = await post(gateway, key, chat_body())
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-baton-run"] == "run_0"
    assert reply.headers["x-request-id"].startswith("req_")
    body = reply.json()
    ChatCompletion.model_validate(body, strict=True)
    assert body["id"] == "chatcmpl-run_0"
    assert body["model"] == "baton-mini"
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Four.", "refusal": None}
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    assert body["baton"]["run"] == "run_0"
    assert body["baton"]["rehearsal"] is True
    assert body["baton"]["audit"] == "/v1/runs/run_0"
    assert body["baton"]["topology"] == "chain"
    assert body["baton"]["cost_usd"] == 100 / MILLION
    assert [step["worker"] for step in body["baton"]["steps"]] == ["alpha", "alpha"]


async def test_usage_keeps_both_identities(gateway: GatewayStandIn, key: str) -> None:
    body = (await post(gateway, key, chat_body())).json()
    usage, total = body["usage"], body["baton"]["usage"]
    rest_in = usage["prompt_tokens_details"]["orchestration_input_tokens"]
    rest_cached = usage["prompt_tokens_details"]["orchestration_input_cached_tokens"]
    rest_out = usage["completion_tokens_details"]["orchestration_output_tokens"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] == 10 + 7
    assert usage["prompt_tokens"] + rest_in == total["input"] == 40
    assert usage["completion_tokens"] + rest_out == total["output"] == 13
    assert usage["prompt_tokens_details"]["cached_tokens"] + rest_cached == total["cached"] == 4
    assert total["estimated"] is False


async def test_a_stream_is_exactly_these_frames(gateway: GatewayStandIn, key: str) -> None:
    reply = await post(gateway, key, chat_body(stream=True))
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["cache-control"] == "no-cache, no-transform"
    assert reply.headers["x-accel-buffering"] == "no"
    assert reply.headers["x-baton-run"] == "run_0"
    head = (
        '\ndata: {"id":"chatcmpl-run_0","object":"chat.completion.chunk","created":1000000001,"model":"baton-mini",'
        '"service_tier":"default","system_fingerprint":null,"choices":[{"index":0,"delta":'
    )
    tail = ',"logprobs":null,"finish_reason":null}]}'
    stream_frames = frames(reply)
    assert stream_frames[:4] == [
        "id: 0" + head + '{"role":"assistant","content":"","refusal":null}' + tail,
        "id: 2" + head + '{"content":"Fo"}' + tail,
        "id: 4" + head + '{"content":"ur"}' + tail,
        "id: 5" + head + '{"content":"."}' + tail,
    ]
    assert stream_frames[4].startswith(
        "id: 6" + head + '{},"logprobs":null,"finish_reason":"stop"}],"baton":{"run":"run_0",'
    )
    assert stream_frames[5:] == ["id: 8\ndata: [DONE]"]
    for chunk in chunks(reply):
        ChatCompletionChunk.model_validate(chunk, strict=True)
        assert "usage" not in chunk


async def test_usage_comes_in_a_last_chunk_if_asked_for(gateway: GatewayStandIn, key: str) -> None:
    reply = await post(gateway, key, chat_body(stream=True, stream_options={"include_usage": True}))
    *others, last = chunks(reply)
    assert all(chunk["usage"] is None for chunk in others)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 17
    ChatCompletionChunk.model_validate(last, strict=True)
    assert frames(reply)[-1] == "id: 8\ndata: [DONE]"


async def test_steps_are_told_on_empty_deltas(gateway: GatewayStandIn, key: str) -> None:
    async def script(order: Order, run: str, line: Mailbox[CallerMessage]) -> None:
        assert order.stream_steps
        line.put(StepEvent("step.done", {"n": 0, "chars": 3}))
        line.put(AnswerPart("Four."))
        line.put(turn_end(run))

    gateway.runs.script = script
    reply = await post(gateway, key, chat_body(stream=True, baton={"stream_steps": True}))
    noted = chunks(reply)[1]
    ChatCompletionChunk.model_validate(noted, strict=True)
    assert noted["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}]
    assert noted["baton"] == {"event": "step.done", "n": 0, "chars": 3}


async def test_a_failed_run_is_an_error_reply(gateway: GatewayStandIn, key: str) -> None:
    async def script(_order: Order, run: str, line: Mailbox[CallerMessage]) -> None:
        line.put(turn_end(run, "", RunFailed(code="worker_refused")))

    gateway.runs.script = script
    reply = await post(gateway, key, chat_body())
    assert reply.status_code == 502
    assert reply.json()["error"]["code"] == "worker_refused"
    assert reply.headers["x-baton-run"] == "run_0"


async def test_an_error_after_the_first_byte_is_an_event_and_no_done(gateway: GatewayStandIn, key: str) -> None:
    async def script(_order: Order, run: str, line: Mailbox[CallerMessage]) -> None:
        line.put(AnswerPart("Fo"))
        line.put(turn_end(run, "", RunFailed()))

    gateway.runs.script = script
    reply = await post(gateway, key, chat_body(stream=True))
    assert reply.status_code == 200
    last = frames(reply)[-1]
    assert orjson.loads(last.removeprefix("data: "))["error"]["code"] == "run_failed"
    assert "[DONE]" not in reply.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [
        (Overloaded(retry_after=2.4), 503, "overloaded"),
        (StoreUnavailable(), 503, "store_unavailable"),
        (PlanRejected(["step 0: worker is not an eligible worker", "the plan has no steps"]), 400, "plan_rejected"),
    ],
)
async def test_what_is_refused_before_admission_has_its_status(
    gateway: GatewayStandIn, key: str, stream: bool, refusal: Exception, status: int, code: str
) -> None:
    gateway.runs.refusal = refusal  # type: ignore[assignment]
    reply = await post(gateway, key, chat_body(stream=stream))
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
    assert reply.headers.get("retry-after") == {"overloaded": "3", "store_unavailable": "1"}.get(code)
    if status == 400:
        assert reply.json()["error"]["param"] == "baton.plan"
        assert "step 0" in reply.text
        assert "no steps" in reply.text


async def test_a_silent_stream_is_kept_alive_by_comments() -> None:
    gateway = GatewayStandIn(ping=0.05)
    key = gateway.add_key()

    speaks, ends = asyncio.Event(), asyncio.Event()

    async def script(_order: Order, run: str, line: Mailbox[CallerMessage]) -> None:
        await speaks.wait()
        line.put(AnswerPart("Four."))
        await ends.wait()
        line.put(turn_end(run))

    gateway.runs.script = script
    lines: list[str] = []
    async with (
        gateway.serve() as url,
        httpx.AsyncClient(base_url=url, headers={"x-api-key": key}) as client,
        client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)) as reply,
    ):
        async for line in reply.aiter_lines():
            if line:
                lines.append(line)
            if lines.count(": ping") == 2:
                speaks.set()
            if '"Four."' in "".join(lines[-2:-1]) and line == ": ping":
                ends.set()
    [answer_line] = [place for place, line in enumerate(lines) if '"Four."' in line]
    assert lines[:answer_line].count(": ping") == 2
    assert lines[answer_line + 1] == ": ping"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_its_run(gateway: GatewayStandIn, key: str, stream: bool) -> None:
    async def script(_order: Order, _run: str, _line: Mailbox[CallerMessage]) -> None:
        await asyncio.Event().wait()

    gateway.runs.script = script
    async with gateway.serve() as url:
        async with httpx.AsyncClient(base_url=url, headers={"x-api-key": key}) as client:
            asking = asyncio.create_task(client.post("/v1/chat/completions", json=chat_body(stream=stream)))
            await until(lambda: gateway.runs.orders)
            asking.cancel()
        await gateway.runs.stopped.wait()
    assert gateway.runs.cancelled[0] == ("run_0", "client")


async def test_the_first_frame_is_not_held_back(gateway: GatewayStandIn, key: str) -> None:
    ends = asyncio.Event()

    async def script(_order: Order, run: str, line: Mailbox[CallerMessage]) -> None:
        await ends.wait()
        line.put(turn_end(run))

    gateway.runs.script = script
    async with (
        gateway.serve() as url,
        httpx.AsyncClient(base_url=url, headers={"x-api-key": key}) as client,
        client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)) as reply,
    ):
        assert '"role":"assistant"' in await anext(reply.aiter_text())
        ends.set()


async def test_a_run_that_never_ends_is_given_up_on() -> None:
    gateway = GatewayStandIn(grace=0.0)
    key = gateway.add_key()

    async def script(_order: Order, _run: str, _line: Mailbox[CallerMessage]) -> None:
        await asyncio.Event().wait()

    gateway.runs.script = script
    body = chat_body(baton={"budget": {"seconds": 0.2}})
    assert (await post(gateway, key, body)).status_code == 504
    reply = await post(gateway, key, body | {"stream": True})
    assert '"error"' in frames(reply)[-1]
    assert [by for _, by in gateway.runs.cancelled] == ["client", "client"]


@pytest.mark.parametrize("name", ["José", "ann@example.com", "sales.agent", "営業", "a" * 64])
async def test_the_name_of_a_message_is_what_it_may_be_at_openai(gateway: GatewayStandIn, key: str, name: str) -> None:
    body = chat_body(messages=[{"role": "user", "content": "Hello", "name": name}])
    assert (await post(gateway, key, body)).status_code == 200
    [order] = gateway.runs.orders
    assert order.task.messages[0].name == name


@pytest.mark.parametrize("name", ["", "a b", "a\u3000b", "a<b", "a|b", "a\\b", "a/b", "a>b", "a" * 65, "a\n"])
async def test_other_names_are_refused(gateway: GatewayStandIn, key: str, name: str) -> None:
    reply = await post(gateway, key, chat_body(messages=[{"role": "user", "content": "Hello", "name": name}]))
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages[0].name")


@pytest.mark.parametrize("content", [None, ""])
async def test_a_refusal_comes_back_beside_empty_content(
    gateway: GatewayStandIn, key: str, content: str | None
) -> None:
    """An empty text is what clients put together from a stream, whose first chunk has one."""
    refused = {"role": "assistant", "content": content, "refusal": "No."}
    messages = [{"role": "user", "content": "Hello"}, refused, {"role": "user", "content": "Why?"}]
    assert (await post(gateway, key, chat_body(messages=messages))).status_code == 200
    [order] = gateway.runs.orders
    assert order.task.messages[1].text == "No."


async def test_everything_of_a_request_reaches_the_order(gateway: GatewayStandIn, key: str) -> None:
    body = {
        "model": "mini",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "developer", "content": [{"type": "text", "text": "Really."}]},
            {"role": "user", "content": "Hello", "name": "ann"},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "See"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}},
                ],
            },
        ],
        "temperature": 1,
        "top_p": 0.5,
        "max_completion_tokens": 7,
        "stop": "END",
        "seed": -5,
        "presence_penalty": 0.5,
        "frequency_penalty": None,
        "user": "u",
        "metadata": {"a": "b"},
        "reasoning_effort": "xhigh",
        "store": True,
        "n": 1,
        "baton": {
            "budget": {"usd": 0.000123, "seconds": 12, "steps": 2},
            "pool": {"allow": ["alpha"], "deny": ["beta"], "pin": "alpha"},
            "labels": ["phi"],
            "plan": {"steps": []},
        },
    }
    assert (await post(gateway, key, body)).status_code == 200
    [order] = gateway.runs.orders
    roles = [message.role for message in order.task.messages]
    assert roles == ["system", "developer", "user", "assistant", "user"]
    assert order.task.messages[3].text == "No."
    assert order.task.has_images
    sampling = order.task.sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.stop, sampling.seed) == (1, 7, ("END",), -5)
    assert (order.model, order.tier.name, order.effort) == ("mini", "baton-mini", "high")
    assert (order.limits.usd, order.limits.seconds, order.limits.steps) == (123, 12, 2)
    assert order.labels == {"phi"}
    assert (order.overrides.pin, order.plan) == ("alpha", {"steps": []})
    assert (order.tenant, order.key, order.ignored) == ("acme", "caller", ("n", "store"))


async def test_a_key_narrows_what_its_requests_may_do(gateway: GatewayStandIn) -> None:
    key = gateway.add_key("tight", max_usd=50, labels=frozenset({"secret"}))
    assert (await post(gateway, key, chat_body(baton={"budget": {"usd": 1.0}, "labels": ["phi"]}))).status_code == 200
    [order] = gateway.runs.orders
    assert order.limits.usd == 50
    assert order.labels == {"secret", "phi"}
    other = gateway.add_key("elsewhere", tiers=frozenset({"baton-ultra"}))
    assert (await post(gateway, other, chat_body())).json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("effort", "got"), [(None, "medium"), ("none", "low"), ("minimal", "low"), ("high", "high"), ("max", "high")]
)
async def test_effort_goes_to_the_nearest_level(
    gateway: GatewayStandIn, key: str, effort: str | None, got: str
) -> None:
    await post(gateway, key, chat_body(reasoning_effort=effort))
    assert gateway.runs.orders[0].effort == got


async def test_a_client_that_reads_nothing_holds_no_place() -> None:
    gateway = GatewayStandIn(grace=0.0, rates=Rates(running=1))
    key = gateway.add_key()

    async def script(_order: Order, _run: str, line: Mailbox[CallerMessage]) -> None:
        while True:
            line.put(AnswerPart("x" * 100_000))
            await asyncio.sleep(GAP_SECONDS)

    gateway.runs.script = script
    async with gateway.serve() as url:
        host, port = url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1)
        body = orjson.dumps(chat_body(stream=True, baton={"budget": {"seconds": 0.5}}))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await gateway.runs.stopped.wait()
        gateway.runs.script = answer_four
        assert (await post(gateway, key, chat_body())).status_code == 200
        writer.close()
