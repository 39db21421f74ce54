"""The API's description of itself: complete, without what is not public, and true of real replies."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema_rs
import pytest
from jsonschema import Draft202012Validator

from app.core.pool.catalog import LIMITS, Limit
from app.gateway.wire.parameters import COMPLETIONS, PARAMETERS, RESPONSES
from tests.harness.in_process import plan
from tests.harness.stand_ins import GatewayStandIn, api_routes
from tests.stubs import Fail, ProviderStub, Reply, ToolCall

CHAIN = plan(("alpha", "Think", ["user"]), ("beta", "Answer", ["user", 0]))
ASK: dict[str, Any] = {"model": "baton-mini", "messages": [{"role": "user", "content": "What is 2 + 2?"}]}


@pytest.mark.long
def test_every_public_route_is_described(gateway: GatewayStandIn, document: dict[str, Any]) -> None:
    assert document["openapi"] == "3.1.0"
    described_routes = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    routes = [route for route in api_routes(list(gateway.app.routes)) if route.include_in_schema]
    served = {(m, r.path.replace(":path}", "}")) for r in routes for m in r.methods or ()}
    assert served == described_routes
    assert len(described_routes) > 20
    assert not [path for path in document["paths"] if "admin" in path]


@pytest.mark.long
async def test_the_root_names_the_api(gateway: GatewayStandIn) -> None:
    async with gateway.client() as client:
        reply = await client.get("/")
        body = reply.json()
        assert (reply.status_code, body["name"], reply.headers["vary"]) == (200, "Baton", "Accept")
        for path in (body["docs"], body["openapi"]):
            assert (await client.get(path)).status_code == 200


def test_every_operation_is_named_explained_and_typed(document: dict[str, Any]) -> None:
    operations_of_document = [*operations(document)]
    assert len({operation["operationId"] for _, operation in operations_of_document}) == len(operations_of_document)
    for path, operation in operations_of_document:
        assert operation["tags"], path
        assert operation["summary"].endswith("."), path
        assert operation["description"].endswith("."), path
        assert all(parameter.get("description") for parameter in operation.get("parameters", ())), path
        assert "422" not in operation["responses"], path
        assert operation["responses"]["200"]["headers"]["x-request-id"], path
        is_public = not path.startswith("/v1/")
        assert bool(operation.get("security")) != is_public, path
        for medium, content in operation["responses"]["200"]["content"].items():
            if medium == "application/json" and path != "/openapi.json":
                assert content["schema"], path
            if medium == "text/event-stream":
                assert data_of_events(content)["$ref"], path


def test_whatever_may_be_absent_of_a_body_may_be_null(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    bodies = [name for name in schemas if name.endswith("Request")]
    assert len(bodies) > 10
    for name in bodies:
        validator = Draft202012Validator({"components": document["components"], **schemas[name]})
        for field in schemas[name].get("properties", {}):
            is_refused = any(error.path for error in validator.iter_errors({field: None}))
            assert is_refused == (field in schemas[name].get("required", ())), (name, field)


def data_of_events(content: dict[str, Any]) -> dict[str, Any]:
    """The schema of the JSON that a stream's events bring."""
    data = content["itemSchema"]["properties"]["data"]
    schema: dict[str, Any] = data.get("anyOf", [data])[0]["contentSchema"]
    return schema


def test_scopes_are_described(document: dict[str, Any]) -> None:
    paths = document["paths"]
    assert paths["/v1/chat/completions"]["post"]["security"] == [{"bearer": ["runs:write"]}, {"header": ["runs:write"]}]
    assert paths["/v1/runs/{run}/steps/{n}"]["get"]["security"][0] == {"bearer": ["runs:read", "audit:read"]}
    assert paths["/v1/models"]["get"]["security"][0] == {"bearer": []}


def operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each operation with its path."""
    for path, methods in document["paths"].items():
        for operation in methods.values():
            yield path, operation


def test_requests_are_described_by_the_tables_of_parameters(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert set(schemas["ChatRequest"]["properties"]) == set(PARAMETERS)
    assert set(schemas["CompletionRequest"]["properties"]) == set(COMPLETIONS)
    assert set(schemas["ResponsesRequest"]["properties"]) == set(RESPONSES)
    for schema in schemas.values():
        jsonschema_rs.meta.validate(schema)


@pytest.mark.parametrize("limit", LIMITS.values(), ids=lambda limit: limit.name)
def test_each_limit_is_described_for_tiers_and_budgets(limit: Limit, document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert schemas["TierLimits"]["properties"][limit.name]["description"] == limit.about
    assert limit.name in schemas["TierLimits"]["required"]
    budgets = [schema["properties"] for name, schema in schemas.items() if name.endswith(".Budget")]
    assert len(budgets) >= 3, "one for each wire format"
    assert all((limit.name in budget) == (limit.budget is not None) for budget in budgets)


@pytest.mark.long
async def test_real_replies_are_as_described(
    stub: ProviderStub, client: httpx.AsyncClient, document: dict[str, Any]
) -> None:
    options = {"logprobs": True, "top_logprobs": 1, "baton": {"plan": CHAIN}}
    reply = await client.post("/v1/chat/completions", json=ASK | options)
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
    for path in ("/", "/v1/models", "/v1/runs", "/healthz", "/readyz", "/metrics"):
        check(document, await client.get(path), path)
    check(document, await client.get("/v1/models/baton-mini"), "/v1/models/{model}")
    for listed_run in (await client.get("/v1/runs")).json()["data"]:
        check(document, await client.get(f"/v1/runs/{listed_run['id']}"), "/v1/runs/{run}")
        for view in ("explain", "graph", "timeline", "state", "views", "views?step=0"):
            path = f"/v1/runs/{{run}}/{view.partition('?')[0]}"
            check(document, await client.get(f"/v1/runs/{listed_run['id']}/{view}"), path)
    pair = {"a": run, "b": listed_run["id"]}
    check(document, await client.get("/v1/runs/compare", params=pair), "/v1/runs/compare")
    check(document, await client.get(f"/v1/runs/{run}/events"), "/v1/runs/{run}/events")
    check(document, await client.get(f"/v1/runs/{run}/steps/1"), "/v1/runs/{run}/steps/{n}")
    check(document, await client.get("/v1/runs/none"), "/v1/runs/{run}")
    check(document, await client.get(f"/v1/runs/{run}/stream"), "/v1/runs/{run}/stream")
    check(document, await client.post(f"/v1/runs/{run}/cancel"), "/v1/runs/{run}/cancel", "post")
    second_reply = await client.post("/v1/plans", json=ASK)
    check(document, second_reply, "/v1/plans", "post")
    path = f"/v1/plans/{second_reply.json()['id']}"
    edit = {"revision": 1, "edits": [{"op": "change", "step": 0, "subtask": "Think."}]}
    check(document, await client.patch(path, json=edit), "/v1/plans/{plan}", "patch")
    check(document, await client.get("/v1/plans"), "/v1/plans")
    check(document, await client.post(f"{path}/run"), "/v1/plans/{plan}/run", "post")
    check(document, await client.delete(path), "/v1/plans/{plan}", "delete")


@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
async def test_a_plan_of_each_format_and_its_answer_are_as_described(
    client: httpx.AsyncClient, document: dict[str, Any], api: str
) -> None:
    path = {"chat": "/v1/chat/completions"}.get(api, f"/v1/{api}")
    request_body = {name: value for name, value in INPUTS[path].items() if name != "stream_options"}
    body_schema = document["paths"]["/v1/plans"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert Draft202012Validator({"components": document["components"], **body_schema}).is_valid(request_body)
    planned = await client.post("/v1/plans", json=request_body, params={"api": api})
    check(document, planned, "/v1/plans", "post")
    path = f"/v1/plans/{planned.json()['id']}/run"
    check(document, await client.post(path), "/v1/plans/{plan}/run", "post")
    check_events(document, await client.post(path, json={"stream": True}), "/v1/plans/{plan}/run")


async def test_real_responses_are_as_described(
    stub: ProviderStub, client: httpx.AsyncClient, document: dict[str, Any]
) -> None:
    path, request_body = "/v1/responses", {"model": "baton-mini", "baton": {"plan": CHAIN}}
    reply = await client.post(path, json=request_body | {"input": "What is 2 + 2?"})
    check(document, reply, path, "post")
    response = reply.json()["id"]
    follow = {"model": "baton-mini", "input": "And 3 + 3?", "previous_response_id": response}
    check(document, await client.post(path, json=follow | {"background": True}), path, "post")
    check(document, await client.post(f"{path}/input_tokens", json=follow), f"{path}/input_tokens", "post")
    check(document, await client.post(f"{path}/compact", json=follow), f"{path}/compact", "post")
    check(document, await client.get(f"{path}/{response}"), f"{path}/{{response}}")
    check(document, await client.get(f"{path}/{response}/input_items"), f"{path}/{{response}}/input_items")
    check(document, await client.post(f"{path}/{response}/cancel"), f"{path}/{{response}}/cancel", "post")
    check(document, await client.delete(f"{path}/{response}"), f"{path}/{{response}}", "delete")
    check(document, await client.get(f"{path}/{response}"), f"{path}/{{response}}")


async def test_real_messages_are_as_described(
    stub: ProviderStub, client: httpx.AsyncClient, document: dict[str, Any]
) -> None:
    check(document, await client.post("/v1/messages", json=ASK | {"max_tokens": 64}), "/v1/messages", "post")
    check(document, await client.post("/v1/messages", json=ASK), "/v1/messages", "post")
    path = "/v1/messages/count_tokens"
    check(document, await client.post(path, json=ASK), path, "post")
    headers = {"anthropic-version": "2023-06-01"}
    check(document, await client.get("/v1/models", headers=headers), "/v1/models")
    check(document, await client.get("/v1/models/baton-mini", headers=headers), "/v1/models/{model}")


INPUTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": ASK | {"stream_options": {"include_usage": True}},
    "/v1/completions": {"model": "baton-mini", "prompt": "2 + 2 ="},
    "/v1/messages": ASK | {"max_tokens": 64},
    "/v1/responses": {"model": "baton-mini", "input": "What is 2 + 2?"},
}
LOOK = {"type": "object", "properties": {"place": {"type": "string"}}}
TOOLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"type": "function", "function": {"name": "look", "parameters": LOOK}},
    "/v1/messages": {"name": "look", "input_schema": LOOK},
    "/v1/responses": {"type": "function", "name": "look", "parameters": LOOK},
}


@pytest.mark.parametrize("path", INPUTS)
@pytest.mark.parametrize("end", ["answer", "failure"])
async def test_the_events_of_real_streams_are_as_described(
    stub: ProviderStub, client: httpx.AsyncClient, document: dict[str, Any], path: str, end: str
) -> None:
    if end == "failure":
        for worker in ("alpha", "beta", "gamma"):
            stub.always(worker, Fail(status=400))
    extension = {"stream_steps": True, **({"plan": CHAIN} if end == "answer" else {})}
    reply = await client.post(path, json=INPUTS[path] | {"stream": True, "baton": extension})
    check_events(document, reply, path)


@pytest.mark.parametrize("path", TOOLS)
@pytest.mark.long
async def test_the_events_of_streamed_tool_calls_are_as_described(
    stub: ProviderStub, client: httpx.AsyncClient, document: dict[str, Any], path: str
) -> None:
    stub.script("alpha", Reply(chunks=(), tool_calls=(ToolCall("look", '{"place": "here"}'),)))
    request_body = INPUTS[path] | {"stream": True, "tools": [TOOLS[path]], "baton": {"pool": {"pin": "alpha"}}}
    reply = await client.post(path, json=request_body)
    assert "look" in reply.text
    check_events(document, reply, path)


def closed_components(document: dict[str, Any]) -> dict[str, Any]:
    """Return the components of a document, whose objects have no fields but those that are described."""
    schemas = {}
    for name, schema in document["components"]["schemas"].items():
        schemas[name] = {"additionalProperties": False, **schema} if "properties" in schema else schema
    return {"schemas": schemas}


def check_events(document: dict[str, Any], reply: httpx.Response, path: str) -> None:
    """Fails unless each event's data has the described type."""
    assert reply.status_code == 200, reply.text
    content = document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
    validator = Draft202012Validator({"components": closed_components(document), **data_of_events(content)})
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    assert len(events) > 1
    for event in events:
        assert not [error.message[:300] for error in validator.iter_errors(event)], event


def check(document: dict[str, Any], reply: httpx.Response, path: str, method: str = "get") -> None:
    """Fails unless the reply's status, medium and body are described."""
    response_schema = document["paths"][path][method]["responses"].get(str(reply.status_code))
    assert response_schema is not None, (path, reply.status_code, reply.text[:300])
    medium = reply.headers["content-type"].partition(";")[0]
    schema = response_schema["content"][medium].get("schema", {})
    if medium == "application/json":
        whole = {"components": closed_components(document), **schema}
        faults = [
            f"{error.json_path}: {error.message[:200]}"
            for error in Draft202012Validator(whole).iter_errors(reply.json())
        ]
        assert not faults, (path, faults)
