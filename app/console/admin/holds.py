"""Legal holds: listed, placed and released."""

from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.console import forms
from app.console.admin.sections import API, Administration, Cell, ListPage, Person, Table, at, next_page_address, query
from app.console.api import Session, path_segment
from app.console.templating import moment, when

FILTERS: Final = (
    forms.Field("tenant", "Tenant"),
    forms.Field("in_force", "State", "select", choices=(("", "all"), ("true", "in force"), ("false", "released"))),
)
FIELDS: Final = (
    forms.Field("scope", "On", "select", choices=[(scope, f"a {scope}") for scope in ("run", "user", "tenant", "key")]),
    forms.Field("name", "Name", hint="The id of the run or key, the user, or the tenant's name.", required=True),
    forms.Field("reason", "Reason", hint="Such as the number of the case.", required=True),
    forms.Field("tenant", "Tenant", hint="Of a user: the tenant whose runs are held; empty: every tenant's."),
)


def routes(admin: Administration) -> list[Route]:
    """Return the pages of legal holds."""

    async def show_holds(request: Request, session: Session) -> Response:
        page = await admin.api.get(session, f"{API}/holds", **query(request, FILTERS))
        person = await admin.person(request, session)
        table = Table(
            "Table of legal holds",
            ("On", "Tenant", "Reason", "Placed (UTC)", "Placed by", "State", "Actions"),
            [_row(hold, person) for hold in page["data"]],
            "No hold fits these filters.",
            next_page_address(request, page),
        )
        actions = [("Place a hold", at("holds", "new"), "holds:write")]
        hint = "Nothing of the runs that a hold covers is erased or deleted until it is released."
        return await admin.show_list(
            request, session, ListPage("Legal holds", table, actions=actions, filters=FILTERS, hint=hint)
        )

    async def ask(_request: Request, _session: Session) -> forms.Form:
        says = ("From then on nothing of the runs that it covers is erased or deleted, until it is released.",)
        return forms.Form("Place a legal hold", "Place it", FIELDS, at("holds"), says)

    async def act(_request: Request, session: Session, submission: forms.Submission) -> None:
        await admin.api.post(session, f"{API}/holds", submission.body, **submission.headers)

    async def confirm(request: Request, session: Session) -> forms.Form:
        hold = await admin.api.get(session, _path(request))
        says = (
            f"It is on the {hold['scope']} {hold['name']}: {hold['reason']}",
            "What no other hold covers may be erased from then on. The hold stays in the list as released.",
        )
        return forms.Form("Release a legal hold", "Release it", (), at("holds"), says, is_final=True)

    async def release(request: Request, session: Session, submission: forms.Submission) -> None:
        await admin.api.post(session, f"{_path(request)}/release", submission.body, **submission.headers)

    return [
        admin.pages.route("/admin/holds", show_holds),
        *admin.form("/admin/holds/new", ask, act),
        *admin.form("/admin/holds/{hold}/release", confirm, release),
    ]


def _path(request: Request) -> str:
    """Return the path in the API of the hold that the address names."""
    return f"{API}/holds/{path_segment(request.path_params['hold'])}"


def _row(hold: dict[str, Any], person: Person) -> list[Cell]:
    state = Cell("in force", kind="state")
    links: list[tuple[str, str]] = []
    if not hold["in_force"]:
        state = Cell(f"released {moment(hold['released_at'])} by {hold['released_by']}")
    elif person.may("holds:write"):
        links.append(("Release", at("holds", hold["id"], "release")))
    return [
        Cell(f"{hold['scope']} {hold['name']}"),
        Cell(hold["tenant"] or "every tenant"),
        Cell(hold["reason"], kind="text"),
        Cell(when(hold["placed_at"])),
        Cell(hold["placed_by"]),
        state,
        Cell("", links=links),
    ]
