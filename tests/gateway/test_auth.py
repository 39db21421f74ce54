"""Keys: every route with every way to be nobody, in every spelling; and what a store that is down looks like."""

import re
from collections.abc import Iterator
from itertools import product

import httpx
import pytest
from msgspec.structs import replace

from app.errors import ConfigInvalid, StoreUnavailable, Unauthorized
from app.gateway.http.api_keys import adopt, digest, mint, new_secret, pepper_mark
from app.gateway.http.callers import NO_BEARER, NO_KEY, TWO_KEYS
from app.gateway.openapi.docs_page import ASSETS
from tests.harness.stand_ins import (
    APPROVED_RUN,
    CALLER,
    PEPPER,
    PLAN_RUN,
    SECRET,
    GatewayStandIn,
    api_routes,
    chat_body,
)

OPEN = {"/", "/healthz", "/readyz", "/metrics", "/openapi.json", "/docs"}
OPEN |= {f"/docs/{name}" for name in ASSETS}
NEEDS = {
    ("POST", "/v1/chat/completions"): {"runs:write"},
    ("POST", "/v1/completions"): {"runs:write"},
    ("POST", "/v1/messages"): {"runs:write"},
    ("POST", "/v1/messages/count_tokens"): {"runs:write"},
    ("POST", "/v1/responses"): {"runs:write"},
    ("POST", "/v1/responses/compact"): {"runs:write"},
    ("POST", "/v1/responses/input_tokens"): {"runs:write"},
    ("GET", "/v1/responses/{response}"): {"runs:read"},
    ("DELETE", "/v1/responses/{response}"): {"runs:write"},
    ("POST", "/v1/responses/{response}/cancel"): {"runs:write"},
    ("GET", "/v1/responses/{response}/input_items"): {"runs:read"},
    ("POST", "/v1/plans"): {"runs:write"},
    ("GET", "/v1/plans"): {"runs:read"},
    ("GET", "/v1/plans/{plan}"): {"runs:read", "audit:read"},  # the latter for plans of other keys, as this one is
    ("PATCH", "/v1/plans/{plan}"): {"runs:write", "audit:read"},
    ("DELETE", "/v1/plans/{plan}"): {"runs:write", "audit:read"},
    ("POST", "/v1/plans/{plan}/run"): {"runs:write", "audit:read"},
    ("GET", "/v1/disclosures"): {"audit:read"},
    ("GET", "/v1/approvals"): {"runs:read"},
    ("GET", "/v1/approvals/{approval}"): {"runs:read"},
    ("POST", "/v1/approvals/{approval}"): {"approvals:decide"},
    ("GET", "/v1/reports"): {"runs:read"},
    ("GET", "/v1/overview"): {"runs:read"},
    ("GET", "/v1/overview/live"): {"runs:read"},
    ("GET", "/v1/me"): set(),
    ("GET", "/v1/models"): set(),
    ("GET", "/v1/models/{model:path}"): set(),
    ("GET", "/v1/shadows/report"): {"audit:read"},
    ("GET", "/v1/runs"): {"runs:read"},
    ("GET", "/v1/runs/live"): {"runs:read"},
    ("GET", "/v1/runs/{run}"): {"runs:read"},
    ("GET", "/v1/runs/{run}/compare/{other}"): {"runs:read"},
    ("GET", "/v1/runs/{run}/events"): {"runs:read"},
    ("GET", "/v1/runs/{run}/events/stream"): {"runs:read"},
    ("GET", "/v1/runs/{run}/explain"): {"runs:read"},
    ("GET", "/v1/runs/{run}/graph"): {"runs:read"},
    ("GET", "/v1/runs/{run}/timeline"): {"runs:read"},
    ("GET", "/v1/runs/{run}/state"): {"runs:read"},
    ("GET", "/v1/runs/{run}/views"): {"runs:read"},
    ("GET", "/v1/runs/compare"): {"runs:read"},
    ("GET", "/v1/log/checkpoint"): {"audit:read"},
    ("GET", "/v1/log/tile/{tile:path}"): {"audit:read"},
    ("GET", "/v1/log/verify"): {"audit:read"},
    ("GET", "/v1/runs/{run}/proof"): {"runs:read"},
    ("GET", "/v1/runs/{run}/steps/{n}"): {"runs:read", "audit:read"},
    ("GET", "/v1/runs/{run}/stream"): {"runs:read", "audit:read"},  # the latter for runs of other keys, as this one is
    ("POST", "/v1/runs/{run}/cancel"): {"runs:write"},
    ("POST", "/v1/runs/{run}/feedback"): {"runs:write"},
    ("POST", "/v1/runs/{run}/replay"): {"runs:write", "runs:read", "audit:read"},  # as for the stream
    ("DELETE", "/v1/runs/{run}"): {"runs:write"},
}
OTHERS = {
    ("GET", "/v1/responses/{response}"),
    ("POST", "/v1/responses/{response}/cancel"),
    ("GET", "/v1/responses/{response}/input_items"),
}
"""Routes that need `audit:read` as well for a response that another key began, as the one of these tests is. Without it
there is no such response."""
BODIES = {
    "/v1/completions": {"model": "baton-mini", "prompt": "What is 2 + 2?"},
    "/v1/messages": chat_body() | {"max_tokens": 64},
    "/v1/plans/{plan}": {"revision": 1, "edits": [{"op": "change", "step": 0, "subtask": "Think."}]},
    "/v1/plans/{plan}/run": {},
    "/v1/approvals/{approval}": {"decision": "approve", "digest": "0" * 64},
    "/v1/runs/{run}/feedback": {"thumbs": "up"},
    "/v1/runs/{run}/replay": {},
    "/v1/responses": {"model": "baton-mini", "input": "What is 2 + 2?"},
    "/v1/responses/input_tokens": {"model": "baton-mini", "input": "What is 2 + 2?"},
    "/v1/responses/compact": {"model": "baton-mini", "input": "What is 2 + 2?"},
}
"""What a route is sent that takes a body and not a chat."""
EXAMPLES = {"model": "baton-mini", "run": "run_mine", "response": "resp_run_mine", "n": "0", "plan": f"plan_{PLAN_RUN}"}
EXAMPLES |= {"other": "run_mine"}
EXAMPLES["tile"] = "0/000.p/1"
EXAMPLES["approval"] = APPROVED_RUN
TAKES_BODY = ("POST", "PATCH")


