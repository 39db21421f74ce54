"""A browser's view of the console without a browser: a client with cookies over a stand-in of the gateway."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from html import unescape
from html.parser import HTMLParser
from typing import Any

import httpx
from starlette.types import ASGIApp

from app.console.app import Console
from tests.harness.stand_ins import PEPPER, GatewayStandIn

ORIGIN = "http://baton"
SAME_ORIGIN = {"sec-fetch-site": "same-origin", "origin": ORIGIN}
"""What a browser says of a form that a page of the same origin has sent."""


@asynccontextmanager
async def console_client(
    app: ASGIApp, now: Any = lambda: 1_000_000_000.0, **more: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of a console in front of an API; it keeps cookies and follows no redirect. A bug is raised."""
    bugs: list[Exception] = []
    console = Console(app, lambda: (PEPPER,), now, lambda error, _path: bugs.append(error), **more)
    transport = httpx.ASGITransport(console)
    hooks = {"response": [check_tables]}
    async with httpx.AsyncClient(transport=transport, base_url=ORIGIN, event_hooks=hooks) as client:
        yield client
    for bug in bugs:
        raise bug


@asynccontextmanager
async def signed_in_client(
    stand_in: GatewayStandIn, key: str, app: ASGIApp | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client that has signed in by a key."""
    async with console_client(app or stand_in.app, lambda: stand_in.seconds) as client:
        await sign_in(client, key)
        yield client


class RowWidths(HTMLParser):
    """The columns that each row of each table of a page takes up."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tables: list[list[int]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """A table, a row or a cell begins."""
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append(0)
        elif tag in ("th", "td"):
            self.tables[-1][-1] += int(dict(attrs).get("colspan") or 1)


async def check_tables(reply: httpx.Response) -> None:
    """Check that all rows of a table are as wide as its head, also the one that says that there are no others."""
    if reply.headers.get("content-type", "").startswith("text/html"):
        await reply.aread()
        for widths in RowWidths(reply.text).tables:
            assert len(set(widths)) <= 1, (reply.url.path, widths)


async def sign_in(client: httpx.AsyncClient, key: str) -> None:
    """Sign in as a person does, by the form."""
    reply = await client.post("/console/sign-in", data={"key": key}, headers=SAME_ORIGIN)
    assert reply.status_code == 303, reply.text


def page_text(html: str) -> str:
    """Return the text of a page as a person reads it, on one line."""
    return " ".join(re.sub(r"<[^>]*>", " ", html).split())


def hidden_value(page: str, name: str) -> str:
    """Return the value of a hidden field."""
    found = re.search(rf'type="hidden" name="{name}" value="([^"]*)"', page)
    assert found is not None, name
    return unescape(found[1])
