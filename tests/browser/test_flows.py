"""Whole flows of a person in the console, from the first click to the last."""

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from msgspec.structs import replace
from playwright.sync_api import expect

from tests.browser.conftest import KEY, PLAIN_HOST, sign_in
from tests.browser.distributed import Service
from tests.harness.waiting import wait_until
from tests.integration.installation import TREE, WORKERS
from tests.stubs import Reply, Stall, ToolCall, plan_reply

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Locator, Page

WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
APPROVER = ("runs:read", "approvals:decide")


def ask(page: "Page", tier: str, question: str, button: str = "Ask") -> None:
    """Fill the form of the playground, and press one of its buttons."""
    page.get_by_label("Question").fill(question)
    page.get_by_label("Tier").select_option(tier)
    page.get_by_role("button", name=button, exact=True).click()


def open_options(page: "Page") -> None:
    """Open the fields of the playground that few requests need."""
    page.get_by_text("System prompt, budget, labels, tools, format").click()


def region(page: "Page", name: str) -> "Locator":
    """A region of a page that is named by its heading or its label."""
    return page.get_by_role("region", name=name)


def latest_request_to(service: Service, worker: str) -> str:
    """The latest request that a worker got, as text."""
    return json.dumps(service.stub.requests(worker)[-1])


def test_a_plan_grows_while_it_is_decoded_and_the_answer_streams(page: "Page", service: Service) -> None:
    plan = plan_reply((0, "Read it.", ["user"]), (1, "Sum it up.", ["user", 0]))
    behind_one_step = plan.text.index("}") // 16 + 2
    service.stub.always("planner", replace(plan, fault=Stall(after=behind_one_step)))
    page.goto("/console/playground")
    ask(page, "baton-ultra", "What is in it?")
    steps = region(page, "Plan and steps").get_by_role("listitem")
    expect(steps).to_have_count(1)
    expect(steps).to_contain_text("Read it.")
    expect(steps).to_contain_text("done")
    for worker in WORKERS:
        service.stub.always(worker, Reply(chunks=("first ", "last"), fault=Stall(after=1)))
    service.stub.release()
    expect(steps).to_have_count(2)
    answer = region(page, "Text of the answer")
    expect(answer).to_have_text("first ", use_inner_text=True)
    service.stub.release()
    expect(answer).to_have_text("first last")
    expect(region(page, "Outcome")).to_contain_text("succeeded")
    page.get_by_text("curl", exact=True).click()
    expect(page.get_by_label("Code: curl")).to_contain_text("What is in it?")
    page.get_by_label("Comment").fill("It is short.")
    page.get_by_role("button", name="Good").click()
    expect(page.get_by_role("status")).to_contain_text("is stored: good.")
    run = service.caller.read("/v1/runs", limit=1)["data"][0]["id"]
    assert service.caller.read(f"/v1/runs/{run}")["feedback"]["explicit"][0]["commented"]


def test_a_tool_is_called_and_answered_in_the_playground(page: "Page", service: Service) -> None:
    call = ToolCall("weather", json.dumps({"city": "Bonn"}))
    service.stub.script("alpha", Reply(chunks=(), tool_calls=(call,), finish="tool"), Reply(chunks=("Take a coat.",)))
    page.goto("/console/playground")
    open_options(page)
    page.get_by_label("Tools").fill(json.dumps([WEATHER]))
    ask(page, "baton-mini", "What shall I wear in Bonn?")
    expect(page.get_by_label("Arguments of call 1")).to_contain_text("Bonn")
    page.get_by_label("Result of weather").fill("It rains cats.")
    page.get_by_role("button", name="Send the results").click()
    expect(region(page, "Text of the answer")).to_have_text("Take a coat.")
    assert "It rains cats." in latest_request_to(service, "alpha")


def test_a_run_is_followed_from_its_graph_to_its_money_and_rated(page: "Page", service: Service) -> None:
    service.stub.always("planner", TREE)
    run = service.caller.ask_whole("baton-ultra", "Who are you?")[1]["baton"]["run"]
    page.goto(f"/console/runs/{run}")
    assert page.locator("path.edge.withheld title").first.text_content()
    page.locator("#run-graph a.node").last.click()
    page.locator("#run-pane").get_by_role("heading", name="What it saw", exact=True).wait_for()
    page.get_by_role("link", name="Show it by money").click()
    page.get_by_role("heading", name="Where its money went").wait_for()
    page.get_by_role("button", name="It is right").click()
    page.locator("#run-rate li").first.wait_for()


