"""Forms: fields with their faults beside them, a confirmation for what cannot be undone, and one effect per form.

Each form carries an `Idempotency-Key` that was made with it, so that a form which is sent twice is carried out once.
"""

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.console.api import ApiError, Session
from app.console.pages import Pages, form_lists, redirect_to
from app.core.console_path import PATH

Kind = Literal["text", "number", "days", "list", "lines", "select", "checks", "check", "hidden"]
"""How a field is asked for and read: `days` are sent as seconds, `list` are words between commas, `lines` a long text,
`checks` any number of choices, `check` true or left out."""
DAY_SECONDS: Final = 86_400
TOKEN_BYTES: Final = 16
NUMBER_CHARS: Final = 40
MAX_NUMBER: Final = 2**53
"""The largest number of a field: every whole one up to it is the same in JSON."""


def new_token() -> str:
    """Return a fresh token for a form: what is sent twice with one token is carried out once."""
    return secrets.token_urlsafe(TOKEN_BYTES)


class Field(Struct, frozen=True):
    """One field of a form; `name` is the API's name of the field, which a refusal names too."""

    name: str
    label: str
    kind: Kind = "text"
    hint: str = ""
    choices: Sequence[tuple[str, str]] = ()
    """Each choice with its words."""
    required: bool = False
    value: str = ""
    """The value that a new form has."""


class Form(Struct, frozen=True):
    """A form as a page shows it. Without fields it is a confirmation."""

    title: str
    button: str
    fields: Sequence[Field] = ()
    back: str = ""
    """The page that is behind the form, and the one to which it leads unless it says otherwise."""
    says: Sequence[str] = ()
    """Sentences above the fields: what will happen, and whether it can be undone."""
    is_final: bool = False
    """True for what cannot be undone."""
    entries: Mapping[str, Sequence[str]] = {}
    faults: Mapping[str, str] = {}
    """The fault of each field by its name; under the empty name that of the whole."""
    once: str = msgspec.field(default_factory=new_token)
    """The `Idempotency-Key`."""

    def values(self, field: Field) -> list[str]:
        """Return the values of a field: what a person has entered, or the value that a new form has."""
        if self.entries:
            return list(self.entries.get(field.name, ()))
        if field.value:
            return [field.value]
        return []


class Submission(Struct, frozen=True):
    """A form that was sent: the fields as the API takes them, without those that were left empty."""

    body: Mapping[str, Any]
    headers: Mapping[str, str]


Ask = Callable[[Request, Session], Awaitable[Form]]
Act = Callable[[Request, Session, Submission], Awaitable[Response | None]]
"""Carries a form out. None: the browser is led to `Form.back`."""
Show = Callable[..., Awaitable[Response]]


def routes(pages: Pages, path: str, ask: Ask, act: Act, show: Show) -> list[Route]:
    """Return a page with a form. `show(request, session, template, status, **values)` renders a page of the section."""

    async def show_form(request: Request, session: Session) -> Response:
        return await show(request, session, "form.html", 200, form=await ask(request, session))

    async def take_form(request: Request, session: Session) -> Response:
        form = await ask(request, session)
        lists = await form_lists(request)
        form = replace(form, entries=lists, once=lists.get("once", [form.once])[-1])
        body, faults = read_fields(form.fields, lists)
        # What is corrected is another request, which needs a key of its own.
        status, once = 400, new_token()
        if not faults:
            try:
                reply = await act(request, session, Submission(body, {"idempotency_key": form.once}))
                return reply or redirect_to(form.back.removeprefix(PATH))
            except ApiError as error:
                if error.status == 401:
                    raise
                status, faults = error.status, faults_of(error, form.fields)
                if error.is_undecided:
                    once = form.once
        form = replace(form, faults=faults, once=once)
        return await show(request, session, "form.html", status, form=form)

    return [pages.route(path, show_form), pages.route(path, take_form, "POST")]


def faults_of(error: ApiError, fields: Sequence[Field]) -> dict[str, str]:
    """Return the refusal of the API beside the field that it names, or above the form."""
    name = error.param.partition("[")[0]
    if name not in [field.name for field in fields]:
        name = ""
    return {name: error.message}


def read_fields(fields: Sequence[Field], lists: Mapping[str, Sequence[str]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the body for the API, and the faults of fields that cannot be read."""
    body: dict[str, Any] = {}
    faults: dict[str, str] = {}
    for field in fields:
        texts = [text for text in lists.get(field.name, ()) if text.strip()]
        if not texts:
            if field.required:
                faults[field.name] = "This field must be filled in."
            continue
        try:
            body[field.name] = _value(field, texts)
        except ValueError:
            faults[field.name] = "This must be a number."
    return body, faults


def _value(field: Field, texts: Sequence[str]) -> Any:
    text = texts[-1]
    if field.kind == "checks":
        return list(texts)
    if field.kind == "check":
        return True
    if field.kind == "list":
        return [word.strip() for word in text.split(",") if word.strip()]
    if field.kind == "number":
        return parse_number(text)
    if field.kind == "days":
        return _seconds(parse_number(text))
    if field.kind == "lines":
        return text
    return text.strip()


def parse_number(text: str) -> int | float:
    """Return the number that a text says, a whole one where it is digits alone, because the API takes no other for
    counts.

    Raises `ValueError` for what is no number, is not finite, or is too large for every field of the API."""
    if len(text) > NUMBER_CHARS:
        raise ValueError
    value: int | float
    if text.strip().removeprefix("-").isdecimal():
        value = int(text)
    else:
        value = float(text)
    if not abs(value) <= MAX_NUMBER:
        raise ValueError
    return value


def _seconds(days: float) -> int:
    """Return days as seconds. Raises `ValueError` as `parse_number` does."""
    seconds = round(days * DAY_SECONDS)
    if abs(seconds) > MAX_NUMBER:
        raise ValueError
    return seconds
