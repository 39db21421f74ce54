"""The console as one ASGI application over the API of its listener: `Console(api, ...)`.

It answers `/console`, leads browsers from `/` there, and gives every other request to the API untouched.
"""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.console import admin, approvals, disclosures, overview, plans, playground, run, runs
from app.console.api import Api, ApiError, Session
from app.console.pages import HEADERS, SMALL_FORM_BYTES, THEME_COOKIE, THEMES, Pages, Place, form, redirect_to
from app.console.session import Sessions, is_from_console, is_https
from app.core.console_path import PATH, restrict_to_console

FILES: Final = Path(__file__).parent / "static"
ASSETS: Final = {
    "htmx.min.js": "text/javascript",
    "hx-sse.min.js": "text/javascript",
    "hx-csp.min.js": "text/javascript",
    "console.css": "text/css",
    "run.css": "text/css",
    "run.js": "text/javascript",
    "sign_out.js": "text/javascript",
    "uplot.min.js": "text/javascript",
    "uplot.min.css": "text/css",
    "overview.js": "text/javascript",
}
"""The files that pages load, with their media types."""
MAX_AGE: Final = 3_600
"""Seconds for which a browser may keep a file."""
LOGINS: Final = ("/admin/login", "/admin/callback")
"""The steps of a login at the OpenID provider, to which browsers are led."""
REFUSING_WEIGHTS: Final = frozenset({b"q=0", b"q=0.0", b"q=0.00", b"q=0.000"})
"""The parameters by which an `Accept` header says that a media type is not wanted."""
THEME_SECONDS: Final = 365 * 86_400
START_PLACES: Final = (Place("Overview", PATH),)
COMMON_PLACES: Final = (
    Place("Runs", f"{PATH}/runs"),
    Place("Disclosures", f"{PATH}/disclosures"),
    Place("Approvals", f"{PATH}/approvals"),
)
PUBLIC_PLACES: Final = (Place("Playground", f"{PATH}/playground"), Place("Plans", f"{PATH}/plans"))
"""Pages of what only the public listener's API has."""
ADMIN_PLACES: Final = (Place("Administration", f"{PATH}/admin"),)


