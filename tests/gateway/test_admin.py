"""The admin API: keys, tenants, budgets, policy, conductors, and who changed them."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from msgspec.structs import asdict, replace

from app.core.pool.catalog import Limits
from app.core.pool.conductor_versions import Change
from app.core.roles import KEY_FORMAT
from app.core.run.kinds import Kind
from app.core.transparency.notes import Signer
from app.core.transparency.version_signatures import TrustedSigners
from app.errors import StoreUnavailable
from app.gateway.administration import create_admin
from app.gateway.http.api_keys import mint
from app.store.protocol import Entry, Projection
from app.store.rows import keys as key_rows
from tests.conformance.entries import new_run
from tests.conformance.test_store_budgets import begin, intend
from tests.harness.administration import AdminStandIn, administration
from tests.harness.raw_facts import fact_from_json
from tests.harness.stand_ins import CATALOG, PEPPER

SIGNER = Signer("releases", bytes(32))
POOL = """
[providers.rehearsal]
format = "rehearsal"
[workers.alpha]
provider = "rehearsal"
model = "sage"
clearance = ["secret"]
[tiers.baton-mini]
pool = ["alpha"]
"""

ADMITTED = {
    "deadline": 2e9,
    "conductor": "fixed",
    "streams": False,
    "labels": [],
    "excluded": {},
    "effort": "medium",
    "model": "baton-mini",
    "catalog": "0" * 64,
    "rehearsal": True,
    "ignored": [],
    "preview": False,
    "wire": {},
}
"""The other fields of an admission."""


@pytest.fixture
async def admin(tmp_path: Path) -> AsyncIterator[AdminStandIn]:
    async with administration(tmp_path) as opened:
        yield opened


async def call_admin(client: httpx.AsyncClient, method: str, path: str, **more: Any) -> dict[str, Any]:
    """Send a request that must succeed, and return the reply."""
    reply = await client.request(method, f"/admin/v1{path}", **more)
    assert reply.status_code == 200, reply.text
    assert reply.headers["cache-control"] == "no-store"  # it may have a secret in it
    body: dict[str, Any] = reply.json()
    return body


async def assert_refused(client: httpx.AsyncClient, method: str, path: str, **more: Any) -> tuple[int, str]:
    """Send a request that must be refused; return its status and the error's code."""
    reply = await client.request(method, f"/admin/v1{path}", **more)
    return reply.status_code, reply.json()["error"]["code"]


async def statuses(admin: AdminStandIn, *keys: str) -> list[int]:
    """Return the status that a new gateway gives each key."""
    codes = []
    for key in keys:
        async with admin.client(key, admin.gateway_app()) as client:
            codes.append((await client.get("/v1/models")).status_code)
    return codes


@pytest.mark.long
async def test_a_key_is_made_rotated_and_revoked_and_the_log_says_by_whom(admin: AdminStandIn) -> None:
    async with admin.client(await admin.add_key("boss")) as client:
        key = await call_admin(
            client, "POST", "/keys", json={"name": "ci", "roles": ["caller"], "usd": 0.25, "rpm": 60}
        )
        first = key.pop("key")
        assert KEY_FORMAT.fullmatch(first)
        assert (key["role"], key["tenant"], key["usd"], key["in_force"]) == ("caller", "acme", 0.25, True)
        assert await call_admin(client, "GET", f"/keys/{key['id']}") == key
        rotated = await call_admin(client, "POST", f"/keys/{key['id']}/rotate", json={"overlap_seconds": 60})
        assert await statuses(admin, first, rotated["key"]) == [200, 200]
        ended = await call_admin(client, "POST", f"/keys/{key['id']}/revoke")
        assert (ended["in_force"], ended["revoked_at"]) == (False, admin.gateway.now())
        assert await statuses(admin, first, rotated["key"]) == [401, 401]
        assert await assert_refused(client, "POST", f"/keys/{key['id']}/rotate") == (409, "key_not_in_force")
        logged = (await call_admin(client, "GET", f"/changes?target={key['id']}"))["data"]
    assert [(entry["action"], entry["actor"], entry["via"]) for entry in logged] == [
        ("key.revoked", "boss", "key"),
        ("key.rotated", "boss", "key"),
        ("key.added", "boss", "key"),
    ]
    assert not [secret for secret in (first, rotated["key"]) if secret.split("_", 2)[2] in str(logged)]