def test_the_slider_shows_any_instant_and_plays_it_back(page: "Page", service: Service) -> None:
    service.stub.always("planner", replace(TREE, gap=0.02))
    run = service.caller.ask_whole("baton-ultra", "Who are you?")[1]["baton"]["run"]
    page.goto(f"/console/runs/{run}")
    nodes, place = page.locator("#run-graph a.node"), page.locator("#run-cursor")
    expect(nodes).to_have_count(5)
    last = service.caller.read(f"/v1/runs/{run}/state")["last_seq"]
    instants = str(place.get_attribute("data-instants")).split(" ")
    for t in (instants[1], instants[len(instants) // 2], instants[-2]):
        then = service.caller.read(f"/v1/runs/{run}/state", t=t)
        page.get_by_label("The run at an instant").fill(t)
        expect(place).to_contain_text(f"event {then['seq']} of {last}")
        graph = service.caller.read(f"/v1/runs/{run}/graph", at=then["seq"])
        states = [node["state"].replace("_", " ") for node in graph["nodes"]]
        expect(nodes.locator(".word")).to_have_text(states)
        assert "t=" in page.url
    page.get_by_label("The run at an instant").press("Home")
    expect(nodes).to_have_count(1)
    page.get_by_role("button", name="Play in real time").click()
    expect(place).to_contain_text(f"event {last} of {last}")
    expect(nodes).to_have_count(5)


def test_a_session_that_ends_while_a_run_is_played_back_leads_to_the_run_again(page: "Page", service: Service) -> None:
    run = service.caller.ask_whole("baton-mini", "Who are you?")[1]["baton"]["run"]
    page.goto(f"/console/runs/{run}?step=0")
    page.context.clear_cookies()
    page.get_by_label("The run at an instant").press("Home")
    page.wait_for_url(re.compile("/console/sign-in"))
    page.get_by_label("A key of this service").fill(KEY)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url(re.compile(f"/console/runs/{run}\\?step=0"))
    page.get_by_role("button", name="Play in real time").wait_for()


def test_a_replay_is_compared_with_its_origin(page: "Page", service: Service) -> None:
    service.stub.always("planner", TREE)
    first = service.caller.ask_whole("baton-ultra", "Who are you?")[1]["baton"]["run"]
    for worker in WORKERS:
        service.stub.always(worker, Reply(chunks=("Somebody else.",)))
    page.goto(f"/console/runs/{first}")
    page.get_by_role("button", name="Replay it").click()
    expect(region(page, "Summary")).to_contain_text(f"replay of {first}")
    expect(region(page, "Summary")).to_contain_text("succeeded")
    page.get_by_role("link", name="Compare with another run").click()
    figures = region(page, "Figures of both runs")
    expect(figures.get_by_role("link", name=first)).to_be_visible()
    expect(figures).to_contain_text("they differ")
    expect(region(page, "Steps of both runs").get_by_role("row")).to_have_count(4)
    expect(region(page, "Steps of both runs")).to_contain_text("the same subtask")


def test_an_auditor_finds_who_saw_the_callers_words_on_a_day(another: Callable[..., "Page"], service: Service) -> None:
    run = service.caller.ask_whole("baton-mini", "My name is Ada.")[1]["baton"]["run"]
    auditor = another("auditor", "runs:read", "audit:read")
    today = datetime.now(UTC).date()
    auditor.get_by_role("link", name="Disclosures").click()
    auditor.get_by_label("Saw").select_option("the caller's words")
    for since, rows in ((today - timedelta(days=1), 1), (today + timedelta(days=2), 0)):
        auditor.get_by_label("From day").fill(str(since))
        auditor.get_by_role("button", name="Show").click()
        auditor.wait_for_url(re.compile(f"since={since}"))
        expect(auditor.get_by_role("row").filter(has_text=run)).to_have_count(rows)
    auditor.go_back()
    auditor.get_by_role("link", name=run).click()
    expect(auditor.locator("#run-pane").get_by_text("My name is Ada.")).to_be_visible()


def test_a_plan_is_previewed_edited_and_run(page: "Page", service: Service) -> None:
    service.stub.always("planner", TREE)
    page.goto("/console/playground")
    ask(page, "baton-ultra", "Who are you?", button="Preview the plan")
    expect(page.get_by_role("heading", name="Steps", exact=True)).to_be_visible()
    assert service.stub.requests("alpha") == []
    step = page.get_by_role("group", name="Step 2, which answers")
    step.get_by_label("Worker").select_option("beta")
    step.get_by_label("Instruction").fill("Answer as a pirate.")
    step.get_by_label("step 0").uncheck()
    page.get_by_role("button", name="Run revision 1").click()
    expect(page.get_by_role("deletion").first).to_be_visible()
    page.get_by_role("button", name="Run revision 2").click()
    expect(region(page, "Outcome")).to_contain_text("succeeded")
    assert "Answer as a pirate." in latest_request_to(service, "beta")


def test_a_plan_that_waits_is_approved_by_a_second_person(
    page: "Page", another: Callable[..., "Page"], service: Service
) -> None:
    service.stub.always("planner", TREE)
    approver = another("approver", *APPROVER, address=f"{service.admin}/console")
    with approver.expect_response(re.compile("[?&]live")):
        approver.get_by_role("link", name="Approvals", exact=True).click()
    page.goto("/console/playground")
    open_options(page)
    page.get_by_label("Wait for an approval of the plan").check()
    ask(page, "baton-ultra", "May I?")
    page.get_by_role("link", name="See what waits for whom.").wait_for()
    approver.get_by_role("rowheader").get_by_role("link").click()
    expect(approver.get_by_role("heading", name="Who would be shown what")).to_be_visible()
    approver.get_by_label("Reason").fill("It is harmless.")
    approver.get_by_label("Approve this plan").check()
    approver.get_by_role("button", name="Decide").click()
    expect(approver.get_by_role("heading", name="The decision")).to_be_visible()
    expect(region(page, "Outcome")).to_contain_text("succeeded")


def test_a_key_is_made_rotated_and_revoked(page: "Page", service: Service) -> None:
    page.goto(f"{service.admin}/console/admin")
    page.get_by_role("navigation", name="Sections").get_by_role("link", name="Keys").click()
    page.get_by_role("link", name="Make a key").click()
    page.get_by_label("Name (needed)").fill("a program")
    page.get_by_role("button", name="Make the key").click()
    first = page.get_by_label("Secret").input_value()
    assert is_taken(service, first)
    page.get_by_role("link", name="The key").click()
    page.get_by_role("link", name="Rotate").click()
    page.get_by_label("Days for which the old secret still works").fill("0")
    page.get_by_role("button", name="Make a new secret").click()
    second = page.get_by_label("Secret").input_value()
    assert is_taken(service, second)
    wait_until(lambda: not is_taken(service, first), what="the old secret is refused")
    page.get_by_role("link", name="The key").click()
    page.get_by_role("link", name="Revoke").click()
    page.get_by_role("button", name="Revoke it").click()
    wait_until(lambda: not is_taken(service, second), what="the revoked key is refused")


def is_taken(service: Service, key: str) -> bool:
    """True if the API takes a key."""
    reply = service.caller.http.get("/v1/me", headers={"authorization": f"Bearer {key}"})
    assert reply.status_code in (200, 401)
    return reply.status_code == 200


def test_a_run_that_begins_elsewhere_appears_in_the_list(page: "Page", service: Service) -> None:
    with page.expect_response(re.compile("[?&]live")):
        page.goto("/console/runs")
    run = service.caller.ask_whole("baton-mini", "Who are you?")[1]["baton"]["run"]
    page.locator(f"#row-{run}").wait_for()


def test_a_person_who_has_signed_out_must_sign_in_again(page: "Page") -> None:
    page.goto("/console")
    page.get_by_role("button", name="Sign out").click()
    page.wait_for_url(re.compile("sign-in"))
    page.goto("/console/runs")
    page.get_by_label("A key of this service").wait_for()


def test_signing_out_in_one_tab_ends_what_others_follow(page: "Page") -> None:
    page.goto("/console")
    follower = page.context.new_page()
    with follower.expect_response(re.compile("[?&]live")):
        follower.goto("/console/runs?status=failed")
    page.get_by_role("button", name="Sign out").click()
    follower.get_by_label("A key of this service").wait_for()
    assert follower.url.endswith("/console/sign-in?next=/console/runs%3Fstatus%3Dfailed")


def test_a_page_that_is_followed_says_when_its_reader_may_not_see_it_any_more(
    another: Callable[..., "Page"], service: Service
) -> None:
    new_page = another("guest", "runs:read", address="/console/runs")
    keys = service.api("GET", f"{service.admin}/admin/v1/keys").json()["data"]
    [key] = [key["id"] for key in keys if key["name"] == "guest"]
    service.api("POST", f"{service.admin}/admin/v1/keys/{key}/revoke")
    expect(new_page.get_by_role("alert")).to_contain_text("not updated any more")
    new_page.get_by_role("link", name="Load it anew").click()
    new_page.get_by_label("A key of this service").wait_for()


def test_forms_can_be_sent_without_https(browser: "Browser", service: Service) -> None:
    """There a browser says by `Origin` alone which page has sent a form."""
    context = browser.new_context(base_url=service.url.replace("127.0.0.1", PLAIN_HOST))
    new_page = context.new_page()
    sign_in(new_page)
    new_page.get_by_role("button", name="Sign out").click()
    new_page.get_by_label("A key of this service").wait_for()
    context.close()


def test_the_admin_listener_has_its_console(opened: "BrowserContext", service: Service) -> None:
    page = opened.new_page()
    sign_in(page, f"{service.admin}/")
    assert page.url.startswith(f"{service.admin}/console")