def list_closed_routes() -> Iterator[tuple[str, str]]:
    """Every route of the application that is not open to everybody, from the route table."""
    for route in api_routes(GatewayStandIn().app.routes):
        for method in sorted((route.methods or set()) - {"HEAD"}):  # a GET without its body
            if route.path not in OPEN:
                yield method, route.path


ROUTES = sorted(list_closed_routes())
SPELLINGS = {
    "Bearer": lambda key: {"authorization": f"Bearer {key}"},
    "bearer": lambda key: {"Authorization": f"bearer   {key} "},
    "x-api-key": lambda key: {"x-api-key": key},
    "X-Api-Key": lambda key: {"X-Api-Key": f" {key}"},
    "both": lambda key: {"authorization": f"Bearer {key}", "x-api-key": key},
}
STRANGERS = {
    "malformed": "sk-1234567890",
    "no secret": "bt_caller_",
    "empty": "",
    "wrong secret": "bt_caller_" + "t" * 43,
    "half the secret": "bt_caller_" + SECRET[:-1],
    "unknown id": f"bt_nobody_{SECRET}",
    "revoked": f"bt_revoked_{SECRET}",
    "expired": f"bt_expired_{SECRET}",
    "non-ascii": "bt_caller_\xe9" + SECRET,
    "very long": "bt_caller_" + "s" * 4_000,
}


@pytest.fixture
def gateway(gateway: GatewayStandIn) -> GatewayStandIn:
    """With keys that were good once."""
    gateway.add_key()
    gateway.add_key("revoked", revoked_at=1.0)
    gateway.add_key("expired", expires_at=gateway.seconds)
    return gateway