@pytest.mark.long
async def test_a_key_that_is_asked_for_again_is_made_once(admin: AdminStandIn) -> None:
    again = {"idempotency-key": "one"}
    async with admin.client(await admin.add_key("boss")) as client:
        key = await call_admin(client, "POST", "/keys", json={"name": "ci"}, headers=again)
        repeated = await call_admin(client, "POST", "/keys", json={"name": "ci"}, headers=again)
        assert repeated == key | {"key": None}
        other = {"name": "ci", "roles": ["owner"]}
        assert await assert_refused(client, "POST", "/keys", json=other, headers=again) == (409, "conflict")
        assert await assert_refused(client, "POST", "/keys", json={"name": "ci"}) == (409, "name_taken")
        assert len((await call_admin(client, "GET", "/keys"))["data"]) == 2


@pytest.mark.long
async def test_a_rotation_that_is_sent_again_ends_no_secret_in_use(admin: AdminStandIn) -> None:
    again = {"idempotency-key": "one"}
    async with admin.client(await admin.add_key("boss")) as client:
        key = await call_admin(client, "POST", "/keys", json={"name": "ci"})
        path = f"/keys/{key['id']}/rotate"
        replies = [call_admin(client, "POST", path, json={"overlap_seconds": 60}, headers=again) for _ in range(2)]
        secrets = [reply["key"] for reply in await asyncio.gather(*replies)]
        [rotated] = [secret for secret in secrets if secret is not None]
        assert await statuses(admin, key["key"], rotated) == [200, 200]
        other = await assert_refused(client, "POST", path, json={"overlap_seconds": 0}, headers=again)
        assert other == (409, "idempotency_key_reuse")
        admin.stand_in.seconds += 61
        later = await call_admin(client, "POST", path, json={"overlap_seconds": 60}, headers=again)
        assert later["key"] not in (None, rotated)


async def test_a_rotation_that_has_failed_is_carried_out_when_it_is_sent_again(
    admin: AdminStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = {"idempotency-key": "one"}
    async with admin.client(await admin.add_key("boss")) as client:
        key = await call_admin(client, "POST", "/keys", json={"name": "leaked"})
        request = ("POST", f"/keys/{key['id']}/rotate")

        def fail(*_arguments: object, **_fields: object) -> None:
            raise StoreUnavailable()

        with monkeypatch.context() as patched:
            patched.setattr(key_rows, "_change", fail)
            failed = await assert_refused(client, *request, json={"overlap_seconds": 0}, headers=again)
        assert failed == (503, "store_unavailable")
        rotated = await call_admin(client, *request, json={"overlap_seconds": 0}, headers=again)
        assert await statuses(admin, key["key"], rotated["key"]) == [401, 200]


async def test_a_request_that_is_not_valid_names_its_field(admin: AdminStandIn) -> None:
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"name": "x", "scopes": ["runs:delete"]}, "scopes"),
        ({"name": "x", "tiers": ["none"]}, "tiers"),
        ({"name": "x", "roles": ["root"]}, "roles[0]"),
        ({"name": ""}, "name"),
        ({}, "name"),
        ({"name": "x", "expires_in": 0}, "expires_in"),
        ({"name": "x", "secret": "s"}, "secret"),
        ({"name": "x", "usd": 1e-7}, "usd"),  # less than a micro-dollar: no run could be paid
        ({"name": "x", "labels": [f"label-{number}" for number in range(65)]}, "labels"),
        ({"name": "x", "labels": "phi"}, "labels"),
    )
    async with admin.client(await admin.add_key("boss")) as client:
        for body, param in wrong:
            reply = await client.post("/admin/v1/keys", json=body)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), body
    assert "it must be a list, not a string" in reply.json()["error"]["message"]


