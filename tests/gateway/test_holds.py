"""Legal holds by the admin API: who places, sees and releases them."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.test_admin import assert_refused, call_admin
from tests.harness.administration import AdminStandIn, administration

CASE: dict[str, Any] = {"scope": "tenant", "name": "acme", "reason": "case 12"}


@pytest.fixture
async def admin(tmp_path: Path) -> AsyncIterator[AdminStandIn]:
    async with administration(tmp_path) as opened:
        yield opened


@pytest.mark.long
async def test_a_hold_is_placed_listed_and_released_by_an_owner_of_all_tenants(admin: AdminStandIn) -> None:
    await admin.add_key("mine")
    async with admin.client(await admin.add_key("root", tenant="ops", all_tenants=True)) as client:
        placed = await call_admin(client, "POST", "/holds", json=CASE)
        assert (placed["tenant"], placed["placed_by"], placed["in_force"]) == ("acme", "root", True)
        user = await call_admin(client, "POST", "/holds", json=CASE | {"scope": "user", "name": "ann"})
        assert user["tenant"] == ""
        released = await call_admin(client, "POST", f"/holds/{placed['id']}/release")
        assert (released["released_by"], released["in_force"]) == ("root", False)
        assert [hold["id"] for hold in (await call_admin(client, "GET", "/holds?in_force=true"))["data"]] == [
            user["id"]
        ]
        changes = (await call_admin(client, "GET", f"/changes?target={placed['id']}"))["data"]
        assert [(change["action"], change["actor"]) for change in changes] == [
            ("hold.released", "root"),
            ("hold.placed", "root"),
        ]
        assert await assert_refused(client, "POST", "/holds", json=CASE | {"name": "nobody"}) == (404, "not_found")
        assert await assert_refused(client, "POST", "/holds", json=CASE | {"tenant": "acme"}) == (400, "invalid_value")
        unreasoned = {"scope": "tenant", "name": "acme"}
        assert await assert_refused(client, "POST", "/holds", json=unreasoned) == (400, "missing_required_parameter")
        assert await assert_refused(client, "POST", "/holds/none/release") == (404, "not_found")
        assert await call_admin(client, "GET", f"/holds/{placed['id']}") == released
        assert await assert_refused(client, "GET", "/holds/none") == (404, "not_found")


async def test_a_hold_that_is_asked_for_again_is_placed_once(admin: AdminStandIn) -> None:
    again = {"idempotency-key": "one"}
    async with admin.client(await admin.add_key("root", tenant="ops", all_tenants=True)) as client:
        await admin.add_key("mine")
        first, second = await asyncio.gather(
            *[call_admin(client, "POST", "/holds", json=CASE, headers=again) for _ in range(2)]
        )
        assert first == second
        assert len((await call_admin(client, "GET", "/holds"))["data"]) == 1
        await call_admin(client, "POST", f"/holds/{first['id']}/release")
        for seconds in (0.0, admin.gateway.remembered + 1):
            admin.stand_in.seconds += seconds
            released = await assert_refused(client, "POST", "/holds", json=CASE, headers=again)
            assert released == (409, "hold_released")
        other = await call_admin(client, "POST", "/holds", json=CASE | {"reason": "case 13"}, headers=again)
        assert (other["in_force"], other["reason"]) == (True, "case 13")


async def test_an_owner_of_one_tenant_sees_its_holds_and_changes_none(admin: AdminStandIn) -> None:
    await admin.add_key("theirs", tenant="other")
    async with admin.client(await admin.add_key("root", tenant="ops", all_tenants=True)) as client:
        mine = await call_admin(client, "POST", "/holds", json={"scope": "tenant", "name": "other", "reason": "x"})
        other = await call_admin(client, "POST", "/holds", json={"scope": "tenant", "name": "ops", "reason": "y"})
    async with admin.client(await admin.add_key("boss", tenant="other")) as client:
        assert [hold["id"] for hold in (await call_admin(client, "GET", "/holds"))["data"]] == [mine["id"]]
        assert await call_admin(client, "GET", f"/holds/{mine['id']}") == mine
        assert await assert_refused(client, "GET", f"/holds/{other['id']}") == (404, "not_found")
        assert await assert_refused(client, "POST", f"/holds/{mine['id']}/release") == (403, "insufficient_scope")
        assert await assert_refused(client, "POST", "/holds", json=CASE) == (403, "insufficient_scope")
