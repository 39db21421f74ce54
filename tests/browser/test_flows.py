"""Whole flows of a person in the console, from the first click to the last."""

import re
from typing import TYPE_CHECKING

from tests.browser.distributed import Service
from tests.integration.installation import TREE
from tests.stubs import Reply

if TYPE_CHECKING:
    from playwright.sync_api import Page


def test_a_run_is_followed_from_its_graph_to_its_money_and_rated(page: "Page", service: Service) -> None:
    service.stub.always("planner", TREE)
    run = service.caller.whole("baton-ultra", "Who are you?")[1]["baton"]["run"]
    page.goto(f"/console/runs/{run}")
    assert page.locator("path.edge.withheld title").first.text_content()
    page.locator("#run-graph a.node").last.click()
    page.locator("#run-pane").get_by_role("heading", name="What it saw", exact=True).wait_for()
    page.get_by_role("link", name="Show it by money").click()
    page.get_by_role("heading", name="Where its money went").wait_for()
    page.get_by_role("button", name="It is right").click()
    page.locator("#run-rate li").first.wait_for()


def test_a_run_that_begins_elsewhere_appears_in_the_list(page: "Page", service: Service) -> None:
    service.stub.always("alpha", Reply())
    with page.expect_response(re.compile("[?&]live")):
        page.goto("/console/runs")
    run = service.caller.whole("baton-mini", "Who are you?")[1]["baton"]["run"]
    page.locator(f"#row-{run}").wait_for()


def test_a_person_who_has_signed_out_must_sign_in_again(page: "Page") -> None:
    page.get_by_role("button", name="Sign out").click()
    page.wait_for_url(re.compile("sign-in"))
    page.goto("/console/runs")
    page.get_by_label("A key of this service").wait_for()


def test_an_answer_streams_into_the_playground(page: "Page", service: Service) -> None:
    for worker in ("alpha", "beta", "gamma"):
        service.stub.always(worker, Reply(chunks=("first ", "second ", "last"), gap=2.0))
    page.goto("/console/playground")
    page.locator("textarea").first.fill("Count.")
    page.locator("main button.main").first.click()
    page.locator("#run-answer", has_text=re.compile(r"first(?!.*last)", re.DOTALL)).wait_for()
    page.locator("#run-answer", has_text="last").wait_for()