@pytest.mark.long
async def test_nobody_gains_rights_by_making_or_rotating_keys(admin: AdminStandIn) -> None:
    await admin.add_key("boss")
    await admin.add_key("theirs", tenant="other")
    limited = {"labels": frozenset({"phi"}), "tiers": frozenset({"baton-mini"}), "max_usd": 1_000_000}
    key = await admin.add_key("oper", "operator", expires_at=2e9, **limited)
    fitting: dict[str, Any] = {"name": "x", "labels": ["phi"], "tiers": ["baton-mini"], "usd": 0.5, "expires_in": 60}
    wider: tuple[dict[str, Any], ...] = (
        {"roles": ["owner"]},
        {"roles": ["auditor"]},
        {"all_tenants": True},
        {"labels": []},
        {"tiers": []},
        {"usd": 1.5},
        {"usd": None},
        {"expires_in": None},
    )
    async with admin.client(key) as client:
        for one in wider:
            assert (await assert_refused(client, "POST", "/keys", json=fitting | one))[0] == 403, one
        assert await assert_refused(client, "POST", "/keys/boss/rotate") == (403, "insufficient_scope")
        assert await assert_refused(client, "POST", "/keys", json=fitting | {"tenant": "other"}) == (404, "not_found")
        assert await assert_refused(client, "POST", "/keys/theirs/rotate") == (404, "not_found")
        assert await assert_refused(client, "POST", "/keys/theirs/revoke") == (404, "not_found")
        assert await assert_refused(client, "GET", "/keys/theirs") == (404, "not_found")
        await call_admin(client, "POST", "/keys", json=fitting)
        assert [row["tenant"] for row in (await call_admin(client, "GET", "/keys"))["data"]] == ["acme"] * 3


@pytest.mark.long
async def test_a_key_that_is_made_has_no_higher_rates_than_its_maker(admin: AdminStandIn) -> None:
    key = await admin.add_key("slow", rpm=10, tpm=1000, concurrency=2)
    fitting: dict[str, Any] = {"name": "x", "rpm": 10, "tpm": 999, "concurrency": 1}
    async with admin.client(key) as client:
        for one in ({"rpm": 11}, {"rpm": None}, {"tpm": None}, {"concurrency": 3}):
            assert (await assert_refused(client, "POST", "/keys", json=fitting | one))[0] == 403, one
        await call_admin(client, "POST", "/keys", json=fitting)


async def test_only_keys_with_no_more_rights_are_revoked(admin: AdminStandIn) -> None:
    """But one with fewer limits may be: an operator whose own key expires still ends a key that leaked."""
    await admin.add_key("boss")
    await admin.add_key("root", "operator", all_tenants=True)
    await admin.add_key("leaked", "caller")
    key = await admin.add_key("oper", "operator", expires_at=2e9, rpm=5, labels=frozenset({"phi"}))
    async with admin.client(key) as client:
        for mightier in ("boss", "root"):
            assert await assert_refused(client, "POST", f"/keys/{mightier}/revoke") == (403, "insufficient_scope")
            assert (await call_admin(client, "GET", f"/keys/{mightier}"))["in_force"] is True
        assert (await call_admin(client, "POST", "/keys/leaked/revoke"))["in_force"] is False


@pytest.mark.long
async def test_a_tenant_is_created_disabled_and_enabled(admin: AdminStandIn) -> None:
    theirs = await admin.add_key("theirs", "caller", tenant="new")
    async with admin.client(await admin.add_key("root", tenant="ops", all_tenants=True)) as client:
        tenant = await call_admin(client, "POST", "/tenants", json={"name": "new"})
        assert await call_admin(client, "POST", "/tenants", json={"name": "new"}) == tenant
        assert (tenant["keys"], tenant["disabled_at"]) == (1, None)
        assert await call_admin(client, "GET", "/tenants/new") == tenant
        await call_admin(client, "POST", "/tenants/new/disable")
        assert await statuses(admin, theirs) == [401]
        await call_admin(client, "POST", "/tenants/new/enable")
        assert await statuses(admin, theirs) == [200]
        assert await assert_refused(client, "POST", "/tenants/ops/disable") == (409, "own_tenant")
        assert await assert_refused(client, "POST", "/tenants/none/disable") == (404, "not_found")
        assert await assert_refused(client, "GET", "/tenants/none") == (404, "not_found")
        names = [row["name"] for row in (await call_admin(client, "GET", "/tenants"))["data"]]
    assert names == ["new", "ops"]


