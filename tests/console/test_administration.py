"""The administration in the console: keys, tenants, budgets, policy, the pool, holds and the log of changes."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest

from app.console.admin import budgets
from app.console.admin.sections import SECTIONS
from app.console.api import Api, timeout_error
from app.core.pool.conductor_versions import Change
from app.core.roles import ROLES
from app.core.run.events import Kind
from app.store.protocol import Entry, Projection
from tests.conformance.entries import new_run
from tests.harness.administration import AdminStandIn, administration
from tests.harness.console import SAME_ORIGIN, console_client, hidden_value, page_text, sign_in
from tests.harness.playground import HOSTILE
from tests.harness.raw_facts import Raw

SECRET = re.compile(r'class="secret" readonly value="(bt_[^"]+)"')


@pytest.fixture
async def admin(tmp_path: Path) -> AsyncIterator[AdminStandIn]:
    async with administration(tmp_path) as opened:
        yield opened


@asynccontextmanager
async def console(admin: AdminStandIn, key: str) -> AsyncIterator[httpx.AsyncClient]:
    """A browser at the console of the admin listener, signed in by a key."""
    async with console_client(admin.app, lambda: admin.stand_in.seconds, is_admin=True, has_people=True) as client:
        await sign_in(client, key)
        yield client


async def read(client: httpx.AsyncClient, path: str) -> str:
    """The words of a page."""
    reply = await client.get(f"/console/admin{path}")
    assert reply.status_code == 200, reply.text
    return page_text(reply.text)


async def fill_form(client: httpx.AsyncClient, path: str, **fields: Any) -> dict[str, Any]:
    """The fields of the form at a path: the hidden ones as the page has them, and these."""
    page = await client.get(f"/console/admin{path}")
    assert page.status_code == 200, page.text
    return dict(re.findall(r'<input type="hidden" name="(once)" value="([^"]+)"', page.text)) | fields


async def post(client: httpx.AsyncClient, path: str, data: dict[str, Any]) -> httpx.Response:
    return await client.post(f"/console/admin{path}", data=data, headers=SAME_ORIGIN)


async def send(client: httpx.AsyncClient, path: str, **fields: Any) -> httpx.Response:
    """Fill a form in and send it."""
    return await post(client, path, await fill_form(client, path, **fields))


@pytest.mark.long
async def test_a_key_is_made_rotated_and_revoked_each_once_however_often_the_form_is_sent(admin: AdminStandIn) -> None:
    async with console(admin, await admin.add_key("boss")) as client:
        fields = await fill_form(client, "/keys/new", name="ci", roles=["caller", "auditor"], rpm="60", expires_in="30")
        replies = [await post(client, "/keys/new", fields) for _ in range(2)]
        first = SECRET.search(replies[0].text)
        assert first is not None
        assert "The form was sent twice, and was carried out once." in page_text(replies[1].text)
        rows = {row.name: row for row in await admin.store.keys()}
        assert set(rows) == {"boss", "ci"}
        assert rows["ci"].scopes == ROLES["auditor"] | ROLES["caller"]
        assert (rows["ci"].rpm, rows["ci"].expires_at) == (60, admin.stand_in.seconds + 30 * 86_400)
        name = rows["ci"].id
        fields = await fill_form(client, f"/keys/{name}/rotate", overlap_seconds="0.5")
        replies = [await post(client, f"/keys/{name}/rotate", fields) for _ in range(2)]
        second = SECRET.search(replies[0].text)
        assert second is not None
        assert SECRET.search(replies[1].text) is None
        rotated = await admin.store.key(name)
        assert rotated is not None
        assert rotated.previous_until == admin.stand_in.seconds + 0.5 * 86_400
        async with admin.client(first[1]) as old, admin.client(second[1]) as new:
            assert [(await client.get("/admin/v1/me")).status_code for client in (old, new)] == [200, 200]
        assert "This cannot be undone." in await read(client, f"/keys/{name}/revoke")
        assert (await send(client, f"/keys/{name}/revoke")).headers["location"] == f"/console/admin/keys/{name}"
        assert "revoked" in await read(client, f"/keys/{name}")
        assert "ci" not in await read(client, "/keys?in_force=true")
        assert f"{name} acme" in await read(client, "/keys?in_force=false")
        changes = await read(client, f"/changes?target={name}")
    titles = ("Key made", "Key given a new secret", "Key revoked")
    assert [changes.count(f"(key) {words} {name}") for words in titles] == [1, 1, 1]
    assert "Secret: another one" in changes
    assert "Revoked at: was none, is " in changes


@pytest.mark.long
async def test_faults_stand_beside_their_fields_and_what_was_typed_is_kept(admin: AdminStandIn) -> None:
    async with console(admin, await admin.add_key("boss", all_tenants=True)) as client:
        for fields, name, fault in (
            ({"name": ""}, "name", "This field must be filled in."),
            ({"name": "x", "rpm": "many"}, "rpm", "This must be a number."),
            ({"name": "x", "tiers": "none"}, "tiers", "There is no tier of a name in &#39;tiers&#39;."),
        ):
            reply = await send(client, "/keys/new", **fields, usd='<b>"' if name == "name" else "")
            assert reply.status_code == 400
            assert f'id="fault-{name}">{fault}' in reply.text
            assert f'aria-describedby="hint-{name} fault-{name}" aria-invalid="true"' in reply.text
            assert ('value="&lt;b&gt;&#34;"' in reply.text) == (name == "name")
        assert (await send(client, "/keys/new", name="x", expires_in="1e15")).status_code == 400, "too long in seconds"
        for text in ("1e999", "1.0e999", "-inf", "nan", "9" * 30, "9" * 5_000):
            for name in ("rpm", "usd", "expires_in"):
                reply = await send(client, "/keys/new", name="x", **{name: text})
                assert (reply.status_code, f'id="fault-{name}">This must be a number.' in reply.text) == (400, True)
        reply = await send(client, "/tenants/acme/disable")
        assert (reply.status_code, "end the access of the one who asks" in page_text(reply.text)) == (409, True)


@pytest.mark.long
async def test_the_form_of_what_does_not_exist_is_not_found(admin: AdminStandIn) -> None:
    async with console(admin, await admin.add_key("boss", all_tenants=True)) as client:
        for path in (
            "tenants/nobody/disable",
            "tenants/nobody/enable",
            "budgets/remove?id=acme/user/ann/day",
            "holds/none/release",
        ):
            page = await client.get(f"/console/admin/{path}")
            assert (page.status_code, "There is no such" in page_text(page.text)) == (404, True), path


@pytest.mark.long
async def test_a_form_whose_reply_is_lost_is_shown_again_and_carried_out_once(
    admin: AdminStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    post_really = Api.post

    async def post_and_lose_the_reply(self: Api, *args: Any, **headers: str) -> None:
        await post_really(self, *args, **headers)
        raise timeout_error("The API has not answered.")

    async with console(admin, await admin.add_key("boss")) as client:
        with monkeypatch.context() as patch:
            patch.setattr(Api, "post", post_and_lose_the_reply)
            lost = await send(client, "/keys/new", name="ci", rpm="60")
        assert lost.status_code == 504
        assert "The API has not answered." in page_text(lost.text)
        assert 'name="rpm" value="60"' in lost.text
        again = await post(client, "/keys/new", {"name": "ci", "rpm": "60", "once": hidden_value(lost.text, "once")})
        assert "was carried out once" in page_text(again.text)
    assert sorted(row.name for row in await admin.store.keys()) == ["boss", "ci"]


@pytest.mark.long
async def test_tenants_budgets_and_holds_are_managed(admin: AdminStandIn) -> None:
    async with console(admin, await admin.add_key("boss", all_tenants=True)) as client:
        await send(client, "/tenants/new", name="other")
        await send(client, "/tenants/other/disable")
        assert re.search(r"other 0 \S+ \S+ disabled .* Enable", await read(client, "/tenants"))
        await send(client, "/tenants/other/enable")
        assert re.search(r"other 0 \S+ \S+ enabled Disable", await read(client, "/tenants"))
        await admin.store.add_tenant("co/eu", 1.0)
        await send(client, "/tenants/co%2Feu/disable")
        assert re.search(r"co/eu 0 \S+ \S+ disabled .* Enable", await read(client, "/tenants"))
        await send(client, "/budgets/set", scope="user", name="*", period="day", usd="2.50", soft="0.8")
        assert "acme/user/*/day acme $2.50 a day nothing was spent in this period yet" in await read(client, "/budgets")
        assert "Warning at 80.0 %" in await read(client, "/budgets/one?id=acme/user/*/day")
        await send(client, "/budgets/remove?id=acme/user/*/day")
        assert "No budget is set" in await read(client, "/budgets")
        fields = await fill_form(client, "/holds/new", scope="user", name="ann", reason="case 12")
        for _ in range(2):
            assert (await post(client, "/holds/new", fields)).status_code == 303
        [hold] = await admin.store.holds()
        assert "user ann every tenant case 12" in await read(client, "/holds?in_force=true")
        await send(client, f"/holds/{hold.id}/release")
        assert "released" in await read(client, "/holds?in_force=false")


@pytest.mark.long
async def test_the_pool_its_rules_and_its_conductors_are_shown(admin: AdminStandIn) -> None:
    async with console(admin, await admin.add_key("boss", all_tenants=True)) as client:
        workers = await read(client, "/workers")
        assert re.search(r"alpha closed 0 \S \S stub .* beta open 0 \S \S stub ", workers)
        assert "alpha the pool file&#39;s model" in await read(client, "/conductors")
        assert "nothing to roll back" in await read(client, "/conductors/alpha/rollback")
        reply = await send(client, "/conductors/alpha/rollback")
        assert (reply.status_code, "there is nothing to roll back" in page_text(reply.text)) == (409, True)
        assert "The pool file in force has no rules." in await read(client, "/policy")
        reply = await send(client, "/policy", question="diff", pool="[tiers.")
        assert (reply.status_code, 'id="fault-pool">The pool file is not valid' in reply.text) == (400, True)
        assert "Has the role" in await read(client, "/people") or "cannot log in" in await read(client, "/people")


DECLASSIFYING = """
[providers.stub]
format = "rehearsal"
[workers.alpha]
provider = "stub"
model = "alpha"
clearance = ["secret"]
declassifies = ["secret"]
[workers.beta]
provider = "stub"
model = "beta"
[tiers.baton-mini]
pool = ["alpha", "beta"]
"""


async def test_an_answer_about_a_pool_file_names_who_declassifies_and_what_could_not_be_read(
    admin: AdminStandIn,
) -> None:
    damaged = (Raw(Kind.ADMITTED, {}),)
    entry = Entry("run_damaged", admin.gateway.now(), damaged, new=new_run(tenant="acme"), row=Projection())
    await admin.store.append(entry)
    async with console(admin, await admin.add_key("boss", all_tenants=True)) as client:
        answers = {
            question: page_text((await send(client, "/policy", question=question, pool=DECLASSIFYING)).text)
            for question in ("check", "diff", "try")
        }
    assert "What alpha writes loses the labels secret." in answers["check"]
    assert "beta (worker, stub), as what alpha makes of it" in answers["diff"]
    assert "The journal of run_damaged cannot be read." in answers["try"]


@pytest.mark.long
async def test_a_long_text_is_kept_from_its_first_line_on(admin: AdminStandIn) -> None:
    async with console(admin, await admin.add_key("boss")) as client:
        reply = await post(client, "/policy", {"question": "diff", "pool": "\n[workers]\nx = 1"})
    area = re.search(r"<textarea[^>]*>(.*?)</textarea>", reply.text, re.DOTALL)
    assert area is not None
    assert area[1].removeprefix("\n") == "\n[workers]\nx = 1", "a browser leaves out one line end behind the tag"


@pytest.mark.long
async def test_a_version_gets_a_canary_is_promoted_and_rolled_back_once_for_a_double_click(admin: AdminStandIn) -> None:
    for name, version in (("c1", "v1"), ("c2", "v2")):
        await admin.store.change(Change(name, 1.0, "ann", "alpha", "loaded", version))
        admin.served.append(version)
    async with console(admin, await admin.add_key("boss", all_tenants=True)) as client:
        assert "v2: no tier states conditions for a promotion." in await read(client, "/conductors/alpha/promote")
        await send(client, "/conductors/alpha/promote", version="v1")
        await send(client, "/conductors/alpha/canary", version="v2", share="0.25")
        assert "alpha v1 v2 25.0 %" in await read(client, "/conductors")
        assert "The canary v2 ends." in await read(client, "/conductors/alpha/rollback")
        fields = await fill_form(client, "/conductors/alpha/rollback")
        for _ in range(2):
            assert (await post(client, "/conductors/alpha/rollback", fields)).status_code == 303
        assert "alpha v1 \N{EN DASH}" in await read(client, "/conductors")


@pytest.mark.long
async def test_a_filter_that_is_refused_stays_on_the_page_with_the_others(admin: AdminStandIn) -> None:
    async with console(admin, await admin.add_key("boss")) as client:
        refused = await client.get("/console/admin/changes?since=yesterday&actor=ann")
    assert refused.status_code == 400
    assert "it must be seconds since 1970 or RFC 3339" in page_text(refused.text)
    for field in ('name="since" value="yesterday"', 'name="actor" value="ann"'):
        assert field in refused.text


@pytest.mark.long
async def test_texts_of_others_are_shown_as_texts(admin: AdminStandIn) -> None:
    async with console(admin, await admin.add_key("boss", all_tenants=True)) as client:
        await send(client, "/holds/new", scope="user", name=HOSTILE, reason=HOSTILE)
        await send(client, "/budgets/set", scope="team", name=HOSTILE, period="day", usd="1")
        [budget] = await admin.store.budgets(None)
        for path in ("/holds", "/changes", "/budgets", f"/budgets/one?{urlencode({'id': budget.id})}"):
            page = await client.get(f"/console/admin{path}")
            assert page.status_code == 200
            text = "%3Cscript%3E" if path == "/budgets" else "&lt;script&gt;alert(1)&lt;/script&gt;{{ 7 * 7 }}"
            assert text in page.text
            assert "<script>alert" not in page.text
            assert "<svg" not in page.text
            assert "\u202e" not in page.text
        removed = f"/budgets/remove?{urlencode({'id': budget.id})}"
        assert (await send(client, removed)).status_code == 303
        assert await admin.store.budgets(None) == ()


@pytest.mark.long
async def test_everybody_sees_the_sections_that_their_scopes_allow(admin: AdminStandIn) -> None:
    async with console(admin, await admin.add_key("devel", "developer")) as client:
        start = await client.get("/console/admin")
        sections = re.findall(r'href="/console/admin/([a-z]+)"', start.text)
        assert set(sections) == {"policy", "workers", "conductors"}
        assert (await client.get("/console/admin/keys")).status_code == 403
        assert "Canary" not in (await read(client, "/conductors")).partition("Actions")[2]
    async with console_client(admin.gateway_app()) as client:
        await sign_in(client, await admin.add_key("boss"))
        assert (await client.get("/console/admin")).status_code == 404
        assert "Administration" not in (await client.get("/console/runs")).text


async def test_the_scope_of_each_section_is_enough_for_its_page(admin: AdminStandIn) -> None:
    statuses = {}
    for number, section in enumerate(SECTIONS):
        key = await admin.add_key(f"reader{number}", scopes=[section.scope], all_tenants=True)
        async with console(admin, key) as client:
            statuses[section.name] = (await client.get(section.path)).status_code
    assert set(statuses.values()) == {200}, statuses


def test_a_budget_shows_the_period_of_today_not_what_was_spent_in_an_earlier_one() -> None:
    earlier = {"account": "acme", "start": 0, "end": 86_400, "held": 0.0, "spent": 2.5, "overrun": 0.0}
    present = earlier | {"start": 86_400, "end": 172_800, "spent": 0.5}
    budget = {"id": "acme/tenant//day", "tenant": "acme", "usd": 2.5, "period": "day", "windows": [earlier]}
    assert "nothing was spent in this period yet" in [cell.text for cell in budgets._row(budget, 90_000.0)]
    texts = [cell.text for cell in budgets._row(budget | {"windows": [present, earlier]}, 90_000.0)]
    assert texts[4:7] == ["$0.50", "$0", "$2.00"]
