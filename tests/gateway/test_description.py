"""The API's description of itself: complete, without what is not public, and true of real replies."""

from typing import Any

import httpx
from jsonschema import Draft202012Validator

from app.gateway.openapi.description import OPERATIONS
from app.gateway.wire.parameters import COMPLETIONS, PARAMETERS
from tests.harness.in_process import plan
from tests.harness.stand_ins import House, api_routes
from tests.stubs import Fail, ProviderStub, Reply

CHAIN = plan(("alpha", "Think", ["user"]), ("beta", "Answer", ["user", 0]))
ASK: dict[str, Any] = {"model": "baton-mini", "messages": [{"role": "user", "content": "What is 2 + 2?"}]}


async def described(client: httpx.AsyncClient) -> dict[str, Any]:
    reply = await client.get("/openapi.json", headers={"authorization": ""})
    assert reply.status_code == 200
    document: dict[str, Any] = reply.json()
    return document


async def test_every_public_route_is_described(gateway: House) -> None:
    async with gateway.client() as client:
        document = await described(client)
    assert document["openapi"] == "3.1.0"
    found = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert found == set(OPERATIONS), "name the operation in app/gateway/openapi/description.py"
    routes = [*api_routes(list(gateway.app.routes))]
    served = {(m, r.path.replace(":path}", "}")) for r in routes for m in r.methods or () if m != "HEAD"}
    assert served == found
    assert not [path for path in document["paths"] if "admin" in path]


async def test_requests_are_described_by_the_tables_of_parameters(gateway: House) -> None:
    async with gateway.client() as client:
        schemas = (await described(client))["components"]["schemas"]
    assert set(schemas["ChatRequest"]["properties"]) == set(PARAMETERS)
    assert set(schemas["CompletionRequest"]["properties"]) == set(COMPLETIONS)
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)


async def test_real_replies_are_as_described(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    document = await described(client)
    asked = {"logprobs": True, "top_logprobs": 1, "baton": {"plan": CHAIN}}
    reply = await client.post("/v1/chat/completions", json=ASK | asked)
    check(document, reply, "/v1/chat/completions", "post")
    run = reply.json()["baton"]["run"]
    stub.script("alpha", Reply(chunks=("4",), usage=None))
    check(
        document,
        await client.post("/v1/completions", json={"model": "baton-mini", "prompt": "2 + 2 ="}),
        "/v1/completions",
        "post",
    )
    stub.always("planner", Reply(chunks=("no plan",)))
    await client.post("/v1/chat/completions", json=ASK | {"model": "baton-ultra"})
    for worker in ("alpha", "beta", "gamma"):
        stub.always(worker, Fail(status=400))
    check(document, await client.post("/v1/chat/completions", json=ASK), "/v1/chat/completions", "post")
    for path in ("/v1/models", "/v1/runs", "/healthz", "/readyz", "/metrics"):
        check(document, await client.get(path), path)
    check(document, await client.get("/v1/models/baton-mini"), "/v1/models/{model}")
    for one in (await client.get("/v1/runs")).json()["data"]:
        check(document, await client.get(f"/v1/runs/{one['id']}"), "/v1/runs/{run}")
    check(document, await client.get(f"/v1/runs/{run}/events"), "/v1/runs/{run}/events")
    check(document, await client.get(f"/v1/runs/{run}/steps/1"), "/v1/runs/{run}/steps/{n}")
    check(document, await client.get("/v1/runs/none"), "/v1/runs/{run}")
    check(document, await client.get(f"/v1/runs/{run}/stream"), "/v1/runs/{run}/stream")
    check(document, await client.post(f"/v1/runs/{run}/cancel"), "/v1/runs/{run}/cancel", "post")


def check(document: dict[str, Any], reply: httpx.Response, path: str, method: str = "get") -> None:
    """Fails unless the reply's status, medium and body are described."""
    found = document["paths"][path][method]["responses"].get(str(reply.status_code))
    assert found is not None, (path, reply.status_code, reply.text[:300])
    medium = reply.headers["content-type"].partition(";")[0]
    schema = found["content"][medium]["schema"]
    if medium == "application/json":
        whole = {"components": document["components"], **schema}
        faults = [
            f"{error.json_path}: {error.message[:200]}"
            for error in Draft202012Validator(whole).iter_errors(reply.json())
        ]
        assert not faults, (path, faults)
