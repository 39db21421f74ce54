"""`/docs`: a page that works without a key and loads nothing from elsewhere."""

import hashlib
import re

import httpx
import pytest

from app.gateway.openapi.docs_page import ASSETS, FILES
from tests.harness.stand_ins import GatewayStandIn


async def get(stand_in: GatewayStandIn, path: str) -> httpx.Response:
    async with stand_in.client() as client:
        reply = await client.get(path)
    assert reply.status_code == 200
    return reply


async def test_the_page_needs_no_key_and_names_nothing_elsewhere(gateway: GatewayStandIn) -> None:
    page = await get(gateway, "/docs")
    assert page.headers["content-type"].startswith("text/html")
    loaded = re.findall(r'(?:src|href)="([^"]*)"', page.text)
    assert {f"docs/{name}" for name in ASSETS} <= set(loaded)
    start = await get(gateway, "/docs/start.js")
    for text in (page.text, start.text):
        assert "//" not in re.sub(r"^ *// .*$", "", text, flags=re.MULTILINE)
    assert "<script>" not in page.text


async def test_the_browser_is_told_to_load_nothing_from_elsewhere(gateway: GatewayStandIn) -> None:
    policy = (await get(gateway, "/docs")).headers["content-security-policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["connect-src"] == "'self'"
    assert rules["frame-ancestors"] == "'none'"
    allowed = {word for rule in rules.values() for word in rule.split()}
    assert allowed <= {"'none'", "'self'", "data:"}


async def test_what_the_page_loads_is_there(gateway: GatewayStandIn) -> None:
    for name, media_type in ASSETS.items():
        asset = await get(gateway, f"/docs/{name}")
        assert asset.headers["content-type"].startswith(media_type)
        assert asset.headers["x-content-type-options"] == "nosniff"
        assert asset.content == (FILES / name).read_bytes()


@pytest.mark.parametrize("path", ["/docs/none.js", "/docs/../app.py", "/docs/LICENSE.txt", "/redoc"])
async def test_no_other_file_is_served(gateway: GatewayStandIn, path: str) -> None:
    async with gateway.client() as client:
        assert (await client.get(path)).status_code == 404


async def test_a_preview_by_head_has_no_body(gateway: GatewayStandIn) -> None:
    async with gateway.serve() as url, httpx.AsyncClient(base_url=url) as client:
        head, page = await client.head("/docs"), await client.get("/docs")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(page.content))


def test_the_vendored_files_are_those_that_were_published() -> None:
    lines = (FILES / "ORIGIN.txt").read_text().splitlines()
    hashes = {line.split()[1]: line.split()[0] for line in lines if re.match(r"[0-9a-f]{64} ", line)}
    assert set(hashes) == set(ASSETS) - {"start.js"}
    for name, expected in hashes.items():
        assert hashlib.sha256((FILES / name).read_bytes()).hexdigest() == expected
