"""The authorisation matrix: every route with every role, with no key, and with a key of another tenant.

deploy/docs/security.md has the matrix as a table. Each route of the route table must stand in it with the scopes that
it declares, and answers each role as the table says. `python -m tests.gateway.test_roles` prints the tables.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from app.core.roles import ROLES, SCOPES, SERVICE_WIDE, permits, role_of, scopes_of
from app.gateway.http.auth import Keys
from tests.gateway.test_auth import BODIES, EXAMPLES
from tests.harness.stand_ins import GatewayStandIn, api_routes, ask, row_of, shelve_content

PAGE = Path(__file__).parents[2] / "deploy" / "docs" / "security.md"
OPEN = "no key"
ANY_KEY = "any key"
WITHOUT_SCOPE = {"/v1/models", "/v1/models/{model:path}"}
"""Routes that every valid key may use."""
WITHOUT_KEY = {"/", "/healthz", "/readyz", "/metrics", "/openapi.json", "/docs", "/root_page.css"}
WITHOUT_KEY |= {"/docs/swagger-ui-bundle.js", "/docs/swagger-ui.css", "/docs/start.js"}
"""Routes that need no key."""


def needs(route: APIRoute) -> frozenset[str] | None:
    """Return the scopes that a route declares; None if it asks for no key."""
    found: set[str] | None = None
    pending: list[Dependant] = [route.dependant]
    while pending:
        one = pending.pop()
        pending += one.dependencies
        if getattr(one.call, "__func__", None) is Keys.caller:
            found = (found or set()) | set(one.own_oauth_scopes or ())
    return None if found is None else frozenset(found)


def declared(routes: Iterable[Any]) -> dict[tuple[str, str], frozenset[str] | None]:
    """Return every method and path of a route table with the scopes that it declares."""
    found = {}
    for route in api_routes(list(routes)):
        for method in sorted((route.methods or set()) - {"HEAD"}):  # a GET without its body
            found[method, route.path] = needs(route)
    return found


def matrix(routes: Iterable[Any]) -> Iterator[str]:
    """Yield the lines of the table of routes and roles."""
    yield f"| route | needs | {' | '.join(ROLES)} |"
    yield f"|---|---|{'---|' * len(ROLES)}"
    for (method, path), scopes in sorted(declared(routes).items(), key=lambda one: (one[0][1], one[0][0])):
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


def test_every_route_stands_in_the_matrix() -> None:
    page = PAGE.read_text()
    for line in (*scope_table(), *matrix(GatewayStandIn().app.routes)):
        assert line in page, f"deploy/docs/security.md lacks {line!r}; see python -m tests.gateway.test_roles"


def test_every_route_declares_who_may_use_it() -> None:
    found = declared(GatewayStandIn().app.routes)
    assert {path for (_, path), scopes in found.items() if scopes is None} == WITHOUT_KEY
    assert {path for (_, path), scopes in found.items() if scopes is not None and not scopes} == WITHOUT_SCOPE
    assert not [scopes for scopes in found.values() if scopes and scopes - set(SCOPES)]


def documented(page: str) -> dict[tuple[str, str], dict[str, bool]]:
    """Return the matrix as the page has it: whether each role may use each method and path."""
    found = {}
    for method, path, marks in re.findall(r"^\| `([A-Z]+) (/v1/\S*)` \| [^|]* \| (.*) \|$", page, re.MULTILINE):
        found[method, path] = dict(zip(ROLES, [mark == "yes" for mark in marks.split(" | ")], strict=True))
    return found


@pytest.mark.parametrize("role", [*ROLES, "nobody", "else"])
async def test_each_role_gets_what_the_matrix_says(gateway: GatewayStandIn, role: str) -> None:
    """`nobody` has no key, and `else` is the owner of another tenant."""
    shelve_content(gateway.store)
    gateway.store.rows = [row_of("run_mine", "acme", key=role)]
    key = None
    if role != "nobody":
        tenant, granted = ("else", ROLES["owner"]) if role == "else" else ("acme", ROLES[role])
        key = gateway.add_key(role, tenant=tenant, scopes=sorted(granted))
    wrong = []
    async with gateway.client(key) as client:
        for (method, path), allowed in documented(PAGE.read_text()).items():
            url = re.sub(r"\{(\w+)(?::path)?\}", lambda found: EXAMPLES[found[1]], path)
            body = BODIES.get(path, ask()) if method == "POST" else None
            status = (await client.request(method, url, json=body)).status_code
            if role == "nobody":
                expected = status == 401
            elif role == "else":
                expected = status == 404 if "{run}" in path or "{response}" in path else status == 200
            else:
                expected = status == (200 if allowed[role] else 403)
            if not expected:
                wrong.append((method, path, status))
    assert wrong == []


def test_roles_are_sets_of_scopes() -> None:
    assert scopes_of(["caller"], ["audit:read"]) == {"runs:write", "runs:read", "audit:read"}
    assert scopes_of(["caller", "owner"], []) == {"runs:write", "runs:read", "admin"}
    assert [role_of(scopes) for scopes in ROLES.values()] == list(ROLES)
    assert role_of(frozenset({"runs:read"})) == ""
    assert not permits(ROLES["owner"], "tenants:write", all_tenants=False)
    assert permits(ROLES["owner"], "tenants:write", all_tenants=True)


if __name__ == "__main__":
    print("\n".join(["", *scope_table(), "", *matrix(GatewayStandIn().app.routes)]))
