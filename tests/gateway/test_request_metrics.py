"""Metrics of HTTP requests: durations, first words, and refusals by reason."""

from app.engine.delivery.messages import CallerMessage, Mailbox
from app.engine.runs.admission import Order
from app.errors import InvalidRequest, OverQuota, RunOverBudget
from app.gateway.http.connection import MOST_REASONS
from tests.harness.stand_ins import GatewayStandIn, answer_four, chat_body


def value(gateway: GatewayStandIn, name: str, **labels: str) -> float:
    return gateway.telemetry.registry.get_sample_value(name, labels) or 0.0


def refusals(gateway: GatewayStandIn) -> dict[tuple[str, str], float]:
    counts = {}
    for family in gateway.telemetry.registry.collect():
        for sample in family.samples:
            if sample.name == "baton_refusals_total":
                counts[sample.labels["status"], sample.labels["reason"]] = sample.value
    return counts


async def test_refusals_are_counted_by_reason(gateway: GatewayStandIn, key: str) -> None:
    slow = gateway.add_key("slow1", rpm=1)
    short = gateway.add_key("short1", tpm=1)
    async with gateway.client() as client:

        async def post(key: str, text: str = "Hello.") -> int:
            headers = {"authorization": f"Bearer {key}"}
            return (await client.post("/v1/chat/completions", json=chat_body(text), headers=headers)).status_code

        assert [await post(slow), await post(slow)] == [200, 429]
        assert [await post(short), await post(short)] == [200, 429]
        assert await post("bt_nobody_" + "s" * 43) == 401
        await client.get("/nowhere")
        await client.post("/v1/chat/completions", content=b"{", headers={"authorization": f"Bearer {key}"})
        gateway.runs.refusal = RunOverBudget()
        assert await post(key) == 429
        gateway.runs.refusal = OverQuota(limit="waiting_runs", retry_after=1.0)
        assert await post(key) == 429
    assert refusals(gateway) == {
        ("429", "requests"): 1.0,
        ("429", "tokens"): 1.0,
        ("401", "invalid_api_key"): 1.0,
        ("404", "unknown_url"): 1.0,
        ("400", "invalid_json"): 1.0,
        ("429", "run_over_budget"): 1.0,
        ("429", "waiting_runs"): 1.0,
    }


async def test_there_are_only_so_many_reasons(gateway: GatewayStandIn, key: str) -> None:
    async with gateway.client(key) as client:
        for number in range(MOST_REASONS + 5):
            gateway.runs.refusal = InvalidRequest("No.", code=f"code_{number}")
            await client.post("/v1/chat/completions", json=chat_body())
    counts = refusals(gateway)
    assert (len(counts), counts["400", "other"]) == (MOST_REASONS + 1, 5.0)


async def test_durations_are_told_apart_by_route_method_and_status(gateway: GatewayStandIn, key: str) -> None:
    async with gateway.client(key) as client:
        await client.get("/v1/runs/run_none")
        await client.head("/healthz")

        async def play(order: Order, run: str, line: Mailbox[CallerMessage]) -> None:
            gateway.ticks += 2.0
            await answer_four(order, run, line)

        gateway.runs.script = play
        await client.post("/v1/chat/completions", json=chat_body())
        await client.post("/v1/chat/completions", json=chat_body(stream=True))
    name = "baton_request_seconds"
    assert value(gateway, f"{name}_count", route="/v1/runs/{run}", method="read", status="4xx") == 1
    assert value(gateway, f"{name}_count", route="/healthz", method="read", status="2xx") == 1
    chat = {"route": "/v1/chat/completions", "method": "write", "status": "2xx"}
    assert (value(gateway, f"{name}_count", **chat), value(gateway, f"{name}_sum", **chat)) == (2, 4.0)
    assert value(gateway, "baton_stream_first_text_seconds_count", route="/v1/chat/completions") == 1
    assert value(gateway, "baton_stream_first_text_seconds_sum", route="/v1/chat/completions") == 2.0
