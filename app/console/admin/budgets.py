"""Budgets: what may be spent in each period, what is spent and left of it, set and removed."""

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.console import forms
from app.console.admin.sections import API, Administration, Cell, ListPage, Table, at, next_page_address, query
from app.console.api import ApiRequest, Session
from app.console.templating import NOTHING, usd, when

FILTERS: Final = (forms.Field("tenant", "Tenant"),)
PAGE_BUDGETS: Final = 20
"""Budgets of a page: the use of each is asked for apart."""
FIELDS: Final = (
    forms.Field("scope", "For", "select", choices=[(scope, scope) for scope in ("tenant", "key", "user", "team")]),
    forms.Field(
        "name",
        "Name",
        hint="The key's id or name, the user or the team; * for each without its own budget; empty: the tenant.",
    ),
    forms.Field("tenant", "Tenant", hint="Empty: your own."),
    forms.Field("period", "Period", "select", choices=[(period, period) for period in ("hour", "day", "month")]),
    forms.Field("usd", "Dollars in each period", "number", required=True),
    forms.Field("soft", "Share at which a warning is given", "number", "Such as 0.8; empty: no warning."),
    forms.Field("slices", "Slices", "number", "2 to 64, for many busy engines; empty: the account is held as a whole."),
    forms.Field("zone", "Time zone", hint="By whose clocks periods begin, such as Europe/Berlin.", value="UTC"),
)


def routes(admin: Administration) -> list[Route]:
    """Return the pages of budgets."""

    async def show_budgets(request: Request, session: Session) -> Response:
        page = await admin.api.get(session, f"{API}/budgets", **query(request, FILTERS) | {"limit": PAGE_BUDGETS})
        now = admin.pages.now()
        rows = [_row(await _budget(admin, session, budget["id"]), now) for budget in page["data"]]
        table = Table(
            "Table of budgets",
            ("Budget", "Tenant", "Amount", "Account that has least left", "Spent", "Reserved", "Left", "Until (UTC)"),
            rows,
            "No budget is set: nothing bounds what several runs cost together.",
            next_page_address(request, page),
        )
        actions = [("Set a budget", at("budgets", "set"), "budgets:write")]
        return await admin.show_list(request, session, ListPage("Budgets", table, actions=actions, filters=FILTERS))

    async def show_budget(request: Request, session: Session) -> Response:
        budget = await _budget(admin, session, request.query_params.get("id", ""))
        table = Table(
            "Table of the latest periods",
            ("Account", "From (UTC)", "Until (UTC)", "Spent", "Reserved", "Left", "Beyond the worst case"),
            [_window(budget, window) for window in budget["windows"]],
            "Nothing was spent under this budget yet.",
        )
        return await admin.show(request, session, "budget.html", budget=budget, table=table)

    return [
        admin.pages.route("/admin/budgets", show_budgets),
        admin.pages.route("/admin/budgets/one", show_budget),
        *_set(admin),
        *_remove(admin),
    ]


def _set(admin: Administration) -> list[Route]:
    async def ask(_request: Request, _session: Session) -> forms.Form:
        says = ("One of the same tenant, scope, name and period is replaced, and keeps what was spent.",)
        return forms.Form("Set a budget", "Set it", FIELDS, at("budgets"), says)

    async def act(_request: Request, session: Session, submission: forms.Submission) -> None:
        await admin.api.post(session, f"{API}/budgets", submission.body, **submission.headers)

    return admin.form("/admin/budgets/set", ask, act)


def _remove(admin: Administration) -> list[Route]:
    async def ask(request: Request, session: Session) -> forms.Form:
        budget = await _budget(admin, session, request.query_params.get("id", ""))
        says = (f"Nothing bounds the spending of {budget['id']} any more. What was spent stays in the log.",)
        return forms.Form("Remove a budget", "Remove it", (), at("budgets"), says)

    async def act(request: Request, session: Session, submission: forms.Submission) -> None:
        path = _path(request.query_params.get("id", ""))
        await admin.api.request(session, ApiRequest("DELETE", path, headers=submission.headers))

    return admin.form("/admin/budgets/remove", ask, act)


async def _budget(admin: Administration, session: Session, budget: str) -> dict[str, Any]:
    reply: dict[str, Any] = await admin.api.get(session, _path(budget))
    return reply


def _path(budget: str) -> str:
    return f"{API}/budgets/{quote(budget, safe='/')}"


def _row(budget: dict[str, Any], now: float) -> list[Cell]:
    """Return the row of a budget. It shows the account with the least left in the period of `now`, in seconds since
    1970; what was spent in earlier periods is not taken from this one."""
    name = Cell(budget["id"], at("budgets", "one", id=budget["id"]))
    head = [name, Cell(budget["tenant"]), Cell(f"{usd(budget['usd'])} a {budget['period']}", kind="number")]
    present = [window for window in budget["windows"] if window["end"] > now]
    if not present:
        amounts = [Cell(NOTHING, kind="number") for _ in range(3)]
        return [*head, Cell("nothing was spent in this period yet"), *amounts, Cell(NOTHING)]
    window = max(present, key=lambda account: float(account["spent"] + account["held"]))
    return [*head, Cell(window["account"]), *_amounts(budget, window), Cell(when(float(window["end"])))]


def _window(budget: Mapping[str, Any], window: Mapping[str, Any]) -> list[Cell]:
    times = [Cell(when(float(window[name]))) for name in ("start", "end")]
    return [Cell(window["account"]), *times, *_amounts(budget, window), Cell(usd(window["overrun"]), kind="number")]


def _amounts(budget: Mapping[str, Any], window: Mapping[str, Any]) -> list[Cell]:
    """Return the amounts that are spent, reserved and left."""
    remainder = budget["usd"] - window["spent"] - window["held"]
    return [Cell(usd(amount), kind="number") for amount in (window["spent"], window["held"], remainder)]
