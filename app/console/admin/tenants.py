"""Tenants: listed, created, disabled and enabled."""

from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.console import forms
from app.console.admin.sections import API, Administration, Cell, ListPage, Person, Table, at, next_page_address, query
from app.console.api import Session, path_segment
from app.console.templating import moment, when

FIELDS: Final = (forms.Field("name", "Name", hint="Letters, digits and _ . : @ -", required=True),)
WORDS: Final = {
    "disable": "None of its keys is accepted any more, within five seconds. Runs that have begun go on.",
    "enable": "Its keys are accepted again, within five seconds.",
}


def routes(admin: Administration) -> list[Route]:
    """Return the pages of tenants."""

    async def show_tenants(request: Request, session: Session) -> Response:
        page = await admin.api.get(session, f"{API}/tenants", **query(request, ()))
        person = await admin.person(request, session)
        table = Table(
            "Table of tenants",
            ("Name", "Keys", "Created (UTC)", "State", "Actions"),
            [_row(tenant, person) for tenant in page["data"]],
            "There are no tenants yet.",
            next_page_address(request, page),
        )
        actions = [("Create a tenant", at("tenants", "new"), "tenants:write")]
        return await admin.show_list(request, session, ListPage("Tenants", table, actions=actions))

    async def ask(_request: Request, _session: Session) -> forms.Form:
        return forms.Form("Create a tenant", "Create it", FIELDS, at("tenants"))

    async def act(_request: Request, session: Session, submission: forms.Submission) -> None:
        await admin.api.post(session, f"{API}/tenants", submission.body, **submission.headers)

    return [
        admin.pages.route("/admin/tenants", show_tenants),
        *admin.form("/admin/tenants/new", ask, act),
        *_switch(admin, "disable"),
        *_switch(admin, "enable"),
    ]


def _switch(admin: Administration, verb: str) -> list[Route]:
    async def ask(request: Request, session: Session) -> forms.Form:
        tenant = await admin.api.get(session, f"{API}/tenants/{path_segment(request.path_params['tenant'])}")
        title = f"{verb.capitalize()} the tenant {tenant['name']}"
        return forms.Form(title, f"{verb.capitalize()} it", (), at("tenants"), (WORDS[verb],))

    async def act(request: Request, session: Session, submission: forms.Submission) -> None:
        path = f"{API}/tenants/{path_segment(request.path_params['tenant'])}/{verb}"
        await admin.api.post(session, path, submission.body, **submission.headers)

    return admin.form(f"/admin/tenants/{{tenant:path}}/{verb}", ask, act)


def _row(tenant: dict[str, Any], person: Person) -> list[Cell]:
    state, verb = "enabled", "disable"
    if tenant["disabled_at"] is not None:
        state, verb = f"disabled {moment(tenant['disabled_at'])}", "enable"
    links: list[tuple[str, str]] = []
    if person.may("tenants:write"):
        links.append((verb.capitalize(), at("tenants", tenant["name"], verb)))
    if person.may("keys:read"):
        links.append(("Keys", at("keys", tenant=tenant["name"])))
    return [
        Cell(tenant["name"]),
        Cell(f"{tenant['keys']:,}", kind="number"),
        Cell(when(tenant["created_at"])),
        Cell(state, kind="state"),
        Cell("", links=links),
    ]
