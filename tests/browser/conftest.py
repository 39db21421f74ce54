"""A browser before a running distributed service, whose every page is watched for faults.

Without `BATON_TEST_BROWSER`, the path of Chromium's program, nothing here is collected: `make test-browser` sets it.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from tests.browser.distributed import Service, serving
from tests.harness.processes import KEY
from tests.integration.conftest import database, stub
from tests.stubs.control import StubControl

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page

BROWSER: Final = os.environ.get("BATON_TEST_BROWSER")
__all__ = ["database", "stub"]
collect_ignore_glob = [] if BROWSER else ["test_*.py"]
OPTIONS: Final = ("--disable-gpu", "--disable-background-networking", "--disable-quic")
PATIENCE_MILLISECONDS: Final = 20_000
HARMLESS: Final = re.compile(r"Password forms should have|the server responded with a status of 4\d\d")
"""Messages of the browser's console that are no fault of a page."""


@pytest.fixture(scope="module")
def service(
    tmp_path_factory: pytest.TempPathFactory, stub: StubControl, database: str, redis_server_url: str
) -> Iterator[Service]:
    """A gateway with its admin listener and an engine over Postgres and Redis."""
    with serving(tmp_path_factory.mktemp("service"), stub, database, redis_server_url) as made:
        yield made


@pytest.fixture(scope="module")
def browser(service: Service) -> Iterator["Browser"]:
    """One Chromium for all tests of a file. Playwright has an event loop in this thread, in which nothing else may
    have one: the service, which needs one to start and stop, starts before it and stops after it."""
    assert service.gateway.alive
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=BROWSER, chromium_sandbox=os.getuid() != 0, args=OPTIONS)
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser: "Browser", service: Service) -> Iterator["BrowserContext"]:
    """A new browser profile; at the end no page of it has broken the policy or failed in a script."""
    faults: list[str] = []

    def note(message: "ConsoleMessage") -> None:
        if message.type in ("error", "warning") and not HARMLESS.search(message.text):
            faults.append(f"{message.location.get('url')}: {message.text}")

    context = browser.new_context(base_url=service.url)
    context.set_default_timeout(PATIENCE_MILLISECONDS)
    context.on("console", note)
    context.on("weberror", lambda error: faults.append(f"{error.error}"))
    yield context
    context.close()
    assert faults == []


@pytest.fixture
def page(opened: "BrowserContext") -> "Page":
    """A page whose person has signed in by the first key."""
    made = opened.new_page()
    sign_in(made)
    return made


def sign_in(page: "Page", address: str = "/console", key: str = KEY) -> None:
    """Sign in by the form that every address leads to."""
    page.goto(address)
    page.get_by_label("A key of this service").fill(key)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url(re.compile(r"/console(?!/sign-in)"))


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core."""
    import axe_playwright_python

    return (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text()