async def test_a_tenant_that_a_command_has_made_may_have_any_name(admin: AdminStandIn) -> None:
    await admin.store.add_tenant("Søn & co/eu", 1.0)
    async with admin.client(await admin.add_key("root", all_tenants=True)) as client:
        path = "/tenants/S%C3%B8n%20%26%20co%2Feu"
        assert (await call_admin(client, "GET", path))["disabled_at"] is None
        assert (await call_admin(client, "POST", f"{path}/disable"))["disabled_at"] is not None
        assert (await call_admin(client, "POST", f"{path}/enable"))["disabled_at"] is None


async def test_an_owner_of_one_tenant_sees_this_tenant_alone(admin: AdminStandIn) -> None:
    async with admin.client(await admin.add_key("boss")) as client:  # an owner of one tenant
        assert await assert_refused(client, "POST", "/tenants", json={"name": "x"}) == (403, "insufficient_scope")
        assert [row["name"] for row in (await call_admin(client, "GET", "/tenants"))["data"]] == ["acme"]
        assert await assert_refused(client, "GET", "/tenants/ops") == (404, "not_found")


async def test_a_reason_says_something(admin: AdminStandIn) -> None:
    too_short = (400, "string_below_min_length")
    forced = {"subject": "baton-ultra", "force": " "}
    held = {"scope": "run", "name": "run_1", "reason": "\n"}
    async with admin.client(await admin.add_key("root", all_tenants=True)) as client:
        assert await assert_refused(client, "POST", "/tiers/baton-mini/promote", json=forced) == too_short
        assert await assert_refused(client, "POST", "/holds", json=held) == too_short


@pytest.mark.long
async def test_lists_go_on_behind_what_was_seen(admin: AdminStandIn) -> None:
    key = await admin.add_key("boss")
    for number in range(4):
        await admin.add_key(f"mine{number}", "caller")
        await admin.add_key(f"theirs{number}", "caller", tenant="other")
    async with admin.client(key) as client:
        for path, field in (("/keys", "id"), ("/changes", "seq")):
            whole = [row[field] for row in (await call_admin(client, "GET", path))["data"]]
            first = await call_admin(client, "GET", f"{path}?limit=3")
            rest = await call_admin(client, "GET", f"{path}?limit=3&after={first['next']}")
            assert [row[field] for row in (*first["data"], *rest["data"])] == whole
            assert (first["has_more"], rest["has_more"], rest["next"]) == (True, False, None)
            assert len(whole) == 5
        assert await assert_refused(client, "GET", "/keys?after=none") == (400, "invalid_value")
        assert await assert_refused(client, "GET", "/holds?in_force=yes") == (400, "invalid_value")
        assert await assert_refused(client, "GET", "/keys/a%00b") == (404, "unknown_url"), "no database is asked"
        assert (await call_admin(client, "GET", "/changes?tenant=other"))["data"] == []


async def test_what_was_spent_is_the_callers_tenants(admin: AdminStandIn) -> None:
    async with admin.client(await admin.add_key("boss")) as client:
        spending = await call_admin(client, "GET", "/spend?by=key")
        assert (spending["data"], spending["until"] - spending["since"]) == ([], 86_400)
        assert await assert_refused(client, "GET", "/spend?tenant=other") == (404, "not_found")
        for window in ("since=0", "since=9&until=1", "since=99999999999"):
            assert await assert_refused(client, "GET", f"/spend?{window}") == (400, "invalid_value")


