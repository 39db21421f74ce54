"""The sections of the administration, the person who looks at them, and tables of what they list."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal
from urllib.parse import quote, urlencode

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.console import forms
from app.console.api import Session
from app.console.pages import Pages
from app.core.console_path import PATH
from app.core.roles import permits

API: Final = "/admin/v1"
ADMIN: Final = f"{PATH}/admin"
PAGE_ENTRIES: Final = 50
"""Entries of a page of a list."""


class Section(Struct, frozen=True):
    """An entry of the administration's navigation, for people with the scope."""

    name: str
    path: str
    scope: str
    about: str


SECTIONS: Final = (
    Section("Keys", f"{ADMIN}/keys", "keys:read", "Make, rotate and revoke API keys."),
    Section("Tenants", f"{ADMIN}/tenants", "tenants:read", "Create, disable and enable tenants."),
    Section("Budgets", f"{ADMIN}/budgets", "budgets:read", "Set what may be spent, and see what is left."),
    Section("Policy", f"{ADMIN}/policy", "policy:read", "The rules in force, and a pool file compared with them."),
    Section("Workers", f"{ADMIN}/workers", "workers:read", "The workers of the pool, and their circuit breakers."),
    Section("Conductors", f"{ADMIN}/conductors", "conductors:read", "Versions, canaries, promotions, rollbacks."),
    Section("Legal holds", f"{ADMIN}/holds", "holds:read", "Runs of which nothing may be erased."),
    Section("Changes", f"{ADMIN}/changes", "changes:read", "Who changed what."),
    Section("People", f"{ADMIN}/people", "keys:read", "Who can log in, and as what."),
)


class Person(Struct, frozen=True):
    """The key or the person who is signed in."""

    id: str
    via: str
    tenant: str
    all_tenants: bool
    role: str
    scopes: frozenset[str]
    expires_at: float | None

    def may(self, scope: str) -> bool:
        """Return True if their scopes permit it. The API decides anew for each request."""
        return permits(self.scopes, scope, all_tenants=self.all_tenants)


class Cell(Struct, frozen=True):
    """One cell of a table."""

    text: str
    href: str = ""
    kind: Literal["", "state", "number", "code", "text"] = ""
    """`state` is a word with a colour; `text` may be long and have several lines."""
    links: Sequence[tuple[str, str]] = ()
    """The actions that the row offers, each as its words and its address."""


class Table(Struct, frozen=True):
    """A table; the first cell of each row names it."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    empty: str
    """A sentence that stands where there are no rows."""
    following: str = ""
    """The address of the next page, if there is one."""


class ListPage(Struct, frozen=True):
    """A page with one table."""

    title: str
    table: Table
    hint: str = ""
    filters: Sequence[forms.Field] = ()
    actions: Sequence[tuple[str, str, str]] = ()
    """The links above the table, each as its words, its address, and the scope that it needs."""
    fault: str = ""
    """The API's refusal of a filter, which stands in place of the table."""


class Administration:
    """Renders the pages of a section with the navigation among the sections."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self.api = pages.api

    async def person(self, request: Request, session: Session) -> Person:
        """Return the person who is signed in; they are asked for once in each request."""
        person: Person | None = getattr(request.state, "person", None)
        if person is None:
            me = await self.api.get(session, f"{API}/me")
            person = Person(
                id=me["id"],
                via=me["via"],
                tenant=me["tenant"],
                all_tenants=me["all_tenants"],
                role=me["role"] or "",
                scopes=frozenset(me["scopes"]),
                expires_at=me["expires_at"],
            )
            request.state.person = person
        return person

    async def show(
        self, request: Request, session: Session, template: str, status: int = 200, **values: Any
    ) -> Response:
        """Return a page of a section."""
        person = await self.person(request, session)
        sections = [section for section in SECTIONS if person.may(section.scope)]
        frame = {"sections": sections, "person": person}
        return self.pages.show(request, f"admin/{template}", status, **frame, **values)

    async def show_list(self, request: Request, session: Session, page: ListPage) -> Response:
        """Return a page with a table, and with those links that the person's scopes permit."""
        person = await self.person(request, session)
        values = chosen_filters(request, page.filters)
        return await self.show(
            request,
            session,
            "list.html",
            400 if page.fault else 200,
            title=page.title,
            fault=page.fault,
            hint=page.hint,
            table=page.table,
            actions=[(words, href) for words, href, scope in page.actions if person.may(scope)],
            filters=forms.Form(page.title, "Filter", page.filters, entries=values),
        )

    def form(self, path: str, ask: forms.Ask, act: forms.Act) -> list[Route]:
        """Return the pages of a form at `path` below `/console`."""
        return forms.routes(self.pages, path, ask, act, self.show)


def chosen_filters(request: Request, filters: Sequence[forms.Field]) -> dict[str, list[str]]:
    """Return the filters that the address has, by the names of their fields."""
    return {filter_.name: [request.query_params.get(filter_.name, "")] for filter_ in filters}


def query(request: Request, filters: Sequence[forms.Field]) -> dict[str, Any]:
    """Return the filters and the place of a page, as parameters for the API."""
    parameters: dict[str, Any] = {name: values[-1].strip() for name, values in chosen_filters(request, filters).items()}
    return parameters | {"limit": PAGE_ENTRIES, "after": request.query_params.get("after")}


def next_page_address(request: Request, page: Mapping[str, Any]) -> str:
    """Return the address of the page behind this one; empty if there is none."""
    if not page["has_more"]:
        return ""
    parameters = {name: value for name, value in request.query_params.items() if name != "after" and value}
    return f"{request.url.path}?{urlencode(parameters | {'after': page['next']})}"


def at(*parts: str, **fields: str) -> str:
    """Return the address of an administration page. Each part may be any text: it is quoted."""
    path = "/".join([ADMIN, *[quote(part, safe="") for part in parts]])
    if fields:
        return f"{path}?{urlencode(fields)}"
    return path
