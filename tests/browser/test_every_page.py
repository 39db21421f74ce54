"""Every page keeps WCAG A and AA, fits a phone's width, and can be used by keyboard alone."""

from typing import TYPE_CHECKING, Any

import pytest

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
    "/console/runs?limit=10",
    "/console/runs/{run}",
    "/console/runs/{run}?step=2&by=money",
    "/console/runs/{run}?t=0.01",
    "/console/runs/{run}/explain",
    "/console/compare?a={run}&b={run}",
    "/console/disclosures",
    "/console/approvals",
    "/console/none",
    *[f"{{admin}}/console/admin{section}" for section in ("", "/keys", "/keys/new", "/tenants", "/budgets/set")],
    *[f"{{admin}}/console/admin/{section}" for section in ("policy", "workers", "conductors", "holds", "changes")],
]
"""Addresses of pages; `{run}` stands for a run with three steps, `{admin}` for the admin listener."""
WATCH = """() => {
  window.reached = new Set();
  window.unseen = [];
  document.addEventListener('focusin', ({target}) => {
    window.reached.add(target);
    const shape = target instanceof SVGElement ? target.querySelector('rect') : null;
    const isMarked = shape ? getComputedStyle(shape).strokeWidth === '5px'
      : getComputedStyle(target).outlineStyle !== 'none';
    if (!isMarked) window.unseen.push(target.outerHTML.slice(0, 120));
  });
}"""
"""Notes what gets the focus, and what of it cannot be seen to have it."""
CONTROLS = """() => {
  const all = 'a[href], button, input:not([type="hidden"]), select, textarea, summary, [tabindex="0"]';
  const isOne = (one) => one.checkVisibility() && !one.matches(':disabled, [type="radio"]');
  window.controls = [...document.querySelectorAll(all)].filter(isOne);
  return window.controls.length;
}"""
LEFT_OUT = "() => window.controls.filter(one => !window.reached.has(one)).map(one => one.outerHTML.slice(0, 120))"


@pytest.fixture(scope="module")
def addresses(service: Service) -> list[str]:
    service.stub.always("planner", TREE)
    run = service.caller.ask_whole("baton-ultra", "Who are you?")[1]["baton"]["run"]
    return [address.format(run=run, admin=service.admin) for address in PAGES]


def violations(page: "Page", axe: str) -> list[str]:
    """Return what axe finds on a page, each with the element and the reason."""
    page.evaluate(axe)
    result: dict[str, Any] = page.evaluate("levels => axe.run(document, {runOnly: levels})", LEVELS)
    return [
        f"{violation['id']}: {node['html'][:200]}: {node['failureSummary']}"
        for violation in result["violations"]
        for node in violation["nodes"]
    ]


def too_wide(page: "Page") -> float:
    """Return by how many pixels a page can be scrolled sideways."""
    return float(page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


@pytest.mark.parametrize(("theme", "size"), [("light", DESKTOP), ("dark", PHONE)], ids=["desktop", "phone"])
def test_no_page_keeps_anybody_out(
    page: "Page", axe: str, addresses: list[str], theme: str, size: dict[str, int]
) -> None:
    page.set_viewport_size(size)  # type: ignore[arg-type]
    page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
    wrong: dict[str, object] = {}
    for address in addresses:
        page.goto(address)
        page.wait_for_load_state()
        if violation := violations(page, axe):
            wrong[address] = violation
        elif (beyond := too_wide(page)) > 0:
            wrong[address] = f"{beyond} pixels too wide"
        elif page.locator("h1").count() != 1:
            wrong[address] = "not one heading of the first level"
    assert wrong == {}


def test_the_sign_in_page_keeps_nobody_out(opened: "BrowserContext", axe: str) -> None:
    page = opened.new_page()
    page.goto("/console/sign-in")
    assert violations(page, axe) == []


def test_every_page_is_used_by_keyboard_alone(page: "Page", addresses: list[str]) -> None:
    wrong: dict[str, object] = {}
    for address in addresses:
        page.goto(address)
        page.evaluate(WATCH)
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        controls = page.evaluate(CONTROLS)
        for _ in range(controls):
            page.keyboard.press("Tab")
        for _ in range(controls):  # a field for a date has several stops
            if not page.evaluate(LEFT_OUT):
                break
            page.keyboard.press("Tab")
        if problems := page.evaluate(LEFT_OUT) + page.evaluate("window.unseen"):
            wrong[address] = problems
        page.locator(".skip").focus()
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "main"
    assert wrong == {}