@pytest.mark.long
async def test_budgets_are_set_shown_and_removed(admin: AdminStandIn) -> None:
    budget_fields: dict[str, Any] = {
        "scope": "key",
        "name": "robot",
        "period": "day",
        "usd": 2.5,
        "soft": 0.8,
        "slices": 4,
    }
    whole = {"scope": "tenant", "period": "month", "usd": 500}
    await admin.add_key("robot")
    async with admin.client(await admin.add_key("boss")) as client:
        budget = await call_admin(client, "POST", "/budgets", json=budget_fields)
        assert budget["id"] == "acme/key/robot/day"
        assert await call_admin(client, "POST", "/budgets", json=budget_fields | {"usd": 3}) == budget | {"usd": 3.0}
        assert (await call_admin(client, "GET", "/budgets/acme/key/robot/day"))["windows"] == []
        assert [row["usd"] for row in (await call_admin(client, "GET", "/budgets"))["data"]] == [3.0]
        assert await assert_refused(client, "POST", "/budgets", json=whole) == (403, "insufficient_scope")
        assert await assert_refused(client, "POST", "/budgets", json=budget_fields | {"zone": "Mars"}) == (
            400,
            "invalid_value",
        )
        assert await assert_refused(client, "POST", "/budgets", json=budget_fields | {"tenant": "other"}) == (
            404,
            "not_found",
        )
        assert await call_admin(client, "DELETE", "/budgets/acme/key/robot/day") == {
            "id": budget["id"],
            "removed": True,
        }
        assert await assert_refused(client, "GET", "/budgets/acme/key/robot/day") == (404, "not_found")
        logged = (await call_admin(client, "GET", "/changes?target=acme/key/robot/day"))["data"]
        assert [entry["action"] for entry in logged] == ["budget.removed", "budget.set", "budget.set"]
    async with admin.client(await admin.add_key("root", tenant="ops", all_tenants=True)) as client:
        await call_admin(client, "POST", "/budgets", json=whole | {"tenant": "acme"})
        unknown = await assert_refused(client, "POST", "/budgets", json=whole | {"tenant": "acmee"})
        assert unknown == (404, "not_found"), "a budget of nobody would bound nothing"


@pytest.mark.long
async def test_the_key_of_a_budget_is_one_of_the_tenants_by_id_or_name(admin: AdminStandIn) -> None:
    """A budget of a key that does not exist would bound nothing."""
    key, row = mint(PEPPER, tenant="acme", name="shop", scopes=["runs:write"], now=0.0)
    assert await admin.store.add_key(row)
    await admin.add_key("theirs", tenant="other")
    budget_fields: dict[str, Any] = {"scope": "key", "period": "day", "usd": 2.5}
    async with admin.client(await admin.add_key("boss")) as client:
        for name, id_ in (("shop", row.id), (row.id, row.id), ("*", "*")):
            budget = await call_admin(client, "POST", "/budgets", json=budget_fields | {"name": name})
            assert budget["name"] == id_
        for unknown in ("theirs", "shops", key):
            assert await assert_refused(client, "POST", "/budgets", json=budget_fields | {"name": unknown}) == (
                400,
                "invalid_value",
            )
        assert len((await call_admin(client, "GET", "/budgets"))["data"]) == 2


async def test_the_account_of_one_user_is_found_by_the_users_name(admin: AdminStandIn) -> None:
    for user, usd in (("alice", 100), ("bob", 200)):
        await begin(admin.store, f"run of {user}", user=user)
        await admin.store.append(intend(f"run of {user}", "a", usd))
    async with admin.client(await admin.add_key("boss")) as client:
        for query, reserved_usd in (("", [0.0002, 0.0001]), ("?of=bob", [0.0002]), ("?of=nobody", [])):
            account = await call_admin(client, "GET", f"/budgets/acme/user/*/day{query}")
            assert [window["held"] for window in account["windows"]] == reserved_usd


