"""Keys: listed, made, rotated and revoked. A secret is shown once, on the page that follows."""

from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.console import forms
from app.console.admin.sections import API, Administration, Cell, ListPage, Table, at, next_page_address, query
from app.console.api import Session, path_segment
from app.console.templating import NOTHING, usd, when
from app.core.roles import ROLES

FILTERS: Final = (
    forms.Field("tenant", "Tenant"),
    forms.Field("in_force", "State", "select", choices=(("", "all"), ("true", "in force"), ("false", "ended"))),
)
FIELDS: Final = (
    forms.Field("name", "Name", hint="Of the program or person that will use it.", required=True),
    forms.Field("tenant", "Tenant", hint="Empty: your own."),
    forms.Field(
        "roles",
        "Roles",
        "checks",
        "Named sets of scopes.",
        choices=[(name, name) for name in reversed([*ROLES])],
        value="caller",
    ),
    forms.Field("scopes", "Further scopes", "list", "Between commas."),
    forms.Field("tiers", "Tiers", "list", "Between commas; empty: every tier."),
    forms.Field("labels", "Labels", "list", "Between commas; they are put on each of its tasks."),
    forms.Field("usd", "Most dollars for one run", "number"),
    forms.Field("rpm", "Requests a minute", "number"),
    forms.Field("tpm", "Tokens a minute", "number"),
    forms.Field("concurrency", "Requests at one time", "number"),
    forms.Field("expires_in", "Lifetime in days", "days", "Empty: it does not expire."),
    forms.Field("all_tenants", "It reaches every tenant", "check"),
)
OVERLAP: Final = forms.Field(
    "overlap_seconds", "Days for which the old secret still works", "days", "0 ends it at once.", value="1"
)


def routes(admin: Administration) -> list[Route]:
    """Return the pages of keys."""

    async def show_keys(request: Request, session: Session) -> Response:
        page = await admin.api.get(session, f"{API}/keys", **query(request, FILTERS))
        table = Table(
            "Table of keys",
            ("Name", "Id", "Tenant", "Role", "Limits", "Made (UTC)", "Expires (UTC)", "State"),
            [_row(key) for key in page["data"]],
            "No key fits these filters.",
            next_page_address(request, page),
        )
        actions = [("Make a key", at("keys", "new"), "keys:write")]
        return await admin.show_list(request, session, ListPage("Keys", table, actions=actions, filters=FILTERS))

    async def show_key(request: Request, session: Session) -> Response:
        key = await _key(admin, request, session)
        return await admin.show(request, session, "key.html", key=key, state=_state(key))

    return [
        admin.pages.route("/admin/keys", show_keys),
        *_make(admin),
        admin.pages.route("/admin/keys/{key}", show_key),
        *_rotate(admin),
        *_revoke(admin),
    ]


def _make(admin: Administration) -> list[Route]:
    async def ask(_request: Request, _session: Session) -> forms.Form:
        return forms.Form("Make a key", "Make the key", FIELDS, back=at("keys"))

    async def act(request: Request, session: Session, submission: forms.Submission) -> Response:
        new_key = await admin.api.post(session, f"{API}/keys", submission.body, **submission.headers)
        return await admin.show(request, session, "secret.html", key=new_key, verb="made")

    return admin.form("/admin/keys/new", ask, act)


def _rotate(admin: Administration) -> list[Route]:
    async def ask(request: Request, session: Session) -> forms.Form:
        key = await _key(admin, request, session)
        says = (
            f"The key {key['name']} of {key['tenant']} gets a new secret. Both work until the overlap is over, and a "
            "secret from an earlier rotation ends now.",
        )
        back = at("keys", key["id"])
        return forms.Form(f"Rotate the key {key['name']}", "Make a new secret", (OVERLAP,), back, says)

    async def act(request: Request, session: Session, submission: forms.Submission) -> Response:
        path = f"{API}/keys/{path_segment(request.path_params['key'])}/rotate"
        new_key = await admin.api.post(session, path, submission.body, **submission.headers)
        return await admin.show(request, session, "secret.html", key=new_key, verb="rotated")

    return admin.form("/admin/keys/{key}/rotate", ask, act)


def _revoke(admin: Administration) -> list[Route]:
    async def ask(request: Request, session: Session) -> forms.Form:
        key = await _key(admin, request, session)
        says = (f"The key {key['name']} of {key['tenant']} is refused everywhere within five seconds.",)
        back = at("keys", key["id"])
        return forms.Form(f"Revoke the key {key['name']}", "Revoke it", (), back, says, is_final=True)

    async def act(request: Request, session: Session, submission: forms.Submission) -> None:
        path = f"{API}/keys/{path_segment(request.path_params['key'])}/revoke"
        await admin.api.post(session, path, submission.body, **submission.headers)

    return admin.form("/admin/keys/{key}/revoke", ask, act)


async def _key(admin: Administration, request: Request, session: Session) -> dict[str, Any]:
    reply: dict[str, Any] = await admin.api.get(session, f"{API}/keys/{path_segment(request.path_params['key'])}")
    return reply


def _row(key: dict[str, Any]) -> list[Cell]:
    tenant = key["tenant"]
    if key["all_tenants"]:
        tenant = f"{tenant} (reaches all)"
    return [
        Cell(key["name"], at("keys", key["id"])),
        Cell(key["id"], kind="code"),
        Cell(tenant),
        Cell(key["role"] or ", ".join(key["scopes"])),
        Cell(_limits(key)),
        Cell(when(key["created_at"])),
        Cell(when(key["expires_at"])),
        Cell(_state(key), kind="state"),
    ]


def _state(key: dict[str, Any]) -> str:
    if key["revoked_at"] is not None:
        return "revoked"
    if key["in_force"]:
        return "in force"
    return "expired"


def _limits(key: dict[str, Any]) -> str:
    texts = []
    if key["usd"] is not None:
        texts.append(f"{usd(key['usd'])} a run")
    for name, words in (("rpm", "requests a minute"), ("tpm", "tokens a minute"), ("concurrency", "at one time")):
        if key[name] is not None:
            texts.append(f"{key[name]:,} {words}")
    if key["labels"]:
        texts.append(f"labels {', '.join(key['labels'])}")
    if key["tiers"]:
        texts.append(f"tiers {', '.join(key['tiers'])}")
    return "; ".join(texts) or NOTHING
