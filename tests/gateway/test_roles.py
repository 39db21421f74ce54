"""The authorisation matrix: every route with every role, with no key, and with a key of another tenant.

deploy/docs/security.md has the matrix as a table. Each route of the route table must stand in it with the scopes that
it declares, and answers each role as the table says. `python -m tests.gateway.test_roles` prints the tables.
"""

import re
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from app.core.pool.budgets import Budget
from app.core.roles import ROLES, SCOPES, SERVICE_WIDE, permits, role_of, scopes_of
from app.gateway.http.callers import Keys
from app.store.protocol import AdminEventQuery, Store
from tests.gateway.test_auth import BODIES, EXAMPLES, QUERIES, TAKES_BODY
from tests.harness.administration import AdminStandIn, administration
from tests.harness.stand_ins import (
    APPROVED_RUN,
    PLAN_RUN,
    GatewayStandIn,
    api_routes,
    chat_body,
    row_of,
    store_contents,
)

PAGE = Path(__file__).parents[2] / "deploy" / "docs" / "security.md"
ADMIN = "/admin/"
ANY_KEY = "any key"
WITHOUT_SCOPE = {"/v1/me", "/v1/models", "/v1/models/{model:path}", "/admin/v1/me", "/admin/logout"}
"""Routes that every valid key may use."""
WITHOUT_KEY = {"/", "/healthz", "/readyz", "/metrics", "/openapi.json", "/docs"}
WITHOUT_KEY |= {"/admin/login", "/admin/callback"}
WITHOUT_KEY |= {"/docs/swagger-ui-bundle.js", "/docs/swagger-ui.css", "/docs/start.js"}
"""Routes that need no key."""


def needs(route: APIRoute) -> frozenset[str] | None:
    """Return the scopes that a route declares; None if it asks for no key."""
    scopes: set[str] | None = None
    pending: list[Dependant] = [route.dependant]
    while pending:
        dependant = pending.pop()
        pending += dependant.dependencies
        if isinstance(getattr(dependant.call, "__self__", None), Keys):
            scopes = (scopes or set()) | set(dependant.own_oauth_scopes or ())
    return None if scopes is None else frozenset(scopes)


def list_declared_scopes(routes: Iterable[Any]) -> dict[tuple[str, str], frozenset[str] | None]:
    """Return every method and path of a route table with the scopes that it declares."""
    scopes_by_route = {}
    for route in api_routes(list(routes)):
        for method in sorted((route.methods or set()) - {"HEAD"}):  # a GET without its body
            scopes_by_route[method, route.path] = needs(route)
    return scopes_by_route


def matrix(routes: Iterable[Any]) -> Iterator[str]:
    """Yield the lines of the table of routes and roles."""
    yield f"| route | needs | {' | '.join(ROLES)} |"
    yield f"|---|---|{'---|' * len(ROLES)}"
    for (method, path), scopes in sorted(
        list_declared_scopes(routes).items(), key=lambda route: (route[0][1], route[0][0])
    ):
        if scopes is None:
            continue
        marks = ["yes" if may(role, scopes) else "no" for role in ROLES]
        words = ", ".join(f"`{scope}`" for scope in sorted(scopes)) or ANY_KEY
        yield f"| `{method} {path}` | {words} | {' | '.join(marks)} |"


def may(role: str, scopes: Iterable[str]) -> bool:
    """Return True if a key of this role in one tenant, or for service-wide scopes in all, may use a route."""
    return all(permits(ROLES[role], scope, all_tenants=scope in SERVICE_WIDE) for scope in scopes)


def scope_table() -> Iterator[str]:
    """Yield the lines of the table of scopes and roles."""
    yield f"| scope | permits to | {' | '.join(ROLES)} |"
    yield f"|---|---|{'---|' * len(ROLES)}"
    for scope, words in SCOPES.items():
        marks = ["yes" if may(role, [scope]) else "" for role in ROLES]
        everywhere = "; needs a key of all tenants" if scope in SERVICE_WIDE else ""
        yield f"| `{scope}` | {words}{everywhere} | {' | '.join(marks)} |"