@pytest.mark.long
async def test_the_pool_and_its_rules_are_shown_and_a_file_is_compared(admin: AdminStandIn) -> None:
    async with admin.client(await admin.add_key("devel", "developer")) as client:
        workers = (await call_admin(client, "GET", "/workers"))["data"]
        assert [(worker["name"], worker["state"], worker["tiers"]) for worker in workers] == [
            ("alpha", "closed", ["baton-mini"]),
            ("beta", "open", ["baton-mini", "baton-ultra"]),
        ]
        policy = await call_admin(client, "GET", "/policy")
        assert (policy["catalog"], policy["rules"]) == (CATALOG.digest, [])
        comparison = await call_admin(client, "POST", "/policy/diff", json={"pool": POOL})
        assert comparison["widens"]
        assert {witness["worker"] for witness in comparison["witnesses"]} == {"alpha"}
        table = await call_admin(client, "POST", "/policy/check", json={"pool": POOL})
        (secret,) = [row for row in table["shown"] if row["labels"] == ["secret"]]
        assert (secret["tier"], secret["recipients"]) == ("baton-mini", ["alpha"])
        assert await assert_refused(client, "POST", "/policy/diff", json={"pool": "["}) == (400, "invalid_pool")


@pytest.mark.long
async def test_a_file_that_would_take_long_to_compare_is_refused(admin: AdminStandIn) -> None:
    labels = [f"label{place}" for place in range(16)]
    tiers = "".join([f'[tiers.t{place}]\npool = ["alpha"]\n' for place in range(100)])
    pool = POOL.replace('["secret"]', orjson.dumps(labels).decode()) + tiers
    async with admin.client(await admin.add_key("devel", "developer")) as client:
        reply = await client.post("/admin/v1/policy/diff", json={"pool": pool})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_pool")
    assert "too many labels, tiers and workers" in reply.json()["error"]["message"]


@pytest.mark.long
async def test_a_file_whose_table_would_be_large_is_refused(admin: AdminStandIn) -> None:
    labels = [f"label{place}" for place in range(2_000)]
    tiers = "".join([f'[tiers.t{place}]\npool = ["alpha"]\n' for place in range(100)])
    pool = POOL.replace('["secret"]', orjson.dumps(labels).decode()) + tiers
    async with admin.client(await admin.add_key("devel", "developer")) as client:
        reply = await client.post("/admin/v1/policy/check", json={"pool": pool})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_pool")
    assert "too many labels, tiers and workers" in reply.json()["error"]["message"]


async def test_a_pool_file_is_tried_on_past_runs_of_the_tenant(admin: AdminStandIn) -> None:
    """The file knows one of the two workers that were called."""
    admitted = {"task": "t", "tier": "baton-mini", "limits": asdict(Limits()), "pool": ["alpha", "gone"]}
    for run, tenant in (("run_a", "acme"), ("run_b", "other")):
        call = {"n": None, "attempt": 1, "provider": "p", "model": "m", "access": [], "request": "00", "bytes": 1}
        call |= {"max_tokens": 9, "usd_held": 1, "tokens_held": 1}
        facts = [
            fact_from_json(Kind.ADMITTED, admitted | ADMITTED),
            *(fact_from_json(Kind.CALL_INTENDED, call | {"call": name, "worker": name}) for name in ("alpha", "gone")),
        ]
        new = new_run(tenant=tenant)
        await admin.store.append(Entry(run, admin.gateway.now(), tuple(facts), new=new, row=Projection()))
    async with admin.client(await admin.add_key("devel", "developer")) as client:
        trial = await call_admin(client, "POST", "/policy/try", json={"pool": POOL})
        same_call_twice = (*facts, facts[1])
        damaged_run = Entry("run_c", admin.gateway.now(), same_call_twice, new=new_run(tenant="acme"), row=Projection())
        await admin.store.append(damaged_run)
        damaged = await call_admin(client, "POST", "/policy/try", json={"pool": POOL})
    assert (damaged["runs"], damaged["damaged"], damaged["refused"]) == (2, ["run_c"], trial["refused"])
    assert (trial["runs"], trial["all"], trial["damaged"]) == (1, True, [])
    assert trial["refused"] == [
        {"run": "run_a", "tier": "baton-mini", "labels": [], "refused": {"gone": "is not in the pool file"}}
    ]