CODES = {"authentication_error": "invalid_api_key", "permission_error": "insufficient_scope"}


def code_of(reply: httpx.Response) -> str:
    """The error's code; Anthropic's shape has a type alone, which means as much."""
    error: dict[str, str] = reply.json()["error"]
    return error["code"] if "code" in error else CODES[error["type"]]


QUERIES = {
    "/v1/runs/compare": f"?a={EXAMPLES['run']}&b={EXAMPLES['run']}",
    "/v1/runs/live": "?seconds=0",
    "/v1/overview/live": "?seconds=0",
}


async def knock(gateway: GatewayStandIn, method: str, path: str, headers: dict[str, str]) -> httpx.Response:
    url = re.sub(r"\{(\w+)(?::path)?\}", lambda match: EXAMPLES[match[1]], path) + QUERIES.get(path, "")
    raw_headers = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    async with gateway.client() as client:
        return await client.request(
            method, url, headers=raw_headers, json=BODIES.get(path, chat_body()) if method in TAKES_BODY else None
        )


def test_the_table_names_every_closed_route() -> None:
    assert sorted(NEEDS) == ROUTES


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_strangers_are_all_alike(gateway: GatewayStandIn, method: str, path: str) -> None:
    for (stranger, key), (spelling, header) in product(STRANGERS.items(), SPELLINGS.items()):
        reply = await knock(gateway, method, path, header(key))
        assert reply.status_code == 401, (stranger, spelling)
        assert reply.json()["error"]["message"] == (Unauthorized().message if key else NO_KEY)
        assert code_of(reply) == "invalid_api_key"
        assert reply.headers["www-authenticate"] == "Bearer"
    nobody = await knock(gateway, method, path, {})
    assert (nobody.status_code, nobody.json()["error"]["message"]) == (401, NO_KEY)
    assert gateway.runs.orders == []


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_a_key_with_the_scopes_gets_in(gateway: GatewayStandIn, method: str, path: str) -> None:
    more = {"audit:read"} if (method, path) in OTHERS else set()
    key = gateway.add_key("exact", scopes=sorted(NEEDS[method, path] | more))
    for spelling, header in SPELLINGS.items():
        assert (await knock(gateway, method, path, header(key))).status_code == 200, spelling


@pytest.mark.parametrize(("method", "path"), [route for route in ROUTES if NEEDS[route]])
async def test_each_scope_is_needed(gateway: GatewayStandIn, method: str, path: str) -> None:
    for missing in NEEDS[method, path]:
        key = gateway.add_key(f"no{missing.replace(':', '')}", scopes=sorted(set(CALLER) - {missing}))
        reply = await knock(gateway, method, path, {"x-api-key": key})
        assert reply.status_code == 403
        assert code_of(reply) == "insufficient_scope"


@pytest.mark.parametrize(("method", "path"), sorted(OTHERS))
async def test_a_response_of_another_key_is_not_there(gateway: GatewayStandIn, method: str, path: str) -> None:
    key = gateway.add_key("sibling", scopes=["runs:read", "runs:write"])
    assert (await knock(gateway, method, path, {"x-api-key": key})).status_code == 404


@pytest.mark.parametrize(("method", "path"), [route for route in ROUTES if "{run}" in route[1]])
async def test_another_tenants_run_is_not_there(gateway: GatewayStandIn, method: str, path: str) -> None:
    key, admin = gateway.add_key("other1", tenant="else"), gateway.add_key("root", tenant="ops", scopes=["admin"])
    for stranger in (key, admin):
        foreign = await knock(gateway, method, path, {"x-api-key": stranger})
        absent = await knock(gateway, method, path.replace("{run}", "run_none"), {"x-api-key": stranger})
        assert foreign.status_code == absent.status_code == 404
        assert foreign.content == absent.content
    everywhere = gateway.add_key("every", tenant="ops", scopes=["admin"], all_tenants=True)
    assert (await knock(gateway, method, path, {"x-api-key": everywhere})).status_code == 200


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ([("x-api-key", "good"), ("x-api-key", "bad")], TWO_KEYS),
        ([("authorization", "Bearer good"), ("x-api-key", "bad")], TWO_KEYS),
        ([("authorization", "Basic good"), ("x-api-key", "good")], NO_BEARER),
        ([("authorization", "Basic good")], NO_BEARER),
        ([("authorization", "good")], NO_BEARER),
    ],
)
async def test_headers_that_disagree_are_nobody(
    gateway: GatewayStandIn, headers: list[tuple[str, str]], message: str
) -> None:
    good = f"bt_caller_{SECRET}"
    raw_headers = [(name, value.replace("good", good)) for name, value in headers]
    async with gateway.client() as client:
        reply = await client.get("/v1/models", headers=raw_headers)
    assert (reply.status_code, reply.json()["error"]["message"]) == (401, message)


