"""A browser before a running distributed service, whose every page is watched for faults.

Without `BATON_TEST_BROWSER`, the path of Chromium's program, nothing here is collected: `make test-browser` sets it.
Service and browser serve all files: each test scripts the workers that it needs.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from tests.browser.distributed import Service, serving
from tests.harness.processes import KEY

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, StorageState

BROWSER: Final = os.environ.get("BATON_TEST_BROWSER")
collect_ignore_glob = [] if BROWSER else ["test_*.py"]
PLAIN_HOST: Final = "console.test"
"""Another name of this machine for the browser, which trusts only HTTPS and the machine's usual names."""
OPTIONS: Final = (
    *("--disable-gpu", "--disable-background-networking", "--disable-quic"),
    f"--host-resolver-rules=MAP {PLAIN_HOST} 127.0.0.1",
)
PATIENCE_MILLISECONDS: Final = 30_000
HARMLESS: Final = re.compile(r"Password forms should have|the server responded with a status of 4\d\d")
"""Messages of the browser's console that are no fault of a page."""


@pytest.fixture(scope="session")
def service(postgres_server_url: str, redis_server_url: str) -> Iterator[Service]:
    """A gateway with its admin listener and an engine over Postgres and Redis."""
    with serving(postgres_server_url, redis_server_url) as new_service:
        yield new_service


@contextmanager
def chromium(program: str | None) -> Iterator["Browser"]:
    """Run Chromium for the length of the block. Playwright has an event loop in this thread, in which nothing else may
    have one: the service, which needs one to start and stop, starts before the browser and stops after it."""
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=PATIENCE_MILLISECONDS)
    with sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=program, chromium_sandbox=os.getuid() != 0, args=OPTIONS)
        yield running
        running.close()


@pytest.fixture(scope="session")
def browser(service: Service) -> Iterator["Browser"]:
    """One Chromium for all tests."""
    assert service.gateway.alive
    with chromium(BROWSER) as running:
        yield running


@pytest.fixture(autouse=True)
def scripts(service: Service) -> None:
    """Every test begins with workers that answer at once, and with no record of what they were asked."""
    service.stub.clear()


@pytest.fixture(scope="session")
def cookies(browser: "Browser", service: Service) -> "StorageState":
    """The cookies of a person who has signed in by the first key."""
    context = browser.new_context(base_url=service.url)
    sign_in(context.new_page())
    state = context.storage_state()
    context.close()
    return state


@contextmanager
def watched(browser: "Browser", service: Service, cookies: "StorageState | None" = None) -> Iterator["BrowserContext"]:
    """A new browser profile; at the end no page of it has broken the policy or failed in a script."""
    faults: list[str] = []

    def note(message: "ConsoleMessage") -> None:
        if message.type in ("error", "warning") and not HARMLESS.search(message.text):
            faults.append(f"{message.location.get('url')}: {message.text}")

    context = browser.new_context(base_url=service.url, storage_state=cookies)
    context.set_default_timeout(PATIENCE_MILLISECONDS)
    context.on("console", note)
    context.on("weberror", lambda error: faults.append(f"{error.error}"))
    yield context
    context.close()
    assert faults == []


@pytest.fixture
def opened(browser: "Browser", service: Service) -> Iterator["BrowserContext"]:
    """A new browser profile of nobody yet."""
    with watched(browser, service) as context:
        yield context


@pytest.fixture
def page(browser: "Browser", service: Service, cookies: "StorageState") -> Iterator["Page"]:
    """A page whose person has signed in by the first key."""
    with watched(browser, service, cookies) as context:
        yield context.new_page()


@pytest.fixture
def another(browser: "Browser", service: Service) -> Iterator[Callable[..., "Page"]]:
    """Makes a page of another person, in a browser of their own, who has signed in by a new key with these scopes."""
    with ExitStack() as stack:

        def arrive(name: str, *scopes: str, address: str = "/console") -> "Page":
            new_page = stack.enter_context(watched(browser, service)).new_page()
            sign_in(new_page, address, service.new_key(name, *scopes))
            return new_page

        yield arrive


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
