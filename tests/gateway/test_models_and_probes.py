"""The model list, and what probes and Prometheus read."""

import json

from anthropic.types import ModelCapabilities, ModelInfo
from msgspec.structs import replace
from openai.types import Model

from app.core.pool.catalog import Price
from app.errors import StoreUnavailable
from app.gateway.runs.models import describe
from tests.harness.stand_ins import CATALOG, GatewayStandIn


async def test_tiers_and_aliases_are_models(gateway: GatewayStandIn, key: str) -> None:
    async with gateway.client(key) as client:
        body = (await client.get("/v1/models")).json()
        alias = (await client.get("/v1/models/mini")).json()
    assert body["object"] == "list"
    assert [Model.model_validate(model, strict=True).id for model in body["data"]] == ["baton-mini", "mini"]
    tier = body["data"][0]["baton"]
    assert (tier["tier"], tier["alias"], tier["pool"]) == ("baton-mini", False, ["alpha", "beta"])
    assert tier["efforts"]["medium"]["usd"] == 2.0
    assert tier["prices"]["output"] == {"min": 2.0, "max": 4.0}
    assert (alias["id"], alias["baton"]["tier"], alias["baton"]["alias"]) == ("mini", "baton-mini", True)


def test_a_worker_of_unknown_price_is_not_taken_for_free() -> None:
    alpha = replace(CATALOG.workers["alpha"], price=Price(), priced=False)
    catalog = replace(CATALOG, workers={**CATALOG.workers, "alpha": alpha})
    prices = describe(catalog, catalog.tiers["baton-mini"], "baton-mini", 0)["baton"]["prices"]
    assert (prices["output"], prices["unpriced"]) == ({"min": 4.0, "max": 4.0}, ["alpha"])


async def test_models_come_in_pages_in_both_shapes(gateway: GatewayStandIn, key: str) -> None:
    async with gateway.client(key) as client:

        async def page(path: str, **headers: str) -> tuple[list[str], object, object, object]:
            body = (await client.get(f"/v1/models{path}", headers=headers)).json()
            return [model["id"] for model in body["data"]], body["first_id"], body["last_id"], body["has_more"]

        for headers in ({}, {"anthropic-version": "2023-06-01"}):
            assert await page("", **headers) == (["baton-mini", "mini"], "baton-mini", "mini", False)
            assert await page("?limit=1&client_version=9", **headers) == (
                ["baton-mini"],
                "baton-mini",
                "baton-mini",
                True,
            )
            assert await page("?limit=1&after_id=baton-mini", **headers) == (["mini"], "mini", "mini", False)
            assert await page("?before_id=mini", **headers) == (["baton-mini"], "baton-mini", "baton-mini", False)
            assert await page("?after_id=mini", **headers) == ([], None, None, False)
        wrong = await client.get("/v1/models?after_id=nothing")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "after_id")


async def test_anthropics_clients_are_told_what_a_tier_can_do(gateway: GatewayStandIn, key: str) -> None:
    async with gateway.client(key) as client:
        model = (await client.get("/v1/models/mini", headers={"anthropic-version": "2023-06-01"})).json()
    info = ModelInfo.model_validate_json(json.dumps(model), strict=True)
    assert (info.max_input_tokens, info.max_tokens) == (128_000, 4_096)
    can = info.capabilities
    assert can is not None
    assert can.effort.low.supported
    assert can.structured_outputs.supported
    assert not can.pdf_input.supported
    assert not can.thinking.supported
    assert set(model["capabilities"]) == set(ModelCapabilities.model_fields)


async def test_a_key_sees_its_own_tiers(gateway: GatewayStandIn) -> None:
    key = gateway.add_key("other1", tiers=frozenset({"baton-ultra"}))
    async with gateway.client(key) as client:
        assert (await client.get("/v1/models")).json()["data"] == []
        reply = await client.get("/v1/models/baton-mini")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


async def test_probes_need_no_key(gateway: GatewayStandIn) -> None:
    async with gateway.client() as client:
        for path in ("/healthz", "/readyz", "/metrics"):
            for method in ("GET", "HEAD"):
                assert (await client.request(method, path)).status_code == 200


async def test_readiness_tells_which_check_failed(gateway: GatewayStandIn) -> None:
    gateway.store.fault = StoreUnavailable()
    async with gateway.client() as client:
        ready, alive = await client.get("/readyz"), await client.get("/healthz")
    assert ready.status_code == 503
    assert ready.json() == {"status": "not_ready", "checks": {"store": "store_unavailable", "queue": "ok"}}
    assert alive.status_code == 200


async def test_requests_are_counted_by_route_and_never_by_path(gateway: GatewayStandIn, key: str) -> None:
    async with gateway.client(key) as client:
        await client.get("/v1/runs/run_mine")
        await client.get("/v1/runs/run_none")
        await client.get("/nowhere/at/all")
        text = (await client.get("/metrics")).text
    assert 'baton_requests_total{route="/v1/runs/{run}",status="200"} 1.0' in text
    assert 'baton_requests_total{route="/v1/runs/{run}",status="404"} 1.0' in text
    assert 'baton_requests_total{route="unmatched",status="404"} 1.0' in text
    assert "run_mine" not in text
    assert "nowhere" not in text