@pytest.mark.parametrize(
    "headers",
    [
        [("authorization", ""), ("x-api-key", "good")],
        [("authorization", "Bearer "), ("x-api-key", "good")],
        [("authorization", "Bearer good"), ("x-api-key", " ")],
    ],
)
async def test_a_header_without_a_key_is_as_good_as_none(
    gateway: GatewayStandIn, headers: list[tuple[str, str]]
) -> None:
    raw_headers = [(name, value.replace("good", f"bt_caller_{SECRET}")) for name, value in headers]
    async with gateway.client() as client:
        assert (await client.get("/v1/models", headers=raw_headers)).status_code == 200
        empty = [(name, value) for name, value in raw_headers if SECRET not in value]
        assert (await client.get("/v1/models", headers=empty)).status_code == 401


@pytest.mark.parametrize("fault", [StoreUnavailable(), OSError("no route"), TimeoutError()])
@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_a_store_that_is_down_is_a_503(gateway: GatewayStandIn, method: str, path: str, fault: Exception) -> None:
    gateway.store.fault = fault
    reply = await knock(gateway, method, path, {"x-api-key": f"bt_caller_{SECRET}"})
    assert reply.status_code == 503
    assert reply.headers["retry-after"] == "1"
    gateway.store.fault = None
    assert (await knock(gateway, method, path, {"x-api-key": f"bt_caller_{SECRET}"})).status_code == 200


async def test_lookups_are_remembered_for_five_seconds_and_no_longer(gateway: GatewayStandIn) -> None:
    key = gateway.add_key("fleeting")
    row = gateway.store.key_rows["fleeting"]
    for _ in range(3):
        assert (await knock(gateway, "GET", "/v1/models", {"x-api-key": key})).status_code == 200
    assert gateway.store.lookups == 1
    gateway.store.key_rows["fleeting"] = replace(row, revoked_at=1.0)
    gateway.ticks += 5.0
    assert (await knock(gateway, "GET", "/v1/models", {"x-api-key": key})).status_code == 401
    gateway.store.key_rows["fleeting"] = row
    assert (await knock(gateway, "GET", "/v1/models", {"x-api-key": key})).status_code == 401
    gateway.ticks += 5.0
    assert (await knock(gateway, "GET", "/v1/models", {"x-api-key": key})).status_code == 200
    assert gateway.store.lookups == 3


async def test_a_remembered_key_expires_all_the_same(gateway: GatewayStandIn) -> None:
    key = gateway.add_key("mortal", expires_at=gateway.seconds + 1)
    assert (await knock(gateway, "GET", "/v1/models", {"x-api-key": key})).status_code == 200
    gateway.seconds += 1
    assert (await knock(gateway, "GET", "/v1/models", {"x-api-key": key})).status_code == 401


async def test_the_secret_from_before_a_rotation_works_until_its_time(gateway: GatewayStandIn) -> None:
    old = gateway.add_key("turning")
    row = gateway.store.key_rows["turning"]
    new, hashed = new_secret(row, PEPPER)
    until = gateway.seconds + 1
    gateway.store.key_rows["turning"] = replace(
        row, digest=hashed, previous_digest=row.digest, previous_until=until, expires_at=until + 1
    )

    async def statuses() -> list[int]:
        return [(await knock(gateway, "GET", "/v1/models", {"x-api-key": key})).status_code for key in (old, new)]

    assert await statuses() == [200, 200]
    gateway.seconds += 1
    assert await statuses() == [401, 200]
    gateway.seconds += 1
    assert await statuses() == [401, 401]