def every_route() -> list[Any]:
    """Return the routes of the public listener and of the admin API's."""
    return [*GatewayStandIn().app.routes, *AdminStandIn(cast(Store, None), GatewayStandIn()).app.routes]


def test_every_route_stands_in_the_matrix() -> None:
    page = PAGE.read_text()
    lines = [*scope_table(), *matrix(every_route())]
    rows = {line for line in page.splitlines() if re.match(r"\| `([A-Z]+ /|[a-z]+:)", line)}
    assert rows <= set(lines), "deploy/docs/security.md has routes or scopes that there are not"
    for line in lines:
        assert line in page, f"deploy/docs/security.md lacks {line!r}; see python -m tests.gateway.test_roles"


def test_every_route_declares_who_may_use_it() -> None:
    scopes_by_route = list_declared_scopes(every_route())
    assert {path for (_, path), scopes in scopes_by_route.items() if scopes is None} == WITHOUT_KEY
    assert {path for (_, path), scopes in scopes_by_route.items() if scopes is not None and not scopes} == WITHOUT_SCOPE
    assert not [scopes for scopes in scopes_by_route.values() if scopes and scopes - set(SCOPES)]


def read_documented_roles(page: str) -> dict[tuple[str, str], dict[str, bool]]:
    """Return the matrix as the page has it: whether each role may use each method and path."""
    rows = {}
    for method, path, marks in re.findall(r"^\| `([A-Z]+) (/\S*)` \| [^|]* \| (.*) \|$", page, re.MULTILINE):
        rows[method, path] = dict(zip(ROLES, [mark == "yes" for mark in marks.split(" | ")], strict=True))
    return rows


@pytest.mark.parametrize("role", [*ROLES, "nobody", "else"])
async def test_each_role_gets_what_the_matrix_says(gateway: GatewayStandIn, role: str) -> None:
    """`nobody` has no key, and `else` is the owner of another tenant."""
    store_contents(gateway.store)
    gateway.store.rows = [row_of(name, "acme", key=role) for name in ("run_mine", PLAN_RUN, APPROVED_RUN)]
    key = None
    if role != "nobody":
        tenant, granted = ("else", ROLES["owner"]) if role == "else" else ("acme", ROLES[role])
        key = gateway.add_key(role, tenant=tenant, scopes=sorted(granted))
    wrong = []
    async with gateway.client(key) as client:
        for (method, path), allowed in read_documented_roles(PAGE.read_text()).items():
            if path.startswith(ADMIN):
                continue
            url = re.sub(r"\{(\w+)(?::path)?\}", lambda match: EXAMPLES[match[1]], path) + QUERIES.get(path, "")
            body = BODIES.get(path, chat_body()) if method in TAKES_BODY else None
            status = (await client.request(method, url, json=body)).status_code
            if role == "nobody":
                expected = status == 401
            elif role == "else":
                names_a_resource = re.search("{(run|response|plan|approval)}", path) or EXAMPLES["run"] in QUERIES.get(
                    path, ""
                )
                expected = status == (404 if names_a_resource else 200)
            else:
                expected = status == (200 if allowed[role] else 403)
            if not expected:
                wrong.append((method, path, status))
    assert wrong == []