@pytest.mark.long
async def test_a_version_is_promoted_and_rolled_back_by_its_author(admin: AdminStandIn) -> None:
    await admin.store.change(Change("c1", 1.0, "ann", "alpha", "loaded", "v1"))
    async with admin.client(await admin.add_key("root", tenant="ops", all_tenants=True)) as client:
        promote = {"json": {"version": "v1"}}
        assert await assert_refused(client, "POST", "/conductors/alpha/promote", **promote) == (409, "change_refused")
        admin.served.append("v1")
        canary = await call_admin(client, "POST", "/conductors/alpha/canary", json={"version": "v1", "share": 0.25})
        assert (canary["canary"], canary["share"], canary["live"]) == ("v1", 0.25, "")
        careful = create_admin(replace(admin.context, trusted=TrustedSigners((SIGNER.verifier,))))
        async with admin.client(await admin.add_key("chief", tenant="ops", all_tenants=True), careful) as other:
            assert await assert_refused(other, "POST", "/conductors/alpha/promote", **promote) == (
                409,
                "change_refused",
            )
        assert (await call_admin(client, "GET", "/conductors/alpha/evidence?version=v1"))["version"] == "v1"
        unknown = await assert_refused(client, "GET", "/conductors/alpha/evidence?version=v2")
        assert unknown == (400, "invalid_value"), "nothing would seem to speak against it"
        assert (await call_admin(client, "POST", "/conductors/alpha/promote", **promote))["live"] == "v1"
        assert await assert_refused(client, "POST", "/conductors/beta/promote", **promote) == (404, "not_found")
        admin.served.clear()  # rolling back must be possible while the server is away
        assert (await call_admin(client, "POST", "/conductors/alpha/rollback"))["live"] == ""
        assert [row["name"] for row in (await call_admin(client, "GET", "/conductors"))["data"]] == ["alpha"]
        logged = (await call_admin(client, "GET", "/changes?target=alpha"))["data"]
    assert [(entry["action"], entry["actor"]) for entry in logged][:2] == [
        ("conductor.rolled_back", "root"),
        ("conductor.promoted", "root"),
    ]
    async with admin.client(await admin.add_key("boss")) as client:  # conductors are shared by all tenants
        assert await assert_refused(client, "POST", "/conductors/alpha/rollback") == (403, "insufficient_scope")
        assert (await call_admin(client, "GET", "/changes?target=alpha"))["data"] == []


async def test_a_rollback_that_is_sent_again_goes_back_once(admin: AdminStandIn) -> None:
    """Also where the process that made it was gone before it could store its reply."""
    again = {"idempotency-key": "one"}
    for number, version in enumerate(("v1", "v2")):
        for kind in ("loaded", "promoted"):
            await admin.store.change(Change(f"{kind}{number}", 1.0 + number, "ann", "alpha", kind, version))
    async with admin.client(await admin.add_key("root", tenant="ops", all_tenants=True)) as client:
        rollback = ("POST", "/conductors/alpha/rollback")
        assert (await call_admin(client, *rollback, headers=again))["live"] == "v1"
        assert await admin.store.forget_idempotency_records(2e12, 10) == 1
        assert await assert_refused(client, *rollback, headers=again) == (409, "change_made")
        assert (await call_admin(client, "GET", "/conductors"))["data"][0]["live"] == "v1"


