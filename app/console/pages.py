"""The frame around every page: who is signed in, security headers, and errors as pages.

A page is a function of a request and a session. `Pages.route` turns it into a route: who is not signed in is led to the
sign-in page, a request that changes something must come from the console itself, and a refusal of the API becomes a
page with the API's own words.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import parse_qsl, quote

import jinja2
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from app.console import templating
from app.console.api import Api, ApiError, Session
from app.console.live import REFUSED, Live
from app.console.session import Sessions, is_from_console
from app.core.console_path import PATH

NONCE_BYTES: Final = 16
POLICY: Final = (
    "default-src 'none'; script-src 'self' 'nonce-{nonce}'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types htmx"
)
"""Pages run the console's own files and nothing else; a text that slips through the escaping cannot run either."""
HEADERS: Final = {
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",  # with `no-referrer` a browser would hide the origin that `is_from_console` needs
    "cross-origin-opener-policy": "same-origin",
}
THEME_COOKIE: Final = "baton_theme"
THEMES: Final = ("auto", "light", "dark")
FORM_BYTES: Final = 2 << 20
"""The largest form that is read."""
FORM_FIELDS: Final = 2_000
"""The most fields of a form: to read hundreds of thousands takes a second of the whole process."""
FORM_SECONDS: Final = 30.0
"""The longest time until a form has come."""
SMALL_FORM_BYTES: Final = 16 << 10
"""The largest form of somebody who is not signed in."""

Page = Callable[[Request, Session], Awaitable[Any]]


class Place(Struct, frozen=True):
    """An entry of the navigation."""

    name: str
    path: str


class Pages:
    """The parts that every page is made with: the API, the clock, the sessions, the navigation and the templates."""

    def __init__(self, api: Api, sessions: Sessions, places: Sequence[Place], now: Callable[[], float]) -> None:
        """`now` gives seconds since 1970."""
        self.api = api
        self.now = now
        self.sessions = sessions
        self._places = tuple(places)
        self._templates: jinja2.Environment = templating.environment()

    def has_page(self, path: str) -> bool:
        """Return True if the navigation of this listener has this page."""
        return any(place.path == path for place in self._places)

    def route(self, path: str, page: Page, method: str = "GET", *, is_part: bool = False) -> Route:
        """Return the route of a page for people who are signed in. `is_part` says that a script puts the reply into a
        page: where there is none, the browser loads that page anew, which says why or leads to the sign-in page."""

        async def serve(request: Request) -> Any:
            session = self.sessions.session_of(request)
            if session is None and is_part:
                return _reload()
            if session is None:
                return self.redirect_to_sign_in(request)
            if method != "GET" and not is_from_console(request):
                return self.refuse_foreign(request)
            try:
                reply = await page(request, session)
                if isinstance(reply, Live):
                    reply.seconds = session.seconds
                    if request.method == "HEAD":  # which would wait for a stream's end, and for no body
                        return _event_stream("")
                return reply
            except ApiError as error:
                if is_part:
                    return _reload()
                if error.status == 401:  # the session is over: it must not stand in the way of the next one
                    leading = self.redirect_to_sign_in(request)
                    self.sessions.end(request, leading)
                    return leading
                return self.error_page(request, error.status, error.message)

        return Route(PATH + path, serve, methods=[method])

    def show(self, request: Request, template: str, status: int = 200, /, **values: Any) -> HTMLResponse:
        """Return a whole page."""
        nonce = secrets.token_urlsafe(NONCE_BYTES)
        theme = request.cookies.get(THEME_COOKIE, "auto")
        if theme not in THEMES:
            theme = "auto"
        frame = {
            "nonce": nonce,
            "places": self._places,
            "here": request.url.path,
            "address": address_of(request),
            "theme": theme,
            "has_people": self.sessions.has_people,
            "is_signed_in": self.sessions.session_of(request) is not None,
        }
        html = templating.render(self._templates, template, {**frame, **values})
        return HTMLResponse(html, status, {**HEADERS, "content-security-policy": POLICY.format(nonce=nonce)})

    def region(self, template: str, /, **values: Any) -> str:
        """Return a part of a page, of which the whole page and its patches are made. It has no attributes of htmx."""
        return templating.render(self._templates, template, values)

    def error_page(self, request: Request, status: int, message: str, next_step: str = "") -> HTMLResponse:
        """Return an error as a page, with what to do next: `next_step`, or what the status says."""
        return self.show(request, "failure.html", status, status=status, message=message, next_step=next_step)

    def refuse_foreign(self, request: Request) -> HTMLResponse:
        """Return the refusal of a request that would change something and that no page of the console has made."""
        next_step = "Open the page anew, and press its button there."
        return self.error_page(request, 403, "The request did not come from a page of this console.", next_step)

    def redirect_to_sign_in(self, request: Request) -> Response:
        """Lead to the sign-in page, which leads back; end the stream of a page that is open."""
        if "live" in request.query_params or request.url.path.endswith("/live"):
            return _event_stream(REFUSED)
        return RedirectResponse(f"{PATH}/sign-in?next={quote(address_of(request))}", 303, HEADERS)


def address_of(request: Request) -> str:
    """Return the address of a request, without the host."""
    if request.url.query:
        return f"{request.url.path}?{request.url.query}"
    return request.url.path


def address_fields(request: Request, names: Iterable[str]) -> dict[str, str]:
    """Return the parameters of these names that the address has, without those that are blank."""
    fields: dict[str, str] = {}
    for name in names:
        value = request.query_params.get(name, "").strip()
        if value:
            fields[name] = value
    return fields


def _reload() -> Response:
    """Return a reply with nothing to show, at which htmx loads the page anew."""
    return Response(status_code=204, headers={**HEADERS, "hx-refresh": "true"})


def _event_stream(text: str) -> Response:
    return Response(text, headers=HEADERS, media_type="text/event-stream")


async def form(request: Request, most: int = FORM_BYTES) -> dict[str, str]:
    """Return the fields of a form of at most so many bytes, each with its last value. Raises `ApiError` as
    `form_lists`."""
    return {name: values[-1] for name, values in (await form_lists(request, most)).items()}


async def form_lists(request: Request, most: int = FORM_BYTES) -> dict[str, list[str]]:
    """Return the fields of a form, each with all of its values. Raises `ApiError` if it is too large or too slow."""
    try:
        async with asyncio.timeout(FORM_SECONDS):
            body = await _form_body(request, most)
    except TimeoutError:
        message = f"The form did not arrive within {FORM_SECONDS:.0f} seconds."
        raise ApiError(408, {"error": {"code": "timeout", "message": message}}) from None
    try:
        pairs = parse_qsl(body, keep_blank_values=True, max_num_fields=FORM_FIELDS)
    except ValueError:
        raise _too_large(f"The form has more than {FORM_FIELDS:,} fields.") from None
    lists: dict[str, list[str]] = {}
    for name, value in pairs:
        lists.setdefault(name, []).append(value.replace("\r\n", "\n"))
    return lists


def last_value(fields: Mapping[str, Sequence[str]], name: str) -> str:
    """Return the last value of a field of a form; empty if the form does not have it."""
    values = fields.get(name, ())
    if not values:
        return ""
    return values[-1]


async def _form_body(request: Request, most: int) -> str:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise _too_large(f"The form is larger than {most:,} bytes.")
    return body.decode(errors="replace")


def _too_large(message: str) -> ApiError:
    return ApiError(413, {"error": {"code": "request_too_large", "message": message}})


def redirect_to(path: str) -> RedirectResponse:
    """Lead to a page of the console after something was changed."""
    return RedirectResponse(PATH + path, 303, HEADERS)