ADMIN_BODIES: dict[str, dict[str, Any]] = {
    "/admin/v1/approvals/{approval}": {"decision": "approve", "digest": "0" * 64},
    "/admin/v1/keys": {"name": "made"},
    "/admin/v1/tenants": {"name": "acme"},
    "/admin/v1/budgets": {"scope": "key", "name": "target", "period": "day", "usd": 1},
    "/admin/v1/holds": {"scope": "tenant", "name": "acme", "reason": "a case"},
    "/admin/v1/policy/diff": {"pool": "[workers]"},
    "/admin/v1/policy/check": {"pool": "[workers]"},
    "/admin/v1/policy/try": {"pool": "[workers]"},
    "/admin/v1/conductors/{conductor}/canary": {"version": "v1", "share": 0.5},
    "/admin/v1/conductors/{conductor}/promote": {"version": "v1"},
    "/admin/v1/tiers/{tier}/canary": {"subject": "baton-ultra", "share": 0.5},
    "/admin/v1/tiers/{tier}/promote": {"subject": "baton-ultra"},
}
ADMIN_EXAMPLES = {
    "approval": "run_none",
    "key": "target",
    "tenant": "acme",
    "budget": "acme/key/target/day",
    "conductor": "alpha",
    "tier": "baton-mini",
    "hold": "hold_none",
}


@pytest.fixture
async def admin(tmp_path: Path) -> AsyncIterator[AdminStandIn]:
    """An admin API whose tenant `acme` has a key and a budget."""
    async with administration(tmp_path) as opened:
        await opened.store.add_tenant("acme", 1.0)
        await opened.add_key("target", "caller")
        await opened.store.set_budget(Budget("acme", "key", "target", "day", 5))
        yield opened


async def knock(client: httpx.AsyncClient, method: str, path: str) -> httpx.Response:
    """Send a request to a route of the admin API."""
    url = re.sub(r"\{(\w+)(?::path)?\}", lambda match: ADMIN_EXAMPLES[match[1]], path)
    return await client.request(method, url, json=ADMIN_BODIES.get(path, {}) if method == "POST" else None)


@pytest.mark.long
async def test_each_role_gets_what_the_matrix_says_of_the_admin_api(admin: AdminStandIn) -> None:
    """The keys are of all tenants, as the routes that change what tenants share demand."""
    admin_routes = {
        route: marks for route, marks in read_documented_roles(PAGE.read_text()).items() if route[1].startswith(ADMIN)
    }
    keys = {role: await admin.add_key(role, role, tenant="home", all_tenants=True) for role in ROLES}
    wrong = []
    for role in (*ROLES, "nobody"):
        async with admin.client(keys.get(role)) as client:
            for (method, path), allowed in admin_routes.items():
                status = (await knock(client, method, path)).status_code
                expected = 401 if role == "nobody" else 403
                if (status == expected) == allowed.get(role, False) or status >= 500:
                    wrong.append((role, method, path, status))
    assert wrong == []


@pytest.mark.long
async def test_an_owner_of_another_tenant_sees_and_changes_nothing(admin: AdminStandIn) -> None:
    async with admin.client(await admin.add_key("other", tenant="else")) as client:
        for (method, path), scopes in list_declared_scopes(admin.app.routes).items():
            if scopes is None or not path.startswith(ADMIN):
                continue
            reply = await knock(client, method, path)
            if scopes & SERVICE_WIDE:
                assert reply.status_code == 403, path
            elif "{" in path:
                assert reply.status_code == 404, path
            else:
                assert not re.search('acme|:"target"', reply.text) or method == "POST", path
    assert (await admin.store.key("target")) is not None
    assert [budget.usd for budget in await admin.store.budgets("acme")] == [5]
    assert not [
        event for event in await admin.store.admin_events(AdminEventQuery(tenant="acme")) if event.actor == "other"
    ]


def test_roles_are_sets_of_scopes() -> None:
    assert scopes_of(["caller"], ["audit:read"]) == {"runs:write", "runs:read", "audit:read"}
    assert scopes_of(["caller", "owner"], []) == {"runs:write", "runs:read", "admin"}
    assert [role_of(scopes) for scopes in ROLES.values()] == list(ROLES)
    assert role_of(frozenset({"runs:read"})) == ""
    assert not permits(ROLES["owner"], "tenants:write", all_tenants=False)
    assert permits(ROLES["owner"], "tenants:write", all_tenants=True)


if __name__ == "__main__":
    print("\n".join(["", *scope_table(), "", *matrix(every_route())]))