class Console:
    """The console in front of the API. `peppers` gives the secrets of the service, the one in force first.
    `report` is called with an error that is a bug of the console, and the path of its page."""

    def __init__(
        self,
        api: ASGIApp,
        peppers: Callable[[], Sequence[bytes]],
        now: Callable[[], float],
        report: Callable[[Exception, str], None],
        *,
        is_admin: bool = False,
        has_people: bool = False,
    ) -> None:
        """`is_admin` says that this is the listener of administration; `has_people`, that people can log in there."""
        sessions = Sessions(peppers, now, has_people=has_people)
        places = [*START_PLACES, *PUBLIC_PLACES, *COMMON_PLACES]
        if is_admin:
            places = [*START_PLACES, *COMMON_PLACES, *ADMIN_PLACES]
        pages = Pages(Api(api), sessions, places, now)
        self._api = api
        self._report = report
        self._has_people = has_people
        self._page_maker = pages
        self._pages = Starlette(
            routes=_routes(pages, is_admin=is_admin),
            exception_handlers={
                404: _not_found_page(pages),
                405: _not_found_page(pages),
                Exception: _crash_page(pages),
            },
        )
        self._pages.router.redirect_slashes = False

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve one connection's request. One for the API is the API's alone: nothing of the console runs beside it."""
        if scope["type"] != "http":
            return self._api(scope, receive, send)
        if self._has_people and scope["path"] in LOGINS and _is_browser(scope):
            return self._log_in(scope, receive, send)
        if _is_page(scope):
            return self._show_page(scope, receive, send)
        return self._api(scope, receive, send)

    async def _show_page(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._pages(scope, receive, send)
        except Exception as error:  # Starlette raises it again behind the page that says so
            self._report(error, scope["path"])

    async def _log_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Carry out a step of a login at the OpenID provider; its refusal is shown on the page where people sign in."""
        status, body = 0, bytearray()

        async def out(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            if status < 400:
                await send(message)
            else:
                body.extend(message.get("body", b""))

        await self._api(scope, receive, out)
        if status >= 400:
            refusal = ApiError(status, orjson.loads(body))
            page = self._page_maker.show(Request(scope), "sign_in.html", status, next=PATH, fault=refusal.message)
            await page(scope, receive, send)


def _routes(pages: Pages, *, is_admin: bool) -> list[Route]:
    """Return the routes of all pages of a listener."""
    routes = [
        Route("/", _redirect_to_start),
        Route(f"{PATH}/", _redirect_to_start),
        *overview.routes(pages),
        *_sign_in_routes(pages),
        *run.routes(pages),
        *runs.routes(pages),
        *disclosures.routes(pages),
    ]
    if is_admin:
        routes += approvals.routes(pages, "/admin/v1/approvals")
        routes += admin.routes(pages)
    else:
        routes += approvals.routes(pages, "/v1/approvals")
        routes += playground.routes(pages)
        routes += plans.routes(pages)
    routes += [_asset_route(name) for name in ASSETS]
    return routes


def _is_page(scope: Scope) -> bool:
    """Return True for the console's own addresses, and for a browser at the root, which is led to them."""
    path: str = scope["path"]
    if path.startswith(PATH):
        return path == PATH or path[len(PATH)] == "/"
    return path == "/" and _is_browser(scope)


def _is_browser(scope: Scope) -> bool:
    return any(name == b"accept" and _accepts_html(value) for name, value in scope["headers"])


def _accepts_html(accept: bytes) -> bool:
    """Return True if the header names HTML itself; `*/*` does not."""
    for media_range in accept.lower().split(b","):
        kind, *parameters = (part.strip().replace(b" ", b"") for part in media_range.split(b";"))
        if kind == b"text/html":
            return REFUSING_WEIGHTS.isdisjoint(parameters)
    return False


async def _redirect_to_start(_request: Request) -> Response:
    return redirect_to("")


def _not_found_page(pages: Pages) -> Callable[[Request, Exception], Any]:
    async def show_not_found_page(request: Request, error: Exception) -> Response:
        if request.method == "GET" and getattr(error, "status_code", 404) == 405:
            # The address of a button, to which a sign-in or a reload leads back: its page is the one above it.
            return RedirectResponse(request.url.path.rpartition("/")[0], 303, HEADERS)
        return pages.error_page(request, 404, "The console has no page at this address.")

    return show_not_found_page


def _crash_page(pages: Pages) -> Callable[[Request, Exception], Any]:
    async def show_crash_page(request: Request, _error: Exception) -> Response:
        message = "The page failed because of a bug; the service's log has the cause. The API is not affected."
        return pages.error_page(request, 500, message)

    return show_crash_page


def _asset_route(name: str) -> Route:
    async def serve(_request: Request) -> Response:
        headers = {"x-content-type-options": "nosniff", "cache-control": f"public, max-age={MAX_AGE}"}
        return FileResponse(FILES / name, headers=headers, media_type=ASSETS[name])

    return Route(f"{PATH}/static/{name}", serve)


def _sign_in_routes(pages: Pages) -> list[Route]:
    """Return the routes for signing in and out, and for the choice of a theme."""

    async def ask(request: Request) -> Response:
        return pages.show(
            request, "sign_in.html", next=restrict_to_console(request.query_params.get("next", "")), fault=""
        )

    async def sign_in(request: Request) -> Response:
        if not is_from_console(request):
            return pages.refuse_foreign(request)
        following = PATH
        try:
            fields = await form(request, SMALL_FORM_BYTES)
            following, key = restrict_to_console(fields.get("next", "")), fields.get("key", "").strip()
            await pages.api.get(Session((("authorization", f"Bearer {key}"),)), "/v1/me")
        except ApiError as error:
            return pages.show(request, "sign_in.html", error.status, next=following, fault=error.message)
        reply = RedirectResponse(following, 303, HEADERS)
        pages.sessions.begin(request, reply, key)
        return reply

    async def sign_out(request: Request, _session: Session) -> Response:
        reply = redirect_to("/sign-in?signed-out")
        pages.sessions.end(request, reply)
        return reply

    async def choose_theme(request: Request) -> Response:
        if not is_from_console(request):
            return pages.refuse_foreign(request)
        try:
            fields = await form(request, SMALL_FORM_BYTES)
        except ApiError as error:
            return pages.error_page(request, error.status, error.message)
        reply = RedirectResponse(restrict_to_console(fields.get("next", "")), 303, HEADERS)
        if fields.get("theme") in THEMES:
            secure = is_https(request)
            reply.set_cookie(
                THEME_COOKIE, fields["theme"], THEME_SECONDS, path=PATH, secure=secure, httponly=True, samesite="lax"
            )
        return reply

    return [
        Route(f"{PATH}/sign-in", ask),
        Route(f"{PATH}/sign-in", sign_in, methods=["POST"]),
        pages.route("/sign-out", sign_out, "POST"),
        Route(f"{PATH}/theme", choose_theme, methods=["POST"]),
    ]