async def test_a_revocation_takes_effect_within_five_seconds_however_slow_the_database_is(
    gateway: GatewayStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, find_key = gateway.add_key("slow"), gateway.store.key

    async def slow(public_id: str) -> object:
        row = await find_key(public_id)
        gateway.ticks += 2.0
        return row

    monkeypatch.setattr(gateway.store, "key", slow)
    assert (await knock(gateway, "GET", "/v1/models", {"x-api-key": key})).status_code == 200
    row = gateway.store.key_rows["slow"]
    gateway.store.key_rows["slow"] = replace(row, revoked_at=gateway.seconds)
    gateway.ticks += 2.0
    assert (await knock(gateway, "GET", "/v1/models", {"x-api-key": key})).status_code == 200, "it is remembered"
    gateway.ticks += 1.0
    assert (await knock(gateway, "GET", "/v1/models", {"x-api-key": key})).status_code == 401


async def test_a_key_is_hashed_anew_under_a_new_pepper(gateway: GatewayStandIn) -> None:
    key = gateway.add_key("moving")
    stored = gateway.store.key_rows["moving"]

    async def status() -> int:
        gateway.ticks += 10  # beyond what is cached
        return (await knock(gateway, "GET", "/v1/models", {"x-api-key": key})).status_code

    gateway.peppers = (PEPPER, b"new")
    assert await status() == 200
    assert gateway.store.key_rows["moving"] == stored
    gateway.peppers = (b"new", PEPPER)
    assert await status() == 200
    moved = gateway.store.key_rows["moving"]
    assert moved == replace(stored, digest=digest(SECRET, b"new"), pepper=pepper_mark(b"new"))
    gateway.peppers = (b"new",)
    assert await status() == 200
    gateway.peppers = (PEPPER,)
    assert await status() == 401
    old = gateway.add_key("unused")
    gateway.peppers = (b"new",)
    assert (await knock(gateway, "GET", "/v1/models", {"x-api-key": old})).status_code == 401


async def test_a_key_that_cannot_be_hashed_anew_works_all_the_same(gateway: GatewayStandIn) -> None:
    key = gateway.add_key("moving")

    async def refuse(public_id: str, **_: object) -> bool:
        raise StoreUnavailable

    gateway.store.rehash_key = refuse  # type: ignore[method-assign]
    gateway.peppers = (b"new", PEPPER)
    assert (await knock(gateway, "GET", "/v1/models", {"x-api-key": key})).status_code == 200


def test_a_minted_key_is_stored_without_its_secret() -> None:
    key, row = mint(PEPPER, tenant="acme", name="ci", scopes=["runs:read"], now=5.0)
    marker, public, secret = key.split("_", 2)
    assert (marker, public) == ("bt", row.id)
    assert len(secret) >= 43
    assert row.digest == digest(secret, PEPPER) != digest(secret, b"another pepper")
    assert secret not in repr(row)
    assert (row.tenant, row.created_at, row.expires_at) == ("acme", 5.0, None)
    assert mint(PEPPER, tenant="acme", name="ci", scopes=[], now=5.0)[0] != key


@pytest.mark.parametrize(
    ("key", "scopes"), [("sk-abc", CALLER), ("bt_x_y", CALLER), (f"bt_abcd_{SECRET}", ["runs:delete"])]
)
def test_only_keys_in_form_are_adopted(key: str, scopes: list[str]) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        adopt(key, PEPPER, tenant="t", name="n", scopes=scopes, now=0.0)
    assert key not in str(caught.value)


def test_a_secret_may_hold_underscores() -> None:
    secret = "a_b-c_" * 5
    assert adopt(f"bt_abcd_{secret}", PEPPER, tenant="t", name="n", scopes=[], now=0.0).digest == digest(secret, PEPPER)
