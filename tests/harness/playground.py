"""A person at the console's playground: the form and its buttons, and the regions of the page that follows a run."""

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from msgspec.structs import replace
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.gateway.http.api_keys import mint
from app.process.wiring import Runtime
from tests.harness.console import SAME_ORIGIN, console_client, page_text, sign_in
from tests.harness.prepared_apps import app_over

SCOPES = ("runs:write", "runs:read")
HOSTILE = "<script>alert(1)</script>{{ 7 * 7 }}\u202e<svg onload=alert(1)>'\""


def recording_requests(app: ASGIApp, sent: list[tuple[str, Any]]) -> ASGIApp:
    """Return an application whose requests with a body are noted, each as its path and its JSON."""

    async def recording(scope: Scope, receive: Receive, send: Send) -> None:
        body = bytearray()

        async def noting() -> Message:
            message = await receive()
            body.extend(message.get("body", b""))
            if body and not message.get("more_body", False) and message["type"] == "http.request":
                sent.append((scope["path"], json.loads(body)))
            return message

        await app(scope, noting, send)

    return recording


@asynccontextmanager
async def visiting(
    runtime: Runtime, sent: list[tuple[str, Any]] | None = None, name: str = "person", **limits: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a browser that has signed in at the console of a service, by a key with these limits; `sent` notes what the
    console asks the API."""
    key, row = mint(runtime.gateway.pepper, tenant="acme", name=name, scopes=SCOPES, now=0.0)
    assert await runtime.gateway.store.add_key(replace(row, **limits))
    with app_over(runtime.gateway) as app:
        async with console_client(
            recording_requests(app, sent) if sent is not None else app, runtime.gateway.now
        ) as client:
            await sign_in(client, key)
            yield client


async def submit_form(client: httpx.AsyncClient, action: str = "ask", **fields: Any) -> httpx.Response:
    """Send the form by one of its buttons."""
    form = {"question": "What is 2 + 2?", "tier": "baton-mini", "action": action} | fields
    return await client.post("/console/playground", data=form, headers=SAME_ORIGIN)


def run_of_page(page: httpx.Response) -> str:
    """Return the run that a page is about."""
    found = re.search(r'name="run" value="(run_[^"]+)"', page.text)
    assert found is not None, page_text(page.text)
    return found[1]


def section(html: str, name: str) -> str:
    """Return one region of a page or of a patch, with its white space made uniform."""
    found = re.findall(rf'<section id="run-{name}".*?</section>', html, re.DOTALL)
    assert found, name
    return " ".join(str(found[-1]).split())


async def live_stream(client: httpx.AsyncClient, run: str) -> str:
    """Return the live stream of a run until it closes, as the text of its patches."""
    reply = await client.get(f"/console/playground/{run}?live")
    assert reply.headers["content-type"].startswith("text/event-stream")
    return "\n".join(line.removeprefix("data: ") for line in reply.text.splitlines())