@pytest.mark.long
async def test_a_subject_is_put_in_a_tiers_place_and_rolled_back_by_its_author(admin: AdminStandIn) -> None:
    async with admin.client(await admin.add_key("root", tenant="ops", all_tenants=True)) as client:
        promote = {"json": {"subject": "worker beta"}}
        canary = await call_admin(client, "POST", "/tiers/baton-mini/canary", json={"subject": "beta", "share": 0.25})
        assert (canary["canary"], canary["share"], canary["live"]) == ("worker beta", 0.25, "")
        assert (await call_admin(client, "POST", "/tiers/baton-mini/promote", **promote))["live"] == "worker beta"
        assert await assert_refused(client, "POST", "/tiers/baton-mini/promote", **promote) == (409, "change_refused")
        gone = {"json": {"subject": "tier baton-gone"}}
        assert await assert_refused(client, "POST", "/tiers/baton-mini/promote", **gone) == (409, "change_refused")
        assert await assert_refused(client, "POST", "/tiers/baton-none/promote", **promote) == (404, "not_found")
        evidence = await call_admin(client, "GET", "/tiers/baton-mini/evidence?subject=beta")
        assert (evidence["subject"], evidence["tiers"]) == ("worker beta", [])
        mistyped = await assert_refused(client, "GET", "/tiers/baton-mini/evidence?subject=bata")
        assert mistyped == (400, "invalid_value"), "nothing would seem to speak against it"
        listed = {row["name"]: row for row in (await call_admin(client, "GET", "/tiers"))["data"]}
        assert (listed["baton-mini"]["live"], listed["baton-mini"]["missing"]) == ("worker beta", [])
        assert (await call_admin(client, "POST", "/tiers/baton-mini/rollback"))["live"] == ""
        logged = (await call_admin(client, "GET", "/changes?target=baton-mini"))["data"]
    assert [(entry["action"], entry["actor"]) for entry in logged] == [
        ("tier.rolled_back", "root"),
        ("tier.promoted", "root"),
        ("tier.canary", "root"),
    ]
    async with admin.client(await admin.add_key("boss")) as client:  # tiers are shared by all tenants
        assert await assert_refused(client, "POST", "/tiers/baton-mini/rollback") == (403, "insufficient_scope")


@pytest.mark.long
async def test_two_gateways_follow_within_five_seconds(admin: AdminStandIn) -> None:
    """Each gateway has its own cache of keys; the changes are made through the admin API."""
    soon = admin.gateway.now() + 4.9
    names = ("revoked", "rotated", "disabled", "expired", "kept")
    keys = {
        name: await admin.add_key(
            name,
            "caller",
            tenant="leaving" if name == "disabled" else "acme",
            expires_at=soon if name == "expired" else None,
        )
        for name in names
    }
    apps = [admin.gateway_app(), admin.gateway_app()]

    async def list_accepted_codes() -> list[list[str]]:
        codes = []
        for app in apps:
            async with admin.client(app=app) as client:
                headers = {name: {"x-api-key": key} for name, key in keys.items()}
                codes.append([n for n in names if (await client.get("/v1/models", headers=headers[n])).is_success])
        return codes

    assert await list_accepted_codes() == [list(names)] * 2
    async with admin.client(await admin.add_key("root", tenant="home", all_tenants=True)) as client:
        await call_admin(client, "POST", "/keys/revoked/revoke")
        await call_admin(client, "POST", "/keys/rotated/rotate", json={"overlap_seconds": 0})
        await call_admin(client, "POST", "/tenants/leaving/disable")
    admin.stand_in.seconds += 5.0
    admin.stand_in.ticks += 5.0
    assert await list_accepted_codes() == [["kept"]] * 2


@pytest.mark.long
async def test_the_api_describes_itself(admin: AdminStandIn) -> None:
    async with admin.client() as client:
        document = (await client.get("/openapi.json")).json()
        page = await client.get("/docs")
    assert page.status_code == 200
    assert document["info"]["title"] == "Baton administration"
    described = {(method.upper(), path) for path, one in document["paths"].items() for method in one}
    assert ("POST", "/admin/v1/keys/{key}/rotate") in described
    assert not [path for _, path in described if path.startswith("/v1/")]
    schemas = document["components"]["schemas"]
    references = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert references <= set(schemas)
    assert {"KeyRequest", "CanaryRequest", "KeyList", "Error"} <= set(schemas)


async def test_the_public_listener_serves_none_of_it(admin: AdminStandIn) -> None:
    async with admin.client(await admin.add_key("boss"), admin.gateway_app()) as client:
        assert (await client.get("/admin/v1/keys")).status_code == 404
