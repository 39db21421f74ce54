"""What holds for every page: no violation of WCAG A or AA, nothing wider than a phone, usable by keyboard alone."""

from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.conftest import sign_in
from tests.browser.distributed import Service
from tests.integration.installation import TREE

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page

LEVELS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
PHONE = {"width": 360, "height": 740}
DESKTOP = {"width": 1280, "height": 800}
PAGES = [
    "/console?period=hour",
    "/console/playground",
    "/console/plans",
    "/console/runs?limit=50",
    "/console/runs/{run}",
    "/console/runs/{run}?step=2&by=money",
    "/console/runs/{run}?t=0.01",
    "/console/runs/{run}/explain",
    "/console/compare?a={run}&b={run}",
    "/console/approvals",
    "/console/none",
]
"""Addresses of pages; `{run}` stands for a run with three steps."""


@pytest.fixture(scope="module")
def run(service: Service) -> str:
    service.stub.always("planner", TREE)
    return str(service.caller.whole("baton-ultra", "Who are you?")[1]["baton"]["run"])


def violations(page: "Page", axe: str) -> list[str]:
    """Return what axe finds on a page, each with the element and the reason."""
    page.evaluate(axe)
    found: dict[str, Any] = page.evaluate("levels => axe.run(document, {runOnly: levels})", LEVELS)
    return [
        f"{one['id']}: {node['html'][:200]}: {node['failureSummary']}"
        for one in found["violations"]
        for node in one["nodes"]
    ]


def too_wide(page: "Page") -> float:
    """Return by how many pixels a page can be scrolled sideways."""
    return float(page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_page_keeps_anybody_out(page: "Page", axe: str, run: str, theme: str, size: dict[str, int]) -> None:
    page.set_viewport_size(size)  # type: ignore[arg-type]
    page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
    wrong: dict[str, object] = {}
    for address in PAGES:
        page.goto(address.format(run=run))
        page.wait_for_load_state()
        if found := violations(page, axe):
            wrong[address] = found
        elif (beyond := too_wide(page)) > 0:
            wrong[address] = f"{beyond} pixels too wide"
        elif page.locator("h1").count() != 1:
            wrong[address] = "not one heading of the first level"
    assert wrong == {}


def test_the_sign_in_page_keeps_nobody_out(opened: "BrowserContext", axe: str) -> None:
    page = opened.new_page()
    page.goto("/console/sign-in")
    assert violations(page, axe) == []


def test_the_admin_listener_has_its_console(opened: "BrowserContext", service: Service) -> None:
    page = opened.new_page()
    sign_in(page, f"{service.admin}/")
    assert page.url.startswith(f"{service.admin}/console")


def test_every_page_can_be_reached_and_left_by_keyboard(page: "Page", run: str) -> None:
    for address in PAGES:
        page.goto(address.format(run=run))
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "main"
        reachable = page.evaluate(
            """[...document.querySelectorAll('a[href], button, input, select, textarea, summary')]
            .filter(one => one.checkVisibility() && one.tabIndex < 0).map(one => one.outerHTML)"""
        )
        assert reachable == []
