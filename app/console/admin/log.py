"""Changes: who changed what; and people: who can log in."""

from collections.abc import Mapping
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.console import forms
from app.console.admin import change_words
from app.console.admin.sections import API, Administration, Cell, ListPage, Table, next_page_address, query
from app.console.api import ApiError, Session
from app.console.templating import when

FILTERS: Final = (
    forms.Field("target", "What", hint="The id of a key, tenant, budget, conductor or hold."),
    forms.Field("actor", "Who"),
    forms.Field("action", "Kind", hint="Such as key.revoked."),
    forms.Field("tenant", "Tenant"),
    forms.Field("since", "Since", hint="Such as 2026-11-01."),
)
NO_CHANGES: Final[Mapping[str, Any]] = {"data": (), "has_more": False}


def routes(admin: Administration) -> list[Route]:
    """Return the pages of changes and people."""

    async def show_changes(request: Request, session: Session) -> Response:
        fault, page = "", NO_CHANGES
        try:
            page = await admin.api.get(session, f"{API}/changes", **query(request, FILTERS))
        except ApiError as error:
            if error.status != 400:
                raise
            fault = error.message
        table = Table(
            "Table of changes",
            ("Number", "At (UTC)", "Who", "What was done", "To", "Tenant", "Facts"),
            [_change(change) for change in page["data"]],
            "No change fits these filters.",
            next_page_address(request, page),
        )
        return await admin.show_list(request, session, ListPage("Changes", table, filters=FILTERS, fault=fault))

    async def show_people(request: Request, session: Session) -> Response:
        rules = await admin.api.get(session, f"{API}/people")
        table = Table(
            "Table of rules for logins",
            ("Whose claim", "Is or has", "Has the role", "In the tenant"),
            [_grant(grant) for grant in rules["grants"]],
            "People cannot log in: no OpenID provider is configured. Keys are accepted.",
        )
        minutes = ""
        if rules["grants"]:
            minutes = f"A login lasts {rules['session_seconds'] / 60:g} minutes. "
        hint = f"{minutes}The first rule that fits a person counts (BATON_OIDC_ROLES)."
        return await admin.show_list(request, session, ListPage("People", table, hint=hint))

    return [admin.pages.route("/admin/changes", show_changes), admin.pages.route("/admin/people", show_people)]


def _change(change: dict[str, Any]) -> list[Cell]:
    return [
        Cell(str(change["seq"])),
        Cell(when(change["at"])),
        Cell(f"{change['actor']} ({change['via']})"),
        Cell(change_words.action_text(change)),
        Cell(change["target"]),
        Cell(change["tenant"] or "all"),
        Cell(change_words.change_facts(change), kind="text"),
    ]


def _grant(grant: dict[str, Any]) -> list[Cell]:
    return [Cell(grant["claim"]), Cell(grant["value"]), Cell(grant["role"]), Cell(grant["tenant"] or "all tenants")]
