"""One trace from the caller's span through gateway and engine to each provider call, and what is in its spans."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from app.network.tracing import OPERATION_DURATION, TOKEN_USAGE
from app.process.wiring import Runtime
from tests.harness.conversations import look_call, tool_call_reply
from tests.harness.in_process import ask, client_of, plan_text, pool_text, running_service
from tests.harness.spans import (
    CALLER,
    CALLERS_SPAN,
    TRACE_ID,
    Spans,
    attributes,
    has_failed,
    parent_id,
    span_id,
    trace_of,
)
from tests.stubs import Fail, Hang, ProviderStub, Reply

OTHER = {"traceparent": "00-11111111111111111111111111111111-2222222222222222-01"}
UNSAMPLED = {"traceparent": CALLER["traceparent"][:-1] + "0"}
NAMELESS = (
    {"traceparent": "00-0-0-01"},
    {"traceparent": f"00-{'0' * 32}-{CALLERS_SPAN}-01"},
    {"traceparent": "00-" + "a" * 10_000},
    {"traceparent": f"ff-{TRACE_ID}-{CALLERS_SPAN}-01"},
    {"tracestate": "vendor=opaque"},
    {"baggage": "user=me"},
)
"""Headers that are malformed, or are nothing without a `traceparent`."""
SECRET_WORDS = "the whole text of a caller"
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture
def spans(runtime: Runtime) -> Spans:
    """The spans of the service `runtime`."""
    recorded = Spans()
    recorded.record(runtime)
    return recorded


def find_sent_trace(stub: ProviderStub, model: str) -> str | None:
    """The `traceparent` of the latest request to a model."""
    return stub.requests_for(model)[-1].header("traceparent")


async def test_one_request_is_one_trace_from_the_callers_span_to_each_call(
    stub: ProviderStub, client: httpx.AsyncClient, spans: Spans
) -> None:
    stub.always("planner", Reply(chunks=(plan_text((0, "Plan", ["user"]), (1, "Solve", ["user", 0])),)))
    reply = await client.post(
        "/v1/chat/completions",
        json={"model": "baton-ultra", "messages": [{"role": "user", "content": SECRET_WORDS}], "temperature": 0.5},
        headers=CALLER,
    )
    assert reply.status_code == 200
    [run] = await spans.wait_for_named("invoke_workflow")
    [server], [plan] = await spans.wait_for_named("POST"), await spans.wait_for_named("plan")
    planning, *steps = await spans.wait_for_named("chat", 3)
    assert {trace_of(span) for span in spans.ended} == {TRACE_ID}
    assert (server.name, server.kind.name, parent_id(server)) == ("POST /v1/chat/completions", "SERVER", CALLERS_SPAN)
    assert (run.name, run.kind.name, parent_id(run)) == ("invoke_workflow baton-ultra", "INTERNAL", span_id(server))
    assert (plan.name, parent_id(plan)) == ("plan", span_id(run))
    assert (planning.name, planning.kind.name, parent_id(planning)) == ("chat planner", "CLIENT", span_id(plan))
    assert [parent_id(step) for step in steps] == [span_id(run)] * 2
    assert not any(has_failed(span) for span in spans.ended)
    for exported in (planning, *steps):
        received = stub.requests_for(attributes(exported)["gen_ai.request.model"])[-1]
        assert received.header("traceparent") == f"00-{TRACE_ID}-{span_id(exported)}-01"
        assert received.header("tracestate") == "vendor=opaque"
        assert received.header("baggage") is None
    assert SECRET_WORDS not in "".join(span.to_json() for span in spans.ended)


async def test_spans_have_the_attributes_of_the_conventions(
    stub: ProviderStub, client: httpx.AsyncClient, spans: Spans
) -> None:
    stub.script("alpha", Fail(status=503))
    reply = await ask(client, temperature=0.5, max_tokens=77)
    assert reply.status_code == 200
    run = reply.headers["x-baton-run"]
    lost, answered = await spans.wait_for_named("chat", 2)
    [server], [workflow] = await spans.wait_for_named("POST"), await spans.wait_for_named("invoke_workflow")
    assert attributes(server, "http.", "url.", "baton.run") == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "url.path": "/v1/chat/completions",
        "url.scheme": "http",
        "baton.run": run,
    }
    assert attributes(server)["baton.request"] == reply.headers["x-request-id"]
    assert attributes(workflow) == {
        "gen_ai.operation.name": "invoke_workflow",
        "gen_ai.workflow.name": "baton-mini",
        "baton.run": run,
        "baton.tier": "baton-mini",
        "baton.turn": 0,
        "baton.taken_over": False,
        "baton.state": "succeeded",
        "baton.rounds": 1,
        "baton.topology": "single",
        "baton.degraded": False,
        "baton.cost_micro_usd": answered.attributes["baton.cost_micro_usd"],
    }
    port = int(stub.vllm_url.split(":")[2].split("/")[0])
    expected = attributes(answered)
    assert expected["baton.call"].startswith("call_")
    assert expected["gen_ai.response.id"]
    assert expected["gen_ai.usage.input_tokens"] * expected["gen_ai.usage.output_tokens"] > 0
    assert {name: expected[name] for name in expected if not name.startswith(("gen_ai.usage", "gen_ai.response"))} == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "stub",
        "gen_ai.request.model": "alpha",
        "gen_ai.request.stream": True,  # nobody receives it, but its silence is watched
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 77,
        "server.address": "127.0.0.1",
        "server.port": port,
        "baton.call": expected["baton.call"],
        "baton.worker": "alpha",
        "baton.step": 0,
        "baton.attempt": 2,
        "baton.outcome": "ok",
        "baton.cost_micro_usd": expected["baton.cost_micro_usd"],
    }
    assert (expected["gen_ai.response.model"], expected["gen_ai.response.finish_reasons"]) == ("alpha", ("stop",))
    assert [has_failed(lost), has_failed(answered)] == [True, False]
    assert attributes(lost, "error", "http", "baton.attempt", "baton.outcome") == {
        "error.type": "overload",
        "http.response.status_code": 503,
        "baton.attempt": 1,
        "baton.outcome": "error",
    }


async def test_calls_are_measured_by_the_metrics_of_the_conventions(
    stub: ProviderStub, client: httpx.AsyncClient, spans: Spans
) -> None:
    stub.script("alpha", Fail(status=503))
    await ask(client)
    _, answered = await spans.wait_for_named("chat", 2)
    expected = attributes(answered)
    durations = {point.attributes.get("error.type"): point for point in spans.points(OPERATION_DURATION)}
    assert {error: point.count for error, point in durations.items()} == {"overload": 1, None: 1}
    tokens = {point.attributes["gen_ai.token.type"]: point for point in spans.points(TOKEN_USAGE)}
    assert {kind: point.sum for kind, point in tokens.items()} == {
        "input": expected["gen_ai.usage.input_tokens"],
        "output": expected["gen_ai.usage.output_tokens"],
    }
    assert dict(tokens["input"].attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "stub",
        "gen_ai.request.model": "alpha",
        "gen_ai.response.model": "alpha",
        "gen_ai.token.type": "input",
        "server.address": "127.0.0.1",
        "server.port": expected["server.port"],
    }


async def test_a_failed_run_and_its_calls_are_errors(
    stub: ProviderStub, client: httpx.AsyncClient, spans: Spans
) -> None:
    stub.always("*", Fail(status=401))
    reply = await ask(client)
    assert reply.status_code >= 500
    [run], [server] = await spans.wait_for_named("invoke_workflow"), await spans.wait_for_named("POST")
    calls = [span for span in spans.ended if span.name.startswith("chat")]
    assert calls
    assert all(has_failed(call) for call in (run, server, *calls))
    assert {attributes(call)["error.type"] for call in calls} == {"authentication"}
    assert attributes(run)["error.type"] == reply.json()["error"]["code"]
    assert attributes(server)["error.type"] == str(reply.status_code)


async def test_a_caller_who_does_not_sample_is_obeyed(
    stub: ProviderStub, client: httpx.AsyncClient, spans: Spans
) -> None:
    await client.post("/v1/chat/completions", json=body(), headers=UNSAMPLED)
    await ask(client)
    await spans.wait_for_named("invoke_workflow")
    assert TRACE_ID not in {trace_of(span) for span in spans.ended}
    parts = (stub.requests_for("alpha")[0].header("traceparent") or "").split("-")
    assert (parts[1], parts[3]) == (TRACE_ID, "00")


def body(**more: Any) -> dict[str, Any]:
    return {"model": "baton-mini", "messages": [{"role": "user", "content": "What is it?"}], **more}


@pytest.mark.parametrize("second", [CALLER, OTHER], ids=["the same trace", "another trace"])
async def test_a_turn_with_tool_results_continues_the_runs_trace(
    stub: ProviderStub, client: httpx.AsyncClient, spans: Spans, second: dict[str, str]
) -> None:
    stub.script("alpha", tool_call_reply(look_call("a")), Reply(chunks=("Done.",)))
    first = await client.post("/v1/chat/completions", json=body(tools=[LOOK]), headers=CALLER)
    message = first.json()["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "A"}
    messages = [*body()["messages"], message, result]
    reply = await client.post("/v1/chat/completions", json=body(tools=[LOOK], messages=messages), headers=second)
    assert reply.json()["choices"][0]["message"]["content"] == "Done."
    first_turn, resumed = await spans.wait_for_named("invoke_workflow", 2)
    first_request, returned = await spans.wait_for_named("POST", 2)
    calls = await spans.wait_for_named("chat", 2)
    assert {trace_of(call) for call in (first_turn, resumed, *calls)} == {TRACE_ID}
    assert [attributes(span)["baton.turn"] for span in (first_turn, resumed)] == [0, 1]
    assert attributes(first_turn)["baton.state"] == "awaiting_tool"
    assert not has_failed(first_turn)
    assert [parent_id(call) for call in calls] == [span_id(first_turn), span_id(resumed)]
    if second is CALLER:
        assert (parent_id(resumed), resumed.links, returned.links) == (span_id(returned), (), ())
    else:
        assert (parent_id(resumed), trace_of(returned)) == (span_id(first_request), OTHER["traceparent"][3:35])
        assert [f"{link.context.span_id:016x}" for link in resumed.links] == [span_id(returned)]
        assert [f"{link.context.trace_id:032x}" for link in returned.links] == [TRACE_ID]


@pytest.mark.long
async def test_another_engine_goes_on_in_the_same_trace(stub: ProviderStub, tmp_path: Path) -> None:
    """The first engine is gone with its call; the second one takes the run with its sweep."""
    settings, spans = {"BATON_LEASE_SECONDS": "0.6"}, Spans()
    stub.script("planner", Hang())
    async with (
        running_service(tmp_path, pool_text(stub), settings, dispatches=False) as lost,
        client_of(lost) as client,
    ):
        request_body = {"background": True, "input": "What is it?", "model": "baton-ultra"}
        reply = await client.post("/v1/responses", json=request_body, headers=CALLER)
        await stub.wait_for(1, "planner")
        run = reply.headers["x-baton-run"]
    stub.always("planner", Reply(chunks=(plan_text((0, "Solve", ["user"])),)))
    async with running_service(tmp_path, pool_text(stub), settings) as runtime:
        spans.record(runtime)
        [workflow] = await spans.wait_for_named("invoke_workflow")
        calls = [span for span in spans.ended if span.name.startswith("chat")]
    assert attributes(workflow)["baton.taken_over"] is True
    assert attributes(workflow)["baton.run"] == run
    assert (trace_of(workflow), parent_id(workflow)) == (TRACE_ID, CALLERS_SPAN), "the first process exported no spans"
    assert {trace_of(call) for call in calls} == {TRACE_ID}


async def test_without_an_exporter_the_callers_trace_reaches_the_record_and_the_providers(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    reply = await client.post("/v1/chat/completions", json=body(), headers=CALLER)
    assert stub.requests_for("alpha")[0].header("traceparent") == CALLER["traceparent"]
    assert stub.requests_for("alpha")[0].header("tracestate") == CALLER["tracestate"]
    run = reply.headers["x-baton-run"]
    assert (await client.get(f"/v1/runs/{run}")).json()["trace_id"] == TRACE_ID
    await ask(client)
    assert stub.requests_for("alpha")[1].header("traceparent") is None
    runs = (await client.get("/v1/runs", params={"trace_id": TRACE_ID})).json()["data"]
    assert [entry["id"] for entry in runs] == [run]
    assert (await client.get("/v1/runs", params={"trace_id": "x"})).status_code == 400


async def test_headers_that_name_no_span_are_ignored(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    for headers in NAMELESS:
        reply = await client.post("/v1/chat/completions", json=body(), headers=headers)
        assert reply.status_code == 200, headers
        header_names = {name.lower() for name, _ in stub.requests_for("alpha")[-1].headers}
        assert not header_names & {"traceparent", "tracestate", "baggage"}, headers
        run = await client.get(f"/v1/runs/{reply.headers['x-baton-run']}")
        assert run.json()["trace_id"] is None, headers


async def test_a_provider_that_is_not_to_be_told_is_not(stub: ProviderStub, tmp_path: Path) -> None:
    pool = pool_text(stub).replace('format = "openai"', 'format = "openai"\ntraceparent = false', 1)
    async with running_service(tmp_path, pool) as runtime, client_of(runtime) as client:
        await client.post("/v1/chat/completions", json=body(), headers=CALLER)
    assert stub.requests_for("alpha")[0].header("traceparent") is None
